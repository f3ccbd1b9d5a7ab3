"""``esscher probe``: every head of a model, measured on text."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.describe import describe_run
from esscher.cli.domains import check_group, domain_specs, group_path, probe_domains, size_specs
from esscher.cli.heads_table import show_heads
from esscher.cli.options import EXECUTION, Fields, Given
from esscher.cli.output import MODEL, Json, Out, as_path, log, path_option, print_json
from esscher.cli.tables import Look

if TYPE_CHECKING:
    from esscher.models.probe.context import ProbeContext
    from esscher.runs import Run

__all__ = ["absolute", "end_probe", "place_numbers", "probe", "read_fields"]

PLACES = 7  # digits of the number of a layer, a head or a token
MOST_THREADS = 8  # of one process: more of them wait for each other
TEXT = Fields(
    "esscher.models.corpus.spec:CorpusSpec",
    ("text", "dataset", "split", "field", "packaged", "encoding", "max_tokens", "limit"),
    left_out={"max_tokens": "16384, 0 takes all"},
)
MEASURED = Fields(
    "esscher.models.probe.spec:ProbeSpec",
    (
        *(
            "window",
            "pool",
            "positions",
            "special",
            "queries",
            "kept_queries",
            "observe",
            "decode",
            "layers",
            "heads",
            "n",
            "fit",
        ),
        *(
            "epsilons",
            "rules",
            "temperature",
            "planted",
            "scales",
            "moments",
            "moments_n",
            "moments_queries",
            "part",
        ),
        *("revision", "seed", "device", "threads", "dtype"),
    ),
    flags={"epsilons": "epsilon", "scales": "scale"},
    as_text={"temperature": ",", "scales": ","},
    left_out={
        "fit": "64:4096, own contexts 16 to an eighth of their keys",
        "window": "512, or 2048 for a sequence, or what the model takes",
        "rules": "ten of them",
        "positions": "at each quarter",
        "threads": "one a core where no --workers are given",
    },
)
WHERE = Fields(EXECUTION, ("workers", "dask"), left_out={"workers": "this one, a thread a core"})


def probe(
    corpus: Annotated[Given, TEXT],
    settings: Annotated[Given, MEASURED],
    where: Annotated[Given, WHERE],
    look: Look,
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    separate: Annotated[
        bool, typer.Option("--separate", help="No window crosses documents.")
    ] = False,
    domains: Annotated[
        list[str] | None,
        typer.Option(
            "--domain",
            help="Text of a domain, name=file or folder; may be repeated, also beside --packaged.",
        ),
    ] = None,
    pool_sizes: Annotated[
        str | None,
        typer.Option(
            help=(
                "Pools of several sizes of one text, 16384,131072: a run each in one folder,"
                " compared; not --max-tokens."
            )
        ),
    ] = None,
    config: Annotated[
        Path | None, path_option("--config", "YAML file of these settings; flags go before it.")
    ] = None,
    out: Out = None,
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html into the run.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would cost, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure every head of a model on text: how fast it converges, why, and how many tokens it
    needs.

    Several domains, --packaged prose,code or --domain, and several --pool-sizes have a run each in
    one folder, and are compared. --top shows the most demanding heads unless --sort says another
    order.

    Example: esscher probe --text book.txt --max-tokens 100000 --workers 2
    """
    from esscher.models.corpus.documents import check_text
    from esscher.models.huggingface.checkpoint import as_read, written
    from esscher.models.probe.api import LEFT_OPEN, run_folder, too_few_keys
    from esscher.models.probe.memory import context_of
    from esscher.models.probe.spec import ProbeSpec
    from esscher.runs import execute, read_group, terminal
    from esscher.runs.process import cores
    from esscher.runs.survey import refuse_foreign

    if model is not None:
        settings["model"] = written(model)
    if separate:
        corpus["documents"] = "separate"
    fields = read_fields(settings, corpus, config)
    # threads beat processes here, and share one model (docs/runs.md)
    if "workers" not in where and "dask" not in where:
        fields.setdefault("threads", min(cores(), MOST_THREADS))
    if out is not None and not dry_run and read_group(out) is None:
        refuse_foreign(out)
    if "-" in fields["corpus"].get("text", ()) and not dry_run:
        out = _keep_stdin(fields["corpus"], out)
    specs = domain_specs(fields, [_absolute_domain(given) for given in domains or ()])
    sizes = size_specs(fields, pool_sizes)
    if specs and sizes:
        raise ValueError(
            "--pool-sizes: one text in several sizes, and several domains were asked for; ask for"
            " one of the two"
        )
    specs = specs or sizes
    spec = next(iter(specs.values())) if specs else ProbeSpec.read(fields)
    if dry_run:
        check_text(spec.corpus)
        return describe_run(spec, as_json)
    check_group(specs)
    if out is not None and not specs:
        refuse_foreign(out, spec, LEFT_OPEN)
    if sys.stderr.isatty():  # in a log a mistake is one line, with nothing before it
        log(f"reading {as_read(spec.model)} and the text")
    context = context_of(spec, starts=True)
    spec = context.spec
    if specs:
        folder = out if out is not None else group_path(context, specs)
        return probe_domains(specs, folder, where, page=page, as_json=as_json, look=look)
    path = out if out is not None else run_folder(context)
    log(f"{context.loaded.name}: {len(context.layers)} layers, {_pool(context)}; run {path}")
    if (few := too_few_keys(context)) is not None:
        log(f"note: {few}")
    end_probe(execute(spec, path, **where, progress=terminal()), as_json, page=page, look=look)


