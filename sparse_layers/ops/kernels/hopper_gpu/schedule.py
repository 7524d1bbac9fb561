"""In which order work is taken: kernels are started once for each multiprocessor, and take one item after the other.

An item is a head and a block, numbered ``(batch entry * heads + head) * blocks + block``. Heads come one after the
other, two at a time, for their keys stay in the cache then; of these, long items come first. Who is done takes the next
one, from a counter in memory, so it does not matter how long an item takes in fact.

Keys that everybody attends to have lists much longer than the rest, and the more so the more query heads share a key
head. Where all would wait for them, the backward kernel's items are pieces: a key head, a block, and some entries of
the lists of its query heads, one list after the other.
"""

import heapq
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..triton_gpu.work import LEAST_STEPS, cut

# Heads that are worked on together; of pieces, query heads. On an H200, 2 were as fast as 1 and 4; all heads at once
# took 8 to 20 % longer.
TOGETHER = 2
# So that not all wait for the last of them, what takes longer than this part of a program's share of all comes first,
# of whatever head: global columns took 24 % less in the backward pass. Others had better not: 8 of each two heads cost
# random blocks and documents 3 to 4 %. Pieces take no longer than that.
LONG = 1 / 8
# Pieces add to dk and dv in float32, which begin as zeros and are rounded in the end: 18 bytes a number, and not 2.
# That takes about as long as so many steps of a program for each block of keys that there is: if the pass has only some
# of the keys, and if it has all.
EXACT = 1, 4
# Programs that walk over the long lists of several query heads drift apart, and read more queries at a time than the
# cache holds. Where so many heads share keys, and the list of one has so many steps, items take this part longer than
# pieces of one head: causal attention of 64 query heads on 8 key heads took 28.0 ms on an H200 in pieces, forward and
# backward, and 29.5 in whole items; of 16 on 4, the same.
DRIFT = 8, 64, 0.05
# Of lists that are known at run time only, so many of the heads that go together come first.
FIRST_AT_RUN_TIME = 4


def schedule_of(steps: Any, batch: int, programs: int) -> tuple[Any, int]:
    """int32 [1 + items], and the number of programs: how many more items than programs are taken, and the items.

    Args:
      steps: of each block, integers [LB, heads, blocks], of numpy or JAX; batch entry b has those of ``b % LB``.
      batch: number of batch entries.
      programs: how many can run at the same time.
    """
    xp: Any = np if isinstance(steps, np.ndarray) else jnp
    blocks = steps.shape[2]
    every = steps[np.arange(batch) % len(steps)].reshape(-1, blocks)
    items, long = every.size, LONG * every.sum() / programs
    every = xp.pad(every, [(0, -len(every) % TOGETHER), (0, 0)], constant_values=-1)  # of no item
    every = every.reshape(-1, TOGETHER * blocks)
    order = xp.argsort(-every, axis=1) + TOGETHER * blocks * np.arange(len(every))[:, None]
    first = int((every > long).sum(1).max()) if xp is np else min(FIRST_AT_RUN_TIME, blocks)
    order = xp.concatenate([order[:, :first].ravel(), order[:, first:].ravel()])
    order = order[order < items] if xp is np else order[:items]
    return xp.concatenate([np.zeros(1, np.int32), order.astype(np.int32)]), max(1, min(programs, items))


def makespan(costs: Iterable[float], programs: int) -> float:
    """How long so many programs take, who take what is next when they are done."""
    done = [0.0] * programs
    for cost in costs:
        heapq.heapreplace(done, done[0] + cost)
    return max(done)


def cut_if_it_pays(
    schedule: np.ndarray,
    steps: np.ndarray,
    before: np.ndarray,
    key_heads: np.ndarray,
    batch: int,
    programs: int,
    lost: float,
) -> tuple[np.ndarray, np.ndarray | None]:
    """A schedule of the same work in pieces, and these, if that takes less time; else the schedule and None.

    A piece is int32 [6]: its key head and block; its query heads, numbered as the pass has them, the first and the end;
    its first entry in the list of the first of them, and its end in that of the last. Piece p of batch entry b is the
    item ``b * pieces + p``.

    Args:
      schedule: of whole items, as `schedule_of` makes it.
      steps: of each block, integers [key heads, blocks], alike for all batch entries.
      before: of these, the steps that come before those of a query head, [query heads, blocks].
      key_heads: of each query head, [query heads], ascending.
      batch: number of batch entries.
      programs: how many can run at the same time.
      lost: how many steps pieces cost each of them beside their own.
    """
    most, drift = LONG * steps.sum() * batch / programs, 0.0
    of_one_head = steps.max(initial=0) * len(steps) // len(key_heads)
    if len(key_heads) >= DRIFT[0] * len(steps) and of_one_head >= DRIFT[1]:
        most, drift = min(most, of_one_head), DRIFT[2]
    most = max(LEAST_STEPS, most)
    if steps.max(initial=0) <= most:
        return schedule, None
    number = np.ceil(steps.reshape(1, -1) / most).astype(np.int64)
    found = cut(steps.reshape(1, -1), number)
    assert found is not None
    job, begin, end = found.work[:, 0].T
    key_head, block = np.divmod(job, steps.shape[1])
    passed, own = before[:, block].T, key_heads == key_head[:, None]

    def head_of(entry: np.ndarray) -> np.ndarray:
        return np.where(own & (passed <= entry[:, None]), np.arange(len(key_heads)), 0).max(1)

    first, last = head_of(begin), head_of(end - 1)
    at = np.arange(len(job))
    pieces = np.stack([key_head, block, first, last + 1, begin - passed[at, first], end - passed[at, last]], axis=1)
    costs, whole = end - begin, np.tile(steps.ravel(), batch)[schedule[1:]]
    order = np.lexsort((-costs, first // TOGETHER)) + len(job) * np.arange(batch)[:, None]
    ours = makespan(np.tile(costs, batch)[order.ravel()], programs)
    if ours + lost + LEAST_STEPS > makespan(whole, programs) * (1 + drift):
        return schedule, None
    return np.concatenate([schedule[:1], order.ravel()]).astype(np.int32), pieces.astype(np.int32)
