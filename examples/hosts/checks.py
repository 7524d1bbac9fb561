"""Shared by the checks of adapters: a table of differences from a host's own dense attention, with their budgets."""

import argparse
import ast
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_layers.tools.oracle import largest_error, neighbour


def path_argument(description: str | None, meaning: str) -> str:
    """Returns the path on the command line of a check, of whose meaning ``--help`` tells."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help=meaning)
    return parser.parse_args().path


def import_host(path: pathlib.Path, *names: str) -> list[Any]:
    """Returns modules of a host by their names, from the folder ``path``, whatever else is installed."""
    file = path / f"{names[0].replace('.', '/')}.py"
    if not file.is_file():
        raise SystemExit(f"PATH must be a checkout of the project, and {file} is missing")
    sys.path.insert(0, str(path))
    return [importlib.import_module(name) for name in names]


def check_hook(folder: pathlib.Path, edits: Sequence[tuple[str, str, str, str]]) -> None:
    """Ends the process with a list of the lines of a hook that the files of a host lack, and where they belong.

    Args:
      folder: the folder of the host.
      edits: the file of a line, the function or class there, words of the line, and its position in the function.
    """
    missing = []
    for file, name, words, position in edits:
        if not (folder / file).is_file():
            raise SystemExit(f"PATH must have {file}, got {folder}: README.md says which folder, and which copies")
        source = (folder / file).read_text()
        try:
            compile(source, file, "exec")
        except SyntaxError as error:
            raise SystemExit(f"{file} is no valid Python, so the hook is in a wrong line: {error}") from error
        nodes = [x for x in ast.walk(ast.parse(source)) if getattr(x, "name", None) == name]
        if not any(words in (ast.get_source_segment(source, x) or "") for x in nodes):
            missing.append(f"  {file}, {name}, {position}: {words}")
    if missing:
        raise SystemExit("\n".join(["PATH lacks lines of the hook; README.md shows them:", *missing]))


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """Returns a function of the same arrays and, last, a gradient of the result: the result and all gradients."""

    def results(*arrays: Any) -> list[jax.Array]:
        out, pullback = jax.vjp(function, *arrays[:-1])
        return [out, *jax.tree.leaves(pullback(arrays[-1].astype(out.dtype)))]

    return results


class Table:
    """Rows of a check, printed as they come.

    Errors are differences from the host's result, as a share of its largest value. Their budget is measured: each of
    the two results may be off by twice the sum of two numbers. One is the change of the host's result when each input
    changes by the epsilon of its dtype; the other is this epsilon.
    """

    def __init__(self) -> None:
        self.failures = 0
        print("| check | results | largest error | budget | |\n| --- | --- | --- | --- | --- |", flush=True)

    def compare(
        self, name: str, ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: Any, is_of_host: bool = False
    ) -> None:
        """Prints a row: the error that takes the largest share of its budget, among all results of two functions.

        Args:
          name: words for the row.
          ours: returns arrays, computed with the adapter.
          theirs: returns as many arrays of the same shapes, computed by the host's dense path.
          arrays: what both functions take, arrays or trees of arrays; all are floats.
          is_of_host: True if ``ours`` is another route of the host itself, whose errors the table shows as such.
        """
        leaves, tree = jax.tree.flatten(arrays)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        changed = jax.tree.unflatten(tree, [neighbour(key, x) for key, x in zip(keys, leaves, strict=True)])
        results = [[np.asarray(x).astype(np.float64) for x in theirs(*inputs)] for inputs in (arrays, changed)]
        eps, shares = float(max(jnp.finfo(x.dtype).eps for x in leaves)), []
        for answer, right, near in zip(ours(*arrays), *results, strict=True):
            size = np.abs(right).max(initial=0) or 1.0
            error, budget = largest_error(answer, right) / size, 4 * (largest_error(near, right) / size + eps)
            shares.append((error / budget, error, budget))
        share, error, budget = max(shares)
        figures = len(shares), f"{error:.1e}", f"{budget:.1e}"
        self._row(name, *figures, is_right=share <= 1, is_of_host=is_of_host)

    def refuse(self, name: str, call: Callable[[], Any], words: str) -> None:
        """Prints a row: a call must raise an error that has these words."""
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            is_right = words in str(error)
        else:
            is_right = False
        self._row(name, 0, "refused" if is_right else "not refused", "-", is_right=is_right)

    def exit(self) -> None:
        """Ends the process: with 1 if a row failed."""
        print(f"{self.failures} failed" if self.failures else "all within their budgets")
        sys.exit(int(self.failures > 0))

    def _row(
        self, name: str, results: int, error: str, budget: str, *, is_right: bool, is_of_host: bool = False
    ) -> None:
        self.failures += not is_right and not is_of_host
        verdict = "" if is_right else "differs: the host's own route" if is_of_host else "FAILED"
        print(f"| {name} | {results or '-'} | {error} | {budget} | {verdict} |", flush=True)
