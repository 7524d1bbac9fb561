"""Biases by distance: the numbers of ALiBi and T5, the value, and the ways to call; the formula is in `cases.py`."""

import functools
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from tests.ops.cases import IMPLEMENTATIONS, candidates, compiled
from tests.ops.kernels import triton_interpreter
from tests.programs import USUAL, largest

T = 40
NEAR = sl.Window(20, 9)


def arrays():
    q, k, v, dout = (np.random.default_rng(i).normal(size=(2, T, 2, 8)).astype(np.float32) for i in range(4))
    return q, k, v, dout, np.random.default_rng(4).normal(size=(2, 13)).astype(np.float32)


def gradients(q, k, v, dout, table, mask: Any = NEAR, center=9, **options):
    """Returns out and the gradients of query and table."""

    def attend(q, table):
        return sl.block_sparse_attention(q, k, v, mask, bias=sl.DistanceBias(table, center), **options)

    out, pullback = jax.vjp(attend, q, table)
    return out, *pullback(dout)


def close(ours, right):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, right)


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 12, 32])
def test_slopes_are_those_of_the_papers_code(heads):
    def slopes(n):
        if math.log2(n).is_integer():
            first = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [first * first**i for i in range(n)]
        lower = 2 ** math.floor(math.log2(n))
        return slopes(lower) + slopes(2 * lower)[0::2][: n - lower]

    np.testing.assert_allclose(sl.alibi(heads).slopes, slopes(heads), rtol=1e-12)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 64), (20, 100), (4, 3)])
def test_buckets_are_those_of_t5(num_buckets, max_distance):
    """In integers: the k-th bucket beyond the e exact ones begins where (distance / e)^n >= (max_distance / e)^k."""

    def bucket(distance, count):
        exact, far = count // 2, count - count // 2
        if distance < exact:
            return distance
        powers = (k for k in range(far) if distance**far * exact**k >= max_distance**k * exact**far)
        return exact + max(powers)

    reach = 2 * max_distance
    numbers = jnp.arange(num_buckets, dtype=jnp.float32)[None]
    sides = {True: num_buckets // 2, False: num_buckets}
    for bidirectional, count in sides.items():
        bias = sl.t5_bias(numbers, bidirectional=bidirectional, max_distance=max_distance)
        table = np.asarray(bias.table[0]).astype(int)
        ours = table[np.clip(np.arange(-reach, reach + 1) + bias.center, 0, len(table) - 1)]
        behind = [count + bucket(d, count) if bidirectional else 0 for d in range(1, reach + 1)]
        assert ours.tolist() == [bucket(d, count) for d in range(reach, -1, -1)] + behind


def _t5_table(buckets):
    return sl.t5_bias(buckets, bidirectional=False, max_distance=4096).table


def _grid_table(table):
    return sl.grid_bias((64, 64), table).table


@pytest.mark.parametrize(("expand", "shape"), [(_t5_table, (1, 4)), (_grid_table, (1, 1, 1))])
def test_gradients_of_entries_of_many_distances_are_summed_in_float32(expand, shape):
    """In bfloat16, sums of ones would end at 256."""
    gradients = [
        jax.grad(lambda x: expand(x).astype(jnp.float32).sum())(jnp.ones(shape, d)) for d in ("bfloat16", "float32")
    ]
    assert gradients[0].dtype == jnp.bfloat16 and gradients[1].max() > 1000
    np.testing.assert_array_equal(gradients[0], gradients[1].astype(jnp.bfloat16))


def test_gradients_of_buckets_have_an_order():
    """On GPUs, a scatter adds in any order; buckets of -inf and NaN leave others as they are."""
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(lambda x: _t5_table(x).sum()))(jnp.ones((1, 4))))
    table = np.asarray(_t5_table(jnp.array([[1.0, -jnp.inf, jnp.nan, 2.0]])))
    assert {*table[np.isfinite(table)].tolist()} == {1.0, 2.0} and np.isneginf(table).any() and np.isnan(table).any()


def test_a_bias_is_a_pytree_of_its_table():
    bias = sl.DistanceBias(np.ones((2, 5), np.float32), slopes=np.array([1, 2]))
    assert (bias.center, bias.slopes) == (2, (1.0, 2.0))
    assert repr(bias) == "DistanceBias(float32[2, 5], center=2, slopes=(1.0, 2.0))"
    (path, leaf), *others = jax.tree_util.tree_flatten_with_path(bias)[0]
    assert jax.tree_util.keystr(path) == ".table" and leaf.shape == (2, 5) and not others
    assert jax.tree.structure(bias) == jax.tree.structure(pickle.loads(pickle.dumps(bias)))
    assert not jax.tree.leaves(sl.alibi(4)) and hash(jax.tree.structure(sl.alibi(4)))
    grid = sl.grid_bias((4, 5), np.ones((2, 3, 3), np.float32))
    assert jax.tree.structure(grid) == jax.tree.structure(pickle.loads(pickle.dumps(grid)))
    assert "positions=gathered tokens 0 to 4 of every 9" in repr(grid)
    with pytest.raises(AttributeError, match="immutable: center cannot be set"):
        bias.center = 3
    with pytest.raises(AttributeError, match="immutable: table cannot be deleted"):
        del bias.table


