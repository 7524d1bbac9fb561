"""The GPU kernels that the tests of a source tree compile: `benchmarks.machine_code` runs this file once for each tree.

    cd TREE && python PATH/compiled_cases.py kernels.json [TEXT]

Runs the tests with a parameter ``case`` of all ``test_*_gpu_aot.py`` in the current folder, and records what Triton
compiles. Relies on no other name of the tree, which may be of another commit than this file.

The JSON file has by case the name, PTX and launch of each kernel, and the tests that failed. TEXT selects cases.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import triton

# PTX does not say what a launch has to provide.
LAUNCH = "num_warps", "num_ctas", "shared", "global_scratch_size", "global_scratch_align", "tensordesc_meta"


class Recorder:
    """A plugin of pytest that keeps the tests of a ``case``, and records what Triton compiles for each."""

    def __init__(self, only: str, compile_kernel: Callable[..., Any]):
        self.only, self.compile_kernel = only, compile_kernel
        self.cases: dict[str, list[tuple[str, str, str]]] = {}
        self.failed: list[str] = []

    def _name(self, item: Any) -> str:
        return f"{item.path.stem.removeprefix('test_').removesuffix('_gpu_aot')} {item.callspec.id}"

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keeps cases with the text in their name."""
        cases = [item for item in items if hasattr(item, "callspec") and "case" in item.callspec.params]
        items[:] = [item for item in cases if self.only in self._name(item)]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Begins a case, and clears caches: each case is to have all of its kernels, whichever ran before."""
        self.cases.setdefault(self._name(item), [])
        for module in [x for name, x in sys.modules.items() if name.startswith("sparse_layers.ops.kernels")]:
            for function in [x for x in vars(module).values() if hasattr(x, "cache_clear")]:
                function.cache_clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes a test that fails."""
        self.failed += [report.nodeid.rpartition("/")[2]] if report.failed else []

    def compile(self, *args: Any, **options: Any) -> Any:
        """Compiles by Triton, for the case that began last."""
        result = self.compile_kernel(*args, **options)
        launch = ", ".join(f"{name} {getattr(result.metadata, name, None)}" for name in LAUNCH)
        kernel, kernels = (result.metadata.name, result.asm["ptx"], launch), [*self.cases.values()][-1]
        kernels += [] if kernel in kernels else [kernel]
        return result


def collect(file: Path, only: str) -> None:
    """Writes the kernels of the tree in the current folder to a file, as the tests there compile them."""
    import sparse_layers

    assert Path.cwd() in Path(sparse_layers.__file__).parents, f"{sparse_layers.__file__} is of another tree"
    recorder = Recorder(only, triton.compile)
    with mock.patch.object(triton, "compile", recorder.compile):
        tests = sorted(map(str, Path("tests").rglob("test_*_gpu_aot.py")))
        status = pytest.main(["-q", "-p", "no:xdist", *tests], plugins=[recorder])
    assert status in (0, 1, 5), f"pytest ended with {status!r}"  # passed, failed, no test has the text in its name
    file.write_text(json.dumps([recorder.cases, recorder.failed]))


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # modules are those of the tree, not those beside this file
    collect(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
