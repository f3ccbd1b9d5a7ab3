"""The bounds of Boursier and Boyer [S] on the error of attention: at one query (Lemmas C.1 to C.7,
D.2), averaged over queries (equations 16 to 19, Lemma D.1, Proposition 3.1), and on its gradients
(Proposition 3.4). First as functions of plain numbers, then what they say of one head and one law.

Each bounds the error R_n/S_n - R/S of the softmax average of f over n tokens, with

    n        number of tokens                     (paper's L)
    d        dimension of a token
    sigma    sub-Gaussian parameter of the centred token law, E exp<u, y> <= exp(sigma^2 |u|^2 / 2)
    tilt     length |theta| of the query's tilt   (paper's ||Uz||)
    fourth   E|f(y)|^4, or any number above it
    c_f      sup |f(y)| / |y|^p                   (paper's C_f; f(y) = V y has p = 1, c_f = ||V||_2)
    u_norm   ||U||_2 times the sub-Gaussian parameter tau of the query law (the paper has tau = 1:
             a query z = tau w is the same as the query w under tau U)

Every function gives what is proved: the printed formula, or what its proof gives where that is
another (mended). ``printed=True`` asks for the formula as the paper prints it; a name that ends in
``_sharpened`` has a shorter proof that gives more. Proofs and counterexamples: "Bounds" in the
documentation.

Terms are added up from their logarithms: e^{2d} at d = 4096 is 10^3557, and what multiplies it may
be as small. A bound beyond float64 is infinite, which is true.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from esscher.inputs import as_count, as_counts
from esscher.measures.moments import power
from esscher.theory.prediction import (
    Conditions,
    Floats,
    Prediction,
    Setting,
    Status,
    Units,
    tilted_moment,
)

Bound = Callable[[Any], Floats]

DELTA = 0.01  # chance left out by the statements "with high probability"
SHARPENED = 60.0  # 4/a^2 + 12 sqrt(6) e^{-3/2} / (1-a)^3 + 4 e^{-1} / (1-a)^2 at a = 2/5 is 59.5


def log_of(number: Any) -> Any:
    """Logarithm of a number or numbers at least 0; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(number, np.float64))


def from_logs(*terms: Any) -> Floats:
    """The sum of the exponentials, infinite beyond float64. A product of 0 and infinity (NaN) says
    nothing: infinite.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = np.exp(functools.reduce(np.logaddexp, terms))
    return np.asarray(np.nan_to_num(total, nan=np.inf, posinf=np.inf), np.float64)


def counts_of(n: Any) -> Floats:
    return as_counts(n, "n").astype(np.float64)


def _growth(factor: float, sigma: float, tilt: Any) -> Any:
    """factor sigma^2 tilt^2: the logarithm of exp(factor sigma^2 tilt^2)."""
    with np.errstate(over="ignore"):
        return factor * (sigma * tilt) * (sigma * tilt)


# ---- at one query


def lemma_c1(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Floats:
    """Squared error not exceeded with chance at least 1 - 4 delta.

        27 beta^2,   beta = exp(2 sigma^2 tilt^2) fourth^{1/4} / sqrt(delta n)

    Source: [S] Lemma C.1. The paper asks for delta above a threshold, see the two functions below;
    the statement holds for every delta in (0, 1), by the proof in "Bounds".
    """
    return from_logs(_log_c3(sigma, tilt, fourth) - math.log(4.0) - np.log(_share(delta, n)))


def lemma_c1_threshold(n: Any, sigma: float, tilt: float, *, printed: bool = False) -> Floats:
    """exp(-(n/8) exp(-2 sigma^2 tilt^2)), the least delta that the paper's proof of Lemma C.1
    covers (delta_min); printed: without sigma^2.
    """
    return np.exp(-counts_of(n) / 8.0 * math.exp(-_growth(2.0, 1.0 if printed else sigma, tilt)))


def lemma_c2(n: Any, delta: float, second: float, *, printed: bool = False) -> Floats:
    """|sum_i (Q_i - E Q_i)| <= sqrt(u n / (2 delta)) with chance 1 - 2 delta, u = ``second`` >=
    E|Q|^2: Chebyshev's inequality, since E|sum|^2 <= n u.

    Printed: sqrt(3 u n / delta), true and six times (squared) more than is needed. No truncation
    as in Bubeck et al. (2013), Lemma 3, is needed for two moments. Source: [S] Lemma C.2.
    """
    return np.asarray(np.sqrt((3.0 if printed else 0.5) * second * counts_of(n) / delta))


def corollary_c3(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Floats:
    """Squared error not exceeded with chance at least 1 - delta: Lemma C.1 at delta/4, that is

        C / (delta n),   C = 108 exp(4 sigma^2 tilt^2) sqrt(fourth) .

    Source: [S] Corollary C.3.
    """
    return from_logs(_log_c3(sigma, tilt, fourth) - np.log(_share(delta, n)))


def corollary_c3_threshold(n: Any, sigma: float, tilt: float, *, printed: bool = False) -> Floats:
    """4 exp(-(n/8) exp(-2 sigma^2 tilt^2)), the least delta that the paper's proof covers, which
    uses Lemma C.1 at delta/4.

    Printed: delta_0 = 64 exp(4 sigma^2 tilt^2) / n^2, which is smaller where 5.7 < n exp(-2 sigma^2
    tilt^2) < 34.5. Source: [S] Corollary C.3.
    """
    if printed:
        return from_logs(math.log(64.0) + _growth(4.0, sigma, tilt) - 2.0 * np.log(counts_of(n)))
    return 4.0 * lemma_c1_threshold(n, sigma, tilt)


def _log_c3(sigma: float, tilt: float, fourth: float) -> Floats:
    """Logarithm of C of Corollary C.3."""
    log_c = math.log(108.0) + _growth(4.0, sigma, tilt) + 0.5 * log_of(fourth)
    return np.asarray(log_c, np.float64)


def _share(delta: float, n: Any) -> Floats:
    """delta n, for a delta between 0 and 1."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta: expected a number between 0 and 1, got {delta}")
    return delta * counts_of(n)


