import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparse_layers as sl
from sparse_layers.ops import attention, implementations
from sparse_layers.ops.kernels import reference
from sparse_layers.ops.kernels.gpu import hardware
from sparse_layers.ops.kernels.gpu.hardware import local_device as true_device  # before a fixture replaces it
from sparse_layers.ops.planning import platforms
from sparse_layers.tools.oracle import DenseAttention
from tests.ops.cases import CALLS, CASES, IMPLEMENTATIONS, SMALL, candidates, check, expected
from tests.programs import USUAL, largest, sampled

FIXED = sl.preset("sparse_transformer_fixed", **SMALL["sparse_transformer_fixed"])
T, CHAIN = 70, candidates(FIXED, 70, fwd_params=sl.FwdParams(q_blocksize=16, kv_blocksize=16))[-1]


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("implementation", "case"), sampled(CALLS, 0.4), ids=str)
def test_values_and_gradients(implementation, case):
    check(case, case.call(implementation))


def test_every_preset_and_backend_is_in_the_table():
    assert SMALL.keys() == sl.presets().keys()
    # cuDNN's is called without the lse, on GPUs only; those for Hopper have tables of their own.
    assert {*IMPLEMENTATIONS, "cudnn", "hopper"} == set(sl.implementations()) == attention.TUNING.keys()
    assert len({case.name for case in CASES}) == len(CASES)


def test_an_interpreted_kernel_meets_every_preset():
    cases = (case for name, case in CALLS if name in ("pallas_tpu", "triton"))
    met = {sl.as_masks(case.mask) for case in cases if not isinstance(case.mask, jax.Array)}
    assert {sl.as_masks(sl.preset(name, **options)) for name, options in SMALL.items()} <= met


def test_the_table_leaves_natural_order_in_every_way():
    by_name = {case.name: case for case in CASES}

    def chain(name):
        case = by_name[name]
        return [(str(p.q_order), str(p.kv_order)) for p in candidates(case.mask, *case.shape)[-1].chains[0]]

    natural = "natural order"
    assert chain("strided-chain-129") == [("residue-major order, stride 16",) * 2]
    assert chain("sparse_transformer_strided-chain-129") == [(natural,) * 2, ("residue-major order, stride 16",) * 2]
    assert chain("sparse_transformer_fixed-chain-129")[1:] == [(natural, "gathered tokens 20 to 23 of every 24")]
    first = "tokens 0 to 4 only"
    assert chain("longformer-chain-129") == [(natural, natural), (natural, first), (first, natural)]
    long = by_name["long-chain"]
    assert len(sl.make_plan(long.mask, *long.shape).chains[0]) == 2  # the planner's own choice


def rules(mask):
    """The types of the masks that a mask is made of, its own among them."""
    if isinstance(mask, sl.Mask):
        yield type(mask)
    if dataclasses.is_dataclass(mask):
        mask = tuple(getattr(mask, field.name) for field in dataclasses.fields(mask))
    if isinstance(mask, tuple):
        yield from itertools.chain.from_iterable(map(rules, mask))


@pytest.mark.parametrize("kernels", ["pallas_tpu", "triton"])
def test_interpreted_kernels_meet_all_that_the_table_has(kernels):
    def features(case):
        (n, k), (h, hv), (t, s) = case.heads, case.sizes, case.shape
        run_time = isinstance(case.mask, jax.Array) and case.mask.ndim
        masks = () if run_time else sl.as_masks(case.mask)
        yield from (("mask", rule) for rule in rules(tuple(masks)))
        if case.split:
            chain = candidates(case.mask, t, s)[-1].chains[0]
            yield "orders", tuple((type(block_pass.q_order), type(block_pass.kv_order)) for block_pass in chain)
        ids = case.segments and (tuple(np.unique(case.segments[0])), t == s)
        yield from {
            "masks": (len(masks), run_time),
            "dtype": case.dtype,
            "heads": (n == k, k == 1),
            "sizes": np.sign(h - hv),
            "lengths": (np.sign(t - s), t == 1),
            "ragged": t % 128,
            "segments": ids,
            "order ids": case.order_ids is None,
            "sinks": case.sinks,
            "soft cap": case.soft_cap is None,
            "empty": not np.any(case.allowed()),
            "empty rows": bool(np.all(np.any(case.allowed(), (0, 1, 3)))),
            "blocks": (case.fwd is None, case.bwd is None),
        }.items()

    met = [case for name, case in CALLS if name == kernels]
    table, core = ({pair for case in cases for pair in features(case)} for cases in (CASES, met))
    assert table == core
    assert len(core) > 60


