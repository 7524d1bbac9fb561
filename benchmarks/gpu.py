"""GPU kernels beside cuDNN, FlashAttention-3 and FlexAttention: speed by pattern and length, memory, break-even.

    python -m benchmarks.gpu speed --head-size 128 --patterns causal strided --record speed.json

Sections, all by default: ``memory`` of a long layer; ``speed`` of each pattern; ``grouped``, keys that all attend to,
under grouped heads; ``density`` at which block-random masks cost as much as dense causal attention; ``lengths``
of sequences. Needs jax[cuda13]; FlexAttention is left out where there is no torch, FlashAttention-3 where there is no
flash_attn3_jax.

Every result is checked in the run that times it: outputs and gradients of two heads against float64, computed by
formulas of its own and from a rule of its own for each pattern. In every 128 rows an error may be as large as twice
(the error of dense attention in their dtype + eps x the largest value there); "0.40 of budget" is the worst of them.
What fails gets no time. Beyond 16384 tokens only the last 512 queries and keys are checked (later queries alone see
these).
Times are medians of 5 groups of 10 calls (fewer beyond 50 ms) after two warm-up calls and the check; forward + backward
returns out, dq, dk and dv for a random gradient of out. TFLOP/s count allowed (query, key) pairs only: 4 x head size a
pair forward, 3.5 times that for both.
"""

import argparse
import functools
import importlib
import importlib.util
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from .contenders import (
    BLOCK,
    Contender,
    Pattern,
    block_pattern,
    cudnn,
    default_choice,
    flash_attention_3,
    flex,
    gradients,
    op,
    ours,
    patterns,
)
from .record import Record, add_option

CHUNK, WHOLE = 512, 16384  # rows of the reference at a time; longest checked in full
NAMES = "out", "dq", "dk", "dv"
DIRECTIONS = {"fwd": 1.0, "fwd+bwd": 3.5}  # and their operations, where v is as wide as k
SPEED = ["causal", "window", "random", "strided", "fixed", "document", "longformer"]
LONG = (1, 8, 64)  # batch, heads and head size of the sections lengths and memory
FLEX_LENGTHS = (4096, 16384, 65536)  # compiling it takes longer than running it


def inputs(
    seq_len: int,
    batch: int,
    heads: int,
    head_size: int,
    key_heads: int | None = None,
    dtype: str = "bfloat16",
    value_size: int | None = None,
) -> list[jax.Array]:
    """Random q, k, v and gradient of out."""
    keys = jax.random.split(jax.random.key(seq_len + head_size), 4)
    numbers = heads, key_heads or heads, key_heads or heads, heads
    sizes = head_size, head_size, value_size or head_size, value_size or head_size
    rows = zip(keys, numbers, sizes, strict=True)
    return [jax.random.normal(x, (batch, seq_len, n, size), dtype) for x, n, size in rows]


# --- what is right ---------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="dtype")
def attention_of_rows(q, k, v, dout, allowed, dtype, bias=None) -> tuple[jax.Array, ...]:
    """Dense attention of some queries in one dtype throughout: out, dq, and what these queries add to dk and dv.

    With a bias [n, t, s] of logits, its gradient comes last.
    """
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    scale, total = q.shape[-1] ** -0.5, jnp.promote_types(dtype, jnp.float32)
    scores = jnp.einsum("tnh,snh->nts", q, k) * scale
    if bias is not None:
        scores += bias.astype(dtype)
    p = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
    out = jnp.einsum("nts,snh->tnh", p, v)
    dscores = p * (jnp.einsum("tnh,snh->nts", dout, v) - (out * dout).sum(-1).T[..., None])
    dq = jnp.einsum("nts,snh->tnh", dscores, k) * scale
    dk = jnp.einsum("nts,tnh->snh", dscores, q, preferred_element_type=total) * scale
    dv = jnp.einsum("nts,tnh->snh", p, dout, preferred_element_type=total)
    return (out, dq, dk, dv) if bias is None else (out, dq, dk, dv, dscores)


