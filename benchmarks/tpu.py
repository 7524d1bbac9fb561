"""TPU kernels without a TPU: what they ask for, and their cycles as the compiler sees them, beside splash.

    python -m benchmarks.tpu --patterns causal "strided 128" --lengths 8192 131072 --chips v6e

Needs jax[tpu], not a TPU: libtpu compiles ahead of time, and estimates the cycles of every kernel. That estimate is a
static model, not calibrated against hardware; compare its numbers with each other only. It runs a kernel's scalar code
but reads all scalar memory as 0, so both sides get their lists of blocks as arithmetic, with the same numbers of rows,
steps and masked steps, evenly spread. Each kernel is estimated alone, on arrays in HBM, and only some steps of it:
further ones are taken to cost what the second half of these cost.

Splash attention has no chains: it gets the blocks of the whole pattern in natural order, counted, each masked by its
function for the causal mask or the window, which is cheaper than the true ones. It runs forward, without the lse that
backward needs, dkv and dq. It is measured once for all patterns of which it gets the same blocks; a block size on which
its compiler takes longer than --timeout is not tried again for this chip.

Columns. block: rows of q and k in a block; for splash that of --splash-blocks which takes each kernel the fewest cycles
(fwd, dkv, dq: its block sizes may differ), and all that were tried are in the record. compile: seconds for forward and
backward at full length. SMEM: the largest lists of a kernel. VMEM: the most that one asks for, pipelined blocks twice,
and scratch. fwd, bwd: thousands of cycles by kernel and in sum, and cycles for each 512 x 512 of active blocks. Where
splash does not fit SMEM, they are what it would take if it did.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

import sparse_layers as sl
from sparse_layers.masks.states import FULL, PARTIAL
from sparse_layers.ops.kernels.pallas_tpu import backward_kernel, forward_kernel
from sparse_layers.ops.kernels.pallas_tpu.launch import launch
from sparse_layers.ops.kernels.pallas_tpu.schedule import FLAG_BITS, Step, Steps
from sparse_layers.ops.planning.blocks import BlockGrid, active_blocks

from .record import ROOT, Record, add_option

CHIPS = {  # topology to compile for, and the name that JAX knows the device by
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5p"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "tpu7x": ("tpu7x:2x2x1", "TPU7x"),
}
PATTERNS: dict[str, Any] = {
    "causal": sl.Causal(),
    "window 1024": sl.preset("sliding_window", window=1024),
    "strided 128": sl.preset("sparse_transformer_strided", stride=128),
    "fixed 128/8": sl.preset("sparse_transformer_fixed", stride=128, summary=8),
    "bigbird": sl.preset("bigbird"),
}
HEADS, SIZE, AREA = 2, 128, 512 * 512
SPLASH = ("fwd", "dkv", "dq")  # its kernels
FOUND: dict[Any, dict] = {}  # of splash, in this run
# libtpu neither looks for a device nor locks one.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
ENVIRONMENT |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}


def compile_for(chip: str, function: Callable, shapes: list) -> tuple[Any, float]:
    """The jaxpr of a function of such arrays, and the seconds of lowering and compiling it for a chip."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip][0])
    sharding = SingleDeviceSharding(topology.devices[0])
    device = AbstractDevice(device_kind=CHIPS[chip][1], num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes))
        start = time.perf_counter()
        traced.lower(lowering_platforms=("tpu",)).compile()
    return traced.jaxpr.jaxpr, time.perf_counter() - start


def cycles_of(chip: str, function: Callable, shapes: list, name: str) -> int:
    """Estimated cycles of the kernel with ``name`` in its name, in a function of such arrays."""
    folder = pathlib.Path(os.environ["LIBTPU_INIT_ARGS"].partition("=")[2])

    def from_hbm(*arrays):  # the arrays of a real call are too large for VMEM
        return function(*(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays))

    compile_for(chip, from_hbm, shapes)
    profiles = "".join(file.read_text() for file in folder.iterdir())
    (cycles,) = re.findall(f'hlo_op_name: "[^"]*{name}[^"]*"\\s+estimated_cycles: (\\d+)', profiles)
    return int(cycles)


