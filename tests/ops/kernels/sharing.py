"""Repeats a call in a process, and counts the results that are not those of the first: for processes that share a GPU.

``python -m tests.ops.kernels.sharing hopper causal 64``; `test_gpu.py` runs several at a time. A kernel that is stopped
in the middle, for another process to have the GPU, goes on with its programs far apart, and shows what one that runs
through does not.
"""

import sys

import jax
import jax.numpy as jnp

import sparse_layers as sl

PATTERNS = {
    "causal": sl.Causal(),
    "fixed": sl.preset("sparse_transformer_fixed", stride=128, summary=32),
    "documents": sl.Causal(),
}


def wrong(implementation: str, pattern: str, size: int, shape: tuple[int, int, int], calls: int) -> int:
    """The calls, of so many, whose output, lse or gradients are not those of the first one, but for sums' rounding."""
    batch, length = shape[:2]
    arrays = [jax.random.normal(jax.random.key(i), (*shape, size), jnp.bfloat16) for i in range(4)]
    ids = jnp.broadcast_to(jnp.arange(length) // 1000, (batch, length)) if pattern == "documents" else None

    @jax.jit
    def call(q, k, v, dout):
        attend = lambda q, k, v: sl.block_sparse_attention(  # noqa: E731
            q, k, v, PATTERNS[pattern], segment_ids=ids, implementation=implementation, return_lse=True
        )
        (out, lse), transposed = jax.vjp(attend, q, k, v)
        return out, lse, *transposed((dout, jnp.zeros_like(lse)))

    @jax.jit
    def alike(found, first):
        return jnp.array([jnp.abs(x - y).max() <= 0.01 * jnp.abs(y).max() for x, y in zip(found, first, strict=True)])

    first = call(*arrays)
    found = [alike(call(*arrays), first) for _ in range(calls)]
    return sum(not each.all() for each in found)


if __name__ == "__main__":
    print(wrong(sys.argv[1], sys.argv[2], int(sys.argv[3]), (4, 8192, 8), 300))
