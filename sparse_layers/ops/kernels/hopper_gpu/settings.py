"""How many tiles the kernels hold at a time: what fits shared memory and registers, by budgets that are tested."""

import dataclasses

# Of one multiprocessor of compute capability 9.0, for one program.
SHARED_MEMORY = 232448
REGISTERS = 65536
# Rows of a block of the plan's lists, and queries of a step of the backward kernel.
ROWS, PART = 128, 64
# Queries of a tile of the forward kernel by head size, for the lists of which these are a block. Head size 64 has room
# for 192, which three groups of warps then share; that has not been measured.
FORWARD_ROWS = {64: 128, 128: 128}
# Keys in a block of the lists of the forward kernel, whose tiles are whole blocks; the backward kernel has ROWS.
BLOCKS = (64, 128)
# What head sizes are rounded up to.
SIZES = tuple(FORWARD_ROWS)
# More tiles on their way hide no more: four at head size 64 and two at 128 keep the tensor cores fed.
MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a kernel is compiled.

    Attributes:
      rows: rows of a tile of the side that a program holds, 64 for each group of four warps that computes.
      stages: tiles of k and of v that the forward kernel holds or fetches; parts of q and dout in the backward kernel.
      q_stages: tiles of q in the forward kernel.
      registers: of a thread that computes, and of one that fetches.
    """

    rows: int
    stages: int
    q_stages: int
    registers: tuple[int, int]


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
        out, q, kv = settings.rows * size, settings.q_stages * settings.rows * size, 2 * settings.stages * block * size
        return 2 * (out + q + kv)
    kv, q_dout, ds = 2 * block * size, 2 * settings.stages * PART * size, 2 * block * PART
    return 2 * (kv + q_dout + ds) + 4 * (PART * size + 2 * settings.stages * PART)


def registers(rows: int) -> tuple[int, int]:
    """Registers of a thread that computes, and of one that fetches, for which Triton sets four warps aside.

    All that there are, in eights, as many as a thread can have at most; fetching takes 24.
    """
    fetching = 24 if rows == ROWS else 32
    return min(240, (REGISTERS // 128 - fetching) // (rows // 64) // 8 * 8), fetching


def choose(kernel: str, size: int, block: int) -> Settings:
    """As many stages as fit; the second one of q is worth more than the third of k and v (2 % of random blocks)."""
    rows = FORWARD_ROWS[size] if kernel == "forward" else ROWS
    for stages in range(MOST_STAGES, 1, -1):
        settings = Settings(rows, stages, 2, registers(rows))
        if shared_memory(kernel, settings, size, block) + 1024 <= SHARED_MEMORY:
            return settings
    raise AssertionError(f"{kernel} fits at no depth at head size {size}")
