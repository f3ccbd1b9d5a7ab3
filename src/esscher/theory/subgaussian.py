"""Sub-Gaussian parameters and norm moments of the laws of tokens, each with its proof in a line."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.pool import Pool
from esscher.measures.product import Cube, Laplace, Product, Rademacher
from esscher.measures.spectrum import product, spectral_norm
from esscher.measures.sphere import Ball, Rotational, Sphere

__all__ = ["norm_moment", "power", "subgaussian_matrices", "subgaussian_parameter", "support_radius", "value_fourth_moment"]

Floats = npt.NDArray[np.float64]

FLAT = 1e-6  # share of the trace that makes a flat ellipsoid solid


def subgaussian_parameter(measure: Measure) -> float | None:
    """A proved sigma with E exp<theta, y - E y> <= exp(sigma^2 |theta|^2 / 2) for every theta, or None.

    This is the definition used throughout [S] (its section C.1; "sigma sub-Gaussian" there means this sigma), for the
    centred law. Proofs, each for the centred law:

    - Gaussian: equality with sigma^2 = ||Sigma||_2.
    - Sphere: E <u, y>^{2k} = R^{2k} (2k-1)!! / (d (d+2) .. (d+2k-2)) is at most the moment of N(0, R^2/d): sigma^2 =
      R^2/d.
    - Ball: one factor d/(d+2k) more, so at most the moment of N(0, R^2/(d+2)): sigma^2 = R^2/(d+2).
    - Rademacher: cosh x <= exp(x^2/2), coordinates independent: sigma = scale.
    - Cube: sinh(x)/x <= exp(x^2/6), since (2k+1)! >= 6^k k!: sigma^2 = half_width^2/3.
    - Pool: <u, y> lies in an interval of length at most 2 rho, rho the radius of a ball round the tokens (Hoeffding):
      sigma = rho.
    - Mixture: exp of the components' transforms is at most that of the largest sigma_k, times the transform of the
      means, a pool of radius rho: sigma^2 = max_k sigma_k^2 + rho^2.
    - Laplace: the transform is infinite outside a strip, so no sigma exists.

    The first five are sharp (they equal ||Cov||_2); those of Pool and Mixture are upper bounds.
    """
    if isinstance(measure, Gaussian):
        return math.sqrt(measure.reach)
    if isinstance(measure, Sphere):
        return measure.radius / math.sqrt(measure.dim)
    if isinstance(measure, Ball):
        return measure.radius / math.sqrt(measure.dim + 2)
    if isinstance(measure, Rademacher):
        return measure.scale
    if isinstance(measure, Cube):
        return measure.half_width / math.sqrt(3.0)
    if isinstance(measure, Pool):
        return _ball_radius(_used_tokens(measure))
    if isinstance(measure, Mixture):
        parts = [subgaussian_parameter(c) for _, c in _used_components(measure)]
        if any(part is None for part in parts):
            return None
        means = torch.stack([c.mean.double() for _, c in _used_components(measure)])
        return math.hypot(max(part for part in parts if part is not None), _ball_radius(means))
    return None


def subgaussian_matrices(measure: Measure) -> list[Tensor]:
    """Proved matrices S with E exp<theta, y - E y> <= exp(theta^T S theta / 2) for every theta; none where none is known.

    This is the sub-Gaussian Sigma of [B]: the covariance only where the law is Gaussian or as good. Each S is valid, so a
    statement may take the one that gives it most. Proofs, each for the centred law:

    - Gaussian: equality with S = Sigma. Sphere, ball, Rademacher, cube: sigma^2 I, see ``subgaussian_parameter``.
    - Pool: where an ellipsoid (y - c)^T E^{-1} (y - c) <= 1 holds the tokens, <theta, y> lies in an interval of length
      2 sqrt(theta^T E theta), so S = E (Hoeffding). E: a ball, and k (C + eps I) with C the scatter about c and k the largest
      (y - c)^T (C + eps I)^{-1} (y - c), for c the mean and c the middle of the bounding box.
    - Mixture: with S_k of the components and U at least every S_k in Loewner's order, exp of the components' transforms is at
      most exp(theta^T U theta / 2) times the transform of the means, a pool: S = U + E. U is built by U <- U + (S_k - U)_+,
      the positive part; it is the largest S_k where there is one.
    - Laplace and other laws: none.
    """
    if isinstance(measure, Gaussian):
        return [measure.cov.double()]
    if isinstance(measure, Pool):
        return _ellipsoids(_used_tokens(measure))
    if isinstance(measure, Mixture):
        parts = [subgaussian_matrices(component) for _, component in _used_components(measure)]
        if not all(parts):
            return []
        upper = functools.reduce(_above, (min(part, key=spectral_norm) for part in parts))
        means = torch.stack([component.mean.double() for _, component in _used_components(measure)])
        return [upper + between for between in _ellipsoids(means)]
    sigma = subgaussian_parameter(measure)
    return [] if sigma is None else [sigma * sigma * torch.eye(measure.dim, dtype=torch.float64, device=measure.device)]


def _above(first: Tensor, second: Tensor) -> Tensor:
    """first + (second - first)_+, at least both in Loewner's order."""
    values, vectors = torch.linalg.eigh(second - first)
    upper: Tensor = first + (vectors * values.clamp_min(0.0)) @ vectors.T
    return upper


