"""Dense attention in a jaxpr: scores of queries and keys that pass through exp and then multiply values.

The jaxpr is read once, forward. Each value keeps which arrays it depends on, of which longer axes its axes are blocks,
and of which scores it is a function pair by pair. The equations of gradients are passed over: what they compute again
belongs to attention of the forward pass.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from ..masks.algebra import Array, Mask
from ..ops.planning.blocks import outside_trace
from ..ops.recorded_calls import split_marks
from .jaxpr_axes import Axis, differs, full_axis, is_block, longest, reshaped, sources
from .recognition import recognize
from .source_lines import Source, source_of

_MAX_EVALUATED = 1 << 26  # elements of a mask that is computed to recognize it, 8192 x 8192
_HIDDEN = -1e4  # a bias below it hides a pair
_JOINING = {"add", "sub", "mul", "div", "select_n", "and", "or", "min", "max"}
_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator"}
_RESIZING = {"concatenate", "pad", "slice", "dynamic_slice"}  # these may add sinks to scores, and remove them
_BACKWARD = "transpose("  # in the name stacks of gradients
_ELEMENTWISE = _JOINING | {"not", "xor", "eq", "ne", "lt", "le", "gt", "ge", "neg", "convert_element_type"}
_RESHAPING = {"broadcast_in_dim", "reshape", "squeeze"}
_LEFT, _RIGHT = "left", "right"  # sides of the product that makes scores


@dataclasses.dataclass(eq=False)
class DenseMask:
    """An array of pairs of queries and keys that joins scores."""

    shape: tuple[int, ...]
    dtype: str
    primitive: str  # that joins it: "select_n" for a mask, "add" for a bias
    source: Source | None  # the line that built it; None if it is an input
    is_partial: bool  # True if inputs hide more pairs than ``allowed`` does
    is_large: bool  # True if it is constant, and too large to compute it
    # Computes the bool array [T, S] of allowed pairs; returns None if inputs decide it or it is no mask.
    allowed: Callable[[], np.ndarray | None]

    @functools.cached_property
    def pattern(self) -> Mask | None:
        """Masks that allow the same pairs: an `Array` if no expression is known; None if inputs decide them."""
        pairs = self.allowed()
        if pairs is None:
            return None
        array = Array(pairs)
        rewritten = recognize(array, len(pairs)) if pairs.shape[0] == pairs.shape[1] else None
        return array if rewritten is None else rewritten[0]


@dataclasses.dataclass(eq=False)
class DenseAttention:
    """Scores of pairs, the product of two arrays. They are attention once their exponentials multiply a third."""

    shape: tuple[int, ...]  # shape and dtype of the scores
    dtype: str
    path: str  # scopes of modules, as of Linen and Haiku
    source: Source
    times: int  # how often it is computed: scans repeat it
    operands: dict[str, "_Value"]  # by their sides
    q_len: int = 0
    kv_len: int = 0
    has_dropout: bool = False
    masks: list[DenseMask] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class SparseCall:
    """A call of the op in the jaxpr."""

    numbers: list[int]  # in `recorded_calls`; the last one is that of the op
    source: Source
    times: int


@dataclasses.dataclass(eq=False)
class _Value:
    """A variable of a jaxpr, with what is known of it."""

    shape: tuple[int, ...]
    dtype: str
    axes: Sequence[Axis]
    inputs: frozenset[int] = frozenset()  # numbers of the arrays that it depends on; random bits depend on none
    # For each attention whose scores it is a function of: the side of each axis, "" for none, and whether it is a
    # function of their exponentials.
    scores: dict[DenseAttention, tuple[tuple[str, ...], bool]] = dataclasses.field(default_factory=dict)
    is_random: bool = False  # True if it depends on random bits and constants alone
    built: Source | None = None  # of the equation that made it differ along two axes; None if no equation did
    is_partial: bool = False  # True if `evaluate` computes its constant part, which a mask of inputs limits
    stored: "_Value | None" = None  # the smaller value that it repeats along other axes, if it does
    evaluate: Callable[[], Any] | None = None  # computes it; None if it depends on inputs

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_pairwise(self) -> bool:
        """True if values differ along two axes at least."""
        return sum(map(differs, self.axes)) >= 2


def find_attention(
    closed: Any, num_weights: int, op_calls: Collection[int]
) -> tuple[list[DenseAttention], list[SparseCall]]:
    """Finds dense attention and calls of the op in a traced model.

    Args:
      closed: the model's closed jaxpr, from `jax.make_jaxpr`. JAX 0.12 has no class of its own for it.
      num_weights: number of its first inputs that are weights, not data.
      op_calls: the numbers of the op's calls in `recorded_calls`.
    """
    reader = _Reader(num_weights, len(closed.jaxpr.invars), op_calls)
    values = [_fresh(v.aval, [i]) for i, v in enumerate(closed.jaxpr.invars)]
    reader.read(closed, values, "", 1)
    return reader.attention, reader.calls


def _fresh(aval: Any, inputs: Sequence[int] | frozenset[int] = (), **known: Any) -> _Value:
    """Returns a value of which nothing but its inputs is known. Scalars are no inputs: they are temperatures, rates."""
    shape = getattr(aval, "shape", ())
    numbers = frozenset(inputs) if math.prod(shape) > 1 else frozenset()
    return _Value(shape, str(getattr(aval, "dtype", "")), [full_axis(n) for n in shape], numbers, **known)


class _Reader:
    """Reads a jaxpr and all that its equations call."""

    def __init__(self, num_weights: int, num_inputs: int, op_calls: Collection[int]):
        self.attention: list[DenseAttention] = []
        self.calls: list[SparseCall] = []
        self._data = frozenset(range(num_weights, num_inputs))
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
                is_new = name == "concatenate" and j == params["dimension"]
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
        shapes = [x.shape for x in values]
        origins = sources(equation, shapes, result.shape)
        result.scores = _scores(name, values, origins, result.shape)
        if any(x.is_random for x in values) and not result.inputs:
            result.is_random = True
        pairwise = [x for x in values if x.is_pairwise]
        if pairwise:
            result.built = pairwise[0].built
        elif result.is_pairwise:
            result.built = self._source(equation)
        _note_evaluation(equation, values, result)
        if name in _JOINING and _BACKWARD not in path:
            for i, x in enumerate(values):
                for attention, (sides, exponentiated) in x.scores.items():
                    for operand in values:
                        _join(attention, sides, exponentiated, operand, name, i)
        return result

    def _cudnn(self, equation: Any, values: list[_Value], path: str, times: int) -> list[_Value]:
        """Notes dense attention that cuDNN computes, of `jax.nn.dot_product_attention` on arrays [B, T, N, H]."""
        (batch, q_len, heads, _), (kv_len, *_), source = values[0].shape, values[1].shape[1:], self._source(equation)
        if _BACKWARD not in path and not self._trial and not source.is_ours:
            shape, scopes = (batch, heads, q_len, kv_len), split_marks(path)[0]
            self.attention.append(DenseAttention(shape, values[0].dtype, scopes, source, times, {}, q_len, kv_len))
        return self._unknown(equation, values)

    def _product(self, equation: Any, values: list[_Value], path: str, times: int) -> _Value:
        """Returns the result of a product: scores, attention's output, or neither."""
        left, right = values
        contracted, batch = equation.params["dimension_numbers"]
        result = self._elementwise(equation, values, path)
        if _BACKWARD in path:
            return result
        for weights, axes, value in ((left, contracted[0], right), (right, contracted[1], left)):
            for attention, (sides, exponentiated) in weights.scores.items():
                if exponentiated and attention not in value.scores:
                    self._attends(attention, weights, sides, axes, value)
        free = [
            [i for i, n in enumerate(x.shape) if n > 1 and i not in (*contracted[k], *batch[k])]
            for k, x in enumerate(values)
        ]
        if all(free) and self._may_be_scores(left, right):
            origins = sources(equation, [x.shape for x in values], result.shape)
            sides = tuple(
                "" if len(axes) > 1 or n == 1 else (_LEFT, _RIGHT)[axes[0][0]]
                for axes, n in zip(origins, result.shape, strict=True)
            )
            source, (scopes, _) = self._source(equation), split_marks(path)
            if not source.is_ours:
                operands = {_LEFT: left, _RIGHT: right}
                attention = DenseAttention(result.shape, result.dtype, scopes, source, times, operands)
                result.scores[attention] = sides, False
        return result

    def _may_be_scores(self, left: _Value, right: _Value) -> bool:
        """True unless an operand is a weight, as that of a router: no data, or one array alone."""
        if not (left.inputs & self._data and right.inputs & self._data):
            return False
        few, many = sorted((left.inputs, right.inputs), key=len)
        are_alike = len(many) == 1 and len(left.shape) == len(right.shape)  # query and key without projections
        return len(few) > 1 or few <= many or are_alike

    def _attends(
        self, attention: DenseAttention, weights: _Value, sides: tuple[str, ...], axes: Sequence[int], value: _Value
    ) -> None:
        """Notes that weights multiply values, if they are summed over the keys of one side."""
        summed = {sides[i] for i in axes if weights.shape[i] > 1}
        if len(summed) != 1 or not (key := summed.pop()):
            return
        rows = [n for i, n in enumerate(weights.shape) if i not in axes and sides[i] not in ("", key)]
        is_bare = all(len(x.inputs) == 1 for x in attention.operands.values())
        if not rows or max(rows) == 1 or any(is_block(weights.axes[i]) for i in axes):
            return
        if (is_bare and len(value.inputs) > 1) or self._trial or attention in self.attention:
            return
        attention.q_len, attention.kv_len = max(rows), math.prod(weights.shape[i] for i in axes)
        if key == _LEFT:  # the product was written with the keys first
            attention.masks = [dataclasses.replace(x, allowed=_transposed(x.allowed)) for x in attention.masks]
        self.attention.append(attention)


