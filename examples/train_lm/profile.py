"""Where a training step's time goes on a GPU: ``python -m examples.train_lm.profile --config small``.

Trains a few steps exactly as `train` does, without writing anything, and reads JAX's profile of them.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ..training import data
from ..training.config import Refusal, add_options, settings
from ..training.run import Run, fitting, resolved
from .config import Config

# What a kernel is for, by parts of its name; the first that fits, XLA's fused loops and reductions being the rest.
_KINDS = {
    "input": ("memcpyh2d",),
    "attention": ("_kernel", "sdpa", "flash", "fmha", "softmax_backward"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "collective": ("nccl",),
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """Times of one step, in milliseconds, means over the steps looked at.

    Attributes:
      step: from the host's clock.
      kernels: sum over all kernels and copies of one device.
      idle: in which that device did nothing.
      by_kind: sums over the kernels of a kind: attention, matmul, input, collective, other.
      by_name: sums over the kernels of a name.
      waited: in which the host waited for input.
    """

    step: float
    kernels: float
    idle: float
    by_kind: dict[str, float]
    by_name: dict[str, float]
    waited: float


def profile(config: Config, warm: int = 5, steps: int = 20) -> Profile:
    """Times ``steps`` steps of training, after ``warm`` others.

    Raises:
      Refusal: as `train`, or the device is no GPU, whose profile alone has kernels.
    """
    config = resolved(config)
    if config.device != "gpu":
        raise Refusal(f"--device {config.device}: a profile is of the kernels of an NVIDIA GPU")
    source = config.source()
    run = Run(config)
    make = functools.partial(run.batch, source)
    with fitting(config), tempfile.TemporaryDirectory() as folder:
        state, step, began, waited = run.init(), run.compiled(make(1))[0], 0.0, 0.0
        with data.Prefetch(make, range(1, warm + steps + 1)) as batches:
            last: Any = None
            for number, batch in enumerate(batches, 1):
                state, seen = step(state, batch, np.int32(number))
                # As in training: one step is read while the next is computed.
                jax.device_get(last)
                last = seen
                if number == warm:
                    jax.block_until_ready(seen)
                    jax.profiler.start_trace(folder)
                    began, waited = time.perf_counter(), batches.waited
            jax.device_get(last)
            seconds, waited = time.perf_counter() - began, batches.waited - waited
        jax.profiler.stop_trace()
        return _read(pathlib.Path(folder), steps, seconds, waited)


def _read(folder: pathlib.Path, steps: int, seconds: float, waited: float) -> Profile:
    paths = sorted(folder.rglob("*.xplane.pb"))
    planes = [plane for path in paths for plane in jax.profiler.ProfileData.from_file(str(path)).planes]
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    events = [
        (event.name, event.start_ns, event.duration_ns)
        for plane in devices[:1]
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not events:
        raise Refusal(f"the profile shows no kernels, it has {[plane.name for plane in planes]}: this needs a GPU")
    by_name, by_kind = collections.Counter(), collections.Counter()
    for name, _, duration in events:
        by_name[name] += duration / 1e6 / steps
        by_kind[_kind(name)] += duration / 1e6 / steps
    busy = _union((start, start + duration) for _, start, duration in events) / 1e6 / steps
    step = 1e3 * seconds / steps
    return Profile(step, by_kind.total(), step - busy, dict(by_kind), dict(by_name.most_common()), 1e3 * waited / steps)


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, patterns in _KINDS.items() if any(pattern in lower for pattern in patterns)), "other")


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what the intervals cover together.

    Example:
      >>> _union([(0, 3), (2, 5), (7, 8)])
      6
    """
    covered, reached = 0, -np.inf
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def main(argv: list[str] | None = None) -> int:
    """Command line of the profile. Returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.profile", description="Where a training step's time goes on a GPU."
    )
    parser.add_argument("--top", type=int, default=12, help="kernels listed by name [12]")
    add_options(parser, Config)
    flags = vars(parser.parse_args(argv))
    top = flags.pop("top")
    try:
        result = profile(Config(**settings(Config, flags)))
    except Refusal as refusal:
        print(f"profile: {refusal}", file=sys.stderr)
        return 2
    ratio = result.step / result.kernels
    print(f"step {result.step:.2f} ms, kernels {result.kernels:.2f} ms, step / kernels {ratio:.3f}")
    for kind, spent in sorted(result.by_kind.items(), key=lambda kind_and_ms: -kind_and_ms[1]):
        print(f"  {kind:12} {spent:8.2f} ms  {spent / result.step:6.1%}")
    print(f"  {'idle':12} {result.idle:8.2f} ms  {result.idle / result.step:6.1%}")
    print(f"the host waited {result.waited:.2f} ms a step for input")
    for kernel, spent in list(result.by_name.items())[:top]:
        print(f"  {spent:8.2f} ms  {_kind(kernel):10} {kernel[:100]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