def lemma_c4(
    n: Any,
    d: int,
    sigma: float,
    tilt: float,
    fourth: float,
    c_f: float,
    p: int = 1,
    eighth: float = 0.0,
    *,
    printed: bool = False,
) -> Floats:
    """Mean square error at one query.

        2 C ln(max(n, 2))/n
          + 2 16^p sigma^{2p} n p c_f^2 e^{2d} (1 + [p=2] sqrt(n) eighth^{1/4} / (22 sigma^2))
            exp( -((n/2)^{1/p} - exp(2 sigma^2 tilt^2 / p)) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )

    with C of Corollary C.3 and ``eighth`` = E|y|^8 (used for p = 2 only). Printed: ln n, and c_f
    for its square, which fails at n = 1 for large c_f. Source: [S] Lemma C.4.
    """
    counts = counts_of(n)
    logs = np.log(counts if printed else np.maximum(counts, 2.0))
    first = _log_c3(sigma, tilt, fourth) + log_of(2.0 * logs / counts)
    second = _log_second_c4(counts, d, sigma, tilt, fourth, c_f, p, eighth)
    return from_logs(first, (1.0 if printed else 2.0) * log_of(c_f) + second)


def lemma_c4_sharpened(n: Any, sigma: float, tilt: float, fourth: float) -> Floats:
    """Mean square error at one query: 60 exp(4 sigma^2 tilt^2) sqrt(fourth) / n, for every n and
    every f.

    No logarithm, no second term, no c_f and no dimension. It implies the printed Lemma C.4 for n >=
    2. Source: derived here from the estimates of [S] section C.1 (Chebyshev on the centred
    numerator, Chung-Lu on the denominator).
    """
    log_size = math.log(SHARPENED) + _growth(4.0, sigma, tilt) + 0.5 * log_of(fourth)
    return from_logs(log_size - np.log(counts_of(n)))


def _log_second_c4(
    counts: Floats,
    d: int,
    sigma: float,
    tilt: Any,
    fourth: float,
    c_f: float,
    p: int,
    eighth: float,
) -> Floats:
    """Logarithm of the second term of Lemma C.4 without its power of c_f."""
    if p not in (1, 2):
        raise ValueError(f"p: expected 1 or 2, got {p!r}")
    if c_f <= 0 or sigma <= 0:
        raise ValueError(f"c_f, sigma: expected numbers above 0, got {c_f} and {sigma}")
    log_sigma2 = 2.0 * log_of(sigma)
    factor: Any = 0.0
    if p == 2:
        ratio = 0.5 * np.log(counts) + 0.25 * log_of(eighth) - math.log(22.0) - log_sigma2
        factor = np.logaddexp(0.0, ratio)
    size = math.log(2.0 * p * 16.0**p) + p * log_sigma2 + np.log(counts)
    log_rate = 0.5 / p * log_of(fourth) - math.log(16.0) - log_sigma2 - 2.0 / p * log_of(c_f)
    with np.errstate(over="ignore", invalid="ignore"):
        start = np.exp(_growth(2.0 / p, sigma, tilt)) - (counts / 2.0) ** (1.0 / p)
        return np.asarray(size + factor + 2.0 * d + start * np.exp(log_rate), np.float64)


def lemma_c7(
    n: Any, d: int, sigma: float, tilt: float, fourth: float, c_f: float, token_fourth: float
) -> Floats:
    """Mean fourth power of the error at one query, p = 1.

        2 C sqrt(fourth) / sqrt(n)
          + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n) token_fourth^{1/2} / (32 sqrt(2) sigma^2))
            exp( -(sqrt(n)/(2 sqrt(2)) - exp(2 sigma^2 tilt^2)) fourth^{1/2} / (16 sigma^2 c_f^2) )

    ``token_fourth`` = E|y|^4. Source: [S] Lemma C.7. Its proof drops a term, which the second one
    absorbs.
    """
    counts = counts_of(n)
    first = math.log(2.0) + _log_c3(sigma, tilt, fourth) + 0.5 * (log_of(fourth) - np.log(counts))
    growth = _growth(2.0, sigma, tilt)
    return from_logs(first, _log_second_c7(counts, d, sigma, growth, fourth, c_f, token_fourth))