class Exact:
    """Attention and gradients in float64 for the first and last head of the last batch entry, and the budgets."""

    rows: Any = None  # the only queries whose out has a gradient in the check; None for all

    def __init__(self, pattern: Pattern, arrays: list[jax.Array]):
        seq_len = arrays[0].shape[1]
        # The last keys of a causal pattern are seen by the last queries alone: their gradients need no others.
        self.first = 0 if seq_len <= WHOLE or not pattern.causal else seq_len - CHUNK
        rule = jax.jit(lambda q, k, table: pattern.rule(q[:, None], k[None, :], table))
        table = None if pattern.table is None else jnp.asarray(pattern.table)
        positions, chunk = jnp.arange(seq_len, dtype=jnp.int32), math.gcd(seq_len, CHUNK)
        sample = [x[-1][:, np.array([0, -1])] for x in arrays]
        results: dict[Any, list[np.ndarray]] = {}
        dtype_of_call = arrays[0].dtype.name
        for dtype in ("float64", dtype_of_call):
            chunks = []
            with jax.enable_x64(True):
                dk = dv = jnp.zeros((), dtype if dtype == "float64" else "float32")
                for start in range(self.first, seq_len, chunk):
                    rows = slice(start, start + chunk)
                    q, dout = sample[0][rows], sample[3][rows]
                    allowed = rule(positions[rows], positions, table)
                    *out_and_dq, one_dk, one_dv = attention_of_rows(q, *sample[1:3], dout, allowed, dtype)
                    chunks.append(out_and_dq)
                    dk, dv = dk + one_dk, dv + one_dv
                out, dq = (jnp.concatenate(x) for x in zip(*chunks, strict=True))
                answers = [out, dq, *(x.astype(dtype)[self.first :] for x in (dk, dv))]
                results[dtype] = [np.asarray(x).astype(np.float64) for x in answers]
        self._set_budgets(results["float64"], results[dtype_of_call], dtype_of_call)

    def _set_budgets(self, right: list[np.ndarray], rough: list[np.ndarray], dtype: str) -> None:
        eps = float(jnp.finfo(dtype).eps)
        self.right = right
        self.budgets = [2 * (_largest(a - b) + eps * _largest(b)) for a, b in zip(rough, right, strict=True)]

    def check(self, answers: Iterable[np.ndarray]) -> str:
        """Returns the errors of out, or of out, dq, dk and dv [T, 2, H] (and of a table [L, 2, 1]), in words.

        Raises:
          ArithmeticError: one is too large.
        """
        text, fine = [], True
        for name, answer, right, budget in zip((*NAMES, "dtable"), answers, self.right, self.budgets):  # noqa: B905
            errors = _largest(answer[self.first :] - right)
            worst = int(np.argmax(errors / budget))  # a NaN counts as the largest
            share = errors[worst] / budget[worst]
            fine = fine and bool(share <= 1)
            text.append(f"{name} {errors[worst]:.1e} is {share:.2f} of budget")
        if not fine:
            raise ArithmeticError(f"wrong result: {', '.join(text)}")
        return ", ".join(text)


def _largest(x: np.ndarray) -> np.ndarray:
    """The largest absolute value in every BLOCK rows."""
    return np.maximum.reduceat(np.abs(x).max((1, 2)), np.arange(0, len(x), BLOCK))


def pairs_of(pattern: Pattern, seq_len: int) -> int:
    """Number of allowed (query, key) pairs."""
    positions = jnp.arange(seq_len, dtype=jnp.int32)
    table = None if pattern.table is None else jnp.asarray(pattern.table)
    count = jax.jit(lambda q: pattern.rule(q[:, None], positions[None, :], table).sum(dtype=jnp.int32))
    chunk = math.gcd(seq_len, 4 * CHUNK)
    return sum(int(count(positions[start : start + chunk])) for start in range(0, seq_len, chunk))


# --- measuring -------------------------------------------------------------------------------------------------------


