"""Text from outside is shown as text, whatever it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.utils import htmlsafe_json_dumps

from esscher.report import write_report
from esscher.report.words import html_summary
from esscher.runs import load_run
from tests.report.atlas import ProbeLike, atlas_tables, rules_tables, store_run
from tests.report.browser import Page

SCRIPT = "<script>window.hacked = 1</script>"
ENDING = "</script></style></title><img src=x onerror='window.hacked = 2'><!-- {{ 7*7 }} {% raw %}"
QUOTES = "\"'`><svg onload=window.hacked=3>&amp;&lt;"
RIGHT_TO_LEFT = "\u202eevil\u202c \u2067مودل\u2069 \u200f"
SEPARATORS = "line\u2028paragraph\u2029end\x7f\x01"
LONG = "x" * 10_000
HOSTILE = [SCRIPT, ENDING, QUOTES, RIGHT_TO_LEFT, SEPARATORS, LONG]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hostile text wherever text can be: model, files, reasons, regimes, signatures, splits, rules,
    the folder's name.
    """
    tables = atlas_tables(2, 4, failed=0.3, seed=5)
    heads = tables["heads"]
    heads["reason"] = heads["reason"].where(heads["status"] == "ok", SCRIPT + ENDING)
    measured = heads["status"] == "ok"
    heads.loc[measured, "regime"] = QUOTES
    heads.loc[measured, "regime_reason"] = ENDING + RIGHT_TO_LEFT
    heads.loc[measured, "signatures"] = SCRIPT + SEPARATORS
    heads.loc[measured, "score_verdict"] = '=HYPERLINK("http://127.0.0.1/")'
    heads[SCRIPT] = 1.0
    tables["budget"]["split"] = tables["budget"]["split"] + SCRIPT
    tables |= hostile_rules()
    heads["kind"], heads["best_rule_10pct"], heads["best_kept_10pct"] = QUOTES, SCRIPT, 7.0
    spec = ProbeLike(model="".join(HOSTILE), corpus={"text": HOSTILE})
    folder = tmp_path_factory.mktemp("hostile") / "run <script>window.hacked=4<script>'\" \u202e"
    run = store_run(folder, spec, tables)
    return write_report([run, run], folder.parent / "report.html")


def hostile_rules() -> dict[str, Any]:
    """Keep rules of such names, and totals that no rule of the frontier has."""
    tables = rules_tables(2, 4)
    names = dict(zip(dict.fromkeys(tables["frontier"]["rule"]), HOSTILE, strict=False))
    for table in ("frontier", "budget"):
        tables[table] = tables[table].assign(rule=tables[table]["rule"].map(names))
    totals = tables["budget"].assign(worst_head=ENDING, where=QUOTES)
    return {
        "frontier": tables["frontier"],
        "budget": pd.concat([totals, totals.assign(rule="__proto__")]),
    }


def unharmed(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.count("img, svg[onload], iframe") == 0
    assert page.count("script") == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_hostile_text_is_text(visit: Callable[..., Page], hostile: Path, artefacts: Path) -> None:
    page = visit(hostile, "#L0H0")
    unharmed(page)
    title = page.text(".title")
    assert title.startswith(SCRIPT)
    assert "10,0" not in title[:200]
    assert "characters)" in title
    assert SCRIPT in page.text(".what")
    whole = page.evaluate(
        "[...document.querySelectorAll('footer dd')].map((node) => node.textContent).join('|')"
    )
    for text in HOSTILE:
        assert text in whole  # nothing was cut there, nothing was changed
    for place in ("#L0H1", "#L1H0", "#R2-L1H3"):
        page.evaluate(f"location.hash = '{place}'")
        page.settle()
        unharmed(page)
    page.screenshot(artefacts / "hostile_desk.png")


def test_hostile_text_fits_a_phone(
    visit: Callable[..., Page], hostile: Path, artefacts: Path
) -> None:
    page = visit(hostile, "#L0H0", width=390)
    unharmed(page)
    page.screenshot(artefacts / "hostile_phone.png")


def test_direction_stays_inside(visit: Callable[..., Page], hostile: Path) -> None:
    """Every text from outside stands in an isolating element, so that no override reaches
    past it.
    """
    page = visit(hostile, "#L0H0")
    loose = """(() => {
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
        while (walker.nextNode()) {
            const {data, parentNode} = walker.currentNode;
            const turns = /[\\u202a-\\u202e\\u2066-\\u2069\\u200f]/.test(data);
            if (turns && !parentNode.closest('script, bdi, button, option')) found.push(data);
        }
        return found.length;
    })()"""
    assert page.evaluate(loose) == 0


def test_spreadsheets_run_nothing(visit: Callable[..., Page], hostile: Path) -> None:
    page = visit(hostile)
    text = page.evaluate(
        "csvOf([{key: 'a'}], {a: ['=1+1', '@x', '-2', 'plain', -2]}, [0, 1, 2, 3, 4])"
    )
    assert text.split("\r\n") == ["a", "'=1+1", "'@x", "'-2", "plain", "-2", ""]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), st.lists(st.text() | st.none() | st.integers(-(2**53), 2**53))))
def test_json_in_a_page_comes_back_and_ends_nothing(value: object) -> None:
    text = str(htmlsafe_json_dumps(value))
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


def test_notebook_summary_is_escaped(hostile: Path) -> None:
    (run,) = (load_run(path) for path in hostile.parent.iterdir() if path.is_dir())
    text = html_summary(run)
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert run._repr_html_() == text
