"""``esscher probe``: every head of a model, measured on text."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.describe import describe_run
from esscher.cli.heads_table import show_heads
from esscher.cli.options import EXECUTION, Fields, Given
from esscher.cli.output import (
    MODEL,
    Form,
    Json,
    Look,
    Out,
    Shown,
    as_path,
    count,
    log,
    number,
    path_option,
    print_json,
    same_form,
    show_table,
    shown,
)

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.session import ProbeContext
    from esscher.probe.spec import ProbeSpec
    from esscher.runs import Run

FORMS: dict[str, Form] = {
    "beta_fit": ".3f",
    "tokens_needed_10pct": count,
    "effective_tokens": count,
    "sink_mass": ".1%",
    "khat": ".2f",
    "coupling": ".3g",
}
MOST_DIGITS = 12  # of the size of a pool
FILLED = 0.95  # of it, by the text: special tokens do not count
BESIDE = ("beta_fit", "tokens_needed_10pct")  # of a head, for every domain; its run has the rest
LAYERS = ("reach", "coordinate_tail")  # of a layer
FIGURE = "pool_sizes.svg"


def domain_specs(fields: Mapping[str, Any], files: Sequence[str]) -> dict[str, ProbeSpec]:
    """The spec of each domain, where there are several: packaged ones, and files as name=path. None
    is the usual probe.
    """
    from esscher.probe.spec import ProbeSpec
    from esscher.runs.folders import check_name

    corpus = dict(fields["corpus"])
    packaged = corpus.get("packaged")
    names = packaged.split(",") if isinstance(packaged, str) else []
    if not files and len(names) < 2:
        return {}
    others = [name for name in ("text", "dataset") if corpus.get(name)]
    if others:
        raise ValueError(
            f"--{others[0]}: one source of text, and several domains were asked for; use --domain"
            " name=path"
        )
    sources: list[tuple[str, dict[str, Any]]] = [
        (name.strip(), {"packaged": name.strip()}) for name in names
    ]
    for given in files:
        name, separator, path = given.partition("=")
        if not separator or not path:
            raise ValueError(f"--domain: expected name=path, got {given!r}")
        sources.append((name, {"text": [path], "packaged": None}))
    if len(sources) < 2:
        raise ValueError(
            "--domain: one domain alone is a probe of --text; give two or more, or --packaged"
            " beside it"
        )
    found: dict[str, ProbeSpec] = {}
    for name, source in sources:
        try:
            check_name(name)
        except ValueError as cause:
            raise ValueError(f"--domain: {cause}") from cause
        if name in found:
            raise ValueError(
                f"--domain: each domain once, got {name!r} twice; give it another name"
            )
        found[name] = ProbeSpec.read({**fields, "corpus": {**corpus, **source}})
    return found


def size_specs(fields: Mapping[str, Any], text: str | None) -> dict[str, ProbeSpec]:
    """The spec of each pool size, named by it, the smallest first; none where none was asked
    for.
    """
    from esscher.probe.spec import ProbeSpec

    if text is None:
        return {}
    parts = [part.strip() for part in text.split(",")]
    if (
        not all(part.isascii() and part.isdigit() and len(part) <= MOST_DIGITS for part in parts)
        or len(set(parts)) < 2
    ):
        raise ValueError(
            "--pool-sizes: expected two or more numbers of tokens such as 16384,131072, got"
            f" {text!r}"
        )
    sizes = sorted({int(part) for part in parts})
    return {
        str(size): ProbeSpec.read({**fields, "corpus": {**fields["corpus"], "max_tokens": size}})
        for size in sizes
    }


def check_group(specs: Mapping[str, ProbeSpec]) -> None:
    """Refuse what a domain, or the text for a pool size, cannot give, before weights are read."""
    from esscher.probe.checks import check_asked
    from esscher.probe.session import plan_context

    for name, spec in specs.items():
        context = plan_context(spec, check_asked)
        if context is not None and name.isdigit():
            _check_size(context, name)


def _check_size(context: ProbeContext, name: str) -> None:
    """Refuse sizes of what is no pool of a corpus, and those that the text does not fill."""
    if context.spec.pool == "sequence":
        raise ValueError(
            "--pool-sizes: a query's own context has the size it has; use --pool corpus, or leave"
            " --pool-sizes out"
        )
    if context.keys < FILLED * int(name):
        raise ValueError(
            f"--pool-sizes: the text has {context.keys} tokens, fewer than {name}; give more text"
            " or smaller sizes"
        )


def group_path(context: ProbeContext, specs: Mapping[str, ProbeSpec]) -> Path:
    """Where the runs go unless told: beside the run of one of them."""
    from esscher.probe.api import run_folder

    digest = hashlib.sha256(" ".join(spec.hash for spec in specs.values()).encode()).hexdigest()
    alone = run_folder(context)
    return alone.with_name(f"{alone.name.rpartition('-')[0]}-domains-{digest[:8]}")


def probe_domains(
    specs: Mapping[str, ProbeSpec],
    path: Path,
    where: Given,
    *,
    page: bool,
    as_json: bool,
    look: Given | None = None,
) -> None:
    """Run every domain that is not finished, then compare them."""
    from esscher import runs
    from esscher.probe.api import check_measured
    from esscher.probe.checks import context_of

    loaded: Any = None
    settled = {}
    for name, spec in specs.items():  # what a domain cannot give is refused before the first is run
        context = context_of(spec, loaded=loaded, starts=True)
        loaded, settled[name] = context.loaded, context.spec
        if name.isdigit():
            _check_size(context, name)
    runs.begin_group(path, settled)
    found: dict[str, Run] = {}
    for name, spec in settled.items():
        context = context_of(spec, loaded=loaded)
        log(f"{name}: {len(context.places)} queries, pool {spec.pool}; run {path / name}")
        found[name] = runs.execute(spec, path / name, **where, progress=runs.terminal())
        check_measured(found[name])
    _compare(found, path, page=page, as_json=as_json, look=look or {})


def resume_domains(
    fields: Mapping[str, Mapping[str, Any]], path: Path, where: Given, *, as_json: bool
) -> None:
    """Complete every run of a group, begun or not, and compare them."""
    from esscher.probe.spec import ProbeSpec

    specs = {name: ProbeSpec.read(dict(of)) for name, of in fields.items()}
    probe_domains(specs, path, where, page=True, as_json=as_json)


def _compare(
    found: Mapping[str, Run], path: Path, *, page: bool, as_json: bool, look: Given
) -> None:
    import pyarrow as pa

    from esscher.probe.agreement import DOMAIN_COLUMNS, RANK_COLUMNS, compare_domains
    from esscher.report import write_report
    from esscher.runs.columns import declare
    from esscher.runs.store import Store

    seed = next(iter(found.values())).spec.get("seed", 0)
    domains, ranks = compare_domains(
        {name: run.table("heads") for name, run in found.items()}, seed
    )
    tables = {"domains": pa.Table.from_pandas(domains), "domain_ranks": pa.Table.from_pandas(ranks)}
    for name, table in declare(
        tables, {"domains": DOMAIN_COLUMNS, "domain_ranks": RANK_COLUMNS}
    ).items():
        Store(path).write_table(name, table, {})
    sizes = _sizes(found, path)
    report = write_report(list(found.values()), group=path) if page else None
    if as_json:
        each = {
            name: {table: run.table(table).to_dict("records") for table in ("heads", "layers")}
            for name, run in found.items()
        }
        compared = {"domains": domains.to_dict("records"), "domain_ranks": ranks.to_dict("records")}
        compared |= {} if sizes is None else {"pool_sizes": sizes.to_dict("records")}
        print_json(
            {
                "run": str(path),
                "report": None if report is None else str(report),
                **compared,
                "runs": each,
            }
        )
        return
    form, first = same_form(look), next(iter(found.values()))
    _show_beside(found, "heads", BESIDE, ["layer", "head"], look)
    _show_beside(found, "layers", LAYERS, ["layer"], form)
    _show_domains(domains, first, form)
    _show_ranks(ranks, first, form)
    if sizes is not None:
        _show_sizes(sizes, first, form)
        log(f"figure: {path / FIGURE}")
    if report is not None:
        log(f"report: {report}")


def _sizes(found: Mapping[str, Run], path: Path) -> pd.DataFrame | None:
    """Pools of one text in several sizes: their comparison, stored, and the figure of their curves;
    None for other groups.
    """
    import pyarrow as pa

    from esscher.probe.agreement import SIZE_COLUMNS, compare_sizes
    from esscher.report.probe import save_pool_sizes
    from esscher.runs.columns import declare
    from esscher.runs.store import Store

    if not all(name.isdigit() for name in found):
        return None
    rows = compare_sizes({int(name): run.table("endless") for name, run in found.items()})
    table = declare({"pool_sizes": pa.Table.from_pandas(rows)}, {"pool_sizes": SIZE_COLUMNS})[
        "pool_sizes"
    ]
    Store(path).write_table("pool_sizes", table, {})
    save_pool_sizes(found, path / FIGURE)
    return rows


def _show_sizes(sizes: pd.DataFrame, run: Run, look: Given) -> None:
    from esscher.probe.agreement import SIZE_COLUMNS

    known, rows = run.columns("heads"), sizes.to_dict("records")
    forms: dict[str, Form] = {
        "pool": count,
        "larger": count,
        "heads": ".0f",
        "covered": ".0%",
        "beyond": ".0%",
        "change": ".3g",
    }
    first = Shown(
        "number",
        tuple(
            known[row["number"]].header if row["number"] in known else row["number"] for row in rows
        ),
        words=True,
    )
    by_key = {column.key: column for column in SIZE_COLUMNS}
    title = "90 % intervals for an endless text from the smallest pool, held against larger pools"
    show_table(
        title, [first, *(shown(by_key[key], rows, form) for key, form in forms.items())], look
    )


def _show_beside(
    found: Mapping[str, Run], table: str, keys: Sequence[str], place: list[str], look: Given
) -> None:
    """Rows of all runs that have them in common, each number once for every domain."""
    frames = {
        name: run.table(table).set_index(place)
        for name, run in found.items()
        if table in run.tables
    }
    if len(frames) < len(found):
        return
    columns = next(iter(found.values())).columns(table)
    common = sorted(set.intersection(*(set(frame.index) for frame in frames.values())))
    places = tuple(".".join(map(str, one if isinstance(one, tuple) else (one,))) for one in common)
    shows = [Shown(place[-1], places, words=True)]
    for key in (key for key in keys if all(key in frame for frame in frames.values())):
        for name, frame in frames.items():
            cells = [{key: value} for value in frame.loc[common, key]]
            own = shown(columns[key], cells, FORMS.get(key, ".3g"))
            shows.append(replace(own, header=f"{own.header}, {name}", key=f"{key}, {name}"))
    show_table(f"{table} by domain: {', '.join(found)}", shows, look)


def _show_domains(domains: pd.DataFrame, run: Run, look: Given) -> None:
    columns = run.columns("heads")
    shows = [Shown("domain", tuple(dict.fromkeys(domains["domain"])), words=True)]
    for key, rows in domains.groupby("measure", sort=False):
        form = FORMS[str(key)]
        cells = tuple(
            "-" if value != value else number(value, form) if isinstance(form, str) else form(value)
            for value in rows["median"]
        )
        shows.append(Shown(columns[str(key)].header, cells))
    show_table("median over heads, by domain", shows, look)


def _show_ranks(ranks: pd.DataFrame, run: Run, look: Given) -> None:
    """A pair of domains a row, a measure a column."""
    columns = run.columns("heads")
    pairs = list(dict.fromkeys(zip(ranks["first"], ranks["second"], strict=True)))
    shows = [Shown("domains", tuple(f"{first}, {second}" for first, second in pairs), words=True)]
    for key, rows in ranks.groupby("measure", sort=False):
        cells = []
        for row in rows.to_dict("records"):
            text = number(row["rho"], ".2f")
            ends = (
                ""
                if row["rho_low"] != row["rho_low"]
                else f" [{row['rho_low']:.2f}, {row['rho_high']:.2f}]"
            )
            change = "" if row["change"] != row["change"] else f", x{row['change']:.2f}"
            cells.append(text + ends + change)
        shows.append(Shown(columns[str(key)].header, tuple(cells)))
    title = (
        "rank correlation of heads between domains, with its 95 % interval, and median of the"
        " second over the first"
    )
    show_table(title, shows, look)


# ---- ``esscher probe``: every head of a model, measured on text.

PLACES = 7  # digits of the number of a layer, a head or a token
MOST_THREADS = 8  # of one process: more of them wait for each other
TEXT = Fields(
    "esscher.corpus.spec:CorpusSpec",
    ("text", "dataset", "split", "field", "packaged", "encoding", "max_tokens", "limit"),
    left_out={"max_tokens": "16384, 0 takes all"},
)
MEASURED = Fields(
    "esscher.probe.spec:ProbeSpec",
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
    from esscher.corpus.documents import check_text
    from esscher.hf.checkpoint import as_read, written
    from esscher.probe.api import LEFT_OPEN, run_folder, too_few_keys
    from esscher.probe.checks import context_of
    from esscher.probe.spec import ProbeSpec
    from esscher.runs import execute, read_group, terminal
    from esscher.runs.folders import refuse_foreign
    from esscher.runs.lock import cores

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
    from esscher.probe.api import check_measured
    from esscher.report import write_report

    check_measured(run)
    report = write_report([run]) if page else None
    if as_json:
        tables = {
            name: run.table(name).to_dict("records")
            for name in ("about", "heads", "layers", "budget", "agreement", "limits")
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
    from esscher.probe.spec import KEYS
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
    from esscher.runs.files import write_durable

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
