"""Shared code of the kernels: operands in blocks, the launch over a list of steps, masked scores.

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
from .kernel_masks import LANES, allowed_pairs, to_column, unpack_bits
from .schedule import LIMITED, Step, Steps

OPTIONAL = "tile", "q_ids", "kv_ids", "start", "start_lse"
LOG2E = math.log2(math.e)
# Above the compiler's own limit (16 MiB on v5e), below the smallest memory of a generation (64 MiB on v5p and TPU7x).
VMEM_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True)
class PassRun:
    """One pass of a chain for the query heads first, first + head_step, ..., as its kernels compute it.

    Attributes:
      call: the call of the op.
      heads: number of these query heads.
      first: the first of them.
      head_step: from one to the next.
      group: query heads that share a key head.
      shape: (bq, bkv).
      granularity: queries of a block that select together; 1 without a selection.
      mask: computes a partial block from row indices; None if kernels read tiles, or if there are no partial blocks.
      limited: True if segment ids, or selections of groups within a block of queries, limit blocks, too.
    """

    call: Call
    heads: int
    first: int
    head_step: int
    group: int
    shape: tuple[int, int]
    granularity: int
    mask: Callable[[Any, Any], Any] | None
    limited: bool

    def kv_head(self, index: Any) -> Any:
        """Returns the key head of the index-th query head."""
        return (self.first + self.head_step * index) // self.group


class GridPosition(NamedTuple):
    """The position of a kernel in its grid, as scalars."""

    batch: Any  # the batch entry
    head: Any  # the query head
    step: Step
    rows_mask: Any  # bit i is set if group i of the block of queries selected the key block; or None
    is_first_visit: Any  # True in the first visit of the output block
    is_last_visit: Any  # True in the last one
    is_first_step: Any  # True in the first step of this batch entry and group of heads
    is_last_step: Any  # True in the last one
    next_step: Callable[[], tuple[Any, Step]]  # returns the next head and step, if there are any


class PassArrays(NamedTuple):
    """Arrays that the kernels of a pass read, in row order."""

    query: jax.Array  # [B, heads, rows, H]
    key: jax.Array  # [B, K, columns, H]
    value: jax.Array  # [B, K, columns, Hv]
    tiles: jax.Array | None = None  # of [bq, bkv], where a kernel is flipped [bkv, bq]; see `pack_bits`
    q_ids: jax.Array | None = None  # int32 [B, 1, blocks, 1, bq]
    kv_ids: jax.Array | None = None  # int32 [B, 1, blocks, 1, bkv]


@dataclasses.dataclass(frozen=True)
class OperandBlock:
    """An operand of a launch: its array, and the block of it that a step reads or writes, as in a `pl.BlockSpec`.

    Attributes:
      array: the operand, or for an output its `jax.ShapeDtypeStruct`.
      block: shape of a block, None for an axis that is indexed away; None for all of it, left in HBM.
      index: block indices from (b, h, step, tile): batch entry, query head, `Step`, mask tile.
    """

    array: Any
    block: tuple[int | None, ...] | None
    index: Callable[..., tuple[Any, ...]] | None


@dataclasses.dataclass(frozen=True)
class OperandBlocks:
    """Builds the `OperandBlock` of each operand of a pass; ``flipped``: key blocks are the major ones (dk and dv)."""

    pass_run: PassRun
    flipped: bool

    def query_block(self, array: Any) -> OperandBlock:
        """Returns the block of an array [B, heads, rows, size] at a step's queries."""
        block = None, None, self.pass_run.shape[0], array.shape[-1]
        return OperandBlock(array, block, lambda b, h, step, _: (b, h, self._q(step), 0))

    def key_block(self, array: Any) -> OperandBlock:
        """Returns the block of an array [B, K, columns, size] at a step's keys."""
        block = None, None, self.pass_run.shape[1], array.shape[-1]
        return OperandBlock(array, block, lambda b, h, step, _: (b, self.pass_run.kv_head(h), self._kv(step), 0))

    def query_vector_block(self, array: Any) -> OperandBlock:
        """Returns the block of an array [B, heads, blocks, 1, bq] at a step's queries."""
        block = None, None, None, 1, self.pass_run.shape[0]
        return OperandBlock(array, block, lambda b, h, step, _: (b, h, self._q(step), 0, 0))

    def operands(self, arrays: PassArrays) -> dict[str, OperandBlock | None]:
        """Returns the blocks of all arrays that a pass reads, by name."""
        bq, bkv = self.pass_run.shape
        tile = () if arrays.tiles is None else arrays.tiles.shape[1:]
        return {
            "query": self.query_block(arrays.query),
            "key": self.key_block(arrays.key),
            "value": self.key_block(arrays.value),
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


def _optional(array: Any, block: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]]) -> OperandBlock | None:
    return None if array is None else OperandBlock(array, (None, *block), index)


