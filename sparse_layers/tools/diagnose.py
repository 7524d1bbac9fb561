"""Diagnosis of a model: attention that is still dense, and sparse attention that is slow or saves nothing."""

import collections
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ..arguments.checks import strict_kwargs, suggest
from ..arguments.foreign import one_line
from ..masks.algebra import Array, Mask
from ..masks.counting import count
from ..masks.pictures import FORMULA, shortened
from ..masks.primitives import Causal, Full
from ..ops.implementations import rank_implementations
from ..ops.kernels.gpu.bridge import check_triton, record_launches
from ..ops.kernels.gpu.hardware import device_named
from ..ops.planning.plan import Plan
from ..ops.planning.platforms import FALLBACK, assume_gpu, platform
from ..ops.recorded_calls import record_calls
from .advice import advice, mask_name
from .dense_attention import DenseAttention, SparseCall, find_attention
from .dense_masks import DenseMask
from .source_lines import Source
from .subjects import is_linen, plans_of, walk
from .traced_inputs import traced_inputs
from .traces import trace

_MIN_KEYS = 128  # fewer keys are one block of the kernels, and no pattern saves anything
_MIN_QUERIES = 16  # fewer rows do not fill a tile of matrix units: decoding, or pooling with a few seeds
_FEW_KEYS = 2000  # below it, dense attention is often as fast (docs/when_dense.md)
_SAME_SCALE = 0.01  # bfloat16 rounds factors
_LEFT_OUT = "leave this array out of the call"
_PATHS = 4  # most paths of modules in a line
_OP = "sl.block_sparse_attention(query, key, value, {pattern}{options})"
_CALLS = (
    "write sl.diagnose(model, x) with a model of NNX or Equinox, sl.diagnose(module.apply, variables, x) with Linen, "
    "sl.diagnose(transformed.apply, params, rng, x) with Haiku, or sl.diagnose(lambda x: ..., x)"
)
# Attention of libraries, and what to write for it: (library, function or class, self-attention, cross-attention).
_REPLACEMENTS = (
    (
        "flax",
        "MultiHeadAttention",
        "pass attention_fn=sl.make_attention_fn({pattern}, {q_len}) to nnx.MultiHeadAttention, or write "
        "sl.SparseSelfAttention(..., pattern={pattern}, seq_len={q_len}), which has the same parameters",
        "write sl.SparseCrossAttention(..., pattern={pattern}, q_len={q_len}, kv_len={kv_len})",
    ),
    (
        "flax",
        "MultiHeadDotProductAttention",
        "pass attention_fn=sl.make_attention_fn({pattern}, {q_len}) to nn.MultiHeadDotProductAttention, or write "
        "sparse_layers.linen.SparseSelfAttention(..., pattern={pattern}, seq_len={q_len})",
        "write sparse_layers.linen.SparseCrossAttention(..., pattern={pattern}, q_len={q_len}, kv_len={kv_len})",
    ),
    (
        "haiku",
        "MultiHeadAttention",
        "write sparse_layers.haiku.SparseSelfAttention(..., pattern={pattern}, seq_len={q_len}) in place of "
        "hk.MultiHeadAttention",
        f"write {_OP} between projections of your own",
    ),
    ("jax", "dot_product_attention", f"write {_OP}, which takes the same arrays", ""),
)
_FLAX_LAYERS = [(library, name) for library, name, *_ in _REPLACEMENTS if library == "flax"]


class Finding(NamedTuple):
    """One remark about a model.

    Attributes:
      kind: "dense attention", "dense mask", "weight dropout", "sequence length", "slow implementation" or "no saving".
      where: the line of the model, and the paths of its modules if they are known; else "the model".
      times: how often a call of the model does it.
      what: what it does, with shapes.
      advice: what to write instead.
    """

    kind: str
    where: str
    times: int
    what: str
    advice: str


_Located: TypeAlias = tuple[Finding, Sequence[str]]  # a finding, and the paths of its modules


class Diagnosis(NamedTuple):
    """The result of `diagnose`; ``str`` returns the report.

    Attributes:
      findings: a tuple of `Finding`; () if nothing was found.
      summary: the number of sparse attention calls by implementation, what was left out, and which inputs are data.
    """

    findings: tuple[Finding, ...]
    summary: str

    def __str__(self) -> str:
        """Returns a paragraph for each finding, and the summary."""
        paragraphs = []
        for number, (kind, where, times, what, to_do) in enumerate(self.findings, 1):
            repeated = f", {times} times" * (times > 1)
            paragraphs.append(f"{number}. {kind}{repeated}: {where}\n   {what}\n   -> {to_do}")
        return "\n\n".join([*(paragraphs or ["nothing to change"]), self.summary])


