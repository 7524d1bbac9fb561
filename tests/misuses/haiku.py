"""Misuses of the Haiku layers."""

import haiku as hk
import jax
import jax.numpy as jnp

from sparse_layers.haiku import SparseSelfAttention, SparseTransformerBlock
from tests.misuse import Misuse

T, F = 32, 16


def names():
    x = jnp.ones((2, T, F))
    settings = {"pattern": "local:local_attn_ctx=4", "seq_len": T}

    def attend(num_heads=4, key_size=4, *inputs, call=None, **options):
        """Haiku's attention on x, or on other inputs, with more arguments for the call."""
        layer = hk.transform(
            lambda *xs: SparseSelfAttention(num_heads, key_size, **settings | options)(*xs, **call or {})
        )
        return jax.eval_shape(layer.init, jax.random.key(0), *(inputs or [x]))

    def haiku_block(num_heads=4, features=F, *inputs, call=None, **options):
        layer = hk.transform(
            lambda *xs: SparseTransformerBlock(num_heads, features, **settings | options)(*xs, **call or {})
        )
        return jax.eval_shape(layer.init, jax.random.key(0), *(inputs or [x]))

    return {"attend": attend, "haiku_block": haiku_block, "x": x, "hk": hk}


TRY = [
    "attend(patern=mask)",
    "attend(pattern='stridde')",
    "attend(pattern=np.ones((32, 31), bool))",
    "attend(pattern=(mask, mask, mask))",
    "attend(pattern=3)",
    "attend(seq_len=0)",
    "attend(0)",
    "attend(4.0)",
    "attend('4')",
    "attend(4, 0)",
    "attend(4, 4.5)",
    "attend(value_size=0)",
    "attend(model_size=-1)",
    "attend(num_kv_heads=3)",
    "attend(num_kv_heads=2.0)",
    "attend(rope_theta=1e4, key_size=5)",
    "attend(rope_theta='x')",
    "attend(scale='x')",
    "attend(logits_soft_cap=0)",
    "attend(implementation='cuda')",
    "attend(implementation='triton')",
    "attend(fwd_params={'q_blocksize': 8})",
    "attend(dropout_rate=0.1)",
    "attend(w_init='normal')",
    "attend(w_init_scale=1.0, w_init=hk.initializers.Constant(1))",
    "attend(use_sinks='yes')",
    "attend(with_bias=1)",
    "attend(4, 4, jnp.ones((2, 33, 16)))",
    "attend(4, 4, jnp.ones((16,)))",
    "attend(4, 4, jnp.ones((2, 0, 16)))",
    "attend(4, 4, x, jnp.ones((2, 30, 16)))",
    "attend(4, 4, x, x, jnp.ones((3, 32, 16)))",
    "attend(call={'mask': jnp.tril(jnp.ones((1, 1, 32, 32), bool))})",
    "attend(call={'mask': jnp.ones((2, 32), bool)})",
    "attend(call={'segment_ids': jnp.zeros((2, 30), int)})",
    "attend(call={'segment_ids': jnp.zeros((2, 32))})",
    "attend(call={'is_training': True})",
    "attend(4, 4, jnp.ones((2, 32, 16), int))",
    "attend(call={'key': [1]})",
    "attend(4, 4, [[1.0]])",
    "haiku_block(rope_thta=3)",
    "haiku_block(use_bias=False)",
    "haiku_block(out_w_init=3)",
    "haiku_block(16, 4)",
    "haiku_block(4, 18)",
    "haiku_block(4, 0)",
    "haiku_block(mlp='relu')",
    "haiku_block(norm='batch')",
    "haiku_block(num_layers=0)",
    "haiku_block(dropout_rate=1.0)",
    "haiku_block(dropout_rate=0.1)",
    "haiku_block(mlp_features=0)",
    "haiku_block(remat='full')",
    "haiku_block(num_kv_heads=3)",
    "haiku_block(4, 16, jnp.ones((2, 32, 12)))",
    "haiku_block(4, 16, jnp.ones((2, 33, 16)))",
    "haiku_block(call={'segment_ids': jnp.zeros((2, 1), int)})",
    "haiku_block(norm_epsilon=-1)",
]
