import pathlib
import subprocess
import sys
import warnings

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PLUGIN = """
import warnings
def warn(*arguments):
    warnings.warn("of a plugin")
pytest_configure = pytest_sessionstart = pytest_collection_finish = lambda: warn()
pytest_sessionfinish = pytest_terminal_summary = pytest_unconfigure = lambda: warn()
"""


def test_a_warning_is_an_error(request):
    with pytest.raises(UserWarning, match="of a test"):
        warnings.warn("of a test", stacklevel=1)
    for item in request.session.items:  # doctests, too
        assert "error" in [argument for mark in item.iter_markers("filterwarnings") for argument in mark.args]


@pytest.mark.filterwarnings("ignore:of a test")
def test_a_test_may_say_otherwise():
    warnings.warn("of a test", stacklevel=1)


def test_a_warning_of_a_plugin_is_none(tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    this = f"{pathlib.Path(__file__).relative_to(ROOT)}::{test_a_warning_is_an_error.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "noisy", "-p", "no:cacheprovider", this]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "UserWarning: of a plugin" in run.stdout + run.stderr and "1 passed" in run.stdout


def test_no_plugin_imports_what_reads_its_settings_once():
    """Without the settings of tests/conftest.py, numpy has a thread for each core in every process, and they spin."""
    modules = [*sys.modules]  # in the order in which their imports began
    early = {"jax", "numpy"} & {*modules[: modules.index("tests.conftest")]}
    assert not early, "leave out the plugin that imports it, as pyproject.toml does: pytest -p no:NAME"
