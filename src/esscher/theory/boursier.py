"""The bounds of Boursier and Boyer [S] on the error of attention: at one query (Lemmas C.1 to C.7,
D.2), averaged over queries (equations 16 to 19, Lemma D.1, Proposition 3.1), on its gradients
(Proposition 3.4), and on risks (Lemmas E.2 and E.4). First as functions of plain numbers, then what
they say of one head and one law. Each bounds the error R_n/S_n - R/S of the softmax average of f
over n tokens, with

    n        number of tokens                     (paper's L)
    d        dimension of a token
    sigma    sub-Gaussian parameter of the centred token law, E exp<u, y> <= exp(sigma^2 |u|^2 / 2)
    tilt     length |theta| of the query's tilt   (paper's ||Uz||)
    fourth   E|f(y)|^4, or any number above it
    c_f      sup |f(y)| / |y|^p                   (paper's C_f; f(y) = V y has p = 1, c_f = ||V||_2)
    u_norm   ||U||_2 times the sub-Gaussian parameter tau of the query law (the paper has tau = 1)

Every function gives what is proved: the printed formula, or what its proof gives where that is
another (mended). ``printed=True`` asks for the formula as printed; a name that ends in
``_sharpened`` has a shorter proof that gives more. Proofs and counterexamples: "Bounds" in the
documentation. Formulas are evaluated in long double, since e^{2d} at d = 4096 is 10^3557.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec

import numpy as np
from scipy.optimize import minimize_scalar

from esscher.inputs import as_counts
from esscher.measures.base import power
from esscher.theory.prediction import (
    Conditions,
    Floats,
    Prediction,
    Setting,
    state,
    tilted_moment,
)

P = ParamSpec("P")

DELTA = 0.01  # chance left out by the statements "with high probability"
SHARPENED = 60.0  # 4/a^2 + 12 sqrt(6) e^{-3/2} / (1-a)^3 + 4 e^{-1} / (1-a)^2 at a = 2/5 is 59.5
wide = np.longdouble


def _evaluated(
    formula: Callable[Concatenate[Any, P], Any],
) -> Callable[Concatenate[Any, P], Floats]:
    """A formula in n as a function of token numbers, in float64, infinite where it says nothing;
    inside another formula n is wide already, and so is the answer.
    """

    @functools.wraps(formula)
    def bound(n: Any, /, *args: P.args, **options: P.kwargs) -> Any:
        if isinstance(n, np.ndarray) and n.dtype == wide:
            return formula(n, *args, **options)
        with np.errstate(all="ignore"):
            value = formula(as_counts(n, "n").astype(wide), *args, **options)
            return np.nan_to_num(np.asarray(value, np.float64), nan=np.inf, posinf=np.inf)

    return bound


def _growth(factor: float, sigma: float, tilt: float) -> Any:
    """exp(factor sigma^2 tilt^2)."""
    return np.exp(factor * wide(sigma * tilt) ** 2)


# ---- at one query


@_evaluated
def lemma_c1(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Any:
    """Squared error not exceeded with chance at least 1 - 4 delta: 27 exp(4 sigma^2 tilt^2)
    sqrt(fourth) / (delta n). Source: [S] Lemma C.1, here for every delta in (0, 1).
    """
    return 0.25 * corollary_c3(n, delta, sigma, tilt, fourth)


@_evaluated
def lemma_c1_threshold(n: Any, sigma: float, tilt: float, *, printed: bool = False) -> Any:
    """exp(-(n/8) exp(-2 sigma^2 tilt^2)), the least delta that the paper's proof of Lemma C.1
    covers; printed: without sigma^2.
    """
    return np.exp(-n / 8.0 * _growth(-2.0, 1.0 if printed else sigma, tilt))


@_evaluated
def lemma_c2(n: Any, delta: float, second: float, *, printed: bool = False) -> Any:
    """|sum_i (Q_i - E Q_i)| <= sqrt(u n / (2 delta)) with chance 1 - 2 delta, u = ``second`` >=
    E|Q|^2 (Chebyshev); printed: sqrt(3 u n / delta). Source: [S] Lemma C.2.
    """
    return np.sqrt((3.0 if printed else 0.5) * second * n / delta)


@_evaluated
def denominator_below(n: Any, delta: float, sigma: float, tilt: float) -> Any:
    """1 - a of S_n >= (1 - a) E S_n with chance 1 - delta, S_n = sum_k exp<theta, y_k>, a =
    exp(sigma^2 tilt^2) sqrt(2 ln(1/delta) / n); 0 where a > 1. Source: [S] section C.1.
    """
    return np.maximum(1.0 - _growth(1.0, sigma, tilt) * np.sqrt(2.0 * math.log(1 / delta) / n), 0)


@_evaluated
def denominator_above(
    n: Any, delta: float, sigma: float, tilt: float, *, printed: bool = False
) -> Any:
    """1 + a of S_n <= (1 + a) E S_n with chance 1 - delta, a = exp(sigma^2 tilt^2) / sqrt(delta n)
    (Chebyshev); printed: a sqrt(3) times larger, without E S_n. Source: [S] section C.1.
    """
    return 1.0 + _growth(1.0, sigma, tilt) * np.sqrt((3.0 if printed else 1.0) / (delta * n))


@_evaluated
def equation_14(n: Any, delta: float, sigma: float, tilt: float, fourth: float, size: float) -> Any:
    """Error not exceeded with chance 1 - 4 delta, from numerator and denominator apart:

        max(a+, a- / (1 - a-)) |R/S| + exp(2 sigma^2 tilt^2) fourth^(1/4) sqrt(3 / (delta n))
            / (1 - a-),

    a- and a+ of the two functions above as printed, ``size`` = |R/S| the limit. Source: [S] (13)
    and (14).
    """
    low = denominator_below(n, delta, sigma, tilt)
    high = denominator_above(n, delta, sigma, tilt, printed=True)
    beta = _growth(2.0, sigma, tilt) * fourth**0.25 * np.sqrt(3.0 / (delta * n))
    return np.maximum(high - 1.0, (1.0 - low) / low) * size + beta / low


def equation_15(sigma: float, tilt: float, second: float) -> float:
    """|R/S| <= exp(sigma^2 tilt^2) sqrt(``second``), second = E|f|^2. Source: [S] (15)."""
    return math.exp((sigma * tilt) ** 2) * math.sqrt(second)


@_evaluated
def corollary_c3(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Any:
    """Squared error not exceeded with chance at least 1 - delta: Lemma C.1 at delta/4, that is
    C / (delta n), C = 108 exp(4 sigma^2 tilt^2) sqrt(fourth). Source: [S] Corollary C.3.
    """
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta: expected a number between 0 and 1, got {delta}")
    return _c3(sigma, tilt, fourth) / (delta * n)


@_evaluated
def corollary_c3_threshold(n: Any, sigma: float, tilt: float, *, printed: bool = False) -> Any:
    """4 exp(-(n/8) exp(-2 sigma^2 tilt^2)), the least delta that the paper's proof covers.

    Printed: 64 exp(4 sigma^2 tilt^2) / n^2, which is smaller where 5.7 < n exp(-2 sigma^2 tilt^2) <
    34.5. Source: [S] Corollary C.3.
    """
    if printed:
        return 64.0 * _growth(4.0, sigma, tilt) / n**2
    return 4.0 * lemma_c1_threshold(n, sigma, tilt)


def _c3(sigma: float, tilt: float, fourth: float) -> Any:
    """C of Corollary C.3."""
    return 108.0 * _growth(4.0, sigma, tilt) * math.sqrt(fourth)


@_evaluated
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
) -> Any:
    """Mean square error at one query.

        2 C ln(max(n, 2))/n
          + 2 16^p sigma^{2p} n p c_f^2 e^{2d} (1 + [p=2] sqrt(n) eighth^{1/4} / (22 sigma^2))
            exp( -((n/2)^{1/p} - exp(2 sigma^2 tilt^2 / p)) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )

    with C of Corollary C.3 and ``eighth`` = E|y|^8 (used for p = 2 only). Printed: ln n, and c_f
    for its square, which fails at n = 1 for large c_f. Source: [S] Lemma C.4.
    """
    logs = np.log(n if printed else np.maximum(n, 2.0))
    second = _second_c4(n, d, sigma, _growth(2.0 / p, sigma, tilt), fourth, c_f, p, eighth)
    return 2.0 * _c3(sigma, tilt, fourth) * logs / n + second / (c_f if printed and c_f else 1.0)


@_evaluated
def lemma_c4_sharpened(n: Any, sigma: float, tilt: float, fourth: float) -> Any:
    """Mean square error at one query: 60 exp(4 sigma^2 tilt^2) sqrt(fourth) / n, for every n, f and
    dimension. Source: derived here from the estimates of [S] section C.1.
    """
    return SHARPENED * _growth(4.0, sigma, tilt) * math.sqrt(fourth) / n


def _second_c4(
    n: Any, d: int, sigma: float, peak: Any, fourth: float, c_f: float, p: int, eighth: float
) -> Any:
    """Second term of Lemma C.4; ``peak`` is exp(2 sigma^2 tilt^2 / p). f = 0 has no error."""
    if p not in (1, 2):
        raise ValueError(f"p: expected 1 or 2, got {p!r}")
    if c_f == 0.0:
        return 0.0
    sigma2, c_f2 = wide(sigma) ** 2, wide(c_f) ** 2
    factor = 1.0 if p == 1 else 1.0 + np.sqrt(n) * eighth**0.25 / (22.0 * sigma2)
    rate = wide(fourth) ** (0.5 / p) / (16.0 * sigma2 * c_f2 ** (1.0 / p))
    size = 2.0 * p * 16.0**p * sigma2**p * n * c_f2 * factor * np.exp(wide(2.0 * d))
    return size * np.exp((peak - (n / 2.0) ** (1.0 / p)) * rate)


@_evaluated
def lemma_c7(
    n: Any, d: int, sigma: float, tilt: float, fourth: float, c_f: float, token_fourth: float
) -> Any:
    """Mean fourth power of the error at one query, p = 1.

        2 C sqrt(fourth) / sqrt(n)
          + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n) token_fourth^{1/2} / (32 sqrt(2) sigma^2))
            exp( -(sqrt(n)/(2 sqrt(2)) - exp(2 sigma^2 tilt^2)) fourth^{1/2} / (16 sigma^2 c_f^2) )

    ``token_fourth`` = E|y|^4. Source: [S] Lemma C.7. Its proof drops a term, which the second one
    absorbs.
    """
    first = 2.0 * _c3(sigma, tilt, fourth) * math.sqrt(fourth) / np.sqrt(n)
    return first + _second_c7(n, d, sigma, _growth(2.0, sigma, tilt), fourth, c_f, token_fourth)


def _second_c7(
    n: Any, d: int, sigma: float, peak: Any, fourth: float, c_f: float, token_fourth: float
) -> Any:
    """Second term of Lemma C.7; ``peak`` is exp(2 sigma^2 tilt^2). f = 0 has no error."""
    if c_f == 0.0:
        return 0.0
    sigma2, c_f2 = wide(sigma) ** 2, wide(c_f) ** 2
    factor = 1.0 + np.sqrt(n * token_fourth) / (32.0 * math.sqrt(2.0) * sigma2)
    rate = math.sqrt(fourth) / (16.0 * sigma2 * c_f2)
    size = 16.0**3 * sigma2**2 * n * c_f2**2 * factor * np.exp(wide(2.0 * d))
    return size * np.exp((peak - np.sqrt(n / 8.0)) * rate)


def lemma_d2_tail(t: Any, d: int, sigma: float = 1.0) -> Floats:
    """P(|y| >= t) <= exp(2d - t^2 / (16 sigma^2)). Source: [S] Lemma D.2, part 1."""
    return np.asarray(np.exp(2.0 * d - (np.asarray(t, np.float64) / sigma) ** 2 / 16.0))


@_evaluated
def lemma_d2_maximum_moment(n: Any, d: int, p: int, sigma: float = 1.0) -> Any:
    """E max_k |y_k|^p <= C_p sigma^p (d^{p/2} + ln(n)^{p/2}), p even, with the constant that the
    proof of [S] Lemma D.2, part 2, gives:

        C_p = 64^{p/2} (1 + (p/2) c_p),   c_p = Gamma(p/2, 4) e^4 / 4^{p/2}
    """
    if p < 2 or p % 2:
        raise ValueError(f"p: expected an even number of at least 2, got {p}")
    half = p // 2
    # Gamma(m, x) e^x = (m-1)! sum_{j<m} x^j / j! at x = 4
    incomplete = math.factorial(half - 1) * sum(4.0**j / math.factorial(j) for j in range(half))
    constant = 64.0**half * (1.0 + half * incomplete / 4.0**half)
    return constant * wide(sigma) ** p * (wide(d) ** half + np.log(n) ** half)


# ---- averaged over queries: those with |z| <= B, B^2 = ln(n) / (6 u^2 sigma^2) (12 for the fourth
# ---- power), and the others


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the averaged bounds are made of: the symbols at the top of this file, and more moments.

    ``d_query``: dimension of a query (the paper has d for both); ``limit4``, ``limit8``: E|R
    g(z)/S|^4, ^8 over queries; ``token_fourth``, ``eighth``: E|y|^4, ^8; ``g2``, ``g4``, ``g8``:
    E|g(z)|^2, ^4, ^8 of the factor of the average, 1 for the output itself.
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
    1/(192 sigma^2 u^2)). Source: [S] equation (16).
    """
    return 0.5 * min(1.0 / 3.0, _reciprocal(192.0, sigma, u_norm))


