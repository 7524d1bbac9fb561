"""Multi-query associative recall (MQAR): values that are told far before they are asked for.

As in Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models", with filler between; of
one pair and one query it is a needle in a haystack.
"""

import hashlib

import numpy as np

from ..training.data import Batch, Source

# A byte tells by its range what it is; filler has the rest.
KEYS = range(64)
VALUES = range(64, 128)
FILLER = range(128, 256)


def sequences(entropy: list[list[int]], seq_len: int, pairs: int, queries: int) -> Batch:
    """A sequence for each entry of ``entropy``, in which nothing but the answers to the queries counts.

    Pairs (a key and its value) lie at random places of the first quarter of the ``seq_len + 1`` bytes, queries (a key
    and its answer) of the last one. So an answer follows its value by ``seq_len / 2`` to ``seq_len`` bytes. The keys
    are the same in every sequence, in another order, and each is told once and asked for once at most: what a query
    needs is nowhere but in its pair.

    Args:
      entropy: [B], what each sequence is drawn from, a pure function of it.
      seq_len: at least ``8 * pairs``.
      pairs: at most as many as there are keys.
      queries: at most ``pairs``.

    Example:
      >>> tokens, _, answers = sequences([[0]], seq_len=16, pairs=2, queries=1)
      >>> asked = answers[0].argmax()
      >>> key, answer = tokens[0, asked : asked + 2]
      >>> told = tokens[0].tolist().index(key)
      >>> bool(told < 4 and asked >= 12 and tokens[0, told + 1] == answer)
      True
    """
    tokens = np.empty((len(entropy), seq_len + 1), np.int32)
    answers = np.zeros((len(entropy), seq_len), bool)
    for row, counts, source in zip(tokens, answers, entropy, strict=True):
        random = np.random.default_rng(source)
        row[:] = random.choice(FILLER, seq_len + 1)
        told = np.stack([random.permutation(KEYS[:pairs]), random.choice(VALUES, pairs)], 1)
        quarter = seq_len // 4
        _write(row[:quarter], told, random)
        asked = _write(row[-quarter:], random.permutation(told)[:queries], random)
        # The answer is the byte after the query's key, and so is the target there.
        counts[seq_len + 1 - quarter + asked] = True
    return Batch(tokens, None, answers)


def _write(part: np.ndarray, items: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Writes ``items`` [N, 2] at places of ``part`` where none overlaps another: where each begins, [N]."""
    count = len(items)
    starts = np.sort(random.choice(part.size - count, count, replace=False)) + np.arange(count)
    part[starts], part[starts + 1] = items.T
    return starts


def source(seed: int, seq_len: int, batch_size: int, pairs: int, queries: int) -> Source:
    """Sequences made when they are asked for: those of a step from ``seed``, those held out the same for all seeds."""

    def made(seed: int, heldout: bool, first: int, count: int) -> Batch:
        return sequences([[seed, heldout, first + i] for i in range(count)], seq_len, pairs, queries)

    def batch(step: int) -> Batch:
        return made(seed, False, step * batch_size, batch_size)

    # NumPy may draw others in another version, with which a run must not go on.
    digest = hashlib.sha256(batch(0).tokens.tobytes()).hexdigest()
    return Source(digest, 2**32, batch, lambda count: made(0, True, 0, count))