def extrapolated(cycles: Callable[[int], float], few: int, total: int) -> int:
    """cycles(total), from those of a few and of half as many if these are fewer."""
    if few >= total:
        return round(cycles(total))
    half, most = cycles(few // 2), cycles(few)
    return round(most + (total - few) * (most - half) / (few - few // 2))


def kernels(jaxpr: Any) -> Iterator[Any]:
    """The pallas_call equations of a jaxpr that are not interpreted."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call" and not equation.params["interpret"]:
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from kernels(inner)


def needs(chip: str, function: Callable, shapes: list) -> dict[str, float]:
    """Seconds to compile, and the most KiB of SMEM lists and MiB of VMEM that one kernel asks for."""

    def size(arrays):
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)

    jaxpr, seconds = compile_for(chip, function, shapes)
    smem, vmem = [], []
    for kernel in kernels(jaxpr):
        grid = kernel.params["grid_mapping"]
        smem.append(size(x.aval for x in kernel.invars[: grid.num_index_operands]))
        blocks = [x.block_aval for x in grid.block_mappings if "any" not in str(x.block_aval.memory_space)]
        vmem.append(2 * size(blocks) + size(x for x in grid.scratch_avals if str(x.memory_space) == "vmem"))
    return {"compile": seconds, "smem": max(smem) / 2**10, "vmem": max(vmem) / 2**20}


class Arithmetic:
    """A list of steps in place of `Steps` that is computed, by shifts alone: the estimator cannot divide.

    Each masked step has another mask tile than the one before, if there are any.
    """

    def __init__(self, steps: Steps, count: int):
        words, self.scalars, self.count = np.asarray(steps.words), [], count
        self.inners = largest_bit_mask((words >> FLAG_BITS) & ((1 << steps.inner_bits) - 1))
        self.tiles = None if steps.tiles is None else largest_bit_mask(np.asarray(steps.tiles))
        self.rows, self.masked = (round((x.sum() << 12) / words.size) for x in ((words >> 2) & 1, words & 3 == PARTIAL))

    def read(self, scalars, batch, head, step):
        step = jnp.int32(step)
        row = (step * self.rows) >> 12
        kind = jnp.where(((step + 1) * self.masked) >> 12 != (step * self.masked) >> 12, PARTIAL, FULL)
        first, last = ((step - 1) * self.rows) >> 12 != row, ((step + 1) * self.rows) >> 12 != row
        return Step(row, step & self.inners, kind, first.astype(jnp.int32), last.astype(jnp.int32))

    def mask_tile(self, scalars, batch, head, step):
        return None if self.tiles is None else ((jnp.int32(step) * self.masked) >> 12) & self.tiles

    def read_active_query_groups(self, scalars, batch, head, step):
        return None


def largest_bit_mask(numbers: np.ndarray) -> int:
    """Returns the largest 2**n - 1 that is no larger than the largest number: masked numbers stay in range."""
    return (1 << ((int(numbers.max()) + 1).bit_length() - 1)) - 1


def record(function: Callable, operands: list, passes: int) -> list[dict]:
    """The arguments of every launch in the forward and the backward pass of the op."""
    launches = []

    def recorder(*args, **kwargs):
        launches.append(inspect.signature(launch).bind(*args, **kwargs).arguments)
        return [jnp.zeros(x.array.shape, x.array.dtype) for x in launches[-1]["outputs"].values()]

    with mock.patch.object(forward_kernel, "launch", recorder), mock.patch.object(backward_kernel, "launch", recorder):
        jax.eval_shape(function, *operands)
    return launches[:passes] + launches[-passes:]  # forward is traced twice, once for its value alone


def ours(chip: str, pattern: str, seq_len: int, block: int | None, limit: int | None) -> dict:
    """Cycles by kernel if there is a ``limit`` of grid steps, else what compiling all of it takes."""
    params = sl.FwdParams(q_blocksize=block, kv_blocksize=block)
    plan = sl.make_plan(PATTERNS[pattern], seq_len, fwd_params=params, implementation="pallas_tpu")
    operands = [jax.ShapeDtypeStruct((1, seq_len, HEADS, SIZE), jnp.bfloat16)] * 4

    def gradients(q, k, v, dout):
        op = functools.partial(sl.block_sparse_attention, plan_or_mask=plan, implementation="pallas_tpu")
        out, pullback = jax.vjp(op, q, k, v)
        return out, pullback(dout)

    if limit is None:
        return needs(chip, gradients, operands)
    # This state is kept in scalar memory, too. In the midst of a list, the next block is always read ahead.
    backward_kernel._Accumulator._state = lambda self: [pl.program_id(2) & 1, *[jnp.minimum(pl.program_id(2), 1)] * 2]
    links = plan.chains[0]
    blocks = "+".join("x".join(map(str, dict.fromkeys(x.fwd_shape))) for x in links)
    result: dict[str, Any] = {"fwd": [], "bwd": [], "fwd_area": 0, "bwd_area": 0, "blocks": blocks}
    for one, link in zip(record(gradients, operands, len(links)), links * 2, strict=True):
        inputs = {name: x for name, x in one.pop("inputs").items() if x is not None}
        side = one["name"][-3:]
        area = math.prod(getattr(link, side + "_shape"))
        few = max(3, limit * AREA // area // (4 if side == "bwd" else 1))  # the backward kernel's estimate is slow

        def cycles(count, one=one, inputs=inputs):
            def alone(*arrays):
                blocks = {n: dataclasses.replace(x, array=a) for (n, x), a in zip(inputs.items(), arrays, strict=True)}
                return launch(**one | {"steps": Arithmetic(one["steps"], count), "grid": (1, 1, 1)}, inputs=blocks)

            return cycles_of(chip, alone, [x.array for x in inputs.values()], one["name"])

        result[side].append(HEADS * extrapolated(cycles, few, one["steps"].words.shape[-1]))
        result[side + "_area"] += HEADS * getattr(link, side + "_blocks") * area
    return result


def splash_mask(pattern: str) -> Any:
    """The function that masks splash's blocks."""
    return PATTERNS[pattern] if pattern.startswith("window") else sl.Causal()


def splash_grid(pattern: str, seq_len: int, block: int) -> BlockGrid:
    """The blocks that splash lists."""
    return active_blocks(PATTERNS[pattern], seq_len // block, seq_len // block, block, block)


def theirs(chip: str, pattern: str, seq_len: int, block: Any, limit: int | None) -> dict:
    """The same for splash attention: cycles by kernel for a size of blocks, or needs for a size by kernel."""
    function = splash_mask(pattern)

    def grid_of(name, block):
        grid = splash_grid(pattern, seq_len, block)
        return grid, grid.num_rows, int(np.bincount(grid.columns if name == "dkv" else grid.rows).max())

    if limit is None:

        def kernel(name, block):
            _, rows, width = grid_of(name, block)
            shape = (1, width, rows) if name == "dkv" else (1, rows, width)
            # What the lists hold does not matter to the compiler.
            indices, kinds = jnp.zeros(shape, jnp.int8 if rows <= 128 else jnp.int16), jnp.zeros(shape, jnp.int8)
            return splash_kernel(name, block, function, MaskInfo(indices, None, kinds, None, np.arange(seq_len)))

        def everything(*arrays):
            return [kernel(name, size)(*arrays) for name, size in block.items()]

        return needs(chip, everything, splash_operands(HEADS, seq_len, seq_len))

    def estimate(name):
        grid, rows, width = grid_of(name, block)
        # Without lists the grid has all blocks of the lengths given, so these are cut to some rows and slots of it.
        few = min(width, max(2, limit * AREA // block**2))
        kept = min(rows, max(2, 2 * limit * AREA // (few * block**2)))

        def cycles(slots):
            look_up = arithmetic_blocks(len(grid.rows), rows, rows / kept, width / slots)
            run = look_up(0, np.arange(kept)[:, None], np.arange(slots), None, None, None)[2]
            weight = len(grid.rows) / (rows * width * float(run.mean()))
            splash._next_nonzero = look_up
            lengths = [n * block for n in ((slots, kept) if name == "dkv" else (kept, slots))]
            info = MaskInfo(None, None, None, None, np.arange(lengths[0]))
            kernel = splash_kernel(name, block, function, info), splash_operands(1, *lengths)
            return weight * cycles_of(chip, *kernel, name)

        return round(HEADS * extrapolated(cycles, few, width) * rows / kept)

    area = HEADS * len(grid_of("fwd", block)[0].rows) * block**2
    return {"area": area} | {name: estimate(name) for name in SPLASH}


def splash_operands(heads: int, q_len: int, kv_len: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of q, k, v, the gradient of out, lse and the sum of out times its gradient."""
    q, k = (jax.ShapeDtypeStruct((heads, n, SIZE), jnp.bfloat16) for n in (q_len, kv_len))
    return [q, k, k, q] + [jax.ShapeDtypeStruct((heads, q_len), jnp.float32)] * 2


def splash_kernel(name: str, block: int, mask: Any, info: MaskInfo) -> Callable:
    """One of the kernels, as a function of all operands."""
    common: dict[str, Any] = {"mask_value": splash.DEFAULT_MASK_VALUE, "mask_function": mask, "is_mqa": False}
    common |= {"attn_logits_soft_cap": None, "interpret": False}
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.HEAD_DIM_MINOR)
    backward: dict[str, Any] = {"bq": block, "bkv": block, "mask_info": info} | layouts | common
    sizes = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    forward: dict[str, Any] = {"block_sizes": sizes, "residual_checkpoint_name": None, "save_residuals": False} | common

    def function(q, k, v, dout, lse, di):
        if name == "fwd":
            return splash._splash_attention_forward(info, q, k, v, None, None, **forward)
        if name == "dq":
            return splash._splash_attention_bwd_dq(q, k, v, None, None, lse, dout, di, **backward)
        options: dict[str, Any] = {"bkv_compute": block, "use_fused_bwd_kernel": False} | backward
        return splash._splash_attention_bwd_dkv(q, k, v, None, None, lse, dout, di, **options)

    return function


def arithmetic_blocks(active: int, rows: int, row_step: float, slot_step: float) -> Callable:
    """Returns arithmetic in place of the look-up of a block in the lists."""
    # Row i has min(i + 1, most) active blocks; only every so-manieth row and slot is in the grid.
    most = (2 * rows + 1 - math.sqrt(max(1, (2 * rows + 1) ** 2 - 8 * active))) / 2
    most, row_step, slot_step = (round(x * 256) for x in (most, row_step, slot_step))

    def next_nonzero(h, i, j, data_next, block_mask, mask_next, next_i=False):
        row, slot = (j, i) if next_i else (i, j)
        row_of_all, slot_of_all = ((2 * row + 1) * row_step) >> 9, ((2 * slot + 1) * slot_step) >> 9
        run = slot_of_all < jnp.minimum(row_of_all + 1, (((row + 1) * most) >> 8) - ((row * most) >> 8))
        return jnp.where(run, slot, 0), None, run, True

    return next_nonzero


def spawn(timeout: int, **case: Any) -> dict:
    """Measures in a process of its own, for the compiler may crash: what it found, or the reason why not."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"} if case["limit"] else {}
        command = [sys.executable, "-m", "benchmarks.tpu", "--one", json.dumps(case)]
        environment = os.environ | ENVIRONMENT | flags | {"PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"more than {timeout} s"}
    if done.returncode == 0:
        return json.loads(done.stdout)
    if full := re.search("(?:exhausted|ran out|exceed).*?(smem|vmem)", done.stderr, re.IGNORECASE | re.DOTALL):
        return {"failed": f"does not fit {full[1].upper()}"}
    reasons = re.findall(r"Check failed.*|Unsupported.*|\w*Error: .*", done.stderr)
    return {"failed": reasons[-1][:90] if reasons else f"exit status {done.returncode}"}


def measured(side: str, case: dict[str, Any], options: argparse.Namespace, record: Record) -> dict[str, Any]:
    """Returns the cycles and memory of one side for one pattern, length and chip."""
    blocks = [options.block] if side == "ours" else options.splash_blocks
    measure = functools.partial(spawn, **case) if side == "ours" else functools.partial(splash_once, case)
    tried = [measure(side=side, block=block, limit=options.steps) for block in blocks]
    record.add(**case, side=side, tried=dict(zip(map(str, blocks), tried, strict=True)))
    if side == "ours":
        return tried[0] | {"asked": measure(side=side, block=options.block, limit=None)}
    fine = {block: cycles for block, cycles in zip(blocks, tried, strict=True) if "failed" not in cycles}
    if not fine:
        return tried[0] | {"asked": tried[0]}
    best = {name: min(fine, key=lambda block, name=name: fine[block][name]) for name in SPLASH}
    cycles = {name: fine[block][name] for name, block in best.items()}
    areas = {name: fine[block]["area"] for name, block in best.items()}
    return {
        "fwd": [cycles["fwd"]],
        "bwd": [cycles["dkv"], cycles["dq"]],
        "fwd_area": areas["fwd"],
        "bwd_area": (areas["dkv"] + areas["dq"]) / 2,
        "blocks": "/".join(map(str, best.values())),
        "asked": measure(side=side, block=best, limit=None),
    }


def splash_once(case: dict[str, Any], **options: Any) -> dict:
    """Returns the result of `spawn`, once for all patterns with the same blocks in splash, unless it takes too long."""
    block, known = options["block"], FOUND
    blocks = block if isinstance(block, dict) else {"": block}
    grids = [splash_grid(case["pattern"], case["seq_len"], size) for size in blocks.values()]
    listed = [(hash(x.rows.tobytes()), hash(x.columns.tobytes())) for x in grids]
    size = case["chip"], json.dumps(options)
    key = *size, splash_mask(case["pattern"]), case["seq_len"], *listed
    if size not in known and key not in known:
        known[key] = spawn(**case, **options)
        if known[key].get("failed", "").startswith("more than"):  # a compiler that hangs does so at any length
            known[size] = known[key]
    return known.get(size) or known[key]


def cell(case: dict[str, Any], options: argparse.Namespace, record: Record) -> tuple[str, str, str]:
    """Says the lines of one pattern, length and chip: ours, our cycles and splash's, as a table's cells."""
    sums: list[list[float]] = []
    blocks = ""
    for side in ("ours", "splash"):
        row = measured(side, case, options, record)
        blocks = blocks or str(row.get("blocks", "-"))
        line = f"{case['pattern']:12}{case['seq_len']:8}  {case['chip']:6}{side:8}{row.get('blocks', '-'):>16}"
        needed = "{failed:>33}" if "failed" in row["asked"] else "{compile:9.1f} s{smem:8.1f} KiB{vmem:6.1f} MiB"
        line += needed.format(**row["asked"])
        if "failed" in row:
            line += f"  no estimate: {row['failed']}"
        else:
            sums.append([sum(row[x]) for x in ("fwd", "bwd")])
            for direction, total in zip(("fwd", "bwd"), sums[-1], strict=True):
                text = " + ".join(f"{x / 1e3:.0f}" for x in row[direction]) + f" = {total / 1e3:.0f}"
                line += f"{text:>32}{total / row[direction + '_area'] * AREA:7.0f}"
        record.say(line)
    cycles = [" / ".join(f"{x / 1e3:.0f}" for x in pair) for pair in sums] + ["-"] * (2 - len(sums))
    if len(sums) == 2:
        ratios = " / ".join(f"{mine / theirs:.2f}" for mine, theirs in zip(*sums, strict=True))
        record.say(f"{'ours / splash, fwd / bwd:':>40} {ratios}\n")
        cycles[0] += f" ({ratios})"
    return blocks, cycles[0], cycles[1]


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", default=[*PATTERNS], choices=PATTERNS, metavar="PATTERN")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 131072])
    parser.add_argument("--chips", nargs="+", default=["v6e", "v5e"], choices=CHIPS)
    parser.add_argument("--block", type=int, help="rows of our blocks; otherwise the library chooses")
    parser.add_argument("--splash-blocks", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--steps", type=int, default=32, help="grid steps that are estimated, of 512 x 512")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one measurement")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_option(parser)
    options = parser.parse_args()
    if options.one:
        case = json.loads(options.one)
        return print(json.dumps({"ours": ours, "splash": theirs}[case.pop("side")](**case)))
    print(str(__doc__).partition("\n\n")[2])
    record = Record(options.record, f"TPUs by libtpu {importlib.metadata.version('libtpu')}, compiled for only")
    record.say(record.heading)
    record.say(
        f"{HEADS} heads of {SIZE}, bfloat16, {options.steps} steps of 512 x 512 estimated\n"
        f"{'pattern':12}{'T':>8}  {'chip':6}{'side':8}{'block':>16}{'compile':>11}{'SMEM':>12}{'VMEM':>10}"
        f"{'fwd kcycles':>32}{'/block':>7}{'bwd kcycles':>32}{'/block':>7}"
    )
    rows = []
    for seq_len, pattern in itertools.product(options.lengths, options.patterns):
        shape: dict[str, Any] = {"pattern": pattern, "seq_len": seq_len, "timeout": options.timeout}
        cells = [cell(shape | {"chip": chip}, options, record) for chip in options.chips]
        sizes = " or ".join(dict.fromkeys(blocks for blocks, *_ in cells))
        rows.append(f"| {pattern}, {seq_len}, {sizes} | " + " | ".join(x for _, *pair in cells for x in pair) + " |")
    columns = " | ".join(f"{chip}: ours | splash" for chip in options.chips)
    record.say(f"| pattern, T, blocks of ours | {columns} |\n|{' --- |' * (1 + 2 * len(options.chips))}")
    record.say("\n".join(rows))
    record.write()


if __name__ == "__main__":
    main()
