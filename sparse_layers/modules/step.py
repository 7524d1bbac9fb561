"""The attention step of all layers: rotary position embeddings, then attention over the pattern; checks of calls."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Dtype

from ..arguments.checks import as_float
from ..arguments.foreign import one_line
from ..masks.adapters import by_entry
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.kernels.validation import transposed_hint
from ..ops.layouts import warn_of_batch
from ..ops.planning.selection import Selection
from ..scorers import masks_and_scorer
from .attention_fn import AttentionFn, Pattern
from .index import IndexProjections
from .relative_bias import RelativeBias, bias_of_parameter
from .rope import Rope
from .settings import check_array, check_features, check_ids, check_settings


class CallInputs(NamedTuple):
    """The inputs of one call besides query, key and value; Flax's layer passes them on as its ``mask``."""

    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None  # a pair is for queries and keys
    sinks: jax.Array | None
    selection: Selection | None = None
    index: IndexProjections | None = None
    positions: jax.Array | None = None
    order_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None
    bias: DistanceBias | None = None
    gate: jax.Array | None = None  # logits of the gates of heads, see `apply_gate`


@dataclasses.dataclass(frozen=True)
class AttentionStep:
    """The attention step of a layer: rotary position embeddings, then attention over the pattern.

    Attributes:
      fn: attention over the pattern.
      rope: rotary position embeddings of queries and keys, or None.
      relative_bias: the bias of logits, or None.
    """

    fn: AttentionFn
    rope: Rope | None
    relative_bias: RelativeBias | None = None

    def __call__(self, query, key, value, *, mask: CallInputs, dtype=None, **_):
        # The layer refuses or never sets the other arguments that Flax passes (dropout, is_causal, precision).
        options = mask._asdict()
        positions, gate, index = options.pop("positions"), options.pop("gate"), mask.index
        if index is not None:
            options["index"] = self.apply_rope_to_index(index, dtype, positions)
        query, key, value = self.apply_rope(query, key, value, dtype, positions)
        return apply_gate(gate, self.fn.attend(query, key, value, **options))

    def table_shape(self, num_heads: int) -> tuple[int, ...] | None:
        """Returns the shape of the bias's table, or None without one."""
        return None if self.relative_bias is None else self.relative_bias.table_shape(num_heads)

    def make_bias(self, table: jax.Array | None, num_heads: int, bias: DistanceBias | None) -> DistanceBias | None:
        """Returns the bias of a layer that has this table, or ``bias``, that of a call.

        Raises:
          ValueError: there are both, or the table has another shape than that of the layer's relative_bias.
        """
        if self.relative_bias is None:
            return bias
        if bias is not None:
            raise ValueError(f"bias must be None, as the layer has relative_bias={self.relative_bias}, got {bias}")
        return bias_of_parameter(self.relative_bias, table, num_heads)

    def apply_rope_to_index(self, index: IndexProjections, dtype, positions=None) -> IndexProjections:
        """Returns the index with rotated query and key."""
        query, key, _ = self.apply_rope(index.query, index.key, index.key, dtype, positions)
        return index._replace(query=query, key=key)

    def apply_rope(self, query, key, value, dtype, positions=None):
        """Returns query and key rotated by their positions, and value, all in one dtype."""
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        if self.rope is not None:
            query, key = (self.rope(x, positions) for x in (query, key))
        return tuple(x.astype(dtype) for x in (query, key, value))


def apply_gate(gate: jax.Array | None, heads: jax.Array) -> jax.Array:
    """Returns heads [..., N, H] times the sigmoid of their gates' logits [..., N, H] or [..., N, 1]; None for no gate.

    Source: Qiu et al., Gated Attention for Large Language Models, arXiv 2505.06708, position G1.
    """
    return heads if gate is None else heads * jax.nn.sigmoid(gate).astype(heads.dtype)


def refuse_dropout(dropout_rate: Any) -> None:
    """Raises ValueError unless the dropout rate of an attention layer is 0."""
    if as_float(dropout_rate) != 0:
        raise ValueError(
            f"dropout_rate must be 0, got {one_line(dropout_rate)}: block-sparse attention never forms the attention "
            "probabilities, so they cannot be dropped; apply dropout to the layer's output (the residual) instead"
        )


