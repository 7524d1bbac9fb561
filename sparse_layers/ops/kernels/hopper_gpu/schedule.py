"""Who does what: kernels are started once for each multiprocessor, and each of these programs has a list of items.

An item is a head and a block, numbered ``(batch entry * heads + head) * blocks + block``. Heads come one after the
other, two at a time, for their keys stay in the cache then; of these, long items come first. Each goes to the program
that has least until then. A counter in memory would do that while the kernel runs, and did: where six processes shared
an H200, whose driver then stops kernels in the middle, 3 % of the calls left an item undone. Lists whose lengths are
known at run time only are dealt in sweeps over the programs.

Keys that everybody attends to have lists much longer than the rest, and the more so the more query heads share a key
head. Where all would wait for them, the backward kernel's items are pieces: a key head, a block, and some entries of
the lists of its query heads, one list after the other.
"""

import heapq
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..triton_gpu.work import LEAST_STEPS, cut

# Heads that are worked on together; of pieces, query heads. On an H200, 2 were as fast as 1 and 4; all heads at once
# took 8 to 20 % longer.
TOGETHER = 2
# So that not all wait for the last of them, what takes longer than this part of a program's share of all comes first,
# of whatever head: global columns took 24 % less in the backward pass. To take more out of turn, 8 items of each two
# heads, cost random blocks and documents 3 to 4 %. Pieces take no longer than that.
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
# While devices exchange queries, some of the processors are busy with that, and a program that finds none of its own
# begins when another has ended. With an eighth of the work each, they are done earlier: a strided pattern of 131072
# tokens took 14.7 ms on two H200 instead of 16.1. Where little is exchanged that costs time: 2 % of a window's, 20 % of
# documents'.
WAVES = 8
# So many steps an item takes beside its own: to begin, and to store what comes out.
OWN_STEPS = 1
# Of lists that are known at run time only, so many rounds at least come from heads that are worked on together, so more
# than two heads where these have few blocks.
LEAST_ROUNDS = 1.9


def schedule_of(steps: Any, batch: int, programs: int) -> Any:
    """int32 [rounds + 1, programs]: the items of each program, and -1 behind them; as many programs as have any.

    Args:
      steps: of each block, integers [LB, heads, blocks], of numpy or JAX; batch entry b has those of ``b % LB``.
      batch: number of batch entries.
      programs: how many can run at the same time.
    """
    blocks = steps.shape[2]
    every = steps[np.arange(batch) % len(steps)].reshape(-1, blocks)
    items = every.size
    if not isinstance(steps, np.ndarray):
        programs = min(programs, items)
        together = max(TOGETHER, math.ceil(LEAST_ROUNDS * programs / blocks))
        order, _ = _by_heads(every, together)
        places = _in_sweeps(items, together * blocks, programs)
        return jnp.where(places < 0, -1, order.ravel()[:items][places])
    order, groups = _by_heads(every, TOGETHER)
    first = int((groups > LONG * every.sum() / programs).sum(1).max())
    order = np.concatenate([order[:, :first].ravel(), order[:, first:].ravel()])
    order = order[order < items]
    return dealt(order, every.ravel()[order], programs)


def _by_heads(every: Any, together: int) -> tuple[Any, Any]:
    """Items of each group of heads [groups, items], the longest first, those beyond the last being none; and all steps.

    The steps [groups, items] are in the order of blocks.

    Args:
      every: steps of each head's blocks [heads of all batch entries, blocks].
      together: heads of a group.
    """
    xp: Any = np if isinstance(every, np.ndarray) else jnp
    groups = xp.pad(every, [(0, -len(every) % together), (0, 0)], constant_values=-1)
    groups = groups.reshape(-1, together * every.shape[1])
    order = xp.argsort(-groups, axis=1, stable=True).astype(np.int32)
    first = groups.shape[1] * np.arange(len(groups), dtype=np.int32)[:, None]
    return order + first, groups


