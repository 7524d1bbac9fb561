"""The adapter of levanter, by a stub of its named arrays and of its masks."""

import dataclasses
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from examples.hosts.levanter.adapter import attend
from sparse_layers.tools.oracle import DenseAttention, budgets, largest_error, same_segment


class Axis(NamedTuple):
    """haliax's axis."""

    name: str
    size: int


BATCH, KV_HEAD, GROUP = Axis("batch", 2), Axis("kv_head", 2), Axis("group", 2)
QUERIES, KEYS, SIZE, VALUES = Axis("position", 64), Axis("key_position", 64), Axis("head_size", 16), Axis("value", 8)
POSITIONS = ("position", "key_position", "head_size")
Q, K = np.arange(64)[:, None], np.arange(64)
IDS = np.repeat([[0, 1, -1], [3, -1, -1]], [20, 30, 14], axis=1)


@dataclasses.dataclass
class Named:
    """haliax's `NamedArray`, as far as the adapter uses it."""

    array: jax.Array
    axes: tuple[Axis, ...]

    def __bool__(self):
        raise ValueError("arrays of several elements are neither true nor false")

    @property
    def axis_names(self):
        return tuple(axis.name for axis in self.axes)

    def resolve_axis(self, name):
        return self.axes[self.axis_names.index(name)]

    def rearrange(self, axes):
        assert len(axes) == len(self.axes)
        return Named(self.array.transpose([self.axes.index(axis) for axis in axes]), tuple(axes))

    def broadcast_axis(self, axes):
        new = [axis for axis in axes if axis not in self.axes]
        shape = (*(axis.size for axis in new), *self.array.shape)
        return Named(jnp.broadcast_to(self.array, shape), (*new, *self.axes))

    def rename(self, names):
        return Named(self.array, tuple(Axis(names.get(axis.name, axis.name), axis.size) for axis in self.axes))


def mask_of(**fields):
    """levanter's `AttentionMask`."""
    defaults = {"is_causal": False, "causal_offset": None, "explicit_mask": None, "segment_ids": None}
    return types.SimpleNamespace(**defaults | {"sliding_window": None} | fields)


def arrays():
    """q, k, v and a gradient of the result, with axes in the order of the op."""
    random = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 8), (2, 64, 4, 8)]
    return [jax.random.normal(key, shape) for key, shape in zip(random, shapes, strict=True)]


def call(q, k, v, mask, sinks=None, pspec=lambda axes: [None] * len(axes), **options):
    """levanter's call: heads before tokens in query, as its layers have it; returns [B, T, N, Hv]."""
    query = Named(q.reshape(2, 64, 2, 2, 16), (BATCH, QUERIES, KV_HEAD, GROUP, SIZE))
    query = query.rearrange((BATCH, KV_HEAD, GROUP, QUERIES, SIZE))
    key = Named(k, (BATCH, KEYS, KV_HEAD, SIZE)).rearrange((BATCH, KV_HEAD, KEYS, SIZE))
    value = Named(v, (BATCH, KEYS, KV_HEAD, VALUES))
    if sinks is not None:
        options["attn_sink"] = Named(sinks.reshape(2, 2), (KV_HEAD, GROUP))
    out = attend(POSITIONS, query, key, value, mask, pspec, bias=None, dropout=0.0, **options)
    assert out.axes == (BATCH, QUERIES, KV_HEAD, GROUP, VALUES)
    return out.array.reshape(2, 64, 4, 8)


def check(mask, allowed, sinks=None, **options):
    """Compares a call with dense attention in float64, values and gradients."""
    *qkv, dout = arrays()
    inputs = qkv if sinks is None else [*qkv, sinks]
    out, pullback = jax.vjp(lambda q, k, v, sinks=None: call(q, k, v, mask, sinks, **options), *inputs)
    settings = {"scale": options.get("scaling_factor"), "soft_cap": options.get("logits_soft_cap"), "sinks": sinks}
    exact, rough = (DenseAttention(*qkv, allowed, dout, **settings, dtype=dtype) for dtype in (np.float64, np.float32))
    limits = budgets(exact.answers, rough.answers, exact.absolute_sums(), np.float32)
    names = ("out", "dq", "dk", "dv", "dsinks")[: len(inputs) + 1]
    for name, x in zip(names, (out, *pullback(dout)), strict=True):
        assert largest_error(x, exact.answers[name]) <= limits[name], name


