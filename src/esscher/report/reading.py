"""What a run offers to a page: its tables if they are there, who made it, what went wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from esscher.report.packing import shortened, text_of
from esscher.runs import Run, RunError

__all__ = ["described", "overview", "read_table", "settings_line", "warnings_of"]

_NOT_SETTINGS = {"job", "model", "title", "text", "texts", "dataset", "corpus", "threads", "n"}


def read_table(run: Run, name: str) -> Any | None:
    """A table of the run as a pandas frame, of its finished units if the run is not complete; None
    if there is none.
    """
    if name in run.tables:
        return run.table(name)
    if run.tables:
        return None
    try:
        return run.partial(name)
    except (ValueError, RunError):
        return None


def described(run: Run, name: str, keys: Iterable[str]) -> list[dict[str, Any]]:
    """The columns of a table that a page shows, as it takes them: what is not said of one is left
    out.
    """
    known = run.columns(name)
    return [
        {field: value for field, value in asdict(known[key]).items() if value not in (None, "", ())}
        for key in keys
    ]


def overview(run: Run, kind: str, title: str, lines: list[str]) -> dict[str, Any]:
    """The part of a run's content that every kind of page begins with."""
    return {
        "kind": kind,
        "job": run.manifest.job,
        "name": shortened(run.path.name or str(run.path), 120),
        "title": shortened(title),
        "lines": lines,
        "status": run.status,
        "warnings": warnings_of(run),
        "settings": _settings(run),
    }


def warnings_of(run: Run) -> list[str]:
    """What a reader must know before trusting the page: an unfinished run, failed units, an empty
    run.
    """
    found = []
    progress = run.progress
    if run.status != "complete":
        found.append(
            f"This run is {run.status}: {progress.done} of {progress.total} units are done."
        )
    if run.failures:
        reasons: dict[str, int] = {}
        for failure in run.failures:
            reason = shortened(failure.reason)
            reasons[reason] = reasons.get(reason, 0) + 1
        told = "; ".join(
            f"{reason} ({count}×)" if count > 1 else reason
            for reason, count in list(reasons.items())[:3]
        )
        found.append(f"{len(run.failures)} of {progress.total} units failed: {told}")
    if run.manifest.stopped is not None:
        found.append(shortened(run.manifest.stopped))
    found += [shortened(str(note)) for note in run.manifest.notes[:3]]
    return found


def settings_line(run: Run) -> str:
    """Settings, versions, commit and day in one line."""
    settings = ", ".join(
        f"{key.replace('_', ' ')} {shortened(_flat(value), 60)}"
        for key, value in run.spec.items()
        if key not in _NOT_SETTINGS
        and value not in (None, "", [], {})
        and not isinstance(value, dict)
    )
    start = run.manifest.starts[-1] if run.manifest.starts else None
    parts = [settings]
    if start is not None:
        named = ("esscher", "torch", "transformers", "python")
        parts.append(
            ", ".join(f"{name} {start.versions[name]}" for name in named if name in start.versions)
        )
        if start.commit:
            parts.append(f"commit {start.commit[:10]}")
    parts.append(run.manifest.started[:10])
    return " · ".join(part for part in parts if part)


def _settings(run: Run) -> list[list[str]]:
    """Every field of the spec and every version, whole."""
    manifest = run.manifest
    rows = [[key, _flat(value)] for key, value in run.spec.items()]
    rows += [[f"hash of {name}", value] for name, value in manifest.hashes.items()]
    for start in manifest.starts[-1:]:
        rows += [[f"version of {name}", value] for name, value in start.versions.items()]
        rows += [["commit", start.commit or "not known"], ["computed by", start.executor]]
    return [
        *rows,
        ["started", manifest.started],
        ["ended", text_of(manifest.ended)],
        ["identity", manifest.spec_hash],
    ]


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_flat(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
