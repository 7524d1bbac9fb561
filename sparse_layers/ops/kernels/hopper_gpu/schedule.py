"""Who does what, and when.

An item is a head and a block, numbered ``(batch entry * heads + head) * blocks + block``. Heads come one after the
other, for what they read stays in the cache then.

Forward, programs are started once for each multiprocessor, and each has a list of items, long ones of a region first.
Each item goes to the program that has least until then. A counter in memory would do that while the kernel runs, and
did: where six processes shared an H200, whose driver then stops kernels in the middle, 3 % of the calls left an item
undone. Lists whose lengths are known at run time only are dealt in sweeps over the programs.

Backward, each item has a program of its own, which the GPU starts as soon as a multiprocessor is free, in an order that
is given here. Programs that stay drift apart, and the cache no longer holds what they read and add to: with such
programs, two heads at a time, forward and backward of masks of videos took 1.5 times as long on an H100.

Keys that everybody attends to have lists much longer than the rest, and the more so the more query heads share a key
head. Where all would wait for them, the backward kernel's items are pieces: a key head, a block, and some entries of
the lists of its query heads, one list after the other. Long lists that differ much in length are cut for L2.
"""

import heapq
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...planning.lists import BlockLists
from ..gpu.work import LEAST_STEPS, cut

# So that not all wait for the last of them, what takes longer than this part of a program's share of all, and so many
# times as long as the mean, comes first, of whatever head: global columns took 24 % less in the backward pass. If all
# long items came first, more heads would be read at a time than the cache holds. Pieces take no longer than that part,
# or `LEAST_STEPS`.
LONG, FAR = 1 / 8, 4
# The last items come longest first, whatever their heads: as many as there are programs, or a multiple of that by which
# all is done that much earlier.
LAST, UNEVEN = (1, 2, 4, 16, 64), 0.03
# Pieces add to dk and dv in float32, which begin as zeros and are rounded in the end: 18 bytes a number, and not 2.
# That takes about as long as so many steps of a program for each block of keys that there is: if the pass has only some
# of the keys, and if it has all.
EXACT = 1, 4
# Programs with long lists of several query heads are soon at different heads, and then read more at a time than the
# cache holds. Where so many heads share keys, and the list of one has so many steps, pieces are of one head, unless
# whole items are quicker by more than this part: causal attention of 64 query heads on 8 key heads took 53 ms on an
# H100 in pieces, forward and backward, and 62 in whole items.
DRIFT = 8, 64, 0.05
# While devices exchange queries, some of the processors are busy with that, and a program that finds none of its own
# begins when another has ended. With an eighth of the work each, they are done earlier: a strided pattern of 131072
# tokens took 14.7 ms on two H200 instead of 16.1, when both passes had such programs. Where little is exchanged that
# cost time: 2 % of a window's, 20 % of documents'.
WAVES = 8
# Programs walk over the lists of a head from the last queries on. Those that begin together stay together. When shorter
# lists end, others begin, and then programs are at different queries; and of different heads, where each head has few
# blocks. Lists of one length stray apart by one in so many entries of a head, until a head's lists are short again. If
# programs would read and add to more than twice `CACHED` bytes at a time, lists are cut by ranges of queries. All heads
# that are worked on at a time have ranges of `CACHED` bytes together, but no range has fewer queries than that. The
# gradients of summary columns of 131072 tokens took 38 ms so on an H100, and 83 in whole lists.
CACHED, SHORTEST_RANGE, STRAY = 16 << 20, 2048, 256
# So many steps an item takes beside its own: to begin, and to store what comes out.
OWN_STEPS = 1
# Of lists that are known at run time only, so many rounds at least are worked on together: of several heads where these
# have few blocks, and backward of a part of one that has many. Gradients of documents of 4000 tokens, 131072 in all,
# took 46 ms on an H100 when all blocks of a head were worked on together, and 31 in parts; of documents of 20000, 147
# and 119. Forward that gained 4 % at most, and sweeps over parts are less even: by a fifth where heads are few.
LEAST_ROUNDS = 1.9


def schedule_of(steps: Any, batch: int, programs: int) -> Any:
    """int32 [rounds + 1, programs]: the items of each program, and -1 behind them; as many programs as have any.

    Args:
      steps: of each block, integers [LB, heads, blocks], of numpy or JAX; batch entry b has those of ``b % LB``.
      batch: number of batch entries.
      programs: how many can run at the same time.
    """
    if isinstance(steps, np.ndarray):
        order = order_of(steps, batch, programs, False)
        return dealt(order, steps[np.arange(batch) % len(steps)].ravel()[order], programs)
    items = batch * steps.shape[1] * steps.shape[2]
    programs = min(programs, items)
    order, group = _of_groups(steps, batch, programs, False)
    places = _in_sweeps(items, group, programs)
    return jnp.where(places < 0, -1, order[places])


