"""Sphinx: Markdown pages, formulas as MathML (no script, no network), one bibliography, and the
reference made from docstrings.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
import what_holds

_METADATA = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))[
    "project"
]

project = "esscher"
author = "The esscher authors"
copyright = author
version = release = _METADATA["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.bibtex"]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"

html_theme = "furo"
html_title = f"esscher {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["style.css"]


def _as_written(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings hold formulas in plain text (|c|^2, f_1): show them as they stand, not read as
    markup.
    """
    text = list(lines)
    while text and not text[-1].strip():
        text.pop()
    if text:
        lines[:] = ["::", "", *(f"   {line}" for line in text), ""]


def _make_pages(app: Any) -> None:
    """Pages that are made from data, beside the written ones; git does not keep them."""
    what_holds.write_page(Path(app.srcdir) / "made")


def _inline_formula(translator: Any, node: Any) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _formula(translator: Any, node: Any) -> None:
    converted = convert(node.astext(), display="block")
    translator.body.append(f'<div class="formula">{converted}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_formula, None))
    app.connect("builder-inited", _make_pages)
    app.connect("autodoc-process-docstring", _as_written)
