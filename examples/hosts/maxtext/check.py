"""Compares the adapter with MaxText's `attention=dot_product`, in a patched checkout of it: values and gradients.

Run it from the root of a clone of sparse_layers, which needs no installation:
python -m examples.hosts.maxtext.check PATH_TO_CHECKOUT
"""

import functools
import importlib
import logging
import pathlib
import sys
import unittest.mock
from collections.abc import Callable
from typing import Any

if not __package__:  # started by the name of this file
    raise SystemExit(__doc__)

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from ..checks import Table, check_hook, path_argument, with_gradients

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 256, 4, 2, 32
CHUNK, WINDOW = 48, 40
ADAPTER, OP = "layers/sparse_adapter.py", "layers/attention_op.py"
DECODING = '(self.attention_kernel == "sparse" and model_mode == MODEL_MODE_AUTOREGRESSIVE)'
HOOK = [
    (ADAPTER, "attend", "sl.block_sparse_attention", "which is the copy of adapter.py"),
    (OP, "apply_attention", "sparse_adapter.attend(", 'before `elif self.attention_kernel == "cudnn_flash_te"`'),
    (OP, "apply_attention", DECODING, "in the condition of `return self.apply_attention_dot`"),
    (OP, "__init__", '"sparse"', "in the names of block diffusion"),
    ("configs/types.py", "set_derived_and_validate_values", '"dot_product", "sparse")', "in the names of MoBA"),
    ("configs/types.py", "set_derived_and_validate_values", '"dot_product", "sparse", ', "in those of block diffusion"),
]
LOCAL: dict[str, Any] = {"kind": "local_sliding", "sliding_window_size": WINDOW}


class Host:
    """MaxText's attention in a checkout that has hook.patch and the adapter."""

    def __init__(self, checkout: str):
        self.source = pathlib.Path(checkout) / "src"
        check_hook(self.source / "maxtext", HOOK)
        sys.path.insert(0, str(self.source))
        self.op: Any = importlib.import_module("maxtext.layers.attention_op")
        self.types: Any = importlib.import_module("maxtext.common.common_types").AttentionType
        self.configs: Any = importlib.import_module("maxtext.configs.pyconfig")

    def attend(
        self,
        kernel: str,
        kind: str = "global",
        call: dict[str, Any] | None = None,
        mesh_sizes: dict[str, int] | None = None,
        mode: str = "train",
        **settings: Any,
    ) -> Callable[..., list[jax.Array]]:
        """Returns MaxText's call of an `AttentionOp` and its gradients; padding, of segment id 0, is set to 0.

        Args:
          kernel: ``attention:`` of MaxText's configuration.
          kind: ``attention_type:``.
          call: arguments of the call beside query, key and value.
          mesh_sizes: devices of each axis of the mesh that has more than one.
          mode: ``model_mode``.
          settings: arguments of `AttentionOp`, or entries of the configuration.
        """
        names = ("sliding_window_size", "chunk_attn_window_size", "attn_logits_soft_cap", "dropout_rate")
        options = {name: settings.pop(name) for name in names if name in settings}
        config = self.configs.initialize(
            ["check", str(self.source / "maxtext" / "configs" / "base.yml")],
            **{"run_name": "check", "enable_checkpointing": False, "max_target_length": TOKENS, "hardware": "cpu"},
            **{
                "skip_jax_distributed_system": True,
                "attention": kernel,
                "packing": False,
                "matmul_precision": "highest",
            },
            **settings,
        )
        sizes = [(mesh_sizes or {}).get(name, 1) for name in config.mesh_axes]
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), config.mesh_axes)
        heads = {"num_query_heads": HEADS, "num_kv_heads": KV_HEADS, "max_target_length": TOKENS}
        attention_type = {"attention_type": self.types(kind)}
        op = self.op.AttentionOp(config, mesh, kernel, **heads, **attention_type, **options)
        call = call or {}
        ids, others = call.get("ids"), {name: x for name, x in call.items() if name != "ids"}

        def apply(query: jax.Array, key: jax.Array, value: jax.Array, sinks: Any = None) -> jax.Array:
            cached = None if mode == "train" else [(key, value, ids), None]
            out = op(query, key, value, ids, None, mode, cached, sinks=sinks, **others)
            return out if ids is None else jnp.where(ids[:, :, None, None] == 0, 0, out)

        def results(*arrays: jax.Array) -> list[jax.Array]:
            from flax import linen

            with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
                return jax.jit(with_gradients(apply))(*arrays)

        return results


