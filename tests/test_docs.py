"""The pages of docs/: their Python runs page by page, and every public name has its place in the reference."""

import pathlib
import re

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

import sparse_layers as sl
from sparse_layers import linen

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted([*DOCS.glob("*.md"), *DOCS.glob("measured/*.md")])]
# Texts whose links are looked at; the examples' own tests run their code.
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
# Blocks of code, and the text that stands right below one as what it prints, else "".
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.M | re.S)
CODE = {name: BLOCK.findall(text) for name, text in TEXTS.items()}
# What pages say in comments and texts of what their code makes.
SHAPES = {
    "README.md": {"out": (2, 1024, 64)},
    "docs/models.md": {"swapped": (2, 512, 32)},
    "docs/cross_attention.md": {"classes": (2, 10), "latents": (2, 64, 32)},
    "docs/decoding.md": {"tokens": (2, 20)},
}


@pytest.mark.parametrize("page", [name for name, blocks in CODE.items() if blocks])
def test_the_code_of_a_page_runs_by_itself_and_prints_the_text_below_it(page, capsys):
    names = {}
    for block, text in CODE[page]:
        exec(compile(block, page, "exec"), names)
        printed = capsys.readouterr().out
        assert not text or printed == text
    assert {name: names[name].shape for name in SHAPES.get(page, {})} == SHAPES.get(page, {})
    if page == "docs/masks.md":
        assert all(isinstance(mask, sl.Mask) for mask in (names["mask"], *names["by_head"], names["flex"]))


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].split()) <= 700


def test_every_public_name_is_in_the_reference_once():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:class|function):: sparse_layers\.(\w+)$", text, re.M)
    assert sorted(named) == sorted(sl.__all__)
    linen_text = (DOCS / "api" / "linen.md").read_text(encoding="utf-8")
    layers = {name for name, value in vars(linen).items() if isinstance(value, type)}
    assert {*re.findall(r"autoclass:: sparse_layers\.linen\.(\w+)$", linen_text, re.M)} == layers


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in LINKED])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_the_pictures_of_grids_are_right():
    block = re.search(r"of 7 rows of 8:\n\n```text\n(.*?)^```", TEXTS["docs/gallery.md"], re.M | re.S)
    assert block
    names, options, *rows = block[1].splitlines()
    starts = [m.start() for m in re.finditer(r"\w+", names)]
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        mask = sl.preset(f"{names[start:end].strip()}:shape=7x8,{options[start:end].strip()}")
        assert "\n".join(row[start:end].rstrip() for row in rows) == sl.grid_picture(mask, (7, 8), query=(5, 2))


def test_the_formulas_of_patterns_are_those_of_the_masks():
    table = TEXTS["docs/design_space.md"].partition("## Who has")[0]
    rows = re.findall(r"^\| [^|`]+ \| `(.+?)` \| `(.+?)` \|", table, re.M)
    assert len(rows) >= 13
    for code, formula in rows:
        (mask,) = sl.as_masks(eval(code.replace("\\|", "|"), {"sl": sl}))
        said = [[bool(eval(formula, {"q": q, "k": k})) for k in range(96)] for q in range(96)]
        assert (mask.dense(96) == said).all(), code


def test_masks_of_other_libraries_are_those_that_the_page_writes_for_them():
    rows = re.findall(
        r"^\|(?: [^|`]+ \|)? `([^`]+)` \| `([^`]+)` \|$", TEXTS["docs/splash.md"].replace(r"\|", "¦"), re.M
    )
    array = np.random.default_rng(0).random((64, 64)) < 0.5
    q, k = np.arange(64)[:, None], np.arange(64)
    names = {"sl": sl, "splash": splash_attention_mask, "array": array}
    seen = 0
    for theirs, ours in ([cell.replace("¦", "|") for cell in row] for row in rows):
        if theirs.startswith("splash."):
            masks = [mask.dense(64) for mask in sl.as_masks(eval(theirs, names))]
        elif re.match(r"\(?q\b", theirs):
            masks = [np.broadcast_to(eval(theirs, {"q": q, "k": k}), (64, 64))]
        else:
            continue
        seen += 1
        assert np.array_equal(masks, [mask.dense(64) for mask in sl.as_masks(eval(ours, names))]), theirs
    assert seen >= 15
