import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.__main__ import main
from tests.ops.cases import NEEDED


def test_list_names_every_preset_with_its_options(capsys):
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    for name, summary in sl.presets().items():
        assert any(line.strip() == summary for line in lines)
        heads = [line for line in lines if line.partition(":")[0] == name]
        assert len(heads) == 1
        # What is printed is what `show` takes, with lengths for the dots.
        lengths = ["x".join(map(str, np.ravel(value))) for value in NEEDED[name].values()]
        assert sl.preset(heads[0].replace("...", *lengths or [""])) == sl.preset(name, **NEEDED[name])


def test_show_prints_the_description(capsys):
    main(["show", "strided:local_attn_ctx=16", "--seq-len", "300"])
    expected = sl.describe(sl.preset("strided", local_attn_ctx=16), 300)
    assert capsys.readouterr().out == expected + "\n"


def test_show_warns_before_planning_long_sequences(capsys):
    main(["show", "local:local_attn_ctx=8", "--seq-len", "200000"])
    output = capsys.readouterr()
    assert output.err == "planning for 200000 tokens, which may take half a minute\n" and "200000" not in output.out


def test_show_saves_a_picture(capsys, tmp_path):
    path = tmp_path / "fixed.png"
    main(["show", "fixed", "--seq-len", "256", "--png", str(path)])
    assert capsys.readouterr().out.endswith(f"saved {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "the following arguments are required: {list,show,doctor}"),
        (["shwo"], "invalid choice: 'shwo'"),
        (["show"], "the following arguments are required: PRESET, --seq-len"),
        (["show", "local"], "the following arguments are required: --seq-len"),
        (["show", "local", "--seq-len", "many"], "invalid int value: 'many'"),
        (["show", "local", "--seq-len", "0"], "--seq-len must be >= 1 and at most 1048576, got 0"),
        (["show", "local", "--seq-len", "100000000"], "at most 1048576, got 100000000: to plan more may take minutes"),
        (["show", "locale", "--seq-len", "8"], "unknown name 'locale', did you mean 'local'"),
        (["show", "local:window=3", "--seq-len", "8"], "unknown option 'window'. Known: local_attn_ctx"),
        (["show", "local:local_attn_ctx=0", "--seq-len", "8"], "local_attn_ctx must be an integer >= 1, got 0"),
        (
            ["show", "local", "--seq-len", "8", "--png", "no folder/x.png"],
            "a folder that is there, got 'no folder/x.png'",
        ),
        (
            ["show", "local", "--seq-len", "8", "--png", "x.foo"],
            "--png must name a file that ends in .png, got 'x.foo'",
        ),
        (["show", "local", "--seq-len", "8", "--jpg", "x"], "unrecognized arguments: --jpg x"),
        (["doctor", "xla"], "unrecognized arguments: xla"),
    ],
)
def test_errors_are_one_line_and_code_2(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0] and ": error: " in lines[0]


def test_the_doctor_is_imported_by_its_command_only():
    code = "import sys, sparse_layers.__main__; assert 'sparse_layers.tools.doctor' not in sys.modules"
    root = pathlib.Path(sl.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root)}, check=True)


def test_as_a_module(tmp_path):
    root = pathlib.Path(sl.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "sparse_layers", "show", "local:local_attn_ctx=2", "--seq-len", "4"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True)
    assert "■ · · ·\n■ ■ · ·\n· ■ ■ ·\n· · ■ ■\n" in done.stdout and not done.stderr
    done = subprocess.run([*command[:3], "show"], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
