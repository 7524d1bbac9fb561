"""`describe`: density, computed blocks and kernels of a mask, plan, layer or model, as text."""

import math
import re
from collections.abc import Iterator
from typing import Any, overload

import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Positive, checked, strict_kwargs
from ..masks.adapters import MaskLike, by_entry
from ..masks.counting import count
from ..masks.pictures import FORMULA, cell_size, shortened
from ..masks.presets import half_pattern_notes
from ..masks.primitives import Causal
from ..ops import traced_call
from ..ops.kernels.gpu.bridge import check_triton
from ..ops.kernels.gpu.hardware import Device, device_named
from ..ops.planning.context_parallel import MaskPart, gather_all_keys, min_received, padded_length, plan_exchanges
from ..ops.planning.exchanges import Received, TokenBytes
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.planner import make_plan
from ..ops.planning.platforms import assume_gpu, default_implementation
from ..ops.planning.report import head_names
from ..scorers import NSA, Scorer, scorer_of
from .advice import advice
from .pictures import check_size, picture
from .subjects import LONGEST, Planned, check_is_none, lengths_of, plans_of

# What is assumed of a call. Nothing knows its batch; the dtype and head size are those of calls of which no layer says.
_DTYPE, _HEAD_SIZE, _BATCH = "bfloat16", 128, "1 batch entry"
# Fields of `Planned` that are arguments of `trace_call`.
_OPTIONS = "scorer", "heads", "sinks", "logits_soft_cap", "scale", "implementation", "recompute"