@strict_kwargs
def diagnose(
    model: Callable[..., Any], *inputs: Any, device: str | tuple[int, int] | None = None, **options: Any
) -> Diagnosis:
    """Traces a call of a model, and says which attention is dense, slow or refused in training, and what to write.

    Only constant masks are computed, so inputs and parameters may be shapes. These are found:

    - Attention that computes all scores: a softmax between two products, `jax.nn.dot_product_attention`, the layers of
      Flax, Haiku and Equinox. Its keys and values come from data; its queries may come from weights, as latents do.
      Attention in blocks, few queries or keys, and softmaxes over weights (routers, heads, codebooks) are left out.
      So are raw latents as queries, without a projection. Talking heads, top-k and biases are said to stay dense.
    - Dense masks and biases that join such scores, and masks that `block_sparse_attention` takes as JAX arrays. All
      pairs of a mask that depends on no input are compared with patterns, if it has at most 8192 x 8192.
    - Dropout of attention weights, which sparse attention refuses in training. Rates of NNX layers are read; of Linen
      layers, calls with ``deterministic=False`` show dropout.
    - Patterns made for a longer seq_len than what arrives.
    - Sparse attention on a slow implementation, with the reasons, or with a pattern that saves nothing.

    Args:
      model: a callable of the inputs: an NNX or Equinox model, ``module.apply`` of Linen, ``transformed.apply`` of
        Haiku, a `functools.partial` of these, a bound Linen module or any function. Arguments by name are bound, as in
        ``functools.partial(model, deterministic=True)``. A loss, or its gradient by
        `jax.grad`, shows what training does. An NNX module with state, such as dropout, must be the model or an input:
        a function that closes over it cannot change it.
      inputs: pytrees of arrays or of `jax.ShapeDtypeStruct`; everything else in them is passed on as it is. An array
        is data, and a module is weights. Other trees are data if the model or a module has the weights, or a function
        closes over them. Else the first tree is the weights, and the last one is a batch. Random keys and scalars do
        not count. The summary says what was taken for data if weights may be among the inputs.
      device: a GPU to trace for, as in `describe`; None for the device at hand.
      options: none; arguments of the model's call are refused, with what to write.

    Returns:
      A `Diagnosis`: ``str`` returns the report, ``findings`` is a tuple of (kind, where, times, what, advice), and
      ``summary`` counts the calls of sparse attention by implementation. Loops count as often as they run, or once if
      that is not known. A gradient counts the attention of its forward pass.

    Raises:
      TypeError: model is not callable, is a class, a mask, an unbound module or a compiled function, holds shapes that
        are no inputs, changes an NNX module that is no input, or returns a generator; says what to write.
      RuntimeError: model calls cuDNN on a machine without it.
      ValueError: inputs hold no array; device is not known. Errors of the model itself are passed on.
      ModuleNotFoundError: device is given, and Triton is not installed.

    Example:
      >>> import jax, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
      >>> print(sl.diagnose(layer, jax.ShapeDtypeStruct((1, 4096, 64), "float32")))
      1. dense attention: the model
         float32 scores [4, 4096, 4096] of 4096 queries and 4096 keys
         -> pass attention_fn=sl.make_attention_fn(pattern, 4096) to nnx.MultiHeadAttention, or write \
sl.SparseSelfAttention(..., pattern=pattern, seq_len=4096), which has the same parameters; sl.presets() lists patterns
      <BLANKLINE>
      sparse attention: no calls
    """
    _check_options(options)
    _check_model(model)
    gpu = None if device is None else device_named(device)
    if gpu is not None:
        check_triton()
    traced = traced_inputs(model, inputs)
    with assume_gpu(gpu), record_launches(), record_calls() as facts:
        jaxpr = trace(model, traced)
        op_calls = {number for number, fact in enumerate(facts) if "implementation" in fact}
        dense, sparse = find_attention(jaxpr, traced.data, op_calls)
        few = [x for x in dense if x.q_len < _MIN_QUERIES or x.kv_len < _MIN_KEYS]
        dense = [x for x in dense if x not in few]
        layers = {path: layer for x in (model, *inputs) for path, layer, _ in walk(x) if _is_flax_attention(layer)}
        merged = [{"at": x} | dict(pair for number in x.numbers for pair in facts[number].items()) for x in sparse]
        findings = [
            *_dense_findings(dense, layers),
            *_mask_findings(dense),
            *_dropout_findings(dense, layers, merged),
            *_sparse_findings(merged),
        ]
        summary = _summary(merged, few) + f"\n{traced.note}" * bool(traced.note)
        return Diagnosis(tuple(_merged(findings)), summary)