def _joined(x: _Value, y: _Value) -> _Value:
    """Returns what is known of a value that is one of two."""
    axes = [min(filter(differs, pair), key=longest, default=pair[0]) for pair in zip(x.axes, y.axes, strict=True)]
    inputs, is_random = x.inputs | y.inputs, x.is_random and y.is_random
    return _Value(x.shape, x.dtype, axes, inputs, x.scores | y.scores, is_random, x.built or y.built)


def _scores(name: str, values: list[_Value], origins: list[list[tuple[int, int]]], shape: tuple[int, ...]) -> Any:
    """Returns the scores that a result is a function of: those of its operands that keep axes of both sides."""
    scores: dict[DenseAttention, tuple[tuple[str, ...], bool]] = {}
    for k, x in enumerate(values):
        for attention, (sides, exponentiated) in x.scores.items():
            kept = []
            for n, origin in zip(shape, origins, strict=True):
                axes = [i for operand, i in origin if operand == k]
                resized = name not in ("reshape", *_RESIZING) and any(x.shape[i] != n for i in axes)
                side = {sides[i] for i in axes}
                kept.append(side.pop() if len(side) == 1 and not resized and n > 1 else "")
            if {_LEFT, _RIGHT} <= set(kept):
                exponentiated = exponentiated or name in ("exp", "exp2") or scores.get(attention, ("", False))[1]
                scores[attention] = tuple(kept), exponentiated
    return scores


