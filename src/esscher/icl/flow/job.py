"""Final risks of gradient flow against the prompt length as a run: a unit is one covariance and one
length.
"""

from __future__ import annotations

from typing import Any

import torch

from esscher.icl.columns import COVARIANCE, LENGTH, MODEL, MSE, STDERR
from esscher.icl.flow.end import final_parameters
from esscher.icl.flow.in_time import APART, TRAJECTORY, in_time
from esscher.icl.flow.limit import start_block
from esscher.icl.flow.spec import FlowSpec
from esscher.icl.layer import KINDS
from esscher.icl.risk.bayes import bayes_risk
from esscher.icl.risk.exact import risk
from esscher.icl.tasks import as_task
from esscher.runs import Job, Unit
from esscher.runs.columns import Declared

__all__ = ["FLOW", "compute"]


def units(spec: FlowSpec) -> list[Unit]:
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise, spec.task_cov)
    return [
        {"covariance": covariance, "length": n}
        for n in sorted(spec.lengths)
        for covariance in spec.covariances
    ]


def compute(spec: FlowSpec, unit: Unit) -> dict[str, Any]:
    """Mean squared error (twice the risk) at the end of the flow of each model, and of the best
    predictor on L tokens.
    """
    task, length = as_task(unit["covariance"], spec.dim, spec.noise, spec.task_cov), unit["length"]
    start = start_block(task, spec.alpha)
    rows = []
    for kind in KINDS:
        end = final_parameters(task, start, length, kind, spec.query_inside)
        found = risk(task, end, length, kind, query_inside=spec.query_inside)
        rows.append(
            {
                "model": kind,
                "mse": 2 * found.value,
                "stderr": 2 * found.error if spec.query_inside else 0.0,
            }
        )
    generator = torch.Generator().manual_seed(spec.unit_seed(unit))
    bayes = bayes_risk(task, length, spec.draws, generator)
    rows.append({"model": "bayes", "mse": 2 * bayes.value, "stderr": 2 * bayes.error})
    tables = {"final": rows}
    if spec.trajectory:
        tables |= in_time(task, start, length, spec.until, spec.points, spec.query_inside)
    return {name: [unit | row for row in table] for name, table in tables.items()}


def columns(spec: FlowSpec) -> Declared:
    final = {"final": (COVARIANCE, LENGTH, MODEL, MSE, STDERR)}
    return final | ({"trajectory": TRAJECTORY, "apart": APART} if spec.trajectory else {})


FLOW = Job("icl-flow", FlowSpec, units, compute, columns=columns)
