"""Source lines of a traced model: which line of a user's code an equation comes from, through which libraries."""

import functools
import os
import sys
import sysconfig
from typing import Any, NamedTuple

_PACKAGE = __name__.partition(".")[0]
# Libraries between a user's line and an equation, by their names in `sys.modules`. None of them is imported for this.
_LIBRARIES = "jax", "jaxlib", "flax", "haiku", "equinox", _PACKAGE
_STANDARD = sysconfig.get_path("stdlib") + os.sep
# The file that calls the model: frames beyond it belong to its caller.
_DOOR = os.path.join(os.path.dirname(__file__), "traced_inputs.py")


class Source(NamedTuple):
    """The origin of an equation."""

    line: str  # "model.py:42 in Block.__call__"; "" if the model has no line of a user's
    # (library, qualified name of the function) of the libraries' frames up to that line, the innermost one first.
    callers: tuple[tuple[str, str], ...]

    @property
    def is_ours(self) -> bool:
        """True if code of this package makes the equation."""
        return next((name for name, _ in self.callers if name not in ("jax", "jaxlib")), "") == _PACKAGE

    def calls(self, library: str, name: str) -> bool:
        """True if a library's function or class of this name makes the equation, or calls what makes it."""
        return any(caller == library and function.split(".")[0] == name for caller, function in self.callers)


def source_of(equation: Any) -> Source:
    """Returns the origin of an equation of a jaxpr."""
    callers, traceback = [], equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        file, function = frame.file_name, frame.function_name
        if file == _DOOR:
            break
        if library := _library(file):
            callers.append((library, function))
        elif not file.startswith(_STANDARD) or "site-packages" in file:
            path = os.path.relpath(file)
            line = f"{file if path.startswith('..') else path}:{frame.line_num} in {function}"
            return Source(line, tuple(callers))
    return Source("", tuple(callers))


@functools.cache
def _library(file: str) -> str | None:
    """Returns the library that a file belongs to, None for a user's file and those of other libraries."""
    roots = {name: sys.modules[name].__file__ for name in _LIBRARIES if name in sys.modules}
    return next(
        (name for name, root in roots.items() if root and file.startswith(root.removesuffix("__init__.py"))), None
    )