def dealt(order: np.ndarray, steps: np.ndarray, programs: int) -> np.ndarray:
    """A schedule, as of `schedule_of`: one item after the other goes to the program that has least until then.

    Args:
      order: in which items are taken, int32 [items].
      steps: of each of them.
      programs: how many can run at the same time.
    """
    had = [(0, program) for program in range(min(programs, len(order)))]
    who = np.empty(len(order), np.int64)
    for at, cost in enumerate((steps.astype(np.int64) + OWN_STEPS).tolist()):
        least, who[at] = had[0]
        heapq.heapreplace(had, (least + cost, had[0][1]))
    places = _by_program(who, len(had))
    return np.where(places < 0, -1, order[places]).astype(np.int32)


def _in_sweeps(items: int, group: int, programs: int) -> np.ndarray:
    """int [rounds + 1, programs]: places of each program's items among groups that have the longest first; -1 behind.

    Programs are swept over forth and back, an item each. Each group begins at another program, by the golden ratio, so
    that no program has the longest of several. In simulations of documents, causal masks and long first blocks this
    takes 3 % longer than `dealt` in the mean, and 15 % at most, as long as groups have two rounds.
    """
    number, within = np.divmod(np.arange(items), group)
    rounds, place = np.divmod(within, programs)
    begin = np.rint(number * programs * (math.sqrt(5) - 1) / 2).astype(np.int64)
    return _by_program((begin + np.where(rounds % 2 == 0, place, programs - 1 - place)) % programs, programs)


def _by_program(who: np.ndarray, programs: int) -> np.ndarray:
    """int [rounds + 1, programs]: which items each program has, in their order, and -1 behind; ``who`` has each."""
    counts, items = np.bincount(who, minlength=programs), who.argsort(kind="stable")
    places = np.full((counts.max() + 1, programs), -1)
    places[np.arange(len(who)) - np.repeat(counts.cumsum() - counts, counts), who[items]] = items
    return places


def in_waves(schedule: Any) -> Any:
    """The same items for `WAVES` times as many programs, each with a part of what one had."""
    xp: Any = np if isinstance(schedule, np.ndarray) else jnp
    rounds = -(-(len(schedule) - 1) // WAVES)
    items = xp.pad(schedule[:-1], [(0, WAVES * rounds + 1 - len(schedule)), (0, 0)], constant_values=-1)
    waves = items.reshape(WAVES, rounds, -1).swapaxes(0, 1).reshape(rounds, -1)
    return xp.pad(waves, [(0, 1), (0, 0)], constant_values=-1)


def makespan(schedule: np.ndarray, costs: np.ndarray) -> int:
    """Steps of the program that has most, by those of each item."""
    return np.append(costs + OWN_STEPS, 0)[schedule].sum(0).max()


def cut_if_it_pays(
    whole: np.ndarray,
    steps: np.ndarray,
    before: np.ndarray,
    key_heads: np.ndarray,
    batch: int,
    programs: int,
    lost: float,
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """A schedule of the work in pieces, and these, if that takes less time than in whole items; else None twice.

    A piece is int32 [6]: its key head and block; its query heads, numbered as the pass has them, the first and the end;
    its first entry in the list of the first of them, and its end in that of the last. Piece p of batch entry b is the
    item ``b * pieces + p``.

    Args:
      whole: the schedule of whole items, as `dealt` makes it.
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
        return None, None
    number = np.ceil(steps.reshape(1, -1) / most).astype(np.int64)
    parts = cut(steps.reshape(1, -1), number)
    assert parts is not None
    job, begin, end = parts.work[:, 0].T
    key_head, block = np.divmod(job, steps.shape[1])
    passed, own = before[:, block].T, key_heads == key_head[:, None]

    def head_of(entry: np.ndarray) -> np.ndarray:
        return np.where(own & (passed <= entry[:, None]), np.arange(len(key_heads)), 0).max(1)

    first, last = head_of(begin), head_of(end - 1)
    at = np.arange(len(job))
    pieces = np.stack([key_head, block, first, last + 1, begin - passed[at, first], end - passed[at, last]], axis=1)
    costs = end - begin
    order = np.lexsort((-costs, first // TOGETHER)) + len(job) * np.arange(batch)[:, None]
    order, costs = order.ravel().astype(np.int32), np.tile(costs, batch)
    found = dealt(order, costs[order], programs)
    others = makespan(whole, np.tile(steps.ravel(), batch))
    if makespan(found, costs) + lost + LEAST_STEPS > others * (1 + drift):
        return None, None
    return found, pieces.astype(np.int32)
