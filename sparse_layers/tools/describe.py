"""Pictures and numbers: what a mask looks like, how dense it is, and what its plan computes."""

from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np

from ..masks.adapters import as_masks
from ..masks.algebra import EMPTY, FULL, Mask
from ..masks.options import Positive, checked
from ..masks.pictures import COLOURS
from ..masks.pictures import cell_size as _cell
from ..masks.pictures import cells as _cells
from ..masks.primitives import Causal, Full
from ..ops.attention import serving
from ..ops.planning.blocks import active_blocks
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import BLOCK, Plan, make_plan
from ..ops.planning.views import Reordered, RowOrder

_SIGNS = np.array(["·", "▪", "■"])  # by state: EMPTY, PARTIAL, FULL
_ELEMENTS = 1 << 22  # mask elements evaluated at a time
_EXACT = 16384  # longest sequence whose pairs are counted one by one
_SAMPLED_ROWS = 1024


def picture(mask: Any, q_len: int, kv_len: int | None = None, *, size: int = 48) -> str:
    """Draws a mask in characters: ■ allowed, · not allowed, ▪ partly allowed.

    Up to ``size`` tokens, a cell is one (query, key) pair. Beyond, a cell stands for a square of tokens, a power of
    two on a side, large enough for the picture to fit. A cell too large to be looked at pair by pair may show ▪ where
    ■ or · is right.

    Args:
      mask: whatever `as_masks` takes: a mask, a preset's name, a bool array, or a sequence of these that heads take in
        turn (head h takes entry h % len).
      q_len: number of queries, >= 1: the rows.
      kv_len: number of keys, >= 1: the columns; defaults to q_len.
      size: most cells on a side, >= 1.

    Returns:
      Lines of cells separated by one space, without a newline at the end. Several masks lie one under the other, each
      below a heading that names its heads.

    Raises:
      ValueError: a length or size is less than 1.
      TypeError: mask is no mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture((sl.Causal(), sl.Window(0)), 3))
      heads 0, 2, ...:
      ■ · ·
      ■ ■ ·
      ■ ■ ■
      heads 1, 3, ...:
      ■ · ·
      · ■ ·
      · · ■
      >>> print(sl.picture(sl.Causal(), 1000, size=4))
      ▪ · · ·
      ■ ▪ · ·
      ■ ■ ▪ ·
      ■ ■ ■ ▪
    """
    masks = as_masks(mask)
    drawn = ["\n".join(" ".join(row) for row in _SIGNS[_cells(m, q_len, kv_len, size)]) for m in masks]
    if len(masks) == 1:
        return drawn[0]
    return "\n".join(f"{_heads(h, len(masks))}:\n{text}" for h, text in enumerate(drawn))


def draw(mask: Any, q_len: int, path: str | PathLike[str], kv_len: int | None = None, *, size: int = 512) -> None:
    """Saves the picture of a mask as a PNG; a file of that name is replaced. Needs matplotlib.

    Args:
      mask: whatever `as_masks` takes; several masks are drawn side by side.
      q_len: number of queries, >= 1: the rows.
      path: the PNG to write.
      kv_len: number of keys, >= 1: the columns; defaults to q_len.
      size: most cells on a side, as in `picture`.

    Raises:
      ImportError: matplotlib is not installed.
      OSError: the file cannot be written.
      ValueError: a length or size is less than 1.
      TypeError: mask is no mask.

    Example:
      >>> import pathlib, tempfile, sparse_layers as sl
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     sl.draw(sl.Causal(), 64, pathlib.Path(folder, "causal.png"))
      ...     pathlib.Path(folder, "causal.png").read_bytes()[1:4]
      b'PNG'
    """
    try:
        # The object-oriented interface: pyplot would keep the figure and pick a window system for the whole process.
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw needs matplotlib: pip install 'sparse-layers[examples]'") from error
    masks = as_masks(mask)
    figure = Figure(figsize=(4.5 * len(masks), 4.8), dpi=160, layout="constrained")
    colours = ListedColormap(list(COLOURS.values()))
    for h, (axes, m) in enumerate(zip(figure.subplots(1, len(masks), squeeze=False)[0], masks, strict=True)):
        cells = _cells(m, q_len, kv_len, size)
        columns = q_len if kv_len is None else kv_len
        axes.imshow(cells, cmap=colours, vmin=EMPTY, vmax=FULL, interpolation="nearest", extent=(0, columns, q_len, 0))
        axes.set(xlabel="key", ylabel="query", title=_heads(h, len(masks)))
    figure.savefig(path, format="png")


