"""A probe of several kinds of text, or of pools of several sizes: a run for each in one folder,
side by side, with ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esscher.cli.options import Given
from esscher.cli.output import log, number, print_json
from esscher.cli.tables import Form, Shown, count, same_form, show_table, shown

if TYPE_CHECKING:
    import pandas as pd

    from esscher.models.probe.context import ProbeContext
    from esscher.models.probe.spec import ProbeSpec
    from esscher.runs import Run

__all__ = [
    "check_group",
    "domain_specs",
    "group_path",
    "probe_domains",
    "resume_domains",
    "size_specs",
]

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
    from esscher.models.probe.spec import ProbeSpec
    from esscher.runs.group import check_name

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
    from esscher.models.probe.spec import ProbeSpec

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
    from esscher.models.probe.asked import check_asked
    from esscher.models.probe.context import plan_context

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
    from esscher.models.probe.api import run_folder

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
    from esscher.models.probe.api import check_measured
    from esscher.models.probe.memory import context_of

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
    from esscher.models.probe.spec import ProbeSpec

    specs = {name: ProbeSpec.read(dict(of)) for name, of in fields.items()}
    probe_domains(specs, path, where, page=True, as_json=as_json)


def _compare(
    found: Mapping[str, Run], path: Path, *, page: bool, as_json: bool, look: Given
) -> None:
    import pyarrow as pa

    from esscher.models.probe.domains import DOMAIN_COLUMNS, RANK_COLUMNS, compare_domains
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

    from esscher.models.probe.pool_sizes import SIZE_COLUMNS, compare_sizes
    from esscher.report.endless import save_pool_sizes
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
    from esscher.models.probe.pool_sizes import SIZE_COLUMNS

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