def arrays_of(dtype: Any = jnp.float32, value_size: int = SIZE) -> list[jax.Array]:
    """Returns q, scaled as MaxText scales it, k, v and a gradient of the result."""
    shapes = [(HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size), (HEADS, value_size)]
    random = jax.random.split(jax.random.key(0), 4)
    q, *others = [
        jax.random.normal(key, (BATCH, TOKENS, *shape), dtype) for key, shape in zip(random, shapes, strict=True)
    ]
    return [q * SIZE**-0.5, *others]


def check_calls(host: Host, table: Table) -> None:
    """Compares calls of attention with the dense path."""
    documents = sl.segment_ids_from_lengths([[100, 60, 70], [30, 200, 0]], TOKENS) + 1  # the last tokens have id 0
    spans = (jnp.arange(TOKENS) % 64 < 24) & (jnp.arange(TOKENS) >= 64) & jnp.array([[True], [False]])
    call, local = {"ids": documents}, LOCAL
    chunk = {"kind": "chunk", "chunk_attn_window_size": CHUNK}
    cases: dict[str, dict[str, Any]] = {
        "causal, 2 query heads to a key head": {},
        "causal, documents and padding": {"call": call},
        f"sliding window of {WINDOW}": local,
        f"sliding window of {WINDOW}, documents": local | {"call": call},
        f"chunks of {CHUNK}": chunk,
        f"chunks of {CHUNK}, documents": chunk | {"call": call},
        "full": {"kind": "full"},
        "full, documents": {"kind": "full", "call": call},
        "block diffusion": {"kind": "block_diffusion", "attention_type": "block_diffusion", "causal_block_size": 16},
        "images see themselves": {"call": {"bidirectional_mask": spans}},
        "soft cap": {"attn_logits_soft_cap": 2.0},
        "soft cap, window, documents": local | {"attn_logits_soft_cap": 2.0, "call": call},
        "prefill, documents": {"mode": "prefill", "call": call},
        "decoding, which stays MaxText's": {"mode": "autoregressive", "call": call},
    }
    for name, options in cases.items():
        compare(host, table, name, arrays_of(), **options)
    for kind in ("causal", "local"):
        *qkv, dout = arrays_of()
        options = {} if kind == "causal" else local
        compare(host, table, f"sinks, {kind}", [*qkv, jnp.linspace(-1, 2, HEADS), dout], **options)
    compare(host, table, "MLA, values of another size", arrays_of(value_size=16), kind="mla")
    compare(host, table, "bfloat16", arrays_of(jnp.bfloat16), float32_logits=True)
    for axes in ({"data": 2, "tensor": 2}, {"fsdp": 2, "context": 2}):
        options = local | {"call": call, "mesh_sizes": axes, "context_parallel_load_balance": False}
        compare(host, table, f"window, documents, devices {axes}", arrays_of(), **options)


def check_moba(host: Host, table: Table) -> None:
    """Compares MoBA with the dense path, whose chunks are those of the unchanged inputs also for the budget.

    Changed inputs select other chunks for some queries. A budget with these changes would allow wrong selections.
    """
    op, moba = host.op.AttentionOp, {"moba": True, "moba_chunk_size": 32, "moba_topk": 3}
    mask = op._generate_moba_mask
    documents = sl.segment_ids_from_lengths([[100, 60, 70], [30, 200, 0]], TOKENS) + 1
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "MoBA": (jnp.float32, {}),
        "MoBA, documents": (jnp.float32, {"call": {"ids": documents}}),
        "MoBA, bfloat16": (jnp.bfloat16, {"float32_logits": True}),
    }

    def mask_of(self: Any, unchanged: list[jax.Array], query: Any, key: Any, positions: Any) -> jax.Array:
        return mask(self, *unchanged, positions)

    for name, (dtype, options) in cases.items():
        arrays = arrays_of(dtype)
        with unittest.mock.patch.object(op, "_generate_moba_mask", functools.partialmethod(mask_of, arrays[:2])):
            compare(host, table, name, arrays, **moba, **options)


