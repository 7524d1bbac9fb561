"""Attention of a decoding step, on GPUs: the launches of `decode_kernel.py`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics import base_2_sinks

# Arrays of keys that a launch can read, and query heads of a key head; head sizes at most.
MOST_KEPT, MOST_GROUP, MOST_SIZE = 4, 64, 256
# By whether a program has several query heads: bytes of keys and values of a tile, and stages of tiles on their way.
# The best of 8 and of 5 choices on an H200, for windows of 1024 and for 16,384 to 65,536 keys.
TILE_BYTES, STAGES, WARPS = {False: 16384, True: 32768}, {False: 4, True: 6}, 4
# Rows of a tile at the least and most, and bytes of shared memory that are not for tiles or queries.
LEAST_ROWS, MOST_ROWS, OTHER_BYTES = 16, 64, 16384
# How many of the programs that share a list are worth while: by bytes that the whole GPU would read meanwhile for each
# multiprocessor, what a second kernel costs; how much of such a share one program can read, and how much several on a
# multiprocessor where others have none.
MERGE_BYTES, ONE, ALONE, MOST_SPLITS = 80_000, 0.65, 1.5, 64
_DTYPES = "float32", "bfloat16", "float16"


@dataclasses.dataclass(frozen=True)
class Read:
    """What is read of one pair of arrays that keep keys and values.

    Attributes:
      keys, values: [B, heads, rows, H] and [B, heads, rows, Hv].
      heads: those that are read, which query heads share in this order.
      rows: int32 [B * S, 1 or heads, L], what each query sees of a head, -1 for nothing.
      classes: row i of a list is not seen before position i * classes; 0 where that is not known.
    """

    keys: jax.Array
    values: jax.Array
    heads: tuple[int, ...]
    rows: jax.Array
    classes: int = 0


class Options(NamedTuple):
    """How logits come from products: times ``scale``, then ``cap * tanh(x / cap)`` where there is a cap."""

    scale: float
    cap: float | None = None


def unsupported(query: Any, keys: Sequence[Any], values: Sequence[Any], group: int, reads: int) -> str | None:
    """Why `attend` cannot serve queries [..., N, H], with so many query heads of a key head, and reads; or None."""
    from ..gpu import hardware

    device = hardware.local_device()
    if isinstance(device, str):
        return device
    dtypes = {x.dtype.name for x in (query, *keys, *values)}
    if not dtypes <= {*_DTYPES}:
        return f"it computes in {_DTYPES}, got {sorted(dtypes)}"
    if reads > MOST_KEPT:
        return f"it reads {MOST_KEPT} arrays of keys at most, got {reads}"
    if max(query.shape[-1], values[0].shape[-1]) > MOST_SIZE or group > MOST_GROUP:
        return (
            f"it takes head sizes up to {MOST_SIZE} and {MOST_GROUP} query heads of a key head, got {query.shape[-1]} "
            f"and {values[0].shape[-1]}, {group}"
        )
    if math.prod(query.shape[:-2]) > hardware.MAX_BATCH_ENTRIES:
        return f"it takes at most {hardware.MAX_BATCH_ENTRIES} queries, got {query.shape}"
    return None


def attend(
    query: jax.Array,
    reads: Sequence[Read],
    at: jax.Array,
    options: Options,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of single queries to rows of a cache.

    Args:
      query: [B * S, heads, query heads of each, H]; a sequence has S neighbouring ones.
      reads: what they read, disjoint; as many heads of each.
      at: int32 [B * S], positions.
      options: of the logits.
      sinks: [heads, query heads of each], or None.

    Returns:
      [B * S, heads, query heads of each, Hv] in the dtype of query; 0 for a query that sees nothing.
    """
    return _launched(query, reads, at, options, sinks, None)[0]