def test_numpy_tables_are_copied():
    """JAX copies a large numpy array later, in another thread, or shares its memory."""
    buffer = np.zeros((1 << 20) + 16, np.float32)
    start = -buffer.ctypes.data % 64 // 4  # of 64 bytes
    for offset in (start, start + 4):
        table = buffer[offset : offset + (1 << 20) - 1][None]
        for make in (sl.DistanceBias, functools.partial(sl.grid_bias, (1 << 19,))):
            table[:] = 0
            bias = make(table)
            table[:] = 7
            assert not np.any(bias.table)


def test_jax_tables_are_not_copied_and_only_the_same_ones_are_equal():
    table = jnp.zeros((2, 5))
    bias = sl.DistanceBias(table)
    assert bias.table is table and bias == sl.DistanceBias(table) != pickle.loads(pickle.dumps(bias))


def test_exported_programs_take_a_bias():
    bias = sl.grid_bias((1, 3), jnp.ones((2, 1, 5)))
    exported = jax.export.export(jax.jit(lambda bias: bias.table.sum()))(bias)
    assert jax.export.deserialize(exported.serialize()).call(bias) == 10


def test_tables_of_all_heads_and_of_other_dtypes():
    """Their gradients are sums over heads, in the dtype of the table."""
    *x, dout, table = arrays()
    shared = jnp.asarray(table[:1], jnp.bfloat16)
    out, dq, dtable = jax.jit(gradients)(*x, dout, shared)
    right, right_dq, by_head = jax.jit(gradients)(*x, dout, np.repeat(shared.astype(np.float32), 2, axis=0))
    close((out, dq), (right, right_dq))
    assert dtable.shape == (1, 13) and dtable.dtype == jnp.bfloat16
    np.testing.assert_allclose(dtable.astype(np.float32), by_head.sum(0, keepdims=True), rtol=0.01)


def test_under_vmap():
    *x, dout, table = arrays()
    tables, ids = np.stack([table, -table]), np.sort(np.arange(2 * T).reshape(2, T) % 3)
    by_table = compiled(jax.vmap(functools.partial(gradients, *x, dout, segment_ids=ids, implementation="xla")))(tables)
    one = compiled(functools.partial(gradients, *x, dout, segment_ids=ids, implementation="reference"))
    for i in range(2):
        close(tuple(answer[i] for answer in by_table), one(tables[i]))


def test_deterministic_gradients_are_summed_query_by_query():
    *x, dout, table = arrays()
    params = {"bwd_params": sl.BwdParams(q_blocksize=16, kv_blocksize=16, deterministic=True)}
    # Tokens have another order in the second pass.
    call = functools.partial(gradients, mask=sl.preset("sparse_transformer_strided", stride=8), implementation="xla")
    close(compiled(functools.partial(call, **params))(*x, dout, table), compiled(call)(*x, dout, table))


GRID = sl.grid_bias((5, 8), np.random.default_rng(5).normal(size=(2, 3, 7)).astype(np.float32))


@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (NEAR, sl.DistanceBias(arrays()[-1], 9)),
        (sl.preset("sparse_transformer_strided", stride=8), sl.DistanceBias(arrays()[-1], 12)),
        (sl.preset("windows", shape=(5, 8), size=4), GRID),
    ],
    ids=["window", "chain", "grid"],
)
def test_deterministic_gradients_on_gpus_are_the_same_in_any_order_of_programs(mask, bias, monkeypatch):
    *x, dout, _ = arrays()

    def gradients(bias, implementation, deterministic):
        params = sl.BwdParams(q_blocksize=16, kv_blocksize=16, deterministic=deterministic)
        options = {"implementation": implementation, "bwd_params": params}
        attend = functools.partial(sl.block_sparse_attention, plan_or_mask=mask, **options)
        return jax.vjp(lambda *x: attend(*x[:3], bias=x[3]), *x, bias)[1](dout)

    def run(deterministic=True):
        return compiled(functools.partial(gradients, implementation="triton", deterministic=deterministic))(bias)

    ours, by_floats = run(), run(deterministic=False)
    close(ours, compiled(functools.partial(gradients, implementation="reference", deterministic=True))(bias))
    in_order = triton_interpreter.programs
    monkeypatch.setattr(triton_interpreter, "programs", lambda grid_dim: in_order(grid_dim)[::-1])
    jax.tree.map(np.testing.assert_array_equal, run(), ours)
    assert (by_floats[-1].table != run(deterministic=False)[-1].table).any(), "floats depend on the order"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_whose_keys_all_have_entries_of_minus_infinity_is_a_constant(implementation):
    """As of one without keys by the mask, whatever the gradient of its results: here NaN."""
    *x, dout, table = arrays()
    dout[:, 0] = np.nan
    call, mask = functools.partial(gradients, *x, dout, center=12, implementation=implementation), sl.Causal()
    right = compiled(functools.partial(call, mask=mask & ~sl.Window(0)))(table)
    table[:, 12] = -np.inf
    close(compiled(functools.partial(call, mask=mask))(table), right)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("entry", [np.nan, np.inf, 3e38])
