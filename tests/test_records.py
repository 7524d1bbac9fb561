"""Figures in documents are lines of recorded measurements, and records are complete and never overwritten."""

import argparse
import json
import os
import pathlib
import re
import sys

import matplotlib
import pytest

from benchmarks import pictures, suite
from benchmarks.record import Record, add_option

ROOT = pathlib.Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("*.json"))
DOCUMENTS = [
    ROOT / "CONTRIBUTING.md",
    *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "measured").glob("*.md")]),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
QUOTED = re.compile(r"^<!-- record: (\S+) -->\n(.*?)^<!-- end of record -->$", re.M | re.S)
QUOTES = [
    (document, *found) for document in DOCUMENTS for found in QUOTED.findall(document.read_text(encoding="utf-8"))
]


def test_every_record_is_quoted_or_linked():
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    assert {file for _, file, _ in QUOTES} <= {str(path.relative_to(ROOT)) for path in RECORDS} != set()
    for path in RECORDS:
        assert any(f"/{path.name})" in text for text in texts), path


@pytest.mark.parametrize(("document", "file", "text"), QUOTES, ids=[f"{d.parent.name} {f}" for d, f, _ in QUOTES])
def test_quoted_figures_are_those_of_the_record(document, file, text):
    lines = [line for line in text.splitlines() if line and not line.startswith("```")]
    assert lines and set(lines) <= set(json.loads((ROOT / file).read_text(encoding="utf-8"))["lines"])
    link = os.path.relpath(ROOT / file, document.parent)
    assert f"]({link})" in document.read_text(encoding="utf-8"), "the reader is told where they are from"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_what_it_is_of(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert re.fullmatch(r"[0-9a-f]{40}", record["commit"]), "measured on a commit, without changes"
    module = re.match(r"python -m benchmarks\.(\w+)", record["command"])
    assert module and (ROOT / "benchmarks" / f"{module[1]}.py").exists()
    assert record["results"] and record["lines"] and record["versions"]["jax"] and record["load_before"] >= 0


def test_versions_that_the_install_page_calls_run_are_those_of_records():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| \[run\]\(\.\./(\S+)\) on an ([^;|]+?)(?:;.*)? \|$", text, re.M)
    assert len(rows) == text.count("[run](") >= 2
    for python, jax, triton, file, device in rows:
        record = json.loads((ROOT / file).read_text(encoding="utf-8"))
        versions = record["versions"]
        assert (python, jax, triton) == tuple(versions[name] for name in ("python", "jax", "triton"))
        assert record["device"].startswith(device)


def test_pictures_are_drawn_from_records(tmp_path, monkeypatch):
    committed = {path.stem for path in pictures.FOLDER.glob("*.svg")}
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pictures"])
    pictures.main()
    assert {path.stem for path in tmp_path.iterdir()} == committed == {*pictures.PICTURES}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_nothing_of_a_picture_is_cut_off(name):
    with matplotlib.rc_context(fname=pictures.STYLE):
        figure = pictures.PICTURES[name]()
        figure.draw_without_rendering()
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height


def test_a_record_is_written_once(tmp_path, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    add_option(parser)
    path = tmp_path / "new" / "plans.json"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "plans.py"), "--runs", "1"])
    record = Record(parser.parse_args(["--record", str(path)]).record)
    record.say("| a | 1 |\n| b | 2 |")
    record.add(name="a", seconds=[1.0])
    record.write()
    written = json.loads(path.read_text())
    assert written["command"] == "python -m benchmarks.plans --runs 1"
    assert written["lines"] == ["| a | 1 |", "| b | 2 |"] and written["results"] == [{"name": "a", "seconds": [1.0]}]
    with pytest.raises(SystemExit):
        parser.parse_args(["--record", str(path)])
    with pytest.raises(FileExistsError):
        record.write()
    assert "a record is never overwritten" in capsys.readouterr().err


JUNIT = """<testsuites><testsuite time="2.5">
<testcase classname="tests.masks.test_masks" name="test_a[x]" time="0.25"/>
<testcase classname="tests.masks.test_grids" name="test_b" time="1.5"/>
<testcase classname="sparse_layers" name="sparse_layers" time="0.5"><skipped/></testcase>
</testsuite></testsuites>"""


def test_seconds_of_tests_are_summed_by_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "tests.xml").write_text(JUNIT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path / "tests.xml"), "--slowest", "1"])
    suite.main()
    printed = capsys.readouterr().out
    assert "tests.xml: 3 tests in 2 s" in printed
    rows = [
        line for line in printed.splitlines() if line.startswith("| ") and "seconds" not in line and "---" not in line
    ]
    assert rows == ["| tests.masks | 2 | 2 |", "| sparse_layers | 1 | 0 |", "| tests.masks.test_grids::test_b | 1.5 |"]
