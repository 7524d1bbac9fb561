"""Linen layers: the parameters, numbers and refusals of the NNX ones, under Linen's and JAX's transformations."""

import dataclasses
import functools
import inspect
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn

import sparse_layers as sl
from sparse_layers import linen
from tests.arrays import inputs, perturbed
from tests.programs import count

T, F, N = 24, 16, 4
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
UNION = sl.Causal() & (sl.Window(3) | sl.Strided(5))
ARRAY = np.tril(np.random.default_rng(7).random((T, T)) < 0.5)
NSA = sl.NSA(block=16, count=3, pool_size=8, pool_stride=4, sliding=9)
IDS = jnp.asarray([[0] * 9 + [1] * 8 + [-1] * 7] * 2)
BF16 = {"dtype": jnp.bfloat16}
# Each program runs once, so most of the time goes to compiling: without optimisation, to about half as much.
once = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def attention(**options):
    return linen.SparseSelfAttention(N, **{"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options)


def block(**options):
    return linen.SparseTransformerBlock(N, F, **{"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options)


def nnx_attention(**options):
    options = {"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options
    return sl.SparseSelfAttention(N, F, rngs=nnx.Rngs(0), **options)


def nnx_block(**options):
    options = {"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options
    return sl.SparseTransformerBlock(N, F, rngs=nnx.Rngs(0), **options)


def native(**options):
    return linen.NativeSparseAttention(N, **{"pattern": NSA, "seq_len": 80} | options)


def nnx_native(**options):
    return sl.NativeSparseAttention(N, F, **{"pattern": NSA, "seq_len": 80, "rngs": nnx.Rngs(0)} | options)


def pure(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def made(module, *arguments):
    """Parameters away from their initial zeros and ones, without the program that would initialise them."""
    key = jax.random.key(0)
    shapes = jax.eval_shape(module.init, {"params": key, "dropout": key}, *(arguments or [inputs(2, T, F)]))
    assert list(shapes) == ["params"]
    return perturbed(shapes["params"])


def specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def value_and_grads(*functions):
    """Of each function of (params, x, ids): the output, and the gradients of params and x; all in one program."""

    @once
    def run(params, x, ids=None):
        results = []
        for function in functions:
            out, pull = jax.vjp(functools.partial(function, ids=ids), params, x)
            results.append((out, *pull(inputs(*out.shape, seed=3).astype(out.dtype))))
        return results

    return run


def apply_of(module, **options):
    return lambda params, x, ids=None: module.apply({"params": params}, x, segment_ids=ids, **options)


def apply_of_nnx(module, **options):
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(pure_params, x, ids=None):
        state = jax.tree.map(lambda leaf: leaf, params)  # a copy
        nnx.replace_by_pure_dict(state, pure_params)
        return nnx.merge(graphdef, state, rest, copy=True)(x, segment_ids=ids, **options)

    return apply


def assert_close(found, expected, tolerance):
    """Equal to ``tolerance`` times the greatest entry of each leaf, or 1."""

    def compare(a, b):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))

    jax.tree.map(compare, found, expected)


# --- the same numbers ------------------------------------------------------------------------------------------------

SELECTION = sl.Selection(np.random.default_rng(0).integers(-1, 2, (2, 2, N, 1)), block=16, granularity=16)
# An option that one of the two ignored would show, so that a case may set several.
CASES = {
    "attention, many options": (
        attention,
        nnx_attention,
        {
            "num_kv_heads": 2,
            "rope_theta": 100.0,
            "normalize_qk": True,
            "logits_soft_cap": 0.5,
            "scale": 0.9,
            "use_bias": False,
        },
    ),
    "attention, sizes, segments": (
        attention,
        nnx_attention,
        {"qkv_features": 24, "out_features": 10, "pattern": (sl.Window(4), "all"), "use_sinks": True},
    ),
    "attention, array": (
        attention,
        nnx_attention,
        {"pattern": ARRAY, "param_dtype": jnp.float16, "use_sinks": True, "implementation": "reference"},
    ),
    "attention, bfloat16": (attention, nnx_attention, {**BF16, "use_sinks": True, "rope_theta": 100.0}),
    "block, segments, selection": (block, nnx_block, {"remat": True}),
    "block, swiglu": (
        block,
        nnx_block,
        {
            "mlp": "swiglu",
            "norm": "rms",
            "use_bias": False,
            "mlp_features": 24,
            "num_kv_heads": 2,
            "rope": sl.Rope(100.0, (4, 6)),
            "normalize_qk": True,
            "use_sinks": True,
            "scale": 0.9,
        },
    ),
    "block, gelu_tanh": (
        block,
        nnx_block,
        {"mlp": "gelu_tanh", "norm_epsilon": 0.3, "qkv_features": 24, "logits_soft_cap": 0.5},
    ),
    "native, segments": (
        native,
        nnx_native,
        {"num_kv_heads": 2, "rope_theta": 100.0, "scale": 0.9, "out_features": 10, "use_bias": ("gate", "out")},
    ),
    "block, native": (block, nnx_block, {"pattern": NSA, "fwd_params": None, "norm": "rms", "norm_epsilon": 0.3}),
    "block, rms": (block, nnx_block, {"norm": "rms", "norm_epsilon": 0.3, "pattern": (sl.Window(4), ARRAY)}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_parameters_and_the_same_values_and_gradients_as_nnx(name):
    make, reference, options = CASES[name]
    module, other = make(**options), reference(**options)
    params = made(module)
    assert specs(params) == specs(pure(other))
    chosen = {"selection": SELECTION} if "selection" in name else {}
    run = value_and_grads(apply_of(module, **chosen), apply_of_nnx(other, **chosen))
    found, expected = run(params, inputs(2, T, F), IDS if "segments" in name else None)
    assert_close(found, expected, 2e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found))


def test_block_in_half_precision():
    # Flax's norms of NNX round their inputs and parameters to the dtype of the computation, those of Linen do not. With
    # numbers that need no rounding there is no difference left, but that NNX rounds the norms' gradients.
    module, other = block(**BF16, mlp="swiglu"), nnx_block(**BF16, mlp="swiglu")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), made(module))
    x = inputs(2, T, F).astype(jnp.bfloat16)
    found, expected = value_and_grads(apply_of(module), apply_of_nnx(other))(params, x)
    assert found[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0], expected[0])
    assert_close(found, expected, 0.01)


@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_initialisers_go_where_those_of_nnx_go(make, reference):
    names = ["kernel_init", "bias_init", "out_bias_init"] + ["out_kernel_init"] * (make is attention)
    options = {name: nn.initializers.constant(i + 1.0) for i, name in enumerate(names)}
    options |= {"use_sinks": True, "normalize_qk": True, "param_dtype": jnp.float16}
    found, expected = make(**options).init(jax.random.key(0), inputs(1, T, F))["params"], pure(reference(**options))
    if make is block:  # drawn at random, see the next test
        found, expected = found["attention"], expected["attention"]
        del found["out"]["kernel"], expected["out"]["kernel"]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert specs(found) == specs(expected)


@pytest.mark.parametrize("num_layers", [1, 8])
def test_output_projections_start_smaller_by_the_root_of_twice_the_depth(num_layers):
    module = linen.SparseTransformerBlock(N, 128, pattern="all", seq_len=T, num_layers=num_layers)
    params = once(module.init)(jax.random.key(0), inputs(1, T, 128))["params"]
    for out, fan_in in ((params["attention"]["out"], 128), (params["mlp_out"], 512)):
        assert float(jnp.std(out["kernel"])) == pytest.approx((2 * num_layers * fan_in) ** -0.5, rel=0.03)
    for name in (params["attention"]["query"], params["mlp_in"]):
        assert float(jnp.std(name["kernel"])) == pytest.approx(128**-0.5, rel=0.03)


@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_precision_is_that_of_the_four_projections(make, reference):
    def count(apply):
        program = str(jax.make_jaxpr(apply)(params, inputs(1, T, F)))
        return len(re.findall("Precision.HIGHEST, Precision.HIGHEST", program))

    params = made(make())
    kernels = count(apply_of(make()))  # attention's own
    assert count(apply_of(make(precision="highest"))) == kernels + 4
    assert count(apply_of_nnx(reference(precision="highest"))) == kernels + 4


# --- decoding --------------------------------------------------------------------------------------------------------

DECODING = {
    "attention, many options": (
        attention,
        {
            "pattern": (sl.Causal() & sl.Window(4), "strided:local_attn_ctx=5"),
            "num_kv_heads": 2,
            "rope_theta": 100.0,
            "normalize_qk": "rms_joint",
            "use_sinks": True,
            "logits_soft_cap": 0.5,
            "scale": 0.9,
            "out_features": 10,
        },
    ),
    "attention, index": (attention, {"pattern": "msa:block=16,count=1", "num_kv_heads": 1, "rope_theta": 100.0}),
    "block, selection": (block, {"pattern": "all"}),
    "block": (block, {"norm_placement": "sandwich", "normalize_qk": True, "mlp": "geglu", "dropout_rate": 0.5}),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding_equals_the_forward_pass_token_by_token(name):
    make, options = DECODING[name]
    module, x = make(**{"fwd_params": None} | options), inputs(2, T, F)
    params, lengths, rows = made(make(**options | {"dropout_rate": 0.0})), np.array([3, 14]), np.arange(2)
    prompts = np.where(np.arange(16)[:, None] < lengths[:, None, None], x[:, :16], np.nan)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, T, N, 1)))

    @once
    def run(params, x):
        def chosen(ids):
            return sl.Selection(ids, block=16) if "selection" in name else None

        def apply(*arguments, ids, **more):
            return module.apply({"params": params}, *arguments, selection=chosen(ids), **more)

        def step(cache, position):
            own = ids[rows, position][:, None]
            out, cache = apply(x[rows, position], cache, position, ids=own, method="decode_step")
            return cache, out

        off = {"deterministic": True} if make is block else {}
        first, cache = apply(prompts, lengths, ids=ids[:, :16], method="prefill")
        return apply(x, ids=ids, **off), first, jax.lax.scan(step, cache, lengths + np.arange(10)[:, None])[1]

    want, first, later = map(np.asarray, run(params, x))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(first[row, :length], want[row, :length], atol=1e-5)
        np.testing.assert_allclose(later[:, row], want[row, length : length + 10], atol=1e-5)


def test_parameters_may_be_made_by_a_prompt():
    module, arguments = attention(use_sinks=True), (jax.random.key(0), inputs(1, 5, F))
    by_prefill, by_call = (once(functools.partial(module.init, method=m))(*arguments) for m in ("prefill", None))
    jax.tree.map(np.testing.assert_array_equal, by_prefill, by_call)


class LM(nn.Module):
    """A language model of a user's own."""

    seq_len: int = T

    def setup(self):
        self.embed = nn.Embed(32, F)
        self.blocks = [block(seq_len=self.seq_len, num_layers=2) for _ in range(2)]

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)

    def prefill(self, tokens, lengths, chunk=T):
        caches, last = [None] * len(self.blocks), 0.0
        for start in range(0, tokens.shape[1], chunk):
            x = self.embed(tokens[:, start : start + chunk])
            so_far = jnp.minimum(lengths, start + x.shape[1])
            for i, block in enumerate(self.blocks):
                x, caches[i] = block.prefill(x, so_far, cache=caches[i], start=start)
            row = (so_far - 1 - start)[:, None, None]
            picked = jnp.take_along_axis(x, jnp.maximum(row, 0), axis=1)[:, 0]
            last = jnp.where(row[:, 0] < 0, last, picked)
        return self.embed.attend(last), caches

    def decode_step(self, tokens, caches, position):
        x, new = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.decode_step(x, cache, position)
            new.append(cache)
        return self.embed.attend(x), new


