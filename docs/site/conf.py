"""The documents as a site: `make docs`. The tree of the site is that of the repository, so links
between documents are the same in both. What is not a document, and is linked, gets a page too
(files.py). docs/index.md has the table of contents."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from pmstore._base.version import VERSION  # noqa: E402

project = "pmstore"
author = copyright = "The pmstore authors"
version = release = VERSION

extensions = [
    "files",
    "plots",
    "stale",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/*.md", "crashtests/*.md", "README.md", "CHANGELOG.md"]
exclude_patterns = ["docs/site"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # named as the forges name them
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "literal"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

templates_path = ["templates"]
html_theme = "furo"
html_title = "pmstore"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "scorer.js")
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "monokai"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True


def setup(app: Sphinx) -> None:
    app.connect("build-finished", _write_index)


def _write_index(app: Sphinx, error: Exception | None) -> None:
    """The site is entered at its top; its first page lies where its links are right."""
    if error is None:
        target = f"{root_doc}.html"
        (Path(app.outdir) / "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>pmstore</title>'
            f'<meta http-equiv="refresh" content="0; url={target}">'
            f'<a href="{target}">pmstore</a>\n'
        )
