"""Concentration at the first weights of training as a run: a unit is one covariance and one prompt
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.convergence.curve import ErrorCurve
from esscher.convergence.rate.fit import fit_rate
from esscher.icl.columns import COVARIANCE, LENGTH, STATUS, STDERR
from esscher.icl.concentration.bounds import bounds
from esscher.icl.concentration.errors import AGAINST, METRICS, prompt_errors, risk_gradient_errors
from esscher.icl.concentration.lemmas import risk_gaps
from esscher.icl.concentration.spec import ConcentrationSpec
from esscher.icl.layer import OVKQ, default_weights
from esscher.icl.tasks import as_task
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column

__all__ = ["CONCENTRATION"]

LIMIT_ROW = AGAINST.index("limit")

N = Column("n", "int", "prompt length", LENGTH.help, "log")
AGAINST_WHAT = Column(
    "against",
    "word",
    "against",
    "linear attention on the same prompt, or the limit of both.",
    "words",
)
METRIC = Column(
    "metric",
    "word",
    "difference of",
    "The output, its gradients, the gradient of the loss, or that of the risk.",
    "words",
)
RMS = Column(
    "rms",
    "float",
    "rms difference",
    "Root mean square over prompts of the difference; of a bound, its height.",
    "log",
)
EXPONENT = Column(
    "exponent",
    "float",
    "exponent",
    "The difference, or the bound, falls as n to minus this.",
    ends=("low", "high"),
)
TABLES = {
    "errors": (
        *(COVARIANCE, N, AGAINST_WHAT, METRIC),
        Column("repeat", "int", "repeat", "Number of the group of prompts."),
        Column(
            "squared",
            "float",
            "squared difference",
            "Mean over a group of prompts of the squared difference.",
            "log",
        ),
    ),
    "exact": (
        *(COVARIANCE, N, AGAINST_WHAT),
        Column(
            "error",
            "float",
            "difference",
            "Norm of the difference of the exact gradients of the mean squared error.",
            "log",
        ),
    ),
    "curves": (N, RMS, STDERR, COVARIANCE, AGAINST_WHAT, METRIC),
    "rates": (
        *(COVARIANCE, AGAINST_WHAT, METRIC, EXPONENT),
        Column("low", "float", "exponent, low", "Lower end of the exponent's interval."),
        Column("high", "float", "exponent, high", "Upper end of the exponent's interval."),
        Column(
            "constant",
            "float",
            "constant",
            "The difference is about this times n to minus the exponent.",
            "log",
        ),
        STATUS,
        Column("reason", "word", "reason", "What the status of the fit means."),
    ),
    "risks": (
        *(COVARIANCE, N),
        Column(
            "quantity",
            "word",
            "quantity",
            "The risk, Lemma E.2, or its gradient in (U, V), Lemma E.4.",
            "words",
        ),
        Column(
            "measured",
            "float",
            "measured",
            "Exact difference between prompts of n tokens and infinitely many.",
            "log",
        ),
        Column(
            "printed",
            "float",
            "as printed",
            "The lemma as printed, with the norms measured on the prompts.",
            "log",
        ),
        Column(
            "mended",
            "float",
            "mended",
            "The lemma mended, with the norms measured on the prompts.",
            "log",
        ),
    ),
    "bounds": (
        METRIC,
        Column("name", "word", "bound", "Name of the bound."),
        N,
        RMS,
        EXPONENT,
        COVARIANCE,
    ),
}


def units(spec: ConcentrationSpec) -> list[Unit]:
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise, spec.task_cov)
    return [
        {"covariance": covariance, "n": n}
        for n in sorted(spec.lengths)
        for covariance in spec.covariances
    ]


def first_weights(spec: ConcentrationSpec) -> OVKQ:
    """Where training of the spec's seed begins."""
    return default_weights(spec.dim, torch.Generator().manual_seed(spec.seed))


