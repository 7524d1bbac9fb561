"""Selections on a GPU: blocks chosen at run time beside the same blocks as a mask, by single queries, and by 64.

    python -m benchmarks.selections --record selections.json

First table: B=2, T=16384, 16 heads of 128; twelve random 128-blocks and the diagonal one for every 128 queries, as a
mask known beforehand, and as a `Selection` of which each head has its own. The lists of a selection are made in every
call, forward and backward.

Second table: one batch entry, 16 query heads of 128; every query chooses 16 blocks of keys, its own among them, by
`top_k_blocks` of random scores: independent ones, or ones that change slowly from query to query, as a trained model's
do. "union" is how many blocks 4 and 32 neighbouring queries choose together, as a multiple of 16. cuDNN is its causal
attention over all keys. Milliseconds, and TFLOP/s in brackets, which count chosen (query, key) pairs in the past.

Third table: one batch entry, T=109632, 24 heads of 128 without a mask, as in models of videos; every 64 queries choose
64 random blocks of 64 keys, by ``--implementation`` and by 'triton'. Units are those of the second table. Only the
last 512 queries choose the last 512 keys, so that these can be checked alone.

Results are checked in the run that times them, and timed, as `benchmarks.gpu` says; with grouped heads out and dq only.
"""

import argparse
import itertools
import sys
from typing import Any

import jax
import numpy as np

import sparse_layers as sl

from . import contenders, gpu
from .contenders import Contender
from .record import Record, add_option

HEADS, SIZE, BLOCK, CHOSEN = 16, 128, 128, 16
VIDEO_BLOCK, VIDEO_HEADS, VIDEO_CHOSEN = 64, 24, 64  # queries and keys of a block, heads, and choices of the third
Timing = argparse.Namespace(groups=5, calls=10)


def chosen_by_queries(seq_len: int, agree: bool, block: int = BLOCK) -> np.ndarray:
    """ids [T, 16] of the blocks that queries choose, all heads alike."""
    blocks, anchors = seq_len // block, seq_len // 64 + 1

    @jax.jit
    def choose():
        keys = jax.random.split(jax.random.key(seq_len), 2)
        noise = jax.random.normal(keys[0], (seq_len, blocks))
        slow = jax.random.normal(keys[1], (anchors, blocks))
        stretch, share = np.divmod(np.arange(seq_len), 64)
        between = slow[stretch] + (share / 64)[:, None] * (slow[stretch + 1] - slow[stretch])
        scores = between + 0.12 * noise if agree else noise
        return sl.top_k_blocks(scores[None, :, None], CHOSEN, block=block, forced=sl.Window(0)).ids[0, :, 0]

    return np.asarray(choose())


def union(ids: np.ndarray, neighbours: int) -> float:
    """Returns the blocks that neighbours select together, as a multiple of those of one, at the end of the sequence."""
    rows = ids[-4096:].reshape(-1, neighbours * ids.shape[1])
    return float(np.mean([len(np.unique(row)) for row in rows])) / ids.shape[1]


def times(report: Any, name: str, exact: gpu.Exact, contender: Contender, grouped: bool, **labels: Any) -> dict:
    """Milliseconds by direction of results that are right."""
    ms = {}
    for direction, call in contender.calls.items():
        result = call()
        contender.wait(result)
        answers = result[:2] if grouped and direction != "fwd" else result
        errors = exact.check(map(contender.fetch, answers if direction != "fwd" else (answers,)))
        del result, answers
        ms[direction] = gpu.median_ms(call, contender.wait, Timing)
        report.add(**labels, direction=direction, ms=ms[direction], errors=errors)
        print(f"{name}, {direction}: {ms[direction]:.3f} ms ({errors})", flush=True)
    return ms


def selection_of(ids: np.ndarray, batch: int, heads: int, granularity: int, block: int = BLOCK) -> sl.Selection:
    """The same choice for every batch entry and head, each with ids of its own."""
    return sl.Selection(np.tile(ids[None, :, None], (batch, 1, heads, 1)), block=block, granularity=granularity)


def selected(mask: sl.Mask, arrays: list[jax.Array], selection: sl.Selection, implementation: str) -> Contender:
    """Our op with a selection."""

    def attend(q, k, v, selection):
        return sl.block_sparse_attention(q, k, v, mask, selection=selection, implementation=implementation)

    return contenders.in_jax(attend, arrays, selection)


def of_blocks(record: Record, options: argparse.Namespace) -> None:
    """The first table."""
    pattern = contenders.patterns(options.seq_len)["random"]
    arrays = gpu.inputs(options.seq_len, 2, HEADS, SIZE)
    exact, table = gpu.Exact(pattern, arrays), np.asarray(pattern.table)
    most = int(table.sum(1).max())
    ids = np.stack([np.pad(np.flatnonzero(row), (0, most - row.sum()), constant_values=-1) for row in table])
    selection = selection_of(ids.astype(np.int32), 2, HEADS, BLOCK)
    ways = {
        "mask": contenders.ours(pattern, arrays, options.implementation),
        "selection": selected(sl.Full(), arrays, selection, options.implementation),
    }
    ms_by_way = {way: times(record, way, exact, ways[way], False, table="blocks", way=way) for way in ways}
    lines = ["| | fwd | fwd+bwd |", "| --- | --- | --- |"]
    lines += [f"| {way} | {gpu.digits(x['fwd'])} | {gpu.digits(x['fwd+bwd'])} |" for way, x in ms_by_way.items()]
    shares = [gpu.ratio(ms_by_way["selection"][x], ms_by_way["mask"][x]) for x in gpu.DIRECTIONS]
    record.say("\n".join([*lines, f"| selection / mask | {shares[0]} | {shares[1]} |", ""]))


