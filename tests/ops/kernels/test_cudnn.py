import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops import attention, implementations, traced_call
from sparse_layers.ops.kernels import cudnn
from sparse_layers.ops.kernels.call import Call
from sparse_layers.ops.kernels.gpu import hardware
from sparse_layers.ops.kernels.operands import Operands
from sparse_layers.ops.planning.params import BwdParams, FwdParams

T = 48
CAUSAL, DEFAULTS = sl.Causal(), (FwdParams(), BwdParams())


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Lets the package believe that JAX computes on an H200, and cuDNN's attention be XLA's."""
    gpu = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200", local_hardware_id=0)
    for module in (attention, implementations, cudnn, hardware):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [gpu])
    dense = jax.nn.dot_product_attention

    def in_xla(*args, implementation, **options):
        assert implementation == "cudnn"
        return dense(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_xla)


def arrays(t=T, heads=4, kv_heads=2, size=16, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    shapes = (t, heads), (t, kv_heads), (t, kv_heads)
    return [jnp.asarray(rng.normal(size=(2, *shape, size)).astype(dtype)) for shape in shapes]


def why_not(mask=CAUSAL, size=16, t=T, dtype="bfloat16", return_lse=False, params=DEFAULTS, **options):
    soft_cap = options.pop("soft_cap", None)
    plan = None if mask is None else sl.make_plan(mask, t)
    call = Call(plan, (64, 64), (64, 64), params, 1.0, soft_cap, return_lse)
    return cudnn.unsupported(call, Operands(*arrays(t, size=size, dtype=dtype), **options))


MASKS = [
    CAUSAL,
    sl.Full(),
    sl.Window(None, None),
    sl.Window(7),
    sl.Window(None),
    CAUSAL & sl.Window(0),
    sl.Window(7, 3) & CAUSAL,
    CAUSAL & CAUSAL & sl.Window(1000),
    sl.Full() & sl.Window(20, 5) & sl.Window(30, 0),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_that_it_knows_are_computed_as_they_are(mask, on_a_gpu):
    q, k, v = arrays()

    def gradients_and_out(implementation):
        def loss(q, k, v):
            out = sl.block_sparse_attention(q, k, v, mask, implementation=implementation, scale=0.3)
            return (out.astype(jnp.float32) ** 2).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    for ours, right in zip(
        jax.tree.leaves(gradients_and_out("cudnn")), jax.tree.leaves(gradients_and_out("reference")), strict=True
    ):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, right)), rtol=0.02, atol=0.06)


def test_it_has_first_derivatives_only(on_a_gpu):
    def loss(q):
        return sl.block_sparse_attention(q, *arrays()[1:], CAUSAL, implementation="cudnn").sum()

    for second in (jax.hessian(loss), jax.grad(lambda q: jax.grad(loss)(q).sum())):
        with pytest.raises(NotImplementedError, match="cudnn has first derivatives only"):
            jax.eval_shape(second, arrays()[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": CAUSAL & sl.Strided(4)}, "dense, causal and sliding-window masks only"),
        ({"mask": sl.Window(3, 3)}, "dense, causal and sliding-window masks only"),
        ({"mask": ~CAUSAL}, "dense, causal and sliding-window masks only"),
        ({"mask": (CAUSAL, sl.Window(3))}, "the same for all heads"),
        ({"mask": None}, "dense, causal and sliding-window masks only"),
        ({"t": 47}, "an even number, got 47"),
        ({"size": 12}, "a multiple of 8 up to 256, got 12"),
        ({"size": 264}, "a multiple of 8 up to 256, got 264"),
        ({"dtype": "float32"}, "query is float32"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"sinks": jnp.zeros(4)}, "sinks"),
        ({"soft_cap": 3.0}, "a soft cap"),
        ({"segments": (jnp.zeros((2, T), int),) * 2}, "segment ids"),
        (dict.fromkeys(("segments", "order_ids"), (jnp.zeros((2, T), int),) * 2), "order ids"),
        ({"params": (FwdParams(q_blocksize=64), BwdParams())}, "takes no settings"),
        ({"params": (FwdParams(), BwdParams(deterministic=True))}, "differ from run to run"),
    ],
)
def test_what_it_cannot_serve(options, reason, on_a_gpu):
    assert why_not() is None
    assert reason in why_not(**options)


def test_it_needs_a_gpu():
    if attention.platform() == "gpu":
        pytest.skip("this machine has one")
    assert why_not() == f"it needs an NVIDIA GPU, and JAX computes on {attention.platform()}"


@pytest.mark.parametrize(
    ("mask", "size", "name"),
    [
        (CAUSAL, 128, "cudnn"),
        (sl.Full(), 64, "cudnn"),
        (CAUSAL & sl.Window(399), 128, "triton"),
        (CAUSAL & sl.Window(400), 128, "cudnn"),
        (CAUSAL & sl.Window(1499), 64, "triton"),
        (CAUSAL & sl.Window(1500), 64, "cudnn"),
        (sl.preset("strided"), 64, "triton"),
        (CAUSAL, 80, "cudnn"),
    ],
)
def test_the_default_is_the_faster_one(mask, size, name, on_a_gpu, caplog):
    with caplog.at_level("DEBUG", logger="sparse_layers"):
        assert traced_call.trace_call(sl.make_plan(mask, 2048), head_size=size).implementation == name
        assert not caplog.records  # tools ask, and nothing runs
    picked = traced_call.trace_call(sl.make_plan(mask, 256)).implementation
    assert f"bfloat16, 32 heads of 128, 1 batch entry: {picked!r}" in sl.describe(mask, 256)


def test_vmap_in_every_way(on_a_gpu):
    q, k, v = arrays()
    many = jnp.stack([q, 2 * q, -q])

    def loss(implementation):
        def attend(q, k, v):
            return sl.block_sparse_attention(q, k, v, CAUSAL, implementation=implementation).astype(jnp.float32)

        return attend, jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))

    def ways(attend, gradients):
        yield jax.vmap(attend, (0, None, None))(many, k, v)
        yield jax.vmap(attend, (None, 1, None))(q, jnp.stack([k, -k], 1), v)
        yield jax.jit(jax.vmap(gradients, (0, None, None)))(many, k, v)
        yield jax.vmap(jax.vmap(gradients, (0, None, None)), (None, 0, None))(many, jnp.stack([k, -k]), v)
        yield jax.grad(lambda k: jax.vmap(attend, (0, None, None))(many, k, v).sum())(k)

    actual, right = (jax.tree.leaves(list(ways(*loss(name)))) for name in ("cudnn", "reference"))
    for ours, theirs in zip(actual, right, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, theirs)), rtol=0.03, atol=0.15)