def test_the_budget_is_a_few_roundings():
    case = next(case for case in CASES if case.name == "sparse_transformer_strided-chain-129")
    right, _, budgets = expected(case)
    assert all(0 < budgets[name] < 1e-4 * np.abs(right[name]).max() for name in right)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_without_keys(implementation):
    q, k, v = arrays()
    mask = sl.Causal() & sl.Columns(50, 30)  # the first 30 queries see nothing

    def loss(q, k, v):
        out, lse = sl.block_sparse_attention(q, k, v, mask, implementation=implementation, return_lse=True)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    grads, (out, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    assert not out[:, :30].any() and jnp.all(lse[:, :30] == -jnp.inf)
    assert out[:, 30:].all() and jnp.isfinite(lse[:, 30:]).all()
    assert all(jnp.isfinite(g).all() for g in grads)
    assert not grads[0][:, :30].any() and not grads[1][:, :30].any() and grads[1][:, 30:50].all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_without_keys_stay_dead_whatever_their_cotangents(implementation):
    q, k, v = arrays()
    sees = np.arange(T) >= 30
    call = functools.partial(
        sl.block_sparse_attention,
        plan_or_mask=sl.Causal() & sl.Columns(50, 30),
        implementation=implementation,
        return_lse=True,
    )
    _, pullback = jax.vjp(call, q, k, v)
    fine = jnp.ones((2, T, 2, 16)), jnp.ones((2, T, 2))
    wild = tuple(jnp.where(sees.reshape(T, *[1] * (x.ndim - 2)), x, jnp.nan) for x in fine)
    close(pullback(wild), pullback(fine))


def test_float64_where_enabled():
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in arrays())
        call = functools.partial(sl.block_sparse_attention, return_lse=True)
        out, lse = call(q, k, v, CHAIN)
        options = {"allowed": FIXED.dense(T)[None, None], "dout": out, "dlse": lse, "scale": 0.25}
        right = DenseAttention(q, k, v, **options).answers
        grads = jax.vjp(lambda *x: call(*x, CHAIN), q, k, v)[1]((out, lse))
        for name, answer in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
            assert answer.dtype == jnp.float64
            np.testing.assert_allclose(answer, right[name], rtol=1e-11, atol=1e-11)


# --- ways to call ----------------------------------------------------------------------------------------------------


def arrays(*lead, t=T, heads=(2, 2), h=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(*(lead or (2,)), t, n, h) for n in (heads[0], heads[1], heads[1])]
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def loss(q, k, v, plan=CHAIN, **options):
    out, lse = sl.block_sparse_attention(q, k, v, plan, return_lse=True, **options)
    return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


def close(actual, wanted):
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, w, rtol=1e-5, atol=1e-5)


def test_without_a_batch():
    ids = jnp.arange(T) // 30 - (jnp.arange(T) > 60) * 9
    q, k, v = arrays(1)
    call = functools.partial(sl.block_sparse_attention, plan_or_mask=CHAIN, return_lse=True)
    for single, pair in ((ids, ids[None]), ((ids, ids), (ids[None], ids[None]))):
        out, lse = call(q[0], k[0], v[0], segment_ids=single)
        assert out.shape == (T, 2, 16) and lse.shape == (T, 2)
        close((out[None], lse[None]), call(q, k, v, segment_ids=pair))
    assert isinstance(sl.block_sparse_attention(q[0], k[0], v[0], CHAIN), jax.Array)


