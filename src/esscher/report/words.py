"""Cells, sentences and facts that pages and summaries share: rounded numbers, shortened text, what
a head needs, what a run is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from esscher.runs import Run, RunError
from esscher.runs.columns import Column
from esscher.runs.errors import printable

LONGEST = 300  # characters of a text from outside, where it stands in a sentence
KEPT = "cache_kept"
MOST_ROWS = 5000  # of a table on the page; the rest stays in the run
DASHES = {"proved": "dashdot", "heuristic": "dashed", "experimental": "dotted", "exact": "solid"}
COLORS = (1, 2, 3, 4, 6, 5)  # of theory's lines, places in the palette


# ---- Cells.


def number(value: Any, digits: int = 5) -> float | int | None:
    """A number with this many digits; None for what is missing or infinite."""
    value = math.nan if value is None else float(value)
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


def numbers(values: Iterable[Any], digits: int = 5) -> list[float | int | None]:
    return [number(value, digits) for value in values]


def written(value: Any, digits: int = 3) -> str:
    """A number as people write it: 16,384, 0.043, 3.1e+09."""
    value = float(value)
    if not math.isfinite(value):
        return "an unknown number of"
    if (value == round(value) and abs(value) < 1e7) or 10**digits <= abs(value) < 1e7:
        return f"{round(value):,}"
    return f"{value:.{digits}g}"


def text_of(value: Any) -> str:
    """A cell as text; empty where there is none."""
    return "" if value is None or value != value else str(value)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A long text by its two ends, with its length."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {text[-longest // 4 :]} ({len(text):,} characters)"


def columns_of(frame: Any) -> dict[str, list[Any]]:
    """A pandas frame as lists by column: numbers rounded, everything else as text."""
    return {
        str(name): numbers(column) if column.dtype.kind in "iuf" else [text_of(x) for x in column]
        for name, column in frame.items()
    }


def parts_of(frame: Any, keys: list[str]) -> Iterator[tuple[tuple[Any, ...], dict[str, list[Any]]]]:
    """The rows of each group as lists by column: for thousands of small groups much faster than
    frames.
    """
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    for group, places in frame.groupby(keys, sort=False).indices.items():
        yield group, {name: values[places].tolist() for name, values in columns.items()}


class Grids:
    """Lists that occur many times, such as the token numbers of a curve, kept once and named by
    their place.
    """

    def __init__(self) -> None:
        self.lists: list[list[Any]] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, values: list[Any]) -> int:
        place = self._places.setdefault(tuple(values), len(self.lists))
        if place == len(self.lists):
            self.lists.append(values)
        return place


# ---- What heads need.


def head_name(row: Mapping[str, Any]) -> str:
    """L3H5, as in the address of a head."""
    return f"L{int(row['layer'])}H{int(row['head'])}"


def _at(name: str, percent: str) -> str:
    """The column of a number at an error."""
    return f"{name}_{percent.replace('.', '_')}pct"


def need_column(heads: Any, percent: str) -> str:
    """What heads are ordered by at an error: keys that the best rule for a cache keeps of a query's
    own context.

    Where no rule was compared, tokens drawn with replacement. In an own context these may be more
    than it has, and most for heads that two keys decide, which are the easiest for any rule.
    """
    kept = _at(KEPT, percent)
    return kept if kept in heads.columns else _at("tokens_needed", percent)


def ranked_heads(heads: Any, column: str) -> Any:
    """Measured heads from the least to the most demanding.

    A head that never came down to the error demands most of all; among those, the one for which any
    rule needs most, then the one with the largest error at the end.
    """
    measured = heads[heads["status"] == "ok"]
    if column not in measured.columns:
        return measured.head(0)
    ties = (column, column.replace(KEPT, "floor_kept"), "relative_at_n")
    by = [name for name in dict.fromkeys(ties) if name in measured.columns]
    order = measured.fillna(dict.fromkeys(by, math.inf)).sort_values(
        [*by, "layer", "head"], kind="stable"
    )
    return measured.loc[order.index]


def demanding(
    heads: Any, percent: str, changing: Collection[str] = (), count: int = 3, *, own: bool = False
) -> dict[str, list[dict[str, str]]]:
    """The most and the least demanding heads at an error, each with a sentence. ``own``: queries
    have contexts of their own.
    """
    told = [
        {"head": head_name(row), "text": sentence(row, percent, changing, own=own)}
        for row in ranked_heads(heads, need_column(heads, percent)).to_dict("records")
    ]
    share = min(count, max(1, len(told) // 2))
    return {"most": told[: -share - 1 : -1], "least": told[:share] if len(told) > 1 else []}


def need(row: Mapping[str, Any], percent: str, *, own: bool = False) -> str:
    """What a head needs for an error, in a few words: keys kept of those a query sees, or draws."""
    if (column := _at(KEPT, percent)) in row:
        of = f" of {written(row['rule_keys'])}" if "rule_keys" in row else ""
        if not math.isfinite(row[column]):
            return f"more{of} keys than were tried"
        rule = shortened(text_of(row.get(_at("cache_rule", percent))), 60)
        return f"{written(row[column])}{of} keys by {rule}"
    drawn, keys = row[_at("tokens_needed", percent)], row.get("n_keys", math.nan)
    if not math.isfinite(drawn):
        return "more than was measured"
    if own or drawn > keys:
        return f"{written(drawn)} draws with replacement from {written(keys)} keys"
    return f"{written(drawn)} tokens"


def sentence(
    row: Mapping[str, Any], percent: str, changing: Collection[str] = (), *, own: bool = False
) -> str:
    """What a head needs, and why. ``changing``: the words of numbers that more text may change."""
    known = {key: value for key, value in row.items() if value == value}
    needed, keys = known.get(_at("tokens_needed", percent)), known.get("n_keys", 0)
    text = f"{need(row, percent, own=own)} for an error of {percent} %"
    if _at(KEPT, percent) in row:
        text = f"keeps {text}"
    elif needed is not None:
        text = f"needs {text}"
    else:
        text = f"never came down to {percent} % within what was measured"
        if "relative_at_n" in known:
            error = f"{100 * known['relative_at_n']:.2g} %"
            text += f" (its error at {written(keys)} tokens is {error})"
    if "effective_tokens" in known:
        text += f"; about {written(known['effective_tokens'], 2)} keys share its attention"
    if known.get("regime"):
        text += f". It is {shortened(str(known['regime']), 60)}"
    if known.get("converged") in changing:
        text += f". More text may change these numbers: {shortened(known['converged'], 60)}"
    return f"{text}."


# ---- What a run is: its tables, text, settings, failures.


def read_table(run: Run, name: str) -> Any | None:
    """A table of the run as a pandas frame, of its finished units if the run is not complete; None
    if there is none or it is empty.
    """
    if run.tables:
        frame = run.table(name) if name in run.tables else None
    else:
        try:
            frame = run.partial(name)
        except (ValueError, RunError):
            frame = None
    return None if frame is None or frame.empty else frame


def described(run: Run, name: str, keys: Iterable[str]) -> list[dict[str, Any]]:
    """The columns of a table as a page takes them: what is not said of one is left out."""
    known = run.columns(name)
    return [
        {field: value for field, value in asdict(known[key]).items() if value not in (None, "", ())}
        for key in keys
    ]


def described_table(run: Run, name: str) -> dict[str, Any]:
    """A table with its columns explained, empty where there is none; cells that are arrays stay in
    the run.
    """
    frame = read_table(run, name)
    if frame is None:
        return {}
    known = run.columns(name)
    shown = frame[[key for key in frame.columns if known[str(key)].kind != "list"]].head(MOST_ROWS)
    return {
        "name": name.replace("_", " "),
        "columns": described(run, name, map(str, shown.columns)),
        "rows": columns_of(shown),
        "count": len(frame),
    }


def heads_of(run: Run) -> Any | None:
    """The heads table in the order of layers and heads; None if there is none or it is empty."""
    heads = read_table(run, "heads")
    if heads is None:
        return None
    return heads.sort_values(["layer", "head"], kind="stable").reset_index(drop=True)


def epsilons_of(heads: Any) -> dict[str, str]:
    """Percentages for which tokens needed were stored -> their columns, smallest error first."""
    matches = [re.fullmatch(r"tokens_needed_(\d+(?:[._]\d+)?)pct", key) for key in heads.columns]
    found = {match[1].replace("_", "."): match[0] for match in matches if match}
    return dict(sorted(found.items(), key=lambda item: float(item[0])))


def text_described(spec: Mapping[str, Any]) -> str:
    """What text a model was probed on: files, a dataset, or packaged text."""
    corpus = spec.get("corpus") or {}
    names = [shortened(str(name), 120) for name in corpus.get("text") or ()]
    if names:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if corpus.get("dataset"):
        return shortened(f"the {corpus.get('split', 'train')} split of {corpus['dataset']}")
    return f"the packaged {corpus.get('packaged') or 'text'}"


def model_described(spec: Mapping[str, Any]) -> str:
    """The name of the model that was probed."""
    name = str(spec.get("model") or "packaged")
    return "all-MiniLM-L6-v2 (packaged)" if name == "packaged" else name


def overview(run: Run, kind: str, title: str, lines: list[str]) -> dict[str, Any]:
    """The part of a run's content that every kind of page begins with; every setting is whole."""
    manifest = run.manifest
    settings = dict(run.spec) | {f"hash of {key}": value for key, value in manifest.hashes.items()}
    for start in manifest.starts[-1:]:
        settings |= {f"version of {name}": value for name, value in start.versions.items()}
        settings |= {"commit": start.commit or "not known", "computed by": start.executor}
    settings |= {"started": manifest.started, "ended": text_of(manifest.ended)}
    settings["identity"] = manifest.spec_hash
    return {
        "kind": kind,
        "job": manifest.job,
        "name": shortened(run.path.name or str(run.path), 120),
        "title": shortened(title),
        "lines": lines,
        "status": run.status,
        "warnings": warnings_of(run),
        "settings": [[name, _flat(value)] for name, value in settings.items()],
    }


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, list | tuple) else str(value)


