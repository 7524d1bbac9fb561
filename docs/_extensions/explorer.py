"""The data of the pattern explorer: masks drawn and planned by the package, each time the site is built.

A page of static files cannot run the package, so it has every choice beforehand.
"""

import itertools
import json
import pathlib
from typing import Any

from gallery import BACKEND, of_dense

import sparse_layers as sl
from sparse_layers.masks.counting import count
from sparse_layers.masks.pictures import cells
from sparse_layers.ops.planning.planner import make_plan

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
    """The code of each mask that can be chosen, by its name; of a composed one, by what is near and what is far."""
    found = {}
    for (near, near_code), (far, far_code) in itertools.product(NEAR.items(), FAR.items()):
        parts = " | ".join(filter(None, (near_code, far_code)))
        if parts:
            found[f"{near} + {far}"] = f"sl.Causal() & ({parts})" if "|" in parts else f"sl.Causal() & {parts}"
    for name in sl.presets():
        if "shape" not in sl.preset_options(name):
            found[name] = f'sl.preset("{name}")'
    return found


def entry(masks: tuple[sl.Mask, ...], length: int) -> dict[str, Any]:
    """What the page shows of a mask: its cells by digits, its pairs, and its plan for each size of blocks."""
    mask = masks[0]
    counted = count(mask, length, length, 1 << 22)
    every = length * (length + 1) // 2 if counted.causal else length**2
    return {
        "cells": "".join(map(str, cells(mask, length, length, SIDE).ravel())),
        "pairs": f"{counted.pairs / every:.2%} of the {'causal' if counted.causal else 'possible'} pairs",
        "plans": {str(block): planned(mask, length, block, counted.causal) for block in BLOCKS},
    }


def planned(mask: sl.Mask, length: int, block: int, causal: bool) -> dict[str, Any]:
    """The passes of a mask's chain, and what it costs beside dense attention."""
    plan = make_plan(mask, length, implementation=BACKEND, fwd_params=sl.FwdParams(block, block))
    passes = [f"{block_pass.order_text}: {block_pass.block_text}" for block_pass in plan.chains[0]]
    return {"passes": passes, "cost": f"{of_dense(plan, causal):.1%} of dense {'causal ' * causal}attention"}


def data() -> dict[str, Any]:
    """All that the page knows."""
    masks = {name: (code, sl.as_masks(eval(code, {"sl": sl}))) for name, code in choices().items()}
    return {
        "side": SIDE,
        "near": list(NEAR),
        "far": list(FAR),
        "presets": [name for name in masks if name in sl.presets()],
        "lengths": LENGTHS,
        "blocks": BLOCKS,
        "masks": {
            name: {"code": code, "lengths": {str(length): entry(found, length) for length in LENGTHS}}
            for name, (code, found) in masks.items()
        },
    }


def write(app: Any) -> None:
    """Writes the data as a script, which a page may load from a disk, too; not where it is newer than the package."""
    path = pathlib.Path(app.srcdir) / "generated" / "explorer" / "explorer_data.js"
    newest = max(file.stat().st_mtime for file in pathlib.Path(sl.__file__).parent.rglob("*.py"))
    if path.exists() and path.stat().st_mtime > max(newest, pathlib.Path(__file__).stat().st_mtime):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"const EXPLORER = {json.dumps(data())};\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks for it."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
