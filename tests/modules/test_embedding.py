import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_layers.modules.embedding import Embed

TOKENS = jax.random.randint(jax.random.key(1), (4, 3000), 0, 30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_flax_and_gradients_exact(dtype):
    """Some 400 gradients fall onto each row: Flax's bfloat16 is off by several units here."""
    ours, theirs = (kind(256, 8, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)) for kind in (Embed, nnx.Embed))
    np.testing.assert_array_equal(ours(TOKENS), theirs(TOKENS))
    weight = jax.random.normal(jax.random.key(2), (*TOKENS.shape, 8)).astype(dtype)
    slope = nnx.grad(lambda layer: (layer(TOKENS) * weight).astype(jnp.float32).sum())(ours).embedding[...]
    exact, size = np.zeros((2, 256, 8))
    np.add.at(exact, TOKENS.ravel(), np.asarray(weight, np.float64).reshape(-1, 8))
    np.add.at(size, TOKENS.ravel(), np.abs(np.asarray(weight, np.float64)).reshape(-1, 8))
    assert slope.dtype == jnp.float32
    assert np.all(np.abs(slope - exact) <= np.finfo(np.float32).eps * size)


def test_large_tables_and_other_tokens_follow_flax():
    for size in (1, 2000):
        ours, theirs = (kind(size, 8, rngs=nnx.Rngs(0)) for kind in (Embed, nnx.Embed))
        np.testing.assert_array_equal(ours(TOKENS), theirs(TOKENS))
    layer = Embed(4, 2, rngs=nnx.Rngs(0))
    assert np.isnan(layer(jnp.array(4))).all()
    with pytest.raises(ValueError, match="integer"):
        layer(jnp.zeros(3))


@pytest.mark.parametrize(("size", "tokens"), [(257, np.uint8([0, 1, 1])), (10, np.int32([-1, 0, -2]))])
def test_small_types_and_negative_tokens(size, tokens):
    """256 does not fit the type of the tokens; negative ones count from the end."""
    layer = Embed(size, 3, rngs=nnx.Rngs(0))
    slope = nnx.grad(lambda layer: layer(jnp.asarray(tokens)).sum())(layer).embedding[...]
    often = np.zeros((size, 3))
    np.add.at(often, tokens, 1)
    np.testing.assert_array_equal(slope, often)
