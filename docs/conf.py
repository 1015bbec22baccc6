"""How Sphinx builds the site, `make docs`: from the Markdown files and notebooks of the repository, where they lie."""

import gc
import re
from typing import Any

from lab import __version__

gc.disable()  # else a third of the time of the build is spent looking for garbage, of which there is little

project = "The attention lab"
release = __version__
copyright = "its contributors, Apache-2.0"
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**",
    "notebooks/*",
    "results/**.md",
]
exclude_patterns = [".*", "docs/_build", "corpus", "lab", "studies", "tests"]  # not walked through

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are shown with the outputs that are committed; a test runs them
nb_ipywidgets_js = {}  # would come from a CDN

# Docstrings are Google's style with Markdown's backticks.
default_role = "code"
smartquotes = False  # curly quotes would cost an eighth of the time of the build
autodoc_default_options = {"members": True}
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False  # there are none, and looking for them takes time
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as a list
python_maximum_signature_line_length = 88

suppress_warnings = ["ref.python"]  # words such as num_pages name several attributes; none is linked then

html_theme = "furo"
html_title = project
html_extra_path = ["site_root"]
html_static_path = ["site_style"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def keep_names_together(app: Any, kind: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Join the names of a field ":ivar a, b:" by a space of no width: Sphinx takes the first of two words for a type."""
    lines[:] = [
        re.sub(r"^:(ivar|param) [^:]+:", lambda field: field[0].replace(", ", ",\u200b"), line) for line in lines
    ]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_names_together, priority=900)  # after napoleon