def _log_second_c7(
    counts: Floats,
    d: int,
    sigma: float,
    growth: Any,
    fourth: float,
    c_f: float,
    token_fourth: float,
) -> Floats:
    """Logarithm of the second term of Lemma C.7; ``growth`` is 2 sigma^2 tilt^2."""
    log_sigma2, log_c_f = 2.0 * log_of(sigma), log_of(c_f)
    ratio = 0.5 * (np.log(counts) + log_of(token_fourth)) - math.log(32.0 * math.sqrt(2.0))
    factor = np.logaddexp(0.0, ratio - log_sigma2)
    size = math.log(16.0**3) + 2.0 * log_sigma2 + 4.0 * log_c_f + np.log(counts)
    log_rate = 0.5 * log_of(fourth) - math.log(16.0) - log_sigma2 - 2.0 * log_c_f
    with np.errstate(over="ignore", invalid="ignore"):
        start = np.exp(growth) - np.sqrt(counts / 8.0)
        return np.asarray(size + factor + 2.0 * d + start * np.exp(log_rate), np.float64)


def lemma_d2_tail(t: Any, d: int, sigma: float = 1.0) -> Floats:
    """P(|y| >= t) <= exp(2d - t^2 / (16 sigma^2)). Source: [S] Lemma D.2, part 1."""
    return np.asarray(np.exp(2.0 * d - (np.asarray(t, np.float64) / sigma) ** 2 / 16.0))


def lemma_d2_maximum_moment(n: Any, d: int, p: int, sigma: float = 1.0) -> Floats:
    """E max_k |y_k|^p <= C_p sigma^p (d^{p/2} + ln(n)^{p/2}) with the constant its proof gives, p
    even.

        C_p = 64^{p/2} (1 + (p/2) c_p),   c_p = Gamma(p/2, 4) e^4 / 4^{p/2}

    The proof needs Gamma(p/2, x) <= c_p e^{-x} x^{p/2} only from x = 4 on, since d >= 1; there
    x^{-p/2} e^x Gamma(p/2, x) falls. Source: [S] Lemma D.2, part 2, which states that C_p exists.
    """
    return from_logs(_log_maximum_moment(n, d, p, sigma))


def _log_maximum_moment(n: Any, d: int, p: int, sigma: float) -> Floats:
    if p < 2 or p % 2:
        raise ValueError(f"p: expected an even number of at least 2, got {p}")
    half = p // 2
    # Gamma(m, x) e^x = (m-1)! sum_{j<m} x^j / j! at x = 4
    incomplete = math.factorial(half - 1) * sum(4.0**j / math.factorial(j) for j in range(half))
    constant = 64.0**half * (1.0 + half * incomplete / 4.0**half)
    spread = float(as_count(d, "d")) ** half + np.log(counts_of(n)) ** half
    return np.asarray(math.log(constant) + p * log_of(sigma) + np.log(spread), np.float64)


