"""The model: a `sparse_layers.SparseTransformer` over bytes, its loss, and what a step of it costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparse_layers as sl

from .config import Config, Refusal
from .data import Batch
from .sharding import QUERIES, TOKENS

_ROWS = 512  # of a mask, looked at to count its pairs


def build(config: Config) -> sl.SparseTransformer:
    """The model of ``config``, freshly initialised from its seed.

    Raises:
      Refusal: no such preset, a preset that takes other options, or one that cannot serve the length or the heads.
    """
    try:
        return sl.SparseTransformer(
            256,
            config.heads,
            config.features,
            config.layers,
            patterns=_patterns(config),
            causal=not config.looks_ahead,
            seq_len=config.seq_len,
            positions=config.positions,
            position_stride=config.position_stride if config.positions == "row_column" else None,
            mlp=config.mlp,
            mlp_features=_hidden(config),
            norm=config.norm,
            tie_embeddings=config.tied,
            dropout_rate=config.dropout,
            remat=config.recompute,
            scan_layers=config.scan,
            residual_sharding=TOKENS,
            query_sharding=QUERIES,
            dtype=None if config.dtype == "auto" else jnp.dtype(config.dtype),
            rngs=nnx.Rngs(config.seed),
        )
    except (ValueError, OverflowError) as error:
        raise Refusal(f"--pattern {config.pattern} {config.length}: {' '.join(str(error).split())}") from error


def _hidden(config: Config) -> int:
    """Hidden features of the MLPs; as many weights with a gate as without."""
    return max(8, 8 * round(config.features / 3)) if config.mlp == "swiglu" else 4 * config.features


def _patterns(config: Config) -> tuple[Any, ...]:
    """The patterns that the layers take in turn."""
    limited = both_ways if config.looks_ahead else without_future
    return tuple(limited(config.mask(name)) for name in config.pattern.split("+"))


def without_future(pattern: Any) -> Any:
    """The pattern without what lies in the future, where a language model must not look, and scorers do not."""
    if isinstance(pattern, sl.Scorer):
        return pattern
    return tuple(map(without_future, pattern)) if isinstance(pattern, tuple) else pattern & sl.Causal()


def both_ways(pattern: Any) -> Any:
    """The pattern and its mirror image, in which a prefix sees itself whole: order ids hide the future."""
    if isinstance(pattern, sl.Scorer):
        raise ValueError("a scorer selects earlier blocks alone, and a prefix sees later ones, too")
    return tuple(map(both_ways, pattern)) if isinstance(pattern, tuple) else pattern | pattern.T


def mean_loss(model: nnx.Module, batch: Batch, deterministic: bool = True) -> jax.Array:
    """Mean cross-entropy in nats of the next bytes that count, a float32 scalar; no dropout if deterministic."""
    return scores(model, batch, deterministic)["loss"]


def index_loss(model: nnx.Module) -> Any:
    """The losses of the last call by which layers learn what to choose, all together; 0 where there are none."""
    return sum(layer.sum() for layer in jax.tree.leaves(nnx.state(model, sl.IndexLoss)))


def scores(model: nnx.Module, batch: Batch, deterministic: bool = True) -> dict[str, jax.Array]:
    """Means over the next bytes that count, float32 scalars.

    Their cross-entropy in nats is "loss"; where a batch has answers, "accuracy" is the share predicted exactly.
    """
    tokens, segments, answers, order_ids = batch
    seen, targets = None if segments is None else segments[:, :-1], tokens[:, 1:]
    options: Any = {} if order_ids is None else {"order_ids": order_ids}
    options |= {"segment_ids": seen, "deterministic": deterministic}
    logits = model(tokens[:, :-1], **options)  # pyright: ignore[reportCallIssue]
    scores_of_bytes = {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, targets)}
    if answers is not None:
        scores_of_bytes["accuracy"] = logits.argmax(-1) == targets
    counts = counted(batch)
    return {name: jnp.where(counts, x, 0).sum() / jnp.maximum(counts.sum(), 1) for name, x in scores_of_bytes.items()}


def counted(batch: Batch) -> Any:
    """Returns the next bytes that count: bool [B, T]. The first byte of a document kept apart is nobody's next byte."""
    tokens, segments, answers, _ = batch
    counts = np.ones((tokens.shape[0], tokens.shape[1] - 1), bool) if answers is None else answers
    return counts if segments is None else counts & (segments[:, 1:] == segments[:, :-1])


def step_flops(config: Config) -> float:
    """Floating point operations that a training step needs, for the model FLOPs utilisation (MFU).

    Two for each weight of a matrix product and token, four for each feature of a head and allowed (query, key) pair,
    and twice as many again for the gradients. What is computed in vain (masked pairs, recomputation) is not counted,
    nor are the scores by which blocks are chosen.
    The pairs of a pattern are estimated from 512 rows; those that documents kept apart forbid are counted with them.
    """
    hidden = (3 if config.mlp == "swiglu" else 2) * _hidden(config)
    weights = config.layers * config.features * (4 * config.features + hidden) + 256 * config.features
    pairs = [allowed_pairs(pattern, config.seq_len) for pattern in _patterns(config)]
    pairs = sum(pairs[layer % len(pairs)] for layer in range(config.layers))
    forward = config.batch_size * (2 * weights * config.seq_len + 4 * config.features * pairs)
    return 3.0 * forward


def allowed_pairs(pattern: Any, length: int) -> float:
    """Allowed pairs of a pattern, the mean over its heads."""
    if isinstance(pattern, sl.Scorer):
        return pattern.pairs(length)
    masks = pattern if isinstance(pattern, tuple) else (pattern,)
    edges = np.arange(_ROWS + 1) * length // _ROWS if length > _ROWS else np.arange(length + 1)
    rows = np.random.default_rng(0).integers(edges[:-1], edges[1:])[:, None]
    keys = np.arange(length)[None, :]
    counts = [np.count_nonzero(np.broadcast_to(mask(rows, keys), (rows.size, length))) for mask in masks]
    return float(np.mean(counts)) * length / rows.size
