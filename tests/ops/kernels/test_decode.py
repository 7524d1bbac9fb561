"""The kernel of a decoding step: rows of a cache in float64, what goes without it, and what it takes of a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

from benchmarks.triton_resources import TARGETS, Launch, compiled, resources
from sparse_layers.ops.kernels.decode_gpu import decode
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.quantized import QuantizedRows, dequantize, quantize


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
      arrays: (heads, rows, rows that a query is told of) of each pair of arrays.
      heads: key heads that are read, and query heads of each.
      sizes: H and Hv.
      tokens: queries of each of the two sequences.
      lists: of rows, one for all heads or one for each.
      splits: programs that share a list.
      writes: whether a token is written, too.
      rest: soft cap, and whether there are sinks.
    """

    arrays: tuple[tuple[int, int, int], ...]
    heads: tuple[int, int] = (2, 1)
    sizes: tuple[int, int] = (16, 16)
    tokens: int = 1
    lists: int = 1
    splits: int = 1
    writes: bool = False
    rest: tuple[float | None, bool] = (None, False)
    dtype: str = "float32"


CASES = {
    "one": Case(((2, 300, 150),), writes=True, rest=(None, True)),
    "grouped": Case(((2, 90, 70), (2, 300, 200)), (2, 8), (40, 24), writes=True, splits=3, dtype="bfloat16"),
    "four": Case(((2, 30, 20), (3, 20, 20), (2, 40, 5), (4, 90, 90)), (2, 3), (24, 48), 3, splits=2, dtype="float16"),
    "by head": Case(((3, 150, 140),), (3, 4), tokens=3, lists=3, rest=(2.0, True), dtype="bfloat16"),
    "one head of many": Case(((5, 90, 70),), (1, 20), (130, 8), splits=4, rest=(2.0, False)),
}


