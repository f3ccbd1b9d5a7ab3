"""A law seen along one tilt: nodes on the line of scores, with the mean and spread of the token
given its score.

The exact error of attention needs E[h(score) |V y|^2] and its like. When the token given its score
has a known mean and covariance, these are one-dimensional integrals whatever d is; here they become
weighted nodes of a trapezoid rule on the whole line with a step in the score of at most ``STEP``;
the functions it meets are analytic for |Im score| < pi/2, so its error is about exp(-pi^2 / STEP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

STEP = 0.3
NEGLIGIBLE = 46.0  # nodes below exp(-46) of the largest, tilted or not, are left out
MAX_NODES = 1 << 21
# nodes of a panel: of half-length L, nearest singularity L a away, error (a + sqrt(a^2 - 1))^-24
X, W = np.polynomial.legendre.leggauss(12)


@dataclass(frozen=True)
class Line:
    """Nodes of one law along one tilt: node i has score <theta, y> = ``scores[i]``, probability
    exp(``log_weights[i]``), token mean ``means[i]`` and token covariance ``spread[i]`` ``across``
    ``across``^T, a root, so that rounding makes no variance negative.
    """

    scores: Float64[Tensor, " N"]
    log_weights: Float64[Tensor, " N"]
    means: Float64[Tensor, "N d"]
    spread: Float64[Tensor, " N"]
    across: Float64[Tensor, "d r"]

    def extra(self, V: Float64[Tensor, "d_out d"]) -> Float64[Tensor, " N"]:
        """Trace of the value's covariance given the score."""
        return self.spread * float((V @ self.across).square().sum())


def points(
    theta: Float64[Tensor, " d"],
    tokens: Float64[Tensor, "N d"],
    log_weights: Float64[Tensor, " N"] | None = None,
) -> Line:
    """The given tokens, without spread; equally likely where no weights are given."""
    if log_weights is None:
        log_weights = torch.full_like(tokens[:, 0], -math.log(tokens.shape[0]))
    no_spread = theta.new_zeros(theta.numel(), 0)
    return Line(tokens @ theta, log_weights, tokens, torch.ones_like(log_weights), no_spread)


def normalised(log_weights: Float64[Tensor, " N"]) -> Float64[Tensor, " N"]:
    return log_weights - torch.logsumexp(log_weights, 0)


def ladder(start: float, end: float, step: float) -> Float64[Tensor, " N"]:
    """Equally spaced nodes."""
    nodes = (end - start) / step
    check_nodes(nodes)
    return start + step * torch.arange(math.ceil(nodes) + 1, dtype=torch.float64)


def check_nodes(count: float) -> None:
    if not count < MAX_NODES:
        raise ValueError(
            f"queries: a score range this wide needs {count:.3g} nodes, at most {MAX_NODES} are"
            " used; scale the head down"
        )


def invert(
    increasing: Callable[[Tensor], Tensor], target: Tensor, low: float, high: float
) -> Tensor:
    """Solve increasing(y) = target between two ends by bisection, all at once."""
    left, right = torch.full_like(target, low), torch.full_like(target, high)
    for _ in range(60):
        middle = 0.5 * (left + right)
        above = increasing(middle) > target
        left, right = torch.where(above, left, middle), torch.where(above, middle, right)
    return 0.5 * (left + right)


def edge(exponent: Callable[[float], float]) -> float:
    """The y > 0 beyond its peak where a unimodal exponent has fallen by NEGLIGIBLE."""
    best, y, step = exponent(0.0), 0.0, 1e-3
    while True:
        y += step
        value = exponent(y)
        if value > best:
            best = value
        elif value < best - NEGLIGIBLE:
            return y
        step *= 1.02


def graded(
    first: float, last: float, unit: float, halvings: int
) -> tuple[Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Gauss-Legendre nodes and weights on [first, last], first >= 0: panels of length ``unit`` at
    most, and ever shorter towards 0.
    """
    edges = np.append(0.0, unit * 2.0 ** np.arange(-halvings, 1.0))
    edges = edges[edges > first]
    start = first if edges.size == 0 else float(edges[-1])
    far = np.linspace(start, last, max(1, math.ceil((last - start) / unit)) + 1)
    ends = np.concatenate([np.append(first, edges[:-1]) if edges.size else edges, far])
    half, middle = 0.5 * np.diff(ends)[:, None], 0.5 * (ends[1:] + ends[:-1])[:, None]
    return torch.from_numpy((middle + half * X).ravel()), torch.from_numpy((half * W).ravel())
