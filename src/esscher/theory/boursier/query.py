"""[S] at one query: Lemmas C.1, C.4, C.7, D.2 and Corollary C.3 as functions of plain numbers.

Each bounds the error R_n/S_n - R/S of the softmax average of f over n tokens, with

    n      number of tokens                    (paper's L)
    d      dimension of a token
    sigma  sub-Gaussian parameter of the centred token law, E exp<u, y> <= exp(sigma^2 |u|^2 / 2)
    tilt   length |theta| of the query's tilt   (paper's ||Uz||)
    fourth E|f(y)|^4, or any number above it
    c_f    sup |f(y)| / |y|^p                   (paper's C_f; f(y) = V y has p = 1, c_f = ||V||_2)

A name ends in ``_printed`` where the formula is the paper's and its proof does not give it as it stands, in
``_mended`` where it is what the proof gives, in ``_sharpened`` where a shorter proof gives more. A name without ending
is printed and proved. Proofs and counterexamples: "Bounds" in the documentation. Every bound is a sum of products of powers
and exponentials, added up from the logarithms of its terms: e^{2d} at d = 4096 is 10^3557, and what multiplies it may be as
small. A bound beyond float64 is infinite, which is true.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.inputs import as_count, as_counts

__all__ = [
    "corollary_c3",
    "corollary_c3_constant",
    "corollary_c3_threshold_mended",
    "corollary_c3_threshold_printed",
    "lemma_c1",
    "lemma_c1_threshold_mended",
    "lemma_c1_threshold_printed",
    "lemma_c4_mended",
    "lemma_c4_printed",
    "lemma_c4_sharpened",
    "lemma_c7",
    "lemma_d2_maximum_moment",
    "lemma_d2_tail",
]

Floats = npt.NDArray[np.float64]

SHARPENED = 60.0  # 4/a^2 + 12 sqrt(6) e^{-3/2} / (1-a)^3 + 4 e^{-1} / (1-a)^2 at a = 2/5 is 59.5


def lemma_c1(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Floats:
    """Squared error not exceeded with chance at least 1 - 4 delta.

        27 beta^2,   beta = exp(2 sigma^2 tilt^2) fourth^{1/4} / sqrt(delta n)

    Source: [S] Lemma C.1. The paper asks for delta above a threshold, see the two functions below; the statement holds
    for every delta in (0, 1), by the proof in "Bounds".
    """
    return from_logs(math.log(27.0) + _growth(4.0, sigma, tilt) + 0.5 * log_of(fourth) - np.log(_share(delta) * counts_of(n)))


def lemma_c1_threshold_printed(n: Any, tilt: float) -> Floats:
    """exp(-(n/8) exp(-2 tilt^2)), the least delta in [S] Lemma C.1; its proof needs sigma^2 in the exponent."""
    return np.exp(-counts_of(n) / 8.0 * math.exp(-2.0 * tilt * tilt))


def lemma_c1_threshold_mended(n: Any, sigma: float, tilt: float) -> Floats:
    """exp(-(n/8) exp(-2 sigma^2 tilt^2)), the least delta that the paper's proof of Lemma C.1 covers (delta_min)."""
    return np.exp(-counts_of(n) / 8.0 * math.exp(-_growth(2.0, sigma, tilt)))


def corollary_c3_constant(sigma: float, tilt: float, fourth: float) -> float:
    """C = 108 exp(4 sigma^2 tilt^2) sqrt(fourth). Source: [S] Corollary C.3."""
    return float(from_logs(_log_c3(sigma, tilt, fourth)))


