"""Dense attention in a jaxpr: scores of queries and keys that pass through exp and then multiply values.

Scores are a product of queries and keys. Their softmax runs over the axis of the keys, and the product with values sums
over the same axis. Keys and values come from data; queries may come from weights, as the latents of Perceiver do. So
routers, heads and codebooks, whose keys are weights, are no attention. `_Reader._is_attention` has the rule.

The jaxpr is read once, forward. Each value keeps which arrays it depends on, of which longer axes its axes are blocks,
and of which scores it is a function pair by pair. The equations of gradients are passed over: what they compute again
belongs to attention of the forward pass.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, Literal

from ..ops.planning.blocks import outside_trace
from ..ops.recorded_calls import split_marks
from .dense_masks import JOINING, RESHAPING, DenseMask, allowed_pairs, evaluation
from .jaxpr_axes import Axis, differs, full_axis, is_block, longest, reshaped, sources
from .source_lines import Source, source_of

_MAX_EVALUATED = 1 << 26  # elements of a mask that is computed to recognize it, 8192 x 8192
_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator"}
_TINY = 1e-3  # a constant below it in the sum of a softmax keeps it from 0, and is no sink
_RESIZING = {"concatenate", "pad", "slice", "dynamic_slice"}  # these may add sinks to scores, and remove them
_BACKWARD = "transpose("  # in the name stacks of gradients
_COMPARING = {"lt", "le", "gt", "ge"}
_BUILDING = "cum", "dynamic_update_slice", "pad", "scatter"
_LEFT, _RIGHT = "left", "right"  # sides of the product that makes scores


@dataclasses.dataclass(eq=False)
class DenseAttention:
    """Scores of pairs, the product of two arrays. They are attention once their exponentials multiply values."""

    shape: tuple[int, ...]  # shape and dtype of the scores
    dtype: str
    path: str  # scopes of modules, as of Linen and Haiku
    source: Source
    times: int  # how often it is computed: scans repeat it
    operands: dict[str, "_Value"]  # by their sides
    has_batch: bool = False  # True if both operands have an axis that the product keeps
    softmax: set[str] | None = None  # the sides that the first sum of exponentials runs over
    extended: set[str] = dataclasses.field(default_factory=set)  # the sides along which scores are extended
    key_side: str = ""
    q_len: int = 0
    kv_len: int = 0
    has_dropout: bool = False
    has_soft_cap: bool = False
    has_sinks: bool = False
    head_size: int = 0  # features that the product sums over
    scale: float | None = None  # the factor of the scores after their product; None if it is no constant
    mixes_heads: bool = False  # True if a product joins scores or weights of several heads
    has_threshold: bool = False  # True if scores are compared with a number that is computed from data
    masks: list[DenseMask] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class SparseCall:
    """A call of the op in the jaxpr."""

    numbers: list[int]  # in `recorded_calls`; the last one is that of the op
    source: Source
    times: int


class _Scores(NamedTuple):
    """Scores of pairs that a value is a function of."""

    sides: tuple[str, ...]  # of each axis, "" for none
    exponentiated: bool = False
    factor: float | None = 1.0  # of the scores before their exponentials; None if it is no constant


@dataclasses.dataclass(eq=False)
class _Value:
    """A variable of a jaxpr, with what is known of it."""

    shape: tuple[int, ...]
    dtype: str
    axes: Sequence[Axis]
    inputs: frozenset[int] = frozenset()  # numbers of the arrays that it depends on; random bits depend on none
    scores: dict[DenseAttention, _Scores] = dataclasses.field(default_factory=dict)
    is_random: bool = False  # True if it depends on random bits and constants alone
    summed: frozenset[DenseAttention] = frozenset()  # the attention whose exponentials it is the sum of
    built: Source | None = None  # of the equation that made it differ along two axes; None if no equation did
    constant: "_Value | None" = None  # its constant part, if inputs hide more pairs than that
    # Computes it, with size 1 along the axes along which it does not differ; None if it depends on inputs.
    evaluate: Callable[[], Any] | None = None

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """The shape, with 1 for the axes along which values do not differ."""
        return tuple(n if differs(axis) else 1 for n, axis in zip(self.shape, self.axes, strict=True))

    @property
    def is_pairwise(self) -> bool:
        """True if values differ along two axes at least."""
        return sum(map(differs, self.axes)) >= 2


def find_attention(
    closed: Any, data: Collection[int], op_calls: Collection[int]
) -> tuple[list[DenseAttention], list[SparseCall]]:
    """Finds dense attention and calls of the op in a traced model.

    Args:
      closed: the model's closed jaxpr, from `jax.make_jaxpr`. JAX 0.12 has no class of its own for it.
      data: the numbers of its inputs that are data; all others, and its constants, are weights.
      op_calls: the numbers of the op's calls in `recorded_calls`.
    """
    reader = _Reader(frozenset(data), len(closed.jaxpr.invars), op_calls)
    values = [_fresh(v.aval, [i]) for i, v in enumerate(closed.jaxpr.invars)]
    reader.read(closed, values, "", 1)
    return [x for x in reader.attention if x.softmax in (None, {x.key_side})], reader.calls


def _fresh(aval: Any, inputs: Sequence[int] | frozenset[int] = (), **known: Any) -> _Value:
    """Returns a value of which nothing but its inputs is known. Scalars are no inputs: they are temperatures, rates."""
    shape = getattr(aval, "shape", ())
    numbers = frozenset(inputs) if math.prod(shape) > 1 else frozenset()
    return _Value(shape, str(getattr(aval, "dtype", "")), [full_axis(n) for n in shape], numbers, **known)


class _Reader:
    """Reads a jaxpr and all that its equations call."""

    def __init__(self, data: frozenset[int], num_inputs: int, op_calls: Collection[int]):
        self.attention: list[DenseAttention] = []
        self.calls: list[SparseCall] = []
        self._data = data
        self._op_calls = op_calls
        self._numbers = itertools.count(num_inputs)  # of constants
        self._constants: dict[int, _Value] = {}
        self._callers: list[Any] = []  # the equations that call the jaxpr that is read, outermost first
        self._trial = 0  # above 0, a loop's body is read to learn what its carry depends on

    def read(self, closed: Any, values: Sequence[_Value], path: str, times: int) -> list[_Value]:
        """Reads a jaxpr whose inputs have these values; returns those of its results."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False)
        known = {v: self._constant(v.aval, x) for v, x in constants}
        for v, value in zip(jaxpr.invars, values, strict=True):
            known[v] = value if value.shape == getattr(v.aval, "shape", ()) else _fresh(v.aval, value.inputs)

        def value_of(v):
            return self._constant(v.aval, v.val) if isinstance(v, Literal) else known.get(v) or _fresh(v.aval)

        counted = set()  # the op's calls
        for equation in jaxpr.eqns:
            scopes = str(equation.source_info.name_stack)
            inner, (_, numbers) = f"{path}/{scopes}" if scopes else path, split_marks(scopes)
            operands = [value_of(v) for v in equation.invars]
            if not numbers or numbers[-1] not in self._op_calls:
                self._callers.append(equation)
                results = self._equation(equation, operands, inner, times)
                self._callers.pop()
            else:
                results = self._unknown(equation, operands)
                # Derivatives divide a call into several equations, and move those of block lists out of loops.
                is_new = numbers[-1] not in counted and any(x.inputs & self._data for x in operands)
                if is_new and _BACKWARD not in inner and not self._trial:
                    self.calls.append(SparseCall(split_marks(inner)[1], self._source(equation), times))
                    counted.add(numbers[-1])
            known.update(zip(equation.outvars, results, strict=True))
        return [value_of(v) for v in jaxpr.outvars]

    def _constant(self, aval: Any, x: Any) -> _Value:
        """Returns the value of an array that the model holds."""
        if id(x) not in self._constants:
            self._constants[id(x)] = _fresh(aval, [next(self._numbers)], evaluate=lambda: x)
        return self._constants[id(x)]

    def _source(self, equation: Any) -> Source:
        """Returns the origin of an equation; JAX traces a function by itself, so its callers may have the line."""
        source = source_of(equation)
        for caller in reversed(self._callers):
            if source.line:
                break
            outer = source_of(caller)
            source = Source(outer.line, source.callers + outer.callers)
        return source

    # --- equations that call jaxprs ----------------------------------------------------------------------------------

    def _equation(self, equation: Any, values: list[_Value], path: str, times: int) -> list[_Value]:
        """Returns the results of an equation with operands of these values."""
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(equation, values, path, times)
        if name == "while":
            return self._while(params, values, path, times)
        if name == "cond":
            branches = [self.read(branch, values[1:], path, times) for branch in params["branches"]]
            return [functools.reduce(_joined, results) for results in zip(*branches, strict=True)]
        if name.startswith("dot_product_attention_fwd"):
            return self._cudnn(equation, values, path, times)
        for inner in params.values():
            jaxpr = getattr(inner, "jaxpr", inner)
            if isinstance(jaxpr, Jaxpr) and len(jaxpr.invars) == len(values) and name != "pallas_call":
                return self.read(inner, values, path, times)
        if name == "dot_general":
            return [self._product(equation, values, path, times)]
        if len(equation.outvars) != 1 or name in _RANDOM:
            return self._unknown(equation, values)
        return [self._elementwise(equation, values, path)]

    def _unknown(self, equation: Any, values: list[_Value]) -> list[_Value]:
        """Returns the results of an equation: their axes and inputs."""
        inputs = frozenset().union(*(x.inputs for x in values))
        is_random = equation.primitive.name in _RANDOM
        results = [_fresh(v.aval, () if is_random else inputs, is_random=is_random) for v in equation.outvars]
        for result in results:
            result.axes = self._axes(equation, values, result.shape)
        return results

    def _axes(self, equation: Any, values: list[_Value], shape: tuple[int, ...]) -> Sequence[Axis]:
        """Returns the axes of a result, each from an operand that is computed from data if there is one.

        So a bias of blocks, or a table of positions that is longer than the input, changes no axis.
        """
        name, params = equation.primitive.name, equation.params
        is_built = name.startswith(_BUILDING)  # values may differ where those of operands do not
        if name == "reshape":
            return reshaped(values[0].axes, values[0].shape, shape)
        axes: list[Axis] = []
        for j, (n, origin) in enumerate(zip(shape, sources(equation, [x.shape for x in values], shape), strict=True)):
            varying = [(values[k], values[k].axes[i]) for k, i in origin if differs(values[k].axes[i])]
            if name == "iota":
                axes.append(full_axis(n) if j == params["dimension"] else ((n, 0),))
            elif varying:
                computed = [axis for x, axis in varying if len(x.inputs) > 1 and x.inputs & self._data]
                axis = min(computed or [axis for _, axis in varying], key=longest)
                axes.append(axis if math.prod(size for size, _ in axis) == n else ((n, max(n, longest(axis))),))
            else:
                is_new = is_built or (name == "concatenate" and j == params["dimension"])
                is_new = is_new or (not origin and name != "broadcast_in_dim")
                axes.append(full_axis(n) if is_new else ((n, 0),))
        return axes

    def _scan(self, equation: Any, values: list[_Value], path: str, times: int) -> list[_Value]:
        # Ranks inside and outside tell constants, carry and rows apart: versions of JAX count them in other parameters.
        body, length = equation.params["jaxpr"], equation.params["length"]
        inner = getattr(body, "jaxpr", body)
        num_rows = sum(len(x.shape) > len(v.aval.shape) for x, v in zip(values, inner.invars, strict=True))
        ranks = zip(equation.outvars, inner.outvars, strict=True)
        num_carry = sum(len(v.aval.shape) == len(row.aval.shape) for v, row in ranks)
        first = len(values) - num_rows
        constants, carry = values[: first - num_carry], values[first - num_carry : first]
        rows = [_Value(x.shape[1:], x.dtype, x.axes[1:], x.inputs, is_random=x.is_random) for x in values[first:]]

        def read_body(carry, times):
            return self.read(body, [*constants, *carry, *rows], path, times)

        results = read_body(self._settled(carry, lambda carry: read_body(carry, times)), times * length)
        stacked = [
            _Value((length, *x.shape), x.dtype, [full_axis(length), *x.axes], x.inputs, is_random=x.is_random)
            for x in results[num_carry:]
        ]
        return [*results[:num_carry], *stacked]

    def _while(self, params: Any, values: list[_Value], path: str, times: int) -> list[_Value]:
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def body(carry):
            return self.read(params["body_jaxpr"], [*values[first:last], *carry], path, times)

        return body(self._settled(values[last:], body))

    def _settled(self, carry: list[_Value], body: Callable[[list[_Value]], list[_Value]]) -> list[_Value]:
        """Returns what is known of a loop's carry in all iterations: after one, it depends on what the body reads."""
        self._trial += 1
        results = body(carry)[: len(carry)]
        self._trial -= 1
        return [_joined(*pair) for pair in zip(carry, results, strict=True)]

    # --- all other equations -----------------------------------------------------------------------------------------

    def _elementwise(self, equation: Any, values: list[_Value], path: str) -> _Value:
        """Returns the result of an equation that keeps axes of its operands."""
        name = equation.primitive.name
        result = self._unknown(equation, values)[0]
        origins = sources(equation, [x.shape for x in values], result.shape)
        result.scores = _scores(name, values, origins, result.shape)
        if any(x.is_random for x in values) and not result.inputs:
            result.is_random = True
        pairwise = [x for x in values if x.is_pairwise]
        if pairwise:
            result.built = pairwise[0].built
        elif result.is_pairwise:
            result.built = self._source(equation)
        if any(x.scores or x.summed for x in values):
            if _BACKWARD not in path:
                _note_softmax(equation, values, result)
                for i, x in enumerate(values if name in JOINING else ()):
                    for attention, (sides, exponentiated, _) in x.scores.items():
                        for operand in values:
                            self._join(attention, sides, exponentiated, operand, name, i)
                if name in _COMPARING and any(x.inputs & self._data for x in values if not x.scores):
                    for attention in result.scores:
                        attention.has_threshold = True
            return result
        result.evaluate = evaluation(equation, values, result)
        result.constant = None if result.evaluate else self._constant_part(equation, values, path)
        return result

    def _constant_part(self, equation: Any, values: list[_Value], path: str) -> _Value | None:
        """Returns the constant part of a mask that inputs limit, as padding does."""
        if any(x.constant for x in values):
            constant = self._elementwise(equation, [x.constant or x for x in values], path)
            return constant if constant.evaluate else constant.constant
        constants = [x for x in values if x.evaluate is not None and x.is_pairwise]
        return constants[0] if constants and equation.primitive.name == "and" else None

    def _cudnn(self, equation: Any, values: list[_Value], path: str, times: int) -> list[_Value]:
        """Notes dense attention that cuDNN computes, of `jax.nn.dot_product_attention` on arrays [B, T, N, H]."""
        (batch, q_len, heads, _), (kv_len, *_), source = values[0].shape, values[1].shape[1:], self._source(equation)
        if _BACKWARD not in path and not self._trial and not source.is_ours:
            shape, scopes = (batch, heads, q_len, kv_len), split_marks(path)[0]
            attention = DenseAttention(shape, values[0].dtype, scopes, source, times, {}, q_len=q_len, kv_len=kv_len)
            attention.head_size = values[0].shape[3]
            attention.scale = equation.params.get("scale", attention.head_size**-0.5)
            self.attention.append(attention)
        return self._unknown(equation, values)

    def _product(self, equation: Any, values: list[_Value], path: str, times: int) -> _Value:
        """Returns the result of a product: scores, attention's output, or neither."""
        left, right = values
        contracted, batch = equation.params["dimension_numbers"]
        result = self._elementwise(equation, values, path)
        if _BACKWARD in path:
            return result
        for attention in result.scores:
            attention.mixes_heads = True
        for weights, axes, shared, value in (
            (left, contracted[0], batch[0], right),
            (right, contracted[1], batch[1], left),
        ):
            products = [x for x in weights.scores if self._is_attention(x, weights, axes, shared, value)]
            # Terms of positions may join the scores: those of two arrays of data come first.
            products.sort(key=lambda x: not all(side.inputs & self._data for side in x.operands.values()))
            if products and not self._trial and products[0] not in self.attention:
                self.attention.append(products[0])
        free = [
            [i for i, n in enumerate(x.shape) if n > 1 and i not in (*contracted[k], *batch[k])]
            for k, x in enumerate(values)
        ]
        if not all(free):
            return result
        result.built = source = self._source(equation)
        if self._may_be_scores(left, right) and not source.is_ours:
            origins = sources(equation, [x.shape for x in values], result.shape)
            sides = tuple(
                "" if len(axes) > 1 or n == 1 else (_LEFT, _RIGHT)[axes[0][0]]
                for axes, n in zip(origins, result.shape, strict=True)
            )
            scopes, operands = split_marks(path)[0], {_LEFT: left, _RIGHT: right}
            attention = DenseAttention(result.shape, result.dtype, scopes, source, times, operands, bool(batch[0]))
            attention.head_size = math.prod(left.shape[i] for i in contracted[0])
            result.scores[attention] = _Scores(sides)
        return result

    def _may_be_scores(self, left: _Value, right: _Value) -> bool:
        """True if an operand is data, and none is a weight by itself, which projects or routes the other."""
        are_data = [bool(x.inputs & self._data) for x in (left, right)]
        return any(are_data) and all(x or len(y.inputs) != 1 for x, y in zip(are_data, (left, right), strict=True))

    def _is_attention(
        self, attention: DenseAttention, weights: _Value, axes: Sequence[int], shared: Sequence[int], value: _Value
    ) -> bool:
        """True if values are summed over the keys of scores; notes which side that is, and the lengths."""
        sides, exponentiated, _ = weights.scores[attention]
        summed = {sides[i] for i in axes if weights.shape[i] > 1}
        if not exponentiated or attention in value.scores or len(summed) != 1 or not (key_side := summed.pop()):
            return False
        key = attention.operands[key_side]
        query = attention.operands[_LEFT if key_side == _RIGHT else _RIGHT]
        # Values have no axis of the queries: experts compute each token's output by itself.
        rows = [n for i, n in enumerate(weights.shape) if i not in (*axes, *shared) and sides[i] not in ("", key_side)]
        if not rows or max(rows) == 1 or any(is_block(weights.axes[i]) for i in axes):
            return False
        if not (key.inputs & self._data and value.inputs & self._data) or self._is_table(attention, query, key, value):
            return False
        # A query that is an array by itself meets keys and values that are: else it projects or routes them.
        are_bare = len(query.inputs) == 1 and len(key.inputs) == len(value.inputs) == 1
        if len(query.inputs) == 1 and not are_bare and not query.inputs <= key.inputs:
            return False
        attention.key_side, attention.q_len = key_side, math.prod(sorted(rows)[-len(axes) :])
        attention.kv_len = math.prod(weights.shape[i] for i in axes)
        attention.has_sinks = attention.has_sinks or key_side in attention.extended
        for mask in attention.masks:
            mask.keys_first = key_side == _LEFT
        return True

    def _is_table(self, attention: DenseAttention, query: _Value, key: _Value, value: _Value) -> bool:
        """True if keys are a table that is an input, as of embeddings: no weight makes them, and no batch has them."""
        if attention.has_batch or query.inputs & key.inputs & self._data or not key.inputs <= self._data:
            return False
        return value.inputs <= key.inputs or len(key.inputs) == 1 < len(query.inputs)

    def _join(
        self,
        attention: DenseAttention,
        sides: tuple[str, ...],
        exponentiated: bool,
        x: _Value,
        name: str,
        operand: int,
    ) -> None:
        """Notes a mask, a bias or dropout that joins scores: an array that differs by query and by key."""
        if x.scores or len(x.shape) != len(sides):
            return
        constant = x.constant or x
        pair = {side: i for i, side in enumerate(sides) if side and x.shape[i] > 1 and differs(constant.axes[i])}
        if len(pair) < 2:
            return
        if x.is_random:
            attention.has_dropout = attention.has_dropout or exponentiated
            return
        # A constant array is there already; others are computed.
        size = constant.shape[pair[_LEFT]] * constant.shape[pair[_RIGHT]]
        if constant.built is not None:
            size = math.prod(constant.distinct_shape)
        is_large = constant.evaluate is not None and size > _MAX_EVALUATED
        origin = "an input" if x.inputs & self._data else "a parameter" if x.evaluate is None else "a constant"
        allowed = functools.partial(allowed_pairs, constant, name, operand, (pair[_LEFT], pair[_RIGHT]))
        attention.masks.append(
            DenseMask(
                tuple(n for n in x.distinct_shape if n > 1),
                x.dtype,
                origin if x.built is None else x.built.line,
                x.constant is not None,
                is_large,
                (lambda: None) if is_large else allowed,
            )
        )


