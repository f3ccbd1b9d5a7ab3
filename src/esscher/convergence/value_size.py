"""How far a token's value lies from the limit, c = V y + v0 - Gamma, under the tilted law: nodes of
|c|, and c's mean there.

Neyman's rule asks for it: tokens are drawn in proportion to e |c|, and the score then counts no
more. Gaussian tokens stay Gaussian when tilted, so c is N(a, C), C = V Sigma V^T. Where C = sigma^2
I on its own span, of dimension r, and alpha is the length of a in it, the length rho of c in that
span has the density

    rho^(r-1) exp(-(rho^2 + alpha^2) / (2 sigma^2) + K_{r/2}(rho alpha / sigma^2))
    up to a constant,

and c given rho has the mean rho B_{r/2}(rho alpha / sigma^2) along a; K and B are those of a
uniform law on a sphere. Where a = 0, which is one Gaussian alone, |c|^2 is a sum of squares for any
C, and its density that of ``ScoreLaw``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.convergence.queries.score import ScoreLaw
from esscher.measures.base import Measure
from esscher.measures.line import graded
from esscher.measures.matrices import product
from esscher.measures.radial import radial

__all__ = ["Sizes", "drawn_sizes", "tilted_sizes"]

REACH = 12.0  # deviations
HALVINGS = 40  # of the panels towards |c| = 0
ALIKE = 1e-10  # relative spread of eigenvalues taken for equal


@dataclass(frozen=True)
class Sizes:
    """Under the tilted law: |c| (N,), logarithms of weights (N,), the mean of c given the node (N,
    d).
    """

    size: Tensor
    log_weights: Tensor
    centre: Tensor


def tilted_sizes(head: Head, measure: Measure, theta: Tensor, limit: Tensor) -> Sizes | None:
    """At one tilt (d,); None where neither the law nor the head is of a kind that leaves |c|
    one-dimensional.
    """
    parts, rotational = measure.gaussian_parts(), measure.as_rotational()
    if parts is not None:
        return _of_gaussians(head, [(weight, law) for weight, law in parts], theta, limit)
    if rotational is not None and not _keeps_angles(head.V.double()):
        return None
    if rotational is None and measure.as_pool() is None and measure.points() is None:
        return None
    lines = measure.along(theta)
    if lines is None:
        return None
    scores, weights = (
        torch.cat([line.scores for line in lines]),
        torch.cat([line.log_weights for line in lines]),
    )
    centre = head.values(torch.cat([line.means for line in lines])) - limit
    extra = torch.cat([line.extra(head.V.double()) for line in lines])
    return Sizes(
        (centre.square().sum(1) + extra).sqrt(), torch.log_softmax(scores + weights, 0), centre
    )


def drawn_sizes(head: Head, tokens: Tensor, theta: Tensor) -> Sizes:
    """Of given tokens, equally likely; their own limit is the limit."""
    weights = torch.log_softmax(tokens @ theta, 0)
    values = head.values(tokens)
    centre = values - values[0]
    centre = centre - weights.exp() @ centre
    return Sizes(centre.norm(dim=1), weights, centre)


def _keeps_angles(V: Tensor) -> bool:
    """V^T V is a multiple of the identity: |V y| is that of |y|."""
    gram = product(V.T, V)
    size = float(gram.diagonal().mean())
    return bool((gram - size * torch.eye(len(gram)).to(gram)).abs().max() <= ALIKE * size)


def _of_gaussians(
    head: Head, parts: list[tuple[float, Measure]], theta: Tensor, limit: Tensor
) -> Sizes | None:
    V, found, logs = head.V.double(), [], []
    for weight, law in parts:
        spread = product(V, law.root)
        values, basis = torch.linalg.eigh(product(spread, spread.T))
        values = torch.where(values > ALIKE * values.max(), values, 0.0)
        apart = (
            head.values(law.tilted_mean(theta)[None])[0] - limit
            if len(parts) > 1
            else torch.zeros_like(limit)
        )
        used = values > 0
        if not bool(used.any()):
            nodes = Sizes(apart.norm()[None], apart.new_zeros(1), apart[None])
        elif float(values.max()) - float(values[used].min()) <= ALIKE * float(values.max()):
            nodes = _noncentral(apart, basis[:, used], math.sqrt(float(values[used].mean())))
        elif len(parts) == 1:
            nodes = _central(values[used].cpu().numpy(), limit)
        else:
            return None
        found.append(nodes)
        logs.append(math.log(weight) + float(law.log_laplace(theta)))
    shares = torch.log_softmax(torch.tensor(logs, dtype=torch.float64), 0).tolist()
    weights = torch.cat(
        [nodes.log_weights + share for nodes, share in zip(found, shares, strict=True)]
    )
    return Sizes(
        torch.cat([nodes.size for nodes in found]),
        weights,
        torch.cat([nodes.centre for nodes in found]),
    )


def _noncentral(apart: Tensor, span: Tensor, sigma: float) -> Sizes:
    """N(apart, sigma^2) on the span, fixed across it."""
    r, inside = span.shape[1], span @ (span.T @ apart)
    alpha = float(inside.norm())
    # the density of rho has its bell near sqrt(alpha^2 + (r - 1) sigma^2), at most sigma wide
    bell = math.hypot(alpha, math.sqrt(r - 1) * sigma)
    rho, lengths = (
        x.to(apart)
        for x in graded(max(0.0, bell - REACH * sigma), bell + REACH * sigma, sigma, HALVINGS)
    )
    at = radial(r / 2, (rho * alpha / sigma**2).square())
    log_density = (
        (r - 1) * rho.log() - (rho.square() + alpha * alpha) / (2 * sigma * sigma) + at.log
    )
    along = rho.square() / sigma**2 * at.ratio  # rho B(rho alpha / sigma^2) / alpha
    across = apart - inside
    size = (rho.square() + across.square().sum()).sqrt()
    return Sizes(
        size, torch.log_softmax(lengths.log() + log_density, 0), across + along[:, None] * inside
    )


def _central(values: np.ndarray, limit: Tensor) -> Sizes:
    """N(0, C), ``values`` the eigenvalues of C above 0."""
    levels, counts = np.unique(values, return_counts=True)
    none = np.zeros_like(levels)
    law = ScoreLaw(
        levels,
        counts.astype(np.float64),
        none,
        none,
        np.zeros((levels.size + 1, levels.size + 1)),
        0.0,
    )
    bell, unit = math.sqrt(law.mean), math.sqrt(float(levels.max()))
    rho, lengths = graded(max(0.0, bell - REACH * unit), bell + REACH * unit, unit, HALVINGS)
    log_scale, density, _ = law.densities((rho**2).numpy())
    log_density = torch.from_numpy(log_scale + np.log(np.maximum(density, 1e-300))) + rho.log()
    return Sizes(
        rho.to(limit),
        torch.log_softmax(lengths.log() + log_density, 0).to(limit),
        limit.new_zeros(len(rho), len(limit)),
    )