def _ellipsoids(points: Tensor) -> list[Tensor]:
    """Matrices E with (y - c)^T E^{-1} (y - c) <= 1 for all points and some c."""
    dim = points.shape[1]
    eye = torch.eye(dim, dtype=points.dtype, device=points.device)
    out = [_ball_radius(points) ** 2 * eye]
    for centre in _centres(points):
        apart = points - centre
        scatter = apart.T @ apart / points.shape[0]
        size = float(scatter.trace())
        if size > 0.0 and math.isfinite(size):
            shape = scatter + FLAT * size * eye
            reach = (apart * torch.linalg.solve(shape, apart.T).T).sum(dim=1).max()
            out.append(float(reach) * (1.0 + FLAT) * shape)  # the solution's rounding
    return out


def _centres(points: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the middle of the bounding box."""
    return points.mean(dim=0), 0.5 * (points.min(dim=0).values + points.max(dim=0).values)


def support_radius(measure: Measure) -> float | None:
    """A radius that |y - E y| never exceeds; None for unbounded or unknown laws."""
    if isinstance(measure, Rotational):
        return measure.radius
    if isinstance(measure, (Rademacher, Cube)):
        side = measure.scale if isinstance(measure, Rademacher) else measure.half_width
        return side * math.sqrt(measure.dim)
    if isinstance(measure, Pool):
        return float((_used_tokens(measure) - measure.mean.double()).norm(dim=1).max())
    if isinstance(measure, Mixture):
        mean = measure.mean.double()
        radii = [(support_radius(c), float((c.mean.double() - mean).norm())) for _, c in _used_components(measure)]
        return None if any(r is None for r, _ in radii) else max(r + apart for r, apart in radii if r is not None)
    return None


def norm_moment(measure: Measure, order: int) -> float | None:
    """E|y - E y|^order, ``order`` even; an upper bound for mixtures (Minkowski), exact otherwise, None if unknown."""
    if order < 2 or order % 2:
        raise ValueError(f"order: expected an even number of at least 2, got {order}")
    if isinstance(measure, Gaussian):
        spectrum = measure.spectrum
        return _from_cumulants([2.0 ** (r - 1) * math.factorial(r - 1) * float((spectrum**r).sum()) for r in _upto(order)])
    if isinstance(measure, Rotational):
        inside = measure.dim / (measure.dim + order) if isinstance(measure, Ball) else 1.0
        return power(measure.radius, order) * inside
    if isinstance(measure, Product):
        raw = [_raw_moment(measure, 2 * r) for r in _upto(order)]
        if any(math.isnan(moment) for moment in raw):
            return None
        moment = _from_cumulants([measure.dim * k for k in _to_cumulants(raw)])
        return math.inf if math.isnan(moment) else moment  # inf - inf: beyond float64
    if isinstance(measure, Pool):
        return _pool_moment(measure, None, order)
    if isinstance(measure, Mixture):
        return _mixture_moment(measure, None, order)
    return None


def value_fourth_moment(measure: Measure, V: Any) -> float | None:
    """E|V (y - E y)|^4; an upper bound for mixtures (Minkowski), exact otherwise, None for unknown laws.

    With G = V^T V: Gaussian (tr G Sigma)^2 + 2 tr (G Sigma)^2; sphere R^4 ((tr G)^2 + 2 tr G^2) / (d (d+2)), ball
    d/(d+4) of it; independent coordinates m_2^2 ((tr G)^2 + 2 tr G^2) + (m_4 - 3 m_2^2) sum_i G_ii^2.
    """
    V = as_tensor(V, "V", ndim=2, last=measure.dim).double()
    if isinstance(measure, Gaussian):
        spread = product(V, measure.root)
        cov = product(spread, spread.T)
        return float(cov.trace() ** 2 + 2.0 * (cov * cov).sum())
    G = product(V.T, V)
    isotropic = float(G.trace() ** 2 + 2.0 * (G * G).sum())
    if isinstance(measure, Rotational):
        d = measure.dim
        inside = d / (d + 4) if isinstance(measure, Ball) else 1.0
        return power(measure.radius, 4) * isotropic * inside / (d * (d + 2))
    if isinstance(measure, Product):
        m2, m4 = _raw_moment(measure, 2), _raw_moment(measure, 4)
        if math.isnan(m2):
            return None
        moment = m2 * m2 * isotropic + (m4 - 3.0 * m2 * m2) * float((G.diagonal() ** 2).sum())
        return math.inf if math.isnan(moment) else moment  # inf - inf: beyond float64
    if isinstance(measure, Pool):
        return _pool_moment(measure, V, 4)
    if isinstance(measure, Mixture):
        return _mixture_moment(measure, V, 4)
    return None


def power(number: float, order: int) -> float:
    """number^order, infinite beyond float64: an upper bound, where Python raises."""
    with np.errstate(over="ignore"):
        return float(np.float64(number) ** order)


def _raw_moment(measure: Product, order: int) -> float:
    """E y_i^order of one coordinate."""
    if isinstance(measure, Rademacher):
        return power(measure.scale, order)
    if isinstance(measure, Cube):
        return power(measure.half_width, order) / (order + 1)
    if isinstance(measure, Laplace):
        return math.factorial(order) * power(measure.scale, order)
    return math.nan


def _pool_moment(measure: Pool, V: Tensor | None, order: int) -> float:
    apart = measure.tokens.double() - measure.mean.double()
    sizes = (apart if V is None else apart @ V.T).norm(dim=1) ** order
    return float(sizes.mean() if measure.weights is None else sizes @ measure.weights)


def _mixture_moment(measure: Mixture, V: Tensor | None, order: int) -> float | None:
    total = 0.0
    for weight, component in _used_components(measure):
        own = norm_moment(component, order) if V is None else value_fourth_moment(component, V)
        if own is None:
            return None
        apart = component.mean.double() - measure.mean.double()
        total += weight * power(float((apart if V is None else V @ apart).norm()) + own ** (1.0 / order), order)
    return total


def _used_components(measure: Mixture) -> list[tuple[float, Measure]]:
    return [(float(w), c) for w, c in zip(measure.weights, measure.components, strict=True) if float(w) > 0]


def _used_tokens(measure: Pool) -> Tensor:
    tokens = measure.tokens.double()
    return tokens if measure.weights is None else tokens[measure.weights > 0]


def _ball_radius(points: Tensor) -> float:
    """Radius of a ball that holds the points: the better of the centres mean and middle of the bounding box."""
    return min(float((points - centre).norm(dim=1).max()) for centre in _centres(points))


def _upto(order: int) -> range:
    return range(1, order // 2 + 1)


def _from_cumulants(cumulants: list[float]) -> float:
    """The last raw moment that goes with cumulants 1 .. r."""
    moments = [1.0]
    for r in range(1, len(cumulants) + 1):
        moments.append(sum(math.comb(r - 1, j - 1) * cumulants[j - 1] * moments[r - j] for j in range(1, r + 1)))
    return moments[-1]


def _to_cumulants(raw: list[float]) -> list[float]:
    moments = [1.0, *raw]
    cumulants: list[float] = []
    for r in range(1, len(moments)):
        below = sum(math.comb(r - 1, j - 1) * cumulants[j - 1] * moments[r - j] for j in range(1, r))
        cumulants.append(moments[r] - below)
    return cumulants
