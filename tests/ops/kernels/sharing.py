"""Repeats a call in a process, and counts the results that are not those of the first: for processes that share a GPU.

``python -m tests.ops.kernels.sharing hopper causal 64``; `test_gpu.py` runs several at a time. A kernel that is stopped
in the middle, for another process to have the GPU, goes on with its programs far apart, and shows what one that runs
through does not.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

PATTERNS = {
    "causal": sl.Causal(),
    "fixed": sl.preset("sparse_transformer_fixed", stride=128, summary=32),
    "documents": sl.Causal(),
}


def wrong(implementation: str, pattern: str, size: int, shape: tuple[int, int, int], calls: int) -> int:
    """The calls, of so many, whose output, lse or gradients are not those of the first such one, but for rounding.

    Operands change from call to call, out of step with the memory that results take: what is not written must not look
    like what should have been.
    """
    batch, length = shape[:2]
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (*shape, size), jnp.bfloat16)  # noqa: E731
    operands = [tuple(draw(4 * i + j) for j in range(4)) for i in range(3)]
    ids = jnp.broadcast_to(jnp.arange(length) // 1000, (batch, length)) if pattern == "documents" else None

    @jax.jit
    def call(q, k, v, dout):
        attend = lambda q, k, v: sl.block_sparse_attention(  # noqa: E731
            q, k, v, PATTERNS[pattern], segment_ids=ids, implementation=implementation, return_lse=True
        )
        (out, lse), transposed = jax.vjp(attend, q, k, v)
        return out, lse, *transposed((dout, jnp.zeros_like(lse)))

    @jax.jit
    def is_close(found, first):
        return jnp.array([jnp.abs(x - y).max() <= 0.01 * jnp.abs(y).max() for x, y in zip(found, first, strict=True)])

    first = [call(*each) for each in operands]
    which = np.random.default_rng(0).integers(len(operands), size=calls)
    found = [is_close(call(*operands[i]), first[i]) for i in which]
    return sum(not each.all() for each in found)


if __name__ == "__main__":
    print(wrong(sys.argv[1], sys.argv[2], int(sys.argv[3]), (4, 8192, 8), 300))
