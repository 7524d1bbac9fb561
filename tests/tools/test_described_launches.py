"""`describe` names the launches that a layer's call makes. Nothing is compiled, interpreted or launched."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import haiku, linen
from sparse_layers.ops import attention, custom_vjp, traced_call
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.gpu_attention import ENGINES
from sparse_layers.ops.planning.platforms import assume_gpu

pytest.importorskip("triton", reason="needs triton: pip install triton")

T, FEATURES, HEADS = 2048, 512, 8
FIXED = {"pattern": "sparse_transformer_fixed"}
STRIDED = {"pattern": "sparse_transformer_strided"}
WINDOW = {"pattern": "sliding_window:window=512"}
MOBA = {"pattern": "moba:block=64,count=8"}
NNX = "self", "cross", "nsa", "block"  # first words of the names of cases with a layer of NNX


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call of a layer.

    Attributes:
      name: of the case.
      make: makes the layer, without arguments.
      shapes: of the call's arrays.
      dtype: of these.
      ids: whether the call has segment ids.
      device: where it runs.
    """

    name: str
    make: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...] = ((1, T, FEATURES),)
    dtype: str = "bfloat16"
    ids: bool = False
    device: str = "h100"

    def __str__(self):
        return f"{self.name}-{self.device}"

    def layer(self) -> Any:
        """The layer, with shapes in the place of parameters."""
        return nnx.eval_shape(self.make) if self.name.partition("-")[0] in NNX else self.make()

    def call(self, layer: Any) -> None:
        """Traces a call of the layer."""
        ids = {"segment_ids": jax.ShapeDtypeStruct((1, T), "int32")} if self.ids else {}
        arrays = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes]
        if isinstance(layer, nnx.Module):
            graph, state = nnx.split(layer)
            jax.eval_shape(lambda state, *x, **options: nnx.merge(graph, state)(*x, **options), state, *arrays, **ids)
        elif hasattr(layer, "init_with_output"):
            jax.eval_shape(layer.init_with_output, jax.random.key(0), *arrays, **ids)
        else:
            jax.eval_shape(layer, *arrays, **ids)


def nnx_layer(kind, *sizes, **options):
    """A layer of NNX by its class, in bfloat16 unless the options say otherwise."""
    settings = {"dtype": "bfloat16", "seq_len": T} | options
    return lambda: kind(*sizes, rngs=nnx.Rngs(0), **settings)


def linen_layer(kind, **options):
    return functools.partial(kind, **{"num_heads": HEADS, "seq_len": T, "dtype": "bfloat16", "head_dim": 64} | options)


def self_attention(name, heads=HEADS, **options):
    """Self-attention with these query heads, of 64 features each unless there are few."""
    layer = nnx_layer(sl.SparseSelfAttention, heads, FEATURES, **options)
    return Case(f"self-{name}", layer, dtype=options.get("dtype", "bfloat16"))