@dataclasses.dataclass(eq=False)
class Held:
    """A module beside its variables, as others hold it."""

    module: nn.Module
    variables: dict

    def prefill(self, *arguments):
        return self.module.apply(self.variables, *arguments, method="prefill")

    def decode_step(self, *arguments):
        return self.module.apply(self.variables, *arguments, method="decode_step")


def test_models_of_linen_are_sampled_from_and_compiled_once():
    from sparse_layers.modules.generate import _generate

    params, programs = made(LM(), jnp.ones((1, 4), int)), []
    for scale in (1, -0.5):
        variables = {"params": jax.tree.map(lambda leaf, scale=scale: scale * leaf, params)}
        text = sl.generate(LM().bind(variables), [[1, 2, 3], [5]], 6)
        held = sl.generate(Held(LM(), variables), [[1, 2, 3], [5]], 6)
        np.testing.assert_array_equal(held, text)
        np.testing.assert_array_equal(sl.generate(LM().bind(variables), [[1, 2, 3], [5]], 6, chunk=2), text)
        whole = jnp.array([[1, 2, 3, *text[0].tolist()]])
        logits = once(LM().apply)(variables, whole)
        np.testing.assert_array_equal(logits[0, 2:-1].argmax(-1), text[0])
        programs.append(_generate._cache_size())
    assert programs[0] == programs[1]
    with pytest.raises(ValueError, match=f"num_tokens={T} exceed the model's seq_len={T}"):
        sl.generate(LM().bind(variables), [[1]], T)


