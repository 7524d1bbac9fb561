"""The patterns of the GPU benchmarks, and the contenders that compute them: this package, cuDNN, FlexAttention."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.ops.recorded_calls import record_calls

BLOCK = 128  # rows that are drawn, and judged, together


# --- patterns --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """A pattern twice: as our mask, and as a rule on positions and a table, for the reference and FlexAttention."""

    mask: sl.Mask
    rule: Callable[[Any, Any, Any], Any]
    table: np.ndarray | None = None
    causal: bool = True
    cudnn: dict[str, Any] | None = None  # what jax.nn.dot_product_attention takes for it


def block_random(seq_len: int, a_row: int | None = None, density: float = 1.0) -> np.ndarray:
    """Map of 128-blocks: the diagonal and ``a_row`` others in each row; or that share of all causal blocks."""
    rng, rows = np.random.default_rng(0), -(-seq_len // BLOCK)
    blocks = np.eye(rows, dtype=bool)
    if a_row is None:
        below = np.argwhere(np.tri(rows, k=-1, dtype=bool))
        count = max(0, round(density * (rows * (rows + 1) // 2)) - rows)
        blocks[tuple(rng.permutation(below)[:count].T)] = True
        return blocks
    for row in range(rows):
        others = np.delete(np.arange(rows), row)
        blocks[row, rng.permutation(others)[:a_row]] = True
    return blocks


def window(keys: int) -> Pattern:
    """The last keys, the query's own among them."""
    return Pattern(
        sl.Causal() & sl.Window(keys - 1),
        lambda q, k, _: (k <= q) & (q - k < keys),
        cudnn={"is_causal": True, "local_window_size": (keys - 1, 0)},
    )


