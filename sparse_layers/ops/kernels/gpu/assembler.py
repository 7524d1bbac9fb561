"""The assembler: which ptxas turns the kernels' PTX into machine code, and which PTX version it reads.

jaxlib assembles a kernel when its program is loaded, with the first ptxas that XLA finds. Triton writes PTX for the
ptxas that Triton brings. An older one refuses that PTX by its version alone, so kernels are written in the version that
both know. XLA does not say which file it takes: the search here follows XLA's own (`subprocess_compilation.cc` and
`cuda_root_path.cc`).
"""

import functools
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

# XLA passes by older releases, and this one, whose code is wrong.
_OLDEST, _EXCLUDED = (11, 8, 0), (12, 3, 103)
# The PTX version that the kernels need, by the least compute capability, both times 10. 8.1 is the oldest that was
# tried, with the ptxas of CUDA 12.1; later GPUs need a version that knows them.
_REQUIRED = {80: 81, 100: 86, 103: 88, 120: 87, 121: 88}


class Assembler(NamedTuple):
    """A ptxas."""

    path: str
    cuda: tuple[int, int, int]  # the CUDA release that it belongs to: major, minor, patch

    @property
    def ptx_version(self) -> int:
        """The newest PTX version that it reads, times 10."""
        major, minor, _ = self.cuda
        if major < 12:
            return 70 + minor
        if major == 12:
            return 80 + minor - (minor >= 6)
        return 10 * (major - 4) + minor

    def __str__(self):
        return f"{self.path} (CUDA {self.cuda[0]}.{self.cuda[1]}, PTX {self.ptx_version / 10})"


def find_assembler() -> Assembler | None:
    """Returns the ptxas that XLA will run in this process, None if it will find none."""
    return _first_assembler(os.environ.get("PATH", ""), _plugin())


def ptx_version(capability: int) -> int | str:
    """Returns the PTX version times 10 that kernels are written in, or the reason why no version serves."""
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    known = get_ptx_version_from_options(types.SimpleNamespace(ptx_version=None), capability)
    required = _REQUIRED[max(least for least in _REQUIRED if least <= capability)]
    install = "install a newer nvidia-cuda-nvcc, or put the folder of a newer ptxas first on PATH"
    assembler = find_assembler()
    if assembler is None:
        return f"it needs ptxas, to assemble PTX {required / 10} or newer, and XLA finds none: {install}"
    if assembler.ptx_version < required:
        return f"it needs PTX {required / 10} or newer, and JAX assembles with {assembler}: {install}"
    return min(known, assembler.ptx_version)


def _plugin() -> str | None:
    """Returns the folder of JAX's CUDA plugin, whose library searches for ptxas, None if there is no plugin."""
    from jaxlib import gpu_triton

    kernel = getattr(gpu_triton, "TritonKernel", None)
    module = sys.modules.get(kernel.__module__) if kernel is not None else None
    return None if module is None or module.__file__ is None else os.path.dirname(module.__file__)


def _candidates(search_path: str, plugin: str | None) -> Iterator[str]:
    """Yields the files that XLA tries, in its order."""
    yield os.path.join("bin", "ptxas")
    yield from (os.path.join(folder, "ptxas") for folder in search_path.split(os.pathsep))
    roots = ["/usr/local/cuda", "/opt/cuda"]
    if plugin is not None:
        wheel = os.path.join("nvidia", "cu13" if "cuda13" in os.path.basename(plugin) else "cuda_nvcc")
        inside = (f"../{wheel}", f"../../{wheel}", "cuda", "../../../..", "../../../../..")
        roots += [os.path.normpath(os.path.join(plugin, root)) for root in inside]
    yield from (os.path.join(root, "bin", "ptxas") for root in roots)


@functools.lru_cache(maxsize=16)
def _first_assembler(search_path: str, plugin: str | None) -> Assembler | None:
    for path in _candidates(search_path, plugin):
        release = _release(path)
        if release is not None and release >= _OLDEST and release != _EXCLUDED:
            return Assembler(path, release)
    return None


def _release(path: str) -> tuple[int, int, int] | None:
    """Returns the CUDA release of a ptxas, None if there is none that runs."""
    if not os.path.isfile(path):
        return None
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None  # XLA goes on to the next file, too
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", text)
    return match and (int(match[1]), int(match[2]), int(match[3]))
