"""Pictures of masks, in characters and by matplotlib, and of the blocks that a plan keeps of them."""

import math
import os
import pathlib
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments.checks import Natural, Positive, Shape, checked, checked_by_axis, strict_kwargs
from ..masks.adapters import MaskLike, as_masks
from ..masks.algebra import Mask
from ..masks.counting import count
from ..masks.lengths import grid_starts
from ..masks.pictures import COLOURS, FORMULA, cells, shortened
from ..masks.states import EMPTY, FULL
from ..ops.planning.binding import masks_for_lengths
from ..ops.planning.plan import Pass, Plan
from ..ops.planning.planner import make_plan
from ..ops.planning.report import head_names
from .files import check_writable, checked_path
from .subjects import LONGEST, check_is_none, lengths_of, plans_of

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIGNS = np.array(["·", "▪", "■"])  # by state: EMPTY, PARTIAL, FULL
_LINE = 56  # most characters of a formula in a line of a title
# Most cells on a side, pictures side by side, and blocks outlined in one.
_SIZE, _PANELS, _OUTLINES = 2048, 16, 1 << 14
_TOKENS = 1 << 16  # most tokens of a grid in characters


@strict_kwargs
def picture(mask: MaskLike, q_len: int, kv_len: int | None = None, *, size: int = 48) -> str:
    """Draws a mask in characters: ■ allowed, · not allowed, ▪ partly allowed.

    Up to ``size`` tokens, a cell is one (query, key) pair. Beyond, a cell is a square of pairs whose side is the
    smallest power of two that fits the picture. A cell too large to be looked at pair by pair may show ▪ where ■ or ·
    is right.

    Args:
      mask: a mask, a preset's name, a bool array, or a sequence of these: head h takes entry h % len.
      q_len: number of queries, >= 1: the rows.
      kv_len: number of keys, >= 1: the columns; defaults to q_len.
      size: most cells on a side, 1 to 2048.

    Returns:
      Lines of cells separated by one space, without a newline at the end. Several masks lie one under the other, each
      below a heading that names its heads.

    Raises:
      ValueError: a length or size is out of its range.
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
    q_len, kv_len = lengths_of(mask, q_len, kv_len)
    check_size(size)
    masks = masks_for_lengths(mask, q_len, kv_len)
    return _under_headings(["\n".join(" ".join(row) for row in _SIGNS[cells(m, q_len, kv_len, size)]) for m in masks])


def _under_headings(drawn: list[str]) -> str:
    """Joins the pictures of several masks, each under the name of its heads; a single one stays as it is."""
    if len(drawn) == 1:
        return drawn[0]
    return "\n".join(f"{head_names(h, len(drawn))}:\n{text}" for h, text in enumerate(drawn))


@strict_kwargs
def grid_picture(mask: MaskLike, shape: Sequence[int], query: Sequence[int], *, offset: int | None = None) -> str:
    """Draws the keys that one query sees on the grid: ■ seen, · not seen.

    The query itself is ● if it sees itself, ○ if not.

    Args:
      mask: as in `picture`.
      shape: lengths of the grid's axes, row-major, at most 65536 tokens. The last axis runs along a line, the one
        before it over lines. Axes before these two, such as the frames of a video, stand side by side.
      query: the query's coordinates, one for each axis.
      offset: position of the grid's first token. None takes that of the grids in the mask, or 0.

    Returns:
      Lines of tokens separated by one space, and by three between frames, without a newline at the end. Several masks
      lie one under the other, each below a heading that names its heads.

    Raises:
      ValueError: a number is out of its range, shape holds too many tokens, query is not on the grid, or offset is
        not that of the grids in the mask.
      TypeError: mask is no mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.grid_picture(sl.Causal() & sl.Window(5), (3, 4), query=(1, 2)))
      · ■ ■ ■
      ■ ■ ● ·
      · · · ·
      >>> print(sl.grid_picture(sl.Causal() & sl.Window(5), (2, 2, 3), query=(1, 0, 1)))
      · · ■   ■ ● ·
      ■ ■ ■   · · ·
      >>> near = sl.Grid((3, 4), sl.Window(1, 1), offset=1) | sl.Global(1)  # behind a class token
      >>> print(sl.grid_picture(near, (3, 4), query=(1, 2)))
      · ■ ■ ■
      · ■ ● ■
      · ■ ■ ■
    """
    shape, query = checked_by_axis("shape", shape, Shape), checked_by_axis("query", query, tuple[Natural, ...])
    offset = _grid_offset(as_masks(mask), offset)
    size = math.prod(shape)
    if not shape or size > _TOKENS:
        raise ValueError(f"shape must be lengths of axes, of {_TOKENS} tokens at most, got {shape}")
    if len(query) != len(shape) or any(x >= n for x, n in zip(query, shape, strict=True)):
        raise ValueError(f"query must have one coordinate for each axis of shape={shape}, less than it, got {query}")
    masks = masks_for_lengths(mask, offset + size, offset + size)
    query_token = int(np.ravel_multi_index(query, shape))
    drawn = []
    for head_mask in masks:
        seen = np.broadcast_to(head_mask(np.array([offset + query_token]), offset + np.arange(size)), (size,))
        signs = _SIGNS[seen * FULL]
        signs[query_token] = "●" if seen[query_token] else "○"
        frames = signs.reshape(-1, *((1, *shape)[-2:]))
        drawn.append("\n".join("   ".join(" ".join(row) for row in rows) for rows in frames.swapaxes(0, 1)))
    return _under_headings(drawn)


def _grid_offset(masks: Sequence[Mask], offset: int | None) -> int:
    """Returns the offset of the grids of masks, or ``offset`` if it is one."""
    starts = set().union(*map(grid_starts, masks))
    if offset is None and len(starts) <= 1:
        return next(iter(starts), 0)
    if offset is None or checked("offset", offset, Natural) not in (starts or {offset}):
        rule = " or ".join(map(str, sorted(starts)))
        raise ValueError(f"offset must be where a grid of the mask begins, {rule}, got {offset}")
    return offset


@strict_kwargs
def draw(
    subject: Any,
    q_len: int | None = None,
    path: str | os.PathLike[str] | None = None,
    kv_len: int | None = None,
    *,
    size: int = 512,
    head: int | None = None,
    blocks: bool = False,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws a mask with matplotlib, and on request the blocks that its plan computes. It needs no display.

    Args:
      subject: a mask, as in `picture`, with its lengths; or, without lengths, a subject of `describe`: a `Plan`, a
        layer, block or model of this package, or the result of `make_attention_fn`. Several masks are drawn side by
        side, equal ones of several layers once.
      q_len: number of queries of a mask, >= 1: the rows; None for other subjects.
      path: the file to write. An existing file is replaced. The suffix names the format: ``.png``, ``.svg``, ``.pdf``
        and others. None writes nothing.
      kv_len: number of keys: the columns; defaults to q_len.
      size: most cells on a side, 1 to 2048, as in `picture`.
      head: draw the mask of this head only, where heads differ; None for all.
      blocks: draw the passes of the plan side by side, each in its row order, with its share of the mask. The blocks
        that its forward computes are outlined.
      ax: matplotlib's axes to draw into, for one picture; None makes a new figure.

    Returns:
      The figure. It is unknown to matplotlib's pyplot, so there is nothing to close.

    Raises:
      ImportError: matplotlib is not installed.
      OSError: the file cannot be written.
      ValueError: an argument is out of its range, or a suffix is unknown (the message lists the known ones). A length
        comes with a subject that has one, ax with a path or several pictures, or blocks with too many to be seen.
      TypeError: subject is none of the above, or another argument has a wrong type.

    Example:
      >>> import pathlib, tempfile, sparse_layers as sl
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     figure = sl.draw(sl.Causal(), 64, pathlib.Path(folder, "causal.png"))
      ...     pathlib.Path(folder, "causal.png").read_bytes()[1:4]
      b'PNG'
      >>> print(figure.axes[0].get_title())
      Causal()
      T = 64, 50.7812% of the pairs allowed
      >>> sl.draw(sl.make_attention_fn("causal", 64)).axes[0].get_title() == figure.axes[0].get_title()
      True
    """
    try:
        # The object-oriented interface: pyplot would keep the figure and pick a window system for the whole process.
        from matplotlib.axes import Axes
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw needs matplotlib: pip install 'sparse-layers[examples]'") from error
    check_size(size)
    checked("blocks", blocks, bool)
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax must be matplotlib's Axes or None, got {ax!r}")
    if ax is not None and path is not None:
        raise ValueError(f"path must be None where ax is given, whose figure is yours to save, got {path!r}")
    file = None if path is None else _writable(path, Figure().canvas.get_supported_filetypes())
    panels = _panels(subject, q_len, kv_len, head, blocks)
    if len(panels) > (_PANELS if ax is None else 1):
        rule = f"head must be given for more than {_PANELS} pictures" if ax is None else "ax must be None for several"
        raise ValueError(f"{rule}: each mask is one, with blocks each pass of its plan, got {len(panels)}")

    inches = (4.5 * len(panels), 5)
    figure: Any = Figure(figsize=inches, dpi=160, layout="constrained") if ax is None else ax.figure
    all_axes = [ax] if ax else figure.subplots(1, len(panels), squeeze=False)[0]
    colours = ListedColormap([COLOURS[state] for state in sorted(COLOURS)])
    for axes, panel in zip(all_axes, panels, strict=True):
        rows, columns = panel.shape
        extent = (0, columns, rows, 0)
        states = cells(panel.mask, rows, columns, size)
        axes.imshow(states, cmap=colours, vmin=EMPTY, vmax=FULL, interpolation="nearest", extent=extent)
        axes.add_collection(
            PolyCollection(list(panel.outlines), facecolors="none", edgecolors="#e07b00", linewidths=0.6)
        )
        axes.set(xlabel=panel.labels[1], ylabel=panel.labels[0], xlim=extent[:2], ylim=extent[2:])
        axes.set_title(panel.title, fontsize="small", parse_math=False)
    if file is not None:
        figure.savefig(file, format=file.suffix[1:].lower())
    return figure


