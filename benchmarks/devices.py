"""One sequence over several devices: time, memory and what they exchange, beside one device.

    python -m benchmarks.devices --record devices.json

Random arrays, one batch entry, causal patterns; forward and backward, milliseconds. "x" is how many times as long one
device takes. "received" is what the plan lets the busiest device receive, forward and backward together; "exchange" how
long its collectives run in a call, waiting for each other included, and "hidden" the share of that in which something
else runs, copies included, both by JAX's profile of GPUs. "GB" is what the compiler plans on each device for arguments,
results and whatever lies between.

Where one device has the room, results of both are compared: they differ by rounding at most. Where it has not, that is
said in place of its time.
"""

import argparse
import functools
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers.ops.planning.context_parallel import plan_exchanges

from . import contenders, gpu
from .record import Record, add_option

PATTERNS: dict[str, Any] = {
    "window 1024": sl.Causal() & sl.Window(1023),
    "strided 128": sl.preset("sparse_transformer_strided", stride=128),
    "fixed 128/8": sl.preset("sparse_transformer_fixed", stride=128, summary=8),
    "documents": sl.Causal() & sl.BlockDiagonal(20000),
    "causal": sl.Causal(),
}
COLUMNS = ["T", "pattern", "one, ms", "GB", "all, ms", "GB", "x", "received, MB", "exchange, ms", "hidden"]
Timing = argparse.Namespace(groups=3, calls=10)
LONG = 2.0  # seconds of a call beyond which one is timed, not groups of them