def test_native_sparse_attention_decodes_as_that_of_nnx():
    options = {"num_kv_heads": 2, "rope_theta": 100.0}
    module, other, x = native(**options), nnx_native(**options), inputs(2, 80, F)
    params = made(module, x)
    nnx.update(other, params)

    def decoded(prefill, step):
        out, cache = prefill(x[:, :70], np.array([3, 70]))
        return out, step(x[:, 70], cache, np.array([3, 70]))

    def method(name):
        return functools.partial(module.apply, {"params": params}, method=name)

    expected = nnx.jit(lambda layer: decoded(layer.prefill, layer.decode_step))(other)
    found = jax.jit(lambda: decoded(method("prefill"), method("decode_step")))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


def test_native_sparse_attention_has_the_attributes_of_nnx():
    fields = {f.name: f.default for f in dataclasses.fields(linen.NativeSparseAttention)}
    options = inspect.signature(sl.NativeSparseAttention.__init__).parameters
    assert fields.keys() - {"parent", "name"} == options.keys() - {"self", "in_features", "rngs"}
    same = fields.keys() & options.keys() - {"num_heads", "seq_len"}
    assert {name: fields[name] for name in same} == {name: options[name].default for name in same}
    assert native().plans == nnx_native().plans and native(pattern="nsa") == native(pattern=sl.NSA())
    with pytest.raises(TypeError, match="NativeSparseAttention: unknown argument 'use_sinks'"):
        block(pattern=NSA, use_sinks=True).init(jax.random.key(0), inputs(1, T, F))


