"""A picture of a report, as in the README: the map of a model's heads with one of them open.

``python examples/report_screenshot.py [RUN] [FILE]`` writes the page of a run of ``esscher probe`` and photographs it with
Chromium (``make chromium`` installs Debian's). Without a run, the packaged model is probed first, which takes minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from esscher.report import write_report
from esscher.report.words import head_name, ranked_heads
from esscher.runs import Run, load_run, terminal

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1280, 1540)


def probed(folder: Path) -> Run:
    from esscher.models.probe.api import probe

    return probe(out=folder, progress=terminal())


def photograph(address: str, path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"expected one of {', '.join(BROWSERS)} to be installed, found none; make chromium installs it")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        picture = [f"--screenshot={path.resolve()}", "--window-size={},{}".format(*SIZE), "--virtual-time-budget=3000"]
        subprocess.run([browser, *flags, *picture, address], check=True, stderr=subprocess.DEVNULL, timeout=120)


def main(run_path: str | None = None, file: str = "report.png") -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(run_path) if run_path is not None else probed(Path(folder) / "run")
        page = write_report([run], Path(folder) / "report.html")
        head = head_name(ranked_heads(run.table("heads"), "tokens_needed_10pct").iloc[-1])
        photograph(f"{page.resolve().as_uri()}#{head}", Path(file))
    print(f"picture: {file}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
