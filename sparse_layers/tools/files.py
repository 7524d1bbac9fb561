"""Paths of the files that tools write, such as a picture of a mask, checked before any work."""

import os
import pathlib
from typing import Any


def checked_path(path: Any) -> pathlib.Path:
    """Returns the path, if it is one."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or PathLike, got {path!r}")
    return pathlib.Path(path)


def check_writable(file: pathlib.Path) -> None:
    """Checks that a file can be written, or written anew."""
    if not file.parent.is_dir():
        raise FileNotFoundError(f"path must lie in a folder that is there, got {str(file)!r}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(f"path must be writable, got {str(file)!r}")