def test_every_form_of_a_mask_gives_the_same():
    q, k, v = arrays()
    dense = FIXED.dense(T)
    wanted = sl.block_sparse_attention(q, k, v, FIXED)
    forms = [CHAIN, sl.make_plan(FIXED, T), (FIXED, FIXED), [FIXED], np.array(dense), dense[None], sl.Array(dense)]
    forms += [np.stack([dense] * 2), (FIXED, np.array(dense)), *(jnp.asarray(x) for x in (dense, dense[None]))]
    forms += [jnp.stack([jnp.asarray(dense)] * 2), sl.MaskMod(lambda b, h, q, k: FIXED(q, k))]
    for form in forms:
        close(sl.block_sparse_attention(q, k, v, form), wanted)


def test_numpy_operands_and_segments():
    q, k, v = arrays()
    ids = np.repeat([[0, 1]], T // 2, axis=1).repeat(2, axis=0)
    close(
        sl.block_sparse_attention(*map(np.asarray, (q, k, v)), CHAIN, segment_ids=ids),
        sl.block_sparse_attention(q, k, v, FIXED & sl.BlockDiagonal(T // 2)),
    )


def test_vmap_equals_a_loop():
    q, k, v = arrays(3, 2)
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (3, 2, T)))
    sinks = jnp.asarray([0.5, -1.0])

    def gradients(q, k, v, ids, sinks):
        return jax.value_and_grad(lambda q, k, v, s: loss(q, k, v, segment_ids=ids, sinks=s), (0, 1, 2, 3))(
            q, k, v, sinks
        )

    mapped = jax.jit(jax.vmap(gradients, (0, 0, 0, 0, None)))(q, k, v, ids, sinks)
    one = jax.jit(gradients)
    for i in range(3):
        close(jax.tree.map(lambda x: x[i], mapped), one(q[i], k[i], v[i], ids[i], sinks))  # noqa: B023


def test_vmap_over_run_time_masks():
    q, k, v = arrays(3, 1, t=40)
    masks = jnp.asarray(np.random.default_rng(0).random((3, 40, 40)) < 0.4)
    gradients = jax.grad(lambda q, k, v, mask: loss(q, k, v, mask), (0, 1, 2))
    mapped = jax.jit(jax.vmap(gradients))(q, k, v, masks)
    for i in range(3):
        right = jax.grad(lambda *x: loss(*x, np.asarray(masks[i]), implementation="reference"), (0, 1, 2))  # noqa: B023
        close(jax.tree.map(lambda x: x[i], mapped), right(q[i], k[i], v[i]))  # noqa: B023


def test_checkpoint_and_scan():
    q, k, v = arrays(1)

    def layer(x, _):
        return x + sl.block_sparse_attention(x, k, v, CHAIN), None

    def looped(q):
        return jnp.sin(functools.reduce(lambda x, _: layer(x, None)[0], range(3), q)).sum()

    def scanned(q):
        return jnp.sin(jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0]).sum()

    wanted = jax.value_and_grad(looped)(q)
    close(jax.jit(jax.value_and_grad(scanned))(q), wanted)
    close(jax.value_and_grad(jax.checkpoint(looped))(q), wanted)


