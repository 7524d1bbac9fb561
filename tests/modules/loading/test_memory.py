"""The peak memory of a process that loads a model: that of the model, and little more."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.numpy

FOLDER = pathlib.Path(__file__).parent
FIXTURE = FOLDER / "fixtures" / "phi3"
PEAK = """
import pathlib, re, sys
import sparse_layers as sl

def kib(entry):  # of this process only; ru_maxrss begins with that of the parent
    return int(re.search(rf"{entry}:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

options = {"scan_layers": sys.argv[3] == "scanned"}
sl.from_huggingface(sys.argv[1], **options)  # imports and compiles
before = kib("VmRSS")
model = sl.from_huggingface(sys.argv[2], **options)
print(kib("VmHWM") - before)
"""
SCALE = 64  # of all sizes of the fixture
OBJECTS = 16e6  # bytes of Python's objects, programs and holes in the heap, whatever the model; measured: 4e6 to 12e6


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Phi 3 of 223 MB in float16, with fused tensors of up to 25 MB."""
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((FIXTURE / "config.json").read_text())
    config |= {name: SCALE * config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    (folder / "config.json").write_text(json.dumps(config))
    with safetensors.safe_open(FIXTURE / "model.safetensors", "numpy") as file:
        shapes = {name: [SCALE * n for n in file.get_slice(name).get_shape()] for name in file.keys()}  # noqa: SIM118
    safetensors.numpy.save_file(
        {name: np.ones(shape, np.float16) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("layers", ["single", "scanned"])
def test_loading_needs_the_memory_of_the_model(layers, large):
    """At most 1.2 times its size, and a constant. Scanned layers, like experts, are copied into an array of all."""
    arguments = [sys.executable, "-c", PEAK, str(FIXTURE), str(large), layers]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=FOLDER.parents[2])
    peak, size = 1024 * int(run.stdout), (large / "model.safetensors").stat().st_size
    assert size > 2e8 and 0.9 * size < peak < 1.2 * size + OBJECTS, (peak / size, size)
