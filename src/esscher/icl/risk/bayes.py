"""The best possible risk on L tokens: the posterior mean of w, which is ridge regression."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esscher.icl.risk.value import CLOSED, SIMULATION, Risk, as_length
from esscher.icl.tasks import LinearTask, Task
from esscher.inputs import as_count

__all__ = ["bayes_risk"]

Floats = npt.NDArray[np.float64]


def bayes_risk(
    task: Task, length: Any, draws: Any = 4000, generator: torch.Generator | None = None
) -> Risk:
    """1/2 E[x_q^T P x_q] + tau^2 / 2, P the posterior covariance of w given L labelled tokens.

        P = W^{1/2} (I + W^{1/2} X^T X W^{1/2} / tau^2)^{-1} W^{1/2},     X^T X ~ Wishart(L, Sigma)

    Labels, noise and query are averaged exactly; only X^T X is drawn, ``draws`` times, by
    Bartlett's decomposition, so that L may be as large as you like. Without noise P is the
    projection on what the tokens leave open. This is the L-Bayes-optimal estimator of [S], section
    6.
    """
    if not isinstance(task, LinearTask):
        raise ValueError(f"task: expected a LinearTask, got {type(task).__name__}")
    length, draws = as_length(length), as_count(draws, "draws")
    floor = 0.5 * task.noise
    if math.isinf(length):
        return Risk(floor, 0.0, CLOSED)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    grams = _wishart(int(length), draws, task.dim, np.random.default_rng(seed))
    seen = (task.root.T @ task.task_root).numpy()  # X^T X = R G R^T in the basis of Sigma = R R^T
    values, vectors = np.linalg.eigh(seen.T @ grams @ seen)
    values = np.where(values > 1e-12 * values[:, -1:], values, 0.0)
    with np.errstate(invalid="ignore"):
        left = np.where(values > 0, task.noise / (task.noise + values), 1.0)
    asked = (task.query_root.T @ task.task_root).numpy()
    spread = np.einsum("nik,ij,njk->nk", vectors, asked.T @ asked, vectors)
    loss = 0.5 * (left * spread).sum(axis=1)
    return Risk(floor + float(loss.mean()), float(loss.std() / math.sqrt(draws)), SIMULATION)


def _wishart(length: int, draws: int, dim: int, rng: np.random.Generator) -> Floats:
    """``draws`` matrices G = sum of ``length`` products g g^T, g ~ N(0, I)."""
    if length < dim:
        rows = rng.standard_normal((draws, dim, length))
    else:
        rows = np.tril(rng.standard_normal((draws, dim, dim)), -1)
        index = np.arange(dim)
        rows[:, index, index] = np.sqrt(
            rng.chisquare(np.asarray(length - index, float), (draws, dim))
        )
    return np.asarray(rows @ rows.transpose(0, 2, 1))
