"""The contract between the op and its implementations: a `Call`, its `Operands`, and what a backend computes of them.

A backend is a module with three functions::

    unsupported(call, operands) -> str | None                  the reason why it cannot compute the call, or None
    forward(call, operands) -> (out, lse)                      out [B, T, N, Hv], lse [B, T, N]
    backward(call, operands, lse, delta, dout) -> Gradients    lse of the whole call; delta [B, T, N], dout like out

``delta`` is sum(out * dout) less the gradient of lse. A backend that JAX differentiates has
``attend(call, operands) -> out`` in the place of forward and backward. A backend may also have:

* ``not_preferred(call, operands) -> str | None``: the reason why another implementation is the better choice.
* ``planned(call, operands) -> Plan | None``: the plan that it runs, if that may be another one than the call's.
* ``notes(call, operands) -> list[str]``: passes that it hands to another implementation or plans anew, with reasons.
* ``MERGES = False``, if its results over some of the keys cannot be merged by log-sum-exp.
"""

import dataclasses

from ..planning.params import BwdParams, FwdParams
from ..planning.plan import Pass, Plan
from ..planning.row_orders import Reordered, RowOrder
from .operands import Operands as Operands


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of one call of the op."""

    plan: Plan | None  # the blocks of each pass; None if the mask is a run-time array
    fwd_shape: tuple[int, int]  # (bq, bkv), block shape of the forward lists of a run-time mask
    bwd_shape: tuple[int, int]  # (bq, bkv), block shape of its backward lists
    params: tuple[FwdParams, BwdParams]  # the forward and the backward parameters
    scale: float  # factor on q . k
    soft_cap: float | None  # scores s become soft_cap * tanh(s / soft_cap); None for none
    return_lse: bool = False  # True if the caller wants the log-sum-exp, too
    picked_for: str | None = None  # the platform that the implementation was picked for; None if the caller named it
    # With context parallelism, the plan of each device; ``plan`` is that of the last one.
    plans_by_rank: tuple[Plan, ...] = ()
    # True if an all-to-all of all queries runs meanwhile, which occupies some multiprocessors.
    exchanges_queries: bool = False
    bias_center: int = 0  # the index of distance 0 in the table of a bias
    # The position of each query and key token, by which a bias counts distances; None if positions are the tokens.
    bias_orders: tuple[RowOrder, RowOrder] | None = None

    @property
    def chains(self) -> tuple[tuple[Pass, ...], ...]:
        """The chain of each mask of the plan. A call with a run-time mask has no plan, and no chains."""
        assert self.plan is not None
        return self.plan.chains

    def bias_positions(self, lengths: tuple[int, int]) -> tuple[RowOrder, RowOrder]:
        """Returns the order whose ``token(x)`` is the position of token x, of T queries and of S keys."""
        return self.bias_orders or (RowOrder(lengths[0]), RowOrder(lengths[1]))

    @property
    def masks(self) -> tuple[Reordered, ...]:
        """The plan's masks in natural row order; () if the mask is a run-time array."""
        if self.plan is None:
            return ()
        orders = RowOrder(self.plan.q_len), RowOrder(self.plan.kv_len)
        return tuple(Reordered(mask, *orders) for mask in self.plan.masks)
