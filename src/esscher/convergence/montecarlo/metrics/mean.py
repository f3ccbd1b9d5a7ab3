"""mean: the mean of self-attention's outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Exponents, Metric, as_floats
from esscher.convergence.montecarlo.metrics.moments import moment_exponents
from esscher.measures.base import Measure

__all__ = ["Mean"]


class Mean(Metric):
    """|mean of the n outputs - mean of the push-forward|, self-attention [B]."""

    name = "mean"
    description = "mean of self-attention's outputs, L2 norm"
    asked_by = "tokens"

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.pushforward.mean

    def error(self, draw: Draw) -> Discrepancy:
        tokens, push = draw.tokens, draw.plan.pushforward
        mean, cov = self.target(draw.plan, tokens).to(tokens.device), push.cov.to(tokens.device)
        squared = torch.stack([prefix.mean - mean for prefix in draw.moments]).square().sum(1)
        # of an output, since the mean itself may be 0
        size = float(mean.square().sum() + cov.trace())
        return Discrepancy(as_floats(squared), size)

    def target_error(self, plan: Plan) -> tuple[float, str]:
        push = plan.pushforward
        return push.mean_error, f"{push.method}, own error {push.mean_error:.2g}"

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        return moment_exponents(head, measure)
