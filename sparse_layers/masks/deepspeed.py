"""Masks of DeepSpeed's sparse attention, from its JSON (the classes around its SparsityConfig)."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from ..arguments.checks import Natural, Positive, checked, strict_kwargs, suggest
from .algebra import And, Blocks, Mask, Or, PerHead, shifted
from .primitives import BlockDiagonal, Causal, Columns, Draws, Empty, Full, Global, Prefix, Random, Window

_FAR = 2**30  # blocks; a longer window has no end
_DEFAULTS: dict[str, Any] = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": False,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": None,  # bidirectional, but unidirectional in mode local_sliding_window
    "horizontal_global_attention": False,
    "num_different_global_patterns": 1,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
    "seed": 0,
}
_MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")
_LISTS = ("local_window_blocks", "global_block_indices", "global_block_end_indices")
_HINTS: dict[str, Any] = {
    "different_layout_per_head": bool,
    "horizontal_global_attention": bool,
    "num_random_blocks": Draws,
    "global_block_indices": Natural,
    "seed": int,
}


@strict_kwargs
def from_deepspeed(
    config: Mapping[str, Any] | str, *, num_heads: int | None = None, seq_len: int | None = None
) -> Mask | PerHead:
    """Makes a mask from the ``sparse_attention`` section of DeepSpeed's JSON.

    As in DeepSpeed, a layout consists of blocks: 'unidirectional' hides later *blocks*, never later tokens of the same
    block, so a language model needs ``& Causal()``. A key that a mode does not use is ignored, as there.

    Three of DeepSpeed's rules need a length, ``seq_len``:

    * random blocks in both directions; without it, row a draws them from the a blocks before it,
    * the summary of a last, short window in mode 'fixed' with bidirectional attention or several global blocks; without
      it, summary blocks lie where a full window has them,
    * errors about sequences that are too short.

    Random blocks follow DeepSpeed's counts and ranges, but come from the hash of `Random`.

    Args:
      config: a dict or JSON text: the section, or a configuration that has one. Keys and defaults:
        mode ('fixed'; or dense, variable, bigbird, bslongformer, local_sliding_window), block (16 tokens),
        different_layout_per_head (false), num_local_blocks (4), num_global_blocks (1), attention ('bidirectional', in
        local_sliding_window 'unidirectional'), horizontal_global_attention (false), num_different_global_patterns (1),
        num_random_blocks (0), local_window_blocks ([4]), global_block_indices ([0]), global_block_end_indices (null),
        num_sliding_window_blocks (3), and seed (0), which DeepSpeed does not have.
      num_heads: number of heads; needed only for random blocks that differ by head.
      seq_len: tokens in the sequence, a multiple of block; None for a mask of any length.

    Returns:
      A mask, or with different_layout_per_head a tuple of masks by head (head h uses entry h % len).

    Raises:
      ValueError: text that is not JSON, an unknown key or mode, a value of the wrong type or range, settings that
        DeepSpeed refuses together, or num_heads missing.

    Example:
      >>> import sparse_layers as sl
      >>> config = {"mode": "fixed", "block": 1, "num_local_blocks": 3, "attention": "unidirectional"}
      >>> print(sl.picture(sl.from_deepspeed(config), 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · · ■ ■ · ·
      · · ■ ■ ■ ·
      · · ■ ■ ■ ■
    """
    c = _read(config)
    for name, value in (("num_heads", num_heads), ("seq_len", seq_len)):
        if value is not None:
            checked(f"from_deepspeed: {name}", value, Positive)
    blocks = None
    if seq_len is not None:
        blocks, rest = divmod(seq_len, c["block"])
        if rest:
            raise ValueError(f"from_deepspeed: block={c['block']} must divide seq_len={seq_len}")
    heads = 1
    if c["different_layout_per_head"]:
        random = c["mode"] in ("variable", "bigbird") and c["num_random_blocks"] > 0
        if random and num_heads is None:
            raise ValueError("from_deepspeed: random blocks with different_layout_per_head=true need num_heads")
        if random or c["mode"] == "fixed":
            heads = num_heads or c["num_different_global_patterns"]
    layouts = {
        "dense": lambda h: Full(),
        "fixed": lambda h: _fixed(c, h, blocks),
        "variable": lambda h: _variable(c, h, blocks),
        "bigbird": lambda h: _bigbird(c, h, blocks),
        "bslongformer": lambda h: _bslongformer(c, blocks),
        "local_sliding_window": lambda h: _one_way(c, _sliding(c, blocks)),
    }
    masks = PerHead(Blocks(layouts[c["mode"]](h), c["block"]) for h in range(heads))
    return masks if len(set(masks)) > 1 else masks[0]


def _read(config: Mapping[str, Any] | str) -> dict[str, Any]:
    """Returns the section with defaults filled in, checked."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise ValueError(f"from_deepspeed: config is no JSON: {error}") from error
    if isinstance(config, Mapping) and "sparse_attention" in config:
        config = config["sparse_attention"]
    if not isinstance(config, Mapping):
        raise ValueError(f"from_deepspeed: config must be a dict or a JSON object, got {config!r}")
    for key in config:
        if key not in _DEFAULTS:
            raise ValueError(f"from_deepspeed: unknown key {suggest(str(key), _DEFAULTS)}")
    c = _DEFAULTS | dict(config)
    if c["mode"] not in _MODES:
        raise ValueError(f"from_deepspeed: unknown mode {suggest(str(c['mode']), _MODES)}")
    if c["attention"] is None:
        c["attention"] = "unidirectional" if c["mode"] == "local_sliding_window" else "bidirectional"
    if c["attention"] not in ("unidirectional", "bidirectional"):
        raise ValueError(
            f"from_deepspeed: attention must be 'unidirectional' or 'bidirectional', got {c['attention']!r}"
        )
    for key, value in c.items():
        what, hint = f"from_deepspeed: {key}", _HINTS.get(key, Positive)
        if key in _LISTS and value is not None:
            if not isinstance(value, list | tuple) or (not value and key == "local_window_blocks"):
                raise ValueError(f"{what} must be a list of integers, got {value!r}")
            c[key] = [checked(what, entry, hint) for entry in value]
        elif key not in ("mode", "attention", *_LISTS):
            c[key] = checked(what, value, hint)
    if c["attention"] == "unidirectional" and c["horizontal_global_attention"] and c["mode"] in ("fixed", "variable"):
        raise ValueError("from_deepspeed: horizontal_global_attention=true needs attention='bidirectional'")
    starts, ends = c["global_block_indices"], c["global_block_end_indices"]
    if ends is not None and (len(starts) != len(ends) or any(s >= e for s, e in zip(starts, ends, strict=True))):
        raise ValueError(
            "from_deepspeed: global_block_end_indices must have one entry for each of global_block_indices, greater "
            f"than it; got {starts} and {ends}"
        )
    return c


def _union(masks: list[Mask]) -> Mask:
    return functools.reduce(Or, masks) if masks else Empty()


def _between(start: int, stop: int) -> Mask:
    """Returns the mask of the keys ``start <= k < stop``."""
    return And(Prefix(stop), ~Prefix(start)) if start else Prefix(stop)


def _one_way(c: dict[str, Any], mask: Mask) -> Mask:
    return Causal() & mask if c["attention"] == "unidirectional" else mask


def _fits(c: dict[str, Any], key: str, blocks: int | None) -> None:
    if blocks is not None and c[key] > blocks:
        raise ValueError(f"from_deepspeed: {key}={c[key]} must not exceed the {blocks} blocks of the sequence")


def _fixed(c: dict[str, Any], h: int, blocks: int | None) -> Mask:
    """Windows of num_local_blocks, and num_global_blocks of each as summary: the last ones, or earlier ones by head."""
    local, width, patterns = c["num_local_blocks"], c["num_global_blocks"], c["num_different_global_patterns"]
    if local % width:
        raise ValueError(f"from_deepspeed: num_global_blocks={width} must divide num_local_blocks={local}")
    if patterns > 1 and not c["different_layout_per_head"]:
        raise ValueError(
            f"from_deepspeed: num_different_global_patterns={patterns} needs different_layout_per_head=true"
        )
    if patterns > local // width:
        raise ValueError(
            f"from_deepspeed: num_different_global_patterns={patterns} must not exceed num_local_blocks / "
            f"num_global_blocks = {local // width}"
        )
    first = local - (1 + h % patterns) * width
    # All rows from the first row of a summary on see its blocks, those above the diagonal, too.
    later = Blocks(Causal(), width) if c["attention"] == "unidirectional" else Full()
    columns = Columns(local, first, first + width)
    summary = later & columns
    if blocks is not None and blocks % local:
        windows_end = blocks - blocks % local  # of the full windows
        # In a short last window the summary moves forward until it fits. Negative starts count from the end of the row.
        start = min(windows_end + first, blocks - width)
        start, stop, _ = slice(start, start + width).indices(blocks)
        last = _between(start, stop) if start < stop else Empty()
        if c["attention"] == "unidirectional":
            last = last & ~Prefix(start).T
        summary = summary & Prefix(windows_end) | last
    if c["horizontal_global_attention"]:
        summary = summary | summary.T
    return _one_way(c, BlockDiagonal(local)) | summary


def _variable(c: dict[str, Any], h: int, blocks: int | None) -> Mask:
    """Windows of listed sizes, the last repeated; listed global blocks; random blocks, in either direction."""
    *sizes, last = (min(size, _FAR) for size in c["local_window_blocks"])
    start, windows = 0, []
    for size in sizes:
        windows.append(_between(start, start + size) & _between(start, start + size).T)
        start += size
    repeated = shifted(BlockDiagonal(last), -start % last)
    windows.append(repeated & ~Prefix(start) & ~Prefix(start).T if start else repeated)
    terms = [_one_way(c, _union(windows))]
    for first, stop in _globals(c, blocks):
        columns = _between(first, stop)
        later = columns & ~Prefix(first).T if c["attention"] == "unidirectional" else columns
        terms.append(later | columns.T if c["horizontal_global_attention"] else later)
    # DeepSpeed draws from the whole row here, even where attention is unidirectional.
    return _union(terms + _random(c, h, blocks))


def _bigbird(c: dict[str, Any], h: int, blocks: int | None) -> Mask:
    """A sliding window, global blocks at the start, random blocks."""
    _fits(c, "num_global_blocks", blocks)
    one_way = c["attention"] == "unidirectional"
    draws = _random(c, h, blocks, past=one_way)
    return _one_way(c, _union([_sliding(c, blocks), Global(c["num_global_blocks"]), *draws]))


def _bslongformer(c: dict[str, Any], blocks: int | None) -> Mask:
    """A sliding window, and listed blocks that see all and are seen by all."""
    columns = [_between(start, stop) for start, stop in _globals(c, blocks)]
    return _one_way(c, _union([_sliding(c, blocks), *(column | column.T for column in columns)]))


def _sliding(c: dict[str, Any], blocks: int | None) -> Mask:
    _fits(c, "num_sliding_window_blocks", blocks)
    return Window(c["num_sliding_window_blocks"] // 2, c["num_sliding_window_blocks"] // 2)


def _globals(c: dict[str, Any], blocks: int | None) -> list[tuple[int, int]]:
    """Returns (first, one past the last) block of each listed range of global blocks."""
    starts = c["global_block_indices"]
    ends = c["global_block_end_indices"] or [start + 1 for start in starts]
    return list(zip(starts, ends, strict=True))


def _random(c: dict[str, Any], h: int, blocks: int | None, past: bool = False) -> list[Mask]:
    _fits(c, "num_random_blocks", blocks)
    if not c["num_random_blocks"]:
        return []
    # Seeds of heads are a prime apart, so that neighbouring seeds share no draws.
    return [Random(c["num_random_blocks"], c["seed"] + 7919 * h, None if past else blocks)]
