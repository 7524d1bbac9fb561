"""HTML tables for notebooks: the passes of a plan, each with a picture of its blocks."""

import html
from typing import NamedTuple

import numpy as np

from ...masks.pictures import svg


class PassRow(NamedTuple):
    """One pass in a table."""

    orders: str  # its row orders, in words
    blocks: str  # its number of blocks, in words
    cells: np.ndarray  # int8 [rows, columns], the block states that the picture shows


class Section(NamedTuple):
    """One mask in a table: its title in HTML, and the passes of its chain."""

    title: str
    rows: list[PassRow]


def head_names(h: int, period: int) -> str:
    """Returns the names of the heads that take mask h of ``period`` masks."""
    return "all heads" if period == 1 else f"heads {h}, {h + period}, ..."


def html_table(caption: str, sections: list[Section], num_hidden: int) -> str:
    """Returns a table of sections, with a last line for ``num_hidden`` masks that it does not show."""
    lines = []
    for title, rows in sections:
        lines.append(f'<tr><th colspan="4" style="text-align: left">{title}</th></tr>')
        for number, row in enumerate(rows, 1):
            texts = (f"pass {number}", html.escape(row.orders), row.blocks, svg(row.cells))
            lines.append(f"<tr>{''.join(f'<td>{text}</td>' for text in texts)}</tr>")
    if num_hidden:
        lines.append(f'<tr><td colspan="4">and {num_hidden} masks more</td></tr>')
    return f"<table><caption>{caption}</caption>{''.join(lines)}</table>"
