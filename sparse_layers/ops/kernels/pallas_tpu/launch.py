"""What the kernels share: operands in blocks, the launch over a list of steps, the scores of a pair of blocks.

Operands are laid out [B, heads, rows, size] in the row order of the pass, so that one (rows, size) block is one
transfer. Every TPU attention needs a copy that brings the heads before the tokens; a row order is part of that copy.
Vectors by row (lse, segment ids) are laid out [.., blocks, 1, rows].
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....masks.states import FULL, PARTIAL
from ...planning.row_orders import RowOrder
from ..call import Call
from .schedule import LIMITED, Step, Steps
from .sides import LANES, allowed_pairs, column, from_bits

OPTIONAL = "tile", "q_ids", "kv_ids", "start", "start_lse"
LOG2E = math.log2(math.e)
# Above the compiler's own limit (16 MiB on v5e), below the smallest memory of a generation (64 MiB on v5p and TPU7x).
VMEM_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True)
class Link:
    """One pass of a chain for the query heads first, first + stride, ...: what every kernel of it has to know.

    Attributes:
      call: the call of the op.
      heads: number of these query heads.
      first: the first of them.
      stride: from one to the next.
      group: query heads that share a key head.
      shape: (bq, bkv).
      granularity: queries of a block that select together; 1 without a selection.
      mask: computes a partial block from row indices; None if its tiles are given, or if there are no partial blocks.
      limited: whether segment ids or the choices of parts of a block of queries limit blocks, too.
    """

    call: Call
    heads: int
    first: int
    stride: int
    group: int
    shape: tuple[int, int]
    granularity: int
    mask: Callable[[Any, Any], Any] | None
    limited: bool

    def kv_head(self, index: Any) -> Any:
        """The key head of the index-th query head."""
        return (self.first + self.stride * index) // self.group


class Place(NamedTuple):
    """Where a kernel is in its grid, as scalars."""

    batch: Any  # the batch entry
    head: Any  # the query head
    step: Step
    parts: Any  # which parts of the block of queries chose the block of keys, bit by bit; or None
    begins: Any  # whether this is the first visit of the output block
    ends: Any  # whether it is the last
    starts: Any  # whether it is the first of this batch entry and group of heads
    finishes: Any  # whether it is the last of them
    following: Callable[[], tuple[Any, Step]]  # the head and step that come next, where there is a next one


class Arrays(NamedTuple):
    """What the kernels of a pass read, in row order; h counts the heads of the link."""

    query: jax.Array  # [B, heads, rows, H]
    key: jax.Array  # [B, K, columns, H]
    value: jax.Array  # [B, K, columns, Hv]
    tiles: jax.Array | None = None  # of [bq, bkv], where a kernel is flipped [bkv, bq]; see `as_bits`
    q_ids: jax.Array | None = None  # int32 [B, 1, blocks, 1, bq]
    kv_ids: jax.Array | None = None  # int32 [B, 1, blocks, 1, bkv]


@dataclasses.dataclass(frozen=True)
class Block:
    """An operand of a launch: its array, and which block of it a step reads or writes.

    Attributes:
      array: the operand, or for an output its `jax.ShapeDtypeStruct`.
      block: shape of a block, None for an axis that is indexed away; None for all of it, left in HBM.
      index: block indices from (b, h, step, tile): batch entry, query head, `Step`, mask tile.
    """

    array: Any
    block: tuple[int | None, ...] | None
    index: Callable[..., tuple[Any, ...]] | None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Makes the `Block` of any operand of a pass; ``flipped``: key blocks are the major ones (dk and dv)."""

    link: Link
    flipped: bool

    def by_query(self, array: Any) -> Block:
        """Of [B, heads, rows, size]."""
        block = None, None, self.link.shape[0], array.shape[-1]
        return Block(array, block, lambda b, h, step, _: (b, h, self._q(step), 0))

    def by_key(self, array: Any) -> Block:
        """Of [B, K, columns, size]."""
        block = None, None, self.link.shape[1], array.shape[-1]
        return Block(array, block, lambda b, h, step, _: (b, self.link.kv_head(h), self._kv(step), 0))

    def vector(self, array: Any) -> Block:
        """Of [B, heads, blocks, 1, bq]."""
        block = None, None, None, 1, self.link.shape[0]
        return Block(array, block, lambda b, h, step, _: (b, h, self._q(step), 0, 0))

    def operands(self, arrays: Arrays) -> dict[str, Block | None]:
        """Of all that a pass reads."""
        bq, bkv = self.link.shape
        tile = () if arrays.tiles is None else arrays.tiles.shape[1:]
        return {
            "query": self.by_query(arrays.query),
            "key": self.by_key(arrays.key),
            "value": self.by_key(arrays.value),
            "tile": _optional(arrays.tiles, tile, lambda b, h, step, tile: (tile, 0, 0)),
            "q_ids": _optional(arrays.q_ids, (None, None, 1, bq), lambda b, h, step, _: (b, 0, self._q(step), 0, 0)),
            "kv_ids": _optional(
                arrays.kv_ids, (None, None, 1, bkv), lambda b, h, step, _: (b, 0, self._kv(step), 0, 0)
            ),
        }

    def _q(self, step: Step) -> Any:
        return step.minor if self.flipped else step.major

    def _kv(self, step: Step) -> Any:
        return step.major if self.flipped else step.minor


