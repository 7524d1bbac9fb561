"""Presets: sparsity patterns by the names and in the units of the systems that published them.

A preset is a docstring plus one expression over the masks of this room. The query at position q attends to the key at
position k where the formula holds; q and k count tokens from 0. Those of images and videos are in `grid_presets.py`,
those of block diffusion in `diffusion_presets.py`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

from ..arguments.checks import LONGEST, Natural, Positive, checked_by_axis, parsed_options, strict_kwargs, suggest
from ..arguments.foreign import PRESETS
from . import diffusion_presets, grid_presets
from .algebra import And, Blocks, Mask, PerHead
from .primitives import BlockDiagonal, Causal, Columns, Draws, Full, Global, LogSparse, Prefix, Random, Strided, Window


@strict_kwargs
def preset(name: str, **options: int | bool | Sequence[int] | Sequence[bool]) -> Mask | PerHead:
    """Makes the mask of a preset: ``preset("streaming", window=512)``. `presets` lists the names.

    Args:
      name: a preset's name, or ``"name:option=value,option=value"``.
      **options: the preset's options, integers or bools in the units of its system; others keep their defaults. Each
        stands here or in the name, not in both. Images and videos need ``shape``; it and options that may differ by
        axis take tuples, in a name ``64x64``.

    Returns:
      A mask, or a tuple of masks by head (head h uses entry h % len). Both combine with ``&``, ``|`` and ``~``, a tuple
      head by head.

    Raises:
      ValueError: an unknown name or option (the message lists similar ones), a value of the wrong type or range, an
        option twice, or no value for an option without a default.

    Example:
      >>> import sparse_layers as sl
      >>> sl.preset("sliding_window", window=3)
      Window(left=2, right=0)
      >>> sl.preset("sparse_transformer_strided:stride=64")
      Causal() & (Window(left=64, right=0) | Strided(stride=64))
      >>> sl.preset("axial:shape=4x6,axes=1")  # rows of an image
      Grid(shape=(4, 6), axes=(Window(left=0, right=0), Full()), offset=None)
      >>> sl.preset("stridde")
      Traceback (most recent call last):
      ValueError: preset: unknown name 'stridde', did you mean 'strided' or 'image_strided'? Known: all, axial, ...
    """
    name, _, text = name.partition(":") if isinstance(name, str) else (name, "", "")
    make = _preset_function("preset", name)
    hints = get_type_hints(make, include_extras=True)
    parsed = parsed_options(f"preset {name!r}", text)
    for option in parsed.keys() & options.keys():
        raise ValueError(f"preset {name!r}: {option} must be given once, got {text!r} and {options[option]!r}")
    values = parsed | options
    for option, value in values.items():
        if option not in inspect.signature(make).parameters:
            raise ValueError(f"preset {name!r}: unknown option {suggest(option, inspect.signature(make).parameters)}")
        values[option] = checked_by_axis(f"preset {name!r}: {option}", value, hints[option])
    for option, parameter in inspect.signature(make).parameters.items():
        if parameter.default is parameter.empty and option not in values:
            example = "64x64" if option == "shape" else 4096
            raise ValueError(f"preset {name!r}: {option} must be given, as in '{name}:{option}={example}'")
    masks = make(**values)
    return PerHead(masks) if isinstance(masks, tuple) else masks


def presets() -> dict[str, str]:
    """Returns all presets: a dict from name to the first line of its documentation, in alphabetical order.

    Example:
      >>> import sparse_layers as sl
      >>> sl.presets()["chunked"]
      'A query sees the earlier keys of its own chunk of chunk tokens (Llama 4).'
    """
    lines = {name: (make.__doc__ or "").partition("\n")[0] for name, make in sorted(_PRESETS.items())}
    return {name: line.replace("``", "") for name, line in lines.items()}


@strict_kwargs
def preset_options(name: str) -> dict[str, int | bool | tuple[int, ...] | None]:
    """Returns the options of a preset with their defaults; None for lengths that have no default, such as ``shape``.

    Args:
      name: a preset's name.

    Raises:
      ValueError: the name is unknown.

    Example:
      >>> import sparse_layers as sl
      >>> sl.preset_options("streaming")
      {'window': 1024, 'sinks': 4}
      >>> sl.preset_options("windows")
      {'shape': None, 'size': 7, 'shift': 0, 'offset': None}
    """
    parameters = inspect.signature(_preset_function("preset_options", name)).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def half_pattern_notes(*patterns: Any) -> list[str]:
    """Returns notes about patterns that are one of the two masks of the Sparse Transformer, equal notes once.

    Args:
      patterns: presets' names, masks, or anything else. The mask of "local" is also a sliding window, so only its name
        gets a note. A tuple of masks by head with "strided" and a window gets none.

    Example:
      >>> half_pattern_notes("strided:local_attn_ctx=64", Causal() & Strided(64), Causal())
      ["note: 'strided' is one of two masks that the Sparse Transformer combines; 'sparse_transformer_strided' is both"]
    """
    names: dict[str, None] = {}
    for pattern in patterns:
        if isinstance(pattern, str):
            names[pattern.partition(":")[0]] = None
            continue
        masks = pattern if isinstance(pattern, tuple) else (pattern,)
        halves = (isinstance(x, And) and (type(x.left), type(x.right)) == (Causal, Strided) for x in masks)
        if any(halves) and not any(isinstance(x, Window) for x in masks):  # the second mask, for other heads
            names["strided"] = None
    text = "note: {!r} is one of two masks that the Sparse Transformer combines; {!r} is both"
    return [text.format(name, _HALVES[name]) for name in names if name in _HALVES]


def _preset_function(what: str, name: str) -> Callable[..., Mask | tuple[Mask, ...]]:
    """Returns the function that makes a preset's mask; ``what`` names the caller in errors."""
    if not isinstance(name, str):
        raise ValueError(f"{what}: name must be a string, got {name!r}")
    if name not in _PRESETS:
        hint = f"{name!r}: {PRESETS[name.lower()]}" if name.lower() in PRESETS else suggest(name, _PRESETS)
        raise ValueError(f"{what}: unknown name {hint}")
    return _PRESETS[name]


