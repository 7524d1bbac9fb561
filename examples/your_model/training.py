"""The losses of a language model on held-out windows, and its training on others."""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx

from .text import Windows


def token_losses(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Nats of each next token: tokens int [B, T + 1] to float32 [B, T]."""
    logits = model(tokens[:, :-1])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


_read = nnx.jit(token_losses)


def losses(model: nnx.Module, tokens: np.ndarray) -> np.ndarray:
    """Nats of the next token by its place in the window, the mean over windows: int [B, T + 1] to float64 [T].

    The model reads one window at a time. The perplexity is ``np.exp(losses(model, tokens).mean())``.
    """
    return np.stack([_read(model, row[None])[0] for row in tokens]).mean(0, dtype=np.float64)


def train(
    model: nnx.Module,
    windows: Windows,
    steps: int,
    rate: float,
    *,
    batch_size: int = 1,
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] = optax.adamw,
) -> tuple[float, float]:
    """Trains all parameters in place, with a learning rate that rises for a tenth of the steps and then falls.

    Args:
      model: tokens [B, T] to logits [B, T, V].
      windows: what it learns.
      steps: of the optimiser, >= 1.
      rate: the peak of the learning rate.
      batch_size: windows a step.
      optimizer: what takes the schedule of the learning rate.

    Returns:
      The mean loss of the last tenth of the steps in nats, and the median of seconds a step.
    """
    schedule = optax.cosine_onecycle_schedule(steps, rate, pct_start=0.1)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optimizer(schedule))
    state = nnx.Optimizer(model, clipped, wrt=nnx.Param)

    @nnx.jit
    def step(model, state, tokens):
        loss, gradients = nnx.value_and_grad(lambda model: token_losses(model, tokens).mean())(model)
        state.update(model, gradients)
        return loss

    step_losses, seconds = [], []
    for number in range(steps):
        begin = time.perf_counter()
        step_losses.append(float(step(model, state, windows.batch(number, batch_size))))  # waits for the result
        seconds.append(time.perf_counter() - begin)
    later = seconds[1:] or seconds  # the first one compiles
    return statistics.mean(step_losses[-max(1, steps // 10) :]), statistics.median(later)