def _joined(x: _Value, y: _Value) -> _Value:
    """Returns what is known of a value that is one of two."""
    axes = [min(filter(differs, pair), key=longest, default=pair[0]) for pair in zip(x.axes, y.axes, strict=True)]
    known = {"is_random": x.is_random and y.is_random, "built": x.built or y.built}
    return _Value(x.shape, x.dtype, axes, x.inputs | y.inputs, x.scores | y.scores, **known)


def _scores(name: str, values: list[_Value], origins: list[list[tuple[int, int]]], shape: tuple[int, ...]) -> Any:
    """Returns the scores that a result is a function of: those of its operands that keep axes of both sides."""
    scores: dict[DenseAttention, _Scores] = {}
    for k, x in enumerate(values):
        for attention, (sides, exponentiated, factor) in x.scores.items():
            kept = []
            for n, origin in zip(shape, origins, strict=True):
                axes = [i for operand, i in origin if operand == k]
                resized = name not in ("reshape", *_RESIZING) and any(x.shape[i] != n for i in axes)
                side = {sides[i] for i in axes}
                kept.append(side.pop() if len(side) == 1 and not resized and n > 1 else "")
            if {_LEFT, _RIGHT} <= set(kept):
                if name in ("mul", "div") and not exponentiated:
                    factor = _scaled(factor, name, k, values[1 - k])
                elif name in ("exp", "exp2") and not exponentiated:
                    exponentiated = True
                    attention.scale = factor if name == "exp" or factor is None else factor * math.log(2)
                if attention in scores:  # one operand may be a maximum or a sum of the scores
                    first = scores[attention]
                    kept = [a or b for a, b in zip(first.sides, kept, strict=True)]
                    exponentiated, factor = exponentiated or first.exponentiated, first.factor
                scores[attention] = _Scores(tuple(kept), exponentiated, factor)
    return scores


