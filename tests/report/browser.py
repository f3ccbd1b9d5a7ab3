"""A real browser for tests: Debian's Chromium, headless, used through playwright; in words that the
tests of pages share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import BrowserContext, sync_playwright
from playwright.sync_api import Page as Tab

__all__ = ["Browser", "Page", "find_chromium", "started"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
PATIENCE = 60.0  # seconds; a browser on a busy machine


def find_chromium() -> str | None:
    """The installed browser, if any; ESSCHER_CHROMIUM names another."""
    chosen = os.environ.get("ESSCHER_CHROMIUM")
    return chosen or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def started(command: str) -> Iterator[Browser]:
    """A browser with a profile of its own, ended with all its processes."""
    with sync_playwright() as playwright:
        # no sandbox: tests also run as root in containers, and open nothing but pages they made
        chromium = playwright.chromium.launch(
            executable_path=command, args=FLAGS, chromium_sandbox=False
        )
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


class Browser:
    """Opens pages. Those of one colour scheme and kind of device share a profile: a new one takes
    as long as a page.
    """

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._profiles: dict[tuple[bool, bool], BrowserContext] = {}

    def open(
        self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Page:
        """A new page at an address, loaded; everything it asks for and complains of is written down
        from the start.
        """
        page = Page(self._profile(width < 600, dark).new_page())
        page.tab.set_viewport_size({"width": width, "height": height})
        page.go(address)
        return page

    def _profile(self, phone: bool, dark: bool) -> BrowserContext:
        if (phone, dark) not in self._profiles:
            profile = self._chromium.new_context(
                is_mobile=phone, color_scheme="dark" if dark else "light"
            )
            profile.set_default_timeout(1000 * PATIENCE)
            self._profiles[phone, dark] = profile
        return self._profiles[phone, dark]


class Page:
    """One page: what it said, what it asked for, and hands to use it."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.complaints: list[str] = []
        self.requests: list[str] = []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on(
            "console",
            lambda message: self.complaints.append(f"console.{message.type}: {message.text}"),
        )
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))

    def go(self, address: str) -> None:
        self.tab.goto(address)
        self.settle()

    def evaluate(self, expression: str) -> Any:
        return self.tab.evaluate(expression)

    def settle(self) -> None:
        """Two frames: what a change sets off has been drawn. A page behind another draws none, so
        at most a moment.
        """
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => done(true)))"
        self.evaluate(f"new Promise((done) => {{ {frames}; setTimeout(() => done(false), 500); }})")

    def wait(self, expression: str, seconds: float = PATIENCE) -> None:
        """Asked again and again: playwright's own way is an eval in the page, which the page's
        policy refuses.
        """
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never became true: {expression}"
            self.tab.wait_for_timeout(50)

    def click(self, selector: str) -> None:
        self.tab.locator(selector).first.click()
        self.settle()

    def hover(self, selector: str) -> None:
        self.tab.locator(selector).first.hover()
        self.settle()

    def press(self, key: str) -> None:
        self.tab.keyboard.press(key)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        self.tab.locator(selector).first.fill(text)
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a menu."""
        self.tab.locator(selector).first.select_option(value)
        self.settle()

    def text(self, selector: str) -> str:
        return self.tab.locator(selector).first.inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_text_contents()

    def count(self, selector: str) -> int:
        return self.tab.locator(selector).count()

    def download(self, selector: str, folder: Path) -> Path:
        """Click on what gives a file, and the file under the name that the page suggests."""
        with self.tab.expect_download() as begun:
            self.click(selector)
        path = folder / begun.value.suggested_filename
        begun.value.save_as(path)
        return path

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """The page as an image: all of it, or what the window shows."""
        self.tab.screenshot(path=path, full_page=whole)
        return path

    def printed(self, path: Path) -> Path:
        """The page as it prints."""
        self.tab.pdf(path=path)
        return path

    def close(self) -> None:
        self.tab.close()
