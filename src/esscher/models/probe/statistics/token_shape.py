"""How light the tails of the tokens are that enter the layer."""

from __future__ import annotations

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.runs.columns import Column

__all__ = ["TokenShape"]


class TokenShape(Statistic):
    name = "token_shape"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = (
            "Whether the tokens are as light-tailed as theory assumes: sub-Gaussian, heavier or"
            " lighter."
        )
        return (Column("token_verdict", "word", "tokens' tails", help_text),)

    def finish(self, state: None, found: Found) -> Findings:
        hidden = found.layer.hidden
        return Findings({"token_verdict": "unknown" if hidden is None else hidden.verdict})
