"""How many tiles the kernels hold at a time: what fits shared memory and registers, by budgets that are tested."""

import dataclasses

# Of one multiprocessor of compute capability 9.0, for one program.
SHARED_MEMORY = 232448
REGISTERS = 65536
# Registers of a thread that fetches, and of one that computes: 2 groups of 128 threads, and one that Triton fills up.
FETCHING, COMPUTING = 24, 240
# Rows of a tile of the side that a program holds, and queries of a step of the backward kernel.
ROWS, PART = 128, 64
# Keys in a block of the lists: tiles are whole blocks.
BLOCKS = (64, 128)
# What head sizes are rounded up to.
SIZES = (64, 128)
# More tiles on their way hide no more: four at head size 64 and two at 128 keep the tensor cores fed.
MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a kernel is compiled.

    Attributes:
      stages: tiles of k and of v that the forward kernel holds or fetches; parts of q and dout in the backward kernel.
      q_stages: tiles of q in the forward kernel.
      registers: of a thread that computes.
    """

    stages: int
    q_stages: int
    registers: int


def padded(size: int) -> int | None:
    """What a head size is rounded up to, or None if it is too large."""
    return next((most for most in SIZES if size <= most), None)


def shared_memory(kernel: str, settings: Settings, size: int, block: int) -> int:
    """Bytes of shared memory, but for barriers: fewer than 1024.

    Args:
      kernel: "forward" or "backward".
      settings: how it is compiled.
      size: head size, rounded up.
      block: keys in a tile.
    """
    if kernel == "forward":
        out, q, kv = ROWS * size, settings.q_stages * ROWS * size, 2 * settings.stages * block * size
        return 2 * (out + q + kv)
    kv, q_dout, ds = 2 * block * size, 2 * settings.stages * PART * size, 2 * block * PART
    return 2 * (kv + q_dout + ds) + 4 * (PART * size + 2 * settings.stages * PART)


def choose(kernel: str, size: int, block: int) -> Settings:
    """As many stages as fit; the last two of q are worth more than the third of k and v (2 % of random blocks)."""
    for stages in range(MOST_STAGES, 1, -1):
        settings = Settings(stages, 2, COMPUTING)
        if shared_memory(kernel, settings, size, block) + 1024 <= SHARED_MEMORY:
            return settings
    raise AssertionError(f"{kernel} fits at no depth at head size {size}")
