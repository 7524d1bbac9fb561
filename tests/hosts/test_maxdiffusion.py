"""The adapter of maxdiffusion, by a stub of that library's registry and of its call."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from examples.hosts.maxdiffusion.adapter import Cubes, sparse_kernel
from sparse_layers.tools.oracle import DenseAttention, budgets, largest_error

GRID = (3, 4, 5)
TOKENS, HEADS, SIZE = math.prod(GRID), 2, 16
SELF = ("activation_batch", "activation_self_attn_heads", "activation_self_attn_q_length", "activation_kv")
CROSS = tuple(name.replace("self", "cross") for name in SELF)
REGISTRY = {}


def register_kernel(name):
    """maxdiffusion's decorator."""

    def decorator(function):
        REGISTRY[name] = function
        return function

    return decorator


def apply_attention(kernel, q, k, v, mask=None, axis_names=SELF, scale=SIZE**-0.5, is_causal=False):
    """maxdiffusion's call of a kernel, with the entries of its context that say what to compute."""
    context = {"heads": HEADS, "dim_head": SIZE, "scale": scale, "attention_mask": mask, "is_causal": is_causal}
    return REGISTRY[kernel](q, k, v, context | {"axis_names_q": axis_names, "mesh": None, "dtype": q.dtype})


def arrays_of(keys, batch=2):
    """q, k, v [B, tokens, N * H] and a gradient of the result."""
    random = jax.random.split(jax.random.key(keys), 4)
    shapes = [(batch, n, HEADS * SIZE) for n in (TOKENS, keys, keys, TOKENS)]
    return [jax.random.normal(key, shape) for key, shape in zip(random, shapes, strict=True)]


def check(kernel, arrays, allowed, **options):
    """Compares a registered kernel with dense attention in float64, values and gradients."""
    *qkv, dout = arrays
    out, pullback = jax.vjp(lambda *x: apply_attention(kernel, *x, **options), *qkv)
    by_head = [np.asarray(x).reshape(*x.shape[:2], HEADS, SIZE) for x in arrays]
    dense = [
        DenseAttention(*by_head[:3], allowed, by_head[3], scale=options.get("scale"), dtype=dtype)
        for dtype in (np.float64, np.float32)
    ]
    limits = budgets(dense[0].answers, dense[1].answers, dense[0].root_sum_squares(), np.float32)
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *pullback(dout)), strict=True):
        right = dense[0].answers[name]
        assert largest_error(x.reshape(right.shape), right) <= limits[name], name


def test_self_attention_has_the_pattern_and_the_scale():
    pattern = "sliding_tile:kernel=1x3x3,tile=1x1x1"
    register_kernel("sparse")(sparse_kernel(GRID, pattern))
    allowed = sl.preset("sliding_tile", shape=GRID, kernel=(1, 3, 3), tile=1).dense(TOKENS, TOKENS)
    assert 0 < allowed.mean() < 0.3
    check("sparse", arrays_of(TOKENS), allowed)
    check("sparse", arrays_of(TOKENS), allowed, scale=0.5)


def test_heads_take_several_masks_in_turn():
    masks = sl.preset("spatial_temporal", shape=GRID, multiplier=1, block=4)
    register_kernel("sparse")(sparse_kernel(GRID, "spatial_temporal:multiplier=1,block=4"))
    check("sparse", arrays_of(TOKENS), np.stack([mask.dense(TOKENS, TOKENS) for mask in masks])[None])


def test_arrays_by_head_have_the_same_result():
    register_kernel("sparse")(sparse_kernel(GRID, sl.preset("radial", shape=GRID)))
    q, k, v, _ = arrays_of(TOKENS)
    by_head = [x.reshape(*x.shape[:2], HEADS, SIZE).swapaxes(1, 2) for x in (q, k, v)]
    assert np.array_equal(apply_attention("sparse", *by_head), apply_attention("sparse", q, k, v))


def test_cross_attention_sees_all_keys():
    register_kernel("sparse")(sparse_kernel(GRID, "radial"))
    check("sparse", arrays_of(7), True)
    check("sparse", arrays_of(TOKENS), True, axis_names=CROSS)  # as many keys as queries


@pytest.mark.parametrize("rows", [1, 2])
def test_a_padding_mask_hides_keys(rows):
    """A query without keys gets 0, as in maxdiffusion's dense attention."""
    register_kernel("sparse")(sparse_kernel(GRID, "radial"))
    mask = jnp.array([[True] * 3 + [False] * 4, [False] * 7])[-rows:]
    check("sparse", arrays_of(7), np.asarray(mask)[:, None, None], mask=mask)
    assert not apply_attention("sparse", *arrays_of(7)[:3], mask=mask)[-1].any()


