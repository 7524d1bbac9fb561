"""The built site in a browser: ``make test-docs``, where there is a Chromium (Debian: ``apt-get install chromium``)."""

import html
import inspect
import pathlib
import re
import shutil

import pytest
from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports] (of the extra docs)

import sparse_layers as sl

SITE = pathlib.Path(__file__).parent / "_build" / "html"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
QUIET = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser():
    assert BROWSER, f"no browser is installed: looked for {', '.join(NAMES)}"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1300, 900), (400, 800)], ids=["desktop", "phone"])
def page(request, browser):
    """A page of one width, whose errors fail the test."""
    width, height = request.param
    found, errors = browser.new_page(viewport={"width": width, "height": height}), []
    found.on("pageerror", lambda error: errors.append(error))
    yield found
    found.close()
    assert not errors


def test_pages_fit_their_width(page):
    assert {"index.html", "gallery.html", "explorer.html", "api/layers.html"} <= {*PAGES}
    for name in PAGES:
        page.goto((SITE / name).as_uri())
        wide, seen = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= seen, f"{name} is {wide} pixels wide, of which {seen} are seen"
        broken = page.evaluate("[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)")
        assert not broken, name


def test_the_explorer_shows_what_is_chosen(page):
    page.goto((SITE / "explorer.html").as_uri())

    def shown():
        return [
            page.locator(f"#explorer-{part}").inner_html() for part in ("picture", "code", "pairs", "passes", "cost")
        ]

    seen = [shown()]
    assert "sl.Window(63) | sl.Strided(128)" in seen[0][1].replace("&amp;", "&")
    for select, value in (("far", "the first 64 keys"), ("tokens", "1024"), ("near", "the last 256 keys")):
        page.select_option(f"select[name={select}]", value)
        seen.append(shown())
    page.select_option("select[name=preset]", "bigbird")
    assert page.locator("select[name=near]").is_disabled()
    seen.append(shown())
    assert len({picture for picture, *_ in seen}) == len(seen) and 'preset("bigbird")' in seen[-1][1]
    page.select_option("select[name=block]", "64")
    again = shown()
    assert again[0] == seen[-1][0] and again[3] != seen[-1][3] and again[4] != seen[-1][4]
    page.reload()  # the address keeps the choice
    assert shown() == again


def test_a_query_that_sees_nothing(page):
    page.goto((SITE / "explorer.html").as_uri() + "#compose one&nothing near&nothing far&4096&64")
    assert page.locator("#explorer-pairs").inner_text() == "Such a query sees nothing."
    assert page.locator("#explorer-picture").inner_html() == ""


REFERENCE = [name for name in PAGES if name.startswith("api/")]
PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2013", "''\"\"-", "`")  # quotes and dashes of the pages


def words(text):
    return " ".join(text.translate(PLAIN).split())


def reference():
    pages = [(SITE / name).read_text(encoding="utf-8") for name in REFERENCE]
    return words(" ".join(html.unescape(re.sub("<[^>]+>", "", page)) for page in pages))


def test_signatures_have_no_addresses():
    assert "kernel_init=default_kernel_init" in reference() and "dtype=jnp.float32" in reference()
    assert not re.findall(r"<[\w. ]+(?: at 0x\w+| object|'[^']*')>| at 0x", reference())


def test_attributes_and_properties_are_whole():
    seen, attributes, properties = reference(), [], []
    for name in (name for name in dir(sl) if name[0] != "_" and not inspect.ismodule(getattr(sl, name))):
        doc = inspect.getdoc(getattr(sl, name)) or ""
        section = re.search(r"^Attributes:\n((?:  .*\n|\n)*)", doc + "\n", re.M)
        attributes += re.findall(r"^  (\w[\w, ]*): (.*)", section[1], re.M) if section else []
        if inspect.isclass(getattr(sl, name)):
            members = vars(getattr(sl, name)).items()
            properties += [
                x.__doc__ for member, x in members if isinstance(x, property) and member[0] != "_" and x.__doc__
            ]
    assert len(attributes) > 30 and len(properties) > 5
    for names, text in attributes:
        assert f"{names} - {words(text)}" in seen
    for text in properties:
        assert words(text.partition("\n\n")[0]) in seen