class Report:
    """The results so far: printed as they come, and written to a file if there is one."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.failures, self.section = options, 0, ""
        self.record = Record(options.record, jax.devices()[0].device_kind)
        self.start = self.section_start = time.monotonic()
        versions = (f"{name} {version}" for name, version in self.record.facts["versions"].items())
        self.environment = ", ".join([self.record.facts["device"], self.record.facts["date"][:10], *versions])
        self.say(self.environment)

    def begin(self, section: str) -> None:
        """A new section, with a time limit of its own."""
        self.section, self.section_start = section, time.monotonic()

    def say(self, line: str) -> None:
        """Prints a line with the time."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {line}", flush=True)

    def failed(self, what: str, error: Exception | str) -> None:
        """Prints why something is missing, in one line."""
        self.failures += 1
        kind = "" if isinstance(error, str) else f"{type(error).__name__}: "
        self.say(f"{what}: FAILED: {kind}{' '.join(str(error).split())[:800]}")

    def attempt(self, what: str, function: Callable, *args: Any) -> Any:
        """Returns the result of a function, or None and prints why it failed."""
        try:
            return function(*args)
        except Exception as error:
            self.failed(what, error)
            return None

    def over(self, what: str) -> bool:
        """True, with a line that says so, if the section has used up its time."""
        if time.monotonic() - self.section_start < self.options.seconds:
            return False
        self.say(f"{what}: skipped, {self.section} has used its {self.options.seconds} s")
        return True

    def add(self, **record: Any) -> None:
        """Keeps what was measured."""
        self.record.add(section=self.section, **record)

    def table(self, title: str, header: list[str], rows: list[list[str]]) -> None:
        """Prints a markdown table."""
        lines = [f"\n{title}\n"]
        lines += [f"| {' | '.join(x)} |" for x in (header, ["---"] * len(header), *rows)]
        self.record.say("\n".join([*lines, "", self.environment, ""]))


