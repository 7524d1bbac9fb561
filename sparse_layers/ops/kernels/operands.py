"""The operands of a call by name, and a table of their properties: axes, labels, derivatives, backends.

`jax.vmap`, sharding, context parallelism and the derivative of the op read this table.
CONTRIBUTING.md has the recipe for a new operand.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..planning.selection import Selection


class Operands(NamedTuple):
    """The arrays of one call: B batches, T queries, S keys, N query heads, K key heads, head sizes H and Hv."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    sinks: jax.Array | None = None  # [N] logits, or None
    # int32 ids of queries [B, T] and of keys [B, S], or None; a negative id attends to nothing.
    segments: tuple[jax.Array, jax.Array] | None = None
    # int32 order ids, likewise, or None: a key is visible if its id is at most that of the query. With them there are
    # segments, too, so that no backend meets order ids alone.
    order_ids: tuple[jax.Array, jax.Array] | None = None
    mask: jax.Array | None = None  # a run-time bool mask [heads, T, S] whose heads are taken in turn, or None
    # Key blocks that queries attend to within the mask, ids int32 [B, Tq, G, k]; or None.
    selection: Selection | None = None
    # A bias by distance: logits of query token i and key token j get, before the soft cap, table[h, clip(j - i +
    # call.bias_center, 0, L - 1)] - slopes[h] * |j - i|. Both are in the dtype of accumulators.
    bias_table: jax.Array | None = None  # [N, L], or None
    bias_slopes: jax.Array | None = None  # [N], constants, or None


class Gradients(NamedTuple):
    """The results of a backend's ``backward``: gradients by the names of their operands, in the same dtypes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias_table: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Operand:
    """The properties of one operand.

    Letters: b(atch), t (queries), s (keys), n (query heads), k (key heads), h and d (head sizes), g (one head, or those
    of query or key), r (groups of queries that select together), e (entries of a selection), l (entries of a
    table). Devices split b, n and k; t, r and s under context parallelism. Arrays with t move with queries, arrays with
    s with keys.
    """

    axes: Any  # letters of its axes, or a pair of these for a pair of arrays
    label: Any  # its name in errors, or a pair of names
    # "backend" if `Gradients` has it, "op" if it follows from lse and delta, else None.
    differentiated_by: Literal["backend", "op"] | None = None
    once: bool = False  # True if only the first sub-call has it, where results are merged by lse
    # Implementations that support it; None leaves that to ``unsupported`` of each.
    backends: tuple[str, ...] | None = None

    @property
    def batched(self) -> bool:
        """True if it has an axis of batch entries, always the first."""
        return jax.tree.leaves(self.axes)[0].startswith("b ")


_WITH_BIAS = "pallas_tpu", "hopper", "triton", "xla", "reference"
OPERANDS = {
    "query": Operand("b t n h", "query", "backend"),
    "key": Operand("b s k h", "key", "backend"),
    "value": Operand("b s k d", "value", "backend"),
    "sinks": Operand("n", "sinks", "op", once=True),
    "segments": Operand(("b t", "b s"), ("segment_ids of queries", "segment_ids of keys")),
    "order_ids": Operand(("b t", "b s"), ("order_ids of queries", "order_ids of keys")),
    "mask": Operand("g t s", "a run-time mask"),
    "selection": Operand("b r g e", "selection"),
    "bias_table": Operand("n l", "a bias with a table", "backend", backends=_WITH_BIAS),
    "bias_slopes": Operand("n", "a bias with slopes", backends=_WITH_BIAS),
}


def rows_of(operands: Operands) -> dict[str, Operand]:
    """Returns the rows of the table for the operands that are not None, in their order."""
    return {name: OPERANDS[name] for name, x in zip(operands._fields, operands, strict=True) if x is not None}


def stacked_ids(operands: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the ids of queries and of keys for kernels, int32 [B, 1 or 2, tokens]: of segments, then of order."""
    pairs = [x for x in (operands.segments, operands.order_ids) if x is not None]
    if not pairs:
        return None, None
    q_ids, kv_ids = (jnp.stack(side, axis=1) for side in zip(*pairs, strict=True))
    return q_ids, kv_ids


def differentiated(operands: Operands) -> tuple[str, ...]:
    """Returns the names of the operands whose gradients backends compute."""
    return tuple(name for name, row in rows_of(operands).items() if row.differentiated_by == "backend")


def by_name(like: Operands, values: dict[str, Any]) -> Any:
    """Returns operands with these values and None elsewhere; values may be axes or cotangents, too."""
    fields: dict[str, Any] = dict.fromkeys(like._fields)
    return type(like)(**fields | values)


def labels_of(operands: Operands) -> Operands:
    """Returns the labels of the operands, in the place of the arrays."""
    return _in_structure(operands, {name: row.label for name, row in rows_of(operands).items()})


def axes_of(operands: Operands) -> Operands:
    """Returns the axes of the operands, in the place of the arrays; g is n or k if the array has as many heads."""
    n, k = operands.query.shape[-2], operands.key.shape[-2]

    def axes(names: str, x: jax.Array) -> str:
        letters = names.split()
        sizes = dict(zip(letters, x.shape[-len(letters) :], strict=True))  # axes of `jax.vmap` come before these
        heads = {k: "k", n: "n"}
        return " ".join(heads.get(sizes[a], a) if a == "k" or (a == "g" and sizes[a] > 1) else a for a in letters)

    letters = _in_structure(operands, {name: row.axes for name, row in rows_of(operands).items()})
    return jax.tree.map(axes, letters, operands)


def _in_structure(operands: Operands, values: dict[str, Any]) -> Operands:
    """Returns the operands with a value of the table, or a pair of values, in the place of each array."""
    fields = {
        name: jax.tree.unflatten(jax.tree.structure(getattr(operands, name)), jax.tree.leaves(x))
        for name, x in values.items()
    }
    return by_name(operands, fields)


def moved(operands: Operands, axis: str, move: Callable[[jax.Array], jax.Array]) -> Operands:
    """Returns operands after ``move`` of all arrays with an axis of tokens; it takes and returns [B, tokens, ...]."""

    def along(axes: str, x: jax.Array) -> jax.Array:
        letters = axes.split()
        if axis not in letters:
            return x
        return move(x) if letters[0] == "b" else move(x[None])[0]

    return jax.tree.map(along, axes_of(operands), operands)
