"""Pareto k-hat of the softmax weights of some of the queries: how heavy the tail of their largest
weights is.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from esscher.tails import scores as tails
from esscher.tails.scores import TopScores, tail_length

__all__ = ["Tail"]


class Tail(Statistic):
    """The state is the largest scores of the kept queries."""

    name = "tail"
    state = TopScores

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            Column(
                "khat",
                "float",
                "k-hat",
                "Shape of the weights' tail: below 0.5 averages behave, above 0.7 a few keys"
                " decide.",
                scale="linear",
                first=13,
                ends=("khat_low", "khat_high"),
            ),
            Column("khat_low", "float", "k-hat, low", "Lower end of the interval of k-hat."),
            Column("khat_high", "float", "k-hat, high", "Upper end of the interval of k-hat."),
            Column("khat_label", "word", "tail", "The usual verdict on k-hat."),
        )

    def init(self, start: Start) -> TopScores:
        return tails.init(len(start.kept), tail_length(start.keys) + 1, device=start.center.device)

    def update(self, state: TopScores, block: Block) -> TopScores:
        return tails.update(state, block.kept_scores)

    def merge(self, a: TopScores, b: TopScores) -> TopScores:
        return tails.merge(a, b)

    def stack(self, states: Sequence[TopScores], order: Order) -> TopScores:
        top = tails.stack([state for state in states if len(state.count)] or states[:1])
        return TopScores(top.keep, top.count[order.kept], top.scores[order.kept])

    def finish(self, state: TopScores, found: Found) -> Findings:
        tail = tails.finish(state)
        low, high = tail.interval
        return Findings(
            {"khat": tail.median, "khat_low": low, "khat_high": high, "khat_label": tail.label},
            value=tail,
        )
