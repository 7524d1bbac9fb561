import contextlib
import dataclasses
import io
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.__main__ import main
from sparse_layers.ops import attention, custom_vjp
from sparse_layers.ops.decoding import fused, xla
from sparse_layers.ops.implementations import IMPLEMENTATIONS
from sparse_layers.ops.kernels.gpu import hardware
from sparse_layers.ops.planning import platforms
from sparse_layers.tools import doctor
from tests.programs import QUICK

ROOT = pathlib.Path(sl.__file__).parents[1]


@pytest.fixture(scope="module")
def output():
    # Here, the Triton kernels are interpreted, too: the command finds that they work.
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(["doctor"])
    return text.getvalue()


def only(monkeypatch, implementation, number):
    """Leaves one check of one implementation, and nothing compiled of it."""
    every = doctor.checks
    monkeypatch.setattr(doctor, "checks", lambda name: every(name)[number:][:1] if name == implementation else [])
    # JAX keeps what it traced by function: another function, another trace.
    run = jax.jit(lambda *args: custom_vjp.attend(*args), static_argnums=(0, 1, 2))
    monkeypatch.setattr(attention, "jitted_attend", run)


# --- the report ------------------------------------------------------------------------------------------------------


def test_every_implementation_works_and_passes_or_says_why_not(output):
    report, checks = output.partition("\nimplementations\n")[2].split("\nself-check ")
    for name in sl.implementations():
        said = [line.split(maxsplit=1)[1] for line in report.splitlines() if line.startswith(f"  {name} ")]
        passed = [line for line in checks.splitlines() if line.startswith(f"  {name} ") and " PASS " in line]
        assert said and all("works" in text or "unavailable: it " in text for text in said)
        assert bool(passed) == any("works" in text for text in said)
    assert "FAIL" not in output
    summary = output.splitlines()[-1]
    assert summary.startswith(f"all {output.count(' PASS ')} checks passed in ")


def test_versions_and_devices(output):
    import flax
    import jaxlib

    lines = [line.split(maxsplit=1) for line in output.splitlines()]
    for name, module in (("numpy", np), ("jax", jax), ("jaxlib", jaxlib), ("flax", flax)):
        assert [name, module.__version__] in lines
    assert {"triton", "libtpu", "optax", "Python", "cuDNN", "assembler"} <= {line[0] for line in lines if line}
    assert all(str(device) in output and device.device_kind in output for device in jax.local_devices())


def test_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setattr(doctor, "_PACKAGES", {"numpy": ("numpy",), "some plugin": ("no-such-a", "no-such-b")})
    assert doctor.versions()["some plugin"] == "not installed"
    monkeypatch.setattr(doctor, "_PACKAGES", {"arrays": ("no-such-a", "numpy")})
    assert doctor.versions()["arrays"] == f"numpy {np.__version__}"


@pytest.mark.parametrize("probe", doctor.PROBES, ids=str)
def test_the_mark_is_what_the_op_takes(probe, monkeypatch):
    taken = []
    choose = attention.pick_implementation

    def spy(*args):
        taken.append(choose(*args))
        return taken[-1]

    monkeypatch.setattr(attention, "pick_implementation", spy)
    jax.eval_shape(lambda *x: sl.block_sparse_attention(*x, probe.mask), *probe.arrays()[:3])
    assert taken == [doctor.first_that_works(probe)]


def test_other_devices(monkeypatch):
    class Device:
        device_kind, compute_capability = "NVIDIA H200", "9.0"

        def __str__(self):
            return "cuda:0"

        def memory_stats(self):
            return {"bytes_limit": 100 << 30}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert doctor.devices() == ["cuda:0, NVIDIA H200, compute capability 9.0, 100.0 GiB of memory for JAX"]


def test_where_calls_get_different_answers_they_are_named(monkeypatch):
    def some(call, operands):
        return "it is picky" if operands.query.dtype == jnp.float32 else None

    monkeypatch.setattr(IMPLEMENTATIONS["reference"], "unsupported", some)
    lines = [line for line in doctor.report().splitlines() if line.startswith("  reference")]
    assert lines == [
        "  reference     causal bfloat16, strided bfloat16: works",
        "  reference     causal float32, strided float32: unavailable: it is picky",
    ]


def test_the_report_names_the_kernels_on_a_gpu():
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    with platforms.assume_gpu(hardware.DEVICES["h100"]):
        text = doctor.report().partition("what runs at 8192 tokens, bfloat16, 32 heads of 128, 1 batch entry\n")[2]
    assert "  causal: 'hopper'\n    forward: hopper forward_kernel\n    backward: hopper backward_kernel\n" in text
    assert "backward: triton dq_kernel (with dk and dv), then hopper backward_kernel" in text


