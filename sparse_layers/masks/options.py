"""Options that people write by hand, in code, on a command line or in JSON: their types and ranges, and near names."""

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

Positive = Annotated[int, 1]  # the smallest value allowed, and maybe the largest
Natural = Annotated[int, 0]
NaturalOrNone = Natural | None
LONGEST = 2**31 - 2  # tokens of a sequence: kernels count in int32, and one number stays free for 'no limit'
Length = Annotated[int, 1, LONGEST]
Shape = tuple[Length, ...]  # of a grid: the lengths of its axes
# Of a grid's axes: one for all, or one for each.
PositivePerAxis = Positive | tuple[Positive, ...]
NaturalPerAxis = Natural | tuple[Natural, ...]
BoolPerAxis = bool | tuple[bool, ...]
Axes = int | tuple[int, ...]  # one axis or several, by their numbers


_WORDS = {"true": True, "false": False, "none": None}  # in a name

F = TypeVar("F", bound=Callable[..., Any])


def near(name: Any, known: Iterable[str]) -> str:
    """What is no known name, the known ones close to it, and all known ones: the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name).lower(), known)
    hint = f", did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{name!r}{hint} Known: {', '.join(known) or 'none'}"


def refuse_unknown(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses keywords that a function, or the class whose ``__init__`` it is, does not have, by its name.

    It has its parameters and, of ``**options: Unpack[Options]``, the keys of that TypedDict; of other ``**options`` all
    that there are.

    Raises:
      TypeError: see above; says what to write for a word of another library, or names those that are spelled alike.
    """
    known = _keywords(function)
    if not kwargs.keys() <= known and "**" not in known:
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        what = foreign.advice(unknown, known) or near(next(iter(unknown)), known)
        raise TypeError(f"{_owner(function)}: unknown argument {what}")


def _owner(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


@functools.cache
def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    open_ended = (get_args(p.annotation)[0] for p in parameters if p.kind is p.VAR_KEYWORD)
    options = (getattr(kind, "__optional_keys__", {"**"}) for kind in open_ended)
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD).union(*options) - {"self", "cls"}


def own_keywords(owner: F) -> F:
    """Decorates a function, or a class that is complete, to refuse arguments that do not fit in words of its own.

    Unknown keywords are refused by `refuse_unknown`; too many arguments by position, or too few, by `foreign.misbound`,
    which is asked after Python has refused them. The signature stays that of the function.

    Example:
      >>> @own_keywords
      ... def crop(*, size=1, seed=0): ...
      >>> crop(sizes=3)
      Traceback (most recent call last):
      TypeError: crop: unknown argument 'sizes', did you mean 'size'? Known: seed, size
    """
    if isinstance(owner, type):
        owner.__init__ = own_keywords(owner.__init__)
        return owner  # pyright: ignore[reportReturnType] (the same)

    @functools.wraps(owner)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(owner, kwargs)
        try:
            return owner(*args, **kwargs)
        except TypeError:
            if (misfit := foreign.misbound(owner, args, kwargs)) is None:
                raise
        raise TypeError(f"{_owner(owner)}: {misfit}")

    return call  # pyright: ignore[reportReturnType] (of the same type)


def whole(value: Any) -> int | None:
    """An integer as Python's own, or None if it is none; bools are none."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """A finite number as Python's own float, or None if it is none; bools are none."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parsed_options(what: str, text: str) -> dict[str, Any]:
    """The options in a name, as a dict; values but integers, bools and none stay strings, which are refused later.

    Raises:
      ValueError: an option without a value, or twice; ``what`` says of what.

    Example:
      >>> parsed_options("preset 'p'", "a=1,b=true,c=2x3")
      {'a': 1, 'b': True, 'c': (2, 3)}
    """
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or option in options:
            raise ValueError(f"{what}: options must be option=value,..., each once, got {text!r}")
        words = value.lower().split("x")
        if not all(word in _WORDS or word.removeprefix("-").isdecimal() for word in words):
            options[option] = value
            continue
        values = [_WORDS[word] if word in _WORDS else int(word) for word in words]
        options[option] = tuple(values) if len(values) > 1 else values[0]
    return options


def checked_by_axis(what: str, value: Any, hint: Any) -> Any:
    """`checked`, for annotations of tuples and None, too: any sequence is a tuple, and a single value one by itself."""
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
    """The value, if it has the type and range of an annotation: bool, int or one of the above."""
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{what} must be true or false, got {one_line(value)}")
        return value
    least, most = (*get_args(hint)[1:], None, None)[:2]
    rule = "an integer" if least is None else f"an integer >= {least}"
    number = whole(value)
    if number is None or (least is not None and number < least):
        raise ValueError(f"{what} must be {rule}, got {one_line(value)}")
    if most is not None and number > most:
        raise ValueError(f"{what} must be at most {most}, got {number}")
    return number
