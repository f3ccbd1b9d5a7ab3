"""How much the model's next tokens feel the output of a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import (
    Block,
    Findings,
    Found,
    Order,
    Start,
    Statistic,
)
from esscher.runs.columns import Column

__all__ = ["Gradient"]


@dataclass(frozen=True)
class Felt:
    """Root mean square gradients, one of each window (w,) in which keep rules are compared."""

    gradients: Tensor


class Gradient(Statistic):
    """What a head's errors count in a split of keys between heads
    (esscher.models.probe.rule_budget).
    """

    name = "gradient"
    state = Felt

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if not spec.compared:
            return ()
        help_text = (
            "Root mean square gradient of the log probability of next tokens, drawn from the model,"
            " at the head's output: what its errors count in the best split."
        )
        return (Column("gradient", "float", "gradient of log p", help_text, scale="log"),)

    def init(self, start: Start) -> Felt:
        return Felt(torch.zeros(0, dtype=torch.float64))

    def update(self, state: Felt, block: Block) -> Felt:
        return (
            state
            if block.gradient is None
            else Felt(torch.tensor([block.gradient], dtype=torch.float64))
        )

    def merge(self, a: Felt, b: Felt) -> Felt:
        return a

    def stack(self, states: Sequence[Felt], order: Order) -> Felt:
        """A number of a window, not of its queries."""
        return Felt(torch.cat([state.gradients for state in states]))

    def finish(self, state: Felt, found: Found) -> Findings:
        if not found.spec.compared:
            return Findings()
        known = state.gradients
        return Findings(
            {"gradient": float(known.square().mean().sqrt()) if len(known) else math.nan}
        )
