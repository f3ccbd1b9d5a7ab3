"""Sentences about heads, from a row of the heads table."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from esscher.runs import Run, RunError
from esscher.runs.columns import Column

DIGITS = 5
LONGEST = 300  # characters of a text from outside, where it stands in a sentence


def number(value: Any, digits: int = DIGITS) -> float | int | None:
    """Five digits; None for what is missing or infinite."""
    value = float(value)
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


def numbers(values: Iterable[Any], digits: int = DIGITS) -> list[float | int | None]:
    return [number(value, digits) for value in values]


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
    columns: dict[str, list[Any]] = {}
    for name in frame.columns:
        column = frame[name]
        if column.dtype.kind in "iuf":
            columns[str(name)] = numbers(column)
        else:
            columns[str(name)] = [text_of(value) for value in column]
    return columns


def records_of(frame: Any | None) -> list[dict[str, Any]]:
    """The rows of a frame, if there is one."""
    if frame is None:
        return []
    columns = columns_of(frame)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def parts_of(frame: Any, keys: list[str]) -> Iterator[tuple[tuple[Any, ...], dict[str, list[Any]]]]:
    """The rows of each group as lists by column: for thousands of small groups much faster than
    frames.
    """
    rows = frame.groupby(keys, sort=False).indices
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    for group, places in rows.items():
        yield group, {name: values[places].tolist() for name, values in columns.items()}


class Grids:
    """Lists that occur many times, such as the token numbers of a curve, kept once and named by
    their place.
    """

    def __init__(self) -> None:
        self.lists: list[list[Any]] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, values: list[Any]) -> int:
        key = tuple(values)
        if key not in self._places:
            self._places[key] = len(self.lists)
            self.lists.append(values)
        return self._places[key]


def safe_json(value: Any) -> str:
    """JSON in which no character can end a script element or begin markup; ASCII alone, so no line
    separator either.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---- Sentences about heads, from a row of the heads table.

KEPT = "cache_kept"


def head_name(row: Mapping[str, Any]) -> str:
    """L3H5, as in the address of a head."""
    return f"L{int(row['layer'])}H{int(row['head'])}"