def counted(reasons: Iterable[str]) -> str:
    """The most frequent of some reasons, each with its number where that is not 1."""
    told = Counter(reasons).most_common(3)
    return "; ".join(f"{reason} ({count}×)" if count > 1 else reason for reason, count in told)


def warnings_of(run: Run) -> list[str]:
    """What a reader must know before trusting the page: an unfinished run, failed units, an empty
    run.
    """
    found, progress = [], run.progress
    if run.status != "complete":
        found.append(
            f"This run is {run.status}: {progress.done} of {progress.total} units are done."
        )
    if run.failures:
        told = counted(shortened(failure.reason) for failure in run.failures)
        found.append(f"{len(run.failures)} of {progress.total} units failed: {told}")
    if run.manifest.stopped is not None:
        found.append(shortened(run.manifest.stopped))
    return found + [shortened(str(note)) for note in run.manifest.notes[:3]]


# ---- Exponents that theory gives, as lines beside measured ones.


def theory_lines(columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """The columns of theory's exponents as lines, in their order: over the column ``of`` a line is
    a function, over others a mark at each head.
    """
    lines: list[dict[str, Any]] = []
    for column in columns.values():
        if column.of:
            label = f"{column.formula} ({column.status})" if column.formula else column.status
            style = {"dash": dash_of(column.status), "color": COLORS[len(lines) % len(COLORS)]}
            lines.append({"key": column.key, "label": label, "of": column.of, **style})
    return lines


def dash_of(status: str) -> str:
    """How a line is drawn, by what is known of a statement."""
    return next((dash for word, dash in DASHES.items() if status.startswith(word)), "dotted")


# ---- A run in a few lines.


def text_summary(run: Run) -> str:
    """What the run is, how far it got, its tables; for a probe also its most and least demanding
    head.
    """
    return "\n".join(map(printable, _summary(run)))


def html_summary(run: Run) -> str:
    """The same for a notebook."""
    lines = "<br>".join(f"<bdi>{escape(line)}</bdi>" for line in _summary(run))
    return f'<div class="esscher-run">{lines}</div>'


def _summary(run: Run) -> list[str]:
    job, is_probe = run.manifest.job, run.manifest.job == "probe"
    title = model_described(run.spec) if is_probe else str(run.spec.get("title") or job)
    lines = [f"{shortened(title, 120)} · {job}, {run.status}", *warnings_of(run)]
    try:
        heads = heads_of(run) if is_probe else None
        lines += [] if heads is None else _heads_in_words(run, heads)
    except RunError as damage:  # a notebook must still show which run it is
        lines.append(shortened(str(damage)))
    tables = sorted(run.manifest.tables.items())
    lines.append("tables: " + (", ".join(f"{name} ({n:,})" for name, n in tables) or "none yet"))
    return [*lines, shortened(str(run.path), 200)]


def _heads_in_words(run: Run, heads: Any) -> Iterator[str]:
    part = f"{int((heads['status'] == 'ok').sum())} of {len(heads)} heads measured"
    about = read_table(run, "about")
    # of the model, of which a run may have looked at a few
    if about is not None and "layers" in about:
        part += f", {heads['layer'].nunique()} of {int(about['layers'].iloc[0])} layers"
    yield f"on {text_described(run.spec)}: {part}"
    order = ranked_heads(heads, need_column(heads, "10")).to_dict("records")
    if order:
        own = run.spec.get("pool") == "sequence"
        least, most = (
            f"{head_name(row)} with {need(row, '10', own=own)}" for row in (order[0], order[-1])
        )
        yield f"needed for 10 %: least {least}, most {most}"
