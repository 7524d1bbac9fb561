"""In which order work is taken: kernels are started once for each multiprocessor, and take one item after the other.

An item is a head and a block, numbered ``(batch entry * heads + head) * blocks + block``. Heads come one after the
other, two at a time, for their keys stay in the cache then; of these, long items come first. Who is done takes the next
one, from a counter in memory, so it does not matter how long an item takes in fact.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

# Heads that are worked on together. On an H200, 2 were as fast as 1 and 4; all heads at once took 8 to 20 % longer.
TOGETHER = 2
# Keys that everybody attends to have lists much longer than the rest, and all would wait for the last of them. So what
# takes longer than this part of a program's share of all comes first, of whatever head: global columns took 24 % less
# in the backward pass. Others had better not: 8 of each two heads cost random blocks and documents 3 to 4 %.
LONG = 1 / 8
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
