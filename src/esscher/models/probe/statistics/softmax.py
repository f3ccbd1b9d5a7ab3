"""How softmax spreads its weight over the keys, from the masses that were deposited for the
errors.
"""

from __future__ import annotations

import numpy as np

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.runs.columns import Column
from esscher.tails.regimes import share_frozen
from esscher.theory.sharp import freezing_tokens

__all__ = ["EFFECTIVE_TOKENS", "Softmax"]

EFFECTIVE_TOKENS = Column(
    "effective_tokens",
    "float",
    "effective tokens",
    "One over the summed squared weights: how many keys share the attention.",
    scale="log",
    first=12,
    short="effective",
)


class Softmax(Statistic):
    name = "softmax"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            EFFECTIVE_TOKENS,
            Column(
                "entropy",
                "float",
                "entropy",
                "Entropy of the attention weights in nats; its exponential is another count of"
                " keys.",
            ),
            Column(
                "score_sd",
                "float",
                "score spread",
                "Median over queries of the standard deviation s of their scores.",
            ),
            Column(
                "share_frozen",
                "float",
                "frozen queries",
                "Share of queries whose scores spread so widely (s² > 2 log n) that a few keys take"
                " all.",
            ),
            Column(
                "freezing_tokens",
                "float",
                "freezing point",
                "Below about this many tokens the softmax of a typical query rests on its few"
                " largest scores.",
            ),
        )

    def finish(self, state: None, found: Found) -> Findings:
        drawn = found.states["replacement"]
        tokens, entropy, sd = (
            x.numpy()
            for x in (drawn.weights.effective_tokens, drawn.weights.entropy, drawn.weights.sd)
        )
        spread = float(np.median(sd))
        row = {"effective_tokens": float(1 / np.mean(1 / tokens)), "entropy": float(entropy.mean())}
        row |= {"score_sd": spread, "share_frozen": share_frozen(sd, drawn.errors.keys.double())}
        return Findings(row | {"freezing_tokens": freezing_tokens(spread)})
