"""Scorers on a GPU: what it takes to choose key blocks, and to attend to them, beside dense attention by cuDNN.

    python -m benchmarks.scorers --record scorers.json

One batch entry of random bfloat16 arrays. "choose" is the scores and the choice alone, "in XLA" the same without the
library's kernels; "fwd" and "fwd+bwd" are attention with the choice in it. cuDNN's is causal over all keys.
Milliseconds.

In the run that times it, a choice is checked against XLA's: 512 queries at the beginning, in the middle and at the end
must choose the same sets. Sums are rounded differently, so that one row in a thousand may differ. Times are taken as
`benchmarks.gpu` says; what attention computes is checked by `benchmarks.selections`.
"""

import argparse
import itertools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.scorers import as_scorer, base

from . import gpu
from .record import Record, add_option

ROWS, MOST_DIFFERENT = 512, 1e-3
METHODS = ["moba:block=128,count=16", "moba:block=64,count=32", "infllm:count=64,local=32"]
COLUMNS = "T", "heads", "method", "choose", "in XLA", "fwd", "fwd+bwd", "cuDNN fwd", "fwd+bwd", "different rows"
Timing = argparse.Namespace(groups=5, calls=10)


def different(scorer: sl.Scorer, query: jax.Array, key: jax.Array, ids: jax.Array) -> float:
    """The share of rows that choose other blocks than XLA says.

    Raises:
      ArithmeticError: there are too many of them.
    """
    length, pooled, found = query.shape[1], scorer.pool(key), []
    choice = jax.jit(lambda q, pooled, at: scorer.choice(q, pooled, at, at * 0, length, None))
    for first in {0, (length - ROWS) // 2, length - ROWS}:
        rows = slice(first, first + ROWS)
        right = choice(query[:, rows], pooled, jnp.arange(length)[None, rows])
        found.append((np.sort(right, -1) != np.sort(ids[:, rows], -1)).any(-1).mean())
    share = float(np.mean(found))
    if not share <= MOST_DIFFERENT:
        raise ArithmeticError(f"{scorer}: {share:.1%} of the rows choose other blocks than XLA says")
    return share


def choosing(scorer: sl.Scorer, query: jax.Array, key: jax.Array, kernels: bool) -> tuple[jax.Array, float]:
    """(ids, milliseconds) of a choice, with the kernels that there are or without them."""
    with mock.patch.object(base, "_has_kernels", base._has_kernels if kernels else lambda *_: False):
        select = jax.jit(lambda q, k: scorer.select(q, k).ids)
        ids = select(query, key)
    return ids, gpu.median_ms(lambda: select(query, key), jax.block_until_ready, Timing)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", nargs="+", type=int, default=[32, 8])
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="scorers, by name")
    parser.add_argument("--without-xla", action="store_true", help="do not time the choice in XLA")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(f"{record.heading}\n")
    record.say(f"| {' | '.join(COLUMNS)} |\n| {' | '.join(['---'] * len(COLUMNS))} |")
    for length, key_heads in itertools.product(options.lengths, options.key_heads):
        arrays = query, key, *_ = gpu.inputs(length, 1, options.heads, options.head_size, key_heads)
        dense = gpu.cudnn(gpu.patterns(length)["causal"], arrays)
        times = {f"cuDNN {x}": gpu.median_ms(call, dense.wait, Timing) for x, call in dense.calls.items()}
        for method in options.methods:
            scorer = as_scorer(method)
            assert scorer is not None
            if not scorer.chooses(length):
                continue
            ids, times["choose"] = choosing(scorer, query, key, kernels=True)
            wrong = different(scorer, query, key, ids)
            del ids
            times["in XLA"] = 0.0 if options.without_xla else choosing(scorer, query, key, kernels=False)[1]
            own = gpu.in_jax(sl.make_attention_fn(sl.Causal(), length, selection=scorer), arrays)
            times |= {x: gpu.median_ms(call, own.wait, Timing) for x, call in own.calls.items()}
            labels = {"seq_len": length, "heads": f"{options.heads}:{key_heads}", "method": method}
            record.add(**labels, **times, different=wrong)
            order = "choose", "in XLA", "fwd", "fwd+bwd", "cuDNN fwd", "cuDNN fwd+bwd"
            cells = [*map(str, labels.values()), *(gpu.digits(times[x]) for x in order), f"{wrong:.1e}"]
            record.say(f"| {' | '.join(cells)} |")
    record.write()


if __name__ == "__main__":
    sys.exit(main())
