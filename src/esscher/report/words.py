"""Cells, sentences and facts that pages and summaries share: rounded numbers, shortened text, what
a head needs, what a run is.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, NamedTuple

from esscher.runs import Run, RunError
from esscher.runs.columns import Column
from esscher.runs.errors import printable
from esscher.runs.run import find_view

LONGEST = 300  # characters of a text from outside, where it stands in a sentence
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


# ---- What heads need.


def need_column(heads: Any, percent: str) -> str:
    """What heads are ordered by at an error: keys that the best rule for a cache keeps of a query's
    own context.

    Where no rule was compared: tokens drawn with replacement. They can be more than the keys of a
    query's own context, and are most for heads that two keys decide, which rules find easiest.
    """
    at = f"{percent.replace('.', '_')}pct"
    return f"cache_kept_{at}" if f"cache_kept_{at}" in heads.columns else f"tokens_needed_{at}"


def ranked_heads(heads: Any, column: str) -> Any:
    """Measured heads from the least to the most demanding: a head that never came down to the error
    demands most of all; among those, the one with the largest error at the end.
    """
    measured = heads[heads["status"] == "ok"]
    if column not in measured.columns:
        return measured.head(0)
    by = [name for name in (column, "relative_at_n", "layer", "head") if name in measured.columns]
    return measured.sort_values(by, kind="stable")


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
    packaged = f"packaged {corpus.get('packaged') or 'text'}"
    names = list(corpus.get("text") or [corpus.get("dataset") or packaged])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shortened(str(name), 120) for name in names[:3]) + more


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
BEST = "best split"
ANY_CACHE = "any cache"
FLOOR = "neyman"  # a bound that no rule goes below, to first order: nothing to recommend
REFITTED = "fisher+refit"  # the rule of es.compress
USUAL = {"sinks": 4, "recent": 16, "observe": 64, "replay": 1.0, "seed": 0}  # its defaults
KINDS = {
    "streams": "stream (first and recent keys are enough)",
    "retrieves": "retrieve (they need chosen keys)",
    "averages": "average (choosing keys saves little)",
}


class Answer(NamedTuple):
    """Sentences, rows with the keys of a short table, the command to type next, and the table of
    the run that the rows are of.
    """

    sentences: list[str]
    rows: Any = ()
    keys: Sequence[str] = ()
    following: str = ""
    table: str = ""


def answer_of(run: Run) -> Answer:
    """What a finished run of ``esscher probe``, ``compress``, ``converge`` or ``icl`` says, if
    anything.
    """
    job, tables = run.manifest.job, set(run.tables)
    if job == "compress" and {"compress", "about"} <= tables:
        return compress_answer(run)
    if job == "converge" and "rates" in tables:
        return converge_answer(run)
    for name in ("final", "rates", "verdict") if job.startswith("icl-") else ():
        if name in tables:
            return icl_answer(run.table(name), name)
    return probe_answer(run) if job == "probe" and "heads" in tables else Answer([])


def converge_answer(run: Run) -> Answer:
    """Fitted exponents of each metric beside 1/2, and how to draw them."""
    rates = run.table("rates")
    following = f"esscher report {shlex.quote(str(run.path))} --figures svg"
    keys = short_columns(rates, "rates")
    return Answer(_exponents(rates, "error"), rates, keys, following, "rates")


def _exponents(rates: Any, what: str) -> list[str]:
    """The range of fitted exponents by metric, and how many agree with 1/2."""
    fitted, told = rates[rates["exponent"].notna()], []
    for metric, own in fitted.groupby("metric", sort=False):
        ends = dict.fromkeys(f"{end:.3g}" for end in own["exponent"].agg(["min", "max"]))
        told.append(f"{' to '.join(ends)} ({metric})")
    if not told:
        return ["No rate could be fitted."]
    inside = int((fitted["low"].le(0.5) & fitted["high"].ge(0.5)).sum())
    return [
        f"The {what} falls as n^-b with b = {', '.join(told)}.",
        f"1/2 is within the interval of {inside} of {len(fitted)} fits.",
    ]


def icl_answer(rows: Any, name: str) -> Answer:
    """Errors of the models at the shortest and the longest prompt, exponents of their difference,
    or which of the two is stuck more often.
    """
    said = _exponents(rows, "difference") if name == "rates" else []
    for covariance, own in rows.groupby("covariance", sort=False) if name == "final" else ():
        errors = own.groupby(["model", "length"], sort=False)["mse"].mean().unstack("model")
        what = "mean squared error" + " above the Bayes predictor's" * ("bayes" in errors)
        above = errors.sub(errors.pop("bayes") if "bayes" in errors else 0.0, axis=0)
        ends = sorted({own["length"].min(), own["length"].max()})
        shown = (
            f"{model} {' and '.join(f'{above.loc[n, model]:.3g} at {n:,} tokens' for n in ends)}"
            for model in above
        )
        said.append(f"{covariance}, {what}: {'; '.join(shown)}.")
    if name == "verdict":
        total = rows.iloc[-1]  # over all settings
        more = "linear" if total["only_linear"] > total["only_softmax"] else "softmax"
        told = "neither model is shown to be stuck more often"
        if total["p"] < 0.05:
            told = f"{more} attention is stuck more often"
        test = f"sign test over {total['starts']} starts, p = {total['p']:.4g}"
        said.append(f"over all settings: {told} ({test})")
    return Answer(said, rows, short_columns(rows, name), table=name)


def recommended(rows: Any) -> dict[str, Any] | None:
    """The first of ranked rules, if every cache can run it."""
    first: dict[str, Any] = {} if rows.empty else rows.iloc[0].to_dict()
    return first if first and not first["bound"] and first["where"] == ANY_CACHE else None


def cache_answer(
    run: Run, what: str, totals: Any, asked: str, kl: float | None, by: str = "ratio"
) -> Answer:
    """One recommendation for what is asked, the command that builds the cache, and every rule in
    its best split, with the share of the uniform one beside it, in the order of their rank.
    """
    rows = find_view("rank_rules")(totals, by)
    best, following = recommended(rows), f"esscher budget {shlex.quote(str(run.path))}"
    sentences = [f"{what}: no rule that was measured runs on any cache."]
    if best is not None:
        loss = f"worst head {best['worst_head']}: {best['worst']:.0%}"
        if math.isfinite(best.get("nats", math.nan)):
            loss = f"predicted loss {interval(best, 'nats', 'nats_low', 'nats_high')} nats"
        sentences = [
            f"{what}: {best['rule']} keeps {best['ratio']:.1%} of the cache for {asked} ({loss}),"
            " if heads may keep different numbers of keys;"
            f" {best['uniform']:.1%} if all keep the same share."
        ]
        following += f" --rule {best['rule']}"
        if kl is not None:
            following = compress_command(run, best["rule"], kl)
            if best["nats"] < 0.9 * kl:
                sentences.append("Smaller caches were not measured; they may be enough.")
            if best["beyond"]:
                sentences.append("A loss above 0.2 nats is larger than predicted.")
    return Answer(sentences, rows, short_columns(rows, "budget"), following, "budget")


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
    what = f"{model_name(run)} on {text_described(run.spec)}"
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
    kl = losses["kl"].iloc[0] if len(losses) else None
    asked = "an error of 10 %" if kl is None else f"a loss of {kl:g} nats per token"
    rows = totals[totals["epsilon"] == 0.1] if kl is None else losses
    found = cache_answer(run, what, rows, asked, kl)
    kinds = Counter(measured["kind"]) if "kind" in measured else Counter()
    told = [f"{kinds[kind]} {words}" for kind, words in KINDS.items() if kinds[kind]]
    limiting = _limiting(run, recommended(found.rows))
    heads_told = [f"Heads: {', '.join(told)}.{limiting}"] if told else []
    return found._replace(sentences=[found.sentences[0], *heads_told])


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
    return f" Largest loss: layer {layer}, kv head {head} ({share:.0%} of all)."


def _heads_answer(run: Run, measured: Any, what: str) -> Answer:
    """Where no rules were compared."""
    own = run.spec.get("pool") == "sequence"
    order = ranked_heads(measured, "tokens_needed_10pct")
    sentences = []
    if len(order):
        told = []
        for row in (order.iloc[-1].to_dict(), order.iloc[0].to_dict()):
            drawn, keys = row["tokens_needed_10pct"], row.get("n_keys", math.nan)
            need = f"{written(drawn)} tokens"
            if own or drawn > keys:
                need = f"{written(drawn)} draws with replacement from {written(keys)} keys"
            need = need if math.isfinite(drawn) else "more than was measured"
            told.append(f"L{int(row['layer'])}H{int(row['head'])} needs {{}} ({need})")
        most, least = told[0].format("most"), told[1].format("least")
        sentences = [f"{what}: for an error of 10 % {most}, {least}."]
        if kinds := Counter(measured.get("regime", ())).most_common():
            known = run.columns("heads")["regime"]
            meanings = dict(zip(known.words, known.meanings, strict=False))
            said = (
                f"{n} {word}" + f" ({meanings.get(word)})" * (word in meanings) for word, n in kinds
            )
            sentences.append(f"Heads: {', '.join(said)}.")
    pool, rows = "" if own else " --pool sequence", order[::-1]
    settings = same_flags(run, "layers", "heads", "window", "max_tokens", "queries")
    following = f"esscher probe {shlex.quote(model_name(run))}{pool}{text_flags(run)}{settings}"
    return Answer(sentences, rows, short_columns(rows, "heads"), following, "heads")


def compress_answer(run: Run) -> Answer:
    """The best rule at the smallest size with a loss of at most LOSS nats (else the least loss),
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
    layers = run.spec.get("layers")
    some = f", {len(layers)} of {about['layers']} layers compressed" if layers else ""
    prompts = f"{about['texts']} prompt{'s' if about['texts'] > 1 else ''}"
    sentences = [
        f"{shortened(str(about['model']), 120)} on {prompts} of {about['window']} tokens{some}:"
        f" {rule} keeps {row['share']:.1%} of the cache and loses {loss} nats per token; it runs on"
        f" {runs_on(rule, row['split'])}."
    ]
    others = best[best["keep"] != size].sort_values("share")
    told = [
        f"{one['share']:.0%} loses {one['kl']:.2g}" + f" ({one['rule']})" * (one["rule"] != rule)
        for one in others.to_dict("records")
    ]
    if told and size == size:
        sentences.append(f"Keeping {', '.join(told[:4])}.")
    wanted = ("keep", size) if size == size else ("kl", asked)
    following = _same_cache(run, rule, row["split"], *wanted)
    shown = rows[(rows["keep"] == size) | (size != size)].sort_values("kl", kind="stable")
    keys = short_columns(shown, "compress")
    told = [*sentences, *_checked(run)]
    return Answer(told, shown, keys, following, "compress")


