"""``esscher downstream``: what a reader of a model sees when its attention keeps a few keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Execution, Fields, Given
from esscher.cli.output import MODEL, Form, Json, Out, log, print_json, show_table, shown
from esscher.cli.probe import absolute, place_numbers

if TYPE_CHECKING:
    from esscher.runs import Run

TEXT = Fields(
    "esscher.corpus.spec:CorpusSpec",
    ("text", "dataset", "split", "field", "packaged", "encoding", "max_tokens", "limit"),
)
ASKED = Fields(
    "esscher.compress.spec:DownstreamSpec",
    (
        *(
            "rules",
            "sizes",
            "splits",
            "budget",
            "weights",
            "texts",
            "window",
            "decode",
            "when",
            "draws",
            "observe",
            "layers",
            "heads",
        ),
        *(
            "needles",
            "sensitivity",
            "together",
            "depth",
            "revision",
            "seed",
            "device",
            "threads",
            "dtype",
        ),
    ),
    as_text={"sizes": ","},
    left_out={
        "rules": "eight of them",
        "sizes": "0.05,0.1,0.2",
        "splits": "uniform",
        "window": "1024, or 256 for an encoder",
        "max_tokens": "all",
    },
)


def downstream(
    corpus: Annotated[Given, TEXT],
    settings: Annotated[Given, ASKED],
    where: Execution,
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    out: Out = None,
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html into the run.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Keep a few keys for real, and see what the model then says: next tokens, embeddings, labels,
    planted facts.

    A language model reads a text on all keys, keeps a few, and continues; of an encoder every query
    keeps a few. Percentages of the cache are keys kept over keys that the cache holds, summed over
    layers and key-value heads; a sliding-window layer holds at most its window. Rules are compared
    on the same texts: "added" is the loss or KL less the full model's, "behind the best" less that
    of the best rule at the same size.

    Example: esscher downstream smollm2 --text book.txt --rules sinks:4+recent --sizes 0.05,0.1
    """
    from esscher.compress.session import context_of
    from esscher.compress.spec import DownstreamSpec
    from esscher.hf.checkpoint import written
    from esscher.probe.api import short_name
    from esscher.probe.budget import ALIKE
    from esscher.runs import execute, terminal
    from esscher.runs.run import refuse_foreign

    for name in ("layers", "heads"):
        if name in settings:
            settings[name] = place_numbers(settings[name], f"--{name}")
    if "-" in corpus.get("text", ()):
        raise ValueError(
            "--text -: standard input can be read once, and every text may be needed again; give a"
            " file"
        )
    if "text" in corpus:
        corpus["text"] = [absolute(name) for name in corpus["text"]]
    for name in ("budget", "weights"):
        if name in settings and settings[name] != ALIKE:
            settings[name] = absolute(settings[name])
    spec = DownstreamSpec.read({"model": written(model), **settings, "corpus": corpus})
    if out is not None:
        refuse_foreign(out, spec, {"when": "auto"})
    source = context_of(spec, starts=True)
    spec = source.spec
    path = (
        out
        if out is not None
        else Path("runs") / f"{short_name(source.loaded.name)}-downstream-{spec.hash[:8]}"
    )
    log(
        f"{source.loaded.name}: {len(source.texts)} texts of {source.prefill} tokens,"
        f" {source.decode} more decoded; run {path}"
    )
    end_downstream(execute(spec, path, **where, progress=terminal()), as_json, page=page)


def end_downstream(run: Run, as_json: bool, *, page: bool = True) -> None:
    """What a finished run leaves: its page, and the tables."""
    from esscher.report import write_report

    report = write_report([run]) if page else None
    if as_json:
        tables = {
            name: run.table(name).to_dict("records") for name in run.tables if name != "draws"
        }
        print_json(
            {
                "run": str(run.path),
                "report": None if report is None else str(report),
                "spec": run.spec,
                **tables,
            }
        )
        return
    show(run)
    if report is not None:
        log(f"report: {report}")


FORMS: dict[str, dict[str, Form]] = {
    "depth": {"rule": "", "split": "", "layer": "", "exponent": ".3f"},
    "propagation": {
        "rule": "",
        "size": "g",
        "layer": "d",
        "error": ".4f",
        "first_order": ".4f",
        "kl": ".2e",
    },
    "together": {
        **{"rule": "", "size": "g", "text": "d", "layer": "d", "subset": ""},
        **dict.fromkeys(("exact", "measured", "first_order", "independent"), ".4f"),
    },
    "agreement": {
        "rule": "",
        "size": "g",
        "layers": "d",
        "inside": "d",
        "common": "d",
        "apart": ".1e",
        "draws": "d",
    },
    "correlations": {"rule": "", "size": "g", "predictor": "", "rho": ".3f", "heads": "d"},
}
FINAL = "output"


def show(run: Run) -> None:
    """The tables of a run that fit a terminal: means over all texts, exponents of the last word,
    correlations.
    """
    about = run.table("about").iloc[0]
    what = (
        f"{about['model']}, {about['texts']} texts of {about['window']} tokens of {about['text']}"
    )
    _show_readings(run, what)
    for name, forms in FORMS.items():
        if name not in run.tables:
            continue
        rows: list[dict[str, Any]] = run.table(name).to_dict("records")
        if name == "depth":
            rows = [row for row in rows if row["layer"] == FINAL]
        columns = run.columns(name)
        if rows:
            show_table(
                f"{name}: {what}", [shown(columns[key], rows, form) for key, form in forms.items()]
            )


def _show_readings(run: Run, what: str) -> None:
    """A row for each rule, split and share, a column for each reading: means over all texts with
    their intervals; then the loss added to the full model's, and how far behind the best rule of
    the same size, on the same texts.
    """
    columns, table = run.columns("downstream"), run.table("downstream")
    table = table[table["horizon"] == "all"]
    place = ["rule", "split", "size"]
    rows: list[dict[str, Any]] = table.drop_duplicates(place).to_dict("records")
    found = [
        shown(columns[key], rows, form)
        for key, form in {"rule": "", "split": "", "share": ".1%"}.items()
    ]
    compared = []
    for reading, own in table.groupby("reading", sort=False):
        values = {tuple(row[key] for key in place): row for row in own.to_dict("records")}
        blank = dict.fromkeys(table.columns, float("nan"))
        some = [values.get(tuple(row[key] for key in place), blank) for row in rows]
        found.append(replace(shown(columns["value"], some, ".3f"), header=str(reading)))
        for key in ("added", "behind"):
            # the divergence that is added is the divergence; older runs have neither
            if key in own and own[key].notna().any() and (reading, key) != ("kl", "added"):
                header = f"{reading} {columns[key].header}"
                compared.append(
                    replace(shown(columns[key], some, ".3f", gives_way=1), header=header)
                )
    show_table(
        f"readings: {what}; shares of the cache are keys kept over keys held, summed over layers",
        [*found, *compared],
    )
