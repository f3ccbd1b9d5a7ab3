"""Runs, pages and a browser for the tests of reports; what they look like is kept in
artefacts/report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esscher.report import write_report
from esscher.runs import Run
from tests.report.atlas import atlas_run
from tests.report.browser import Browser, Page, find_chromium, started

ARTEFACTS = Path(__file__).parents[2] / "artefacts" / "report"
MISSING = (
    "no Chromium found: make chromium installs Debian's, which needs apt-get, root or sudo, and a"
    " reachable package archive; or name a browser in ESSCHER_CHROMIUM"
)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One headless Chromium for the tests of this folder; not for longer, as its event loop is in
    the way of others.
    """
    command = find_chromium()
    if command is None:
        pytest.skip(MISSING)
    with started(command) as found:
        yield found


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a file; whatever test did so, the page must not have complained nor asked for anything
    else.
    """
    opened: list[tuple[Page, str]] = []

    def open_file(path: Path, place: str = "", **options: object) -> Page:
        address = path.resolve().as_uri()
        page = browser.open(address + place, **options)  # type: ignore[arg-type]
        opened.append((page, address))
        return page

    yield open_file
    for page, address in opened:
        page.settle()
        assert page.complaints == []
        assert [
            request
            for request in page.requests
            if request != address and not request.startswith("blob:")
        ] == []
        page.close()


@pytest.fixture(scope="session")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A made-up probe of 6 layers x 12 heads."""
    return atlas_run(tmp_path_factory.mktemp("atlas") / "six-by-twelve")


@pytest.fixture(scope="session")
def atlas_page(atlas: Run) -> Path:
    return write_report([atlas])


@pytest.fixture(scope="session")
def artefacts() -> Path:
    """Where screenshots are kept for people to look at; git leaves it out."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    return ARTEFACTS