def _check_options(options: dict[str, Any]) -> None:
    """Refuses arguments of the model's call, which are bound to it."""
    if options:
        values = {name: x if isinstance(x, bool | int | float) else name for name, x in options.items()}
        bound = ", ".join(f"{name}={x}" for name, x in values.items())
        raise TypeError(
            f"diagnose: unknown argument {suggest(next(iter(options)), ['device'])}; arguments of the model's call are "
            f"bound: write sl.diagnose(functools.partial(model, {bound}), ...)"
        )


def _check_model(model: Any) -> None:
    """Refuses what is no model or cannot be called by itself."""
    kind = one_line(model) if isinstance(model, type | str) or model is None else type(model).__name__
    to_do = None
    if isinstance(model, Mask | str):
        to_do = "for a pattern write sl.describe(mask, length)"
    elif isinstance(model, type):
        kind, to_do = f"the class {kind}", f"an instance of it is a model; {_CALLS}"
    elif isinstance(model, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced):
        kind, to_do = f"a function that is compiled for one device ({kind})", "write sl.diagnose(f, x) for jax.jit(f)"
    elif is_linen(model) and getattr(model, "scope", None) is None:
        kind, to_do = f"an unbound {kind}", "write sl.diagnose(module.apply, variables, x)"
    elif not callable(model):
        to_do = _CALLS
    if to_do is not None:
        raise TypeError(f"model must be a callable of the inputs, got {kind}: {to_do}")