def test_no_batch_entries():
    empty = [x[:0] for x in arrays()]
    out, lse = sl.block_sparse_attention(*empty, CHAIN, return_lse=True)
    assert out.shape == (0, T, 2, 16) and lse.shape == (0, T, 2)
    ids = jnp.zeros((0, T), int)
    for options in ({}, {"segment_ids": ids}):
        found = jax.grad(functools.partial(loss, **options), (0, 1, 2))(*empty)
        assert [g.shape for g in found] == [x.shape for x in empty]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_promotion(dtype):
    q, k, v = arrays(dtype=dtype)
    ids, sinks = jnp.zeros((2, T), jnp.int8), jnp.ones(2)
    dynamic = jnp.asarray(FIXED.dense(T))
    with jax.numpy_dtype_promotion("strict"):
        for plan, implementation in itertools.product((CHAIN, dynamic), IMPLEMENTATIONS):
            call = functools.partial(
                sl.block_sparse_attention, plan_or_mask=plan, implementation=implementation, return_lse=True
            )

            def gradients(*x, call=call):
                answers, pullback = jax.vjp(
                    lambda *x: call(*x[:3], segment_ids=ids, logits_soft_cap=4.0, sinks=x[3]), *x
                )
                return pullback(answers)

            # Tracing promotes all there is to promote, also inside kernels.
            found = jax.eval_shape(gradients, q, k, v, sinks)
            assert [x.dtype for x in found] == [dtype, dtype, dtype, "float32"]


def test_shard_map_with_replicated_operands():
    # The batch is spread; the sinks are not, and get the summed gradient.
    q, k, v = arrays()
    sinks = jnp.asarray([0.5, -1.0])
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, same = jax.P("batch"), jax.P()

    def total(q, k, v, sinks):
        return jax.lax.psum(loss(q, k, v, sinks=sinks), "batch")

    mapped = jax.shard_map(total, mesh=mesh, in_specs=(spread, spread, spread, same), out_specs=same)
    gradients = jax.jit(jax.grad(mapped, (0, 1, 2, 3)))(q, k, v, sinks)
    close(gradients, jax.grad(lambda q, k, v, s: loss(q, k, v, sinks=s), (0, 1, 2, 3))(q, k, v, sinks))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about programs that a CPU exports for others")
@pytest.mark.parametrize("target", ["tpu", "cuda"])
def test_programs_for_other_platforms(target, monkeypatch):
    monkeypatch.setattr(hardware, "local_device", true_device)  # not the interpreter of tests
    q, k, v = (jax.ShapeDtypeStruct((3, 1, 256, 2, 128), "bfloat16") for _ in range(3))

    def program(implementation=None):
        def total(q, k, v):
            return sl.block_sparse_attention(q, k, v, sl.Window(63), implementation=implementation).sum()

        return jax.jit(jax.vmap(jax.grad(total)))

    platform = {"cuda": "gpu"}.get(target, target)
    for targets in ([target], ["cpu", target]):
        with pytest.raises(ValueError, match=f"implementation=None chose 'xla' for cpu, .* is lowered for {platform}"):
            jax.export.export(program(), platforms=targets)(q, k, v)
    with pytest.raises(ValueError, match=rf"would try .*'{platforms.implementation_order(platform)[0]}'.*: name one"):
        program().trace(q, k, v).lower(lowering_platforms=(target,))
    named = jax.export.export(program("xla"), platforms=[target, "cpu"])(q, k, v)
    assert "while" in named.mlir_module()
    # Where the mesh says what the program is for, that is what the choice is for.
    device = jax.sharding.AbstractDevice(device_kind="TPU v5e", num_cores=1, platform=target)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        if target == "cuda":
            slow = "'xla', which is slow on gpu: hopper: it needs an NVIDIA GPU at hand, .* cudnn: it needs"
            with pytest.warns(UserWarning, match=slow) as warned:
                jax.export.export(program(), platforms=[target])(q, k, v)
            assert warned[0].filename == __file__, "a warning points at who called the op"
        else:
            for name in (None, "pallas_tpu"):
                exported = jax.export.export(program(name), platforms=[target])(q, k, v)
                assert exported.mlir_module().count("tpu_custom_call") == 2, "compiled kernels, not interpreted ones"