# --- the presets -----------------------------------------------------------------------------------------------------


def causal() -> Mask:
    """A query sees every key up to itself: no sparsity.

    ``k <= q``.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("causal"), 4))
      ■ · · ·
      ■ ■ · ·
      ■ ■ ■ ·
      ■ ■ ■ ■
    """
    return Causal()


def all_() -> Mask:
    """A query sees every key up to itself: OpenAI's name for causal (openai/sparse_attention).

    ``k <= q``.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("all"), 4))
      ■ · · ·
      ■ ■ · ·
      ■ ■ ■ ·
      ■ ■ ■ ■
    """
    return Causal()


def local(local_attn_ctx: Positive = 128) -> Mask:
    """A query sees the last ``local_attn_ctx`` keys: one of two masks that the Sparse Transformer combines.

    ``k <= q and q - k < local_attn_ctx``: OpenAI's mode (openai/sparse_attention), A1 of Child et al. 2019. The other
    mask is `strided`; `sparse_transformer_strided` is both, merged.

    Args:
      local_attn_ctx: number of keys a query sees.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("local", local_attn_ctx=3), 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · ■ ■ ■ · ·
      · · ■ ■ ■ ·
      · · · ■ ■ ■
    """
    return Window(local_attn_ctx - 1)


def strided(local_attn_ctx: Positive = 128) -> Mask:
    """A query sees every ``local_attn_ctx``-th key back: one of two masks that the Sparse Transformer combines.

    ``k <= q and (q - k) % local_attn_ctx == 0``: OpenAI's mode (openai/sparse_attention), A2 of Child et al. 2019. The
    other mask is `local`; `sparse_transformer_strided` is both, merged.

    Args:
      local_attn_ctx: the stride in tokens.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("strided", local_attn_ctx=3), 6))
      ■ · · · · ·
      · ■ · · · ·
      · · ■ · · ·
      ■ · · ■ · ·
      · ■ · · ■ ·
      · · ■ · · ■
    """
    return Causal() & Strided(local_attn_ctx)


