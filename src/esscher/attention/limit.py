"""Attention on infinitely many tokens; and the mean and covariance of its outputs when the query is
itself a token of the law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.inputs import as_tensor, finite_result
from esscher.measures.base import Measure
from esscher.measures.pool import Pool
from esscher.measures.radial import scaled_ratio
from esscher.measures.rotational import Rotational

Outputs = Callable[[Tensor], Tensor]
Array = npt.NDArray[np.float64]

SAMPLES = 1 << 16  # queries of a sampled estimate
POOL_QUERIES = 1 << 14  # a larger pool is sampled, not enumerated
NODES = 400  # of the integrals below; every other node gives the error estimate
LENGTHS = 48  # nodes of a query's length, where it varies
KINKS_DIM = 24  # up to here the density's kinks at the eigenvalues are rough enough to matter


@dataclass(frozen=True, eq=False)
class Pushforward:
    """Mean and covariance of the outputs, with their errors (L2, Frobenius) and the method that
    gave them; unpacks as (mean, cov).

    Errors are bounds from rounding ("closed form"), from comparing two resolutions ("quadrature"),
    or one standard error ("sampled").
    """

    mean: Float64[Tensor, " d_out"]
    cov: Float64[Tensor, "d_out d_out"]
    mean_error: float
    cov_error: float
    method: str

    def __post_init__(self) -> None:
        errors = torch.tensor([self.mean_error, self.cov_error])
        for name, part in (("mean", self.mean), ("cov", self.cov), ("errors", errors)):
            finite_result(part, f"pushforward: {name}", "scale the head or the law down")

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.mean, self.cov))


@dataclass(frozen=True)
class Limit:
    """What attention of one head tends to, callable on rows of queries.

    - softmax: Gamma(x) = V grad K(theta(x)) + v0, the mean value under the Esscher transform of the
      law by the tilt theta(x). [B]: Gamma_mu; [S]: T[mu]. For N(m, Sigma): V (m + Sigma theta(x)) +
      v0, affine in x [S, Lemma 2.1].
    - linear, (1/n)-normalised: E[<y, theta(x)> (V y + v0)] = V E[y y^T] theta(x) + v0 <E y,
      theta(x)>. Equal to the softmax limit for centred Gaussian tokens and different otherwise
      [S, B.2].
    - hardmax: the value of the support's point furthest along the tilt. Bounded laws only.
    """

    head: Head
    measure: Measure
    kernel: str

    def __post_init__(self) -> None:
        check_pair(self.head, self.measure)

    def __call__(self, queries: Any) -> Float[Tensor, "*batch d_out"]:
        x = as_tensor(queries, "queries")
        tilt = self.head.tilt(x.double())
        if self.kernel == "linear":
            out = tilt @ self._linear_map().T
        else:
            law = self.measure
            means = law.tilted_mean(tilt) if self.kernel == "softmax" else law.extreme(tilt)
            out = self.head.values(means)
        remedy = "scale the head, the law or the queries down, or use float64"
        return finite_result(out.to(x.dtype), "limit", remedy)

    def _linear_map(self) -> Float64[Tensor, "d_out d"]:
        mean = self.measure.mean.double()
        out = self.head.V.double() @ (self.measure.cov.double() + torch.outer(mean, mean))
        bias = self.head.value_bias
        return out if bias is None else out + torch.outer(bias.double(), mean)

    def pushforward(self) -> Pushforward:
        """Mean and covariance of the outputs for x ~ measure."""
        head, law = self.head, self.measure
        if head.dim_query != law.dim:
            raise ValueError(
                f"pushforward: queries drawn from the measure have dimension {law.dim}, the head"
                f" expects {head.dim_query}"
            )
        if self.kernel == "linear" or (self.kernel == "softmax" and law.is_gaussian):
            linear = self.kernel == "linear"
            to_output = self._linear_map() if linear else head.V.double() @ law.cov.double()
            zero = torch.zeros(head.dim_query, dtype=torch.float64, device=law.device)
            return _affine(to_output @ head.A.double(), self(zero), law)
        pool = law.as_pool()
        if self.kernel == "softmax" and isinstance(law, Rotational) and head.query_bias is None:
            return _rotational(head, law)
        if self.kernel == "softmax" and pool is not None:
            return _pooled(self, pool)
        return sampled(self, law)


def limit(head: Head, measure: Measure) -> Limit:
    """Softmax attention of ``head`` on infinitely many tokens of ``measure``."""
    return Limit(head, measure, "softmax")


def linear_limit(head: Head, measure: Measure) -> Limit:
    """(1/n)-normalised linear attention on infinitely many tokens."""
    return Limit(head, measure, "linear")


def hardmax_limit(head: Head, measure: Measure) -> Limit:
    """Hardmax attention on infinitely many tokens."""
    return Limit(head, measure, "hardmax")


def second_tilt(
    head: Head, measure: Measure, theta: Float64[Tensor, "*batch d"]
) -> tuple[Float64[Tensor, "*batch"], Float64[Tensor, "*batch d_out"], Float64[Tensor, "*b d d"]]:
    """(log_growth, shift, cov) of the law tilted twice as far, which squared weights see.

    With e = exp<theta, y> and c = V y - Gamma(x): E[e^2 f(y)] / (E e)^2 = exp(log_growth) E_{2
    theta} f(y), log_growth = K(2 theta) - 2 K(theta); shift = E_{2 theta} c, cov = Hess K(2 theta).
    The delta method's matrix is C = exp(log_growth) (V cov V^T + shift shift^T).
    """
    log_growth = measure.log_laplace(2 * theta) - 2 * measure.log_laplace(theta)
    shift = (measure.tilted_mean(2 * theta) - measure.tilted_mean(theta)) @ head.V.double().T
    return log_growth, shift, measure.tilted_cov(2 * theta)


# ---- pushforwards


def _affine(
    matrix: Float64[Tensor, "d_out d"], offset: Float64[Tensor, " d_out"], measure: Measure
) -> Pushforward:
    """Outputs matrix x + offset of any law."""
    mean = matrix @ measure.mean.double() + offset
    cov = matrix @ measure.cov.double() @ matrix.T
    return _closed(mean, cov, float(mean.detach().norm()), float(measure.dim))


def _pooled(outputs: Outputs, pool: Pool) -> Pushforward:
    """Every token of the pool is a query; pools above ``POOL_QUERIES`` tokens are sampled."""
    if pool.size > POOL_QUERIES:
        return sampled(outputs, pool, POOL_QUERIES)
    values = outputs(pool.tokens.double())
    mean = values.mean(0)
    cov = (values - mean).T @ (values - mean) / pool.size
    return _closed(mean, cov, float(values.detach().norm(dim=1).max()), math.sqrt(pool.size))


def _closed(mean: Tensor, cov: Tensor, size: float, terms: float) -> Pushforward:
    eps = torch.finfo(torch.float64).eps * terms
    return Pushforward(mean, cov, eps * size, eps * float(cov.detach().norm()), "closed form")


def sampled(outputs: Outputs, measure: Measure, samples: int = SAMPLES) -> Pushforward:
    """Plain Monte Carlo over queries with one standard error; the seed is fixed, so the answer
    repeats.
    """
    queries = measure.sample(samples, torch.Generator().manual_seed(0)).double()
    parts = [outputs(block) for block in queries.chunk(32)]
    values = torch.cat(parts)
    mean = values.mean(dim=0)
    cov = (values - mean).T @ (values - mean) / (samples - 1)
    batch_covs = torch.stack([torch.cov(part.T).reshape(cov.shape) for part in parts])
    cov_error = float(batch_covs.detach().std(dim=0).norm()) / math.sqrt(len(parts))
    mean_error = math.sqrt(float(cov.detach().trace()) / samples)
    return Pushforward(mean, cov, mean_error, cov_error, "sampled")


def _rotational(head: Head, measure: Rotational) -> Pushforward:
    """Sphere and ball, for a head without tilt bias: the output depends on the query through one
    quadratic form.

    With A = a P diag(b) W^T, b_1 = 1 the largest, x = R w and Q = sum_i b_i^2 w_i^2 (w uniform on
    the unit sphere, in the basis W), S = R^2 a and r = S sqrt(Q), the tilted mean is R S q_v(r) P
    diag(b) w, so that its mean is 0 and its covariance

        P diag( R^2 b_i^2 E[ (S q_v(r))^2 w_i^2 ] ) P^T.

    In the ball x = R t w with density d t^(d-1) of the radius t in [0, 1].
    """
    left, singular, _ = torch.linalg.svd(head.A.detach().double().cpu(), full_matrices=False)
    largest = float(singular[0])
    if largest > 0.0:
        singular = singular / largest
    lengths, chances = measure.lengths(LENGTHS)
    radii, size = lengths / measure.radius, measure.radius * (measure.radius * largest)

    def profile(form: Array) -> Array:
        """Q -> E[ (S q_v(S t sqrt(Q)))^2 t^2 ] over the length R t of the query."""
        roots = torch.from_numpy(radii * np.sqrt(form[..., None]))
        return scaled_ratio(measure.order, size, roots).numpy() ** 2 @ (chances * radii**2)

    weights, error = _weighted_moments(singular.numpy() ** 2, profile)
    factor = measure.radius * (head.V.detach().double().cpu() @ left) * singular
    cov = (factor * torch.from_numpy(weights)) @ factor.T
    mean = torch.zeros(head.dim_out, dtype=torch.float64)
    if head.value_bias is not None:
        mean = head.value_bias.detach().double().cpu()
    bound = error * float((factor * factor).sum())
    return Pushforward(mean.to(measure.device), cov.to(measure.device), 0.0, bound, "quadrature")


def _weighted_moments(eigenvalues: Array, profile: Callable[[Array], Array]) -> tuple[Array, float]:
    """E[g(Q) w_i^2] = int g(x) f_i(x) dx for each i, Q = sum_j lambda_j w_j^2, w uniform on the
    unit sphere, and the largest error over i: the difference to half the nodes, plus what the total
    mass misses.

    Tanh-sinh rule, because the densities f_i may be singular at the ends; in low dimension they
    have a kink at each eigenvalue, so the range is cut there.
    """
    d, mean = eigenvalues.size, float(eigenvalues.mean())
    if np.ptp(eigenvalues) <= 1e-13 * mean or mean == 0.0:  # an isotropic map: the form is constant
        return np.full(d, float(profile(np.array([mean]))[0]) / d), 1e-14
    cuts = np.unique(eigenvalues if d <= KINKS_DIM else [eigenvalues.min(), eigenvalues.max()])
    cuts = cuts[np.concatenate([[True], np.diff(cuts) > 1e-9 * cuts[-1]])]
    count = NODES if cuts.size == 2 else 64
    steps = np.linspace(-2.9, 2.9, count + 1)
    share = scipy.special.expit(np.pi * np.sinh(steps))
    weights = (steps[1] - steps[0]) * np.pi * np.cosh(steps) * share * (1.0 - share)
    widths = np.diff(cuts)[:, None]
    points, jacobian = (cuts[:-1, None] + widths * share).ravel(), (widths * weights).ravel()
    half = np.tile(2.0 * (np.arange(count + 1) % 2 == 0), len(widths))
    densities, coarse = _densities(eigenvalues, points)
    g = profile(points) * jacobian
    fine = densities.T @ g
    error = np.abs(fine - coarse.T @ g).max() + np.abs(fine - densities.T @ (g * half)).max()
    missing = abs(float((densities.T @ jacobian).sum()) - 1.0)
    return fine, float(error + missing * np.abs(fine).max())


def _densities(eigenvalues: Array, points: Array) -> tuple[Array, Array]:
    """f_i(x) = E[w_i^2 delta(Q - x)] at each point (points x i), and the same from every other
    node.

    Imhof's inversion of P(sum_j (lambda_j - x) z_j^2 <= 0), differentiated in lambda_i:

        f_i(x) = (1 / pi) Re int_0^inf prod_j (1 - 2iu (lambda_j - x))^(-1/2)
            / (1 - 2iu (lambda_i - x)) du.

    u = scale * sinh(y) covers Gaussian decay and, in low dimension, the algebraic one u^(-d/2).
    """
    y = np.linspace(0.0, max(12.0, 120.0 / eigenvalues.size), NODES + 1)
    weights = np.cosh(y) * (y[1] - y[0]) * np.where(y == 0.0, 0.5, 1.0) / np.pi
    fine, coarse = np.empty((2, points.size, eigenvalues.size))
    for row, point in enumerate(points):
        slopes = 2.0 * (eigenvalues - point)
        scale = 1.0 / math.sqrt(0.5 * float((slopes**2).sum()))
        x = scale * np.sinh(y)[:, None] * slopes
        modulus = scale * weights * np.exp(-0.25 * np.log1p(x * x).sum(axis=1))
        angle = 0.5 * np.arctan(x).sum(axis=1)
        real, imaginary = (modulus * np.cos(angle))[:, None], (modulus * np.sin(angle))[:, None]
        integrand = (real - imaginary * x) / (1.0 + x * x)
        fine[row], coarse[row] = integrand.sum(axis=0), 2.0 * integrand[::2].sum(axis=0)
    return fine, coarse
