"""Final risks of gradient flow against the prompt length as a run: a unit is one covariance and one length."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator

from esscher.convergence.montecarlo.spec import parse_ladder
from esscher.icl.columns import COVARIANCE, LENGTH, MODEL, MSE, STDERR
from esscher.icl.flow.end import final_parameters
from esscher.icl.flow.limit import start_block
from esscher.icl.layer import KINDS
from esscher.icl.risk.bayes import bayes_risk
from esscher.icl.risk.exact import risk
from esscher.icl.tasks import as_task
from esscher.runs import Job, RunSpec, Unit, register

__all__ = ["FLOW", "FlowSpec", "compute"]


class FlowSpec(RunSpec):
    """What ``esscher icl flow`` runs. The flow starts where Theorem 5.2 of [S] does."""

    job: Literal["icl-flow"] = "icl-flow"
    covariances: Annotated[tuple[str, ...], Field(min_length=1)] = ("isotropic", "kms:0.5")
    lengths: tuple[int, ...] = (10, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000)
    dim: Annotated[int, Field(ge=1, le=4096)] = 5
    noise: Annotated[float, Field(ge=0)] = 0.1
    alpha: Annotated[float, Field(gt=0)] | None = None
    draws: Annotated[int, Field(ge=2, le=10**9)] = 4000

    @field_validator("lengths", mode="before")
    @classmethod
    def _ladder(cls, value: Any) -> tuple[int, ...]:
        return tuple(parse_ladder(value).tolist())


def units(spec: FlowSpec) -> list[Unit]:
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise)
    return [{"covariance": covariance, "length": n} for n in sorted(spec.lengths) for covariance in spec.covariances]


def compute(spec: FlowSpec, unit: Unit) -> dict[str, Any]:
    """Mean squared error (twice the risk) at the end of the flow of each model, and of the best predictor on L tokens."""
    task, length = as_task(unit["covariance"], spec.dim, spec.noise), unit["length"]
    start = start_block(task, spec.alpha)
    rows = []
    for kind in KINDS:
        end = final_parameters(task, start, length, kind)
        rows.append({"model": kind, "mse": 2 * float(risk(task, end, length, kind)), "stderr": 0.0})
    generator = torch.Generator().manual_seed(spec.unit_seed(unit))
    bayes = bayes_risk(task, length, spec.draws, generator)
    rows.append({"model": "bayes", "mse": 2 * bayes.value, "stderr": 2 * bayes.error})
    return {"final": [unit | row for row in rows]}


TABLES = {"final": (COVARIANCE, LENGTH, MODEL, MSE, STDERR)}
FLOW = Job("icl-flow", FlowSpec, units, compute, columns=lambda _: TABLES)
register("icl-flow", "esscher.icl.flow.job:FLOW")
