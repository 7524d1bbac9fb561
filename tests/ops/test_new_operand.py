"""A new operand by the recipe of CONTRIBUTING.md, in this file alone: a bias of each key, added to its logits.

`jax.vmap`, sharding and spread sequences learn of it from its row in the table. On several devices this file is a
program, as the number of devices is fixed when JAX starts.
"""

import collections
import contextlib
import functools
import math
import sys
import traceback
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers.ops import attention, implementations
from sparse_layers.ops.kernels import operands as table
from sparse_layers.ops.kernels import reference, xla
from sparse_layers.ops.kernels.transforms import vmap_as_batch
from sparse_layers.ops.planning.context_parallel import plan_exchanges
from tests.ops.cases import COMPILER
from tests.programs import on_devices

B, T, H = 4, 48, 8
STRIDED = sl.preset("sparse_transformer_strided", stride=8)
AXES = ["b s k", "s k", "b s"]

# 1. A field of the operands, a row of the table, and a field of the gradients.
Operands = collections.namedtuple("Operands", (*table.Operands._fields, "bias"), defaults=(None,) * 7)
Gradients = collections.namedtuple("Gradients", (*table.Gradients._fields, "bias"))


# 2. Forward and backward of each implementation.
def biased(backend, axes):
    """The implementation with a bias: a further feature of keys, which queries have as 1 / scale."""

    def append_bias(call, operands):
        """Operands with the bias in query and key, and the transpose of its broadcast to all of ``axes``."""
        q, k = operands.query, operands.key
        missing = [i for i, name in enumerate("bsk") if name not in axes]
        bias, pull = jax.vjp(lambda x: jnp.broadcast_to(jnp.expand_dims(x, missing), k.shape[:3]), operands.bias)
        ones = jnp.full((*q.shape[:3], 1), 1 / call.scale, q.dtype)
        key = jnp.concatenate([k, bias[..., None]], axis=3)
        arrays = operands._replace(query=jnp.concatenate([q, ones], axis=3), key=key)
        return table.Operands(*arrays[: len(table.Operands._fields)]), pull

    def forward(call, operands):
        return vmap_as_batch(lambda x: backend.forward(call, append_bias(call, x)[0]), math.inf, operands)

    def backward(call, operands, *by_query):
        def gradients(operands, *by_query):
            arrays, pull = append_bias(call, operands)
            dq, dk, dv, _ = backend.backward(call, arrays, *by_query)
            return Gradients(dq[..., :-1], dk[..., :-1], dv, None, *pull(dk[..., -1]))

        return vmap_as_batch(gradients, math.inf, operands, *by_query)

    return types.SimpleNamespace(**vars(backend) | {"forward": forward, "backward": backward})


@contextlib.contextmanager
def recipe(axes):
    row = table.Operand(axes, "bias", "backend", backends=("xla", "reference"))
    names = {"xla": biased(xla, axes), "reference": biased(reference, axes)}
    with mock.patch.dict(table.OPERANDS, bias=row), mock.patch.dict(implementations.IMPLEMENTATIONS, names):
        yield


# 3. An argument of the op.
def attend(q, k, v, bias, sinks, mask, **options):
    """The op with a bias: (out, lse)."""
    with mock.patch.object(attention, "Operands", lambda *arrays: Operands(*arrays, bias)):
        return sl.block_sparse_attention(q, k, v, mask, sinks=sinks, return_lse=True, **options)


# --- the formula -----------------------------------------------------------------------------------------------------


def formula(q, k, v, bias, sinks, allowed, axes):
    """(out, lse) by the definition."""
    groups = q.shape[2] // k.shape[2]
    bias = jnp.expand_dims(bias, [i for i, name in enumerate("bsk") if name not in axes])
    k, v, bias = (jnp.repeat(x, groups, axis=2) for x in (k, v, jnp.broadcast_to(bias, k.shape[:3])))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 + bias.swapaxes(1, 2)[:, :, None]
    logits = jnp.where(allowed, logits, -jnp.inf)
    columns = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([logits, columns], axis=3), axis=3)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(logits - lse[..., None]), v), lse.swapaxes(1, 2)


def arrays(heads, axes, t=T, leading=()):
    """Query, key, value, bias, sinks, and cotangents of out and lse, with ``leading`` axes before the others."""
    draw, (n, k), sizes = np.random.default_rng(0).standard_normal, heads, {"b": B, "s": t, "k": heads[1]}
    bias = tuple(sizes[name] for name in axes.split())
    shapes = [(B, t, n, H), (B, t, k, H), (B, t, k, H), bias, (n,), (B, t, n, H), (B, t, n)]
    return [draw((*leading, *shape)).astype(np.float32) for shape in shapes]