def sharpened_exponent(sigma: float, u_norm: float) -> float:
    """The same after the best split of ``equation_16_sharpened``: 1 / (2 (1 + 128 sigma^2 u^2))."""
    return 0.5 / (1.0 + 128.0 * (sigma * u_norm) * (sigma * u_norm))


def _reciprocal(constant: float, sigma: float, u_norm: float) -> float:
    """1 / (constant sigma^2 u^2); infinite for u = 0."""
    coupling = (sigma * u_norm) * (sigma * u_norm)
    return 1.0 / (constant * coupling) if coupling > 0.0 else math.inf


@_evaluated
def equation_17(n: Any, fourth: float, g2: float = 1.0) -> Any:
    """Part of the mean square error from queries |z| <= B: 216 sqrt(fourth) g2 ln(max(n, 2)) /
    n^{1/3}. Source: [S] (17), which has ln n.
    """
    return 216.0 * math.sqrt(fourth) * g2 * np.log(np.maximum(n, 2.0)) / np.cbrt(n)


@_evaluated
def equation_16(n: Any, of: Numbers) -> Any:
    """Mean square L2(nu) error.

        (17) + 2 16^p sigma^{2p} n p c_f^2 e^{2d} (1 + [p=2] ..) g2
                   exp( -((n/2)^{1/p} - n^{1/3p}) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )
             + 2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) )
                   e^{d} n^{-1/(192 sigma^2 u^2)}

    Source: [S] Lemma C.6 and its equation (16), which has c_f for its square in the second term.
    """
    peak = n ** (1.0 / (3.0 * of.p))  # sigma^2 |Uz|^2 = ln(n)/6
    second = _second_c4(n, of.d, of.sigma, peak, of.fourth, of.c_f, of.p, of.eighth) * of.g2
    return equation_17(n, of.fourth, of.g2) + second + _far_16(n, of) * _decay(n, 192.0, of)