def test_an_implementation_that_breaks_when_asked(monkeypatch):
    def broken(call, operands):
        raise AttributeError("module has no attribute 'x'\nand more")

    monkeypatch.setattr(IMPLEMENTATIONS["reference"], "unsupported", broken)
    assert doctor.reason("reference", doctor.PROBES[0]) == (
        "asked, it raised AttributeError: module has no attribute 'x'"
    )
    assert list(doctor.self_check(["reference"])) == []


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_no_device(kind, monkeypatch, capsys):
    def none():
        raise kind("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(SystemExit) as error:
        main(["doctor"])
    assert error.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Python ")
    assert lines[-1] == (
        f"FAILED: JAX finds no device to compute on: {kind.__name__}: Unable to initialize backend 'cuda'"
    )


# --- the self-check --------------------------------------------------------------------------------------------------


def scale_out(call, operands, *, forward=IMPLEMENTATIONS["xla"].forward):
    out, lse = forward(call, operands)
    return (out * 1.01).astype(out.dtype), lse


def scale_dk(*args, backward=IMPLEMENTATIONS["reference"].backward):
    gradients = backward(*args)
    return gradients._replace(key=(gradients.key * 1.03).astype(gradients.key.dtype))


def leak(call, operands):
    raise ValueError("out of shared memory\nand more")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("implementation", "side", "fault", "text"),
    [
        ("xla", "forward", scale_out, " of the budget (out), "),
        ("reference", "backward", scale_dk, " of the budget (dk), "),
        ("xla", "forward", leak, "raised ValueError: out of shared memory, "),
    ],
)
def test_a_planted_fault_is_found(implementation, side, fault, text, number, monkeypatch, capsys):
    monkeypatch.setattr(IMPLEMENTATIONS[implementation], side, fault)
    only(monkeypatch, implementation, number)
    with pytest.raises(SystemExit) as error:
        main(["doctor"])
    assert error.value.code == 1
    *_, line, empty, summary = capsys.readouterr().out.splitlines()
    assert " FAIL  " in line and text in line and empty == ""
    assert summary.startswith("FAILED in ") and f"{implementation} ({doctor.checks(implementation)[0]})" in summary


def test_a_fault_of_decoding_is_found(monkeypatch):
    attend = xla.attend
    monkeypatch.setattr(xla, "attend", lambda *args: attend(*args) * 1.03)
    *_, check = doctor.checks("xla")
    assert check.steps and "FAIL" in str(doctor._result("xla", check))


def test_steps_of_decoding_are_the_kernels(monkeypatch):
    *_, check = doctor.checks("xla")
    check = dataclasses.replace(check, length=75)
    if doctor.made_for("triton"):
        assert "raised RuntimeError: the kernel does not support a step" in str(doctor._result("triton", check))
        monkeypatch.setattr(fused, "implementation_order", lambda _: ("triton",))
    assert doctor._result("triton", check).passed
    monkeypatch.setattr(fused, "attend", None)
    monkeypatch.setattr(fused, "step", None)
    assert not doctor._result("triton", check).passed, "nothing else computed it"


def test_nan_fails(monkeypatch):
    check = doctor.Check("causal", sl.Causal(), 20, "float32")
    right, _ = doctor._expected(check)
    monkeypatch.setattr(doctor, "_answers", lambda *_: right | {"dv": right["dv"] * np.nan})
    result = doctor._result("xla", check)
    assert not result.passed and "FAIL  inf of the budget (dv)" in str(result)


@pytest.mark.parametrize("number", range(4))
def test_budgets_are_a_few_roundings(number):
    check = doctor.checks("xla")[number]
    right, budgets = doctor._expected(check)
    for name, answer in right.items():
        assert 0 < budgets[name] < 32 * float(jnp.finfo(check.dtype).eps) * np.abs(answer).max()


def test_the_checks_are_ragged_chained_and_have_documents():
    causal, chain, documents, decoding = doctor.checks("xla")
    assert {causal.dtype, chain.dtype} == {"bfloat16", "float32"}
    assert len(chain.plan("xla").chains[0]) == 2
    ids = documents.segment_ids()
    assert ids is not None and len(set(ids[0])) == 4 and ids.min() < 0
    assert all(check.length % 16 for check in (causal, chain, documents, decoding))
    for name in ("pallas_tpu", "triton"):
        if doctor.made_for(name):
            (check,) = doctor.checks(name)
            assert "residue-major" in str(check.plan(name).chains[0][0].q_order)


# --- the command -----------------------------------------------------------------------------------------------------


def test_as_a_module_without_a_gpu(tmp_path):
    # No argument restricts the checks; a process that may not compute says quickly what it found.
    # It compiles as a user's process does, with all of XLA's passes.
    usual = {name: value for name, value in os.environ.items() if name not in QUICK}
    environment = usual | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "sparse_layers", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "  triton        unavailable: it needs an NVIDIA GPU, and JAX computes on cpu" in lines
    assert "  xla           works; implementation=None takes it" in lines
    assert any(line.startswith("  pallas_tpu    works, interpreted") for line in lines)
    assert lines[-1].startswith("all 8 checks passed in ") and lines[-1].endswith(": pallas_tpu, xla, reference")
    assert not list(tmp_path.iterdir())


QUIET = """
import sys
from sparse_layers.tools import doctor
print(doctor.report())
assert not {"triton", "jax.experimental.pallas", "flax"} & set(sys.modules)
"""


def test_the_report_imports_no_kernels(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", QUIET], cwd=tmp_path, env=environment, check=True, capture_output=True)
