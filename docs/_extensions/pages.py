"""Pages of the site that are texts of the repository, and links that lead from one to another."""

import os
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Texts that lie elsewhere, and the pages that they become.
COPIED = {
    "README.md": "generated/readme.md",
    "CONTRIBUTING.md": "generated/contributing.md",
    "CHANGELOG.md": "generated/changelog.md",
} | {
    path.relative_to(ROOT).as_posix(): f"generated/{path.parent.name}.md" for path in ROOT.glob("examples/**/README.md")
}
# Each record leads to the page that has a row of it in its last table.
MEASURED = {
    f"benchmarks/records/{name}.json": page
    for page in sorted((DOCS / "measured").glob("*.md"))
    for name in re.findall(r"^\| \[(\w+)\]\(", page.read_text(encoding="utf-8"), re.M)
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def relinked(text: str, origin: pathlib.Path, folder: pathlib.Path) -> str:
    """A text of ``origin`` with links as they are right in ``folder``.

    Of a link to what is no page its words and the file's name stay: the site must not lead nowhere.
    """

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        path = pathlib.Path(os.path.normpath(origin.parent / target))
        name = path.relative_to(ROOT).as_posix()
        if name == "README.md":
            path = DOCS / "index.md"
        elif name in COPIED:
            path = DOCS / COPIED[name]
        elif name in MEASURED and origin != MEASURED[name]:
            path, anchor = MEASURED[name], "#how-it-was-measured"
        elif not image and not (path.suffix == ".md" and path.is_relative_to(DOCS)):
            return words if words in {name, path.name} else f"{words} (`{name}`)"
        return f"{image}[{words}]({os.path.relpath(path, folder)}{anchor or ''})"

    return _LINK.sub(link, text)


def copy(app: Any) -> None:
    """Writes the copies."""
    for origin, page in COPIED.items():
        path = DOCS / page
        # What the front page includes stands in the folder above.
        folder = DOCS if origin == "README.md" else path.parent
        text = relinked((ROOT / origin).read_text(encoding="utf-8"), ROOT / origin, folder)
        write_if_new(path, text)


def write_if_new(path: pathlib.Path, text: str) -> None:
    """Writes a part of the site where it is not what it was: what is older than its page is not built again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _read(app: Any, name: str, source: list[str]) -> None:
    if not name.startswith(("generated/", "api/")):
        path = DOCS / f"{name}.md"
        source[0] = relinked(source[0], path, path.parent)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks for it."""
    app.connect("builder-inited", copy)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
