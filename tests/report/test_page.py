"""The page of a probe in a real browser: opened from disk, used with mouse and keys, at both
widths.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from esscher.report import write_report
from esscher.report.words import theory_lines
from esscher.runs import Column, Run
from esscher.tails.regimes import REGIMES
from tests.report.atlas import ProbeLike, atlas_run, atlas_tables, declared, store_run
from tests.report.browser import Browser, Page

Visit = Callable[..., Page]


def test_opens_from_disk_in_silence_with_every_cell(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    assert page.requests == [atlas_page.as_uri()]
    assert page.complaints == []
    assert page.count(".map .cell") == 72
    assert page.text(".what").startswith(
        "example/six-layers on prose.txt: for an error of 10 % L4H0 needs most ("
    )
    settings = str(page.evaluate("document.querySelector('footer').textContent"))
    assert "version of torch2.13.0" in settings
    assert (
        page.evaluate(
            "document.querySelectorAll('script[src], link[href^=http], img, iframe').length"
        )
        == 0
    )


def test_complaints_and_requests_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    """The two detectors the other tests rest on: an error in the console, an exception, a
    request.
    """
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<img src='other.png'><script>console.error('no'); setTimeout(() => { throw new"
        " Error('worse'); })</script>"
    )
    page = browser.open(bad.as_uri())
    page.settle()
    assert any("console.error" in complaint for complaint in page.complaints)
    assert any("worse" in complaint for complaint in page.complaints)
    assert (tmp_path / "other.png").as_uri() in page.requests
    page.close()


def test_policy_refuses_requests_and_foreign_scripts(browser: Browser, atlas_page: Path) -> None:
    page = browser.open(atlas_page.as_uri())
    assert (
        page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
        == "refused"
    )
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent:"
        " 'window.foreign = 1'}))"
    )
    page.settle()
    assert page.evaluate("window.foreign === undefined")
    told = " ".join(page.complaints)
    # the request was refused by the page, not by the other side
    assert "default-src 'none'" in told
    assert "script-src" in told
    page.close()


def test_epsilon_changes_cells_and_words(visit: Visit, atlas_page: Path, atlas: Run) -> None:
    page = visit(atlas_page)
    heads = atlas.table("heads")
    seen = {}
    for percent in ("5", "10", "20"):
        page.click(f"#map .choice button[data-value='{percent}']")
        seen[percent] = (page.texts(".map .celltext"), page.text(".words"))
        page.hover(".cell[data-head='L0H0']")
        row = heads[(heads["layer"] == 0) & (heads["head"] == 0)].iloc[0]
        assert page.texts(".cell[data-head='L0H0'] title") == [
            f"L0H0: tokens needed for {percent} % {round(row[f'tokens_needed_{percent}pct']):,}"
        ]
        assert f"error of {percent} %" in seen[percent][1]
    for part in range(2):
        assert len({str(shown[part]) for shown in seen.values()}) == 3


def test_every_colour_can_be_chosen(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    fills = (
        "[...document.querySelectorAll('.map .cell')].map((cell) =>"
        " cell.getAttribute('fill')).join()"
    )
    keys = page.evaluate(
        "[...document.querySelectorAll('#map select option')].map((option) => option.value)"
    )
    wanted = {
        "needed",
        "beta_fit",
        "coupling",
        "horizon",
        "effective_tokens",
        "khat",
        "regime",
        "sink_mass",
    }
    assert wanted <= set(keys)
    seen = set()
    for key in keys:
        page.choose("#map select", key)
        seen.add(page.evaluate(fills))
    assert len(seen) == len(keys)
    page.choose("#map select", "regime")
    told = set(page.texts(".key .swatch"))
    assert {words.split(":")[0] for words in told} <= {*REGIMES}
    assert told <= {f"{name}: {meaning}" for name, meaning in REGIMES.items()}


def test_a_click_opens_the_head_and_its_link_opens_the_same(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    assert not page.evaluate("document.querySelector('#head').getClientRects().length")
    page.click(".cell[data-head='L3H5']")
    assert page.text("#head h2") == "Layer 3, head 5"
    assert page.evaluate("location.hash") == "#L3H5"
    titles = page.texts("#head .chart h3")
    assert titles == [
        "Error against the limit",
        "Local exponent",
        "Tail of the scores",
    ]
    linked = visit(atlas_page, "#L3H5")
    assert linked.text("#head") == page.text("#head")
    assert linked.count(".cell.open") == 1


def test_head_view_says_everything(visit: Visit, atlas_page: Path, atlas: Run) -> None:
    page = visit(atlas_page, "#L0H2")
    row = atlas.table("heads").set_index(["layer", "head"]).loc[(0, 2)]
    text = page.text("#head")
    assert row["regime_reason"] in text
    assert f"k-hat {row['khat']:.3g}" in text
    legend = " ".join(page.texts("#head .legend button"))
    for part in (
        "Monte Carlo",
        "rms (heuristic)",
        "(proved",
        "(experimental)",
        "delta method",
        "95 % of queries",
    ):
        assert part in legend
    assert all(line["label"] in legend for line in theory_lines(atlas.columns("heads")))
    assert "freezing point" in text.lower()
    assert page.count("#head .numbers tr") == len(atlas.table("heads").columns)
    # intervals
    assert page.evaluate("document.querySelector('#head .series.points line') !== null")


def test_keys_move_between_heads(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page, "#L0H0")
    for key, place in (
        ("ArrowRight", "#L0H1"),
        ("ArrowDown", "#L1H1"),
        ("ArrowLeft", "#L1H0"),
        ("ArrowUp", "#L0H0"),
        ("ArrowUp", "#L5H0"),
    ):
        page.press(key)
        assert page.evaluate("location.hash") == place
        assert page.text("#head h2") == "Layer {}, head {}".format(*place[2:].split("H"))
    page.press("Escape")
    assert page.evaluate("document.querySelector('#head').hidden")
    page.evaluate("history.back()")
    page.wait("!document.querySelector('#head').hidden")
    assert page.text("#head h2") == "Layer 5, head 0"


def test_a_link_to_no_head_opens_nothing(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page, "#L99H99")
    assert page.evaluate("document.querySelector('#head').hidden")
    visit(atlas_page, "#%E2%80%AEL3H5%3Cscript%3E")
    visit(atlas_page, "#%E0%A4%A")  # not even an address


def test_table_sorts_and_filters(visit: Visit, atlas_page: Path, atlas: Run) -> None:
    page = visit(atlas_page)
    heads = atlas.table("heads")
    first = "#table tbody tr:first-child td:first-child"
    page.click("#table th button[data-key='coupling']")
    smallest = heads.loc[heads["coupling"].idxmin()]
    assert page.text(first) == f"L{smallest['layer']}H{smallest['head']}"
    page.click("#table th button[data-key='coupling']")
    largest = heads.loc[heads["coupling"].idxmax()]
    assert page.text(first) == f"L{largest['layer']}H{largest['head']}"
    for text, count in (
        ("selective", (heads["regime"] == "selective").sum()),
        ("coupling>5", (heads["coupling"] > 5).sum()),
        ("layer=3 coupling<=2", ((heads["layer"] == 3) & (heads["coupling"] <= 2)).sum()),
        ("L2H7", 1),
        ("nothing-like-this", 0),
    ):
        page.type("#table input", text)
        page.wait(
            f"document.querySelector('#table .controls .soft').textContent.startsWith('{count} of"
            " 72')",
            10,
        )
        assert page.count("#table tbody tr") == count


def test_missing_numbers_sort_last_both_ways(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    for _ in range(2):
        page.click("#table th button[data-key='tokens_needed_5pct']")
        column = page.evaluate(
            "[...document.querySelectorAll('#table tbody tr')].map((row) =>"
            " row.children[4].textContent)"
        )
        assert column[-1] == "–"
        assert column[0] != "–"


def test_every_column_is_explained(visit: Visit, atlas_page: Path, atlas: Run) -> None:
    page = visit(atlas_page)
    count = len(atlas.table("heads").columns)
    assert page.count("#table details dt") == page.count("#table details dd") == count
    assert not any("of the stored table" in text for text in page.texts("#table details dd"))
    assert all(
        page.evaluate("[...document.querySelectorAll('#table th')].map((cell) => cell.title)")
    )


def test_csv_downloads(visit: Visit, atlas_page: Path, atlas: Run, tmp_path: Path) -> None:
    page = visit(atlas_page)
    page.click("#table th button[data-key='coupling']")
    file = page.download("#table .csv", tmp_path)
    assert file.name == "esscher-six-by-twelve-heads.csv"
    rows = list(csv.DictReader(io.StringIO(file.read_text("utf-8"))))
    heads = atlas.table("heads").sort_values("coupling")
    assert set(rows[0]) == set(heads.columns)
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == list(
        zip(heads["layer"], heads["head"], strict=True)
    )
    assert [float(row["coupling"]) for row in rows] == pytest.approx(
        heads["coupling"].tolist(), rel=1e-4
    )
    assert [row["regime_reason"] for row in rows] == heads["regime_reason"].tolist()


def test_scatter_names_heads_and_has_theory(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    assert page.count("#scatter .series.points circle") == 72
    legend = " ".join(page.texts("#scatter .legend button"))
    assert all(
        part in legend
        for part in ("measured", "(heuristic)", "(experimental)", "(proved if Gaussian)")
    )
    before = page.evaluate("document.querySelector('#scatter svg').innerHTML")
    page.click("#scatter .choice button[data-value='coupling']")
    assert page.evaluate("document.querySelector('#scatter svg').innerHTML") != before
    page.hover("#scatter circle.link")
    assert page.text("#scatter .tip").startswith("L")
    page.click("#scatter circle.link")
    assert page.evaluate("location.hash").startswith("#L")
    assert page.text("#head h2").startswith("Layer")


@pytest.mark.parametrize(
    ("layers", "heads", "width"), [(6, 12, 390), (48, 12, 360), (34, 32, 390), (40, 16, 1280)]
)
def test_maps_are_whole_at_any_width(
    visit: Visit, tmp_path: Path, layers: int, heads: int, width: int
) -> None:
    """No cell is cut off, every layer has its name, and names do not lie upon each other."""
    page = visit(write_report([atlas_run(tmp_path / "run", layers, heads)]), width=width)
    page.wait("document.querySelector('.map').getBoundingClientRect().right <= innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    rights = page.evaluate(
        "[...document.querySelectorAll('.map .cell')].map((cell) =>"
        " cell.getBoundingClientRect().right)"
    )
    box = page.evaluate("document.querySelector('#map .scroll').getBoundingClientRect().right")
    assert max(rights) <= box + 1
    names = page.evaluate(
        "[...document.querySelectorAll(\".map text[text-anchor='end']\")].map((name) =>"
        " name.textContent)"
    )
    assert names == [f"L{layer}" for layer in range(layers)]
    boxes = page.evaluate("""[...document.querySelectorAll(".map text[y='14']:not([hidden])")]
        .map((name) => name.getBoundingClientRect()).map(({left, right}) => [left, right])""")
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(boxes))
    shown = page.evaluate(
        "getComputedStyle(document.querySelector('.map .celltext') || document.body).display"
    )
    texts = "[...document.querySelectorAll('.map .celltext')].map((text) => text.getBBox().width)"
    size = page.evaluate("document.querySelector('.map .cell').getBBox().width")
    assert (
        shown == "none" or heads == 32 or sorted(page.evaluate(texts))[layers * heads // 2] <= size
    )


def test_long_cells_are_two_lines_until_a_click(visit: Visit, tmp_path: Path) -> None:
    tables = atlas_tables(2, 2)
    tables["layers"] = [
        {"layer": layer, "tokens": 7, "reason": "a long reason of many words " * 12}
        for layer in (0, 1)
    ]
    page = visit(write_report([store_run(tmp_path / "run", ProbeLike(), tables)]))
    height = "document.querySelector('#layers td.long').getBoundingClientRect().height"
    low = page.evaluate(height)
    assert low < 70
    page.click("#layers td.long")
    assert page.evaluate(height) > 2 * low


@pytest.mark.parametrize("width", [360, 390])
def test_tables_of_a_head_fit_a_phone(visit: Visit, tmp_path: Path, width: int) -> None:
    """The table of an endless text too, whose statuses are words."""
    tables = atlas_tables(1, 2)
    numbers = {
        "value": 12345.0,
        "half": 11345.0,
        "quarter": 0.3,
        "eighth": 0.2,
        "estimate": 23456.0,
        "low": 10345.0,
        "high": 34567.0,
    }
    tables["endless"] = [
        {
            "layer": 0,
            "head": head,
            "number": "tokens_needed_5pct",
            "status": "beyond the text",
            **numbers,
        }
        for head in (0, 1)
    ]
    page = visit(
        write_report([store_run(tmp_path / "run", ProbeLike(), tables)]), "#L0H0", width=width
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('#head .scroll')]"
    assert (
        page.evaluate(f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth + 1).length") == 0
    )


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("desk", 1280, False), ("phone", 390, False), ("dark", 1280, True)]
)
def test_fits_its_width(
    visit: Visit, atlas_page: Path, artefacts: Path, name: str, width: int, dark: bool
) -> None:
    page = visit(atlas_page, "#L3H5", width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(artefacts / f"atlas_{name}.png")
    rights = (
        "[...document.querySelectorAll('section, .plot svg, .mapbox')].map((node) =>"
        " node.getBoundingClientRect().right)"
    )
    assert max(page.evaluate(rights)) <= width + 1
    beside = page.evaluate("document.querySelector('.words').getBoundingClientRect().left > 200")
    assert beside == (width > 860)  # two columns on a desk, one below the other on a phone


def test_light_and_dark_switch(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    page.click("#theme")
    assert page.evaluate(ground) == light


def test_prints_on_white(visit: Visit, atlas_page: Path, artefacts: Path) -> None:
    page = visit(atlas_page, "#L3H5", dark=True, width=760)
    page.tab.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= 760
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.printed(artefacts / "atlas_print.pdf").stat().st_size > 20_000


def test_layers(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    assert page.count("#layers .chart:first-of-type .series.line path") == 1
    before = page.evaluate("document.querySelector('#layers svg').innerHTML")
    page.choose("#layers select", "coupling")
    assert page.evaluate("document.querySelector('#layers .plot svg').innerHTML") != before
    assert "Whole layers: mean of the output" in page.texts("#layers h3")


def test_the_rate_of_the_paper_is_of_something_else(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page)
    assert "is for the L2 error" in page.text("#scatter .soft")


def test_a_column_from_outside_is_shown(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table, among the colours of the map, and among the meanings: by what the run says of
    it alone.
    """
    own = Column("charm", "float", "charm of a head", "What nobody measured before.", "log")
    monkeypatch.setattr(
        "tests.report.atlas.declared", lambda spec: {"heads": (*declared(spec)["heads"], own)}
    )
    tables = atlas_tables(2, 3)
    tables["heads"] = tables["heads"].assign(charm=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], plain=1.0)
    page = visit(write_report([store_run(tmp_path / "run", ProbeLike(), tables)]))
    options = page.evaluate(
        "[...document.querySelectorAll('#map select option')].map((option) => option.value)"
    )
    assert "charm" in options
    assert "plain" not in options
    page.choose("#map select", "charm")
    assert "charm of a head, log scale" in page.text(".key")
    assert own.label in page.texts("#table details dt")
    assert own.help in page.texts("#table details dd")
    assert own.label in page.text("#map select")
