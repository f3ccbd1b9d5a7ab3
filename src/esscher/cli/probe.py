"""``esscher probe``: every head of a model, measured on text."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import (
    MEASURED,
    MOST_WORKERS,
    OUTPUT,
    PLACE,
    SIZE,
    TEXT,
    WINDOW,
    All,
    Dask,
    Markdown,
    Sort,
    Top,
    given,
    option,
)
from esscher.cli.output import (
    MODEL,
    Json,
    Out,
    Report,
    as_path,
    brief,
    log,
    path_option,
    print_json,
    say,
    show,
    show_tables,
)
from esscher.corpus.spec import CorpusSpec
from esscher.probe.spec import FLOOR, KEYS, ProbeSpec

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.session import Session
    from esscher.runs import Run

PLACES = 7  # digits of the number of a layer, a head or a token
MOST_THREADS = 8  # of one process: more of them wait for each other
PERCENT = "10"  # error that the summary speaks of
TABLES = ("heads", "budget", "layers", "agreement", "about")
HEADS = [
    "layer",
    "head",
    "regime",
    "tokens_needed_10pct",
    "beta_fit",
    "effective_tokens",
    "coupling",
]
RULES = ["rule", "chosen", "ratio", "worst_head", "worst", "worst_layer"]


def probe(
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    text: Annotated[list[str] | None, option(CorpusSpec, "text", TEXT)] = None,
    dataset: Annotated[str | None, option(CorpusSpec, "dataset", TEXT)] = None,
    split: Annotated[str | None, option(CorpusSpec, "split", TEXT)] = None,
    field: Annotated[str | None, option(CorpusSpec, "field", TEXT)] = None,
    packaged: Annotated[str | None, option(CorpusSpec, "packaged", TEXT)] = None,
    encoding: Annotated[str | None, option(CorpusSpec, "encoding", TEXT)] = None,
    separate: Annotated[
        bool,
        typer.Option("--separate", help="Let no window cross documents.", rich_help_panel=TEXT),
    ] = False,
    layers: Annotated[str | None, option(ProbeSpec, "layers", MEASURED)] = None,
    heads: Annotated[str | None, option(ProbeSpec, "heads", MEASURED)] = None,
    pool: Annotated[str | None, option(ProbeSpec, "pool", MEASURED)] = None,
    rules: Annotated[
        list[str] | None, option(ProbeSpec, "rules", MEASURED, default="ten of them")
    ] = None,
    epsilons: Annotated[
        list[float] | None, option(ProbeSpec, "epsilons", MEASURED, "--epsilon", "0.05, 0.1, 0.2")
    ] = None,
    fit: Annotated[str | None, option(ProbeSpec, "fit", MEASURED)] = None,
    moments: Annotated[int | None, option(ProbeSpec, "moments", MEASURED)] = None,
    scales: Annotated[str | None, option(ProbeSpec, "scales", MEASURED, "--scale")] = None,
    temperature: Annotated[str | None, option(ProbeSpec, "temperature", MEASURED)] = None,
    planted: Annotated[int | None, option(ProbeSpec, "planted", MEASURED)] = None,
    special: Annotated[bool, option(ProbeSpec, "special", MEASURED)] = False,
    max_tokens: Annotated[
        int | None, option(CorpusSpec, "max_tokens", SIZE, default="16384, 0 takes all")
    ] = None,
    window: Annotated[int | None, option(ProbeSpec, "window", SIZE, default=WINDOW)] = None,
    queries: Annotated[int | None, option(ProbeSpec, "queries", SIZE)] = None,
    kept_queries: Annotated[int | None, option(ProbeSpec, "kept_queries", SIZE)] = None,
    limit: Annotated[int | None, option(CorpusSpec, "limit", SIZE)] = None,
    positions: Annotated[
        str | None, option(ProbeSpec, "positions", SIZE, default="at each quarter")
    ] = None,
    observe: Annotated[int | None, option(ProbeSpec, "observe", SIZE)] = None,
    decode: Annotated[int | None, option(ProbeSpec, "decode", SIZE)] = None,
    n: Annotated[str | None, option(ProbeSpec, "n", SIZE)] = None,
    moments_n: Annotated[str | None, option(ProbeSpec, "moments_n", SIZE)] = None,
    part: Annotated[int | None, option(ProbeSpec, "part", SIZE)] = None,
    out: Out = None,
    everything: All = False,
    as_json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print time and memory, and stop.", rich_help_panel=OUTPUT),
    ] = False,
    report: Report = True,
    top: Top = None,
    sort: Sort = None,
    markdown: Markdown = False,
    config: Annotated[
        Path | None, path_option("--config", "YAML file of these settings; flags override it.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of local processes (default: this process, one thread per core).",
            min=1,
            max=MOST_WORKERS,
            rich_help_panel=PLACE,
        ),
    ] = None,
    dask: Dask = None,
    threads: Annotated[
        int | None, option(ProbeSpec, "threads", PLACE, default="one per core without --workers")
    ] = None,
    device: Annotated[str | None, option(ProbeSpec, "device", PLACE)] = None,
    dtype: Annotated[str | None, option(ProbeSpec, "dtype", PLACE)] = None,
    seed: Annotated[int | None, option(ProbeSpec, "seed", PLACE)] = None,
    revision: Annotated[str | None, option(ProbeSpec, "revision", PLACE)] = None,
) -> None:
    """Measure every head of a model on text: its error at n keys, its rate, and the keys it needs.

    Example: esscher probe --text book.txt --max-tokens 100000 --workers 2
    """
    flags = given(locals())
    from esscher.corpus.documents import check_text
    from esscher.hf.checkpoint import as_read
    from esscher.probe.job import LEFT_OPEN, open_probe, run_folder, too_few_keys
    from esscher.runs import execute, terminal
    from esscher.runs.progress import cores
    from esscher.runs.run import refuse_foreign

    fields = read_flags(flags)
    where: dict[str, Any] = {"workers": workers or 1, "dask": dask}
    if workers is None and dask is None:  # threads beat processes here, and share one model
        fields.setdefault("threads", min(cores(), MOST_THREADS))
    if out is not None and not dry_run:
        refuse_foreign(out)
    if "-" in fields["corpus"].get("text", ()) and not dry_run:
        out = _keep_stdin(fields["corpus"], out)
    spec = ProbeSpec.read(fields)
    if dry_run:
        check_text(spec.corpus)
        from esscher.cli.describe import describe_run

        return describe_run(spec, as_json)
    if out is not None:
        refuse_foreign(out, spec, LEFT_OPEN)
    if sys.stderr.isatty():  # in a log a mistake is one line, with nothing before it
        log(f"reading {as_read(spec.model)} and the text")
    context = open_probe(spec)
    path = out if out is not None else run_folder(context)
    log(f"{context.loaded.name}: {len(context.layers)} layers, {_pool(context)}; run {path}")
    if (few := too_few_keys(context)) is not None:
        log(f"note: {few}")
    run = execute(context.spec, path, **where, progress=terminal(), opened=context)
    end_probe(run, as_json, flags)


def read_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the spec: flags before the file --config, the file before the defaults."""
    from esscher.hf.checkpoint import written
    from esscher.runs.spec import read_mapping

    found = read_mapping(flags["config"]) if "config" in flags else {}
    in_file = found.get("corpus", {})
    if not isinstance(in_file, dict):
        raise ValueError(
            f"{flags['config']}: corpus: expected a mapping of fields, got {type(in_file).__name__}"
        )
    own = given(flags, ProbeSpec)
    corpus = {key: value for key, value in given(flags, CorpusSpec).items() if key != "special"}
    if "model" in own:
        own["model"] = written(own["model"])
    for name in ("layers", "heads", "positions"):
        if name in own:
            own[name] = place_numbers(own[name], f"--{name}")
    if "text" in corpus:
        corpus["text"] = [name if name == "-" else absolute(name) for name in corpus["text"]]
    if "separate" in flags:
        corpus["documents"] = "separate"
    if (most := corpus.get("max_tokens")) is not None and most <= 0:
        if most < 0:
            raise ValueError(f"--max-tokens: expected a whole number from 0 (all) on, got {most}")
        corpus["max_tokens"] = None
    return {**found, **own, "corpus": {"max_tokens": KEYS, **in_file, **corpus}}