def _far_16(n: Any, of: Numbers) -> Any:
    """2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) )."""
    most = lemma_d2_maximum_moment(n, of.d, 4 * of.p, of.sigma)
    return 2.0 * (wide(of.c_f) ** 2 * np.sqrt(2.0 * of.g4 * most) + math.sqrt(2.0 * of.limit4))


def _decay(n: Any, constant: float, of: Numbers) -> Any:
    """e^{d} n^{-1/(constant sigma^2 u^2)}; 0 for u = 0, where no query lies beyond B = infinity."""
    rate = _reciprocal(constant, of.sigma, of.u_norm)
    return 0.0 if math.isinf(rate) else np.exp(of.d_query - rate * np.log(n))


@_evaluated
def equation_16_sharpened(n: Any, of: Numbers) -> Any:
    """Mean square L2(nu) error: ``lemma_c4_sharpened`` for |z| <= B, third term of (16) beyond, the
    best B for each n.

        min_B 60 exp(4 sigma^2 u^2 B^2) sqrt(fourth) g2 / n + 2 ( .. ) exp(d - B^2/32)

    Falls like n^{-1/(1 + 128 sigma^2 u^2)} up to a power of ln n. Source: derived here on [S]
    section C.3.
    """
    coupling = (of.sigma * of.u_norm) * (of.sigma * of.u_norm)
    near = SHARPENED * math.sqrt(of.fourth) * of.g2 / n
    if coupling == 0.0:
        return near
    logs = np.log(near), np.log(_far_16(n, of)) + of.d_query
    return np.exp([_best_split(float(a), float(b), coupling) for a, b in zip(*logs, strict=True)])


