"""What the programs of a launch do, and in which order: jobs, and the pieces of those that would take too long.

A job is a head and a block of the major side, with as many steps as its lists have tiles. Where a list is much longer
than others (global tokens, a popular block, a few queries over many keys) it is cut into pieces: a first launch walks
over the pieces, each with a result of its own, and the launch of all jobs then puts these together, in their order.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A program that walks less than 8 steps takes longer to start, and to be put together, than to walk.
LEAST_STEPS = 8
# Each piece has a result of its own.
MOST_PIECES = 256


class Cut(NamedTuple):
    """How jobs are cut.

    Attributes:
      work: int32 [pieces, LB, 3], of each piece its job, its first step, and the end of its steps.
      pieces: int32 [LB, jobs, 2], of each job the first of its pieces and their end; alike for jobs that stay whole.
    """

    work: Any
    pieces: Any


def begin_order(steps: Any, few: int) -> Any:
    """int32 [jobs, LB]: in which order to begin the jobs, so that no long one is left to the end; or None for any.

    Heads come one after the other, for their keys stay in the cache then, and within a head long jobs come first. Where
    steps are known, jobs with far more of them than others come before all else, and so do all in the order of their
    steps if there are ``few`` at most.

    Args:
      steps: of each job, integers [LB, heads, blocks], of numpy or JAX.
      few: up to how many programs the order matters more than the cache.
    """
    batches, heads, blocks = steps.shape
    if not isinstance(steps, np.ndarray):
        order = jnp.argsort(-steps, axis=-1) + blocks * np.arange(heads)[:, None]
        return order.reshape(batches, heads * blocks).T.astype(jnp.int32)
    if steps.max(initial=0) <= 1.5 * steps.mean():
        return None
    rank = steps.argsort(-1, kind="stable")[..., ::-1] + blocks * np.arange(heads)[:, None]
    order = rank.reshape(batches, heads * blocks)
    own = np.take_along_axis(steps.reshape(batches, heads * blocks), order, 1)
    far = own > (4 * steps.mean() if heads * blocks > few else -1)
    first = np.where(far, -own, 1).argsort(1, kind="stable")
    return np.take_along_axis(order, first, 1).T.astype(np.int32)


def pieces_of(steps: np.ndarray, programs: int, slots: int) -> np.ndarray:
    """Into how many pieces to cut each job, 0 for none: int [LB, jobs], for jobs whose steps are known.

    Args:
      steps: of each job.
      programs: programs that do the same job, or the same job of another batch entry.
      slots: programs that the device runs at the same time.
    """
    limit = max(LEAST_STEPS, steps.sum() * programs / slots)  # beyond, one job takes longer than all together should
    long = np.where(steps > limit, steps, 0)
    # Short pieces fill the device; to put together many takes long. The two balance at the root of the steps.
    each = np.maximum(max(LEAST_STEPS, math.ceil(long.sum() * programs / slots)), np.ceil(np.sqrt(long)))
    return np.minimum(np.ceil(long / each), MOST_PIECES).astype(np.int64)


def cut(steps: Any, number: Any, most: int | None = None) -> Cut | None:
    """Cuts jobs into pieces of equal numbers of steps, the last one of fewer.

    Args:
      steps: of each job, integers [LB, jobs], of numpy or JAX.
      number: of pieces of each job, the same shape; 0 for a job that stays whole.
      most: a bound of the sum of ``number`` over the jobs, if that is known at run time only.

    Returns:
      None if it is known that every job stays whole.
    """
    xp: Any = np if isinstance(steps, np.ndarray) else jnp
    ends = xp.cumsum(number, axis=1)
    firsts = ends - number
    if xp is np:
        most = int(ends[:, -1].max(initial=0))
    if not most:
        return None
    place = np.arange(most)
    # The job of each piece: as many jobs as have all of their pieces before it.
    if xp is np:
        job = np.stack([own.searchsorted(place, side="right") for own in ends])
    else:
        job = jax.vmap(lambda own: jnp.searchsorted(own, place, side="right", method="scan_unrolled"))(ends)
    exists, job = job < steps.shape[1], xp.minimum(job, steps.shape[1] - 1)
    own, first, total = (xp.take_along_axis(x, job, axis=1) for x in (number, firsts, steps))
    share = -(-total // xp.maximum(own, 1))
    begin = xp.minimum((place - first) * share, total)
    end = xp.minimum(begin + share, total)
    work = xp.stack([xp.where(exists, x, 0) for x in (job, begin, end)], axis=-1)
    return Cut(work.swapaxes(0, 1).astype(np.int32), xp.stack([firsts, ends], axis=-1).astype(np.int32))
