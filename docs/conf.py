"""How the site is built: `make docs`."""

import os
import pathlib
import sys

import sparse_layers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

project = "sparse_layers"
version = release = sparse_layers.__version__
copyright = "the sparse_layers authors, Apache-2.0"

extensions = [
    "explorer",
    "gallery",
    "pages",
    "reference",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "sparse_layers"
html_show_sphinx = False
# What is written at the beginning of a build has a place before that.
html_static_path = ["_static", "generated/explorer"]
(HERE / "generated" / "explorer").mkdir(parents=True, exist_ok=True)
html_css_files = ["site.css"]
# Names between single backticks are links where something has that name.
default_role = "py:obj"
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the texts say shapes and dtypes
napoleon_numpy_docstring, napoleon_use_rtype = False, False
# Otherwise only one of the names before a colon is shown, and the rest as its type.
napoleon_custom_sections = [("Attributes", "params_style")]
# Notebooks run in each build, and one that fails ends it.
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "force", True, 300
nb_merge_streams = True
# They run as on a new account: no settings of the user's, and a home that cannot be written to is no hindrance.
(HERE / "_build" / "jupyter").mkdir(parents=True, exist_ok=True)
for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
    os.environ[name] = str(HERE / "_build" / "jupyter" / name)
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
# Parts of other pages.
exclude_patterns = ["_build", "generated/gallery.md", "generated/readme.md"]
