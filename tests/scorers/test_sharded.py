"""Scorers on several devices. Their number is fixed when JAX starts, so they have a process: this file as a program."""

import itertools
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers.ops.select import select_blocks
from sparse_layers.scorers import base
from tests.arrays import inputs
from tests.programs import on_devices

T, SPEC = 192, P("data", None, "tensor")
SCORERS = sl.MoBA(16, 3), sl.InfLLM(16, 4, local=2, dense_below=0, pool_size=16, pool_stride=8)


def check(scorer, kv_heads, kind):
    """Asserts that results are those of one device, and that only what must is moved."""
    arrays = [inputs(2, T, heads, 16, seed=seed) for seed, heads in enumerate((12, kv_heads, kv_heads))]
    ids = np.tile(np.arange(T, dtype=np.int32) // 70, (2, 1))
    right = jax.jit(sl.make_attention_fn(scorer, T, segment_ids=ids))(*arrays)
    named = SPEC if kind == AxisType.Auto else None
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        specs = SPEC, *[SPEC if kv_heads % 4 == 0 else P("data")] * 2
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        ids = jax.device_put(ids, NamedSharding(mesh, P("data")))

        @jax.jit
        def attend(ids, *arrays):
            return sl.make_attention_fn(scorer, T, query_sharding=named, segment_ids=ids)(*arrays)

        program = attend.lower(ids, *arrays).compile()
        np.testing.assert_allclose(program(ids, *arrays), right, atol=1e-5)
        moved = {*re.findall(r"all-\w+|collective-permute", program.as_text())}
        together = not scorer.per_query_head and kv_heads % 4
        assert moved <= ({"all-gather"} if together else set()), moved


def check_index(kind):
    """The same of the choices of an index, whose queries lie on several devices, and its key on all."""
    scorer, arrays = sl.MSA(16, 3), [inputs(2, T, heads, 16, seed=heads) for heads in (12, 1)]
    right, named = jax.jit(scorer.select)(*arrays).ids, SPEC if kind == AxisType.Auto else None
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (SPEC, P("data")), strict=True)]
        actual = jax.jit(lambda *x: select_blocks(scorer, *x, query_sharding=named).ids)(*arrays)
        np.testing.assert_array_equal(actual, right)
        assert len({str(shard.index) for shard in actual.addressable_shards}) == 8


def main():
    """All scorers, with one turn and with several."""
    for scorer, kv_heads, kind in itertools.product(SCORERS, (4, 6, 1), (AxisType.Auto, AxisType.Explicit)):
        base._SCORE_BYTES = 1 << (28 if kv_heads == 4 else 15)
        check(scorer, kv_heads, kind)
        print("fine", flush=True)
    for kind in (AxisType.Auto, AxisType.Explicit):
        check_index(kind)
        print("fine", flush=True)


def test_devices_select_independently():
    assert on_devices(8, __file__).split() == ["fine"] * 14


if __name__ == "__main__":
    main()
