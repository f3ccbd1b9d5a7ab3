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

from esscher.report.probe import atlas
from esscher.report.style import PALETTE, SCALE, WORDS
from esscher.runs import Run, load_run
from esscher.runs.store import PAGE, write_durable

_SOURCES = Path(__file__).parent / "page"
_SCRIPTS = (
    "dom save pointing chart metrics map frontier dispersion endless looks scales head views table"
    " kept compare main"
)
_STOPS = 17  # colours of the scale; the page mixes between them


def content_of(run: Run) -> dict[str, Any]:
    """What the page shows of a run, by the kind of its job."""
    job = run.manifest.job
    if job == "probe":
        return atlas(run)
    if job == "compress":
        from esscher.report.compress import compression_page

        return compression_page(run)
    if job.startswith("icl"):
        from esscher.report.icl import icl_page

        return icl_page(run)
    from esscher.report.charts import sweep, tables_page

    return sweep(run) if job == "converge" else tables_page(run)


def render_page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several side by side."""
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    return render_content([content_of(run) for run in runs])


def render_content(contents: Sequence[dict[str, Any]]) -> str:
    """The page of contents that are described already."""
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
    if not loaded:
        raise ValueError("runs: expected at least one run, got none")
    path = loaded[0].path / PAGE if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"out: expected a file name such as report.html, got the folder {path}")
    text = render_page(loaded)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a reader of the old page never sees half of the new one
    write_durable(path, text.encode("utf-8", "backslashreplace"))
    return path


def _source(name: str) -> str:
    return (_SOURCES / name).read_text("utf-8")


def _fingerprint(text: str) -> str:
    """How the page's own policy names its script and style: nothing else may run in it."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
