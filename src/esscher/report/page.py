"""One self-contained HTML page from stored runs. It reads tables, asks for nothing from outside and
computes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from esscher.report.charts import compression_page, icl_page, sweep, tables_page
from esscher.report.probe import atlas
from esscher.runs import Run, load_run
from esscher.runs.store import PAGE, write_durable

_SOURCES = Path(__file__).parent / "page"
_SCRIPTS = (
    "dom save pointing chart metrics map frontier endless scales head views table kept compare main"
)
# Okabe and Ito's colours, told apart by colour-blind readers too
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000"]
SCALE = "cividis"  # for whatever has an order; the same to colour-blind readers, and in grey
# places in the palette of the words a column may hold, in their order; then the last again
WORDS = (2, 0, 1, 4, 6, 3, 5)
_STOPS = 17  # colours of the scale; the page mixes between them


def content_of(run: Run) -> dict[str, Any]:
    """What the page shows of a run, by the kind of its job."""
    job = run.manifest.job
    known = {"probe": atlas, "compress": compression_page, "converge": sweep}
    return known.get(job, icl_page if job.startswith("icl") else tables_page)(run)


def render_page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several side by side."""
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    contents = [content_of(run) for run in runs]
    colors = matplotlib.colormaps[SCALE]
    scale = [[round(255 * part) for part in colors(i / (_STOPS - 1))[:3]] for i in range(_STOPS)]
    style = _source("style.css")
    script = "\n".join(_source(f"{name}.js") for name in _SCRIPTS.split())
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_source("page.html.j2")).render(
        runs=contents,
        title=" and ".join(content["title"] for content in contents[:3]),
        data={"runs": contents, "scale": scale, "palette": PALETTE, "words": WORDS},
        style=style,
        script=script,
        style_hash=_fingerprint(style),
        script_hash=_fingerprint(script),
    )


def write_report(runs: Sequence[Any], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of one or several runs (objects or folders), by default into the first run,
    and return its path.
    """
    loaded = [run if isinstance(run, Run) else load_run(run) for run in runs]
    text = render_page(loaded)
    path = loaded[0].path / PAGE if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"out: expected a file name such as report.html, got the folder {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # a reader of the old page never sees half of the new one
    write_durable(path, text.encode("utf-8", "backslashreplace"))
    return path


def _source(name: str) -> str:
    return (_SOURCES / name).read_text("utf-8")


def _fingerprint(text: str) -> str:
    """How the page's own policy names its script and style: nothing else may run in it."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
