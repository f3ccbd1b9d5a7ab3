"""The uniform error over a ball of queries with a constant: the method of [B] Theorem 3.4, with
numbers of our own.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from esscher.attention.head import Head
from esscher.inputs import as_counts
from esscher.measures.base import Measure
from esscher.theory.prediction import Prediction
from esscher.theory.setting import Setting, setting_of

__all__ = ["chaining_constant", "dudley_sum", "log_peak", "uniform_constant"]

Floats = npt.NDArray[np.float64]
LEVELS = 64  # of nets: the next one would change no digit


def dudley_sum(dim: int) -> float:
    """S = sum over j >= 1 of 2^{1-j} sqrt(2 log(2 N_j)), N_j = (1 + 2^{j+1})^dim: a net of mesh
    2^{-j} in the unit ball.

    A process of norms whose increments over a distance t have E cosh(l |Z_x - Z_y|) <= exp(l^2 t^2
    / 2) has E sup |Z_x - Z_0| <= S over the unit ball: each point is reached by links from net to
    net, N_j links of length at most 2^{1-j}, and the largest of N such norms has mean at most t
    sqrt(2 log 2N).
    """
    level = np.arange(1, LEVELS + 1, dtype=np.float64)
    logs = dim * np.log1p(2.0 ** (level + 1.0)) + math.log(2.0)
    return float((2.0 ** (1.0 - level) * np.sqrt(2.0 * logs)).sum())


def chaining_constant(
    score: float, log_peak: float, value: float, spread: float, dim: int
) -> float:
    """C with E sup over |x| <= r of |Gamma_n(x) - Gamma(x)| at most C / sqrt(n) for every n:

        C = (sqrt(C_N) + sqrt(2 v C_D))^2,   C_N = 2 spread + 8 v M B S,   C_D = 4 M B S.

    Tokens lie within R of their mean, v = ||V|| R (``value``), B = ||A|| r R (``score``) bounds the
    scores about their mean, spread^2 = tr V Sigma V^T, S = ``dudley_sum`` of the rank of A
    (``dim``), and M bounds w = exp(<theta, y - E y> - K(theta)), K of the centred law (``log_peak``
    = log M). As K >= 0 by Jensen, M <= exp(B), whatever the law: exponential in r R.

    Proof. Let E y = 0, g = w V (y - m), m the tilted mean; then Gamma_n - Gamma = N/D with N = mean
    g, D = mean w, E g = 0, E w = 1. (1) Symmetrise: E sup|N| <= 2 E sup|mean eps_i g_i|, eps_i
    signs. (2) In theta, g has the derivative w V ((y-m)(y-m)^T - Cov), a difference of positive
    matrices of norm at most 4 R^2 and R^2: Lipschitz with 4 ||V|| R^2 M; w has w (y-m): 2 R M. (3)
    A sum of signs has E cosh(l |sum eps_i a_i|) <= prod cosh(l |a_i|) <= exp(l^2 sum |a_i|^2 / 2)
    (Pinelis 1994), so chaining over |x| <= r gives E sup|mean eps (g_x - g_0)| <= 4 v M B S /
    sqrt(n), and E|mean eps g_0| <= spread / sqrt(n): C_N. The same for w, where w_0 = 1: E sup|D -
    1| <= C_D / sqrt(n). (4) For 0 < a < 1: where D >= a everywhere the error is at most sup|N| / a;
    elsewhere, with chance C_D / ((1-a) sqrt(n)) by Markov, at most 2 v, since both outputs lie in a
    ball of radius v. The best a gives C. Source: derived here, by the method of [B] Theorem 3.4.
    """
    with np.errstate(over="ignore"):
        chain = float(np.exp(log_peak)) * score * dudley_sum(dim)
    numerator, denominator = 2.0 * spread + 8.0 * value * chain, 4.0 * chain
    return (math.sqrt(numerator) + math.sqrt(2.0 * value * denominator)) ** 2


def log_peak(setting: Setting, reach: float) -> float:
    """log of the largest w over |theta| <= T = ||A|| r: T R - K(T) for laws that turn into
    themselves, else at most T R.

    R t - K(t) grows in t, since K' is a mean of scores over t, none of which is above R.
    """
    tilt = setting.a_norm * setting.radius
    if setting.measure.as_rotational() is None:
        return tilt * reach
    theta = torch.zeros(setting.measure.dim, dtype=torch.float64)
    theta[0] = tilt
    return tilt * reach - float(setting.measure.log_laplace(theta))


def uniform_constant(
    head: Head, measure: Measure, radius: float, *, any_law: bool = False
) -> float:
    """``chaining_constant`` of a head and a bounded law over |x| <= radius; ``any_law``: of every
    law of this support.

    nan where the law is not bounded or the head has a tilt bias.
    """
    return _constant(setting_of(head, measure, radius=radius), any_law)


def _constant(setting: Setting, any_law: bool = False) -> float:
    reach = setting.measure.support_radius()
    if reach is None or setting.head.tilt_bias is not None:
        return math.nan
    V, score = setting.head.V.double(), setting.a_norm * setting.radius * reach
    spread = math.sqrt(float((V @ setting.measure.cov.double() * V).sum()))
    rank = max(1, int(torch.linalg.matrix_rank(setting.head.A.double())))
    return chaining_constant(
        score, score if any_law else log_peak(setting, reach), setting.v_norm * reach, spread, rank
    )


def predictions(setting: Setting) -> list[Prediction]:
    """The uniform bound over |x| <= ``setting.radius``, for bounded laws."""
    reach, constant = setting.measure.support_radius(), _constant(setting)
    known = reach is not None and math.isfinite(constant)

    def value(n: object) -> Floats:
        assert reach is not None
        return np.minimum(constant / np.sqrt(as_counts(n, "n")), 2.0 * setting.v_norm * reach)

    return [
        Prediction(
            name="uniform-chaining",
            statement=(
                "The largest error over |x| <= R is on average at most C(R)/sqrt(n), for every n."
            ),
            source="derived here, by the method of [B] Theorem 3.4",
            formula=(
                "C = (sqrt(C_N) + sqrt(2 v C_D))^2, C_N = 2 sqrt(tr V Sigma V^T) + 8 v M B S, C_D ="
                " 4 M B S, S the sum of Dudley's chain, M at most exp(B), B = ||A|| R r, r the"
                " radius of the support"
            ),
            status="proved",
            quantity="uniform",
            conditions=(
                ("tokens have bounded support", reach is not None),
                ("the head has no tilt bias", setting.head.tilt_bias is None),
            ),
            exponent=0.5,
            value=value if known else None,
            units="mean absolute" if known else "none",
            numbers=(
                {"radius": setting.radius, "support": reach, "constant": constant}
                if known and reach is not None
                else {}
            ),
        )
    ]
