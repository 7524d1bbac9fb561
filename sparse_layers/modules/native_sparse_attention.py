"""`NativeSparseAttention`: compressed, selected and near keys, in three branches that gates merge."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import reprlib
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from ..arguments.checks import strict_kwargs
from ..masks.primitives import Causal, Compressed, Window
from ..ops.decoding.checks import checked_positions
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.selection import Selection
from ..ops.select import select_blocks
from ..scorers import NSA, as_nsa
from .attention import check_step, checked_prompts
from .attention_fn import AttentionFn
from .compression import Compression
from .native_sparse_cache import NSACache
from .rope import Rope, resolved
from .settings import PROJECTIONS, biased, check_settings, check_stream, query_features
from .step import check_inputs


def fixed_parts(
    *,
    num_heads: int,
    num_kv_heads: int | None,
    in_features: int,
    qkv_features: int | None,
    head_dim: int | None,
    out_features: int | None,
    pattern: NSA | str,
    seq_len: int,
    rope: Rope | None,
    rope_theta: float | None,
    dtype: Dtype | None,
    **kernels: Any,
) -> dict[str, Any]:
    """What `NativeSparseAttention`, NNX or Linen, has beside parameters, by its attributes, and the settings checked.

    Raises:
      ValueError, TypeError, NotImplementedError: see `NativeSparseAttention`.
    """
    nsa = checked_nsa(pattern)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    head_dim = query_features(num_heads, in_features, qkv_features, head_dim) // num_heads
    rope, seq_len = resolved(rope, rope_theta), int(seq_len)
    if rope is not None:
        rope.pairs(head_dim, "head_dim")
    fns = branches(nsa, seq_len, **kernels)
    # Traced once, without data: a bad block size or implementation shows up now, not in the first step.
    for name, fn in fns.items():
        length = max(1, nsa.windows(seq_len)) if name == "compressed" else seq_len
        query, key = (
            jax.ShapeDtypeStruct((1, rows, heads, head_dim), dtype or jnp.float32)
            for rows, heads in ((seq_len, num_heads), (length, num_kv_heads))
        )
        jax.eval_shape(fn.attend, query, key, key)
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "in_features": in_features,
        "out_features": in_features if out_features is None else out_features,
        "pattern": nsa,
        "seq_len": seq_len,
        "rope": rope,
        **fns,
    }


def branches(nsa: NSA, seq_len: int, **kernels: Any) -> dict[str, AttentionFn]:
    """The attention of each branch of `NativeSparseAttention`."""
    masks = {
        "compressed": Compressed(*nsa.window),
        "selected": Causal(),
        "sliding": Causal() & Window(nsa.sliding - 1),
    }
    return {name: AttentionFn((mask,), seq_len, **kernels) for name, mask in masks.items()}


def checked_nsa(pattern: Any) -> NSA:
    """The sizes that a pattern of `NativeSparseAttention` stands for.

    Raises:
      ValueError: it is no `NSA` and no name of one.
    """
    nsa = as_nsa(pattern)
    if nsa is None:
        raise ValueError(f"pattern must be NSA, as sl.NSA(count=8), or its name, 'nsa:count=8', got {pattern!r}")
    return nsa


class NativeSparseAttention(nnx.Module):
    """Native sparse attention (Yuan et al. 2025): ``out[t] = sum_c g[c, t] * attention(q[t], K[c], V[c])``.

    The branches c share queries; each has keys and values of its own, projections of the input, and for each query
    head a gate g, the sigmoid of a projection of the input:

    * *compressed*: windows of keys, each compressed to one by a learnt MLP, those that lie in the past as a whole
      (`Compressed`). Queries without such a window get 0.
    * *selected*: the blocks of keys that `NSA` chooses by what the compressed branch attends to, one choice for all
      query heads of a key head. No gradient flows through the choice: the compressed keys learn by being attended to.
    * *sliding*: the nearest keys.

    Rotary embeddings turn queries and the keys of the last two branches by their positions, and a compressed key by
    the position of its window's first token. The layer is causal.

    Args:
      num_heads: number of query heads N.
      in_features: features F of the input.
      qkv_features: features of all query heads together, num_heads * head_dim; defaults to in_features.
      out_features: features of the output; defaults to in_features.
      num_kv_heads: number of key and value heads of each branch, a divisor of num_heads; defaults to num_heads.
      pattern: the sizes of windows and blocks: `NSA`, or its name, ``"nsa:count=8"``.
      seq_len: the longest input, in tokens.
      head_dim: features of a head, instead of qkv_features.
      rope, rope_theta, scale, implementation, fwd_params, bwd_params, query_sharding: as in `SparseSelfAttention`.
      use_bias: whether projections have biases, or the names of those that do, "gate" among them; phi always has.
      dtype: of the computation; None: from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the projections and of phi.
      kernel_init, bias_init: initializers of the projections of queries, keys, values and gates.
      out_kernel_init: initializer of the last projection; None for kernel_init.
      rngs: random number generators of the initial parameters.

    Attributes:
      pattern: the `NSA`.
      plans: the compiled patterns of the branches, by their names.

    Raises:
      ValueError, TypeError, NotImplementedError: as `SparseSelfAttention`; a pattern that is not `NSA`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.NativeSparseAttention(4, 8, num_kv_heads=1, seq_len=4096, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 100, 8))).shape
      (1, 100, 8)

    References:
      Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (arXiv
      2502.11089).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    in_features: int
    out_features: int
    pattern: NSA
    seq_len: int
    rope: Rope | None
    compressed: AttentionFn
    selected: AttentionFn
    sliding: AttentionFn

    @strict_kwargs
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        pattern: NSA | str = "nsa",
        seq_len: int,
        head_dim: int | None = None,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        scale: float | None = None,
        implementation: str | None = None,
        fwd_params: FwdParams | None = None,
        bwd_params: BwdParams | None = None,
        query_sharding: jax.sharding.PartitionSpec | None = None,
        use_bias: bool | Collection[str] = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_settings(
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            seq_len=seq_len,
            head_dim=head_dim,
            rope=rope,
            rope_theta=rope_theta,
            scale=scale,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        check_stream(rngs, "params", "the parameters")
        biases = biased(use_bias, (*PROJECTIONS, "gate"))
        fixed = fixed_parts(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            head_dim=head_dim,
            out_features=out_features,
            pattern=pattern,
            seq_len=seq_len,
            rope=rope,
            rope_theta=rope_theta,
            dtype=dtype,
            scale=scale,
            implementation=implementation,
            fwd_params=fwd_params,
            bwd_params=bwd_params,
            query_sharding=query_sharding,
        )
        for name, value in fixed.items():
            setattr(self, name, value)
        compression: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        shared: dict[str, Any] = compression | {"bias_init": bias_init}

        def projection(name: str, out: tuple[int, ...]) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(in_features, out, kernel_init=kernel_init, use_bias=name in biases, **shared)

        size, of_keys, window = self.head_dim, (3, self.num_kv_heads, self.head_dim), self.pattern.window
        self.query = projection("query", (num_heads, size))
        self.key, self.value = projection("key", of_keys), projection("value", of_keys)
        self.compress_key, self.compress_value = (Compression(window, size, **compression) for _ in range(2))
        self.gate = projection("gate", (3, num_heads))
        self.out = nnx.LinearGeneral(
            (num_heads, size),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            use_bias="out" in biases,
            **shared,
        )

    @property
    def plans(self) -> dict[str, Plan]:
        """The compiled patterns of the branches for the longest input (cached); within "selected", `NSA` chooses."""
        lengths = max(1, self.pattern.windows(self.seq_len)), self.seq_len, self.seq_len
        branches = {"compressed": self.compressed, "selected": self.selected, "sliding": self.sliding}
        return {name: fn.plan(self.seq_len, n) for (name, fn), n in zip(branches.items(), lengths, strict=True)}

    def __nnx_repr__(self) -> Iterator[reprlib.Object | reprlib.Attr]:
        yield reprlib.Object(type(self), same_line=True)
        for name in ("num_heads", "num_kv_heads", "head_dim", "in_features", "pattern", "seq_len"):
            yield reprlib.Attr(name, getattr(self, name))

    @strict_kwargs
    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Applies attention to the inputs.

        Args:
          inputs: [..., T, F] with T <= seq_len; any number of leading batch dimensions, also none.
          segment_ids: int [..., T]; tokens attend within their own id only (packed documents), and to no window that
            holds tokens of several. For the choice each should lie in one piece, see `Scorer`. Negative ids are
            padding, which attends to nothing.
          selection: the key blocks of the selected branch, with the leading axes of the inputs; None for the choice of
            `NSA`.
          positions: int [..., T] or [T], see `SparseSelfAttention`.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError, TypeError: as `SparseSelfAttention`'s.
        """
        given = segment_ids, selection, False, positions
        check_inputs({"inputs": inputs}, [self.in_features], {"seq_len": self.seq_len}, *given)
        *batch, length, _ = inputs.shape
        rows = math.prod(batch)  # not -1: a batch may be empty
        inputs = inputs.reshape(rows, *inputs.shape[-2:])
        ids: Any = None if segment_ids is None else segment_ids.reshape(rows, length)
        selection = jax.tree.map(lambda x: x.reshape(rows, *x.shape[-3:]), selection)

        if positions is not None and positions.ndim > 1:
            positions = positions.reshape(rows, length)
        out, *_ = self._forward(inputs, ids, selection, positions)
        return out.reshape(*batch, length, self.out_features)

    @strict_kwargs
    def prefill(
        self,
        inputs: jax.Array,
        lengths: jax.Array | None = None,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        max_step: int = 1,
        cache: NSACache | None = None,
        start: int = 0,
        total: int | None = None,
    ) -> tuple[jax.Array, NSACache]:
        """`SparseSelfAttention.prefill`: [B, T, F] -> ([B, T, out_features], the cache); lengths int [B].

        Raises:
          ValueError, TypeError: see there.
          NotImplementedError: a piece of a prompt, positions, or a max_step above 1.
        """
        check_inputs({"inputs": inputs}, [self.in_features], {"seq_len": self.seq_len}, None, selection)
        if total is not None and total != inputs.shape[-2]:
            raise NotImplementedError(
                "NativeSparseAttention reads prompts as a whole, so chunk must be left out, got a piece of "
                f"{inputs.shape[-2]} of total={total} tokens"
            )
        _refuse(positions=positions, max_step=max_step, cache=cache, start=start)
        inputs, lengths = checked_prompts(inputs, lengths)
        out, *kept = self._forward(inputs, None, selection)
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return out, NSACache.filled(self.pattern, self.seq_len, lengths, *kept, **heads)

    @strict_kwargs
    def decode_step(
        self,
        inputs: jax.Array,
        cache: NSACache,
        position: jax.Array,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, NSACache]:
        """`SparseSelfAttention.decode_step`: [B, F] -> ([B, out_features], the cache); position int [B].

        It reads all compressed keys, the chosen blocks and the sliding window. The last full window is compressed anew
        in each step: that costs as much as a few tokens' projections.

        Raises:
          ValueError, TypeError: see there.
          NotImplementedError: positions are given.
        """
        _refuse(positions=positions)
        ours = {"pattern": self.pattern, "seq_len": self.seq_len, "num_heads": self.num_heads}
        check_step(inputs, self.in_features, cache, NSACache, ours | {"num_kv_heads": self.num_kv_heads})
        position = checked_positions(position, len(inputs), self.seq_len)
        inputs = inputs[:, None]
        query, keys, values = jax.tree.map(lambda x: x[:, 0], self._heads(inputs, position[:, None]))
        cache, (key, value), first = cache.written(keys, values, position)
        key, value = self._windows(key, value, first[:, None])
        # Behind a barrier, as in `KVCache.step`.
        cache = jax.lax.optimization_barrier(cache.compressed(key[:, 0], value[:, 0], first))
        compressed, selected, sliding = cache.attend(query, position, self.selected.scale, selection)
        return self._merged(inputs, compressed[:, None], selected[:, None], sliding[:, None])[:, 0], cache

    def _forward(
        self, inputs: jax.Array, ids: Any, selection: Selection | None, positions: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        """Outputs [B, T, out_features], keys and values of each branch, [B, T, K, H], and those of windows."""
        (query, keys, values), nsa = self._heads(inputs, positions), self.pattern
        first = jnp.arange(max(1, nsa.windows(inputs.shape[1]))) * nsa.pool_stride
        first = first if positions is None else positions[..., first]
        pooled, value = self._windows(self._whole(keys[0]), self._whole(values[0]), first)
        if selection is None:
            shared: Any = {"scale": self.selected.scale, "query_sharding": self.selected.query_sharding}
            selection = select_blocks(nsa, query, keys[1], ids, pooled=pooled, **shared)
        of_windows = None if ids is None else (ids, self._of_windows(ids))
        compressed = self.compressed.attend(query, pooled, value, segment_ids=of_windows)
        selected = self.selected.attend(query, keys[1], values[1], segment_ids=ids, selection=selection)
        sliding = self.sliding.attend(query, keys[2], values[2], segment_ids=ids)
        return self._merged(inputs, compressed, selected, sliding), keys, values, pooled, value

    def _heads(self, inputs: jax.Array, positions: jax.Array | None = None) -> tuple[Any, ...]:
        """Queries of tokens [B, T, F], and the keys and values of each branch."""
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        (raw, *keys), values = ([x[:, :, c] for c in range(3)] for x in (key, value))
        if self.rope is not None:
            query, *keys = (self.rope(x, positions) for x in (query, *keys))
        return query, [raw, *keys], values

    def _windows(self, key: jax.Array, value: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of windows, by their tokens' and the positions of their first ones, [B, windows] or less."""
        key, value = self.compress_key(key), self.compress_value(value)
        return key if self.rope is None else self.rope(key, first), value

    def _merged(self, inputs: jax.Array, compressed: Any, selected: Any, sliding: Any) -> jax.Array:
        gates = nnx.sigmoid(self.gate(inputs))[..., None]
        return self.out(gates[:, :, 0] * compressed + gates[:, :, 1] * selected + gates[:, :, 2] * sliding)

    def _whole(self, x: jax.Array) -> jax.Array:
        """[B, T, ...], up to the end of a first window that nobody sees where there is none."""
        missing = max(0, self.pattern.pool_size - x.shape[1])
        return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])

    def _of_windows(self, ids: Any) -> jax.Array:
        """The ids of windows whose tokens are all of one document, of the others -1: [B, T] -> [B, windows]."""
        ids, (size, stride) = self._whole(ids), self.pattern.window
        found = ids[:, np.arange(self.pattern.windows(ids.shape[1]))[:, None] * stride + np.arange(size)]
        return jnp.where((found == found[..., :1]).all(-1), found[..., 0], -1)


def _refuse(**given: Any) -> None:
    """Refuses what decoding does not know here.

    Raises:
      NotImplementedError: an argument that says more than its default.
    """
    for name, value in given.items():
        if value is not None and (name, value) not in (("max_step", 1), ("start", 0)):
            raise NotImplementedError(
                "NativeSparseAttention reads prompts as a whole and then a token a step, by their places: "
                f"start, cache, max_step and positions must be left out, got {name}={value!r}"
            )