def _best_split(near: float, far: float, coupling: float) -> float:
    """Logarithm of min over s = B^2 of exp(near + 4 coupling s) + exp(far - s/32)."""
    if not (math.isfinite(near) and math.isfinite(far) and math.isfinite(coupling)):
        return near if near == -math.inf else float(np.logaddexp(near, far))  # B = 0

    def logs(square: float) -> float:
        return float(np.logaddexp(near + 4.0 * coupling * square, far - square / 32.0))

    balance = max((far - near) / (4.0 * coupling + 1.0 / 32.0), 0.0)  # where the two are equal
    best = minimize_scalar(logs, bounds=(0.0, 2.0 * balance + 1.0), method="bounded")
    return min(float(best.fun), logs(0.0))


@_evaluated
def equation_19(n: Any, fourth: float, g4: float = 1.0) -> Any:
    """Part of the mean fourth power from queries |z| <= B: 216 fourth g4 / n^{1/6}. Source: [S]
    (19).
    """
    return 216.0 * wide(fourth) * g4 / n ** (1.0 / wide(6.0))


@_evaluated
def equation_18(n: Any, of: Numbers) -> Any:
    """Mean fourth power of the error over tokens and queries, p = 1.

        (19) + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n token_fourth) / (32 sqrt(2) sigma^2))
                   exp( -(sqrt(n/8) - n^{1/6}) fourth^{1/2} / (16 sigma^2 c_f^2) ) g4
             + 8 ( sigma^4 c_f^4 sqrt(2 g8 C_8 (d^4 + ln(n)^4)) + sqrt(2 limit8) ) e^{d}
                 n^{-1/(384 sigma^2 u^2)}

    Source: [S] Lemma C.9 and its equation (18).
    """
    root = n ** (1.0 / wide(6.0))
    second = _second_c7(n, of.d, of.sigma, root, of.fourth, of.c_f, of.token_fourth)
    spread = wide(of.c_f) ** 4 * np.sqrt(
        2.0 * of.g8 * lemma_d2_maximum_moment(n, of.d, 8, of.sigma)
    )
    far = 8.0 * (spread + math.sqrt(2.0 * of.limit8)) * _decay(n, 384.0, of)
    return equation_19(n, of.fourth, of.g4) + second * of.g4 + far