def exact(query, pieces, cap, sinks):
    """Attention [G, Hv] of the query heads of a key head in float64, to (keys, values)."""
    keys, values = (np.concatenate(x) for x in zip(*pieces, strict=True))
    logits = 0.3 * query @ keys.T
    weights = np.exp(logits if cap is None else cap * np.tanh(logits / cap))
    total = weights.sum(-1) + np.exp(sinks)
    return weights @ values / np.where(total == 0, 1, total)[:, None]


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_formula(name, monkeypatch):
    """What nobody sees is no number, the row of the new token among it; the last query sees nothing."""
    case, rng = CASES[name], np.random.default_rng(0)
    monkeypatch.setattr(decode, "number_of_splits", lambda *_: case.splits)
    (heads, group), (size, value_size), (cap, with_sinks) = case.heads, case.sizes, case.rest
    queries = 2 * case.tokens

    def numbers(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), case.dtype).astype(jnp.float32))

    query, at = numbers(queries, heads, group, size), np.full(queries, 1000)
    new, reads, slots = (numbers(2, heads, size), numbers(2, heads, value_size)), [], [np.array([0, -1])]
    sinks, actual = numbers(heads, group) if with_sinks else np.full((heads, group), -np.inf), []
    for of_array, count, length in case.arrays:
        order = np.argsort(rng.random((queries, case.lists, count)), axis=-1)[..., :length].astype(np.int32)
        rows = np.where(rng.random(order.shape) < 0.7, order, -1)
        rows[-1], slot = -1, np.array([rng.integers(count), -1])
        if case.writes:
            rows = np.where(rows == slot[:, None, None], -1, rows)
        chosen = tuple(range(heads)) if case.writes else tuple(rng.integers(of_array, size=heads).tolist())
        keys, values = (np.full((2, of_array, count, x), np.nan, np.float32) for x in case.sizes)
        for b, i in np.ndindex(queries, heads):
            own = rows[b, i % case.lists]
            for x in (keys, values):
                seen = x[b // case.tokens, chosen[i], own[own >= 0]]
                x[b // case.tokens, chosen[i], own[own >= 0]] = np.where(np.isnan(seen), numbers(*seen.shape), seen)
        actual.append((keys, values, chosen, rows))
        slots.append(slot)
        k, v = (jnp.asarray(x, case.dtype) for x in (keys, values))
        reads.append(decode.CacheRead(k, v, chosen, jnp.asarray(rows)))
    options, given = decode.LogitScaling(0.3, cap), jnp.asarray(sinks) if with_sinks else None
    low, at = jnp.asarray(query, case.dtype), jnp.asarray(at, jnp.int32)
    if case.writes:
        token = jnp.asarray(new[0], case.dtype), jnp.asarray(new[1], case.dtype)
        out, *arrays = decode.step(low, token, reads, jnp.stack(slots, 1).astype(jnp.int32), at, options, given)
        for i, changed in enumerate(arrays):
            for before, after, slot in zip(actual, changed, slots[1:], strict=True):
                before[i][0, :, slot[0]] = new[i][0]
                np.testing.assert_array_equal(after.astype(jnp.float32), before[i])
    else:
        out = decode.attend(low, reads, at, options, given)
    assert out.dtype == case.dtype
    wide = np.asarray(out.astype(jnp.float32), np.float64)
    for b, i in np.ndindex(queries, heads):
        pieces = []
        for keys, values, chosen, rows in actual:
            own = rows[b, i % case.lists]
            pieces.append([x[b // case.tokens, chosen[i], own[own >= 0]].astype(np.float64) for x in (keys, values)])
        if case.writes and b == 0:
            pieces.append([x[0, i][None].astype(np.float64) for x in new])
        right = exact(query[b, i].astype(np.float64), pieces, cap, sinks[i].astype(np.float64))
        # Rounding of weights and result to the dtype, of sums in float32, relative to the largest value.
        budget = 4 * max(float(jnp.finfo(case.dtype).eps), 2e-7) * 4
        np.testing.assert_allclose(wide[b, i], right, atol=budget)
    np.testing.assert_array_equal(wide[-1], 0)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_8_bits(group, dtype, monkeypatch):
    """Rows of very different sizes; the first row is not seen, and is no number."""
    monkeypatch.setattr(decode, "number_of_splits", lambda *_: 2)
    rng, size, slot = np.random.default_rng(0), 24, 70
    query, keys, values, *new = (
        jnp.asarray(rng.normal(size=(1, 2, n, size)), jnp.float32) for n in (group, 90, 90, 1, 1)
    )
    scales = jnp.asarray(rng.lognormal(0, 3, (90, 1)).astype(np.float32)).at[0].set(jnp.nan)
    arrays = [quantize(keys, dtype), quantize(values * scales, dtype)]
    if dtype != "int8":
        arrays = [dataclasses.replace(x, data=x.data.at[:, :, 0].set(jnp.nan)) for x in arrays]
    rows = jnp.arange(90, dtype=jnp.int32).at[jnp.array([0, 5, slot])].set(-1)[None, None]
    read, slots = decode.CacheRead(*arrays, (0, 1), rows), jnp.array([[0, slot]], jnp.int32)
    token = (new[0][:, :, 0], new[1][:, :, 0])
    out, *written = decode.step(query, token, [read], slots, jnp.array([100]), decode.LogitScaling(0.3))
    seen, wide = np.delete(np.arange(90), [0, 5]), []
    for before, after, x in zip(arrays, (written[0][0], written[1][0]), new, strict=True):
        want = quantize(x, dtype)
        for leaves in zip(*map(jax.tree.leaves, (after, before, want)), strict=True):
            now, kept, row = (x.astype(jnp.float32) for x in leaves)
            np.testing.assert_allclose(now, kept.at[:, :, slot : slot + 1].set(row), rtol=2e-7)
        wide.append(np.asarray(dequantize(after, jnp.float32), np.float64)[0][:, seen])
    for i in range(2):
        right = exact(np.asarray(query[0, i], np.float64), [(wide[0][i], wide[1][i])], None, -np.inf)
        np.testing.assert_allclose(out[0, i], right, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("heads", [1, 3])
def test_huge_logits_and_sinks(heads, monkeypatch):
    """Each of three splits has keys; a query takes the value of its largest logit, or nothing beside a larger sink."""
    monkeypatch.setattr(decode, "number_of_splits", lambda *_: 3)
    query, keys, values = (np.random.default_rng(i).normal(size=(1, 2, n, 16)) for i, n in enumerate((heads, 90, 90)))
    rows, sinks = np.arange(90, dtype=np.int32)[None, None], np.tile([[-3e38], [3e38]], heads)
    query, keys, values, sinks = (jnp.asarray(x, jnp.float32) for x in (query, keys, values, sinks))
    read = decode.CacheRead(keys, values, (0, 1), jnp.asarray(rows))
    out = decode.attend(query, [read], jnp.array([100]), decode.LogitScaling(3e7), sinks)
    largest = np.einsum("ngh,nlh->ngl", query[0], keys[0]).argmax(-1)
    np.testing.assert_allclose(out[0, 0], values[0, 0, largest[0]], rtol=1e-6)
    np.testing.assert_array_equal(out[0, 1], 0)


def test_rows_of_later_tokens_are_not_read():
    """Rows in the order of positions, of which the last are those of tokens to come: here they would be seen."""
    keys = jnp.asarray(np.arange(4 * 2 * 64, dtype=np.float32).reshape(1, 1, 512, 1) % 7)
    rows = jnp.arange(512, dtype=jnp.int32)[None, None]
    out = decode.attend(
        jnp.zeros((1, 1, 1, 1)),
        [decode.CacheRead(keys, keys, (0,), rows, 2)],
        jnp.array([600]),
        decode.LogitScaling(1.0),
    )
    np.testing.assert_allclose(out.ravel(), keys[0, 0, :301].mean(), rtol=1e-6)


def test_lists_are_shared_where_programs_are_few():
    def splits(count, programs):
        return decode.number_of_splits(count, 64, 256, programs, 132, 0.65)

    assert splits(1024, 256) == splits(65536, 1024) == splits(64, 1) == 1
    assert splits(65536, 8) >= 16
    assert splits(1 << 20, 1) == decode.MAX_SPLITS


def test_what_goes_without_the_kernel(monkeypatch):
    query, kept = jax.ShapeDtypeStruct((4, 8, 64), "bfloat16"), jax.ShapeDtypeStruct((4, 8, 100, 64), "bfloat16")

    def reason(query=query, kept=kept, group=1, reads=1):
        return decode.unsupported(query, [kept], [kept], group, reads)

    assert reason() is None
    assert "float64" in str(reason(query=query.update(dtype="float64")))
    assert "5" in str(reason(reads=5))
    assert "257" in str(reason(query=query.update(shape=(4, 8, 257))))
    assert "65" in str(reason(group=65))
    assert "65536" in str(reason(query=query.update(shape=(65536, 8, 64))))
    rows = {name: QuantizedRows(kept.update(dtype=name), kept) for name in ("int8", "float8_e4m3fn")}
    assert reason(kept=rows["int8"]) is None and reason(kept=rows["float8_e4m3fn"]) is None
    assert "8 bits alone" in str(decode.unsupported(query, [kept, rows["int8"]], [kept, rows["int8"]], 1, 2))
    monkeypatch.setattr(hardware, "local_device", lambda: TARGETS[80])
    assert "8.0 lack float8_e4m3fn" in str(reason(kept=rows["float8_e4m3fn"])) and reason(kept=rows["int8"]) is None
    monkeypatch.setattr(hardware, "local_device", lambda: "no GPU")
    assert reason() == "no GPU"


# (capability, sequences, key heads, query heads of each, head size, dtype, rows of arrays, whether a token is written,
# the dtype of rows in 8 bits)
COMPILED = {
    "strided": (90, 16, 16, 1, 64, "bfloat16", (129, 512), True),
    "alone": (90, 1, 8, 1, 64, "bfloat16", (1024,), True),
    "grouped": (90, 16, 8, 8, 128, "bfloat16", (65536,), False),
    "float32": (80, 16, 8, 4, 128, "float32", (65536,), True),
    "wide": (86, 4, 8, 64, 256, "float16", (4096,), False),
    "widest": (86, 4, 1, 1, 256, "float32", (128, 4096), True),
    "small": (89, 4, 8, 2, 64, "float16", (4096,), True),
    "int8": (90, 16, 8, 8, 128, "bfloat16", (65536,), True, "int8"),
    "int8, alone": (80, 1, 8, 1, 128, "bfloat16", (4096,), False, "int8"),
    "float8": (90, 16, 8, 4, 64, "bfloat16", (512, 65536), False, "float8_e4m3fn"),
    "float8, alone": (89, 1, 8, 1, 128, "float16", (4096,), True, "float8_e4m3fn"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_and_fits(name, monkeypatch):
    """Loads of several tiles are on their way, in programs of which several fit a multiprocessor."""
    capability, batch, heads, group, size, dtype, lengths, writes, *cache_dtype = COMPILED[name]
    target, found = TARGETS[capability], []

    def call(kernel, grid, arrays, outputs, constants, num_warps, num_stages, in_place=()):
        dtypes = tuple(x.dtype.name for x in (*arrays, *outputs))
        found.append(Launch(kernel, dtypes, constants, num_warps, num_stages, target))
        return [jnp.zeros(x.shape, x.dtype) for x in (*outputs, *(arrays[i] for i in in_place))]

    monkeypatch.setattr(bridge, "call_triton", call)
    monkeypatch.setattr(hardware, "local_device", lambda: target)

    def step(query, token, slots, at, kept, rows):
        reads = [decode.CacheRead(x, x, tuple(range(heads)), row) for x, row in zip(kept, rows, strict=True)]
        if writes:
            return decode.step(query, (token, token), reads, slots, at, decode.LogitScaling(0.1))
        return decode.attend(query, reads, at, decode.LogitScaling(0.1, 30.0), jnp.zeros((heads, group)))

    def shaped(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def kept(*shape):
        if not cache_dtype:
            return shaped(*shape, size)
        return QuantizedRows(shaped(*shape, size, dtype=cache_dtype[0]), shaped(*shape, 1, dtype="float32"))

    jax.eval_shape(
        step,
        shaped(batch, heads, group, size),
        shaped(batch, heads, size),
        shaped(batch, 1 + len(lengths), dtype="int32"),
        shaped(batch, dtype="int32"),
        [kept(batch, heads, rows) for rows in lengths],
        [shaped(batch, 1, rows, dtype="int32") for rows in lengths],
    )
    assert len(found) == (2 if found[0].constants["C"].SPLITS > 1 else 1)
    kernels = [resources(compiled(one)) for one in found]
    assert all(used.shared <= target.shared_memory and used.stack == 0 for used in kernels)
    assert kernels[0].copies and kernels[0].at_once(found[0]) >= (1 if size > 128 else 2)
    assert {*kernels[0].products} == (set() if dtype == "float32" or group == 1 else {"mma.sync"})