def pairs(masks, heads, t=T, ids=None):
    """The pairs that may attend: bool [B, N, T, S]."""
    dense = np.stack([mask.dense(t) for mask in sl.as_masks(masks)])
    allowed = np.tile(dense, (heads // len(dense), 1, 1))[None]
    return allowed if ids is None else allowed & (ids[:, :, None] == ids[:, None])[:, None]


def answers(function, *arrays):
    """(out, lse) and the gradients of query, key, value, bias and sinks."""
    *args, dout, dlse = arrays
    results, pull = jax.vjp(function, *args)
    return *results, *pull((dout, dlse))


def expected(allowed, axes, *arrays, change=lambda f: f):
    """`answers` of the formula in float64."""
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in arrays)
        function = functools.partial(formula, allowed=allowed, axes=axes)
        return jax.tree.map(np.asarray, change(functools.partial(answers, function))(*wide))


def agree(results, wanted):
    names = "out", "lse", "dquery", "dkey", "dvalue", "dbias", "dsinks"
    for name, ours, theirs in zip(names, results, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5, rtol=1e-4, err_msg=name)


# --- one device ------------------------------------------------------------------------------------------------------

MASKS = sl.Causal(), STRIDED
IDS = np.sort(np.random.default_rng(1).integers(0, 3, (B, T)), axis=1).astype(np.int32)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_values_and_gradients(implementation, axes):
    args, allowed = arrays((4, 2), axes), pairs(MASKS, 4, ids=IDS)
    with recipe(axes):
        op = functools.partial(attend, mask=MASKS, implementation=implementation, segment_ids=IDS)
        results = jax.jit(functools.partial(answers, op), compiler_options=COMPILER)(*args)
    agree(results, expected(allowed, axes, *args))


@pytest.mark.parametrize("axes", AXES)
def test_other_implementations_refuse_it(axes):
    with recipe(axes), pytest.raises(NotImplementedError, match=r"^triton: it does not know bias; "):
        attend(*map(jnp.asarray, arrays((4, 2), axes)[:5]), mask="causal", implementation="triton")


@pytest.mark.parametrize("mapped", ["all", "bias", "query"])
@pytest.mark.parametrize("axes", AXES)
def test_under_vmap(axes, mapped):
    """Lists of run time become those of more batch entries; a gradient without a batch axis is each entry's own."""
    wide, args = arrays((4, 2), axes, leading=(2,)), arrays((4, 2), axes)
    which = {"all": range(7), "bias": (3,), "query": (0, 5, 6)}[mapped]
    args = [wide[i] if i in which else x for i, x in enumerate(args)]
    change = functools.partial(jax.vmap, in_axes=[0 if i in which else None for i in range(7)])
    with recipe(axes):
        op = functools.partial(attend, mask=sl.Causal(), implementation="xla", segment_ids=IDS)
        results = jax.jit(change(functools.partial(answers, op)), compiler_options=COMPILER)(*args)
    agree(results, expected(pairs(sl.Causal(), 4, ids=IDS), axes, *args, change=change))


# --- eight devices ---------------------------------------------------------------------------------------------------

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FIXED = sl.preset("sparse_transformer_fixed", stride=8, summary=2)
# Masks, query heads and key heads, tokens, and the sharding of query; the mesh is 2 x 2 x 2.
CASES = {
    "batch and heads": (MASKS, (4, 2), T, P("data", None, "heads")),
    "key heads straddle": (MASKS, (8, 2), T, P(None, None, ("data", "heads"))),
    "a sequence": (STRIDED, (4, 2), T, P("data", "context", "heads")),
    "a sequence in two parts": (FIXED, (4, 2), T, P(None, ("data", "context"), "heads")),
    "a sequence in two parts, one by residue": (STRIDED, (4, 4), 128, P(None, ("data", "context"), "heads")),
    "all keys": (sl.Full(), (4, 2), T, P("data", "context", "heads")),
}
RAGGED = {"ragged": (sl.Causal() & sl.Window(9), (4, 2), 45, P("data", ("context", "heads")))}


def check(kind, masks, heads, t, spec, *, axes, named, implementation):
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "heads"), axis_types=(kind,) * 3)
    args = arrays(heads, axes, t)
    specs = [spec, *[P()] * 4, spec, spec]
    if t % 4:
        specs = [P()] * 7
    options = {"query_sharding": spec} if named else {}
    with jax.set_mesh(mesh), recipe(axes):
        op = functools.partial(attend, mask=masks, implementation=implementation, **options)
        placed = [jax.device_put(x, NamedSharding(mesh, by)) for x, by in zip(args, specs, strict=True)]
        results = jax.jit(functools.partial(answers, op), compiler_options=COMPILER)(*placed)
        results = jax.tree.map(np.asarray, results)
    agree(results, expected(pairs(masks, heads[0], t), axes, *args))


def main(kind):
    """Prints what fails."""
    # Axes take turns; where a sharding may be named or not, a case meets two.
    for i, (name, case) in enumerate({**CASES, **(RAGGED if kind == AUTO else {})}.items()):
        for named in (False, True)[: 1 + (kind == AUTO)]:
            axes = AXES[(i + named) % len(AXES)]
            try:
                implementation = "reference" if name == "all keys" else "xla"
                check(kind, *case, axes=axes, named=named, implementation=implementation)
            except Exception:
                print(f"--- {name}, {axes}, {named}\n{traceback.format_exc()}")


def test_sequences_in_two_parts_have_two():
    """Sinks count once there, and both parts add to gradients."""
    for masks, (n, k), t, _ in (case for name, case in CASES.items() if "two parts" in name):
        assert len(plan_exchanges(sl.as_masks(masks), t, 4, "xla", n // k)) == 2


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_eight_devices(kind):
    assert on_devices(8, __file__, kind) == ""


if __name__ == "__main__":
    main(getattr(AxisType, sys.argv[1]))
