"""Cells, sentences and facts that pages and summaries share: rounded numbers, shortened text, what
a head needs, what a run is.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape
from typing import Any, NamedTuple

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


# ---- The answer: what a command ends with, a notebook shows and a page begins with.

LOSS = 0.05  # nats per token: a compressed cache is recommended if it loses no more
BEST, UNIFORM = "best split", "uniform"
ANY_CACHE = "any cache"
FLOOR = "neyman"  # a bound that no rule goes below, to first order: nothing to recommend
REFITTED = "fisher+refit"  # the rule of es.compress
PACKAGED = {"packaged": "minilm"}
KINDS = {
    "streams": "stream (first and recent keys are enough)",
    "retrieves": "retrieve (they need chosen keys)",
    "diffuse": "are diffuse (choosing keys saves little)",
}


class Answer(NamedTuple):
    """Sentences, a short table with columns of a table of the run, and the command to type next."""

    sentences: list[str]
    rows: Any = None
    table: str = ""
    following: str = ""


def answer_of(run: Run) -> Answer:
    """What a finished run of ``esscher probe`` or ``esscher compress`` says; no sentence where
    there is no answer.
    """
    if run.manifest.job == "compress" and {"compress", "about"} <= set(run.tables):
        return compress_answer(run)
    if run.manifest.job != "probe" or "heads" not in run.tables:
        return Answer([])
    return probe_answer(run)


def cache_rows(totals: Any, by: str = "ratio") -> Any:
    """Budgets in the best split, with the share of the uniform one beside it; first the rules for
    any cache, the smallest first, the bound last.
    """
    uniform = totals[totals["split"] == UNIFORM].drop_duplicates("rule").set_index("rule")["ratio"]
    rows = totals[totals["split"] == BEST]
    rows = rows.assign(uniform=rows["rule"].map(uniform), bound=rows["rule"] == FLOOR)
    order = ["bound", "where", by, *(["nats"] if "nats" in rows else [])]
    return rows.sort_values(order, kind="stable").drop(columns="bound")


def recommended(rows: Any) -> dict[str, Any] | None:
    """The first rule that every cache can run, of ``cache_rows``; None where there is none."""
    usable = rows[(rows["where"] == ANY_CACHE) & (rows["rule"] != FLOOR)]
    return usable.iloc[0].to_dict() if len(usable) else None


def cache_sentence(row: Mapping[str, Any], about: str, asked: str) -> str:
    """One recommendation: rule, share of the cache, loss with its interval, where it can run."""
    text = f"{about}: {row['rule']} keeps {row['ratio']:.1%} of the cache for {asked}"
    if math.isfinite(row.get("nats", math.nan)):
        text += f" (predicted loss {interval(row, 'nats', 'nats_low', 'nats_high')} nats)"
    else:
        text += f" (worst head {row['worst_head']}: {row['worst']:.0%})"
    return f"{text}, on {row['where']}; {row['uniform']:.1%} if every head keeps the same share."


def interval(row: Mapping[str, Any], value: str, low: str, high: str) -> str:
    """A number with its interval, where it has one."""
    ends = [row.get(low, math.nan), row.get(high, math.nan)]
    told = f" [{ends[0]:.2g}, {ends[1]:.2g}]" if all(map(math.isfinite, ends)) else ""
    return f"{row[value]:.2g}{told}"


def probe_answer(run: Run) -> Answer:
    """Keys of a cache for a loss in nats, or for an error of 10 %, and kinds of heads; without
    rules the most and the least demanding head.
    """
    heads, about = run.table("heads"), read_table(run, "about")
    measured = heads[heads["status"] == "ok"]
    what = f"{model_described(run.spec)} on {text_described(run.spec)}"
    if about is not None:
        known = about.iloc[0].to_dict()
        model, text = (text_of(known.get(key)) for key in ("model", "text"))
        what = f"{shortened(model, 120)} on {shortened(text, 120)}" if model and text else what
        every = int(known.get("layers", 0)) * int(known.get("heads", 0))
        what += f" ({len(measured)} of {every} heads)" * (len(measured) < every)
    totals = run.table("budget") if "budget" in run.tables else {}
    if "frontier" not in run.tables or "where" not in totals:
        return _heads_answer(run, measured, what)
    losses = totals[totals["kl"].notna()]
    asked = "an error of 10 %"
    if len(losses):
        asked = f"a loss of {losses['kl'].iloc[0]:g} nats per token"
    rows = cache_rows(losses if len(losses) else totals[totals["epsilon"] == 0.1])
    best = recommended(rows)
    sentences = [f"{what}: no rule that was measured runs on any cache."]
    following = f"esscher budget {shlex.quote(str(run.path))}"
    if best is not None:
        sentences = [cache_sentence(best, what, asked)]
        following += f" --rule {best['rule']}"
        if len(losses):
            following = compress_command(run, best["rule"], losses["kl"].iloc[0])
    kinds = Counter(measured["kind"]) if "kind" in measured else Counter()
    told = [f"{kinds[kind]} {words}" for kind, words in KINDS.items() if kinds[kind]]
    if told:
        sentences.append(f"Heads: {', '.join(told)}.{_limiting(run, best)}")
    return Answer(sentences, rows, "budget", following)


def _limiting(run: Run, best: Mapping[str, Any] | None) -> str:
    """The key-value head that loses most at about the recommended size, as a sentence."""
    frontier = run.table("frontier")
    if best is None or "nats" not in frontier or not frontier["nats"].notna().any():
        return ""
    own = frontier[frontier["rule"] == best["rule"]]
    near = (own["share"] - best["ratio"]).abs()
    losses = own[near == near.min()].groupby(["layer", "kv_head"])["nats"].sum()
    if not losses.sum() > 0:
        return ""
    (layer, head), share = losses.idxmax(), losses.max() / losses.sum()
    return f" Most of the loss: layer {layer}, kv head {head} ({share:.0%} of it)."


def _heads_answer(run: Run, measured: Any, what: str) -> Answer:
    """Where no rules were compared."""
    own = run.spec.get("pool") == "sequence"
    order = ranked_heads(measured, need_column(measured, "10"))
    sentences = []
    if len(order):
        most, least = (
            f"{head_name(row)} ({need(row, '10', own=own)})"
            for row in (order.iloc[-1].to_dict(), order.iloc[0].to_dict())
        )
        sentences = [
            f"{what}: for an error of 10 % the most is needed by {most}, the least by {least}."
        ]
        if kinds := Counter(measured.get("regime", ())).most_common():
            sentences.append(f"Regimes: {', '.join(f'{n} {word}' for word, n in kinds)}.")
    following = "esscher probe --pool sequence"
    if run.spec.get("model") not in PACKAGED:
        following = f"esscher probe {model_argument(run)} --pool sequence{text_flags(run)}"
    if own:
        following = f"esscher probe {model_argument(run)}{text_flags(run)}"
    return Answer(sentences, order[::-1], "heads", following)


def compress_answer(run: Run) -> Answer:
    """The best rule at the smallest size with a loss of at most LOSS nats (else at the largest),
    and what it loses at other sizes; then every rule at this size.
    """
    rows, about = run.table("compress"), run.table("about").iloc[0]
    rows = rows[rows["rule"] != "full"]
    if "kl" not in rows or not rows["kl"].notna().any():
        return _encoder_answer(rows, about)
    asked, best = run.spec.get("kl") or LOSS, rows[rows["kl"].notna()]
    if not run.spec.get("kl"):
        best = best.loc[best.groupby("keep")["kl"].idxmin()]
    enough = best[best["kl"] <= asked]
    row = (enough.sort_values("share") if len(enough) else best.sort_values("kl")).iloc[0]
    size, rule = row["keep"], row["rule"]
    loss = interval(row, "kl", "kl_low", "kl_high")
    sentences = [
        f"{shortened(str(about['model']), 120)} on {about['texts']} prompts of {about['window']}"
        f" tokens: {rule} keeps {row['share']:.1%} of the cache and loses {loss} nats per token; it"
        f" runs on {runs_on(rule, row['split'])}."
    ]
    others = best[best["keep"] != size].sort_values("share")
    told = [
        f"{one['share']:.0%} loses {one['kl']:.2g}" + f" ({one['rule']})" * (one["rule"] != rule)
        for one in others.to_dict("records")
    ]
    if told and size == size:
        sentences.append(f"Keeping {', '.join(told[:4])}.")
    wanted = f"keep={size:g}" if size == size else f"kl={asked:g}"
    call = f'es.compress(model, ids, {wanted}, rule="{rule}")'
    shown = rows[(rows["keep"] == size) | (size != size)].sort_values("kl", kind="stable")
    return Answer(sentences, shown, "compress", f"{call} in Python builds this cache")


def _encoder_answer(rows: Any, about: Mapping[str, Any]) -> Answer:
    """An encoder has no next tokens: the rule whose embeddings are nearest to the full model's."""
    if "cosine" not in rows or not rows["cosine"].notna().any():
        return Answer([], rows.sort_values("keep"), "compress")
    row = rows.loc[rows["cosine"].idxmax()]
    sentence = (
        f"{about['model']}: with {row['rule']} each query reads {row['share']:.1%} of the keys, and"
        f" the embedding has a cosine of {row['cosine']:.3f} with the full one; the model has no"
        " cache, so this saves reading, not memory."
    )
    return Answer([sentence], rows.sort_values(["keep", "cosine"], ascending=False), "compress")