def test_equal_masks_share_a_trace(monkeypatch):
    traces = itertools.count()

    class Counting:
        unsupported, backward = implementations.xla.unsupported, implementations.xla.backward

        @staticmethod
        def forward(call, operands):
            next(traces)
            return implementations.xla.forward(call, operands)

    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "counting", Counting)
    monkeypatch.setitem(attention.TUNING, "counting", attention.TUNING["xla"])
    q, k, v = arrays()

    def new_mask():
        return sl.Causal() & (sl.Window(5) | sl.Strided(7))

    for _ in range(3):
        sl.block_sparse_attention(q, k, v, new_mask(), implementation="counting", return_lse=True)
    assert next(traces) == 1
    step = jax.jit(jax.value_and_grad(functools.partial(loss, implementation="counting")), static_argnums=3)
    for _ in range(3):
        step(q, k, v, new_mask())
    assert next(traces) == 3


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        sl.preset("strided"),
        sl.preset("sparse_transformer_strided"),
        sl.preset("sparse_transformer_fixed"),
        (sl.preset("sliding_window", window=100), sl.preset("bigbird")),
        sl.MaskMod(lambda b, h, q, k: (q >= k) & (q - k < 100)),
    ],
    ids=["strided", "merged", "fixed", "heads differ", "tiles"],
)
def test_no_array_is_of_size_t_by_s(pattern):
    length = 4096
    q, k, v = arrays(1, t=length, h=8)
    ids = jnp.zeros((1, length), jnp.int32)
    grads = jax.grad(lambda *x: loss(*x, pattern, segment_ids=ids, implementation="xla"), (0, 1, 2))
    assert largest(grads, q, k, v) < length * length // 16


def test_the_search_finds_what_is_t_by_s():
    q, k, v = arrays(1, t=256)
    grads = jax.grad(lambda *x: loss(*x, sl.Causal(), implementation="reference"), (0, 1, 2))
    assert largest(grads, q, k, v) >= 256 * 256


def test_compiled_memory():
    length = 4096
    q, k, v = arrays(1, t=length, heads=(1, 1), h=8)
    plan = sl.make_plan(sl.preset("sparse_transformer_strided"), length)
    assert len(plan.chains[0]) == 2
    lowered = jax.jit(jax.grad(lambda *x: loss(*x, plan, implementation="xla"), (0, 1, 2))).lower(q, k, v)
    compiled = lowered.compile(USUAL)
    assert compiled.memory_analysis().temp_size_in_bytes < length * length // 2  # bytes; the scores alone take 4 T T


# --- errors ----------------------------------------------------------------------------------------------------------

