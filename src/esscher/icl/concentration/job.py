"""How fast softmax attention on a prompt becomes linear: outputs and gradients against L at the first weights of training.

Measured on the same prompts, in mean square: softmax attention on L tokens minus (1/L) linear attention on the same tokens
("linear"), or minus the limit of both, attention on infinitely many tokens of the same task ("limit"). Sources: [S],
Figures 1 and 5; bounds: Propositions 3.1 and 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pydantic import Field, field_validator

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.montecarlo.spec import parse_ladder
from esscher.convergence.rate.fit import fit_rate
from esscher.icl.layer import OVKQ, default_weights
from esscher.icl.risk.risk import risk_gradient, tensors
from esscher.icl.risk.softmax import product_rule
from esscher.icl.tasks import LinearTask
from esscher.icl.training.job import as_task
from esscher.icl.training.kernel import draw_prompt, new_prompt, white_directions
from esscher.icl.training.loop import whiten
from esscher.icl.training.normals import compiled, seeded_lanes
from esscher.icl.training.token_sums import new_stream, new_work
from esscher.measures.gaussian import Gaussian
from esscher.runs import Job, RunSpec, Shard, Unit, register
from esscher.theory.boursier.average_predictions import average_predictions
from esscher.theory.setting import setting_of

__all__ = ["AGAINST", "CONCENTRATION", "METRICS", "ConcentrationSpec", "bounds", "prompt_errors", "risk_gradient_errors"]

Floats = npt.NDArray[np.float64]
METRICS = ("output", "gradient_U", "gradient_V", "gradient")
AGAINST = ("linear", "limit")
BOUNDS = {
    "output": ("s-16-mended", "s-16-sharpened"),
    "gradient_U": ("s-gradient-u",),
    "gradient_V": ("s-gradient-v",),
}
TASKS = 16  # drawn to average the bounds, which hold task by task


@compiled
def measure_prompts(
    stream: Any, length: int, white: Any, root: Any, task_root: Any, noise: float, o: Any, V: Any, K: Any, Q: Any, out: Any
) -> None:
    """Rows of ``out`` (prompts, 2, 4): squared differences to linear attention and to the limit, in the order of METRICS."""
    size = white.shape[1]
    d = size - 1
    work, prompt = new_work(length, size - 2), new_prompt(size)
    outputs, slopes = np.zeros(3), np.zeros((3, 2, size))
    tokens, change, query = np.zeros((3, 2, size)), np.zeros((2, size)), np.zeros(d)
    for row in range(out.shape[0]):
        label = draw_prompt(stream, length, white, task_root, noise, work, prompt, outputs, slopes)
        white_directions(white[0], prompt[0], prompt[1], noise, slopes[2, 0], slopes[2, 1])
        outputs[2] = 0.0
        for k in range(size):
            outputs[2] += slopes[2, 0, k] * slopes[2, 1, k]
        for model in range(3):
            for which in range(2):
                to_token(root, prompt[1], noise, slopes[model, which], tokens[model, which])
        for i in range(d):
            query[i] = 0.0
            for k in range(d):
                query[i] += root[i, k] * prompt[0][k]
        for other in range(2):
            out[row, other, 0] = (outputs[0] - outputs[1 + other]) ** 2
            change[:] = tokens[0] - tokens[1 + other]
            out[row, other, 1] = square(change[1]) * square(query)
            out[row, other, 2] = square(change[0])
            change[:] = 2.0 * (outputs[0] - label) * tokens[0] - 2.0 * (outputs[1 + other] - label) * tokens[1 + other]
            out[row, other, 3] = (
                square(o) * square(change[0])
                + square_image(V, change[0])
                + square_image(Q, query) * square(change[1])
                + square_image(K, change[1]) * square(query)
            )


@compiled
def to_token(root: Any, task: Any, noise: float, x: Any, out: Any) -> None:
    """out = A x: from white coordinates to those of a token."""
    d = task.size
    out[d] = noise * x[d]
    for i in range(d):
        out[d] += task[i] * x[i]
        out[i] = 0.0
        for k in range(d):
            out[i] += root[i, k] * x[k]


@compiled
def square(x: Any) -> float:
    total = 0.0
    for value in x:
        total += value * value
    return total


@compiled
def square_image(matrix: Any, x: Any) -> float:
    """|matrix x|^2, with the columns of ``matrix`` beyond x left out."""
    total = 0.0
    for i in range(matrix.shape[0]):
        image = 0.0
        for k in range(x.size):
            image += matrix[i, k] * x[k]
        total += image * image
    return total


def prompt_errors(task: LinearTask, weights: OVKQ, length: int, prompts: int, seed: int) -> Floats:
    """Squared differences on each of some random prompts, (prompts, against, metrics).

    Against: linear attention on the same prompt, the limit. Metrics: output f; df/dU and df/dV (its last row), Frobenius;
    gradient of the loss (f - y)^2 in (O, V, K, Q).
    """
    e = task.dim + 1
    root = np.eye(e)
    root[:-1, :-1] = task.root.numpy()
    o, V, K, Q = (np.ascontiguousarray(part.numpy()) for part in (weights.O[-1], weights.V, weights.K, weights.Q))
    white = np.zeros((2, e, e))
    for model in range(2):
        whiten(o, V, K, Q, root, np.zeros((e, e)), np.zeros((e, e)), white[model])
    task_root = np.ascontiguousarray((task.root.T @ task.task_root).numpy())
    out = np.zeros((prompts, 2, len(METRICS)))
    stream = new_stream(seeded_lanes(seed), e)
    measure_prompts(stream, length, white, root, task_root, float(np.sqrt(task.noise)), o, V, K, Q, out)
    return out


def risk_gradient_errors(task: LinearTask, weights: OVKQ, length: int) -> Floats:
    """Norm of the difference of the exact gradients of the mean squared error in (O, V, K, Q): to linear, to the limit."""
    rule = product_rule(task.dim)
    at = [(length, "softmax"), (length, "linear"), (float("inf"), "softmax")]
    gradients = [tensors(risk_gradient(task, weights, n, kind, rule)[1]) for n, kind in at]
    # the risk is half of the mean squared error
    return np.array([2 * sum(float(((a - b) ** 2).sum()) for a, b in zip(gradients[0], other, strict=True)) ** 0.5
                     for other in gradients[1:]])  # fmt: skip


def bounds(task: LinearTask, weights: OVKQ, lengths: Any, seed: int = 0) -> pd.DataFrame:
    """[S] Propositions 3.1 and 3.4 for these weights: root mean square over tasks of the proved bounds on the distance to
    the limit. Columns metric, name, n, rms, exponent; infinite where the proof says nothing.
    """
    uv = weights.uv()
    n = np.asarray(lengths, np.int64)
    head = Head(uv.U[:, :-1], uv.V[-1:])
    w = torch.randn(TASKS, task.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) @ task.task_root.T
    found: dict[tuple[str, str], list[tuple[Floats, float]]] = {}
    for row in w:
        gram = torch.cat([torch.eye(task.dim, dtype=torch.float64), row[None]])
        cov = gram @ task.sigma @ gram.T
        cov[-1, -1] += task.noise
        setting = setting_of(head, Gaussian(cov), Gaussian(task.sigma))
        by_name = {prediction.name: prediction for prediction in average_predictions(setting)}
        for metric, names in BOUNDS.items():
            for name in names:
                prediction = by_name[name]
                found.setdefault((metric, name), []).append((prediction.rms(n) ** 2, prediction.exponent or 0.0))
    rows = []
    for (metric, name), values in found.items():
        rms = np.sqrt(np.mean([value for value, _ in values], axis=0))
        exponent = min(exponent for _, exponent in values)
        rows += [
            {"metric": metric, "name": name, "n": int(m), "rms": float(height), "exponent": exponent}
            for m, height in zip(n, rms, strict=True)
        ]
    return pd.DataFrame(rows)


# ---- the job ---------------------------------------------------------------------------------------------------------


class ConcentrationSpec(RunSpec):
    """What ``esscher icl concentration`` runs."""

    job: Literal["icl-concentration"] = "icl-concentration"
    covariances: Annotated[tuple[str, ...], Field(min_length=1)] = ("isotropic", "kms:0.5")
    lengths: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
    dim: Annotated[int, Field(ge=1, le=4096)] = 5
    noise: Annotated[float, Field(ge=0)] = 0.1
    repeats: Annotated[int, Field(ge=2, le=10**6)] = 32
    prompts: Annotated[int, Field(ge=1, le=1 << 20)] = 128

    @field_validator("lengths", mode="before")
    @classmethod
    def _ladder(cls, value: Any) -> tuple[int, ...]:
        return tuple(parse_ladder(value).tolist())

    @property
    def weights(self) -> OVKQ:
        """The weights of seed ``seed``, where training of that seed begins."""
        return default_weights(self.dim, torch.Generator().manual_seed(self.seed))


def units(spec: ConcentrationSpec) -> list[Unit]:
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise)
    return [{"covariance": covariance, "n": n} for n in sorted(spec.lengths) for covariance in spec.covariances]


def compute(spec: ConcentrationSpec, unit: Unit) -> dict[str, Any]:
    """Mean squares of each repeat, and the exact difference of the risks' gradients."""
    task, weights, n = as_task(unit["covariance"], spec.dim, spec.noise), spec.weights, unit["n"]
    squared = prompt_errors(task, weights, n, spec.repeats * spec.prompts, spec.unit_seed(unit))
    means = squared.reshape(spec.repeats, spec.prompts, 2, len(METRICS)).mean(axis=1)
    rows = [
        unit | {"against": against, "metric": metric, "repeat": repeat, "squared": float(means[repeat, i, j])}
        for i, against in enumerate(AGAINST)
        for j, metric in enumerate(METRICS)
        for repeat in range(spec.repeats)
    ]
    exact = risk_gradient_errors(task, weights, n)
    return {
        "errors": rows,
        "exact": [unit | {"against": against, "error": float(value)} for against, value in zip(AGAINST, exact, strict=True)],
    }


