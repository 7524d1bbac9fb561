"""Importing: what ``import sparse_layers`` costs over the import of jax and flax.nnx, which any Flax program pays.

    python -m benchmarks.imports

Each import runs in a fresh process, the kinds in turns, after one of each that fills the caches of files and bytecode.
Seconds are of the processor, user and system together, from the start of the interpreter to its end; the least of all
runs counts, for other work on the machine only ever adds. ``python -X importtime -c "import sparse_layers"`` says where
it goes.
"""

import argparse
import os
import subprocess
import sys

from .record import ROOT, Record, add_option

KINDS = {
    "jax, flax.nnx": "import jax, flax.nnx",
    "jax, flax.nnx, sparse_layers": "import jax, flax.nnx, sparse_layers",
    "the same, and a layer's first use": "import jax, flax.nnx, sparse_layers; sparse_layers.SparseTransformer",
}


def cpu_seconds(code: str) -> float:
    """Seconds of the processor that a fresh interpreter takes for some code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{code!r} failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="of each kind")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record)
    record.say(record.heading)
    for code in KINDS.values():
        cpu_seconds(code)
    seconds = {name: [] for name in KINDS}
    for _ in range(options.runs):
        for name, code in KINDS.items():
            seconds[name].append(cpu_seconds(code))
    least, base = {name: min(runs) for name, runs in seconds.items()}, min(seconds["jax, flax.nnx"])
    record.say(f"\n| import | least of {options.runs}, CPU seconds | more than jax and flax.nnx |\n| --- | --- | --- |")
    for name, runs in seconds.items():
        record.add(imported=name, cpu_seconds=runs)
        record.say(f"| {name} | {least[name]:.2f} | {least[name] - base:.2f} |")
    record.write()


if __name__ == "__main__":
    main()
