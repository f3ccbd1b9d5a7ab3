"""``esscher compress``: which keys of a KV cache to keep, and what the model's answers lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import (
    EVERYDAY,
    MEASURED,
    PLACE,
    SIZE,
    TEXT,
    All,
    Dask,
    Workers,
    given,
    option,
)
from esscher.cli.output import (
    MODEL,
    OUT,
    Json,
    Report,
    close,
    log,
    log_files,
    path_option,
    print_run,
    show_tables,
)
from esscher.cli.probe import absolute, place_numbers
from esscher.compress.spec import CompressSpec
from esscher.corpus.spec import CorpusSpec

if TYPE_CHECKING:
    from esscher.runs import Run

TABLES = ("compress", "check", "kinds", "layers", "depth", "sensitivity", "together", "about")


def compress(
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    text: Annotated[list[str] | None, option(CorpusSpec, "text", EVERYDAY)] = None,
    keep: Annotated[str | None, option(CompressSpec, "keep", EVERYDAY)] = None,
    kl: Annotated[float | None, option(CompressSpec, "kl", EVERYDAY)] = None,
    rules: Annotated[
        list[str] | None, option(CompressSpec, "rules", EVERYDAY, default="ten of them")
    ] = None,
    texts: Annotated[int | None, option(CompressSpec, "texts", EVERYDAY)] = None,
    window: Annotated[int | None, option(CompressSpec, "window", EVERYDAY)] = None,
    out: Annotated[Path | None, path_option("--out", OUT, EVERYDAY)] = None,
    dataset: Annotated[str | None, option(CorpusSpec, "dataset", TEXT)] = None,
    split: Annotated[str | None, option(CorpusSpec, "split", TEXT)] = None,
    field: Annotated[str | None, option(CorpusSpec, "field", TEXT)] = None,
    packaged: Annotated[str | None, option(CorpusSpec, "packaged", TEXT)] = None,
    encoding: Annotated[str | None, option(CorpusSpec, "encoding", TEXT)] = None,
    splits: Annotated[list[str] | None, option(CompressSpec, "splits", MEASURED)] = None,
    check: Annotated[bool, option(CompressSpec, "check", MEASURED)] = False,
    needles: Annotated[int | None, option(CompressSpec, "needles", MEASURED)] = None,
    needle_kinds: Annotated[
        list[str] | None, option(CompressSpec, "needle_kinds", MEASURED)
    ] = None,
    when: Annotated[str | None, option(CompressSpec, "when", MEASURED)] = None,
    layers: Annotated[str | None, option(CompressSpec, "layers", MEASURED)] = None,
    heads: Annotated[str | None, option(CompressSpec, "heads", MEASURED)] = None,
    sensitivity: Annotated[bool, option(CompressSpec, "sensitivity", MEASURED)] = False,
    together: Annotated[bool, option(CompressSpec, "together", MEASURED)] = False,
    decode: Annotated[int | None, option(CompressSpec, "decode", SIZE)] = None,
    observe: Annotated[int | None, option(CompressSpec, "observe", SIZE)] = None,
    replay: Annotated[float | None, option(CompressSpec, "replay", SIZE)] = None,
    sinks: Annotated[int | None, option(CompressSpec, "sinks", SIZE)] = None,
    recent: Annotated[int | None, option(CompressSpec, "recent", SIZE)] = None,
    max_tokens: Annotated[int | None, option(CorpusSpec, "max_tokens", SIZE, default="all")] = None,
    report: Report = True,
    everything: All = False,
    as_json: Json = False,
    workers: Workers = 1,
    dask: Dask = None,
    threads: Annotated[int | None, option(CompressSpec, "threads", PLACE)] = None,
    device: Annotated[str | None, option(CompressSpec, "device", PLACE)] = None,
    dtype: Annotated[str | None, option(CompressSpec, "dtype", PLACE)] = None,
    seed: Annotated[int | None, option(CompressSpec, "seed", PLACE)] = None,
    revision: Annotated[str | None, option(CompressSpec, "revision", PLACE)] = None,
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
    if "text" in corpus:
        corpus["text"] = [absolute(name) for name in corpus["text"]]
    spec = CompressSpec.read({**fields, "model": written(model), "corpus": corpus})
    if spec.keep is not None and spec.kl is not None:
        raise ValueError("--keep, --kl: give a size or a loss, not both")
    if out is not None:
        refuse_foreign(out)
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
    from esscher.report.words import answer_of, short_columns

    flags = flags or {"report": True}
    page = write_report([run]) if flags.get("report") else None
    figure = None
    if page is not None and "check" in run.tables:
        figure = save_check(run, run.path / "check.svg")
    if as_json:
        records = run.table("compress").to_dict("records")
        path = None if page is None else str(page)
        return print_run(run, TABLES[1:], report=path, rows=records)
    if flags.get("everything"):
        show_tables(run, TABLES)
    sentences, rows, table, following = answer_of(run)
    if flags.get("everything"):
        rows = None
    log_files("figure", [figure])
    keys = [] if rows is None else short_columns(rows, table)
    close([*sentences, *_checked(run)], rows, keys, run.columns(table), following, page)


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
