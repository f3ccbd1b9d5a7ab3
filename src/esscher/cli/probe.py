"""``esscher probe``: every head of a model, measured on text; ``esscher describe``: a dry run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli import options
from esscher.cli.options import given, option, run_spec, switch
from esscher.cli.output import close, end_run, log, print_json
from esscher.corpus.spec import CorpusSpec
from esscher.probe.spec import KEYS, ProbeSpec

if TYPE_CHECKING:
    from esscher.probe.session import Session
    from esscher.runs import Run, RunSpec

MOST_THREADS = 8  # of one process: more of them wait for each other
FACTS = ("parameters", "head width", "hidden size", "longest sequence", "mask")  # below a sentence
PROCESSES = "Number of local processes (default: this process, one thread per core)."


def probe(
    model: Annotated[str | None, typer.Argument(help=options.MODEL)] = None,
    text: Annotated[list[str] | None, option(CorpusSpec, "text", options.EVERYDAY)] = None,
    max_tokens: Annotated[
        int | None, option(CorpusSpec, "max_tokens", options.EVERYDAY, default="16384, 0 takes all")
    ] = None,
    window: Annotated[
        int | None, option(ProbeSpec, "window", options.EVERYDAY, default=options.WINDOW)
    ] = None,
    layers: Annotated[str | None, option(ProbeSpec, "layers", options.EVERYDAY)] = None,
    heads: Annotated[str | None, option(ProbeSpec, "heads", options.EVERYDAY)] = None,
    pool: Annotated[str | None, option(ProbeSpec, "pool", options.EVERYDAY)] = None,
    rules: Annotated[
        list[str] | None, option(ProbeSpec, "rules", options.EVERYDAY, default="ten of them")
    ] = None,
    out: Annotated[Path | None, options.path_option("--out", options.OUT, options.EVERYDAY)] = None,
    workers: Annotated[
        int | None,
        switch("--workers", PROCESSES, options.EVERYDAY, min=1, max=options.MOST_WORKERS),
    ] = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print time and memory, and stop.", options.EVERYDAY)
    ] = False,
    dataset: Annotated[str | None, option(CorpusSpec, "dataset", options.TEXT)] = None,
    split: Annotated[str | None, option(CorpusSpec, "split", options.TEXT)] = None,
    field: Annotated[str | None, option(CorpusSpec, "field", options.TEXT)] = None,
    packaged: Annotated[str | None, option(CorpusSpec, "packaged", options.TEXT)] = None,
    epsilons: Annotated[
        list[float] | None,
        option(ProbeSpec, "epsilons", options.MEASURED, "--epsilon", "0.05, 0.1, 0.2"),
    ] = None,
    moments: Annotated[int | None, option(ProbeSpec, "moments", options.MEASURED)] = None,
    scales: Annotated[str | None, option(ProbeSpec, "scales", options.MEASURED, "--scale")] = None,
    queries: Annotated[int | None, option(ProbeSpec, "queries", options.SIZE)] = None,
    kept_queries: Annotated[int | None, option(ProbeSpec, "kept_queries", options.SIZE)] = None,
    positions: Annotated[
        str | None, option(ProbeSpec, "positions", options.SIZE, default="at each quarter")
    ] = None,
    n: Annotated[str | None, option(ProbeSpec, "n", options.SIZE)] = None,
    part: Annotated[int | None, option(ProbeSpec, "part", options.SIZE)] = None,
    everything: options.All = False,
    as_json: options.Json = False,
    report: options.Report = True,
    config: Annotated[
        Path | None,
        options.path_option(
            "--config", "YAML file of these and all other settings; flags override it."
        ),
    ] = None,
    dask: options.Dask = None,
    threads: Annotated[
        int | None,
        option(ProbeSpec, "threads", options.PLACE, default="one per core without --workers"),
    ] = None,
    device: Annotated[str | None, option(ProbeSpec, "device", options.PLACE)] = None,
    dtype: Annotated[str | None, option(ProbeSpec, "dtype", options.PLACE)] = None,
    seed: Annotated[int | None, option(ProbeSpec, "seed", options.PLACE)] = None,
    revision: Annotated[str | None, option(ProbeSpec, "revision", options.PLACE)] = None,
) -> None:
    """Measure every head of a model on text: its error at n keys, its rate, and the keys it needs.

    Example: esscher probe --text book.txt --max-tokens 100000 --workers 2
    """
    flags = given(locals())
    from esscher.corpus.documents import check_text
    from esscher.probe.job import open_probe, run_folder
    from esscher.runs.progress import cores
    from esscher.runs.run import refuse_foreign

    fields = model_fields(ProbeSpec, flags, KEYS)
    if workers is None and dask is None:  # threads beat processes here, and share one model
        fields.setdefault("threads", min(cores(), MOST_THREADS))
    spec = ProbeSpec.read(fields)
    if dry_run:
        check_text(spec.corpus)
        return _describe(spec, as_json)
    if out is not None:
        refuse_foreign(out)
    context = open_probe(spec, tell=_tell)
    path = out if out is not None else run_folder(context)
    log(f"run {path}")
    log(_first_look(context))
    run = run_spec(context.spec, flags | {"out": path}, opened=context)
    end_probe(run, as_json, everything=everything, report=report)


def _tell(session: Session) -> None:
    keys = f"{session.keys} keys of the corpus"
    if session.spec.pool == "sequence":
        keys = f"their own contexts in windows of {session.windows.length} tokens"
    layers = f"{len(session.layers)} layer{'s' * (len(session.layers) > 1)}"
    counts = f"{layers}, {len(session.queries)} queries"
    log(f"{session.loaded.name}: {counts} over {keys}; reading the weights")


def _first_look(session: Session) -> str:
    """A line about attention in the first tokens, before anything is measured."""
    from esscher.probe.pools import first_look

    rows = first_look(session)
    few, many = (pick(rows, key=lambda row: row["effective keys"]) for pick in (min, max))
    told = (f"to {row['effective keys']:.2g} keys in layer {row['layer']}" for row in (few, many))
    middle = rows[len(rows) // 2]
    return (
        f"first look, 256 tokens, all layers: the median head attends {' and '.join(told)};"
        f" the first key gets {middle['on the first key']} of the weight in layer {middle['layer']}"
    )


def model_fields(
    spec: type[RunSpec], flags: Mapping[str, Any], max_tokens: int | None = None
) -> dict[str, Any]:
    """Fields of a spec with a model and a corpus: flags before the file --config, the file before
    the defaults. ``max_tokens``: of the corpus, unless told.
    """
    from esscher.hf.checkpoint import written
    from esscher.runs.spec import read_mapping

    found = read_mapping(flags["config"]) if "config" in flags else {}
    in_file = found.get("corpus", {})
    if not isinstance(in_file, dict):
        return found  # the spec refuses it
    own, corpus = given(flags, spec), given(flags, CorpusSpec)
    if "model" in own:
        own["model"] = written(own["model"])
    for name in ("layers", "heads", "positions"):
        if name in own:
            own[name] = place_numbers(own[name], f"--{name}")
    if "text" in corpus:  # absolute: a run may be resumed from another folder
        paths = map(options.as_path, corpus["text"])
        corpus["text"] = [os.path.abspath(os.path.expanduser(path)) for path in paths]
    if corpus.get("max_tokens") == 0:  # all
        corpus["max_tokens"] = None
    return {**found, **own, "corpus": {"max_tokens": max_tokens, **in_file, **corpus}}


def place_numbers(text: str, flag: str) -> list[int]:
    """0,2-4 as [0, 2, 3, 4]."""
    found: list[int] = []
    for piece in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", piece)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(
                f"{flag}: expected numbers such as 0,2-4, below 10000000, got {text!r}"
            )
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return found


def end_probe(run: Run, as_json: bool, **how: Any) -> None:
    """Write the page of a finished probe, and print what was found."""
    from esscher.probe.job import check_measured

    check_measured(run)
    if not as_json:
        heads, about = run.table("heads"), run.table("about").iloc[0]
        apart = about["output_difference" if about["pool"] == "sequence" else "parity"]
        log(f"check: outputs of attention match the model's to {apart:.0e}")
        notes = heads[heads["reason"] != ""].groupby(["status", "reason"], sort=False).size()
        for (status, reason), count in notes.items():
            log(f"{count} of {len(heads)} heads: {'' if status == 'ok' else f'{status}, '}{reason}")
    end_run(run, as_json, **how)


def describe(
    model: Annotated[str, typer.Argument(help=options.MODEL, show_default=False)] = "minilm",
    revision: Annotated[str | None, option(ProbeSpec, "revision")] = None,
    as_json: options.Json = False,
) -> None:
    """Show a model's layers and heads, whether it is supported, and what a probe costs.

    Only the configuration is read. Time and memory are estimates for a probe with default settings
    on this machine. For other settings: esscher probe MODEL ... --dry-run.

    Example: esscher describe openai-community/gpt2
    """
    from esscher.hf.checkpoint import read_config, resolve

    asked = ProbeSpec.read({"model": model, "revision": revision})
    read_config(source := resolve(asked.model), revision)  # a mistake is one line, before this one:
    log(f"{source.shown}: counting what a probe costs")
    _describe(asked, as_json)


def _describe(asked: ProbeSpec, as_json: bool) -> None:
    """Print what a model is, and what a probe of it would cost."""
    from esscher.describe import describe as described

    found = described(asked.model, revision=asked.revision, asked=asked)
    if as_json:
        return print_json({**asdict(found), "heads_in_all": found.heads_in_all})
    facts = found.facts()
    said = [f"{found.name} ({found.family}) is not supported: {found.reason}."]
    if found.supported:
        said = [
            f"{found.name} ({found.family}) is supported: {found.layers} layers with"
            f" {found.heads} heads and {found.kv_heads} key-value heads each."
        ]
    if found.cost is not None:
        said.append("A probe costs {a probe costs}, at {measured here}.".format_map(facts))
    rows = [{"fact": name, "value": facts[name]} for name in FACTS if name in facts]
    following = f"esscher probe {shlex.quote(asked.model)}" if found.supported else ""
    close(said, rows, ("fact", "value"), following, everything=False)
