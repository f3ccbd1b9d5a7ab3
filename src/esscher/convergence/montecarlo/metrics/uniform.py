"""uniform: the largest error over a ball of queries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esscher.attention.limit import limit
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Metric, as_floats
from esscher.convergence.montecarlo.uniform import uniform_error

__all__ = ["Uniform"]


class Uniform(Metric):
    """sup over |x| <= R of |Gamma_n(x) - Gamma(x)| [B]; the size of the limit is that where it is
    attained.
    """

    name = "uniform"
    description = "largest error over queries |x| <= radius"
    asked_by = "ball"
    in_float64 = True

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return limit(plan.head, plan.measure)(x)

    def error(self, draw: Draw) -> Discrepancy:
        plan, tokens = draw.plan, draw.tokens
        worst = [
            uniform_error(
                plan.head,
                plan.measure,
                tokens[:n],
                plan.radius,
                draw.generator(f"starts {n}"),
                query_inside=plan.query_inside,
            )
            for n in draw.ladder
        ]
        points = torch.stack([at.point for at in worst])
        size = float(self.target(plan, points).square().sum(1).mean())
        return Discrepancy(np.array([at.error for at in worst]) ** 2, size, as_floats(points))