def launch(
    kernel: Callable[[Any, GridPosition], None],
    name: str,
    steps: Steps,
    grid: tuple[int, int, int],
    inputs: dict[str, OperandBlock | None],
    outputs: dict[str, OperandBlock],
    scratch: dict[str, Any],
    aliases: dict[str, str] | None = None,
) -> list[jax.Array]:
    """Runs a kernel over (batch entries, heads, steps, members of a head group), compiled on TPUs, else interpreted.

    Args:
      kernel: called with a namespace of all references by name, None for missing optional inputs, and with a
        `GridPosition`.
      name: of the kernel in profiles.
      steps: the list of steps.
      grid: (batch entries, groups of query heads that share an output block, members of such a group).
      inputs: read by the kernel.
      outputs: written by it.
      scratch: memory that lasts from step to step.
      aliases: inputs whose memory becomes an output's.
    """
    inputs_present = {key: block for key, block in inputs.items() if block is not None}
    names = [*inputs_present, *outputs, *scratch]
    scalars = steps.scalars
    batches, groups, members = grid

    def spec(block: OperandBlock) -> pl.BlockSpec:
        block_index = block.index
        if block_index is None:
            return pl.BlockSpec(memory_space=pl.ANY)

        def index(b, h, s, member, *refs):
            head = h * members + member
            return block_index(b, head, steps.read_step(refs, b, head, s), steps.read_tile(refs, b, head, s))

        return pl.BlockSpec(block.block, index)

    def body(*refs):
        named = dict.fromkeys(OPTIONAL) | dict(zip(names, refs[len(scalars) :], strict=True))
        kernel(SimpleNamespace(**named), _grid_position(steps, refs, members))

    varying = jax.typeof(next(iter(inputs_present.values())).array).manual_axis_type

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
                in_specs=[spec(x) for x in inputs_present.values()],
                out_specs=[spec(x) for x in outputs.values()],
                scratch_shapes=[*scratch.values()],
            ),
            input_output_aliases={
                len(scalars) + [*inputs_present].index(i): [*outputs].index(o) for i, o in (aliases or {}).items()
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

    arrays = [*scalars, *(x.array for x in inputs_present.values()), jnp.asarray(steps.count, jnp.int32)]
    return lax.platform_dependent(*arrays, tpu=functools.partial(run, False), default=functools.partial(run, True))


def _grid_position(steps: Steps, scalars: Any, members: int) -> GridPosition:
    batch, group, s, member = (pl.program_id(axis) for axis in range(4))
    head, final, last_member = group * members + member, pl.num_programs(2) - 1, member == members - 1
    step = steps.read_step(scalars, batch, head, s)

    def find_next_step():
        next_s, next_member = (
            jnp.where(last_member, jnp.minimum(s + 1, final), s),
            jnp.where(last_member, 0, member + 1),
        )
        next_head = group * members + next_member
        return next_head, steps.read_step(scalars, batch, next_head, next_s)

    return GridPosition(
        batch,
        head,
        step,
        steps.read_rows_mask(scalars, batch, head, s),
        is_first_visit=(step.first == 1) & (member == 0),
        is_last_visit=(step.last == 1) & last_member,
        is_first_step=(s == 0) & (member == 0),
        is_last_step=(s == final) & last_member,
        next_step=find_next_step,
    )


# --- operands --------------------------------------------------------------------------------------------------------


def by_rows(order: RowOrder, x: jax.Array, block: int) -> jax.Array:
    """Gathers [B, T, heads, size] by token to [B, heads, rows, size] by row, padded to whole blocks."""
    return order.gather(x, padded(order.rows, block)).swapaxes(1, 2)


def vector(order: RowOrder, x: jax.Array, block: int) -> jax.Array:
    """Gathers [B, T, heads] by token to [B, heads, blocks, 1, block] by row."""
    x = order.gather(x, padded(order.rows, block)).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, 1, block)


