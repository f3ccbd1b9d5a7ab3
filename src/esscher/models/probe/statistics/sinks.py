"""The weight that queries put on the first and the special tokens of their own window."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Start, Statistic
from esscher.runs.columns import Column

__all__ = ["SinkMass", "Sinks"]


@dataclass(frozen=True)
class SinkMass:
    """Of each query, (m,); it does not depend on the pool."""

    mass: Tensor


class Sinks(Statistic):
    name = "sinks"
    state = SinkMass

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = "Share of the attention that goes to first and special tokens."
        return (
            Column(
                "sink_mass",
                "float",
                "sink mass",
                help_text,
                scale="linear",
                first=14,
                short="sinks",
            ),
        )

    def init(self, start: Start) -> SinkMass:
        return SinkMass(start.sink_mass)

    def merge(self, a: SinkMass, b: SinkMass) -> SinkMass:
        return a

    def single(self, state: SinkMass) -> tuple[str, ...]:
        return (".mass",)

    def finish(self, state: SinkMass, found: Found) -> Findings:
        return Findings({"sink_mass": float(state.mass.double().mean())})