def compare(host: Host, table: Table, name: str, arrays: list[jax.Array], **options: Any) -> None:
    """Compares the adapter with the dense path."""
    ours, theirs = (host.attend(kernel, **options) for kernel in ("sparse", "dot_product"))
    table.compare(name, ours, theirs, *arrays)


def check_other_kernels(host: Host, table: Table) -> None:
    """Compares the kernels for TPUs, interpreted here, and a window beside images, whose length the hook must state."""
    adapter: Any = importlib.import_module("maxtext.layers.sparse_adapter")
    call, local = {"ids": jnp.repeat(jnp.array([[1, 2]]), TOKENS // 2, 1).repeat(BATCH, 0)}, LOCAL
    tpu = functools.partial(sl.block_sparse_attention, implementation="pallas_tpu")
    with unittest.mock.patch.object(adapter.sl, "block_sparse_attention", tpu):
        compare(host, table, "window, documents, TPU kernels interpreted", arrays_of(), **local | {"call": call})
    spans = (jnp.arange(TOKENS) % 64 < 24)[None] & jnp.array([[True], [False]])
    with unittest.mock.patch.object(adapter, "attend", functools.partial(adapter.attend, longest_span=24)):
        options = local | {"call": {"bidirectional_mask": spans}}
        compare(host, table, "images of at most 24 tokens, window", arrays_of(), **options)


def check_host(host: Host, table: Table) -> None:
    """Compares MaxText's `flash` route for GPUs with its dense path.

    Its kernel is replaced by the XLA form of the same library. The arguments of the kernel are those on a GPU.
    """
    kernels = host.op.tokamax_pallas_triton
    plain = host.op.tokamax_attention_base.DotProductAttention
    call = {"ids": jnp.repeat(jnp.array([[1, 2]]), TOKENS // 2, 1).repeat(BATCH, 0)}
    cases = {
        "causal, documents": {"call": call},
        f"window of {WINDOW}": LOCAL,
        f"chunks of {CHUNK}": {"kind": "chunk", "chunk_attn_window_size": CHUNK},
        "soft cap": {"attn_logits_soft_cap": 2.0},
        "full": {"kind": "full"},
    }
    with unittest.mock.patch.object(kernels, "PallasTritonFlashAttention", plain):
        for name, options in cases.items():
            routes = (host.attend(kernel, **options) for kernel in ("flash", "dot_product"))
            table.compare(f"MaxText's flash on GPUs, {name}", *routes, *arrays_of(), is_of_host=True)


def check_refusals(host: Host, table: Table) -> None:
    """Checks that calls with another meaning end in an error."""
    arrays = arrays_of()
    mask = jnp.zeros((BATCH, TOKENS, TOKENS))
    spans = jnp.zeros((BATCH, TOKENS), bool)
    chunk = {"kind": "chunk", "chunk_attn_window_size": CHUNK}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "indexer_mask": ({"call": {"indexer_mask": mask}}, "indexer_mask"),
        "record_max_logits": ({"call": {"record_max_logits": True}}, "record_max_logits"),
        "a window of no size": ({"kind": "local_sliding"}, "sliding_window_size"),
        "images, window": (LOCAL | {"call": {"bidirectional_mask": spans}}, "longest_span"),
        "images, chunks": (chunk | {"call": {"bidirectional_mask": spans}}, "bidirectional_mask"),
        "attention_type compressed": ({"kind": "compressed"}, "attention_type"),
        "dropout": ({"dropout_rate": 0.1}, "dropout_rate"),
        "MoBA of chunks of 1024": ({"moba": True, "moba_chunk_size": 1024, "moba_topk": 3}, "moba_chunk_size"),
        "context_parallel_load_balance": ({"mesh_sizes": {"context": 2}}, "context_parallel_load_balance"),
    }
    for name, (options, words) in cases.items():
        table.refuse(name, lambda options=options: host.attend("sparse", **options)(*arrays), words)


def main() -> None:
    """Runs all checks of the checkout that the command line names."""
    checkout = path_argument(__doc__, "path to a checkout of MaxText, patched as README.md says")
    jax.config.update("jax_num_cpu_devices", 4)
    logging.disable(logging.WARNING)  # MaxText warns of folders and data sets at each configuration
    host, table = Host(checkout), Table()
    check_calls(host, table)
    check_moba(host, table)
    check_other_kernels(host, table)
    check_refusals(host, table)
    check_host(host, table)
    table.exit()


if __name__ == "__main__":
    main()