class _Panel(NamedTuple):
    """One picture of a figure: a mask of shape (rows, columns), and corners of blocks [n, 4, 2] as (column, row)."""

    mask: Mask
    shape: tuple[int, int]
    title: str
    labels: tuple[str, str] = ("query", "key")
    outlines: np.ndarray = np.empty((0, 4, 2), int)


def _panels(subject: Any, q_len: int | None, kv_len: int | None, head: int | None, blocks: bool) -> list[_Panel]:
    plans = plans_of(subject)
    if plans is not None:
        check_is_none(subject, {"q_len": q_len, "kv_len": kv_len})
        return [
            panel
            for which, (plan, *_) in plans.items()
            for panel in _of_masks(plan.masks, (plan.q_len, plan.kv_len), which, head, plan if blocks else None)
        ]
    shape = lengths_of(subject, q_len, kv_len, LONGEST if blocks else None)
    masks = masks_for_lengths(subject, *shape)
    return _of_masks(masks, shape, "", head, make_plan(masks, *shape) if blocks else None)


def _of_masks(
    masks: tuple[Mask, ...], shape: tuple[int, int], which: str, head: int | None, plan: Plan | None
) -> list[_Panel]:
    """Returns the pictures of masks, or of the passes of their plan."""
    if head is None:
        names_of_heads = {h: head_names(h, len(masks)) for h in range(len(masks))}
    else:
        names_of_heads = {checked("head", head, Natural) % len(masks): f"head {head}"}
    panels = []
    for h, names in names_of_heads.items():
        title = f"{which}\n" * bool(which) + _title(masks[h], shape) + (f", {names}" if len(masks) > 1 else "")
        chain = plan.chains[h] if plan else ()
        for index, block_pass in enumerate(chain, 1):
            orders = f"query, {block_pass.q_order}", f"key, {block_pass.kv_order}"
            rows = block_pass.q_order.rows, block_pass.kv_order.rows
            name = f"{title}\npass {index} of {len(chain)}: {block_pass.block_text}"
            panels.append(_Panel(block_pass.mask, rows, name, orders, _outlines(block_pass)))
        if not chain:
            panels.append(_Panel(masks[h], shape, title))
    return panels


