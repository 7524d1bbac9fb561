"""The words of the code: those of docs/glossary.md, and none of a private dialect."""

import ast
import collections
import pathlib
import re

import pytest

import sparse_layers as sl

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "sparse_layers"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
TERMS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `(\w+)` \|$", GLOSSARY, re.MULTILINE)
PUBLIC = frozenset(vars(sl)["__all__"])
WORD = re.compile(r"\w+")
# Names that say where a value comes from, and not what it is.
VAGUE = set(
    WORD.findall("""
    found own given each made told held at here who those more both apart alike whole together within nothing
    begun coming early late raised old other turn place piece pieces part parts leave back give gives near real
""")
)
# Names of earlier versions, for which there is a term now.
REPLACED = set(
    WORD.findall("""
    Link HopperLink also goes_with gives_dkv adds_in_float32 single_keys Candidates static_candidates unserved
    outdone misfit pays serves chosen chosen_by choosing Choices item items job by_key gathered Spread Neighbors
    Gathered Residues folded Home own_keywords answers_now taken_apart put_together placed Extras
    products_begin_from
""")
)
# First words of a docstring whose sentence has no subject.
BEGINNING = re.compile(r"(What|Of|To how|How|By how|Whether|Which|Those|Whose)\b")


def defined(tree):
    """The names that code defines, with their lines; parameters of operators, such as ``other``, are Python's."""
    operators = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("__")
        for argument in ast.walk(node.args)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg) and node not in operators:
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def documented(tree):
    """The modules, classes and functions that have a docstring, with it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield node, docstring


def is_explained(name, docstring):
    """True if a term stands in a name, or in the first sentence of its docstring."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_/.]", " ", name).lower()
    text = f"{words} {docstring.partition(chr(10) * 2)[0].lower()}"
    spellings = [re.split(r"[ (,)]*[(]|[)]", term)[:2] for term, _, _ in TERMS]
    return any(re.search(rf"\b{re.escape(word.strip())}(s|es)?\b", text) for pair in spellings for word in pair if word)


def faults(file):
    """What is to be rewritten in a file, a line each."""
    tree = ast.parse(SOURCES[file].read_text(encoding="utf-8"))
    lines = [
        f"{line}: {name!r} {reason}"
        for name, line in defined(tree)
        for words, reason in ((VAGUE, "does not say what the value is"), (REPLACED, "is an old name: see the glossary"))
        if name.strip("_") in words
    ]
    for node, docstring in documented(tree):
        name, line = getattr(node, "name", file.removesuffix(".py")), getattr(node, "lineno", 1)
        if BEGINNING.match(docstring):
            lines.append(f"{line}: the docstring of {name} begins with {docstring.split()[0]!r} and has no subject")
        if isinstance(node, ast.ClassDef):
            name += "".join(f" {base.id}" for base in node.bases if isinstance(base, ast.Name))
        public = isinstance(node, ast.Module) or (isinstance(node, ast.ClassDef) and node.name in PUBLIC)
        if public and not is_explained(name, docstring):
            lines.append(f"{line}: no term of the glossary explains {name}: {docstring.splitlines()[0]}")
    return lines


@pytest.mark.parametrize("file", SOURCES)
def test_words(file):
    lines = faults(file)
    assert not lines, "\n".join([file, *lines])


def test_terms():
    assert 30 <= len(TERMS) <= 40
    assert not [term for term, count in collections.Counter(term for term, _, _ in TERMS).items() if count > 1]
    names = {name for path in SOURCES.values() for name, _ in defined(ast.parse(path.read_text(encoding="utf-8")))}
    assert not [name for _, _, name in TERMS if name not in names], "names of the table are in the code"
    assert not [term for term, meaning, _ in TERMS if len(re.sub(r"\[.*", "", meaning).split()) > 40]