# ---- averaged over queries: those with |z| <= B, B^2 = ln(n) / (6 u^2 sigma^2) (12 for the fourth
# ---- power), and the others


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the averaged bounds are made of: the symbols at the top of this file, and more moments.

    ``d_query`` is the dimension of a query (the paper has d for both); ``limit4``, ``limit8`` are
    E|R g(z)/S|^4, ^8, moments of the limit over queries; ``token_fourth``, ``eighth`` are E|y|^4,
    E|y|^8; ``g2``, ``g4``, ``g8`` are E|g(z)|^2, ^4, ^8 of the factor that multiplies the average,
    1 for the output itself.
    """

    d: int
    d_query: int
    sigma: float
    u_norm: float
    fourth: float
    c_f: float
    limit4: float = 0.0
    limit8: float = 0.0
    token_fourth: float = 0.0
    p: int = 1
    eighth: float = 0.0
    g2: float = 1.0
    g4: float = 1.0
    g8: float = 1.0


def lemma_d1(d_query: int, sigma: float, v_norm: float, u_norm: float) -> float:
    """L4 norm of the limit over queries: 4 sigma^2 ||V|| ||U|| sqrt(d). Source: [S] Lemma D.1."""
    return 4.0 * sigma * sigma * v_norm * u_norm * math.sqrt(d_query)


def proposition_31_exponent(sigma: float, u_norm: float) -> float:
    """Exponent b of the root mean square L2(nu) error n^-b up to logarithms: half of min(1/3,
    1/(192 sigma^2 u^2)).

    Source: [S] equation (16), behind the constant c_2 of Proposition 3.1.
    """
    return 0.5 * min(1.0 / 3.0, _reciprocal(192.0, sigma, u_norm))


def sharpened_exponent(sigma: float, u_norm: float) -> float:
    """The same after the best split of ``equation_16_sharpened``: 1 / (2 (1 + 128 sigma^2 u^2))."""
    return 0.5 / (1.0 + 128.0 * (sigma * u_norm) * (sigma * u_norm))


def _reciprocal(constant: float, sigma: float, u_norm: float) -> float:
    """1 / (constant sigma^2 u^2); infinite for u = 0."""
    coupling = (sigma * u_norm) * (sigma * u_norm)
    return 1.0 / (constant * coupling) if coupling > 0.0 else math.inf


def equation_17(n: Any, fourth: float, g2: float = 1.0, *, printed: bool = False) -> Floats:
    """Part of the mean square error from queries |z| <= B: 216 sqrt(fourth) g2 ln(max(n, 2)) /
    n^{1/3}; printed: ln n. Source: [S] (17).
    """
    counts = counts_of(n)
    size = math.log(216.0) + 0.5 * log_of(fourth) + log_of(g2) - np.log(counts) / 3.0
    return from_logs(size + log_of(np.log(counts if printed else np.maximum(counts, 2.0))))


def equation_16(n: Any, of: Numbers, *, printed: bool = False) -> Floats:
    """Mean square L2(nu) error.

        (17) + 2 16^p sigma^{2p} n p c_f^2 e^{2d} (1 + [p=2] ..) g2
                   exp( -((n/2)^{1/p} - n^{1/3p}) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )
             + 2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) )
                   e^{d} n^{-1/(192 sigma^2 u^2)}

    Printed: c_f for its square in the second term, and (17) as printed. Source: [S] Lemma C.6 and
    its equation (16).
    """
    counts = counts_of(n)
    edge = np.sqrt(np.log(counts) / 6.0) / of.sigma  # sigma^2 |Uz|^2 = ln(n)/6
    second = _log_second_c4(counts, of.d, of.sigma, edge, of.fourth, of.c_f, of.p, of.eighth)
    return from_logs(
        log_of(equation_17(n, of.fourth, of.g2, printed=printed)),
        log_of(of.g2) + (1.0 if printed else 2.0) * log_of(of.c_f) + second,
        _log_far_16(counts, of) + of.d_query + _log_decay(counts, 192.0, of),
    )


def _log_far_16(counts: Floats, of: Numbers) -> Floats:
    """2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) )."""
    most = _log_maximum_moment(counts, of.d, 4 * of.p, of.sigma)
    spread = 2.0 * log_of(of.c_f) + 0.5 * (math.log(2.0) + log_of(of.g4) + most)
    far = np.logaddexp(spread, 0.5 * (math.log(2.0) + log_of(of.limit4)))
    return np.asarray(math.log(2.0) + far, np.float64)


def _log_decay(counts: Floats, constant: float, of: Numbers) -> Floats:
    """Logarithm of n^{-1/(constant sigma^2 u^2)}; of 0 for u = 0, where no query lies beyond B =
    infinity.
    """
    rate = _reciprocal(constant, of.sigma, of.u_norm)
    return np.full_like(counts, -np.inf) if math.isinf(rate) else -rate * np.log(counts)


def equation_16_sharpened(n: Any, of: Numbers) -> Floats:
    """Mean square L2(nu) error: ``lemma_c4_sharpened`` for |z| <= B, third term of (16) beyond, the
    best B for each n.

        min_B 60 exp(4 sigma^2 u^2 B^2) sqrt(fourth) g2 / n + 2 ( .. ) exp(d - B^2/32)

    Every B gives a true bound, so an inexact minimum does too. Falls like n^{-1/(1 + 128 sigma^2
    u^2)} up to a power of ln n. Source: derived here on [S] section C.3.
    """
    counts = counts_of(n)
    coupling = (of.sigma * of.u_norm) * (of.sigma * of.u_norm)
    near = math.log(SHARPENED) + 0.5 * log_of(of.fourth) + log_of(of.g2) - np.log(counts)
    if coupling == 0.0:
        return from_logs(near)
    far = _log_far_16(counts, of) + of.d_query
    return from_logs(
        np.array([_best_split(a, b, coupling) for a, b in zip(near, far, strict=True)])
    )


def _best_split(near: float, far: float, coupling: float) -> float:
    """Logarithm of min over s = B^2 of exp(near + 4 coupling s) + exp(far - s/32)."""
    if not (math.isfinite(near) and math.isfinite(far) and math.isfinite(coupling)):
        return near if near == -math.inf else float(np.logaddexp(near, far))  # B = 0

    def logs(square: float) -> float:
        return float(np.logaddexp(near + 4.0 * coupling * square, far - square / 32.0))

    balance = max((far - near) / (4.0 * coupling + 1.0 / 32.0), 0.0)  # where the two are equal
    best = minimize_scalar(logs, bounds=(0.0, 2.0 * balance + 1.0), method="bounded")
    return min(float(best.fun), logs(0.0))


def equation_19(n: Any, fourth: float, g4: float = 1.0) -> Floats:
    """Part of the mean fourth power from queries |z| <= B: 216 fourth g4 / n^{1/6}. Source: [S]
    (19).
    """
    size = math.log(216.0) + log_of(fourth) + log_of(g4)
    return from_logs(size - np.log(counts_of(n)) / 6.0)


def equation_18(n: Any, of: Numbers) -> Floats:
    """Mean fourth power of the error over tokens and queries, p = 1.

        (19) + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n token_fourth) / (32 sqrt(2) sigma^2))
                   exp( -(sqrt(n/8) - n^{1/6}) fourth^{1/2} / (16 sigma^2 c_f^2) ) g4
             + 8 ( sigma^4 c_f^4 sqrt(2 g8 C_8 (d^4 + ln(n)^4)) + sqrt(2 limit8) ) e^{d}
                 n^{-1/(384 sigma^2 u^2)}

    Source: [S] Lemma C.9 and its equation (18).
    """
    counts = counts_of(n)
    growth = np.log(counts) / 6.0
    second = _log_second_c7(counts, of.d, of.sigma, growth, of.fourth, of.c_f, of.token_fourth)
    most = _log_maximum_moment(counts, of.d, 8, of.sigma)
    spread = 4.0 * log_of(of.c_f) + 0.5 * (math.log(2.0) + log_of(of.g8) + most)
    far = math.log(8.0) + np.logaddexp(spread, 0.5 * (math.log(2.0) + log_of(of.limit8)))
    return from_logs(
        log_of(equation_19(n, of.fourth, of.g4)),
        log_of(of.g4) + second,
        far + of.d_query + _log_decay(counts, 384.0, of),
    )


def gradient_u_bound(
    product: Floats, x4: float, x_error4: Floats, y4: float, y_error4: Floats
) -> Floats:
    """Mean square error of one row of the gradient in U, from its parts.

        2 product + 2 ( 2 sqrt(8 (x4 + x_error4) y_error4) + 2 sqrt(y4 x_error4) )

    ``product``: (16) for f(y) = <v_i, y> y, g(z) = z^T; X = <v_i, tilted mean>, Y = (tilted mean)
    z^T; x4 = E X^4, y4 = E|Y|^4; x_error4, y_error4: (18) for X and Y. Source: [S] equation (21),
    and |a - b|^2 <= 2|a|^2 + 2|b|^2 for the two parts.
    """
    logs = [log_of(part) for part in (product, x4, x_error4, y4, y_error4)]
    log_product, log_x, log_x_error, log_y, log_y_error = logs
    first = 0.5 * (math.log(8.0) + np.logaddexp(log_x, log_x_error) + log_y_error)
    return from_logs(
        math.log(2.0) + log_product,
        math.log(4.0) + first,
        math.log(4.0) + 0.5 * (log_y + log_x_error),
    )


# ---- what they say of one head and one law


@dataclass(frozen=True)
class Version:
    """One version of a lemma; what it leaves out is the lemma's own."""

    formula: str
    bound: Bound
    exponent: float | None = None
    sigma: float | None = None  # where the version takes another than the law's


