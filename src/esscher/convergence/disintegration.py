"""A law seen along one tilt: nodes on the line of scores, with the mean and spread of the token given its score.

The exact error of attention needs E[h(score) |V y|^2] and its like. When the token given its score has a known mean and
covariance, these are one-dimensional integrals whatever d is; here they become weighted nodes. All rules are trapezoid rules
of analytic functions on the whole line, with a step in the score of at most ``STEP``: the functions they meet are analytic
for |Im score| < pi/2, so the error is about exp(-pi^2 / STEP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.pool import Pool
from esscher.measures.product import Cube, Laplace, Rademacher
from esscher.measures.sphere import Ball, Rotational, Sphere

__all__ = ["MAX_NODES", "Line", "cosine_nodes", "disintegrate", "is_line"]

STEP = 0.3
NEGLIGIBLE = 46.0  # nodes below exp(-46) of the largest, tilted or not, are left out
MAX_NODES = 1 << 21
CORNERS = 12  # Rademacher laws up to this dimension are listed corner by corner


@dataclass(frozen=True)
class Line:
    """Nodes of one law along one tilt.

    Node i has score <theta, y> = ``scores[i]``, probability exp(``log_weights[i]``), token mean ``means[i]`` and token
    covariance ``spread[i]`` ``across`` ``across``^T: a root, so that rounding makes no variance negative.
    """

    scores: Float64[Tensor, " N"]
    log_weights: Float64[Tensor, " N"]
    means: Float64[Tensor, "N d"]
    spread: Float64[Tensor, " N"]
    across: Float64[Tensor, "d r"]

    def extra(self, V: Float64[Tensor, "d_out d"]) -> Float64[Tensor, " N"]:
        """Trace of the value's covariance given the score."""
        return self.spread * float((V @ self.across).square().sum())


def is_line(measure: Measure) -> bool:
    """Whether the law has exact nodes along every tilt."""
    if isinstance(measure, Mixture):
        return all(is_line(component) for component in measure.components)
    if isinstance(measure, Cube | Laplace):
        return measure.dim == 1
    if isinstance(measure, Rademacher):
        return measure.dim <= CORNERS
    return isinstance(measure, Gaussian | Rotational | Pool)


@singledispatch
def disintegrate(measure: Measure, theta: Float64[Tensor, " d"]) -> list[Line]:
    """The law along ``theta`` as one or several sets of nodes whose weights sum to one together."""
    raise NotImplementedError(f"{type(measure).__name__} has no nodes along a tilt")


@disintegrate.register
def _(measure: Gaussian, theta: Tensor) -> list[Line]:
    """Score m.theta + s g, token m + L u g with covariance L (I - u u^T) L^T; L L^T = Sigma, u = L^T theta / s, s its length.

    Whatever unit vector u is, these are two parts of the same Gaussian: rounding of u costs nothing where s nearly vanishes.
    """
    mean, root = measure.mean.double(), measure.root
    u = root.T @ theta
    s = float(u.norm())
    if s == 0.0:
        return [_points((theta @ mean)[None], mean[None], root)]
    # weights tilt by up to exp(2 score), which moves the bell to g = 2s
    g = _ladder(-10.0, 2 * s + 10.0, min(0.25, STEP / s)).to(theta.device)
    u = u / s
    log_weights = _normalised(-0.5 * g * g)
    means = mean + g[:, None] * (root @ u)
    across = root - torch.outer(root @ u, u)
    return [Line(float(theta @ mean) + s * g, log_weights, means, torch.ones_like(g), across)]


@disintegrate.register
def _(measure: Rotational, theta: Tensor) -> list[Line]:
    """Token R (x u + sqrt(1 - x^2) w): x the cosine, w uniform across u."""
    size = float(theta.norm())
    u = theta / size if size > 0 else torch.eye(measure.dim, dtype=theta.dtype, device=theta.device)[0]
    across = torch.eye(measure.dim, dtype=theta.dtype, device=theta.device) - torch.outer(u, u)
    r = measure.radius * size
    x, log_weights, spread = cosine_nodes(measure, r)
    return [Line(r * x, log_weights, measure.radius * x[:, None] * u, measure.radius**2 * spread, across)]


