"""Scorers on a GPU: what it takes to score and choose key blocks, and to attend to them, beside dense attention.

    python -m benchmarks.scorers --record scorers.json

Random bfloat16 arrays of --tokens tokens, in as many batch entries as there are sequences. "scores" are the scores
alone, where a kernel of their own computes them, "choose" scores and choice; "all" is attention with these in it, so
that attention is what "all" takes beyond "choose". cuDNN's is causal over all keys, and "x cuDNN" how many times as
long it takes, forward and backward. Milliseconds. "memory" is what the compiler plans for arguments, results and
whatever lies between, forward and backward, over cuDNN's. NSA chooses by means of keys here, in place of the keys that
its layer compresses, and its other branches are left out, as is the loss by which MSA's index learns.

In the run that times it, a choice is checked against XLA's: of what queries at the beginning, in the middle and at the
end choose, one block in a thousand may be another one, for sums are rounded differently. Times are taken as
`benchmarks.gpu` says; what attention computes is checked by `benchmarks.selections`. What fails is named below the
table, and what there was no time for is left out.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.ops.kernels.select_gpu import choose, score
from sparse_layers.scorers import as_scorer

from . import contenders, gpu
from .record import Record, add_option

ROWS, MAX_DIFFERENT = 256, 1e-3
METHODS = [
    "moba:block=128,count=16",
    "msa:block=128,count=16",
    "infllm:block=64,count=32,local=16,dense_below=0",
    "nsa:block=64,count=32",
]
TIMES = ["scores", "choose", "all fwd", "all fwd+bwd", "cuDNN fwd", "cuDNN fwd+bwd"]
COLUMNS = ["T", "heads", "method", *TIMES, "x cuDNN", "memory", "different"]
Timing = argparse.Namespace(groups=3, calls=10)


def measured(function: Callable[..., Any], *arrays: jax.Array) -> tuple[Any, float, int]:
    """Returns the result of a function, its milliseconds, and the bytes that its program plans for."""
    program = jax.jit(function).lower(*arrays).compile()
    plan: Any = program.memory_analysis()
    bytes_planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    result = jax.block_until_ready(program(*arrays))
    return result, gpu.median_ms(lambda: program(*arrays), jax.block_until_ready, Timing), bytes_planned


def different(scorer: sl.Scorer, query: jax.Array, key: jax.Array, ids: jax.Array) -> float:
    """The share of blocks that queries choose and that they would not choose if XLA computed it.

    Raises:
      ArithmeticError: there are too many of them.
    """
    length, pooled, shares = query.shape[1], scorer.pool(key[:1]), []
    choice = jax.jit(lambda q, pooled, rows_at: scorer.select_rows(q, pooled, rows_at, rows_at * 0, length, None))
    for first in {0, (length - ROWS) // 2, length - ROWS}:
        rows = slice(first, first + ROWS)
        right = np.asarray(choice(query[:1, rows], pooled, jnp.arange(length)[None, rows]))
        ours = np.asarray(ids[:1, rows])
        shares.append(1 - (ours[..., None] == right[..., None, :]).any(-1).mean())
    share = float(np.mean(shares))
    if not share <= MAX_DIFFERENT:
        raise ArithmeticError(f"{share:.1%} of the chosen blocks are not those that XLA chooses")
    return share


class Run:
    """The measurements of one length and one number of key heads.

    Args:
      record: where it goes.
      options: of the command line.
      length: tokens of a sequence.
      key_heads: heads of the keys.
      deadline: when no more is begun, by `time.monotonic`.
    """

    def __init__(self, record: Record, options: argparse.Namespace, length: int, key_heads: int, deadline: float):
        self.record, self.options, self.deadline, self.failures = record, options, deadline, list[str]()
        self.length, self.key_heads, self.heads = length, key_heads, f"{options.heads}:{key_heads}"
        batch = max(1, options.tokens // length)
        self.arrays = gpu.inputs(length, batch, options.heads, options.head_size, key_heads)
        # The index of MSA: a query for each key head, a key for all.
        self.index = gpu.inputs(length, batch, key_heads, options.head_size, 1)[:2]
        self.dense: dict[str, tuple[Any, float, int]] = {}
        if self.in_time("cuDNN"):
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            self.dense = self.both_ways("cuDNN", "cuDNN", attend)

    def attempt(self, method: str, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a function, or None and says why it failed."""
        try:
            return function(*arguments)
        except Exception as error:  # whatever it is, the others can still be measured
            self.fail(method, f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
            return None

    def in_time(self, method: str) -> bool:
        """True if there is time for another measurement; says so if not."""
        is_over = time.monotonic() > self.deadline
        if is_over:
            self.fail(method, "left out: no time")
        return not is_over

    def fail(self, method: str, why: str) -> None:
        """Keeps why something is missing."""
        self.failures.append(f"T={self.length}, {self.heads}, {method}: {why}")
        self.record.add(seq_len=self.length, heads=self.heads, method=method, failed=why)
        print(self.failures[-1], file=sys.stderr, flush=True)

    def both_ways(self, method: str, name: str, attend: Callable, *operands: Any) -> dict[str, tuple[Any, float, int]]:
        """Returns the results of `measured` for attention forward, and forward and backward, as far as they succeed."""
        q, k, v, dout = self.arrays
        forward_backward = functools.partial(contenders.gradients, attend)
        calls = {"fwd+bwd": (forward_backward, q, k, v, dout, *operands), "fwd": (attend, q, k, v, *operands)}
        results = {
            f"{name} {way}": self.attempt(method, f"{name} {way}", measured, *call) for way, call in calls.items()
        }
        return {way: (None, *result[1:]) for way, result in results.items() if result}  # results take memory

    def of(self, method: str) -> None:
        """One row of the table."""
        scorer = as_scorer(method)
        assert scorer is not None
        if not scorer.selects(self.length) or not self.in_time(method):
            return
        scored = tuple(self.index if scorer.indexed else self.arrays[:2])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *index: jax.Array) -> jax.Array:
            scored_query, scored_key = index or (q, k)
            selection = scorer.select(scored_query, scored_key)
            return sl.block_sparse_attention(q, k, v, sl.Causal(), selection=selection)

        results: dict[str, Any] = {}
        results["choose"] = self.attempt(method, "choose", measured, lambda q, k: scorer.select(q, k).ids, *scored)
        wrong = None
        if results["choose"]:
            wrong = self.attempt(method, "check", different, scorer, *scored, results["choose"][0])
            results["choose"] = None, *results["choose"][1:]
        if scorer.formula not in (None, score.Formula.PRODUCT):
            with mock.patch.object(
                choose, "select_by_scores", lambda rule, scores, *_: scores[..., : rule.count].astype(int)
            ):
                results["scores"] = self.attempt(
                    method, "scores", measured, lambda q, k: scorer.select(q, k).ids, *scored
                )
        results |= self.dense | self.both_ways(method, "all", attend, *(scored if scorer.indexed else ()))
        ms = {name: result[1] for name, result in results.items() if result}
        sizes = {name: result[2] for name, result in results.items() if result}
        memory = sizes.get("all fwd+bwd", 0) / sizes.get("cuDNN fwd+bwd", np.inf)
        self.record.add(
            seq_len=self.length,
            batch=len(self.arrays[0]),
            heads=self.heads,
            method=method,
            ms=ms,
            bytes=sizes,
            different=wrong,
        )
        cells = [str(self.length), self.heads, method, *(gpu.digits(ms.get(name)) for name in TIMES)]
        cells += [gpu.ratio(ms.get("cuDNN fwd+bwd"), ms.get("all fwd+bwd")), gpu.digits(memory)]
        cells += ["failed" if wrong is None else f"{wrong:.1e}"]
        self.record.say(f"| {' | '.join(cells)} |")


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[131072, 32768, 8192, 65536])
    parser.add_argument("--tokens", type=int, default=131072, help="of all batch entries together")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", nargs="+", type=int, default=[8, 2])
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="scorers, by name")
    parser.add_argument("--seconds", type=float, default=200, help="after which nothing more is begun")
    add_option(parser)
    options = parser.parse_args()
    record, deadline, failures = Record(options.record, jax.devices()[0].device_kind), time.monotonic(), list[str]()
    record.say(f"{record.heading}\n")
    record.say(f"| {' | '.join(COLUMNS)} |\n| {' | '.join(['---'] * len(COLUMNS))} |")
    for length, key_heads in itertools.product(options.lengths, options.key_heads):
        run = Run(record, options, length, key_heads, deadline + options.seconds)
        for method in options.methods:
            run.attempt(method, "all of it", run.of, method)
        failures += run.failures
    record.say("\n".join(["", *failures]))
    record.write()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