@dataclass(frozen=True, kw_only=True)
class Lemma:
    """One lemma or proposition of [S]: as printed, as its proof gives it (mended), by a shorter
    proof that gives more (sharpened), or in one version that is printed and proved (proved).
    """

    conditions: Conditions
    known: bool  # whether the numbers of the formulas are
    numbers: dict[str, float]
    exponent: float | None = None
    units: Units = "squared"
    name: str = ""
    source: str = ""
    quantity: str = ""
    statement: str = ""  # "The <quantity> is at most the bound." unless given
    proved: Version | None = None
    printed: Version | None = None
    printed_status: Status = "printed (not proved as printed)"
    mended: Version | None = None
    sharpened: Version | None = None

    def rows(self) -> list[Prediction]:
        """One prediction for each version, named after it."""
        name, source = self.name, self.source
        versions: list[tuple[str, str, Status, Version | None]] = [
            (name, source, "proved", self.proved),
            (f"{name}-printed", source, self.printed_status, self.printed),
            (f"{name}-mended", f"{source}, mended", "proved", self.mended),
            (f"{name}-sharpened", f"derived here on {source}", "proved", self.sharpened),
        ]
        return [
            Prediction(
                name=name,
                statement=self.statement or f"The {self.quantity} is at most the bound.",
                source=source,
                formula=version.formula,
                status=status,
                quantity=self.quantity,
                conditions=self.conditions,
                exponent=self.exponent if version.exponent is None else version.exponent,
                value=version.bound if self.known else None,
                units=self.units,
                numbers={**self.numbers, **({"sigma": version.sigma} if version.sigma else {})},
            )
            for name, source, status, version in versions
            if version is not None
        ]


def _zero_for(v_norm: float, bound: Bound) -> Bound:
    """V = 0 has no error, and the formulas divide by ||V||."""
    return bound if v_norm > 0 else lambda n: np.zeros(counts_of(n).shape)


def _token_conditions(setting: Setting) -> Conditions:
    """Hypotheses of [S] on the law of the tokens. A mean of the tokens shifts all scores of a query
    alike and the output by V E y, so it cancels in the error and the centred law may be used.
    """
    return (
        (
            "tokens are sub-Gaussian: E exp<u, y - E y> <= exp(sigma^2 |u|^2 / 2)",
            setting.sigma is not None,
        ),
        ("E|V (y - E y)|^4 is known", setting.fourth is not None),
    )


