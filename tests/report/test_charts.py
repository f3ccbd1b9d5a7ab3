"""Charts of a page in use: saved as files, looked at more closely, and read by mouse, finger and
keys.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from esscher.report import write_report
from esscher.runs import Run
from tests.report.atlas import ProbeLike, atlas_tables, store_run
from tests.report.browser import Page
from tests.report.test_hostile import HOSTILE

Visit = Callable[..., Page]
SVG = "{http://www.w3.org/2000/svg}"
ERROR = "#head figure[data-title='Error against the limit']"


def saved(page: Page, figure: str, kind: str, folder: Path) -> Path:
    return page.download(f"{figure} .tools .{kind}", folder)


def words_of(file: Path) -> str:
    return " ".join("".join(node.itertext()) for node in ElementTree.parse(file).iter(f"{SVG}text"))


def test_every_figure_has_a_way_to_a_file(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page, "#L3H5")
    assert (
        page.count("figure")
        == page.count("figure .tools .svg")
        == page.count("figure .tools .png")
        >= 7
    )
    assert page.evaluate(
        "[...document.querySelectorAll('.plot > svg, .map')].every((picture) =>"
        " picture.closest('figure'))"
    )


def test_a_chart_as_svg(visit: Visit, atlas_page: Path, tmp_path: Path) -> None:
    """A file of its own: named by run, head and title, no style sheet, its title and legend in it,
    hidden curves left out.
    """
    page = visit(atlas_page, "#L3H5", dark=True)
    page.click(f"{ERROR} .legend button:last-child")
    file = saved(page, ERROR, "svg", tmp_path)
    assert file.name == "esscher-six-by-twelve-L3H5-Error_against_the_limit.svg"
    text = file.read_text("utf-8")
    assert "var(" not in text
    assert "class=" not in text
    assert 'fill="rgb(255, 255, 255)"' in text  # on white, though the page is dark
    assert 'stroke="rgb(0, 114, 178)"' in text
    words = words_of(file)
    for part in (
        "Error against the limit",
        "rms error",
        "tokens n",
        "exact, keys drawn with replacement",
        "10 % of the limit",
    ):
        assert part in words
    assert "delta method" not in words
    assert "delta method" in page.text(f"{ERROR} .legend")
    assert page.evaluate("document.documentElement.dataset.theme === undefined")
    opened = visit(file)  # the browser reads what it wrote
    assert opened.count("path") >= 7


def test_a_chart_as_png(visit: Visit, atlas_page: Path, tmp_path: Path, artefacts: Path) -> None:
    page = visit(atlas_page, "#L3H5")
    file = saved(page, ERROR, "png", artefacts)
    assert file.name == "esscher-six-by-twelve-L3H5-Error_against_the_limit.png"
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    picture = ElementTree.parse(saved(page, ERROR, "svg", tmp_path)).getroot()
    assert (width, height) == (3 * int(picture.attrib["width"]), 3 * int(picture.attrib["height"]))
    drawn = f"""new Promise((done) => {{
        const image = new Image(), canvas = document.createElement('canvas');
        image.onload = () => {{
            [canvas.width, canvas.height] = [{width}, {height}];
            const context = canvas.getContext('2d');
            context.drawImage(image, 0, 0);
            const seen = context.getImageData(0, 0, {width}, {height}).data;
            let blue = 0;
            for (let i = 0; i < seen.length; i += 4)
                blue += seen[i] < 10 && Math.abs(seen[i + 1] - 114) < 10 && seen[i + 2] > 160;
            done(blue);
        }};
        image.src = 'data:image/png;base64,{base64.b64encode(data).decode()}';
    }})"""
    assert page.evaluate(drawn) > 1000  # pixels of the exact curve


def test_a_map_as_svg(visit: Visit, atlas_page: Path, tmp_path: Path) -> None:
    page = visit(atlas_page)
    page.choose("#map select", "regime")
    file = saved(page, "#map figure", "svg", tmp_path)
    assert file.name == "esscher-six-by-twelve-map-regime.svg"
    words = words_of(file)
    assert "click a cell" not in words
    assert all(word in words for word in ("layers down", "L5", "11", "diffuse", "selective"))
    assert len(list(ElementTree.parse(file).iter(f"{SVG}rect"))) > 72


def test_hostile_words_make_a_sound_file(visit: Visit, tmp_path: Path) -> None:
    tables = atlas_tables(1, 2)
    tables["heads"]["regime"] = [
        "".join(HOSTILE[:5]),
        "\ud800\x00\x08".encode("utf-8", "replace").decode() + "\x01]]>",
    ]
    page = visit(
        write_report([store_run(tmp_path / "run", ProbeLike(), tables)], tmp_path / "page.html")
    )
    page.choose("#map select", "regime")
    words = words_of(saved(page, "#map figure", "svg", tmp_path))
    assert "<script>" in words
    assert "onerror" in words
    assert saved(page, "#map figure", "png", tmp_path).stat().st_size > 1000


def ticks(page: Page) -> list[str]:
    """What the chart of the error shows, by the texts along its axes and in it."""
    return page.texts(f"{ERROR} .plot text")


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Between two places, in shares of the plot."""
    page.tab.locator(f"{ERROR} .plot").scroll_into_view_if_needed()
    box = page.tab.locator(f"{ERROR} .plot svg").bounding_box()
    assert box is not None
    places = [
        (box["x"] + share[0] * box["width"], box["y"] + share[1] * box["height"])
        for share in (start, end)
    ]
    page.tab.mouse.move(*places[0])
    page.tab.mouse.down()
    page.tab.mouse.move(*places[1], steps=4)
    page.tab.mouse.up()
    page.settle()