def _scaled(factor: float | None, name: str, operand: int, x: _Value) -> float | None:
    """Returns the factor of scores, which are an operand of a product or a quotient with another value."""
    if x.scores or x.is_pairwise:
        return factor
    if factor is None or x.evaluate is None or math.prod(x.distinct_shape) > 1 or (name == "div" and operand == 1):
        return None
    with outside_trace():
        number = float(np.asarray(x.evaluate()).item())
    return factor * number if name == "mul" else factor / number


def _note_softmax(equation: Any, values: list[_Value], result: _Value) -> None:
    """Notes the sums of a softmax, its sinks, and soft caps, at an equation on scores or their sums."""
    name, params = equation.primitive.name, equation.params
    for x in values:
        for attention, (sides, exponentiated, _) in x.scores.items():
            if name == "reduce_sum" and exponentiated:
                removed = {sides[i] for i in params["axes"] if x.shape[i] > 1}
                attention.softmax = removed if attention.softmax is None else attention.softmax
                result.summed |= {attention}
            elif name == "tanh" and not exponentiated:
                attention.has_soft_cap = True
            elif name in ("concatenate", "pad") and not exponentiated:
                extended = {side for side, n, size in zip(sides, x.shape, result.shape, strict=True) if n < size}
                attention.extended |= extended
    summed = frozenset().union(*(x.summed for x in values))
    if name in (*RESHAPING, "convert_element_type"):
        result.summed = summed
    elif name == "add":
        terms = [x for x in values if not x.summed and not x.scores]
        for attention in summed if any(not _is_tiny(x) for x in terms) else ():
            attention.has_sinks = True


def _is_tiny(x: _Value) -> bool:
    """True for the constant that keeps a sum from 0."""
    if x.evaluate is None or math.prod(x.distinct_shape) > 1:
        return False
    with outside_trace():
        return bool(np.asarray(x.evaluate()).item() < _TINY)
