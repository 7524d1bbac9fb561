"""Compares the adapter with levanter's `attn_backend: vanilla`, in a patched copy of it: values and gradients.

Run it from the root of a clone of sparse_layers, which needs no installation:
python -m examples.hosts.levanter.check PATH
"""

import functools
import importlib
import pathlib
import sys
import unittest.mock
from collections.abc import Callable
from typing import Any

if not __package__:  # started by the name of this file
    raise SystemExit(__doc__)

import jax
import jax.numpy as jnp

import sparse_layers as sl

from ..checks import Table, check_hook, path_argument, with_gradients

BATCH, TOKENS, KV_HEADS, GROUP, SIZE = 2, 256, 2, 2, 32
WINDOW = 40
ADAPTER, ATTENTION = "levanter/layers/sparse_adapter.py", "levanter/layers/attention.py"
HOOK = [
    (ADAPTER, "attend", "sl.block_sparse_attention", "which is the copy of adapter.py"),
    (ATTENTION, "AttentionBackend", 'SPARSE = "sparse"', "as a member"),
    (
        ATTENTION,
        "dot_product_attention",
        "case AttentionBackend.SPARSE:",
        "in the match, before VANILLA",
    ),
    (ATTENTION, "dot_product_attention", "sparse_adapter import attend", "in the case AttentionBackend.SPARSE"),
]


class Host:
    """levanter's attention in a folder that has hook.patch and the adapter."""

    def __init__(self, path: str):
        check_hook(pathlib.Path(path), HOOK)
        sys.path.insert(0, path)
        self.attention: Any = importlib.import_module("levanter.layers.attention")
        self.hax: Any = importlib.import_module("haliax")
        sizes = {"batch": BATCH, "kv_head": KV_HEADS, "q_heads_per_group": GROUP, "position": TOKENS, "head_size": SIZE}
        self.axes = {name: self.hax.Axis(name, size) for name, size in sizes.items()}
        self.keys = self.hax.Axis("key_position", TOKENS)

    def named(self, x: Any, *names: str) -> Any:
        """Returns an array with axes of levanter's attention; the last axis of values may have another size."""
        axes = [self.keys if name == "key_position" else self.axes[name] for name in names]
        return self.hax.named(x, axes)

    def attend(self, backend: str, mask: Any = None, **options: Any) -> Callable[..., Any]:
        """Returns levanter's `dot_product_attention` and its gradients; padding, of negative ids, is set to 0."""
        ids = getattr(mask, "segment_ids", None)

        def apply(q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any = None) -> jax.Array:
            query = self.named(q, "batch", "kv_head", "q_heads_per_group", "position", "head_size")
            key, value = (self.named(x, "batch", "kv_head", "key_position", "head_size") for x in (k, v))
            sink = None if sinks is None else self.named(sinks, "kv_head", "q_heads_per_group")
            names, more = ("position", "key_position", "head_size"), {"attn_sink": sink, **options}
            backends = self.attention.AttentionBackend
            out = self.attention.dot_product_attention(
                *names, query, key, value, mask, attn_backend=backends(backend), **more
            )
            out = out.rearrange(("batch", "position", "kv_head", "q_heads_per_group", "head_size")).array
            return out if ids is None else jnp.where(ids[0].array[:, :, None, None, None] < 0, 0, out)

        return jax.jit(with_gradients(apply))


def arrays_of(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Returns q, k, v in levanter's order of axes and a gradient of the result."""
    keys = (BATCH, KV_HEADS, TOKENS, SIZE)
    shapes = [(BATCH, KV_HEADS, GROUP, TOKENS, SIZE), keys, keys, (BATCH, TOKENS, KV_HEADS, GROUP, SIZE)]
    random = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(random, shapes, strict=True)]


def compare(host: Host, table: Table, name: str, arrays: list[jax.Array], **options: Any) -> None:
    """Compares the adapter with the dense path."""
    table.compare(name, *(host.attend(backend, **options) for backend in ("sparse", "vanilla")), *arrays)


