"""Bohbot et al. [B]: exponents for the moments of the outputs, growth of the uniform bound, and
hardmax self-attention on Gaussian tokens of the line, where the exact mean of the outputs stands
beside its asymptote.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erf, erfc, gammaln

from esscher.inputs import as_counts, as_positive
from esscher.theory.prediction import Conditions, Floats, Prediction, Setting

PROVED = "1/(2(1+32Ψ))"  # the exponent as pictures and tables write it
EXPERIMENTAL = "1/(2(1+Ψ))"
EVERY_SPLIT = 1000  # up to here every number of positive tokens is summed; beyond, a grid of them
# half-width of that grid in standard deviations; what lies outside weighs less than 1e-20
WINDOW = 9.5
_legendre = functools.cache(np.polynomial.legendre.leggauss)


def moment_exponent(coupling: float) -> float:
    """beta = 1 / (2 (1 + 32 Psi)): mean and covariance of the outputs err by O(n^-beta). Source:
    [B] Theorem 4.4.

    Psi = ||Sigma||_2 ||Sigma^{1/2} A||_2^2 is ``Head.coupling``.
    """
    return 0.5 / (1.0 + 32.0 * coupling)


def moment_exponent_experimental(coupling: float) -> float:
    """1 / (2 (1 + Psi)), from an experiment that a summary of [B] suggests; no proof is claimed for
    it.
    """
    return 0.5 / (1.0 + coupling)


def uniform_log_growth(horizon: float, radius: float) -> float:
    """R^2 ||Sigma^{1/2} A||_2^2: logarithm of the growth of C(R) in the uniform bound C(R)/sqrt(n)
    over |x| <= R.

    Source: [B] section 4.1 after Theorem 3.4. The constant in front is not given in the sources
    used here.
    """
    return (radius * horizon) * (radius * horizon)


def moments(setting: Setting) -> list[Prediction]:
    """[B] Theorem 4.4, the curve of its experiments, and its uniform bound."""
    subgaussian = ("tokens are sub-Gaussian", setting.sigma is not None)
    conditions: Conditions = (
        subgaussian,
        ("queries are the tokens (self-attention)", setting.own_queries),
    )
    psi, horizon = setting.coupling, setting.horizon
    numbers = {} if psi is None else {"coupling": psi}
    uniform = {"radius": setting.radius}
    if horizon is not None:
        growth = uniform_log_growth(horizon, setting.radius)
        uniform |= {"horizon": horizon, "log_growth": growth}
    return [
        Prediction(
            name="b-moments",
            source="[B] Theorem 4.4",
            formula=(
                "beta = 1 / (2 (1 + 32 Psi)), Psi = ||S||_2 ||S^{1/2} A||_2^2, "
                "S sub-Gaussian: E exp<u, y - E y> <= exp(u^T S u / 2)"
            ),
            status="proved (asymptotic)",
            quantity="mean and cov",
            conditions=conditions,
            exponent=None if psi is None else moment_exponent(psi),
            numbers=numbers,
        ),
        Prediction(
            name="b-moments-experimental",
            source="a summary of [B], in an experiment it suggests",
            formula="beta = 1 / (2 (1 + Psi))",
            status="experimental",
            quantity="mean and cov",
            conditions=conditions,
            exponent=None if psi is None else moment_exponent_experimental(psi),
            numbers=numbers,
        ),
        Prediction(
            name="b-uniform",
            source="[B] Theorem 3.4 and section 4.1",
            formula="C(R) / sqrt(n), ln C(R) of order R^2 ||S^(1/2) A||^2",
            status="proved (asymptotic)",
            quantity="uniform",
            conditions=(subgaussian,),
            exponent=0.5,
            numbers=uniform,
        ),
    ]


# ---- hardmax


def hardmax_mean_abs_asymptotic(n: Any, sigma: Any = 1.0) -> Floats:
    """Leading term of E|mean output| as n grows.

        E|Gamma-bar_n| = ln(4) sigma / (2 sqrt(2 ln n)) (1 + o(1))

    Infinite at n = 1, where ln n = 0. Source: [B] Proposition 5.1 (d = 1, tokens N(0, sigma^2)).
    The reason: the largest token and minus the smallest are sigma (b_n + G / sqrt(2 ln n)) with
    independent Gumbel G, half of the queries take each, and the difference of two Gumbel variables
    has mean absolute value ln 4.
    """
    size = math.log(4.0) * as_positive(sigma, "sigma") / 2.0
    with np.errstate(divide="ignore"):
        return np.asarray(size / np.sqrt(2.0 * np.log(_counts(n).astype(np.float64))), np.float64)


def hardmax_mean_abs(n: Any, sigma: Any = 1.0, positive: bool = True) -> Floats:
    """Exact E|mean output| of hardmax self-attention on n tokens N(0, sigma^2), d = 1, V = 1;
    queries are the tokens.

    For A > 0 (``positive``) a query above 0 takes the largest token and one below 0 the smallest;
    for A < 0 the other way. Given K = k tokens above 0, the k positive ones and minus the n - k
    others are independent half-normal samples, so with M_k the largest of k half-normals

        |mean| = | (k/n) M_k - ((n-k)/n) M'_{n-k} |     for A > 0 and 0 < k < n,

    for A < 0 with the two shares exchanged,

    and M_n (A > 0) or the smallest of n half-normals (A < 0) when all tokens have one sign. K is
    binomial(n, 1/2), and E|X - Y| = int_0^inf F_X (1 - F_Y) + F_Y (1 - F_X) dt for independent X, Y
    >= 0. One sum of one-dimensional integrals: relative error below 1e-12 for n from 1 to 1e12 and
    beyond. The limit of the mean is 0, so this is an error.

    The quantity is that of [B] Proposition 5.1. ``n`` a number or a flat list; the shape of ``n``
    is kept.
    """
    counts = _counts(n)
    scale = as_positive(sigma, "sigma")
    values = [scale * _unit_mean_abs(int(count), positive) for count in counts.ravel()]
    return np.array(values, dtype=np.float64).reshape(counts.shape)


def _counts(n: Any) -> npt.NDArray[np.int64]:
    counts = as_counts(n, "n")
    return counts.reshape(()) if np.ndim(n) == 0 else counts


def _unit_mean_abs(n: int, positive: bool) -> float:
    split, chance = _splits(n)
    total = 0.0
    if n > 1:
        own = split / n
        total = float(chance @ _mean_gap(split, n - split, own if positive else 1.0 - own))
    if n <= EVERY_SPLIT:  # all tokens on one side of 0
        u, du = _grid(float(n))
        survival = -np.expm1(n * _log_erf(u)) if positive else erfc(u / math.sqrt(2.0)) ** n
        total += 2.0 ** (1 - n) * float(du @ survival)
    return total


def _splits(n: int) -> tuple[Floats, Floats]:
    """Numbers k of positive tokens, 0 < k < n, and their binomial(n, 1/2) chances.

    Beyond ``EVERY_SPLIT`` a grid of half a standard deviation: the summand is a smooth function
    times a near Gaussian, for which the trapezoid rule with that step errs by about exp(-8 pi^2).
    """
    if n <= EVERY_SPLIT:
        k = np.arange(1, n, dtype=np.float64)
        chance = np.exp(
            gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(n - k + 1.0) - n * math.log(2.0)
        )
        return k, chance * ((1.0 - 2.0 ** (1 - n)) / chance.sum()) if n > 1 else chance
    deviation = math.sqrt(n) / 2.0
    step = int(deviation / 2.0)
    reach = int(WINDOW * deviation / step)
    k = n // 2 + step * np.arange(-reach, reach + 1, dtype=np.float64)
    u = (2.0 * k - n) / n
    # Stirling: log C(n, k) 2^-n up to a constant, the entropy as its series in u because its closed
    # form cancels
    entropy = sum(u ** (2 * j) / (j * (2 * j - 1)) for j in range(1, 25))
    series = sum(1.0 / (12.0 * m) - 1.0 / (360.0 * m**3) for m in (k, n - k))
    log_chance = -0.5 * n * entropy - 0.5 * np.log1p(-(u**2)) - series
    chance = np.exp(log_chance - log_chance.max())
    return k, chance / chance.sum()


def _mean_gap(k: Floats, j: Floats, share: Floats) -> Floats:
    """E|share M_k - (1 - share) M'_j| for each row; M_k, M'_j the largest of k and of j independent
    half-normals.
    """
    u, du = _grid(float(np.max(k + j)))
    top = np.maximum(share, 1.0 - share)[:, None]
    t = top * u
    log_f = k[:, None] * _log_erf(t / share[:, None])
    log_g = j[:, None] * _log_erf(t / (1.0 - share)[:, None])
    integrand = np.exp(log_f) * -np.expm1(log_g) + np.exp(log_g) * -np.expm1(log_f)
    return np.asarray(top[:, 0] * (integrand @ du), dtype=np.float64)


def _grid(n: float) -> tuple[Floats, Floats]:
    """Gauss-Legendre nodes from 0 to where the largest of n half-normals lies with chance below
    1e-18.
    """
    end = math.sqrt(2.0 * (math.log(n) + 42.0))
    nodes, weights = _legendre(600)
    return 0.5 * end * (nodes + 1.0), 0.5 * end * weights


def _log_erf(u: Floats) -> Floats:
    """log P(|g| <= u) for a standard normal g, accurate at both ends."""
    root = u / math.sqrt(2.0)
    with np.errstate(divide="ignore"):
        return np.asarray(
            np.where(root < 0.5, np.log(erf(root)), np.log1p(-erfc(root))), dtype=np.float64
        )


def hardmax(setting: Setting) -> list[Prediction]:
    """[B] Proposition 5.1 beside the exact expectation; only for d = 1."""
    head, measure = setting.head, setting.measure
    if head.dim != 1 or head.dim_query != 1 or head.dim_out != 1:
        return []
    a = float(head.A.double()[0, 0])
    scale = abs(float(head.V.double()[0, 0])) * float(measure.cov.double()[0, 0]) ** 0.5
    centred = measure.is_gaussian and not bool(measure.mean.any())
    conditions: Conditions = (
        ("d = 1 and tokens are N(0, sigma^2)", centred and scale > 0.0),
        ("queries are the tokens (self-attention)", setting.own_queries),
        ("no tilt bias and A is not 0", setting.no_bias and a != 0.0),
    )
    asymptote = Prediction(
        name="b-hardmax",
        source="[B] Proposition 5.1",
        formula="ln(4) sigma |V| / (2 sqrt(2 ln n)) (1 + o(1))",
        status="proved (asymptotic)",
        quantity="hardmax mean",
        conditions=conditions,
        exponent=0.0,
        value=(lambda n: hardmax_mean_abs_asymptotic(n, scale)) if scale > 0.0 else None,
        units="mean absolute",
        numbers={"sigma": scale, "A": a},
    )
    exact = replace(
        asymptote,
        name="hardmax-exact",
        source="derived here; the quantity of [B] Proposition 5.1",
        formula=(
            "sum_k C(n,k) 2^-n |V| E|(k/n) M_k - ((n-k)/n) M'_{n-k}|, M_k the largest of k"
            " half-normals"
        ),
        status="exact",
        value=(lambda n: hardmax_mean_abs(n, scale, positive=a > 0)) if scale > 0.0 else None,
    )
    return [asymptote, exact]
