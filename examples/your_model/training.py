"""What a language model loses on held-out windows, and its training on others."""

import statistics
import time

import jax
import numpy as np
import optax
from flax import nnx

from .text import Windows


def token_losses(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Nats of each next token: tokens int [B, T + 1] to float32 [B, T]."""
    logits = model(tokens[:, :-1])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def losses(model: nnx.Module, tokens: np.ndarray) -> np.ndarray:
    """Nats of the next token by its place in the window, the mean over windows: int [B, T + 1] to float64 [T].

    The model reads one window at a time. The perplexity is ``np.exp(losses(model, tokens).mean())``.
    """
    read = nnx.jit(token_losses)
    return np.mean([read(model, row[None])[0] for row in tokens], axis=0, dtype=np.float64)


def train(
    model: nnx.Module, windows: Windows, steps: int, rate: float, batch_size: int = 1, seed: int = 0
) -> tuple[float, float]:
    """Trains all parameters in place, by AdamW with one cycle of the learning rate.

    Args:
      model: tokens [B, T] to logits [B, T, V].
      windows: what it learns.
      steps: of the optimiser, >= 1.
      rate: the peak of the learning rate.
      batch_size: windows a step.
      seed: of the choice of windows.

    Returns:
      The mean loss of the last tenth of the steps in nats, and the median of seconds a step.
    """
    schedule = optax.cosine_onecycle_schedule(steps, rate, pct_start=0.1)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(lambda model: token_losses(model, tokens).mean())(model)
        optimizer.update(model, gradients)
        return loss

    found, seconds = [], []
    for number in range(steps):
        begin = time.perf_counter()
        found.append(float(step(model, optimizer, windows.batch(number, batch_size, seed))))  # waits for the result
        seconds.append(time.perf_counter() - begin)
    return statistics.mean(found[-max(1, steps // 10) :]), statistics.median(seconds)