def patterns(seq_len: int) -> dict[str, Pattern]:
    """All patterns by name."""
    everywhere, documents = block_random(seq_len, a_row=12), np.arange(seq_len, dtype=np.int32) // 2048
    strided: Any = sl.preset("sparse_transformer_strided", stride=128)
    fixed: Any = sl.preset("sparse_transformer_fixed", stride=128, summary=8)
    longformer: Any = sl.preset("longformer", window=1024, global_tokens=64)
    bigbird: Any = sl.preset("bigbird")
    by_block, by_id = sl.Blocks(sl.Array(everywhere), BLOCK), sl.Causal() & sl.BlockDiagonal(2048)
    return {
        "causal": Pattern(sl.Causal(), lambda q, k, _: k <= q, cudnn={"is_causal": True}),
        "window": window(1024),
        "window 128": window(128),
        "random": Pattern(
            by_block, lambda q, k, blocks: blocks[q // 128, k // 128] == 1, everywhere.astype(np.int32), causal=False
        ),
        "strided": Pattern(strided, lambda q, k, _: (k <= q) & ((q - k < 128) | ((q - k) % 128 == 0))),
        "fixed": Pattern(fixed, lambda q, k, _: (k <= q) & ((q // 128 == k // 128) | (k % 128 >= 120))),
        "document": Pattern(by_id, lambda q, k, ids: (k <= q) & (ids[q] == ids[k]), documents),
        "longformer": Pattern(longformer, lambda q, k, _: (k <= q) & ((q - k < 1024) | (k < 64))),
        "bigbird": Pattern(bigbird, lambda q, k, _: bigbird(q, k)),  # the rule is not torch's
    }


def block_pattern(seq_len: int, density: float) -> Pattern:
    """Causal attention within a random share of the causal blocks."""
    blocks = block_random(seq_len, density=density)
    return Pattern(
        sl.Causal() & sl.Blocks(sl.Array(blocks), BLOCK),
        lambda q, k, table: (k <= q) & (table[q // 128, k // 128] == 1),
        blocks.astype(np.int32),
    )


# --- who computes it -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contender:
    """An implementation with its inputs: calls by direction, how to wait for a result, how to get at its sample.

    Backward calls of biases take queries: the gradient of out is then 0 for all others.
    """

    calls: dict[str, Callable[..., Any]]
    wait: Callable[[Any], Any]
    fetch: Callable[[Any], np.ndarray]
    # Calls of one direction in a loop on the device, without the time of the host: (direction, number) -> function.
    in_loop: Callable[[str, int], Callable[[], Any]] | None = None


def in_jax(attention: Callable, arrays: list[jax.Array], *operands: Any) -> Contender:
    """Returns a function of q, k, v and further operands, and its gradients."""
    q, k, v, dout = arrays
    functions = {"fwd": attention, "fwd+bwd": functools.partial(gradients, attention)}
    inputs = {"fwd": (q, k, v, *operands), "fwd+bwd": (q, k, v, dout, *operands)}

    def in_loop(direction: str, number: int) -> Callable[[], Any]:
        function = functions[direction]

        @jax.jit
        def loop(*args):
            def step(_, carry):  # the compiler must not compute it once for all
                return jax.lax.optimization_barrier((carry[0], function(*carry[0])))

            start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
            return jax.lax.fori_loop(0, number, step, (args, start))[1]

        return functools.partial(loop, *inputs[direction])

    return Contender(
        {
            direction: functools.partial(jax.jit(function), *inputs[direction])
            for direction, function in functions.items()
        },
        jax.block_until_ready,
        lambda x: np.asarray(x[-1][:, np.array([0, -1])]).astype(np.float64),
        in_loop,
    )


def gradients(attention: Callable, q, k, v, dout, *operands) -> tuple[jax.Array, ...]:
    """out, dq, dk and dv."""
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, *operands), q, k, v)
    return out, *pullback(dout)


def op(mask: Any, seq_len: int, implementation: str | None) -> Callable:
    """Our op under a plan, as a function of q, k, v, and perhaps segment ids and order ids."""
    plan = sl.make_plan(mask, seq_len, implementation=implementation)

    def attend(q, k, v, ids=None, order=None):
        options = {"segment_ids": ids, "order_ids": order, "implementation": implementation}
        return sl.block_sparse_attention(q, k, v, plan, **options)

    return attend


def ours(pattern: Pattern, arrays: list[jax.Array], implementation: str | None, segments: bool = False) -> Contender:
    """Our op; with ``segments``, the pattern's table is given as segment ids, and the mask is causal."""
    batch, seq_len = arrays[0].shape[:2]
    if not segments:
        return in_jax(op(pattern.mask, seq_len, implementation), arrays)
    ids = jnp.asarray(np.tile(np.asarray(pattern.table), (batch, 1)))
    return in_jax(op(sl.Causal(), seq_len, implementation), arrays, ids)


def default_choice(pattern: Pattern, arrays: list[jax.Array]) -> str:
    """The implementation that ``implementation=None`` runs."""
    with record_calls() as calls:
        jax.eval_shape(op(pattern.mask, arrays[0].shape[1], None), *arrays[:3])
    return calls[0]["implementation"]


def cudnn(pattern: Pattern, arrays: list[jax.Array]) -> Contender:
    """CuDNN's attention through jax.nn, which wants values as wide as keys: narrower ones are padded with zeros."""
    options: Any = {"implementation": "cudnn"} | (pattern.cudnn or {})
    size = arrays[2].shape[-1]
    padding = (0, 0), (0, 0), (0, 0), (0, arrays[1].shape[-1] - size)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, jnp.pad(v, padding), **options)[..., :size]

    return in_jax(attend, arrays)


def flash_attention_3(pattern: Pattern, arrays: list[jax.Array]) -> Contender:
    """FlashAttention-3 in JAX, of the package flash_attn3_jax."""
    module: Any = importlib.import_module("flash_attn3_jax")
    options: Any = {"window_size": (-1, -1)} | (pattern.cudnn or {})
    options["window_size"] = options.pop("local_window_size", options["window_size"])
    return in_jax(functools.partial(module.flash_mha, **options), arrays)


def ours_by_order(pattern: Pattern, arrays: list[jax.Array], implementation: str | None, packed: bool) -> Contender:
    """Our op with the order ids of the pattern's table [2, T], and if ``packed`` with its segment ids."""
    batch, seq_len = arrays[0].shape[:2]
    order, ids = (jnp.tile(x, (batch, 1)) for x in np.asarray(pattern.table))
    return in_jax(op(sl.Full(), seq_len, implementation), arrays, ids if packed else None, order)


def flex(
    pattern: Pattern, arrays: list[jax.Array], mask_each_call: bool = False, make_bias: Callable | None = None
) -> Contender:
    """FlexAttention, compiled for this pattern alone; with ``mask_each_call``, the time has that of its block mask.

    ``make_bias(device)`` returns a score_mod, and the tensors that it learns, which get gradients.
    """
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    torch.compiler.reset()  # or, after a few patterns, it silently computes dense attention
    on_gpu, seq_len, rule = torch.cuda.is_available(), arrays[0].shape[1], pattern.rule
    device = "cuda" if on_gpu else "cpu"
    # By DLPack: arrays stay on their device, in their dtype.
    q, k, v, dout = (torch.from_dlpack(x).transpose(1, 2).contiguous() for x in arrays)
    table = None if pattern.table is None else torch.from_numpy(pattern.table).to(device)

    def mask_mod(batch, head, q_index, k_index):
        return rule(q_index, k_index, table)

    # Triton may take minutes to compile it. Without, it makes arrays of all pairs.
    is_compiled = mask_each_call or seq_len > 32768
    create = torch.compile(module.create_block_mask, dynamic=False) if is_compiled else module.create_block_mask
    make_mask = functools.partial(create, mask_mod, None, None, seq_len, seq_len, device=device)
    first_mask = None if mask_each_call else make_mask()

    def block_mask():
        return make_mask() if mask_each_call else first_mask

    score_mod, learned = (None, ()) if make_bias is None else make_bias(device)
    # With learned tensors and heads of 128, its stages of the backward kernel need 1 KiB more than an H200 has.
    options = {"bwd_num_stages": 2} if learned else None
    grouped = functools.partial(
        module.flex_attention, score_mod=score_mod, enable_gqa=q.shape != k.shape, kernel_options=options
    )
    attention = torch.compile(grouped, dynamic=False, fullgraph=True)
    for x in (q, k, v, *learned):
        x.requires_grad_()

    def forward():
        with torch.no_grad():
            return attention(q, k, v, block_mask=block_mask())

    def forward_backward(rows=None):
        out, pulled = attention(q, k, v, block_mask=block_mask()), dout
        if rows is not None:
            pulled = torch.zeros_like(dout)
            pulled[:, :, rows] = dout[:, :, rows]
        return out, *torch.autograd.grad(out, (q, k, v, *learned), pulled)

    def fetch(x):
        x = x if x.dim() == 4 else x[None, :, :, None]  # a table [N, L]
        return x.detach()[-1, [0, -1]].transpose(0, 1).double().cpu().numpy()

    return Contender(
        {"fwd": forward, "fwd+bwd": forward_backward},
        lambda _: torch.cuda.synchronize() if on_gpu else None,
        fetch,
    )
