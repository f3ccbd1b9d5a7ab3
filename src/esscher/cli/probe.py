"""``esscher probe``: every head of a model, measured on text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import (
    EVERYDAY,
    MEASURED,
    MOST_WORKERS,
    PLACE,
    SIZE,
    TEXT,
    WINDOW,
    All,
    Dask,
    given,
    option,
)
from esscher.cli.output import (
    MODEL,
    OUT,
    Json,
    Report,
    as_path,
    close,
    log,
    path_option,
    print_run,
    show_tables,
)
from esscher.corpus.spec import CorpusSpec
from esscher.probe.spec import KEYS, ProbeSpec

if TYPE_CHECKING:
    from esscher.runs import Run

PLACES = 7  # digits of the number of a layer, a head or a token
MOST_THREADS = 8  # of one process: more of them wait for each other
TABLES = ("heads", "budget", "layers", "about")


def probe(
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    text: Annotated[list[str] | None, option(CorpusSpec, "text", EVERYDAY)] = None,
    max_tokens: Annotated[
        int | None, option(CorpusSpec, "max_tokens", EVERYDAY, default="16384, 0 takes all")
    ] = None,
    window: Annotated[int | None, option(ProbeSpec, "window", EVERYDAY, default=WINDOW)] = None,
    layers: Annotated[str | None, option(ProbeSpec, "layers", EVERYDAY)] = None,
    heads: Annotated[str | None, option(ProbeSpec, "heads", EVERYDAY)] = None,
    pool: Annotated[str | None, option(ProbeSpec, "pool", EVERYDAY)] = None,
    rules: Annotated[
        list[str] | None, option(ProbeSpec, "rules", EVERYDAY, default="ten of them")
    ] = None,
    out: Annotated[Path | None, path_option("--out", OUT, EVERYDAY)] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of local processes (default: this process, one thread per core).",
            min=1,
            max=MOST_WORKERS,
            rich_help_panel=EVERYDAY,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print time and memory, and stop.", rich_help_panel=EVERYDAY
        ),
    ] = False,
    dataset: Annotated[str | None, option(CorpusSpec, "dataset", TEXT)] = None,
    split: Annotated[str | None, option(CorpusSpec, "split", TEXT)] = None,
    field: Annotated[str | None, option(CorpusSpec, "field", TEXT)] = None,
    packaged: Annotated[str | None, option(CorpusSpec, "packaged", TEXT)] = None,
    encoding: Annotated[str | None, option(CorpusSpec, "encoding", TEXT)] = None,
    epsilons: Annotated[
        list[float] | None, option(ProbeSpec, "epsilons", MEASURED, "--epsilon", "0.05, 0.1, 0.2")
    ] = None,
    fit: Annotated[str | None, option(ProbeSpec, "fit", MEASURED)] = None,
    moments: Annotated[int | None, option(ProbeSpec, "moments", MEASURED)] = None,
    scales: Annotated[str | None, option(ProbeSpec, "scales", MEASURED, "--scale")] = None,
    queries: Annotated[int | None, option(ProbeSpec, "queries", SIZE)] = None,
    kept_queries: Annotated[int | None, option(ProbeSpec, "kept_queries", SIZE)] = None,
    positions: Annotated[
        str | None, option(ProbeSpec, "positions", SIZE, default="at each quarter")
    ] = None,
    observe: Annotated[int | None, option(ProbeSpec, "observe", SIZE)] = None,
    decode: Annotated[int | None, option(ProbeSpec, "decode", SIZE)] = None,
    n: Annotated[str | None, option(ProbeSpec, "n", SIZE)] = None,
    part: Annotated[int | None, option(ProbeSpec, "part", SIZE)] = None,
    everything: All = False,
    as_json: Json = False,
    report: Report = True,
    config: Annotated[
        Path | None,
        path_option("--config", "YAML file of these and all other settings; flags override it."),
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
    from esscher.hf.checkpoint import resolve
    from esscher.probe.job import open_probe, run_folder
    from esscher.runs import execute, terminal
    from esscher.runs.progress import cores
    from esscher.runs.run import refuse_foreign

    fields = _read_flags(flags)
    if workers is None and dask is None:  # threads beat processes here, and share one model
        fields.setdefault("threads", min(cores(), MOST_THREADS))
    spec = ProbeSpec.read(fields)
    if dry_run:
        from esscher.cli.describe import describe_run

        check_text(spec.corpus)
        return describe_run(spec, as_json)
    if out is not None:
        refuse_foreign(out)
    if sys.stderr.isatty():  # in a log a mistake is one line, with nothing before it
        log(f"reading the model {resolve(spec.model).shown} and the text")
    context = open_probe(spec)
    path = out if out is not None else run_folder(context)
    keys = f"{context.keys} keys of the corpus"
    if context.spec.pool == "sequence":
        keys = f"their own contexts in windows of {context.windows.length} tokens"
    counts = f"{len(context.layers)} layers, {len(context.queries)} queries"
    log(f"{context.loaded.name}: {counts} over {keys}; run {path}")
    log(_first_look(context))
    where: dict[str, Any] = {"workers": workers or 1, "dask": dask, "progress": terminal()}
    run = execute(context.spec, path, **where, opened=context)
    end_probe(run, as_json, flags)


def _first_look(session: Any) -> str:
    """A line about attention in the first tokens, before anything is measured."""
    from esscher.probe.pools import first_look

    rows = first_look(session)
    few, many = (pick(rows, key=lambda row: row["effective keys"]) for pick in (min, max))
    told = (f"{row['effective keys']:.2g} keys in layer {row['layer']}" for row in (few, many))
    middle = rows[len(rows) // 2]
    return (
        f"first look, 256 tokens: the median head spreads over {' and '.join(told)}; the first key"
        f" gets {middle['on the first key']} of the weight in layer {middle['layer']}"
    )


def _read_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
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
    corpus = given(flags, CorpusSpec)
    if "model" in own:
        own["model"] = written(own["model"])
    for name in ("layers", "heads", "positions"):
        if name in own:
            own[name] = place_numbers(own[name], f"--{name}")
    if "text" in corpus:
        corpus["text"] = [absolute(name) for name in corpus["text"]]
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
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        ends = [first, last if dash else first]
        usable = all(end.isascii() and end.isdigit() and len(end) <= PLACES for end in ends)
        if not usable or int(ends[1]) < int(ends[0]):
            raise ValueError(
                f"{flag}: expected numbers such as 0,2-4, below {10**PLACES}, got {text!r}"
            )
        found += range(int(ends[0]), int(ends[1]) + 1)
    return found


# ---- The end of a probe.


def end_probe(run: Run, as_json: bool, flags: Mapping[str, Any] | None = None) -> None:
    """Write the page of a finished probe, and print what was found."""
    from esscher.probe.job import check_measured
    from esscher.report import write_report
    from esscher.report.words import answer_of, short_columns

    flags = flags or {"report": True}
    check_measured(run)
    page = write_report([run]) if flags.get("report") else None
    if as_json:
        return print_run(run, TABLES, report=None if page is None else str(page))
    heads, about = run.table("heads"), run.table("about").iloc[0]
    apart = about["output_difference" if about["pool"] == "sequence" else "parity"]
    log(f"check: outputs of attention match the model's to {apart:.0e}")
    notes = heads[heads["reason"] != ""].groupby(["status", "reason"], sort=False).size()
    for (status, reason), count in notes.items():
        log(f"{count} of {len(heads)} heads: {'' if status == 'ok' else f'{status}, '}{reason}")
    if flags.get("everything"):
        show_tables(run, TABLES)
    sentences, rows, table, following = answer_of(run)
    if flags.get("everything"):
        rows = None
    keys = [] if rows is None else short_columns(rows, table)
    close(sentences, rows, keys, run.columns(table), following, page)