def consolidate(spec: ConcentrationSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """errors; curves (rms and standard error); rates (fitted exponents with intervals); bounds."""
    errors, exact = (
        pd.concat([shard.tables[name].to_pandas() for shard in shards], ignore_index=True) for name in ("errors", "exact")
    )
    curves: list[pd.DataFrame] = []
    rates: list[dict[str, Any]] = []
    keys = ["covariance", "against", "metric"]
    for key, part in errors.groupby(keys, sort=False):
        samples = part.pivot_table(index="repeat", columns="n", values="squared")
        _append(curves, rates, dict(zip(keys, key, strict=True)), sampled_curve(samples))
    for (covariance, against), part in exact.groupby(["covariance", "against"], sort=False):
        ordered = part.sort_values("n")
        curve = ErrorCurve(ordered["n"].to_numpy(np.int64), ordered["error"].to_numpy(), "exact", "risk_gradient")
        _append(curves, rates, {"covariance": covariance, "against": against, "metric": "risk_gradient"}, curve)
    limits = [
        bounds(as_task(name, spec.dim, spec.noise), spec.weights, sorted(spec.lengths), spec.seed).assign(covariance=name)
        for name in spec.covariances
    ]
    frames = {"errors": errors, "exact": exact, "curves": pd.concat(curves, ignore_index=True), "rates": pd.DataFrame(rates)}
    return frames | {"bounds": pd.concat(limits, ignore_index=True)}


def sampled_curve(samples: pd.DataFrame) -> ErrorCurve:
    """A curve from mean squares by repeat (rows) and n (columns)."""
    return ErrorCurve.from_repeats(samples.columns.to_numpy(np.int64), samples.to_numpy(np.float64))


def _append(curves: list[pd.DataFrame], rates: list[dict[str, Any]], identity: dict[str, Any], curve: ErrorCurve) -> None:
    fit = fit_rate(curve, raise_on_failure=False)
    curves.append(pd.DataFrame({"n": curve.n, "rms": curve.rms, "stderr": curve.stderr}).assign(**identity))
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


CONCENTRATION = Job("icl-concentration", ConcentrationSpec, units, compute, consolidate)
register("icl-concentration", "esscher.icl.concentration.job:CONCENTRATION")