@np.errstate(all="ignore")
def gradient_u_bound(
    product: Floats, x4: float, x_error4: Floats, y4: float, y_error4: Floats
) -> Floats:
    """Mean square error of one row of the gradient in U, from its parts.

        2 product + 2 ( 2 sqrt(8 (x4 + x_error4) y_error4) + 2 sqrt(y4 x_error4) )

    ``product``: (16) for f(y) = <v_i, y> y, g(z) = z^T; X = <v_i, tilted mean>, Y = (tilted mean)
    z^T; x4 = E X^4, y4 = E|Y|^4; x_error4, y_error4: (18) for X and Y. Source: [S] equation (21).
    """
    x_error, y_error = x_error4.astype(wide), y_error4.astype(wide)
    parts = np.sqrt(8.0 * (x4 + x_error) * y_error) + np.sqrt(y4 * x_error)
    return np.nan_to_num(np.asarray(2.0 * product + 4.0 * parts, np.float64), nan=np.inf)


# ---- risks of in-context learning: R_n and R are E loss(Gamma_n(z), y) and E loss(Gamma(z), y)
#
# error2, gradient_error2: (E|Gamma_n - Gamma|^2)^{1/2}, the same of gradients in (U, V), or above
# them; limit2, label2, gradient2: (E|Gamma|^2)^{1/2}, (E|y|^2)^{1/2}, (E|grad Gamma|^2)^{1/2}; with
# 4 for 2 the fourth moment. All are over tasks, tokens and queries together. The loss satisfies
# |grad_1 loss(a, y)| <= |a| + |y| and |grad_1 loss(a, y) - grad_1 loss(b, y)| <= |a - b|; the
# quadratic loss |a - y|^2 / 2 does.


