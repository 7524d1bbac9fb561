"""How the site is built: `make docs`."""

import pathlib
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

project = "sparse_layers"
version = release = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
copyright = "the sparse_layers authors, Apache-2.0"

extensions = [
    "gallery",
    "pages",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "sparse_layers"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Names between single backticks are links where something has that name.
default_role = "py:obj"
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the texts say shapes and dtypes
napoleon_numpy_docstring, napoleon_use_rtype, napoleon_use_ivar = False, False, True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
# Parts of other pages.
exclude_patterns = ["_build", "generated/gallery.md", "generated/readme.md"]
