"""The metrics of Monte Carlo experiments: one table, one file each; a metric from outside enters by
``register``.
"""

from __future__ import annotations

from typing import Any

from esscher.convergence.montecarlo.draw import Draw
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Exponents, Metric
from esscher.convergence.montecarlo.metrics.cov import Cov, CovOp
from esscher.convergence.montecarlo.metrics.grad_u import GradU
from esscher.convergence.montecarlo.metrics.grad_v import GradV
from esscher.convergence.montecarlo.metrics.hardmax import Hardmax
from esscher.convergence.montecarlo.metrics.l2 import L2
from esscher.convergence.montecarlo.metrics.mean import Mean
from esscher.convergence.montecarlo.metrics.uniform import Uniform
from esscher.inputs import as_kind

__all__ = ["METRICS", "Discrepancy", "Exponents", "Metric", "discrepancies", "register", "unknown"]

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (Mean(), Cov(), L2(), Uniform(), GradV(), GradU(), Hardmax(), CovOp())
}
"""Name -> metric. Only :func:`register` adds to it; no file of a run can."""


def register(metric: Any) -> None:
    """Let experiments, in Python and in YAML, ask for a metric by its name. Processes that compute
    have to import it too.
    """
    metric = as_kind(metric, Metric, "metric")
    if type(METRICS.setdefault(metric.name, metric)) is not type(metric):
        raise ValueError(
            f"metric {metric.name}: already registered, as {METRICS[metric.name].description}"
        )


def unknown(names: tuple[object, ...]) -> list[object]:
    """Those of the names that no metric has."""
    return [name for name in names if not isinstance(name, str) or name not in METRICS]


def discrepancies(draw: Draw) -> dict[str, Discrepancy]:
    """Every metric of the plan on one draw, and what these bring with them, in the order of the
    table.
    """
    found: dict[str, Discrepancy] = {}
    for name, metric in METRICS.items():
        if name in draw.plan.metrics:
            for each in (name, *metric.brings):
                if each not in found:
                    found[each] = METRICS[each].error(draw)
    return found
