"""Machine code of the GPU kernels in the working tree, compared with another commit. No GPU is needed.

    python -m benchmarks.machine_code                      # with HEAD
    python -m benchmarks.machine_code main --only causal   # with main, only cases with this text in their name

Needs git, pytest and triton. Each tree compiles the cases of its own ``test_*_gpu_aot.py`` in a process of its own.
Kernels are the same if their PTX is, without names, comments and debug information, and the needs of their launch.
Renaming variables, kernels or files changes neither. Where PTX differs, ptxas shows whether SASS does.

Exit status: 0 if all kernels are the same, 1 if a kernel differs or the test of a case fails, 2 if nothing is compared.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 3  # differing lines of a kernel, of each side


class Kernel(NamedTuple):
    """A compiled kernel: its name, its PTX, and the needs of its launch."""

    name: str
    ptx: str
    launch: str = ""

    @property
    def code(self) -> tuple[str, ...]:
        """Lines that are equal for kernels that do the same."""
        return (self.launch, *normalized(self.ptx))


def normalized(ptx: str) -> list[str]:
    """Lines of PTX without comments and debug information; functions are numbered, not named."""
    text = re.sub(r"^\s*\.section\s+\.debug_\w+\s*\{[^}]*\}", "", re.sub("//.*", "", ptx), flags=re.MULTILINE)
    functions = r"^(?!\s*\.extern).*\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)"
    lines = map(str.strip, _numbered(text, re.findall(functions, text, re.MULTILINE)).splitlines())
    return [line for line in lines if line and not re.match(r"\.(loc|file)\s|\$L__(tmp|func_begin|func_end)\d+:", line)]


def normalized_sass(sass: str) -> list[str]:
    """Instructions and labels of what ``nvdisasm -c`` writes, without addresses; functions are numbered."""
    text = _numbered(sass, re.findall(r"^\s*\.type\s+(\S+),@function", sass, re.MULTILINE))
    lines = (re.sub(r"/\*[0-9a-f]{4,}\*/\s*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line.endswith(";") or re.match(r"\.L\w+:", line)]


def _numbered(text: str, names: Sequence[str]) -> str:
    """Text with a number in place of each name, also where it begins the name of a parameter."""
    for number, name in enumerate(dict.fromkeys(names)):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_\d|(?![\w$]))", f"<{number}>", text)
    return text


def difference(before: Sequence[str], after: Sequence[str]) -> str | None:
    """Says how many lines differ, and the first of them; None if all are the same."""
    changed: dict[str, list[str]] = {"-": [], "+": []}
    for line in list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]:
        changed.get(line[0], []).append(line)
    if not any(changed.values()):
        return None
    shown = "".join(f"\n    {line}" for lines in changed.values() for line in lines[:SHOWN])
    return f"differs: {max(map(len, changed.values()))} of {max(len(before), len(after))} lines{shown}"


def assembled(ptx: str) -> list[str]:
    """Lines of the SASS that ptxas makes of PTX."""
    from benchmarks.gluon_resources import resources

    return normalized_sass(resources(ptx).sass)


def changes(
    before: Sequence[Kernel],
    after: Sequence[Kernel],
    every: bool = False,
    assemble: Callable[[str], list[str]] = assembled,
) -> list[str]:
    """Describes how the kernels of one case differ.

    Args:
      before, after: kernels of the two trees. Those of equal code are pairs; those that are left pair up in order.
      every: True to compare the SASS of all pairs, not only of those whose PTX differs.
      assemble: makes SASS of PTX.

    Returns:
      Lines, none if all kernels are the same.
    """
    unpaired, pairs, added = collections.defaultdict(list), [], []
    for kernel in before:
        unpaired[kernel.code].append(kernel)
    for kernel in after:
        if twins := unpaired[kernel.code]:
            pairs.append((twins.pop(0), kernel))
        else:
            added.append(kernel)
    removed = [kernel for kernels in unpaired.values() for kernel in kernels]
    count = min(len(removed), len(added))
    lines = []
    for one, two in [*zip(removed[:count], added[:count], strict=True), *(pairs if every else ())]:
        if ptx := difference(one.code, two.code):
            lines.append(f"{two.name} {ptx}")
        sass = difference(assemble(one.ptx), assemble(two.ptx))
        lines += [f"{two.name} in SASS: {sass or 'same'}"] if ptx or sass else []
    lines += [f"{kernel.name} removed" for kernel in removed[count:]]
    return lines + [f"{kernel.name} added" for kernel in added[count:]]


def kernels_of(tree: Path, only: str) -> tuple[dict[str, list[Kernel]], list[str]]:
    """Returns the kernels of a tree by case, and its tests that fail."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernels.json")
        command = [sys.executable, Path(__file__).with_name("compiled_cases.py"), file, only]
        environment = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the tests of {tree} did not run:\n{done.stdout}{done.stderr}")
        cases, failed = json.loads(file.read_text())
    return {case: [Kernel(*fields) for fields in kernels] for case, kernels in cases.items()}, failed


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree").resolve()
        try:
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares what the command line asks for, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD", metavar="REVISION", help="the commit, HEAD by default")
    parser.add_argument("--only", default="", metavar="TEXT", help="compare cases with this text in their name")
    parser.add_argument("--sass", action="store_true", help="compare the SASS of all kernels")
    options = parser.parse_args(arguments)
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{options.revision}^{{commit}}"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not commit:
        parser.error(f"REVISION must be a commit of this repository, got {options.revision!r}")
    try:
        with checked_out(commit) as tree, concurrent.futures.ThreadPoolExecutor() as pool:
            (before, failed_before), (after, failed) = pool.map(kernels_of, (tree, ROOT), 2 * [options.only])
    except RuntimeError as error:
        parser.exit(2, f"{error}\n")
    cases = {**before, **after}
    if not cases:
        parser.error(f"--only must be in the name of a case, got {options.only!r}")
    changed = 0
    for case in cases:
        kernels = before.get(case, []), after.get(case, [])
        lines = changes(*kernels, options.sass) if any(kernels) else ["compiles no kernel"]
        print(f"{case}: " + ("\n  ".join(lines) or f"same (kernels: {len(kernels[1])})"), flush=True)
        changed += bool(lines)
    for side, tests in ((commit[:9], failed_before), ("the working tree", failed)):
        print("".join(f"{test} fails in {side}, and may lack kernels\n" for test in tests), end="")
    print(f"{changed} of {len(cases)} cases differ from {options.revision} ({commit[:9]})")
    return int(bool(changed or failed or failed_before))


if __name__ == "__main__":
    sys.exit(main())
