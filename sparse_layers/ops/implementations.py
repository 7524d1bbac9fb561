"""The implementations of the op by name, and the choice among them: the first of the platform's that is preferred."""

import functools
import logging
import warnings
from typing import Any

from .kernels import cudnn, pallas_tpu, reference, xla
from .kernels.call import Call
from .kernels.gpu_attention import hopper, triton
from .kernels.operands import Operands, rows_of
from .planning.platforms import FALLBACK, implementation_order, platform

_log = logging.getLogger(f"{__package__}.attention")  # the name in the documentation

# A new backend is one name here, and in platforms.py what it is tried for and how its block sizes are chosen.
IMPLEMENTATIONS = {
    "pallas_tpu": pallas_tpu,
    "hopper": hopper,
    "triton": triton,
    "cudnn": cudnn,
    "xla": xla,
    "reference": reference,
}


def implementations() -> tuple[str, ...]:
    """The names that ``block_sparse_attention(implementation=)`` takes.

    Example:
      >>> import sparse_layers as sl
      >>> sl.implementations()
      ('pallas_tpu', 'hopper', 'triton', 'cudnn', 'xla', 'reference')
    """
    return tuple(IMPLEMENTATIONS)


def pick_implementation(name: str | None, call: Call, operands: Operands, is_whole: bool = True) -> str:
    """Returns the implementation of a call: the named one or, for None, the first that `rank_implementations` finds.

    Warns once if that is a slow one on an accelerator. Without ``is_whole``, results are merged with others by lse,
    which not every implementation supports.
    """
    if name is not None:
        reason = _unsupported(name, call, operands)
        if reason is not None:
            raise NotImplementedError(f"{name}: {reason}; implementation=None or 'xla' supports this call")
        return name
    target, (name, reasons) = platform(), rank_implementations(call, operands, is_whole)
    _log.debug("block_sparse_attention runs %r%s", name, f"; {_listed(reasons)}" if reasons else "")
    if _log.isEnabledFor(logging.DEBUG) and hasattr(IMPLEMENTATIONS[name], "notes"):
        for note in IMPLEMENTATIONS[name].notes(call, operands):
            _log.debug("%r: %s", name, note)
    if name in FALLBACK and target != "cpu":
        why = _listed(reasons) if reasons else f"no kernels for {target} yet"
        warn_once(f"block_sparse_attention runs {name!r}, which is slow on {target}: {why}")
    return name


def rank_implementations(call: Call, operands: Operands, is_whole: bool = True) -> tuple[str, dict[str, str]]:
    """Returns the implementation that ``implementation=None`` picks, and the reasons against those before it.

    It logs nothing, so that tools may ask, too.
    """
    reasons: dict[str, str] = {}
    for name in implementation_order(platform()):
        backend = IMPLEMENTATIONS[name]
        reason = _unsupported(name, call, operands)
        if reason is None and not is_whole and not merges(backend):
            reason = "its results over some of the keys cannot be merged"
        if reason is None and hasattr(backend, "not_preferred"):
            reason = backend.not_preferred(call, operands)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise NotImplementedError(f"no implementation supports this call; {_listed(reasons)}")


def merges(backend: Any) -> bool:
    """True if a backend's results over some of the keys can be merged by lse: backward then takes the lse of all."""
    return getattr(backend, "MERGES", not hasattr(backend, "attend"))


def _unsupported(name: str, call: Call, operands: Operands) -> str | None:
    """Returns the reason why an implementation does not support a call, or None."""
    for row in rows_of(operands).values():
        if row.backends is not None and name not in row.backends:
            return f"it does not know {row.label}"
    return IMPLEMENTATIONS[name].unsupported(call, operands)


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


@functools.cache
def warn_once(message: str) -> None:
    """Warns of a slow path, unless the same was said before."""
    warnings.warn(message, stacklevel=5)