def _same_cache(run: Run, rule: str, split: str, wanted: str, size: float) -> str:
    """What builds a measured cache: the call of es.compress, on a prompt of as many tokens; of some
    layers alone, which the call does not take, the command for all of them.
    """
    spec, length = run.spec, run.table("about")["window"].iloc[0]
    changed = {name: spec[name] for name in USUAL if spec.get(name, USUAL[name]) != USUAL[name]}
    if spec.get("layers"):
        settings = same_flags(run, "window", "decode", *changed)
        place = f"{shlex.quote(model_name(run))}{text_flags(run)}{settings}"
        return f"esscher compress {place} --{wanted} {size:g} --rules {rule}"
    more = f', split="{split}"' * bool(spec.get("splits"))
    more += "".join(f", {name}={value:g}" for name, value in changed.items())
    call = f'es.compress(model, ids[:, :{length}], {wanted}={size:g}, rule="{rule}"{more})'
    return f"cache = {call}; model.generate(ids, past_key_values=cache) # in Python"


def _checked(run: Run) -> Iterator[str]:
    """Predicted beside measured losses, where --check was given."""
    if "check" not in run.tables:
        return
    check = run.table("check")
    own = check[check["second_order"] & (check["kl"] > 0) & check["ratio"].notna()]
    if len(own) > 2:
        ratio, rank = own["ratio"], own["kl"].corr(own["kl_predicted"], method="spearman")
        yield (
            f"Measured over predicted loss in {len(own)} caches (predicted at most 0.2 nats):"
            f" median {ratio.median():.2f}, 90 % between {ratio.quantile(0.05):.2f} and"
            f" {ratio.quantile(0.95):.2f}; rank correlation {rank:.2f}."
        )


