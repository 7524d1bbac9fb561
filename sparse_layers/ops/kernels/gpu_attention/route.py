"""Routes: which attention kernels a call runs on a GPU, of which engine, in which order, and why.

A route has no arrays. Kernels that only prepare a launch are not in it: `compact_kernel` builds block lists from
segment ids or selections (`gpu/lists.py`), a launch with splits merges them, and selections are made before
(`select_gpu`). `traced_call.trace_launches` records these, too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from ....masks.bounded_cache import bounded_cache
from ...planning.head_groups import HeadGroup
from ...planning.report import head_names
from ..call import Call
from ..gpu import hardware
from ..gpu.passes import GroupPass
from ..operands import Operands
from ..pass_blocks import head_groups_of
from . import ENGINES, Engine

Kernel = Literal["forward", "dq", "dkv", "dqkv"]
# The alternatives of a call in which single queries select blocks, see `kv_outer.selections_disagree`.
DISAGREE, AGREE = "if neighbouring queries disagree", "if neighbouring queries agree"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, for one or two passes of a head group."""

    kernel: Kernel  # "forward" computes out and lse, "dq" dq, "dkv" dk and dv, and "dqkv" all three gradients
    engine: Engine
    group_pass: GroupPass  # the pass, or two that are fused, with shapes for arrays
    head_group: int  # index of the head group
    # True if the kernel adds to the results of earlier launches, else its results are added to them afterwards.
    accumulates: bool
    in_input_dtype: bool  # True to store results (of "dqkv" dq) in the dtype of the query, else in float32
    kv_in_input_dtype: bool = False  # the same of dk and dv of "dqkv"
    reason: str | None = None  # why the preferred engine does not compute the work; None where it does


class KvOuter(NamedTuple):
    """Kernels that hold a block of keys and gather the single queries that selected it."""

    engine: Engine
    # True if the call always runs them. Otherwise the program decides at run time: it runs them where neighbouring
    # queries disagree, see `kv_outer.selections_disagree`, else the launches of the route.
    always: bool
    reason: str | None = None  # why the preferred engine has no such kernel for the call; None where it has


class Route(NamedTuple):
    """The launches of a call."""

    groups: tuple[HeadGroup, ...]
    forward: tuple[Launch, ...]  # launches of the forward pass, in their order
    backward: tuple[Launch, ...]  # those of the backward pass
    kv_outer_forward: KvOuter | None  # the alternative to ``forward``; None for none
    kv_outer_backward: KvOuter | None  # the alternative to ``backward``; None for none
    # For each pass of each head group, before passes are fused, why the preferred engine does not compute it in the
    # forward pass; None where it does.
    forward_reasons: tuple[str | None, ...]

    def notes(self) -> list[str]:
        """Returns a sentence for each reason that leaves launches to another engine than the preferred one.

        It names the launches: forward or backward, the row orders and heads if the call has several, the condition.
        """
        names_by_reason: dict[str, list[str]] = {}
        for direction, launches, kv_outer in (
            ("forward", self.forward, self.kv_outer_forward),
            ("backward", self.backward, self.kv_outer_backward),
        ):
            condition = "" if kv_outer is None else f" {AGREE}"
            if kv_outer is not None and kv_outer.reason is not None:
                names_by_reason.setdefault(kv_outer.reason, []).append(f"{direction} {DISAGREE}")
            if kv_outer is not None and kv_outer.always:
                continue
            for launch in launches:
                if launch.reason is not None:
                    name = f"{direction}{self._orders_and_heads(launch)}{condition}"
                    names_by_reason.setdefault(launch.reason, []).append(name)
        return [
            f"Triton runs {' and '.join(dict.fromkeys(names))}, because {reason}"
            for reason, names in names_by_reason.items()
        ]

    def _orders_and_heads(self, launch: Launch) -> str:
        """The row orders and the heads of a launch in brackets, if the call has several of them."""
        passes = [group_pass for x in (*self.forward, *self.backward) for group_pass in x.group_pass.unfused()]
        row_orders, entries = ({getattr(x, name) for x in passes} for name in ("orders", "bias_entry"))
        texts = []
        if len(entries) > 1:
            texts.append(f"keys {'within' if launch.group_pass.bias_entry is None else 'beyond'} the table's reach")
        if len(row_orders) > 1:
            texts.append(" and ".join(dict.fromkeys(group_pass.orders for group_pass in launch.group_pass.unfused())))
        if len(self.groups) > 1:
            texts.append(head_names(self.groups[launch.head_group].first, self.groups[launch.head_group].step))
        return f" ({'; '.join(texts)})" if texts else ""


