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
# Of these, so many items come before all others: keys that everybody attends to have lists that are much longer than
# the rest, and others would wait for the last of them in the end.
FIRST = 8


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
    items = every.size
    every = xp.pad(every, [(0, -len(every) % TOGETHER), (0, 0)], constant_values=-1)  # these come last
    order = xp.argsort(-every.reshape(-1, TOGETHER * blocks), axis=1)
    order = order + TOGETHER * blocks * np.arange(len(order))[:, None]
    first = min(FIRST, blocks)
    order = xp.concatenate([order[:, :first].ravel(), order[:, first:].ravel()])[:items]
    return xp.concatenate([np.zeros(1, np.int32), order.astype(np.int32)]), max(1, min(programs, items))
