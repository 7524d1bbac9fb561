"""How many tiles the kernels hold at a time: what fits shared memory and registers, by budgets that are tested."""

# Of one multiprocessor of compute capability 9.0, for one program.
SHARED_MEMORY = 232448
# Rows that a program holds, and those of each group of four warps that computes. At head size 64 there is room for 192
# queries in the forward kernel, and three groups of warps; on an H200 that took as long for causal attention, and 1.35
# to 2.6 times as long for windows, documents and random blocks.
ROWS, GROUP = 128, 64
# Queries of a step of the backward kernel by head size: 128 where registers hold as many scores. On an H200, causal
# attention, windows, fixed and documents with heads of 64 take 2 to 3 % less for it, forward and backward together.
PARTS = {64: 128, 128: 64}
# Keys of a tile forward. A block of the lists is one tile, or several of ROWS.
BLOCKS = (64, 128)
# Bytes that lists of tiles may take while they are made on the device, in place of lists of blocks of several tiles: of
# one batch entry and head 24 for each tile. That is as much as k and v of 100,000 tokens, 8 heads of 128, in bfloat16.
LISTED = 400 << 20
# What head sizes are rounded up to.
SIZES = (64, 128)
# More tiles on their way hide no more: four at head size 64 and two at 128 keep the tensor cores fed.
MOST_STAGES = 4
# Tiles of q that the forward kernel holds: the second one is worth more than the third of k and v (2 % of random
# blocks).
Q_STAGES = 2
# Registers of a thread that computes, as many as one can have but for those of 16, and of one that fetches, for which
# Triton sets four warps aside. There are 65536: 128 times 240 + 240 + 24.
REGISTERS, FETCHING = 240, 24
# The same where all threads of four warps fetch, by addresses of their own.
GATHERING = 232, 40


def keys_of(block: int) -> int:
    """Keys of a tile, of which a block of the lists is one or more."""
    return min(block, ROWS)


def padded(size: int) -> int | None:
    """What a head size is rounded up to, or None if it is too large."""
    return next((most for most in SIZES if size <= most), None)


def shared_memory(kernel: str, stages: int, size: int, block: int, part: int = GROUP) -> int:
    """Bytes of shared memory, but for barriers: fewer than 1024.

    Args:
      kernel: "forward", "backward" or "gathered".
      stages: tiles of k and of v that the forward kernel holds or fetches; parts of q and dout in the others.
      size: head size, rounded up.
      block: keys in a tile.
      part: queries of a step of the other kernels.
    """
    if kernel == "forward":
        return 2 * (ROWS * size + Q_STAGES * ROWS * size + 2 * stages * block * size)
    if kernel == "gathered":
        return 2 * (2 * block * size + 2 * stages * part * size + 2 * ROWS * part) + stages * part * (8 + block // 8)
    kv, q_dout, ds = 2 * block * size, 2 * stages * part * size, 2 * block * part
    return 2 * (kv + q_dout + ds) + 4 * (part * size + 2 * stages * part)


def stages_of(kernel: str, size: int, block: int, part: int = GROUP) -> int:
    """As many stages as fit, for `shared_memory`."""
    for stages in range(MOST_STAGES, 1, -1):
        if kernel == "gathered" and block == GROUP and stages % 2:
            continue  # each of two groups that take turns has stages of its own
        if shared_memory(kernel, stages, size, block, part) + 1024 <= SHARED_MEMORY:
            return stages
    raise AssertionError(f"{kernel} fits at no depth at head size {size}")
