"""The oracle: its gradients by differences of its values, its rounding, and what counts as an error."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_layers.tools.oracle import DenseAttention, budgets, largest_error


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("with_all", [False, True])
def test_the_oracle_by_finite_differences(soft_cap, with_all):
    rng = np.random.default_rng(1)
    shapes = {"query": (2, 5, 4, 3), "key": (2, 7, 2, 3), "value": (2, 7, 2, 6)}
    shapes |= {"sinks": (4,), "table": (4, 6)} if with_all else {}
    x = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    allowed = rng.random((2, 4, 5, 7)) < 0.5
    allowed[:, :, 2] = False
    dout, dlse = rng.normal(size=(2, 5, 4, 6)), rng.normal(size=(2, 5, 4))
    options = {"allowed": allowed, "dout": dout, "dlse": dlse, "scale": 0.7, "soft_cap": soft_cap}
    options |= {"center": 2, "slopes": (0.1, -0.2, 0, 1)} if with_all else {}

    def loss(x):
        answers = DenseAttention(**x, **options).answers
        return (answers["out"] * dout).sum() + (np.where(np.isfinite(answers["lse"]), answers["lse"], 0) * dlse).sum()

    exact = DenseAttention(**x, **options)
    answers, sizes = exact.answers, exact.absolute_sums()
    for name, gradient in zip(x, ("dq", "dk", "dv", "dsinks", "dtable"), strict=False):
        step = 1e-6 * rng.normal(size=x[name].shape)
        slope = loss(x | {name: x[name] + step}) - loss(x | {name: x[name] - step})
        assert abs(slope / 2e-6 - (answers[gradient] * step).sum() / 1e-6) < 1e-6
    for name in answers:
        assert np.all(np.abs(np.where(np.isfinite(answers[name]), answers[name], 0)) <= sizes[name] * (1 + 1e-9) + 3)
    # A hand-made row: two equal scores share the weight.
    ones = {"query": np.zeros((1, 1, 1, 2)), "key": np.ones((1, 3, 1, 2)), "value": np.arange(3.0).reshape(1, 3, 1, 1)}
    two = {"allowed": np.array([[[[True, False, True]]]]), "dout": np.ones((1, 1, 1, 1)), "dlse": np.zeros((1, 1, 1))}
    answers = DenseAttention(**ones, **two, scale=1.0).answers
    assert answers["out"].item() == 1.0 and answers["lse"].item() == np.log(2.0)
    np.testing.assert_allclose(answers["dv"].ravel(), [0.5, 0, 0.5])


def call(dtype=np.float64, **options):
    rng = np.random.default_rng(2)
    query, key, value, dout = (
        rng.normal(size=shape).astype("bfloat16") for shape in ((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 6), (2, 5, 4, 6))
    )
    allowed = rng.random((2, 1, 5, 7)) < 0.6
    return DenseAttention(query, key, value, allowed, dout, dtype=dtype, **options)


def test_root_sum_squares():
    exact = call(scale=-0.7)
    _, key, value, dout, _ = exact._arrays
    p, found = exact._p, exact.root_sum_squares()
    for b, t, n in np.ndindex(2, 5, 4):
        rows = p[b, n, t]
        delta = abs(exact.answers["out"][b, t, n] @ dout[b, t, n])
        slopes = rows * (abs(value[b, :, n]) @ abs(dout[b, t, n]) + delta)
        np.testing.assert_allclose(found["out"][b, t, n], np.linalg.norm(rows[:, None] * value[b, :, n], axis=0))
        np.testing.assert_allclose(found["dq"][b, t, n], 0.7 * np.linalg.norm(slopes[:, None] * key[b, :, n], axis=0))
    for b, s, k in np.ndindex(2, 7, 2):
        heads = slice(2 * k, 2 * k + 2)
        summands = p[b, heads, :, s, None] * dout[b, :, heads].swapaxes(0, 1)
        np.testing.assert_allclose(found["dv"][b, s, k], np.linalg.norm(summands.reshape(10, -1), axis=0))
    sums = exact.absolute_sums()
    assert all((found[name] <= sums[name] * (1 + 1e-9)).all() for name in found)
    assert found["dk"].shape == sums["dk"].shape and (found["dk"] > 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_rounding_of_a_dtype(dtype):
    exact, rough = call(), call(dtype)
    eps = float(jnp.finfo(dtype).eps)
    measured = budgets(exact.answers, rough.answers, exact.root_sum_squares(), dtype)
    assert measured.keys() == {"out", "dq", "dk", "dv"}
    for name, budget in measured.items():
        assert eps / 8 < budget < 64 * eps * abs(exact.answers[name]).max()
        np.testing.assert_array_equal(rough.answers[name], rough.answers[name].astype(dtype).astype(np.float32))


def test_errors():
    right = np.array([1.0, -np.inf, 3.0])
    assert largest_error(np.array([1.5, -np.inf, 2.75], np.float32), right) == 0.5
    assert largest_error(np.array([1.0, 0.0, 3.0]), right) == np.inf
    assert largest_error(np.array([np.nan, -np.inf, 3.0]), right) == np.inf
    assert largest_error(right[:2], right) == np.inf
    with pytest.raises(ArithmeticError, match="lse of dense attention in float32 must be finite"):
        budgets({"lse": right}, {"lse": np.zeros(3)}, {"lse": np.ones(3)}, "float32")
