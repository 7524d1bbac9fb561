"""The plan: a mask bound to lengths, block sizes and an implementation, as a chain of block-sparse passes.

Softmax over a union of disjoint key sets is the log-sum-exp weighted merge of the softmaxes over each set. So attention
under a union of patterns is a chain: a pass for each pattern, in the row order that turns its pairs into dense blocks::

    mask            Causal() & (Window(2) | Strided(4))            T = 12
    chain           pass 1, natural order      pass 2, residue-major order, stride 4
    rows            0 1 2 3 4 5 ...            0 4 8 | 1 5 9 | 2 6 10 | 3 7 11
    blocks          along the diagonal         one for each residue: block-diagonal
    result          out, lse of pass 1   ->    merged with those of pass 2: exact

`make_plan` (planner.py) chooses the chain.
"""

import dataclasses
import functools
import html
from typing import NamedTuple

import numpy as np

from ...masks.algebra import Mask
from ...masks.counting import count
from ...masks.pictures import FORMULA, shortened
from ...masks.primitives import Causal, Full
from ...masks.states import FULL, PARTIAL
from .binding import bind
from .block_lists import planned_block_pairs
from .blocks import outside_trace
from .costs import PassCandidate
from .mask_info import MaskInfo, process_mask
from .params import BwdParams, FwdParams
from .platforms import TUNING
from .report import PassRow, Section, head_names, html_table
from .row_orders import Reordered, RowOrder, describe_orders

