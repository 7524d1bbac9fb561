"""Compares the adapter with maxdiffusion's dense path, in a checkout of it: values and gradients.

Run it from the root of a clone of sparse_layers, which needs no installation:
python -m examples.hosts.maxdiffusion.check PATH_TO_CHECKOUT
"""

import math
import pathlib
from collections.abc import Callable
from typing import Any

if not __package__:  # started by the name of this file
    raise SystemExit(__doc__)

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from ..checks import Table, import_host, path_argument, with_gradients
from .adapter import Cubes, sparse_kernel

GRID, CUBE = (6, 8, 10), (3, 4, 4)
TOKENS, BATCH, HEADS, SIZE = math.prod(GRID), 2, 4, 32
PATTERNS: dict[str, Any] = {
    "all": sl.Full(),
    "radial": "radial",
    "sliding_tile": "sliding_tile:kernel=3x3x1,tile=1x2x5",
    "spatial_temporal": "spatial_temporal:multiplier=1,block=8",
    "cubes": Cubes(count=3, cube=CUBE),
}


def arrays_of(keys: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Returns q, k, v and a gradient of the result, as [B, tokens, heads * size]."""
    lengths = (TOKENS, keys, keys, TOKENS)
    random = jax.random.split(jax.random.key(keys), 4)
    return [jax.random.normal(x, (BATCH, n, HEADS * SIZE), dtype) for x, n in zip(random, lengths, strict=True)]


def by_head(x: jax.Array) -> jax.Array:
    """Returns [B, N, T, H] of [B, T, N * H], as maxdiffusion has q, k and v after rotary positions."""
    return x.reshape(*x.shape[:2], HEADS, SIZE).swapaxes(1, 2)


def allowed_by(pattern: str, q: jax.Array, k: jax.Array) -> np.ndarray:
    """Returns the pairs of a pattern, bool [1 or B, 1 or N, T, T]."""
    if pattern != "cubes":
        name, _, options = PATTERNS[pattern].partition(":")
        masks: Any = sl.as_masks(f"{name}:shape={'x'.join(map(str, GRID))}{options and ','}{options}")
        return np.stack([masks[head % len(masks)].dense(TOKENS, TOKENS) for head in range(HEADS)])[None]
    counts = [-(-n // side) for n, side in zip(GRID, CUBE, strict=True)]
    coordinates = np.unravel_index(np.arange(TOKENS), GRID)
    number = np.ravel_multi_index([x // side for x, side in zip(coordinates, CUBE, strict=True)], counts)
    members = number == np.arange(math.prod(counts))[:, None]
    mean_q, mean_k = (
        np.einsum("ct,bnth->bnch", members / members.sum(1, keepdims=True), np.asarray(by_head(x))) for x in (q, k)
    )
    scores = mean_q @ mean_k.swapaxes(2, 3) + np.where(np.eye(len(members)), np.inf, 0)
    selected = scores >= np.sort(scores, axis=-1)[..., -3, None]
    return selected[:, :, number][..., number]


class Host:
    """maxdiffusion's attention in a checkout, with the adapter in its registry under the names of `PATTERNS`."""

    def __init__(self, checkout: str):
        models = "maxdiffusion.models"
        self.flax, self.wan = import_host(
            pathlib.Path(checkout) / "src", f"{models}.attention_flax", f"{models}.wan.transformers.transformer_wan"
        )
        self.mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), ("data", "fsdp", "context", "tensor")
        )
        for name, pattern in PATTERNS.items():
            self.flax.register_kernel(name)(sparse_kernel(GRID, pattern))

    def attend(
        self, kernel: str, scale: float = SIZE**-0.5, mask: Any = None, **options: Any
    ) -> Callable[..., jax.Array]:
        """Returns maxdiffusion's call of a kernel of its registry."""
        op = self.flax.NNXAttentionOp(self.mesh, kernel, scale, HEADS, SIZE, float32_qk_product=False, **options)
        return lambda q, k, v: op.apply_attention(q, k, v, attention_mask=mask)

    def dense(self, allowed: np.ndarray) -> Callable[..., jax.Array]:
        """Returns maxdiffusion's dense attention to the pairs of a pattern."""
        bias = jnp.where(allowed, 0.0, -1e30)
        options = (HEADS, SIZE, SIZE**-0.5, True, False, False, bias)
        return lambda q, k, v: self.flax._apply_attention_dot(q, k, v, q.dtype, *options)