def fixed(
    local_attn_ctx: Positive = 128, num_verts: Positive = 4, vertsize: Positive = 1, blocksize: Positive = 32
) -> Mask | tuple[Mask, ...]:
    """A query sees its own group, and summary blocks of all groups, which differ by head (openai/sparse_attention).

    ``k <= q and (q // local_attn_ctx == k // local_attn_ctx or k // blocksize % s in summary(h))``, where
    ``s = local_attn_ctx // blocksize`` and summary(h) is row ``h % num_verts`` of [s - 1, s - 2, ..., 0] reshaped to
    rows of vertsize: head 0 takes the last vertsize blocks of each group, head 1 those before them.

    Args:
      local_attn_ctx: tokens in a group.
      num_verts: number of different heads; it must divide the number of heads.
      vertsize: number of summary blocks in a group.
      blocksize: tokens in a block.

    Returns:
      A tuple of num_verts masks, or one mask if num_verts is 1.

    Raises:
      ValueError: blocksize does not divide local_attn_ctx, vertsize does not divide s, or s holds fewer than
        num_verts * vertsize blocks.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("fixed", local_attn_ctx=4, num_verts=2, blocksize=1), 6))
      heads 0, 2, ...:
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ ■ ■ ■ · ·
      · · · ■ ■ ·
      · · · ■ ■ ■
      heads 1, 3, ...:
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ ■ ■ ■ · ·
      · · ■ · ■ ·
      · · ■ · ■ ■
    """
    s, rest = divmod(local_attn_ctx, blocksize)
    if rest:
        raise ValueError(f"fixed: blocksize={blocksize} must divide local_attn_ctx={local_attn_ctx}")
    if s % vertsize or num_verts * vertsize > s:
        raise ValueError(
            f"fixed: vertsize={vertsize} must divide the local_attn_ctx / blocksize = {s} blocks of a group, and "
            f"num_verts * vertsize = {num_verts * vertsize} must not exceed them"
        )
    width = vertsize * blocksize
    masks = tuple(
        Causal() & (BlockDiagonal(local_attn_ctx) | Columns(local_attn_ctx, stop - width, stop))
        for stop in range(local_attn_ctx, local_attn_ctx - num_verts * width, -width)
    )
    return masks if num_verts > 1 else masks[0]


def sparse_transformer_strided(stride: Positive = 128) -> Mask:
    """A query sees the last keys and every ``stride``-th one: both masks merged (Child et al. 2019, equation 7).

    ``k <= q and (q - k <= stride or (q - k) % stride == 0)``.

    Args:
      stride: the stride in tokens; the window reaches as far back, so it holds stride + 1 keys.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("sparse_transformer_strided", stride=2), 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · ■ ■ ■ · ·
      ■ · ■ ■ ■ ·
      · ■ · ■ ■ ■
    """
    return Causal() & (Window(stride) | Strided(stride))


def sparse_transformer_fixed(stride: Positive = 128, summary: Positive = 32) -> Mask:
    """A query sees its own group and the last ``summary`` keys of all groups (Child et al. 2019, 'fixed').

    ``k <= q and (q // stride == k // stride or k % stride >= stride - summary)``.

    Args:
      stride: tokens in a group.
      summary: summary tokens at the end of each group, at most stride.

    Raises:
      ValueError: summary exceeds stride.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("sparse_transformer_fixed", stride=3, summary=1), 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · · ■ ■ · ·
      · · ■ ■ ■ ·
      · · ■ ■ ■ ■
    """
    if summary > stride:
        raise ValueError(f"sparse_transformer_fixed: summary={summary} must not exceed stride={stride}")
    return Causal() & (BlockDiagonal(stride) | Columns(stride, stride - summary))


def sliding_window(window: Positive = 1024) -> Mask:
    """A query sees the last ``window`` keys, itself included (Mistral, Gemma).

    ``k <= q and q - k < window``.

    Args:
      window: number of keys a query sees.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("sliding_window", window=2), 4))
      ■ · · ·
      ■ ■ · ·
      · ■ ■ ·
      · · ■ ■
    """
    return Window(window - 1)