def order_of(steps: Any, batch: int, programs: int, as_numbered: bool) -> Any:
    """int32 [items]: in which order to begin items that have a program each; see `schedule_of` for the arguments.

    If lengths are known, blocks of a head come as they are numbered with ``as_numbered``, else by regions of as many
    neighbours as there are programs: from that end where more is to do, and of a region the longest first.
    """
    if not isinstance(steps, np.ndarray):
        return _of_groups(steps, batch, programs, True)[0]
    every = steps[np.arange(batch) % len(steps)].ravel()
    heads = np.repeat(np.arange(batch * steps.shape[1]), steps.shape[2])
    orders = _in_order(every, heads, [x * programs for x in LAST], programs, as_numbered)
    times = [taken(orders[0], every, programs)]
    if times[0] <= (1 + UNEVEN) * (every + OWN_STEPS).sum() / programs:  # no other one is so much sooner
        return orders[0]
    times += [taken(order, every, programs) for order in orders[1:]]
    return next(order for order, time in zip(orders, times, strict=True) if time <= (1 + UNEVEN) * min(times))


def _in_order(
    every: np.ndarray, heads: np.ndarray, last: list[int], programs: int, as_numbered: bool
) -> list[np.ndarray]:
    """Orders of items: what is `LONG` and `FAR`, then head by head and region by region, then the last ones.

    Args:
      every: steps of each item.
      heads: of each, ascending.
      last: for each order, how many are the last ones; of them, and of the first, the longest come first.
      programs: how many can run at the same time.
      as_numbered: see `order_of`.
    """
    items, total = len(every), every.sum()
    first = (every > LONG * total / programs) & (every > FAR * total / items)
    number = np.arange(items) - np.searchsorted(heads, heads)
    if not as_numbered:
        size, done = np.bincount(heads), np.bincount(heads, number * every)
        late = 2 * done > np.bincount(heads, every) * (size - 1)  # more is to do at the end
        number = np.where(late[heads], (size - 1)[heads] - number, number)
    within = np.where(first | (not as_numbered), -every, number)
    order = np.lexsort((within, np.where(first, 0, number // programs), np.where(first, -1, heads))).astype(np.int32)
    begun = [max(items - n, first.sum()) for n in last]
    return [np.append(order[:n], (end := order[n:])[np.argsort(-every[end], kind="stable")]) for n in begun]


def _of_groups(steps: Any, batch: int, programs: int, in_parts: bool) -> tuple[Any, int]:
    """(order of items known at run time only: of each group the longest first; how many a group has).

    A group has several heads, or one, or with ``in_parts`` as many blocks as divide a head that has many of them.
    """
    every, blocks, least = steps[np.arange(batch) % len(steps)].ravel(), steps.shape[2], LEAST_ROUNDS * programs
    size = blocks * math.ceil(least / blocks)
    if in_parts and blocks >= 2 * least:
        size = math.ceil(blocks / (blocks // least))
    groups = jnp.pad(every, (0, -len(every) % size), constant_values=-1).reshape(-1, size)
    order = jnp.argsort(-groups, axis=1, stable=True).astype(np.int32)
    order += size * np.arange(len(groups), dtype=np.int32)[:, None]
    return order.ravel()[: every.size], size


def neighbours_share(spans: np.ndarray, block: np.ndarray, minor_blocks: int) -> bool:
    """Whether most entries of lists are in the list before, too; see `BlockLists` for the arguments."""
    lengths = (spans[..., 2] - spans[..., 0]).ravel()
    entry = np.repeat(np.arange(len(lengths)), lengths) * minor_blocks + block
    return bool(2 * np.isin(entry - minor_blocks, entry).sum() > len(entry))


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


def taken(order: np.ndarray, costs: np.ndarray, programs: int) -> int:
    """Steps until all is done, if items of so many steps each are begun in an order, as soon as a program ends."""
    return makespan(dealt(order, costs[order], programs), costs)


def cut_if_it_pays(
    steps: np.ndarray, before: np.ndarray, key_heads: np.ndarray, batch: int, programs: int, lost: float
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The order of the work in pieces, and these, if that takes less time than in whole items; else None twice.

    A piece is int32 [5]: its block; its query heads, numbered as the pass has them, the first and the end; its first
    entry in the list of the first of them, and its end in that of the last. Piece p of batch entry b is the item
    ``b * pieces + p``.

    Args:
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
    pieces = np.stack([block, first, last + 1, begin - passed[at, first], end - passed[at, last]], axis=1)
    # What the pieces of a query head read stays in the cache, too.
    by_head = np.lexsort((begin - end, first))
    pieces, costs = pieces[by_head].astype(np.int32), np.tile((end - begin)[by_head], batch)

    heads = (len(key_heads) * np.arange(batch)[:, None] + pieces[:, 1]).ravel()
    (order,) = _in_order(costs, heads, [programs], programs, True)  # pieces of a head are numbered by their length
    others = taken(order_of(steps[None], batch, programs, False), np.tile(steps.ravel(), batch), programs)
    if taken(order, costs, programs) + lost + LEAST_STEPS > others * (1 + drift):
        return None, None
    return order, pieces


def cut_by_ranges(
    lists: BlockLists, kinds: np.ndarray, key_heads: np.ndarray, batch: int, programs: int, queries: int, held: int
) -> tuple[Any, np.ndarray] | tuple[None, None]:
    """The order of the work in pieces by ranges of queries, and these, if programs would drift apart; else None twice.

    Pieces are as of `cut_if_it_pays`. They come head by head, and of a head range by range, as lists are walked: the
    last queries first, and of a range the longest pieces. If all heads have the same list, pieces are those of head 0:
    piece p of head h and batch entry b is the item ``(b * heads + h) * pieces + p``.

    Args:
      lists: of the key blocks, known beforehand, alike for all batch entries.
      kinds: which of the lists each query head has, [query heads].
      key_heads: of each query head, [query heads], ascending.
      batch: number of batch entries.
      programs: how many can run at the same time.
      queries: of a block.
      held: bytes of q, dout and dq of a query.
    """
    # Of a program and a key head.
    entries = lists.counts[0, ..., 1].sum(1)[kinds].sum() / len(np.unique(key_heads)) / programs
    first, end = (lists.spans[0, ..., i].ravel() for i in (0, 2))
    some = np.flatnonzero(end > first)  # these follow each other, as all lists do that are known beforehand
    if not len(some):
        return None, None
    at_a_time, heads = max(1.0, programs * len(lists.spans[0]) / len(some)), batch * len(kinds)
    of_a_block = held * queries * at_a_time
    size = max(math.ceil(SHORTEST_RANGE / queries), int(CACHED / of_a_block))
    if at_a_time >= heads or len(lists.block) < size * len(some):
        return None, None
    reach = np.zeros(len(first), np.int64)
    reach[some] = 1 + np.subtract(*(f.reduceat(lists.block, first[some]) for f in (np.maximum, np.minimum)))
    apart = _apart(reach.reshape(len(lists.spans[0]), -1), programs) + entries / STRAY
    if apart * of_a_block <= 2 * CACHED:
        return None, None
    line, number = np.repeat(some, (end - first)[some]), lists.block // size
    begin = np.flatnonzero(np.diff(line, prepend=-1) | np.diff(number, prepend=-1))
    kind, block = np.divmod(line[begin], lists.spans.shape[2])
    part = begin - first[line[begin]]
    steps = np.diff(begin, append=len(line))
    order, pieces = np.lexsort((-steps, -number[begin])), []
    alike = bool((kinds == kinds[0]).all())
    for head, own in enumerate(kinds[:1] if alike else kinds):
        here = order[kind[order] == own]
        piece = block[here], head, head + 1, part[here], part[here] + steps[here]
        pieces.append(np.stack(np.broadcast_arrays(*piece), axis=1))
    pieces = np.concatenate(pieces).astype(np.int32)
    # By JAX, which counts in the program instead of keeping numbers there, millions of long sequences.
    return jnp.arange(len(pieces) * (heads if alike else batch), dtype=np.int32), pieces


def _apart(reach: np.ndarray, programs: int) -> float:
    """By how many blocks of queries programs of one head are apart when lists end, in the mean over their steps.

    Args:
      reach: blocks of queries from the first to the last of each list, [kinds, blocks].
      programs: how many run at the same time.
    """
    longest = -np.sort(-reach, axis=1)
    there = (longest > 0).sum(1, keepdims=True)
    other = np.minimum(np.arange(reach.shape[1]) + programs, np.maximum(there - 1, 0))
    return float((longest * (longest - np.take_along_axis(longest, other, axis=1))).sum() / longest.sum())
