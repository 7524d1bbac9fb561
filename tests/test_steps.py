"""Benchmarks of whole steps: they run at a small size, refuse wrong results, and put words where memory ends."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import steps, video, weather

WEATHER = "--subdivisions 1 --hops 2 --layers 2 --width 16 --heads 2 --hidden 32 --dtype float32"
VIDEO = "--grid 5 6 8 --tile 1 2 2 --width 16 --heads 2 --hidden 32 --text 8 --dtype float32 --patterns"


def record_of(module, arguments, tmp_path, monkeypatch):
    """Runs a benchmark and returns its record."""
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [module.__file__, *arguments, "--record", str(path)])
    module.main()
    return json.loads(path.read_text(encoding="utf-8"))


def test_weather_runs_at_a_small_size(tmp_path, monkeypatch):
    """It takes 7 seconds: four kinds of attention are compiled, checked and measured."""
    record = record_of(weather, WEATHER.split(), tmp_path, monkeypatch)
    rows = [line.split(" | ") for line in record["lines"] if line.startswith("| ")]
    assert [row[0] for row in rows] == [
        "| attention",
        "| ---",
        "| graph",
        "| graph, sorted",
        "| dense",
        "| three diagonals",
    ]
    assert all(len(row) == 7 and float(row[1]) > 0 for row in rows[2:])
    shares = {x["check"]: x["share_of_budget"] for x in record["results"] if "check" in x}
    assert len(shares) == 4 and all(0 < share <= 1 for share in shares.values())


def test_video_runs_at_a_small_size(tmp_path, monkeypatch):
    """It takes 7 seconds: two kinds of attention and their blocks are compiled, checked and measured."""
    record = record_of(video, [*VIDEO.split(), "cubes", "dense"], tmp_path, monkeypatch)
    measured = [(x["attention"], x["step"]) for x in record["results"] if "step" in x]
    assert measured == [(name, step) for name in ("cubes", "dense") for step in video.COLUMNS]
    assert all(x["ms"] > 0 and x["failed"] is None for x in record["results"] if "step" in x)


@pytest.mark.parametrize("name", ["radial", "sliding tiles"])
def test_masks_are_those_of_the_written_rules(name):
    grid, tile, cube = (5, 6, 8), (1, 2, 2), (3, 5, 4)
    allowed = video.allowed_pairs(name, grid, tile, cube, np.zeros(0), np.zeros(0))[0]
    assert np.array_equal(video.pattern(name, grid, tile, cube).dense(240, 240), allowed) and not allowed.all()


def test_three_diagonals_hold_every_pair_of_the_band():
    edges, _ = weather.mesh(2, "rcm")
    graph = weather.sl.from_csr(*weather.within(edges, 2))
    size = weather.band(graph)
    masks = weather.diagonals(graph, size)
    assert masks.sum() == graph.indices.size and size < graph.shape[0] / 2


def test_nodes_in_another_order_have_the_same_neighbours():
    edges, vertices = weather.mesh(1, "rcm")
    graph = weather.sl.from_csr(*weather.within(edges, 1))
    order = weather.sl.spatial_order(vertices)
    nodes = graph.shape[0]
    assert np.array_equal(
        weather.permuted(graph, order).dense(nodes, nodes), graph.dense(nodes, nodes)[order][:, order]
    )


def test_wrong_attention_is_refused():
    arrays = [jax.random.normal(key, (1, 8, 1, 4)) for key in jax.random.split(jax.random.key(0), 4)]
    every = np.ones((1, 1), bool)
    assert 0 < steps.check_attention(jax.nn.dot_product_attention, arrays, every) <= 1
    with pytest.raises(ArithmeticError, match="'dv'"):
        steps.check_attention(lambda q, k, v: jax.nn.dot_product_attention(q, k, v) * 1.001, arrays, every)


def test_a_lack_of_memory_is_a_cell_and_other_failures_are_errors():
    def failing(message):
        def fail(x):
            raise jax.errors.JaxRuntimeError(message)

        return lambda x: jax.pure_callback(fail, x, x)

    measured = steps.measure(failing("RESOURCE_EXHAUSTED: out of memory"), jnp.ones(4))
    assert measured.cells() == ["out of memory", "0.00"]
    with pytest.raises(jax.errors.JaxRuntimeError):
        steps.measure(failing("INTERNAL: a kernel failed"), jnp.ones(4))
