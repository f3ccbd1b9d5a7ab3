"""Attention on infinitely many tokens."""

from __future__ import annotations

from collections.abc import Callable
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
class SoftmaxLimit:
    """Gamma(x) = V grad K(theta(x)) + v0: the mean value under the Esscher transform of the law by
    the tilt theta(x).

    [B]: Gamma_mu; [S]: T[mu]. For N(m, Sigma): V (m + Sigma theta(x)) + v0, affine in x [S, Lemma
    2.1].
    """

    head: Head
    measure: Measure

    def __call__(self, queries: Any) -> Float[Tensor, "*batch d_out"]:
        return _values(self.head, self.measure.tilted_mean, queries)

    def pushforward(self) -> Pushforward:
        """Mean and covariance of Gamma(x) for x ~ measure, with the error of each and the method
        that gave it.
        """
        _queries_from(self.head, self.measure)
        rotational, pool = self.measure.as_rotational(), self.measure.as_pool()
        if self.measure.is_gaussian:
            head, cov = self.head, self.measure.cov.double()
            matrix = head.V.double() @ cov @ head.A.double()
            zero = torch.zeros(head.dim_query, dtype=torch.float64, device=cov.device)
            return _pushforward.affine(matrix, self(zero), self.measure)
        if rotational is not None and self.head.query_bias is None:
            return _pushforward.rotational(self.head, rotational)
        if pool is not None:
            return _pushforward.pooled(self, pool)
        return _pushforward.sampled(self, self.measure)


@dataclass(frozen=True)
class LinearLimit:
    """Limit of (1/n)-normalised linear attention: E[<y, theta(x)> (V y + v0)] = V E[y y^T] theta(x)
    + v0 <E y, theta(x)>.

    Equal to the softmax limit for centred Gaussian tokens and different otherwise [S, B.2].
    """

    head: Head
    measure: Measure

    def __call__(self, queries: Any) -> Float[Tensor, "*batch d_out"]:
        x = as_tensor(queries, "queries")
        return _answer(self.head.tilt(x.double()) @ self._map().T, x)

    def pushforward(self) -> Pushforward:
        _queries_from(self.head, self.measure)
        matrix = self._map() @ self.head.A.double()
        zero = torch.zeros(self.head.dim_query, dtype=torch.float64, device=matrix.device)
        return _pushforward.affine(matrix, self(zero), self.measure)

    def _map(self) -> Tensor:
        mean = self.measure.mean.double()
        second_moment = self.measure.cov.double() + torch.outer(mean, mean)
        out = self.head.V.double() @ second_moment
        return (
            out
            if self.head.value_bias is None
            else out + torch.outer(self.head.value_bias.double(), mean)
        )


@dataclass(frozen=True)
class HardmaxLimit:
    """Limit of hardmax attention: the value of the support's point furthest along the tilt. Bounded
    laws only.
    """

    head: Head
    measure: Measure

    def __call__(self, queries: Any) -> Float[Tensor, "*batch d_out"]:
        return _values(self.head, self.measure.extreme, queries)

    def pushforward(self) -> Pushforward:
        _queries_from(self.head, self.measure)
        return _pushforward.sampled(self, self.measure)


def limit(head: Head, measure: Measure) -> SoftmaxLimit:
    """Softmax attention of ``head`` on infinitely many tokens of ``measure``, callable on rows of
    queries.
    """
    check_pair(head, measure)
    return SoftmaxLimit(head, measure)


def linear_limit(head: Head, measure: Measure) -> LinearLimit:
    """(1/n)-normalised linear attention on infinitely many tokens."""
    check_pair(head, measure)
    return LinearLimit(head, measure)


def hardmax_limit(head: Head, measure: Measure) -> HardmaxLimit:
    """Hardmax attention on infinitely many tokens."""
    check_pair(head, measure)
    return HardmaxLimit(head, measure)


def _values(head: Head, mean: Callable[[Tensor], Tensor], queries: Any) -> Tensor:
    """The value of the mean token at each query's tilt, in float64 throughout and answered in the
    dtype of the queries.
    """
    x = as_tensor(queries, "queries")
    return _answer(head.values(mean(head.tilt(x.double()))), x)


def _answer(out: Tensor, queries: Tensor) -> Tensor:
    return finite_result(
        out.to(queries.dtype),
        "limit",
        "scale the head, the law or the queries down, or use float64",
    )


def _queries_from(head: Head, measure: Measure) -> None:
    if head.dim_query != measure.dim:
        raise ValueError(
            f"pushforward: queries drawn from the measure have dimension {measure.dim}, the head"
            f" expects {head.dim_query}"
        )


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
