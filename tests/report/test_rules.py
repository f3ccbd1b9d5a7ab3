"""Keep rules on the page of a probe: the curves of a head, the kinds of heads, and the totals of
every rule.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from esscher.report import write_report
from esscher.report.page import content_of
from esscher.runs import Run
from tests.report.atlas import RULES, OwnContexts, rules_run, rules_tables, store_run
from tests.report.browser import Page

Visit = Callable[..., Page]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rules_run(tmp_path_factory.mktemp("rules") / "run")


@pytest.fixture(scope="module")
def rules_page(run: Run) -> Path:
    return write_report([run])


def test_content_holds_the_frontier_by_head(run: Run) -> None:
    content = content_of(run)
    assert content["rules"] == list(RULES)
    table = run.table("frontier")
    own = table[(table["layer"] == 1) & (table["head"] == 2) & (table["rule"] == "heavy")]
    part = content["frontier"][1 * 6 + 2][content["rules"].index("heavy")]
    assert part["rule"] == "heavy"
    assert part["kept"] == pytest.approx(own["kept"].tolist(), rel=1e-4)
    assert part["relative"] == pytest.approx(own["relative"].tolist(), rel=1e-4)


def test_totals_follow_the_error_and_name_their_rule(
    visit: Visit, rules_page: Path, run: Run
) -> None:
    page = visit(rules_page)
    totals = run.table("budget")
    seen = set()
    for percent in ("5", "10", "20"):
        page.click(f"#map .choice button[data-value='{percent}']")
        assert (
            page.text("#rules .totals h3") == f"Keys kept for a total error of {percent} %, by rule"
        )
        assert page.texts("#rules tbody th bdi") == list(RULES)
        (row,) = totals.query(
            f"rule == 'heavy' and split == 'best split' and epsilon == {int(percent) / 100}"
        ).to_dict("records")
        cells = page.texts("#rules tr[data-rule='heavy'] td.number")
        assert float(cells[0].removesuffix(" %")) == pytest.approx(100 * row["ratio"], rel=0.06)
        assert cells[3].startswith(f"{row['worst_head']} ")
        seen.add(tuple(cells))
    assert len(seen) == 3
    assert [text.endswith("*") for text in page.texts("#rules tbody th")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert "could" not in page.text("main")  # nothing is said of a cache without the rule


def test_the_map_of_kinds_has_words(visit: Visit, rules_page: Path, run: Run) -> None:
    page = visit(rules_page)
    heads = run.table("heads")
    assert page.texts("#rules .celltext") == list(heads["kind"])
    kind = run.columns("heads")["kind"]
    want = [
        f"{word}: {meaning}"
        for word, meaning in zip(kind.words, kind.meanings, strict=True)
        if word in set(heads["kind"])
    ]
    assert page.texts("#rules .key .swatch") == want
    fills = page.evaluate(
        "[...document.querySelectorAll('#rules .cell')].map((cell) => cell.getAttribute('fill'))"
    )
    assert len(set(fills)) == len(want)
    page.click("#rules .cell[data-head='L2H3']")
    assert page.text("#head h2") == "Layer 2, head 3"


def test_the_map_begins_with_the_keys_that_a_rule_keeps(
    visit: Visit, rules_page: Path, run: Run
) -> None:
    """In own contexts tokens drawn with replacement may be more than there are, and most where two
    keys decide.
    """
    page = visit(rules_page)
    row = run.table("heads").query("layer == 1 and head == 2").iloc[0]
    for percent in ("5", "10"):
        page.click(f"#map .choice button[data-value='{percent}']")
        page.hover("#map .cell[data-head='L1H2']")
        [told] = page.texts("#map .cell[data-head='L1H2'] title")
        name, _, number = told.rpartition(" ")
        assert name == f"L1H2: fewest keys kept for {percent} %"
        assert float(number.replace(",", "")) == pytest.approx(
            row[f"cache_kept_{percent}pct"], rel=0.05
        )
    page.click("#map .cell[data-head='L1H2']")
    assert any(
        text.startswith("For the errors allowed, fewest keys kept: ")
        for text in page.texts("#head .told p")
    )


def test_a_head_shows_its_frontier(visit: Visit, rules_page: Path, run: Run) -> None:
    page = visit(rules_page, "#L1H2")
    chart = "#head figure[data-title='Which keys: error against keys kept, by rule']"
    assert page.texts(f"{chart} .legend button") == [
        *list(RULES)[:-1],
        "neyman (floor)",
        "fewest keys for an error",
    ]
    assert page.count(f"{chart} .series.line path") == len(RULES)
    assert page.count(f"{chart} .series.line path[stroke-dasharray]") == 1  # the floor
    assert page.count(f"{chart} .series.points circle") == 3
    row = run.table("heads").query("layer == 1 and head == 2").iloc[0]
    cells = page.texts(".frontier tbody tr:nth-child(2) td")
    assert cells[0] == f"heavy {row['best_kept_10pct']:.3g}"
    assert row["kind_reason"] in page.text("#head .told")
    page.click(f"{chart} .legend button")
    assert page.count(f"{chart} .series.line path") == len(RULES) - 1


def test_errors_of_rounding_do_not_stretch_the_picture(visit: Visit, tmp_path: Path) -> None:
    tables = rules_tables(1, 2)
    exact = (tables["frontier"]["rule"] == "topk") & (tables["frontier"]["share"] > 0.05)
    tables["frontier"].loc[exact, ["rms", "relative", "q95"]] = 1e-17
    page = visit(write_report([store_run(tmp_path / "run", OwnContexts(), tables)]), "#L0H0")
    ticks = page.texts("#head .frontier .plot text")
    assert "0.01" in ticks
    assert {tick for tick in ticks if "10⁻" in tick} == {"10⁻⁴"}  # where curves leave the picture


def test_totals_of_rules_with_long_names_are_not_cut_off_beside_the_map(
    visit: Visit, tmp_path: Path
) -> None:
    tables = rules_tables(3, 9)
    for name in ("frontier", "budget"):
        tables[name]["rule"] = tables[name]["rule"].replace(
            "topk", "sinks:4+recent:16+random:reweight"
        )
    page = visit(write_report([store_run(tmp_path / "run", OwnContexts(), tables)]), width=1280)
    assert page.evaluate(
        "document.querySelector('.totals .scroll').scrollWidth <= document.querySelector('.totals"
        " .scroll').clientWidth"
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_fits_its_width(visit: Visit, rules_page: Path, artefacts: Path, width: int) -> None:
    page = visit(rules_page, "#L0H0", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(artefacts / f"rules_{width}.png")
