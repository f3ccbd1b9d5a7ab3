"""A real browser for tests: headless Chromium driven through its debugging pipe, with nothing but the standard library.

Clicks, keys, downloads, console messages and requests are the browser's own. Messages of the DevTools protocol are JSON
texts that end in a zero byte, on file descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Page", "find_chromium", "started"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# no sandbox: tests also run as root in containers, and open nothing but pages they made
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# sh cannot name descriptors above 9, so the pipes are put in their places by Python, which then becomes the browser
ON_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0  # seconds; a browser on a busy machine
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}


def find_chromium() -> str | None:
    """The installed browser, if any; ESSCHER_CHROMIUM names another."""
    chosen = os.environ.get("ESSCHER_CHROMIUM")
    return chosen or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def started(command: str) -> Iterator[Browser]:
    """A browser with a profile of its own, ended with all its processes."""
    with tempfile.TemporaryDirectory(prefix="esscher-browser-", ignore_cleanup_errors=True) as profile:
        to_browser, writing = os.pipe()
        reading, from_browser = os.pipe()
        ends = [str(to_browser), str(from_browser)]
        arguments = [sys.executable, "-c", ON_3_AND_4, *ends, command, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            arguments,
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        browser = Browser(reading, writing)
        try:
            browser.ask("Browser.getVersion")
            yield browser
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                browser.ask("Browser.close")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(reading)
            os.close(writing)


class Browser:
    """Questions and answers over the pipe; what the browser tells unasked goes to the page it concerns."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._number = 0
        self._pages: dict[str, Page] = {}
        self.downloads: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._send(json.dumps(message).encode() + b"\0")
        number = self._number
        while True:
            answer = self._read(PATIENCE)
            if answer is None:
                raise RuntimeError(f"the browser did not answer {method} within {PATIENCE:g} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._writing, data) :]

    def listen(self, seconds: float) -> None:
        """Take in what the browser tells, for so long at most, until it is silent."""
        while self._read(seconds) is not None:
            seconds = 0.0

    def _read(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._reading, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._hear(message)
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        page = self._pages.get(message.get("sessionId", ""))
        if message["method"].startswith("Browser.download"):
            self.downloads.append(message)
        elif page is not None:
            page.hear(message["method"], message["params"])

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new page at an address, loaded; everything it asks for and complains of is written down from the start."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        self._pages[session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.ask("Emulation.setEmulatedMedia", features=scheme)
        page.go(address)
        return page

    def save_downloads(self, folder: Path) -> None:
        self.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)


class Page:
    """One page: what it said, what it asked for, and hands to use it."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def hear(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{told['type']}: {[item.get('value') for item in told['args']]}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"{told['entry']['level']}: {told['entry']['text']}")
        elif method == "Page.loadEventFired":
            self._loaded = True

    def go(self, address: str) -> None:
        self._loaded = False
        self.ask("Page.navigate", url=address)
        end = time.monotonic() + PATIENCE
        while not self._loaded and time.monotonic() < end:
            self._browser.listen(0.2)
        assert self._loaded, f"{address} did not load"
        self.settle()

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def settle(self) -> None:
        """Two frames: what a change sets off has been drawn. A page behind another draws none, so at most a moment."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => done(true)))"
        self.evaluate(f"new Promise((done) => {{ {frames}; setTimeout(() => done(false), 500); }})")

    def wait(self, expression: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never became true: {expression}"
            self._browser.listen(0.05)

    def click(self, selector: str) -> None:
        """The left mouse button in the middle of the first element that fits, which is brought into view."""
        x, y = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def hover(self, selector: str) -> tuple[float, float]:
        """The mouse over the middle of the first element that fits."""
        script = f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            if (!node) return null;
            node.scrollIntoView({{block: "center", inline: "center"}});
            const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        place = self.evaluate(script)
        assert place is not None, f"nothing fits {selector}"
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        self.settle()
        return place[0], place[1]

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])
        self.settle()

    def type(self, selector: str, text: str) -> None:
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.ask("Input.insertText", text=text)
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a menu, as its own list would."""
        self.evaluate(
            f"""(() => {{ const menu = document.querySelector({json.dumps(selector)}); menu.value = {json.dumps(value)};
            menu.dispatchEvent(new Event("change", {{bubbles: true}})); }})()"""
        )
        self.settle()

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        return list(self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)"))

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """The page as an image: all of it, or what the window shows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def printed(self, path: Path) -> Path:
        """The page as it prints."""
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"]))
        return path

    def downloaded(self, seconds: float = PATIENCE) -> str:
        """Wait until the browser has finished the latest download, and give the name it suggested."""
        end = time.monotonic() + seconds
        done: Callable[[], bool] = lambda: any(  # noqa: E731
            told["params"].get("state") == "completed" for told in self._browser.downloads
        )
        while not done():
            assert time.monotonic() < end, "no download"
            self._browser.listen(0.1)
        begun = [told for told in self._browser.downloads if told["method"] == "Browser.downloadWillBegin"]
        return str(begun[-1]["params"]["suggestedFilename"])

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)
