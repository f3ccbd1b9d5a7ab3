"""``esscher describe``: a dry run on a model, from its configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import SIZE, WINDOW, given, option
from esscher.cli.output import MODEL, Json, print_json, show
from esscher.corpus.spec import CorpusSpec
from esscher.probe.spec import ProbeSpec

if TYPE_CHECKING:
    from esscher.describe import Cost, ModelDescription


def describe(
    model: Annotated[str, typer.Argument(help=MODEL)] = "minilm",
    revision: Annotated[str | None, option(ProbeSpec, "revision")] = None,
    max_tokens: Annotated[
        int | None, option(CorpusSpec, "max_tokens", SIZE, default="16384")
    ] = None,
    window: Annotated[int | None, option(ProbeSpec, "window", SIZE, default=WINDOW)] = None,
    pool: Annotated[str | None, option(ProbeSpec, "pool", SIZE)] = None,
    queries: Annotated[int | None, option(ProbeSpec, "queries", SIZE)] = None,
    kept_queries: Annotated[int | None, option(ProbeSpec, "kept_queries", SIZE)] = None,
    layers: Annotated[str | None, option(ProbeSpec, "layers", SIZE)] = None,
    heads: Annotated[str | None, option(ProbeSpec, "heads", SIZE)] = None,
    rules: Annotated[
        list[str] | None, option(ProbeSpec, "rules", SIZE, default="ten of them")
    ] = None,
    part: Annotated[int | None, option(ProbeSpec, "part", SIZE)] = None,
    as_json: Json = False,
) -> None:
    """Show a model's layers and heads, whether it is supported, and what a probe costs.

    Only the configuration is read, and of the weights how they are stored. Time and memory are
    those of the probe that the flags ask for: its operations are counted and divided by the speed
    of this machine. esscher probe --dry-run says the same.

    Example: esscher describe openai-community/gpt2
    """
    flags = given(locals())
    from esscher.cli.probe import read_flags

    describe_run(ProbeSpec.read(read_flags(flags)), as_json)


def describe_run(asked: ProbeSpec, as_json: bool) -> None:
    """Print what a model is, and what a probe of it would cost."""
    from esscher.describe import describe_model

    found = describe_model(asked.model, revision=asked.revision, asked=asked)
    counted = found.layers is not None and found.heads is not None
    total = found.layers * found.heads if counted else None  # type: ignore[operator]
    if as_json:
        return print_json({**asdict(found), "heads_in_all": total})
    lines = {**_facts(found, total), **({} if found.cost is None else _costs(found.cost))}
    rows = [{" ": name, "": value} for name, value in lines.items() if value]
    show(found.name, rows)


def _facts(found: ModelDescription, total: int | None) -> dict[str, str]:
    def whole(value: int | None) -> str:
        return "" if value is None else f"{value:,}"

    windows = Counter(window for window in found.windows if window is not None)
    only = ", encoder only" if found.encoder_of_pair else ""
    mask = {None: "", True: "causal", False: "every token sees every token"}
    return {
        "family": f"{found.family} ({found.architecture}{only})",
        "supported": "yes" if found.supported else f"no: {found.reason}",
        "parameters": f"{found.parameters:,}",
        "weights": found.weights or "",
        "layers": whole(found.layers),
        "heads a layer": whole(found.heads),
        "key heads a layer": whole(found.kv_heads),
        "heads in all": whole(total),
        "width k": whole(found.width),
        "hidden size d": whole(found.hidden_size),
        "longest sequence": whole(found.max_positions) or "no limit given",
        "positions": found.positions,
        "mask": mask[found.causal],
        "sliding windows": "; ".join(
            f"{window:,} tokens in {layers} layers" for window, layers in sorted(windows.items())
        ),
        "soft cap": "" if found.softcap is None else f"{found.softcap:g}",
        "sink logits": "yes" if found.sinks else "",
    }


def _costs(cost: Cost) -> dict[str, Any]:
    """Processor time and memory of the probe, and the speed that they come from."""
    pool = f"{cost.queries} queries in windows of {cost.keys:,} of {cost.tokens:,} tokens"
    if cost.keys == cost.tokens:
        pool = f"{cost.keys:,} keys, {cost.queries} queries"
    forward = cost.operations["forward"] / cost.speed
    return {
        "a probe costs": (
            f"about {_time(cost.seconds)} of processor time and {cost.bytes / 1e9:.2g} GB"
            f" ({pool}; of the time {_time(forward)} are forward passes)"
        ),
        "measured here": f"{cost.speed / 1e9:.3g} GFLOP/s, threads: {cost.threads}",
    }


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