def cross_attention(name, **options):
    settings = {"pattern": sl.Window(127, 127), "q_len": T, "kv_len": T // 2, "dtype": "bfloat16"} | options

    def make():
        return sl.SparseCrossAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **settings)

    return Case(f"cross-{name}", make, ((1, T, FEATURES), (1, T // 2, FEATURES)))


def function(name, pattern="causal", **options):
    """An attention function for heads as `describe` assumes them."""
    arrays = ((1, T, 32, 128),) * 3
    return Case(f"function-{name}", functools.partial(sl.make_attention_fn, pattern, T, **options), arrays)


CASES = [
    self_attention("fixed", **FIXED),
    self_attention("few-heads", 2, **FIXED),  # whose forward passes are fused, and by Triton
    self_attention("four-heads", 4, **FIXED),
    self_attention("one-head", 1, head_dim=64, pattern="causal"),
    self_attention("grouped", num_kv_heads=2, **FIXED),
    self_attention("sinks", use_sinks=True, **FIXED),
    self_attention("learned-bias", relative_bias=sl.LearnedBias(63), **WINDOW),
    self_attention("soft-cap", logits_soft_cap=30.0, **STRIDED),
    self_attention("negative-scale", scale=-0.5, **STRIDED),
    self_attention("triton", implementation="triton", **STRIDED),
    self_attention("hopper", implementation="hopper", pattern="causal"),
    self_attention("xla", implementation="xla", **WINDOW),
    self_attention("cudnn-passed-over", pattern="causal", use_sinks=True, head_dim=256),
    self_attention("cudnn", pattern="causal", head_dim=256),
    self_attention("float32", dtype="float32", **STRIDED),
    self_attention("float32-window", dtype="float32", **WINDOW),
    self_attention("head-size", head_dim=20, **WINDOW),
    self_attention("two-masks", pattern=("causal", "sparse_transformer_strided")),
    self_attention("deterministic", bwd_params=sl.BwdParams(deterministic=True), **WINDOW),
    self_attention("moba", **MOBA),
    self_attention("moba-grouped", num_kv_heads=2, use_sinks=True, **MOBA),
    self_attention("moba-hopper", pattern="moba:block=32,count=8", implementation="hopper"),
    self_attention("moba-within-a-window", selection="moba:block=64,count=8", **WINDOW),
    dataclasses.replace(self_attention("documents", num_kv_heads=2, **STRIDED), ids=True),
    dataclasses.replace(self_attention("sinks", use_sinks=True, **WINDOW), device="a100"),
    dataclasses.replace(self_attention("plain", **WINDOW), device="a100"),
    cross_attention("window"),
    cross_attention("sinks", use_sinks=True, num_kv_heads=1),
    cross_attention("soft-cap", logits_soft_cap=5.0, implementation="triton"),
    function("causal"),
    function("soft-cap", "sparse_transformer_strided", logits_soft_cap=3.0),
    function("triton", implementation="triton"),
    function("recompute", "sparse_transformer_fixed", recompute=True, scale=-1.0),
    function("moba", "moba:block=64,count=8"),
    Case("nsa", nnx_layer(sl.NativeSparseAttention, HEADS, FEATURES)),
    Case("nsa-grouped", nnx_layer(sl.NativeSparseAttention, HEADS, FEATURES, num_kv_heads=1, head_dim=128)),
    Case("nsa-float32", nnx_layer(sl.NativeSparseAttention, HEADS, FEATURES, dtype=None), dtype="float32"),
    Case("nsa-triton", nnx_layer(sl.NativeSparseAttention, HEADS, FEATURES, implementation="triton")),
    Case("nsa-documents", nnx_layer(sl.NativeSparseAttention, HEADS, FEATURES, num_kv_heads=2), ids=True),
    Case("block", nnx_layer(sl.SparseTransformerBlock, HEADS, FEATURES, use_sinks=True, remat=True, **FIXED)),
    Case("block-nsa", nnx_layer(sl.SparseTransformerBlock, HEADS, FEATURES, pattern="nsa", scale=0.5)),
    Case("linen", linen_layer(linen.SparseSelfAttention, num_kv_heads=2, **FIXED)),
    Case("linen-options", linen_layer(linen.SparseSelfAttention, use_sinks=True, logits_soft_cap=2.0, **STRIDED)),
    Case("linen-triton", linen_layer(linen.SparseSelfAttention, implementation="triton", scale=-1.0, **STRIDED)),
    Case("linen-alibi", linen_layer(linen.SparseSelfAttention, relative_bias=sl.AlibiBias(), **FIXED)),
    Case("linen-float32", linen_layer(linen.SparseSelfAttention, dtype=None, **WINDOW), dtype="float32"),
    Case("linen-moba", linen_layer(linen.SparseSelfAttention, selection="moba:block=64,count=8", pattern="causal")),
    Case("linen-nsa", linen_layer(linen.NativeSparseAttention, num_kv_heads=2)),
]


def described(layer, case):
    """(implementation, launches forward, launches backward) of each call of the op, by the text and by its trace."""
    traces = []

    def trace_call(*args, trace=traced_call.trace_call, **options):
        traces.append(trace(*args, **options))
        return traces[-1]

    with mock.patch.object(traced_call, "trace_call", trace_call):
        text = sl.describe(layer, size=4, device=case.device, segment_ids=case.ids)
    lines = rf"^runs on {case.device}, .*: '(\w+)'(?:\n  forward: (.*))?(?:\n  backward: (.*))?"
    return re.findall(lines, text, re.MULTILINE), [(x.implementation, x.forward, x.backward) for x in traces]


@pytest.fixture
def calls(monkeypatch):
    """(implementation, launches forward, launches backward) of the calls of the op, in their order."""
    recorded = []

    def attend(name, call, query_sharding, operands):
        def attention_of(query, key, value):
            arrays = operands._replace(query=query, key=key, value=value)
            return custom_vjp.attend(name, call, query_sharding, arrays)[0]

        arrays = operands[:3]
        out = jnp.zeros((*operands.query.shape[:3], operands.value.shape[3]), operands.query.dtype)
        launches = (), ()
        if name in ENGINES:
            with bridge.record_launches() as forward:
                out, pull_back = jax.vjp(attention_of, *arrays)
            with bridge.record_launches() as backward:
                pull_back(jnp.zeros_like(out))
            launches = tuple(forward), tuple(backward)
        recorded.append((name, *launches))
        return out, None

    monkeypatch.setattr(attention, "jitted_attend", attend)
    return recorded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_describe_names_the_launches_of_a_call(case, calls):
    """Those of scorers are recorded, too, and left out: `describe` says that it does not list them."""
    with assume_gpu(hardware.device_named(case.device)), bridge.record_launches():
        layer = case.layer()
        calls.clear()  # a layer traces its step when it is made
        case.call(layer)
    said, traces = described(layer, case)
    recorded = calls[-len(said) :]  # a layer of Linen traces its step before
    assert traces == recorded and len(said) in (1, 3)
    assert said == [(name, *(", then ".join(map(str, x)) for x in launches)) for name, *launches in recorded]


def test_the_cases_have_names_of_their_own():
    assert len({str(case) for case in CASES}) == len(CASES)


def test_segment_ids_of_an_attention_function_and_a_plan_as_it_is():
    ids = np.zeros((1, 2048), np.int32)
    bound = sl.make_attention_fn("causal", 2048, segment_ids=ids)
    alone = sl.make_attention_fn("causal", 2048)
    assert sl.describe(bound, device="a100") == sl.describe(alone, device="a100", segment_ids=True)
    assert sl.describe(bound, device="a100") != sl.describe(alone, device="a100")
    plan = sl.make_plan("causal", 8192, implementation="triton")  # its backward blocks have 64 keys
    assert "triton dq_kernel" in sl.describe(plan, device="h100")


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        ({"dtype": "float64"}, "in float32, "),  # without x64
        ({"param_dtype": "bfloat16"}, "assuming bfloat16, "),  # inputs decide
        ({"param_dtype": "float32"}, "in float32, "),
    ],
)
def test_the_dtype_that_is_known(dtypes, text):
    layer = linen.SparseSelfAttention(4, pattern="causal", seq_len=64, head_dim=32, **dtypes)
    assert text in sl.describe(layer)


def test_the_head_size_of_a_haiku_layer():
    def described_layer():
        return sl.describe(haiku.SparseSelfAttention(8, 20, pattern="causal", seq_len=4096), device="h100")

    text = hk.testing.transform_and_run(described_layer)()
    assert "8 heads of 20" in text and "'triton'" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 7, "pattern": ("causal", sl.Full())}, "num_heads=7: the pattern has 2 entries"),
        ({"num_heads": 6, "num_kv_heads": 4, "pattern": "causal"}, "num_kv_heads=4 must divide num_heads=6"),
    ],
)
def test_layers_whose_calls_are_refused(options, message):
    layer = linen.SparseSelfAttention(seq_len=64, head_dim=32, **options)
    with pytest.raises(ValueError, match=message):
        sl.describe(layer)