Q, K, V = (jnp.zeros(shape) for shape in ((2, 12, 4, 8), (2, 16, 2, 8), (2, 16, 2, 6)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": Q[0, 0]}, ["query", "(4, 8)", "[B, T, N, H] or [T, N, H]"]),
        ({"key": K[0]}, ["key", "as many axes as query, 4", "(16, 2, 8)"]),
        ({"value": V[..., None]}, ["value", "(2, 16, 2, 6, 1)"]),
        ({"query": Q.astype(int)}, ["query", "int32", "float32, bfloat16, float16 or float64"]),
        ({"query": Q.astype(jnp.float8_e4m3fn)}, ["query", "float8_e4m3fn"]),
        ({"key": K.astype(jnp.bfloat16)}, ["key", "bfloat16", "dtype of query, float32"]),
        ({"value": V.astype(jnp.float16)}, ["value", "float16", "dtype of query, float32"]),
        ({"key": K[:, :0], "value": V[:, :0]}, ["key", "must not be empty", "(2, 0, 2, 8)"]),
        ({"query": Q[:, :, :0]}, ["query", "must not be empty", "(2, 12, 0, 8)"]),
        ({"key": K[:1]}, ["batch sizes", "(1, 16, 2, 8)"]),
        ({"value": V[:, :-1]}, ["key and value", "length and heads", "(2, 15, 2, 6)"]),
        ({"value": V[:, :, :1]}, ["key and value", "(2, 16, 1, 6)"]),
        ({"key": K[..., :4]}, ["query and key", "size H", "(2, 12, 4, 8)", "(2, 16, 2, 4)"]),
        ({"query": Q[:, :, :3]}, ["key heads must divide the query heads", "2 and 3"]),
        # Axes [B, heads, length, size], as of other libraries.
        (
            {"query": Q.swapaxes(1, 2), "key": jnp.zeros((2, 4, 16, 8)), "value": jnp.zeros((2, 4, 16, 8))},
            ["key heads must divide", "16 and 12", "axes are [B, length, heads, size]"],
        ),
        (
            {x: Q.swapaxes(1, 2) for x in ("query", "key", "value")} | {"plan_or_mask": sl.make_plan(sl.Causal(), 12)},
            ["the plan is for q_len 12 and kv_len 12", "T = 4 and S = 4", "[B, T, N, H]"],
        ),
        ({"plan_or_mask": sl.make_plan(sl.Causal(), 12)}, ["q_len 12 and kv_len 12", "T = 12 and S = 16"]),
        ({"plan_or_mask": (sl.Causal(), sl.Full(), sl.Empty())}, ["masks must divide", "3 masks and N = 4"]),
        ({"plan_or_mask": ()}, ["must not be empty"]),
        ({"plan_or_mask": np.ones((12, 15), bool)}, ["mask", "(12, 16)", "(12, 15)"]),
        ({"plan_or_mask": np.ones((3, 12, 16), bool)}, ["mask", "N = 4", "(3, 12, 16)"]),
        ({"plan_or_mask": np.ones((12, 16))}, ["mask", "bool", "float64"]),
        ({"plan_or_mask": jnp.ones((16, 12), bool)}, ["mask", "(12, 16)", "(16, 12)"]),
        ({"plan_or_mask": jnp.ones((2, 12, 16), bool)}, ["mask", "[N, T, S]", "(2, 12, 16)"]),
        ({"plan_or_mask": jnp.ones((2, 1, 12, 16), bool)}, ["mask", "(2, 1, 12, 16)"]),
        ({"plan_or_mask": jnp.ones((12, 16), jnp.int8)}, ["mask", "bool", "int8"]),
        ({"plan_or_mask": [np.ones((12, 15), bool)]}, ["mask", "(12, 16)", "(12, 15)"]),
        ({"plan_or_mask": sl.Array(np.ones((12, 15), bool))}, ["mask", "(12, 16)", "(12, 15)"]),
        ({"segment_ids": (np.full((2, 12), 2**31), np.zeros((2, 16), int))}, ["segment_ids of queries", "2147483648"]),
        ({"segment_ids": jnp.zeros((2, 12), int)}, ["segment_ids", "pair", "T = 12, S = 16"]),
        ({"segment_ids": (jnp.zeros((2, 12), int),) * 3}, ["segment_ids", "3 entries"]),
        ({"segment_ids": (jnp.zeros((2, 12), int),) * 2}, ["segment_ids of keys", "(2, 16)", "(2, 12)"]),
        ({"segment_ids": (jnp.zeros((2, 16), int),) * 2}, ["segment_ids of queries", "(2, 12)", "(2, 16)"]),
        ({"segment_ids": (jnp.zeros((2, 12)), jnp.zeros((2, 16)))}, ["segment_ids of queries", "integers", "float32"]),
        ({"scale": float("nan")}, ["scale", "finite", "nan"]),
        ({"scale": jnp.ones(())}, ["scale", "finite Python number"]),
        ({"scale": "1"}, ["scale", "'1'"]),
        ({"logits_soft_cap": 0.0}, ["logits_soft_cap", "> 0 or None", "0.0"]),
        ({"logits_soft_cap": -2}, ["logits_soft_cap", "-2"]),
        ({"logits_soft_cap": float("inf")}, ["logits_soft_cap", "inf"]),
        ({"sinks": jnp.zeros(2)}, ["sinks", "(4,)", "(2,)"]),
        ({"sinks": jnp.zeros((4, 1))}, ["sinks", "(4, 1)"]),
        ({"sinks": jnp.zeros(4, int)}, ["sinks", "floats", "int32"]),
        ({"fwd_params": sl.BwdParams()}, ["fwd_params", "FwdParams or None", "BwdParams("]),
        ({"bwd_params": (128, 128)}, ["bwd_params", "BwdParams or None", "(128, 128)"]),
        (
            {"plan_or_mask": sl.make_plan(sl.Causal(), 12, 16), "fwd_params": sl.FwdParams()},
            ["fwd_params and bwd_params belong to make_plan"],
        ),
        ({"implementation": "flash"}, ["implementation", "'flash'", *sl.implementations()]),
        ({"implementation": "XLA"}, ["implementation", "'XLA'"]),
    ],
)
def test_value_errors_name_argument_value_and_rule(changes, words):
    arguments = {"query": Q, "key": K, "value": V, "plan_or_mask": sl.Causal()} | changes
    with pytest.raises(ValueError) as error:
        sl.block_sparse_attention(**arguments)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize("mask", [None, b"strided", 3, sl.Causal, [None]], ids=repr)
