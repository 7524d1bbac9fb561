"""One table of calls of the op, and what each must give: every backend answers to all of it.

`DenseAttention` in float64 is right. What a backend may be off is measured, not tuned: twice the error of dense
attention in the same dtype, plus the rounding of the largest summand. This is `DenseAttention` in float32, for which
nothing is compiled, and `naive` in half precision, which numpy does not multiply well.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.ops.kernels.operands import OPERANDS
from sparse_layers.ops.planning.costs import PassCandidate
from sparse_layers.ops.planning.planner import finish_pass
from sparse_layers.ops.planning.platforms import PREFERRED, TUNING
from sparse_layers.ops.planning.row_orders import Reordered
from sparse_layers.ops.planning.terms import decompositions
from sparse_layers.tools import oracle
from sparse_layers.tools.oracle import NAMES, DenseAttention

# A new backend is one more name here.
IMPLEMENTATIONS = ["pallas_tpu", "triton", "xla", "reference"]
# Those that answer to the whole table; interpreted kernels, and the reference, which computes no plan, to its core.
COMPILED = {"xla", *PREFERRED.get(jax.default_backend(), ())}
# Most of a test's time is XLA's, and on CPUs most of that is LLVM's, which only makes the program run faster.
COMPILER = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
compiled = functools.partial(jax.jit, compiler_options=COMPILER if jax.default_backend() == "cpu" else None)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call: the mask, and all that the arrays and options are made from."""

    name: str
    mask: Any  # whatever the op takes; a JAX array is passed to the compiled function as an argument
    q_len: int
    kv_len: int | None = None
    heads: tuple[int, int] = (2, 1)  # few, as the time of interpreted kernels grows with them
    sizes: tuple[int, int] = (16, 16)
    batch: int = 2
    dtype: str = "float32"
    fwd: tuple[int, int] | None = None  # block sizes
    bwd: tuple[int, int] | None = None
    split: bool = False  # compute the longest chain that the planner weighs, not the cheapest
    segments: tuple[np.ndarray, np.ndarray] | None = None
    order_ids: tuple[np.ndarray, np.ndarray] | None = None
    sinks: bool = False
    table: tuple[int, int, int] | None = None  # heads, entries and center of a bias by distance
    # Heads and lengths of a joint table of a grid, and the grid's lengths; in place of ``table``.
    grid_table: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    slopes: tuple[float, ...] | None = None  # of a bias, by head
    soft_cap: float | None = None
    scale: float | None = None
    return_lse: bool = True
    core: bool = True  # whether interpreted kernels answer to it, too; what is not repeats parts of others
    left_out: str = ""  # an interpreted kernel that does not

    def __str__(self):
        return self.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_len, self.kv_len or self.q_len

    def params(self) -> dict[str, Any]:
        sides = {"fwd_params": (sl.FwdParams, self.fwd), "bwd_params": (sl.BwdParams, self.bwd)}
        return {name: make(q_blocksize=b[0], kv_blocksize=b[1]) for name, (make, b) in sides.items() if b}

    def arrays(self) -> dict[str, Any]:
        """Operands and cotangents, in the dtypes of the call."""
        rng = np.random.default_rng(0)
        (n, k), (h, hv), (t, s), b = self.heads, self.sizes, self.shape, self.batch
        shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, hv), "dout": (b, t, n, hv)}
        # Of numpy: JAX would compile a program for each shape and dtype that it converts or takes over.
        dtype = np.dtype(self.dtype)
        arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
        arrays["dlse"] = rng.normal(size=(b, t, n)).astype(np.float32) * self.return_lse
        arrays["sinks"] = (rng.normal(size=n) + 1).astype(np.float32) if self.sinks else None
        entries = self.grid_table and (self.grid_table[0], math.prod(self.grid_table[1]))
        entries = self.table[:2] if self.table else entries
        arrays["table"] = rng.normal(size=entries).astype(np.float32) if entries else None
        return arrays

    def bias(self, table: jax.Array | None) -> sl.DistanceBias | None:
        """The bias with a table; None if there is none."""
        if self.grid_table:
            heads, lengths, shape = self.grid_table
            return sl.grid_bias(shape, table.reshape(heads, *lengths))
        if table is None and self.slopes is None:
            return None
        return sl.DistanceBias(table, self.table and self.table[2], self.slopes)

    def dense_bias(self) -> dict[str, Any]:
        """The static parts of the bias, as `DenseAttention` takes them."""
        if not self.grid_table:
            return {"slopes": self.slopes} | ({"center": self.table[2]} if self.table else {})
        _, lengths, shape = self.grid_table
        distances = [np.subtract.outer(x, x).T for x in np.unravel_index(np.arange(self.q_len), shape)]
        index = [np.clip(x + n // 2, 0, n - 1) for x, n in zip(distances, lengths, strict=True)]
        return {"table_index": np.ravel_multi_index(index, lengths)}

    def allowed(self) -> np.ndarray:
        """The pairs that may attend: bool [B or 1, N, T, S]."""
        if isinstance(self.mask, jax.Array):
            heads = np.asarray(self.mask).reshape(-1, *self.shape)
        else:
            heads = np.stack([mask.dense(*self.shape) for mask in sl.as_masks(self.mask)])
        allowed = np.tile(heads, (self.heads[0] // len(heads), 1, 1))[None]
        if self.segments is not None:
            allowed = allowed & oracle.same_segment(*self.segments)
        if self.order_ids is not None:
            allowed = allowed & oracle.in_order(*self.order_ids)
        return allowed

    def selection(self) -> sl.Selection | None:
        """What queries choose to look at, if they do; an argument of the compiled function."""
        return None

    def call(self, implementation: str) -> dict[str, np.ndarray]:
        """The op's answers and gradients, by `NAMES`, compiled."""
        return self.compiled(implementation)()

    def op(self, implementation: str) -> Callable[..., Any]:
        """Returns the op as a function of (query, key, value, sinks, run-time mask, selection, table): (out, lse)."""
        params, fixed = self.params(), self.mask
        if self.split:
            params, fixed = {}, candidates(self.mask, *self.shape, **params)[-1]

        def op(query, key, value, sinks, dynamic, selection, table=None):
            results = sl.block_sparse_attention(
                query,
                key,
                value,
                fixed if dynamic is None else dynamic,
                segment_ids=self.segments,
                order_ids=self.order_ids,
                selection=selection,
                scale=self.scale,
                logits_soft_cap=self.soft_cap,
                sinks=sinks,
                bias=self.bias(table),
                implementation=implementation,
                return_lse=self.return_lse,
                **params,
            )
            return results if self.return_lse else (results, None)

        return op

    def compiled(self, implementation: str) -> Callable[[], dict[str, np.ndarray]]:
        """Returns the function of no arguments that gives the answers of `call`."""
        arrays, op = self.arrays(), self.op(implementation)
        dynamic = self.mask if isinstance(self.mask, jax.Array) else None

        @compiled
        def answers(arrays, dynamic, selection):
            operands = (arrays[x] for x in ("query", "key", "value", "sinks", "table"))
            (out, lse), pullback = jax.vjp(lambda *x: op(*x[:4], dynamic, selection, x[4]), *operands)
            return out, lse, *pullback((arrays["dout"], arrays["dlse"] if self.return_lse else None))

        return lambda: _named(answers(arrays, dynamic, self.selection()))


def _named(results) -> dict[str, np.ndarray]:
    return {name: x for name, x in zip(NAMES, results, strict=True) if x is not None}


_SMALL_TILES = dataclasses.replace(TUNING["xla"], block_shapes=((32, 32),))


def candidates(mask: Any, q_len: int, kv_len: int | None = None, fwd_params=None, bwd_params=None) -> list[sl.Plan]:
    """A plan for each chain that the planner weighs for a mask, whatever it would choose; natural order comes first.

    For several masks, the i-th plan takes the i-th chain of each, or its last one.
    """
    kv_len = q_len if kv_len is None else kv_len
    fwd = fwd_params or sl.FwdParams()
    bwd = bwd_params or sl.BwdParams(q_blocksize=fwd.q_blocksize, kv_blocksize=fwd.kv_blocksize)
    by_mask = []
    for one in sl.as_masks(mask):
        chains = []
        for _, terms in decompositions(one, q_len, kv_len, _SMALL_TILES):
            candidates = [PassCandidate(Reordered(term, *orders), fwd, TUNING["xla"]) for orders, term in terms]
            chains.append(tuple(finish_pass(candidate, bwd) for candidate in candidates if candidate.blocks))
        by_mask.append(chains)
    found = []
    for i in range(max(map(len, by_mask))):
        chains = tuple(c[min(i, len(c) - 1)] for c in by_mask)
        # Plans compare by what they are made from, chains follow from that. A setting that only GPUs read tells these
        # plans apart, or a compiled function would take one for the other.
        params = dataclasses.replace(fwd, num_key_splits=2 + i)
        found.append(sl.Plan(sl.as_masks(mask), q_len, kv_len, params, bwd, "xla", chains, ((),) * len(chains)))
    return found


# --- what is right ---------------------------------------------------------------------------------------------------


@functools.partial(compiled, static_argnames=("scale", "soft_cap", "center", "slopes"))
def naive(
    query,
    key,
    value,
    allowed,
    dout,
    dlse,
    *,
    scale,
    soft_cap=None,
    sinks=None,
    table=None,
    center=0,
    table_index=None,
    slopes=None,
):
    """Dense attention in the dtype of its inputs throughout, differentiated by JAX: the answers by `NAMES`."""
    dtype = query.dtype

    distances = np.arange(key.shape[1]) - np.arange(query.shape[1])[:, None]
    if table is not None and table_index is None:
        table_index = np.clip(distances + center, 0, table.shape[1] - 1)

    def attention(query, key, value, sinks, table):
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * jnp.asarray(scale, dtype)
        if table is not None:
            scores += table.astype(dtype)[:, table_index]
        if slopes is not None:
            scores -= (np.array(slopes)[:, None, None] * abs(distances)).astype(dtype)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        sink = jnp.full((1, 1, 1, 1), -jnp.inf, dtype) if sinks is None else sinks.astype(dtype)[None, :, None, None]
        top = jnp.maximum(jnp.where(allowed, scores, -jnp.inf).max(-1, keepdims=True), sink)
        top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
        weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores, 0) - top), 0)
        total = weights.sum(-1, keepdims=True) + jnp.exp(sink - top)
        safe = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)[..., 0].swapaxes(1, 2)
        return jnp.einsum("bnts,bsnh->btnh", weights / safe, value, precision="highest"), lse

    answers, pullback = jax.vjp(attention, query, key, value, sinks, table)
    return _named((*answers, *pullback((dout, dlse.astype(dtype)))))