def _is_flax_attention(layer: Any) -> bool:
    """True for attention layers of Flax itself, whose attention function may be one of this package."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(layer).__mro__}
    return any(layer in names for layer in _FLAX_LAYERS)


def _merged(findings: Iterable[_Located]) -> Iterator[Finding]:
    """Yields findings with the paths of their modules; equal ones become one with all their times and paths."""
    groups: dict[Finding, list[tuple[int, Sequence[str]]]] = {}
    for finding, paths in findings:
        groups.setdefault(finding._replace(times=0), []).append((finding.times, paths))
    for finding, equal in groups.items():
        paths = list(dict.fromkeys(path for _, paths in equal for path in paths if path))
        shown = ", ".join(paths[:_PATHS]) + f" and {len(paths) - _PATHS} more" * (len(paths) > _PATHS)
        where = (finding.where or "the model") + f" ({shown})" * bool(shown)
        yield finding._replace(where=where, times=sum(times for times, _ in equal))


def _scopes(path: str) -> str:
    """Returns the modules of a name stack: without the names of transformations and of einsums.

    Example:
      >>> _scopes("jvp(Decoder)/checkpoint/blocks_0/attention/...qhd,...khd->...hqk")
      'Decoder/blocks_0/attention'
    """
    scopes = (re.sub(r"^(\w+\()+|\)+$", "", scope) for scope in path.split("/"))
    modules = (x for x in scopes if x and "->" not in x and x not in ("checkpoint", "rematted_computation"))
    return "/".join(name for name, _ in itertools.groupby(modules))


# --- dense attention -------------------------------------------------------------------------------------------------


def _dense_findings(attention: Sequence[DenseAttention], layers: dict[str, Any]) -> Iterator[_Located]:
    dense_layers = [path for path, layer in layers.items() if path and plans_of(layer.attention_fn) is None]
    for x in attention:
        scores = f"{x.dtype} scores {_listed([n for n in x.shape if n > 1])} of {x.q_len} queries and {x.kv_len} keys"
        if x.kv_len < _FEW_KEYS:
            scores += f"; below about {_FEW_KEYS} keys a pattern saves little"
        scopes = _scopes(x.path)
        paths = [scopes] if scopes or not _in_flax(x.source) else dense_layers
        yield Finding("dense attention", x.source.line, x.times, scores, _replacement(x)), paths


def _in_flax(source: Source) -> bool:
    return any(source.calls(*layer) for layer in _FLAX_LAYERS)


def _replacement(attention: DenseAttention) -> str:
    """Returns what to write in place of dense attention."""
    masks = [mask.pattern for mask in attention.masks if mask.pattern is not None]
    saves = len(masks) == 1 and masks[0] not in (Causal(), Full())
    is_cross = attention.q_len != attention.kv_len
    code = f"write {_OP} in place of the two products and the softmax, with arrays [B, T, N, H]"
    for library, function, replacement, for_cross in _REPLACEMENTS:
        if attention.source.calls(library, function):
            code = (is_cross and for_cross) or replacement
            break
    is_scaled = attention.source.calls("jax", "dot_product_attention") or not _in_library(attention.source)
    capped, sinks = attention.has_soft_cap, attention.has_sinks
    options = ", logits_soft_cap=cap" * capped + ", sinks=sinks" * sinks
    scale, default = attention.scale, attention.head_size**-0.5
    is_default = scale is not None and math.isclose(scale, default, rel_tol=_SAME_SCALE)
    if is_scaled and not is_default:
        options += f", scale={1 if scale is None else scale:.6g}"
    pattern = _code(masks[0]) if saves else "pattern"
    code = code.format(q_len=attention.q_len, kv_len=attention.kv_len, pattern=pattern, options=options)
    code += ", where scores become cap * tanh(scores / cap)" * capped
    code += f",{' and' * capped} where sinks [N] are the logits that join the softmax" * sinks
    code += "; multiply query by the factor of the scores, which is no constant" * (is_scaled and scale is None)
    return _obstacles(attention) + code + "; sl.presets() lists patterns" * (not saves)


def _in_library(source: Source) -> bool:
    """True if a library multiplies queries and keys, which may scale the queries before."""
    return any(library in ("flax", "haiku", "equinox") for library, _ in source.callers)


def _obstacles(attention: DenseAttention) -> str:
    """Returns why attention has no sparse form of the same results, before what to write; "" if it has one."""
    if attention.mixes_heads:
        return "this attention stays dense, because its heads mix scores or weights (talking heads); without that, "
    if attention.has_threshold:
        return (
            "this attention stays dense, because a threshold of the scores decides its pairs (top-k); to select blocks "
            "of keys instead, as sl.MoBA() does, "
        )
    if any(_is_bias(mask) for mask in attention.masks):
        return (
            "this attention stays dense with its bias, unless that depends on head and distance alone, as "
            "relative_bias= of layers or bias= of the op; if it only hides pairs, "
        )
    return ""


def _is_bias(mask: DenseMask) -> bool:
    """True if an array is added to scores, and is not known to hide pairs alone."""
    return mask.dtype != "bool" and mask.pattern is None and not mask.differs_by_head and not mask.is_large


def _mask_findings(attention: Sequence[DenseAttention]) -> Iterator[_Located]:
    for x in attention:
        for mask in {(m.shape, m.dtype, m.line): m for m in x.masks}.values():
            size = math.prod(mask.shape) * np.dtype(mask.dtype).itemsize / 2**20
            what = f"{mask.dtype} {_listed(mask.shape)}, {size:.1f} MiB, joins the scores of dense attention"
            yield Finding("dense mask", mask.line, x.times, what, _mask_advice(mask)), ()


def _mask_advice(mask: DenseMask) -> str:
    expression = mask.pattern
    by_input = "documents and padding are segment_ids, and what else differs by batch entry is order_ids"
    if mask.is_large:
        return "it is too large to compare with patterns: diagnose a shorter input, or write its rule as masks"
    if mask.differs_by_head:
        return f"if it differs by head, write a tuple of masks, one for each head; {by_input}"
    if _is_bias(mask):
        return (
            "if it hides pairs, write it as a pattern; if it depends on head and distance alone (ALiBi, T5, Swin), as "
            "relative_bias= of layers or bias= of the op; else this attention stays dense"
        )
    if expression is None:
        return f"its constant rule, such as causality, is the pattern; {by_input}"
    rule = f"the pattern {_code(expression)} allows the same pairs"
    if isinstance(expression, Array):
        rule = "it depends on no input: write it as a numpy bool array [T, S] or as masks of the same rule"
    return f"{rule}, except pairs that an input hides: {by_input}" if mask.is_partial else f"{rule}; {_LEFT_OUT}"


def _code(mask: Mask) -> str:
    """Returns the code of an expression of masks."""
    return re.sub(r"\b([A-Z]\w*\()", r"sl.\1", shortened(repr(mask), FORMULA))


def _listed(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# --- dropout, and sparse attention -----------------------------------------------------------------------------------


def _dropout_findings(
    attention: Sequence[DenseAttention], layers: dict[str, Any], calls: Sequence[dict[str, Any]]
) -> Iterator[_Located]:
    """Yields dropout of attention weights: in layers of Flax that the model holds, else as calls show it."""
    to_do = (
        "set dropout_rate=0 and apply dropout to the output: sparse attention forms no weights to drop, and refuses "
        "the rate in training"
    )
    rates = {path: getattr(layer, "dropout_rate", 0) for path, layer in layers.items()}
    for path, rate in rates.items():
        if rate:
            yield Finding("weight dropout", "", 1, f"the layer has dropout_rate={rate}", to_do), [path]
    are_known = any(rates.values())
    for x in attention:
        if x.has_dropout and not (are_known and _in_flax(x.source)):
            what = "the weights of dense attention are dropped"
            yield Finding("weight dropout", x.source.line, x.times, what, to_do), [_scopes(x.path)]
    for fact in calls:
        if fact.get("dropout_rate") and not are_known:
            what = f"the layer has dropout_rate={fact['dropout_rate']}, which this call does not use"
            yield Finding("weight dropout", fact["at"].source.line, fact["at"].times, what, to_do), ()


def _sparse_findings(calls: Sequence[dict[str, Any]]) -> Iterator[_Located]:
    unsaving = functools.cache(_unsaving_masks)  # layers have equal plans
    for fact in calls:
        sparse: SparseCall = fact["at"]
        call, operands, name = fact["call"], fact["operands"], fact["implementation"]
        length, seq_len = operands.query.shape[1], fact.get("seq_len")

        def finding(kind, what, to_do, sparse=sparse):
            return Finding(kind, sparse.source.line, sparse.times, what, to_do), ()

        if operands.mask is not None:
            what = f"bool {_listed(operands.mask.shape)}, a run-time mask of the op"
            to_do = (
                "a mask that no input decides is a numpy array or an expression of masks, which is planned beforehand"
            )
            yield finding("dense mask", what, to_do)
        if seq_len is not None and seq_len > length:
            what = f"the pattern is made for seq_len={seq_len}; {length} tokens see its upper left corner"
            to_do = f"write seq_len={length} if no longer input comes: sizes that follow from seq_len stay as they are"
            yield finding("sequence length", what, to_do)
        target = platform()
        if name == "reference" or (name in FALLBACK and target != "cpu"):
            why, to_do = f"as implementation={name!r} names it", "leave implementation out"
            if call.picked_for:
                reasons = rank_implementations(call, operands)[1].items()
                why = "; ".join(f"not {preferred!r}: {reason}" for preferred, reason in reasons)
                to_do = "change what the reasons name; `sparse-layers doctor` checks the installation"
            yield finding("slow implementation", f"{name!r} computes it on {target}, {why}", to_do)
        if call.plan is not None and operands.selection is None:
            for what, to_do in unsaving(call.plan):
                yield finding("no saving", what, to_do)


def _unsaving_masks(plan: Plan) -> list[tuple[str, str]]:
    """Returns the masks of a plan that save nothing, with the reason, and what to try instead."""
    masks = []
    for h, mask in enumerate(plan.masks):
        lines = [] if mask in (Causal(), Full()) else [*advice(plan, h, count(mask, plan.q_len, plan.kv_len))]
        if lines and lines[0].startswith("nothing is saved"):
            masks.append((f"{mask_name(mask)}: {lines[0]}", "; ".join(lines[1:])))
    return masks


def _summary(calls: Sequence[dict[str, Any]], few: Sequence[DenseAttention]) -> str:
    """Returns the number of sparse attention calls by implementation, and what was left out."""
    numbers = collections.Counter()
    for fact in calls:
        numbers[fact["implementation"]] += fact["at"].times
    counted = ", ".join(f"{n} call{'s' * (n > 1)} of {name!r} on {platform()}" for name, n in numbers.items())
    left_out = sum(x.times for x in few)
    calls_text = f"{left_out} call{'s' * (left_out > 1)} of dense attention"
    limits = f"fewer than {_MIN_QUERIES} queries or {_MIN_KEYS} keys"
    return f"sparse attention: {counted or 'no calls'}" + f"\nleft out: {calls_text} with {limits}" * bool(few)
