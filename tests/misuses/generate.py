"""Misuses of `generate`: its arguments, and models that it cannot sample from."""

import types

import jax.numpy as jnp
from flax import linen as nn

from tests.misuse import INTEGER, Misuse
from tests.misuses.layers import V, model


class LM(nn.Module):
    """A model of Linen."""

    def prefill(self, tokens, lengths):
        return jnp.zeros((len(tokens), V)), ()

    def decode_step(self, tokens, caches, position):
        return jnp.zeros((len(tokens), V)), caches


def foreign(**methods):
    """A model that `generate` can sample from, but for the methods that are given."""

    def prefill(tokens, lengths):
        return jnp.zeros((len(tokens), V)), {"k": jnp.zeros(3)}

    named = {"prefill": prefill, "decode_step": methods.pop("step", lambda *x: prefill(x[0], x[2]))} | methods
    return types.SimpleNamespace(**named)


def step_of(*sizes, dtype=float, caches=None):
    """A model whose steps return logits [B, *sizes]."""
    return foreign(step=lambda *x: (jnp.zeros((len(x[0]), *sizes), dtype), x[1] if caches is None else caches))


def names():
    return {
        "a_model": model(),
        "linen_lm": LM(),
        "foreign": foreign,
        "step_of": step_of,
        "V": V,
        "tokens": jnp.ones((2, 4), jnp.int32),
    }


ENCODE = "encode it"
ROWS = [
    ("sl.generate(a_model, [[2**32 + 3]], 3)", ValueError, "prompts", "4294967299", "tokens in 0.."),
    ("sl.generate(a_model, 'hello', 3)", TypeError, "prompts", "'hello'", "[list(b'hello')]"),
    ("sl.generate(a_model, ['hello'], 3)", TypeError, "prompts", "['hello']", ENCODE),
    ("sl.generate(a_model, b'hello', 3)", TypeError, "prompts", "b'hello'", ENCODE),
    ("sl.generate(a_model, [1, 2, 3], 3)", ValueError, "prompts", "[(), (), ()]", "a sequence in a sequence"),
    ("sl.generate(a_model, [[1.5]], 3)", ValueError, "prompts", "got float64", "must be integers of shape [B, P]"),
    (
        "sl.generate(a_model, None, 3)",
        TypeError,
        "prompts",
        "NoneType: None",
        "an array [B, P] of integers, or a sequence",
    ),
    ("sl.generate(a_model, [[1]], 3, temprature=1)", TypeError, "generate", "'temprature'", "mean 'temperature'?"),
    (
        "sl.generate(foreign(prefill=3), [[1]], 3)",
        TypeError,
        "model",
        "got namespace",
        "must have prefill and decode_step",
    ),
    ("sl.generate(foreign(step=lambda *x: x[1]), [[1]], 3)", TypeError, "decode_step", "got dict", "(logits, caches)"),
    ("sl.generate(step_of(V + 1), [[1]], 3)", ValueError, "decode_step", "(1, 33)", "must return logits [1, 32]"),
    ("sl.generate(step_of(V, 1), [[1]], 3)", ValueError, "decode_step", "(1, 32, 1)", "must return logits [1, 32]"),
    ("sl.generate(step_of(V, dtype=int), [[1]], 3)", ValueError, "decode_step", "int32", "floats"),
    (
        "sl.generate(step_of(V, caches=()), [[1]], 3)",
        ValueError,
        "decode_step",
        "got PyTreeDef(())",
        "caches like those",
    ),
    (
        "sl.generate(step_of(V, caches={'k': jnp.zeros(4)}), [[1]], 3)",
        ValueError,
        "decode_step",
        "got caches['k']: float32[4]",
        "caches like those it takes, caches['k']: float32[3]",
    ),
    ("sl.generate(a_model, [[1]], '3')", ValueError, "num_tokens", "got '3'", INTEGER),
    ("sl.generate(a_model, [[1]], 3, chunk=0)", ValueError, "chunk", "got 0", INTEGER),
    ("sl.generate(foreign(), [[1]], 3, chunk=2)", ValueError, "chunk", "got 2", "no argument chunk"),
    ("sl.generate(a_model, [[1]], True)", ValueError, "num_tokens", "got True", INTEGER),
    (
        "sl.generate(a_model, [[1]] * 2, 3, lengths=[1, 1])",
        ValueError,
        "lengths",
        "sequence of prompts",
        "must be None",
    ),
    ("sl.generate(a_model, tokens, 9)", ValueError, "num_tokens=9", "4 tokens", "seq_len=8"),
    ("sl.generate(a_model, [[99]], 3)", ValueError, "prompts", "got 99 to 99", "tokens in 0..31"),
    ("sl.generate(a_model, [[1]], 3, temperature=True)", ValueError, "temperature", "got True", "a number >= 0"),
    (
        "sl.generate(a_model, [[1]], 3, temperature=jnp.ones(()))",
        ValueError,
        "temperature",
        "Array(1.",
        "a number >= 0",
    ),
    ("sl.generate(a_model, [[1]], 3, temperature=1.0)", ValueError, "key", "got None", "must be a jax.random.key"),
    ("sl.generate(a_model, [[1]], 3, temperature=1.0, key=0)", ValueError, "key", "got 0", "one jax.random.key"),
    (
        "sl.generate(a_model, [[1]], 3, temperature=1.0, key=jax.random.split(jax.random.key(0)))",
        ValueError,
        "key",
        "got Array((2,)",
        "one jax.random.key",
    ),
    ("sl.generate(a_model, [[1]], 3, top_k=2.0)", ValueError, "top_k", "got 2.0", INTEGER),
    ("sl.generate(a_model, [[1]], 3, top_p=True)", ValueError, "top_p", "got True", "in (0, 1]"),
    ("sl.generate(a_model, [[1]], 3, stop_token='x')", ValueError, "stop_token", "got 'x'", "must be an integer >= 0"),
    ("sl.generate(a_model, [[1]], 3, stop_token=[1, -1])", ValueError, "stop_token", "got -1", "an integer >= 0"),
    ("sl.generate(a_model, [[1]], 3, on_tokens=3)", TypeError, "on_tokens", "got 3", "a function of the tokens"),
    (
        "sl.generate(a_model, tokens, 3, padding_side='start')",
        ValueError,
        "padding_side",
        "got 'start'",
        "'right' or 'left'",
    ),
    (
        "sl.generate(a_model, tokens, 3, padding_side='left')",
        ValueError,
        "lengths",
        "got None",
        "how many tokens each prompt has where padding_side='left'",
    ),
    ("sl.generate(linen_lm, [[1]], 3)", ValueError, "model", "LM", "must be bound, model.bind(variables)"),
    ("sl.generate(None, [[1]], 3)", TypeError, "model", "got None", "must have prefill and decode_step"),
    ("sl.generate(sl.SparseTransformer, [[1]], 3)", TypeError, "model", "got <class", "prefill and decode_step"),
]
MISUSES = [Misuse(*row) for row in ROWS]
