"""Whether a head's limit is what the model itself computes: the output that its attention gives the
same queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Block, Findings, Found, Start, Statistic
from esscher.runs.columns import Column

__all__ = ["OwnOutput"]


@dataclass(frozen=True)
class Outputs:
    """The model's own, (m, d_v); of no query where the pool is the corpus."""

    outputs: Tensor


class OwnOutput(Statistic):
    """Where the pool is a query's own context, its limit is attention on all that the model lets it
    see.
    """

    name = "own_output"
    reads = ("replacement",)
    state = Outputs

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if spec.pool != "sequence":
            return ()
        help_text = (
            "Largest difference between a coordinate of the limit and of the model's own output for"
            " the same query, relative to the largest coordinate of these outputs."
        )
        return (Column("output_difference", "float", "difference from the model", help_text),)

    def init(self, start: Start) -> Outputs:
        return Outputs(torch.zeros(0, len(start.center)))

    def update(self, state: Outputs, block: Block) -> Outputs:
        return state if block.outputs is None else Outputs(block.outputs.cpu())

    def merge(self, a: Outputs, b: Outputs) -> Outputs:
        return a

    def finish(self, state: Outputs, found: Found) -> Findings:
        if found.spec.pool != "sequence":
            return Findings()
        outputs = state.outputs.double()
        size = float(outputs.abs().max()) if outputs.numel() else math.nan
        apart = (
            float((found.states["replacement"].errors.limit - outputs).abs().max())
            if outputs.numel()
            else math.nan
        )
        return Findings({"output_difference": apart / size if size > 0 else apart})
