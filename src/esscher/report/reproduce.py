"""The page of verdicts: what was claimed, what was found, and a picture of the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esscher.report.page import render_content
from esscher.report.words import numbers, shortened
from esscher.runs.store import PAGE, write_durable

COLUMNS = {
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
NUMBERS = ("value", "low", "high", "seconds")


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
        {"key": key, "label": label, "help": help, "kind": "float" if key in NUMBERS else "word"}
        for key, (label, help) in COLUMNS.items()
    ]
    rows = {key: [claim[key] for claim in claims] for key in COLUMNS}
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
