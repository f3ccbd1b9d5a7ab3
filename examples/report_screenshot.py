"""A picture of a report, as in the README: of a language model down to the text with the kept keys,
of others the map of heads with one of them open.

``python examples/report_screenshot.py [RUN] [FILE]`` writes the page of a run of ``esscher probe``
and takes a screenshot with Chromium (``make chromium`` installs Debian's). Without a run it first
probes the packaged model, which takes minutes. The README's is of ``esscher probe smollm2 --window
512 --max-tokens 1024 --queries 32 --kept-queries 16 --rules random --rules streamingllm --rules
snapkv --rules expected --rules topk --rules neyman``.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from esscher.report import write_report
from esscher.report.words import ranked_heads
from esscher.runs import Run, load_run, terminal

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# of the picture, which is taller where the open head ends further down
WIDTH, HEIGHT = 1280, 1540
COLOURS = 256  # of the file, half of whose bytes are then enough
MARGIN = 12  # below it
# of a window in which no page scrolls: a browser leaves blank what it has scrolled over
TALLEST = 12000
LAST = "document.querySelector('#kept') || document.querySelector('#head .headgrid')"
MEASURE = f"setTimeout(() => {{ document.title = ({LAST}).getBoundingClientRect().bottom; }}, 1000)"


def probed(folder: Path) -> Run:
    from esscher.probe.job import probe

    return probe(out=folder, progress=terminal())


def browse(address: str, *flags: str) -> str:
    """What Chromium prints, with a window as tall as any page."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(
            f"expected one of {', '.join(BROWSERS)} to be installed, found none; make chromium"
            " installs it"
        )
    with tempfile.TemporaryDirectory() as profile:
        usual = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        window = [f"--window-size={WIDTH},{TALLEST}", "--virtual-time-budget=3000"]
        done = subprocess.run(
            [browser, *usual, *window, *flags, address],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=120,
            text=True,
        )
    return done.stdout


def photograph(page: Path, head: str, path: Path) -> None:
    """The page from its top to the kept text, or to the charts of an open head; HEIGHT at least."""
    measured = page.with_name("measured.html")
    open_to_scripts = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8")
    )
    measured.write_text(f"{open_to_scripts}<script>{MEASURE}</script>", "utf-8")
    title = re.search(
        r"<title>([0-9.]+)</title>", browse(f"{measured.as_uri()}#{head}", "--dump-dom")
    )
    end = math.ceil(float(title[1])) + MARGIN if title else HEIGHT
    whole = page.with_name("whole.png")
    browse(f"{page.as_uri()}#{head}", f"--screenshot={whole}")
    picture = Image.open(whole).convert("RGB").crop((0, 0, WIDTH, max(HEIGHT, end)))
    # the way that keeps rare colours: those of lines
    picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main(run_path: str | None = None, file: str = "report.png") -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(run_path) if run_path is not None else probed(Path(folder) / "run")
        page = write_report([run], (Path(folder) / "report.html").resolve())
        row = ranked_heads(run.table("heads"), "tokens_needed_10pct").iloc[-1]
        head = "" if "tokens" in run.tables else f"L{int(row['layer'])}H{int(row['head'])}"
        photograph(page, head, Path(file))
    print(f"picture: {file}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