def median_ms(call: Callable[[], Any], wait: Callable[[Any], Any], options: argparse.Namespace) -> float:
    """Milliseconds of a call: median over groups of calls that are queued together."""

    def group(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        return (time.perf_counter() - start) / calls

    group(1)
    calls = min(options.calls, max(1, int(0.5 / group(1))))
    return statistics.median(group(calls) for _ in range(options.groups)) * 1e3


class Case:
    """One pattern and its inputs: whoever computes it is checked, then timed."""

    def __init__(
        self,
        report: Report,
        pattern: Pattern,
        arrays: list[jax.Array],
        labels: dict[str, Any],
        make_exact: Callable[..., Exact] = Exact,
    ):
        self.report, self.pattern, self.arrays, self.labels = report, pattern, arrays, labels
        self.name = ", ".join(x if isinstance(x, str) else f"{name}={x}" for name, x in labels.items())
        skip = report.over(self.name)
        self.exact: Any = None if skip else report.attempt(f"{self.name}, reference", make_exact, pattern, arrays)

    def run(
        self, contender_name: str, build: Callable[..., Contender], *options: Any, wanted: Iterable = DIRECTIONS
    ) -> dict[str, float]:
        """Milliseconds by direction, of those whose result is right."""
        name, times = f"{self.name}, {contender_name}", dict[str, float]()
        if self.exact is None or self.report.over(name):
            return times
        contender = self.report.attempt(name, build, self.pattern, self.arrays, *options)
        for direction in wanted if contender else ():
            record = self.report.attempt(f"{name}, {direction}", self.time, contender, direction)
            if record:
                times[direction] = record["ms"]
                self.report.add(**self.labels, who=contender_name, direction=direction, **record)
                about = f"first call {record['first_call_s']:.1f} s; {record['errors']}"
                self.report.say(f"{name}, {direction}: {record['ms']:.3f} ms ({about})")
        return times

    def time(self, contender: Contender, direction: str) -> dict[str, Any]:
        """Milliseconds of a call whose result is right; of a wrong one, an error."""
        start, call = time.monotonic(), contender.calls[direction]
        result = call() if self.exact.rows is None or direction == "fwd" else call(self.exact.rows)
        contender.wait(result)
        first = time.monotonic() - start
        answers = result if direction == "fwd+bwd" else (result,)
        if self.arrays[0].shape != self.arrays[1].shape:  # dk and dv are sums over heads that are not in the sample
            answers = answers[:2]
        errors = self.exact.check(map(contender.fetch, answers))
        del result, answers
        calls = 1
        if getattr(self.report.options, "loop", None) and contender.in_loop is not None:
            calls = self.report.options.loop
            call = contender.in_loop(direction, calls)
        ms = median_ms(call, contender.wait, self.report.options) / calls
        return {"ms": ms, "first_call_s": first, "errors": errors}


def digits(x: float | None) -> str:
    """Three significant digits, or a dash."""
    return "-" if not x else f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"


def ratio(above: float | None, below: float | None) -> str:
    """A quotient, or a dash."""
    return f"{above / below:.2f}" if above and below else "-"


# --- sections --------------------------------------------------------------------------------------------------------


def speed(report: Report, options: argparse.Namespace) -> None:
    """Every pattern and head size, ours beside FlexAttention, cuDNN and, if installed, FlashAttention-3."""
    for head_size in options.head_size:
        libraries = {"cuDNN": cudnn}
        if head_size <= 128 and importlib.util.find_spec("flash_attn3_jax"):  # it is built for these
            libraries["FA3"] = flash_attention_3
        sizes = options.seq_len, options.batch, options.heads, head_size, options.key_heads, options.dtype
        value_size = options.value_size or head_size
        arrays, rows = inputs(*sizes, value_size), []
        for name in options.patterns:
            pattern, mine = patterns(options.seq_len)[name], {}
            case = Case(report, pattern, arrays, {"D": head_size, "pattern": name})
            if case.exact is None:
                continue
            mine[name] = case.run(options.implementation, ours, options.implementation)
            if name == "document":
                mine[f"{name}, segment_ids"] = case.run("segment_ids", ours, options.implementation, True)
            choice = report.attempt(f"{name}, default", default_choice, pattern, arrays)
            report.say(f"{name}: implementation=None runs {choice!r}")
            if choice != options.implementation:
                mine[f"{name}, default: {choice}"] = case.run("default", ours, None)
            if options.beside:
                mine[f"{name}, {options.beside}"] = case.run(options.beside, ours, options.beside)
            theirs = [{} if options.no_flex else case.run("FlexAttention", flex)]
            theirs += [case.run(x, build) if pattern.cudnn else {} for x, build in libraries.items()]
            pairs = pairs_of(pattern, options.seq_len) * options.batch * options.heads / 1e9
            work = {
                "fwd": 2 * (head_size + value_size) * pairs,
                "fwd+bwd": 2 * (4 * head_size + 3 * value_size) * pairs,
            }
            for label, times in mine.items():
                rows.append([label])
                for direction, operations in work.items():
                    ms = [x.get(direction) for x in (times, *theirs)]
                    rows[-1] += [f"{digits(x)} ({operations / x:.0f})" if x else "-" for x in ms]
                    rows[-1].append(ratio(ms[1], ms[0]))
        heads = f"{options.heads}:{options.key_heads or options.heads}"
        size = f"{head_size}" if value_size == head_size else f"{head_size}/{value_size}"
        shape = f"B={options.batch}, T={options.seq_len}, H={heads}, D={size}, {options.dtype}"
        columns = [f"{who} {x}" for x in DIRECTIONS for who in ("ours", "Flex", *libraries, "Flex / ours")]
        title = f"{shape}; ms (TFLOP/s); ours is {options.implementation!r}"
        report.table(title, [f"D={size}", *columns], rows)


def lengths(report: Report, options: argparse.Namespace) -> None:
    """Time against T of dense attention and of some patterns."""
    curves = [("cuDNN", "causal"), *(("ours", x) for x in ("strided", "window", "fixed", "bigbird"))]
    curves += [] if options.no_flex else [("Flex", "strided"), ("Flex", "window")]
    curves += [("triton", x) for x in ("strided", "window", "fixed")] if options.implementation == "hopper" else []
    builds = {"ours": (ours, options.implementation), "triton": (ours, "triton"), "Flex": (flex,), "cuDNN": (cudnn,)}
    data = functools.cache(lambda seq_len: inputs(seq_len, *LONG))
    cases = functools.cache(lambda name, n: Case(report, patterns(n)[name], data(n), {"pattern": name, "T": n}))
    points: dict[str, dict[str, dict[int, float]]] = {x: {f"{a} {b}": {} for a, b in curves} for x in DIRECTIONS}
    for contender, name in curves:
        for seq_len in sorted(options.lengths):
            if contender == "Flex" and seq_len not in FLEX_LENGTHS:
                continue
            wanted = []
            for direction in DIRECTIONS:
                known = list(points[direction][f"{contender} {name}"].items())[-1:]
                predicted = sum(ms * (seq_len / n) ** 2 for n, ms in known)  # it grows no faster than that
                if predicted > 1000:
                    report.say(f"{contender}, {name}, {seq_len}, {direction}: skipped, may take {predicted:.0f} ms")
                else:
                    wanted.append(direction)
            for direction, ms in cases(name, seq_len).run(contender, *builds[contender], wanted=wanted).items():
                points[direction][f"{contender} {name}"][seq_len] = ms
    shape = "B={}, H={}, D={}, bfloat16".format(*LONG)
    for direction, times_by_curve in points.items():
        rows = [
            [curve, *(digits(times.get(n)) for n in sorted(options.lengths))] for curve, times in times_by_curve.items()
        ]
        title = f"{direction}, {shape}; ms; ours is {options.implementation!r}"
        report.table(title, ["T", *map(str, sorted(options.lengths))], rows)


def grouped(report: Report, options: argparse.Namespace) -> None:
    """Keys that everybody attends to, under grouped heads: their key blocks have lists far longer than the others'."""
    causal, head_size = sl.Causal(), options.head_size[0]
    masks = {
        "window 512 + 4 sinks": Pattern(
            causal & (sl.Window(511) | sl.Prefix(4)), lambda q, k, _: (k <= q) & ((q - k < 512) | (k < 4))
        ),
        "window 256 + 16 of 1024 + first 128": Pattern(
            causal & (sl.Window(255) | sl.Columns(1024, 0, 16) | sl.Prefix(128)),
            lambda q, k, _: (k <= q) & ((q - k < 256) | (k % 1024 < 16) | (k < 128)),
        ),
    }
    q, k, v, dout = inputs(options.seq_len, options.batch, options.heads, head_size)
    rows = []
    for name, pattern in masks.items():
        for key_heads in (options.heads, options.heads // 4, 1):
            arrays = [q, k[:, :, :key_heads], v[:, :, :key_heads], dout]
            case = Case(report, pattern, arrays, {"D": head_size, "pattern": name, "key_heads": key_heads})
            times = case.run(options.implementation, ours, options.implementation)
            rows.append([name, f"{options.heads}:{key_heads}", *(digits(times.get(x)) for x in DIRECTIONS)])
    shape = f"B={options.batch}, T={options.seq_len}, D={head_size}, bfloat16"
    report.table(f"{shape}; ms; {options.implementation!r}", ["pattern", "query:key heads", *DIRECTIONS], rows)


def memory(report: Report, options: argparse.Namespace) -> None:
    """Bytes that forward and backward of one long layer need at once, over those of q, k, v and out."""
    rows = []
    for name in ("window", "fixed", "strided"):
        row = report.attempt(name, memory_of, patterns(options.memory_len)[name].mask, options)
        if row:
            report.add(pattern=name, **row)
            report.say(f"{name}: {row}")
            seen = f"{'' if row['raised'] else '<= '}{row['allocator']:.2f}" if row["allocator"] else "-"
            rows.append([name, f"{row['compiler']:.2f}", seen])
            if not row["finite"] or row["compiler"] > 16:
                report.failed(name, f"finite: {row['finite']}; {row['compiler']:.2f} times, of at most 16")
    shape = f"B={LONG[0]}, T={options.memory_len}, H={LONG[1]}, D={LONG[2]}, bfloat16"
    title = f"memory of forward + backward in units of q, k, v and out, {shape}; ours is {options.implementation!r}"
    report.table(title, ["pattern", "by the compiler", "by the allocator"], rows)


def memory_of(mask: sl.Mask, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a call, in units, as the compiler plans them and as the allocator's peak says."""

    def allocated(which: str) -> int:
        return (jax.devices()[0].memory_stats() or {}).get(which, 0)

    before, arrays = allocated("bytes_in_use"), jax.block_until_ready(inputs(options.memory_len, *LONG))
    attention = op(mask, options.memory_len, options.implementation)
    compiled = jax.jit(functools.partial(gradients, attention)).lower(*arrays).compile()
    plan: Any = compiled.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    unit, peak = 4 * arrays[0].nbytes, allocated("peak_bytes_in_use")
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.block_until_ready(compiled(*arrays)))
    # The peak is that of the process so far: where this call did not raise it, it is but a bound.
    after = allocated("peak_bytes_in_use")
    used = {"compiler": planned / unit, "allocator": (after - before) / unit}
    return {"unit_bytes": unit, **used, "raised": after > peak, "finite": finite}


def density(report: Report, options: argparse.Namespace) -> None:
    """Block-random causal masks beside dense causal attention, and the density at which both take as long."""
    shares = sorted(x / 100 for x in options.densities)
    for seq_len in options.density_lengths:
        arrays = inputs(seq_len, options.batch, options.heads, options.head_size[0])
        points: dict[str, dict[float, float]] = {direction: {} for direction in DIRECTIONS}
        dense = Case(report, patterns(seq_len)["causal"], arrays, {"T": seq_len, "density": 1.0}).run("cuDNN", cudnn)
        for share in shares:
            case = Case(report, block_pattern(seq_len, share), arrays, {"T": seq_len, "density": share})
            for direction, ms in case.run(options.implementation, ours, options.implementation).items():
                points[direction][share] = ms
        rows = [[f"{share:.0%}"] for share in shares] + [["break-even"]]
        for direction, times in points.items():
            dense_ms = dense.get(direction)
            for row, share in zip(rows, shares, strict=False):
                row += [digits(times.get(share)), digits(dense_ms), ratio(dense_ms, times.get(share))]
            rows[-1] += [break_even(times, dense_ms), "", ""]
        shape = f"B={options.batch}, T={seq_len}, H={options.heads}, D={options.head_size[0]}, bfloat16"
        columns = [f"{contender} {x}" for x in DIRECTIONS for contender in ("ours", "cuDNN causal", "cuDNN / ours")]
        title = f"block-random, {shape}; ms; ours is {options.implementation!r}"
        report.table(title, ["causal blocks kept", *columns], rows)


def break_even(times: dict[float, float], dense: float | None) -> str:
    """The density at which ours takes as long as dense attention, interpolated."""
    if not times or not dense:
        return "-"
    known = sorted(times.items())
    if known[0][1] > dense:
        return f"< {known[0][0]:.0%}"
    for (low, before), (high, after) in itertools.pairwise(known):
        if after > dense:
            return f"{low + (high - low) * (dense - before) / (after - before):.0%}"
    return f"> {known[-1][0]:.0%}"


SECTIONS = {
    "memory": memory,
    "speed": speed,
    "grouped": grouped,
    "density": density,
    "lengths": lengths,
}  # memory: before others' peaks


def add_options(parser: argparse.ArgumentParser, implementation: str, seconds: int) -> None:
    """Adds the options that the benchmarks of GPU kernels share, with two defaults."""
    parser.add_argument("--implementation", default=implementation, choices=sl.implementations())
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=seconds, help="after which a section starts nothing new")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention")
    add_option(parser)


def main() -> int:
    """Runs what the command line asks for; 1 if any cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--head-size", nargs="+", type=int, default=[128, 64], help="density: the first of them")
    parser.add_argument("--patterns", nargs="+", default=SPEED, choices=patterns(BLOCK), metavar="PATTERN")
    parser.add_argument("--beside", choices=sl.implementations(), help="speed: another implementation of ours")
    parser.add_argument(
        "--loop", type=int, help="speed: calls in a loop on the device; short ones else wait for the host"
    )
    parser.add_argument("--key-heads", type=int, help="speed: fewer key heads than query heads")
    parser.add_argument("--value-size", type=int, help="speed: another head size of v, which cuDNN gets padded")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"], help="speed: of q, k and v")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2**x for x in range(11, 18)])
    parser.add_argument("--memory-len", type=int, default=131072)
    parser.add_argument("--densities", nargs="+", type=float, default=[5, 10, 20, 35, 50, 70, 85, 100], help="percent")
    parser.add_argument("--density-lengths", nargs="+", type=int, default=[8192, 16384])
    add_options(parser, "triton", 270)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; there are {', '.join(SECTIONS)}")
    # JAX takes three quarters of the memory otherwise, and torch wants some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    report = Report(options)
    if not options.no_flex and importlib.util.find_spec("torch") is None:
        options.no_flex = True
        report.say("torch is not installed: no FlexAttention")
    for name, section in SECTIONS.items():
        if name in (options.sections or SECTIONS):
            report.begin(name)
            report.attempt(name, section, report, options)
    report.say(f"{report.failures} failed")
    report.record.write()
    return int(report.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