@functools.lru_cache(maxsize=4)
def expected(case: Case):
    """(right answers, their sizes, budget of each) of a case."""
    arrays, allowed = case.arrays(), case.allowed()
    options = {"scale": case.sizes[0] ** -0.5 if case.scale is None else case.scale, "soft_cap": case.soft_cap}
    options |= case.dense_bias()
    exact = DenseAttention(**arrays, allowed=allowed, **options)
    if case.dtype == "float32":
        rough = DenseAttention(**arrays, allowed=allowed, **options, dtype=np.float32).answers
    else:
        rough = naive(**arrays, allowed=allowed, **options)
    sizes = exact.absolute_sums()
    return exact.answers, sizes, oracle.budgets(exact.answers, rough, sizes, case.dtype)


def check(case: Case, answers: dict[str, np.ndarray]) -> None:
    """Asserts that answers are of the right dtypes and shapes, and right to within the budget."""
    right, sizes, budgets = expected(case)
    assert answers.keys() | (set() if case.return_lse else {"lse"}) == right.keys()
    for name, answer in answers.items():
        assert answer.shape == right[name].shape, name
        assert answer.dtype == ("float32" if name in ("lse", "dsinks", "dtable") else case.dtype), name
        values = np.asarray(answer).astype(np.float64)
        nothing = (sizes[name] == 0) & np.isfinite(right[name])
        assert not values[nothing].any(), f"{name}: not 0 where nothing contributes"
        error = oracle.largest_error(answer, right[name])  # inf, where -inf of queries without keys differs
        assert error <= budgets[name], f"{name}: off by {error:.3g}, allowed {budgets[name]:.3g}"


