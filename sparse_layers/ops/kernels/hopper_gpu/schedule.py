"""Who does what: kernels are started once for each multiprocessor, and each program has a list of items of work.

An item is a head and a block, numbered ``(batch entry * heads + head) * blocks + block``. Heads come one after the
other, two at a time, for their keys stay in the cache then; of these, long items come first.
"""

import functools
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Heads that are worked on together. On an H200, 2 were as fast as 1 and 4; all heads at once took 8 to 20 % longer.
TOGETHER = 2
# What an item takes beside its steps, in steps.
_BEGIN = 1.0


def schedule_of(steps: Any, batch: int, programs: int) -> tuple[Any, int]:
    """int32 [programs + 1 + items], and the number of programs: where the items of each begin and end, then the items.

    Args:
      steps: of each block, integers [LB, heads, blocks], of numpy or JAX; batch entry b has those of ``b % LB``.
      batch: number of batch entries.
      programs: how many can run at the same time.
    """
    items = batch * steps.shape[1] * steps.shape[2]
    programs = max(1, min(programs, items))
    if isinstance(steps, np.ndarray):
        return _static(steps.tobytes(), str(steps.dtype), steps.shape, batch, programs), programs
    return _at_run_time(steps, batch, programs), programs


@functools.lru_cache(maxsize=64)
def _static(data: bytes, dtype: str, shape: tuple[int, int, int], batch: int, programs: int) -> np.ndarray:
    """Each item goes to the program that is done first."""
    steps = np.frombuffer(data, dtype).reshape(shape)
    every = steps[np.arange(batch) % len(steps)].reshape(-1, steps.shape[2]) + _BEGIN
    blocks = steps.shape[2]
    own: list[list[int]] = [[] for _ in range(programs)]
    waiting = [(0.0, program) for program in range(programs)]
    for head in range(0, len(every), TOGETHER):
        cost = every[head : head + TOGETHER].ravel()
        for item in np.argsort(-cost, kind="stable"):
            end, program = waiting[0]
            own[program].append(head * blocks + int(item))
            heapq.heapreplace(waiting, (end + float(cost[item]), program))
    begins = np.cumsum([0, *map(len, own)]) + programs + 1
    return np.concatenate([begins, *own]).astype(np.int32)


def _at_run_time(steps: jax.Array, batch: int, programs: int) -> jax.Array:
    """Items are dealt out in turn, forwards and backwards, for who comes first gets the longest ones."""
    blocks = steps.shape[2]
    every = steps[np.arange(batch) % len(steps)].reshape(-1, blocks)
    heads = len(every)
    every = jnp.pad(every, [(0, -heads % TOGETHER), (0, 0)], constant_values=-1)  # to come last
    order = jnp.argsort(-every.reshape(-1, TOGETHER * blocks), axis=1)
    order = (order + TOGETHER * blocks * np.arange(len(order))[:, None]).ravel()[: heads * blocks]
    place = np.arange(-(-len(order) // programs) * programs).reshape(-1, programs)
    place[1::2] = place[1::2, ::-1]
    own = [column[column < len(order)] for column in place.T]
    begins = np.cumsum([0, *map(len, own)]) + programs + 1
    return jnp.concatenate([begins.astype(np.int32), order[np.concatenate(own)].astype(jnp.int32)])
