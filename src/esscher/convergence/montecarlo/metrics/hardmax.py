"""hardmax: attention that takes the token of largest score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esscher.attention.hardmax import attend_hardmax
from esscher.attention.limit import hardmax_limit
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Metric, as_floats

__all__ = ["Hardmax"]


class Hardmax(Metric):
    """Hardmax. Centred Gaussian tokens on the line: |mean output of self-attention|, whose limit is
    0 [B, Prop. 5.1].

    Bounded laws: mean over queries x ~ nu of the squared error against the support's furthest point
    along the tilt.
    """

    name = "hardmax"
    description = (
        "mean hardmax output on the line; for bounded laws hardmax outputs over queries x ~ nu"
    )
    asked_by = "queries"
    of_softmax = False
    in_float64 = True

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        if on_the_line(plan):
            return torch.zeros(plan.head.dim_out, dtype=torch.float64)
        return hardmax_limit(plan.head, plan.measure)(x)

    def check(self, plan: Plan) -> None:
        if not on_the_line(plan):
            plan.measure.extreme(plan.head.tilt(self.probes(plan)))

    def describe_queries(self, plan: Plan) -> str:
        if on_the_line(plan):
            return "queries are the tokens"
        # hardmax leaves a query out of its prompt
        return super().describe_queries(replace(plan, query_inside=False))

    def error(self, draw: Draw) -> Discrepancy:
        plan = draw.plan
        if on_the_line(plan):
            return _on_the_line(draw)
        x, tokens = (
            draw.queries.to(plan.measure.device),
            draw.tokens.double().to(plan.measure.device),
        )
        target = self.at_queries(draw)
        q, k, v = plan.head.queries(x), plan.head.keys(tokens), plan.head.values(tokens)
        squared = [
            (attend_hardmax(q, k[:n], v[:n]) - target).square().sum(1).mean() for n in draw.ladder
        ]
        return Discrepancy(as_floats(torch.stack(squared)), float(target.square().sum(1).mean()))


def _on_the_line(draw: Draw) -> Discrepancy:
    """A query of positive tilt takes the largest token, one of negative tilt the smallest: O(n),
    any number of tokens.
    """
    head = draw.plan.head
    y = as_floats(draw.tokens)[:, 0]
    at = np.array(draw.ladder) - 1
    upward = np.cumsum(y * float(head.A) > 0)[at] / (at + 1.0)
    mean = upward * np.maximum.accumulate(y)[at] + (1.0 - upward) * np.minimum.accumulate(y)[at]
    size = float(head.V.double().square().sum())
    return Discrepancy(size * mean**2, size * float(draw.plan.measure.cov))


def on_the_line(plan: Plan) -> bool:
    """The setting of [B, Proposition 5.1]: centred Gaussian tokens in d = 1, where hardmax takes an
    extreme token.
    """
    head, measure = plan.head, plan.measure
    if not measure.is_gaussian or measure.dim != 1 or head.dim_query != 1:
        return False
    bias = head.tilt_bias
    centred = float(measure.mean) == 0.0 and (bias is None or float(bias) == 0.0)
    if not centred or float(head.A) == 0.0:
        raise ValueError(
            "metrics: hardmax on Gaussian tokens of the line needs mean 0, A other than 0, and no"
            " tilt bias"
        )
    return True
