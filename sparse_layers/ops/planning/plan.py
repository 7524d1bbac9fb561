"""Where to compute: a mask and two lengths become a chain of block-sparse passes.

Softmax over a union of disjoint key sets is the log-sum-exp weighted merge of the softmaxes over each set. So a union
of patterns may be computed one pattern after the other, each in the row order that turns its part into dense blocks:

* ``Strided(l)`` asks for residue-major order of queries and keys, where it is block-diagonal;
* ``Columns(l, c)`` and ``Prefix(n)`` ask for just their keys, gathered; their transposes for just their queries;
* a ``Grid`` asks for its tokens tile by tile, in tiles of the shape that costs least, ``ColumnMajor`` for columns;
* everything else stays in natural order.

`make_plan` splits a union by the orders its terms ask for, makes the terms disjoint (``term & ~earlier``), estimates
each candidate (natural order alone is always one) and takes the cheapest. The result is exact whichever it takes.
"""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np

from ...arguments.checks import Length, checked, strict_kwargs
from ...masks.adapters import MaskLike
from ...masks.algebra import And, Blocks, Mask, Not, Or, Shifted, Transposed
from ...masks.bounded_cache import bounded_cache
from ...masks.grids import ColumnMajor, Grid
from ...masks.pictures import FORMULA, shortened
from ...masks.primitives import BlockDiagonal, Columns, Full, Global, Prefix, Strided
from ...masks.states import FULL, PARTIAL
from .block_lists import grid_shape
from .blocks import BlockGrid, active_blocks, outside_trace
from .changing_masks import note_masks
from .mask_info import MaskInfo, bind, masks_for_lengths, process_mask
from .params import BwdParams, FwdParams, resolve_params
from .platforms import TUNING, Tuning, check_implementation, default_implementation
from .row_orders import Reordered, RowOrder

Wish = tuple[RowOrder, RowOrder]