def cosine_nodes(measure: Rotational, r: float) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of the cosine x = <y, u> / R for tilts up to r = R |theta|: x, log-weights, variance of each coordinate across u.

    x has density (1 - x^2)^((p-3)/2), p = d on the sphere and d + 2 in the ball. With x = tanh y the weight is sech(y)^(p-1),
    smooth on the whole line; given x each coordinate across has variance (1 - x^2) / (p - 1).
    """
    assert isinstance(measure, Sphere | Ball)
    p = measure.dim + (2 if isinstance(measure, Ball) else 0)
    if p == 1:  # two points
        ends = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=measure.device)
        return ends, torch.full_like(ends, -math.log(2.0)), torch.zeros_like(ends)
    _check_nodes(r / STEP)  # at least so many; beyond them the edge is lost in the rounding of r
    end = _edge(lambda y: (p - 1) * _log_sech(y) + 2 * r * math.tanh(y))  # the weight tilts by up to exp(2 score)
    start = _edge(lambda y: (p - 1) * _log_sech(y))
    # z = y / h + r tanh(y) / STEP: unit steps in z are at most h in y and at most STEP in the score
    h = min(0.2, 0.5 / math.sqrt(p))
    first, last = (y / h + r * math.tanh(y) / STEP for y in (-start, end))
    z = _ladder(first, last, 1.0).to(measure.device)
    y = _invert(lambda y: y / h + r * torch.tanh(y) / STEP, z, -start - 1.0, end + 1.0)
    sech2 = 1.0 / torch.cosh(y) ** 2
    log_density = -(p - 1) * (y.abs() + torch.log1p(torch.exp(-2 * y.abs())))
    log_weights = _normalised(log_density - torch.log(1.0 / h + r * sech2 / STEP))
    return torch.tanh(y), log_weights, sech2 / (p - 1)


@disintegrate.register
def _(measure: Pool, theta: Tensor) -> list[Line]:
    tokens = measure.tokens.double()
    line = _points(tokens @ theta, tokens, theta.new_zeros(measure.dim, 0))
    return [line if measure.weights is None else _reweighted(line, measure.weights.log())]


@disintegrate.register
def _(measure: Rademacher, theta: Tensor) -> list[Line]:
    corners = torch.cartesian_prod(*(measure.dim * [torch.tensor([-1.0, 1.0], dtype=theta.dtype, device=theta.device)]))
    return disintegrate(Pool(measure.scale * corners.reshape(-1, measure.dim)), theta)


@disintegrate.register
def _(measure: Cube, theta: Tensor) -> list[Line]:
    return disintegrate(Ball(1, measure.half_width, device=measure.device), theta)


@disintegrate.register
def _(measure: Laplace, theta: Tensor) -> list[Line]:
    """Token +-b e^z with weight exp(z - e^z) / 2: one dimension only, no spread."""
    size = measure.scale * abs(float(theta))
    top = math.log(2.5 * NEGLIGIBLE / (1.0 - size))
    z = _ladder(-NEGLIGIBLE, top, min(0.1, STEP / (size * math.exp(top)) if size > 0 else 1.0)).to(theta.device)
    z = torch.cat([z, z])
    sign = torch.ones_like(z)
    sign[: z.numel() // 2] = -1.0
    tokens = (sign * measure.scale * torch.exp(z))[:, None]
    line = _points(tokens @ theta, tokens, theta.new_zeros(1, 0))
    return [_reweighted(line, _normalised(z - torch.exp(z)))]


@disintegrate.register
def _(measure: Mixture, theta: Tensor) -> list[Line]:
    lines = []
    for weight, component in zip(measure.weights, measure.components, strict=True):
        if float(weight) > 0:
            lines += [_reweighted(line, line.log_weights + weight.log()) for line in disintegrate(component, theta)]
    return lines


def _points(scores: Tensor, tokens: Tensor, across: Tensor, spread: Tensor | None = None) -> Line:
    """Equally likely nodes."""
    log_weights = torch.full_like(scores, -math.log(scores.numel()))
    return Line(scores, log_weights, tokens, torch.ones_like(scores) if spread is None else spread, across)


def _reweighted(line: Line, log_weights: Tensor) -> Line:
    return Line(line.scores, log_weights, line.means, line.spread, line.across)


def _normalised(log_weights: Tensor) -> Tensor:
    return log_weights - torch.logsumexp(log_weights, 0)


def _ladder(start: float, end: float, step: float) -> Tensor:
    nodes = (end - start) / step
    _check_nodes(nodes)
    count = math.ceil(nodes) + 1
    return start + step * torch.arange(count, dtype=torch.float64)


def _check_nodes(count: float) -> None:
    if not count < MAX_NODES:
        raise ValueError(
            f"queries: a score range this wide needs {count:.3g} nodes, at most {MAX_NODES} are used; scale the head down"
        )


def _invert(increasing: Callable[[Tensor], Tensor], target: Tensor, low: float, high: float) -> Tensor:
    """Solve increasing(y) = target between two ends by bisection, all at once."""
    left, right = torch.full_like(target, low), torch.full_like(target, high)
    for _ in range(60):
        middle = 0.5 * (left + right)
        above = increasing(middle) > target
        left, right = torch.where(above, left, middle), torch.where(above, middle, right)
    return 0.5 * (left + right)


def _log_sech(y: float) -> float:
    return math.log(2.0) - abs(y) - math.log1p(math.exp(-2 * abs(y)))


def _edge(exponent: Callable[[float], float]) -> float:
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
