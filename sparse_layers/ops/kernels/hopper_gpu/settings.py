"""Sizes of tiles, rings and register budgets of the Hopper kernels, within limits that tests hold."""

# Bytes of shared memory of one program, on a multiprocessor of compute capability 9.0.
SHARED_MEMORY = 232448
# Rows of the tile that a program holds, and of each group of four warps. At head size 64 the forward kernel could hold
# 192 queries, with three groups. On an H200 that took as long for causal attention, and 1.35 to 2.6 times as long for
# windows, documents and random blocks.
TILE_ROWS, GROUP_ROWS = 128, 64
# Queries of a step of the backward kernel by head size: 128 where registers hold as many scores. On an H200, causal
# attention, windows, fixed and documents with heads of 64 take 2 to 3 % less for it, forward and backward together.
STEP_QUERIES = {64: 128, 128: 64}
# Keys of a step of the forward kernel. A block of the lists is one step, or a multiple of TILE_ROWS.
STEP_KEYS = (64, 128)
# Bytes of the lists of tiles that the device makes where blocks of several tiles are split: of one batch entry and
# head, 24 for each tile. That is as much as k and v of 100,000 tokens, 8 heads of 128, in bfloat16.
MAX_LIST_BYTES = 400 << 20
# Head sizes are rounded up to one of these.
HEAD_SIZES = (64, 128)
# More stages hide no more latency: four at head size 64 and two at 128 keep the tensor cores busy.
MAX_STAGES = 4
# Stages of q in the forward kernel. The second one gains more than a third stage of k and v (2 % of random blocks).
Q_STAGES = 2
# Registers of a thread in a consumer, nearly the most that a thread can have, and in the producer, which Triton gives
# four warps. A multiprocessor has 65536: 128 times 240 + 240 + 24.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# The same for the query gather kernel, where each of the producer's 128 threads copies rows by its own addresses.
GATHER_REGISTERS = 232, 40


def tile_keys(block: int) -> int:
    """Keys of a tile; a block of the lists has one or more tiles."""
    return min(block, TILE_ROWS)


def padded_head_size(size: int) -> int | None:
    """Rounds a head size up to a supported one; None if it is too large."""
    return next((supported for supported in HEAD_SIZES if size <= supported), None)


def shared_memory_bytes(kernel: str, stages: int, size: int, block: int, queries: int = GROUP_ROWS) -> int:
    """Bytes of shared memory without barriers, which take fewer than 1024.

    Args:
      kernel: "forward", "backward" or "query_gather".
      stages: stages of k and v in the forward kernel, of q and dout in the others.
      size: head size, rounded up.
      block: keys of a tile.
      queries: queries of a step in the kernels other than "forward".
    """
    if kernel == "forward":
        return 2 * (TILE_ROWS * size + Q_STAGES * TILE_ROWS * size + 2 * stages * block * size)
    kv, q_dout = 2 * block * size, 2 * stages * queries * size
    if kernel == "query_gather":
        return 2 * (kv + q_dout + 2 * TILE_ROWS * queries) + stages * queries * (8 + block // 8)
    ds = 2 * block * queries
    return 2 * (kv + q_dout + ds) + 4 * (queries * size + 2 * stages * queries)


def num_stages(kernel: str, size: int, block: int, queries: int = GROUP_ROWS) -> int:
    """Number of stages that fit in shared memory; see `shared_memory_bytes` for the arguments."""
    for stages in range(MAX_STAGES, 1, -1):
        if kernel == "query_gather" and block == GROUP_ROWS and stages % 2:
            continue  # two groups alternate, and each has half of the stages
        if shared_memory_bytes(kernel, stages, size, block, queries) + 1024 <= SHARED_MEMORY:
            return stages
    raise AssertionError(f"{kernel} fits with no number of stages at head size {size}")
