"""``esscher compress``: which keys of a KV cache to keep, and what the model's answers lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import (
    MEASURED,
    PLACE,
    SIZE,
    TEXT,
    All,
    Dask,
    Markdown,
    Sort,
    Top,
    Workers,
    given,
    option,
)
from esscher.cli.output import (
    MODEL,
    ROWS,
    Json,
    Out,
    Report,
    brief,
    log,
    print_json,
    say,
    show,
    show_tables,
)
from esscher.cli.probe import absolute, place_numbers
from esscher.compress.spec import CompressSpec
from esscher.corpus.spec import CorpusSpec

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Run

TABLES = ("compress", "check", "kinds", "layers", "depth", "sensitivity", "together", "about")
SHORT = (
    *("rule", "split", "share", "kl", "kl_predicted", "loss_added", "agreement"),
    *("needle", "cosine", "neighbour", "error"),
)


def compress(
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    text: Annotated[list[str] | None, option(CorpusSpec, "text", TEXT)] = None,
    dataset: Annotated[str | None, option(CorpusSpec, "dataset", TEXT)] = None,
    split: Annotated[str | None, option(CorpusSpec, "split", TEXT)] = None,
    field: Annotated[str | None, option(CorpusSpec, "field", TEXT)] = None,
    packaged: Annotated[str | None, option(CorpusSpec, "packaged", TEXT)] = None,
    encoding: Annotated[str | None, option(CorpusSpec, "encoding", TEXT)] = None,
    keep: Annotated[str | None, option(CompressSpec, "keep", MEASURED)] = None,
    kl: Annotated[float | None, option(CompressSpec, "kl", MEASURED)] = None,
    rules: Annotated[
        list[str] | None, option(CompressSpec, "rules", MEASURED, default="eight of them")
    ] = None,
    splits: Annotated[list[str] | None, option(CompressSpec, "splits", MEASURED)] = None,
    check: Annotated[bool, option(CompressSpec, "check", MEASURED)] = False,
    needles: Annotated[int | None, option(CompressSpec, "needles", MEASURED)] = None,
    when: Annotated[str | None, option(CompressSpec, "when", MEASURED)] = None,
    layers: Annotated[str | None, option(CompressSpec, "layers", MEASURED)] = None,
    heads: Annotated[str | None, option(CompressSpec, "heads", MEASURED)] = None,
    sensitivity: Annotated[bool, option(CompressSpec, "sensitivity", MEASURED)] = False,
    together: Annotated[bool, option(CompressSpec, "together", MEASURED)] = False,
    texts: Annotated[int | None, option(CompressSpec, "texts", SIZE)] = None,
    window: Annotated[int | None, option(CompressSpec, "window", SIZE)] = None,
    decode: Annotated[int | None, option(CompressSpec, "decode", SIZE)] = None,
    draws: Annotated[int | None, option(CompressSpec, "draws", SIZE)] = None,
    observe: Annotated[int | None, option(CompressSpec, "observe", SIZE)] = None,
    sinks: Annotated[int | None, option(CompressSpec, "sinks", SIZE)] = None,
    recent: Annotated[int | None, option(CompressSpec, "recent", SIZE)] = None,
    max_tokens: Annotated[int | None, option(CorpusSpec, "max_tokens", SIZE, default="all")] = None,
    limit: Annotated[int | None, option(CorpusSpec, "limit", SIZE)] = None,
    out: Out = None,
    report: Report = True,
    top: Top = None,
    sort: Sort = None,
    markdown: Markdown = False,
    everything: All = False,
    as_json: Json = False,
    revision: Annotated[str | None, option(CompressSpec, "revision", PLACE)] = None,
    workers: Workers = 1,
    dask: Dask = None,
    threads: Annotated[int | None, option(CompressSpec, "threads", PLACE)] = None,
    device: Annotated[str | None, option(CompressSpec, "device", PLACE)] = None,
    dtype: Annotated[str | None, option(CompressSpec, "dtype", PLACE)] = None,
    seed: Annotated[int | None, option(CompressSpec, "seed", PLACE)] = None,
) -> None:
    """Compress the KV cache of a language model by several rules, and measure what its answers
    lose.

    Each prompt is read in full, its cache is compressed, and the text goes on from the smaller
    cache. KL and loss are in nats per token, against the full model on the same text. The share of
    the cache is keys kept over keys held, summed over layers and key-value heads. For an encoder
    each query keeps a few keys.

    Example: esscher compress smollm2 --text book.txt --keep 0.1,0.2 --rules fisher --rules snapkv
    """
    flags = given(locals())
    from esscher.compress.session import source_of
    from esscher.hf.checkpoint import written
    from esscher.probe.job import short_name
    from esscher.runs import execute, terminal
    from esscher.runs.run import refuse_foreign

    fields, corpus = given(flags, CompressSpec), given(flags, CorpusSpec)
    for name in ("layers", "heads"):
        if name in fields:
            fields[name] = place_numbers(fields[name], f"--{name}")
    if "-" in corpus.get("text", ()):
        raise ValueError(
            "--text -: standard input can be read once, and every text may be needed again; give a"
            " file"
        )
    if "text" in corpus:
        corpus["text"] = [absolute(name) for name in corpus["text"]]
    spec = CompressSpec.read({**fields, "model": written(model), "corpus": corpus})
    if spec.keep is not None and spec.kl is not None:
        raise ValueError("--keep, --kl: give a size or a loss, not both")
    if out is not None:
        refuse_foreign(out, spec, {"when": "auto"})
    source = source_of(spec)
    name = f"{short_name(source.loaded.name)}-compress-{source.spec.hash[:8]}"
    path = out if out is not None else Path("runs") / name
    log(
        f"{source.loaded.name}: {len(source.texts)} prompts of {source.prefill} tokens,"
        f" {source.decode} more decoded; run {path}"
    )
    where: dict[str, Any] = {"workers": workers, "dask": dask, "progress": terminal()}
    run = execute(source.spec, path, **where, opened=source)
    end_compress(run, as_json, flags)


def end_compress(run: Run, as_json: bool, flags: Mapping[str, Any] | None = None) -> None:
    """Write the page of a finished run, and print what was found."""
    from esscher.report import write_report
    from esscher.report.compress import save_check

    flags = flags or {"report": True}
    page = write_report([run]) if flags.get("report") else None
    figure = None
    if flags.get("report") and "check" in run.tables:
        figure = save_check(run, run.path / "check.svg")
    if as_json:
        tables = {name: run.table(name).to_dict("records") for name in TABLES if name in run.tables}
        about = {"run": str(run.path), "report": None if page is None else str(page)}
        return print_json({**about, "spec": run.spec, "rows": tables.pop("compress"), **tables})
    rows = run.table("compress")
    for sentence in summary(run):
        say(sentence)
    if flags.get("everything"):
        show_tables(run, TABLES, flags)
    else:
        columns = run.columns("compress")
        keys = [key for key in SHORT if key in rows and rows[key].notna().any()]
        ends = [end for key in ("kl", "needle") if key in keys for end in columns[key].ends or ()]
        order = rows[rows["rule"] != "full"].sort_values(["keep", keys[3]], kind="stable")
        sizes = max(1, order["keep"].nunique())
        order = order.groupby("keep", sort=False, dropna=False).head(max(2, ROWS // sizes))
        show("means over the texts", order[keys + ends], columns, brief(flags))
        if "check" in run.tables:
            whole = {"markdown": flags.get("markdown")}
            show("predicted and measured", run.table("check"), run.columns("check"), whole)
    if figure is not None:
        log(f"figure: {figure}")
    if page is not None:
        log(f"report: {page}")


def summary(run: Run) -> Iterator[str]:
    """The best rule at each size, and what it costs."""
    about, rows = run.table("about").iloc[0], run.table("compress")
    rows = rows[rows["rule"] != "full"]
    yield (
        f"{about['model']}, {about['texts']} texts of {about['window']} tokens of {about['text']}."
    )
    if "kl" not in rows:
        return
    for keep, own in rows.groupby("keep", dropna=False):
        best = own.loc[own["kl"].idxmin()]
        loss = f", loss {best['loss_added']:+.3f}" if "loss_added" in best else ""
        size = "" if keep == keep else f" (asked for {run.spec['kl']:g} nats)"
        yield (
            f"Keeping {best['share']:.1%} of the cache{size} costs {_interval(best)} nats per token"
            f" with {best['rule']}{loss}."
        )
    if "check" in run.tables:
        yield from _agreement(run.table("check"))


def _agreement(check: pd.DataFrame) -> Iterator[str]:
    """How predicted and measured divergence agree where the second order holds."""
    own = check[check["second_order"] & (check["kl"] > 0) & check["ratio"].notna()]
    if len(own) > 2:
        ratio, rank = own["ratio"], own["kl"].corr(own["kl_predicted"], method="spearman")
        yield (
            f"Predicted at most 0.2 nats, {len(own)} caches: measured over predicted"
            f" {ratio.median():.2f} (median), {ratio.quantile(0.05):.2f} to"
            f" {ratio.quantile(0.95):.2f} (90 %), rank correlation {rank:.2f}."
        )


def _interval(row: pd.Series[Any]) -> str:
    low, high = row["kl_low"], row["kl_high"]
    return f"{row['kl']:.3g}" + (f" [{low:.3g}, {high:.3g}]" if low == low else "")