def lemma_e2_printed(error2: Any, error4: Any, label4: float, limit4: float) -> Any:
    """|R_n - R| as printed: 2 label4 error2 (error4 + limit4); false, since it is 0 for labels that
    are 0. Source: [S] Lemma E.2.
    """
    return 2.0 * label4 * error2 * (error4 + limit4)


def lemma_e2_mended(error2: Any, label2: float, limit2: float) -> Any:
    """|R_n - R| <= error2 (label2 + limit2 + error2). Source: [S] Lemma E.2, mended."""
    return error2 * (label2 + limit2 + error2)


def lemma_e4(
    error2: Any, gradient_error2: Any, label2: float, limit2: float, gradient2: float
) -> Any:
    """|grad R_n - grad R| <= gradient_error2 (limit2 + error2 + label2) + error2 gradient2.

    Source: the proof of [S] Lemma E.4 up to (28); the displayed statement holds only for one common
    sigma_mu.
    """
    return gradient_error2 * (limit2 + error2 + label2) + error2 * gradient2


# ---- what they say of one head and one law


def _token_conditions(setting: Setting) -> Conditions:
    """Hypotheses of [S] on the law of the tokens. A mean of the tokens cancels in the error."""
    return (
        (
            "tokens are sub-Gaussian: E exp<u, y - E y> <= exp(sigma^2 |u|^2 / 2)",
            setting.sigma is not None,
        ),
        ("E|V (y - E y)|^4 is known", setting.fourth is not None),
    )


def one_query(setting: Setting) -> list[Prediction]:
    """Bounds for every query |x| <= radius: Corollary C.3 and Lemmas C.4 and C.7."""
    d, v, token_fourth = setting.head.dim, setting.v_norm, setting.token_fourth or 0.0
    at = (setting.sigma or 1.0, setting.tilt, setting.fourth or 0.0)
    numbers = {"radius": setting.radius, "d": float(d), "c_f": v}
    numbers |= dict(zip(("sigma", "tilt", "fourth"), at, strict=True))
    rows: dict[str, tuple[float, Callable[[Any], Floats]]] = {
        "s-c3-mended": (0.5, lambda n: corollary_c3(n, DELTA, *at)),
        "s-c4-mended": (0.5, lambda n: lemma_c4(n, d, *at, v)),
        "s-c4-sharpened": (0.5, lambda n: lemma_c4_sharpened(n, *at)),
        "s-c7": (0.125, lambda n: lemma_c7(n, d, *at, v, token_fourth)),
    }
    known = None not in (setting.sigma, setting.fourth, setting.token_fourth)
    found = []
    for name, (exponent, value) in rows.items():
        own = numbers | {"delta": DELTA} if name == "s-c3-mended" else numbers
        found.append(state(name, _token_conditions(setting), exponent, value, own, known))
    return found


