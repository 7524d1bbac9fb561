"""The op on several devices: each computes its own batch entries and heads, and q, k, v and out are not exchanged.

The number of devices is fixed when JAX starts, so each kind of mesh has a process of its own: this file as a program.
"""

import dataclasses
import functools
import re
import sys
import traceback
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers.ops.custom_vjp import CHECKPOINT_NAMES
from sparse_layers.ops.implementations import IMPLEMENTATIONS
from sparse_layers.tools.oracle import DenseAttention, in_order, same_segment
from tests.ops.cases import COMPILER
from tests.ops.test_selections import selected_pairs
from tests.programs import ALL_CASES, on_devices

B, T, H = 4, 24, 8
CAUSAL, NEAR, FULL, FAR = sl.Causal(), sl.Causal() & sl.Window(5), sl.Full(), sl.Causal() & sl.Strided(4)
DATA, HEADS, BOTH = P("data"), P(None, None, "tensor"), P("data", None, "tensor")
ALL = P(None, None, ("data", "tensor"))
ALLOWED = np.random.default_rng(0).random((8, T, T)) < 0.4


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, the sharding of its arrays, and the sums of shared gradients that devices must exchange."""

    mask: Any
    spec: P  # of query
    heads: tuple[int, int] = (4, 4)
    keys: P | None = None  # of key and value, if not that of query
    extras: bool = False  # sinks and segment ids
    order: bool = False  # order ids
    bias: bool = False  # a table and slopes
    told: frozenset[str] = frozenset()
    implementation: str = "xla"
    named: bool = False  # whether the op is told the sharding of query
    chosen: int = 0  # how many heads of a selection there are, if there is one
    tokens: int = T
    dtype: str = "float32"


SUM = frozenset({"all-reduce"})
ANYTHING = SUM | {"all-gather", "all-to-all", "collective-permute"}
CASES = {
    "batch": Case(CAUSAL, DATA),
    "heads": Case(CAUSAL, HEADS),
    "batch and heads, sinks, segments": Case(CAUSAL, BOTH, (8, 4), extras=True, told=SUM),
    "two axes": Case((CAUSAL, NEAR), ALL, (16, 8)),
    "masks differ": Case((CAUSAL, NEAR, FULL, FAR), BOTH, (8, 8)),
    "masks are out of step, one key head each": Case((CAUSAL, NEAR), HEADS, (12, 2), keys=P(), told=SUM),
    "nothing": Case(sl.Empty(), BOTH),
    "MQA": Case((CAUSAL, FULL), BOTH, (4, 1), keys=DATA, told=SUM),
    "order ids": Case(FULL, BOTH, (8, 4), order=True),
    "order ids, MQA, segments": Case((CAUSAL, FULL), BOTH, (4, 1), keys=DATA, extras=True, order=True, told=SUM),
    "GQA, key heads straddle": Case((CAUSAL, FULL, NEAR), BOTH, (12, 3), keys=DATA, told=SUM, extras=True, bias=True),
    "run-time masks": Case(jnp.asarray(ALLOWED), BOTH, (8, 4)),
    "chosen alike": Case(CAUSAL, BOTH, (8, 4), chosen=1),
    "chosen by query head, masks differ": Case((CAUSAL, NEAR), BOTH, (8, 4), chosen=8),
    "chosen by key head, key heads straddle": Case(CAUSAL, BOTH, (12, 3), keys=DATA, told=SUM, extras=True, chosen=3),
    "reference": Case((CAUSAL, NEAR, FULL), BOTH, (12, 3), keys=DATA, told=SUM, bias=True, implementation="reference"),
    "triton": Case((CAUSAL, FULL, NEAR, NEAR), BOTH, (8, 4), implementation="triton"),
}


def arrays(heads, kv_heads, tokens=T, dtype="float32"):
    """Query, key, value and the cotangents of out and lse, which is in float32."""
    draw = np.random.default_rng(1).standard_normal
    shapes = [(B, tokens, n, H) for n in (heads, kv_heads, kv_heads, heads)] + [(B, tokens, heads)]
    return [jnp.asarray(draw(x).astype(dtype if len(x) == 4 else np.float32)) for x in shapes]


def gradients(attend, *args, pull):
    """Returns attend(*args) and its gradients."""
    results, pullback = jax.vjp(attend, *args)
    return results, pullback(pull)


def collectives(compiled):
    names = r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast)[-\w]*\("
    return set(re.findall(names, compiled.as_text()))


def on(mesh, x, spec):
    return None if x is None else jax.device_put(x, NamedSharding(mesh, spec))


def agree(mesh, program, args, specs, right=None, told=frozenset(), rtol=1e-4, atol=2e-5):
    """Checks that program(*args) on a mesh equals right(*args) on one device, or a list, with the least collectives."""
    want = right if isinstance(right, list) else jax.jit(right or program, compiler_options=COMPILER)(*args)
    placed = [jax.tree.map(lambda x, spec=spec: on(mesh, x, spec), x) for x, spec in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda *args: program(*args), compiler_options=COMPILER).lower(*placed).compile()
    actual = compiled(*placed)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
    assert collectives(compiled) <= told, f"{collectives(compiled)} instead of {set(told)}"
    return actual


def check_case(mesh, case):
    t, (q, k, v, *pull) = case.tokens, arrays(*case.heads, tokens=case.tokens, dtype=case.dtype)
    sinks = jnp.linspace(-1, 1, case.heads[0]) if case.extras else None
    ids = np.sort(np.random.default_rng(0).integers(-1, 3, (B, t)), axis=1) if case.extras else None
    mask = case.mask if isinstance(case.mask, jax.Array) else None
    heads = ALLOWED if mask is not None else np.stack([each.dense(t) for each in sl.as_masks(case.mask)])
    allowed = np.tile(heads, (case.heads[0] // len(heads), 1, 1))
    if ids is not None:
        allowed = allowed & same_segment(ids, ids)
    order = np.random.default_rng(3).integers(0, 9, (B, t), np.int32) if case.order else None
    if order is not None:
        allowed = allowed & in_order(order, order)
    chosen = None
    if case.chosen:
        blocks = np.random.default_rng(2).integers(-1, 2, (B, -(-t // 16), case.chosen, 1))
        chosen = sl.Selection(blocks, block=16, granularity=16)
        allowed = allowed & selected_pairs(blocks, 16, 16, case.heads[0], (t, t))
    n = case.heads[0]
    table, constants = (jnp.sin(jnp.arange(9.0 * n)).reshape(n, 9), sl.alibi(n).slopes) if case.bias else (None, None)
    right = DenseAttention(q, k, v, allowed, *pull, sinks=sinks, table=table, center=5, slopes=constants).answers
    right["lse"] = np.where(np.isfinite(right["lse"]), right["lse"], 0)

    def program(q, k, v, sinks, table, ids, order, mask, chosen, *pull):
        def attend(q, k, v, sinks, table):
            options = {"segment_ids": ids, "order_ids": order}
            options |= {"sinks": sinks, "implementation": case.implementation, "return_lse": True}
            options["selection"] = chosen
            options["bias"] = None if table is None else sl.DistanceBias(table, 5, constants)
            options["query_sharding"] = case.spec if case.named else None
            return sl.block_sparse_attention(q, k, v, case.mask if mask is None else mask, **options)

        (out, lse), slopes = gradients(attend, q, k, v, sinks, table, pull=tuple(pull))
        return out, jnp.where(jnp.isfinite(lse), lse, 0), slopes

    batch, _, heads = (*case.spec, None, None)[:3]
    keys = case.spec if case.keys is None else case.keys
    masks = P(heads) if mask is not None and mask.ndim == 3 else P()
    by_head = P(batch, None, {case.heads[0]: heads, case.heads[1]: (*keys, *[None] * 3)[2]}.get(case.chosen))
    specs = [case.spec, keys, keys, P(heads), P(heads), P(batch), P(batch), masks, by_head, case.spec, case.spec]
    args = [q, k, v, sinks, table, ids, order, mask, chosen, *pull]
    off = {} if case.dtype == "float32" else {"rtol": 0.01, "atol": 0.03}
    out, lse, slopes = agree(mesh, program, args, specs, [*right.values()], case.told, **off)
    for x, spec in ((out, case.spec), (lse, case.spec), *zip(slopes, specs[:3], strict=False)):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), x.sharding


# --- inside of other transformations ---------------------------------------------------------------------------------


def attend(q, k, v, mask=(CAUSAL, NEAR), implementation="xla", **options):
    return sl.block_sparse_attention(q, k, v, mask, implementation=implementation, **options)


def check_vmap(mesh):
    # JAX 0.10 gathers what `jax.vmap` maps over an axis of type Explicit.
    old = jax.__version_info__ < (0, 11) and AxisType.Explicit in mesh.axis_types
    check_transformed(mesh, jax.vmap, told=frozenset({"all-gather"} if old else ()))
    check_transformed(mesh, jax.vmap, (P(None, *BOTH),) * 4, lambda x: jnp.stack([x, x / 2]))


def check_transformed(mesh, transform, specs=(BOTH,) * 4, change=lambda x: x, right=None, told=frozenset()):
    args = [change(x) for x in arrays(4, 4)[:4]]
    by_reference = functools.partial(attend, implementation="reference")
    program = functools.partial(_sloped, transform(attend))
    agree(mesh, program, args, specs, functools.partial(_sloped, right or transform(by_reference)), told)


def _sloped(function, q, k, v, pull):
    return gradients(function, q, k, v, pull=pull)


def repeated(function):
    """Layers under `jax.lax.scan`, recomputed except for what is saved by name."""
    saved = jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES))
    return lambda q, k, v: jax.lax.scan(lambda x, _: (saved(x, k, v), None), q, None, length=2)[0]


def check_manual(mesh):
    """Inside `jax.shard_map` of the caller, the plan is that of the local heads, here with equal masks."""
    right = functools.partial(_sloped, functools.partial(attend, mask=NEAR))
    over_heads = [HEADS, P(), P(), HEADS]  # the one key head is on all devices
    for specs, kv_heads, name in (([BOTH] * 4, 4, "xla"), (over_heads, 1, "triton")):
        alike = functools.partial(attend, mask=NEAR, implementation=name)
        mapped = jax.shard_map(alike, mesh=mesh, in_specs=tuple(specs[:3]), out_specs=specs[0])
        agree(mesh, functools.partial(_sloped, mapped), arrays(4, kv_heads)[:4], specs, right, SUM)
    part = jax.shard_map(attend, mesh=mesh, in_specs=(DATA,) * 3, out_specs=DATA, axis_names={"data"})
    check_transformed(mesh, lambda _: part, right=attend, told=ANYTHING)  # the other axis is left to JAX


def check_second_derivative(mesh):
    q, k, v, pull, _ = arrays(8, 8)

    def forward_and_reverse(q, implementation):
        slope = jax.grad(lambda q: (attend(q, k, v, implementation=implementation) ** 2).sum())
        forward = jax.vmap(lambda along: jax.jvp(slope, (q,), (along,))[1])(jnp.stack([pull, -pull]))  # as jacfwd does
        return forward, jax.grad(lambda q: jnp.vdot(slope(q), pull))(q)

    want = jax.jit(forward_and_reverse, static_argnums=1)(
        q, "reference"
    )  # of one device's program, in this process of eight
    with jax.set_mesh(mesh):
        actual = jax.jit(forward_and_reverse, static_argnums=1)(on(mesh, q, BOTH), "xla")
    for ours, theirs in zip(jax.tree.leaves((actual, actual[1])), jax.tree.leaves((want, want[0][0])), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)  # the Hessian is symmetric


def check_disabled_jit(mesh):
    args = arrays(4, 4)[:4]
    want = _sloped(attend, *args)
    with jax.set_mesh(mesh), jax.disable_jit():
        actual = _sloped(attend, *(on(mesh, x, BOTH) for x in args))
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def check_names(mesh):
    q, k, v, *_ = (on(mesh, x, BOTH) for x in arrays(8, 8)[:3])
    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(lambda *args: jax.vjp(attend, *args))(q, k, v))
    assert all(name in text for name in CHECKPOINT_NAMES)


def check_attention_fn(mesh):
    check_transformed(mesh, lambda _: sl.make_attention_fn((CAUSAL, NEAR), seq_len=T, recompute=True), right=attend)


def check_layer(mesh):
    options: dict[str, Any] = {"use_sinks": True, "relative_bias": sl.LearnedBias(3, 3)}
    layer = sl.SparseSelfAttention(4, 16, pattern=(CAUSAL, NEAR), seq_len=T, **options, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, 16)), jnp.float32)
    step = jax.grad(lambda x, state: (nnx.merge(definition, state)(x) ** 2).sum(), (0, 1))
    agree(mesh, step, [x, state], [DATA, P()], told=SUM)


def check_model(mesh):
    """A whole model with context parallelism moves no more than a window."""
    options: dict[str, Any] = {"scan_layers": True, "remat": True, "dropout_rate": 0.1, "tie_embeddings": True}
    options |= {"patterns": NEAR, "seq_len": T, "positions": "rope", "rngs": nnx.Rngs(0, dropout=1)}
    model = sl.SparseTransformer(9, 4, 16, 2, **options)
    definition, params, keys = nnx.split(model, nnx.Param, ...)
    tokens, ids = jnp.arange(B * T).reshape(B, T) % 9, jnp.arange(B * T).reshape(B, T) % T // 10

    @jax.grad
    def step(params, keys, tokens, ids):
        model = nnx.merge(definition, params, jax.tree.map(jnp.copy, keys))
        return (model(tokens, segment_ids=ids) ** 2).mean()

    specs = [P(), P(), P("data", "tensor"), P("data", "tensor")]
    agree(mesh, step, [params, keys, tokens, ids], specs, told=SUM | {"collective-permute"})


def check_key_heads(mesh):
    """An implementation that JAX differentiates gets the key heads of its query heads, too."""
    program, right = (functools.partial(attend, mask=CAUSAL, implementation=name) for name in ("cudnn", "xla"))
    if AxisType.Auto in mesh.axis_types:
        program = functools.partial(program, query_sharding=HEADS)
    specs = [HEADS, P(), P(), HEADS]
    agree(mesh, functools.partial(_sloped, program), arrays(8, 2)[:4], specs, functools.partial(_sloped, right), SUM)


def check_without_context(mesh):
    args = arrays(8, 8)[:3]
    found = jax.jit(attend)(*(on(mesh, x, BOTH) for x in args))
    np.testing.assert_allclose(found, attend(*args), atol=2e-5)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, BOTH), 4)


TRANSFORMED = {
    "scan, remat": functools.partial(check_transformed, transform=repeated),
    "vmap": check_vmap,
    "shard_map": check_manual,
    "names": check_names,
    "key heads": check_key_heads,
    "without context": check_without_context,
}


# --- what only one kind of mesh has ----------------------------------------------------------------------------------


def check_refusals(mesh):
    q, k, v, *_ = arrays(4, 4)
    ids = jnp.zeros((B, T), int)
    whole, size = "P('data', None, None, None)", P("data", None, None, "tensor")
    for message, specs in {
        f"query must be sharded as {whole}, or replicated, but its sharding is P('data', None, None, 'tensor'": [
            size,
            DATA,
            DATA,
        ],
        f"key must be sharded as {whole}, or replicated, but its sharding is P('tensor'": [DATA, P("tensor"), DATA],
        f"value must be sharded as {whole}": [DATA, DATA, BOTH],
        "segment_ids of queries must be sharded as P('data', None)": [DATA, DATA, DATA, P(None, "data")],
    }.items():
        specs = [*specs, DATA][:4]
        placed = [on(mesh, x, spec) for x, spec in zip((q, k, v, ids), specs, strict=True)]
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(message)):
            attend(*placed[:3], segment_ids=placed[3])


def check_names_of_axes(mesh):
    """A ``query_sharding`` is checked, and axes that it does not divide are left out."""
    q, k, v, *_ = arrays(4, 4)
    wrong = (
        P("batch"),
        P(None, P.UNCONSTRAINED),
        P("data", None, None, "tensor"),
        P(*[None] * 5),
        P(("data", "data")),
        ["data"],
    )
    for spec in wrong:
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(f"got {spec}")):
            attend(q, k, v, query_sharding=spec)
    told = functools.partial(attend, query_sharding=BOTH)
    check_indivisible(mesh, lambda f: told if f is attend else f)
    np.testing.assert_array_equal(told(q, k, v), attend(q, k, v))  # without a mesh it says nothing


def check_types(mesh):
    q, k, v, *_ = (on(mesh, x, BOTH) for x in arrays(8, 8)[:3])
    with jax.set_mesh(mesh):
        types = jax.eval_shape(functools.partial(attend, return_lse=True), q, k, v)
    assert [x.sharding.spec for x in types] == [P("data", None, "tensor", None), P("data", None, "tensor")]


def check_hopper(mesh):
    """The kernels for Hopper GPUs get local arrays; with fewer tokens they would compute no gradients."""
    from sparse_layers.ops.kernels.gpu import bridge
    from tests.ops.kernels import gluon_interpreter

    def call(kernel, *args):
        names.add(kernel.fn.__name__)
        return gluon_interpreter.call(kernel, *args)

    names: set[str] = set()
    bridge.call_gluon, bridge.gluon_unsupported = call, lambda: None
    check_case(mesh, Case(CAUSAL, BOTH, (4, 1), DATA, told=SUM, implementation="hopper", tokens=256, dtype="bfloat16"))
    assert names == {"hopper_forward_kernel", "hopper_backward_kernel"}


def check_mixed(_):
    """The op is mapped over axes of type Explicit; JAX's partitioner decides about other axes."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit, AxisType.Auto))
    check_transformed(mesh, lambda f: f, told=ANYTHING)