def test_windows_count_the_query():
    check(mask_of(is_causal=True, sliding_window=9), (K <= Q) & (Q - K < 9))
    check(mask_of(sliding_window=9), (K <= Q) & (Q - K < 9))


@pytest.mark.parametrize("is_shared", [False, True])
def test_documents_and_padding(is_shared):
    axes = (QUERIES,) if is_shared else (BATCH, QUERIES)
    ids = Named(jnp.asarray(IDS[0] if is_shared else IDS), axes)
    pairs = same_segment(*[np.broadcast_to(IDS[0], IDS.shape) if is_shared else IDS] * 2)
    check(mask_of(segment_ids=(ids, ids)), pairs)
    check(mask_of(is_causal=True, segment_ids=(ids, ids)), pairs & (K <= Q))


def test_no_mask_scale_soft_cap_and_sinks():
    check(None, np.ones((64, 64), bool), scaling_factor=0.5, logits_soft_cap=2.0, sinks=jnp.linspace(-1, 1, 4))


def test_prefixes():
    lengths, keys = np.array([20, 0]), np.arange(64) % 9 < np.array([[2], [4]])
    causal = (K <= Q)[None]
    check(mask_of(is_causal=True, prefix_length=20, sliding_window=9), ((K <= Q) & (Q - K < 9)) | (K < 20))
    pairs = causal | (lengths[:, None, None] > K)
    check(mask_of(is_causal=True, prefix_lengths=Named(jnp.asarray(lengths), (BATCH,))), pairs[:, None])
    pairs = causal | keys[:, None, :] | (K < 7)
    named = Named(jnp.asarray(keys), (BATCH, QUERIES))
    check(mask_of(is_causal=True, prefix_mask=named, prefix_length=7), pairs[:, None])


def test_explicit_masks():
    dense = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.3, (64, 64)))
    named = Named(jnp.asarray(dense.T), (KEYS, QUERIES))
    check(named, dense)
    check(mask_of(explicit_mask=named, is_causal=True), dense & (K <= Q))


@pytest.mark.parametrize("has_batch", [True, False])
def test_arrays_with_heads_first(has_batch):
    """The axes of sinks are heads and those of ids are not, wherever they stand."""
    q, k, v, _ = arrays()
    sinks, ids = jnp.linspace(-1, 1, 4), np.broadcast_to(IDS[0], (2, 64))
    batch = (BATCH,) if has_batch else ()
    query = Named(q.reshape(2, 64, 2, 2, 16), (BATCH, QUERIES, KV_HEAD, GROUP, SIZE))
    query = query.rearrange((KV_HEAD, BATCH, GROUP, QUERIES, SIZE))
    key, value = Named(k, (BATCH, KEYS, KV_HEAD, SIZE)), Named(v, (BATCH, KEYS, KV_HEAD, VALUES))
    named = Named(jnp.asarray(ids), (BATCH, QUERIES))
    if not has_batch:
        query, key, value, named = (
            Named(jnp.take(x.array, 0, x.axes.index(BATCH)), tuple(axis for axis in x.axes if axis is not BATCH))
            for x in (query, key, value, named)
        )
    for sink in (None, Named(sinks.reshape(2, 2), (KV_HEAD, GROUP))):
        mask = mask_of(is_causal=True, segment_ids=(named, named))
        out = attend(POSITIONS, query, key, value, mask, lambda axes: [None] * len(axes), attn_sink=sink)
        out = out.rearrange((*batch, QUERIES, KV_HEAD, GROUP, VALUES)).array.reshape(-1, 64, 4, 8)
        options = {"sinks": None if sink is None else sinks, "segment_ids": jnp.asarray(ids)}
        right = sl.block_sparse_attention(q, k, v, sl.Causal(), **options)
        assert np.allclose(out, right[: len(out)], atol=1e-6)