def runs_on(rule: str, split: str) -> str:
    """Where a compressed cache can run."""
    if ":reweight" in rule:
        return "attention that takes a weight for each kept key"
    if split in ("uniform", "pages"):
        return ANY_CACHE
    return "a cache with a length for each head"


def model_argument(run: Run) -> str:
    """The model as a command takes it."""
    name = str(run.spec.get("model") or "packaged")
    return shlex.quote(PACKAGED.get(name, name))


def text_flags(run: Run) -> str:
    """The text of a run as flags, with a space before each; none for packaged prose."""
    corpus = run.spec.get("corpus") or {}
    named = [("--text", name) for name in corpus.get("text") or ()]
    named += [(f"--{key}", corpus.get(key)) for key in ("dataset", "field")]
    if corpus.get("packaged") not in (None, "prose"):
        named.append(("--packaged", corpus["packaged"]))
    return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in named if value)


def compress_command(run: Run, rule: str, kl: float) -> str:
    """The command that builds and measures a cache by a rule, on the model and text of a probe,
    and by the rule of es.compress beside it.
    """
    rules = " ".join(f"--rules {name}" for name in dict.fromkeys((rule, REFITTED)))
    return f"esscher compress {model_argument(run)}{text_flags(run)} --kl {kl:g} {rules}"


