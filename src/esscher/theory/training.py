"""[S] on in-context learning, as functions of plain numbers: risks (Lemmas E.2 and E.4) and
training (Assumption 4.2 (ii), Lemma F.1 (ii), the start of Theorem 5.2, the PL constant).

Risks: R_n and R are E loss(Gamma_n(z), y) and E loss(Gamma(z), y). All norms are over tasks, tokens
and queries together:

    error2, error4     (E|Gamma_n - Gamma|^2)^{1/2}, (E|Gamma_n - Gamma|^4)^{1/4}, or above them
    gradient_error2    (E|grad Gamma_n - grad Gamma|^2)^{1/2}, gradients in (U, V)
    limit2, limit4     (E|Gamma|^2)^{1/2}, (E|Gamma|^4)^{1/4}
    label2, label4     (E|y|^2)^{1/2}, (E|y|^4)^{1/4}

The loss satisfies |grad_1 loss(a, y)| <= |a| + |y| and |grad_1 loss(a, y) - grad_1 loss(b, y)| <=
|a - b|; the quadratic loss |a - y|^2 / 2 does.

Training:

    d      dimension of the covariates, w ~ N(0, I_d), zeta = |w|^2 ~ chi^2(d)
    c      exponent of a bound n^(-c / sigma_mu^2), as in Proposition 3.1
    alpha  size of the start of Assumption 5.1: U11 = alpha G, v = alpha, G = Theta Theta^T,
           |G|_F = 1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.integrate import quad
from scipy.special import gammaln, kve

from esscher.inputs import as_counts
from esscher.theory.prediction import Floats

# ---- risks


def lemma_e2_printed(error2: Any, error4: Any, label4: float, limit4: float) -> Any:
    """|R_n - R| as printed: 2 label4 error2 (error4 + limit4). Source: [S] Lemma E.2.

    False: the proof bounds |(a, y)| by |y| |a| where it needs |y| + |a|, so the bound is 0 for
    labels that are 0.
    """
    return 2.0 * label4 * error2 * (error4 + limit4)


def lemma_e2_mended(error2: Any, label2: float, limit2: float) -> Any:
    """|R_n - R| <= error2 (label2 + limit2 + error2).

    From |loss(a, y) - loss(b, y)| <= (|y| + max(|a|, |b|)) |a - b|, max(|a|, |b|) <= |b| + |a - b|
    and Cauchy-Schwarz; second moments suffice. Source: [S] Lemma E.2, mended.
    """
    return error2 * (label2 + limit2 + error2)


def lemma_e4(
    error2: Any, gradient_error2: Any, label2: float, limit2: float, gradient2: float
) -> Any:
    """|grad R_n - grad R| <= gradient_error2 (limit2 + error2 + label2) + error2 gradient2,
    gradient2 = (E|grad Gamma|^2)^{1/2}.

    Source: the proof of [S] Lemma E.4 up to (28). Its last step replaces (E_mu X^2)^{1/2} by E_mu
    X, which is smaller when the tasks differ in sigma_mu, so the displayed statement holds only for
    one common sigma_mu.
    """
    return gradient_error2 * (limit2 + error2 + label2) + error2 * gradient2


# ---- training


def task_sigma(zeta: float, *, printed: bool = False) -> float:
    """sigma_mu^2 = 1 + |w|^2, zeta = |w|^2: Gamma_w = (I, w)^T Sigma (I, w) has the norm ||Sigma||
    (1 + |w|^2) for Sigma = ||Sigma|| I.

    Printed: max(1, |w|^2), too small. Source: [S] Lemma F.1, for ||Sigma|| <= 1.
    """
    return max(1.0, zeta) if printed else 1.0 + zeta


def task_mean(f: Callable[[float], float], d: int, far: float = 0.0) -> float:
    """E f(|w|^2) over tasks w ~ N(0, I_d), by quadrature; ``far``: where f has most of its weight,
    if beyond d.
    """
    ends = sorted({0.0, 1.0, d + 10.0, d + 10.0 + 2.0 * far})
    pieces = [*pairwise(ends), (ends[-1], np.inf)]
    size = math.lgamma(0.5 * d) + 0.5 * d * math.log(2.0)

    def weighted(z: float) -> float:
        return math.exp((0.5 * d - 1.0) * math.log(z) - 0.5 * z - size) * f(z)

    return math.fsum(
        quad(weighted, *piece, limit=200, epsabs=0.0, epsrel=1e-9)[0] for piece in pieces
    )


def decay(
    log_n: Any, d: int, c: float, power: int = 0, sigma: Callable[[float], float] = task_sigma
) -> Floats:
    """E[ln(n)^power / n^(c / sigma_mu^2)] over tasks w ~ N(0, I_d), sigma_mu^2 a function of |w|^2,
    at some ln n.

    Assumption 4.2 (ii) of [S] has power 4 and wants it to vanish as n grows.
    """

    def one(x: float) -> float:
        return x**power * task_mean(
            lambda z: math.exp(-c * x / sigma(z)), d, math.sqrt(2.0 * c * x)
        )

    return np.array([one(float(x)) for x in np.atleast_1d(np.asarray(log_n, np.float64))])


def decay_begins(d: int, c: float, power: int = 4) -> float:
    """The ln n from which on ``decay`` falls, 2 (power + (d-1)/4)^2 / c: the maximum of ln(n)^power
    times the asymptote of Lemma F.1 (ii). For c = 1/3, d = 5 and power 4 it is 150, that is n =
    10^65. Derived here.
    """
    return 2.0 * (power + 0.25 * (d - 1)) ** 2 / c


def lemma_f1(n: Any, d: int, c: float, *, printed: bool = False) -> Floats:
    """Bound on E n^(-c / sigma_mu^2) for sigma_mu^2 = 1 + |w|^2: e^{1/2} times the integral of the
    printed one.

    With x = 1 + zeta the density has (x-1)^{d/2-1} e^{-(x-1)/2} <= e^{1/2} x^{d/2-1} e^{-x/2} for d
    >= 2; one dimension has smaller tasks than two. Derived here. Printed, for max(1, |w|^2):

        n^-c + lambda^{d/2} / (2^{d/2} Gamma(d/2)) int_0^inf u^{d/2-1} exp(-lambda (1/u + u/2))
            du,    lambda^2 = c ln n
        = n^-c + 2 (lambda / sqrt 2)^{d/2} K_{d/2}(sqrt 2 lambda) / Gamma(d/2)

    The proof of [S] Lemma F.1 (ii) goes on by Laplace's method (``lemma_f1_asymptote``); the Bessel
    function needs no limit.
    """
    counts = as_counts(n, "n").astype(np.float64)
    rate = c * np.log(counts)
    if printed:
        return np.asarray(counts**-c + _bessel(rate, d), np.float64)
    return math.exp(0.5) * _bessel(rate, max(d, 2))


def _bessel(rate: Floats, d: int) -> Floats:
    """2 (lambda / sqrt 2)^{d/2} K_{d/2}(sqrt 2 lambda) / Gamma(d/2), lambda^2 = ``rate``; 1
    at 0.
    """
    at = np.sqrt(2.0 * rate)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_size = math.log(2.0) + 0.5 * d * np.log(0.5 * at) - gammaln(0.5 * d) - at
        return np.where(rate > 0, np.exp(log_size) * kve(0.5 * d, at), 1.0)


def lemma_f1_asymptote(n: Any, d: int, c: float) -> Floats:
    """What the integral of ``lemma_f1`` is equivalent to for large n, with n^-c left out.
    Source: [S] Lemma F.1 (ii).

    lambda^{(d-1)/2} sqrt(2 pi / Phi''(u_0)) u_0^{d/2-1} exp(-sqrt 2 lambda) / (2^{d/2} Gamma(d/2)),
    Phi(u) = 1/u + u/2, u_0 = sqrt 2, Phi''(u_0) = 1/sqrt 2.
    """
    root = np.sqrt(c * np.log(as_counts(n, "n").astype(np.float64)))
    size = math.sqrt(2.0 * math.pi * math.sqrt(2.0)) * math.sqrt(2.0) ** (0.5 * d - 1.0)
    fall = np.exp(-math.sqrt(2.0) * root - gammaln(0.5 * d))
    return np.asarray(root ** (0.5 * (d - 1.0)) * size * fall / 2.0 ** (0.5 * d), np.float64)


def start_limit(d: int, norm: float, *, printed: bool = False) -> float:
    """Upper limit of alpha, sqrt(2) / (d^{1/4} ||Sigma||^{1/2}): below it the start has less risk
    than no weights at all, which the proof needs.

    R(start) - R(0) = alpha^4 tr(Sigma G Sigma G Sigma)/2 - alpha^2 tr(Sigma G Sigma) < 0 for
    alpha^2 ||Sigma|| < 2, since ||G|| <= |G|_F = 1; Zhang et al. (2024) have alpha^2 sqrt(d)
    ||Sigma|| < 2. Derived here for W = I. Printed, [S] Theorem 5.2: ||Sigma|| for its root. That is
    not dimensionless: with Sigma = s I the start is scaled right by s^{-1/2}, and for ||Sigma|| < 1
    the range is too wide.
    """
    if printed:
        return math.sqrt(2.0) / (math.sqrt(math.sqrt(d)) * norm)
    return math.sqrt(2.0) / math.sqrt(math.sqrt(d) * norm)


def pl_constant(
    alpha: float, eigenvalues: Any, turned: float = 0.0, *, printed: bool = False
) -> float:
    """mu with |grad R|^2 >= mu (R - min R) along the flow on an infinite prompt, W = I, from the
    start of Assumption 5.1.

        mu = alpha^2 t (2 - alpha^2 ||Sigma||) / (|Sigma^2|_F tr(Sigma^+2) tr(Sigma^+)),
        t = ``turned`` = tr(Sigma G Sigma)

    Proof. |grad R|^2 >= |v Sigma B Sigma|_F^2 >= v^2 |B Sigma^{1/2}|_F^2 / (tr(Sigma^+2)
    tr(Sigma^+)), B = v Sigma U - I, and R - min R = |B Sigma^{1/2}|_F^2 / 2. Below, v^2 |Sigma^2|_F
    >= v tr(Sigma U Sigma) >= R(0) - R(t) >= R(0) - R(start) >= alpha^2 t (2 - alpha^2 ||Sigma||) /
    2, with |U|_F = v. Derived here.

    Printed, [S] F.3: alpha^2 / (sqrt(d) ||Sigma|| tr(Sigma^+2) tr(Sigma^+)), d the number of
    eigenvalues. False: in units of x it is x^2 where |grad R|^2 / R is x^4. For d = 1, Sigma = s <
    1/4 it fails at the start.
    """
    values = np.asarray(eigenvalues, np.float64)
    d, values = values.size, values[values > 0]
    norm, traces = float(values.max()), float((values**-2).sum() * (values**-1).sum())
    if printed:
        return alpha**2 / (math.sqrt(d) * norm * traces)
    gain = max(alpha**2 * turned * (2.0 - alpha**2 * norm), 0.0)
    return gain / (math.sqrt(float((values**4).sum())) * traces)