def test_it_hands_over_the_sharding(monkeypatch):
    seen = []
    operation = sl.block_sparse_attention

    def record(*arrays, query_sharding, **options):
        seen.append(query_sharding)
        return operation(*arrays, **options)

    monkeypatch.setattr(sl, "block_sparse_attention", record)
    names = {"batch": ("replica", "data"), "kv_head": "model"}
    call(*arrays()[:3], None, pspec=lambda axes: [names.get(axis.name) for axis in axes])
    assert seen == [jax.sharding.PartitionSpec(("replica", "data"), None, ("model",))]


BY_ENTRY = Named(jnp.ones((2, 64, 64), bool), (BATCH, QUERIES, KEYS))
FLOATS = Named(jnp.zeros((64, 64)), (QUERIES, KEYS))
LENGTHS = Named(jnp.array([3, 4]), (BATCH,))


@pytest.mark.parametrize(
    ("mask", "options", "words"),
    [
        (mask_of(is_causal=True, sliding_window=0), {}, "sliding_window must be None or an integer >= 1, got 0"),
        (mask_of(sliding_window=2.5), {}, "sliding_window must be None or an integer >= 1, got 2.5"),
        (mask_of(is_causal=True, prefix_length=-1), {}, "prefix_length must be None or an integer >= 0, got -1"),
        (FLOATS, {}, "explicit_mask must be a named bool array, .*got an array .*float32"),
        (mask_of(explicit_mask=FLOATS), {}, "explicit_mask must be a named bool array, .*got an array .*float32"),
        (jnp.ones((64, 64), bool), {}, "explicit_mask must be a named bool array, .*got Array"),
        ("causal", {}, "explicit_mask must be a named bool array, .*got 'causal'"),
        (mask_of(segment_ids=(LENGTHS, FLOATS)), {}, "segment_ids must be a named integer array, .*got an array"),
        (mask_of(is_causal=True, prefix_lengths=FLOATS), {}, "prefix_lengths must be a named integer array, .*got an"),
        (mask_of(is_causal=True, prefix_mask=LENGTHS), {}, "prefix_mask must be a named bool array, .*got an array"),
        (None, {"scaling_factor": jnp.ones(4)}, "scaling_factor must be a Python number or None, got Array"),
        (None, {"attn_sink": jnp.ones(4)}, "attn_sink must be a named floating array, of axes among .*got Array"),
        (None, {"attn_sink": LENGTHS}, "attn_sink must be a named floating array, .*got an array .*int32"),
        (None, {"bias": BY_ENTRY}, "bias must be None or 0, got an array"),
        (None, {"dropout": 0.1}, "dropout must be None or 0, got 0.1"),
        (mask_of(explicit_mask=BY_ENTRY), {}, r"explicit_mask must be .*\['position', 'key_position'\], got"),
        (mask_of(is_causal=True, causal_offset=LENGTHS), {}, "causal_offset must be None"),
        (mask_of(prefix_length=4), {}, "is_causal must be True beside a prefix, got False"),
        (mask_of(is_causal=True, prefix_lengths=LENGTHS, sliding_window=8), {}, "sliding_window must be None .* got 8"),
    ],
)
def test_what_it_does_not_serve(mask, options, words):
    q, k, v, _ = arrays()
    query = Named(q.reshape(2, 64, 2, 2, 16), (BATCH, QUERIES, KV_HEAD, GROUP, SIZE))
    key, value = Named(k, (BATCH, KEYS, KV_HEAD, SIZE)), Named(v, (BATCH, KEYS, KV_HEAD, VALUES))
    with pytest.raises(NotImplementedError, match=words + ".*write attn_backend=vanilla"):
        attend(POSITIONS, query, key, value, mask, lambda axes: [None] * len(axes), **options)