def one_query(setting: Setting) -> list[Prediction]:
    """Bounds for every query |x| <= radius: Lemmas C.1, C.2, C.4, C.7, D.2 and Corollary C.3."""
    sigma, fourth, eighth = setting.sigma or 1.0, setting.fourth or 0.0, setting.token_eighth or 0.0
    d, tilt, v = setting.head.dim, setting.tilt, setting.v_norm
    numbers = {"radius": setting.radius, "tilt": tilt, "d": float(d), "c_f": v}
    optional = {"sigma": setting.sigma, "fourth": setting.fourth}
    lemma = Lemma(
        conditions=_token_conditions(setting),
        known=setting.sigma is not None and setting.fourth is not None,
        numbers=numbers | {key: number for key, number in optional.items() if number is not None},
        exponent=0.5,
    )

    def c1(n: Any) -> Floats:
        return lemma_c1(n, DELTA, sigma, tilt, fourth)

    def c1_printed(n: Any) -> Floats:
        said = lemma_c1_threshold(n, sigma, tilt, printed=True) <= DELTA
        return np.where(said, c1(n), np.inf)

    def c3(n: Any) -> Floats:
        return corollary_c3(n, DELTA, sigma, tilt, fourth)

    def c3_printed(n: Any) -> Floats:
        said = corollary_c3_threshold(n, sigma, tilt, printed=True) <= DELTA
        return np.where(said, c3(n), np.inf)

    at_most = "the squared error at one query is at most the bound."
    growth = "exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2}"
    with_chance = replace(lemma, numbers=lemma.numbers | {"delta": DELTA})
    first = replace(
        with_chance,
        name="s-c1",
        source="[S] Lemma C.1",
        quantity=f"squared error at one query, with chance {1.0 - 4.0 * DELTA:g}",
        statement=f"With chance {1.0 - 4.0 * DELTA:g} or more {at_most}",
        printed=Version(
            f"27 {growth} / (delta n), for delta >= exp(-(n/8) exp(-2 |theta|^2))", c1_printed
        ),
        mended=Version(f"27 {growth} / (delta n), for every delta in (0, 1)", c1),
    )
    corollary = replace(
        with_chance,
        name="s-c3",
        source="[S] Corollary C.3",
        quantity=f"squared error at one query, with chance {1.0 - DELTA:g}",
        statement=f"With chance {1.0 - DELTA:g} or more {at_most}",
        printed=Version(
            f"108 {growth} / (delta n), for delta >= 64 exp(4 sigma^2 |theta|^2) / n^2", c3_printed
        ),
        mended=Version(f"108 {growth} / (delta n), for every delta in (0, 1)", c3),
    )
    tail = "e^{2d} exp(-(n/2 - exp(2 sigma^2 |theta|^2)) E|V y|^4^{1/2} / (16 sigma^2 ||V||^2))"
    args = (d, sigma, tilt, fourth, v)
    square = replace(
        lemma,
        name="s-c4",
        source="[S] Lemma C.4",
        quantity="mean square error at one query",
        printed=Version(
            f"2 C ln(n)/n + 32 sigma^2 n ||V|| {tail}",
            _zero_for(v, lambda n: lemma_c4(n, *args, printed=True)),
        ),
        mended=Version(
            f"2 C ln(max(n,2))/n + 32 sigma^2 n ||V||^2 {tail}",
            _zero_for(v, lambda n: lemma_c4(n, *args)),
        ),
        sharpened=Version(f"60 {growth} / n", lambda n: lemma_c4_sharpened(n, sigma, tilt, fourth)),
    )
    # f(y) = V y y^T, the first part of the gradient in A
    args2 = (d, sigma, tilt, power(v, 4) * eighth, v, 2, eighth)
    formula2 = "Lemma C.4 with p = 2, C_f = ||V||, E|f|^4 <= ||V||^4 E|y|^8"
    size = float(setting.measure.cov.double().trace()) ** 0.5
    centred = float(setting.measure.mean.double().norm()) <= 1e-9 * size
    second_moment = replace(
        lemma,
        name="s-c4-p2",
        source="[S] Lemma C.4, p = 2",
        quantity="mean square error of the average of V y y^T at one query",
        conditions=(
            lemma.conditions[0],
            ("tokens are centred", centred),
            ("E|y|^8 is known", setting.token_eighth is not None),
        ),
        known=setting.sigma is not None and setting.token_eighth is not None,
        printed=Version(formula2, _zero_for(v, lambda n: lemma_c4(n, *args2, printed=True))),
        mended=Version(formula2, _zero_for(v, lambda n: lemma_c4(n, *args2))),
    )
    token_fourth = setting.token_fourth or 0.0
    fourth_power = replace(
        lemma,
        name="s-c7",
        source="[S] Lemma C.7",
        quantity="mean fourth power of the error at one query",
        known=lemma.known and setting.token_fourth is not None,
        exponent=0.125,
        units="fourth power",
        proved=Version(
            "2 C E|V y|^4^{1/2} / sqrt(n) + 16^3 sigma^4 n ||V||^4 e^{2d} (1 + ..) exp(-(sqrt(n/8)"
            " - exp(2 sigma^2 |theta|^2)) ..)",
            _zero_for(v, lambda n: lemma_c7(n, *args, token_fourth)),
        ),
    )
    furthest = replace(
        lemma,
        name="s-d2",
        source="[S] Lemma D.2, part 1, and a union bound",
        quantity=f"largest |y - E y| of n tokens, with chance {1.0 - DELTA:g}",
        statement=(
            f"With chance at least {1.0 - DELTA:g} no token of n lies further from the mean than"
            " the bound."
        ),
        conditions=lemma.conditions[:1],
        known=setting.sigma is not None,
        exponent=None,
        units="rms",
        numbers={} if setting.sigma is None else {"sigma": sigma, "delta": DELTA, "d": float(d)},
        proved=Version(
            "4 sigma sqrt(2d + ln(n / delta))",
            lambda n: 4.0 * sigma * np.sqrt(2.0 * d + np.log(counts_of(n) / DELTA)),
        ),
    )
    # Lemma C.2 for Q = exp<theta, y> V y of centred tokens, which Lemma C.1 applies to the
    # numerator of attention, divided by n
    u = float(from_logs(_growth(4.0, setting.sigma or 0.0, tilt) + 0.5 * log_of(fourth)))
    numerator = replace(
        lemma,
        name="s-c2",
        source="[S] Lemma C.2",
        quantity=f"numerator of attention at one query, with chance {1.0 - 2.0 * DELTA:g}",
        statement=(
            f"With chance {1.0 - 2.0 * DELTA:g} or more the mean of e V (y - E y) over the tokens,"
            " e = exp<theta, y - E y>, is this close to its expectation."
        ),
        units="rms",
        numbers={"tilt": tilt, "delta": DELTA} | ({"u": u} if math.isfinite(u) else {}),
        printed=Version(
            f"sqrt(3 u / (delta n)), u = {growth}",
            lambda n: lemma_c2(n, DELTA, u, printed=True) / counts_of(n),
        ),
        printed_status="proved",
        sharpened=Version(
            f"sqrt(u / (2 delta n)), u = {growth}", lambda n: lemma_c2(n, DELTA, u) / counts_of(n)
        ),
    )
    lemmas = (first, corollary, square, second_moment, fourth_power, furthest, numerator)
    return [row for each in lemmas for row in each.rows()]


