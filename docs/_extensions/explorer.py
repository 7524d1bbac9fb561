"""Writes the data of the pattern explorer: masks drawn and planned by the package each time the site is built.

Static pages cannot run the package, so the data covers every choice.
"""

import itertools
import json
import pathlib
from typing import Any

from gallery import IMPLEMENTATION, relative_cost

import sparse_layers as sl
from sparse_layers.masks.counting import count
from sparse_layers.masks.pictures import cells

SIDE = 64
LENGTHS, BLOCKS = (1024, 4096, 16384), (64, 128)
NEAR = {
    "nothing near": "",
    "the last 64 keys": "sl.Window(63)",
    "the last 256 keys": "sl.Window(255)",
    "the last 1024 keys": "sl.Window(1023)",
    "its own block of 128": "sl.BlockDiagonal(128)",
}
FAR = {
    "nothing far": "",
    "every 64th key back": "sl.Strided(64)",
    "every 128th key back": "sl.Strided(128)",
    "the last 8 keys of every 128": "sl.Columns(128, 120)",
    "the last 32 keys of every 128": "sl.Columns(128, 96)",
    "the first 64 keys": "sl.Global(64)",
    "3 blocks of 64 at random": "sl.Blocks(sl.Random(3), 64)",
    "everything": "sl.Full()",
}


def choices() -> dict[str, str]:
    """Returns the code of each mask, by the preset's name, or by the near and the far part of a composed mask."""
    codes = {}
    for (near, near_code), (far, far_code) in itertools.product(NEAR.items(), FAR.items()):
        parts = " | ".join(filter(None, (near_code, far_code)))
        if parts:
            codes[f"{near} + {far}"] = f"sl.Causal() & ({parts})" if "|" in parts else f"sl.Causal() & {parts}"
    for name in sl.presets():
        if None not in sl.preset_options(name).values():  # all options have defaults, for any length
            codes[name] = f'sl.preset("{name}")'
    return codes


def entry(masks: tuple[sl.Mask, ...], length: int) -> dict[str, Any]:
    """Returns the entry of a mask: its cells as digits, its share of pairs, and its plan for each block size."""
    mask = masks[0]
    counted = count(mask, length, length, 1 << 22)
    all_pairs = length * (length + 1) // 2 if counted.causal else length**2
    return {
        "cells": "".join(map(str, cells(mask, length, length, SIDE).ravel())),
        "pairs": f"{counted.pairs / all_pairs:.2%} of the {'causal' if counted.causal else 'possible'} pairs",
        "plans": {str(block): planned(mask, length, block, counted.causal) for block in BLOCKS},
    }


def planned(mask: sl.Mask, length: int, block: int, causal: bool) -> dict[str, Any]:
    """Returns the passes of a mask's plan, and its cost relative to dense attention."""
    plan = sl.make_plan(mask, length, implementation=IMPLEMENTATION, fwd_params=sl.FwdParams(block, block))
    passes = [f"{block_pass.order_text}: {block_pass.block_text}" for block_pass in plan.chains[0]]
    return {"passes": passes, "cost": f"{relative_cost(plan, causal):.1%} of dense {'causal ' * causal}attention"}


def data() -> dict[str, Any]:
    """Returns the data of the page."""
    masks = {name: (code, sl.as_masks(eval(code, {"sl": sl}))) for name, code in choices().items()}
    return {
        "side": SIDE,
        "near": list(NEAR),
        "far": list(FAR),
        "presets": [name for name in masks if name in sl.presets()],
        "lengths": LENGTHS,
        "blocks": BLOCKS,
        "masks": {
            name: {"code": code, "lengths": {str(length): entry(head_masks, length) for length in LENGTHS}}
            for name, (code, head_masks) in masks.items()
        },
    }


def write(app: Any) -> None:
    """Writes the data as a script, which pages opened from a disk can load, if the package or this folder changed."""
    path = pathlib.Path(app.srcdir) / "generated" / "explorer" / "explorer_data.js"
    newest = max(file.stat().st_mtime for file in pathlib.Path(sl.__file__).parent.rglob("*.py"))
    newest = max(newest, *(file.stat().st_mtime for file in pathlib.Path(__file__).parent.glob("*.py")))
    if path.exists() and path.stat().st_mtime > newest:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"const EXPLORER = {json.dumps(data())};\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