def test_dragging_zooms_and_a_double_click_shows_all(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page, "#L3H5")
    before = ticks(page)
    drag(page, (0.3, 0.5), (0.6, 0.502))  # along the first axis alone
    assert ticks(page) != before
    upright = (
        "[...document.querySelectorAll(\"#head figure .plot text[text-anchor='end']\")].map((node)"
        " => node.textContent)"
    )
    kept = page.evaluate(upright)
    drag(page, (0.3, 0.3), (0.7, 0.6))
    assert page.evaluate(upright) != kept
    page.tab.locator(f"{ERROR} .plot").dblclick(position={"x": 200, "y": 100})
    page.settle()
    assert ticks(page) == before
    drag(page, (0.3, 0.5), (0.302, 0.502))  # a click
    assert ticks(page) == before


def test_zoom_stays_when_a_curve_is_hidden_or_the_window_changes(
    visit: Visit, atlas_page: Path
) -> None:
    page = visit(atlas_page, "#L3H5")
    drag(page, (0.3, 0.3), (0.6, 0.7))
    labels = ticks(page)
    page.click(f"{ERROR} .legend button")
    assert ticks(page) == labels
    page.tab.set_viewport_size({"width": 1200, "height": 900})
    page.wait(
        f"document.querySelector('{ERROR.replace(chr(39), chr(34))} .plot"
        " svg').getAttribute('width') < 700"
    )
    page.click(f"{ERROR} .tools button:nth-child(3)")
    assert ticks(page) != labels


def test_keys_zoom_move_and_read(visit: Visit, atlas_page: Path) -> None:
    """All of it without a mouse, while the page's own arrow keys are left alone."""
    page = visit(atlas_page, "#L3H5")
    before = ticks(page)
    page.tab.locator(f"{ERROR} .plot").focus()
    page.press("+")
    closer = ticks(page)
    assert closer != before
    page.press("Shift+ArrowRight")
    assert ticks(page) != closer
    page.press("0")
    assert ticks(page) == before
    page.press("-")
    assert ticks(page) == before  # never further away than all
    page.press("ArrowRight")
    assert "exact, keys drawn with replacement" in page.text(f"{ERROR} .tip")
    first = page.text(f"{ERROR} .tip")
    page.press("ArrowRight")
    assert page.text(f"{ERROR} .tip") != first
    page.press("ArrowDown")
    assert "exact, keys drawn with replacement" not in page.text(f"{ERROR} .tip")
    assert page.evaluate("location.hash") == "#L3H5"
    page.press("Escape")  # of the chart
    assert page.evaluate("location.hash") == "#L3H5"
    page.press("Escape")  # of the head
    assert page.evaluate("location.hash") == "#map"


def test_buttons_zoom_on_a_phone(visit: Visit, atlas_page: Path) -> None:
    page = visit(atlas_page, "#L3H5", width=390)
    before = ticks(page)
    page.click(f"{ERROR} .tools button:nth-child(1)")
    assert ticks(page) != before
    page.click(f"{ERROR} .tools button:nth-child(2)")
    assert ticks(page) == before