# Block size of pictures.
BLOCK = 128
# A mask whose block lists would exceed this many cells gets larger blocks: metadata stays below some tens of MB.
MAX_CELLS = 1 << 21
# Reading or writing one row of q, k, v or out costs about as much as this many (q, k) pairs: 8 bytes x head size
# against 4 flops x head size a pair, on machines that do 100 to 300 flops in the time of one byte.
PAIRS_PER_ROW = 256
# One cell of a block list costs about as much as this many pairs (a step that looks at it and moves on).
PAIRS_PER_CELL = 16
MAX_TERMS = 16
# Mask tiles are made of up to this many pairs, which takes seconds; where there are more, rules are computed.
MAX_TILED = 1 << 29


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One link of a chain: a block-sparse attention in a row order of its own.

    Attributes:
      q_order: token of each query row.
      kv_order: token of each key row.
      mask: the pattern in row space, disjoint from the masks of earlier passes.
      fwd_shape: (bq, bkv), block shape of the forward lists.
      bwd_shape: (bq, bkv), block shape of the backward lists.
      fwd_blocks: number of blocks that the forward computes.
      bwd_blocks: number of blocks that the backward computes.
    """

    q_order: RowOrder
    kv_order: RowOrder
    mask: Reordered
    fwd_shape: tuple[int, int]
    bwd_shape: tuple[int, int]
    fwd_blocks: int
    bwd_blocks: int

    @property
    def fwd(self) -> MaskInfo:
        """The blocks of the forward pass by query row, made when they are asked for: kernels read `BlockLists`."""
        return self._info(self.fwd_shape, is_dkv=False)

    @property
    def dkv(self) -> MaskInfo:
        """The blocks of the backward pass by key column, made as those of `fwd`."""
        return self._info(self.bwd_shape, is_dkv=True)

    @property
    def order_text(self) -> str:
        """The row orders of queries and of keys, in words."""
        return _name((self.q_order, self.kv_order))

    @property
    def block_text(self) -> str:
        """How many blocks the forward computes, of how many of which shape, in words."""
        rows, columns = (n // side for n, side in zip(self.padded(self.fwd_shape), self.fwd_shape, strict=True))
        return f"{self.fwd_blocks} of {rows * columns} blocks of {self.fwd_shape[0]} x {self.fwd_shape[1]}"

    def padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows of q and of k/v, rounded up to whole blocks of ``shape``."""
        return _round_up(self.q_order.rows, shape[0]), _round_up(self.kv_order.rows, shape[1])

    def _info(self, shape: tuple[int, int], *, is_dkv: bool) -> MaskInfo:
        return process_mask(bind(self.mask, 1, *self.padded(shape)), shape, is_dkv=is_dkv)[0]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A mask bound to lengths and block sizes. Equal arguments of `make_plan` make equal, equally hashed plans.

    Attributes:
      masks: the masks that the heads take in turn.
      q_len: number of queries T.
      kv_len: number of keys S.
      fwd_params: as given to `make_plan`.
      bwd_params: as given to `make_plan`.
      implementation: whose block sizes were chosen where the parameters leave them open.
      chains: for each mask, the passes whose merged result is the attention under that mask.
      candidates: for each mask, what was weighed: (description, estimated cost in pairs), the chosen one first.
    """

    masks: tuple[Mask, ...]
    q_len: int
    kv_len: int
    fwd_params: FwdParams
    bwd_params: BwdParams
    implementation: str
    chains: tuple[tuple[Pass, ...], ...] = dataclasses.field(compare=False, repr=False)
    candidates: tuple[tuple[tuple[str, int], ...], ...] = dataclasses.field(compare=False, repr=False)

    def __repr__(self):
        lines = [f"Plan of {self.q_len} queries x {self.kv_len} keys for {self.implementation!r}"]
        for h, (mask, chain) in enumerate(zip(self.masks, self.chains, strict=True)):
            lines.append(f"{shortened(repr(mask), FORMULA)}: {self.density(h):.1%} of what dense attention computes")
            lines += [f"  {one.order_text}: {one.block_text}" for one in chain]
        return "\n".join(lines)

    def density(self, h: int) -> float:
        """The share of the blocks of full attention that the forward passes of mask h compute."""
        dense = (-(-self.q_len // one.fwd_shape[0]) * -(-self.kv_len // one.fwd_shape[1]) for one in self.chains[h])
        return sum(one.fwd_blocks / blocks for one, blocks in zip(self.chains[h], dense, strict=True))

    @functools.cached_property
    def allows_diagonal(self) -> bool:
        """Whether every query may attend to the key at its own position, so that no row is empty."""
        if self.q_len > self.kv_len:
            return False
        place = np.arange(self.q_len)
        with outside_trace():
            return all(bool(np.asarray(mask(place, place)).all()) for mask in self.masks)

    def for_heads(self, first: int, count: int) -> "Plan":
        """The plan of ``count`` heads from head ``first`` on, of all that take this plan's masks in turn."""
        turn = [self.masks.index(self.masks[head % len(self.masks)]) for head in range(first, first + count)]
        period = next(p for p in range(1, count + 1) if count % p == 0 and turn == turn[:p] * (count // p))
        if turn[:period] == list(range(len(self.masks))):
            return self
        masks, chains, candidates = (
            tuple(entries[i] for i in turn[:period]) for entries in (self.masks, self.chains, self.candidates)
        )
        return dataclasses.replace(self, masks=masks, chains=chains, candidates=candidates)

    def _repr_html_(self) -> str:
        from .report import as_html  # which compares this plan with another

        return as_html(self)


@strict_kwargs
def make_plan(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    implementation: str | None = None,
) -> Plan:
    """Plans attention under a mask: which passes, in which row orders, over which blocks. Cached by content.

    Args:
      mask: whatever `as_masks` takes: a mask, a preset's name, a numpy bool array, or a sequence of these (head h takes
        entry h % len).
      q_len: number of queries T, >= 1.
      kv_len: number of keys S; defaults to q_len.
      fwd_params: block sizes of the forward pass; None leaves the choice to the library.
      bwd_params: block sizes of the backward pass; None means those of the forward pass.
      implementation: one of `implementations()`, for which to choose block sizes that are left open; None means the
        first choice of this platform. Every implementation computes every plan.

    Returns:
      The `Plan`; pass it to `block_sparse_attention` in place of the mask.

    Raises:
      ValueError: a length is no integer from 1 to 2**31 - 2, an array's shape differs from the lengths, or
        implementation is unknown.
      TypeError: mask is none of the above.

    Example:
      >>> import sparse_layers as sl
      >>> plan = sl.make_plan(sl.Causal() & (sl.Window(128) | sl.Strided(128)), 4096)
      >>> [str(p.q_order) for p in plan.chains[0]]
      ['natural order', 'residue-major order, stride 128']
    """
    kv_len = q_len if kv_len is None else kv_len
    q_len, kv_len = checked("q_len", q_len, Length), checked("kv_len", kv_len, Length)
    masks = masks_for_lengths(mask, q_len, kv_len)
    fwd_params, bwd_params = resolve_params(fwd_params, bwd_params)
    check_implementation(implementation)
    note_masks(masks)
    name = implementation or default_implementation()
    return _make_plan(masks, q_len, kv_len, fwd_params, bwd_params, name, TUNING[name])


@bounded_cache()
def _make_plan(masks, q_len, kv_len, fwd_params, bwd_params, implementation, tuning) -> Plan:
    # By tuning, not by name: implementations that are tuned alike share their chains.
    options = fwd_params, bwd_params, tuning
    chains, candidates = zip(*(_make_chain(mask, q_len, kv_len, *options) for mask in masks), strict=True)
    return Plan(masks, q_len, kv_len, fwd_params, bwd_params, implementation, chains, candidates)


@bounded_cache()
def _make_chain(mask, q_len, kv_len, fwd_params, bwd_params, tuning):
    """The cheapest chain for one mask, and what was weighed."""
    weighed = []
    for number, (name, groups) in enumerate(decompositions(mask, q_len, kv_len, tuning)):
        passes = [_Draft(Reordered(part, *wish), fwd_params, tuning) for wish, part in groups]
        passes = [draft for draft in passes if draft.blocks]
        weighed.append((sum(draft.cost for draft in passes), number, name, passes))
    weighed.sort(key=lambda entry: entry[:2])
    chain = tuple(draft.finish(bwd_params) for draft in weighed[0][3])
    return chain, tuple((name, cost) for cost, _, name, _ in weighed)


class _Draft:
    """A pass of a candidate: its blocks counted, its lists not yet made."""

    def __init__(self, mask: Reordered, params: FwdParams, tuning: Tuning):
        self.mask, self.tuning = mask, tuning
        if params.q_blocksize is None and params.kv_blocksize is None:
            self.shape = _cheapest(mask, tuning)
        else:
            self.shape = _block_shape(mask, params, tuning.block_shapes[0])
        self.blocks = _count(mask, self.shape)[0]
        self.cost = _cost(mask, self.shape, tuning)

    def finish(self, params: BwdParams) -> Pass:
        explicit = params.q_blocksize is not None or params.kv_blocksize is not None
        own = (
            self.tuning.deterministic_bwd_block_shape if params.deterministic else None
        ) or self.tuning.bwd_block_shape
        default = own or (self.tuning.block_shapes[0] if explicit else self.shape)
        (rows, keys), largest = self.shape, self.tuning.block_shapes[-1]
        grown = math.isqrt(rows * keys // math.prod(largest))
        if own and not explicit and grown > 1:  # as the forward's are, where lists would be too long
            default = own[0] * grown, own[1] * grown
        elif self.tuning.max_stretched_keys and not explicit and keys > largest[1]:
            default = keys, max(rows, largest[1])
        bwd_shape = _block_shape(self.mask, params, default)
        bwd_blocks = _count(self.mask, bwd_shape)[0]
        return Pass(self.mask.q_order, self.mask.kv_order, self.mask, self.shape, bwd_shape, self.blocks, bwd_blocks)


def _block_shape(mask: Reordered, params: FwdParams | BwdParams, default: tuple[int, int]) -> tuple[int, int]:
    """Explicit block sizes, else the default, no larger than the rows at hand need."""
    explicit = (params.q_blocksize, params.kv_blocksize)
    rows = (mask.q_order.rows, mask.kv_order.rows)
    enough = (max(16, 1 << (r - 1).bit_length()) for r in rows)
    sizes = [e or min(d, r) for e, d, r in zip(explicit, default, enough, strict=True)]
    return sizes[0], sizes[1]


def _cost(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> int:
    blocks, cells = _count(mask, shape)
    extra = tuning.partial_cost - 1
    if tuning.max_operations is not None and not uses_mask_tiles(mask, shape, tuning):
        extra += tuning.operation_cost * max(0, count_operations(mask) - tuning.max_operations)
    pairs = shape[0] * shape[1] * (blocks + extra * _partial(mask, shape))
    pairs = (pairs + blocks * tuning.step_cost) * dict(zip(tuning.block_shapes, tuning.cost_factors, strict=False)).get(
        shape, 1
    )
    rows = mask.q_order.rows + mask.kv_order.rows
    return round(pairs) + PAIRS_PER_ROW * rows + PAIRS_PER_CELL * cells


def _cheapest(mask: Reordered, tuning: Tuning) -> tuple[int, int]:
    """The block shape of least cost. Finer ones are tried as long as they gain, so a dense mask never lists them."""
    *finer, largest = (_block_shape(mask, FwdParams(), size) for size in tuning.block_shapes)
    best = _affordable(mask, largest, tuning)
    for shape in reversed(finer):
        if shape == best:
            continue
        if best != largest or not _fits(mask, shape, tuning) or _cost(mask, shape, tuning) >= _cost(mask, best, tuning):
            break
        best = largest = shape
    return best


def _affordable(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> tuple[int, int]:
    """``shape``, grown until its block lists fit.

    Goes from coarse to fine, so that the fine blocks of a dense mask, too many, are never listed.
    """
    shapes = [shape]
    while math.prod(grid_shape(mask, shapes[-1])) > MAX_CELLS:
        shapes.append(_grown(shapes[-1], tuning))
    coarse = shapes.pop()
    while shapes:
        at_most = len(_grid(mask, coarse).rows) * (math.prod(coarse) // math.prod(shape))
        if at_most <= 4 * MAX_CELLS and _fits(mask, shape, tuning):
            return shape
        if not _fits(mask, shapes[-1], tuning):
            break
        coarse = shapes.pop()
    while not _fits(mask, coarse, tuning) and max(coarse) < (tuning.max_block or math.inf):
        coarse = _grown(coarse, tuning)
    return coarse


def _grown(shape: tuple[int, int], tuning: Tuning) -> tuple[int, int]:
    """The next larger block, where lists would be too long."""
    rows, keys = shape
    return (rows, 2 * keys) if 2 * keys <= tuning.max_stretched_keys else (2 * rows, 2 * keys)


def _fits(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> bool:
    blocks, cells = _count(mask, shape)
    size = (8 if uses_mask_tiles(mask, shape, tuning) else 4) * (blocks + max(grid_shape(mask, shape)))
    return cells <= MAX_CELLS and (tuning.max_list_bytes is None or size <= tuning.max_list_bytes)


def _count(mask: Reordered, shape: tuple[int, int]) -> tuple[int, int]:
    """Active blocks, and cells of the block lists by row and by column, each as wide as its widest entry."""
    grid = _grid(mask, shape)
    if not len(grid.rows):
        return 0, 0
    widest = [int(np.bincount(axis).max()) for axis in (grid.rows, grid.columns)]
    return len(grid.rows), grid.num_rows * widest[0] + grid.num_columns * widest[1]


def uses_mask_tiles(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> bool:
    """Whether kernels read masked blocks of a shape as tiles that are made beforehand; else they compute the rule."""
    if not mask.computable or tuning.max_operations is None:
        return not mask.computable
    if count_operations(mask) <= tuning.max_operations:
        return False
    while math.prod(grid_shape(mask, shape)) > MAX_CELLS:  # too many to list; larger ones hold no fewer pairs
        shape = 2 * shape[0], 2 * shape[1]
    return _partial(mask, shape) * math.prod(shape) <= MAX_TILED


@bounded_cache()
def count_operations(mask: Mask) -> int:
    """How many operations a mask's rule takes for each pair, besides those for each query and for each key alone."""
    sides, pairs = [jax.ShapeDtypeStruct(shape, np.int32) for shape in ((2, 1), (1, 3))], (2, 3)

    def counted(jaxpr):
        inner = [x.params["jaxpr"].jaxpr for x in jaxpr.eqns if "jaxpr" in x.params]
        own = sum(x.outvars[0].aval.shape == pairs for x in jaxpr.eqns if "jaxpr" not in x.params)
        return own + sum(map(counted, inner))

    # Without the mesh in force: inside `jax.shard_map`, positions would be traced as a device's own.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return counted(jax.make_jaxpr(mask)(*sides).jaxpr)


def _partial(mask: Reordered, shape: tuple[int, int]) -> int:
    """Active blocks that need a mask."""
    return int(np.count_nonzero(_grid(mask, shape).states == PARTIAL))


def _grid(mask: Reordered, shape: tuple[int, int]) -> BlockGrid:
    return active_blocks(mask, *grid_shape(mask, shape), *shape)


def _round_up(n: int, block: int) -> int:
    return -(-n // block) * block


# --- candidates ------------------------------------------------------------------------------------------------------


def decompositions(mask: Mask, q_len: int, kv_len: int, tuning: Tuning | None = None):
    """Yields (description, [(row orders, part of the mask)]), the parts disjoint and their union the mask.

    Grids are cut into tiles only if it is said what blocks cost.
    """
    natural: Wish = (RowOrder(q_len), RowOrder(kv_len))
    yield str(natural[0]), [(natural, mask)]
    terms = [(_wish(term, q_len, kv_len, tuning) or natural, functools.reduce(And, term)) for term in _terms(mask)]
    wishes = list(dict.fromkeys(wish for wish, _ in terms if wish != natural))
    if len(terms) > MAX_TERMS or not wishes:
        return
    sizes = range(1, len(wishes) + 1) if len(wishes) <= 2 else sorted({1, len(wishes)})
    for chosen in itertools.chain.from_iterable(itertools.combinations(wishes, n) for n in sizes):
        groups: dict[Wish, list[Mask]] = {natural: []} | {wish: [] for wish in chosen}
        for wish, term in terms:
            groups[wish if wish in chosen else natural].append(term)
        parts, earlier = [], []
        for wish, group in groups.items():
            if group:
                part = functools.reduce(Or, group)
                parts.append((wish, functools.reduce(And, (Not(e) for e in earlier), part)))
                earlier.append(part)
        yield " + ".join(_name(wish) for wish, _ in parts), parts


@bounded_cache()
def decomposition_costs(
    mask: Mask, length: int, tuning: Tuning, pieces: int
) -> list[list[tuple[Wish, Mask, np.ndarray]]]:
    """The parts of each of the `splits`, but for those of grids into tiles, and what they cost.

    Args:
      mask: the mask.
      length: tokens of the sequence.
      tuned: says what blocks cost.
      pieces: of equal length, into which the queries are cut.

    Returns:
      For each split, the parts that hold anything: (row orders, part of the mask, cost in pairs of each piece).
    """
    costs = []
    for _, groups in decompositions(mask, length, length):
        found = []
        for wish, part in groups:
            draft = _Draft(Reordered(part, *wish), FwdParams(), tuning)
            if draft.blocks:
                token = np.minimum(wish[0].token(_grid(draft.mask, draft.shape).rows * draft.shape[0]), length - 1)
                share = np.bincount(token * pieces // length, minlength=pieces) / draft.blocks
                found.append((wish, part, draft.cost * share))
        costs.append(found)
    return costs


def _name(wish: Wish) -> str:
    q_order, kv_order = wish
    if q_order == kv_order or (q_order.natural and kv_order.natural):
        return str(q_order)
    named = [f"{side}: {order}" for side, order in (("queries", q_order), ("keys", kv_order)) if not order.natural]
    return ", ".join(named)


def _terms(mask: Mask) -> list[list[Mask]]:
    """The mask as a union of terms, each a list of factors whose intersection it is (disjunctive normal form)."""
    mask = _pushed(mask)
    if isinstance(mask, Or):
        return _terms(mask.left) + _terms(mask.right)
    if isinstance(mask, And):
        left, right = _terms(mask.left), _terms(mask.right)
        if len(left) * len(right) > MAX_TERMS:
            return [[mask]]
        return [a + b for a in left for b in right]
    return [[mask]]


def _pushed(mask: Mask) -> Mask:
    """Moves Not, Blocks and Transposed one level below And and Or; shows columns in a lifted mask, strides of rows."""
    if isinstance(mask, Global):
        return Or(Prefix(mask.size), Transposed(Prefix(mask.size)))
    if isinstance(mask, Not):
        inner = _pushed(mask.mask)
        if isinstance(inner, Not):
            return _pushed(inner.mask)
        if isinstance(inner, And | Or):
            return (Or if isinstance(inner, And) else And)(Not(inner.left), Not(inner.right))
    if isinstance(mask, Reordered):
        return _shown(mask)
    if isinstance(mask, Blocks | Transposed):
        inner, rewrap = _pushed(mask.mask), functools.partial(dataclasses.replace, mask)
        if isinstance(inner, And | Or):
            return type(inner)(rewrap(mask=inner.left), rewrap(mask=inner.right))
        if isinstance(mask, Transposed) and isinstance(inner, Transposed):
            return _pushed(inner.mask)
        if isinstance(mask, Blocks):
            if isinstance(inner, Transposed):
                return Transposed(_pushed(Blocks(inner.mask, mask.block)))
            if isinstance(inner, Prefix):
                return Prefix(inner.size * mask.block)
            if isinstance(inner, Columns):
                return Columns(*(x * mask.block for x in (inner.period, inner.start, inner.end)))
    if isinstance(mask, Shifted) and isinstance(mask.mask, Columns):
        period = mask.mask.period
        start, last = ((x - mask.by) % period for x in (mask.mask.start, mask.mask.end - 1))
        if start <= last:
            return Columns(period, start, last + 1)
        return Or(Columns(period, start), Columns(period, 0, last + 1))  # they go on where the next period begins
    return mask


def _shown(mask: Reordered) -> Mask:
    """The same mask, with strides that rows have as tokens have beside what else it says.

    Only what strides are in is taken apart: a union of terms that each repeat all else would be long to compute.
    """
    factors = _factors(mask.mask)
    for factor in factors:
        rest = [x for x in factors if x is not factor]
        if isinstance(factor, Strided) and mask.keeps_residues(factor.stride):
            # With nothing else to say, that rows have tokens is still to be said.
            return And(factor, dataclasses.replace(mask, mask=functools.reduce(And, rest) if rest else Full()))
    for factor in factors:
        if isinstance(factor, Or) and _has_stride(factor, mask):
            rest = [x for x in factors if x is not factor]
            sides = (functools.reduce(And, [*rest, side]) for side in (factor.left, factor.right))
            left, right = (dataclasses.replace(mask, mask=side) for side in sides)
            return Or(left, right)
    return mask


def _factors(mask: Mask) -> list[Mask]:
    return _factors(mask.left) + _factors(mask.right) if isinstance(mask, And) else [mask]


def _has_stride(mask: Mask, rows: Reordered) -> bool:
    if isinstance(mask, And | Or):
        return _has_stride(mask.left, rows) or _has_stride(mask.right, rows)
    return isinstance(mask, Strided) and rows.keeps_residues(mask.stride)


def _wish(factors: list[Mask], q_len: int, kv_len: int, tuning: Tuning | None) -> Wish | None:
    """The row orders that a term asks for; None for natural order."""
    for factor in factors:
        if isinstance(factor, Strided) and 1 < factor.stride < min(q_len, kv_len):
            return RowOrder.residue_major(q_len, factor.stride), RowOrder.residue_major(kv_len, factor.stride)
        if tuning and isinstance(factor, Grid | ColumnMajor) and (tiles := _tiles(factor, max(q_len, kv_len), tuning)):
            return RowOrder.tiled(q_len, factor, *tiles), RowOrder.tiled(kv_len, factor, *tiles)
    q_order, kv_order = RowOrder(q_len), RowOrder(kv_len)
    for factor in factors:
        if kv_order.natural:
            kv_order = _selected(factor, kv_len)
        if q_order.natural and isinstance(factor, Transposed):
            q_order = _selected(factor.mask, q_len)
    return None if q_order.natural and kv_order.natural else (q_order, kv_order)


@bounded_cache()
def _tiles(grid: Grid | ColumnMajor, length: int, tuning: Tuning) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The cheapest tile, no smaller than a block, and its phase; None for a part of a row, as in natural order."""
    if isinstance(grid, ColumnMajor):
        return (grid.rows, 1), (0, 0)
    shape = RowOrder.tiled(length, grid, grid.shape, ()).shape
    axes = [_tile_pairs(*axis) for axis in zip(grid.axes, shape, strict=True)]
    least, largest = max(tuning.block_shapes[0]), max(tuning.block_shapes[-1])
    tiles = [x for x in itertools.product(*axes) if least // 2 < math.prod(x) <= 4 * largest]

    def met(tokens: int, block: int) -> int:  # by a tile, of the blocks that hold it, if it begins anywhere it may
        return tokens + block - math.gcd(tokens, block)

    def cost(tile):  # pairs of tiles on the grid are pairs on each axis; of equals, those with the longest rows
        _, counts, full = map(math.prod, zip(*(axis[n] for axis, n in zip(axes, tile, strict=True)), strict=True))
        sides = [[met(math.prod(tile), block) for block in shape] for shape in tuning.block_shapes]
        steps = [math.prod(n) / math.prod(shape) for n, shape in zip(sides, tuning.block_shapes, strict=True)]
        pairs = counts + (tuning.partial_cost - 1) * (counts - full)
        each = zip(sides, steps, strict=True)
        return min(pairs * math.prod(n) + counts * step * tuning.step_cost for n, step in each), tile

    best = min(tiles, key=cost, default=(1,))
    return (best, tuple(axis[n][0] for axis, n in zip(axes, best, strict=True))) if math.prod(best[:-1]) > 1 else None


def _tile_pairs(mask: Mask, length: int) -> dict[int, tuple[int, int, int]]:
    """For each size of a tile of an axis its phase, and how many pairs of tiles are active, and full.

    Sizes are the powers of two, and that of the mask's own blocks; tiles begin where a shift has a mask's blocks begin.
    """
    inner, by = (mask.mask, mask.by) if isinstance(mask, Shifted) else (mask, 0)
    sizes = {1 << i for i in range(length.bit_length() + 1) if 1 << i < 2 * length}
    sizes |= {inner.block} if isinstance(inner, Blocks) else {inner.size} if isinstance(inner, BlockDiagonal) else set()
    found = {}
    for size in sorted(sizes):
        order = RowOrder(length, (length,), (size,), phase=(by % size,))
        cells = order.rows // size
        if cells * cells <= MAX_CELLS:
            states = active_blocks(Reordered(mask, order, order), cells, cells, size, size).states
            found[size] = order.phase[0], len(states), int(np.count_nonzero(states == FULL))
    return found


def _selected(factor: Mask, length: int) -> RowOrder:
    """The order that holds just the positions a factor selects."""
    if isinstance(factor, Prefix) and 0 < factor.size < length:
        return RowOrder.gathered(length, length, 0, factor.size)
    if isinstance(factor, Columns) and factor.start < length:
        period, stop = min(factor.period, length), min(factor.end, length)
        if stop - factor.start < period:
            return RowOrder.gathered(length, period, factor.start, stop)
    return RowOrder(length)
