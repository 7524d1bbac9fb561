"""Results of `tune`: the parameters of a kernel with their table of measurements, and the file that keeps them."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from ..ops.planning.params import BwdParams, FwdParams, KernelParams
from .files import checked_path

FORMAT = "sparse_layers.tuned 1"
# Sizes of a call, and their letters.
SIZES = {
    "batch": "B",
    "q_len": "T",
    "kv_len": "S",
    "heads": "N",
    "kv_heads": "K",
    "head_size": "H",
    "value_size": "Hv",
}
_ABOUT = {"mask", *SIZES, "dtype", "implementation", "tunable", "device", "versions"}
_PARAMS = {"fwd_params": FwdParams, "bwd_params": BwdParams}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row of the table of `Tuned`: candidate parameters with their times in milliseconds, or why they have none."""

    fwd_params: FwdParams
    bwd_params: BwdParams
    forward_ms: float | None = None
    both_ms: float | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`: parameters of the kernels, and the table that they were picked from, which ``print`` shows.

    Attributes:
      fwd_params: the best parameters of the forward pass.
      bwd_params: the best parameters of the backward pass.
      about: the call and the machine: the mask's text, lengths, sizes, dtype, implementation, device, package versions.
      table: one `Measured` for each candidate: fwd_params, bwd_params, forward_ms, both_ms (forward and backward, None
        for ``gradients=False``), and reason, None unless the candidate failed. Forward candidates come first, then
        those for the backward, either after the parameters that they had to beat.

    Example:
      >>> import sparse_layers as sl
      >>> result = sl.tune(sl.Causal(), 64, heads=1, head_size=8, implementation="xla", candidates=())
      >>> result.fwd_params == sl.FwdParams(), result.about["q_len"], len(result.table)
      (True, 64, 1)
    """

    fwd_params: FwdParams
    bwd_params: BwdParams
    about: dict[str, Any] = dataclasses.field(hash=False)
    table: tuple[Measured, ...]

    def __str__(self):
        about = self.about
        sizes = " ".join(f"{letter}={about[name]}" for name, letter in SIZES.items())
        runs = about["implementation"] or f"the library's choice, with settings {about['tunable']},"
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines = [f"{sizes} {about['dtype']}; {runs} on {about['device']}", f"{about['mask']}; {versions}"]
        lines.append(f"  {'forward':>10}  {'fwd + bwd':>10}")
        best = [i for i, row in enumerate(self.table) if _params(row) == _params(self)][-1:]
        for i, row in enumerate(self.table):
            forward, forward_backward = ("" if x is None else f"{x:.3f} ms" for x in (row.forward_ms, row.both_ms))
            text = f"{_text(row.fwd_params)} {_text(row.bwd_params)}"
            if row.reason is not None:
                forward, text = "left out", f"{text}: {row.reason}"
            lines.append(f"{'*' if [i] == best else ' '} {forward:>10}  {forward_backward:>10}  {text}")
        return "\n".join(lines)


def load_tuned(path: str | os.PathLike[str]) -> Tuned:
    """Reads the file that `tune` wrote. Whether it fits your machine is for you to judge: see ``about``.

    Args:
      path: the file.

    Returns:
      The `Tuned` that `tune` returned.

    Raises:
      OSError: the file cannot be read.
      TypeError: path is no str or PathLike.
      ValueError: it is no such file, or a value in it breaks a rule; says which.

    Example:
      >>> import pathlib, tempfile, sparse_layers as sl
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "tuned.json")
      ...     result = sl.tune(sl.Causal(), 64, heads=1, head_size=8, implementation="xla", candidates=(), path=path)
      ...     sl.load_tuned(path) == result
      True
    """
    file = checked_path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file that tune wrote, got {str(file)!r}, which is none")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # that of JSON, and of UTF-8
        raise ValueError(f"{path} must be a file that tune wrote; it is no JSON: {error}") from None
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(f"{path} must be a file that tune wrote: its 'format' must be {FORMAT!r}, got {version!r}")
    try:
        table = tuple(Measured(**_with_params(row)) for row in content["table"])
        result = Tuned(**_with_params(content | {"table": table}))
        _check(result)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} must be a file that tune wrote: {type(error).__name__}: {error}") from None
    return result


def save_tuned(result: Tuned, file: pathlib.Path) -> None:
    """Writes a new file for `load_tuned`, which appears under its name when it is complete."""
    content = {"format": FORMAT, **dataclasses.asdict(result)}
    for params in (row[name] for row in (content, *content["table"]) for name in _PARAMS):
        for field in [field for field, value in params.items() if not value]:
            del params[field]
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with partial.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=1) + "\n")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if os.path.lexists(file):
        raise FileExistsError(f"path must be a new file, got {str(file)!r}: the result is in {str(partial)!r}")
    partial.rename(file)


def _check(result: Tuned) -> None:
    """Raises an error unless times, reasons, parameters and facts are those of a result."""
    for row in result.table:
        times = (row.forward_ms, row.both_ms)
        if not all(ms is None or (isinstance(ms, int | float) and ms >= 0) for ms in times):
            raise ValueError(f"times must be numbers >= 0 or null, got {times}")
        if not isinstance(row.reason, str | None) or (row.reason is None) == (row.forward_ms is None):
            raise ValueError(f"a row must have a time or a reason, got {row.forward_ms!r} and {row.reason!r}")
    if _params(result) not in [_params(row) for row in result.table if row.reason is None]:
        raise ValueError("the chosen parameters must be in the table, with a time")
    missing = _ABOUT - result.about.keys()
    if missing:
        raise ValueError(f"'about' must name {', '.join(sorted(missing))}")
    str(result)


def _params(row: Measured | Tuned) -> tuple[FwdParams, BwdParams]:
    return row.fwd_params, row.bwd_params


def _with_params(content: dict[str, Any]) -> dict[str, Any]:
    return content | {name: kind(**content[name]) for name, kind in _PARAMS.items()}


def _text(params: KernelParams) -> str:
    values = ((field.name, getattr(params, field.name)) for field in dataclasses.fields(params))
    return f"{type(params).__name__}({', '.join(f'{name}={value}' for name, value in values if value is not None)})"
