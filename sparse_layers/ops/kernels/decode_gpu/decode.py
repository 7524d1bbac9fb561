"""Attention of a decoding step, on GPUs: the launches of `decode_kernel.py`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics import limit_base_2
from ..quantized import QuantizedRows, Rows

# At most: arrays of keys that a launch reads, query heads of a key head, and the head size.
MAX_ARRAYS, MAX_GROUPED_HEADS, MAX_SIZE = 4, 64, 256
# Fewest and most rows of a tile, and bytes of shared memory for other things than tiles and queries.
MIN_ROWS, MAX_ROWS, OTHER_BYTES = 16, 64, 16384
# The cost model of splits. A merge kernel takes as long as each multiprocessor takes to read MERGE_BYTES when the whole
# GPU reads. Several programs on a multiprocessor read at BUSY_SM_RATE of its share of the bandwidth while others are
# idle; see also `Settings`.
MERGE_BYTES, BUSY_SM_RATE, MAX_SPLITS = 80_000, 1.5, 64
_DTYPES = "float32", "bfloat16", "float16"


class Settings(NamedTuple):
    """Settings of a launch."""

    tile_bytes: int  # most bytes of keys and values of a tile
    stages: int  # most tiles in flight
    warps: int
    one_program_rate: float  # a program alone reads at this rate of a multiprocessor's share of the bandwidth


# By (True if a program has several query heads, True for rows of 8 bits). The best of 8 and of 5 choices on an H200,
# for windows of 1024 and for 16,384 to 65,536 keys; for rows of 8 bits the best of 5 and of 7, for 65,536 keys. There a
# program with several query heads has two warps, and needs company twice as soon.
SETTINGS = {
    (False, False): Settings(16384, 4, 4, 0.65),
    (True, False): Settings(32768, 6, 4, 0.65),
    (False, True): Settings(8192, 4, 4, 0.65),
    (True, True): Settings(16384, 4, 2, 0.33),
}


@dataclasses.dataclass(frozen=True)
class CacheRead:
    """The rows of one pair of cache arrays that queries read."""

    # [B, heads, rows, H] and [B, heads, rows, Hv].
    keys: Rows
    values: Rows
    heads: tuple[int, ...]  # heads of the arrays that are read; entry i is that of the i-th group of query heads
    rows: jax.Array  # int32 [B * S, 1 or heads, L], list of rows of a head that a query sees, -1 for none
    stride: int = 0  # entry i of a list is not seen before position i * stride; 0 if that is unknown


class LogitScaling(NamedTuple):
    """Turns products into logits: times ``scale``, then ``cap * tanh(x / cap)`` if there is a cap."""

    scale: float
    cap: float | None = None


def unsupported(query: Any, keys: Sequence[Any], values: Sequence[Any], group: int, reads: int) -> str | None:
    """Returns why `attend` cannot compute queries [..., N, H] with ``group`` query heads of a key head, or None.

    ``reads`` is the number of pairs of arrays.
    """
    from ..gpu import hardware

    device = hardware.local_device()
    if isinstance(device, str):
        return device
    rows = [x for x in (*keys, *values) if isinstance(x, QuantizedRows)]
    dtypes = {x.dtype.name for x in (query, *keys, *values) if not isinstance(x, QuantizedRows)}
    if not dtypes <= {*_DTYPES}:
        return f"it computes in {_DTYPES}, got {sorted(dtypes)}"
    if rows and (len(rows) < len(keys) + len(values) or len({x.dtype for x in rows}) > 1):
        return "it reads arrays of 8 bits alone, of one dtype"
    if rows and rows[0].dtype.name != "int8" and device.capability < 89:
        return f"GPUs of compute capability {device.compute_capability} lack {rows[0].dtype.name}"
    if rows and (query.shape[-1] % 2 or values[0].shape[-1] % 2):
        return f"it reads rows of 8 bits in pairs of columns, got sizes {query.shape[-1]} and {values[0].shape[-1]}"
    if reads > MAX_ARRAYS:
        return f"it reads {MAX_ARRAYS} arrays of keys at most, got {reads}"
    if max(query.shape[-1], values[0].shape[-1]) > MAX_SIZE or group > MAX_GROUPED_HEADS:
        return (
            f"it takes head sizes up to {MAX_SIZE} and {MAX_GROUPED_HEADS} query heads of a key head, got "
            f"{query.shape[-1]} and {values[0].shape[-1]}, {group}"
        )
    if math.prod(query.shape[:-2]) > hardware.MAX_BATCH_ENTRIES:
        return f"it takes at most {hardware.MAX_BATCH_ENTRIES} queries, got {query.shape}"
    return None


def attend(
    query: jax.Array,
    reads: Sequence[CacheRead],
    positions: jax.Array,
    options: LogitScaling,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes attention of single queries to rows of a cache.

    Args:
      query: [B * S, heads, query heads of each, H]; a sequence has S neighbouring queries.
      reads: disjoint rows of one or more pairs of arrays, with the same number of heads.
      positions: int32 [B * S], positions of the queries.
      options: scale and soft cap of the logits.
      sinks: [heads, query heads of each], or None.

    Returns:
      [B * S, heads, query heads of each, Hv] in the dtype of query; 0 for a query that sees nothing.
    """
    return _launch_step(query, reads, positions, options, sinks, None)[0]


