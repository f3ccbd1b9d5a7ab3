"""One self-contained HTML page from stored runs. It reads tables, asks for nothing from outside and
computes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from esscher.report.probe import atlas
from esscher.report.style import PALETTE, SCALE, WORDS
from esscher.report.words import numbers, shortened
from esscher.runs import Run, load_run
from esscher.runs.store import PAGE, write_durable

_SOURCES = Path(__file__).parent / "page"
_SCRIPTS = (
    "dom save pointing chart metrics map frontier endless scales head views table kept compare main"
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


# ---- The page of verdicts: what was claimed, what was found, and a picture of the evidence.

VERDICT_COLUMNS = {
    "id": ("claim", "Which claim; esscher reproduce takes this name."),
    "source": ("source", "Paper and statement."),
    "statement": ("statement", "The claim in our words."),
    "verdict": ("verdict", "supported, refuted or undecided."),
    "effect": ("effect", "The number the verdict rests on."),
    "value": ("value", "Its size."),
    "low": ("low", "Lower end of its interval, 99.9 % unless the rule says otherwise."),
    "high": ("high", "Upper end of its interval."),
    "reason": ("why", "What was found, and what it has to be."),
    "rule": ("rule", "How it is decided."),
    "refuted_by": ("refuted by", "What would have refuted it."),
    "seen": ("seen before", "Its own measurements seen when rule or settings were fixed."),
    "seconds": ("seconds", "Time of its runs; claims may share a run."),
    "command": ("command", "What does it again."),
}
VERDICT_NUMBERS = ("value", "low", "high", "seconds")


def write_verdicts(folder: Path, content: Mapping[str, Any], out: Path | None = None) -> Path:
    """Write the page of what ``reproduce.json`` holds, and return its path: ``out``, or beside the
    file.
    """
    path = folder / PAGE if out is None else out
    claims = content["claims"]
    counts = Counter(claim["verdict"] for claim in claims)
    told = ", ".join(f"{counts[word]} {word}" for word in ("supported", "refuted", "undecided"))
    made = (
        f"{content['scale']}, seed {content['seed']}, commit {str(content.get('commit'))[:10]},"
        f" {content['written'][:10]}"
    )
    columns = [
        {
            "key": key,
            "label": label,
            "help": help,
            "kind": "float" if key in VERDICT_NUMBERS else "word",
        }
        for key, (label, help) in VERDICT_COLUMNS.items()
    ]
    rows = {key: [claim[key] for claim in claims] for key in VERDICT_COLUMNS}
    page = {
        "kind": "charts",
        "job": "reproduce",
        "name": shortened(folder.name, 120),
        "title": "What holds",
        "lines": [f"{len(claims)} claims tested: {told}.", made],
        "status": "complete",
        "warnings": [],
        "settings": [[key, str(value)] for key, value in content.items() if key != "claims"],
        "charts": [_chart(claim) for claim in claims if claim.get("picture")],
        "tables": [{"name": "verdicts", "columns": columns, "rows": rows, "count": len(claims)}],
    }
    write_durable(path, render_content([page]).encode("utf-8", "backslashreplace"))
    return path


def _chart(claim: Mapping[str, Any]) -> dict[str, Any]:
    picture = claim["picture"]
    series = []
    for i, own in enumerate(picture["series"]):
        known = [key for key in ("x", "y", "low", "high") if own[key] is not None]
        entry = {"label": own["label"], "color": i % 8}
        entry |= {key: numbers(own[key]) for key in known}
        series.append(entry if own["line"] else {**entry, "mode": "points"})
    return {
        "title": f"{claim['id']}: {claim['verdict']}",
        "note": shortened(f"{claim['statement']} Found: {claim['reason']}", 600),
        "x": {"label": picture["x"], "log": "x" in picture["log"]},
        "y": {"label": picture["y"], "log": "y" in picture["log"]},
        "series": series,
    }
