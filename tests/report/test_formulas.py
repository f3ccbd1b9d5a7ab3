"""Formulas of the documentation in a browser without network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.report.browser import Browser

pytest.importorskip("latex2mathml")
DOCS = Path(__file__).parents[2] / "docs"


def test_a_formula_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """With the settings of the documentation: no TeX is left, a fraction is taller than a line, its
    numerator stands above its denominator, and nothing is asked for from outside.
    """
    application = pytest.importorskip("sphinx.application")
    shutil.copy(DOCS / "references.bib", tmp_path)
    (tmp_path / "index.md").write_text(
        "# Page\n\nInline $x$ here.\n\n$$\n\\frac{1 - e^{-t}}{\\sqrt{n_{\\mathrm{eff}}}}\n$$\n"
    )
    out = tmp_path / "html"
    made = application.Sphinx(
        tmp_path, DOCS, out, tmp_path / "trees", "html", status=None, warning=None
    )
    made.build()
    page = browser.open((out / "index.html").as_uri())
    box = "document.querySelector('.formula {}').getBoundingClientRect()"
    assert page.evaluate("document.querySelectorAll('math').length") == 2
    assert "\\frac" not in page.text("article")
    line = page.evaluate("document.querySelector('p math').getBoundingClientRect().height")
    assert page.evaluate(f"{box.format('mfrac')}.height") > 1.5 * line > 0
    upper, lower = (
        page.evaluate(f"{box.format(f'mfrac > :nth-child({place})')}.top") for place in (1, 2)
    )
    assert upper < lower
    assert [request for request in page.requests if request.startswith("http")] == []
    page.close()
