"""What squared weights see: the law of a token tilted twice as far."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor

from esscher.attention.head import Head
from esscher.measures.base import Measure

__all__ = ["SecondTilt", "second_tilt"]


@dataclass(frozen=True)
class SecondTilt:
    """E[e^2 f(y)] / (E e)^2 = exp(log_growth) E_{2 theta} f(y) with e = exp<theta, y>, for c = V y
    - Gamma(x):

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
