"""The page of a compression run: a prompt coloured by the heads that keep its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import esscher.compress.job  # noqa: F401  (its columns)
from esscher.compress.spec import CompressSpec
from esscher.probe.spec import ProbeSpec
from esscher.report import write_report
from esscher.report.charts import compression_page
from esscher.report.figures import save_figures
from esscher.runs import Run
from tests.report.atlas import rules_tables, store_run
from tests.report.browser import Page
from tests.report.test_hostile import HOSTILE, SCRIPT, unharmed

TOKENS = ["The", " end", ".", "\n", *HOSTILE]
KEEPS = (0.1, 0.5)


def tables() -> dict[str, Any]:
    """A run of one rule with hostile names and two layers of two heads each; token i is kept by i %
    3 heads of layer 0, at the larger size also by one of layer 1.
    """
    rule = f"fisher$x_1$ {SCRIPT}"
    cells = [{"rule": rule, "split": "cut", "keep": keep} for keep in KEEPS]
    kl = {"kl": 0.1, "kl_low": 0.05, "kl_high": 0.2, "kl_predicted": 0.08, "kl_cross": 0.09}
    shares = {"kept_share": 0.4, "held_share": 0.1, "low": 0.3, "high": 0.5, "texts": 2}
    return {
        "compress": [cell | {"share": cell["keep"], "texts": 2, **kl} for cell in cells],
        "check": [cell | kl | {"ratio": 1.25, "second_order": True} for cell in cells],
        "kinds": [cell | {"kind": "punctuation", **shares} for cell in cells],
        "tokens": [
            cell
            | {"draw": 0, "position": i, "token": token, "heads_all": [2, 2]}
            | {"heads": [i % 3, int(cell["keep"] == KEEPS[1])]}
            for cell in cells
            for i, token in enumerate(TOKENS)
        ],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return store_run(tmp_path_factory.mktemp("kept") / "run", CompressSpec(), tables())


def test_content(run: Run) -> None:
    page = compression_page(run)
    kept = page["kept"]
    assert kept["tokens"] == TOKENS
    assert kept["heads"] == [2, 2]
    assert [size["keep"] for size in kept["sizes"]] == [0.1, 0.5]
    assert kept["sizes"][0]["heads"][0] == [i % 3 for i in range(len(TOKENS))]
    assert kept["sizes"][0]["kept_share"] == [0.4]
    assert [table["name"] for table in page["tables"]] == ["compress", "check", "kinds"]


def test_a_run_without_the_table_has_no_such_part(tmp_path: Path) -> None:
    own = {name: rows for name, rows in tables().items() if name == "compress"}
    assert compression_page(store_run(tmp_path / "run", CompressSpec(), own))["kept"] is None


def test_the_page(run: Run, visit: Callable[..., Page], artefacts: Path) -> None:
    page = visit(write_report([run]))
    unharmed(page)
    assert page.count("#kept .kepttext bdi") == len(TOKENS)
    kl = "figure[data-title='KL against the share of the cache']"
    assert page.count(f"{kl} .series.line line.bar") == len(KEEPS)
    assert SCRIPT in page.text("#kept .kepttext")
    titles = "[...document.querySelectorAll('#kept .kepttext bdi')].map((node) => node.title)"
    assert page.evaluate(titles)[:3] == [f"kept by {n} of 4 heads" for n in (0, 1, 2)]
    page.tab.select_option("#kept select", "1")
    assert set(page.evaluate(titles)) == {"kept by 0 of 2 heads"}
    page.tab.click("#kept button[data-value='1']")
    assert set(page.evaluate(titles)) == {"kept by 1 of 2 heads"}
    assert "punctuation" in page.text("#kept table")
    page.screenshot(artefacts / "kept.png")


def test_the_page_of_a_probe(tmp_path: Path, visit: Callable[..., Page], artefacts: Path) -> None:
    """It has the text too, named by the layers that were probed, without kinds of tokens."""
    tokens = [row | {"split": "best split"} for row in tables()["tokens"]]
    own = rules_tables(2, 3) | {"tokens": [row for row in tokens if row.pop("draw") == 0]}
    run = store_run(tmp_path / "run", ProbeSpec(pool="sequence", layers=(3, 7)), own)
    page = visit(write_report([run]))
    unharmed(page)
    assert page.count("#kept .kepttext bdi") == len(TOKENS)
    assert page.texts("#kept select option") == ["all layers", "3", "7"]
    assert page.count("#kept table") == 0
    assert "table" not in page.text("#kept p")
    sections = "[...document.querySelectorAll('section[id]')].map((part) => part.id)"
    assert page.evaluate(sections)[:2] == ["map", "kept"]
    page.screenshot(artefacts / "kept_probe.png")


def test_the_picture_of_the_check(run: Run, tmp_path: Path) -> None:
    files = {file.stem: file for file in save_figures(run, ["svg"], tmp_path)}
    text = files["predicted_against_measured_loss"].read_text("utf-8")
    assert "predicted = measured" in text
    assert "$x_1$" in text
    assert "<script" not in text
    nothing = pd.DataFrame(tables()["compress"]).assign(kl=0.0)
    empty = store_run(tmp_path / "run", CompressSpec(), {"compress": nothing})
    names = [file.stem for file in save_figures(empty, ["svg"], tmp_path / "empty")]
    assert "predicted_against_measured_loss" not in names
