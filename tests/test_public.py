import ast
import importlib
import inspect
import pathlib
import pickle
import re
import subprocess
import sys

import pytest

import sparse_layers as sl

ROOT = pathlib.Path(__file__).parents[1]
# The layers are no variables of the package before their first use: dir() lists them all the same.
PUBLIC = {n: getattr(sl, n) for n in dir(sl) if not n.startswith("_") and not inspect.ismodule(getattr(sl, n))}
# Written with &, |, ~ and .T; and made by functions of the package, whose examples show them.
OPERATORS, RESULTS = {sl.And, sl.Or, sl.Not, sl.Transposed}, {sl.AttentionFn, sl.MaskInfo, sl.Plan}


# --- import ----------------------------------------------------------------------------------------------------------

COLD = """
import sys
import jax, numpy, flax.nnx
settings, loaded = dict(jax.config.values), set(sys.modules)
import sparse_layers
changed = {name for name, value in jax.config.values.items() if name not in settings or settings[name] != value}
assert not changed, changed
for name in ("torch", "triton", "haiku", "equinox", "matplotlib", "jax.experimental.pallas"):
    assert name not in sys.modules, name
parts = {name for name in sys.modules if name.startswith("sparse_layers.")}
assert all(name.startswith(("sparse_layers.arguments", "sparse_layers.masks")) for name in parts), parts
assert set(sparse_layers.__all__) <= set(dir(sparse_layers))
more = {name.partition(".")[0] for name in set(sys.modules) - loaded} - sys.stdlib_module_names
print(*sorted(more))
"""


def test_a_cold_import_is_light(tmp_path):
    # Flax itself imports optax and orbax; what counts is what this package adds.
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", COLD], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["sparse_layers"]
    assert not list(tmp_path.iterdir()), "importing writes nothing"


def test_names_at_first_use_are_those_that_type_checkers_see():
    tree = ast.parse(pathlib.Path(sl.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING"
    )
    seen = [(node.module, alias.name) for node in block.body for alias in node.names]
    assert seen == [(module, name) for module, names in sl._AT_FIRST_USE.items() for name in names]
    with pytest.raises(AttributeError, match="module 'sparse_layers' has no attribute 'atention'"):
        sl.__getattr__("atention")


def test_what_comes_at_first_use_is_imported_and_pickled_by_name():
    names = {}
    exec("from sparse_layers import *", names)
    assert names.keys() - {"__builtins__"} == set(sl.__all__)
    for value in (sl.FwdParams(num_warps=4), sl.make_plan, sl.SparseSelfAttention, sl.Causal() & sl.Window(3)):
        assert pickle.loads(pickle.dumps(value)) == value


# --- names -----------------------------------------------------------------------------------------------------------


def test_public_names_resolve_and_no_other_is_exported():
    assert set(sl.__all__) == PUBLIC.keys()
    assert len(set(sl.__all__)) == len(sl.__all__)
    wanted = {"SparseSelfAttention", "SparseTransformerBlock", "SparseTransformer", "block_sparse_attention", "preset"}
    assert wanted <= PUBLIC.keys()


def parameters(thing):
    if getattr(thing, "_is_protocol", False):  # nobody makes one
        return []
    # A Flax module's class takes its arguments through a metaclass; a NamedTuple has no __init__ of its own.
    function = thing.__init__ if isinstance(thing, type(sl.SparseSelfAttention)) else thing
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_documentation(name):
    thing = PUBLIC[name]
    text = thing.__doc__ or ""
    first = text.partition("\n")[0]
    assert first.endswith(".") and len(first) <= 117, "one line says what it is"
    if thing in OPERATORS:
        assert "``" in first, "says how it is written"
        return
    assert thing in RESULTS or ("Example:" in text and ">>>" in text)
    documented = text
    for other in re.findall(r"(?:see|are those of) `(\w+)`", text):
        documented += vars(sys.modules[thing.__module__])[other].__doc__
    for parameter in parameters(thing):
        assert re.search(rf"^\s+(\w+, )*\**{parameter}(, \w+)*: ", documented, re.M), f"{parameter} is not documented"
    assert "raise ValueError" not in inspect.getsource(thing) or "Raises:" in documented


@pytest.mark.parametrize("name", [*sorted(PUBLIC), "linen", "haiku"])
def test_examples_come_in_by_the_public_door(name):
    thing = PUBLIC[name] if name in PUBLIC else importlib.import_module(f"sparse_layers.{name}")
    parts = [thing, *(value for member, value in inspect.getmembers(thing) if not member.startswith("__"))]
    text = "\n".join(part.__doc__ or "" for part in parts)
    assert not re.findall(r"(?:>>>|\.\.\.) .*\bsparse_layers\.(?!linen|haiku)\w+.*", text)
