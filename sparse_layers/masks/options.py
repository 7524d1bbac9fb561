"""Options that people write by hand, in code, on a command line or in JSON: their types and ranges, and near names."""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import numpy as np

Positive = Annotated[int, 1]  # the smallest value allowed, and maybe the largest
Natural = Annotated[int, 0]
LONGEST = 2**31 - 2  # tokens of a sequence: kernels count in int32, and one number stays free for 'no limit'
Length = Annotated[int, 1, LONGEST]


def near(name: str, known: Iterable[str]) -> str:
    """An unknown name, the known ones close to it, and all known ones: the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known)
    hint = f", did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{name!r}{hint} Known: {', '.join(known) or 'none'}"


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


def checked(what: str, value: Any, hint: Any) -> int:
    """The value, if it has the type and range of an annotation: bool, int or one of the above."""
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{what} must be true or false, got {value!r}")
        return value
    least, most = (*get_args(hint)[1:], None, None)[:2]
    rule = "an integer" if least is None else f"an integer >= {least}"
    number = whole(value)
    if number is None or (least is not None and number < least):
        raise ValueError(f"{what} must be {rule}, got {value!r}")
    if most is not None and number > most:
        raise ValueError(f"{what} must be at most {most}, got {number}")
    return number
