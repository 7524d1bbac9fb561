"""`SparseCrossAttention`: attention of one sequence to another over a sparsity pattern."""

from typing import Any, Unpack

import jax
from flax import nnx

from ..arguments.checks import strict_kwargs
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.selection import Selection
from .attention_fn import Pattern
from .options import CrossOptions
from .relative_bias import RelativeBias
from .sparse_attention import SparseAttention
from .step import check_inputs


class SparseCrossAttention(SparseAttention):
    """Cross-attention over a sparsity pattern, with the parameters of ``flax.nnx.MultiHeadAttention``.

    Queries come from one sequence, keys and values from another with its own length and features. As in
    `SparseSelfAttention`, names and initial values of parameters are Flax's, the state of a dense layer loads
    unchanged, and the pattern is compiled at construction. Query t and key s have positions t and s in the pattern.
    A mask of distances, such as `Window`, fits sequences with common positions; `from_mask_mod` or an array makes any
    other mask. Attention is causal only if the pattern is.

    The layer has no rotary position embeddings, since positions of two sequences have no common origin. Where they
    do, rotate arrays with a `Rope` and call `block_sparse_attention`. The layer has no cache for decoding.

    Args:
      num_heads, qkv_features, out_features, num_kv_heads, head_dim: as in `SparseSelfAttention`.
      in_features: features F of the queries' input.
      in_kv_features: features of the input of keys and values; defaults to in_features.
      pattern: as in `SparseSelfAttention`; a numpy bool array is [q_len, kv_len] or [entries, q_len, kv_len].
      q_len, kv_len: the longest inputs of queries and of keys, in tokens; shorter ones use the upper left corner of the
        pattern.
      relative_bias: as in `SparseSelfAttention`; the distance of key s from query t is s - t.
      dropout_rate: must be 0, as in `SparseSelfAttention`.
      rngs: random number generators of the initial parameters.
      **options: use_sinks, gate_output, scale, logits_soft_cap, implementation, fwd_params, bwd_params and
        query_sharding as in `SparseSelfAttention`, and all other arguments of ``flax.nnx.MultiHeadAttention`` except
        ``attention_fn`` and ``decode``.

    Attributes:
      pattern: the name or mask; a sequence or an array becomes its tuple of masks.
      plan: the plan of the pattern for q_len queries and kv_len keys.

    Raises:
      ValueError, TypeError, NotImplementedError: errors of `SparseSelfAttention`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> near = sl.Window(3, 3)  # audio and its transcript, aligned by token
      >>> layer = sl.SparseCrossAttention(2, 8, in_kv_features=12, pattern=near, q_len=16, kv_len=20, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 16, 8)), jnp.ones((1, 20, 12))).shape
      (1, 16, 8)
    """

    _limits = ("q_len", "kv_len")
    q_len: int
    kv_len: int

    @strict_kwargs
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        head_dim: int | None = None,
        pattern: Pattern,
        q_len: int,
        kv_len: int,
        relative_bias: RelativeBias | None = None,
        dropout_rate: float = 0.0,
        rngs: nnx.Rngs,
        **options: Unpack[CrossOptions],
    ):
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            lengths={"q_len": q_len, "kv_len": kv_len},
            head_dim=head_dim,
            pattern=pattern,
            relative_bias=relative_bias,
            dropout_rate=dropout_rate,
            rngs=rngs,
            **options,
        )

    @strict_kwargs
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] (keys and values of one input, no dense mask)
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array,
        *,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        order_ids: tuple[jax.Array, jax.Array] | None = None,
        selection: Selection | None = None,
        bias: DistanceBias | None = None,
        sow_weights: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Applies attention of one input to the other.

        Args:
          inputs_q: [..., T, F] with T <= q_len and any number of leading batch axes, including none.
          inputs_kv: [..., S, in_kv_features] with S <= kv_len and the same leading axes.
          segment_ids: a pair, int [..., T] of queries and int [..., S] of keys; queries attend to keys of their own id
            only. Negative ids are padding: such queries attend to nothing, and nothing attends to such keys.
          order_ids: a pair, likewise; queries see keys whose id is at most their own, within the pattern and segments.
          selection: the key blocks of each query within the pattern, selected at run time: a `Selection` with the
            leading axes of the inputs.
          bias: as in a call of `SparseSelfAttention`.
          sow_weights: must be False, see Raises.
          out_sharding, qkv_sharding: passed to Flax's projections.

        Returns:
          [..., T, out_features] in the layer's dtype. A query without any key gets the output bias.

        Raises:
          ValueError: inputs that are not floats, are longer than q_len or kv_len, or have another shape; ids
            whose shape is not that of the tokens; a selection whose axes or blocks do not fit the inputs;
            sow_weights=True (the probabilities are never formed).
          TypeError: an input that is not an array; ids that are not a pair; a selection of another type.
        """
        inputs = {"inputs_q": inputs_q, "inputs_kv": inputs_kv}
        features = [self.in_features, self.in_kv_features]
        check_inputs(inputs, features, self.lengths, segment_ids, selection, sow_weights, order_ids=order_ids)
        call_inputs = self._core.call_inputs(inputs_q, segment_ids, selection, order_ids=order_ids, bias=bias)
        return super().__call__(
            inputs_q,
            inputs_kv,
            mask=call_inputs,  # pyright: ignore[reportArgumentType] (Flax hands it to attention_fn as it is)
            decode=False,
            out_sharding=out_sharding,
            qkv_sharding=qkv_sharding,
        )