def test_a_padding_mask_of_self_attention_joins_the_pattern():
    register_kernel("sparse")(sparse_kernel(GRID, "radial"))
    mask = jnp.arange(TOKENS)[None] < jnp.array([[40], [60]])
    allowed = sl.preset("radial", shape=GRID).dense(TOKENS, TOKENS) & np.asarray(mask)[:, None, None]
    check("sparse", arrays_of(TOKENS), allowed, mask=mask)


@pytest.mark.parametrize("cube", [(2, 2, 2), (3, 4, 5), (1, 2, 3)])
def test_cubes_select_the_cubes_of_the_highest_products(cube):
    """The grid ends within cubes, or is one."""
    q, k, *_ = arrays = arrays_of(TOKENS)
    counts = [-(-n // side) for n, side in zip(GRID, cube, strict=True)]
    count = min(3, math.prod(counts))
    register_kernel("sparse")(sparse_kernel(GRID, Cubes(count, cube)))
    cube_of = np.zeros(TOKENS, int)
    for token in range(TOKENS):
        coordinates = np.unravel_index(token, GRID)
        cube_of[token] = np.ravel_multi_index([x // side for x, side in zip(coordinates, cube, strict=True)], counts)
    allowed = np.zeros((2, HEADS, TOKENS, TOKENS), bool)
    for entry, head, number in np.ndindex(2, HEADS, math.prod(counts)):
        features = slice(head * SIZE, (head + 1) * SIZE)
        query = np.asarray(q[entry, cube_of == number, features], np.float64).mean(0)
        keys = [np.asarray(k[entry, cube_of == x, features], np.float64).mean(0) for x in range(math.prod(counts))]
        scores = np.array([query @ key for key in keys])
        scores[number] = np.inf
        selected = np.argsort(-scores)[:count]
        allowed[entry, head, cube_of == number] = np.isin(cube_of, selected)
    check("sparse", arrays, allowed)


def test_what_it_does_not_compute_is_refused_by_name():
    register_kernel("sparse")(sparse_kernel(GRID, "radial"))
    register_kernel("cubes")(sparse_kernel(GRID, Cubes(2)))
    arrays = arrays_of(TOKENS)[:3]
    with pytest.raises(ValueError, match="is_causal must be False, got True; write attention=dot_product"):
        apply_attention("sparse", *arrays, is_causal=True)
    with pytest.raises(ValueError, match=r"grid must have the 7 tokens of self-attention, got \(3, 4, 5\)"):
        apply_attention("sparse", *(x[:, :7] for x in arrays))
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 60\] or \[1, 60\], got \(2, 1, 60\)"):
        apply_attention("sparse", *arrays, mask=jnp.ones((2, 1, TOKENS), bool))
    with pytest.raises(ValueError, match=r"attention_mask must be None with Cubes, got \(2, 60\); write a preset"):
        apply_attention("cubes", *arrays, mask=jnp.ones((2, TOKENS), bool))
    with pytest.raises(ValueError, match="unknown"):
        sparse_kernel(GRID, "no_preset")


@pytest.mark.parametrize("grid", [256, (16, 16), (3.0, 4, 5), (3, 0, 5), "3x4x5", None, np.array([3, 4, 5])])
def test_a_wrong_grid_is_named(grid):
    with pytest.raises(ValueError, match=r"grid must be frames, height and width, .*got .*; write grid=\(21, 45, 80\)"):
        sparse_kernel(grid, "radial")


@pytest.mark.parametrize(
    "options",
    [((4, 4, 4), 3), (0,), (-1,), (2.5,), (2, (5, 5, 5)), (2, (4, 4)), (2, (4, 0, 4)), (2, 4)],
)
def test_wrong_cubes_are_named(options):
    with pytest.raises(
        ValueError, match=r"pattern must have integers >= 1, .* <= 64, got Cubes\(count=.*; write Cubes"
    ):
        Cubes(*options)


@pytest.mark.parametrize("pattern", ["radial:shape=3x4x5", "sliding_window:window=4", "causal"])
def test_a_preset_with_its_own_shape_or_without_one_is_named(pattern):
    with pytest.raises(ValueError, match=f"pattern must name a preset of grids, .*got '{pattern}'; write pattern="):
        sparse_kernel(GRID, pattern)


@pytest.mark.parametrize("pattern", [None, 3, Cubes, sl.MoBA()])
def test_no_pattern_is_refused_before_the_kernel_exists(pattern):
    with pytest.raises(TypeError, match=r"mask must be a Mask .*got"):
        sparse_kernel(GRID, pattern)