@overload
def describe(
    subject: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    size: int = 48,
    devices: int = 1,
    device: str | tuple[int, int] | None = None,
    segment_ids: bool = False,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
) -> str: ...
@overload
def describe(
    subject: Any,
    *,
    size: int = 48,
    devices: int = 1,
    device: str | tuple[int, int] | None = None,
    segment_ids: bool = False,
) -> str: ...
@strict_kwargs
def describe(
    subject: Any,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    size: int = 48,
    devices: int = 1,
    device: str | tuple[int, int] | None = None,
    segment_ids: bool = False,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
) -> str:
    """Says in words what a mask, plan, layer or model costs: picture, density, blocks, passes and the expected saving.

    Args:
      subject: a mask, as `as_masks` takes it, with its lengths; or, without lengths, a `Plan`, a layer or block of this
        package, the result of `make_attention_fn`, or a `SparseTransformer`, whose equal layers are described once. In
        any other model, these are looked for in fields, lists and dicts, and in what ``setup`` of a Linen module makes;
        the text names their paths. A scorer by itself selects among all keys of the past, with as many key heads as
        query heads, of 128 features; of `NSA`, this is the branch "selected", one of the layer's three. The text then
        counts the selected pairs, and the work of the scores in pairs of attention. Sorting scores is not counted.
      q_len: number of queries, 1 to 1048576, of a mask; None for the others.
      kv_len: number of keys, as q_len, to which it defaults.
      size: most cells on a side of the picture.
      devices: number of devices that share each sequence, as by ``query_sharding``. With several, the text also lists
        the exchanges of keys. For each, forward and backward, it has what the device receives that receives most, and
        how far the pairs of the busiest device exceed the mean. The bound is the least that must be received: keys of
        other devices that a device's queries see, and all rows that move to the device of their residue. Numbers are
        bytes of one batch entry if heads and their size are known, as for most layers, else rows of all heads.
      device: a GPU, which need not be there: a name such as "h100"; JAX's ``device_kind``, "NVIDIA H100 80GB HBM3"; or
        a compute capability, "9.0" or (9, 0), for the first GPU of the list that has it. An unknown name ends in an
        error with this list. The plan and the kernels are then those of this GPU, but a `Plan` stays as it is. Triton
        must be installed. None for the device at hand.
      segment_ids: True if calls have segment ids or order ids, which change kernels. The kernels are those of one batch
        entry on one device, with the heads, head size, dtype and options of a layer; the text says what is assumed.
      fwd_params: block sizes of a mask's plan in the forward pass, as in `make_plan`.
      bwd_params: block sizes of a mask's plan in the backward pass, as in `make_plan`.

    Returns:
      Several lines of text, without a newline at the end. Pairs are counted exactly up to 16384 tokens, and beyond that
      where most is clear by closed form, else estimated from 2**24 pairs; the text says which. A plan's costs are in
      (query, key) pairs: what its blocks compute, plus what moving rows and walking block lists is worth. The saving is
      against the plan of full attention, or of causal attention if the mask is causal. Where nothing is saved, it says
      why, and changes that save by plans of their own. A function or array whose pairs an expression of masks allows,
      too, is compared with the plan of that.

    Raises:
      ValueError: a length is missing or out of range, or given with what has lengths of its own, as are block sizes;
        size or devices is less than 1; more devices than tokens; device is not known.
      TypeError: subject is none of the above and holds none; says where it looked.
      ModuleNotFoundError: device is given, and Triton is not installed; says what to install.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.describe("sparse_transformer_strided", 4096, size=4))  # doctest: +ELLIPSIS
      Causal() & (Window(left=128, right=0) | Strided(stride=128))
      ▪ · · ·
      ▪ ▪ · ·
      ▪ ▪ ▪ ·
      ▪ ▪ ▪ ▪
      rows are queries, columns keys; a cell of 1024 x 1024 tokens: ■ all pairs allowed, ▪ some, · none
      allowed pairs: 579648 of 16777216 (3.4550%), 6.9083% of the causal pairs
      plan: ...
      >>> fn = sl.make_attention_fn("streaming", 4096)
      >>> sl.describe(fn) == sl.describe(fn.plan(4096)) == sl.describe("streaming", 4096)
      True
      >>> text = sl.describe("sliding_window", 65536, devices=8, size=4)
      >>> print(text.rpartition(2 * chr(10))[2])  # doctest: +ELLIPSIS
      a sequence over 8 devices, 8192 tokens each:
        keys of neighbors, 1023 before
          forward: receives 1023 rows of k and v, the bound; the busiest device computes 1.0... times the mean
          backward: receives 1023 rows of dk and dv, the bound; the busiest device computes 1.0... times the mean
    """
    check_size(size)
    checked("devices", devices, Positive)
    checked("segment_ids", segment_ids, bool)
    gpu = None if device is None else device_named(device)
    if gpu is not None:
        check_triton()
    plans = plans_of(subject)
    if plans is None:
        scorer = scorer_of(subject)
        mask = subject if scorer is None else Causal()
        lengths = lengths_of(mask, q_len, kv_len, LONGEST)
        plan = make_plan(mask, *lengths, fwd_params=fwd_params, bwd_params=bwd_params)
        plans = {"selected" if isinstance(scorer, NSA) else "": Planned(plan, scorer)}
    else:
        check_is_none(subject, dict(q_len=q_len, kv_len=kv_len, fwd_params=fwd_params, bwd_params=bwd_params))
        for plan, *_ in plans.values():
            lengths_of(subject, plan.q_len, plan.kv_len, LONGEST)
    texts = {}
    for heading, planned in plans.items():
        _check_heads(planned)
        planned = planned._replace(plan=_plan_for(gpu, planned))
        traced = _traced(planned, gpu, segment_ids)
        kernels_text = f"runs {_device_text(device, devices)}, {_call_text(planned)}: {traced}"
        planned = planned._replace(plan=traced.plan or planned.plan)
        texts[heading] = _plan_text(planned, size, devices, kernels_text)
    notes = half_pattern_notes(subject, *(planned.plan.masks for planned in plans.values()))
    by_head = [planned.plan.masks for planned in plans.values() if by_entry(planned.plan.masks)]
    notes += dict.fromkeys(f"note: head h takes entry h % {len(masks)}{by_entry(masks)}" for masks in by_head)
    return "\n\n".join([*(f"{heading}:\n" * bool(heading) + text for heading, text in texts.items()), *notes])


