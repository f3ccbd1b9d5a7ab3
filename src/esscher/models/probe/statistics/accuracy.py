"""How exact the exact error is."""

from __future__ import annotations

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.runs.columns import Column

__all__ = ["ACCURACY", "Accuracy"]

ACCURACY = Column(
    "accuracy",
    "float",
    "accuracy",
    "Estimated relative error of the numerical integrals behind the exact curve.",
)


class Accuracy(Statistic):
    name = "accuracy"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (ACCURACY,)

    def finish(self, state: None, found: Found) -> Findings:
        return Findings({"accuracy": found.values["replacement"].accuracy})
