"""GPU kernels without a GPU: the registers, shared memory and instructions of every launch of a call, for any GPU.

    python -m benchmarks.triton_resources --pattern strided --head-size 128 --target 90

Needs triton, which compiles for any NVIDIA GPU and brings ptxas; jax-triton is not needed. Nothing runs, so there are
no times. Settings are those that the library chooses for the target unless --fwd and --bwd give others, such as
``--fwd num_stages=3 blocksize_n=64``; forward and backward are traced as for a gradient.

Columns. kernel: "dq_with_dkv" is the dq kernel that gives dk and dv, too; "+" does two passes. M, N: rows of a tile of
q, and of k. regs: registers of a thread, of 255. stack: bytes of each thread in local memory, mostly spilled registers.
shared: bytes of shared memory. estimate: the library's upper one, by which it shrinks tiles that do not fit. at once:
programs that a multiprocessor can run together. cp.async: instructions that load ahead of use; where there are none,
loops are not pipelined. tensor core: instructions that multiply; where there are none, as for float32, ordinary ones
do. seconds: to compile; Triton keeps what it has compiled.
"""

import argparse
import dataclasses
import functools
import itertools
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import triton
from triton import knobs

import sparse_layers as sl
from sparse_layers.ops import attention
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.gpu_attention import triton as plain_triton
from sparse_layers.ops.kernels.triton_gpu import settings
from sparse_layers.ops.planning import platforms

TARGETS = {device.capability: device for device in reversed(hardware.DEVICES.values())}  # by compute capability
PATTERNS: dict[str, Any] = {
    "causal": sl.Causal(),
    "window": sl.preset("sliding_window", window=1024),
    "strided": sl.preset("sparse_transformer_strided", stride=128),
    "fixed": sl.preset("sparse_transformer_fixed", stride=128, summary=8),
    "longformer": sl.preset("longformer", causal=False),
    "bigbird": sl.preset("bigbird"),
    "full": sl.Full(),
}
TENSOR_CORE = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A kernel as the library would launch it.

    Attributes:
      kernel: the Triton function.
      dtypes: names of the dtypes of its pointers.
      constants: its other arguments.
      num_warps, num_stages: how it is compiled.
      device: for which GPU.
    """

    kernel: Any
    dtypes: tuple[str, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    device: hardware.Device

    @property
    def key(self) -> tuple:
        """Equal launches have equal keys."""
        constants = tuple(self.constants.items())
        return self.kernel.fn.__name__, self.dtypes, constants, self.num_warps, self.num_stages, self.device

    @property
    def name(self) -> str:
        """A kernel of `settings`: forward, dq, dkv and so on; or compact, the kernel that makes lists."""
        name = self.kernel.fn.__name__.removeprefix("triton_").removesuffix("_kernel")
        if name == "dkv" and self.constants["Q"].GATHERED:
            return "dkv_with_dq"
        return "dq_with_dkv" if self.constants.get("WITH_DKV") else name

    @property
    def by_keys(self) -> bool:
        """True if a program holds keys."""
        return self.name in ("dkv", "dkv_with_dq", "kv_outer")

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows of a tile of q, and of k; 0 if the kernel has none."""
        if self.name == "compact":
            return 0, 0
        return self.constants["Q"].TILE, self.constants["KV"].TILE

    @property
    def estimate(self) -> int:
        """The bytes of shared memory that the library reckons with; 0 if it does not."""
        if self.name == "compact":
            return 0
        outer, inner = reversed(self.tiles) if self.by_keys else self.tiles
        arrays, itemsize = self.constants["A"], jnp.dtype(self.dtypes[0]).itemsize
        inputs = settings.KernelInputs(itemsize, (arrays.D, arrays.DV), arrays.BIAS.LENGTH > 0)
        launch_settings = settings.Settings(outer, inner, self.num_warps, self.num_stages)
        return settings.shared_memory(self.name, launch_settings, inputs, self.device.capability)


