"""Derivatives of the op's gradients, in both modes, against differences of the float64 oracle's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.tools.oracle import DenseAttention
from tests.ops.cases import SMALL, candidates, compiled

T = 70
RNG = np.random.default_rng(0)
BLOCKS = sl.FwdParams(q_blocksize=16, kv_blocksize=16)
IDS = np.repeat([[4, 4, 0, 0, 0, 2, -1], [1, 1, 1, 1, 3, 3, 3]], 10, axis=1)
HOLES = np.tril(RNG.random((T, T)) < 0.3) & (np.arange(T) % 9 != 4)[:, None]  # some queries see nothing
CHOSEN = RNG.integers(-1, 5, (2, T, 2, 2))
BLOCKED = sl.Selection(CHOSEN, block=16)
CASES = {
    "chain": {
        "mask": candidates(sl.preset("sparse_transformer_fixed", **SMALL["sparse_transformer_fixed"]), T, T, BLOCKS)[
            -1
        ],
        "segment_ids": IDS,
        "sinks": RNG.normal(size=4),
        "logits_soft_cap": 2.0,
        "table": RNG.normal(size=(4, 20)),  # a bias by distance
    },
    "heads differ, tables": {
        "mask": (sl.Array(HOLES), sl.Causal() & sl.Strided(8)),
        "fwd_params": BLOCKS,
        "table": RNG.normal(size=(1, 9)),
    },
    "selection": {"mask": sl.Causal(), "selection": BLOCKED, "segment_ids": IDS, "sinks": RNG.normal(size=4)},
    "run-time mask": {"mask": jnp.asarray(HOLES), "sinks": RNG.normal(size=4), "fwd_params": BLOCKS},
}


def allowed(mask, segment_ids=None, selection=None, **_):
    masks = mask.masks if isinstance(mask, sl.Plan) else sl.as_masks(mask)
    pairs = np.tile([one.dense(T) for one in masks], (4 // len(masks), 1, 1))[None]
    if segment_ids is not None:
        pairs = pairs & ((segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, :, None] >= 0))[:, None]
    if selection is not None:
        blocks = (CHOSEN[..., None] == np.arange(5)).any(-2).swapaxes(1, 2)  # [B, K, T, blocks]
        pairs = pairs & blocks.repeat(2, axis=1).repeat(16, axis=3)[..., :T]
    return pairs


@pytest.mark.parametrize(
    ("implementation", "name"),
    [*(("xla", name) for name in CASES), ("reference", "chain"), ("reference", "run-time mask")],
)
def test_second_derivatives(implementation, name):
    options = dict(CASES[name])
    pairs, mask = allowed(**options), options.pop("mask")
    learned = {which: options.pop(which) for which in ("sinks", "table") if which in options}
    shapes = {"query": (2, T, 4, 8), "key": (2, T, 2, 8), "value": (2, T, 2, 4)}
    rng = np.random.default_rng(1)
    x = {which: rng.normal(size=shape) for which, shape in shapes.items()} | learned
    pull = {"dout": rng.normal(size=(2, T, 4, 4)), "dlse": rng.normal(size=(2, T, 4))}
    along = {which: rng.normal(size=array.shape) for which, array in x.items()}

    def right(step, **others):
        moved = {which: x[which] + step * along[which] for which in x}
        soft_cap = options.get("logits_soft_cap")
        fixed = pull | others | {"scale": 0.5, "soft_cap": soft_cap, "center": 8}
        return DenseAttention(**moved, **fixed, allowed=pairs).answers

    def op(x):
        x = dict(x)
        arrays = [x.pop(which) for which in shapes]
        if "table" in x:
            x["bias"] = sl.DistanceBias(x.pop("table"), center=8)
        return sl.block_sparse_attention(
            *arrays, mask, scale=0.5, return_lse=True, implementation=implementation, **x, **options
        )

    def gradients(x, pull):
        return jax.vjp(op, x)[1]((pull["dout"], pull["dlse"]))[0]

    @compiled
    def forward_and_reverse(x, pull, along):
        forward = jax.jvp(gradients, (x, pull), (along, pull))[1]
        return forward, jax.vjp(gradients, x, pull)[1](along)

    with jax.enable_x64(True):
        forward, (back, back_pull) = forward_and_reverse(*jax.tree.map(jnp.asarray, (x, pull, along)))
    with np.errstate(invalid="ignore"):
        slopes = {key: (high - right(-1e-5)[key]) / 2e-5 for key, high in right(1e-5).items()}
    now = right(0)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for which in x:
        key = {"query": "dq", "key": "dk", "value": "dv"}.get(which, f"d{which}")
        close(back[which], slopes[key])  # the Hessian is symmetric
        close(forward[which], slopes[key] + now[key])  # the gradient is linear in what is pulled back
    live = np.isfinite(now["lse"])
    close(back_pull["dout"], slopes["out"])
    close(back_pull["dlse"], np.where(live, slopes["lse"], 0))


def test_huge_logits():
    """Where one key has all of a query's weight, gradients are linear in cotangents, and all derivatives are finite."""
    scale, shapes = 3e7, ((1, T, 2, 8), (1, T, 1, 8), (1, T, 1, 4), (1, T, 2, 4))
    x, along = ([jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes] for _ in range(2))

    @functools.partial(compiled, static_argnames="implementation")
    def second(along, implementation):
        def gradients(q, k, v, dout):
            op = functools.partial(sl.block_sparse_attention, scale=scale, implementation=implementation)
            return jax.vjp(lambda *x: op(*x, sl.Window(30)), q, k, v)[1](dout)

        return jax.jvp(gradients, x, along)[1]

    assert all(map(np.isfinite, map(jnp.sum, second(along, "xla"))))
    of_dout = [*map(jnp.zeros_like, along[:3]), along[3]]
    for size, ours, right in zip((scale, scale, 1), second(of_dout, "xla"), second(of_dout, "reference"), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "triton"])
def test_where_there_are_none_the_reason_is_named(implementation):
    x = jnp.ones((1, 16, 1, 8))

    def loss(x, weight=1.0):
        out = sl.block_sparse_attention(x, x, x, sl.Causal(), implementation=implementation)
        return (weight * out**3).sum()

    def slope(weight):  # reaches the backward only, by its cotangent
        return jax.grad(loss)(x, weight).sum()

    for second in (jax.hessian(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        with pytest.raises(NotImplementedError, match=rf'{implementation} has first .* implementation="xla"'):
            jax.eval_shape(second, x)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.grad(slope), 1.0)


def test_memory_of_second_derivatives_follows_the_pattern():
    """No score outlives its pair of blocks, in either mode."""
    length = 2048
    q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

    def loss(q):
        return (sl.block_sparse_attention(q, q, q, sl.Window(63), implementation="xla") ** 3).sum()

    def second(q):
        slope = jax.grad(loss)
        return jax.grad(lambda q: (slope(q) ** 2).sum())(q), jax.jvp(slope, (q,), (q,))[1]

    used = compiled(second).lower(q).compile().memory_analysis().temp_size_in_bytes
    assert used < length * length // 2  # bytes; the scores alone take 4 T T
