"""Schedules of the Hopper kernels: which program computes which work tile, in which order, and how lists are split.

A work tile is a head and a block, with the number ``(batch entry * heads + head) * blocks + block``. Heads are computed
one after the other, so that the keys and values that they read stay in L2.

The forward kernel is persistent: one program a multiprocessor, each with a queue of work tiles, long ones of a region
first. The next work tile goes to the program with the least work. An atomic counter in memory did that at run time
once. Where six processes shared an H200, whose driver then stops kernels in the middle, 3 % of the calls left a work
tile undone. Work tiles whose lengths are known at run time only are assigned in sweeps over the programs.

The backward kernel has one program a work tile. The GPU starts them in the order given here, as multiprocessors become
free. Persistent programs drift apart, and L2 no longer holds what they read and add to. With them, two heads at a time,
forward and backward of masks of videos took 1.5 times as long on an H100.

Keys that all queries attend to have far longer lists than others, the more so the more query heads share a key head.
Where all programs would wait for them, work tiles of the backward kernel are splits: a key head, a block, and a range
of entries in the lists of its query heads, one list after the other. Long lists of different lengths are split for L2.
"""

import heapq
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...planning.block_lists import BlockLists
from ..gpu.splits import MIN_STEPS, split_work_tiles

# Work tiles come first, whatever their head, if they take longer than this share of a program's work, and this many
# times the mean: the backward pass of global columns takes 24 % less. If all long ones came first, programs would read
# more heads at a time than L2 holds. Splits take at most that share, or `MIN_STEPS`.
LONG_SHARE, LONG_FACTOR = 1 / 8, 4
# The last work tiles come longest first, whatever their heads: one a program, or a multiple of that if the whole pass
# then ends earlier by more than this part.
TAIL_ROUNDS, TOLERANCE = (1, 2, 4, 16, 64), 0.03
# Splits add to dk and dv in float32, which are zeroed before and rounded after: 18 bytes a number instead of 2. A block
# of keys costs a program as much as this many steps: if the pass has only some of the keys, and if it has all.
FLOAT32_STEPS = 1, 4
# Programs with long lists of several query heads drift to different heads, and then read more than L2 holds. Where this
# many query heads share a key head, and lists have this many steps, a split has one head, unless unsplit work tiles are
# faster by more than this part. Causal attention of 64 query heads on 8 key heads, forward and backward, took 53 ms on
# an H100 with splits, and 62 without.
DRIFT_HEADS, DRIFT_STEPS, DRIFT_GAIN = 8, 64, 0.05
# While devices exchange queries, some multiprocessors are busy with that, and programs without one start when others
# end. With an eighth of the work each, they end earlier. A strided pattern of 131072 tokens took 14.7 ms on two H200
# instead of 16.1, when both passes had such programs. Where devices exchange little, that cost time: 2 % of a window's,
# 20 % of documents'.
NUM_WAVES = 8
# Programs walk the lists of a head from the last queries on, and those that start together stay together. When shorter
# lists end, others start, and then programs are at different queries, and at different heads if heads have few blocks.
# Lists of one length drift apart by one in this many entries of a head. If programs would read and add to more than
# twice `CACHED_BYTES` at a time, lists are split by ranges of queries. The ranges of all heads in flight have
# `CACHED_BYTES` together, but a range has at least `MIN_RANGE` queries. Gradients of summary columns of 131072 tokens
# took 38 ms on an H100 with splits, and 83 without.
CACHED_BYTES, MIN_RANGE, STRAY_ENTRIES = 16 << 20, 2048, 256
# Steps that a work tile costs beside those of its list: its prologue, and the stores of its results.
OVERHEAD_STEPS = 1
# Lists that are known at run time only are sorted in groups of at least this many rounds of programs: several heads of
# few blocks, or backward a range of blocks of one head. Gradients of documents of 4000 tokens, 131072 in all, took
# 46 ms on an H100 with all blocks of a head in one group, and 31 with ranges; of documents of 20000, 147 and 119.
# Forward, ranges gained 4 % at most, and their sweeps are less even: by a fifth where heads are few.
MIN_ROUNDS = 1.9


def build_schedule(steps: Any, batch: int, programs: int) -> Any:
    """Builds the queues of persistent programs, as many as have work: int32 [rounds + 1, programs], -1 at the ends.

    Steps are those of each block, integers [LB, heads, blocks] of numpy or JAX; batch entry b has those of ``b % LB``.
    At most ``programs`` run at the same time.
    """
    if isinstance(steps, np.ndarray):
        order = order_work_tiles(steps, batch, programs, False)
        return assign_greedily(order, steps[np.arange(batch) % len(steps)].ravel()[order], programs)
    num_tiles = batch * steps.shape[1] * steps.shape[2]
    programs = min(programs, num_tiles)
    order, group_size = _order_in_groups(steps, batch, programs, False)
    positions = _assign_in_sweeps(num_tiles, group_size, programs)
    return jnp.where(positions < 0, -1, order[positions])