def check_calls(host: Host, table: Table) -> None:
    """Compares calls of attention with the dense path."""
    masks, causal = host.attention.AttentionMask, host.attention.AttentionMask.causal()
    ids = host.named(sl.segment_ids_from_lengths([[100, 60, 70], [30, 200, 0]], TOKENS), "batch", "position")
    local = causal.with_sliding_window(WINDOW)
    dense = host.named(jax.random.bernoulli(jax.random.key(1), 0.3, (TOKENS, TOKENS)), "position", "key_position")
    dense = dense | host.named(jnp.eye(TOKENS, dtype=bool), "position", "key_position")
    cases: dict[str, dict[str, Any]] = {
        "causal, 2 query heads to a key head": {"mask": causal},
        "all keys, mask None": {},
        "causal, documents and padding": {"mask": causal.with_segment_ids(ids)},
        "all keys, documents": {"mask": masks().with_segment_ids(ids)},
        f"sliding window of {WINDOW}": {"mask": local},
        f"sliding window of {WINDOW}, documents": {"mask": local.with_segment_ids(ids)},
        "explicit mask": {"mask": masks.explicit(dense)},
        "explicit mask, causal": {"mask": masks.explicit(dense) & causal},
        "a named array as mask": {"mask": dense},
        "soft cap": {"mask": causal, "logits_soft_cap": 2.0},
        "scaling factor": {"mask": local, "scaling_factor": 0.3},
        "soft cap, window, documents": {"mask": local.with_segment_ids(ids), "logits_soft_cap": 2.0},
    }
    if hasattr(masks, "prefix_lm"):
        lengths = host.named(jnp.array([60, 0]), "batch")
        keys = host.named(jnp.arange(TOKENS)[None] % 50 < jnp.array([[5], [20]]), "batch", "key_position")
        cases |= {
            "prefix of 60": {"mask": masks.prefix_lm(prefix_length=60)},
            "prefix of 60, window, documents": {
                "mask": masks.prefix_lm(prefix_length=60, sliding_window=WINDOW).with_segment_ids(ids)
            },
            "prefixes by entry": {"mask": masks.prefix_lm(prefix_lengths=lengths)},
            "prefixes by entry, documents": {"mask": masks.prefix_lm(prefix_lengths=lengths).with_segment_ids(ids)},
            "prefix mask": {"mask": masks.prefix_lm(prefix_mask=keys, prefix_length=7)},
        }
    else:
        print("| prefixes | - | - | - | this levanter has none |")
    for name, options in cases.items():
        compare(host, table, name, arrays_of(), **options)
    compare(host, table, "bfloat16", arrays_of(jnp.bfloat16), mask=causal)
    *qkv, dout = arrays_of()
    sinks = jnp.linspace(-1, 2, KV_HEADS * GROUP).reshape(KV_HEADS, GROUP)
    compare(host, table, "sinks, window", [*qkv, sinks, dout], mask=local)
    tpu = functools.partial(sl.block_sparse_attention, implementation="pallas_tpu")
    with unittest.mock.patch.object(sl, "block_sparse_attention", tpu):
        compare(
            host, table, "window, documents, TPU kernels interpreted", arrays_of(), mask=local.with_segment_ids(ids)
        )


def check_refusals(host: Host, table: Table) -> None:
    """Checks that calls with another meaning end in an error."""
    masks, arrays = host.attention.AttentionMask, arrays_of()
    bias = host.named(jnp.zeros((TOKENS, TOKENS)), "position", "key_position")
    by_entry = host.named(jnp.ones((BATCH, TOKENS, TOKENS), bool), "batch", "position", "key_position")
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "bias": ({"bias": bias}, "bias"),
        "dropout": ({"dropout": 0.1, "inference": False, "prng": jax.random.key(0)}, "dropout"),
        "causal_offset": ({"mask": masks.causal(offset=2)}, "causal_offset"),
        "explicit mask by batch entry": ({"mask": masks.explicit(by_entry)}, "explicit_mask"),
    }
    for name, (options, words) in cases.items():
        table.refuse(name, lambda options=options: host.attend("sparse", **options)(*arrays), words)


def check_host(host: Host, table: Table) -> None:
    """Compares levanter's routes with sinks: with each other, and with a soft cap with the adapter."""
    causal = host.attention.AttentionMask.causal()
    *qkv, dout = arrays_of()
    arrays = [*qkv, jnp.linspace(-1, 4, KV_HEADS * GROUP).reshape(KV_HEADS, GROUP), dout]
    options = {"mask": causal, "flash_block_size": 64}
    flash, vanilla = (host.attend(backend, **options) for backend in ("jax_flash", "vanilla"))
    table.compare("levanter's jax_flash, sinks", flash, vanilla, *arrays, is_of_host=True)
    for backend in ("jax_flash", "vanilla"):
        routes = (host.attend(name, **options, logits_soft_cap=2.0) for name in (backend, "sparse"))
        table.compare(f"levanter's {backend}, sinks and soft cap", *routes, *arrays, is_of_host=True)


def main() -> None:
    """Runs all checks of the folder that the command line names."""
    host, table = Host(path_argument(__doc__, "the folder that holds levanter/, patched as README.md says")), Table()
    check_calls(host, table)
    check_refusals(host, table)
    check_host(host, table)
    table.exit()


if __name__ == "__main__":
    main()
