"""Routes: which kernels a call runs on a GPU, of which engine, in which order, and why. A route has no arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from ....masks.bounded_cache import bounded_cache
from ...planning.head_groups import HeadGroup
from ..call import Call
from ..gpu import hardware
from ..gpu.passes import GroupPass
from ..operands import Operands
from ..pass_blocks import head_groups_of
from . import ENGINES, Engine

Kernel = Literal["forward", "dq", "dkv", "dqkv"]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, for one or two passes of a head group.

    Attributes:
      kernel: "forward" computes out and lse, "dq" dq, "dkv" dk and dv, and "dqkv" all three gradients.
      engine: the engine of the kernel.
      work: the pass, or two that are fused, with shapes for arrays.
      group: index of the head group.
      starts_from_state: True if the kernel adds to the results of earlier launches, else its results are added to them
        afterwards.
      rounded: True to store results (of "dqkv" dq) in the dtype of the query, else in float32.
      rounded_kv: the same of dk and dv of "dqkv".
    """

    kernel: Kernel
    engine: Engine
    work: GroupPass
    group: int
    starts_from_state: bool
    rounded: bool
    rounded_kv: bool = False


class KvOuter(NamedTuple):
    """Kernels that hold a block of keys and gather the single queries that selected it.

    Attributes:
      engine: the engine of the kernels.
      always: True if the call always runs them. Otherwise the program decides at run time: it runs them where
        neighbouring queries disagree, see `kv_outer.neighbours_disagree`, else the launches of the route.
    """

    engine: Engine
    always: bool


class PassReasons(NamedTuple):
    """Why the preferred engine does not compute a pass, forward and backward; None where it does."""

    orders: str
    forward: str | None
    backward: str | None


class Route(NamedTuple):
    """The launches of a call.

    Attributes:
      groups: the head groups.
      forward: launches of the forward pass, in their order.
      backward: those of the backward pass.
      kv_outer_forward: the alternative to ``forward``; None for none.
      kv_outer_backward: the alternative to ``backward``; None for none.
      passes: for each pass of each head group, why the preferred engine does not compute it.
    """

    groups: tuple[HeadGroup, ...]
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
    kv_outer_forward: KvOuter | None
    kv_outer_backward: KvOuter | None
    passes: tuple[PassReasons, ...]


def route(implementation: str, call: Call, operands: Operands) -> Route:
    """Returns the route of a call on the local GPU.

    Args:
      implementation: "hopper" or "triton".
      call: the call, which the implementation supports.
      operands: its arrays, or their shapes.
    """
    arrays, structure = jax.tree.flatten(operands)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return _route(ENGINES[implementation], call, shapes, structure, hardware.local_gpu())


@bounded_cache()
def _route(
    engines: tuple[Engine, ...], call: Call, leaves: tuple[Any, ...], structure: Any, device: hardware.Device
) -> Route:
    shapes: Operands = jax.tree.unflatten(structure, leaves)
    groups = head_groups_of(call, shapes, merge=True)
    works = [[GroupPass(call, shapes, heads.first, heads.step, one) for one in heads.passes] for heads in groups]
    kv_outer = None, None
    if triton_kv_outer_unsupported(call, shapes) is None:
        by_hopper = "hopper" in engines and query_gather_unsupported(call, shapes) is None
        kv_outer = KvOuter("triton", False), KvOuter("hopper", True) if by_hopper else KvOuter("triton", False)
    reasons = tuple(
        PassReasons(
            work.orders,
            _pick_engine(engines, work, "forward")[1],
            None if kv_outer[1] is not None and kv_outer[1].always else _pick_engine(engines, work, "backward")[1],
        )
        for group_passes in works
        for work in group_passes
    )
    forward = [launch for group, passes in enumerate(works) for launch in _forward_launches(engines, passes, group)]
    return Route(groups, tuple(forward), _backward_launches(engines, works), *kv_outer, reasons)


def triton_kv_outer_unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why plain Triton's kernels that hold keys cannot compute the selections of a call, or None."""
    from ..triton_gpu import kv_outer

    return kv_outer.unsupported(call, operands)


