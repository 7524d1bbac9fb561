"""Numbers: how dense a mask is, what its plan computes, and what a layer or a model does."""

import math
from collections.abc import Iterator
from typing import Any, overload

import numpy as np

from ..masks.adapters import MaskLike
from ..masks.counting import count
from ..masks.options import Positive, checked, own_keywords
from ..masks.pictures import cell_size
from ..masks.presets import half_notes
from ..masks.primitives import Causal
from ..ops.attention import serving
from ..ops.planning.blocks import active_blocks
from ..ops.planning.communication import Part, Received, Token, bound, filled_up, parts_of, whole
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import BLOCK, Plan, make_plan
from ..ops.planning.report import heads, saving
from ..ops.planning.views import Reordered, RowOrder
from ..scorers import NSA, Scorer, scorer_of
from .pictures import check_size, picture
from .subjects import LONGEST, Planned, lengths_of, plans_of, refuse_given

_BLOCKS = 1 << 24  # most blocks of the grid in which kept ones are counted
_HEAD_SIZE = 128  # features of a head, where they are not known


@overload
def describe(
    subject: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    size: int = 48,
    block: int | None = None,
    devices: int = 1,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
) -> str: ...
@overload
def describe(subject: Any, *, size: int = 48, block: int | None = None, devices: int = 1) -> str: ...
@own_keywords
def describe(
    subject: Any,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    size: int = 48,
    block: int | None = None,
    devices: int = 1,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
) -> str:
    """Says in words what a mask, plan, layer or model costs: picture, density, blocks, passes and the expected saving.

    Args:
      subject: a mask with its lengths, or what knows these by itself. A mask is whatever `as_masks` takes; the others
        are a `Plan`, a layer or block of this package, what `make_attention_fn` returns, or a `SparseTransformer`,
        whose layers are told one by one, equal ones once. Where a scorer chooses blocks, it says how many pairs that
        leaves, and to how many more attention would take as much work as scores take: a score is one product, of the
        scorer's features, and a pair of attention two, of a head's. To find the highest ones is not in it. A scorer by
        itself is one among all keys of the past, with as many key heads as query heads, of 128 features; of `NSA`, that
        is the branch "selected", beside which the layer has two more.
      q_len: number of queries, 1 to 1048576, of a mask; None for the others.
      kv_len: number of keys, as q_len, to which it defaults.
      size: most cells on a side of the picture.
      block: tokens on a side of the blocks that are counted; None for 128, doubled until they are at most 2**24.
      devices: that share each sequence, as by ``query_sharding``. With several it also says by which routes keys come
        to their queries. Of each route, forward and backward, it says what the device receives that receives most, and
        how far the pairs that the busiest device computes exceed the mean. The bound is the least that must be
        received: the keys that a device's queries see elsewhere, and by residues all that changes places. These are
        bytes of a batch entry where heads and their size are known, as those of most layers are, and rows of all heads
        elsewhere. Grouped heads of a layer are reckoned with: keys that fewer heads have are cheaper to send.
      fwd_params: block sizes of a mask's plan in the forward pass, as in `make_plan`.
      bwd_params: block sizes of a mask's plan in the backward pass, as in `make_plan`.

    Returns:
      Several lines of text, without a newline at the end. Pairs are counted exactly up to 16384 tokens, and beyond that
      where most is clear by closed form, else estimated from 2**24 pairs; the text says which. A plan's costs are in
      (query, key) pairs: what its blocks compute, plus what moving rows and walking block lists is worth. The saving is
      against the plan of full attention, or of causal attention if the mask is causal.

    Raises:
      ValueError: a length is missing or out of range, or given with what has lengths of its own, as are block sizes;
        size, block or devices is less than 1, or block so small that there were more than 2**24 of them; more devices
        than tokens.
      TypeError: subject is none of the above.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.describe("sparse_transformer_strided", 4096, size=4))  # doctest: +ELLIPSIS
      Causal() & (Window(left=128, right=0) | Strided(stride=128))
      ▪ · · ·
      ▪ ▪ · ·
      ▪ ▪ ▪ ·
      ▪ ▪ ▪ ▪
      one cell = 1024 x 1024 tokens
      allowed pairs: 579648 of 16777216 (3.4550%), 6.9083% of the causal pairs
      blocks of 128 x 128 kept: 528 of 1024 (51.56%)
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
    plans = plans_of(subject)
    if plans is None:
        scorer = scorer_of(subject)
        mask = subject if scorer is None else Causal()
        lengths = lengths_of(mask, q_len, kv_len, LONGEST)
        _block(max(lengths), block)
        plan = make_plan(mask, *lengths, fwd_params=fwd_params, bwd_params=bwd_params)
        plans = {"selected" if isinstance(scorer, NSA) else "": Planned(plan, scorer)}
    else:
        refuse_given(subject, dict(q_len=q_len, kv_len=kv_len, fwd_params=fwd_params, bwd_params=bwd_params))
        for plan, *_ in plans.values():
            _block(max(lengths_of(subject, plan.q_len, plan.kv_len, LONGEST)), block)
    texts = {which: _text(found, size, block, devices) for which, found in plans.items()}
    notes = half_notes(subject, *(mask for planned in plans.values() for mask in planned.plan.masks))
    return "\n\n".join([*(f"{which}:\n" * bool(which) + text for which, text in texts.items()), *notes])


def _block(length: int, block: int | None) -> int:
    """The side of the blocks that are counted in a sequence of some length."""
    least = -(-length // math.isqrt(_BLOCKS))
    if block is None:
        return max(BLOCK, 1 << (least - 1).bit_length())
    if checked("block", block, Positive) < least:
        raise ValueError(
            f"block must be at least {least} for {length} tokens, where there would be too many, got {block}"
        )
    return block


def _text(planned: Planned, size: int, block: int | None, devices: int) -> str:
    plan = planned.plan
    side = _block(max(plan.q_len, plan.kv_len), block)
    alone = "" if planned.scorer is None else ", if nothing is chosen"
    sections = ["\n".join(_described(plan, h, size, side, alone)) for h in range(len(plan.masks))]
    name, notes = serving(plan)
    sections[-1] += f"\nruns here, in bfloat16 with heads of 128: {name!r}"
    text = "\n\n".join(sections) + "".join(f"\n  {note}" for note in notes)
    if planned.scorer is not None:
        text += f"\n\n{_chosen(planned.scorer, planned)}"
    return text if devices == 1 else text + "\n\n" + "\n".join(_spread(planned, devices))


def _spread(planned: Planned, devices: int) -> Iterator[str]:
    """The lines about a sequence that several devices share."""
    plan, scorer, groups, token, _ = planned
    length, params = plan.q_len, (plan.fwd_params, plan.bwd_params)
    if devices > length:
        raise ValueError(f"devices must be at most {length}, the tokens that they share, got {devices}")
    if length != plan.kv_len:
        yield f"queries over {devices} devices, {-(-length // devices)} each; each device has all {plan.kv_len} keys"
        return
    if scorer is None:
        length = filled_up(plan.masks, length, devices, plan.implementation, groups)
        parts = parts_of(plan.masks, length, devices, plan.implementation, groups)
    else:  # any block may be chosen
        parts = (whole(plan.masks, length, devices),)
    own = -(-length // devices)
    idle = devices - -(-length // own)
    more = f", filled up to {length}" if length > plan.q_len else ""
    yield f"a sequence over {devices} devices, {own} tokens each{f', none on the last {idle}' * bool(idle)}{more}:"
    total, work = [Received(0)] * devices, np.zeros((2, devices))
    if not parts:
        yield "  nothing moves: no query sees a key"
    for route, masks in parts:
        received, pairs = [route.received(place) for place in range(devices)], np.zeros((2, devices), int)
        for piece in route.pieces:
            plans = [piece.plan(masks, place, params, implementation=plan.implementation) for place in range(devices)]
            pairs += np.transpose([*map(_pairs, plans)])
        total = [Received(*map(sum, zip(*each, strict=True))) for each in zip(total, received, strict=True)]
        work += pairs
        yield f"  {route}"
        yield from _exchanged(received, pairs, token, bound(Part(route, masks)))
    if len(parts) > 1:
        yield "  together"
        yield from _exchanged(total, work, token)


def _pairs(plan: Plan) -> tuple[int, int]:
    """The pairs in the blocks that a plan computes, forward and backward."""
    links = [link for chain in plan.chains for link in chain]
    forward = sum(link.fwd_blocks * math.prod(link.fwd_shape) for link in links)
    return forward, sum(link.bwd_blocks * math.prod(link.bwd_shape) for link in links)


def _exchanged(
    received: list[Received], work: np.ndarray, token: Token | None, least: Received | None = None
) -> Iterator[str]:
    """The lines about what each device receives, and the pairs [2, devices] that it computes, forward and backward."""
    for backward, way in enumerate(("forward", "backward")):
        volume, most = max(_volume(x, token, backward) for x in received)
        limit = ""
        if least is not None and volume:
            lowest, words = _volume(least, token, backward)
            limit = ", the bound" if lowest == volume else f" (bound: {words})"
        busiest = work[backward].max() * work.shape[1] / max(1, work[backward].sum())
        yield f"    {way}: receives {most}{limit}; the busiest device computes {busiest:.2f} times the mean"


def _volume(received: Received, token: Token | None, backward: int) -> tuple[int, str]:
    """How much is received forward or backward, in rows or, if it is known what one takes, in bytes; and in words."""
    if token is not None:
        volume = received.volume(token)[backward]
        in_units = f"{volume / 2**20:.1f} MiB" if volume >= 2**20 else f"{volume / 2**10:.1f} KiB"
        return volume, in_units if volume else "nothing"
    keys, queries, results, gradients = received
    rows = {"dk and dv": gradients, "dout": queries, "dq": results}
    if not backward:
        rows = {"k and v": keys, "q": queries, "out": results}
    words = ", ".join(f"{n} of {what}" for what, n in rows.items() if n)
    return sum(rows.values()), words.replace(" of", " rows of", 1) or "nothing"


def _chosen(scorer: Scorer, planned: Planned) -> str:
    """The lines about what is chosen within the pattern, and how much work that is in pairs of attention."""
    plan, groups, size = planned.plan, planned.groups, planned.head_size or _HEAD_SIZE
    length = plan.q_len
    lines = [f"of that, blocks are chosen at run time: {scorer!r}"]
    if not scorer.chooses(length):
        return "\n".join([*lines, f"{length} tokens: every query looks at all blocks, and nothing is chosen"])
    whole, chosen, scored = length * (length + 1) // 2, scorer.pairs(length), round(scorer.work(length, groups, size))
    lines.append(f"each query looks at {scorer.count} of up to {-(-length // scorer.block)} blocks of {scorer.block}")
    hidden = "" if set(plan.masks) == {Causal()} else ", before the pattern hides some"
    lines.append(f"chosen pairs: {chosen} of {whole} causal ones ({chosen / whole:.2%}){hidden}")
    features, heads = "", "query head"
    if scorer.indexed:
        features = f" of {scorer.index_features(size)} features"
        heads = f"{groups} query heads of {size}" if groups > 1 else f"query head of {size}"
    keys = "key" if scorer.window[0] == 1 else f"window of {scorer.window[0]} keys"
    lines.append(f"scores: the work of {scored} pairs (a product{features} with each {keys} for each {heads})")
    total = chosen + scored
    lines.append(f"together: the work of {total} pairs, {total / whole:.2%} of all causal ones{hidden}")
    return "\n".join(lines)


def _described(plan: Plan, h: int, size: int, block: int, alone: str) -> Iterator[str]:
    """The lines about one mask of a plan; ``alone`` comes behind the saving."""
    mask, q_len, kv_len = plan.masks[h], plan.q_len, plan.kv_len
    if len(plan.masks) > 1:
        yield f"{heads(h, len(plan.masks))}:"
    yield repr(mask)
    yield picture(mask, q_len, kv_len, size=size)
    cell = cell_size(q_len, kv_len, size)
    if cell > 1:
        yield f"one cell = {cell} x {cell} tokens"

    found = count(mask, q_len, kv_len)
    square = min(q_len, kv_len)
    total, lower = q_len * kv_len, square * (square + 1) // 2 + (q_len - square) * kv_len
    share = f", {found.pairs / lower:.4%} of the causal pairs" if found.causal else ""
    estimate = "" if found.looked_at is None else f" (estimated from {found.looked_at} pairs)"
    yield f"allowed pairs: {found.pairs} of {total} ({found.pairs / total:.4%}){share}{estimate}"

    rows, columns = -(-q_len // block), -(-kv_len // block)
    inside = Reordered(mask, RowOrder(q_len), RowOrder(kv_len))  # nothing beyond the last token
    kept = len(active_blocks(inside, rows, columns, block, block).rows)
    yield f"blocks of {block} x {block} kept: {kept} of {rows * columns} ({kept / (rows * columns):.2%})"

    chain, candidates = plan.chains[h], plan.candidates[h]
    yield f"plan: {len(chain)} pass{'' if len(chain) == 1 else 'es'}"
    for number, link in enumerate(chain, 1):
        yield f"  pass {number}: {link.orders}; {link.blocks}"
    for number, (name, cost) in enumerate(candidates):
        yield f"  {'chosen' if number == 0 else 'not taken'}: {name}, cost {cost:.3g} pairs"
    yield f"expected saving{alone}: {saving(plan, h, found.causal)}"