def compute(spec: ConcentrationSpec, unit: Unit) -> dict[str, Any]:
    """Mean squares of each repeat, and the exact difference of the risks' gradients."""
    task, weights, n = (
        as_task(unit["covariance"], spec.dim, spec.noise, spec.task_cov),
        first_weights(spec),
        unit["n"],
    )
    squared = prompt_errors(task, weights, n, spec.repeats * spec.prompts, spec.unit_seed(unit))
    means = squared.reshape(spec.repeats, spec.prompts, 2, len(METRICS)).mean(axis=1)
    rows = [
        unit
        | {
            "against": against,
            "metric": metric,
            "repeat": repeat,
            "squared": float(means[repeat, i, j]),
        }
        for i, against in enumerate(AGAINST)
        for j, metric in enumerate(METRICS)
        for repeat in range(spec.repeats)
    ]
    exact = risk_gradient_errors(task, weights, n)
    output, gradient = squared[:, LIMIT_ROW, 0], squared[:, LIMIT_ROW, 1] + squared[:, LIMIT_ROW, 2]
    norms = (
        float(output.mean() ** 0.5),
        float((output**2).mean() ** 0.25),
        float(gradient.mean() ** 0.5),
    )
    return {
        "errors": rows,
        "risks": [unit | row for row in risk_gaps(task, weights.uv(), n, *norms)],
        "exact": [
            unit | {"against": against, "error": float(value)}
            for against, value in zip(AGAINST, exact, strict=True)
        ],
    }


def consolidate(spec: ConcentrationSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """errors; curves (rms and standard error); rates (fitted exponents with intervals); bounds."""
    errors, exact, risks = (
        pd.concat([shard.tables[name].to_pandas() for shard in shards], ignore_index=True)
        for name in ("errors", "exact", "risks")
    )
    curves: list[pd.DataFrame] = []
    rates: list[dict[str, Any]] = []
    keys = ["covariance", "against", "metric"]
    for key, part in errors.groupby(keys, sort=False):
        samples = part.pivot_table(index="repeat", columns="n", values="squared")
        _append(curves, rates, dict(zip(keys, key, strict=True)), sampled_curve(samples))
    for (covariance, against), part in exact.groupby(["covariance", "against"], sort=False):
        ordered = part.sort_values("n")
        curve = ErrorCurve(
            ordered["n"].to_numpy(np.int64), ordered["error"].to_numpy(), "exact", "risk_gradient"
        )
        _append(
            curves,
            rates,
            {"covariance": covariance, "against": against, "metric": "risk_gradient"},
            curve,
        )
    limits = [
        bounds(
            as_task(name, spec.dim, spec.noise, spec.task_cov),
            first_weights(spec),
            sorted(spec.lengths),
            spec.seed,
        ).assign(covariance=name)
        for name in spec.covariances
    ]
    frames = {
        "errors": errors,
        "exact": exact,
        "curves": pd.concat(curves, ignore_index=True),
        "rates": pd.DataFrame(rates),
    }
    return frames | {"risks": risks, "bounds": pd.concat(limits, ignore_index=True)}


def sampled_curve(samples: pd.DataFrame) -> ErrorCurve:
    """A curve from mean squares by repeat (rows) and n (columns)."""
    return ErrorCurve.from_repeats(samples.columns.to_numpy(np.int64), samples.to_numpy(np.float64))


def _append(
    curves: list[pd.DataFrame],
    rates: list[dict[str, Any]],
    identity: dict[str, Any],
    curve: ErrorCurve,
) -> None:
    fit = fit_rate(curve, raise_on_failure=False)
    curves.append(
        pd.DataFrame({"n": curve.n, "rms": curve.rms, "stderr": curve.stderr}).assign(**identity)
    )
    rates.append(
        identity
        | {
            "exponent": fit.exponent,
            "low": fit.interval[0],
            "high": fit.interval[1],
            "constant": fit.constant,
            "status": fit.status.code,
            "reason": fit.status.text,
        }
    )


CONCENTRATION = Job(
    "icl-concentration", ConcentrationSpec, units, compute, consolidate, columns=lambda _: TABLES
)