def end_probe(run: Run, as_json: bool, *, page: bool = True, look: Given | None = None) -> None:
    """What a finished probe leaves: its page, and the tables."""
    from esscher.models.probe.api import check_measured
    from esscher.report import write_report

    check_measured(run)
    report = write_report([run]) if page else None
    if as_json:
        tables = {
            name: run.table(name).to_dict("records")
            for name in ("about", "heads", "layers", "budget", "rule_budget", "agreement", "limits")
            if name in run.tables
        }
        print_json(
            {
                "run": str(run.path),
                "report": None if report is None else str(report),
                "spec": run.spec,
                **tables,
            }
        )
    else:
        show_heads(run, look or {})
        if report is not None:
            log(f"report: {report}")


def _pool(context: ProbeContext) -> str:
    """Which keys queries meet, and how many."""
    import numpy as np

    queries = f"{len(context.places)} queries"
    if context.spec.pool == "corpus":
        return f"{queries} over {context.keys} keys of the corpus"
    windows = np.unique(context.places.windows)
    seen = np.concatenate([context.foreseen(layer) for layer in context.layers])
    keys = f"{seen.min()} to {seen.max()} keys" if seen.min() < seen.max() else f"{seen.max()} keys"
    return (
        f"{queries}, each over all it attends to in its own window: {keys}, {len(windows)} windows"
        f" of {context.windows.length}"
    )


def read_fields(flags: Given, corpus: Given, config: Path | None) -> dict[str, Any]:
    """Fields of the spec: flags before the file, the file before a probe's own amount of text."""
    from esscher.models.probe.spec import KEYS
    from esscher.runs.spec import read_mapping

    found = {} if config is None else read_mapping(config)
    given = found.get("corpus", {})
    if not isinstance(given, dict):
        raise ValueError(
            f"{config}: corpus: expected a mapping of fields, got {type(given).__name__}"
        )
    for name in ("layers", "heads", "positions"):
        if name in flags:
            flags[name] = place_numbers(flags[name], f"--{name}")
    if "text" in corpus:
        corpus["text"] = [name if name == "-" else absolute(name) for name in corpus["text"]]
    if corpus.get("max_tokens", 0) < 0:
        raise ValueError(
            f"--max-tokens: expected a whole number from 0 (all) on, got {corpus['max_tokens']}"
        )
    if corpus.get("max_tokens") == 0:
        corpus["max_tokens"] = None
    return {**found, **flags, "corpus": {"max_tokens": KEYS, **given, **corpus}}


def absolute(name: str) -> str:
    """Whoever resumes the run may stand elsewhere."""
    return os.path.abspath(os.path.expanduser(as_path(name)))


def _absolute_domain(given: str) -> str:
    name, separator, path = given.partition("=")
    return f"{name}={absolute(path)}" if separator and path else given


def place_numbers(text: str, flag: str) -> list[int]:
    """0,2-4 as [0, 2, 3, 4]."""
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not _is_place(first) or (dash and (not _is_place(last) or int(last) < int(first))):
            raise ValueError(
                f"{flag}: expected numbers such as 0,2-4, below {10**PLACES}, got {text!r}"
            )
        found += range(int(first), int(last if dash else first) + 1)
    return found


def _is_place(text: str) -> bool:
    """Whether it may be the number of a layer, a head or a token."""
    return text.isascii() and text.isdigit() and len(text) <= PLACES


def _keep_stdin(corpus: dict[str, Any], out: Path | None) -> Path:
    """Put what came on stdin into the run's folder: it can be read once only, a run may need it
    again.
    """
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
