"""Types and ranges of arguments and of presets' options, and errors that name the argument, its value and the rule."""

import difflib
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import numpy as np

from . import foreign
from .foreign import one_line

# Annotated[int, minimum] or Annotated[int, minimum, maximum].
Positive = Annotated[int, 1]
Natural = Annotated[int, 0]
NaturalOrNone = Natural | None
LONGEST = 2**31 - 2  # tokens of a sequence: kernels count in int32, and one number stays free for 'no limit'
Length = Annotated[int, 1, LONGEST]
Shape = tuple[Length, ...]  # lengths of a grid's axes
# One value for all axes of a grid, or one for each.
PositivePerAxis = Positive | tuple[Positive, ...]
NaturalPerAxis = Natural | tuple[Natural, ...]
BoolPerAxis = bool | tuple[bool, ...]
Axes = int | tuple[int, ...]  # numbers of one or several axes

_CONSTANTS = {"true": True, "false": False, "none": None}  # as written in "name:option=value"

F = TypeVar("F", bound=Callable[..., Any])


def suggest(name: Any, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the name, known names close to it, and all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name).lower(), known)
    hint = f", did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{name!r}{hint} Known: {', '.join(known) or 'none'}"


def refuse_unknown(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses keywords that a function, or a class by its ``__init__``, does not have.

    A function with ``**options: Unpack[Options]`` has the keys of that TypedDict. One with other ``**options`` has all.
    """
    known = keywords(function)
    if not kwargs.keys() <= known and "**" not in known:
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        hint = foreign.advice(unknown, known) or suggest(next(iter(unknown)), known)
        raise TypeError(f"{_owner(function)}: unknown argument {hint}")


def _owner(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


@functools.cache
def keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of a function's arguments, those of its ``**options`` too, or "**" if these may be any."""
    parameters = inspect.signature(function).parameters.values()
    open_ended = (next(iter(get_args(p.annotation)), Any) for p in parameters if p.kind is p.VAR_KEYWORD)
    options = (getattr(kind, "__optional_keys__", {"**"}) for kind in open_ended)
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD).union(*options) - {"self", "cls"}


def strict_kwargs(owner: F) -> F:
    """Decorates a function or a class so that its errors about wrong arguments say what to write.

    `refuse_unknown` refuses unknown keywords. `foreign.signature_error` words the errors about too many arguments by
    position and about missing ones, once Python has refused the call. The signature stays that of the function.

    Example:
      >>> @strict_kwargs
      ... def crop(*, size=1, seed=0): ...
      >>> crop(sizes=3)
      Traceback (most recent call last):
      TypeError: crop: unknown argument 'sizes', did you mean 'size'? Known: seed, size
    """
    if isinstance(owner, type):
        owner.__init__ = strict_kwargs(owner.__init__)
        return owner  # pyright: ignore[reportReturnType] (the class itself)

    @functools.wraps(owner)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(owner, kwargs)
        try:
            return owner(*args, **kwargs)
        except TypeError:
            if (reason := foreign.signature_error(owner, args, kwargs)) is None:
                raise
        raise TypeError(f"{_owner(owner)}: {reason}")

    return call  # pyright: ignore[reportReturnType] (it has the function's signature)


def as_int(value: Any) -> int | None:
    """Returns an integer, numpy's too, as a Python int; None for bools and anything else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """Returns a finite number, numpy's too, as a Python float; None for bools and anything else."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parsed_options(what: str, text: str) -> dict[str, Any]:
    """Parses ``"option=value,option=value"`` to a dict of integers, bools, None and tuples of these.

    Other values stay strings, which `checked` refuses later.

    Example:
      >>> parsed_options("preset 'p'", "a=1,b=true,c=2x3")
      {'a': 1, 'b': True, 'c': (2, 3)}
    """
    options: dict[str, Any] = {}
    for assignment in filter(None, text.split(",")):
        option, equals, value = (x.strip() for x in assignment.partition("="))
        if not equals or option in options:
            raise ValueError(f"{what}: options must be option=value,..., each once, got {text!r}")
        words = value.lower().split("x")
        if not all(word in _CONSTANTS or word.removeprefix("-").isdecimal() for word in words):
            options[option] = value
            continue
        values = [_CONSTANTS[word] if word in _CONSTANTS else int(word) for word in words]
        options[option] = tuple(values) if len(values) > 1 else values[0]
    return options


def checked_by_axis(what: str, value: Any, hint: Any) -> Any:
    """Returns `checked` values for an annotation with tuples or None: a tuple for a sequence, else a single value."""
    if hint == NaturalOrNone:
        return value if value is None else checked(what, value, Natural)
    several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[several]
    if get_origin(hint) is not tuple:
        return checked(what, value, hint)
    entries = {f"{what}[{i}]": entry for i, entry in enumerate(value)} if several else {what: value}
    return tuple(checked(name, entry, get_args(hint)[0]) for name, entry in entries.items())


def checked(what: str, value: Any, hint: Any) -> int:
    """Returns a value that has the type and range of an annotation: bool, int, `Positive`, `Natural`, `Length`."""
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{what} must be true or false, got {one_line(value)}")
        return value
    minimum, maximum = (*get_args(hint)[1:], None, None)[:2]
    rule = "an integer" if minimum is None else f"an integer >= {minimum}"
    number = as_int(value)
    if number is None or (minimum is not None and number < minimum):
        raise ValueError(f"{what} must be {rule}, got {one_line(value)}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{what} must be at most {maximum}, got {number}")
    return number
