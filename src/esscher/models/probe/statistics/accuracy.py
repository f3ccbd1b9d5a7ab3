"""How exact the exact error is."""

from __future__ import annotations

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.runs.columns import Column

__all__ = ["Accuracy"]


class Accuracy(Statistic):
    name = "accuracy"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = "Estimated relative error of the numerical integrals behind the exact curve."
        return (Column("accuracy", "float", "accuracy", help_text),)

    def finish(self, state: None, found: Found) -> Findings:
        return Findings({"accuracy": found.values["replacement"].accuracy})
