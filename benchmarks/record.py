"""Records of measurements: what a benchmark printed and measured, with the command, the commit and the machine.

A figure in a document is a line of such a file: it stands between ``<!-- record: benchmarks/records/FILE.json -->`` and
``<!-- end of record -->``, and tests/test_records.py compares the two.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "libtpu", "triton", "torch", "nvidia-cudnn-cu13")
ROOT = pathlib.Path(__file__).parents[1]


class Record:
    """The results of one run of a benchmark, printed as they come and kept for a file.

    Args:
      path: the new file that `write` makes; None for none.
      device: what computes.

    Attributes:
      facts: command, date, commit, versions, machine and its load before the run.
      lines: what was printed.
      results: what was measured, in full.
    """

    def __init__(self, path: pathlib.Path | None, device: str = "cpu"):
        self.path, self.lines, self.results = path, [], []
        installed = {name: [x.version for x in importlib.metadata.distributions(name=name)] for name in PACKAGES}
        self.facts: dict[str, Any] = {
            "command": _command(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "versions": {"python": platform.python_version()} | {name: x[0] for name, x in installed.items() if x},
            "device": device,
            "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} host cores",
            "load_before": os.getloadavg()[0],
        }

    def say(self, text: str = "") -> None:
        """Prints lines and keeps them."""
        print(text, flush=True)
        self.lines += text.split("\n")

    def add(self, **result: Any) -> None:
        """Keeps one result, of JSON's types."""
        self.results.append(result)

    @property
    def heading(self) -> str:
        """Device, machine, versions and load in a line for a person."""
        versions = ", ".join(f"{name} {self.facts['versions'][name]}" for name in ("python", "jax", "numpy"))
        return f"{self.facts['device']}; {self.facts['machine']}; {versions}; load {self.facts['load_before']:.1f}"

    def write(self) -> None:
        """Writes the file, if one is asked for."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.facts | {"load_after": os.getloadavg()[0], "lines": self.lines, "results": self.results}
        with self.path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(f"recorded in {self.path}", file=sys.stderr)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--record FILE.json``, whose value is a path or None. A file that exists is refused before the run."""
    text = "also write what is found to this new file; those that documents quote lie in benchmarks/records/"
    parser.add_argument("--record", type=_new_file, metavar="FILE.json", help=text)


def _new_file(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"a record must be named *.json, got {text!r}")
    if path.exists():
        raise argparse.ArgumentTypeError(f"{text} exists: a record is never overwritten")
    return path


def _command() -> str:
    """The command line of this process, from this checkout's root."""
    script = pathlib.Path(sys.argv[0]).resolve()
    module = script.relative_to(ROOT).with_suffix("").parts if script.is_relative_to(ROOT) else [script.name]
    arguments = sys.argv[1:]
    if "--record" in arguments:  # where the record goes says nothing of what is measured
        index = arguments.index("--record")
        del arguments[index : index + 2]
    return shlex.join(["python", "-m", ".".join(module), *arguments])


def _commit() -> str:
    """The commit of this checkout, and whether it was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git checkout"


def _processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )
