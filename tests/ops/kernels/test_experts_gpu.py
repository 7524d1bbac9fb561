"""Products of rows with the kernels of their experts on GPUs: float64, ragged sizes, transformations, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

from sparse_layers.ops.kernels.experts_gpu import grouped_matmul as grouped
from sparse_layers.ops.kernels.experts_gpu.grouped_matmul import grouped_matmul
from sparse_layers.ops.kernels.gpu import hardware
from tests.arrays import inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of each expert, the last of expert E; sizes of a kernel; dtypes."""

    rows: tuple[int, ...]
    sizes: tuple[int, int]
    dtype: str
    kernel_dtype: str | None = None

    def arrays(self):
        expert, num_experts = np.repeat(np.arange(len(self.rows)), self.rows), len(self.rows) - 1
        if len(expert) <= num_experts:  # need not be sorted
            expert = np.random.default_rng(0).permutation(expert)
        shapes = (len(expert), self.sizes[0]), (num_experts, *self.sizes), (len(expert), self.sizes[1])
        dtypes = self.dtype, self.kernel_dtype or self.dtype, self.dtype
        arrays = (
            inputs(*shape, seed=i).astype(dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        )
        return *map(jnp.asarray, arrays), jnp.asarray(expert)


CASES = {
    "few": Case((0, 2, 0, 0, 1, 0, 1), (140, 70), "bfloat16", "float32"),
    "many": Case((0, 67, 2, 5), (72, 136), "float16"),
    "many, float32": Case((40, 0, 0), (20, 12), "float32"),
    "wide": Case((520, 3), (70, 260), "bfloat16"),
    "no rows": Case((0, 0, 0), (4, 4), "float32"),
}


def gathered(x, kernels, expert):
    """The same products with a copy of its kernel for each row, which is 0 for expert E."""
    copies = kernels.astype(x.dtype).at[expert].get(mode="fill", fill_value=0)
    return (x[:, None] @ copies)[:, 0]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_in_float64(name):
    """The budget of an error is twice that of dense products in this dtype, and the rounding of the largest number."""
    *operands, expert = CASES[name].arrays()

    def value_and_grads(function, x, kernels, dy):
        y, vjp = jax.vjp(lambda *operands: function(*operands, expert), x, kernels)
        return y, *vjp(dy)

    computed = jax.jit(lambda *x: value_and_grads(grouped_matmul, *x))(*operands)
    rounded = value_and_grads(gathered, *operands)
    with jax.enable_x64(True):
        exact = value_and_grads(gathered, *(jnp.asarray(np.asarray(x, np.float64)) for x in operands))
    for a, b, known in zip(computed, rounded, exact, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b, known = (np.asarray(x, np.float64) for x in (a, b, known))
        eps = float(jnp.finfo(CASES[name].dtype).eps)
        budget = 2 * np.abs(b - known).max(initial=0) + 2 * eps * np.abs(known).max(initial=0)
        assert np.abs(a - known).max(initial=0) <= budget
        assert not len(expert) or np.abs(known).max() > 0.1


def test_transformations():
    """The gradient of a gradient, through `jax.vmap` over rows and experts and through `jax.checkpoint`."""
    experts = jnp.array([[0, 1, 1, 1, 2], [0, 0, 0, 0, 1]])  # of 2
    x, kernels = jnp.asarray(inputs(2, 5, 6)), jnp.asarray(inputs(2, 6, 4, seed=1))

    def second(multiply):
        def loss(x, kernels, expert):
            return (jnp.sin(multiply(x, kernels, expert)) * x[:, :4]).sum()

        def norm(x, kernels):
            gradients = jax.vmap(jax.grad(jax.checkpoint(loss), argnums=(0, 1)), (0, None, 0))(x, kernels, experts)
            return sum((gradient**2).sum() for gradient in gradients)

        return jax.jit(jax.value_and_grad(norm, argnums=(0, 1)))(x, kernels)

    for a, b in zip(*(jax.tree.leaves(second(multiply)) for multiply in (grouped_matmul, gathered)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_what_the_kernels_cannot_multiply(monkeypatch):
    x, kernels = jnp.ones((2, 4)), jnp.ones((2, 4, 4))
    monkeypatch.setattr(grouped, "has_local_arrays", lambda: True)
    assert grouped.unsupported(x, kernels.astype("bfloat16")) is None
    assert (
        grouped.unsupported(x, kernels.astype("int8")) == "it multiplies float32, bfloat16, float16, got float32, int8"
    )
    monkeypatch.setattr(grouped, "has_local_arrays", lambda: False)
    assert "expert_axis and token_axes" in str(grouped.unsupported(x, kernels))
    monkeypatch.setattr(hardware, "local_device", lambda: "no GPU")
    assert grouped.unsupported(x, kernels) == "no GPU"