# In a notebook: most masks, most cells on a side of a picture, most pairs evaluated to find out if a mask is causal.
_MASKS, _SIDE, _LOOKS = 8, 48, 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One block-sparse attention of a chain, in row orders of its own."""

    q_order: RowOrder  # token of each query row
    kv_order: RowOrder  # token of each key row
    mask: Reordered  # the pattern in row space, disjoint from the masks of earlier passes
    fwd_shape: tuple[int, int]  # (bq, bkv), block shape of the forward lists
    bwd_shape: tuple[int, int]  # (bq, bkv), block shape of the backward lists
    fwd_blocks: int  # number of blocks that the forward pass computes
    bwd_blocks: int  # number of blocks that the backward pass computes
    bias_entry: int | None = None  # the only entry of a bias table that its pairs get; None if they may get several

    @property
    def fwd(self) -> MaskInfo:
        """The blocks of the forward pass by query row, in splash attention's format; kernels read `BlockLists`."""
        return self._mask_info(self.fwd_shape, is_dkv=False)

    @property
    def dkv(self) -> MaskInfo:
        """The blocks of the backward pass by key column, in splash attention's format."""
        return self._mask_info(self.bwd_shape, is_dkv=True)

    @property
    def order_text(self) -> str:
        """The row orders of queries and of keys, in words."""
        return describe_orders((self.q_order, self.kv_order))

    @property
    def block_text(self) -> str:
        """The number of blocks that the forward pass computes, of all blocks, and their shape, in words."""
        rows, columns = self._grid_shape
        return f"{self.fwd_blocks} of {rows * columns} blocks of {self.fwd_shape[0]} x {self.fwd_shape[1]}"

    def padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows of q and of k/v, rounded up to whole blocks of ``shape``."""
        return -(-self.q_order.rows // shape[0]) * shape[0], -(-self.kv_order.rows // shape[1]) * shape[1]

    def active_blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns row, column and state of each block that the forward pass computes, int32 [fwd_blocks] each."""
        pairs, _ = planned_block_pairs([self.mask], self.fwd_shape, False)
        return pairs.q_block[0, 0], pairs.kv_block[0, 0], pairs.state[0, 0]

    @property
    def _grid_shape(self) -> tuple[int, int]:
        """The number of query blocks and of key blocks of the forward pass."""
        (rows, columns), (bq, bkv) = self.padded(self.fwd_shape), self.fwd_shape
        return rows // bq, columns // bkv

    def _mask_info(self, shape: tuple[int, int], *, is_dkv: bool) -> MaskInfo:
        return process_mask(bind(self.mask, 1, *self.padded(shape)), shape, is_dkv=is_dkv)[0]

    def _picture_cells(self) -> np.ndarray:
        """Returns the states of the grid of blocks, or of a coarser grid of at most `_SIDE` cells on a side."""
        shape = self._grid_shape
        step = -(-max(shape) // _SIDE)
        rows, columns, states = self.active_blocks()
        full, active = np.zeros((2, *(-(-n // step) for n in shape)), int)
        np.add.at(active, (rows // step, columns // step), 1)
        np.add.at(full, (rows // step, columns // step), states == FULL)
        sizes = [np.bincount(np.arange(n) // step) for n in shape]
        return np.where(full == np.outer(*sizes), FULL, np.where(active > 0, PARTIAL, 0)).astype(np.int8)


class Candidate(NamedTuple):
    """A chain that the planner weighed."""

    orders: str  # the row orders of its passes, in words
    cost: int  # estimated cost in (query, key) pairs


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A mask bound to lengths and block sizes. Equal arguments of `make_plan` make equal, equally hashed plans.

    Attributes:
      masks: the masks that the heads take in turn.
      q_len: number of queries T.
      kv_len: number of keys S.
      fwd_params: as passed to `make_plan`.
      bwd_params: as passed to `make_plan`.
      implementation: its block sizes are used where the parameters leave them open.
      chains: for each mask, the passes whose merged result is the attention under that mask.
      candidates: for each mask, the chains that were weighed, the cheapest first.
    """

    masks: tuple[Mask, ...]
    q_len: int
    kv_len: int
    fwd_params: FwdParams
    bwd_params: BwdParams
    implementation: str
    chains: tuple[tuple[Pass, ...], ...] = dataclasses.field(compare=False, repr=False)
    candidates: tuple[tuple[Candidate, ...], ...] = dataclasses.field(compare=False, repr=False)

    def __repr__(self):
        lines = [f"Plan of {self.q_len} queries x {self.kv_len} keys for {self.implementation!r}"]
        for h, (mask, chain) in enumerate(zip(self.masks, self.chains, strict=True)):
            lines.append(f"{shortened(repr(mask), FORMULA)}: {self.density(h):.1%} of what dense attention computes")
            lines += [f"  {block_pass.order_text}: {block_pass.block_text}" for block_pass in chain]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Returns a table of the passes with pictures of their blocks, and for each mask the saving."""
        sections = []
        for h, mask in enumerate(self.masks[:_MASKS]):
            formula = html.escape(shortened(repr(mask), FORMULA))
            saving = self.saving(h, count(mask, self.q_len, self.kv_len, _LOOKS).causal)
            title = f"{head_names(h, len(self.masks))}: <code>{formula}</code><br>{saving}"
            rows = [PassRow(x.order_text, x.block_text, x._picture_cells()) for x in self.chains[h]]
            sections.append(Section(title, rows))
        caption = f"Plan of {self.q_len} queries and {self.kv_len} keys"
        return html_table(caption, sections, max(0, len(self.masks) - _MASKS))

    def density(self, h: int) -> float:
        """Returns the blocks that the forward passes of mask h compute, as a fraction of those of full attention."""
        chain = self.chains[h]
        dense = (-(-self.q_len // x.fwd_shape[0]) * -(-self.kv_len // x.fwd_shape[1]) for x in chain)
        return sum(block_pass.fwd_blocks / blocks for block_pass, blocks in zip(chain, dense, strict=True))

    def dense_cost(self, is_causal: bool) -> int:
        """Returns the cost in pairs of causal or full attention at the plan's lengths and settings."""
        mask = Reordered(Causal() if is_causal else Full(), RowOrder(self.q_len), RowOrder(self.kv_len))
        return PassCandidate(mask, self.fwd_params, TUNING[self.implementation]).cost

    def dense_pairs(self, is_causal: bool) -> int:
        """Returns the number of pairs that causal or full attention allows at the plan's lengths."""
        square = min(self.q_len, self.kv_len)
        beyond = (self.q_len - square) * self.kv_len  # of queries beyond the last key
        return square * (square + 1) // 2 + beyond if is_causal else self.q_len * self.kv_len

    def saving(self, h: int, is_causal: bool) -> str:
        """Returns the saving of mask h over full attention, or over causal attention if it is causal, in words."""
        dense, cost = self.dense_cost(is_causal), self.candidates[h][0].cost
        kind = "causal" if is_causal else "full"
        text = f"{dense / cost:.1f} times less work than {kind} attention" if cost else "nothing to compute"
        return f"{text} (cost {cost:.3g} against {dense:.3g} pairs)"

    @functools.cached_property
    def allows_diagonal(self) -> bool:
        """True if every query may attend to the key at its own position, so that no row is empty."""
        if self.q_len > self.kv_len:
            return False
        position = np.arange(self.q_len)
        with outside_trace():
            return all(bool(np.asarray(mask(position, position)).all()) for mask in self.masks)

    def for_heads(self, first: int, count: int) -> "Plan":
        """Returns the plan of ``count`` heads from head ``first`` on, of all that take this plan's masks in turn."""
        indices = [self.masks.index(self.masks[head % len(self.masks)]) for head in range(first, first + count)]
        period = next(p for p in range(1, count + 1) if count % p == 0 and indices == indices[:p] * (count // p))
        if indices[:period] == list(range(len(self.masks))):
            return self
        masks, chains, candidates = (
            tuple(entries[i] for i in indices[:period]) for entries in (self.masks, self.chains, self.candidates)
        )
        return dataclasses.replace(self, masks=masks, chains=chains, candidates=candidates)
