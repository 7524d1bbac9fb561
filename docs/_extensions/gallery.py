"""Writes the gallery of presets, drawn and planned by the package each time the site is built."""

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
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder

LENGTHS = 4096, 65536
# The grids of presets with a shape, by their number of axes, one for each length.
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {2: ((64, 64), (256, 256)), 3: ((16, 16, 16), (16, 64, 64))}
# The numbers of queries and keys of presets whose keys are not those of the queries, one pair for each length.
SIDES: dict[str, tuple[tuple[int, int], ...]] = {"draft_blocks": ((4096, 8192), (65536, 131072))}
VIDEOS = {"radial", "sliding_tile", "spatial_temporal"}
# Options of presets whose defaults do not fit LENGTHS[0] tokens, or show nothing there.
OPTIONS: dict[str, dict[str, Any]] = {"chunked": {"chunk": 1024}, "axial": {"axes": -1}, "sliding_tile": {"tile": 4}}
QUERIES = {"block_diffusion": LENGTHS[0] * 5 // 16}  # drawn beside the mask, if not at 5/8: one of the noisy half
TRAINING = {"block_diffusion", "draft_blocks"}  # of two sequences in one: under a heading of their own
# Presets as a model has them, with what it adds to them: a summary and a line of code.
MODELS = {
    "windows:size=8,shift=4": (
        "The shifted windows of Swin's every second layer, with biases from its joint table, [225, heads].",
        f"sl.grid_bias({SHAPES[2][0]}, table[::-1].T.reshape(-1, 15, 15))  # the bias= of calls",
    )
}
# Cells on a side of a picture, pictures of masks that differ by head, tokens on a side of a counted block.
SIDE, MAX_MASKS, BLOCK = 64, 2, 128
# Costs are those that `sl.describe(mask, length, device="h100")` prints: an H100 plans for this implementation.
IMPLEMENTATION = "hopper"


def preset_masks(name: str, number: int) -> tuple[sl.Mask, ...]:
    """Returns the masks of a preset over LENGTHS[number] tokens."""
    return sl.as_masks(sl.preset(name, **options(name, number)))


def options(name: str, number: int) -> dict[str, Any]:
    """Returns the options of a preset that differ from its defaults."""
    lengths = {
        "shape": SHAPES[3 if name in VIDEOS else 2][number],
        "n": LENGTHS[number] // 2,
        "total_seq_len": LENGTHS[number],
    }
    needed = {option: lengths[option] for option in defaults(name) if option in lengths}
    return needed | OPTIONS.get(name, {})


def defaults(name: str) -> dict[str, Any]:
    """Returns the options of a preset with their defaults; the name may set some of them."""
    return sl.preset_options(name.partition(":")[0])


def sides(name: str, number: int) -> tuple[int, int]:
    """Returns the number of queries and of keys."""
    return SIDES[name][number] if name in SIDES else (LENGTHS[number], LENGTHS[number])


def call(name: str) -> str:
    """Returns the lines of code that make the drawn preset, and what a model adds to it."""
    arguments = "".join(f", {key}={value!r}" for key, value in options(name, 0).items())
    return "\n".join([f'sl.preset("{name}"{arguments})', *MODELS.get(name, ())[1:]])


def pictures(name: str) -> str:
    """Returns pictures of the masks and of the keys of one query; for a grid, of the keys of two queries."""
    masks, (q_len, kv_len), shape = [*preset_masks(name, 0)], sides(name, 0), options(name, 0).get("shape")
    if shape is not None:
        return figures([grid_figure(masks[0], shape, query) for query in (q_len * 5 // 8 + SIDE // 3, q_len // 32 + 1)])
    drawn = []
    for number, mask in enumerate(masks[:MAX_MASKS]):
        heads = f", heads {number}, {number + len(masks)}, ..." if len(masks) > 1 else ""
        drawn.append(figure(svg(cells(mask, q_len, kv_len, SIDE)), f"{q_len} queries × {kv_len} keys{heads}"))
    query = QUERIES.get(name, q_len * 5 // 8)
    strip = np.repeat(cell_states(allowed_keys(masks[0], query, kv_len), kv_len // 256), 8, axis=0)
    return figures([*drawn, figure(svg(strip), f"keys of query {query}")])


def grid_figure(mask: sl.Mask, shape: tuple[int, ...], query: int) -> str:
    """Draws the keys of a query on its grid, a video frame by frame."""
    keys = allowed_keys(mask, query, int(np.prod(shape))).reshape(shape) * np.int8(2)
    coordinates = ", ".join(map(str, np.unravel_index(query, shape)))
    if len(shape) == 2:
        return figure(svg(keys), f"keys of pixel ({coordinates}) of {shape[0]} × {shape[1]}")
    gap = np.ones((shape[1], shape[0], 1), np.int8)
    frames = np.concatenate([keys.transpose(1, 0, 2), gap], axis=2).reshape(shape[1], -1)
    caption = f"keys of place ({coordinates}) of {' × '.join(map(str, shape))}, frame by frame"
    return figure(svg(frames), caption, "wide")


def allowed_keys(mask: sl.Mask, query: int, length: int) -> np.ndarray:
    """Returns True for the keys that a query sees: bool [length]."""
    return np.broadcast_to(mask(np.array(query), np.arange(length)), (length,))


def cell_states(keys: np.ndarray, cell: int) -> np.ndarray:
    """Returns the states of a row of cells, int8 [1, length / cell]: 2 if all keys are seen, 1 if some are."""
    in_cells = keys.reshape(1, -1, cell)
    return np.where(in_cells.all(-1), np.int8(2), np.where(in_cells.any(-1), np.int8(1), np.int8(0)))


def figure(picture: str, caption: str, kind: str = "") -> str:
    """Returns a picture with a caption."""
    return f'<figure class="{kind}">{picture}<figcaption>{html.escape(caption)}</figcaption></figure>'


def figures(drawn: list[str]) -> str:
    """Returns pictures side by side."""
    return f'<div class="patterns">{"".join(drawn)}</div>'


def costs(name: str, number: int) -> list[str]:
    """Returns a row of the table: shares of pairs and blocks, and the predicted cost, as means over heads."""
    masks, (q_len, kv_len) = preset_masks(name, number), sides(name, number)
    causal = all(count(mask, q_len, kv_len, 1 << 26).causal for mask in masks)
    pairs = [count(mask, q_len, kv_len, 1 << 26).pairs for mask in masks]
    all_pairs = q_len * (q_len + 1) // 2 if causal else q_len * kv_len
    cost = relative_cost(sl.make_plan(masks, q_len, kv_len, implementation=IMPLEMENTATION), causal)
    active = np.mean([num_active_blocks(mask, q_len, kv_len) for mask in masks])
    rows, columns = -(-q_len // BLOCK), -(-kv_len // BLOCK)
    block_share = f"{active / (rows * (rows + 1) // 2 if causal else rows * columns):.1%}"
    tokens = " × ".join(map(str, options(name, number).get("shape", dict.fromkeys((q_len, kv_len)))))
    return [tokens, f"{np.mean(pairs) / all_pairs:.2%}", block_share, f"{cost:.1%} of {'causal' if causal else 'full'}"]


def relative_cost(plan: sl.Plan, causal: bool) -> float:
    """Returns the predicted cost of a plan, its mean over masks, divided by that of causal or full attention."""
    options: dict[str, Any] = {name: getattr(plan, name) for name in ("implementation", "fwd_params", "bwd_params")}
    dense_mask = sl.Causal() if causal else sl.Full()
    dense = sl.make_plan(dense_mask, plan.q_len, plan.kv_len, **options).candidates[0][0].cost
    return float(np.mean([candidates[0].cost for candidates in plan.candidates])) / dense


def num_active_blocks(mask: sl.Mask, q_len: int, kv_len: int) -> int:
    """Returns the number of blocks of BLOCK × BLOCK tokens in natural order that hold an allowed pair."""
    reordered = Reordered(mask, RowOrder(q_len), RowOrder(kv_len))
    return len(active_blocks(reordered, -(-q_len // BLOCK), -(-kv_len // BLOCK), BLOCK, BLOCK).rows)


def entry(name: str, summary: str) -> str:
    """Returns the section of one preset."""
    values = defaults(name).items()
    required = {option for option, value in values if value is None and option != "offset"}
    options = ", ".join(f"`{option}`" if option in required else f"`{option}={value!r}`" for option, value in values)
    rows = "\n".join(f"| {' | '.join(costs(name, number))} |" for number in range(len(LENGTHS)))
    return inspect.cleandoc(f"""
### `{name}`

{summary}

```python
{call(name)}
```

{f"Options and their defaults: {options}." if options else ""}

{pictures(name)}

| tokens | pairs | blocks | predicted cost |
| --- | --- | --- | --- |
{rows}
""")


def kind(name: str) -> str:
    """Returns the heading that a preset belongs to."""
    if "shape" in defaults(name):
        return "Images and videos"
    masks = preset_masks(name, 0)
    if name in TRAINING:
        return "Block diffusion"
    return "Causal" if all(count(mask, *LENGTHS[:1] * 2, 1 << 26).causal for mask in masks) else "Both ways"


def page() -> str:
    """Returns the sections of all presets and of those as models have them, by kind."""
    presets = (sl.presets() | {name: summary for name, (summary, _) in MODELS.items()}).items()
    parts = []
    for title in ("Causal", "Both ways", "Block diffusion", "Images and videos"):
        parts += [f"## {title}", *(entry(name, summary) for name, summary in presets if kind(name) == title)]
    return "\n\n".join(parts) + "\n"


def write(app: Any) -> None:
    """Writes the sections, which gallery.md includes."""
    write_if_new(pathlib.Path(app.srcdir) / "generated" / "gallery.md", page())


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
