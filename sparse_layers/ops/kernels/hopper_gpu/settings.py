"""Sizes of tiles, rings and register budgets of the Hopper kernels, within limits that tests hold."""

from typing import NamedTuple

# Bytes of shared memory of one program, on a multiprocessor of compute capability 9.0.
SHARED_MEMORY = 232448
# The same of each of two programs, less the 1024 bytes that the GPU takes for each. Two programs of one group run on a
# multiprocessor: their 256 threads start with ONE_GROUP_REGISTERS, and those of a consumer then have 232.
HALF_SHARED_MEMORY, ONE_GROUP_REGISTERS = (SHARED_MEMORY + 1024) // 2 - 1024, 128
# Rows of the tile that a program holds, and of each group of four warps. At head size 64 the forward kernel could hold
# 192 queries, with three groups. On an H200 that took as long for causal attention, and 1.35 to 2.6 times as long for
# windows, documents and random blocks.
TILE_ROWS, GROUP_ROWS = 128, 64
# Queries of a step of the backward kernel by head size: 128 where registers hold as many scores. On an H200, causal
# attention, windows, fixed and documents with heads of 64 take 2 to 3 % less for it, forward and backward together.
STEP_QUERIES = {64: 128, 128: 64, 256: 64}
# Keys of a step of the forward kernel. A block of the lists is one step, or a multiple of TILE_ROWS.
STEP_KEYS = (64, 128)
# Keys of a tile of heads of 256: registers hold the scores of no more beside the accumulators of out, or of dk and dv.
WIDE_TILE_KEYS = 64
# Bytes of the lists of tiles that the device makes where blocks of several tiles are split: of one batch entry and
# head, 28 for each tile. That is as much as k and v of 100,000 tokens, 8 heads of 128, in bfloat16.
MAX_LIST_BYTES = 400 << 20
# Added to the number of a mask tile where ids may exclude keys of the block: kernels compare ids there alone.
COMPARE_IDS = 1 << 30
# Head sizes are rounded up to one of these. The query gather kernel has no more.
HEAD_SIZES = (64, 128, 256)
GATHER_HEAD_SIZES = HEAD_SIZES[:2]
# More stages hide no more latency: four at head size 64 and two at 128 keep the tensor cores busy.
MAX_STAGES = 4
# Stages of q in the forward kernel by head size. The second one gains more than a third stage of k and v (2 % of random
# blocks). Shared memory has no second one of heads of 256.
Q_STAGES = {64: 2, 128: 2, 256: 1}
# Columns of out that leave through shared memory at a time, at most.
OUT_COLUMNS = 128
# Registers of a thread in a consumer, nearly the most that a thread can have, and in the producer, which Triton gives
# four warps. A multiprocessor has 65536: 128 times 240 + 240 + 24.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# The same for the query gather kernel, where each of the producer's 128 threads copies rows by its own addresses.
GATHER_REGISTERS = 232, 40


class PaddedSizes(NamedTuple):
    """Head sizes, rounded up."""

    query_key: int
    value: int  # as that of q and k, or 128 where that is 256
    depth: int  # columns of q and k that products read


def size_text(query_key: int, value: int) -> str:
    """Returns head sizes in the words of an error."""
    return str(query_key) if query_key == value else f"{query_key} of q and k, {value} of v"


def is_wide(sizes: PaddedSizes) -> bool:
    """True if the head size of q and k is above 128: such heads have tiles of fewer keys and a backward kernel."""
    return sizes.query_key > OUT_COLUMNS


def tile_keys(block: int, size: int, one_group: bool = False) -> int:
    """Keys of a tile; a block of the lists has one or more tiles. ``size`` is the head size of q and k, rounded up."""
    return min(block, WIDE_TILE_KEYS if size > OUT_COLUMNS else GROUP_ROWS if one_group else TILE_ROWS)


def padded_head_sizes(query_key: int, value: int) -> PaddedSizes:
    """Rounds head sizes up to supported ones; plain Triton has no larger ones, either."""
    size = next(supported for supported in HEAD_SIZES if max(query_key, value) <= supported)
    if size <= OUT_COLUMNS:
        return PaddedSizes(size, size, size)
    return PaddedSizes(size, OUT_COLUMNS if value <= OUT_COLUMNS else size, 192 if query_key <= 192 else size)


def shared_memory_bytes(kernel: str, stages: int, sizes: PaddedSizes, block: int, queries: int = GROUP_ROWS) -> int:
    """Bytes of shared memory without barriers, which take fewer than 1024.

    Args:
      kernel: "forward", "forward_one_group", "backward" or "query_gather".
      stages: stages of k and v in the forward kernel, of q and dout in the others.
      sizes: head sizes.
      block: keys of a tile.
      queries: queries of a step in the kernels other than "forward".
    """
    size, row = sizes.query_key, sizes.query_key + sizes.value  # of q or k, and with dout or v
    if kernel == "forward_one_group":  # out takes the place of q
        return 2 * (GROUP_ROWS * size + stages * block * row)
    if kernel == "forward":
        q_out = TILE_ROWS * (Q_STAGES[size] * size + min(sizes.value, OUT_COLUMNS))
        return 2 * (q_out + stages * block * row) + 4 * block  # the last with a bias
    kv, q_dout = block * row, stages * queries * row
    if kernel == "query_gather":
        return 2 * (kv + q_dout + 2 * TILE_ROWS * queries) + stages * queries * (8 + block // 8)
    if size > OUT_COLUMNS:  # p in float32 and ds; dq takes the place of tiles of q and dout, if these are large enough
        dq = 4 * queries * size // 2 * (sizes.value < size)
        return 2 * (kv + q_dout) + 6 * block * queries + dq + 8 * stages * queries
    ds = 2 * block * queries
    return 2 * (kv + q_dout + ds) + 4 * (queries * size + 2 * stages * queries)


def num_stages(kernel: str, sizes: PaddedSizes, block: int, queries: int = GROUP_ROWS) -> int:
    """Number of stages that fit in shared memory; see `shared_memory_bytes` for the arguments."""
    available = HALF_SHARED_MEMORY if kernel == "forward_one_group" else SHARED_MEMORY
    for stages in range(MAX_STAGES, 1, -1):
        if kernel == "query_gather" and block == GROUP_ROWS and stages % 2:
            continue  # two groups alternate, and each has half of the stages
        if shared_memory_bytes(kernel, stages, sizes, block, queries) + 1024 <= available:
            return stages
    raise AssertionError(f"{kernel} fits with no number of stages at head sizes {sizes}")
