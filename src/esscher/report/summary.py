"""A run in a few lines: of HTML in a notebook, of text elsewhere."""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

from esscher.report.probe import epsilons_of, heads_of, is_atlas
from esscher.report.words import (
    head_name,
    model_described,
    need,
    need_column,
    ranked_heads,
    read_table,
    shortened,
    text_described,
    warnings_of,
)
from esscher.runs import Run, RunError
from esscher.runs.errors import printable

TAG = re.compile("<[^<>]*>")


def text_summary(run: Run) -> str:
    """The same as lines of text."""
    return "\n".join(unescape(TAG.sub("", line)) for line in html_summary(run).split("<br>"))


def html_summary(run: Run) -> str:
    """What the run is, how far it got, its tables; for a probe also its most and least demanding
    head.
    """
    job, title = run.manifest.job, str(run.spec.get("title") or run.manifest.job)
    title = shortened(model_described(run.spec) if is_atlas(run) else title, 120)
    lines = [f"<b><bdi>{escape(title)}</bdi></b> · {escape(job)}, {escape(run.status)}"]
    lines += [escape(warning) for warning in warnings_of(run)]
    try:
        lines += _atlas_lines(run) if is_atlas(run) else []
    except RunError as damage:  # a notebook must still show which run it is
        lines.append(escape(shortened(str(damage))))
    tables = sorted(run.manifest.tables.items())
    rows = ", ".join(f"{escape(name)} ({count:,})" for name, count in tables)
    lines.append(f"tables: {rows or 'none yet'}")
    lines.append(f"<code><bdi>{escape(shortened(str(run.path), 200))}</bdi></code>")
    spans = "<br>".join(f"<span>{line}</span>" for line in lines)
    return f'<div class="esscher-run">{spans}</div>'


def _atlas_lines(run: Run) -> list[str]:
    heads = heads_of(run)
    if heads is None:
        return []
    measured = heads[heads["status"] == "ok"]
    part = f"{len(measured)} of {len(heads)} heads measured"
    about = read_table(run, "about")
    # of the model, of which a run may have looked at a few
    if about is not None and "layers" in about:
        part += f", {heads['layer'].nunique()} of {int(about['layers'].iloc[0])} layers"
    lines = [f"on <bdi>{escape(text_described(run.spec))}</bdi>: {part}"]
    if "10" in epsilons_of(heads) and not measured.empty:
        order = ranked_heads(heads, need_column(heads, "10")).to_dict("records")
        own = run.spec.get("pool") == "sequence"
        told = [
            f"{word} {head_name(row)} with {need(row, '10', own=own)}"
            for word, row in (("least", order[0]), ("most", order[-1]))
        ]
        lines.append(escape(f"needed for 10 %: {', '.join(told)}"))
    return lines + _sinks(measured)


def _sinks(measured: Any) -> list[str]:
    """The tokens that most heads rest on."""
    if "sink_token" not in measured.columns or not (measured["sink_token"] != "").any():
        return []
    counts = measured.loc[measured["sink_token"] != "", "sink_token"].value_counts()
    told = [
        f"“<bdi>{escape(shortened(printable(token), 60))}</bdi>” in {count} head{'s' * (count > 1)}"
        for token, count in counts.head(3).items()
    ]
    return [f"sinks: {', '.join(told)}, none in {len(measured) - counts.sum()}"]