def step(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    reads: Sequence[CacheRead],
    slots: jax.Array,
    positions: jax.Array,
    options: LogitScaling,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Rows, ...], tuple[Rows, ...]]:
    """Computes attention of one query a sequence (S = 1) to rows of a cache and to a new token, and writes the token.

    Args:
      new: the token's keys [B, heads, H] and values [B, heads, Hv].
      reads: as of `attend`, of different arrays with all their heads; their rows exclude those of the token.
      slots: int32 [B, 1 + arrays]: 0 if the query sees the token, else -1; then its row in each array, -1 for none.

    Returns:
      (out as of `attend`, keys and values of each of the reads with the token).
    """
    out, *arrays = _launch_step(query, reads, positions, options, sinks, (*new, slots))
    return out, tuple(arrays[: len(reads)]), tuple(arrays[len(reads) :])


def _launch_step(
    query: jax.Array,
    reads: Sequence[CacheRead],
    positions: jax.Array,
    options: LogitScaling,
    sinks: jax.Array | None,
    new_token: tuple[jax.Array, jax.Array, jax.Array] | None,
) -> Sequence[Any]:
    """Launches the kernels and returns (out,).

    With a ``new_token`` (keys, values, slots), it writes that to the cache arrays in place, and returns (out, *keys,
    *values).
    """
    from ..gpu import bridge, hardware
    from ..gpu.hardware import padded_size
    from .decode_kernel import CacheArray, DecodeConstants, decode_kernel, merge_kernel

    device = hardware.local_device()
    assert isinstance(device, hardware.Device)
    (queries, heads, queries_per_head, size), value_size = query.shape, reads[0].values.shape[-1]
    # All integers that the kernel reads are one array, which XLA makes in one fusion.
    leading_ints = [jnp.broadcast_to(positions.astype(jnp.int32)[:, None, None], (queries, reads[0].rows.shape[1], 1))]
    if new_token is not None:
        leading_ints.append(new_token[2][:, None])
    rows = jnp.concatenate([*leading_ints, *(x.rows for x in reads)], axis=-1)
    list_starts = np.cumsum([sum(x.shape[-1] for x in leading_ints), *(x.rows.shape[-1] for x in reads)]).tolist()
    cache_arrays = tuple(
        CacheArray(x.keys.shape[1], x.keys.shape[2], start, x.rows.shape[-1], x.stride)
        for x, start in zip(reads, list_starts, strict=False)
    )
    padded, itemsize = (padded_size(size), padded_size(value_size)), reads[0].keys.dtype.itemsize
    if itemsize == 1:
        padded = max(32, padded[0]), max(32, padded[1])  # matrix products have half of the columns
    settings, q_rows = pick_settings(queries_per_head, itemsize), rows_of_queries(queries_per_head)
    tile, stages = tile_and_stages(
        settings, q_rows * padded[0] * query.dtype.itemsize, sum(padded) * itemsize, device.shared_memory
    )
    num_rows, row_bytes = sum(x.COUNT for x in cache_arrays), (size + value_size) * itemsize
    splits = number_of_splits(
        num_rows, tile, row_bytes, queries * heads, device.multiprocessors, settings.one_program_rate
    )
    scales = [x.scale for read in reads for x in (read.keys, read.values) if isinstance(x, QuantizedRows)]
    constants = DecodeConstants(
        TOKENS=queries // len(reads[0].keys),
        HEADS=heads,
        GROUP=queries_per_head,
        LIST_HEADS=rows.shape[1],
        ROW_INTS=rows.shape[2],
        H=size,
        HV=value_size,
        D=padded[0],
        DV=padded[1],
        ARRAYS=cache_arrays,
        SCALE=float(options.scale),
        CAP=0.0 if options.cap is None else float(options.cap),
        SINKS=sinks is not None,
        WRITES=new_token is not None,
        QUANTIZED=bool(scales),
        SPLITS=splits,
        STAGES=stages,
        ROWS=q_rows,
        TILE=tile,
        PADDED_SPLITS=1 << (splits - 1).bit_length(),
    )
    unused = [query] * 2 * (MAX_ARRAYS - len(reads))  # stand for arrays that the kernel does not read
    arrays = [
        query,
        *((query, query) if new_token is None else new_token[:2]),
        *(x.data if isinstance(x, QuantizedRows) else x for read in reads for x in (read.keys, read.values)),
        *unused,
        *(scales + unused if scales else [query] * 2 * MAX_ARRAYS),
        jnp.array([x.heads for x in reads], jnp.int32),
        rows,
        rows if sinks is None else limit_base_2(sinks),
    ]
    shape = queries, heads, queries_per_head, value_size
    lse = jax.ShapeDtypeStruct((queries, heads, splits, queries_per_head), jnp.float32)
    out_shape = jax.ShapeDtypeStruct(shape, query.dtype)
    split_out = out_shape if splits == 1 else jax.ShapeDtypeStruct((*lse.shape, value_size), jnp.float32)
    in_place = []
    if new_token is not None:
        in_place = [first + i for first in ((3, 3 + 2 * MAX_ARRAYS) if scales else (3,)) for i in range(2 * len(reads))]
    launch_options: dict[str, Any] = {"constants": {"C": constants}, "num_warps": settings.warps}
    grid, outputs = (splits * heads, queries), [split_out, lse]
    out, split_lse, *written = bridge.call_triton(
        decode_kernel, grid, arrays, outputs, num_stages=stages, in_place=in_place, **launch_options
    )
    if splits > 1:
        grid = (math.prod(shape[:3]),)
        out = bridge.call_triton(merge_kernel, grid, [out, split_lse], [out_shape], num_stages=1, **launch_options)[0]
    if scales:
        half = len(written) // 2
        written = [QuantizedRows(*x) for x in zip(written[:half], written[half:], strict=True)]
    return out, *written[::2], *written[1::2]