def absolute(name: str) -> str:
    """The absolute path of a file: a run may be resumed from another folder."""
    return os.path.abspath(os.path.expanduser(as_path(name)))


def place_numbers(text: str, flag: str) -> list[int]:
    """0,2-4 as [0, 2, 3, 4]."""

    def usable(part: str) -> bool:
        return part.isascii() and part.isdigit() and len(part) <= PLACES

    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not usable(first) or (dash and (not usable(last) or int(last) < int(first))):
            raise ValueError(
                f"{flag}: expected numbers such as 0,2-4, below {10**PLACES}, got {text!r}"
            )
        found += range(int(first), int(last if dash else first) + 1)
    return found


def _keep_stdin(corpus: dict[str, Any], out: Path | None) -> Path:
    """Write what came on stdin into the run's folder, since a run may need it again; its folder."""
    from esscher.runs.store import write_durable

    data = sys.stdin.buffer.read()
    if not data.strip():
        raise ValueError("--text -: standard input is empty; pipe text into the command")
    digest = hashlib.sha256(data).hexdigest()
    folder = out if out is not None else Path("runs") / f"stdin-{digest[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    # hidden: a run begins in an empty folder; other text is another spec
    path = folder / f".stdin-{digest[:16]}.txt"
    write_durable(path, data)
    corpus["text"] = [str(path.absolute()) if name == "-" else name for name in corpus["text"]]
    return folder


