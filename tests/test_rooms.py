"""The house: which room may import which, and what each room may know of other libraries."""

import ast
import graphlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "sparse_layers"
SOURCES = sorted(path for name in ("sparse_layers", "examples", "benchmarks") for path in (ROOT / name).rglob("*.py"))

# From the ground up. A room may import itself and the rooms on floors below its own, never one beside or above it.
FLOORS = [
    ("arguments",),  # checks of what callers write, and their words
    ("masks",),  # WHAT may attend
    ("ops/planning",),  # WHERE to compute
    ("ops/kernels",),  # HOW
    ("scorers",),  # which key blocks a query selects at run time
    ("ops/decoding",),  # caches, and steps of decoding
    ("ops",),  # THE op
    ("modules", "tools"),
    ("",),  # the public doors
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# The implementations on GPUs, and the engines that they ask.
STANDS_ON = {"gpu_attention": {"hopper_gpu", "triton_gpu"}}
# Heavy or optional libraries, and the only rooms that may know them.
LIBRARIES = {
    "flax": {"modules", ""},
    "haiku": {""},
    "equinox": set(),
    "triton": {"ops/kernels"},
    "jax_triton": set(),  # `ops/kernels/gpu/bridge.py` takes its place
    "jax.experimental.pallas": {"ops/kernels"},
}


def room(path):
    """The innermost room that a path below the package lies in."""
    place = path.relative_to(PACKAGE).parent.as_posix()
    return max((name for name in FLOOR if name in ("", place) or place.startswith(f"{name}/")), key=len)


def imports(path, types=True):
    """(name, is it of this package) of every module that a file imports or may import from; types, for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    left_out = set() if types else {node for block in for_types for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name.startswith("sparse_layers")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(ROOT).parent.parts[: len(path.relative_to(ROOT).parent.parts) - node.level + 1]
            module = ".".join([*(base if node.level else ()), *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", module.startswith("sparse_layers")


def source(module):
    """The file of this package that a dotted name is, or is defined in."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:count])
        for path in (stem / "__init__.py", stem.with_suffix(".py")):
            if path.is_file():
                return path
    raise AssertionError(f"{module} is no module of the package")


def test_every_room_is_on_a_floor_and_has_files():
    found = {room(path) for path in PACKAGE.rglob("*.py")}
    assert found == FLOOR.keys()
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_files(path):
    text = path.read_text(encoding="utf-8")
    assert "jax._src" not in text
    if "examples" in path.relative_to(ROOT).parts:
        assert not [name for name, _ in imports(path) if name.startswith("benchmarks")], "an example stands by itself"


def test_no_file_is_longer_than_600_lines():
    beside = [path for name in ("tests", "docs") for path in (ROOT / name).rglob("*.py")]
    files = [*SOURCES, *beside, *ROOT.glob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {"tests/test_rooms.py", "docs/conf.py"} < lines.keys()
    assert not {file: count for file, count in lines.items() if count > 600}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_function_is_longer_than_60_lines(path):
    """Without its docstring. Kernels, and what launches them, may be longer: they read from top to bottom."""
    functions = [x for x in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(x, ast.FunctionDef)]
    lengths = {x.name: x.end_lineno - x.lineno + 1 for x in functions}
    for x in functions:
        if ast.get_docstring(x) is not None:
            lengths[x.name] -= x.body[0].end_lineno - x.body[0].lineno + 1
    limit = 90 if "kernels" in path.parts else 60
    assert not {name: lines for name, lines in lengths.items() if lines > limit}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    here = room(path)
    for name, ours in imports(path):
        if not ours:
            for library, rooms in LIBRARIES.items():
                assert here in rooms or not f"{name}.".startswith(f"{library}."), f"{here or 'the root'} imports {name}"
            if here in ("arguments", "masks"):
                allowed = {"numpy", "jax.errors", "jax.export", "jax.tree_util"}
                known = name in allowed or name.partition(".")[0] in sys.stdlib_module_names
                assert known, (
                    "values know numpy, and of JAX its errors and what makes them static in pytrees and exports"
                )
            continue
        there = room(source(name))
        assert there == here or FLOOR[there] < FLOOR[here], f"{here or 'the root'} imports {name}"


def test_there_is_no_circle_of_imports():
    """Not of files, and not of folders; imports within functions count."""
    files, folders = {}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        sources = {source(name) for name, ours in imports(path, types=False) if ours} - {path}
        files[path] = sources
        folders.setdefault(path.parent, set()).update({file.parent for file in sources} - {path.parent})
    for graph in (files, folders):
        graphlib.TopologicalSorter(graph).prepare()


def test_implementations_do_not_import_each_other():
    kernels = PACKAGE / "ops" / "kernels"
    shared = {
        "__init__",
        "call",
        "distance_bias",
        "gpu",
        "numerics",
        "operands",
        "pass_blocks",
        "quantized",
        "transforms",
        "validation",
    }

    def implementation(path):
        return path.relative_to(kernels).parts[0].removesuffix(".py")

    files = {path: implementation(path) for path in kernels.rglob("*.py") if implementation(path) not in shared}
    assert len(set(files.values())) >= 5
    for path, own in files.items():
        used = {source(name) for name, ours in imports(path) if ours}
        others = (
            {implementation(other) for other in used if kernels in other.parents}
            - shared
            - {own}
            - STANDS_ON.get(own, set())
        )
        assert not others, f"{path.name} of {own} imports {others}"


def test_what_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/.]+)`", text) if "/" in name}
    assert named >= {f"sparse_layers/{name}/".replace("//", "/") for name in FLOOR}, "every room is explained"
    assert not [name for name in named if not ((ROOT / name).exists() or name.startswith("build/"))]
