"""Planning and importing: seconds and bytes for every preset at long lengths, and the cost of the import.

python benchmarks/plans.py
"""

import platform
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

import sparse_layers as sl
from sparse_layers.ops.planning.blocks import active_blocks

LIMITS = {131072: 1.0, 1048576: 10.0}  # seconds that the project allows itself for one preset


def metadata_bytes(plan: sl.Plan) -> int:
    """Bytes of all distinct arrays that a plan holds."""
    arrays = {
        id(array): array.nbytes
        for chain in plan.chains
        for link in chain
        for info in (link.fwd, link.dkv)
        for array in info
        if isinstance(array, np.ndarray)
    }
    return sum(arrays.values())


def plans() -> None:
    """Prints the table of plans; each is made anew, nothing of an earlier one is reused."""
    from sparse_layers.ops.planning import plan as planning

    for seq_len, limit in LIMITS.items():
        print(f"\nT = {seq_len}, default options; limit {limit:.0f} s")
        print(f"{'preset':30}{'seconds':>8}{'of limit':>10}{'MB':>8}  chosen chain")
        for name in sl.presets():
            for cache in (active_blocks, planning._make_plan, planning._make_chain):
                cache.cache_clear()
            start = time.perf_counter()
            plan = sl.make_plan(sl.preset(name), seq_len)
            seconds = time.perf_counter() - start
            chain = plan.candidates[0][0][0]
            print(
                f"{name:30}{seconds:8.2f}{seconds / limit:10.0%}{metadata_bytes(plan) / 1e6:8.1f}  {chain}", flush=True
            )


def imports(repeats: int = 7) -> None:
    """Prints what `import sparse_layers` costs over `import jax, flax`, each in a fresh process."""
    timed = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    seconds = {}
    for what in ("jax, flax", "jax, flax, sparse_layers"):
        runs = [
            float(subprocess.run([sys.executable, "-c", timed.format(what)], capture_output=True, check=True).stdout)
            for _ in range(repeats)
        ]
        seconds[what] = statistics.median(runs)
        print(f"import {what}: {seconds[what]:.3f} s (median of {repeats})")
    print(f"sparse_layers alone: {seconds['jax, flax, sparse_layers'] - seconds['jax, flax']:.3f} s")


if __name__ == "__main__":
    print(f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}")
    imports()
    plans()
