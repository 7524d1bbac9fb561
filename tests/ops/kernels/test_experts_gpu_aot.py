"""Products with the kernels of experts, compiled by Triton for GPUs: they fit, and no register spills."""

import dataclasses
from typing import Any

import jax
import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")
from benchmarks.triton_resources import TARGETS, Launch, compiled, resources
from sparse_layers.ops.kernels.experts_gpu.grouped_matmul import grouped_matmul
from sparse_layers.ops.kernels.gpu import bridge
from sparse_layers.ops.planning import platforms


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of a layer of Qwen3-30B-A3B, dtypes of rows and kernels, and the instruction of each product."""

    rows: int
    target: int
    dtypes: tuple[str, str]
    products: tuple[Any, Any, Any]  # forward, of the gradient of rows, of that of kernels

    def __str__(self):
        return f"{self.rows}-{self.target}-{'-'.join(self.dtypes)}"


CASES = [
    Case(8, 90, ("bfloat16", "bfloat16"), ("mma.sync", "mma.sync", "wgmma.mma_async")),
    Case(4096, 90, ("bfloat16", "float32"), ("wgmma.mma_async",) * 3),
    Case(131072, 90, ("bfloat16", "bfloat16"), ("wgmma.mma_async",) * 3),
    Case(4096, 80, ("float32", "float32"), (None,) * 3),
    Case(8, 86, ("float16", "float32"), ("mma.sync",) * 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_and_fits(case):
    shapes = ((case.rows, 2048), case.dtypes[0]), ((128, 2048, 768), case.dtypes[1]), ((case.rows,), "int32")

    def gradients(x, kernels, expert):
        y, vjp = jax.vjp(lambda x, kernels: grouped_matmul(x, kernels, expert), x, kernels)
        return vjp(y)

    device = TARGETS[case.target]
    with platforms.assume_gpu(device), bridge.record_launches() as launches:
        jax.eval_shape(gradients, *(jax.ShapeDtypeStruct(*x) for x in shapes))
    for x, product in zip(launches, case.products, strict=True):
        used = resources(compiled(Launch(x.kernel, x.dtypes, x.constants, **x.options, device=device)))
        assert used.shared <= device.shared_memory and used.copies and used.stack == 0, x.constants
        assert [*used.products] == [product] * (product is not None)
