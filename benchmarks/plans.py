"""Planning for XLA: seconds and bytes for every preset at long lengths, the lists of all passes included.

    python -m benchmarks.plans

Each plan is made anew, nothing of an earlier one is reused, in turns; the least of the runs counts. Seconds are of the
processor: planning runs in one thread, and other work on the machine only ever adds. ``MB`` are those of all block
lists.
"""

import argparse
import itertools
import time

import sparse_layers as sl
from sparse_layers.ops.planning import block_lists as lists
from sparse_layers.ops.planning import planner
from sparse_layers.ops.planning.blocks import active_blocks

from .record import Record, add_option

LIMITS = {131072: 1.0, 1048576: 10.0}  # seconds that the project allows itself for one preset
SHAPES = {131072: (32, 64, 64), 1048576: (64, 128, 128)}  # for presets that need one: frames, height, width
PARTS = "n", "total_seq_len"  # options without a default: the first half of the sequence


def listed(plan: sl.Plan) -> int:
    """Bytes of the lists of all passes, by query and by key, made here; of presets XLA needs no mask tiles."""
    size = 0
    for block_pass in itertools.chain.from_iterable(plan.chains):
        for shape, transposed in (block_pass.fwd_shape, False), (block_pass.bwd_shape, True):
            block_lists = lists.planned_block_pairs([block_pass.mask], shape, False)[0].lists(transposed)
            size += block_lists.spans.nbytes + block_lists.inner_block.nbytes + block_lists.mask_tile.nbytes
    return size


def planned(name: str, seq_len: int) -> tuple[float, sl.Plan, int]:
    """CPU seconds of making a plan and its lists, the plan, and the bytes of the lists."""
    for cache in (active_blocks, planner._make_plan, planner._make_chain, lists._planned_block_pairs):
        cache.cache_clear()
    lengths = {"shape": SHAPES[seq_len], **dict.fromkeys(PARTS, seq_len // 2)}
    needed = {option: lengths[option] for option in sl.preset_options(name) if option in lengths}
    start = time.process_time()
    plan = sl.make_plan(sl.preset(name, **needed), seq_len, implementation="xla")
    size = listed(plan)
    return time.process_time() - start, plan, size


def main() -> None:
    """Runs what the command line asks for; an error if a plan takes longer than the project allows itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(sl.presets()), metavar="PRESET")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LIMITS), choices=LIMITS)
    parser.add_argument("--runs", type=int, default=3, help="of each")
    add_option(parser)
    options = parser.parse_args()
    record, too_slow = Record(options.record), []
    record.say(record.heading)
    for seq_len in options.lengths:
        limit = LIMITS[seq_len]
        record.say(f"\n| T = {seq_len:,}, limit {limit:g} s | seconds | MB | chosen chain |\n| --- | --- | --- | --- |")
        seconds, plans, sizes = {name: [] for name in options.presets}, {}, {}
        for _ in range(options.runs):
            for name in options.presets:
                taken, plans[name], sizes[name] = planned(name, seq_len)
                seconds[name].append(taken)
        for name, plan in plans.items():
            size, chain, least = sizes[name], plan.candidates[0][0][0], min(seconds[name])
            record.add(preset=name, seq_len=seq_len, cpu_seconds=seconds[name], bytes=size, chain=chain)
            record.say(f"| {name} | {least:.2f} | {size / 1e6:.1f} | {chain} |")
            if least > limit:
                too_slow.append(f"{name} at {seq_len}: {least:.2f} s of {limit:g} s")
    record.write()
    if too_slow:
        raise SystemExit(f"slower than allowed: {'; '.join(too_slow)}")


if __name__ == "__main__":
    main()