# --- masks -----------------------------------------------------------------------------------------------------------


def _join(
    attention: DenseAttention, sides: tuple[str, ...], exponentiated: bool, x: _Value, name: str, operand: int
) -> None:
    """Notes a mask, a bias or dropout that joins scores: an array that differs by query and by key."""
    if x.scores or len(x.shape) != len(sides):
        return
    varying = {side: i for i, side in enumerate(sides) if side and x.shape[i] > 1 and differs(x.axes[i])}
    if len(varying) < 2:
        return
    if x.is_random:
        attention.has_dropout = attention.has_dropout or exponentiated
        return
    stored = x.stored or x
    is_large = stored.evaluate is not None and stored.size > _MAX_EVALUATED
    allowed = functools.partial(_allowed, stored, name, operand)
    if varying[_LEFT] > varying[_RIGHT]:
        allowed = _transposed(allowed)
    attention.masks.append(DenseMask(stored.shape, stored.dtype, name, x.built, x.is_partial, is_large, allowed))


def _allowed(x: _Value, name: str, operand: int) -> np.ndarray | None:
    """Returns the pairs [T, S] that a mask allows; ``operand`` is the number of the scores in the equation."""
    by_pair = [slice(None) if differs(axis) else 0 for axis in x.axes]
    if x.evaluate is None or by_pair.count(slice(None)) != 2 or x.size > _MAX_EVALUATED:
        return None
    with outside_trace():
        pairs = np.asarray(x.evaluate())[tuple(by_pair)]
    if name == "select_n" and x.dtype == "bool":
        return pairs if operand == 2 else ~pairs
    is_mask = name == "add" and bool(np.all((pairs == 0) | (pairs < _HIDDEN)))
    return pairs == 0 if is_mask else None


