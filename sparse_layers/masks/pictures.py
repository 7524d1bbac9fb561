"""Pictures of masks: a grid of cells, one for each square of tokens, and HTML for notebooks."""

import html
from typing import TYPE_CHECKING

import numpy as np

from .states import EMPTY, FULL, PARTIAL, UNSURE

if TYPE_CHECKING:
    from .algebra import Mask

_ELEMENTS = 1 << 22  # mask elements evaluated at a time
_REFINED = 1 << 25  # elements that a picture may evaluate for cells whose state the closed form cannot tell
COLOURS = {EMPTY: "#f4f4f2", PARTIAL: "#8fb3d9", FULL: "#1f4e8c"}
FORMULA = 200  # characters of a mask's formula, at most
# Limits of a picture in a notebook: cells and pixels on a side, and tokens.
_SIDE, _PIXELS, LONGEST = 48, 192, 1 << 14


def cell_size(q_len: int, kv_len: int, size: int) -> int:
    """Returns the tokens on a side of a picture's cell: a power of two, which divides the periods of most patterns."""
    return 1 << (-(-max(q_len, kv_len) // size) - 1).bit_length()


def cells(mask: "Mask", q_len: int, kv_len: int, size: int) -> np.ndarray:
    """Returns the block states of a picture's cells, int8 [rows, columns], at most ``size`` on a side."""
    cell = cell_size(q_len, kv_len, size)
    if cell == 1:
        return mask.dense(q_len, kv_len) * np.int8(FULL)
    q0, k0 = np.arange(0, q_len, cell)[:, None], np.arange(0, kv_len, cell)[None, :]
    q1, k1 = np.minimum(q0 + cell, q_len) - 1, np.minimum(k0 + cell, kv_len) - 1
    states = np.array(mask.block_state(q0, q1, k0, k1))
    row, column = np.nonzero(states == UNSURE)
    if row.size:
        states[row, column] = _refined(mask, q0[row, 0], q1[row, 0], k0[0, column], k1[0, column], cell)
    return states


def _refined(mask: "Mask", q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray, cell: int) -> np.ndarray:
    """Returns the states of rectangles, ``cell`` on a side: by their elements if few, else by 16 x 16 smaller ones."""
    exact = q0.size * cell * cell <= _REFINED
    points = cell if exact else 16
    step = -(-cell // points)
    states = np.empty(q0.size, np.int8)
    batch = max(1, _ELEMENTS // (points * points))
    for start in range(0, q0.size, batch):
        chunk = slice(start, start + batch)
        a0, a1, b0, b1 = (x[chunk, None, None] for x in (q0, q1, k0, k1))
        # Positions beyond the rectangle's end repeat its last one, which changes nothing.
        q = np.minimum(a0 + step * np.arange(points)[:, None], a1)
        k = np.minimum(b0 + step * np.arange(points)[None, :], b1)
        if exact:
            inner = np.broadcast_to(mask(q, k), np.broadcast_shapes(q.shape, k.shape)) * np.int8(FULL)
        else:
            inner = mask.block_state(q, np.minimum(q + step - 1, a1), k, np.minimum(k + step - 1, b1))
            inner = np.where(inner == UNSURE, np.int8(PARTIAL), inner)
        low, high = inner.min(axis=(1, 2)), inner.max(axis=(1, 2))
        states[chunk] = np.where(low == high, low, np.int8(PARTIAL))
    return states


# --- in notebooks ----------------------------------------------------------------------------------------------------


def as_html(mask: "Mask") -> str:
    """Returns a mask's formula and its picture, over enough tokens to show the pattern."""
    formula = shortened(repr(mask), FORMULA)
    try:
        q_len, kv_len = mask._picture_lengths()
        picture = f"<br>{q_len} queries, {kv_len} keys</figcaption>{svg(cells(mask, q_len, kv_len, _SIDE))}"
    except Exception:  # a user's table may be shorter, and a notebook shows masks unasked
        picture = "</figcaption>"
    return f'<figure style="margin: 0"><figcaption><code>{html.escape(formula)}</code>{picture}</figure>'


def shortened(text: str, max_length: int) -> str:
    """Returns the text, cut to ``max_length`` characters with dots at the end."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def svg(states: np.ndarray) -> str:
    """Draws a grid of cells as SVG: one path for each colour, one rectangle for each run in a row."""
    rows, columns = states.shape
    paths = ""
    for state in (PARTIAL, FULL):
        edges = np.diff((states == state).astype(np.int8), axis=1, prepend=0, append=0)
        (row, start), (_, stop) = np.nonzero(edges > 0), np.nonzero(edges < 0)
        runs = "".join(f"M{a} {y}h{b - a}v1H{a}z" for y, a, b in zip(row, start, stop, strict=True))
        paths += f'<path fill="{COLOURS[state]}" d="{runs}"/>' if runs else ""
    scale = max(1, _PIXELS // max(rows, columns))
    return (
        f'<svg viewBox="0 0 {columns} {rows}" width="{columns * scale}" height="{rows * scale}" '
        f'style="background: {COLOURS[EMPTY]}" shape-rendering="crispEdges">{paths}</svg>'
    )