@dataclasses.dataclass(frozen=True)
class Resources:
    """The registers and memory that a compiled kernel asks for.

    Attributes:
      registers: registers of a thread.
      stack: bytes of local memory of a thread.
      shared: bytes of shared memory of a program.
      copies: asynchronous copies in its PTX.
      products: tensor core instructions in its PTX, by name.
    """

    registers: int
    stack: int
    shared: int
    copies: int
    products: dict[str, int]

    def at_once(self, launched: Launch) -> int:
        """Programs that a multiprocessor can run together, by registers, shared memory and threads."""
        threads, device = 32 * launched.num_warps, launched.device
        most = 1536 if device.capability in (86, 89, 120) else 2048
        registers = 65536 // (-(-self.registers // 8) * 8 * threads)
        return min(registers, (device.shared_memory + 1024) // (self.shared + 1024), most // threads)


def launches(
    device: hardware.Device,
    mask: Any,
    lengths: tuple[int, int],
    *,
    batch: int = 2,
    heads: tuple[int, int] = (2, 2),
    sizes: tuple[int, int] = (64, 64),
    dtype: str = "bfloat16",
    segments: bool = False,
    sinks: bool = False,
    selection: Any = None,
    **options: Any,
) -> list[Launch]:
    """The different launches of forward and backward of a call, on a device that need not be there.

    Args:
      device: on which it would run.
      mask: whatever the op takes, or a `jax.ShapeDtypeStruct` for a mask that is known at run time.
      lengths: T and S.
      batch: batch entries.
      heads: of queries and keys.
      sizes: H and Hv.
      dtype: of query, key and value.
      segments: whether there are segment ids.
      sinks: whether there are sinks.
      selection: a `Selection`, with a `jax.ShapeDtypeStruct` for its ids; or None.
      **options: of `block_sparse_attention`.
    """
    launches_by_key: dict[tuple, Launch] = {}

    def attend(implementation, call, query_sharding, operands):
        with bridge.record_launches() as launches:
            out, lse = plain_triton.forward(call, operands)
            plain_triton.backward(call, operands, lse, lse, out)
        for x in launches:
            one = Launch(x.kernel, x.dtypes, x.constants, **x.options, device=device)
            launches_by_key.setdefault(one.key, one)
        return out, lse

    dynamic = isinstance(mask, jax.ShapeDtypeStruct)

    def op(query, key, value, mask_array, ids, sink_logits, selection):
        plan_or_mask = mask_array if dynamic else mask
        arrays = {"segment_ids": ids, "sinks": sink_logits, "selection": selection}
        call_options: dict[str, Any] = {"implementation": "triton"} | arrays | options
        return attention.block_sparse_attention(query, key, value, plan_or_mask, **call_options)

    (t, s), (n, k), (h, hv) = lengths, heads, sizes
    operands = (
        *(jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in ((t, n, h), (s, k, h), (s, k, hv))),
        mask if dynamic else None,
        tuple(jax.ShapeDtypeStruct((batch, length), jnp.int32) for length in lengths) if segments else None,
        jax.ShapeDtypeStruct((n,), jnp.float32) if sinks else None,
        selection,
    )
    with (
        platforms.assume_gpu(device),
        mock.patch.object(attention, "jitted_attend", attend),  # what jit keeps would lack launches, or have these
    ):
        jax.eval_shape(op, *operands)
    return list(launches_by_key.values())


def compiled(one: Launch) -> Any:
    """The kernel, compiled by Triton for the device of its launch."""
    types = [f"*{bridge.TYPES[name]}" for name in one.dtypes]
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
    return bridge.compile_kernel(one.kernel, types, one.constants, one.device.capability, options)


def resources(kernel: Any) -> Resources:
    """Returns the resources that a compiled kernel asks for."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.findall(rf"\b{word}:(\d+)", usage)[-1]) for word in ("REG", "STACK"))
    products = {name: ptx.count(name) for name in TENSOR_CORE if name in ptx}
    return Resources(registers, stack, kernel.metadata.shared, len(re.findall(r"cp\.async\.c[ag]\.", ptx)), products)


HEADER = (
    f"{'kernel':14}{'M':>4}{'N':>4}{'warps':>6}{'stages':>7}{'regs':>6}{'stack':>6}{'shared':>8}{'estimate':>9}"
    f"{'at once':>8}{'cp.async':>9}  {'tensor core':22}{'seconds':>8}"
)


def line(one: Launch) -> str:
    """The line of one launch."""
    start = time.perf_counter()
    kernel = compiled(one)
    seconds, needs = time.perf_counter() - start, resources(kernel)
    name = one.name + (" +" if "KV2" in one.constants and one.constants["KV2"].ROWS else "")
    products = ", ".join(f"{count} {product}" for product, count in needs.products.items()) or "none"
    return (
        f"{name:14}{one.tiles[0]:4}{one.tiles[1]:4}{one.num_warps:6}{one.num_stages:7}"
        f"{needs.registers:6}{needs.stack:6}{needs.shared:8}{one.estimate:9}{needs.at_once(one):8}{needs.copies:9}"
        f"  {products:22}{seconds:8.1f}"
    )


def setting(text: str) -> tuple[str, int]:
    """A setting from the command line."""
    name, _, value = text.partition("=")
    return name, int(value)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", nargs="+", default=[*PATTERNS], choices=PATTERNS, metavar="PATTERN")
    parser.add_argument("--head-size", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--target", nargs="+", type=int, default=[80, 90], choices=TARGETS)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", nargs=2, type=int, default=(16, 16), help="of queries, and of keys")
    parser.add_argument("--segments", action="store_true", help="with segment ids")
    for name, kind in (("fwd", "FwdParams"), ("bwd", "BwdParams")):
        parser.add_argument(f"--{name}", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help=f"of {kind}")
    options = parser.parse_args()
    params = {
        "fwd_params": sl.FwdParams(**dict(options.fwd)) if options.fwd else None,
        "bwd_params": sl.BwdParams(**dict(options.bwd)) if options.bwd else None,
    }
    print(str(__doc__).partition("\n\n")[2])
    print(f"triton {triton.__version__}, B {options.batch}, T {options.length}, {tuple(options.heads)} heads")
    find = functools.partial(launches, batch=options.batch, heads=tuple(options.heads), segments=options.segments)
    for pattern, size, dtype, target in itertools.product(
        options.pattern, options.head_size, options.dtype, options.target
    ):
        print(f"\n{pattern}, head size {size}, {dtype}, compute capability {target / 10}\n{HEADER}")
        length = 2 * (options.length,)
        for one in find(TARGETS[target], PATTERNS[pattern], length, sizes=(size, size), dtype=dtype, **params):
            print(line(one), flush=True)


if __name__ == "__main__":
    main()