def by_tokens(order: RowOrder, x: jax.Array, fill: float = 0.0) -> jax.Array:
    """Scatters [B, heads, rows, ..] by row to [B, T, heads, ..] by token; ``fill`` in tokens without a row."""
    return order.scatter(x.swapaxes(1, 2), fill)


def padded(n: int, block: int) -> int:
    """Rounds n up to whole blocks."""
    return -(-n // block) * block


# --- inside kernels --------------------------------------------------------------------------------------------------


def by_kind(step: Step, pass_run: PassRun, compute: Callable[[bool, bool], None]) -> None:
    """Calls compute(masked, limited) by the kind of a step; not in a dead step."""
    pl.when(step.kind == FULL)(lambda: compute(False, False))
    pl.when(step.kind == PARTIAL)(lambda: compute(True, pass_run.limited))
    if pass_run.limited:
        pl.when(step.kind == LIMITED)(lambda: compute(False, True))


def scores(pass_run: PassRun, product: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Turns products q . k into logits to base 2; returns also the slope of the soft cap there, None without one."""
    cap = pass_run.call.soft_cap
    if cap is None:
        return product * (pass_run.call.scale * LOG2E), None
    squashed = jnp.tanh(product * (pass_run.call.scale / cap))
    return squashed * (cap * LOG2E), 1 - squashed * squashed


def masked_scores(
    pass_run: PassRun, refs: Any, position: GridPosition, s: jax.Array, masked: bool, limited: bool, flipped: bool
) -> jax.Array:
    """Sets scores [bq, bkv] (``flipped``: [bkv, bq]) to -inf where a pair may not attend."""
    allowed = []
    q_block, kv_block = (
        (position.step.minor, position.step.major) if flipped else (position.step.major, position.step.minor)
    )
    if masked and pass_run.mask is not None:
        starts = q_block * pass_run.shape[0], kv_block * pass_run.shape[1]
        allowed.append(allowed_pairs(pass_run.mask, starts, pass_run.shape, flipped))
    elif masked and refs.tile is not None:
        allowed.append(unpack_bits(refs.tile[...], s.shape[0]))
    if limited and position.rows_mask is not None:
        row = lax.broadcasted_iota(jnp.int32, s.shape, int(flipped))
        query_group = row >> pass_run.granularity.bit_length() - 1
        allowed.append((position.rows_mask >> query_group) & 1 != 0)
    if limited and refs.q_ids is not None:
        q, k = refs.q_ids[...], refs.kv_ids[...]
        q, k = (q, to_column(k)) if flipped else (to_column(q), k)
        allowed.append((q == k) & (q >= 0))
    return jnp.where(functools.reduce(jnp.logical_and, allowed), s, -jnp.inf) if allowed else s


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiplies matrices over two axes, summed in float32; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def lanes(x: jax.Array, width: int) -> jax.Array:
    """Makes [n, LANES], the same in every lane, broadcast against [n, width]."""
    if width % LANES:
        return x[:, :1]
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)