# --- the table -------------------------------------------------------------------------------------------------------

# Options without a default: lengths that the other defaults fit.
_LENGTHS = {"shape": (24, 24, 24), "n": 150, "total_seq_len": 100}
NEEDED = {name: {x: _LENGTHS[x] for x in sl.preset_options(name) if x in _LENGTHS} for name in sl.presets()}
TINY = NEEDED | {  # options under which 40 tokens show the pattern; a preset that is not listed runs with its defaults
    "bigbird": {"block": 4, "global_blocks": 1, "random_blocks": 1},
    "block_diffusion": {"n": 20, "block_size": 6},
    "chunked": {"chunk": 12},
    "dilated": {"window": 4, "dilation": 3},
    "draft_blocks": {"total_seq_len": 24, "block_size": 4, "stride": 5},
    "fixed": {"local_attn_ctx": 8, "num_verts": 2, "vertsize": 1, "blocksize": 2},
    "local": {"local_attn_ctx": 7},
    "longformer": {"window": 5, "global_tokens": 2},
    "prefix_lm": {"prefix": 9},
    "sliding_window": {"window": 6},
    "sparse_transformer_fixed": {"stride": 8, "summary": 2},
    "sparse_transformer_strided": {"stride": 7},
    "streaming": {"window": 5, "sinks": 2},
    "strided": {"local_attn_ctx": 6},
    "neighborhood": {"shape": (6, 7), "kernel": 3, "dilation": (2, 1)},
    "sliding_tile": {"shape": (6, 7), "kernel": (1, 3), "tile": 2},
    "windows": {"shape": (6, 7), "size": 3, "shift": 1},
    "axial": {"shape": (3, 3, 5)},
    "image_strided": {"shape": (9, 8)},
    "image_fixed": {"shape": (9, 8), "summary": 2},
    "spatial_temporal": {"shape": (5, 3, 3), "multiplier": 1, "block": 2},
    "radial": {"shape": (11, 2, 2)},
}
# Every preset, with options that make it do something at short lengths.
# Options that fit short sequences; presets that are not listed run with their defaults.
SMALLER = {
    "all": {},
    "local": {"local_attn_ctx": 24},
    "strided": {"local_attn_ctx": 16},
    "fixed": {"local_attn_ctx": 32, "num_verts": 4, "blocksize": 4},
    "sparse_transformer_strided": {"stride": 16},
    "sparse_transformer_fixed": {"stride": 24, "summary": 4},
    "sliding_window": {"window": 40},
    "chunked": {"chunk": 50},
    "dilated": {"window": 8, "dilation": 7},
    "longformer": {"window": 24, "global_tokens": 5, "causal": False},
    "bigbird": {"block": 8, "random_blocks": 2, "causal": False},
    "streaming": {"window": 24, "sinks": 4},
    "block_diffusion": {"n": 64, "block_size": 12},
    "draft_blocks": {"total_seq_len": 70, "block_size": 8, "stride": 11},
    "prefix_lm": {"prefix": 40},
    "neighborhood": {"shape": (12, 13), "kernel": 5, "causal": (True, False)},
    "sliding_tile": {"shape": (4, 5, 6), "kernel": (1, 3, 3), "tile": 2, "offset": 0},
    "windows": {"shape": (12, 13), "size": 5, "shift": 2, "offset": 3},
    "axial": {"shape": (5, 6, 7)},
    "image_strided": {"shape": (16, 10)},
    "image_fixed": {"shape": (16, 10), "summary": 3},
    "spatial_temporal": {"shape": (6, 5, 5), "multiplier": 1, "block": 8},
    "radial": {"shape": (17, 3, 4)},
}
SMALL = SMALLER | {name: needed for name, needed in NEEDED.items() if name not in SMALLER}
BOTH_WAYS = {"bidirectional", "prefix_lm", "block_diffusion", "draft_blocks"} | {
    "neighborhood",
    "sliding_tile",
    "windows",
    "axial",
}
BOTH_WAYS |= {"spatial_temporal", "radial"}
OF_THEIR_OWN = {"bigbird", "logsparse", "spatial_temporal", "radial"}  # which have a rule that no other case has
# One preset for each way to leave natural order: permuted, also after a window; gathered keys; gathered queries, too.
CHAINS = ["strided", "sparse_transformer_strided", "sparse_transformer_fixed", "longformer"]
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def _presets():
    # Pairwise: each preset meets both lengths, both dtypes, small options and its default ones. The core meets each
    # once, in so many blocks that some are left out. Grids meet that alone. Interpreted kernels take turns, as a case
    # takes seconds; all of them meet all rules that presets are made of.
    for number, (name, options) in enumerate(SMALL.items()):
        dtypes = ("float32", "bfloat16") if number % 2 else ("bfloat16", "float32")
        mask = sl.preset(name, **options)
        heads = (4, 2) if isinstance(mask, tuple) else (2, 1)
        left_out = "" if name in OF_THEIR_OWN else ("pallas_tpu", "triton")[number // 2 % 2]
        options = {"heads": heads, "batch": 1, "fwd": (32, 64), "left_out": left_out}
        yield Case(f"{name}-129-{dtypes[0]}", mask, 129, dtype=dtypes[0], **options)
        if "shape" not in NEEDED[name]:
            default = sl.preset(name, **NEEDED[name])
            yield Case(f"{name}-default-300-{dtypes[1]}", default, 300, dtype=dtypes[1], heads=heads, core=False)


def _chains():
    # Pairwise, too: each chain answers to every length, grouping of heads and dtype, and so does each of these to the
    # others. The longest has few heads: the oracle's time grows with them and with the square of the length.
    groups, dtypes = [*HEADS.values()], ("float32", "bfloat16", "float16")
    for i, (name, core) in enumerate(zip(CHAINS, (1000, 128, 1, 127), strict=True)):
        mask = sl.preset(name, **SMALL[name])
        for j, length in enumerate((1, 127, 128, 129)):
            options = {"heads": groups[(i + j) % 3], "dtype": dtypes[(i + 2 * j + 2) % 3]}
            yield Case(f"{name}-chain-{length}", mask, length, split=True, core=length in (core, 129), **options)
        yield Case(f"{name}-chain-1000", mask, 1000, split=True, core=core == 1000, batch=1, heads=(2, 1))


def _random(*shape, density=0.3):
    return np.random.default_rng(3).random(shape) < density


def _documents(batch, *lengths):
    """Packed documents that end elsewhere in each batch entry and on each side, then padding; ids are not sorted."""
    sides = []
    for length in lengths:
        ends = [[length * share // (10 + 2 * b) for share in (3, 4, 9)] for b in range(batch)]
        ids = np.array([7, 0, 3, -1], np.int32)
        sides.append(np.stack([ids[np.searchsorted(end, np.arange(length), side="right")] for end in ends]))
    return sides[0], sides[-1]


def _prefixes(*lengths):
    """Order ids of prefix-LM: for each length that of a prefix, in a row of its own."""
    return np.maximum(np.arange(lengths[0], dtype=np.int32), np.array(lengths[1:], np.int32)[:, None] - 1)


def _levels(batch, *lengths):
    """Order ids of a tree of prefixes in levels: unsorted, with ties, negative and extreme ones."""
    ids = np.array([-(2**31), -9, 0, 4, 4, 2**31 - 1], np.int32)
    return tuple(ids[np.random.default_rng(length).integers(0, len(ids), (batch, length))] for length in lengths)


def _features():
    causal, window = sl.Causal(), sl.Causal() & sl.Window(40)
    fixed, strided = (sl.preset(name, **SMALL[name]) for name in ("sparse_transformer_fixed", "strided"))
    several = sl.preset("fixed", **SMALL["fixed"])
    longformer = sl.preset("longformer", **SMALL["longformer"])
    holes = (sl.Causal() & sl.Columns(50, 20)) | sl.Prefix(70).T & sl.Empty()  # queries 0 to 19 see nothing
    mod = sl.MaskMod(lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0))
    yield Case("long-chain", sl.preset("sparse_transformer_strided", stride=64), 2048, heads=(1, 1), batch=1)
    yield Case("documents-chain", fixed, 300, segments=_documents(2, 300), split=True, fwd=(32, 32), sinks=True)
    yield Case("documents-residues", strided, 300, segments=_documents(2, 300), split=True, fwd=(32, 32))
    yield Case("documents-many", sl.Full(), 160, segments=_documents(3, 160), batch=3, fwd=(32, 32))
    yield Case("documents-pair", window | sl.Prefix(9), 129, 300, segments=_documents(2, 129, 300), fwd=(32, 64))
    drafts = sl.preset("draft_blocks", total_seq_len=128, block_size=8, stride=16)
    yield Case("draft_blocks-anchors", drafts, 64, 192, fwd=(32, 32))
    yield Case("padding-only", causal, 129, segments=(np.full((2, 129), -1),) * 2)
    for name, ids in {
        "prefixes": _prefixes(300, 0, 170),
        "blocks": np.arange(600, dtype=np.int32).reshape(2, -1) // 24,
    }.items():
        yield Case(f"order-{name}", sl.Full(), 300, order_ids=(ids, ids), fwd=(32, 64), bwd=(64, 32))
    yield Case(
        "order-causal-MQA", sl.Full(), 129, order_ids=(_prefixes(129, 0, 0),) * 2, heads=(4, 1), dtype="bfloat16"
    )
    ids = np.where(np.arange(300) // 50 % 2, np.arange(300) // 50 * 50 + 49, np.arange(300)).astype(np.int32)
    spans = {"order_ids": (np.tile(ids, (2, 1)),) * 2, "segments": _documents(2, 300)}
    yield Case("order-spans", sl.Window(90, 40), 300, fwd=(32, 32), sinks=True, soft_cap=3.0, **spans)
    yield Case("order-levels-pair", window | sl.Prefix(99), 129, 300, order_ids=_levels(2, 129, 300), sinks=True)
    yield Case("order-levels-chain", strided, 300, order_ids=_levels(2, 300, 300), split=True, fwd=(32, 32))
    yield Case("order-run-time", jnp.asarray(_random(2, 64, 64)), 64, order_ids=_levels(2, 64, 64), dtype="float16")
    yield Case("empty", sl.Empty(), 129)
    yield Case("empty-sinks", sl.Empty(), 129, sinks=True, core=False)
    yield Case("empty-rows", holes, 300, core=False)
    yield Case("empty-rows-sinks", holes, 300, sinks=True)
    yield Case("heads-differ", several, 300, heads=(4, 2), split=True, core=False)
    yield Case("heads-differ-MQA", several, 129, heads=(8, 1), sinks=True, dtype="bfloat16")
    yield Case("heads-in-turn", (window, strided), 129, heads=(6, 3), split=True)
    yield Case("soft-cap-chain", fixed, 300, soft_cap=3.0, sinks=True, split=True, scale=0.5)
    yield Case("sinks", strided, 300, sinks=True, split=True)
    yield Case("sinks-bfloat16", window, 129, sinks=True, dtype="bfloat16", core=False)
    yield Case("large-logits", window, 129, scale=9.0)
    yield Case("value-size", fixed, 300, sizes=(16, 24), split=True)
    yield Case("value-size-1", window, 129, sizes=(5, 1), core=False)
    # Tiles do not divide these grids. Tokens lie before the second, behind it, and the third ends within it.
    near = [sl.Neighborhood(n, 5) for n in (11, 13, 19, 7)]
    yield Case("grid", sl.Grid((13, 19), near[1:3]), 247, split=True, fwd=(32, 64))
    shifted = sl.preset("windows", shape=(13, 19), size=8, shift=3)
    yield Case("grid-shifted", shifted, 247, heads=(4, 2), split=True, fwd=(32, 32))
    yield Case("grid-among-others", sl.Grid((11, 13), near[:2], 40) | sl.Global(40), 300, split=True, sinks=True)
    yield Case("grid-cut", sl.Grid((7, 7, 7), near[3]) & causal, 300, dtype="bfloat16", split=True, fwd=(32, 32))
    # Residue classes have 32 rows, too: in both passes, each key is in one block only. The scale keeps budgets small.
    diagonal, large = causal & (sl.BlockDiagonal(32) | sl.Strided(8)), {"heads": (2, 2), "sizes": (128, 72), "batch": 1}
    yield Case("large-heads", diagonal, 250, dtype="bfloat16", split=True, fwd=(32, 32), scale=0.02, **large)
    yield Case("cross-short-queries", causal | sl.Prefix(40), 127, 300)
    yield Case("cross-short-keys", sl.Window(20, 50), 300, 129, sizes=(16, 8))
    yield Case("cross-compressed", sl.Compressed(32, 16), 300, 17, segments=_documents(2, 300, 17))
    yield Case("cross-chain", longformer, 129, 300, split=True, fwd=(16, 32), sinks=True)
    yield Case("one-query", sl.Full(), 1, 300)
    yield Case("run-time-all-heads", jnp.asarray(_random(1, 64, 64)), 64, segments=_documents(2, 64))
    yield Case("run-time-heads", jnp.asarray(_random(2, 130, 100)), 130, 100, fwd=(16, 32), bwd=(32, 16), soft_cap=5.0)
    yield Case("run-time-sparse", jnp.asarray(np.kron(_random(9, 9), np.ones((16, 16), bool))), 144, fwd=(16, 16))
    yield Case("array-heads", tuple(sl.Array(x) for x in _random(2, 129, 129)), 129)
    near = np.arange(150)[:, None] + np.array([-70, -9, 0, 5])
    yield Case("graph", sl.from_csr(np.arange(0, 601, 4), np.clip(near, 0, 149).ravel()), 150)
    yield Case("mask-mod", mod, 300, fwd=(32, 32), core=False)
    yield Case("mask-mod-traceable", dataclasses.replace(mod, traceable=True), 300, fwd=(32, 32))
    yield Case("blocks", window, 300, fwd=(32, 64), bwd=(64, 16))
    yield Case("blocks-fwd", fixed, 300, fwd=(24, 40), split=True)
    yield Case("blocks-bwd", strided, 300, bwd=(40, 24), split=True)
    yield Case("blocks-larger-than-lengths", strided, 50, fwd=(256, 128), bwd=(64, 512))
    yield Case("bias-slopes", strided, 129, slopes=sl.alibi(2).slopes, split=True, dtype="bfloat16", core=False)
    yield Case(
        *("bias-table", (window, strided), 129),
        **{"table": (6, 40, 30), "heads": (6, 3), "soft_cap": 3.0, "sinks": True, "split": True, "core": False},
    )
    yield Case("bias-both", sl.Window(20, 50), 127, 300, table=(1, 9, 2), slopes=(0.1, -0.2), core=False)
    swin, table = sl.preset("windows", shape=(10, 15), size=4), (2, (5, 29), (10, 15))
    yield Case("bias-grid", swin, 150, heads=(2, 2), batch=1, grid_table=table, split=True, core=False)
    yield Case("one-batch-one-head", window, 129, heads=(1, 1), batch=1)


CASES = [*_features(), *_chains(), *_presets()]


def _computes_bias(name: str, case: Case) -> bool:
    if name == "pallas_tpu" and case.grid_table is not None:  # it counts distances by tokens
        return False
    has_table = case.table is not None or case.grid_table is not None
    rows = [OPERANDS["bias_table"]] * has_table + [OPERANDS["bias_slopes"]] * (case.slopes is not None)
    return bool(rows) and all(name in (row.backends or ()) for row in rows)


CALLS = [
    (name, case)
    for case in CASES
    for name in IMPLEMENTATIONS
    if (case.core and name != case.left_out) or name in COMPILED or _computes_bias(name, case)
]