def _encoder_answer(rows: Any, about: Mapping[str, Any]) -> Answer:
    """An encoder has no next tokens: the rule whose embeddings are nearest to the full model's."""
    keys = short_columns(rows, "compress")
    row = rows.loc[rows["cosine"].idxmax()]
    sentence = (
        f"{about['model']}: with {row['rule']} each query reads {row['share']:.1%} of the keys, and"
        f" the embedding has a cosine of {row['cosine']:.3f} with the full one; the model has no"
        " cache, so this saves reading, not memory."
    )
    shown = rows.sort_values(["keep", "cosine"], ascending=False)
    return Answer([sentence], shown, keys, table="compress")


def runs_on(rule: str, split: str) -> str:
    """Where a compressed cache can run."""
    if ":reweight" in rule:
        return "attention that takes a weight for each kept key"
    if split in ("uniform", "pages"):
        return ANY_CACHE
    return "a cache whose heads hold different numbers of keys"


def model_name(run: Run) -> str:
    """The model as a command takes it."""
    name = str(run.spec.get("model") or "packaged")
    return "minilm" if name == "packaged" else name


def text_flags(run: Run) -> str:
    """The text of a run as flags, with a space before each; none for packaged prose."""
    corpus = run.spec.get("corpus") or {}
    named = [("--text", name) for name in corpus.get("text") or ()]
    named += [(f"--{key}", corpus.get(key)) for key in ("dataset", "field")]
    if corpus.get("packaged") not in (None, "prose"):
        named.append(("--packaged", corpus["packaged"]))
    return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in named if value)


