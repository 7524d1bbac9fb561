"""Inputs of a diagnosed model: its call as a function of all arrays, and which of these are data."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.foreign import shown
from .subjects import is_nnx

_ARRAYS = jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct
_KEY_SIZES = 2, 4  # of random keys in uint32
_IDS = "int32", "int64", "bool"  # tokens, segments and masks of a batch; quantized weights are int8 or uint8


class TracedInputs(NamedTuple):
    """The call of a model as a function of its arrays."""

    call: Callable[..., None]
    arrays: list[Any]
    data: list[int]  # the numbers of the arrays that are data
    note: str  # which inputs were taken for data, if weights may be among the inputs; else ""


def traced_inputs(model: Callable[..., Any], inputs: tuple[Any, ...]) -> TracedInputs:
    """Returns a call of the model as a function of all its arrays."""
    is_partial = isinstance(model, functools.partial)
    bound = (model.func, model.args, model.keywords) if is_partial else (model, (), {})
    has_weights = any(_is_tree(x) for x in (bound[0], *bound[1], *bound[2].values()))
    of_inputs, note = _are_data(inputs, has_weights, any(_is_tree(x) for x in closed_over(model)))
    leaves, structure = jax.tree.flatten((bound, inputs))
    are_data = [False] * len(jax.tree.leaves(bound))
    for x, is_data in zip(inputs, of_inputs, strict=True):
        are_data += [is_data] * len(jax.tree.leaves(x))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
    if not any(isinstance(x, _ARRAYS) for x in jax.tree.leaves(inputs)):
        raise ValueError(f"inputs must hold an array or a jax.ShapeDtypeStruct at least, got {shown(inputs)}")

    def call(*values: Any) -> None:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        (called, first, options), rest = jax.tree.unflatten(structure, filled)
        _check_result(called(*first, *rest, **options))

    return TracedInputs(
        call, [leaves[i] for i in places], [number for number, i in enumerate(places) if are_data[i]], note
    )


def closed_over(model: Any) -> list[Any]:
    """Returns the variables that a function closes over or reads as globals, and the object of a method."""
    function = inspect.unwrap(model.func if isinstance(model, functools.partial) else model)
    if inspect.ismethod(function):
        return [function.__self__]
    if not inspect.isfunction(function):
        return []
    variables = inspect.getclosurevars(function)
    return [*variables.nonlocals.values(), *variables.globals.values()]


def _check_result(result: Any) -> None:
    """Refuses results that are computed later, outside of the trace."""
    if inspect.iscoroutine(result):
        result.close()
    elif not inspect.isgenerator(result) and not inspect.isasyncgen(result):
        return
    kind = "a generator of results" if inspect.isgenerator(result) else "an async function"
    to_do = "sl.diagnose(lambda *x: list(model(*x)), ...)" if inspect.isgenerator(result) else "a plain function"
    raise TypeError(f"model must compute when it is called, got {kind}: write {to_do}")


def _are_data(inputs: Sequence[Any], has_weights: bool, closes_over: bool) -> tuple[list[bool], str]:
    """Returns which inputs are data, and a note if weights may be among the inputs.

    Arrays are data, and modules are weights. Random keys and scalars count for neither. Other trees are data if the
    model or a module has the weights, or the model closes over a tree. Else the first tree is the weights, and the last
    one is a batch.
    """
    if iterators := [type(x).__name__ for x in inputs if isinstance(x, Iterator)]:
        raise TypeError(
            f"inputs must be pytrees of arrays, got {iterators[0]}: write next(batches) for one batch of it"
        )
    has_weights = has_weights or any(_is_module(x) and _is_tree(x) for x in inputs)
    trees = [i for i, x in enumerate(inputs) if _is_tree(x) and not _is_module(x)]
    arrays = {i for i, x in enumerate(inputs) if isinstance(x, _ARRAYS) and _counted(x)}
    are_elsewhere = has_weights or closes_over
    data = arrays | {i for i in trees if are_elsewhere or _mostly(inputs[i], lambda x: x.dtype in _IDS)}
    if not are_elsewhere and trees:
        data |= _batches(inputs, trees, data)
    note = ""
    if not has_weights and trees and len({*trees, *arrays}) > 1:
        names = {kind: _listed(sorted(numbers)) for kind, numbers in (("data", data), ("weights", {*trees} - data))}
        note = "; ".join(f"taken for {kind}: {text}" for kind, text in names.items() if text)
        note += " (bind weights by functools.partial(model, weights) if this is wrong)"
    return [i in data for i in range(len(inputs))], note


def _batches(inputs: Sequence[Any], trees: Sequence[int], data: set[int]) -> set[int]:
    """Returns which trees are data where the first one may be the weights."""
    structures = {i: jax.tree.structure(inputs[i]) for i in trees}
    weights = next((i for i in trees if i not in data), trees[0])
    rest = [i for i in trees if i not in data and structures[i] != structures[weights]]  # also no averages of them
    sizes = {x.shape[0] for i in data for x in _counted(inputs[i])}
    batches = {i for i in rest if _mostly(inputs[i], lambda x: x.shape[0] in sizes)} | {*rest[-1:]}
    if any(i < weights for i in data):  # data come first, as a token before its cache
        batches |= {weights} if _mostly(inputs[weights], lambda x: x.shape[0] in sizes) else set()
    return batches or ({i for i in trees if structures[i] == structures[trees[-1]]} if not data else set())


def _is_tree(x: Any) -> bool:
    """True if an object holds arrays that are no keys and no scalars, and is none itself."""
    return not isinstance(x, _ARRAYS) and bool(_counted(x))


def _is_module(x: Any) -> bool:
    """True for models, and for states, optimizers and random streams of NNX."""
    return callable(x) or is_nnx(x)


def _counted(tree: Any) -> list[Any]:
    """Returns the arrays of a tree without random keys and scalars."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, _ARRAYS) and x.shape and not _is_key(x)]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == "uint32" and x.shape[-1] in _KEY_SIZES)


def _mostly(tree: Any, rule: Callable[[Any], bool]) -> bool:
    """True if a rule holds for more than half of a tree's arrays."""
    arrays = _counted(tree)
    return 2 * sum(map(rule, arrays)) > len(arrays)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"inputs[{i}]" for i in numbers)