def check_indivisible(mesh, change=lambda f: f):
    """Axes that do not divide are left out: three batch entries, two heads."""

    def padded_slice(f):
        return lambda *args: jnp.pad(change(f)(*(x[:3, :, :2] for x in args)), [(0, 1), (0, 0), (0, 2), (0, 0)])

    check_transformed(mesh, padded_slice, told=ANYTHING)


# To save time, cases that both kinds of axes treat equally run on one kind.
ONLY = {
    AxisType.Explicit: {
        "refusals": check_refusals,
        "types": check_types,
        "mixed": check_mixed,
        "hopper": check_hopper,
        "layer": check_layer,
        "model": check_model,
        "replicated keys": functools.partial(
            check_transformed, transform=lambda f: f, specs=(BOTH, P(), P(), BOTH), told=ANYTHING
        ),
    },
    AxisType.Auto: {
        "indivisible": check_indivisible,
        "second derivative": check_second_derivative,
        "disabled jit": check_disabled_jit,
        "names of axes": check_names_of_axes,
        "attention_fn": check_attention_fn,
        "no batch": functools.partial(
            check_transformed, transform=lambda f: f, specs=(P(None, "tensor"),) * 4, change=lambda x: x[0]
        ),
    },
}


def main(kind):
    """Prints what fails on a mesh of 2 x 4 devices."""
    from sparse_layers.ops.kernels.gpu import bridge, hardware
    from tests.ops.kernels import triton_interpreter

    bridge.call_triton, hardware.local_device = triton_interpreter.call, lambda: hardware.Device(90, 232448, 132)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
    names = [name for i, name in enumerate(CASES) if ALL_CASES or i % 2 == (kind == AxisType.Auto)]  # they take turns
    checks = {name: functools.partial(check_case, case=CASES[name]) for name in names} | TRANSFORMED | ONLY[kind]
    IMPLEMENTATIONS["cudnn"] = types.SimpleNamespace(
        unsupported=lambda call, operands: None,
        attend=lambda call, operands: jax.nn.dot_product_attention(*operands[:3], is_causal=True),
    )
    if kind == AxisType.Auto:
        checks.pop("triton", None)  # interpreted kernels are callbacks, which JAX cannot call from a part of a program
        for name in (
            "triton",
            "two axes",
            "GQA, key heads straddle",
            "run-time masks",
            "chosen by query head, masks differ",
        ):
            checks[f"{name}, told"] = functools.partial(check_case, case=dataclasses.replace(CASES[name], named=True))
    for name, check in checks.items():
        try:
            check(mesh)
        except Exception:
            print(f"--- {name}\n{traceback.format_exc()}")


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_on_eight_devices(kind):
    assert on_devices(8, __file__, kind) == ""


@pytest.mark.usefixtures("all_passes")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_compiles_for_tpus(kind):
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'sparse-layers[tpu-aot]'")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.reshape(devices, (2, 2)), ("data", "tensor"), axis_types=(kind,) * 2)
    specs = [BOTH, DATA, DATA, BOTH]
    args = [
        jax.ShapeDtypeStruct((2, 256, heads, 128), "bfloat16", sharding=NamedSharding(mesh, spec))
        for heads, spec in zip((2, 1, 1, 2), specs, strict=True)
    ]
    kernel = functools.partial(attend, implementation="pallas_tpu")
    with jax.set_mesh(mesh):
        if kind == AxisType.Auto:
            with pytest.raises(ValueError, match="query_sharding must say how query lies"):
                jax.eval_shape(kernel, *args[:3])
            kernel = functools.partial(kernel, query_sharding=BOTH)
        compiled = jax.jit(functools.partial(_sloped, kernel)).trace(*args).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in compiled.as_text() and collectives(compiled) == SUM


if __name__ == "__main__":
    main(getattr(AxisType, sys.argv[1]))