def order_work_tiles(steps: Any, batch: int, programs: int, as_numbered: bool) -> Any:
    """Orders work tiles that have a program each: int32 [work tiles]; see `build_schedule` for the arguments.

    If lengths are known, blocks of a head come in their order with ``as_numbered``. Otherwise they come in regions of
    ``programs`` neighbours, from the end with more work, and the longest of a region first.
    """
    if not isinstance(steps, np.ndarray):
        return _order_in_groups(steps, batch, programs, True)[0]
    costs = steps[np.arange(batch) % len(steps)].ravel()
    heads = np.repeat(np.arange(batch * steps.shape[1]), steps.shape[2])
    orders = _candidate_orders(costs, heads, [x * programs for x in TAIL_ROUNDS], programs, as_numbered)
    times = [finish_time(orders[0], costs, programs)]
    if (
        times[0] <= (1 + TOLERANCE) * (costs + OVERHEAD_STEPS).sum() / programs
    ):  # no other order can be that much faster
        return orders[0]
    times += [finish_time(order, costs, programs) for order in orders[1:]]
    return next(order for order, time in zip(orders, times, strict=True) if time <= (1 + TOLERANCE) * min(times))


def _candidate_orders(
    costs: np.ndarray, heads: np.ndarray, tail_sizes: list[int], programs: int, as_numbered: bool
) -> list[np.ndarray]:
    """Orders work tiles: long ones by `LONG_SHARE` and `LONG_FACTOR`, then by head and region, then the tail.

    Heads are ascending. Returns an order, int32 [work tiles], for each size of the tail. The tail and the long ones are
    sorted, longest first.
    """
    num_tiles, total = len(costs), costs.sum()
    is_long = (costs > LONG_SHARE * total / programs) & (costs > LONG_FACTOR * total / num_tiles)
    position = np.arange(num_tiles) - np.searchsorted(heads, heads)
    if not as_numbered:
        num_blocks, moment = np.bincount(heads), np.bincount(heads, position * costs)
        is_back_heavy = 2 * moment > np.bincount(heads, costs) * (num_blocks - 1)  # more work at the end
        position = np.where(is_back_heavy[heads], (num_blocks - 1)[heads] - position, position)
    rank = np.where(is_long | (not as_numbered), -costs, position)
    region, head = np.where(is_long, 0, position // programs), np.where(is_long, -1, heads)
    order = np.lexsort((rank, region, head)).astype(np.int32)
    tail_starts = [max(num_tiles - n, is_long.sum()) for n in tail_sizes]
    return [np.append(order[:n], (tail := order[n:])[np.argsort(-costs[tail], kind="stable")]) for n in tail_starts]


def _order_in_groups(steps: Any, batch: int, programs: int, split_heads: bool) -> tuple[Any, int]:
    """Orders work tiles whose lengths are known at run time only, the longest of each group first.

    A group has several heads, or one, or with ``split_heads`` a range of blocks of a head that has many. Returns the
    order, and the number of work tiles in a group.
    """
    costs, blocks, min_tiles = steps[np.arange(batch) % len(steps)].ravel(), steps.shape[2], MIN_ROUNDS * programs
    size = blocks * math.ceil(min_tiles / blocks)
    if split_heads and blocks >= 2 * min_tiles:
        size = math.ceil(blocks / (blocks // min_tiles))
    groups = jnp.pad(costs, (0, -len(costs) % size), constant_values=-1).reshape(-1, size)
    order = jnp.argsort(-groups, axis=1, stable=True).astype(np.int32)
    order += size * np.arange(len(groups), dtype=np.int32)[:, None]
    return order.ravel()[: costs.size], size


def has_overlapping_neighbors(spans: np.ndarray, block: np.ndarray, inner_blocks: int) -> bool:
    """True if most entries of the lists are also in the list before; see `BlockLists` for the arguments."""
    lengths = (spans[..., 2] - spans[..., 0]).ravel()
    entry = np.repeat(np.arange(len(lengths)), lengths) * inner_blocks + block
    return bool(2 * np.isin(entry - inner_blocks, entry).sum() > len(entry))


def assign_greedily(order: np.ndarray, steps: np.ndarray, programs: int) -> np.ndarray:
    """Builds a schedule, see `build_schedule`: each work tile goes to the program with the least work so far."""
    loads = [(0, program) for program in range(min(programs, len(order)))]
    program_of_tile = np.empty(len(order), np.int64)
    for position, cost in enumerate((steps.astype(np.int64) + OVERHEAD_STEPS).tolist()):
        load, program_of_tile[position] = loads[0]
        heapq.heapreplace(loads, (load + cost, loads[0][1]))
    positions = _positions_by_program(program_of_tile, len(loads))
    return np.where(positions < 0, -1, order[positions]).astype(np.int32)


def _assign_in_sweeps(num_tiles: int, group_size: int, programs: int) -> np.ndarray:
    """Assigns sorted groups of work tiles to programs in sweeps forth and back, one work tile each.

    Each group starts at another program, by the golden ratio, so that no program has the longest of several groups. In
    simulations of documents, causal masks and long first blocks, results are 3 % behind `assign_greedily` in the mean,
    and 15 % at most, as long as groups have two rounds.

    Returns:
      int [rounds + 1, programs]: positions of each program's work tiles in the order, then -1.
    """
    group, rank = np.divmod(np.arange(num_tiles), group_size)
    sweep, slot = np.divmod(rank, programs)
    first_program = np.rint(group * programs * (math.sqrt(5) - 1) / 2).astype(np.int64)
    offset = np.where(sweep % 2 == 0, slot, programs - 1 - slot)
    return _positions_by_program((first_program + offset) % programs, programs)


def _positions_by_program(program: np.ndarray, programs: int) -> np.ndarray:
    """Groups positions 0, 1, ... by their ``program``: int [rounds + 1, programs], ascending in a column, then -1."""
    counts, positions = np.bincount(program, minlength=programs), program.argsort(kind="stable")
    table = np.full((counts.max() + 1, programs), -1)
    table[np.arange(len(program)) - np.repeat(counts.cumsum() - counts, counts), program[positions]] = positions
    return table


def split_into_waves(schedule: Any) -> Any:
    """Splits a schedule among `NUM_WAVES` times as many programs, each with a part of one program's queue."""
    xp: Any = np if isinstance(schedule, np.ndarray) else jnp
    rounds = -(-(len(schedule) - 1) // NUM_WAVES)
    queues = xp.pad(schedule[:-1], [(0, NUM_WAVES * rounds + 1 - len(schedule)), (0, 0)], constant_values=-1)
    waves = queues.reshape(NUM_WAVES, rounds, -1).swapaxes(0, 1).reshape(rounds, -1)
    return xp.pad(waves, [(0, 1), (0, 0)], constant_values=-1)


def makespan(schedule: np.ndarray, costs: np.ndarray) -> int:
    """Steps of the busiest program of a schedule, from the steps of each work tile."""
    return np.append(costs + OVERHEAD_STEPS, 0)[schedule].sum(0).max()


def finish_time(order: np.ndarray, costs: np.ndarray, programs: int) -> int:
    """Steps until all work tiles are done, if the next of ``order`` starts as soon as a program ends."""
    return makespan(assign_greedily(order, costs[order], programs), costs)


def split_long_lists(
    steps: np.ndarray, before: np.ndarray, key_heads: np.ndarray, batch: int, programs: int, lost_steps: float
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Splits long lists, if all work then ends earlier.

    Args:
      steps: of each block, integers [key heads, blocks], the same for all batch entries.
      before: of these, the steps before those of a query head, [query heads, blocks].
      key_heads: key head of each query head, [query heads], ascending.
      lost_steps: steps that sums in float32 cost each program.

    Returns:
      (order of the work tiles, splits), or (None, None). A split is int32 [5]: its block; its first query head, and the
      end of its query heads, numbered within the pass; its first entry in the list of the first head, and its end in
      that of the last head. Split i of batch entry b is work tile ``b * len(splits) + i``.
    """
    max_steps, min_gain = LONG_SHARE * steps.sum() * batch / programs, 0.0
    steps_of_head = steps.max(initial=0) * len(steps) // len(key_heads)
    if len(key_heads) >= DRIFT_HEADS * len(steps) and steps_of_head >= DRIFT_STEPS:
        max_steps, min_gain = min(max_steps, steps_of_head), DRIFT_GAIN
    max_steps = max(MIN_STEPS, max_steps)
    if steps.max(initial=0) <= max_steps:
        return None, None
    num_splits = np.ceil(steps.reshape(1, -1) / max_steps).astype(np.int64)
    split_steps = split_work_tiles(steps.reshape(1, -1), num_splits)
    assert split_steps is not None
    list_number, begin, end = split_steps.steps[:, 0].T
    key_head, block = np.divmod(list_number, steps.shape[1])
    steps_before, is_same_kv_head = before[:, block].T, key_heads == key_head[:, None]

    def head_of(entry: np.ndarray) -> np.ndarray:
        return np.where(is_same_kv_head & (steps_before <= entry[:, None]), np.arange(len(key_heads)), 0).max(1)

    first, last, split = head_of(begin), head_of(end - 1), np.arange(len(list_number))
    first_entry, end_entry = begin - steps_before[split, first], end - steps_before[split, last]
    splits = np.stack([block, first, last + 1, first_entry, end_entry], axis=1)
    # Splits of a query head follow each other, so that what they read stays in L2. They are numbered by length.
    head_order = np.lexsort((begin - end, first))
    splits, costs = splits[head_order].astype(np.int32), np.tile((end - begin)[head_order], batch)

    heads = (len(key_heads) * np.arange(batch)[:, None] + splits[:, 1]).ravel()
    (order,) = _candidate_orders(costs, heads, [programs], programs, True)
    unsplit_time = finish_time(
        order_work_tiles(steps[None], batch, programs, False), np.tile(steps.ravel(), batch), programs
    )
    if finish_time(order, costs, programs) + lost_steps + MIN_STEPS > unsplit_time * (1 + min_gain):
        return None, None
    return order, splits


def split_by_query_ranges(
    lists: BlockLists,
    list_of_head: np.ndarray,
    key_heads: np.ndarray,
    batch: int,
    programs: int,
    block_queries: int,
    query_bytes: int,
) -> tuple[Any, np.ndarray] | tuple[None, None]:
    """Splits lists by ranges of queries, if programs would otherwise drift apart by more than L2 holds.

    Splits come head by head and range by range, the last queries first, and the longest of a range first.

    Args:
      lists: of the key blocks, known beforehand, the same for all batch entries.
      list_of_head, key_heads: list and key head of each query head, [query heads]; the latter ascend.
      queries: queries of a block.
      query_bytes: bytes of q, dout and dq of a query.

    Returns:
      (order of the work tiles, splits), see `split_long_lists`, or (None, None). If all heads have the same list,
      splits are of head 0: split i of head h and batch entry b is work tile ``(b * heads + h) * len(splits) + i``.
    """
    # Mean number of list entries of a program within a key head.
    entries_per_program = lists.counts[0, ..., 1].sum(1)[list_of_head].sum() / len(np.unique(key_heads)) / programs
    first, end = (lists.spans[0, ..., i].ravel() for i in (0, 2))
    nonempty = np.flatnonzero(end > first)  # in the order of their entries, as the lists are known beforehand
    if not len(nonempty):
        return None, None
    heads_in_flight, batch_heads = max(1.0, programs * len(lists.spans[0]) / len(nonempty)), batch * len(list_of_head)
    block_bytes = query_bytes * block_queries * heads_in_flight
    range_blocks = max(math.ceil(MIN_RANGE / block_queries), int(CACHED_BYTES / block_bytes))
    if heads_in_flight >= batch_heads or len(lists.inner_block) < range_blocks * len(nonempty):
        return None, None
    reach = np.zeros(len(first), np.int64)
    reach[nonempty] = 1 + np.subtract(
        *(f.reduceat(lists.inner_block, first[nonempty]) for f in (np.maximum, np.minimum))
    )
    distance = _mean_distance(reach.reshape(len(lists.spans[0]), -1), programs) + entries_per_program / STRAY_ENTRIES
    if distance * block_bytes <= 2 * CACHED_BYTES:
        return None, None
    list_of_entry, query_range = np.repeat(nonempty, (end - first)[nonempty]), lists.inner_block // range_blocks
    split_starts = np.flatnonzero(np.diff(list_of_entry, prepend=-1) | np.diff(query_range, prepend=-1))
    list_number, block = np.divmod(list_of_entry[split_starts], lists.spans.shape[2])
    first_entry = split_starts - first[list_of_entry[split_starts]]
    steps = np.diff(split_starts, append=len(list_of_entry))
    order, splits = np.lexsort((-steps, -query_range[split_starts])), []
    same_list = bool((list_of_head == list_of_head[0]).all())
    for head, list_of_this_head in enumerate(list_of_head[:1] if same_list else list_of_head):
        splits_of_list = order[list_number[order] == list_of_this_head]
        split = (
            block[splits_of_list],
            head,
            head + 1,
            first_entry[splits_of_list],
            first_entry[splits_of_list] + steps[splits_of_list],
        )
        splits.append(np.stack(np.broadcast_arrays(*split), axis=1))
    splits = np.concatenate(splits).astype(np.int32)
    # By JAX, so that the compiled program computes the order: as a constant it would have millions of numbers.
    return jnp.arange(len(splits) * (batch_heads if same_list else batch), dtype=np.int32), splits


def _mean_distance(reach: np.ndarray, programs: int) -> float:
    """Mean distance between the programs of one head, in blocks of queries, when lists end.

    ``reach`` is that of each list, [lists, blocks]: blocks of queries from its first to its last.
    """
    longest = -np.sort(-reach, axis=1)
    num_lists = (longest > 0).sum(1, keepdims=True)
    next_list = np.minimum(np.arange(reach.shape[1]) + programs, np.maximum(num_lists - 1, 0))
    return float((longest * (longest - np.take_along_axis(longest, next_list, axis=1))).sum() / longest.sum())