def _optional(array: Any, block: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]]) -> Block | None:
    return None if array is None else Block(array, (None, *block), index)


def launch(
    kernel: Callable[[Any, Place], None],
    name: str,
    steps: Steps,
    grid: tuple[int, int, int],
    inputs: dict[str, Block | None],
    outputs: dict[str, Block],
    scratch: dict[str, Any],
    aliases: dict[str, str] | None = None,
) -> list[jax.Array]:
    """Runs a kernel over (batch entries, heads, steps, members of a head group), compiled on TPUs, else interpreted.

    Args:
      kernel: called with a namespace of all references by name (None for optional inputs that are not there) and a
        `Place`.
      name: of the kernel in profiles.
      steps: the list of steps.
      grid: (batch entries, groups of query heads that share an output block, members of such a group).
      inputs: read by the kernel.
      outputs: written by it.
      scratch: memory that lasts from step to step.
      aliases: inputs whose memory becomes an output's.
    """
    given = {key: block for key, block in inputs.items() if block is not None}
    names = [*given, *outputs, *scratch]
    scalars = steps.scalars
    batches, groups, members = grid

    def spec(block: Block) -> pl.BlockSpec:
        choose = block.index
        if choose is None:
            return pl.BlockSpec(memory_space=pl.ANY)

        def index(b, h, s, member, *refs):
            head = h * members + member
            return choose(b, head, steps.at(refs, b, head, s), steps.tile(refs, b, head, s))

        return pl.BlockSpec(block.block, index)

    def body(*refs):
        named = dict.fromkeys(OPTIONAL) | dict(zip(names, refs[len(scalars) :], strict=True))
        kernel(SimpleNamespace(**named), _place(steps, refs, members))

    varying = jax.typeof(next(iter(given.values())).array).manual_axis_type

    def run(interpret, *arrays):
        *arrays, count = arrays
        call = pl.pallas_call(
            body,
            out_shape=[
                jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, manual_axis_type=varying) for x in outputs.values()
            ],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(batches, groups, count if isinstance(steps.count, jax.Array) else steps.count, members),
                in_specs=[spec(x) for x in given.values()],
                out_specs=[spec(x) for x in outputs.values()],
                scratch_shapes=[*scratch.values()],
            ),
            input_output_aliases={
                len(scalars) + [*given].index(i): [*outputs].index(o) for i, o in (aliases or {}).items()
            },
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            interpret=interpret,
            name=name,
        )
        # TPUs have no 64-bit registers, which Python's numbers in kernels and index maps would ask for under x64.
        with jax.enable_x64(False):
            return call(*arrays)

    arrays = [*scalars, *(x.array for x in given.values()), jnp.asarray(steps.count, jnp.int32)]
    return lax.platform_dependent(*arrays, tpu=functools.partial(run, False), default=functools.partial(run, True))


