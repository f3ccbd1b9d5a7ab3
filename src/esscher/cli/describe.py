"""``esscher describe``: a dry run on a model, from its configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from esscher.cli.options import option
from esscher.cli.output import MODEL, Json, print_json, show
from esscher.probe.spec import ProbeSpec

if TYPE_CHECKING:
    from esscher.describe import Cost


def describe(
    model: Annotated[str, typer.Argument(help=MODEL)] = "minilm",
    revision: Annotated[str | None, option(ProbeSpec, "revision")] = None,
    as_json: Json = False,
) -> None:
    """Show a model's layers and heads, whether it is supported, and what a probe costs.

    Only the configuration is read, and of the weights how they are stored. Time and memory are
    those of a probe with its usual settings: its operations are counted and divided by the speed
    of this machine. For other settings: esscher probe MODEL ... --dry-run.

    Example: esscher describe openai-community/gpt2
    """
    describe_run(ProbeSpec.read({"model": model, "revision": revision}), as_json)


def describe_run(asked: ProbeSpec, as_json: bool) -> None:
    """Print what a model is, and what a probe of it would cost."""
    from esscher.describe import describe_model

    found = describe_model(asked.model, revision=asked.revision, asked=asked)
    total = None if found.layers is None or found.heads is None else found.layers * found.heads
    if as_json:
        return print_json({**asdict(found), "heads_in_all": total})

    windows = Counter(window for window in found.windows if window is not None)
    only = ", encoder only" if found.encoder_of_pair else ""
    facts = {
        "family": f"{found.family} ({found.architecture}{only})",
        "supported": "yes" if found.supported else f"no: {found.reason}",
        "parameters": found.parameters,
        "weights": found.weights,
        "layers": found.layers,
        "heads a layer": found.heads,
        "key heads a layer": found.kv_heads,
        "heads in all": total,
        "width k": found.width,
        "hidden size d": found.hidden_size,
        "longest sequence": found.max_positions or "no limit given",
        "positions": found.positions,
        "mask": {None: "", True: "causal", False: "every token sees every token"}[found.causal],
        "sliding windows": "; ".join(
            f"{window:,} tokens in {layers} layers" for window, layers in sorted(windows.items())
        ),
        "soft cap": None if found.softcap is None else f"{found.softcap:g}",
        "sink logits": "yes" if found.sinks else "",
        **({} if found.cost is None else _costs(found.cost)),
    }
    rows = [
        {" ": name, "": f"{value:,}" if isinstance(value, int) else value}
        for name, value in facts.items()
        if value
    ]
    show(found.name, rows)


def _costs(cost: Cost) -> dict[str, str]:
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