def step(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    reads: Sequence[Read],
    slots: jax.Array,
    at: jax.Array,
    options: Options,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Attention of one query a sequence, S = 1, to rows of a cache and a token that is written into it meanwhile.

    Args:
      query: as of `attend`.
      new: the token's keys [B, heads, H] and values [B, heads, Hv].
      reads: as of `attend`, of different arrays with all their heads; rows are without the places of the token.
      slots: int32 [B, 1 + arrays], whether the query sees the token (0, else -1), and its rows in arrays, -1 for none.
      at, options, sinks: as of `attend`.

    Returns:
      (as of `attend`, keys and values of each of the reads with the token).
    """
    out, *arrays = _launched(query, reads, at, options, sinks, (*new, slots))
    return out, tuple(arrays[: len(reads)]), tuple(arrays[len(reads) :])


def _launched(
    query: jax.Array,
    reads: Sequence[Read],
    at: jax.Array,
    options: Options,
    sinks: jax.Array | None,
    token: tuple[jax.Array, jax.Array, jax.Array] | None,
) -> Sequence[jax.Array]:
    """The results of `attend`, or with a token (keys, values, slots) those of `step`."""
    from ..gpu import bridge, hardware
    from ..gpu.hardware import padded_size
    from .decode_kernel import Kept, Step, decode_kernel, merge_kernel

    device = hardware.local_device()
    assert isinstance(device, hardware.Device)
    (queries, heads, group, size), value_size = query.shape, reads[0].values.shape[-1]
    # Whatever the kernel has to be told is one array, and so one fusion of XLA's.
    told = [jnp.broadcast_to(at.astype(jnp.int32)[:, None, None], (queries, reads[0].rows.shape[1], 1))]
    if token is not None:
        told.append(token[2][:, None])
    rows = jnp.concatenate([*told, *(x.rows for x in reads)], axis=-1)
    first = np.cumsum([sum(x.shape[-1] for x in told), *(x.rows.shape[-1] for x in reads)]).tolist()
    kept = tuple(
        Kept(x.keys.shape[1], x.keys.shape[2], begin, x.rows.shape[-1], x.classes)
        for x, begin in zip(reads, first, strict=False)
    )
    padded, itemsize = (padded_size(size), padded_size(value_size)), reads[0].keys.dtype.itemsize
    tile, stages = tile_and_stages(
        group, padded[0] * query.dtype.itemsize, sum(padded) * itemsize, device.shared_memory
    )
    count = sum(x.COUNT for x in kept)
    splits = number_of_splits(count, tile, (size + value_size) * itemsize, queries * heads, device.processors)
    constants = Step(
        TOKENS=queries // len(reads[0].keys),
        HEADS=heads,
        GROUP=group,
        LISTS=rows.shape[1],
        LENGTH=rows.shape[2],
        H=size,
        HV=value_size,
        D=padded[0],
        DV=padded[1],
        KEPT=kept,
        SCALE=float(options.scale),
        CAP=0.0 if options.cap is None else float(options.cap),
        SINKS=sinks is not None,
        WRITES=token is not None,
        SPLITS=splits,
        STAGES=stages,
        ROWS=rows_of_queries(group),
        TILE=tile,
        PARTIAL=1 << (splits - 1).bit_length(),
    )
    none = [query] * 2 * (MOST_KEPT - len(reads))  # arrays that are not there
    arrays = [
        query,
        *((query, query) if token is None else token[:2]),
        *(array for x in reads for array in (x.keys, x.values)),
        *none,
        jnp.array([x.heads for x in reads], jnp.int32),
        rows,
        rows if sinks is None else base_2_sinks(sinks),
    ]
    shape = queries, heads, group, value_size
    lse = jax.ShapeDtypeStruct((queries, heads, splits, group), jnp.float32)
    out = jax.ShapeDtypeStruct(shape, query.dtype)
    partial = out if splits == 1 else jax.ShapeDtypeStruct((*lse.shape, value_size), jnp.float32)
    in_place = range(3, 3 + 2 * len(reads)) if token is not None else ()
    settings: dict[str, Any] = {"constants": {"C": constants}, "num_warps": WARPS}
    found, logs, *changed = bridge.call_triton(
        decode_kernel,
        (splits * heads, queries),
        arrays,
        [partial, lse],
        num_stages=stages,
        in_place=in_place,
        **settings,
    )
    if splits > 1:
        grid = (math.prod(shape[:3]),)
        found = bridge.call_triton(merge_kernel, grid, [found, logs], [out], num_stages=1, **settings)[0]
    return found, *changed[::2], *changed[1::2]


def rows_of_queries(group: int) -> int:
    """Rows of a tile of so many query heads; matrix products have 16 at least."""
    return 1 if group == 1 else max(16, 1 << (group - 1).bit_length())


def tile_and_stages(group: int, query_bytes: int, row_bytes: int, shared_memory: int) -> tuple[int, int]:
    """Rows of a tile of keys and how many stages fit into so many bytes, of which all but the last hold a tile."""
    stages = STAGES[group > 1]
    room = shared_memory - OTHER_BYTES - rows_of_queries(group) * query_bytes
    most = min(TILE_BYTES[group > 1], room // (stages - 1)) // row_bytes
    rows = min(MOST_ROWS, max(LEAST_ROWS, 1 << max(most, 1).bit_length() - 1))
    return rows, max(2, min(stages, room // (rows * row_bytes) + 1))


def number_of_splits(count: int, tile: int, row_bytes: int, programs: int, processors: int) -> int:
    """How many programs share each of so many lists of ``count`` rows.

    One is done when it has read its share, when its multiprocessor has read what all programs there read, or when the
    whole GPU has read all, whichever is last.
    """

    def cost(splits: int) -> float:
        own = count * row_bytes / splits
        alone = own * max(1 / ONE, -(-programs * splits // processors) / ALONE)
        return max(programs * count * row_bytes / processors, alone) + (MERGE_BYTES if splits > 1 else 0)

    numbers = (1 << i for i in range(MOST_SPLITS.bit_length()))
    return min((n for n in numbers if n == 1 or n * tile <= count), key=cost)
