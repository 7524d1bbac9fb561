"""The prose of every page: short sentences, short pages, and no phrase that a reader has to translate."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"generated", "_build"} & {*path.parts}),
        *sorted((ROOT / "examples").rglob("README.md")),
    ]
}
WORDS_OF_A_SENTENCE, WORDS_OF_A_PAGE, WORDS_OF_A_MEASURED_PAGE = 30, 2500, 1500
# Sentences that are longer, by their first words, with the reason. At most ten.
LONGER: dict[str, str] = {}
PHRASES = re.compile(
    r"\b(?:but for|in vain|whoever|so many|of what|there are none|in so many words|of theirs|what is more)\b", re.I
)
CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.M | re.S)
FRONT_MATTER = re.compile(r"\A---\n.*?^---$", re.M | re.S)
TABLE = re.compile(r"^ *\|.*\n?", re.M)


def prose(text):
    """A page without code, tables, comments, pictures and addresses of links."""
    text = FRONT_MATTER.sub("", text)
    text = re.sub(r"<!--.*?-->", "", CODE.sub("\n\n", text), flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", TABLE.sub("", text))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text):
    """The sentences of a page; a heading, an item of a list and the end of a paragraph end one, too."""
    for paragraph in re.split(r"\n\s*\n|^#+ .*$|^ *(?:[-*]|\d+\.) ", prose(text), flags=re.M):
        for sentence in re.split(r"(?<=[.!?:])[)\"*_]*\s+(?=[`*\"(\[]*[A-Z0-9`])", paragraph):
            if sentence.strip():
                yield " ".join(sentence.split())


def test_it_finds_sentences():
    text = "# A b\n\nOne `x.y` two. Three (four). *Six*:\n\n- seven\n- [eight](x.md)\n\n| t |\n\n```\nx y\n```\nTen.\n"
    assert [*sentences(text)] == ["One `x.y` two.", "Three (four).", "*Six*:", "seven", "eight", "Ten."]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    found = [x for x in sentences(PAGES[page]) if len(x.split()) > WORDS_OF_A_SENTENCE]
    assert not [x for x in found if not x.startswith(tuple(LONGER))]


def test_exceptions_are_few_and_needed():
    found = [x for text in PAGES.values() for x in sentences(text) if len(x.split()) > WORDS_OF_A_SENTENCE]
    assert len(LONGER) <= 10 and all(any(x.startswith(start) for x in found) for start in LONGER)


@pytest.mark.parametrize("page", PAGES)
def test_phrases_are_plain(page):
    assert not [x for x in sentences(PAGES[page]) if PHRASES.search(x)]


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page):
    limit = WORDS_OF_A_MEASURED_PAGE if page.startswith("docs/measured/") else WORDS_OF_A_PAGE
    assert len(prose(PAGES[page]).split()) <= limit