def check_attention(host: Host, table: Table) -> None:
    """Compares calls of attention."""
    self_arrays, cross_arrays = arrays_of(TOKENS), arrays_of(24)
    square_cross = {"axis_names_q": ("activation_batch", "activation_cross_attn_heads", None, None)}
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, (BATCH, 24)).at[0].set(False)  # an entry without keys
    cases: dict[str, tuple[Any, Any, list[jax.Array]]] = {
        "self-attention, all keys": ("all", {}, self_arrays),
        "scale 0.5": ("all", {"scale": 0.5}, self_arrays),
        "bfloat16": ("all", {"dtype": jnp.bfloat16}, arrays_of(TOKENS, jnp.bfloat16)),
        "padding mask [B, S] of self-attention": (
            "all",
            {"mask": jnp.arange(TOKENS)[None] < jnp.array([[90], [480]])},
            self_arrays,
        ),
        "cross-attention to 24 keys": ("radial", {}, cross_arrays),
        "cross-attention to as many keys": ("radial", square_cross, self_arrays),
        "padding mask [B, S], an entry without keys": ("radial", {"mask": mask}, cross_arrays),
        "padding mask [1, S]": ("radial", {"mask": mask[1:]}, cross_arrays),
    }
    for name, (kernel, options, arrays) in cases.items():
        ours, theirs = (with_gradients(host.attend(x, **options)) for x in (kernel, "dot_product"))
        table.compare(name, ours, theirs, *arrays)
    theirs = with_gradients(host.attend("dot_product"))
    ours = with_gradients(lambda *x: host.attend("all")(*map(by_head, x)))
    table.compare("arrays [B, heads, T, size]", ours, theirs, *self_arrays)
    for name in ("radial", "sliding_tile", "spatial_temporal", "cubes"):
        dense = with_gradients(host.dense(allowed_by(name, *self_arrays[:2])))
        table.compare(f"pattern {name}", with_gradients(host.attend(name)), dense, *self_arrays)


def check_refusals(host: Host, table: Table) -> None:
    """Checks that calls with another meaning end in an error."""
    q, k, v, _ = arrays_of(TOKENS)
    context = {"heads": HEADS, "scale": 1.0, "attention_mask": None, "axis_names_q": (), "is_causal": True}
    kernels, mask = host.flax.KERNEL_REGISTRY, jnp.ones((BATCH, TOKENS), bool)
    table.refuse("is_causal=True", lambda: kernels["radial"](q, k, v, context), "is_causal")
    table.refuse("another grid", lambda: host.attend("radial")(q[:, 1:], k[:, 1:], v[:, 1:]), "grid")
    table.refuse("a mask of other keys", lambda: host.attend("radial", mask=mask[:, 1:])(q, k, v), "attention_mask")
    table.refuse("cubes with a mask", lambda: host.attend("cubes", mask=mask)(q, k, v), "attention_mask")


def check_blocks(host: Host, table: Table) -> None:
    """Compares Wan's block, and its attention to an image and to text, with the weights that JAX draws."""
    from flax import nnx

    width, hidden, text, image = HEADS * SIZE, 64, 8, 128
    random = iter(jax.random.split(jax.random.key(1), 9))
    x, dout = (jax.random.normal(next(random), (BATCH, TOKENS, width)) for _ in range(2))
    source = jax.random.normal(next(random), (BATCH, image + text, width))
    noise = jax.random.normal(next(random), (BATCH, 6, width))
    angle = jax.random.normal(next(random), (1, 1, TOKENS, SIZE // 2))
    rotary, mask = jnp.exp(1j * angle), jnp.arange(image + text)[None].repeat(BATCH, 0) < 100

    def block(kernel: str) -> Callable[..., jax.Array]:
        options: dict[str, Any] = {"cross_attn_norm": True, "mesh": host.mesh, "attention": kernel}
        module = host.wan.WanTransformerBlock(nnx.Rngs(0), width, hidden, HEADS, **options)
        return lambda x, source, noise: module(x, source[:, :text], noise, rotary)

    def image_attention(kernel: str) -> Callable[..., jax.Array]:
        sizes = {"heads": HEADS, "dim_head": SIZE, "added_kv_proj_dim": width, "image_seq_len": 100}
        options: dict[str, Any] = {"is_self_attention": False, "attention_kernel": kernel, "mesh": host.mesh}
        module = host.flax.FlaxWanAttention(nnx.Rngs(0), width, **sizes, **options)
        return lambda x, source, _: module(x, source, encoder_attention_mask=mask)

    for name, build in {"a block of Wan": block, "attention to image and text": image_attention}.items():
        ours, theirs = (with_gradients(build(kernel)) for kernel in ("all", "dot_product"))
        table.compare(name, ours, theirs, x, source, noise, dout)


def main() -> None:
    """Runs all checks of the checkout that the command line names."""
    host, table = Host(path_argument(__doc__, "path to a checkout of maxdiffusion")), Table()
    check_attention(host, table)
    check_refusals(host, table)
    with jax.set_mesh(host.mesh):
        check_blocks(host, table)
    table.exit()


if __name__ == "__main__":
    main()