def _transposed(allowed: Callable[[], np.ndarray | None]) -> Callable[[], np.ndarray | None]:
    def transposed():
        pairs = allowed()
        return None if pairs is None else pairs.T

    return transposed


def _varying(x: _Value) -> list[int]:
    """Returns the axes along which values differ."""
    return [i for i, axis in enumerate(x.axes) if differs(axis)]


def _is_reshaped(equation: Any, x: _Value, result: _Value) -> bool:
    """True if an equation repeats a value along new axes, or moves axes along which values do not differ."""
    if equation.primitive.name == "transpose":
        moved = [i for i in equation.params["permutation"] if differs(x.axes[i])]
        return moved == sorted(moved)
    sizes = [x.shape[i] for i in _varying(x)]
    return equation.primitive.name in _RESHAPING and sizes == [result.shape[i] for i in _varying(result)]


def _note_evaluation(equation: Any, values: list[_Value], result: _Value) -> None:
    """Notes how a result is computed, if constants alone decide it, and the smaller value that it repeats."""
    name, result.is_partial = equation.primitive.name, any(x.is_partial for x in values)
    if values and _is_reshaped(equation, values[0], result):
        result.stored = values[0].stored or values[0]

    def compute(operands, shape=None):
        arrays = (jnp.asarray(x.evaluate()) for x in operands)
        if shape is not None:
            arrays = (jnp.broadcast_to(x.reshape(()) if x.size == 1 else x, shape) for x in arrays)
        return equation.primitive.bind(*arrays, **equation.params)

    unknown = [x for x in values if x.evaluate is None]
    result.evaluate = None if unknown else functools.cache(functools.partial(compute, tuple(values)))
    small = tuple(x.stored or x for x in values)
    pairs = [x for x in small if _varying(x)]
    if name in _ELEMENTWISE and len(pairs) == 1 and all(x.size == 1 for x in small if x is not pairs[0]):
        evaluate = None if unknown else functools.cache(functools.partial(compute, small, pairs[0].shape))
        result.stored = dataclasses.replace(pairs[0], dtype=result.dtype, evaluate=evaluate)
    constant = [x for x in values if x.evaluate is not None and x.is_pairwise]
    if name == "and" and len(unknown) == len(constant) == 1:  # inputs hide more, as padding does
        result.evaluate, result.is_partial = functools.partial(_broadcast, constant[0], result.shape), True
        result.stored = constant[0].stored or constant[0]


def _broadcast(x: _Value, shape: tuple[int, ...]) -> Any:
    """Returns a constant value as an array of a shape."""
    assert x.evaluate is not None
    return jnp.broadcast_to(x.evaluate(), shape)
