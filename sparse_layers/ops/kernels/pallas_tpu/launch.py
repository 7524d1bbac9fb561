"""The launch of a TPU kernel over a list of steps, its operands in blocks, and the logits of a pair of blocks.

Operands are laid out [B, heads, rows, size] in the row order of the pass, so that one (rows, size) block is one
transfer. Every TPU attention needs a copy that brings the heads before the tokens; a row order is part of that copy.
Vectors by row (lse, ids) are laid out [.., blocks, 1, rows].
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
from .biases import PassBias, TileBias
from .kernel_masks import LANES, allowed_pairs, from_bits, to_column
from .schedule import LIMITED, Step, Steps

OPTIONAL = "tile", "q_ids", "kv_ids", "table", "slopes", "dtable", "start", "start_lse"
LOG2E = math.log2(math.e)
# Above the compiler's own limit (16 MiB on v5e), below the smallest memory of a generation (64 MiB on v5p and TPU7x).
VMEM_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """The static arguments of the kernels of one pass, for the query heads first, first + stride, ..."""

    call: Call
    heads: int  # number of these query heads
    first: int  # index of the first
    stride: int  # from one to the next
    heads_per_kv_head: int  # query heads that share a key head
    shape: tuple[int, int]  # (bq, bkv)
    granularity: int  # queries of a block that select together; 1 without a selection
    # Computes a partial block from row indices; None if tiles hold them, or no block is partial.
    mask: Callable[[Any, Any], Any] | None
    limited: bool  # True if ids limit blocks, too, or a selection that differs within a block of queries
    bias: PassBias | None = None

    def kv_head(self, index: Any) -> Any:
        """Returns the key head of a query head by its index in the pass."""
        return (self.first + self.stride * index) // self.heads_per_kv_head


class GridPosition(NamedTuple):
    """The position of a kernel in its grid, as scalars."""

    batch: Any  # the batch entry
    head: Any  # the query head
    step: Step
    active_query_groups: Any  # bit i: the i-th group of queries of the block selected the key block; or None
    is_first_visit: Any  # of the output block
    is_last_visit: Any  # of the output block
    is_first_step: Any  # of this batch entry and group of heads
    is_last_step: Any  # of this batch entry and group of heads
    next_step: Callable[[], tuple[Any, Step]]  # head and step of the next grid step, if there is one


class PassArrays(NamedTuple):
    """The operands that the kernels of a pass read, in row order."""

    query: jax.Array  # [B, heads, rows, H]
    key: jax.Array  # [B, K, columns, H]
    value: jax.Array  # [B, K, columns, Hv]
    tiles: jax.Array | None = None  # mask tiles of [bq, bkv], transposed [bkv, bq], as bits; see `as_bits`
    # Segment ids, and if there are n = 2 ids, order ids: int32 [B, 1, blocks, n, bq] and [B, 1, blocks, n, bkv].
    q_ids: jax.Array | None = None
    kv_ids: jax.Array | None = None
    # Of a bias, in the unit of `to_logits`: float32 [heads, 1, entries], see `PassTable`, and [heads, 1, 128], equal in
    # all lanes.
    table: jax.Array | None = None
    slopes: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class BlockOperand:
    """An operand of a launch: its array, and the block of it that a step reads or writes."""

    array: Any  # the operand, or for an output its `jax.ShapeDtypeStruct`
    block_shape: tuple[int | None, ...] | None  # as of `pl.BlockSpec`; None if the whole array stays in HBM
    # Block indices from (b, h, step, mask_tile): batch entry, query head, `Step`, number of a mask tile.
    index_map: Callable[..., tuple[Any, ...]] | None


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """Makes the `BlockOperand` of each operand of a pass."""

    config: PassConfig
    transposed: bool  # True if key blocks are the outer ones, as for dk and dv. Logits are [bkv, bq] then.
    members: int = 1  # query heads that share an output block

    def by_query(self, array: Any) -> BlockOperand:
        """Returns the operand of [B, heads, rows, size]."""
        block_shape = None, None, self.config.shape[0], array.shape[-1]
        return BlockOperand(array, block_shape, lambda b, h, step, _: (b, h, self._q(step), 0))

    def by_kv_head(self, array: Any) -> BlockOperand:
        """Returns the operand of [B, K, columns, size]."""
        block_shape = None, None, self.config.shape[1], array.shape[-1]
        return BlockOperand(array, block_shape, lambda b, h, step, _: (b, self.config.kv_head(h), self._kv(step), 0))

    def vector(self, array: Any) -> BlockOperand:
        """Returns the operand of [B, heads, blocks, 1, bq]."""
        block_shape = None, None, None, 1, self.config.shape[0]
        return BlockOperand(array, block_shape, lambda b, h, step, _: (b, h, self._q(step), 0, 0))

    def operands(self, arrays: PassArrays) -> dict[str, BlockOperand | None]:
        """Returns the operands that a pass reads, None for those that it does not have."""
        bq, bkv = self.config.shape
        tile_shape = () if arrays.tiles is None else arrays.tiles.shape[1:]
        num_ids = 0 if arrays.q_ids is None else arrays.q_ids.shape[3]
        return {
            "query": self.by_query(arrays.query),
            "key": self.by_kv_head(arrays.key),
            "value": self.by_kv_head(arrays.value),
            "tile": _optional(arrays.tiles, tile_shape, lambda b, h, step, mask_tile: (mask_tile, 0, 0)),
            "q_ids": _optional(
                arrays.q_ids, (None, None, num_ids, bq), lambda b, h, step, _: (b, 0, self._q(step), 0, 0)
            ),
            "kv_ids": _optional(
                arrays.kv_ids, (None, None, num_ids, bkv), lambda b, h, step, _: (b, 0, self._kv(step), 0, 0)
            ),
            "table": None if arrays.table is None else self.table(arrays.table),
            "slopes": _optional(arrays.slopes, (1, LANES), lambda b, h, step, _: (h, 0, 0)),
        }

    def table(self, array: Any, *batch: None) -> BlockOperand:
        """Returns the operand of [heads, 1, entries], the tables of all members; with ``batch``, of [B, heads, ..]."""
        block_shape = *batch, self.members, 1, array.shape[-1]
        return BlockOperand(array, block_shape, lambda b, h, *_: (*(b for _ in batch), h // self.members, 0, 0))

    def _q(self, step: Step) -> Any:
        return step.inner if self.transposed else step.outer

    def _kv(self, step: Step) -> Any:
        return step.outer if self.transposed else step.inner


def _optional(
    array: Any, block_shape: tuple[int | None, ...], index_map: Callable[..., tuple[Any, ...]]
) -> BlockOperand | None:
    return None if array is None else BlockOperand(array, (None, *block_shape), index_map)


def launch(
    kernel: Callable[[Any, GridPosition], None],
    name: str,
    steps: Steps,
    grid: tuple[int, int, int],
    inputs: dict[str, BlockOperand | None],
    outputs: dict[str, BlockOperand],
    scratch: dict[str, Any],
    aliases: dict[str, str] | None = None,
) -> list[jax.Array]:
    """Runs a kernel over (batch entries, heads, steps, members of a head group), compiled on TPUs, else interpreted.

    Args:
      kernel: called with a namespace of all references by name (None for absent optional inputs) and its position.
      grid: (batch entries, groups of query heads that share an output block, members of such a group).
      scratch: memory that lasts from step to step.
      aliases: inputs whose memory becomes that of an output.
    """
    present = {name: operand for name, operand in inputs.items() if operand is not None}
    names = [*present, *outputs, *scratch]
    scalars = steps.scalars
    batches, groups, members = grid

    def spec(operand: BlockOperand) -> pl.BlockSpec:
        by_step = operand.index_map
        if by_step is None:
            return pl.BlockSpec(memory_space=pl.ANY)

        def index_map(b, h, s, member, *refs):
            head = h * members + member
            return by_step(b, head, steps.read(refs, b, head, s), steps.mask_tile(refs, b, head, s))

        return pl.BlockSpec(operand.block_shape, index_map)

    def body(*refs):
        named = dict.fromkeys(OPTIONAL) | dict(zip(names, refs[len(scalars) :], strict=True))
        kernel(SimpleNamespace(**named), _grid_position(steps, refs, members))

    varying = jax.typeof(next(iter(present.values())).array).manual_axis_type

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
                in_specs=[spec(x) for x in present.values()],
                out_specs=[spec(x) for x in outputs.values()],
                scratch_shapes=[*scratch.values()],
            ),
            input_output_aliases={
                len(scalars) + [*present].index(i): [*outputs].index(o) for i, o in (aliases or {}).items()
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

    arrays = [*scalars, *(x.array for x in present.values()), jnp.asarray(steps.count, jnp.int32)]
    return lax.platform_dependent(*arrays, tpu=functools.partial(run, False), default=functools.partial(run, True))


def _grid_position(steps: Steps, scalars: Any, members: int) -> GridPosition:
    batch, group, s, member = (pl.program_id(axis) for axis in range(4))
    head, final, last_member = group * members + member, pl.num_programs(2) - 1, member == members - 1
    step = steps.read(scalars, batch, head, s)

    def next_step():
        next_s, next_member = (
            jnp.where(last_member, jnp.minimum(s + 1, final), s),
            jnp.where(last_member, 0, member + 1),
        )
        next_head = group * members + next_member
        return next_head, steps.read(scalars, batch, next_head, next_s)

    return GridPosition(
        batch,
        head,
        step,
        steps.read_active_query_groups(scalars, batch, head, s),
        is_first_visit=(step.is_first == 1) & (member == 0),
        is_last_visit=(step.is_last == 1) & last_member,
        is_first_step=(s == 0) & (member == 0),
        is_last_step=(s == final) & last_member,
        next_step=next_step,
    )


# --- operands --------------------------------------------------------------------------------------------------------


def to_rows(order: RowOrder, x: jax.Array, block: int) -> jax.Array:
    """Returns [B, heads, rows, size] in row order from [B, T, heads, size] by token, rows padded to whole blocks."""
    return order.gather(x, pad_length(order.rows, block)).swapaxes(1, 2)


def vector(order: RowOrder, x: jax.Array, block: int) -> jax.Array:
    """Returns [B, heads, blocks, 1, block] in row order from [B, T, heads] by token."""
    x = order.gather(x, pad_length(order.rows, block)).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, 1, block)


def to_tokens(order: RowOrder, x: jax.Array, fill: float = 0.0) -> jax.Array:
    """Returns [B, T, heads, ..] from [B, heads, rows, ..]: the inverse of `to_rows`; ``fill`` for missing tokens."""
    return order.scatter(x.swapaxes(1, 2), fill)


def pad_length(n: int, block: int) -> int:
    """Returns n rounded up to whole blocks."""
    return -(-n // block) * block


# --- inside kernels --------------------------------------------------------------------------------------------------


def compute_by_state(step: Step, config: PassConfig, compute: Callable[[bool, bool], None]) -> None:
    """Calls compute(masked, limited) by the kind of a step; an empty step computes nothing."""
    pl.when(step.state == FULL)(lambda: compute(False, False))
    pl.when(step.state == PARTIAL)(lambda: compute(True, config.limited))
    if config.limited:
        pl.when(step.state == LIMITED)(lambda: compute(False, True))


def bias_unit(call: Call) -> float:
    """Returns the factor on a bias in `to_logits`."""
    return LOG2E if call.soft_cap is None else 1 / call.soft_cap


def to_logits(config: PassConfig, product: jax.Array, bias: TileBias) -> tuple[jax.Array, jax.Array | None]:
    """Returns logits to base 2 from the products q . k, and the slope of the soft cap at them."""
    cap = config.call.soft_cap
    if cap is None:
        return bias.add(product * (config.call.scale * LOG2E)), None
    squashed = jnp.tanh(bias.add(product * (config.call.scale / cap)))
    return squashed * (cap * LOG2E), 1 - squashed * squashed


def mask_logits(
    config: PassConfig, refs: Any, position: GridPosition, s: jax.Array, masked: bool, limited: bool, transposed: bool
) -> jax.Array:
    """Returns logits [bq, bkv], or [bkv, bq] if ``transposed``, with -inf where a query may not see a key."""
    allowed = []
    q_block, kv_block = (
        (position.step.inner, position.step.outer) if transposed else (position.step.outer, position.step.inner)
    )
    if masked and config.mask is not None:
        first_rows = q_block * config.shape[0], kv_block * config.shape[1]
        allowed.append(allowed_pairs(config.mask, first_rows, config.shape, transposed))
    elif masked and refs.tile is not None:
        allowed.append(from_bits(refs.tile[...], s.shape[0]))
    if limited and position.active_query_groups is not None:
        q_group = lax.broadcasted_iota(jnp.int32, s.shape, int(transposed)) >> config.granularity.bit_length() - 1
        allowed.append((position.active_query_groups >> q_group) & 1 != 0)
    if limited and refs.q_ids is not None:
        for i in range(refs.q_ids.shape[0]):
            q, k = refs.q_ids[i : i + 1], refs.kv_ids[i : i + 1]
            q, k = (q, to_column(k)) if transposed else (to_column(q), k)
            allowed.append(k <= q if i else (q == k) & (q >= 0))
    return jnp.where(functools.reduce(jnp.logical_and, allowed), s, -jnp.inf) if allowed else s


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the matrix product over two axes, summed in float32; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def across_lanes(x: jax.Array, width: int) -> jax.Array:
    """Returns an array that broadcasts against [n, width] from [n, LANES] with equal lanes."""
    if width % LANES:
        return x[:, :1]
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)