def same_flags(run: Run, *names: str) -> str:
    """These settings of a run as flags, with a space before each, where the run has them."""
    told = {**(run.spec.get("corpus") or {}), **run.spec}
    found = ((name.replace("_", "-"), told.get(name)) for name in names)
    return "".join(
        f" --{name} {','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for name, value in found
        if value is not None
    )


def compress_command(run: Run, rule: str, kl: float) -> str:
    """The command that builds and measures a cache by a rule, on the model, text and layers of a
    probe, and by the rule of es.compress beside it. Prompt and answer fill a window of the probe.
    """
    rules = " ".join(f"--rules {name}" for name in dict.fromkeys((rule, REFITTED)))
    length = int(run.table("about")["window"].iloc[0])
    model, decoded = shlex.quote(model_name(run)), max(length // 8, 1)
    place = f"{text_flags(run)}{same_flags(run, 'layers')}"
    window = f" --window {length - decoded} --decode {decoded}"
    return f"esscher compress {model}{place}{window} --kl {kl:g} {rules}"


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
    table = ""
    if len(found.rows):
        columns = run.columns(found.table)
        labels = {key: columns[key].header for key in found.keys if key in columns}
        shown = found.rows[list(found.keys)].head(8).rename(columns=labels)
        table = shown.to_html(index=False, float_format="{:.3g}".format, border=0, escape=True)
    return f'<div class="esscher-run">{lines}{table}</div>'


SHORT = {  # columns of short tables, the first six that there are
    "budget": ("rule", "ratio", "nats", "where", "uniform", "error", "worst_head", "worst"),
    "rates": (
        *("value", "covariance", "against", "metric", "exponent", "exact_exponent", "sharp"),
        "status",
    ),
    "final": ("covariance", "length", "seed", "model", "mse", "status", "stderr"),
    "verdict": ("covariance", "length", "starts", "softmax", "linear", "p"),
    "heads": ("layer", "head", "regime", "tokens_needed_10pct", "beta_fit", "effective_tokens"),
    "compress": (
        *("rule", "split", "share", "kl", "kl_predicted", "needle", "loss_added", "agreement"),
        *("needle_several", "needle_distractor", "cosine", "error"),
    ),
}


def short_columns(rows: Any, table: str) -> list[str]:
    return [key for key in SHORT[table] if key in rows and rows[key].notna().any()][:6]


def _summary(run: Run) -> list[str]:
    job, is_probe = run.manifest.job, run.manifest.job == "probe"
    title = model_name(run) if is_probe else str(run.spec.get("title") or job)
    lines = [f"{shortened(title, 120)} · {job}, {run.status}", *warnings_of(run)]
    try:
        lines += answer_of(run).sentences
    except RunError as damage:  # a notebook must still show which run it is
        lines.append(shortened(str(damage)))
    tables = sorted(run.manifest.tables.items())
    lines.append("tables: " + (", ".join(f"{name} ({n:,})" for name, n in tables) or "none yet"))
    return [*lines, shortened(str(run.path), 200)]