def _check_heads(planned: Planned) -> None:
    """Refuses a layer of Linen whose calls will be refused; other layers are checked when they are made."""
    if planned.heads is None:
        return
    (num_heads, kv_heads), entries = planned.heads, len(planned.plan.masks)
    if num_heads % entries:
        raise ValueError(
            f"num_heads={num_heads}: the pattern has {entries} entries, which the heads take in turn, so {entries} "
            "must divide it"
        )
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} must divide num_heads={num_heads}")


def _plan_for(gpu: Device | None, planned: Planned) -> Plan:
    """Returns the plan of the same masks and settings for a GPU, or for a layer's calls here, whose dtype is known."""
    plan = planned.plan
    if planned.fixed or (gpu is None and planned.heads is None):
        return plan
    with assume_gpu(gpu):
        name = planned.implementation or default_implementation(
            planned.dtype or _DTYPE, planned.head_size or _HEAD_SIZE
        )
        params = {"fwd_params": plan.fwd_params, "bwd_params": plan.bwd_params}
        return make_plan(plan.masks, plan.q_len, plan.kv_len, implementation=name, **params)


def _traced(planned: Planned, gpu: Device | None, segment_ids: bool) -> traced_call.TracedCall:
    """Returns the trace of the op's call that a layer makes, or of one that is assumed for a mask."""
    dtype, head_size = jnp.dtype(planned.dtype or _DTYPE), planned.head_size or _HEAD_SIZE
    options: dict[str, Any] = {name: getattr(planned, name) for name in _OPTIONS}
    if planned.relative_bias is not None and planned.heads is not None:
        options["bias"] = planned.relative_bias.abstract_bias(planned.heads[0])
    segment_ids = segment_ids or planned.segment_ids
    return traced_call.trace_call(planned.plan, dtype, head_size, segment_ids=segment_ids, device=gpu, **options)


def _device_text(device: Any, devices: int) -> str:
    """Names the device of the call. It has the whole sequence: devices that share one may run other kernels."""
    if device is None:
        text = "here"
    elif isinstance(device, str) and not re.fullmatch(r"\d+\.\d", device):
        text = f"on {device}"
    else:
        capability = device if isinstance(device, str) else "{}.{}".format(*device)
        text = f"on compute capability {capability}"
    return text if devices == 1 else f"{text} if one device has the whole sequence"


def _plan_text(planned: Planned, size: int, devices: int, routed: str) -> str:
    plan = planned.plan
    sections = ["\n".join(_mask_lines(planned, h, size)) for h in range(len(plan.masks))]
    text = "\n\n".join(sections) + f"\n{routed}"
    if planned.scorer is not None:
        text += f"\n\n{_selection_lines(planned.scorer, planned)}"
    return text if devices == 1 else text + "\n\n" + "\n".join(_device_lines(planned, devices))


def _call_text(planned: Planned) -> str:
    """Says the dtype, heads, head size and bias of a layer, and what is assumed besides."""
    known, assumed_gpu = [], []
    (known if planned.dtype else assumed_gpu).append(planned.dtype or _DTYPE)
    size = planned.head_size or _HEAD_SIZE
    if planned.heads is None:
        heads = f"{traced_call.assumed_heads(planned.plan)} heads"
    else:
        num_heads, kv_heads = planned.heads
        heads = f"{num_heads} head{'s' * (num_heads > 1)}"
        if num_heads != kv_heads:
            heads = f"{num_heads} query heads and {kv_heads} key head{'s' * (kv_heads > 1)}"
    if (planned.heads is None) == (planned.head_size is None):
        (assumed_gpu if planned.heads is None else known).append(f"{heads} of {size}")
    else:
        (assumed_gpu if planned.heads is None else known).append(heads)
        (assumed_gpu if planned.head_size is None else known).append(f"head size {size}")
    known += [] if planned.relative_bias is None else [repr(planned.relative_bias)]
    return ", ".join([f"in {', '.join(known)}"] * bool(known) + [f"assuming {', '.join([*assumed_gpu, _BATCH])}"])


