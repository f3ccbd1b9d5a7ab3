"""Attention on infinitely many tokens; and the mean and covariance of its outputs when the query is
itself a token of the law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.inputs import as_tensor, finite_result
from esscher.measures.base import Measure
from esscher.measures.matrices import is_multiple_of_identity
from esscher.measures.pool import Pool
from esscher.measures.radial import radial
from esscher.measures.rotational import Rotational

Outputs = Callable[[Tensor], Tensor]

SAMPLES = 1 << 16  # queries of a sampled estimate
POOL_QUERIES = 1 << 14  # a larger pool is sampled, not enumerated
LENGTHS = 48  # nodes of a query's length, where it varies


@dataclass(frozen=True, eq=False)
class Pushforward:
    """Mean and covariance of the outputs, with their errors (L2, Frobenius) and the method that
    gave them.

    Unpacks as (mean, cov). Errors are bounds from rounding ("closed form"), from comparing two
    resolutions ("quadrature"), or one standard error ("sampled").
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
        """Mean and covariance of the outputs for x ~ measure, with the error of each and the method
        that gave it.
        """
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
        rotational, pool = law.as_rotational(), law.as_pool()
        square = head.A.double().T @ head.A.double()
        alike = head.query_bias is None and is_multiple_of_identity(square, 1e-13)
        if self.kernel == "softmax" and rotational is not None and alike:
            return _rotational(head, rotational)
        if self.kernel == "softmax" and pool is not None:
            return _pooled(self, pool)
        return sampled(self, law)


def limit(head: Head, measure: Measure) -> Limit:
    """Softmax attention of ``head`` on infinitely many tokens of ``measure``, callable on rows of
    queries.
    """
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
    theta} f(y), log_growth = K(2 theta) - 2 K(theta); shift = E_{2 theta} c = V (m_{2 theta} -
    m_theta), cov = Hess K(2 theta). The delta method's matrix is C = exp(log_growth) (V cov V^T +
    shift shift^T). ValueError where the law has no transform at 2 theta.
    """
    log_growth = measure.log_laplace(2 * theta) - 2 * measure.log_laplace(theta)
    shift = (measure.tilted_mean(2 * theta) - measure.tilted_mean(theta)) @ head.V.double().T
    return log_growth, shift, measure.tilted_cov(2 * theta)


# ---- pushforwards


def _affine(
    matrix: Float64[Tensor, "d_out d"], offset: Float64[Tensor, " d_out"], measure: Measure
) -> Pushforward:
    """Outputs matrix x + offset of any law: mean matrix m + offset, covariance matrix Sigma
    matrix^T.
    """
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
    """Sphere and ball, for a head without tilt bias and A^T A = a^2 I: every direction is alike.

    The tilted mean of a query x = R t w is R B_v(r) A w / a, r = a R^2 t. Over w, uniform on the
    sphere, and t its mean is 0 and its covariance R^2 E B_v(r)^2 A A^T / (a^2 d); t = 1 on the
    sphere, in the ball its density is d t^(d-1).
    """
    A = head.A.detach().double()
    size = float(A.square().sum()) / measure.dim  # a^2
    lengths, weights = measure.lengths(LENGTHS)
    squared = torch.from_numpy(lengths**2).to(A) * (size * measure.radius**2)  # r^2
    ratio = radial(measure.order, squared).ratio  # B_v / r
    mean_square = float((ratio**2 * squared) @ torch.from_numpy(weights).to(A))
    factor = head.V.detach().double() @ A
    scale = measure.radius**2 * mean_square / (measure.dim * size) if size > 0 else 0.0
    cov = scale * factor @ factor.T
    mean = torch.zeros(head.dim_out, dtype=torch.float64, device=measure.device)
    if head.value_bias is not None:
        mean = head.value_bias.detach().double()
    return Pushforward(mean, cov, 0.0, 1e-14 * float(cov.norm()), "quadrature")
