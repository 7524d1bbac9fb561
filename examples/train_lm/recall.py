"""Multi-query associative recall (MQAR): values that are told far before they are asked for.

As in Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models", with filler between; of
one pair and one query it is a needle in a haystack.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from ..training.data import Batch, Source

# A byte tells by its range what it is; filler has the rest.
KEYS = range(64)
VALUES = range(64, 128)
FILLER = range(128, 256)


def sequences(
    entropy: list[list[int]], seq_len: int, pairs: int, queries: int, num_documents: Sequence[int] | None = None
) -> Batch:
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
      num_documents: [B], the number of documents of each sequence, which must divide ``seq_len``. Documents are kept
        apart, and each is such a sequence with a pair in 8 bytes at most. None: there are no documents.

    Example:
      >>> tokens, _, answers, _ = sequences([[0]], seq_len=16, pairs=2, queries=1)
      >>> asked = answers[0].argmax()
      >>> key, answer = tokens[0, asked : asked + 2]
      >>> told = tokens[0].tolist().index(key)
      >>> bool(told < 4 and asked >= 12 and tokens[0, told + 1] == answer)
      True
    """
    tokens = np.empty((len(entropy), seq_len + 1), np.int32)
    segments, answers = np.zeros_like(tokens), np.empty((len(entropy), seq_len), bool)
    rows = zip(tokens, segments, answers, entropy, num_documents or [1] * len(entropy), strict=True)
    for row, segment, counts, source, count in rows:
        tokens_of_documents, asked = _documents(np.random.default_rng(source), count, seq_len // count, pairs, queries)
        # Behind a document that another one follows comes that one's first byte, and no answer.
        row[:-1], row[-1] = tokens_of_documents[:, :-1].reshape(-1), tokens_of_documents[-1, -1]
        segment[:] = np.minimum(np.arange(seq_len + 1) * count // seq_len, count - 1)
        asked[:-1, -1] = False
        counts[:] = asked.reshape(-1)
    return Batch(tokens, None if num_documents is None else segments, answers)


def _documents(
    random: np.random.Generator, count: int, length: int, pairs: int, queries: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents of a sequence: their bytes [P, L + 1], and which of the next bytes are answers [P, L]."""
    pairs, quarter = min(pairs, length // 8), length // 4
    tokens = random.integers(FILLER.start, FILLER.stop, (count, length + 1))
    keys = random.permuted(np.tile(KEYS[:pairs], (count, 1)), axis=1)
    stored = np.stack([keys, random.integers(VALUES.start, VALUES.stop, keys.shape)], 2)
    _write(tokens[:, :quarter], stored, random)
    asked = random.random(keys.shape).argsort(1)[:, : min(queries, pairs), None]
    asked = _write(tokens[:, -quarter:], np.take_along_axis(stored, asked, 1), random)
    # The answer is the byte after the query's key, and so is the target there.
    answers = np.zeros((count, length), bool)
    np.put_along_axis(answers, length + 1 - quarter + asked, True, 1)
    return tokens, answers


def _write(rows: np.ndarray, records: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Writes ``records`` [P, N, 2] at random into ``rows`` [P, L], none over another: where each begins, [P, N]."""
    count = records.shape[1]
    places = random.random((len(rows), rows.shape[1] - count)).argsort(1)[:, :count]
    starts = np.sort(places, 1) + np.arange(count)
    for i in range(2):
        np.put_along_axis(rows, starts + i, records[..., i], 1)
    return starts


def source(seed: int, seq_len: int, batch_size: int, pairs: int, queries: int, num_documents: int = 1) -> Source:
    """Sequences made when they are asked for: those of a step from ``seed``, those held out the same for all seeds.

    Args:
      seed: of what is learnt.
      seq_len: as in `sequences`, as are pairs and queries.
      batch_size: sequences in a step.
      pairs: told in a sequence.
      queries: asked in a sequence.
      num_documents: the sequences of a step are cut into 1, 4, 16, ... and so many in turn, those held out are whole.
    """
    levels = [4**i for i in range(num_documents.bit_length() // 2 + 1)]

    def sequences_of(seed: int, heldout: bool, first: int, count: int) -> Batch:
        numbers = range(first, first + count)
        cut = [1 if heldout else levels[i % len(levels)] for i in numbers] if num_documents > 1 else None
        return sequences([[seed, heldout, i] for i in numbers], seq_len, pairs, queries, cut)

    def batch(step: int) -> Batch:
        return sequences_of(seed, False, step * batch_size, batch_size)

    # NumPy may draw others in another version, with which a run must not go on.
    digest = hashlib.sha256(batch(0).tokens.tobytes()).hexdigest()
    return Source(digest, 2**32, batch, lambda count: sequences_of(0, True, 0, count))
