"""[S] averaged over queries: equations (16) to (19), Lemma D.1 and Proposition 3.4 with every constant the proofs give.

Symbols of ``boursier_query``, and

    u_norm   ||U||_2 times the sub-Gaussian parameter of the query law (the paper takes that law 1-sub-Gaussian;
             a query z = tau w with w 1-sub-Gaussian is the same as the query w under tau U)
    d_query  dimension of a query (the paper has d for both)
    g2, g4, g8          E|g(z)|^2, ^4, ^8 of the factor that multiplies the average; 1 for the output itself
    limit4, limit8      E|R g(z)/S|^4, ^8: moments of the limit over queries

The split of the proofs: queries with |z| <= B, B^2 = ln(n) / (6 u^2 sigma^2) (12 for the fourth power), and the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from esscher.theory.boursier.query import (
    SHARPENED,
    counts_of,
    from_logs,
    log_maximum_moment,
    log_of,
    log_tail_c4,
    log_tail_c7,
)

__all__ = [
    "equation_16_mended",
    "equation_16_printed",
    "equation_16_sharpened",
    "equation_17_mended",
    "equation_17_printed",
    "equation_18",
    "equation_19",
    "gradient_u_bound",
    "lemma_d1",
    "proposition_31_exponent",
    "sharpened_exponent",
]

Floats = npt.NDArray[np.float64]


def lemma_d1(d_query: int, sigma: float, v_norm: float, u_norm: float) -> float:
    """L4 norm of the limit over queries: 4 sigma^2 ||V|| ||U|| sqrt(d). Source: [S] Lemma D.1."""
    return 4.0 * sigma * sigma * v_norm * u_norm * math.sqrt(d_query)


def proposition_31_exponent(sigma: float, u_norm: float) -> float:
    """Exponent b of the root mean square L2(nu) error n^-b up to logarithms: half of min(1/3, 1/(192 sigma^2 u^2)).

    Source: [S] equation (16), behind the constant c_2 of Proposition 3.1.
    """
    return 0.5 * min(1.0 / 3.0, reciprocal(192.0, sigma, u_norm))


def sharpened_exponent(sigma: float, u_norm: float) -> float:
    """The same after the best split of ``equation_16_sharpened``: 1 / (2 (1 + 128 sigma^2 u^2))."""
    return 0.5 / (1.0 + 128.0 * (sigma * u_norm) * (sigma * u_norm))


def reciprocal(constant: float, sigma: float, u_norm: float) -> float:
    """1 / (constant sigma^2 u^2); infinite for u = 0."""
    coupling = (sigma * u_norm) * (sigma * u_norm)
    return 1.0 / (constant * coupling) if coupling > 0.0 else math.inf


def equation_17_printed(n: Any, fourth: float, g2: float = 1.0) -> Floats:
    """Part of the mean square error from queries |z| <= B: 216 sqrt(fourth) g2 ln(n) / n^{1/3}. Source: [S] (17)."""
    return from_logs(_log_17(counts_of(n), 1.0, fourth, g2))


def equation_17_mended(n: Any, fourth: float, g2: float = 1.0) -> Floats:
    """[S] (17) with ln max(n, 2): Lemma C.4 has that logarithm."""
    return from_logs(_log_17(counts_of(n), 2.0, fourth, g2))


def _log_17(counts: Floats, least: float, fourth: float, g2: float) -> Floats:
    size = math.log(216.0) + 0.5 * log_of(fourth) + log_of(g2) - np.log(counts) / 3.0
    return np.asarray(size + log_of(np.log(np.maximum(counts, least))), np.float64)


def equation_16_printed(
    n: Any,
    *,
    d: int,
    d_query: int,
    sigma: float,
    u_norm: float,
    fourth: float,
    c_f: float,
    limit4: float,
    p: int = 1,
    eighth: float = 0.0,
    g2: float = 1.0,
    g4: float = 1.0,
) -> Floats:
    """Mean square L2(nu) error with the constants of the printed proof (c_f, not its square, in the second term).

        (17) + 2 16^p sigma^{2p} n p c_f e^{2d} (1 + [p=2] ..) g2
                   exp( -((n/2)^{1/p} - n^{1/3p}) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )
             + 2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) ) e^{d} n^{-1/(192 sigma^2
             u^2)}

    Source: [S] Lemma C.6 and its equation (16).
    """
    counts = counts_of(n)
    second = log_of(g2) + log_of(c_f) + _log_second_16(counts, d, sigma, fourth, c_f, p, eighth)
    third = _log_far_16(counts, d, sigma, c_f, limit4, p, g4) + d_query + _log_decay(counts, 192.0, sigma, u_norm)
    return from_logs(_log_17(counts, 1.0, fourth, g2), second, third)


def equation_16_mended(
    n: Any,
    *,
    d: int,
    d_query: int,
    sigma: float,
    u_norm: float,
    fourth: float,
    c_f: float,
    limit4: float,
    p: int = 1,
    eighth: float = 0.0,
    g2: float = 1.0,
    g4: float = 1.0,
) -> Floats:
    """[S] (16) as its proof gives it: c_f^2 in the second term, ln max(n, 2) in the first."""
    counts = counts_of(n)
    second = log_of(g2) + 2.0 * log_of(c_f) + _log_second_16(counts, d, sigma, fourth, c_f, p, eighth)
    third = _log_far_16(counts, d, sigma, c_f, limit4, p, g4) + d_query + _log_decay(counts, 192.0, sigma, u_norm)
    return from_logs(_log_17(counts, 2.0, fourth, g2), second, third)


def equation_16_sharpened(
    n: Any,
    *,
    d: int,
    d_query: int,
    sigma: float,
    u_norm: float,
    fourth: float,
    c_f: float,
    limit4: float,
    p: int = 1,
    g2: float = 1.0,
    g4: float = 1.0,
) -> Floats:
    """Mean square L2(nu) error: ``lemma_c4_sharpened`` for |z| <= B, third term of (16) beyond, the best B for each n.

        min_B 60 exp(4 sigma^2 u^2 B^2) sqrt(fourth) g2 / n + 2 ( .. ) exp(d - B^2/32)

    Every B gives a true bound, so an inexact minimum does too. Falls like n^{-1/(1 + 128 sigma^2 u^2)} up to a power of
    ln n. Source: derived here on [S] section C.3.
    """
    counts = counts_of(n)
    coupling = (sigma * u_norm) * (sigma * u_norm)
    near = math.log(SHARPENED) + 0.5 * log_of(fourth) + log_of(g2) - np.log(counts)
    if coupling == 0.0:
        return from_logs(near)
    far = _log_far_16(counts, d, sigma, c_f, limit4, p, g4) + d_query
    return from_logs(np.array([_best_split(a, b, coupling) for a, b in zip(near, far, strict=True)]))


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
    """Part of the mean fourth power from queries |z| <= B: 216 fourth g4 / n^{1/6}. Source: [S] (19)."""
    return from_logs(_log_19(counts_of(n), fourth, g4))


def _log_19(counts: Floats, fourth: float, g4: float) -> Floats:
    return np.asarray(math.log(216.0) + log_of(fourth) + log_of(g4) - np.log(counts) / 6.0, np.float64)


def equation_18(
    n: Any,
    *,
    d: int,
    d_query: int,
    sigma: float,
    u_norm: float,
    fourth: float,
    c_f: float,
    token_fourth: float,
    limit8: float,
    g4: float = 1.0,
    g8: float = 1.0,
) -> Floats:
    """Mean fourth power of the error over tokens and queries, p = 1.

        (19) + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n token_fourth) / (32 sqrt(2) sigma^2))
                   exp( -(sqrt(n/8) - n^{1/6}) fourth^{1/2} / (16 sigma^2 c_f^2) ) g4
             + 8 ( sigma^4 c_f^4 sqrt(2 g8 C_8 (d^4 + ln(n)^4)) + sqrt(2 limit8) ) e^{d} n^{-1/(384 sigma^2 u^2)}

    Source: [S] Lemma C.9 and its equation (18).
    """
    counts = counts_of(n)
    second = log_of(g4) + log_tail_c7(counts, d, sigma, np.log(counts) / 6.0, fourth, c_f, token_fourth)
    spread = 4.0 * log_of(c_f) + 0.5 * (math.log(2.0) + log_of(g8) + log_maximum_moment(counts, d, 8, sigma))
    far = math.log(8.0) + np.logaddexp(spread, 0.5 * (math.log(2.0) + log_of(limit8)))
    third = far + d_query + _log_decay(counts, 384.0, sigma, u_norm)
    return from_logs(_log_19(counts, fourth, g4), second, third)


def gradient_u_bound(product: Floats, x4: float, x_error4: Floats, y4: float, y_error4: Floats) -> Floats:
    """Mean square error of one row of the gradient in U, from its parts.

        2 product + 2 ( 2 sqrt(8 (x4 + x_error4) y_error4) + 2 sqrt(y4 x_error4) )

    ``product``: (16) for f(y) = <v_i, y> y, g(z) = z^T; X = <v_i, tilted mean>, Y = (tilted mean) z^T; x4 = E X^4, y4
    = E|Y|^4; x_error4, y_error4: (18) for X and Y. Source: [S] equation (21), and |a - b|^2 <= 2|a|^2 + 2|b|^2 for the
    two parts.
    """
    logs = [log_of(part) for part in (product, x4, x_error4, y4, y_error4)]
    log_product, log_x, log_x_error, log_y, log_y_error = logs
    first = 0.5 * (math.log(8.0) + np.logaddexp(log_x, log_x_error) + log_y_error)
    return from_logs(math.log(2.0) + log_product, math.log(4.0) + first, math.log(4.0) + 0.5 * (log_y + log_x_error))


def _log_second_16(counts: Floats, d: int, sigma: float, fourth: float, c_f: float, p: int, eighth: float) -> Floats:
    """Second term of Lemma C.4 at the edge sigma^2 |Uz|^2 = ln(n)/6, without its power of c_f."""
    edge = np.sqrt(np.log(counts) / 6.0) / sigma
    return log_tail_c4(counts, d, sigma, edge, fourth, c_f, p, eighth)


def _log_far_16(counts: Floats, d: int, sigma: float, c_f: float, limit4: float, p: int, g4: float) -> Floats:
    """2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) )."""
    spread = 2.0 * log_of(c_f) + 0.5 * (math.log(2.0) + log_of(g4) + log_maximum_moment(counts, d, 4 * p, sigma))
    return np.asarray(math.log(2.0) + np.logaddexp(spread, 0.5 * (math.log(2.0) + log_of(limit4))), np.float64)


def _log_decay(counts: Floats, constant: float, sigma: float, u_norm: float) -> Floats:
    """Logarithm of n^{-1/(constant sigma^2 u^2)}; of 0 for u = 0, where no query lies beyond B = infinity."""
    rate = reciprocal(constant, sigma, u_norm)
    return np.full_like(counts, -np.inf) if math.isinf(rate) else -rate * np.log(counts)
