"""The table of the checks: budgets are those of rounding, and a wrong row ends the process with 1."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.hosts.checks import Table, check_hook, with_gradients


def attention(scale):
    return with_gradients(lambda q, k, v: jax.nn.softmax(scale * q @ k.T) @ v)


def arrays(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (4, 16, 16), dtype)


def test_results_have_gradients():
    out, dq, dk, dv = attention(1.0)(*arrays())
    assert out.shape == dq.shape == dk.shape == dv.shape == (16, 16)
    assert np.allclose(dv, jax.nn.softmax(arrays()[0] @ arrays()[1].T).T @ arrays()[3], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_is_within_the_budget_and_more_is_not(dtype, capsys):
    table, eps = Table(), float(jnp.finfo(dtype).eps)
    table.compare("equal", attention(0.25), attention(0.25), *arrays(dtype))
    table.compare("rounded", jax.jit(attention(0.25)), attention(0.25), *arrays(dtype))
    assert table.failures == 0
    table.compare("scale", attention(0.25 * (1 + 32 * eps)), attention(0.25), *arrays(dtype))
    table.compare("NaN", lambda *x: [y * np.nan for y in attention(0.25)(*x)], attention(0.25), *arrays(dtype))
    table.compare("shape", lambda *x: [y[1:] for y in attention(0.25)(*x)], attention(0.25), *arrays(dtype))
    assert table.failures == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| equal", "| rounded", "| scale", "| NaN", "| shape"]
    assert lines[2].startswith("| equal | 4 | 0.0e+00 |") and lines[4].endswith("| FAILED |")


def test_a_failed_row_ends_the_process_with_1(capsys):
    def refuse():
        raise ValueError("grid must fit")

    table = Table()
    table.refuse("right words", refuse, "grid")
    with pytest.raises(SystemExit, match="0"):
        table.exit()
    table.refuse("other words", refuse, "mask")
    table.refuse("no error", lambda: None, "grid")
    with pytest.raises(SystemExit, match="1"):
        table.exit()
    assert capsys.readouterr().out.splitlines()[-1] == "2 failed"


def test_a_row_of_the_host_itself_never_fails(capsys):
    table = Table()
    table.compare("its route", attention(0.5), attention(0.25), *arrays(), is_of_host=True)
    table.compare("its other route", attention(0.25), attention(0.25), *arrays(), is_of_host=True)
    with pytest.raises(SystemExit, match="0"):
        table.exit()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("| differs: the host's own route |") and lines[3].endswith("|  |")


HOOK = [
    ("host/attention.py", "attend", "case Backend.SPARSE:", "in `match backend`, before `case _`"),
    ("host/attention.py", "Backend", 'SPARSE = "sparse"', "as a member"),
]
HOST = """
class Backend:
    DENSE = "dense"


def attend(backend):
    match backend:
        case Backend.DENSE:
            return 1
        case _:
            return 0


def other(backend):
    return 2
"""


def test_the_hook_is_checked_by_the_function_that_must_have_it(tmp_path):
    """Lines in another function do not count, and each missing line is named with its position."""
    with pytest.raises(SystemExit, match=r"PATH must have host/attention.py, got"):
        check_hook(tmp_path, HOOK)
    file = tmp_path / "host" / "attention.py"
    file.parent.mkdir()
    wrong = HOST.replace("    return 2", "    match backend:\n        case Backend.SPARSE:\n            return 2")
    file.write_text(wrong)
    words = (
        r"host/attention.py, attend, in `match backend`, before `case _`: case Backend.SPARSE:\n.*Backend, as a member"
    )
    with pytest.raises(SystemExit, match=words):
        check_hook(tmp_path, HOOK)
    late = HOST.replace(
        "            return 0", "            return 0\n        case Backend.SPARSE:\n            return 2"
    )
    file.write_text(late)
    with pytest.raises(
        SystemExit, match=r"host/attention.py is no valid Python, so the hook is in a wrong line: wildcard"
    ):
        check_hook(tmp_path, HOOK)
    right = HOST.replace("        case _", "        case Backend.SPARSE:\n            return 2\n        case _")
    file.write_text(right.replace('    DENSE = "dense"', '    DENSE = "dense"\n    SPARSE = "sparse"'))
    check_hook(tmp_path, HOOK)


@pytest.mark.parametrize("host", ["levanter", "maxdiffusion", "maxtext", "weathernext"])
def test_a_check_that_is_started_elsewhere_says_where_it_runs(host, tmp_path):
    file = pathlib.Path(__file__).parents[2] / "examples" / "hosts" / host / "check.py"
    ended = subprocess.run([sys.executable, file, "PATH"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    words = "from the root of a clone of sparse_layers, which needs no installation:"
    assert f"{words}\npython -m examples.hosts.{host}.check PATH" in ended.stderr
