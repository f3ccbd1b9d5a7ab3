"""``esscher compress``: which keys of a KV cache to keep, and what the model's answers lose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esscher.cli import options
from esscher.cli.options import given, option, run_spec
from esscher.cli.output import end_run, log
from esscher.cli.probe import model_fields
from esscher.compress.spec import CompressSpec
from esscher.corpus.spec import CorpusSpec

if TYPE_CHECKING:
    from esscher.compress.session import Source


def compress(
    model: Annotated[str | None, typer.Argument(help=options.MODEL)] = None,
    text: Annotated[list[str] | None, option(CorpusSpec, "text", options.EVERYDAY)] = None,
    keep: Annotated[str | None, option(CompressSpec, "keep", options.EVERYDAY)] = None,
    kl: Annotated[float | None, option(CompressSpec, "kl", options.EVERYDAY)] = None,
    rules: Annotated[
        list[str] | None, option(CompressSpec, "rules", options.EVERYDAY, default="ten of them")
    ] = None,
    texts: Annotated[int | None, option(CompressSpec, "texts", options.EVERYDAY)] = None,
    window: Annotated[int | None, option(CompressSpec, "window", options.EVERYDAY)] = None,
    out: Annotated[Path | None, options.path_option("--out", options.OUT, options.EVERYDAY)] = None,
    dataset: Annotated[str | None, option(CorpusSpec, "dataset", options.TEXT)] = None,
    split: Annotated[str | None, option(CorpusSpec, "split", options.TEXT)] = None,
    field: Annotated[str | None, option(CorpusSpec, "field", options.TEXT)] = None,
    packaged: Annotated[str | None, option(CorpusSpec, "packaged", options.TEXT)] = None,
    splits: Annotated[list[str] | None, option(CompressSpec, "splits", options.MEASURED)] = None,
    check: Annotated[bool, option(CompressSpec, "check", options.MEASURED)] = False,
    needles: Annotated[int | None, option(CompressSpec, "needles", options.MEASURED)] = None,
    needle_kinds: Annotated[
        list[str] | None, option(CompressSpec, "needle_kinds", options.MEASURED)
    ] = None,
    when: Annotated[str | None, option(CompressSpec, "when", options.MEASURED)] = None,
    layers: Annotated[str | None, option(CompressSpec, "layers", options.MEASURED)] = None,
    sensitivity: Annotated[bool, option(CompressSpec, "sensitivity", options.MEASURED)] = False,
    together: Annotated[bool, option(CompressSpec, "together", options.MEASURED)] = False,
    decode: Annotated[int | None, option(CompressSpec, "decode", options.SIZE)] = None,
    observe: Annotated[int | None, option(CompressSpec, "observe", options.SIZE)] = None,
    again: Annotated[int | None, option(CompressSpec, "again", options.SIZE)] = None,
    replay: Annotated[float | None, option(CompressSpec, "replay", options.SIZE)] = None,
    sinks: Annotated[int | None, option(CompressSpec, "sinks", options.SIZE)] = None,
    recent: Annotated[int | None, option(CompressSpec, "recent", options.SIZE)] = None,
    max_tokens: Annotated[
        int | None, option(CorpusSpec, "max_tokens", options.SIZE, default="all")
    ] = None,
    report: options.Report = True,
    everything: options.All = False,
    as_json: options.Json = False,
    workers: options.Workers = 1,
    dask: options.Dask = None,
    threads: Annotated[int | None, option(CompressSpec, "threads", options.PLACE)] = None,
    device: Annotated[str | None, option(CompressSpec, "device", options.PLACE)] = None,
    dtype: Annotated[str | None, option(CompressSpec, "dtype", options.PLACE)] = None,
    seed: Annotated[int | None, option(CompressSpec, "seed", options.PLACE)] = None,
    revision: Annotated[str | None, option(CompressSpec, "revision", options.PLACE)] = None,
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
    from esscher.probe.job import short_name
    from esscher.runs.run import refuse_foreign

    spec = CompressSpec.read(model_fields(CompressSpec, flags))
    if spec.keep is not None and spec.kl is not None:
        raise ValueError("--keep, --kl: give a size or a loss, not both")
    if out is not None:
        refuse_foreign(out)
    source = source_of(spec, _tell)
    name = f"{short_name(source.loaded.name)}-compress"
    run = run_spec(source.spec, flags, name, opened=source)
    end_run(run, as_json, everything=everything, report=report)


def _tell(source: Source) -> None:
    decoded = f", {source.decode} more decoded" * (source.decode > 0)
    texts = f"{len(source.texts)} prompt{'s' * (len(source.texts) > 1)}"
    log(f"{source.loaded.name}: {texts} of {source.prefill} tokens{decoded}; reading the weights")