# --- attributes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SparseSelfAttention", "SparseTransformerBlock"])
def test_attributes_and_their_defaults_are_those_of_nnx(name):
    fields = {f.name: f for f in dataclasses.fields(getattr(linen, name)) if f.name not in ("parent", "name")}
    options = inspect.signature(getattr(sl, name).__init__).parameters
    options = {n: p for n, p in options.items() if n != "self" and p.kind is not p.VAR_KEYWORD}
    # In Linen, an input brings its features, and keys are given to init and apply.
    assert options.keys() - fields.keys() == {"rngs"} | ({"in_features"} if name == "SparseSelfAttention" else set())
    for option in options.keys() & fields.keys():
        default = options[option].default
        assert fields[option].default == (dataclasses.MISSING if default is inspect.Parameter.empty else default)
    more = inspect.signature(nnx.MultiHeadAttention.__init__).parameters.keys() & fields.keys() - options.keys()
    assert more >= {"precision", "out_bias_init"}
    assert fields.keys() - options.keys() - more <= inspect.signature(sl.SparseSelfAttention.__init__).parameters.keys()
    documentation = getattr(linen, name).__doc__
    for field in fields:
        assert re.search(rf"^\s+(\w+, )*{field}(,\s+\w+)*: |^ .*\b{field}\b.*,$", documentation, re.M), field


def test_all_settings_of_the_block_reach_its_attention():
    options = {
        "pattern": (sl.Causal(), sl.Window(2)),
        "seq_len": T + 1,
        "qkv_features": 8,
        "num_kv_heads": 1,
        "head_dim": 2,
        "rope": sl.Rope(9.0),
        "rope_theta": 9.0,
        "use_sinks": True,
        "scale": 0.7,
        "logits_soft_cap": 3.0,
        "implementation": "reference",
        "fwd_params": BLOCKS,
        "bwd_params": sl.BwdParams(num_warps=2),
        "query_sharding": jax.sharding.PartitionSpec("data"),
        "selection": sl.MoBA(block=16, count=1),
        "normalize_qk": "rms",
        "norm_epsilon": 1e-3,
        "use_bias": ("query", "out"),
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.float16,
        "precision": "highest",
        "kernel_init": nn.initializers.ones,
        "bias_init": nn.initializers.ones,
        "out_kernel_init": nn.initializers.ones,
        "out_bias_init": nn.initializers.ones,
    }
    shared = {f.name for c in (attention, block) for f in dataclasses.fields(c())} - {"parent", "name"}
    shared &= {f.name for f in dataclasses.fields(attention())} & {f.name for f in dataclasses.fields(block())}
    assert options.keys() == shared - {"num_heads", "dropout_rate"}
    inner = block(**options).bind({}).attention
    assert {name: getattr(inner, name) for name in options} == options
    assert inner.num_heads == N and inner.dropout_rate == 0


