"""Rope: turns by coordinates, gradients, logits of distances only, and what cannot be turned."""

import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.settings import check_settings
from tests.arrays import inputs
from tests.ops.cases import compiled

T, N = 30, 2
ROPES = {
    "positions": (sl.Rope(50.0), 6),
    "one axis": (sl.Rope(50.0, (40,)), 6),
    "image": (sl.Rope(100.0, (5, 6)), 12),
    "behind a prompt, with tokens beyond": (sl.Rope(100.0, (3, 4), offset=7), 8),
    "video, uneven": (sl.Rope(256.0, (2, 3, 5), sizes=(2, 6, 4)), 12),
    "four axes": (sl.Rope(10.0, (2, 3, 1, 4), offset=1), 16),
}


def turned(rope, x, positions=None, sign=1):
    """One token, one axis, one pair at a time, in float64; coordinates are those of a walk through the grid."""
    x, out = np.asarray(x, np.float64), np.array(x, np.float64)
    walk = None if rope.shape is None else list(itertools.product(*map(range, rope.shape)))
    size = x.shape[-1]
    sizes = rope.sizes or [size // len(rope.shape or (0,))] * len(rope.shape or (0,))
    for t in range(len(x)):
        position = t if positions is None else positions[t]
        coordinates = [position]
        if walk is not None:
            place = position - rope.offset
            coordinates = walk[place] if 0 <= place < len(walk) else [0] * len(rope.shape)
        i = 0
        for coordinate, share in zip(coordinates, sizes, strict=True):
            for j in range(share // 2):
                angle = sign * coordinate * rope.theta ** (-2 * j / share)
                a, b = x[t, :, i], x[t, :, i + size // 2]
                out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, :, i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
                i += 1
    return out


@pytest.mark.parametrize("name", ROPES)
def test_each_pair_rotates_by_its_coordinate_and_gradients_rotate_back(name):
    rope, size = ROPES[name]
    x, weights = inputs(T, N, size), inputs(T, N, size, seed=1)

    @compiled
    def out_and_gradient(x, weights):
        out, pull = jax.vjp(rope, x)
        return out, pull(weights)[0]

    out, slope = out_and_gradient(x, weights)
    np.testing.assert_allclose(out, turned(rope, x), atol=1e-5)
    np.testing.assert_allclose(slope, turned(rope, weights, sign=-1), atol=1e-5)
    positions = np.array([[3, 29, 0], [8, 8, 9]])
    some = compiled(rope)(x[positions], positions)
    for row, at in zip(some, positions, strict=True):
        np.testing.assert_allclose(row, turned(rope, x[at], at), atol=1e-5)


@pytest.mark.parametrize("name", ["image", "video, uneven"])
def test_logits_depend_on_the_differences_of_coordinates_only(name):
    rope, size = ROPES[name]
    q, k = (np.broadcast_to(inputs(1, 1, size, seed=seed), (T, 1, size)) for seed in (0, 1))
    logits = np.einsum("tnh,snh->ts", *map(rope, (q, k)))
    places = np.array(list(itertools.product(*map(range, rope.shape))))
    found = {}
    for t, s in itertools.product(range(T), repeat=2):
        found.setdefault(tuple(places[t] - places[s]), []).append(logits[t, s])
    assert len(found) == math.prod(2 * n - 1 for n in rope.shape)
    for same in found.values():
        np.testing.assert_allclose(same, same[0], atol=1e-5)
    first = np.array([same[0] for same in found.values()])
    assert len(np.unique(first.round(3))) > 0.9 * len(first), "other differences have other logits"


def test_tokens_off_the_grid_are_not_rotated():
    rope, size = ROPES["behind a prompt, with tokens beyond"]
    x = inputs(T, N, size)
    out = np.asarray(rope(x))
    off = [*range(8), *range(19, T)]  # the grid's own first token stands at 0, too
    np.testing.assert_array_equal(out[off], x[off])
    assert np.all(np.abs(out[8:19] - x[8:19]).max((1, 2)) > 0.01)


def test_it_is_a_value_and_keeps_the_dtype():
    rope = sl.Rope(100, [5, 6], np.int64(3), sizes=np.array([4, 8]))
    assert rope == sl.Rope(100.0, (5, 6), 3, (4, 8)) == pickle.loads(pickle.dumps(rope))
    assert hash(rope) == hash(sl.Rope(100.0, (5, 6), 3, (4, 8))) and rope != sl.Rope(100.0, (5, 6), 3)
    assert repr(rope).startswith("Rope(theta=100.0, shape=(5, 6), offset=3, sizes=(4, 8), ")
    half = rope(inputs(T, N, 12).astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), turned(rope, inputs(T, N, 12)), atol=0.03)


def test_the_short_form_is_the_same_layer():
    options = {"pattern": "all", "seq_len": T}
    dense = nnx.MultiHeadAttention(N, 8, decode=False, rngs=nnx.Rngs(0))
    for make in (
        lambda **more: sl.SparseSelfAttention(N, 8, rngs=nnx.Rngs(0), **options, **more),
        lambda **more: sl.SparseTransformerBlock(N, 8, rngs=nnx.Rngs(0), **options, **more),
        lambda **more: sl.from_nnx(dense, **options, **more),
        lambda **more: sl.SparseTransformer(
            4, N, 8, 1, patterns="all", seq_len=T, positions="rope", rngs=nnx.Rngs(0), **more
        ),
    ):
        short, long = nnx.graphdef(make(rope_theta=50.0)), nnx.graphdef(make(rope=sl.Rope(50.0)))
        assert short == long != nnx.graphdef(make(rope=sl.Rope(50.0, (5, 6))))


def test_options_are_checked_by_their_names():
    check_settings(rope=None)
    check_settings(rope=sl.Rope())
    with pytest.raises(TypeError, match=r"rope must be a Rope, as sl.Rope\(shape=\(16, 16\)\), or None, got 1.0"):
        check_settings(rope=1.0)


@pytest.mark.parametrize(
    ("shape", "positions", "error", "says"),
    [
        ((4,), None, ValueError, "x must have shape .*got \\(4,\\)"),
        ((12, 1, 4), np.arange(3), ValueError, "positions .*got \\(12, 1, 4\\) and \\(3,\\)"),
        ((3, 1, 4), np.arange(3) / 2, TypeError, "positions integers, got float32 and float"),
    ],
)
def test_calls_are_checked(shape, positions, error, says):
    with pytest.raises(error, match=says):
        sl.Rope()(jnp.ones(shape), positions)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"x must be floats .*got int32"):
        sl.Rope()(jnp.ones((3, 1, 4), jnp.int32))


# --- scalings --------------------------------------------------------------------------------------------------------


def llama3(frequency, factor, length, low, high):
    """One pair's, in the three cases of Llama 3.1's own code."""
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn(pairs, theta, factor, length, fast, slow, rounded=True):
    """The paper's: a pair whose number of turns within length lies between slow and fast is a mixture."""
    first, last = (pairs * math.log(length / (2 * math.pi * turns)) / math.log(theta) for turns in (fast, slow))
    first, last = (math.floor(first), math.ceil(last)) if rounded else (first, last)
    found = []
    for i in range(pairs):
        share = min(max((i - max(first, 0)) / (min(last, 2 * pairs - 1) - max(first, 0)), 0), 1)
        found.append(theta ** (-i / pairs) * (share / factor + 1 - share))
    return found


@pytest.mark.parametrize("pairs", [4, 32, 64])
def test_scaled_frequencies_are_those_of_their_definitions(pairs):
    plain = [500000.0 ** (-i / pairs) for i in range(pairs)]
    np.testing.assert_allclose(sl.Rope(500000.0).frequencies(pairs), plain, rtol=1e-12)
    linear = sl.LinearScaling(8).frequencies(500000.0, pairs)
    np.testing.assert_allclose(linear, [x / 8 for x in plain], rtol=1e-12)
    scaled = sl.Llama3Scaling(32.0, 4096, 2.0, 5.0).frequencies(500000.0, pairs)
    np.testing.assert_allclose(scaled, [llama3(x, 32.0, 4096, 2.0, 5.0) for x in plain], rtol=1e-12)
    for rounded in (True, False):
        scaled = sl.YarnScaling(4.0, 32768, fast=20.0, slow=2.0, rounded=rounded).frequencies(500000.0, pairs)
        np.testing.assert_allclose(scaled, yarn(pairs, 500000.0, 4.0, 32768, 20.0, 2.0, rounded), rtol=1e-12)
    assert len({round(a / b, 6) for a, b in zip(scaled, plain, strict=True)}) > 2


def test_scaled_embeddings_rotate_and_grow():
    x, positions = inputs(3, N, 12), np.array([5, 40, 7])
    scaling = sl.YarnScaling(16.0, 64)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    rope, size = sl.Rope(100.0, rotary_dim=8, scaling=scaling), 8
    found = np.asarray(rope(x, jnp.asarray(positions)))
    np.testing.assert_array_equal(found[..., size:], x[..., size:])
    pairs = found[..., : size // 2] + 1j * found[..., size // 2 : size]
    original = x[..., : size // 2] + 1j * x[..., size // 2 : size]
    angles = positions[:, None, None] * np.array(yarn(4, 100.0, 16.0, 64, 32.0, 1.0))
    np.testing.assert_allclose(pairs, scaling.attention_factor * original * np.exp(1j * angles), atol=1e-5)
    assert sl.YarnScaling(0.5, 64).attention_factor == 1 and sl.YarnScaling(4, 64, attention_factor=2).rounded


def test_longrope_divides_each_frequency_by_a_factor_of_the_models_length():
    short, long = (1.0, 1.5, 2.0), [1.0, 3.0, 9.0]
    plain = sl.Rope().frequencies(3)
    for length, factors in ((64, short), (65, long)):
        scaling = sl.LongRopeScaling(short, long, original_length=64, length=length, attention_factor=1.25)
        rope = sl.Rope(rotary_dim=6, scaling=scaling)
        np.testing.assert_allclose(rope.frequencies(3), plain / factors)
        x = inputs(9, 1, 8)
        angles = np.arange(9)[:, None] * plain / factors
        a, b, rest = x[:, 0, :3], x[:, 0, 3:6], x[:, 0, 6:]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        np.testing.assert_allclose(rope(x)[:, 0], np.concatenate([1.25 * np.hstack(turned), rest], -1), atol=1e-5)
        assert hash(rope) == hash(sl.Rope(rotary_dim=6, scaling=scaling))
    with pytest.raises(ValueError, match="long_factors must be one for each of the 4 pairs, got 3"):
        sl.Rope(scaling=scaling)(inputs(9, 1, 8))
