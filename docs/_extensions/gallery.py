"""The gallery of presets: a page's part that is made from the package itself, each time the site is built."""

import html
import inspect
import pathlib
from typing import Any

import numpy as np
from pages import write_if_new

import sparse_layers as sl
from sparse_layers.masks.counting import count
from sparse_layers.masks.pictures import cells, svg
from sparse_layers.ops.planning.blocks import active_blocks
from sparse_layers.ops.planning.planner import make_plan
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder

LENGTHS = 4096, 65536
# What presets on a grid are shown on, by their number of axes, at each of the lengths.
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {2: ((64, 64), (256, 256)), 3: ((16, 16, 16), (16, 64, 64))}
VIDEOS = {"radial", "sliding_tile", "spatial_temporal"}
# Where the default would not show, or does not fit so few tokens.
OPTIONS: dict[str, dict[str, Any]] = {"chunked": {"chunk": 1024}, "axial": {"axes": -1}, "sliding_tile": {"tile": 4}}
SIDE, MASKS, BLOCK = 64, 2, 128
BACKEND = "triton"


def made(name: str, number: int) -> tuple[sl.Mask, ...]:
    """The masks of a preset over LENGTHS[number] tokens."""
    return sl.as_masks(sl.preset(name, **options(name, number)))


def options(name: str, number: int) -> dict[str, Any]:
    """What is said of a preset beside its defaults."""
    shape = {"shape": SHAPES[3 if name in VIDEOS else 2][number]} if "shape" in sl.preset_options(name) else {}
    return shape | OPTIONS.get(name, {})


def call(name: str) -> str:
    """The line of code that makes what is drawn."""
    given = "".join(f", {key}={value!r}" for key, value in options(name, 0).items())
    return f'sl.preset("{name}"{given})'


def pictures(name: str) -> str:
    """The masks with the keys of one query; on a grid, where the former say little, the keys of two."""
    masks, length, shape = [*made(name, 0)], LENGTHS[0], options(name, 0).get("shape")
    if shape is not None:
        return figures([of_place(masks[0], shape, query) for query in (length * 5 // 8 + SIDE // 3, length // 32 + 1)])
    found = []
    for number, mask in enumerate(masks[:MASKS]):
        of = f", heads {number}, {number + len(masks)}, ..." if len(masks) > 1 else ""
        found.append(figure(svg(cells(mask, length, length, SIDE)), f"{length} queries × {length} keys{of}"))
    query = length * 5 // 8
    strip = np.repeat(shares(keys_of(masks[0], query, length), length // 256), 8, axis=0)
    return figures([*found, figure(svg(strip), f"keys of query {query}")])


def of_place(mask: sl.Mask, shape: tuple[int, ...], query: int) -> str:
    """The keys of a query of a grid, in their places; a video frame by frame."""
    seen = keys_of(mask, query, int(np.prod(shape))).reshape(shape) * np.int8(2)
    place = ", ".join(map(str, np.unravel_index(query, shape)))
    if len(shape) == 2:
        return figure(svg(seen), f"keys of pixel ({place}) of {shape[0]} × {shape[1]}")
    gap = np.ones((shape[1], shape[0], 1), np.int8)
    frames = np.concatenate([seen.transpose(1, 0, 2), gap], axis=2).reshape(shape[1], -1)
    caption = f"keys of place ({place}) of {' × '.join(map(str, shape))}, frame by frame"
    return figure(svg(frames), caption, "wide")


def keys_of(mask: sl.Mask, query: int, length: int) -> np.ndarray:
    """Which keys a query sees: bool [length]."""
    return np.broadcast_to(mask(np.array(query), np.arange(length)), (length,))


def shares(seen: np.ndarray, cell: int) -> np.ndarray:
    """Cells of a row [1, ...]: 2 where all keys are seen, 1 where some are."""
    parts = seen.reshape(1, -1, cell)
    return np.where(parts.all(-1), np.int8(2), np.where(parts.any(-1), np.int8(1), np.int8(0)))


def figure(picture: str, caption: str, kind: str = "") -> str:
    """A picture with a line below it."""
    return f'<figure class="{kind}">{picture}<figcaption>{html.escape(caption)}</figcaption></figure>'


def figures(found: list[str]) -> str:
    """Pictures side by side."""
    return f'<div class="patterns">{"".join(found)}</div>'


def costs(name: str, number: int) -> list[str]:
    """A row of the table: what is kept and what it costs, the mean over heads."""
    masks, length = made(name, number), LENGTHS[number]
    causal = all(count(mask, length, length, 1 << 26).causal for mask in masks)
    pairs = [count(mask, length, length, 1 << 26).pairs for mask in masks]
    every = length * (length + 1) // 2 if causal else length**2
    cost = of_dense(make_plan(masks, length, implementation=BACKEND), causal)
    kept, grid = np.mean([blocks(mask, length) for mask in masks]), -(-length // BLOCK)
    computed = f"{kept / (grid * (grid + 1) // 2 if causal else grid**2):.1%}"
    tokens = " × ".join(map(str, options(name, number).get("shape", [length])))
    return [tokens, f"{np.mean(pairs) / every:.2%}", computed, f"{cost:.1%} of {'causal' if causal else 'full'}"]


def of_dense(plan: sl.Plan, causal: bool) -> float:
    """What a plan is expected to cost, the mean over its masks, beside attention to all keys or all before."""
    options: dict[str, Any] = {name: getattr(plan, name) for name in ("implementation", "fwd_params", "bwd_params")}
    dense = make_plan(sl.Causal() if causal else sl.Full(), plan.q_len, **options).candidates[0][0][1]
    return float(np.mean([found[0][1] for found in plan.candidates])) / dense


def blocks(mask: sl.Mask, length: int) -> int:
    """How many blocks of BLOCK × BLOCK tokens in natural order have any pair."""
    order = RowOrder(length)
    return len(active_blocks(Reordered(mask, order, order), *(-(-length // BLOCK),) * 2, BLOCK, BLOCK).rows)


def entry(name: str, summary: str) -> str:
    """What the page says of one preset."""
    given = sl.preset_options(name).items()
    options = ", ".join(f"`{option}`" if option == "shape" else f"`{option}={value!r}`" for option, value in given)
    rows = "\n".join(f"| {' | '.join(costs(name, number))} |" for number in range(len(LENGTHS)))
    return inspect.cleandoc(f"""
### `{name}`

{summary}

```python
{call(name)}
```

{f"Options and their defaults: {options}." if options else ""}

{pictures(name)}

| tokens | pairs kept | blocks kept | predicted cost |
| --- | --- | --- | --- |
{rows}
""")


def kind(name: str) -> str:
    """Under which heading a preset stands."""
    if "shape" in sl.preset_options(name):
        return "Images and videos"
    masks = made(name, 0)
    return "Causal" if all(count(mask, *LENGTHS[:1] * 2, 1 << 26).causal for mask in masks) else "Both ways"


def page() -> str:
    """All presets, by kind."""
    presets = sl.presets().items()
    parts = []
    for title in ("Causal", "Both ways", "Images and videos"):
        parts += [f"## {title}", *(entry(name, summary) for name, summary in presets if kind(name) == title)]
    return "\n\n".join(parts) + "\n"


def write(app: Any) -> None:
    """Writes the part."""
    write_if_new(pathlib.Path(app.srcdir) / "generated" / "gallery.md", page())


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks for it."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