@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_head_dim_is_that_of_the_nnx_layer(make, reference):
    shapes = jax.eval_shape(make(head_dim=6).init, jax.random.key(0), inputs(1, T, F))["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, pure(reference(head_dim=6)))


PATTERNS = {
    "name": "local:local_attn_ctx=4",
    "mask": UNION,
    "list": ["all", sl.Window(3)],
    "array": ARRAY,
    "array of heads": np.stack([ARRAY, ARRAY.T]),
    "list with an array": [ARRAY, "all"],
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_modules_are_values_with_any_pattern(name, make, reference):
    pattern = PATTERNS[name]
    module, equal = make(pattern=pattern), make(pattern=pattern.copy() if hasattr(pattern, "copy") else pattern)
    assert module == equal and hash(module) == hash(equal) and module == module.clone()
    assert module != make(pattern=sl.Causal() & sl.Strided(2))
    other = reference(pattern=pattern)
    assert module.pattern == (other if make is attention else other.attention).pattern
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def shapes(module, x):
        traces.append(1)
        return jnp.zeros(jax.tree.leaves(jax.eval_shape(module.init, jax.random.key(0), x))[0].shape)

    shapes(module, inputs(1, T, F)), shapes(equal, inputs(1, T, F))
    assert len(traces) == 1


def test_the_plan_is_that_of_nnx():
    pattern = ("all", "local:local_attn_ctx=4")
    assert attention(pattern=pattern).plan is nnx_attention(pattern=pattern).plan


def test_importing_the_package_does_not_import_the_linen_layers():
    code = "import sys, sparse_layers; print('sparse_layers.linen' in sys.modules, 'flax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


# --- transformations -------------------------------------------------------------------------------------------------


def test_any_leading_batch_dimensions_vmap_and_shorter_inputs():
    module, x = block(), inputs(2, 3, T, F)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 3, T)))

    @once
    def run(params, x, ids):
        apply = apply_of(module)
        one = apply(params, x[1, 2], ids[1, 2])
        mapped = jax.vmap(apply, in_axes=(None, 0, 0))(params, x[1], ids[1])
        return apply(params, x, ids), one, mapped, apply(params, x[1, 2, :17], ids[1, 2, :17])

    out, one, mapped, shorter = run(made(module), x, ids)
    assert out.shape == x.shape
    np.testing.assert_allclose(out[1, 2], one, atol=1e-5)
    np.testing.assert_allclose(out[1], mapped, atol=1e-5)
    np.testing.assert_allclose(out[1, 2, :17], shorter, atol=1e-5)


def test_remat_of_linen_with_a_policy_keeps_what_attention_names():
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names("sparse_attention_out", "sparse_attention_lse")
    options = {"pattern": [ARRAY, "all"], "seq_len": T, "fwd_params": BLOCKS, "use_sinks": True}
    kinds = [
        linen.SparseSelfAttention,
        nn.remat(linen.SparseSelfAttention, policy=policies.nothing_saveable),
        nn.remat(linen.SparseSelfAttention, policy=kept),
    ]
    applies, x = [apply_of(kind(N, **options)) for kind in kinds], inputs(2, T, F)
    params = made(kinds[0](N, **options))
    gradients = [jax.grad(lambda p, apply=apply: apply(p, x, IDS).sum()) for apply in applies]
    programs = [jax.make_jaxpr(gradient)(params).jaxpr for gradient in gradients]
    assert [count(program, "remat2") for program in programs] == [0, 1, 1]
    plain, nothing, named = (count(program, "dot_general") for program in programs)
    assert plain < named < nothing
    first, *others = value_and_grads(*applies)(params, x, IDS)
    for other in others:
        assert_close(other, first, 1e-6)


def test_remat_of_the_block_changes_neither_values_nor_gradients():
    x = inputs(1, T, F)
    options = {"deterministic": False, "rngs": {"dropout": jax.random.key(5)}}
    applies = [apply_of(block(remat=remat, dropout_rate=0.3), **options) for remat in (False, True)]
    params = made(block())
    assert ["remat" in str(jax.make_jaxpr(apply)(params, x)) for apply in applies] == [False, True]
    plain, remat = value_and_grads(*applies)(params, x)
    assert_close(remat, plain, 2e-6)


