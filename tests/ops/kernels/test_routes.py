"""Routes: which kernels each call runs on which GPU. Nothing is compiled, interpreted or launched."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import sparse_layers as sl
from sparse_layers.ops import attention, traced_call
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.planning.platforms import assume_gpu, platform

pytest.importorskip("triton", reason="needs triton: pip install triton")

T = 8192
WINDOW = sl.Causal() & sl.Window(511)
DETERMINISTIC = {"bwd_params": sl.BwdParams(deterministic=True)}
TABLE = {"bias": sl.DistanceBias(jnp.zeros((16, 513)))}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of the op for shapes: [2, length, heads, size]."""

    name: str
    mask: Any
    route: str
    device: str = "h100"
    size: int = 128
    heads: tuple[int, int] = (16, 16)
    dtype: str = "bfloat16"
    length: int = T
    segments: bool = False
    selected_by: int = 0  # neighbouring queries that select 8 blocks together; 0 for no selection
    block: int = 64
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self):
        return f"{self.name}-{self.device}"

    def routed(self) -> str:
        """The implementation, its launches forward, and those backward."""
        found = []

        def attend(name, call, query_sharding, operands):
            found.append((name, *traced_call.trace_launches(name, call, operands)))
            return operands.query, None

        def op(query, key, value, ids, blocks, mask):
            selection = (
                {"selection": sl.Selection(blocks, block=self.block, granularity=self.selected_by)}
                if self.selected_by
                else {}
            )
            mask = self.mask if mask is None else mask
            segments = {"segment_ids": ids} if self.segments else {}
            return sl.block_sparse_attention(query, key, value, mask, **segments, **selection, **self.options)

        shaped, (n, k), t = jax.ShapeDtypeStruct, self.heads, self.length
        blocks = shaped((2, t // max(1, self.selected_by), k, 8), "int32")
        mask = self.mask if isinstance(self.mask, jax.ShapeDtypeStruct) else None
        device, patched = hardware.device_named(self.device), mock.patch.object(attention, "jitted_attend", attend)
        with jax.enable_x64(self.dtype == "float64"), assume_gpu(device), patched:
            arrays = [shaped((2, t, heads, self.size), self.dtype) for heads in (n, k, k)]
            jax.eval_shape(op, *arrays, shaped((2, t), "int32"), blocks, mask)
        ((name, forward, backward),) = found
        return f"{name}: {launch_names(forward)} | {launch_names(backward)}" if forward or backward else name


def launch_names(launches) -> str:
    """Launches without the ending of kernels' names; those if neighbours agree come last."""
    text = " + ".join(str(launch).replace("_kernel", "") for launch in launches)
    return text.replace("if neighbouring queries disagree", "if not").replace(
        "if neighbouring queries agree", "if agreed"
    )


CALLS = [
    Call("causal", sl.Causal(), "hopper: hopper forward | hopper backward"),
    Call("full", sl.Full(), "hopper: hopper forward | hopper backward"),
    Call("window", WINDOW, "hopper: hopper forward | hopper backward"),
    Call("window-narrow", sl.Causal() & sl.Window(63), "triton: triton forward | triton dq + triton dkv"),
    Call("window-lse", WINDOW, "hopper: hopper forward | hopper backward", options={"return_lse": True}),
    # Narrow heads fill half of a Hopper tile.
    Call("causal-32", sl.Causal(), "triton: triton forward | triton dq + triton dkv", size=32),
    Call("full-32", sl.Full(), "triton: triton forward | triton dq + triton dkv", size=32),
    Call("window-32", WINDOW, "triton: triton forward | triton dq + triton dkv", size=32),
    Call("window-40", WINDOW, "hopper: hopper forward | hopper backward", size=40),
    Call("window-64", WINDOW, "hopper: hopper forward | hopper backward", size=64),
    Call("window-80", WINDOW, "hopper: hopper forward | hopper backward", size=80),
    Call("window-96", WINDOW, "hopper: hopper forward | hopper backward", size=96),
    Call("window-100", WINDOW, "triton: triton forward | triton dq + triton dkv", size=100),
    Call("window-192", WINDOW, "hopper: hopper forward | hopper wide_backward", size=192),
    Call("window-256", WINDOW, "hopper: hopper forward | hopper wide_backward", size=256),
    Call("window-float16", WINDOW, "hopper: hopper forward | hopper backward", dtype="float16"),
    Call("window-float32", WINDOW, "triton: triton forward | triton dq + triton dkv", dtype="float32"),
    Call("window-float64", WINDOW, "xla", dtype="float64"),
    Call("window-grouped", WINDOW, "hopper: hopper forward | hopper backward", heads=(16, 2)),
    Call("window-one-key-head", WINDOW, "hopper: hopper forward | hopper backward", heads=(16, 1)),
    Call("window-deterministic", WINDOW, "hopper: hopper forward | triton dq + triton dkv", options=DETERMINISTIC),
    Call("causal-deterministic", sl.Causal(), "hopper: hopper forward | triton dq + triton dkv", options=DETERMINISTIC),
    Call("window-sinks", WINDOW, "hopper: hopper forward | hopper backward", options={"sinks": jnp.zeros(16)}),
    Call("window-soft-cap", WINDOW, "hopper: hopper forward | hopper backward", options={"logits_soft_cap": 30.0}),
    Call("window-alibi", WINDOW, "hopper: hopper forward | hopper backward", options={"bias": sl.alibi(16)}),
    # The Hopper backward kernels compute the keys beyond the reach of a table.
    Call("window-table", WINDOW, "hopper: hopper forward | triton dq + triton dkv", options=TABLE),
    Call(
        "causal-table",
        sl.Causal(),
        "hopper: hopper forward + hopper forward | hopper backward + triton dq + triton dkv",
        options=TABLE,
    ),
    # Too few far keys for a separate pass.
    Call(
        "fixed-table",
        sl.preset("sparse_transformer_fixed", stride=128, summary=8),
        "hopper: hopper forward + hopper forward"
        " | triton dkv (split lists) + triton dkv (merges splits) + triton dq (two passes) + triton dkv",
        options=TABLE,
    ),
    Call(
        "window-documents",
        WINDOW,
        "hopper: triton compact + hopper forward | triton compact + hopper backward",
        segments=True,
    ),
    Call(
        "causal-documents",
        sl.Causal(),
        "hopper: triton compact + hopper forward | triton compact + hopper backward",
        segments=True,
    ),
    Call(
        "causal-documents-64",
        sl.Causal(),
        "hopper: triton compact + hopper forward | triton compact + hopper backward",
        segments=True,
        size=64,
    ),
    Call(
        "causal-documents-grouped",
        sl.Causal(),
        "hopper: triton compact + hopper forward | triton compact + hopper backward",
        segments=True,
        heads=(16, 4),
    ),
    Call(
        "causal-documents-deterministic",
        sl.Causal(),
        "hopper: triton compact + hopper forward | triton compact + triton dq + triton compact + triton dkv",
        segments=True,
        options=DETERMINISTIC,
    ),
    Call(
        "documents-float32",
        sl.Causal(),
        "triton: triton compact + triton forward | triton compact + triton dq + triton compact + triton dkv",
        segments=True,
        dtype="float32",
    ),
    Call(
        "strided",
        sl.preset("sparse_transformer_strided"),
        "hopper: hopper forward + triton forward | triton dq (with dk and dv) + hopper backward",
    ),
    Call(
        "strided-64",
        sl.preset("sparse_transformer_strided"),
        "hopper: hopper forward + triton forward | triton dq (with dk and dv) + hopper backward",
        size=64,
    ),
    Call(
        "strided-documents",
        sl.preset("sparse_transformer_strided"),
        "hopper: triton compact + hopper forward + triton compact + triton forward"
        " | triton compact + hopper backward + triton compact + triton dq + triton compact + triton dkv",
        segments=True,
    ),
    Call(
        "strided-deterministic",
        sl.preset("sparse_transformer_strided"),
        "hopper: hopper forward + triton forward | triton dq (with dk and dv) + triton dq + triton dkv",
        options=DETERMINISTIC,
    ),
    Call(
        "strided-short",
        sl.preset("sparse_transformer_strided"),
        "triton: triton forward | triton dq + triton dkv",
        length=1024,
    ),
    Call(
        "fixed",
        sl.preset("sparse_transformer_fixed"),
        "hopper: hopper forward (two passes) | hopper backward (split lists) + triton dq (with dk and dv)",
    ),
    Call(
        "fixed-grouped",
        sl.preset("sparse_transformer_fixed"),
        "hopper: hopper forward (two passes) | hopper backward (split lists) + hopper backward",
        heads=(16, 2),
    ),
    Call("dilated", sl.preset("dilated", window=256, dilation=4), "hopper: hopper forward | hopper backward"),
    Call("longformer", sl.preset("longformer", causal=False), "hopper: hopper forward | hopper backward"),
    Call("longformer-causal", sl.preset("longformer"), "hopper: hopper forward | hopper backward"),
    Call("bigbird", sl.preset("bigbird", causal=False), "triton: triton forward | triton dq + triton dkv"),
    Call("streaming", sl.preset("streaming"), "hopper: hopper forward | hopper backward"),
    Call(
        "neighborhood",
        sl.preset("neighborhood", shape=(64, 128), kernel=(9, 9)),
        "triton: triton forward | triton dq + triton dkv",
    ),
    Call(
        "video",
        sl.preset("sliding_tile", shape=(16, 16, 32), tile=(4, 8, 8), kernel=(3, 1, 3)),
        "hopper: hopper forward | hopper backward",
    ),
    Call("heads-differ", (sl.Causal(), WINDOW), "hopper: hopper forward | hopper backward"),
    Call(
        "heads-differ-in-order",
        (sl.Causal(), sl.preset("sparse_transformer_strided")),
        "hopper: hopper forward + hopper forward + triton forward"
        " | hopper backward + hopper backward + triton dq + triton dkv",
    ),
    Call("skewed", sl.Causal() & (sl.Window(127) | sl.Global(64)), "hopper: hopper forward | hopper backward"),
    Call(
        "skewed-one-head",
        sl.Window(127) | sl.Global(64),
        "triton: triton forward (split lists) + triton forward (merges splits)"
        " | triton dq (split lists) + triton dq (merges splits) + triton dkv (split lists)"
        " + triton dkv (merges splits)",
        heads=(1, 1),
    ),
    Call("empty", sl.Empty(), "hopper"),
    Call("short", sl.Causal(), "hopper: hopper forward | triton dq (with dk and dv)", length=100),
    Call("shorter-than-a-tile", sl.Causal(), "cudnn", length=16),
    Call("long", sl.Causal(), "hopper: hopper forward | hopper backward", length=1 << 17, heads=(4, 4)),
    Call("window-long", WINDOW, "hopper: hopper forward | hopper backward", length=1 << 18, heads=(4, 4)),
    Call(
        "run-time-mask",
        jax.ShapeDtypeStruct((1024, 1024), bool),
        "triton: triton compact + triton forward | triton compact + triton dq + triton dkv",
        length=1024,
    ),
    Call(
        "run-time-masks",
        jax.ShapeDtypeStruct((16, 1024, 1024), bool),
        "triton: triton compact + triton forward | triton compact + triton dq + triton dkv",
        length=1024,
    ),
    Call(
        "blocks-of-64",
        WINDOW,
        "triton: triton forward | triton dq + triton dkv",
        options={"fwd_params": sl.FwdParams(64, 64), "bwd_params": sl.BwdParams(64, 64)},
    ),
    Call(
        "own-tiles",
        WINDOW,
        "triton: triton forward | triton dq + triton dkv",
        options={"fwd_params": sl.FwdParams(blocksize_m=64, blocksize_n=32)},
    ),
    Call(
        "own-splits",
        sl.Causal(),
        "triton: triton forward (split lists) + triton forward (merges splits) | triton dq + triton dkv",
        options={"fwd_params": sl.FwdParams(num_key_splits=4)},
    ),
    Call(
        "selected-by-1",
        sl.Causal(),
        "hopper: triton kv_outer (split lists, if not) + triton compact (if agreed) + triton forward (if agreed)"
        " | hopper query_gather (split lists)",
        selected_by=1,
    ),
    Call(
        "selected-by-1-grouped",
        sl.Causal(),
        "hopper: triton kv_outer (split lists, if not) + triton compact (if agreed) + triton forward (if agreed)"
        " | hopper query_gather (split lists)",
        selected_by=1,
        heads=(16, 4),
    ),
    Call(
        "selected-by-1-blocks-of-128",
        sl.Causal(),
        "hopper: triton kv_outer (split lists, if not) + triton compact (if agreed) + triton forward (if agreed)"
        " | hopper query_gather (split lists)",
        selected_by=1,
        block=128,
    ),
    Call(
        "selected-by-1-blocks-of-32",
        sl.Causal(),
        "triton: triton kv_outer (split lists, if not) + triton compact (if agreed) + triton forward (if agreed)"
        " | triton dkv (split lists, with dq, if not) + triton dkv (merges splits, if not)"
        " + triton compact (if agreed) + triton dq (if agreed) + triton dkv (if agreed)",
        selected_by=1,
        block=32,
    ),
    Call(
        "selected-by-64",
        sl.Causal(),
        "hopper: triton compact + hopper forward"
        " | triton compact + triton dq + triton dkv (split lists) + triton dkv (merges splits)",
        selected_by=64,
    ),
    Call(
        "selected-by-64-blocks-of-128",
        sl.Causal(),
        "hopper: triton compact + hopper forward | triton compact + triton dq + triton dkv",
        selected_by=64,
        block=128,
    ),
    Call(
        "selected-by-64-192",
        sl.Causal(),
        "triton: triton compact + triton forward"
        " | triton compact + triton dq + triton dkv (split lists) + triton dkv (merges splits)",
        selected_by=64,
        size=192,
    ),
    Call(
        "selected-by-128",
        sl.Causal(),
        "hopper: triton compact + hopper forward"
        " | triton compact + triton dq + triton dkv (split lists) + triton dkv (merges splits)",
        selected_by=128,
    ),
    Call(
        "selected-by-128-blocks-of-128",
        sl.Causal(),
        "hopper: triton compact + hopper forward | hopper backward",
        selected_by=128,
        block=128,
    ),
    Call(
        "selected-by-128-deterministic",
        sl.Causal(),
        "hopper: triton compact + hopper forward | triton compact + triton dq + triton dkv",
        selected_by=128,
        block=128,
        options=DETERMINISTIC,
    ),
    Call(
        "selected-by-128-float32",
        sl.Causal(),
        "triton: triton compact + triton forward | triton compact + triton dq + triton dkv",
        selected_by=128,
        dtype="float32",
    ),
    Call("causal", sl.Causal(), "cudnn", device="a100"),
    Call("window", WINDOW, "cudnn", device="a100"),
    Call(
        "documents",
        sl.Causal(),
        "triton: triton compact + triton forward | triton compact + triton dq + triton compact + triton dkv",
        device="a100",
        segments=True,
    ),
    Call(
        "strided",
        sl.preset("sparse_transformer_strided"),
        "triton: triton forward + triton forward | triton dq (with dk and dv) + triton dq + triton dkv",
        device="a100",
    ),
    Call(
        "selected-by-1",
        sl.Causal(),
        "triton: triton kv_outer (if not) + triton compact (if agreed) + triton forward (if agreed)"
        " | triton dkv (with dq, if not) + triton compact (if agreed) + triton dq (if agreed) + triton dkv (if agreed)",
        device="a100",
        selected_by=1,
    ),
    Call("window", WINDOW, "cudnn", device="rtx4090"),
    Call("window-256", WINDOW, "xla", device="rtx4090", size=256, dtype="float32"),
    Call(
        "strided",
        sl.preset("sparse_transformer_strided"),
        "triton: triton forward + triton forward | triton dq + triton dq + triton dkv + triton dkv",
        device="rtx4090",
    ),
    Call(
        "documents",
        sl.Causal(),
        "triton: triton compact + triton forward | triton compact + triton dq + triton compact + triton dkv",
        device="b200",
        segments=True,
    ),
]


@pytest.mark.filterwarnings("ignore:block_sparse_attention runs .xla., which is slow")
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_what_runs(call):
    assert call.routed() == call.route


def test_the_debug_log_names_what_is_left_to_triton(caplog):
    (call,) = [call for call in CALLS if str(call) == "strided-h100"]
    with caplog.at_level("DEBUG", "sparse_layers"):
        call.routed()
    lines = [record.getMessage().partition(", because")[0] for record in caplog.records]
    passes = [f"'hopper': Triton runs {way} (residue-major order, stride 128)" for way in ("forward", "backward")]
    assert lines == ["block_sparse_attention runs 'hopper'", *passes]


def test_the_table_meets_every_kernel_of_attention():
    """By the names of the functions: those that serve selections of single queries, too."""
    named = {word for call in CALLS for part in call.route.split(" | ") for word in part.split() if word != "+"}
    assert {"forward", "backward", "query_gather", "dq", "dkv", "kv_outer", "compact"} <= named
    assert len({str(call) for call in CALLS}) == len(CALLS) >= 60


def test_nothing_is_left_of_a_gpu_that_was_assumed():
    here = hardware.local_device()
    with pytest.raises(ZeroDivisionError), assume_gpu(hardware.DEVICES["h100"]), bridge.record_launches() as launches:
        assert platform() == "gpu" and hardware.local_device() == hardware.DEVICES["h100"] and launches == []
        raise ZeroDivisionError
    assert hardware.local_device() == here


@pytest.mark.parametrize(
    "name",
    [
        *("h1000", "9.1", "", "NVIDIA", 90, None, (9,), (9.0, 0), (9, 1)),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),  # with fewer multiprocessors
    ],
)
def test_unknown_gpus_are_refused(name):
    with pytest.raises(
        ValueError, match=r"device must be the name of a GPU or its compute capability, got .* Known: .*, h100, "
    ):
        hardware.device_named(name)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H100", "h100"),
        ("9.0", "h100"),
        ((9, 0), "h100"),
        ("10.3", "b300"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA H100 PCIe", "h100pcie"),  # with fewer multiprocessors
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_names_of_gpus(name, device):
    """Also JAX's ``device_kind``."""
    assert hardware.device_named(name) == hardware.DEVICES[device]
