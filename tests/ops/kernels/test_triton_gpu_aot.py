"""The kernels, compiled by Triton for GPUs of every kind, with the settings chosen there. No GPU is needed.

This catches what interpreted kernels cannot show: operations and layouts that a GPU does not have, programs that exceed
its shared memory, which Triton does not check before it launches one, and loops that are not pipelined.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl

pytest.importorskip("triton", reason="needs triton: pip install triton")
import triton

from benchmarks.triton_resources import TARGETS, compiled, launches, resources
from tests.ops.cases import candidates

OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
STRIDED = sl.preset("sparse_transformer_strided")
FIXED = sl.preset("sparse_transformer_fixed")
BIGBIRD = sl.preset("bigbird", causal=False)
LONGFORMER = sl.preset("longformer", causal=False)
STRIDES = sl.Strided(128)
CORNER = sl.BlockDiagonal(128) | (sl.Prefix(256) & sl.Prefix(256).T)  # of all keys, but few come with few queries
WINDOW = sl.preset("sliding_window", window=256)
PRODUCTS = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call, and which of its kernels to compile for which GPU; None for all that differ."""

    name: str
    target: int
    mask: Any
    sizes: tuple[int, int]
    dtype: str = "bfloat16"
    only: tuple[str, ...] | None = None
    length: int = 4096
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self):
        return f"{self.name}-{self.target}-{'x'.join(map(str, self.sizes))}-{self.dtype}"

    @functools.cached_property
    def launches(self):
        options = {"heads": (16, 16)} | self.options
        lengths = self.length, self.length
        found = launches(TARGETS[self.target], self.mask, lengths, sizes=self.sizes, dtype=self.dtype, **options)
        return [one for one in found if self.only is None or one.name in self.only]


def _splits(number):
    return {"fwd_params": sl.FwdParams(num_key_splits=number), "bwd_params": sl.BwdParams(num_key_splits=number)}