def _place(steps: Steps, scalars: Any, members: int) -> Place:
    batch, group, s, member = (pl.program_id(axis) for axis in range(4))
    head, final, last_member = group * members + member, pl.num_programs(2) - 1, member == members - 1
    step = steps.at(scalars, batch, head, s)

    def following():
        next_s, next_member = (
            jnp.where(last_member, jnp.minimum(s + 1, final), s),
            jnp.where(last_member, 0, member + 1),
        )
        next_head = group * members + next_member
        return next_head, steps.at(scalars, batch, next_head, next_s)

    return Place(
        batch,
        head,
        step,
        steps.parts(scalars, batch, head, s),
        begins=(step.first == 1) & (member == 0),
        ends=(step.last == 1) & last_member,
        starts=(s == 0) & (member == 0),
        finishes=(s == final) & last_member,
        following=following,
    )


# --- operands --------------------------------------------------------------------------------------------------------


def by_rows(order: RowOrder, x: jax.Array, block: int) -> jax.Array:
    """[B, T, heads, size] in token order -> [B, heads, rows, size] in row order, rows padded to whole blocks."""
    return order.gather(x, padded(order.rows, block)).swapaxes(1, 2)


def vector(order: RowOrder, x: jax.Array, block: int) -> jax.Array:
    """[B, T, heads] in token order -> [B, heads, blocks, 1, block] in row order."""
    x = order.gather(x, padded(order.rows, block)).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, 1, block)


def by_tokens(order: RowOrder, x: jax.Array, fill: float = 0.0) -> jax.Array:
    """[B, heads, rows, ..] -> [B, T, heads, ..], the inverse of `by_rows`; ``fill`` in tokens without a row."""
    return order.scatter(x.swapaxes(1, 2), fill)


def padded(n: int, block: int) -> int:
    """n, rounded up to whole blocks."""
    return -(-n // block) * block


# --- inside kernels --------------------------------------------------------------------------------------------------


def by_kind(step: Step, link: Link, compute: Callable[[bool, bool], None]) -> None:
    """Calls compute(masked, limited) as the kind of a step asks for, and not at all in a dead step."""
    pl.when(step.kind == FULL)(lambda: compute(False, False))
    pl.when(step.kind == PARTIAL)(lambda: compute(True, link.limited))
    if link.limited:
        pl.when(step.kind == LIMITED)(lambda: compute(False, True))


def scores(link: Link, product: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Logits in base 2 from the products q . k, and the slope of the soft cap at them."""
    cap = link.call.soft_cap
    if cap is None:
        return product * (link.call.scale * LOG2E), None
    squashed = jnp.tanh(product * (link.call.scale / cap))
    return squashed * (cap * LOG2E), 1 - squashed * squashed


def masked_scores(
    link: Link, refs: Any, place: Place, s: jax.Array, masked: bool, limited: bool, flipped: bool
) -> jax.Array:
    """Scores [bq, bkv] (``flipped``: [bkv, bq]) with -inf where a pair may not attend."""
    allowed = []
    q_block, kv_block = (place.step.minor, place.step.major) if flipped else (place.step.major, place.step.minor)
    if masked and link.mask is not None:
        starts = q_block * link.shape[0], kv_block * link.shape[1]
        allowed.append(allowed_pairs(link.mask, starts, link.shape, flipped))
    elif masked and refs.tile is not None:
        allowed.append(from_bits(refs.tile[...], s.shape[0]))
    if limited and place.parts is not None:
        part = lax.broadcasted_iota(jnp.int32, s.shape, int(flipped)) >> link.granularity.bit_length() - 1
        allowed.append((place.parts >> part) & 1 != 0)
    if limited and refs.q_ids is not None:
        q, k = refs.q_ids[...], refs.kv_ids[...]
        q, k = (q, column(k)) if flipped else (column(q), k)
        allowed.append((q == k) & (q >= 0))
    return jnp.where(functools.reduce(jnp.logical_and, allowed), s, -jnp.inf) if allowed else s


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Matrix product over the given axes, summed in float32; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def lanes(x: jax.Array, width: int) -> jax.Array:
    """[n, LANES], the same in every lane -> something that broadcasts against [n, width]."""
    if width % LANES:
        return x[:, :1]
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)