def _average(setting: Setting) -> Lemma:
    """What the bounds averaged over queries have in common."""
    known = None not in (setting.sigma, setting.fourth, setting.u_norm, setting.token_fourth)
    no_bias = setting.head.tilt_bias is None or not bool(setting.head.tilt_bias.any())
    conditions = (
        *_token_conditions(setting),
        (
            "queries are sub-Gaussian (parameter tau; [S] has tau = 1 and U in place of tau A)",
            setting.tau is not None,
        ),
        ("queries are centred", setting.queries_centred),
        ("the head has no tilt bias", no_bias),
    )
    numbers = {"sigma": setting.sigma or 1.0, "u_norm": setting.u_norm or 0.0} if known else {}
    return Lemma(conditions=conditions, known=known, numbers=numbers)


def _output(setting: Setting, sigma: float) -> Numbers:
    """Of the output V y itself; moments of its limit from |grad K(theta)| <= 2 sigma^2 |theta|."""
    dq, u, v = setting.head.dim_query, setting.u_norm or 0.0, setting.v_norm
    # E w_i^8 <= 8! exp(lambda^2/2) / lambda^8 at lambda^2 = 8 for a 1-sub-Gaussian coordinate;
    # E|w|^8 <= d^4 max_i E w_i^8
    query8 = float(dq) ** 4 * 40320.0 * math.exp(4.0) / 8.0**4
    return Numbers(
        d=setting.head.dim,
        d_query=dq,
        sigma=sigma,
        u_norm=u,
        fourth=setting.fourth or 0.0,
        c_f=v,
        limit4=power(lemma_d1(dq, sigma, v, u), 4),
        limit8=power(2.0 * sigma * sigma * v * u, 8) * query8,
        token_fourth=setting.token_fourth or 0.0,
    )


def averaged(setting: Setting) -> list[Prediction]:
    """Bounds on errors averaged over the law of the queries: equations (16) to (19), Proposition
    3.1 and Lemma D.1.
    """
    own = setting.sigma or 1.0
    # [S] asks for sigma >= 1; a law that is sigma sub-Gaussian is so for every larger sigma
    wide = max(own, 1.0)
    of, of_wide = _output(setting, own), _output(setting, wide)
    u, v, fourth = of.u_norm, of.c_f, of.fourth
    lemma = _average(setting)
    known = lemma.known
    output = replace(lemma, numbers=lemma.numbers | ({"fourth": fourth, "c_f": v} if known else {}))

    def version(formula: str, bound: Bound, exponent: float, sigma: float = own) -> Version:
        known_exponent = exponent if known else None
        return Version(formula, _zero_for(v, bound), known_exponent, sigma if known else None)

    near = replace(
        output,
        name="s-17",
        source="[S] equation (17)",
        quantity="part of the mean square L2 error from queries |x| <= B",
        printed=version(
            "216 E|V y|^4^{1/2} ln(n) / n^{1/3}",
            lambda n: equation_17(n, fourth, printed=True),
            1 / 6,
            wide,
        ),
        mended=version(
            "216 E|V y|^4^{1/2} ln(max(n,2)) / n^{1/3}", lambda n: equation_17(n, fourth), 1 / 6
        ),
    )
    formula = (
        "(17) + (second term of C.4 at |x| = B) + 2 ( sigma^2 ||V||^2 sqrt(2 C_4 (d^2 + ln(n)^2)) +"
        " sqrt(2 E|Gamma|^4) ) e^d n^{-1/(192 sigma^2 ||U||^2)}"
    )
    square = replace(
        output,
        name="s-16",
        source="[S] Lemma C.6, equation (16)",
        quantity="l2 mean square",
        statement="The mean square error averaged over queries is at most the bound.",
        printed=version(
            formula,
            lambda n: equation_16(n, of_wide, printed=True),
            proposition_31_exponent(wide, u),
            wide,
        ),
        mended=version(formula, lambda n: equation_16(n, of), proposition_31_exponent(own, u)),
        sharpened=version(
            "min over B of 60 exp(4 sigma^2 ||U||^2 B^2) E|V y|^4^{1/2} / n + 2 ( .. ) exp(d -"
            " B^2/32)",
            lambda n: equation_16_sharpened(n, of),
            sharpened_exponent(own, u),
        ),
    )
    near_fourth = replace(
        output,
        name="s-19",
        source="[S] equation (19)",
        quantity="part of the l4 mean fourth power from queries |x| <= B",
        units="fourth power",
        proved=version("216 E|V y|^4 / n^{1/6}", lambda n: equation_19(n, fourth), 1 / 24),
    )
    fourth_power = replace(
        output,
        name="s-18",
        source="[S] Lemma C.9, equation (18)",
        quantity="l4 mean fourth power",
        units="fourth power",
        proved=version(
            "(19) + (second term of C.7 at |x| = B) + 8 ( .. ) e^d n^{-1/(384 sigma^2 ||U||^2)}",
            lambda n: equation_18(n, of),
            min(1 / 24, _reciprocal(1536.0, own, u)),
        ),
    )
    proposition = Prediction(
        name="s-prop31",
        statement=(
            "For n >= 2 the mean square error over queries is at most c_1 sigma^6 ln(n)"
            " n^{-c_2/sigma^2}."
        ),
        source="[S] Proposition 3.1",
        formula="c_1 sigma^6 ln(n) / n^{c_2/sigma^2}, c_2 = min(1/3, 1/(192 ||U||^2)) by its proof",
        status="proved",
        quantity="l2 mean square",
        conditions=(*lemma.conditions, ("n >= 2 (at n = 1 the printed bound is 0)", True)),
        exponent=0.5 * min(1 / 3, _reciprocal(192.0, 1.0, u)) / wide / wide if known else None,
        numbers={"sigma": wide, "u_norm": u} if known else {},
    )
    limit4 = lemma_d1(of.d_query, own, v, u)
    limit = replace(
        lemma,
        name="s-d1",
        source="[S] Lemma D.1",
        quantity="L4 norm of the limit",
        statement=(
            "The L4 norm over queries of the limit Gamma(x) - V E y is at most the bound,"
            " whatever n."
        ),
        exponent=0.0,
        units="rms",
        proved=Version(
            "4 sigma^2 ||V|| ||U|| sqrt(d)", lambda n: np.full(counts_of(n).shape, limit4)
        ),
    )
    powers = [row for each in (near, square, near_fourth, fourth_power) for row in each.rows()]
    return [*powers, proposition, *limit.rows()]