def _average_conditions(setting: Setting) -> tuple[Conditions, bool]:
    """Hypotheses of the bounds averaged over queries, and whether their numbers are known."""
    conditions = (
        *_token_conditions(setting),
        (
            "queries are sub-Gaussian (parameter tau; [S] has tau = 1 and U in place of tau A)",
            setting.u_norm is not None,
        ),
        ("queries are centred", setting.queries_centred),
        ("the head has no tilt bias", setting.no_bias),
    )
    numbers = (setting.sigma, setting.fourth, setting.u_norm, setting.token_fourth)
    return conditions, None not in numbers


def _output(setting: Setting) -> Numbers:
    """Of the output V y itself; moments of its limit from |grad K(theta)| <= 2 sigma^2 |theta|."""
    sigma, u, v = setting.sigma or 1.0, setting.u_norm or 0.0, setting.v_norm
    dq = setting.head.dim_query
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
    """Bounds on errors averaged over the law of the queries: equations (16) and (18), Proposition
    3.1.
    """
    of = _output(setting)
    sigma, u = of.sigma, of.u_norm
    conditions, known = _average_conditions(setting)
    numbers = {"sigma": sigma, "u_norm": u, "fourth": of.fourth, "c_f": of.c_f}
    # [S] asks for sigma >= 1; a law that is sigma sub-Gaussian is so for every larger sigma
    large = max(sigma, 1.0)
    rows: list[tuple[str, float, Callable[[Any], Floats] | None]] = [
        ("s-16-mended", proposition_31_exponent(sigma, u), lambda n: equation_16(n, of)),
        ("s-16-sharpened", sharpened_exponent(sigma, u), lambda n: equation_16_sharpened(n, of)),
        ("s-18", min(1 / 24, _reciprocal(1536.0, sigma, u)), lambda n: equation_18(n, of)),
        ("s-prop31", proposition_31_exponent(1.0, u) / large / large, None),
    ]
    return [
        state(
            name, conditions, beta, value, numbers if value else numbers | {"sigma": large}, known
        )
        for name, beta, value in rows
    ]


def gradients(setting: Setting) -> list[Prediction]:
    """Proposition 3.4: the error of one row of the gradient in V, and of the gradient in U (all
    rows, Frobenius norm).
    """
    output = _output(setting)
    sigma, u, v = output.sigma, output.u_norm, output.c_f
    conditions, known = _average_conditions(setting)
    limit4 = power(lemma_d1(output.d_query, sigma, 1.0, u), 4)
    token = replace(output, fourth=output.token_fourth, c_f=1.0, limit4=limit4)  # f(y) = y
    moments = {pq: tilted_moment(setting, *pq) for pq in ((4, 0), (8, 0), (4, 4), (8, 4), (8, 8))}
    query = {q: setting.queries.norm_moment(q) for q in (2, 4, 8)}
    all_known = known and None not in (*moments.values(), *query.values(), setting.token_eighth)
    m = {pq: moment or 0.0 for pq, moment in moments.items()}
    g = {q: moment or 0.0 for q, moment in query.items()}
    eighth, v4 = setting.token_eighth or 0.0, power(v, 4)
    x = replace(output, limit8=power(v, 8) * m[8, 0])
    y = replace(token, limit8=m[8, 8], g4=g[4], g8=g[8])
    squares = replace(  # f(y) = V y y^T
        output, fourth=v4 * eighth, limit4=v4 * m[8, 4], p=2, eighth=eighth, g2=g[2], g4=g[4]
    )

    def u_bound(n: Any) -> Floats:
        return gradient_u_bound(
            equation_16(n, squares), v4 * m[4, 0], equation_18(n, x), m[4, 4], equation_18(n, y)
        )

    moment_condition = ("the moments of Assumption 3.3 and E|y|^8 are known", all_known)
    v_beta, u_beta = proposition_31_exponent(sigma, u), min(1 / 24, _reciprocal(1536.0, sigma, u))
    v_numbers = {"sigma": sigma, "u_norm": u}
    u_numbers = {f"tilted_moment_{p}_{q}": of for (p, q), of in moments.items() if of}
    both = (*conditions, moment_condition)
    return [
        state(
            "s-gradient-v", conditions, v_beta, lambda n: equation_16(n, token), v_numbers, known
        ),
        state("s-gradient-u", both, u_beta, u_bound, u_numbers, all_known),
    ]