def attention_step(
    pattern: Pattern,
    lengths: Mapping[str, int],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: Dtype | None,
    *,
    rope: Rope | None = None,
    relative_bias: RelativeBias | None = None,
    size_name: str = "head_dim",
    **settings: Any,
) -> AttentionStep:
    """Makes the attention step of a self-attention or cross-attention layer of any library, and checks its settings.

    Args:
      pattern, rope, relative_bias: see `SparseSelfAttention`.
      lengths: {"seq_len": T}, or {"q_len": T, "kv_len": S} for cross-attention.
      num_heads, num_kv_heads, head_size, dtype: those of later calls; dtype None stands for float32.
      size_name: the name of head_size in errors.
      **settings: the other fields of `AttentionFn`, with a selection as in `SparseSelfAttention`.
    """
    check_settings(**lengths)
    masks, scorer = masks_and_scorer(pattern, settings.pop("selection", None), list(lengths.values()))
    if num_heads % len(masks):
        raise ValueError(
            f"pattern: has {len(masks)} entries, which the heads take in turn, so {len(masks)} must divide "
            f"num_heads={num_heads}{by_entry(masks)}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if rope is not None:
        rope.pairs(head_size, size_name)
        if scorer is not None and (index_size := scorer.index_features(head_size)):
            rope.pairs(index_size, "index_size")
    sizes = [int(length) for length in lengths.values()]
    step = AttentionStep(AttentionFn(masks, sizes[0], selection=scorer, **settings), rope, relative_bias)
    check_traces(step, sizes, num_heads, num_kv_heads, head_size, dtype, relative_bias)
    return step


def check_traces(
    step: AttentionStep,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: Dtype | None,
    relative_bias: RelativeBias | None,
) -> None:
    """Traces a step abstractly: a bad block size, soft cap, implementation or bias is refused now, not in a call.

    The arguments are those of `attention_step`, without the names of lengths; a model may share ``relative_bias``.
    """
    q_len, kv_len = lengths[0], lengths[-1]
    query, key = (
        jax.ShapeDtypeStruct((1, length, heads, head_size), dtype or jnp.float32)
        for length, heads in ((q_len, num_heads), (kv_len, num_kv_heads))
    )
    index: Any = None
    if step.fn.selection is not None and (size := step.fn.selection.index_features(head_size)):
        arrays = (jax.ShapeDtypeStruct((1, q_len, heads, size), query.dtype) for heads in (num_kv_heads, 1))
        index = IndexProjections(*arrays)  # pyright: ignore[reportArgumentType] (shapes instead of arrays)
    bias = None if relative_bias is None else relative_bias.abstract_bias(num_heads, (q_len, kv_len))
    jax.eval_shape(
        lambda q, k, i, b: step(q, k, k, mask=CallInputs(None, None, index=i, bias=b)), query, key, index, bias
    )


def check_inputs(
    inputs: Mapping[str, jax.Array],
    features: Sequence[int],
    lengths: Mapping[str, int],
    segment_ids: Any,
    selection: Selection | None = None,
    sow_weights: bool = False,
    positions: Any = None,
    order_ids: Any = None,
) -> None:
    """Refuses wrong inputs of a layer of any library.

    Args:
      inputs: one array by argument name, or two: of queries and of keys.
      features: the last axis of each.
      lengths: the longest length of each, see `attention_step`.
      segment_ids, selection, sow_weights, positions, order_ids: see `SparseSelfAttention.__call__`, and
        `SparseCrossAttention.__call__`.
    """
    if sow_weights:
        raise ValueError(
            f"sow_weights must be False, got {one_line(sow_weights)}: block-sparse attention never forms the attention "
            "probabilities"
        )
    for letter, (name, x), size, (limit_name, limit) in zip(
        "TS", inputs.items(), features, lengths.items(), strict=False
    ):
        shape = f"[..., {letter}, {size}]"
        check_features(name, x, shape, size)
        if x.ndim < 2:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
        if x.shape[-2] == 0:
            raise ValueError(f"{name} must have at least one token, got shape {x.shape}")
        if x.shape[-2] > limit:
            raise ValueError(
                f"{name}: got {x.shape[-2]} tokens, but the layer's pattern was compiled for {limit_name}={limit}: "
                "there must not be more"
            )
        if segment_ids is None and len(lengths) == 1:
            warn_of_batch(name, x.shape, limit)
    (query_name, query), *key_inputs = inputs.items()
    for name, x in key_inputs:
        if x.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} must have the leading axes of {query_name}, {query.shape[:-2]}, got shape {x.shape}"
            )
    for name, ids in (("segment_ids", segment_ids), ("order_ids", order_ids)):
        if ids is not None:
            check_ids(name, ids, [x.shape[:-1] for x in inputs.values()])
    if positions is not None:
        check_positions(positions, query.shape[:-1])
    if selection is not None:
        if not isinstance(selection, Selection):
            raise TypeError(f"selection must be a Selection or None, got {type(selection).__name__}")
        if selection.ids.shape[:-3] != query.shape[:-2]:
            raise ValueError(
                f"selection: ids must have the leading axes of {query_name}, {query.shape[:-2]}, and then rows, heads "
                f"and blocks, got shape {selection.ids.shape}"
            )


def check_positions(positions: Any, tokens: tuple[int, ...]) -> None:
    """Refuses positions that are not integers [..., T] or [T] for tokens [..., T]."""
    check_array("positions", positions, "[..., T] or [T]")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    shapes = dict.fromkeys((tokens, tokens[-1:]))
    if positions.shape not in shapes:
        hint = transposed_hint(positions.shape, tokens)
        raise ValueError(f"positions must have shape {' or '.join(map(str, shapes))}, got {positions.shape}{hint}")