class DeviceGroup:
    """Some devices with a sequence, and what they compute.

    Args:
      mask: of the attention.
      shape: T, N, K, H of the arrays.
      dtype: theirs.
      devices: one or more.
    """

    def __init__(self, mask: sl.Mask, shape: tuple[int, ...], dtype: Any, devices: Sequence[Any]):
        self.mesh = Mesh(devices, ("context",), axis_types=(AxisType.Auto,))
        spec = P(None, "context")
        length, heads, kv_heads, size = shape
        shapes = [(1, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
        self.lies = NamedSharding(self.mesh, spec)

        def random_arrays() -> list[jax.Array]:
            keys = jax.random.split(jax.random.key(length), 4)
            return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]

        attend = functools.partial(sl.block_sparse_attention, plan_or_mask=mask, query_sharding=spec)
        arrays = [jax.ShapeDtypeStruct(x, dtype, sharding=self.lies) for x in shapes]
        with jax.set_mesh(self.mesh):
            self.make = jax.jit(random_arrays, out_shardings=[self.lies] * 4)
            program = jax.jit(functools.partial(contenders.gradients, attend), out_shardings=(self.lies,) * 4)
            self.program = program.lower(*arrays).compile()
        plan: Any = self.program.memory_analysis()
        self.bytes = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes

    @property
    def fits(self) -> bool:
        """True if a device has the memory, or does not say how much it has."""
        limit = (self.mesh.devices[0].memory_stats() or {}).get("bytes_limit")
        return limit is None or self.bytes <= limit

    def run(self, profiled: bool, keep: bool) -> tuple[tuple[jax.Array, ...], float, tuple[float, float]]:
        """Results, if they are to be kept, milliseconds, and `exchange` where that is asked for."""
        with jax.set_mesh(self.mesh):
            arrays = self.make()

        def call() -> Any:
            return self.program(*arrays)

        result = jax.block_until_ready(call())  # and the first call, which takes longer
        result, began = result if keep else (), time.monotonic()
        jax.block_until_ready(call())
        once = time.monotonic() - began
        ms = once * 1e3 if once > LONG else gpu.median_ms(call, jax.block_until_ready, Timing)
        return result, ms, exchange(call, 1 if once > LONG else 3) if profiled else (0.0, 0.0)


def exchange(call: Any, calls: int) -> tuple[float, float]:
    """Milliseconds of collectives in a call, of the device that has most of them; and the share that is hidden."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        for _ in range(calls):
            jax.block_until_ready(call())
        jax.profiler.stop_trace()
        paths = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = [plane for path in paths for plane in jax.profiler.ProfileData.from_file(str(path)).planes]
    most = 0.0, 0.0
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        events = [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
        spans = {True: [], False: []}
        for event in events:
            spans["nccl" in event.name.lower()].append((event.start_ns, event.start_ns + event.duration_ns))
        exchanged, computed, covered = (union(x) for x in (spans[True], spans[False], spans[True] + spans[False]))
        most = max(most, (exchanged / calls / 1e6, (exchanged + computed - covered) / max(1.0, exchanged)))
    return most


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what spans (begin, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def received(mask: sl.Mask, shape: tuple[int, ...], size: int, devices: int) -> int:
    """Bytes that the busiest device receives, forward and backward: rows by the plan, and what belongs to a row."""
    length, heads, kv_heads, features = shape
    key, row, number = 2 * kv_heads * features * size, heads * features * size, 4 * heads
    total, implementation = [0] * devices, sl.make_plan(mask, length).implementation
    for keys_exchange, _ in plan_exchanges(sl.as_masks(mask), length, devices, implementation, heads // kv_heads):
        for rank in range(devices):
            x = keys_exchange.received(rank)
            # Queries bring q, and dout with lse and delta; results out with lse, and dq.
            total[rank] += (x.keys + x.gradients) * key + x.queries * (2 * row + 2 * number)
            total[rank] += x.results * (2 * row + number)
    return max(total)


@jax.jit
def relative_difference(ours: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the largest difference divided by the largest value."""
    difference = jnp.abs(ours.astype(jnp.float32) - right.astype(jnp.float32))
    return difference.max() / jnp.abs(right.astype(jnp.float32)).max()


def measured(record: Record, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """One row of the table.

    Raises:
      ArithmeticError: results of one device and of all differ by more than rounding.
    """
    (mask,), devices = sl.as_masks(PATTERNS[name]), jax.devices()
    one = DeviceGroup(mask, shape, dtype, devices[:1])
    result, before = None, None
    if one.fits:
        result, before, _ = one.run(profiled=False, keep=True)
    every = DeviceGroup(mask, shape, dtype, devices)
    ours, ms, (exchange_ms, hidden) = every.run(devices[0].platform == "gpu", result is not None)
    if result is not None:
        errors = [
            float(relative_difference(jax.device_put(x, devices[0]), y)) for x, y in zip(ours, result, strict=True)
        ]
        if not max(errors) <= 4 * float(jnp.finfo(dtype).eps):
            raise ArithmeticError(f"{name}, T={shape[0]}: out, dq, dk, dv differ by {errors}")
    moved = received(mask, shape, jnp.dtype(dtype).itemsize, len(devices))
    facts = {"ms_one": before, "bytes_one": one.bytes, "ms_all": ms, "bytes_all": every.bytes}
    record.add(pattern=name, seq_len=shape[0], **facts, received=moved, exchange_ms=exchange_ms, hidden=hidden)
    cells = [str(shape[0]), name, "no room" if before is None else gpu.digits(before), f"{one.bytes / 1e9:.1f}"]
    cells += [gpu.digits(ms), f"{every.bytes / 1e9:.1f}", gpu.ratio(before, ms), f"{moved / 1e6:.1f}"]
    record.say(f"| {' | '.join([*cells, f'{exchange_ms:.2f}', f'{hidden:.0%}'])} |")


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[131072, 524288])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS, metavar="PATTERN")
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("N", "K", "H"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=240, help="after which nothing more is begun")
    add_option(parser)
    options = parser.parse_args()
    record, deadline = Record(options.record, jax.devices()[0].device_kind), time.monotonic() + options.seconds
    heads, kv_heads, size = options.heads
    record.say(
        f"{len(jax.devices())} x {record.heading}\n"
        f"B=1, {heads} query heads on {kv_heads} of {size}, {options.dtype}\n\n"
        f"| {' | '.join(COLUMNS)} |\n| {' | '.join(['---'] * len(COLUMNS))} |"
    )
    for length in options.lengths:
        for name in options.patterns:
            if time.monotonic() > deadline:
                print(f"T={length}, {name}: left out, no time", file=sys.stderr)
                continue
            try:
                measured(record, name, (length, heads, kv_heads, size), jnp.dtype(options.dtype))
            except Exception as error:  # whatever it is, the others can still be measured
                print(f"T={length}, {name}: {type(error).__name__}: {str(error)[:600]}", file=sys.stderr, flush=True)
                record.add(pattern=name, seq_len=length, failed=str(error)[:600])
    record.write()
    return int(any("failed" in result for result in record.results))


if __name__ == "__main__":
    sys.exit(main())