def gradients(setting: Setting) -> list[Prediction]:
    """Proposition 3.4: the error of one row of the gradient in V, and of the gradient in U."""
    lemma, output = _average(setting), _output(setting, setting.sigma or 1.0)
    sigma, u, v = output.sigma, output.u_norm, output.c_f
    limit4 = power(lemma_d1(output.d_query, sigma, 1.0, u), 4)
    token = replace(output, fourth=output.token_fourth, c_f=1.0, limit4=limit4)  # f(y) = y
    in_v = replace(
        lemma,
        name="s-gradient-v",
        source="[S] Proposition 3.4, first part, mended",
        quantity="gradient in V, mean square of one row",
        statement="The mean square error of each row of the gradient in V is at most the bound.",
        exponent=proposition_31_exponent(sigma, u) if lemma.known else None,
        proved=Version("(16) with f(y) = y, g = 1", lambda n: equation_16(n, token)),
    )
    moments = {pq: tilted_moment(setting, *pq) for pq in ((4, 0), (8, 0), (4, 4), (8, 4), (8, 8))}
    query = {q: setting.queries.norm_moment(q) for q in (2, 4, 8)}
    known = lemma.known and None not in (*moments.values(), *query.values(), setting.token_eighth)
    m = {pq: moment or 0.0 for pq, moment in moments.items()}
    g = {q: moment or 0.0 for q, moment in query.items()}
    eighth = setting.token_eighth or 0.0
    x = replace(output, limit8=power(v, 8) * m[8, 0])
    y = replace(token, limit8=m[8, 8], g4=g[4], g8=g[8])
    squares = replace(  # f(y) = V y y^T
        output,
        fourth=power(v, 4) * eighth,
        limit4=power(v, 4) * m[8, 4],
        p=2,
        eighth=eighth,
        g2=g[2],
        g4=g[4],
    )

    def bound(n: Any) -> Floats:
        return gradient_u_bound(
            equation_16(n, squares),
            power(v, 4) * m[4, 0],
            equation_18(n, x),
            m[4, 4],
            equation_18(n, y),
        )

    in_u = replace(
        lemma,
        name="s-gradient-u",
        source="[S] Proposition 3.4, second part, mended",
        quantity="gradient in U, mean square",
        statement=(
            "The mean square error of the gradient in U (all rows, Frobenius norm) is at most the"
            " bound."
        ),
        conditions=(
            *lemma.conditions,
            ("the moments of Assumption 3.3 and E|y|^8 are known", known),
        ),
        known=known,
        exponent=min(1 / 24, _reciprocal(1536.0, sigma, u)) if known else None,
        numbers={
            f"tilted_moment_{p}_{q}": moment
            for (p, q), moment in moments.items()
            if moment is not None
        },
        proved=Version(
            "2 (16) for f(y) = V y y^T, g(z) = z, p = 2, plus 2 (21) with (18) for X and Y",
            _zero_for(v, bound),
        ),
    )
    return [*in_v.rows(), *in_u.rows()]