def query_gather_unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why the Hopper kernel that gathers queries cannot compute the gradients of a call, or None."""
    from ..hopper_gpu import query_gather
    from .kv_outer import divisor

    reason = triton_kv_outer_unsupported(call, operands)
    if reason is not None:
        return reason
    assert operands.selection is not None
    return query_gather.unsupported(call, operands, operands.selection.block // divisor(call, operands))


def _pick_engine(engines: tuple[Engine, ...], work: GroupPass, direction: str) -> tuple[Engine, str | None]:
    """Returns the engine of a pass in a direction, and why it is not the preferred one; None if it is."""
    from ..triton_gpu import launch as triton

    if engines == ("triton",):
        return "triton", None
    from ..hopper_gpu import launch as hopper

    if direction == "backward" and triton.each_key_once(work):
        return "triton", "each key is in one list, and plain Triton's kernel then writes each gradient once"
    reason = hopper.unsupported(work, direction)
    return ("hopper" if reason is None else "triton"), reason


def _fuse_passes(
    engines: tuple[Engine, ...], works: Sequence[GroupPass], direction: str
) -> list[tuple[GroupPass, Engine]]:
    """Returns passes and their engines, those of some queries first; two are one where a kernel can compute both."""
    fused: list[tuple[GroupPass, Engine]] = []
    for work in sorted(works, key=lambda work: work.q_order.complete):
        engine, _ = _pick_engine(engines, work, direction)
        for i, (partner, partner_engine) in enumerate(fused):
            if partner.fused_with is None and partner_engine == engine and _can_fuse(engine, partner, work, direction):
                pair = partner.fuse(work)
                fused[i] = pair, _pick_engine(engines, pair, direction)[0]
                break
        else:
            fused.append((work, engine))
    return fused


def _can_fuse(engine: Engine, work: GroupPass, second: GroupPass, direction: str) -> bool:
    if engine == "triton":
        return work.same_rows(second)
    from ..hopper_gpu import launch as hopper

    return hopper.can_fuse(work, second, direction)


def _forward_launches(engines: tuple[Engine, ...], works: Sequence[GroupPass], group: int) -> list[Launch]:
    """Returns the forward launches of a head group."""
    fused = _fuse_passes(engines, works, "forward")
    rounded = _may_round([work for work, _ in fused if work.q_order.complete])
    launches = []
    for i, (work, engine) in enumerate(fused):
        starts_from_state = i == 0 or work.q_order.complete
        launches.append(Launch("forward", engine, work, group, starts_from_state, starts_from_state and rounded(work)))
    return launches


def _backward_launches(engines: tuple[Engine, ...], works: Sequence[Sequence[GroupPass]]) -> tuple[Launch, ...]:
    """Returns the backward launches of all head groups; dk and dv are sums over them."""
    dq_launches: list[Launch] = []
    by_keys: list[tuple[GroupPass, int]] = []  # passes whose dk and dv need a dkv kernel
    for group, group_passes in enumerate(works):
        launches = _dq_launches(engines, group_passes, group)
        by_keys += [(work, group) for x in launches if x.kernel == "dq" for work in x.work.unfused()]
        dq_launches += launches
    # Passes over some keys come before those that write dk and dv of all keys.
    some = [Launch("dkv", "triton", work, group, False, False) for work, group in by_keys if not work.kv_order.complete]
    every = [(work, group) for work, group in by_keys if work.kv_order.complete]
    rounded = _may_round([*(x.work for x in dq_launches if x.kernel == "dqkv"), *(work for work, _ in every)])
    return (
        *some,
        *(dataclasses.replace(launch, rounded_kv=rounded(launch.work)) for launch in dq_launches),
        *(Launch("dkv", "triton", work, group, True, rounded(work)) for work, group in every),
    )


def _dq_launches(engines: tuple[Engine, ...], works: Sequence[GroupPass], group: int) -> list[Launch]:
    """Returns the launches of a head group that compute dq; a Hopper kernel adds to it in float32."""
    from ..triton_gpu import launch as triton

    fused = _fuse_passes(engines, works, "backward")
    once = {work: triton.each_key_once(work) for work, _ in fused}
    kernels: dict[GroupPass, Kernel] = {x: "dqkv" if engine == "hopper" or once[x] else "dq" for x, engine in fused}
    # Of the passes over all queries, those that write dk and dv of some keys come before those that write all. Of the
    # latter, those with each key in one list come first: their kernel computes most, and need not read earlier results.
    fused.sort(
        key=lambda x: (
            x[0].q_order.complete,
            x[0].kv_order.complete or kernels[x[0]] == "dq",
            not once[x[0]],
        )
    )
    rounded = _may_round([work for work, _ in fused if work.q_order.complete])
    return [
        Launch(
            kernels[work],
            engine,
            work,
            group,
            starts_from_state=i == 0 or work.q_order.complete,
            rounded=rounded(work) and not any(later == "hopper" for _, later in fused[i + 1 :]),
        )
        for i, (work, engine) in enumerate(fused)
    ]


def _may_round(works: Sequence[GroupPass]) -> Any:
    """Returns a predicate of passes over all tokens: True if one may round its results, of more than two the last."""
    return lambda work: len(works) <= 2 or work is works[-1]
