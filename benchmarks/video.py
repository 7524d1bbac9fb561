"""Attention of a video model on a GPU, alone and in a whole block, beside cuDNN's dense attention.

    python -m benchmarks.video --record video.json

The shape is that of Wan 2.1 with 14 billion parameters at 720p: 21 x 45 x 80 = 75,600 tokens, 40 heads of 128, width
5,120, 13,824 hidden features, cross-attention to 512 tokens of text, one sample, bfloat16. Weights are random.

All contenders but "dense" call the kernel of examples/hosts/maxdiffusion/adapter.py, the arrays as maxdiffusion hands
them over: [B, N, T, H] from rotary positions. "pairs" is the share of all pairs that a token attends to:

- "radial": Radial Attention's mask for this grid;
- "sliding tiles": 3 x 3 x 3 tiles of 4 x 8 x 8 tokens;
- "cubes": each cube of 3 x 5 x 4 queries selects 10 % of the cubes of keys by its mean query and their mean keys.

Each is checked on a small grid against float64, values and gradients, by a rule written out here. GB are those of the
compiled program's memory plan. The block is differentiated with regard to its input and its weights.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from examples.hosts.maxdiffusion.adapter import Cubes, sparse_kernel

from .record import Record, add_option
from .steps import check_attention, forward_backward, measure, reserve_memory

Grid = tuple[int, int, int]
Attention = Callable[..., jax.Array]
SHARE = 0.1  # of the cubes that a cube selects
NAMES = ("radial", "sliding tiles", "cubes", "dense")
SMALL, SMALL_TILE = (7, 12, 16), (2, 3, 4)  # grid and tiles of the check; cubes do not divide it


# --- attention -------------------------------------------------------------------------------------------------------


def pattern(name: str, grid: Grid, tile: Grid, cube: Grid) -> Any:
    """Returns the pattern of a name on a grid; "cubes" select 10 % of the cubes, and at least 2."""
    if name == "cubes":
        return Cubes(max(2, round(SHARE * number_of_cubes(grid, cube))), cube)
    return sl.preset("radial", shape=grid) if name == "radial" else sl.preset("sliding_tile", shape=grid, tile=tile)


def number_of_cubes(grid: Grid, cube: Grid) -> int:
    """Returns the number of cubes that cover a grid."""
    return math.prod(-(-n // side) for n, side in zip(grid, cube, strict=True))


def attention(name: str, *grid_tile_cube: Grid) -> Attention:
    """Returns attention [B, T, N * H] of q, k and v [B, T, N, H] on a grid, or of q to another number of keys."""
    if name == "dense":
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        return lambda q, k, v: attend(q, k, v).reshape(*q.shape[:2], -1)
    kernel = sparse_kernel(grid_tile_cube[0], pattern(name, *grid_tile_cube))

    def attend_by_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        heads, features = q.shape[2:]
        context = {"heads": heads, "scale": features**-0.5, "attention_mask": None, "axis_names_q": ()}
        return kernel(*(x.swapaxes(1, 2) for x in (q, k, v)), context)

    return attend_by_kernel


# --- the rules once more, pair by pair --------------------------------------------------------------------------------


def allowed_pairs(name: str, grid: Grid, tile: Grid, cube: Grid, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns the pairs that may attend, bool [N or 1, T, T], for q and k [T, N, H]."""
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(grid)), grid), axis=1)
    if name == "dense":
        return np.ones((1, 1, 1), bool)
    if name == "radial":
        size = grid[1] * grid[2]
        frame, token = np.divmod(np.arange(math.prod(grid)), size)
        frames, tokens = abs(frame[:, None] - frame), abs(token[:, None] - token)
        power = 2 ** np.floor(np.log2(np.maximum(frames, 1))).astype(int)
        return (((tokens + 1) * power <= size) | ((tokens == 0) & (frames % -(-power // size) == 0)))[None]
    if name == "sliding tiles":
        number = coordinates // tile
        first = np.clip(number - 1, 0, -(-np.array(grid) // tile) - 3)[:, None]
        return np.all((first <= number) & (number < first + 3), axis=-1)[None]
    counts = -(-np.array(grid) // cube)
    number = np.ravel_multi_index(tuple((coordinates // cube).T), tuple(counts))
    members = (number == np.arange(counts.prod())[:, None]).astype(np.float64)
    mean_q, mean_k = (np.einsum("ct,tnh->cnh", members, x) / members.sum(1)[:, None, None] for x in (q, k))
    scores = np.einsum("cnh,dnh->ncd", mean_q, mean_k)
    np.einsum("ncc->nc", scores)[:] = np.inf  # its own cube first
    rank = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
    return (rank < max(2, round(SHARE * len(members))))[:, number][:, :, number]


def check(record: Record, options: argparse.Namespace) -> None:
    """Compares every attention with float64 on the small grid."""
    keys = jax.random.split(jax.random.key(1), 4)
    shape = (1, math.prod(SMALL), 2, options.width // options.heads)
    arrays = [jax.random.normal(key, shape, options.dtype) for key in keys]
    q, k = (np.asarray(x[0]).astype(np.float64) for x in arrays[:2])
    for name in options.patterns:
        attend = attention(name, SMALL, SMALL_TILE, options.cube)
        allowed = allowed_pairs(name, SMALL, SMALL_TILE, options.cube, q, k)
        share = check_attention(lambda q, k, v, attend=attend: attend(q, k, v).reshape(q.shape), arrays, allowed)
        record.say(
            f"{name}: values and gradients on {' x '.join(map(str, SMALL))} tokens within {share:.2f} of the budget"
        )
        record.add(check=name, grid=SMALL, share_of_budget=share)


# --- a block ---------------------------------------------------------------------------------------------------------


def random_weights(options: argparse.Namespace) -> dict[str, jax.Array]:
    """Returns the weights of a block; each of the two attentions has q, k, v, out and two norms."""
    width = options.width
    shapes: dict[str, tuple[int, ...]] = {"modulation": (6, width), "norm": (2, width)}
    layers = {f"{one}_{name}": (width, width) for one in ("self", "cross") for name in ("q", "k", "v", "out")}
    layers |= {"up": (width, options.hidden), "down": (options.hidden, width)}
    for name, shape in layers.items():
        shapes |= {name: shape, f"{name}_bias": shape[1:]}
    shapes |= {f"{one}_norm_{name}": (width,) for one in ("self", "cross") for name in "qk"}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return {
        name: draw(key, shape, jnp.dtype(options.dtype)) * (shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def linear(x: jax.Array, weights: dict[str, jax.Array], name: str) -> jax.Array:
    """A dense layer."""
    return x @ weights[name] + weights[f"{name}_bias"]


def normalized(x: jax.Array) -> jax.Array:
    """Features with mean 0 and variance 1, in float32."""
    wide = x.astype(jnp.float32)
    return (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-6)


def rms_normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Features over the root of their mean square, over all heads."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def rotated(x: jax.Array, grid: Grid) -> jax.Array:
    """Rotates pairs of features of [B, T, N, H] by the frame, the row and the column of their token."""
    half = x.shape[-1] // 2
    sizes = (half - 2 * (half // 3), half // 3, half // 3)  # pairs for each axis
    coordinates = np.unravel_index(np.arange(math.prod(grid)), grid)
    angles = [p[:, None] * 10000.0 ** (-np.arange(n) / n) for p, n in zip(coordinates, sizes, strict=True)]
    angle = np.concatenate(angles, axis=1)[:, None]
    cos, sin = (jnp.asarray(f(angle), x.dtype) for f in (np.cos, np.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def block(attend: Attention, options: argparse.Namespace) -> Callable[..., jax.Array]:
    """Returns a block: a function of weights, tokens [B, T, width], text [B, S, width], noise level [B, 6, width]."""

    def attended(weights: Any, one: str, x: jax.Array, source: jax.Array) -> jax.Array:
        q = rms_normalized(linear(x, weights, f"{one}_q"), weights[f"{one}_norm_q"])
        k = rms_normalized(linear(source, weights, f"{one}_k"), weights[f"{one}_norm_k"])
        v = linear(source, weights, f"{one}_v")
        q, k, v = (y.reshape(*y.shape[:2], options.heads, -1) for y in (q, k, v))
        if one == "self":
            q, k = rotated(q, options.grid), rotated(k, options.grid)
        return linear(attend(q, k, v), weights, f"{one}_out")

    def apply_block(weights: Any, x: jax.Array, text: jax.Array, noise: jax.Array) -> jax.Array:
        modulation = (weights["modulation"] + noise).astype(jnp.float32)[:, :, None]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.swapaxes(0, 1)
        y = (normalized(x) * (1 + scale) + shift).astype(x.dtype)
        x = x + (attended(weights, "self", y, y) * gate).astype(x.dtype)
        y = (normalized(x) * weights["norm"][0] + weights["norm"][1]).astype(x.dtype)
        x = x + attended(weights, "cross", y, text)
        y = (normalized(x) * (1 + mlp_scale) + mlp_shift).astype(x.dtype)
        y = linear(jax.nn.gelu(linear(y, weights, "up")), weights, "down")
        return x + (y * mlp_gate).astype(x.dtype)

    return apply_block


# --- measurements ----------------------------------------------------------------------------------------------------

COLUMNS = ("attention forward", "attention forward + backward", "block forward", "block forward + backward")


def share_of_pairs(name: str, options: argparse.Namespace) -> float:
    """Returns the share of all pairs that tokens attend to; of masks, that of 500 queries."""
    if name == "dense":
        return 1.0
    allowed = pattern(name, *options.sizes)
    if isinstance(allowed, Cubes):
        return allowed.count / number_of_cubes(options.grid, options.cube)
    tokens = math.prod(options.grid)
    return float(allowed(np.linspace(0, tokens - 1, 500).astype(int)[:, None], np.arange(tokens)[None]).mean())


def programs(name: str, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Yields the functions of the columns with their arrays."""
    keys, attend = iter(jax.random.split(jax.random.key(2), 6)), attention(name, *options.sizes)
    tokens = math.prod(options.grid)

    def draw(*shape: int) -> jax.Array:
        return jax.jit(jax.random.normal, static_argnums=(1, 2))(next(keys), shape, options.dtype)

    arrays = [draw(1, tokens, options.heads, options.width // options.heads) for _ in range(3)]
    dout = draw(1, tokens, options.width)
    yield attend, *arrays
    yield forward_backward(attend, 3), *arrays, dout
    x, text = arrays.pop().reshape(dout.shape), draw(1, options.text, options.width)
    del arrays
    apply, weights, noise = block(attend, options), random_weights(options), draw(1, 6, options.width)
    yield apply, weights, x, text, noise

    def both(weights, x, text, noise, dout):
        return forward_backward(lambda weights, x: apply(weights, x, text, noise), 2)(weights, x, dout)

    yield both, weights, x, text, noise, dout


def row(record: Record, options: argparse.Namespace, name: str) -> None:
    """Measures one kind of attention."""
    share = share_of_pairs(name, options)
    cells = [name, f"{100 * share:.1f} %"]
    for column, (function, *arrays) in zip(COLUMNS, programs(name, options), strict=True):
        if time.monotonic() > options.deadline:
            cells += ["no time left", "-"]
            continue
        measured = measure(function, *arrays, seconds=4)
        cells += measured.cells()
        record.add(attention=name, step=column, pairs=share, **measured._asdict())
    record.say(f"| {' | '.join(cells)} |")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", nargs=3, type=int, default=[21, 45, 80], help="frames, rows and columns of tokens")
    parser.add_argument("--tile", nargs=3, type=int, default=[4, 8, 8], help="tokens in a sliding tile")
    parser.add_argument("--cube", nargs=3, type=int, default=[3, 5, 4], help="tokens in a cube, at most 64")
    parser.add_argument("--patterns", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=13824)
    parser.add_argument("--text", type=int, default=512, help="tokens of text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=int, default=420, help="after which no measurement begins")
    add_option(parser)
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    options.grid, options.tile, options.cube = options.sizes = [*map(tuple, (options.grid, options.tile, options.cube))]
    reserve_memory()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading + "\n")
    check(record, options)
    sizes = f"{options.heads} heads of {options.width // options.heads}, width {options.width}, {options.hidden} hidden"
    record.say(
        f"\n{' x '.join(map(str, options.grid))} tokens, {sizes}, {options.text} tokens of text, {options.dtype}\n"
    )
    columns = [cell for column in COLUMNS for cell in (f"{column}, ms", "GB")]
    record.say(f"| attention | pairs | {' | '.join(columns)} |\n| {' | '.join(['---'] * 10)} |")
    for name in options.patterns:
        row(record, options, name)
    record.write()


if __name__ == "__main__":
    main()
