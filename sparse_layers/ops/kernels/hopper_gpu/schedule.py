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
# An item that takes longer than this part of a program's share of all would leave others waiting in the end.
_LONG = 1 / 8


def schedule_of(steps: Any, batch: int, programs: int) -> tuple[Any, int]:
    """int32 [1 + items], and the number of programs: how many more items than programs are taken, and the items.

    Args:
      steps: of each block, integers [LB, heads, blocks], of numpy or JAX; batch entry b has those of ``b % LB``.
      batch: number of batch entries.
      programs: how many can run at the same time.
    """
    xp: Any = np if isinstance(steps, np.ndarray) else jnp
    every = steps[np.arange(batch) % len(steps)].reshape(-1, steps.shape[2])
    group = xp.broadcast_to(np.arange(len(every))[:, None] // TOGETHER, every.shape)
    group = xp.where(every > every.sum() / programs * _LONG, -1, group)  # before all others, of whatever head
    order = xp.lexsort((-every.ravel(), group.ravel()))
    return xp.concatenate([np.zeros(1, np.int32), order.astype(np.int32)]), max(1, min(programs, every.size))
