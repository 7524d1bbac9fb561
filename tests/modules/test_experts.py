"""Mixtures of experts: a loop over experts in float64, few and many tokens, devices, transformations, decoding."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.modules import experts_core
from sparse_layers.modules.activations import activate
from sparse_layers.modules.experts import Experts
from sparse_layers.modules.experts_core import ExpertParams, apply_experts
from sparse_layers.ops.kernels.experts_gpu import grouped_matmul
from tests.arrays import inputs, perturbed
from tests.programs import jaxprs, on_devices

E, K, F, H = 8, 2, 16, 12
OPTIONS = {
    "qwen": {},
    "softmax over all": {"normalize": False, "top_k": 3},
    "gpt-oss": {"activation": "clamped_swiglu", "router_bias": True, "top_k": 4},
    "no gate": {"activation": "gelu_tanh", "top_k": 1},
    "all experts": {"activation": jax.nn.tanh, "top_k": E, "normalize": False},
}


def mixture(**options):
    return sl.MixtureOfExperts(**{"num_experts": E, "top_k": K, "features": H} | options)


def expert_params(settings, bias, dtype, seed=0):
    shapes = [(E, F, H), (E, F, H) if settings.is_gated else None, (E, H, F)]
    shapes += [shape and (shape[0], shape[2]) if bias else None for shape in shapes]
    arrays = [shape and jnp.asarray(inputs(*shape, seed=seed + i), dtype) for i, shape in enumerate(shapes)]
    return ExpertParams(*arrays)


def loop(settings, params, x, weights, ids):
    """Every expert computes every token, and counts as often as it is selected."""
    out = jnp.zeros_like(x)
    for expert in range(E):
        in_kernel, gate_kernel, out_kernel, *biases = (None if p is None else p[expert] for p in params)
        in_bias, gate_bias, out_bias = (0 if bias is None else bias for bias in biases)
        gate = None if gate_kernel is None else x @ gate_kernel + gate_bias
        one = activate(settings.activation, x @ in_kernel + in_bias, gate) @ out_kernel + out_bias
        out += one * jnp.where(ids == expert, weights, 0).sum(-1, keepdims=True).astype(x.dtype)
    return out


def value_and_grads(function, params, x, weights, dout):
    """The output of a function of params, x and weights, and its gradients, in one program."""

    def loss(params, x, weights):
        out = function(params, x, weights)
        return (out * dout).astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(params, x, weights)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), (out, gradients))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 37], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_a_loop_in_float64(name, tokens, dtype):
    """The budget of an error is twice that of the same loop in this dtype, and the rounding of the largest number."""
    settings, bias = mixture(**OPTIONS[name]), name != "qwen"
    params, x = expert_params(settings, bias, dtype), jnp.asarray(inputs(tokens, F, seed=7), dtype)
    # Two experts are never selected, one by every token.
    logits = jnp.asarray(inputs(tokens, E, seed=8)) + jnp.array([0, 0, 9, 0, -9, 0, 0, -9])
    weights, ids = settings.route(logits)
    assert len({*np.asarray(ids).ravel()}) <= max(E - 2, settings.top_k)
    dout = jnp.asarray(inputs(tokens, F, seed=9), dtype)
    result = value_and_grads(lambda p, x, w: apply_experts(settings, p, x, w, ids, dtype), params, x, weights, dout)
    same_dtype = value_and_grads(lambda p, x, w: loop(settings, p, x, w, ids), params, x, weights, dout)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (params, x, weights, dout))
        exact = value_and_grads(lambda p, x, w: loop(settings, p, x, w, ids), *wide)

    def check(computed, known, rounded):
        budget = 2 * np.abs(rounded - known).max() + 2 * float(jnp.finfo(dtype).eps) * np.abs(known).max()
        assert np.abs(known).max() > 0.01 and np.abs(computed - known).max() <= budget

    jax.tree.map(check, result, exact, same_dtype)


@pytest.mark.parametrize("tokens", [1, 7], ids=["few tokens", "many tokens"])
def test_experts_of_other_devices_add_nothing_on_gpus(tokens, monkeypatch):
    """Not even NaN, which kernels leave in memory that they do not write; within `shard_map` over both axes."""
    monkeypatch.setattr(experts_core, "platform", lambda: "gpu")
    settings = mixture(**OPTIONS["gpt-oss"], expert_axis="expert", token_axes="data")
    params, x = expert_params(settings, True, jnp.float32), jnp.asarray(inputs(1, tokens, F, seed=7))
    weights, ids = settings.route(jnp.asarray(inputs(1, tokens, E, seed=8)))
    local, dout = ids < E // 2, jnp.asarray(inputs(1, tokens, F, seed=9))
    mesh = jax.make_mesh((1, 1), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def half(params, x, weights):  # the first of two devices
        first = jax.tree.map(lambda p: p[: E // 2], params)
        return apply_experts(dataclasses.replace(settings, num_experts=E // 2), first, x, weights, ids, jnp.float32)

    def known(params, x, weights):
        return loop(settings, params, x, jnp.where(local, weights, 0), ids)

    assert local.any() and not local.all()
    with jax.set_mesh(mesh):
        result = value_and_grads(half, params, x, weights, dout)
    compared = zip(
        *(jax.tree.leaves(y) for y in (result, value_and_grads(known, params, x, weights, dout))), strict=True
    )
    for a, b in compared:
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_experts_that_a_gpu_computes_without_kernels_warn_once(monkeypatch):
    """Once for each reason, and never elsewhere."""
    params, x = expert_params(mixture(), False, jnp.float32), jnp.ones((4, F))
    weights, ids = mixture().route(jnp.zeros((4, E)))

    def trace():
        jax.eval_shape(lambda x: apply_experts(mixture(), params, x, weights, ids, jnp.float32), x)

    monkeypatch.setattr(grouped_matmul, "unsupported", lambda *_: f"reason {id(params)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace()
        assert not caught
        monkeypatch.setattr(experts_core, "platform", lambda: "gpu")
        trace()
        trace()
    assert [str(x.message) for x in caught] == [
        f"experts run without their kernel, which is slow on gpu: reason {id(params)}"
    ]


def test_routing():
    logits = jnp.asarray(inputs(50, E))
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)[:, :K]
    selected = np.take_along_axis(p, order, axis=-1)
    for normalize, known in ((False, selected), (True, selected / selected.sum(-1, keepdims=True))):
        weights, ids = mixture(normalize=normalize).route(logits)
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_allclose(weights, known, rtol=1e-5)


def make(settings=None, **options):
    options = {"pattern": sl.Causal(), "seq_len": 24, "implementation": "reference"} | options
    return sl.SparseTransformerBlock(2, F, mlp=settings or mixture(), **options, rngs=nnx.Rngs(0))


def moved(module):
    nnx.update(module, perturbed(nnx.state(module, nnx.Param)))
    return module


@nnx.jit
def run(module, *arguments):
    return module(*arguments)


def test_the_block_adds_the_experts_and_the_shared_expert():
    settings = mixture(shared_features=10, router_bias=True)
    block, x = moved(make(settings, norm="rms")), inputs(1, 24, F)
    layer: Experts = block.experts
    assert layer.experts_in.kernel.shape == (E, F, H) and layer.experts_out.bias.shape == (E, F)
    assert layer.shared_in.kernel.shape == (F, 10)
    logits = x @ layer.router.kernel[...] + layer.router.bias[...]
    linears = [layer.experts_in, layer.experts_gate, layer.experts_out]
    params = ExpertParams(*(p.kernel[...] for p in linears), *(p.bias[...] for p in linears))
    known = loop(settings, params, x, *settings.route(logits))
    known += layer.shared_out(nnx.silu(layer.shared_gate(x)) * layer.shared_in(x))
    np.testing.assert_allclose(run(layer, x), known, atol=1e-4)
    # The layer is the block's MLP: without its output, attention remains.
    rest = nnx.jit(lambda block, x: x + block.attention(block.attention_norm(x)))(block, x)
    added = nnx.jit(lambda block, y: block.experts(block.mlp_norm(y)))(block, rest)
    np.testing.assert_allclose(run(block, x), rest + added, atol=1e-4)


def test_initial_kernels_have_the_variance_of_single_ones():
    block = make(mixture(features=256), num_layers=8)
    for kernel, variance in ((block.experts.experts_in.kernel, 1 / F), (block.experts.experts_out.kernel, 1 / 4096)):
        assert float(jnp.std(kernel[...])) == pytest.approx(variance**0.5, rel=0.05)
    first, second = block.experts.experts_in.kernel[:2]
    assert np.abs(first - second).max() > 0.01, "each expert draws its own"


def test_few_tokens_read_the_kernels_of_their_experts_only(monkeypatch):
    """Decoding of T tokens reads T * top_k kernels at most: the only operations on all kernels are gathers."""
    monkeypatch.setattr(experts_core, "platform", lambda: "cpu")

    def readers(tokens):
        params = expert_params(mixture(), False, jnp.float32)
        x = jnp.ones((tokens, F))
        weights, ids = mixture().route(jnp.zeros((tokens, E)))
        program = jax.make_jaxpr(lambda *x: apply_experts(mixture(), *x, jnp.float32))(params, x, weights, ids)
        equations = [equation for inner in jaxprs(program.jaxpr) for equation in inner.eqns]
        sizes = {(E, F, H), (E, H, F)}
        # An equation with a program of its own, as of jit, is counted by what it contains.
        return {
            equation.primitive.name
            for equation in equations
            if any(getattr(x.aval, "shape", ()) in sizes for x in equation.invars)
            and not any(hasattr(p, "eqns") or hasattr(p, "jaxpr") for p in jax.tree.leaves(equation.params))
        }

    assert readers(E // K - 1) == {"gather"}
    assert "ragged_dot_general" not in readers(E // K)  # gathered kernels have the shape of all of them
    assert readers(E // K + 1) == {"ragged_dot_general"}


def test_the_loss_is_that_of_switch_transformers():
    block, x = moved(make()), inputs(2, 24, F)

    @nnx.jit
    def losses(block, x, deterministic=None):
        block.experts.load_balancing_loss[...] = -1.0
        block(x, deterministic=deterministic)
        return block.experts.load_balancing_loss[...]

    y = run(block, x)  # sets the loss, too
    assert block.experts.load_balancing_loss[...] > 0 and y.shape == x.shape

    def known(x):
        rest = x + block.attention(block.attention_norm(x))
        logits = np.asarray(block.experts.router(block.mlp_norm(rest)), np.float64).reshape(-1, E)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        selected = np.argsort(-logits, axis=-1)[:, :K]
        f = np.bincount(selected.ravel(), minlength=E) / selected.size
        return E * (f * p.mean(0)).sum()

    assert float(losses(block, x)) == pytest.approx(known(x), rel=1e-4)
    block.eval()
    assert float(losses(block, x)) == -1
    block.train()

    @nnx.jit
    def without(block, x):
        block.experts.load_balancing_loss[...] = -1.0
        block(x, deterministic=True)
        return block.experts.load_balancing_loss[...]

    assert float(without(block, x)) == -1

    def total(block, x):
        block(x)
        return sum(jax.tree.leaves(nnx.state(block, sl.LoadBalancingLoss)))

    gradients = nnx.jit(nnx.grad(total))(block, x)
    assert np.abs(gradients["experts"]["router"]["kernel"][...]).max() > 1e-4


def model(seed=0, **options):
    sizes = {"patterns": ("causal", sl.Causal() & sl.Window(3)), "seq_len": 24, "positions": "rope"}
    options = sizes | {"implementation": "reference", "mlp": mixture(), "use_bias": False} | options
    return sl.SparseTransformer(11, 2, F, 4, **options, rngs=nnx.Rngs(seed))


def gradients_and_losses(model, tokens):
    def loss(model):
        logits = model(tokens)
        losses = jnp.stack([x.sum() for x in jax.tree.leaves(nnx.state(model, sl.LoadBalancingLoss))])
        return (jax.nn.log_softmax(logits)[..., 3]).mean() + losses.sum(), losses.sum()

    return nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model)


@pytest.mark.parametrize("options", [{"remat": True}, {"scan_layers": True}], ids=str)
def test_remat_and_scanned_layers_change_neither_values_nor_gradients(options):
    plain, tokens = moved(model()), np.arange(24)[None] % 11
    changed = model(1, **options)
    if changed.scan_layers:
        for number, stack in enumerate(changed.blocks):
            layers = [nnx.state(block, nnx.Param) for block in plain.blocks[number :: len(changed.blocks)]]
            nnx.update(stack, jax.tree.map(lambda *x: jnp.stack(x), *layers))
        rest = {name: getattr(plain, name) for name in ("token_embedding", "final_norm", "head")}
        for name, module in rest.items():
            nnx.update(getattr(changed, name), nnx.state(module, nnx.Param))
    else:
        nnx.update(changed, nnx.state(plain, nnx.Param))
    (value, losses), known = gradients_and_losses(plain, tokens)
    (new_value, new_losses), gradients = gradients_and_losses(changed, tokens)
    np.testing.assert_allclose([new_value, new_losses], [value, losses], rtol=1e-5)
    kernel = known["blocks"][2]["experts"]["experts_in"]["kernel"][...]
    new_kernel = gradients["blocks"][0 if changed.scan_layers else 2]["experts"]["experts_in"]["kernel"][...]
    np.testing.assert_allclose(new_kernel[1] if changed.scan_layers else new_kernel, kernel, atol=1e-5)
    assert np.abs(kernel).max() > 1e-3


def test_decoding_steps_are_the_rows_of_a_call():
    """Chunks of a prompt, steps of one token with donated caches, and sampling."""
    plain, tokens = moved(model(mlp=("swiglu", mixture(shared_features=4)))), np.arange(24)[None] % 11
    known = nnx.jit(lambda model, tokens: model(tokens, deterministic=True))(plain, tokens)
    graph, state = nnx.split(plain)

    def prefill(state, tokens):
        return nnx.merge(graph, state).prefill(tokens, chunk=5)

    def step(state, tokens, caches, position):
        return nnx.merge(graph, state).decode_step(tokens, caches, position)

    logits, caches = jax.jit(prefill)(state, tokens[:, :16])
    np.testing.assert_allclose(logits, known[:, 15], atol=1e-4)
    step = jax.jit(step, donate_argnums=2)
    for position in range(16, 24):
        logits, caches = step(state, tokens[:, position], caches, jnp.array([position]))
        np.testing.assert_allclose(logits, known[:, position], atol=1e-4)
    sampled = sl.generate(plain, tokens[:, :8], 6)
    assert sampled.shape == (1, 6)
    assert isinstance(plain.blocks[0].mlp, str) and plain.blocks[1].mlp == mixture(shared_features=4)


def test_linen_has_the_parameters_values_and_gradients_of_nnx():
    settings = mixture(shared_features=10, router_bias=True)
    block, x = moved(make(settings)), inputs(1, 24, F)
    options = {"pattern": sl.Causal(), "seq_len": 24, "implementation": "reference", "mlp": settings}
    other = linen.SparseTransformerBlock(2, F, **options)
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    shapes = jax.eval_shape(other.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)

    def loss(params):
        out, state = other.apply({"params": params}, x, mutable="losses")
        (value,) = state["losses"]["experts"]["load_balancing_loss"]
        return (out**2).sum() + value, (out, value)

    def nnx_loss(block):
        out = block(x)
        value = block.experts.load_balancing_loss[...]
        return (out**2).sum() + value, (out, value)

    gradients, result = jax.jit(jax.grad(loss, has_aux=True))(params)
    known_gradients, known = nnx.jit(nnx.grad(nnx_loss, has_aux=True))(block)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), result, known)
    known_gradients = nnx.to_pure_dict(known_gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), gradients, known_gradients)


def test_partitioned_initializers_name_the_axis_of_experts_first():
    settings = mixture(expert_axis="expert")
    mesh = jax.make_mesh((1, 1), ("expert", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        block = nnx.eval_shape(lambda: make(settings, use_bias=("mlp",), kernel_init=init))
    spec = nnx.get_partition_spec(nnx.state(block.experts.experts_in))["kernel"].get_value()
    assert spec == P("expert", None, "model")
    options = {"pattern": "causal", "seq_len": 24, "mlp": settings}
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    block = linen.SparseTransformerBlock(2, F, **options, kernel_init=init)
    shapes = jax.eval_shape(block.init, jax.random.key(0), jnp.ones((1, 24, F)))
    kernel = shapes["params"]["experts"]["experts_in"]["kernel"]
    assert kernel.names == ("expert", None, "model") and kernel.value.shape == (E, F, H)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import sparse_layers as sl
from tests.arrays import inputs
from tests.modules.test_experts import gradients_and_losses, mixture, model, moved

tokens = (np.arange(4 * 24).reshape(4, 24) * 7) % 11
plain = moved(model(mlp=mixture(shared_features=4, router_bias=True)))
known = gradients_and_losses(plain, tokens)
steps = sl.generate(plain, tokens[:, :8], 8)
for shape, token_axes in (((2, 4), ("data",)), ((1, 8), ())):
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(shape, ("data", "expert"), axis_types=(kind, kind))
    settings = mixture(shared_features=4, router_bias=True, expert_axis="expert", token_axes=token_axes)
    other = model(mlp=settings)
    nnx.update(other, nnx.state(plain, nnx.Param))

    def place(path, x):
        is_expert = any("experts_" in str(key) for key in path)
        return jax.device_put(x, NamedSharding(mesh, P("expert") if is_expert else P()))

    graph, state = nnx.split(other)
    other = nnx.merge(graph, jax.tree_util.tree_map_with_path(place, state))
    kernel = other.blocks[0].experts.experts_in.kernel
    assert kernel.sharding.shard_shape(kernel.shape)[0] == 8 // shape[1]
    with jax.set_mesh(mesh):
        sharded = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        result = gradients_and_losses(other, sharded)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), result, known)
        np.testing.assert_array_equal(sl.generate(other, sharded[:, :8], 8), steps)

        def compiled(model, tokens):
            return model(tokens, deterministic=True)
        text = nnx.jit(compiled).lower(other, sharded).compile().as_text()
        assert "all-reduce" in text
        assert not [line for line in text.splitlines() if "all-gather" in line and "[8,16,12]" in line]
mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
x = jax.random.normal(jax.random.key(0), (4, 24, 16))
known = plain.blocks[0].experts(x), plain.blocks[0].experts.load_balancing_loss[...]
with jax.set_mesh(mesh):  # experts that lie on one device are moved
    settings = mixture(shared_features=4, router_bias=True, expert_axis="expert", token_axes="data")
    experts = model(mlp=settings).blocks[0].experts
    nnx.update(experts, jax.device_put(nnx.state(plain.blocks[0].experts, nnx.Param), NamedSharding(mesh, P())))
    call = nnx.jit(lambda experts, x: (experts(x), experts.load_balancing_loss[...]))
    result = call(experts, jax.device_put(x, NamedSharding(mesh, P("data"))))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), result, known)
print("fine")
"""


def test_experts_over_eight_devices():
    """Values, gradients, losses and samples are those of one device, and no device gathers the experts of others."""
    assert on_devices(8, "-c", PROGRAM) == "fine\n"
