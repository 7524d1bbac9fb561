"""Losses on eight simulated devices, in a process of its own: their number is fixed when JAX starts."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from examples.train_lm import generate
from examples.train_lm.config import Config
from examples.training import loop
from examples.training.config import Refusal
from examples.training.sharding import make_mesh
from tests.programs import on_devices

from .conftest import TINY

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = {
    **TINY,
    "batch_size": 8,
    "heads": 4,
    "save_every": 4,
    "sample_tokens": 0,
    "dropout": 0.1,
    "layers": 2,
    "pattern": "sliding_window:window=6+strided:local_attn_ctx=8",
    "packed": True,
    "scan": True,
    "recompute": True,
}
MESHES = {"mixed": {"fsdp": 2, "tensor_parallel": 2}, "heads": {"tensor_parallel": 4}}
SCRIPT = """
import json, pathlib, sys
import jax
from examples.train_lm import generate, train
from examples.train_lm.config import Config
from examples.training import loop
from examples.training.run import Run
out, corpus, settings, meshes = json.loads(sys.argv[1])
assert jax.device_count() == 8
compiled, programs = Run.compiled, {}

def recorded(run, batch):
    made = compiled(run, batch)
    programs[run.config.out] = run.mesh.size, made[0].as_text()
    return made

Run.compiled = recorded
for name, options in meshes.items():
    loop.train(Config(**{**settings, **options, "data": corpus, "out": f"{out}/{name}"}), resume=False)
assert train.main(["--out", f"{out}/moved", "--resume", "--fsdp", "2", "--context-parallel", "4"]) == 0
json.dump({pathlib.Path(path).name: program for path, program in programs.items()}, open(f"{out}/programs.json", "w"))
"""


@pytest.fixture(scope="module")
def one(corpus, tmp_path_factory):
    """The folder of the run on one device."""
    out = tmp_path_factory.mktemp("one") / "run"
    loop.train(Config(**{**SETTINGS, "data": str(corpus), "out": str(out)}), resume=False)
    return out


@pytest.fixture(scope="module")
def eight(one, corpus, tmp_path_factory):
    """The folder of runs on eight devices, one for each mesh, and one that did four steps on one device before."""
    out = tmp_path_factory.mktemp("eight")
    shutil.copytree(one, out / "moved")
    shutil.rmtree(out / "moved" / "checkpoints" / "6")
    on_devices(8, "-W", "ignore", "-c", SCRIPT, json.dumps([str(out), str(corpus), SETTINGS, MESHES]))
    return out


def losses(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return np.array([(row["loss"], row["grad_norm"], row.get("heldout_bpb", 0)) for row in rows])


# One test, so that tests run side by side do not train all of these twice.
def test_eight_devices(one, eight):
    programs = json.loads((eight / "programs.json").read_text())
    assert list(programs) == [*MESHES, "moved"]
    for name, (devices, text) in programs.items():
        # Six steps of Adam; sums over devices are in another order.
        np.testing.assert_allclose(losses(eight / name), losses(one), rtol=2e-5, err_msg=name)

        assert devices == 8
        moved = re.findall(r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
        sizes = {size for shapes in moved for shape in re.findall(r"\[([\d,]*)\]", shapes) for size in shape.split(",")}
        # Activations have the axis of the 32 tokens in a sequence, or of the 8 of a device that has a part of it: they
        # are never put together. No weight of this model is as long.
        assert str(TINY["seq_len"]) not in sizes, (name, moved)
        assert bool(moved) == (name != "heads"), (name, moved)


def test_fewer_devices_sample_what_more_have_learnt(eight, capsys):
    assert generate.main(["--out", str(eight / "moved"), "--prompt", "\udcff", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("\ufffd")


def test_too_few_devices():
    with pytest.raises(Refusal, match="--fsdp 2 --context-parallel 2 --tensor-parallel 1 needs 16 devices, JAX sees 1"):
        make_mesh(Config(data_parallel=4, fsdp=2, context_parallel=2, batch_size=8), "cpu")