def rows_of_queries(queries_per_head: int) -> int:
    """Returns the rows of a tile of ``queries_per_head`` query heads; matrix products have at least 16."""
    return 1 if queries_per_head == 1 else max(16, 1 << (queries_per_head - 1).bit_length())


def pick_settings(queries_per_head: int, itemsize: int) -> Settings:
    """Returns the settings for rows of elements of ``itemsize`` bytes."""
    settings = SETTINGS[queries_per_head > 1, itemsize == 1]
    # The results of more than 16 query heads do not fit in the registers of two warps.
    return settings._replace(warps=4) if queries_per_head > 16 else settings


def tile_and_stages(settings: Settings, query_bytes: int, row_bytes: int, shared_memory: int) -> tuple[int, int]:
    """Returns (rows of a tile of keys, stages that fit in shared memory); all stages but one hold a tile."""
    available_bytes = shared_memory - OTHER_BYTES - query_bytes
    max_rows = min(settings.tile_bytes, available_bytes // (settings.stages - 1)) // row_bytes
    rows = min(MAX_ROWS, max(MIN_ROWS, 1 << max(max_rows, 1).bit_length() - 1))
    return rows, max(2, min(settings.stages, available_bytes // (rows * row_bytes) + 1))


def number_of_splits(
    num_rows: int, tile: int, row_bytes: int, programs: int, multiprocessors: int, one_program_rate: float
) -> int:
    """Returns the number of splits of each list of ``num_rows`` rows; ``programs`` is the number of lists.

    A program ends when it has read its split, when its multiprocessor has read those of all its programs, or when the
    GPU has read all lists, whichever is last.
    """

    def cost(splits: int) -> float:
        split_bytes = num_rows * row_bytes / splits
        split_cost = split_bytes * max(1 / one_program_rate, -(-programs * splits // multiprocessors) / BUSY_SM_RATE)
        return max(programs * num_rows * row_bytes / multiprocessors, split_cost) + (MERGE_BYTES if splits > 1 else 0)

    numbers = (1 << i for i in range(MAX_SPLITS.bit_length()))
    return min((n for n in numbers if n == 1 or n * tile <= num_rows), key=cost)
