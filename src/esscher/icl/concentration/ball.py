"""Corollaries E.3 and E.5 of [S]: the largest gap of risks, and of their gradients, over the ball
|(U, V)| <= 2 rho.

The bounds behind them grow with ||U|| and ||V|| and depend on U, V through nothing else, so the
supremum over the ball is one over the ways u^2 + v^2 = (2 rho)^2 to share its radius. On a cell of
such ways it is at most the bound at the largest u and the largest v of the cell: a maximum over
cells is proved, not searched. Averages over tasks are over drawn ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.icl.concentration.bounds import token_laws
from esscher.icl.flow.trajectory import flow_times, gradient_flow
from esscher.icl.layer import Parameters
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_counts, as_positive
from esscher.measures.gaussian import Gaussian
from esscher.theory.boursier import averaged, gradients, proposition_31_exponent
from esscher.theory.prediction import setting_of
from esscher.theory.training import (
    decay,
    decay_begins,
    lemma_e2_mended,
    lemma_e4,
    sigma_mended,
    task_mean,
)

__all__ = ["AssumptionCheck", "BallGaps", "ball_gaps", "check_assumption", "flow_radius"]

Floats = npt.NDArray[np.float64]
CELLS = 12


@dataclass(frozen=True, eq=False)
class BallGaps:
    """g1 of Corollary E.3 and g2 of Corollary E.5 at each prompt length, for a ball of radius 2
    ``rho``; infinite where the bounds say nothing.
    """

    n: npt.NDArray[np.int64]
    rho: float
    risk: Floats
    gradient: Floats


def ball_gaps(task: LinearTask, rho: Any, lengths: Any, tasks: int = 8, seed: int = 0) -> BallGaps:
    """[S] Corollaries E.3 and E.5, with Lemmas E.2 and E.4 mended and the sharpened (16) in
    them.
    """
    n, radius = as_counts(lengths, "lengths"), 2.0 * as_positive(rho, "rho")
    laws = token_laws(task, tasks, seed)
    # E ||Gamma_w||^2
    fourth = float(np.mean([float(torch.linalg.matrix_norm(law, ord=2)) ** 2 for law in laws]))
    asked = float(torch.trace(task.query_sigma))
    label = math.sqrt(float(torch.sum(task.query_sigma * task.task_cov)) + task.noise)
    angles = np.linspace(0.0, 0.5 * math.pi, CELLS + 1)
    risk, by_gradient = np.zeros(n.size), np.zeros(n.size)
    for low, high in pairwise(angles):
        u, v = radius * math.sin(high), radius * math.cos(low)
        output, slope = _errors(task, laws, u, v, n)
        limit, gradient2 = (
            u * v * math.sqrt(fourth * asked),
            math.hypot(u, v) * math.sqrt(fourth * asked),
        )
        risk = np.maximum(risk, lemma_e2_mended(output, label, limit))
        by_gradient = np.maximum(by_gradient, lemma_e4(output, slope, label, limit, gradient2))
    return BallGaps(n, radius / 2.0, risk, by_gradient)


def flow_radius(task: LinearTask, start: Parameters, until: float = 1e3) -> float:
    """rho: the largest norm of (U, V) along the flow on an infinite prompt from ``start``, as
    Theorem 4.3 of [S] has it.
    """
    flow = gradient_flow(task, start, math.inf, times=flow_times(until, 40))
    return float(np.linalg.norm(flow.states, axis=1).max())


@dataclass(frozen=True, eq=False)
class AssumptionCheck:
    """Assumption 4.2 of [S] at one start: what it asks for, in numbers.

    ``query``: ||Sigma_q||, at most 1 in (i). ``sigma12``: E sigma_mu^12, finite in (ii).
    ``exponent``: c_2 of Proposition 3.1 in the ball. ``rate``: E[ln(n)^4 / n^(c_2 / sigma_mu^2)],
    which (ii) wants to vanish; ``falls_from``: the ln n after which it falls, from Laplace's
    method.
    """

    rho: float
    query: float
    sigma12: float
    exponent: float
    n: npt.NDArray[np.int64]
    rate: Floats
    falls_from: float

    @property
    def met(self) -> tuple[tuple[str, bool], ...]:
        """(iii) holds for Gaussian tokens with the moments of Lemma F.1."""
        return (
            ("(i) x_q is 1 sub-Gaussian: ||Sigma|| <= 1", self.query <= 1.0 + 1e-12),
            ("(ii) E sigma_mu^12 is finite", math.isfinite(self.sigma12)),
            (
                "(ii) E[ln(n)^4 / n^(c / sigma_mu^2)] falls at the lengths given",
                bool(self.rate[-1] < self.rate[0]),
            ),
            ("(iii) tilted moments are bounded: Gaussian tokens", True),
        )


def check_assumption(
    task: LinearTask, start: Parameters, lengths: Any = (10, 10**3, 10**6, 10**9, 10**12)
) -> AssumptionCheck:
    """Assumption 4.2 of [S] for a task and a start, rho being that of its flow.

    sigma_mu^2 = max(1, ||Sigma|| (1 + ||W|| zeta) + tau^2), zeta ~ chi^2(d): exact for Sigma and W
    that are multiples of I, a bound otherwise. The rate of (ii) vanishes as n grows, for every c;
    where its fall begins is another matter, and is told.
    """
    n, rho = as_counts(lengths, "lengths"), flow_radius(task, start)
    sizes = [
        float(torch.linalg.matrix_norm(matrix, ord=2)) for matrix in (task.sigma, task.task_cov)
    ]
    exponent = 2.0 * proposition_31_exponent(1.0, 2.0 * rho)

    def sigma2(zeta: float) -> float:
        return max(1.0, sizes[0] * sigma_mended(sizes[1] * zeta) + task.noise)

    return AssumptionCheck(
        rho=rho,
        query=float(torch.linalg.matrix_norm(task.query_sigma, ord=2)),
        sigma12=task_mean(lambda zeta: sigma2(zeta) ** 6, task.dim),
        exponent=exponent,
        n=n,
        rate=decay(np.log(n.astype(np.float64)), task.dim, exponent, 4, sigma2),
        falls_from=decay_begins(task.dim, exponent / (sizes[0] * sizes[1])),
    )


def _errors(
    task: LinearTask, laws: list[Tensor], u: float, v: float, n: npt.NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Root mean squares over tasks of the bounds on the output and on the gradient in (U, V), at
    norms u and v.
    """
    wide = torch.eye(task.dim + 1, task.dim, dtype=torch.float64)
    squares = []
    for law in laws:
        top = torch.linalg.eigh(law)[1][:, -1:]
        setting = setting_of(Head(u * wide, v * top.T), Gaussian(law), Gaussian(task.query_sigma))
        known = {each.name: each for each in [*averaged(setting), *gradients(setting)]}
        output, by_u, by_v = (
            known[name].rms(n) ** 2 for name in ("s-16-sharpened", "s-gradient-u", "s-gradient-v")
        )
        squares.append((output, by_u + by_v))
    output, slope = np.sqrt(np.mean(squares, axis=0))
    return output, slope