def written(value: Any, digits: int = 3) -> str:
    """A number as people write it: 16,384, 0.043, 3.1e+09."""
    value = float(value)
    if not math.isfinite(value):
        return "an unknown number of"
    if (value == round(value) and abs(value) < 1e7) or 10**digits <= abs(value) < 1e7:
        return f"{round(value):,}"
    return f"{value:.{digits}g}"


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

    A head that never came down to the error within what was measured demands most of all; among
    those, the one for which any rule needs most, then the one with the largest error at the end.
    """
    measured = heads[heads["status"] == "ok"]
    if column not in measured.columns:
        return measured.head(0)
    floor = column.replace(KEPT, "floor_kept")
    ties = [
        name for name in (floor, "relative_at_n") if name != column and name in measured.columns
    ]
    order = measured.assign(
        **{f"_{name}": measured[name].fillna(math.inf) for name in (column, *ties)}
    )
    by = [f"_{name}" for name in (column, *ties)]
    return order.sort_values([*by, "layer", "head"], kind="stable").drop(columns=by)


def demanding(
    heads: Any, percent: str, unsettled: Collection[str] = (), count: int = 3, *, own: bool = False
) -> dict[str, list[dict[str, str]]]:
    """The most and the least demanding heads at an error, each with a sentence. ``own``: queries
    have contexts of their own.
    """
    rows = [
        dict(row) for row in ranked_heads(heads, need_column(heads, percent)).to_dict("records")
    ]
    if not rows:
        return {"most": [], "least": []}
    share = min(count, max(1, len(rows) // 2)) if len(rows) > 1 else 1
    told = [
        {"head": head_name(row), "text": sentence(row, percent, unsettled, own=own)} for row in rows
    ]
    return {"most": told[-share:][::-1], "least": told[:share] if len(rows) > 1 else []}


def need(row: Mapping[str, Any], percent: str, *, own: bool = False) -> str:
    """What a head needs for an error, in a few words: keys kept of those a query sees, or draws."""
    if _at(KEPT, percent) in row:
        return _kept(row, percent)
    drawn, keys = _value(row, _at("tokens_needed", percent)), _value(row, "n_keys")
    if not math.isfinite(drawn):
        return "more than was measured"
    if own or drawn > keys:
        return f"{written(drawn)} draws with replacement from {written(keys)} keys"
    return f"{written(drawn)} tokens"


def sentence(
    row: Mapping[str, Any], percent: str, unsettled: Collection[str] = (), *, own: bool = False
) -> str:
    """What a head needs, and why. ``unsettled``: the words of numbers that more text may change."""
    text = _needs(row, percent, own)
    exponent, coupling = (_value(row, key) for key in ("beta_fit", "coupling"))
    facts = []
    if math.isfinite(exponent):
        facts.append(f"its error falls with exponent {exponent:.2f}")
    if math.isfinite(coupling):
        facts.append(f"its coupling is {written(coupling)}")
    effective = _value(row, "effective_tokens")
    if math.isfinite(effective):
        facts.append(f"about {written(effective, 2)} keys share its attention")
    if facts:
        text += "; " + ", ".join(facts)
    regime = text_of(row.get("regime"))
    settled = text_of(row.get("settled"))
    status = (
        f" More text may change these numbers: {shortened(settled, 60)}."
        if settled in unsettled
        else ""
    )
    return f"{text}. It is {shortened(regime, 60)}.{status}" if regime else f"{text}.{status}"


def _needs(row: Mapping[str, Any], percent: str, own: bool) -> str:
    drawn, keys, error = (
        _value(row, key) for key in (_at("tokens_needed", percent), "n_keys", "relative_at_n")
    )
    if _at(KEPT, percent) in row:
        return f"keeps {_kept(row, percent)} for an error of {percent} %"
    if math.isfinite(drawn):
        text = f"needs {need(row, percent, own=own)} for an error of {percent} %"
        return (
            text
            if own or not 0 < drawn <= keys
            else f"{text} ({100 * drawn / keys:.2g} % of the pool)"
        )
    text = f"never came down to {percent} % within what was measured"
    return (
        f"{text} (its error at {written(keys)} tokens is {100 * error:.2g} %)"
        if math.isfinite(error)
        else text
    )


def _kept(row: Mapping[str, Any], percent: str) -> str:
    """Keys that the best rule for a cache keeps, of those that a query sees."""
    kept, keys, rule = (
        row.get(key) for key in (_at(KEPT, percent), "rule_keys", _at("cache_rule", percent))
    )
    of = f" of {written(keys)}" if keys is not None else ""
    if not math.isfinite(_value(row, _at(KEPT, percent))):
        return f"more{of} keys than were tried"
    return f"{written(kept)}{of} keys by {shortened(text_of(rule), 60)}"


def text_described(spec: Mapping[str, Any]) -> str:
    """What text a model was probed on, from the corpus of its spec: files, a dataset, or packaged
    text.
    """
    corpus = spec.get("corpus")
    corpus = corpus if isinstance(corpus, Mapping) else spec
    names = corpus.get("text") or corpus.get("texts") or ()
    names = [shortened(str(name), 120) for name in ([names] if isinstance(names, str) else names)]
    if names:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if corpus.get("dataset"):
        return shortened(f"the {corpus.get('split', 'train')} split of {corpus['dataset']}")
    return f"the packaged {corpus.get('packaged') or 'text'}"


def model_described(spec: Mapping[str, Any]) -> str:
    """The name of the model that was probed."""
    name = str(spec.get("model") or "packaged")
    return "all-MiniLM-L6-v2 (packaged)" if name == "packaged" else name


def _value(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    try:
        return float(value) if value is not None else math.nan
    except (TypeError, ValueError):
        return math.nan


def _at(name: str, percent: str) -> str:
    """The column of a number at an error."""
    return f"{name}_{percent.replace('.', '_')}pct"


# ---- What a run offers to a page: its tables if they are there, who made it, what went wrong.

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


# ---- What a probe measured, in a few facts: pages set those of runs beside each other, and pair
# heads of one model alone.

POOLS = {"corpus": "all tokens of the text", "sequence": "a query's own window"}


def identity_of(run: Run, known: Mapping[str, Any], heads: Any, model: str) -> dict[str, Any]:
    """``known``: the row of the table about, where there is one.

    ``weights`` is the same for runs of one model and no others: the digest of its weights, or its
    name where nobody took that. ``pool`` is the same for runs whose queries see the same kind of
    keys, as many of them.
    """
    measured = heads[heads["status"] == "ok"]
    keys = measured["n_keys"].max() if "n_keys" in measured.columns and len(measured) else None
    pool = text_of(known.get("pool")) or text_of(run.spec.get("pool"))
    facts = {
        "model": shortened(model, 120),
        "text": text_described(run.spec),
        "tokens of text": written(known["tokens"]) if known.get("tokens") else "",
        "keys are": POOLS.get(pool, pool),
        "keys a query sees": "" if keys is None else written(keys),
        "heads measured": f"{len(measured)} of {len(heads)}, {heads['layer'].nunique()} layers",
    }
    return {
        "weights": text_of(known.get("model_sha256")) or model,
        "pool": f"{pool} {keys}",
        "facts": [[name, value] for name, value in facts.items() if value],
    }


# ---- Exponents that theory gives beside measured ones: which lines a picture draws, from what a
# run says of its columns.

DASHES = {"proved": "dashdot", "heuristic": "dashed", "experimental": "dotted", "exact": "solid"}
COLORS = (1, 2, 3, 4, 6, 5)


@dataclass(frozen=True)
class TheoryLine:
    """A column of exponents as a line: over the column ``of`` it is a function, over others a mark
    at each head.
    """

    key: str
    label: str
    of: str
    dash: str
    color: int


def theory_lines(columns: Mapping[str, Column]) -> list[TheoryLine]:
    """The lines of a table, in the order of its columns."""
    found = [column for column in columns.values() if column.of]
    return [
        TheoryLine(
            column.key, _label(column), column.of, _dash(column.status), COLORS[i % len(COLORS)]
        )
        for i, column in enumerate(found)
    ]


def _label(column: Column) -> str:
    return f"{column.formula} ({column.status})" if column.formula else column.status


def _dash(status: str) -> str:
    return next((dash for word, dash in DASHES.items() if status.startswith(word)), "dotted")
