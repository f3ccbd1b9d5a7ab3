"""``esscher describe``: a dry run on a model, from its configuration."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from esscher.cli.options import option
from esscher.cli.output import MODEL, Json, print_json, say, show
from esscher.probe.spec import ProbeSpec


def describe(
    model: Annotated[str, typer.Argument(help=MODEL, show_default=False)] = "minilm",
    revision: Annotated[str | None, option(ProbeSpec, "revision")] = None,
    as_json: Json = False,
) -> None:
    """Show a model's layers and heads, whether it is supported, and what a probe costs.

    Only the configuration is read, not the weights. Time and memory are estimates for a probe with
    default settings on this machine; for other settings: esscher probe MODEL ... --dry-run.

    Example: esscher describe openai-community/gpt2
    """
    describe_run(ProbeSpec.read({"model": model, "revision": revision}), as_json)


def describe_run(asked: ProbeSpec, as_json: bool) -> None:
    """Print what a model is, and what a probe of it would cost."""
    from esscher.describe import describe as described

    found = described(asked.model, revision=asked.revision, asked=asked)
    if as_json:
        return print_json({**asdict(found), "heads_in_all": found.heads_in_all})
    show(found.name, [{" ": name, "": value} for name, value in found.facts().items()])
    if found.supported:
        say(f"Next: esscher probe {shlex.quote(asked.model)}")
