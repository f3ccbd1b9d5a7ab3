"""``esscher describe``: a dry run on a model, from its configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from esscher.cli.options import Fields, Given
from esscher.cli.output import MODEL, Json, print_json, print_table

if TYPE_CHECKING:
    from esscher.describe import Cost, ModelDescription
    from esscher.probe.spec import ProbeSpec


PRICED = Fields(
    "esscher.probe.spec:ProbeSpec",
    ("revision", "window", "pool", "queries", "kept_queries", "layers", "heads", "rules", "part"),
    left_out={
        "window": "512, or 2048 for a sequence, or what the model takes",
        "rules": "ten of them",
    },
)
TOKENS = Fields("esscher.corpus.spec:CorpusSpec", ("max_tokens",), left_out={"max_tokens": "16384"})


def describe(
    settings: Annotated[Given, PRICED],
    corpus: Annotated[Given, TOKENS],
    model: Annotated[str, typer.Argument(help=MODEL)] = "minilm",
    as_json: Json = False,
) -> None:
    """Layers, heads and positions of a model, whether its attention can be captured, and what a
    probe would cost.

    Only the configuration is read, and of the weights how they are stored. Time and memory are
    those of the probe that the flags ask for: a small piece of each stage is timed on this machine
    and multiplied. esscher probe --dry-run says the same.

    Example: esscher describe openai-community/gpt2
    """
    from esscher.cli.probe import read_fields
    from esscher.probe.spec import ProbeSpec

    describe_run(ProbeSpec.read(read_fields(settings | {"model": model}, corpus, None)), as_json)


def describe_run(asked: ProbeSpec, as_json: bool) -> None:
    """A model, and what a probe of it costs that is not run."""
    from esscher.describe import describe_model

    found = describe_model(asked.model, revision=asked.revision, asked=asked)
    if as_json:
        print_json({**asdict(found), "heads_in_all": _in_all(found)})
        return
    rows = [[what, value] for what, value in _lines(found) if value]
    print_table(found.name, ("", ""), rows, left=2)


def _in_all(found: ModelDescription) -> int | None:
    return None if found.layers is None or found.heads is None else found.layers * found.heads


def _lines(found: ModelDescription) -> list[tuple[str, str]]:
    capped = "" if found.softcap is None else f"{found.softcap:g}"
    lines = [
        (
            "family",
            (
                f"{found.family}"
                f" ({found.architecture}{', encoder only' if found.encoder_of_pair else ''})"
            ),
        ),
        ("supported", "yes" if found.supported else f"no: {found.reason}"),
        ("parameters", f"{found.parameters:,}"),
        ("weights", found.weights or ""),
        ("layers", _number(found.layers)),
        ("heads a layer", _number(found.heads)),
        ("key heads a layer", _number(found.kv_heads)),
        ("heads in all", _number(_in_all(found))),
        ("width k", _number(found.width)),
        ("hidden size d", _number(found.hidden_size)),
        ("longest sequence", _number(found.max_positions) or "no limit given"),
        ("positions", found.positions),
        (
            "mask",
            (
                ""
                if found.causal is None
                else "causal"
                if found.causal
                else "every token sees every token"
            ),
        ),
        ("sliding windows", _windows(found)),
        ("soft cap", capped),
        ("sink logits", "yes" if found.sinks else ""),
    ]
    if found.cost is not None:
        cost = found.cost
        lines += [
            (
                "a probe costs",
                f"about {_time(cost.seconds)} of processor time and {cost.bytes / 1e9:.2g} GB",
            ),
            ("", f"({_pool(cost)}; of the time {_time(cost.forward_seconds)} are forward passes)"),
            (
                "measured here",
                (f"{cost.speed.matmul / 1e9:.3g} GFLOP/s, {_heads(cost)}, threads: {cost.threads}"),
            ),
        ]
    return lines


def _heads(cost: Cost) -> str:
    """The measured time of one head, its keep rules and tables included."""
    spent = cost.seconds - cost.forward_seconds - cost.work.backward * cost.speed.backward
    return f"{spent / cost.work.heads:.2g} s for a head"


def _pool(cost: Cost) -> str:
    """What the queries of a probe meet."""
    if cost.keys == cost.tokens:
        return f"{cost.keys:,} keys, {cost.queries} queries"
    return f"{cost.queries} queries in windows of {cost.keys:,} of {cost.tokens:,} tokens"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _windows(found: ModelDescription) -> str:
    """As "4,096 tokens in 13 layers"."""
    counts = Counter(window for window in found.windows if window is not None)
    return "; ".join(
        f"{window:,} tokens in {layers} layers" for window, layers in sorted(counts.items())
    )


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