EVERY = """(() => {
    const silent = [];
    for (const figure of document.querySelectorAll('#content figure.chart')) {
        const plot = figure.querySelector('.plot'), picture = plot.querySelector('svg');
        if (!picture) continue;
        const box = picture.getBoundingClientRect(), frame = picture.querySelector('clipPath rect');
        const [left, top, wide, high] = ['x', 'y', 'width', 'height'].map((name) => Number(frame.getAttribute(name)));
        const told = (x, y) => {
            plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + x, clientY: box.top + y}));
            return !figure.querySelector('.tip').hidden && /\\d/.test(figure.querySelector('.tip').textContent);
        };
        const ask = (x, y) => {
            if (x < left || x > left + wide || y < top || y > top + high) return;
            if (!told(x, y)) silent.push([figure.dataset.title, x, y]);
        };
        for (const path of picture.querySelectorAll('.series.line path')) {
            const long = path.getTotalLength();
            for (let share = 0; long && share <= 1; share += 0.1) {
                const {x, y} = path.getPointAtLength(share * long);
                ask(x, y);
            }
        }
        for (const dot of picture.querySelectorAll('.series.points circle')) {
            ask(...['cx', 'cy'].map((name) => Number(dot.getAttribute(name))));
        }
    }
    return silent;
})()"""  # noqa: E501


def test_every_curve_and_point_tells_its_values(visit: Visit, atlas_page: Path) -> None:
    """Anywhere along it, between two points too: lines of theory have but two."""
    page = visit(atlas_page, "#L0H2")
    assert page.evaluate(EVERY) == []
    slope = "#head figure[data-title='Local exponent']"
    middle = f"""(() => {{
        const path = [...document.querySelectorAll("{slope} .series.line path")].pop();
        const {{ x, y }} = path.getPointAtLength(path.getTotalLength() / 2);
        return {{ x, y }};
    }})()"""
    page.tab.locator(f"{slope} .plot").hover(position=page.evaluate(middle))
    page.settle()
    assert re.search(r"tokens n: [\d,.×⁰-⁹]+", page.text(f"{slope} .tip"))


@pytest.fixture(scope="module")
def endless_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Heads with intervals for an endless text at two n, upon the exact curve."""
    tables = atlas_tables(1, 2)
    heads = tables["heads"]
    for n in (64, 1024):
        relative = heads["relative_at_n"] * (n / heads["n_keys"]) ** -heads["beta_fit"]
        heads[f"relative_{n}"] = relative
        heads[f"relative_{n}_low"], heads[f"relative_{n}_high"] = 0.9 * relative, relative / 0.9
    rows = [
        {
            "layer": 0,
            "head": head,
            "number": "beta_fit",
            "value": 0.5,
            "half": 0.4,
            "quarter": 0.3,
            "eighth": 0.2,
        }
        | {"estimate": 0.777, "low": 0.3, "high": float("nan"), "status": status}
        for head, status in ((0, "not converged"), (1, "beyond the text"))
    ]
    return store_run(
        tmp_path_factory.mktemp("endless") / "run", ProbeLike(), {**tables, "endless": rows}
    )


def test_intervals_for_an_endless_text_tell_their_ends(visit: Visit, endless_run: Run) -> None:
    """The points lie upon the exact curve: both are told."""
    page = visit(write_report([endless_run]), "#L0H0")
    page.tab.locator(f"{ERROR} .series.points circle").last.hover()
    page.settle()
    told = page.text(f"{ERROR} .tip")
    assert told.startswith("endless text, 90 %")
    row = endless_run.table("heads").iloc[0]
    assert f"interval {0.9 * row['relative_1024'] * row['limit_rms']:.3g} to" in told
    assert "exact, keys drawn with replacement" in told


def test_no_estimate_is_shown_where_there_is_a_bound_at_best(
    visit: Visit, endless_run: Run
) -> None:
    """By the place of the status among the words of its column, not by the word."""
    page = visit(write_report([endless_run]), "#L0H0")
    assert "0.777" in page.text("#head .endless")
    page.press("ArrowRight")
    assert "0.777" not in page.text("#head .endless")
    assert "beyond the text" in page.text("#head .endless")
