"""l2: the outputs over queries of a law."""

from __future__ import annotations

from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.exact import exact_curve
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Exponents, Metric
from esscher.convergence.montecarlo.metrics.softmax_mean import against
from esscher.measures.base import Measure
from esscher.theory.sharp import l2_exponent_rms, speaks_of

__all__ = ["L2"]


class L2(Metric):
    """Mean over queries x ~ nu of |Gamma_n(x) - Gamma(x)|^2 [S, Proposition 3.1]."""

    name = "l2"
    description = "outputs over queries x ~ nu"
    asked_by = "queries"

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return limit(plan.head, plan.measure)(x)

    def error(self, draw: Draw) -> Discrepancy:
        return against(draw, draw.plan.head.values, self.at_queries(draw))

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        """The sharp one speaks of Gaussian tokens and of queries that are Gaussian and centred."""
        return (
            Exponents(sharp=float(l2_exponent_rms(head.horizon(measure))))
            if speaks_of(measure)
            else Exponents()
        )

    def exact(self, head: Head, measure: Measure, n: list[int], seed: int) -> ErrorCurve | None:
        return exact_curve(head, measure, measure, n, seed=seed)
