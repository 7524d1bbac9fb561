"""A few training steps for several models at once, in turns, so that what else the machine does slows all alike."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.train_lm import data

from .decoder import Decoder


@dataclasses.dataclass
class Run:
    """The losses and times of the training of one model.

    Attributes:
      losses: of each step, nats per byte.
      seconds: of each step, without compilation.
      params: after the last step.
    """

    losses: list[float]
    seconds: list[float]
    params: Any

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


def train(
    models: Mapping[str, Decoder], seq_len: int, steps: int, batch_size: int = 1, seed: int = 0
) -> dict[str, Run]:
    """Trains models from the same parameters on the same bytes: the standard library of the running Python.

    Args:
      models: by name; their parameters must have the same names and shapes.
      seq_len: tokens of a sequence.
      steps: steps of Adam.
      batch_size: sequences a step.
      seed: of the parameters and of the choice of bytes.
    """
    optimizer = optax.adam(optax.linear_schedule(0.0, 3e-3, min(10, steps)))
    tokens = jnp.zeros((batch_size, seq_len), jnp.int32)
    variables: Any = jax.jit(next(iter(models.values())).init)(jax.random.key(seed), tokens)
    start = variables["params"]
    compiled, state = {}, {}
    for name, model in models.items():

        def step(params, optimizer_state, batch, model=model):
            def loss(params):
                logits: Any = model.apply({"params": params}, batch[:, :-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

            value, gradient = jax.value_and_grad(loss)(params)
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state, value

        state[name] = start, optimizer.init(start)
        batch = jax.ShapeDtypeStruct((batch_size, seq_len + 1), jnp.int32)
        compiled[name] = jax.jit(step).lower(*state[name], batch).compile()
    runs = {name: Run([], [], start) for name in models}
    for i in range(steps):
        batch = _corpus().batch(seed, i, batch_size, seq_len).tokens
        for name, run in runs.items():
            begin = time.perf_counter()
            *new, loss = compiled[name](*state[name], batch)
            run.losses.append(float(loss))  # waits for the result
            run.seconds.append(time.perf_counter() - begin)
            state[name] = run.params, _ = tuple(new)
    return runs


@functools.cache  # some 10 MB of files
def _corpus() -> data.Corpus:
    return data.load("", 1)