def route(implementation: str, call: Call, operands: Operands) -> Route:
    """Returns the route of a call on the local GPU."""
    arrays, structure = jax.tree.flatten(operands)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return _route(ENGINES[implementation], call, shapes, structure, hardware.local_gpu())


@bounded_cache()
def _route(
    engines: tuple[Engine, ...], call: Call, leaves: tuple[Any, ...], structure: Any, device: hardware.Device
) -> Route:
    shapes: Operands = jax.tree.unflatten(structure, leaves)
    groups = head_groups_of(call, shapes, merge=True)
    group_passes = [[GroupPass(call, shapes, heads.first, heads.step, one) for one in heads.passes] for heads in groups]
    reasons = tuple(
        _pick_engine(engines, group_pass, "forward").reason for passes in group_passes for group_pass in passes
    )
    forward = [
        launch
        for head_group, passes in enumerate(group_passes)
        for launch in _forward_launches(engines, passes, head_group)
    ]
    kv_outer = _kv_outer(engines, call, shapes)
    return Route(groups, tuple(forward), _backward_launches(engines, group_passes), *kv_outer, reasons)


def _kv_outer(engines: tuple[Engine, ...], call: Call, shapes: Operands) -> tuple[KvOuter | None, KvOuter | None]:
    """Returns the kernels that hold keys, forward and backward; None where a call has none."""
    if triton_kv_outer_unsupported(call, shapes) is not None:
        return None, None
    if "hopper" not in engines:
        return KvOuter("triton", False), KvOuter("triton", False)
    reason = query_gather_unsupported(call, shapes)
    forward = KvOuter("triton", False, "the Hopper kernel that gathers queries computes gradients only")
    return forward, KvOuter("hopper", True) if reason is None else KvOuter("triton", False, reason)


def triton_kv_outer_unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why plain Triton's kernels that hold keys cannot compute the selections of a call, or None."""
    from ..triton_gpu import kv_outer

    return kv_outer.unsupported(call, operands)


