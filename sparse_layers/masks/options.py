"""Options that people write by hand, in code, on a command line or in JSON: their types and ranges, and near names."""

import difflib
import operator
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import numpy as np

Positive = Annotated[int, 1]  # the smallest value allowed
Natural = Annotated[int, 0]
Length = Annotated[int, 1, 2**31 - 2]  # of a sequence: kernels count in int32, and one number stays free for 'no limit'


def near(name: str, known: Iterable[str]) -> str:
    """An unknown name, the known ones close to it, and all known ones: the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known)
    hint = f", did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{name!r}{hint} Known: {', '.join(known) or 'none'}"


def checked(what: str, value: Any, hint: Any) -> Any:
    """The value, if it has the type and range of an annotation: bool, int, Positive, Natural or Length."""
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{what} must be true or false, got {value!r}")
        return value
    least, most = (*get_args(hint)[1:], None, None)[:2]
    rule = "an integer" if least is None else f"an integer >= {least}"
    integer = hasattr(value, "__index__") and not isinstance(value, bool | np.bool_)
    if not integer or (least is not None and value < least):
        raise ValueError(f"{what} must be {rule}, got {value!r}")
    if most is not None and value > most:
        raise ValueError(f"{what} must be at most {most}, got {value!r}")
    return operator.index(value)
