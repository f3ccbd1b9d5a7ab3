"""Attention on infinitely many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.attention import pushforward as _pushforward
from esscher.attention.head import Head, check_pair
from esscher.attention.pushforward import Pushforward
from esscher.inputs import as_tensor, finite_result
from esscher.measures.base import Measure


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
            return _pushforward.affine(to_output @ head.A.double(), self(zero), law)
        rotational, pool = law.as_rotational(), law.as_pool()
        if self.kernel == "softmax" and rotational is not None and head.query_bias is None:
            return _pushforward.rotational(head, rotational)
        if self.kernel == "softmax" and pool is not None:
            return _pushforward.pooled(self, pool)
        return _pushforward.sampled(self, law)


def limit(head: Head, measure: Measure) -> Limit:
    """Softmax attention of ``head`` on infinitely many tokens of ``measure``, callable on rows of
    queries.
    """
    check_pair(head, measure)
    return Limit(head, measure, "softmax")


def linear_limit(head: Head, measure: Measure) -> Limit:
    """(1/n)-normalised linear attention on infinitely many tokens."""
    check_pair(head, measure)
    return Limit(head, measure, "linear")


def hardmax_limit(head: Head, measure: Measure) -> Limit:
    """Hardmax attention on infinitely many tokens."""
    check_pair(head, measure)
    return Limit(head, measure, "hardmax")


@dataclass(frozen=True)
class SecondTilt:
    """The law of a token tilted twice as far, which squared weights see: E[e^2 f(y)] / (E e)^2 =
    exp(log_growth) E_{2 theta} f(y) with e = exp<theta, y>, for c = V y - Gamma(x).

    E_{2 theta} c = ``shift`` and the covariance of y under 2 theta is ``cov``, so that the delta
    method's matrix is C = exp(log_growth) (V cov V^T + shift shift^T).
    """

    log_growth: Float64[Tensor, "*batch"]  # K(2 theta) - 2 K(theta)
    shift: Float64[Tensor, "*batch d_out"]  # V (m_{2 theta} - m_theta)
    cov: Float64[Tensor, "*batch d d"]


def second_tilt(head: Head, measure: Measure, theta: Float64[Tensor, "*batch d"]) -> SecondTilt:
    """The law at twice each tilt; ValueError where it has no transform there."""
    return SecondTilt(
        log_growth=measure.log_laplace(2 * theta) - 2 * measure.log_laplace(theta),
        shift=(measure.tilted_mean(2 * theta) - measure.tilted_mean(theta)) @ head.V.double().T,
        cov=measure.tilted_cov(2 * theta),
    )