def of_queries(record: Record, options: argparse.Namespace) -> None:
    """The second table."""
    columns = (
        "T",
        "query heads of a key head",
        "block",
        "choices",
        "union of 4",
        "of 32",
        "fwd",
        "fwd+bwd",
        "cuDNN fwd",
        "fwd+bwd",
    )
    record.say(f"| {' | '.join(columns)} |\n| {' | '.join(['---'] * len(columns))} |")
    for seq_len in options.lengths:
        full = gpu.inputs(seq_len, 1, HEADS, SIZE)
        for group in options.groups:
            arrays = [full[0], *(x[:, :, : HEADS // group] for x in full[1:3]), full[3]]
            dense = contenders.cudnn(contenders.patterns(seq_len)["causal"], arrays)
            dense_ms = {x: gpu.median_ms(call, dense.wait, Timing) for x, call in dense.calls.items()}
            for block, choices in itertools.product(options.blocks, options.choices):
                ids = chosen_by_queries(seq_len, choices == "agree", block)
                table = np.zeros((seq_len, seq_len // block + 1), np.int8)
                np.put_along_axis(table, ids, 1, axis=1)
                pattern = contenders.Pattern(
                    sl.Causal(), lambda q, k, table, n=block: (k <= q) & (table[q, k // n] == 1), table[:, :-1]
                )
                selection = selection_of(ids, 1, HEADS // group, 1, block)
                contender = selected(sl.Causal(), arrays, selection, options.implementation)
                labels = {"table": "queries", "seq_len": seq_len, "group": group, "block": block, "choices": choices}
                name = f"T={seq_len}, {group} to a key head, blocks of {block}, {choices}"
                ms = times(record, name, gpu.Exact(pattern, arrays), contender, group > 1, **labels)
                record.add(**labels, who="cuDNN", **dense_ms)
                scale = 4 * SIZE * HEADS / 1e9 * gpu.pairs_of(pattern, seq_len)
                cells = [str(seq_len), str(group), str(block), choices, *(f"{union(ids, n):.2f}" for n in (4, 32))]
                rates = zip(ms.values(), gpu.DIRECTIONS.values(), strict=True)
                cells += [f"{gpu.digits(x)} ({factor * scale / x:.0f})" for x, factor in rates]
                record.say(f"| {' | '.join([*cells, *map(gpu.digits, dense_ms.values())])} |")


def chosen_by_64(seq_len: int) -> np.ndarray:
    """ids [T / 64, 64] of the blocks that 64 queries choose; only the last 512 queries choose the last 512 keys."""
    blocks, last = seq_len // VIDEO_BLOCK, gpu.CHUNK // VIDEO_BLOCK
    scores = np.random.default_rng(0).random((blocks, blocks), np.float32)
    scores[:-last, -last:] = 1
    scores[-last:, -last:] = -1  # else some of these keys have no gradient to compare
    return np.argpartition(scores, VIDEO_CHOSEN, axis=1)[:, :VIDEO_CHOSEN].astype(np.int32)


def of_video(record: Record, options: argparse.Namespace) -> None:
    """The third table."""
    seq_len = options.video_len
    arrays, ids = gpu.inputs(seq_len, 1, VIDEO_HEADS, SIZE), chosen_by_64(seq_len)
    table = np.zeros((seq_len // VIDEO_BLOCK,) * 2, np.int8)
    np.put_along_axis(table, ids, 1, axis=1)
    # "Causal" says here that the last queries alone see the last keys.
    pattern = contenders.Pattern(
        sl.Full(), lambda q, k, table: table[q // VIDEO_BLOCK, k // VIDEO_BLOCK] == 1, table, causal=True
    )
    exact, selection = gpu.Exact(pattern, arrays), selection_of(ids, 1, VIDEO_HEADS, VIDEO_BLOCK, VIDEO_BLOCK)
    scale = 4 * SIZE * VIDEO_HEADS / 1e9 * seq_len * VIDEO_BLOCK * VIDEO_CHOSEN
    record.say("| T | by | fwd | fwd+bwd |\n| --- | --- | --- | --- |")
    for name in dict.fromkeys((options.implementation, "triton")):
        contender = selected(sl.Full(), arrays, selection, name)
        ms = times(record, f"T={seq_len}, {name}", exact, contender, False, table="video", by=name)
        rates = zip(ms.values(), gpu.DIRECTIONS.values(), strict=True)
        cells = [str(seq_len), f"`{name}`", *(f"{gpu.digits(x)} ({factor * scale / x:.0f})" for x, factor in rates)]
        record.say(f"| {' | '.join(cells)} |")


TABLES = {"blocks": of_blocks, "queries": of_queries, "video": of_video}


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton", choices=sl.implementations())
    parser.add_argument("--tables", nargs="+", default=[*TABLES], choices=TABLES)
    parser.add_argument("--seq-len", type=int, default=16384, help="of the first table")
    parser.add_argument("--lengths", nargs="*", type=int, default=[8192, 32768, 131072], help="of the second")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4, 8, 16], help="query heads of a key head")
    parser.add_argument("--blocks", nargs="+", type=int, default=[BLOCK, 64], help="keys in a block of the second")
    parser.add_argument("--choices", nargs="+", default=["agree", "independent"], choices=["agree", "independent"])
    parser.add_argument("--video-len", type=int, default=109632, help="of the third")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading + "\n")
    for table in options.tables:
        TABLES[table](record, options)
    record.write()


if __name__ == "__main__":
    sys.exit(main())
