"""Cells, sentences and facts that pages and summaries share: rounded numbers, shortened text, what
a head needs, what a run is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape, unescape
from typing import Any

from esscher.runs import Run, RunError
from esscher.runs.columns import Column
from esscher.runs.errors import printable

DIGITS = 5
LONGEST = 300  # characters of a text from outside, where it stands in a sentence
KEPT = "cache_kept"
POOLS = {"corpus": "all tokens of the text", "sequence": "a query's own window"}
MOST_ROWS = 5000  # of a table on the page; the rest stays in the run
_NEEDED = re.compile(r"tokens_needed_(\d+(?:[._]\d+)?)pct")
DASHES = {"proved": "dashdot", "heuristic": "dashed", "experimental": "dotted", "exact": "solid"}
COLORS = (1, 2, 3, 4, 6, 5)


# ---- Cells.


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


def records_of(frame: Any | None) -> list[dict[str, Any]]:
    """The rows of a frame, if there is one."""
    columns = {} if frame is None else columns_of(frame)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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


def safe_json(value: Any) -> str:
    """JSON in which no character can end a script element or begin markup; ASCII alone, so no line
    separator either.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---- What heads need.


def head_name(row: Mapping[str, Any]) -> str:
    """L3H5, as in the address of a head."""
    return f"L{int(row['layer'])}H{int(row['head'])}"


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
    if _at(KEPT, percent) in row:
        keys, rule = row.get("rule_keys"), row.get(_at("cache_rule", percent))
        kept, of = _value(row, _at(KEPT, percent)), "" if keys is None else f" of {written(keys)}"
        if not math.isfinite(kept):
            return f"more{of} keys than were tried"
        return f"{written(kept)}{of} keys by {shortened(text_of(rule), 60)}"
    drawn, keys = _value(row, _at("tokens_needed", percent)), _value(row, "n_keys")
    if not math.isfinite(drawn):
        return "more than was measured"
    if own or drawn > keys:
        return f"{written(drawn)} draws with replacement from {written(keys)} keys"
    return f"{written(drawn)} tokens"


def sentence(
    row: Mapping[str, Any], percent: str, changing: Collection[str] = (), *, own: bool = False
) -> str:
    """What a head needs, and why. ``changing``: the words of numbers that more text may change."""
    exponent, coupling, effective = (
        _value(row, key) for key in ("beta_fit", "coupling", "effective_tokens")
    )
    facts = [
        *([f"its error falls with exponent {exponent:.2f}"] if math.isfinite(exponent) else []),
        *([f"its coupling is {written(coupling)}"] if math.isfinite(coupling) else []),
        *(
            [f"about {written(effective, 2)} keys share its attention"]
            if math.isfinite(effective)
            else []
        ),
    ]
    text = _needs(row, percent, own) + (f"; {', '.join(facts)}" if facts else "") + "."
    if regime := text_of(row.get("regime")):
        text += f" It is {shortened(regime, 60)}."
    if (status := text_of(row.get("converged"))) in changing:
        text += f" More text may change these numbers: {shortened(status, 60)}."
    return text


def _needs(row: Mapping[str, Any], percent: str, own: bool) -> str:
    drawn, keys, error = (
        _value(row, key) for key in (_at("tokens_needed", percent), "n_keys", "relative_at_n")
    )
    told = f"{need(row, percent, own=own)} for an error of {percent} %"
    if _at(KEPT, percent) in row:
        return f"keeps {told}"
    if math.isfinite(drawn):
        share = "" if own or not 0 < drawn <= keys else f" ({100 * drawn / keys:.2g} % of the pool)"
        return f"needs {told}{share}"
    end = f" (its error at {written(keys)} tokens is {100 * error:.2g} %)"
    never = f"never came down to {percent} % within what was measured"
    return never + (end if math.isfinite(error) else "")


def _value(row: Mapping[str, Any], key: str) -> float:
    try:
        return float(row[key])
    except (KeyError, TypeError, ValueError):
        return math.nan


def _at(name: str, percent: str) -> str:
    """The column of a number at an error."""
    return f"{name}_{percent.replace('.', '_')}pct"


# ---- What a run is: its tables, text, settings, failures.


def read_table(run: Run, name: str) -> Any | None:
    """A table of the run as a pandas frame, of its finished units if the run is not complete; None
    if there is none.
    """
    if name in run.tables:
        return run.table(name)
    try:
        return None if run.tables else run.partial(name)
    except (ValueError, RunError):
        return None


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
    if frame is None or frame.empty:
        return {}
    known = run.columns(name)
    shown = frame[[key for key in frame.columns if known[str(key)].kind != "list"]].head(MOST_ROWS)
    return {
        "name": name.replace("_", " "),
        "columns": described(run, name, map(str, shown.columns)),
        "rows": columns_of(shown),
        "count": len(frame),
    }


def is_atlas(run: Run) -> bool:
    """Whether a run describes the heads of a model."""
    return run.manifest.job == "probe"


def heads_of(run: Run) -> Any | None:
    """The heads table in the order of layers and heads; None if there is none or it is empty."""
    heads = read_table(run, "heads")
    if heads is None or heads.empty:
        return None
    return heads.sort_values(["layer", "head"], kind="stable").reset_index(drop=True)


def epsilons_of(heads: Any) -> dict[str, str]:
    """Percentages for which tokens needed were stored -> their columns, smallest error first."""
    matches = [match for key in heads.columns if (match := _NEEDED.fullmatch(key))]
    found = {match.group(1).replace("_", "."): match.group() for match in matches}
    return dict(sorted(found.items(), key=lambda item: float(item[0])))


def text_described(spec: Mapping[str, Any]) -> str:
    """What text a model was probed on: files, a dataset, or packaged text."""
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


def counted(reasons: Iterable[str], most: int = 3) -> str:
    """The most frequent of some reasons, each with its number where that is not 1."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    told = list(counts.items())[:most]
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


def _settings(run: Run) -> list[list[str]]:
    """Every field of the spec and every version, whole."""
    manifest = run.manifest
    rows = [[key, _flat(value)] for key, value in run.spec.items()]
    rows += [[f"hash of {name}", value] for name, value in manifest.hashes.items()]
    for start in manifest.starts[-1:]:
        rows += [[f"version of {name}", value] for name, value in start.versions.items()]
        rows += [["commit", start.commit or "not known"], ["computed by", start.executor]]
    rows += [["started", manifest.started], ["ended", text_of(manifest.ended)]]
    return [*rows, ["identity", manifest.spec_hash]]


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_flat(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def identity_of(run: Run, known: Mapping[str, Any], heads: Any, model: str) -> dict[str, Any]:
    """Facts by which a page sets runs beside each other; ``known``: the row of the table about.

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


# ---- Exponents that theory gives, as lines beside measured ones.


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
    lines = []
    for i, column in enumerate(found):
        label = f"{column.formula} ({column.status})" if column.formula else column.status
        dash, color = dash_of(column.status), COLORS[i % len(COLORS)]
        lines.append(TheoryLine(column.key, label, column.of, dash, color))
    return lines


def dash_of(status: str) -> str:
    """How a line is drawn, by what is known of a statement."""
    return next((dash for word, dash in DASHES.items() if status.startswith(word)), "dotted")


# ---- A run in a few lines.


def text_summary(run: Run) -> str:
    """The same as lines of text."""
    return "\n".join(
        unescape(re.sub("<[^<>]*>", "", line)) for line in html_summary(run).split("<br>")
    )


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
