"""An ordinary dense language model in Linen: pre-LN blocks, Flax's own multi-head attention, learned positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and choices of a `Decoder`."""

    vocab_size: int = 256  # bytes
    features: int = 64  # of the residual stream
    num_heads: int = 2
    num_layers: int = 2
    mlp_features: int = 256
    max_len: int = 1024  # rows of the table of positions
    tie_embeddings: bool = True  # the token embedding is the output head
    dtype: Any = jnp.float32  # of the computation; parameters are float32
    attention_fn: Callable[..., jax.Array] = nn.dot_product_attention  # what goes on between the projections
    causal_mask: bool = True  # hide the future by a mask of T x T; not needed where attention_fn hides it


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        hidden = nn.gelu(nn.Dense(c.mlp_features, dtype=c.dtype, name="up")(x))
        return nn.Dense(c.features, dtype=c.dtype, name="down")(hidden)


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        c = self.config
        attention = nn.MultiHeadDotProductAttention(
            num_heads=c.num_heads, dtype=c.dtype, attention_fn=c.attention_fn, name="attention"
        )
        x = x + attention(nn.LayerNorm(dtype=c.dtype, name="attention_norm")(x), mask=mask)
        return x + Mlp(c, name="mlp")(nn.LayerNorm(dtype=c.dtype, name="mlp_norm")(x))


class Decoder(nn.Module):
    """Tokens [B, T] to the logits of the next token [B, T, V].

    ``valid``, bool [B, T], is False at padding, which no token attends to.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        c = self.config
        causal = nn.make_causal_mask(tokens) if c.causal_mask else None
        padding = None if valid is None else valid[:, None, None, :]
        mask = nn.combine_masks(causal, padding)

        embedding = nn.Embed(c.vocab_size, c.features, dtype=c.dtype, name="tokens")
        position = nn.Embed(c.max_len, c.features, dtype=c.dtype, name="positions")
        x = embedding(tokens) + position(jnp.arange(tokens.shape[1]))
        for i in range(c.num_layers):
            x = Block(c, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm(dtype=c.dtype, name="final_norm")(x)
        logits = embedding.attend(x) if c.tie_embeddings else nn.Dense(c.vocab_size, use_bias=False, name="head")(x)
        return logits.astype(jnp.float32)