def corollary_c3(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Floats:
    """Squared error not exceeded with chance at least 1 - delta: C / (delta n). Source: [S] Corollary C.3."""
    return from_logs(_log_c3(sigma, tilt, fourth) - np.log(_share(delta) * counts_of(n)))


def corollary_c3_threshold_printed(n: Any, sigma: float, tilt: float) -> Floats:
    """delta_0 = 64 exp(4 sigma^2 tilt^2) / n^2, the least delta in [S] Corollary C.3."""
    return from_logs(math.log(64.0) + _growth(4.0, sigma, tilt) - 2.0 * np.log(counts_of(n)))


def corollary_c3_threshold_mended(n: Any, sigma: float, tilt: float) -> Floats:
    """4 exp(-(n/8) exp(-2 sigma^2 tilt^2)): Lemma C.1 is used at delta/4, so delta must be four times its threshold.

    The printed delta_0 is smaller than this where 5.7 < n exp(-2 sigma^2 tilt^2) < 34.5.
    """
    return 4.0 * lemma_c1_threshold_mended(n, sigma, tilt)


def lemma_c4_printed(
    n: Any, d: int, sigma: float, tilt: float, fourth: float, c_f: float, p: int = 1, eighth: float = 0.0
) -> Floats:
    """Mean square error at one query, as printed.

        2 C ln(n)/n + 2 16^p sigma^{2p} n p c_f e^{2d} (1 + [p=2] sqrt(n) eighth^{1/4} / (22 sigma^2))
            exp( -( (n/2)^{1/p} - exp(2 sigma^2 tilt^2 / p) ) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )

    with C of Corollary C.3 and ``eighth`` = E|y|^8 (used for p = 2 only). Source: [S] Lemma C.4. Fails at n = 1 for
    large c_f.
    """
    counts = counts_of(n)
    first = _log_c3(sigma, tilt, fourth) + log_of(2.0 * np.log(counts) / counts)
    return from_logs(first, log_of(c_f) + log_tail_c4(counts, d, sigma, tilt, fourth, c_f, p, eighth))


def lemma_c4_mended(
    n: Any, d: int, sigma: float, tilt: float, fourth: float, c_f: float, p: int = 1, eighth: float = 0.0
) -> Floats:
    """Mean square error at one query as the proof gives it: [S] Lemma C.4 with c_f^2 for c_f, ln max(n, 2) for ln n."""
    counts = counts_of(n)
    first = _log_c3(sigma, tilt, fourth) + np.log(2.0 * np.log(np.maximum(counts, 2.0)) / counts)
    return from_logs(first, 2.0 * log_of(c_f) + log_tail_c4(counts, d, sigma, tilt, fourth, c_f, p, eighth))


def lemma_c4_sharpened(n: Any, sigma: float, tilt: float, fourth: float) -> Floats:
    """Mean square error at one query: 60 exp(4 sigma^2 tilt^2) sqrt(fourth) / n, for every n and every f.

    No logarithm, no second term, no c_f and no dimension. It implies the printed Lemma C.4 for n >= 2.
    Source: derived here from the estimates of [S] section C.1 (Chebyshev on the centred numerator, Chung-Lu on the
    denominator).
    """
    return from_logs(math.log(SHARPENED) + _growth(4.0, sigma, tilt) + 0.5 * log_of(fourth) - np.log(counts_of(n)))


def lemma_c7(n: Any, d: int, sigma: float, tilt: float, fourth: float, c_f: float, token_fourth: float) -> Floats:
    """Mean fourth power of the error at one query, p = 1.

        2 C sqrt(fourth) / sqrt(n) + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n) token_fourth^{1/2} / (32 sqrt(2) sigma^2))
            exp( -( sqrt(n)/(2 sqrt(2)) - exp(2 sigma^2 tilt^2) ) fourth^{1/2} / (16 sigma^2 c_f^2) )

    ``token_fourth`` = E|y|^4. Source: [S] Lemma C.7. Its proof drops a term, which the second one absorbs.
    """
    counts = counts_of(n)
    first = math.log(2.0) + _log_c3(sigma, tilt, fourth) + 0.5 * (log_of(fourth) - np.log(counts))
    return from_logs(first, log_tail_c7(counts, d, sigma, _growth(2.0, sigma, tilt), fourth, c_f, token_fourth))


def lemma_d2_tail(t: Any, d: int, sigma: float = 1.0) -> Floats:
    """P(|y| >= t) <= exp(2d - t^2 / (16 sigma^2)). Source: [S] Lemma D.2, part 1."""
    return np.asarray(np.exp(2.0 * d - (np.asarray(t, dtype=np.float64) / sigma) ** 2 / 16.0), np.float64)


def lemma_d2_maximum_moment(n: Any, d: int, p: int, sigma: float = 1.0) -> Floats:
    """E max_k |y_k|^p <= C_p sigma^p (d^{p/2} + ln(n)^{p/2}) with the constant its proof gives, p even.

        C_p = 64^{p/2} (1 + (p/2) c_p),   c_p = Gamma(p/2, 4) e^4 / 4^{p/2}

    The proof needs Gamma(p/2, x) <= c_p e^{-x} x^{p/2} only from x = 4 on, since d >= 1; there x^{-p/2} e^x Gamma(p/2,
    x) falls. Source: [S] Lemma D.2, part 2, which states that C_p exists.
    """
    return from_logs(log_maximum_moment(n, d, p, sigma))


def log_maximum_moment(n: Any, d: int, p: int, sigma: float = 1.0) -> Floats:
    """Logarithm of ``lemma_d2_maximum_moment``."""
    if p < 2 or p % 2:
        raise ValueError(f"p: expected an even number of at least 2, got {p}")
    half = p // 2
    # Gamma(m, x) e^x = (m-1)! sum_{j<m} x^j / j! at x = 4
    incomplete = math.factorial(half - 1) * sum(4.0**j / math.factorial(j) for j in range(half))
    constant = 64.0**half * (1.0 + half * incomplete / 4.0**half)
    spread = float(as_count(d, "d")) ** half + np.log(counts_of(n)) ** half
    return np.asarray(math.log(constant) + p * log_of(sigma) + np.log(spread), np.float64)


def log_tail_c4(counts: Floats, d: int, sigma: float, tilt: Any, fourth: float, c_f: float, p: int, eighth: float) -> Floats:
    """Logarithm of the second term of Lemma C.4 without its power of c_f."""
    if p not in (1, 2):
        raise ValueError(f"p: expected 1 or 2, got {p!r}")
    if c_f <= 0 or sigma <= 0:
        raise ValueError(f"c_f, sigma: expected numbers above 0, got {c_f} and {sigma}")
    log_sigma2 = 2.0 * log_of(sigma)
    factor = 0.0 if p == 1 else np.logaddexp(0.0, 0.5 * np.log(counts) + 0.25 * log_of(eighth) - math.log(22.0) - log_sigma2)
    with np.errstate(over="ignore", invalid="ignore"):
        rate = np.exp(0.5 / p * log_of(fourth) - math.log(16.0) - log_sigma2 - 2.0 / p * log_of(c_f))
        power = (np.exp(_growth(2.0 / p, sigma, tilt)) - (counts / 2.0) ** (1.0 / p)) * rate
        return np.asarray(math.log(2.0 * p * 16.0**p) + p * log_sigma2 + np.log(counts) + factor + 2.0 * d + power, np.float64)


def log_tail_c7(counts: Floats, d: int, sigma: float, growth: Any, fourth: float, c_f: float, token_fourth: float) -> Floats:
    """Logarithm of the second term of Lemma C.7; ``growth`` is 2 sigma^2 tilt^2."""
    log_sigma2, log_c_f = 2.0 * log_of(sigma), log_of(c_f)
    factor = np.logaddexp(0.0, 0.5 * (np.log(counts) + log_of(token_fourth)) - math.log(32.0 * math.sqrt(2.0)) - log_sigma2)
    with np.errstate(over="ignore", invalid="ignore"):
        rate = np.exp(0.5 * log_of(fourth) - math.log(16.0) - log_sigma2 - 2.0 * log_c_f)
        power = (np.exp(growth) - np.sqrt(counts / 8.0)) * rate
        size = math.log(16.0**3) + 2.0 * log_sigma2 + 4.0 * log_c_f + np.log(counts)
        return np.asarray(size + factor + 2.0 * d + power, np.float64)


def _log_c3(sigma: float, tilt: float, fourth: float) -> Floats:
    """Logarithm of ``corollary_c3_constant``."""
    return np.asarray(math.log(108.0) + _growth(4.0, sigma, tilt) + 0.5 * log_of(fourth), np.float64)


def _growth(power: float, sigma: float, tilt: Any) -> Any:
    """power sigma^2 tilt^2: the logarithm of exp(power sigma^2 tilt^2)."""
    with np.errstate(over="ignore"):
        return power * (sigma * tilt) * (sigma * tilt)


def log_of(number: Any) -> Any:
    """Logarithm of a number or numbers at least 0; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(number, np.float64))


def from_logs(*terms: Any) -> Floats:
    """The sum of the exponentials, infinite beyond float64. A product of 0 and infinity (NaN) says nothing: infinite."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = np.exp(functools.reduce(np.logaddexp, terms))
    return np.asarray(np.nan_to_num(total, nan=np.inf, posinf=np.inf), np.float64)


def counts_of(n: Any) -> Floats:
    return as_counts(n, "n").astype(np.float64)


def _share(delta: float) -> float:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta: expected a number between 0 and 1, got {delta}")
    return delta
