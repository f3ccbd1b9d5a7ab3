"""The page of verdicts: what was claimed, what was found, and a picture of the evidence for each
claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esscher.report.packing import numbers, shortened
from esscher.report.page import render_content
from esscher.runs.files import check_output
from esscher.runs.store import PAGE, write_durable

__all__ = ["verdicts_page", "write_verdicts"]

COLUMNS = {
    "id": ("claim", "Which claim; esscher reproduce takes this name."),
    "source": ("source", "Paper and statement."),
    "statement": ("statement", "In our words."),
    "verdict": (
        "verdict",
        (
            "supported, refuted or undecided; what had been seen when the rule was fixed stands"
            " beside."
        ),
    ),
    "effect": ("effect", "The number the verdict rests on."),
    "value": ("value", "Its size."),
    "low": (
        "low",
        "Lower end of the interval of the effect, 99.9 % unless the rule says otherwise.",
    ),
    "high": ("high", "Upper end of the interval of the effect."),
    "reason": ("why", "What was found, in a sentence."),
    "rule": ("rule", "How it is decided."),
    "refuted_by": ("refuted by", "What would have refuted it."),
    "seen": (
        "seen before",
        "Measurements of its own that had been looked at when rule or settings were fixed.",
    ),
    "seconds": (
        "seconds",
        "Time of its runs on the machine that did them; claims may share a run.",
    ),
    "command": ("command", "What does it again."),
}
NUMBERS = ("value", "low", "high", "seconds")


def write_verdicts(folder: Path, content: Mapping[str, Any], out: Path | None = None) -> Path:
    """Write the page of what ``reproduce.json`` holds, beside it unless told."""
    path = folder / PAGE if out is None else out
    check_output(path)
    write_durable(
        path,
        render_content([verdicts_page(content, folder.name)]).encode("utf-8", "backslashreplace"),
    )
    return path


def verdicts_page(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Charts of the evidence, then the table of verdicts."""
    claims = content["claims"]
    counts = {
        word: sum(claim["verdict"] == word for claim in claims)
        for word in ("supported", "refuted", "undecided")
    }
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    made = (
        f"{content['scale']}, seed {content['seed']}, commit {str(content.get('commit'))[:10]},"
        f" {content['written'][:10]}"
    )
    columns = [
        {"key": key, "label": label, "help": help, "kind": "float" if key in NUMBERS else "word"}
        for key, (label, help) in COLUMNS.items()
    ]
    rows: dict[str, list[Any]] = {
        key: [claim[key] if claim[key] is not None else "" for claim in claims] for key in COLUMNS
    }
    rows |= {key: [claim[key] for claim in claims] for key in NUMBERS}
    settings = [[key, str(value)] for key, value in content.items() if key != "claims"]
    return {
        "kind": "charts",
        "job": "reproduce",
        "name": shortened(name, 120),
        "title": "What holds",
        "lines": [f"{len(claims)} claims tested: {told}.", made],
        "status": "complete",
        "warnings": [],
        "settings": settings,
        "charts": [_chart(claim) for claim in claims if claim.get("picture")],
        "tables": [{"name": "verdicts", "columns": columns, "rows": rows, "count": len(claims)}],
    }


def _chart(claim: Mapping[str, Any]) -> dict[str, Any]:
    picture = claim["picture"]
    series = []
    for i, own in enumerate(picture["series"]):
        entry = {"label": own["label"], "color": i % 8, "x": own["x"], "y": own["y"]}
        if not own["line"]:
            entry["mode"] = "points"
        if own["low"] is not None:
            entry |= {"low": own["low"], "high": own["high"]}
        series.append(
            {
                key: _points(value) if isinstance(value, list) else value
                for key, value in entry.items()
            }
        )
    return {
        "title": f"{claim['id']}: {claim['verdict']}",
        "note": shortened(f"{claim['statement']} Found: {claim['reason']}", 600),
        "x": {"label": picture["x"], "log": "x" in picture["log"]},
        "y": {"label": picture["y"], "log": "y" in picture["log"]},
        "series": series,
    }


def _points(values: list[float | None]) -> list[float | int | None]:
    """Numbers of a picture; what was not finite is null in the file."""
    return numbers(float("nan") if value is None else value for value in values)
