"""Order ids beside the masks that say the same, and beside FlexAttention.

    python -m benchmarks.order_ids --record order_ids.json

Order ids are arrays of the step: another batch compiles and plans nothing anew. ``mask`` is the planned mask of the
same pattern, where there is one. ``FlexAttention, mask each call`` makes its block mask from the arrays in each call,
as a training step with new documents has to. Results are checked and timed as in `benchmarks.gpu`.
"""

import argparse
import sys
from typing import Any

import numpy as np

import sparse_layers as sl

from . import contenders, gpu

PREFIX = 4096


def patterns(seq_len: int) -> dict[str, contenders.Pattern]:
    """Patterns with a table [2, T] of order ids and segment ids; packed documents have no planned mask."""
    positions, rng = np.arange(seq_len, dtype=np.int32), np.random.default_rng(0)
    lengths = rng.integers(seq_len // 32, seq_len // 6, 64)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), seq_len) + 1]
    prefixes = (lengths * rng.uniform(0.1, 0.9, len(lengths))).astype(int)
    ids = sl.segment_ids_from_lengths(np.diff(np.minimum(np.cumsum(lengths), seq_len), prepend=0), seq_len)
    order = sl.prefix_order(prefixes, seq_len, ids)

    def rule(q, k, table):
        return (table[0, k] <= table[0, q]) & (table[1, k] == table[1, q])

    def table(order):
        return np.stack([order, np.zeros_like(order)])

    block: Any = sl.Blocks(sl.Array(np.tri(seq_len // 512, dtype=bool)), 512)
    prefix: Any = sl.preset("prefix_lm", prefix=PREFIX)
    return {
        "causal": contenders.Pattern(sl.Causal(), rule, table(positions)),
        "prefix": contenders.Pattern(prefix, rule, table(np.maximum(positions, PREFIX - 1)), causal=False),
        "block causal": contenders.Pattern(block, rule, table(positions // 512), causal=False),
        "packed prefixes": contenders.Pattern(sl.Empty(), rule, np.stack([order, ids]), causal=False),
    }


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-size", type=int, nargs="+", default=[128])
    gpu.add_options(parser, "hopper", 400)
    options = parser.parse_args()
    report = gpu.Report(options)
    for size in options.head_size:
        report.begin(f"head size {size}")
        arrays, rows = gpu.inputs(options.seq_len, options.batch, options.heads, size), []
        for name, pattern in patterns(options.seq_len).items():
            packed = name.startswith("packed")
            case = gpu.Case(report, pattern, arrays, {"D": size, "pattern": name})
            times = {"order ids": case.run("order ids", contenders.ours_by_order, options.implementation, packed)}
            if not packed:
                times["mask"] = case.run("mask", contenders.ours, options.implementation)
            if not options.no_flex:
                times["FlexAttention"] = case.run("FlexAttention", contenders.flex)
                times["FlexAttention, mask each call"] = case.run("FlexAttention, mask", contenders.flex, True)
            for who, ms in times.items():
                ratios = [gpu.ratio(ms.get(x), times["order ids"].get(x)) for x in gpu.DIRECTIONS]
                rows.append([name, who, *(gpu.digits(ms.get(x)) for x in gpu.DIRECTIONS), *ratios])
        shape = f"B={options.batch}, T={options.seq_len}, H={options.heads}, D={size}, bfloat16"
        ratio = [f"{x} / that of order ids" for x in gpu.DIRECTIONS]
        report.table(f"{shape}; ms, {options.implementation!r}", ["pattern", "by", *gpu.DIRECTIONS, *ratio], rows)
    report.record.write()
    return report.failures > 0


if __name__ == "__main__":
    sys.exit(main())