def _pool(context: Session) -> str:
    """Which keys queries meet, and how many."""
    import numpy as np

    queries = f"{len(context.queries)} queries"
    if context.spec.pool == "corpus":
        return f"{queries} over {context.keys} keys of the corpus"
    seen = np.concatenate([context.seen_keys(layer) for layer in context.layers])
    keys = f"{seen.min()} to {seen.max()} keys" if seen.min() < seen.max() else f"{seen.max()} keys"
    windows = len(np.unique(context.queries.windows))
    return (
        f"{queries}, each over all it attends to in its own window: {keys}, {windows} windows of"
        f" {context.windows.length}"
    )


# ---- The end of a probe.


def end_probe(run: Run, as_json: bool, flags: Mapping[str, Any] | None = None) -> None:
    """Write the page of a finished probe, and print what was found."""
    from esscher.probe.job import check_measured
    from esscher.report import write_report

    flags = flags or {"report": True}
    check_measured(run)
    page = write_report([run]) if flags.get("report") else None
    if as_json:
        tables = {name: run.table(name).to_dict("records") for name in TABLES if name in run.tables}
        about = {"run": str(run.path), "report": None if page is None else str(page)}
        return print_json({**about, "spec": run.spec, **tables})
    for sentence in _summary(run):
        say(sentence)
    if flags.get("everything"):
        show_tables(run, TABLES, flags)
    else:
        title, rows, columns = _short_table(run)
        show(title, rows, columns, brief(flags))
    say(f"Next: {_next(run)}")
    _log_failures(run.table("heads"))
    if page is not None:
        log(f"report: {page}")


def _summary(run: Run) -> Iterator[str]:
    """What was measured, and which heads need most and least."""
    from esscher.probe.session import measured_part
    from esscher.report.words import need, need_column, ranked_heads

    heads, about = run.table("heads"), run.table("about").iloc[0]
    measured, own = heads[heads["status"] == "ok"], about["pool"] == "sequence"
    kinds = "kind" if "kind" in measured and measured["kind"].any() else "regime"
    told = ", ".join(f"{count} {word}" for word, count in Counter(measured[kinds]).most_common())
    difference = about["output_difference"] if own else about["parity"]
    yield (
        f"{about['model']} on {about['text']}: {measured_part(run)} ({told}); outputs match the"
        f" model to {difference:.0e}."
    )
    rows = ranked_heads(measured, need_column(measured, PERCENT)).to_dict("records")
    if rows:
        most, least = (
            f"{row['layer']}.{row['head']} ({need(row, PERCENT, own=own)})"
            for row in (rows[-1], rows[0])
        )
        yield f"Most needed for an error of {PERCENT} %: {most}; least: {least}."


def _short_table(run: Run) -> tuple[str, pd.DataFrame, Any]:
    """Keep rules by the share of the cache they need; without rules the most demanding heads."""
    from esscher.report.words import need_column, ranked_heads

    if "frontier" in run.tables:
        return "share of the cache for an error of 10 %, best split between heads", *_rules(run)
    heads = run.table("heads")
    order = ranked_heads(heads, need_column(heads, PERCENT))[::-1]
    ends = [end for key in HEADS for end in run.columns("heads")[key].ends or ()]
    return "most demanding heads", order[HEADS + ends], run.columns("heads")


def _rules(run: Run) -> tuple[pd.DataFrame, Any]:
    """Totals of the rules at an error of 10 % in their best split, the smallest cache first."""
    totals = run.table("budget")
    best = totals[(totals["epsilon"] == 0.1) & (totals["split"] == "best split")]
    best = best[best["rule"] != FLOOR].sort_values(["chosen", "ratio"], ascending=[False, True])
    return best[RULES], run.columns("budget")


def _next(run: Run) -> str:
    """The command to type next."""
    if "frontier" in run.tables:
        rules = _rules(run)[0]
        once = rules[rules["chosen"] == "once"]
        if len(once):
            return f"esscher budget {run.path} --rule {once['rule'].iloc[0]}"
        return f"esscher budget {run.path}"
    if run.spec.get("pool") == "sequence":
        return "leave --rules none out, to compare keep rules"
    return "esscher probe --pool sequence, for the keys that each query needs of its own context"


def _log_failures(heads: pd.DataFrame) -> None:
    """Why heads were not measured, and what was left out of those that were."""
    fine = heads["status"] == "ok"
    notes = heads.loc[fine & (heads["reason"] != ""), "reason"].value_counts(sort=False)
    for note, count in notes.items():
        log(f"{count} of {len(heads)} heads: {note}")
    for row in heads[~fine].to_dict("records"):
        log(f"layer {row['layer']} head {row['head']}: {row['status']}, {row['reason']}")