def _selection(granularity, block, length=2048):
    """A selection of 8 blocks."""
    ids = jax.ShapeDtypeStruct((2, length // granularity, 1, 8), jnp.int32)
    return {"selection": jax.eval_shape(functools.partial(sl.Selection, block=block, granularity=granularity), ids)}


def _chain(mask):
    """The longest chain that the planner weighs, whatever it would take."""
    return dataclasses.replace(candidates(mask, 4096)[-1], fwd_params=sl.FwdParams(), implementation="triton")


REPEATABLE = {"bwd_params": sl.BwdParams(deterministic=True)}
WIDE = {"heads": (512, 512)}
BY_KEY = "kv_outer", "dkv_with_dq"
CAP = {"sinks": True, "logits_soft_cap": 30.0}
RUN_TIME = jax.ShapeDtypeStruct((512, 512), bool)
BIAS = sl.DistanceBias(np.zeros((16, 513)), slopes=sl.alibi(16).slopes)
SWIN = sl.preset("windows", shape=(56, 56), size=7), sl.grid_bias((56, 56), np.zeros((4, 13, 13)))
CASES = [
    # Each pattern meets several sizes, dtypes and GPUs; each size and dtype every amount of shared memory.
    Case("strided", 90, STRIDED, (128, 128)),
    Case("twice-fused", 80, sl.Causal() & (sl.BlockDiagonal(128) | STRIDES), (128, 128), "float16", ("dq_with_dkv",)),
    Case("strided", 86, STRIDED, (128, 128), only=("dkv", "dq_with_dkv")),
    Case("strided", 100, STRIDED, (128, 128), only=("dq_with_dkv",)),
    Case("strided", 80, sl.preset("strided"), (192, 192), "float32", ("forward",)),
    Case("fixed", 80, FIXED, (64, 64), only=("forward",)),
    Case("fixed", 90, FIXED, (96, 96), "float16", ("dq",)),
    Case("window", 100, WINDOW, (16, 16), "float32", ("forward",)),
    Case("longformer", 90, _chain(LONGFORMER), (16, 16)),
    Case("longformer", 86, LONGFORMER, (128, 128), "float32", ("dkv",)),
    Case("bigbird", 86, BIGBIRD, (64, 64), "float16", options={"heads": (4, 4)}),
    Case("causal", 86, sl.Causal(), (256, 256), only=("forward", "dkv")),
    Case("causal", 90, sl.Causal(), (192, 128), "float16", ("dkv", "dq"), options={"heads": (16, 4)}),
    Case("causal", 100, sl.Causal(), (96, 96), only=("forward",)),
    Case("full", 100, sl.Full(), (64, 64), "float16", ("dkv",)),
    Case("full", 80, sl.Full(), (256, 16), "float32", ("dq",)),
    Case("segments", 90, sl.Causal(), (64, 64), only=("compact", "forward", "dkv"), options={"segments": True}),
    Case("cap-sinks", 90, WINDOW, (128, 128), "float32", ("dq",), options=CAP),
    Case("cap-sinks", 80, WINDOW, (16, 16), only=("forward",), options=CAP | {"heads": (16, 2)}),
    Case("run-time", 80, RUN_TIME, (128, 128), only=("compact", "forward"), length=512),
    Case(
        "million", 90, WINDOW, (64, 64), only=("forward", "dq"), length=1 << 20, options={"batch": 1, "heads": (32, 32)}
    ),
    Case("splits", 86, sl.Causal(), (80, 256), "float16", ("forward",), options=_splits(4)),
    # Parts of a block of queries chose for themselves; several tiles of a block that chose together.
    Case(
        "chosen-parts",
        90,
        sl.Causal(),
        (128, 128),
        only=("compact", "forward", "dq", "dkv"),
        length=2048,
        options=_selection(1, 64) | {"heads": (16, 4)},
    ),
    Case(
        "scattered-wide", 90, sl.Causal(), (128, 128), "bfloat16", BY_KEY, 1 << 15, WIDE | _selection(1, 128, 1 << 15)
    ),
    Case("scattered", 80, sl.Causal(), (64, 64), "float16", BY_KEY, 2048, _selection(1, 64) | CAP | {"segments": True}),
    Case("scattered", 86, sl.Causal(), (128, 128), "float32", ("kv_outer",), 2048, _selection(1, 32)),
    Case("scattered", 100, sl.Causal(), (256, 256), "bfloat16", BY_KEY, 2048, _selection(1, 48) | {"heads": (16, 4)}),
    Case("chosen", 80, sl.Causal(), (64, 64), "float16", ("forward",), 2048, _selection(128, 32)),
    Case("corner", 90, _chain(CORNER), (64, 64), only=("dq_with_dkv",)),
    # Tiles of natural order, and of residues, which sum the gradient pair by pair.
    Case("bias", 90, _chain(STRIDED), (64, 64), only=("forward", "dq", "dkv"), options={"bias": BIAS}),
    Case("repeatable", 90, sl.Window(63), (64, 64), only=("forward", "dq", "dkv"), options={"bias": BIAS} | REPEATABLE),
    Case("swin", 90, SWIN[0], (32, 32), only=("dq",), length=3136, options={"bias": SWIN[1], "heads": (4, 4)}),
    Case("heads-differ", 80, (sl.Causal(), sl.preset("strided")), (16, 16), "float16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_and_fits(case):
    assert case.launches
    for one in case.launches:
        found = resources(compiled(one))
        if one.name == "compact":  # copies a few integers
            assert found.shared <= 4096 and not found.products
            continue
        if case.target == 100 and OLD:  # no such GPU is served with it
            continue
        settings = f"{one.name}, {one.tiles[0]} x {one.tiles[1]}, {one.num_stages} stages"
        assert found.shared <= one.device.shared_memory, settings
        spilled = found.stack > 8 * OLD and one.constants["A"].BIAS.LENGTH > 0
        assert not spilled, f"{settings}: registers are spilled"
        assert found.shared <= one.estimate, f"{settings}: the estimate is no upper bound"
        assert (found.copies > 0) == (one.num_stages > 1), f"{settings}: pipelined, or not"
        # A group of four warps multiplies 64 rows at once.
        product = PRODUCTS[case.target if one.tiles[one.by_keys] >= 64 else 80]
        assert set(found.products) == ({product} if case.dtype != "float32" else set()), settings
        if case.target in (80, 90, 100) and case.dtype != "float32" and max(case.sizes) <= 128:
            assert one.num_stages > 1, settings


def test_tiles_that_are_too_large_do_not_fit():
    params = sl.FwdParams(blocksize_m=64, blocksize_n=128, num_stages=4, num_warps=4)
    options = {"sizes": (256, 256), "fwd_params": params}
    roomy = TARGETS[90]._replace(shared_memory=1 << 20)  # the real one would be refused
    one = next(x for x in launches(roomy, sl.Full(), (512, 512), **options) if x.name == "forward")
    assert (*one.tiles, one.num_stages) == (64, 128, 4)
    assert TARGETS[90].shared_memory < resources(compiled(one)).shared <= one.estimate
    with pytest.raises(NotImplementedError, match=r"blocksize_m=64, blocksize_n=128.* need about .* of shared memory"):
        launches(TARGETS[90], sl.Full(), (512, 512), **options)


# Numbers that switch parts of the kernels on, and the values at which they do not; every boolean is such a switch, too.
OFF = {"ORDER": (), "LENGTH": 0, "CAP": 0, "HEAD_STEP": 1, "GRANULARITY": 0, "TILES": 1, "PACK": 1}
# But for these: where results go is always given, and looked up by token or by row; key heads are never packed, nor
# keys gathered; kernels whose programs hold queries have all of a block, and that by key has only choices.
ALWAYS = {"OUT.EXISTS", "KV.PACK", "KV.GATHERED"}
OF_CHOICES = {f"Q.{x}" for x in ("GATHERED", "ORDER", "TILES")} | {
    f"L.{x}" for x in ("ANY_FULL", "ANY_PARTIAL", "GRANULARITY")
}
OF_CHOICES |= {"BIAS.EXISTS", "BIAS.LENGTH", "BIAS.SLOPES", "BIAS.FIXED_POINT"}
OF_CHOICES |= {"A.HEAD_STEP", "OUT.ORDER", "KV.ORDER", "KV.TILES", "OUT.BY_TOKEN", "W.MERGED"}
NO_SWITCHES = {
    "triton_forward_kernel": ALWAYS | {"Q.GATHERED"},
    "dq_kernel": ALWAYS | {"Q.GATHERED"},
    "dkv_kernel": ALWAYS,
    "kv_outer_kernel": ALWAYS | OF_CHOICES,
}


def switches(constants):
    """(name, whether it is on) of all that switches parts of a kernel."""
    for bundle, fields in constants.items():
        if isinstance(fields, bool):
            yield bundle, fields
        elif bundle == "KV2":
            yield "KV2.ROWS", fields.ROWS > 0
        elif bundle != "L2" and fields is not None:  # a second pass is walked by the functions of the first
            if bundle == "A":
                yield from switches({"BIAS": fields.BIAS})
            for name, value in fields._asdict().items():
                if isinstance(value, bool) or name in OFF:
                    value = value.AXES if name == "ORDER" else value
                    yield f"{bundle}.{name}", value != OFF.get(name, False)


def test_all_that_can_be_switched_is():
    found = [one for case in CASES for one in case.launches]
    assert {one.name for one in found} == {"forward", "dq", "dkv", "dq_with_dkv", "compact", *BY_KEY}
    values: dict[tuple[str, str], set[bool]] = {}
    for one in found:
        for name, on in switches(one.constants):
            values.setdefault((one.kernel.fn.__name__, name), set()).add(on)
    assert len(values) > 50
    same = {switch for switch, both in values.items() if both != {False, True}}
    assert same == {(kernel, name) for kernel, names in NO_SWITCHES.items() for name in names}