def _title(mask: Mask, shape: tuple[int, int]) -> str:
    """Returns the formula of a mask, on as many lines as it needs, and its lengths and density."""
    lengths = f"T = {shape[0]}" + (f", S = {shape[1]}" if shape[1] != shape[0] else "")
    share = count(mask, *shape).pairs / (shape[0] * shape[1])
    formula = "\n".join(textwrap.wrap(shortened(repr(mask), FORMULA), _LINE, break_on_hyphens=False))
    return f"{formula}\n{lengths}, {share:.4%} of the pairs allowed"


def _outlines(block_pass: Pass) -> np.ndarray:
    """Returns the corners of the blocks that a pass computes, (column, row): [n, 4, 2]."""
    if block_pass.fwd_blocks > _OUTLINES:
        raise ValueError(
            f"blocks: at most {_OUTLINES} can be seen in a picture, the plan keeps {block_pass.fwd_blocks}: "
            "draw fewer tokens"
        )
    rows, columns, _ = block_pass.active_blocks()
    height, width = block_pass.fwd_shape
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]])
    return np.stack([columns * width, rows * height], axis=-1)[:, None] + corners


# --- checks ----------------------------------------------------------------------------------------------------------


def check_size(size: Any) -> None:
    """Raises ValueError unless size is a number of cells from 1 to 2048."""
    if checked("size", size, Positive) > _SIZE:
        raise ValueError(f"size must be at most {_SIZE}, got {size}")


def _writable(path: Any, known: dict[str, str]) -> pathlib.Path:
    """Returns the file to write, checked before any work."""
    file = checked_path(path)
    if file.is_dir():
        raise IsADirectoryError(f"path must be a file, got the folder {os.fspath(path)!r}")
    if file.suffix[1:].lower() not in known:
        raise ValueError(f"path must end in one of .{', .'.join(sorted(known))}, got {os.fspath(path)!r}")
    check_writable(file)
    return file