def query_gather_unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why the Hopper kernel that gathers queries cannot compute the gradients of a call, or None."""
    from ..hopper_gpu import query_gather
    from .kv_outer import subblocks_per_block

    reason = triton_kv_outer_unsupported(call, operands)
    if reason is not None:
        return reason
    assert operands.selection is not None
    return query_gather.unsupported(call, operands, operands.selection.block // subblocks_per_block(call, operands))


class _EnginePass(NamedTuple):
    """One pass, or two that are fused, with the engine that computes them."""

    group_pass: GroupPass
    engine: Engine
    reason: str | None  # why it is not the preferred engine; None where it is
    each_key_once: bool  # True if the kernel for dq computes dk and dv, too, see `triton_gpu.launch.each_key_once`


def _pick_engine(engines: tuple[Engine, ...], group_pass: GroupPass, direction: str) -> _EnginePass:
    """Returns a pass with its engine in a direction, "forward" or "backward"."""
    from ..triton_gpu import launch as triton

    once = direction == "backward" and triton.each_key_once(group_pass)
    if engines == ("triton",):
        return _EnginePass(group_pass, "triton", None, once)
    from ..hopper_gpu import launch as hopper

    if once:
        reason = "each key is in one block list, so one Triton kernel has dq, dk and dv and writes each once"
    else:
        reason = hopper.unsupported(group_pass, direction)
    return _EnginePass(group_pass, "hopper" if reason is None else "triton", reason, once)


def _fuse_passes(engines: tuple[Engine, ...], group_passes: Sequence[GroupPass], direction: str) -> list[_EnginePass]:
    """Returns passes and their engines, those of some queries first; two are one where a kernel can compute both."""
    fused: list[_EnginePass] = []
    for group_pass in sorted(group_passes, key=lambda group_pass: group_pass.q_order.covers_all_tokens):
        picked = _pick_engine(engines, group_pass, direction)
        for i, (partner, engine, *_) in enumerate(fused):
            if (
                partner.fused_with is None
                and engine == picked.engine
                and _can_fuse(engine, partner, group_pass, direction)
            ):
                fused[i] = _pick_engine(engines, partner.fuse(group_pass), direction)
                break
        else:
            fused.append(picked)
    return fused


def _can_fuse(engine: Engine, group_pass: GroupPass, second: GroupPass, direction: str) -> bool:
    if engine == "triton":
        return group_pass.same_rows(second)
    from ..hopper_gpu import launch as hopper

    return hopper.can_fuse(group_pass, second, direction)


def _forward_launches(engines: tuple[Engine, ...], group_passes: Sequence[GroupPass], head_group: int) -> list[Launch]:
    """Returns the forward launches of a head group."""
    fused = _fuse_passes(engines, group_passes, "forward")
    in_input_dtype = _may_round([x.group_pass for x in fused if x.group_pass.q_order.covers_all_tokens])
    launches = []
    for i, (group_pass, engine, reason, _) in enumerate(fused):
        starts = i == 0 or group_pass.q_order.covers_all_tokens
        launches.append(
            Launch(
                "forward", engine, group_pass, head_group, starts, starts and in_input_dtype(group_pass), reason=reason
            )
        )
    return launches


def _backward_launches(engines: tuple[Engine, ...], group_passes: Sequence[Sequence[GroupPass]]) -> tuple[Launch, ...]:
    """Returns the backward launches of all head groups; dk and dv are sums over them."""
    dq_launches: list[Launch] = []
    dkv_launches: list[Launch] = []  # of passes whose dk and dv need a dkv kernel
    for head_group, passes in enumerate(group_passes):
        launches = _dq_launches(engines, passes, head_group)
        dkv_launches += [
            Launch(
                "dkv", "triton", group_pass, head_group, group_pass.kv_order.covers_all_tokens, False, reason=x.reason
            )
            for x in launches
            if x.kernel == "dq"
            for group_pass in x.group_pass.unfused()
        ]
        dq_launches += launches
    # Passes over some keys come before those that write dk and dv of all keys.
    some = [x for x in dkv_launches if not x.accumulates]
    every = [x for x in dkv_launches if x.accumulates]
    in_input_dtype = _may_round([x.group_pass for x in (*(x for x in dq_launches if x.kernel == "dqkv"), *every)])
    return (
        *some,
        *(dataclasses.replace(launch, kv_in_input_dtype=in_input_dtype(launch.group_pass)) for launch in dq_launches),
        *(dataclasses.replace(launch, in_input_dtype=in_input_dtype(launch.group_pass)) for launch in every),
    )


def _dq_launches(engines: tuple[Engine, ...], group_passes: Sequence[GroupPass], head_group: int) -> list[Launch]:
    """Returns the launches of a head group that compute dq; a Hopper kernel adds to it in float32."""
    fused = _fuse_passes(engines, group_passes, "backward")
    kernels: dict[GroupPass, Kernel] = {
        x.group_pass: "dqkv" if x.engine == "hopper" or x.each_key_once else "dq" for x in fused
    }
    # Of the passes over all queries, those that write dk and dv of some keys come before those that write all. Of the
    # latter, those with each key in one list come first: their kernel computes most, and need not read earlier results.
    fused.sort(
        key=lambda x: (
            x.group_pass.q_order.covers_all_tokens,
            x.group_pass.kv_order.covers_all_tokens or kernels[x.group_pass] == "dq",
            not x.each_key_once,
        )
    )
    in_input_dtype = _may_round([x.group_pass for x in fused if x.group_pass.q_order.covers_all_tokens])
    return [
        Launch(
            kernels[group_pass],
            engine,
            group_pass,
            head_group,
            accumulates=i == 0 or group_pass.q_order.covers_all_tokens,
            in_input_dtype=in_input_dtype(group_pass) and not any(later.engine == "hopper" for later in fused[i + 1 :]),
            reason=reason,
        )
        for i, (group_pass, engine, reason, _) in enumerate(fused)
    ]


def _may_round(group_passes: Sequence[GroupPass]) -> Any:
    """Returns a predicate of passes over all tokens: True if one may round its results, of more than two the last."""
    return lambda group_pass: len(group_passes) <= 2 or group_pass is group_passes[-1]
