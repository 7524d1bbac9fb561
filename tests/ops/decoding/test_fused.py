"""Decoding steps by the kernel, which reads the cache in place, equal XLA's; masked rows may hold anything."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

import sparse_layers as sl
from sparse_layers.ops.decoding import fused
from sparse_layers.ops.kernels.decode_gpu import decode
from tests.arrays import inputs
from tests.ops.decoding.test_decode import CASES

B, T, N, H, HV = 2, 70, 6, 8, 4
START = np.array([0, T - 4])
OPTIONS = {"sinks": jnp.linspace(-1, 1, N), "logits_soft_cap": 5.0, "scale": 0.7}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A pattern, and the steps over it.

    Attributes:
      mask: whatever `KVCache.empty` takes.
      kv_heads: of 6 query heads.
      tokens: of a step.
      splits: programs that share a list.
      writes: whether the kernel writes the token.
      lists: heads that choose blocks of 16, or None for no choice.
    """

    mask: object
    kv_heads: int = N
    tokens: int = 1
    splits: int = 1
    writes: bool = False
    lists: int | None = None


STEPS = {
    "window": Case(CASES["sliding_window"], 2, writes=True),
    "strided": Case(CASES["sparse_transformer_strided"], 1, splits=3, writes=True),
    "columns": Case(CASES["sparse_transformer_fixed"], writes=True),
    "table": Case(CASES["bigbird"], 2, splits=3, writes=True),
    "four parts": Case(CASES["four parts"], writes=True),
    "several tokens": Case(CASES["four parts"], 2, tokens=3, splits=2),
    "array": Case(CASES["array"], 2),
    "differs by head": Case(CASES["differs by head"], 2),
    "empty rows": Case(sl.Causal() & sl.Columns(9, 4, 6), splits=2, writes=True),
    "chosen by all": Case(sl.Causal() & ~sl.Window(3), 2, lists=1),
    "chosen by key head": Case(sl.Causal(), 2, tokens=3, splits=2, lists=2),
    "chosen by query head": Case(sl.Causal(), 2, lists=N),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels are chosen, as they are on a GPU."""
    monkeypatch.setattr(fused, "implementation_order", lambda _: ("triton",))
    monkeypatch.setattr(fused, "has_local_arrays", lambda: True)


def filled(case, dtype=jnp.float32):
    """A cache with unequal prompts, and queries, keys and values of all tokens."""
    heads = N, case.kv_heads, case.kv_heads
    shapes = [(B, T, n, size) for n, size in zip(heads, (H, H, HV), strict=True)]
    q, k, v = (jnp.asarray(inputs(*shape, seed=seed).astype(dtype)) for seed, shape in enumerate(shapes))
    sizes = {"num_heads": N, "num_kv_heads": case.kv_heads, "head_size": H, "value_size": HV, "max_step": case.tokens}
    sizes["implementation"] = "triton"
    cache = jax.jit(lambda *x: sl.KVCache.empty(case.mask, T, batch=B, dtype=dtype, **sizes).filled(*x))(k, v, START)

    return cache, (q, k, v)


def poisoned(cache):
    """A cache with NaN instead of zeros, that is in rows without a token."""
    keys, values = (tuple(np.where(x == 0, np.nan, x) for x in each) for each in (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def exact(case, q, k, v, ids):
    """Attention of all tokens in float64, [B, T, N, Hv]; the blocks ids [B, T, lists, k] are 16 keys long."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // case.kv_heads, axis=2) for x in (k, v))
    masks = sl.as_masks(case.mask)
    allowed = np.stack([masks[h % len(masks)].dense(T) for h in range(N)], axis=1)[None]
    if ids is not None:
        chosen = (ids[..., None, :] == np.arange(T)[:, None] // 16).any(-1)
        allowed = allowed & np.repeat(chosen, N // case.lists, axis=2)
    cap = OPTIONS["logits_soft_cap"]
    logits = cap * np.tanh(OPTIONS["scale"] / cap * np.einsum("btnh,bsnh->btns", q, k))
    weights = np.where(allowed, np.exp(logits), 0)
    total = weights.sum(-1) + np.exp(np.asarray(OPTIONS["sinks"], np.float64))
    return np.einsum("btns,bsnh->btnh", weights, v) / total[..., None]


@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_the_full_forward(name, monkeypatch):
    case, written = STEPS[name], []
    monkeypatch.setattr(decode, "number_of_splits", lambda *_: case.splits)
    monkeypatch.setattr(fused.decode, "step", lambda *args: written.append(args) or step(*args))
    cache, (q, k, v) = filled(case)
    ids = chosen = None
    if case.lists:
        # Some ids are repeated, some are -1, some lie in the future; the last block is shorter.
        ids = np.random.default_rng(1).integers(-1, -(-T // 16), (B, T, case.lists, 4))
        chosen = sl.Selection(ids, block=16)

    @jax.jit
    def run(cache, position):
        def one(cache, position):
            batch, at = np.arange(B)[:, None], position[:, None] + jnp.arange(case.tokens)
            own = jax.tree.map(lambda ids: ids[batch, at], chosen)
            args = (x[batch, at] if case.tokens > 1 else x[batch[:, 0], at[:, 0]] for x in (q, k, v))
            out, cache = cache.step(*args, position, selection=own, **OPTIONS)
            return cache, out.reshape(B, case.tokens, N, HV)

        return jax.lax.scan(one, cache, position)[1]

    position = START + np.arange(0, 4 - case.tokens + 1, case.tokens)[:2, None]
    out, want = run(poisoned(cache), jnp.asarray(position)), exact(case, q, k, v, ids)
    at = position[:, :, None] + np.arange(case.tokens)
    np.testing.assert_allclose(out, want[np.arange(B)[:, None], at], atol=2e-6)
    assert bool(written) == case.writes


step = decode.step


def test_mapped_and_differentiated_they_are_xlas():
    cache, (q, k, v) = filled(STEPS["window"])
    token, at = (q[:, 5], k[:, 5], v[:, 5]), jnp.asarray(START)

    def step_and_attend(token):
        out, after = cache.step(*token, at, **OPTIONS)
        return (out * jnp.arange(HV)).sum(), after.attend(token[0], at, **OPTIONS)

    def answers():
        several = jax.tree.map(lambda x: jnp.stack([x, -x]), token)
        return jax.jit(lambda: (jax.grad(step_and_attend, has_aux=True)(token), jax.vmap(step_and_attend)(several)))()

    found = answers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "implementation_order", lambda _: ())
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, answers())
    assert np.abs(found[0][0][0]).max() > 0.01
