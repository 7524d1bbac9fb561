"""The kernels, compiled by the TPUs' own compiler for every generation. No TPU is needed, for nothing runs.

This catches what interpreted kernels cannot show: operations and block shapes that a generation does not have, and
programs that exceed its vector or scalar memory.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import sparse_layers as sl
from sparse_layers.ops.planning import costs
from tests.ops.cases import candidates
from tests.programs import sampled

pytest.importorskip("libtpu", reason="needs libtpu: pip install 'sparse-layers[tpu-aot]'")
pytestmark = pytest.mark.usefixtures("all_passes")

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def kernels(
    generation,
    mask,
    t=512,
    *,
    heads=(2, 2),
    sizes=(128, 128),
    dtype="bfloat16",
    segments=False,
    order_ids=False,
    sinks=None,
    bias=None,
    backward=True,
    chosen=None,
    **options,
):
    """How many kernels of each name the program of out, lse and their gradients holds, compiled.

    A `jax.ShapeDtypeStruct` as mask is one known at run time; ``chosen`` are (granularity, block, G, k) of a selection.
    """
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[0]
    dynamic = isinstance(mask, jax.ShapeDtypeStruct)

    def program(arrays, mask_array, ids, order, selection, sink_logits, bias, dout, dlse):
        def call(arrays, bias):
            return sl.block_sparse_attention(
                *arrays,
                mask_array if dynamic else mask,
                segment_ids=ids,
                order_ids=order,
                selection=selection,
                sinks=sink_logits,
                bias=bias,
                implementation="pallas_tpu",
                return_lse=True,
                **options,
            )

        if not backward:
            return call(arrays, bias)
        answers, pullback = jax.vjp(call, arrays, bias)
        return answers, pullback((dout, dlse))

    (n, k), (h, hv) = heads, sizes
    selection = None
    if chosen is not None:
        granularity, block, lists, most = chosen
        ids = jax.ShapeDtypeStruct((1, -(-t // granularity), lists, most), jnp.int32)
        selection = jax.eval_shape(functools.partial(sl.Selection, block=block, granularity=granularity), ids)
    operands = (
        [jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, t, n, h), (1, t, k, h), (1, t, k, hv))],
        mask if dynamic else None,
        *(jax.ShapeDtypeStruct((1, t), jnp.int32) if given else None for given in (segments, order_ids)),
        selection,
        sinks,
        bias,
        jax.ShapeDtypeStruct((1, t, n, hv), dtype),
        jax.ShapeDtypeStruct((1, t, n), jnp.float32),
    )
    placed = jax.sharding.SingleDeviceSharding(device)
    # Lowering asks for the kind of the device at hand, which is the CPU's but for this.
    kind = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(program, in_shardings=placed).trace(*operands)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    return collections.Counter(
        re.findall(r"%(\w+?)(?:\.\d+)? = [^\n]* custom_call_target=\"tpu_custom_call\"", compiled.as_text())
    )


def forward_and_backward(passes):
    return {"sparse_fwd": passes, "sparse_bwd": passes}


# --- all generations -------------------------------------------------------------------------------------------------

PATTERNS = {
    "window": (sl.preset("sliding_window", window=256), 1, {"dtype": "float32"}),
    "strided": (sl.preset("sparse_transformer_strided"), 2, {}),
    "fixed": (sl.preset("sparse_transformer_fixed"), 2, {}),
    "bigbird": (sl.preset("bigbird"), 1, {}),
    "segments": (sl.Causal(), 1, {"segments": True}),
    "order ids": (sl.Full(), 1, {"segments": True, "order_ids": True}),
    "GQA": (sl.Causal(), 1, {"heads": (4, 2)}),
    "image": (sl.Grid((16, 32), (sl.Neighborhood(16, 7), sl.Neighborhood(32, 7))), 1, {}),
    "video": (sl.Grid((5, 7, 12), sl.Window(2, 2), offset=92) | sl.Global(92), 3, {"heads": (4, 2)}),
}
# Larger blocks take the compiler longer.
BLOCKS = {64: (128, 256), 128: (256, 128), 256: (128, 128)}


# Each pattern for each generation, the sizes in turn: four generations are enough for it to meet each of three sizes.
COMPILED = [
    (generation, [*BLOCKS][(i + j) % 3], name)
    for i, generation in enumerate(TOPOLOGIES)
    for j, name in enumerate(PATTERNS)
]


@pytest.mark.parametrize(("generation", "size", "name"), sampled(COMPILED, 0.6))
def test_compiles(generation, size, name):
    mask, passes, options = PATTERNS[name]
    params = sl.FwdParams(q_blocksize=BLOCKS[size][0], kv_blocksize=BLOCKS[size][1])
    plan = [x for x in candidates(mask, 512, fwd_params=params) if len(x.chains[0]) == passes][-1]
    assert kernels(generation, plan, sizes=(size, size), **options) == forward_and_backward(passes)


# --- one generation each ---------------------------------------------------------------------------------------------

SMALL = sl.FwdParams(q_blocksize=128, kv_blocksize=128)
TABLE = np.random.default_rng(0).random((512, 512)) < 0.3
TWO_KINDS = sl.Causal(), sl.Causal() & sl.Window(100)
# The tables are of 4 heads.
T5 = jax.eval_shape(functools.partial(sl.DistanceBias, center=128), jax.ShapeDtypeStruct((4, 257), jnp.float32))
WITH_SLOPES = jax.eval_shape(functools.partial(sl.DistanceBias, slopes=(0.1,) * 4), T5.table)


@pytest.mark.parametrize(
    ("generation", "mask", "passes", "options"),
    [
        pytest.param("v5e", sl.Causal(), 1, {"sizes": (80, 80)}, id="size 80"),
        pytest.param("v5p", sl.Causal(), 1, {"sizes": (96, 96)}, id="size 96"),
        pytest.param("v6e", sl.Causal(), 1, {"sizes": (192, 192)}, id="size 192"),
        pytest.param("tpu7x", sl.Causal(), 1, {"sizes": (192, 128)}, id="smaller values"),
        pytest.param("v5e", sl.Causal(), 1, {"sizes": (64, 256)}, id="larger values"),
        pytest.param("v5p", sl.Causal(), 1, {"sizes": (80, 80), "dtype": "float32"}, id="size 80, float32"),
        pytest.param("v6e", sl.Causal(), 1, {"dtype": "float16"}, id="float16"),
        pytest.param("tpu7x", sl.Causal(), 1, {"logits_soft_cap": 30.0}, id="soft cap"),
        pytest.param("v5e", sl.Causal(), 1, {"sinks": jax.ShapeDtypeStruct((2,), jnp.float32)}, id="sinks"),
        pytest.param("v5p", TWO_KINDS, 2, {"heads": (4, 2)}, id="heads differ"),
        pytest.param("v6e", sl.Array(TABLE), 1, {}, id="tiles"),
        pytest.param("tpu7x", jax.ShapeDtypeStruct((512, 512), bool), 1, {}, id="run-time mask"),
        pytest.param("v5e", jax.ShapeDtypeStruct((2, 512, 512), bool), 1, {"segments": True}, id="run-time heads"),
        pytest.param("v5p", sl.Causal(), 1, {"heads": (4, 1), "segments": True}, id="MQA, segments"),
        pytest.param("v6e", sl.Causal(), 1, {"heads": (4, 1), "order_ids": True}, id="MQA, order ids"),
        pytest.param("v5e", sl.Causal(), 1, {"chosen": (16, 64, 1, 4)}, id="16 together choose"),
        pytest.param("v6e", sl.Causal(), 1, {"chosen": (64, 16, 2, 4), "heads": (4, 2)}, id="64, by key head"),
        pytest.param("tpu7x", sl.Causal(), 1, {"chosen": (128, 512, 4, 1), "heads": (4, 2)}, id="128, by head"),
        pytest.param("v5p", sl.Array(TABLE), 1, {"chosen": (16, 48, 1, 4), "segments": True}, id="choices, tiles"),
        pytest.param("v5e", sl.Causal(), 1, {"bias": T5, "heads": (4, 2)}, id="table, GQA"),
        pytest.param("v5p", sl.Causal(), 1, {"bias": sl.alibi(2), "dtype": "float32"}, id="slopes, float32"),
        pytest.param(
            *("v6e", sl.Full(), 1),
            {"bias": WITH_SLOPES, "heads": (4, 4), "logits_soft_cap": 9.0, "segments": True},
            id="table and slopes",
        ),
        pytest.param(
            *("tpu7x", sl.Causal(), 1),
            {"bias": T5, "chosen": (64, 48, 2, 4), "heads": (4, 2)},
            id="table, blocks of 48 keys",
        ),
    ],
)
def test_compiles_options(generation, mask, passes, options):
    assert kernels(generation, mask, fwd_params=SMALL, **options) == forward_and_backward(passes)


@pytest.mark.parametrize("name", ["strided", "bigbird"])
def test_compiles_rules_too_long_for_tiles(name, monkeypatch):
    monkeypatch.setattr(costs, "MAX_TILED", 0)
    assert kernels("v5e", sl.preset(name), fwd_params=SMALL) == forward_and_backward(1)


def test_64_bits_enabled():
    with jax.enable_x64(True):
        assert kernels("v5e", sl.Causal(), fwd_params=SMALL, segments=True) == forward_and_backward(1)


def test_default_blocks_at_a_ragged_length():
    assert kernels("v6e", sl.Causal(), 1000) == forward_and_backward(1)


@pytest.mark.parametrize(
    ("preset", "block", "passes"),
    [("sliding_window", 512, 1), ("strided", 512, 1), ("sparse_transformer_fixed", 1024, 2)],
)
def test_a_million_tokens(preset, block, passes):
    params = sl.FwdParams(q_blocksize=block, kv_blocksize=block)
    found = kernels("v5e", sl.preset(preset), 1 << 20, heads=(1, 1), backward=False, fwd_params=params)
    assert found == {"sparse_fwd": passes}