class Stack(nn.Module):
    """Three blocks as one, in a scan."""

    block: nn.Module
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, segment_ids=None):
        scanned = nn.scan(
            lambda layer, x, ids: (layer(x, segment_ids=ids, deterministic=self.deterministic), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast,),
            length=3,
        )
        return scanned(self.block, x, segment_ids)[0]


def test_scan_over_stacked_blocks_equals_the_loop():
    module = block(num_layers=3, pattern=[ARRAY, "all"], remat=True)
    params = made(Stack(module))
    assert specs(params["block"]) == jax.tree.map(lambda leaf: ((3, *leaf.shape), str(leaf.dtype)), pure(nnx_block()))

    def loop(params, x, ids):
        for i in range(3):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["block"])
            x = module.apply({"params": layer}, x, segment_ids=ids)
        return x

    scanned, expected = value_and_grads(apply_of(Stack(module)), loop)(params, inputs(2, T, F), IDS)
    assert_close(scanned, expected, 5e-6)


def test_scan_gives_each_block_parameters_and_dropout_of_its_own():
    module, x = Stack(block(num_layers=3, dropout_rate=0.3), deterministic=False), inputs(1, T, F)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = once(module.init)(keys, x)["params"]
    kernel = params["block"]["mlp_in"]["kernel"]
    assert float(jnp.abs(kernel[0] - kernel[1]).max()) > 0.1

    # With weights of zero, the blocks add their last biases of one, dropped (0) or kept (1 / 0.7).
    params = jax.tree.map(jnp.zeros_like, params)
    params["block"]["mlp_out"]["bias"] += 1
    out = once(apply_of(module, rngs={"dropout": keys["dropout"]}))(params, x) - x
    kept = np.asarray(out * 0.7)
    np.testing.assert_allclose(kept, kept.round(), atol=1e-5)
    assert set(kept.round().ravel()) == {0, 1, 2, 3}  # one mask for all blocks would give 0 and 3 only


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_acts_at_the_ends_of_both_branches_only():
    module, x = block(dropout_rate=0.5), inputs(1, T, F)
    params = made(block())
    assert specs(made(module.clone(deterministic=True))) == specs(params)
    # With a silent MLP the branch's end is seen by itself: each value is either dropped or doubled.
    silent = params | {"mlp_out": jax.tree.map(jnp.zeros_like, params["mlp_out"])}
    keys = [{"dropout": jax.random.key(seed)} for seed in (0, 1)]

    @once
    def run(params, silent):
        return {
            "none": apply_of(block())(params, x),
            "nothing to switch": apply_of(block(), deterministic=False)(params, x),
            "off": apply_of(module, deterministic=True)(params, x),
            "off by attribute": apply_of(module.clone(deterministic=True))(params, x),
            "on": apply_of(module, deterministic=False, rngs=keys[0])(params, x),
            "on by attribute": apply_of(module.clone(deterministic=False), rngs=keys[0])(params, x),
            "another key": apply_of(module, deterministic=False, rngs=keys[1])(params, x),
            "silent": apply_of(module, deterministic=False, rngs=keys[0])(silent, x) - x,
            "silent, none": apply_of(block())(silent, x) - x,
        }

    out = run(params, silent)
    for name in ("nothing to switch", "off", "off by attribute"):
        np.testing.assert_allclose(out[name], out["none"], atol=1e-6)
    np.testing.assert_allclose(out["on by attribute"], out["on"], atol=1e-6)
    assert float(jnp.abs(out["on"] - out["another key"]).max()) > 0.1
    kept = np.asarray(out["silent"] / out["silent, none"])
    np.testing.assert_allclose(np.where(kept > 1, kept - 2, kept), 0, atol=1e-3)
    assert 0.4 < (kept > 1).mean() < 0.6


def test_dropout_must_be_switched_and_needs_a_key():
    params, x = made(block()), inputs(1, T, F)
    with pytest.raises(ValueError, match="deterministic"):
        jax.eval_shape(apply_of(block(dropout_rate=0.5)), params, x)
    with pytest.raises(errors.InvalidRngError, match="dropout"):
        jax.eval_shape(apply_of(block(dropout_rate=0.5), deterministic=False), params, x)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [attention, block])
