"""grad_v: the gradient in the value map."""

from __future__ import annotations

from torch import Tensor

from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Metric
from esscher.convergence.montecarlo.metrics.softmax_mean import against

__all__ = ["GradV"]


class GradV(Metric):
    """The gradient in V, row by row: every row has the tilted mean m(theta) as its gradient, so the
    error is |m_n - m|.

    [S, Proposition 3.4], gradients as in [S, C.7]; the gradient in all of V is larger by the factor
    sqrt(d_out).
    """

    name = "grad_v"
    description = "gradient in V over queries x ~ nu"
    asked_by = "queries"

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.measure.tilted_mean(plan.head.tilt(x))

    def error(self, draw: Draw) -> Discrepancy:
        return against(draw, lambda rows: rows, self.at_queries(draw))