def test_what_is_no_mask_is_a_type_error(mask):
    with pytest.raises(TypeError, match="mask must be a Mask"):
        sl.block_sparse_attention(Q, K, V, mask)


def test_a_named_implementation_runs_or_says_why_not(monkeypatch):
    monkeypatch.setattr(reference, "MAX_SCORES", 2 * 4 * 12 * 16)
    sl.block_sparse_attention(Q, K, V, sl.Causal(), implementation="reference")
    monkeypatch.setattr(reference, "MAX_SCORES", 2 * 4 * 12 * 16 - 1)
    with pytest.raises(NotImplementedError, match=r"reference: it holds the whole score matrix .*1\.54e\+03"):
        sl.block_sparse_attention(Q, K, V, sl.Causal(), implementation="reference")
    assert sl.block_sparse_attention(Q, K, V, sl.Causal()).shape == (2, 12, 4, 6)


def test_the_first_implementation_that_can_is_taken(monkeypatch):
    class Never:
        @staticmethod
        def unsupported(call, operands):
            return "it never does"

    for name in ("never", "neither"):
        monkeypatch.setitem(implementations.IMPLEMENTATIONS, name, Never)
        monkeypatch.setitem(attention.TUNING, name, attention.TUNING["xla"])
    monkeypatch.setitem(platforms.PREFERRED, jax.default_backend(), ("never",))
    assert sl.block_sparse_attention(Q, K, V, sl.Causal()).shape == (2, 12, 4, 6)
    monkeypatch.setattr(platforms, "FALLBACK", ("neither",))
    with pytest.raises(NotImplementedError, match="never: it never does; neither: it never does"):
        sl.block_sparse_attention(Q, K, V, sl.Causal())


def test_an_implementation_is_that_one(monkeypatch):
    # 'reference' must not reach the blocks, nor 'xla' the dense scores.
    q, k, v = arrays(t=9)
    for name, other in (("xla", reference), ("reference", implementations.xla)):
        with monkeypatch.context() as patch:
            patch.delattr(other, "forward")
            sl.block_sparse_attention(q, k, v, sl.Window(3), implementation=name)


def test_derivatives_of_a_table_are_finite_differences():
    with jax.enable_x64(True):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 20, 2, 4), "float64")

        def attend(table):
            bias = sl.DistanceBias(table, center=5)
            return sl.block_sparse_attention(q, k, v, sl.Window(8, 3), bias=bias, implementation="xla")

        table = jax.random.normal(jax.random.key(1), (2, 7), "float64")
        check_grads(attend, (table,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