def test_entries_that_no_pair_has_change_nothing(implementation, entry):
    """A soft cap has a slope at every logit, also at those of pairs that are not allowed."""
    *x, dout, table = arrays()
    options = {"center": 8, "logits_soft_cap": 5.0, "implementation": implementation}
    call = compiled(functools.partial(gradients, *x, dout, mask=sl.Causal(), **options))
    right = call(table)
    table[:, 9:] = entry
    jax.tree.map(np.testing.assert_array_equal, call(table), right)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("entry", [3e38, -3e38, float(np.finfo(np.float32).min)])
def test_huge_finite_entries_do_not_overflow(implementation, entry):
    *x, dout, table = arrays()
    call = compiled(functools.partial(gradients, *x, dout, implementation=implementation))
    table[:, 9] = math.copysign(1e30, entry)
    right = call(table)
    table[:, 9] = entry
    close(call(table), right)


def test_memory_grows_with_t_for_as_many_entries():
    """XLA compiles a program for some seconds, because the largest array of a trace is not all that it holds."""
    length = 4096
    q, table = jnp.zeros((1, length, 2, 8)), jnp.zeros((2, length))

    def loss(q, k, v, table):
        bias = sl.DistanceBias(table, length - 1)
        return sl.block_sparse_attention(q, k, v, sl.Causal() & sl.Window(100), bias=bias, implementation="xla").sum()

    grads = jax.grad(loss, (0, 1, 2, 3))
    assert largest(grads, q, q, q, table) <= q.size
    used = jax.jit(grads).lower(q, q, q, table).compile(USUAL).memory_analysis().temp_size_in_bytes
    assert used < 12 * q.nbytes < length * length


def test_tables_by_axis_of_a_grid_are_summed():
    by_axis = np.ones((2, 5), np.float32), np.arange(15, dtype=np.float32)[None]
    joint = by_axis[0][:, :, None] + by_axis[1][:, None]
    np.testing.assert_array_equal(sl.grid_bias((5, 8), by_axis).table, sl.grid_bias((5, 8), joint).table)


def test_pallas_tpu_with_a_table_in_the_place_of_gathered_columns():
    """The chain gives way to one pass in natural order."""
    *x, dout, table = arrays()
    plan = candidates(sl.preset("sparse_transformer_fixed", stride=16, summary=4), T)[-1]
    assert len(plan.chains[0]) == 2
    calls = [functools.partial(gradients, mask=plan, implementation=name) for name in ("pallas_tpu", "reference")]
    close(*(compiled(call)(*x, dout, table) for call in calls))


def test_what_pallas_tpu_refuses_of_it():
    call = functools.partial(sl.block_sparse_attention, plan_or_mask=sl.Causal(), implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match=r"^pallas_tpu: it counts the distances of a bias by tokens, not on "):
        call(*arrays()[:3], bias=sl.grid_bias((5, 8), np.ones((1, 3, 3))))
    with pytest.raises(
        NotImplementedError, match=r"^pallas_tpu: its vector memory holds 1048576 entries of .* 1310720"
    ):
        shapes = [jax.ShapeDtypeStruct((1, 1 << 18, heads, 16), jnp.bfloat16) for heads in (4, 1, 1)]
        bias = sl.DistanceBias(jnp.zeros((4, 5 << 16)), 0)
        jax.eval_shape(functools.partial(call, bias=bias), *shapes)


def test_cudnn_refuses_it():
    with pytest.raises(NotImplementedError, match=r"^cudnn: it does not know a bias with slopes; "):
        sl.block_sparse_attention(*arrays()[:3], sl.Causal(), bias=sl.alibi(2), implementation="cudnn")