# ---- A run in a few lines.


def text_summary(run: Run) -> str:
    """What the run is, what it found, how far it got, its tables."""
    return "\n".join(map(printable, _summary(run)))


def html_summary(run: Run) -> str:
    """The same for a notebook, with the short table of the answer."""
    lines = "<br>".join(f"<bdi>{escape(line)}</bdi>" for line in _summary(run))
    try:
        found = answer_of(run)
    except RunError:  # told in the lines
        found = Answer([])
    table = "" if found.rows is None else html_table(found, run.columns(found.table))
    return f'<div class="esscher-run">{lines}{table}</div>'


def html_table(found: Answer, columns: Mapping[str, Column], most: int = 8) -> str:
    """The first rows of an answer and six of its columns as HTML, headed by their labels."""
    keys = short_columns(found.rows, found.table)
    labels = {key: columns[key].short or columns[key].label for key in keys if key in columns}
    shown = found.rows[keys].head(most).rename(columns=labels)
    return str(shown.to_html(index=False, float_format="{:.3g}".format, border=0, escape=True))


SHORT = {  # columns of short tables, the first six that there are
    "budget": ("rule", "ratio", "nats", "where", "uniform", "error", "worst_head", "worst"),
    "heads": ("layer", "head", "regime", "tokens_needed_10pct", "beta_fit", "effective_tokens"),
    "compress": (
        *("rule", "split", "share", "kl", "kl_predicted", "needle", "loss_added", "agreement"),
        *("needle_several", "needle_distractor", "cosine", "neighbour", "error"),
    ),
}


def short_columns(rows: Any, table: str) -> list[str]:
    return [key for key in SHORT[table] if key in rows and rows[key].notna().any()][:6]


def _summary(run: Run) -> list[str]:
    job, is_probe = run.manifest.job, run.manifest.job == "probe"
    title = model_described(run.spec) if is_probe else str(run.spec.get("title") or job)
    lines = [f"{shortened(title, 120)} · {job}, {run.status}", *warnings_of(run)]
    try:
        lines += answer_of(run).sentences
    except RunError as damage:  # a notebook must still show which run it is
        lines.append(shortened(str(damage)))
    tables = sorted(run.manifest.tables.items())
    lines.append("tables: " + (", ".join(f"{name} ({n:,})" for name, n in tables) or "none yet"))
    return [*lines, shortened(str(run.path), 200)]
