"""The site: `make docs`. Sources are all Markdown files of the repository that are named below, notebooks included."""

import importlib.metadata
import os
import re
from typing import Any

project = "saejax"
author = "The saejax authors"
copyright = author
release = importlib.metadata.version("saejax")

# Sphinx is started with the repository as its source folder, so that links to benchmarks/ and CHANGELOG.md hold on
# the site as they do in a checkout.
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "benchmarks/**.md",
    "saejax/lm/demo/README.md",
    "saejax/lm/recall/README.md",
]
exclude_patterns = [".*", "docs/_build", "build", "dist", "runs", "stores", "**/.*", "**/__pycache__"]
# A part of benchmarks/RESULTS.md, not a page.
exclude_patterns += ["benchmarks/bench/remarks.md"]
# The two tables that other pages link, and what programs write.
suppress_warnings = ["toc.not_included"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_excludepatterns = ["README.md", "benchmarks/*"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
source_suffix = {".md": "myst-nb"}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "saejax"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["saejax.css"]
html_show_sourcelink = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"

# Notebooks run on the CPU, and offline.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _escape, priority=900)


def _escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written for readers of code: `||x||` and `*` are mathematics there, not markup."""
    lines[:] = [re.sub(r"(?<!\\)([|])", r"\\\1", line) for line in lines]
