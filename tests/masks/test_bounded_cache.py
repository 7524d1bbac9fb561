"""The caches of the package: what they hold in bytes, what goes first, and that nothing else changes."""

import dataclasses
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks import bounded_cache
from sparse_layers.masks.algebra import Array
from sparse_layers.ops.planning import changing_masks

RNG = np.random.default_rng(0)


@pytest.fixture
def store(monkeypatch):
    """An empty store that holds 10,000 bytes, or two entries."""
    monkeypatch.setattr(bounded_cache, "STORE", bounded_cache._Store())
    monkeypatch.setattr(bounded_cache, "MAX_BYTES", 10_000)
    monkeypatch.setattr(bounded_cache, "MIN_ENTRIES", 2)
    return bounded_cache.STORE


@dataclasses.dataclass(frozen=True)
class Box:
    content: tuple


def test_the_oldest_go_first(store):
    computed = []

    @bounded_cache.bounded_cache(extra_bytes=0)
    def boxed(number):
        computed.append(number)
        return Box((np.zeros(3000, np.uint8), {"number": number}))

    first = [boxed(number) for number in range(3)]
    assert store.bytes == 9000 and boxed(0) is first[0]  # used last: 1 is the oldest now
    boxed(3)
    assert store.bytes == 9000 and boxed(0) is first[0] and boxed(2) is first[2] and computed == [0, 1, 2, 3]
    assert boxed(1) is not first[1] and computed == [0, 1, 2, 3, 1]
    boxed.cache_clear()
    assert not store.bytes and not store.entries and not store.holders


def test_shared_arrays_count_once_and_views_as_a_whole(store):
    array = np.zeros(4000, np.uint8)
    view = bounded_cache.bounded_cache(extra_bytes=0)(lambda number: array[number:][:10])
    of_closure = bounded_cache.bounded_cache(extra_bytes=7)(lambda: lambda: array)
    for number in range(2):
        view(number)
    of_closure()
    assert store.bytes == 4007
    view.cache_clear()
    assert store.bytes == 4007 and len(store.entries) == 1


def test_entries_too_large_stay_while_they_are_the_last(store):
    large = bounded_cache.bounded_cache()(lambda number: np.zeros(20_000 + number, np.uint8))
    results = [large(number) for number in range(5)]
    assert large(4) is results[4] and large(3) is results[3] and len(store.entries) == 2


def test_threads_get_one_result(store):
    barrier, results = threading.Barrier(4), []
    slow = bounded_cache.bounded_cache()(lambda: (barrier.wait(), object())[1])
    threads = [threading.Thread(target=lambda: results.append(slow())) for _ in range(4)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert len(results) == 4 and len({*map(id, results)}) == 1


def test_new_masks_in_every_call_hold_a_bounded_number_of_bytes(store, monkeypatch):
    """Plans, lists and compiled programs, with the masks that they are of, go when they are evicted."""
    monkeypatch.setattr(bounded_cache, "MAX_BYTES", 12 << 20)
    q = jnp.asarray(RNG.normal(size=(1, 128, 1, 8)), jnp.float32)
    right = jax.jit(lambda mask: sl.block_sparse_attention(q, q, q, mask))
    masks, sizes = [np.tri(128, dtype=bool) & (RNG.random((128, 128)) < 0.9) for _ in range(24)], []
    for mask in masks:
        mask[:, 0] = True
        out = sl.block_sparse_attention(q, q, q, mask)
        sizes.append(store.bytes)
        np.testing.assert_allclose(out, right(jnp.asarray(mask)), atol=1e-5)
    assert sizes[0] < sizes[5] and max(sizes) <= 12 << 20
    alive = {key.values[1][1].plan.masks for key in store.entries if key.values[0].__name__ == "_program"}
    assert (Array(masks[-1]),) in alive and (Array(masks[0]),) not in alive


def test_equal_masks_share_a_plan_that_is_as_without_a_cache():
    mask = np.tri(300, dtype=bool) & (RNG.random((300, 300)) < 0.5)
    plan = sl.make_plan(mask, 300)
    assert sl.make_plan(mask.copy(), 300) is plan
    bounded_cache.STORE.drop(next(k for k, x in bounded_cache.STORE.entries.items() if x.result is plan))
    again = sl.make_plan(mask, 300)
    assert again is not plan and again == plan and repr(again) == repr(plan)


def test_masks_that_change_from_call_to_call_are_hinted_at_once():
    masks = [RNG.random((16, 16)) < 0.5 for _ in range(changing_masks.MAX_TABLES + 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # a model with many layers, that runs again and again
            for mask in masks[:60]:
                sl.make_plan((mask, sl.Causal()), 16)
        for number in range(200):  # rules are no tables
            sl.make_plan(sl.Window(number), 16)
    changing_masks._recent.clear()
    for mask in masks[:-2]:
        for _ in range(3):  # layers that share it
            sl.make_plan(mask, 16)
    with pytest.warns(UserWarning, match=r"changes from call to call is better a JAX array") as caught:
        sl.make_plan(masks[-2], 16)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sl.make_plan(masks[-1], 16)