def describe(
    mask: Any,
    seq_len: int,
    *,
    size: int = 48,
    block: int = BLOCK,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
) -> str:
    """Says in words what a mask costs: picture, density, blocks kept, the plan's passes and the expected saving.

    Args:
      mask: whatever `as_masks` takes: a mask, a preset's name, a bool array, or a sequence of these that heads take in
        turn (head h takes entry h % len).
      seq_len: number of queries and of keys, >= 1.
      size: most cells on a side of the picture.
      block: tokens on a side of the blocks that are counted.
      fwd_params: block sizes of the plan's forward pass, as in `make_plan`.
      bwd_params: block sizes of the plan's backward pass, as in `make_plan`.

    Returns:
      Several lines of text, without a newline at the end. Pairs are counted exactly up to 16384 tokens, and beyond that
      estimated from 1024 rows; the text says which. A plan's costs are in (query, key) pairs: what its blocks compute,
      plus what moving rows and walking block lists is worth. The saving is against the plan of full attention,
      or of causal attention if the mask is causal.

    Raises:
      ValueError: seq_len, size or block is less than 1.
      TypeError: mask is no mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.describe(sl.preset("strided"), 4096, size=4))  # doctest: +ELLIPSIS
      Causal() & Strided(stride=128)
      ▪ · · ·
      ▪ ▪ · ·
      ▪ ▪ ▪ ·
      ▪ ▪ ▪ ▪
      one cell = 1024 x 1024 tokens
      allowed pairs: 67584 of 16777216 (0.4028%), 0.8055% of the causal pairs
      blocks of 128 x 128 kept: 528 of 1024 (51.56%)
      plan: ...
    """
    checked("block", block, Positive)
    plan = make_plan(mask, seq_len, fwd_params=fwd_params, bwd_params=bwd_params)
    sections = ["\n".join(_described(plan, h, size, block)) for h in range(len(plan.masks))]
    return "\n\n".join(sections) + f"\nruns here, in bfloat16 with heads of 128: {serving(plan)!r}"


def _described(plan: Plan, h: int, size: int, block: int) -> Iterator[str]:
    """The lines about one mask of a plan."""
    mask, length = plan.masks[h], plan.q_len
    if len(plan.masks) > 1:
        yield f"{_heads(h, len(plan.masks))}:"
    yield repr(mask)
    yield picture(mask, length, size=size)
    cell = _cell(length, length, size)
    if cell > 1:
        yield f"one cell = {cell} x {cell} tokens"

    pairs, causal, exact = _count(mask, length)
    total, lower = length * length, length * (length + 1) // 2
    share = f", {pairs / lower:.4%} of the causal pairs" if causal else ""
    estimate = "" if exact else f" (estimated from {_SAMPLED_ROWS} rows)"
    yield f"allowed pairs: {pairs} of {total} ({pairs / total:.4%}){share}{estimate}"

    side = -(-length // block)
    inside = Reordered(mask, RowOrder(length), RowOrder(length))  # nothing beyond the last token
    kept = len(active_blocks(inside, side, side, block, block).rows)
    yield f"blocks of {block} x {block} kept: {kept} of {side * side} ({kept / (side * side):.2%})"

    chain, candidates = plan.chains[h], plan.candidates[h]
    yield f"plan: {len(chain)} pass{'' if len(chain) == 1 else 'es'}"
    for number, link in enumerate(chain, 1):
        orders = str(link.q_order) if str(link.q_order) == str(link.kv_order) else f"{link.q_order} / {link.kv_order}"
        grid = [rows // side for rows, side in zip(link.padded(link.fwd_shape), link.fwd_shape, strict=True)]
        shape = "{} x {}".format(*link.fwd_shape)
        yield f"  pass {number}: {orders}; {link.fwd_blocks} of {grid[0] * grid[1]} blocks of {shape}"
    for number, (name, cost) in enumerate(candidates):
        yield f"  {'chosen' if number == 0 else 'not taken'}: {name}, cost {cost:.3g} pairs"
    whole, kind = (Causal(), "causal") if causal else (Full(), "full")
    options = {"fwd_params": plan.fwd_params, "bwd_params": plan.bwd_params, "implementation": plan.implementation}
    dense = make_plan(whole, length, **options).candidates[0][0][1]
    cost = candidates[0][1]
    saving = f"{dense / cost:.1f} times less work than {kind} attention" if cost else "nothing to compute"
    yield f"expected saving: {saving} (cost {cost:.3g} against {dense:.3g} pairs)"


def _heads(h: int, period: int) -> str:
    return "all heads" if period == 1 else f"heads {h}, {h + period}, ..."


def _count(mask: Mask, length: int) -> tuple[int, bool, bool]:
    """Allowed pairs of a square, whether none lies in the future, and whether all rows were looked at."""
    exact = length <= _EXACT
    # Not evenly spaced: a step that shares a factor with the pattern's period would see one residue only.
    rows = np.arange(length)
    if not exact:
        edges = np.arange(_SAMPLED_ROWS + 1) * length // _SAMPLED_ROWS
        rows = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    k = np.arange(length)[None, :]
    pairs, future = 0, 0
    for chunk in np.array_split(rows, max(1, len(rows) * length // _ELEMENTS)):
        allowed = np.broadcast_to(mask(chunk[:, None], k), (chunk.size, length))
        pairs += int(np.count_nonzero(allowed))
        future += int(np.count_nonzero(allowed & (k > chunk[:, None])))
    return pairs if exact else round(pairs * length / len(rows)), not future, exact
