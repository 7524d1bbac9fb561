"""Recorded calls: what the op and the attention functions know of each call in a traced program.

While a program is traced under `record_calls`, each call of the op writes its facts to a list. A name scope with its
number marks the call in the jaxpr, so that every equation leads to the facts of its call. Otherwise nothing is marked.
"""

import contextlib
import contextvars
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

_MARK = "sparse_layers_call_"
_RECORD: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar("recorded calls", default=None)
_numbers = itertools.count(1)


@contextlib.contextmanager
def record_calls() -> Iterator[list[dict[str, Any]]]:
    """Records the facts of all calls that are traced inside, also in functions under `jax.jit` that JAX has traced.

    JAX keeps traces by the context that they are made in. Metadata that no other context has makes it trace again, and
    leaves the traces that it keeps. A context of `jax.make_user_context` would drop them.
    """
    calls: list[dict[str, Any]] = []
    token = _RECORD.set(calls)
    try:
        with set_xla_metadata(sparse_layers_record=str(next(_numbers))):
            yield calls
    finally:
        _RECORD.reset(token)


@contextlib.contextmanager
def mark_call(**facts: Any) -> Iterator[None]:
    """Marks what is traced inside with facts, under `record_calls`; elsewhere it does nothing."""
    calls = _RECORD.get()
    if calls is None:
        yield
        return
    shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x for x in jax.tree.leaves(facts)]
    calls.append(jax.tree.unflatten(jax.tree.structure(facts), shaped))
    with jax.named_scope(f"{_MARK}{len(calls) - 1}"):
        yield


def split_marks(path: str) -> tuple[str, list[int]]:
    """Splits the name stack of an equation into the scopes of the model and the numbers of the calls around it.

    Example:
      >>> split_marks("jvp(decoder/sparse_layers_call_3/attention)")
      ('jvp(decoder/attention)', [3])
    """
    numbers = [int(number) for number in re.findall(rf"{_MARK}(\d+)", path)]
    return re.sub(rf"{_MARK}\d+/?", "", path), numbers