@pytest.mark.parametrize(
    "options, words",
    [
        ({"pattern": "stridde"}, ["stridde", "strided"]),
        ({"pattern": np.ones((T, T + 1), bool)}, [f"seq_len={T}", str((T, T + 1))]),
        ({"pattern": np.ones((T, T), np.float32)}, ["bool", "float32"]),
        ({"seq_len": 0}, ["seq_len", "0"]),
        ({"seq_len": True}, ["seq_len", "True"]),
        ({"rope_theta": 0.0}, ["rope_theta", "> 0", "0.0"]),
        ({"logits_soft_cap": -1.0}, ["logits_soft_cap", "> 0", "-1.0"]),
    ],
)
def test_a_bad_pattern_or_number_is_refused_at_construction(make, options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mlp": "tanh"}, ["mlp", "tanh", "swiglu"]),
        ({"norm": "batch"}, ["norm", "batch", "rms"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"dropout_rate": 1.0}, ["dropout_rate", "1.0"]),
    ],
)
def test_settings_of_the_block_are_refused_at_construction_as_in_nnx(options, words):
    messages = []
    for make in (block, nnx_block):
        with pytest.raises(ValueError) as error:
            make(**options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert all(word in messages[0] for word in words)


NEEDS_FEATURES = [
    ({"pattern": ("all", "local", sl.Window(2))}, ["3 entries", "num_heads=4", "divide"]),
    ({"pattern": np.ones((3, T, T), bool) & (np.arange(3)[:, None, None] > 1)}, ["3 entries", "num_heads=4"]),
    ({"rope_theta": 1e4, "qkv_features": 12}, ["rope", "2 must divide head_dim", "3"]),
    ({"num_kv_heads": 3}, ["num_heads", "3"]),
    ({"qkv_features": 18}, ["num_heads=4", "divide", "18"]),
    ({"head_dim": 3, "qkv_features": 8}, ["qkv_features=8", "head_dim=3", "12"]),
    ({"implementation": "cuda"}, ["implementation", "cuda", "xla"]),
]


@pytest.mark.parametrize("make", [attention, block])
@pytest.mark.parametrize("options, words", NEEDS_FEATURES)
def test_wrong_settings_are_refused_before_any_work(make, options, words):
    def work(*_):
        pytest.fail("a parameter was made")

    module = make().clone(**{"kernel_init": work} | options)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(module.init, jax.random.key(0), inputs(2, T, F))
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(ValueError) as again:
        jax.eval_shape(apply_of(module), made(make()), inputs(2, T, F))
    assert str(again.value) == str(error.value)


def test_unsupported_attention_options_are_refused():
    x = inputs(2, T, F)
    with pytest.raises(ValueError, match=r"dropout_rate.*0\.1.*residual"):
        attention(dropout_rate=0.1).init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match=r"decode=True.*prefill"):
        attention(decode=True).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="sow_weights must be False"):
        attention().init(jax.random.key(0), x, sow_weights=True)
    with pytest.raises(TypeError, match="seq_len"):
        linen.SparseSelfAttention(N, pattern="all")


@pytest.mark.parametrize("make", [attention, block])
def test_wrong_calls_are_refused(make):
    params, x = made(make()), inputs(2, T + 1, F)

    def apply(x, segment_ids=None):
        return jax.eval_shape(apply_of(make()), params, x, segment_ids)

    with pytest.raises(ValueError, match=f"{T + 1} tokens.*seq_len={T}"):
        apply(x)
    x = x[:, :T]
    with pytest.raises(ValueError, match=r"segment_ids .*\(2, 24\), got shape \(2, 1\)"):
        apply(x, segment_ids=jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"segment_ids.*integers.*float32"):
        apply(x, segment_ids=jnp.zeros((2, T)))
    with pytest.raises(ValueError, match=r"\[\.\.\., T, 16\], got \(16,\)"):
        apply(x[0, 0])
    with pytest.raises(ValueError, match=r"\[\.\.\., T, .*got \(\)"):
        apply(x[0, 0, 0])
    with pytest.raises((ValueError, errors.ScopeParamShapeError), match="16"):
        apply(x[..., :12])


def test_the_block_refuses_other_features_than_its_own():
    with pytest.raises(ValueError, match=r"\[\.\.\., T, 16\], got \(2, 24, 12\)"):
        block().init(jax.random.key(0), inputs(2, T, 12))
