"""Source lines of a traced model: which line of a user's code an equation comes from, through which libraries."""

import os
import sys
import sysconfig
from typing import Any, NamedTuple

# Libraries between a user's line and an equation, by their names in `sys.modules`. None of them is imported for this.
_LIBRARIES = "jax", "jaxlib", "flax", "haiku", "equinox"
_PACKAGE = __name__.partition(".")[0]
_STANDARD = sysconfig.get_path("stdlib") + os.sep
# The file that calls the model: frames beyond it belong to its caller.
_DOOR = os.path.join(os.path.dirname(__file__), "diagnose.py")


class Source(NamedTuple):
    """The origin of an equation."""

    line: str  # "model.py:42 in Block.__call__"; "" if the model has no line of a user's
    # (file below its library's folder, function) of the libraries' frames up to that line, the innermost one first.
    callers: tuple[tuple[str, str], ...]

    @property
    def is_ours(self) -> bool:
        """True if code of this package makes the equation."""
        outside_jax = (file for file, _ in self.callers if not file.startswith(("jax/", "jaxlib/")))
        return next(outside_jax, "").startswith(f"{_PACKAGE}/")

    def calls(self, file: str, function: str) -> bool:
        """True if a library's function makes the equation, or calls what makes it."""
        return any(caller[0] == file and caller[1].startswith(function) for caller in self.callers)


def source_of(equation: Any) -> Source:
    """Returns the origin of an equation of a jaxpr."""
    roots = {name: os.path.dirname(sys.modules[name].__file__ or "") for name in _LIBRARIES if name in sys.modules}
    roots[_PACKAGE] = os.path.dirname(os.path.dirname(__file__))
    callers, traceback = [], equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        file = frame.file_name
        if file == _DOOR:
            break
        library = next((name for name, root in roots.items() if file.startswith(root + os.sep)), None)
        if library is not None:
            callers.append((f"{library}{file.removeprefix(roots[library])}", frame.function_name))
        elif not file.startswith(_STANDARD) or "site-packages" in file:
            path = os.path.relpath(file)
            return Source(
                f"{file if path.startswith('..') else path}:{frame.line_num} in {frame.function_name}", tuple(callers)
            )
    return Source("", tuple(callers))