def _device_lines(planned: Planned, devices: int) -> Iterator[str]:
    """Yields the lines about a sequence that several devices share."""
    plan, scorer, groups, token = planned.plan, planned.scorer, planned.groups, planned.token
    length, params = plan.q_len, (plan.fwd_params, plan.bwd_params)
    if devices > length:
        raise ValueError(f"devices must be at most {length}, the tokens that they share, got {devices}")
    if length != plan.kv_len:
        yield f"queries over {devices} devices, {-(-length // devices)} each; each device has all {plan.kv_len} keys"
        return
    if scorer is None:
        length = padded_length(plan.masks, length, devices, plan.implementation, groups)
        exchanges = plan_exchanges(plan.masks, length, devices, plan.implementation, groups)
    else:  # any block may be chosen
        exchanges = (gather_all_keys(plan.masks, length, devices),)
    tokens_each = -(-length // devices)
    idle = devices - -(-length // tokens_each)
    notes = f", none on the last {idle}" * bool(idle) + f", filled up to {length}" * (length > plan.q_len)
    yield f"a sequence over {devices} devices, {tokens_each} tokens each{notes}:"
    total, work = [Received(0)] * devices, np.zeros((2, devices))
    if not exchanges:
        yield "  nothing moves: no query sees a key"
    for exchange, masks in exchanges:
        received, pairs = [exchange.received(rank) for rank in range(devices)], np.zeros((2, devices), int)
        for chunk in exchange.chunks:
            options = {"params": params, "implementation": plan.implementation}
            plans = [chunk.local_plan(masks, rank, **options) for rank in range(devices)]
            pairs += np.transpose([*map(_pairs, plans)])
        total = [Received(*map(sum, zip(*pair, strict=True))) for pair in zip(total, received, strict=True)]
        work += pairs
        yield f"  {exchange}"
        yield from _exchange_lines(received, pairs, token, min_received(MaskPart(exchange, masks)))
    if len(exchanges) > 1:
        yield "  together"
        yield from _exchange_lines(total, work, token)


def _pairs(plan: Plan) -> tuple[int, int]:
    """Returns the (query, key) pairs in the blocks that a plan computes, forward and backward."""
    passes = [block_pass for chain in plan.chains for block_pass in chain]
    forward = sum(block_pass.fwd_blocks * math.prod(block_pass.fwd_shape) for block_pass in passes)
    return forward, sum(block_pass.bwd_blocks * math.prod(block_pass.bwd_shape) for block_pass in passes)


def _exchange_lines(
    received: list[Received], work: np.ndarray, token: TokenBytes | None, least: Received | None = None
) -> Iterator[str]:
    """Yields the lines about what each device receives, and the pairs [2, devices] that it computes."""
    for backward, way in enumerate(("forward", "backward")):
        volume, most = max(_volume(x, token, backward) for x in received)
        limit = ""
        if least is not None and volume:
            lowest, words = _volume(least, token, backward)
            limit = ", the bound" if lowest == volume else f" (bound: {words})"
        busiest = work[backward].max() * work.shape[1] / max(1, work[backward].sum())
        yield f"    {way}: receives {most}{limit}; the busiest device computes {busiest:.2f} times the mean"


def _volume(received: Received, token: TokenBytes | None, backward: int) -> tuple[int, str]:
    """Returns what is received in a direction: in bytes if those of a token are known, else in rows; and in words."""
    if token is not None:
        volume = received.nbytes(token)[backward]
        in_units = f"{volume / 2**20:.1f} MiB" if volume >= 2**20 else f"{volume / 2**10:.1f} KiB"
        return volume, in_units if volume else "nothing"
    keys, queries, results, gradients = received
    rows = {"dk and dv": gradients, "dout": queries, "dq": results}
    if not backward:
        rows = {"k and v": keys, "q": queries, "out": results}
    words = ", ".join(f"{n} of {what}" for what, n in rows.items() if n)
    return sum(rows.values()), words.replace(" of", " rows of", 1) or "nothing"


def _selection_lines(scorer: Scorer, planned: Planned) -> str:
    """Returns the lines about the blocks that a scorer selects, and their work in pairs of attention."""
    plan, groups, size = planned.plan, planned.groups, planned.head_size or _HEAD_SIZE
    length = plan.q_len
    lines = [f"of that, blocks are chosen at run time: {scorer!r}"]
    if not scorer.selects(length):
        return "\n".join([*lines, f"{length} tokens: every query looks at all blocks, and nothing is chosen"])
    causal_pairs, selected_pairs = length * (length + 1) // 2, scorer.pairs(length)
    scored = round(scorer.work(length, groups, size))
    lines.append(f"each query looks at {scorer.count} of up to {-(-length // scorer.block)} blocks of {scorer.block}")
    hidden = "" if set(plan.masks) == {Causal()} else ", before the pattern hides some"
    share = f"{selected_pairs / causal_pairs:.2%}"
    lines.append(f"chosen pairs: {selected_pairs} of {causal_pairs} causal ones ({share}){hidden}")
    features, heads = "", "query head"
    if scorer.indexed:
        features = f" of {scorer.index_features(size)} features"
        heads = f"{groups} query heads of {size}" if groups > 1 else f"query head of {size}"
    keys = "key" if scorer.window[0] == 1 else f"window of {scorer.window[0]} keys"
    lines.append(f"scores: the work of {scored} pairs (a product{features} with each {keys} for each {heads})")
    total = selected_pairs + scored
    lines.append(f"together: the work of {total} pairs, {total / causal_pairs:.2%} of all causal ones{hidden}")
    return "\n".join(lines)


def _mask_lines(planned: Planned, h: int, size: int) -> Iterator[str]:
    """Yields the lines about one mask of a plan."""
    plan = planned.plan
    mask, q_len, kv_len = plan.masks[h], plan.q_len, plan.kv_len
    if len(plan.masks) > 1:
        yield f"{head_names(h, len(plan.masks))}:"
    yield shortened(repr(mask), FORMULA)
    yield picture(mask, q_len, kv_len, size=size)
    cell = cell_size(q_len, kv_len, size)
    signs = f"a cell of {cell} x {cell} tokens: ■ all pairs allowed, ▪ some, · none" if cell > 1 else "■ allowed, · not"
    yield f"rows are queries, columns keys; {signs}"

    counted = count(mask, q_len, kv_len)
    pairs, total = counted.pairs, q_len * kv_len
    share = f", {pairs / plan.dense_pairs(True):.4%} of the causal pairs" if counted.causal else ""
    estimate = "" if counted.looked_at is None else f" (estimated from {counted.looked_at} pairs)"
    yield f"allowed pairs: {pairs} of {total} ({pairs / total:.4%}){share}{estimate}"

    chain, candidates = plan.chains[h], plan.candidates[h]
    blocks = sum(block_pass.fwd_blocks for block_pass in chain)
    sizes = f"{len(chain)} pass{'' if len(chain) == 1 else 'es'}, {blocks} block{'' if blocks == 1 else 's'}"
    yield f"plan: {sizes}, {plan.density(h):.2%} of full attention's"
    for number, block_pass in enumerate(chain, 1):
        yield f"  pass {number}: {block_pass.order_text}; {block_pass.block_text}"
    for number, (name, cost) in enumerate(candidates):
        yield f"  {'chosen' if number == 0 else 'not taken'}: {name}, cost {cost:.3g} pairs"
    alone = "" if planned.scorer is None else ", if nothing is chosen"
    yield f"expected saving{alone}: {plan.saving(h, counted.causal)}"
    is_cheapest = candidates[0].cost == min(x.cost for x in candidates)  # else advice would count on other passes
    if planned.scorer is None and is_cheapest:
        yield from (f"  {line}" for line in advice(plan, h, counted))