def chunked(chunk: Positive = 8192) -> Mask:
    """A query sees the earlier keys of its own chunk of ``chunk`` tokens (Llama 4).

    ``k <= q and q // chunk == k // chunk``.

    Args:
      chunk: tokens in a chunk.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("chunked", chunk=2), 4))
      ■ · · ·
      ■ ■ · ·
      · · ■ ·
      · · ■ ■
    """
    return Causal() & BlockDiagonal(chunk)


def dilated(window: Positive = 256, dilation: Positive = 4) -> Mask:
    """A query sees ``window`` keys, itself included, ``dilation`` tokens apart (Longformer, LongNet).

    ``k <= q and (q - k) % dilation == 0 and q - k < window * dilation``.

    Args:
      window: number of keys a query sees.
      dilation: distance of the keys in tokens.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("dilated", window=2, dilation=2), 6))
      ■ · · · · ·
      · ■ · · · ·
      ■ · ■ · · ·
      · ■ · ■ · ·
      · · ■ · ■ ·
      · · · ■ · ■
    """
    return Window(window * dilation - 1) & Strided(dilation)


def longformer(window: Positive = 512, global_tokens: Natural = 64, causal: bool = True) -> Mask:
    """A query sees a window and global tokens, which see all keys unless causal (Beltagy et al. 2020).

    Causal: ``k <= q and (q - k < window or k < global_tokens or q < global_tokens)``. Bidirectional: ``abs(q - k) <=
    window // 2 or k < global_tokens or q < global_tokens``, as in the paper, where half the window lies on each side.

    Args:
      window: keys in the window: causal the last ones, the query included; else half on each side of the query.
      global_tokens: number of global tokens at the start.
      causal: True if later keys are hidden.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("longformer", window=2, global_tokens=1, causal=False), 6))
      ■ ■ ■ ■ ■ ■
      ■ ■ ■ · · ·
      ■ ■ ■ ■ · ·
      ■ · ■ ■ ■ ·
      ■ · · ■ ■ ■
      ■ · · · ■ ■
    """
    if causal:
        return Causal() & (Window(window - 1) | Global(global_tokens))
    return Window(window // 2, window // 2) | Global(global_tokens)


def bigbird(
    block: Positive = 64,
    window_blocks: Positive = 3,
    global_blocks: Natural = 2,
    random_blocks: Draws = 3,
    seed: int = 0,
    causal: bool = True,
    seq_len: Annotated[int, 0, LONGEST] = 0,
) -> Mask:
    """A query sees a window, global blocks and random blocks (Zaheer et al. 2020).

    With a = q // block and b = k // block: ``abs(a - b) <= window_blocks // 2``, or ``a < global_blocks``, or ``b <
    global_blocks``, or b is one of the random_blocks that row a draws from the blocks before it (bidirectional: or a
    is one that row b draws); and ``k <= q`` if causal. The draws are a hash of row and seed, and need no length.

    Hugging Face's global blocks are the first and the last ones, and its random blocks lie before and after the row.
    That needs a length: ``"bigbird:causal=false,seq_len=4096"``. Then ``global_blocks // 2`` of the global blocks are
    the last ones of ``n = seq_len // block``. Bidirectional, row a draws from all n blocks, for itself only.
    (Draws that fall on the window or on a global block add nothing; Hugging Face's draws avoid these.)

    Args:
      block: tokens in a block.
      window_blocks: blocks in the window, half of them on each side of the query's block.
      global_blocks: number of global blocks, at the start; with a seq_len the smaller half is at its end.
      random_blocks: number of random blocks a row of blocks draws.
      seed: equal seeds make equal masks.
      causal: True if later keys are hidden.
      seq_len: tokens in the sequence, a multiple of block; 0 for a mask of any length.

    Raises:
      ValueError: block does not divide seq_len.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("bigbird", block=1, global_blocks=1, random_blocks=1, causal=False), 8))
      ■ ■ ■ ■ ■ ■ ■ ■
      ■ ■ ■ · ■ · ■ ·
      ■ ■ ■ ■ · · · ·
      ■ · ■ ■ ■ · · ■
      ■ ■ · ■ ■ ■ · ·
      ■ · · · ■ ■ ■ ·
      ■ ■ · · · ■ ■ ■
      ■ · · ■ · · ■ ■
      >>> ends = sl.preset("bigbird", block=1, random_blocks=0, causal=False, seq_len=8)
      >>> print(sl.picture(ends, 8))
      ■ ■ ■ ■ ■ ■ ■ ■
      ■ ■ ■ · · · · ■
      ■ ■ ■ ■ · · · ■
      ■ · ■ ■ ■ · · ■
      ■ · · ■ ■ ■ · ■
      ■ · · · ■ ■ ■ ■
      ■ · · · · ■ ■ ■
      ■ ■ ■ ■ ■ ■ ■ ■
    """
    if seq_len % block:
        raise ValueError(f"bigbird: block={block} must divide seq_len={seq_len}")
    reach, blocks, last = window_blocks // 2, seq_len // block, global_blocks // 2 if seq_len else 0
    pattern = Window(reach, reach) | Global(global_blocks - last)
    if last:
        ends = Columns(blocks, max(blocks - last, 0))
        pattern = pattern | ends | ends.T
    if random_blocks:
        draws = Random(random_blocks, seed, size=None if causal or not seq_len else blocks)
        pattern = pattern | (draws if causal or seq_len else draws | draws.T)
    lifted = Blocks(pattern, block)
    return Causal() & lifted if causal else lifted


def streaming(window: Positive = 1024, sinks: Natural = 4) -> Mask:
    """A query sees the last ``window`` and the first ``sinks`` keys (StreamingLLM, Xiao et al. 2023).

    ``k <= q and (q - k < window or k < sinks)``.

    Args:
      window: number of recent keys a query sees.
      sinks: number of attention sink tokens at the start.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("streaming", window=2, sinks=1), 5))
      ■ · · · ·
      ■ ■ · · ·
      ■ ■ ■ · ·
      ■ · ■ ■ ·
      ■ · · ■ ■
    """
    return Causal() & (Window(window - 1) | Prefix(sinks))


def logsparse() -> Mask:
    """A query sees itself and the keys at distances 1, 2, 4, 8, ... before it (Li et al. 2019).

    ``q - k`` is 0 or a power of two.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("logsparse"), 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · ■ ■ ■ · ·
      ■ · ■ ■ ■ ·
      · ■ · ■ ■ ■
    """
    return LogSparse()


def prefix_lm(prefix: Natural = 128) -> Mask:
    """A query sees every key up to itself, and the first ``prefix`` keys (T5, GLM).

    ``k <= q or k < prefix``.

    Args:
      prefix: tokens in the prefix.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("prefix_lm", prefix=2), 4))
      ■ ■ · ·
      ■ ■ · ·
      ■ ■ ■ ·
      ■ ■ ■ ■
    """
    return Causal() | Prefix(prefix)


def bidirectional() -> Mask:
    """A query sees every key, before and after it: no sparsity and no causality.

    Always true.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("bidirectional"), 3))
      ■ ■ ■
      ■ ■ ■
      ■ ■ ■
    """
    return Full()


# Modes of OpenAI that are one of two masks of a pattern, and the preset of both.
_HALVES = {"local": "sparse_transformer_strided", "strided": "sparse_transformer_strided"}

_PRESETS: dict[str, Callable[..., Mask | tuple[Mask, ...]]] = {
    "causal": causal,
    "all": all_,
    "local": local,
    "strided": strided,
    "fixed": fixed,
    "sparse_transformer_strided": sparse_transformer_strided,
    "sparse_transformer_fixed": sparse_transformer_fixed,
    "sliding_window": sliding_window,
    "chunked": chunked,
    "dilated": dilated,
    "longformer": longformer,
    "bigbird": bigbird,
    "streaming": streaming,
    "logsparse": logsparse,
    "prefix_lm": prefix_lm,
    "bidirectional": bidirectional,
    "block_diffusion": diffusion_presets.block_diffusion,
    "draft_blocks": diffusion_presets.draft_blocks,
    "neighborhood": grid_presets.neighborhood,
    "sliding_tile": grid_presets.sliding_tile,
    "windows": grid_presets.windows,
    "axial": grid_presets.axial,
    "image_strided": grid_presets.image_strided,
    "image_fixed": grid_presets.image_fixed,
    "spatial_temporal": grid_presets.spatial_temporal,
    "radial": grid_presets.radial,
}
