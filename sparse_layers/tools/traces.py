"""The trace of a diagnosed model, and errors of what cannot be traced."""

from collections.abc import Callable
from typing import Any

import jax

from .subjects import is_nnx
from .traced_inputs import TracedInputs, closed_over


def trace(model: Callable[..., Any], traced: TracedInputs) -> Any:
    """Returns the jaxpr of a call. An error leaves NNX modules that the model closes over as they were."""
    fields = _fields(model)
    try:
        return jax.make_jaxpr(traced.call)(*traced.arrays)
    except Exception as error:
        for value, saved in fields:
            vars(value).update(saved)
        if (hint := _hint(error)) is None:
            raise
        raise (RuntimeError if isinstance(error, RuntimeError) else TypeError)(hint) from error


def _hint(error: Exception) -> str | None:
    """Returns what to write in place of what raises an error; None for errors of the model itself."""
    text = str(error)
    if "different trace level" in text:
        return (
            "model must not change an NNX module that it closes over: make the module its first input, as in "
            "sl.diagnose(lambda model, x: model(x), model, x)"
        )
    if jax.ShapeDtypeStruct.__name__ in text and isinstance(error, TypeError | AttributeError):
        return (
            "model must not close over jax.ShapeDtypeStruct, which only inputs and functools.partial may hold: write "
            "sl.diagnose(module.apply, variables, x)"
        )
    if isinstance(error, RuntimeError) and "cuDNN" in text:
        return (
            f"model must not call implementation='cudnn' on a machine without cuDNN ({text}): leave implementation out "
            "for the diagnosis"
        )
    return None


def _fields(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Returns the objects in NNX modules that a model closes over, with copies of their fields.

    Transformations of NNX take the fields of modules away during their trace.
    """
    stack, fields = closed_over(model), {}
    while stack:
        value = stack.pop()
        if is_nnx(value) and hasattr(value, "__dict__") and id(value) not in fields:
            fields[id(value)] = value, dict(vars(value))
            stack += vars(value).values()
    return list(fields.values())
