"""[S] averaged over queries: equations (16) to (19), Lemma D.1 and Proposition 3.1 with every
constant the proofs give.

Symbols of ``query``, and

    u_norm   ||U||_2 times the sub-Gaussian parameter of the query law (the paper takes that law
    1-sub-Gaussian;
             a query z = tau w with w 1-sub-Gaussian is the same as the query w under tau U)
    d_query  dimension of a query (the paper has d for both) g2, g4, g8          E|g(z)|^2, ^4, ^8
    of the factor that multiplies the average; 1 for the output itself limit4, limit8      E|R
    g(z)/S|^4, ^8: moments of the limit over queries

The split of the proofs: queries with |z| <= B, B^2 = ln(n) / (6 u^2 sigma^2) (12 for the fourth
power), and the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from esscher.measures.moments import power as raised
from esscher.theory.boursier.logs import counts_of, from_logs, log_of
from esscher.theory.boursier.query import (
    PRINTED,
    SHARPENED,
    log_maximum_moment,
    log_tail_c4,
    log_tail_c7,
    token_conditions,
    zero_without_values,
)
from esscher.theory.prediction import Conditions, Prediction, Status
from esscher.theory.setting import Setting

__all__ = [
    "Numbers",
    "equation_16_mended",
    "equation_16_printed",
    "equation_16_sharpened",
    "equation_17_mended",
    "equation_17_printed",
    "equation_18",
    "equation_19",
    "lemma_d1",
    "predictions",
    "proposition_31_exponent",
    "sharpened_exponent",
]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the averaged bounds are made of: the symbols at the top of this file, and f of the power
    ``p`` with its moments.
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
    return 0.5 * min(1.0 / 3.0, reciprocal(192.0, sigma, u_norm))


def sharpened_exponent(sigma: float, u_norm: float) -> float:
    """The same after the best split of ``equation_16_sharpened``: 1 / (2 (1 + 128 sigma^2 u^2))."""
    return 0.5 / (1.0 + 128.0 * (sigma * u_norm) * (sigma * u_norm))


def reciprocal(constant: float, sigma: float, u_norm: float) -> float:
    """1 / (constant sigma^2 u^2); infinite for u = 0."""
    coupling = (sigma * u_norm) * (sigma * u_norm)
    return 1.0 / (constant * coupling) if coupling > 0.0 else math.inf


def equation_17_printed(n: Any, fourth: float, g2: float = 1.0) -> Floats:
    """Part of the mean square error from queries |z| <= B: 216 sqrt(fourth) g2 ln(n) / n^{1/3}.
    Source: [S] (17).
    """
    return from_logs(_log_17(counts_of(n), 1.0, fourth, g2))


def equation_17_mended(n: Any, fourth: float, g2: float = 1.0) -> Floats:
    """[S] (17) with ln max(n, 2): Lemma C.4 has that logarithm."""
    return from_logs(_log_17(counts_of(n), 2.0, fourth, g2))


def _log_17(counts: Floats, least: float, fourth: float, g2: float) -> Floats:
    size = math.log(216.0) + 0.5 * log_of(fourth) + log_of(g2) - np.log(counts) / 3.0
    return np.asarray(size + log_of(np.log(np.maximum(counts, least))), np.float64)


def equation_16_printed(n: Any, of: Numbers) -> Floats:
    """Mean square L2(nu) error with the constants of the printed proof (c_f, not its square, in the
    second term).

        (17) + 2 16^p sigma^{2p} n p c_f e^{2d} (1 + [p=2] ..) g2
                   exp( -((n/2)^{1/p} - n^{1/3p}) fourth^{1/2p} / (16 sigma^2 c_f^{2/p}) )
             + 2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) ) e^{d}
             n^{-1/(192 sigma^2 u^2)}

    Source: [S] Lemma C.6 and its equation (16).
    """
    counts = counts_of(n)
    second = log_of(of.g2) + log_of(of.c_f) + _log_second_16(counts, of)
    return from_logs(
        _log_17(counts, 1.0, of.fourth, of.g2),
        second,
        _log_far_16(counts, of) + of.d_query + _log_decay(counts, 192.0, of),
    )


def equation_16_mended(n: Any, of: Numbers) -> Floats:
    """[S] (16) as its proof gives it: c_f^2 in the second term, ln max(n, 2) in the first."""
    counts = counts_of(n)
    second = log_of(of.g2) + 2.0 * log_of(of.c_f) + _log_second_16(counts, of)
    return from_logs(
        _log_17(counts, 2.0, of.fourth, of.g2),
        second,
        _log_far_16(counts, of) + of.d_query + _log_decay(counts, 192.0, of),
    )


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
    return from_logs(_log_19(counts_of(n), fourth, g4))


def _log_19(counts: Floats, fourth: float, g4: float) -> Floats:
    return np.asarray(
        math.log(216.0) + log_of(fourth) + log_of(g4) - np.log(counts) / 6.0, np.float64
    )


def equation_18(n: Any, of: Numbers) -> Floats:
    """Mean fourth power of the error over tokens and queries, p = 1.

        (19) + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n token_fourth) / (32 sqrt(2) sigma^2))
                   exp( -(sqrt(n/8) - n^{1/6}) fourth^{1/2} / (16 sigma^2 c_f^2) ) g4
             + 8 ( sigma^4 c_f^4 sqrt(2 g8 C_8 (d^4 + ln(n)^4)) + sqrt(2 limit8) ) e^{d} n^{-1/(384
             sigma^2 u^2)}

    Source: [S] Lemma C.9 and its equation (18).
    """
    counts = counts_of(n)
    tail = log_tail_c7(
        counts, of.d, of.sigma, np.log(counts) / 6.0, of.fourth, of.c_f, of.token_fourth
    )
    spread = 4.0 * log_of(of.c_f) + 0.5 * (
        math.log(2.0) + log_of(of.g8) + log_maximum_moment(counts, of.d, 8, of.sigma)
    )
    far = math.log(8.0) + np.logaddexp(spread, 0.5 * (math.log(2.0) + log_of(of.limit8)))
    third = far + of.d_query + _log_decay(counts, 384.0, of)
    return from_logs(_log_19(counts, of.fourth, of.g4), log_of(of.g4) + tail, third)


def _log_second_16(counts: Floats, of: Numbers) -> Floats:
    """Second term of Lemma C.4 at the edge sigma^2 |Uz|^2 = ln(n)/6, without its power of c_f."""
    edge = np.sqrt(np.log(counts) / 6.0) / of.sigma
    return log_tail_c4(counts, of.d, of.sigma, edge, of.fourth, of.c_f, of.p, of.eighth)


def _log_far_16(counts: Floats, of: Numbers) -> Floats:
    """2 ( sigma^{2p} c_f^2 sqrt(2 g4 C_{4p} (d^{2p} + ln(n)^{2p})) + sqrt(2 limit4) )."""
    most = log_maximum_moment(counts, of.d, 4 * of.p, of.sigma)
    spread = 2.0 * log_of(of.c_f) + 0.5 * (math.log(2.0) + log_of(of.g4) + most)
    return np.asarray(
        math.log(2.0) + np.logaddexp(spread, 0.5 * (math.log(2.0) + log_of(of.limit4))), np.float64
    )


def _log_decay(counts: Floats, constant: float, of: Numbers) -> Floats:
    """Logarithm of n^{-1/(constant sigma^2 u^2)}; of 0 for u = 0, where no query lies beyond B =
    infinity.
    """
    rate = reciprocal(constant, of.sigma, of.u_norm)
    return np.full_like(counts, -np.inf) if math.isinf(rate) else -rate * np.log(counts)


# ---- what they say of one head and one law
# --------------------------------------------------------------------------------


def predictions(setting: Setting) -> list[Prediction]:
    """Bounds on errors averaged over the law of the queries."""
    ready = is_ready(setting)
    return [
        *_second_power(setting, ready),
        *_fourth_power(setting, ready),
        _proposition(setting, ready),
        _limit(setting, ready),
    ]


def is_ready(setting: Setting) -> bool:
    """Whether every number of the formulas is known."""
    return None not in (setting.sigma, setting.fourth, setting.u_norm, setting.token_fourth)


def conditions_of(setting: Setting) -> Conditions:
    return (
        *token_conditions(setting),
        (
            "queries are sub-Gaussian (parameter tau; [S] has tau = 1 and U in place of tau A)",
            setting.tau is not None,
        ),
        ("queries are centred", setting.queries_centred),
        (
            "the head has no tilt bias",
            setting.head.tilt_bias is None or not bool(setting.head.tilt_bias.any()),
        ),
    )


def _at_least_one(setting: Setting) -> float:
    """[S] asks for sigma >= 1; a law that is sigma sub-Gaussian is so for every larger sigma."""
    return max(setting.sigma or 1.0, 1.0)


def _limit_power(setting: Setting, power: int, sigma: float) -> float:
    """Bound on E|Gamma - V E y|^power over queries: |grad K(theta)| <= 2 sigma^2 |theta|, as in
    Lemma D.1.
    """
    d, u, v = setting.head.dim_query, setting.u_norm or 0.0, setting.v_norm
    if power == 4:
        return raised(lemma_d1(d, sigma, v, u), 4)
    # E w_i^8 <= 8! exp(lambda^2/2) / lambda^8 at lambda^2 = 8 for a 1-sub-Gaussian coordinate;
    # E|w|^8 <= d^4 max_i E w_i^8
    return (
        raised(2.0 * sigma * sigma * v * u, 8)
        * float(d) ** 4
        * 40320.0
        * float(np.exp(4.0))
        / 8.0**4
    )


def _second_power(setting: Setting, ready: bool) -> list[Prediction]:
    d, dq, u = setting.head.dim, setting.head.dim_query, setting.u_norm or 0.0
    own, wide, fourth, c_f = (
        setting.sigma or 1.0,
        _at_least_one(setting),
        setting.fourth or 0.0,
        setting.v_norm,
    )

    def numbers(sigma: float) -> Numbers:
        limit4 = _limit_power(setting, 4, sigma)
        return Numbers(
            d=d, d_query=dq, sigma=sigma, u_norm=u, fourth=fourth, c_f=c_f, limit4=limit4
        )

    printed, mended, sharp = equation_16_printed, equation_16_mended, equation_16_sharpened
    third = (
        "2 ( sigma^2 ||V||^2 sqrt(2 C_4 (d^2 + ln(n)^2)) + sqrt(2 E|Gamma|^4) ) e^d n^{-1/(192"
        " sigma^2 ||U||^2)}"
    )
    whole = f"(17) + (second term of C.4 at |x| = B) + {third}"
    near = "216 E|V y|^4^{1/2} ln(n) / n^{1/3}"
    inside = "part of the mean square L2 error from queries |x| <= B"
    rows: list[tuple[str, str, Status, str, str, float, float, Callable[[Any], Floats]]] = [
        (
            "s-17-printed",
            "[S] equation (17)",
            PRINTED,
            near,
            inside,
            1 / 6,
            wide,
            lambda n: equation_17_printed(n, fourth),
        ),
        (
            "s-17-mended",
            "[S] equation (17), mended",
            "proved",
            near.replace("ln(n)", "ln(max(n,2))"),
            inside,
            1 / 6,
            own,
            lambda n: equation_17_mended(n, fourth),
        ),
        (
            "s-16-printed",
            "[S] Lemma C.6, equation (16)",
            PRINTED,
            whole,
            "l2",
            proposition_31_exponent(wide, u),
            wide,
            lambda n: printed(n, numbers(wide)),
        ),
        (
            "s-16-mended",
            "[S] Lemma C.6, equation (16), mended",
            "proved",
            whole,
            "l2",
            proposition_31_exponent(own, u),
            own,
            lambda n: mended(n, numbers(own)),
        ),
        (
            "s-16-sharpened",
            "derived here on [S] Lemma C.6",
            "proved",
            (
                "min over B of 60 exp(4 sigma^2 ||U||^2 B^2) E|V y|^4^{1/2} / n + 2 ( .. ) exp(d -"
                " B^2/32)"
            ),
            "l2",
            sharpened_exponent(own, u),
            own,
            lambda n: sharp(n, numbers(own)),
        ),
    ]
    out = []
    for name, source, status, formula, quantity, exponent, sigma, value in rows:
        everywhere = quantity == "l2"
        subject = "mean square error averaged over queries" if everywhere else quantity
        out.append(
            Prediction(
                name=name,
                statement=f"The {subject} is at most the bound.",
                source=source,
                formula=formula,
                status=status,
                quantity="l2 mean square" if everywhere else quantity,
                conditions=conditions_of(setting),
                exponent=exponent if ready else None,
                value=zero_without_values(setting, value) if ready else None,
                units="squared" if ready else "none",
                numbers=(
                    {"sigma": sigma, "u_norm": u, "fourth": fourth, "c_f": c_f} if ready else {}
                ),
            )
        )
    return out


def _fourth_power(setting: Setting, ready: bool) -> list[Prediction]:
    d, dq, u, sigma = (
        setting.head.dim,
        setting.head.dim_query,
        setting.u_norm or 0.0,
        setting.sigma or 1.0,
    )
    fourth, token_fourth, c_f = setting.fourth or 0.0, setting.token_fourth or 0.0, setting.v_norm
    limit8 = _limit_power(setting, 8, sigma)
    numbers = Numbers(
        d=d,
        d_query=dq,
        sigma=sigma,
        u_norm=u,
        fourth=fourth,
        c_f=c_f,
        token_fourth=token_fourth,
        limit8=limit8,
    )
    rows: list[tuple[str, str, str, str, float, Callable[[Any], Floats]]] = [
        (
            "s-19",
            "[S] equation (19)",
            "216 E|V y|^4 / n^{1/6}",
            "part of the l4 mean fourth power from queries |x| <= B",
            1 / 24,
            lambda n: equation_19(n, fourth),
        ),
        (
            "s-18",
            "[S] Lemma C.9, equation (18)",
            "(19) + (second term of C.7 at |x| = B) + 8 ( .. ) e^d n^{-1/(384 sigma^2 ||U||^2)}",
            "l4 mean fourth power",
            min(1 / 24, reciprocal(1536.0, sigma, u)),
            lambda n: equation_18(n, numbers),
        ),
    ]
    return [
        Prediction(
            name=name,
            statement=f"The {quantity} of the error is at most the bound.",
            source=source,
            formula=formula,
            status="proved",
            quantity=quantity,
            conditions=conditions_of(setting),
            exponent=exponent if ready else None,
            value=zero_without_values(setting, value) if ready else None,
            units="fourth power" if ready else "none",
            numbers={"sigma": sigma, "u_norm": u, "fourth": fourth, "c_f": c_f} if ready else {},
        )
        for name, source, formula, quantity, exponent, value in rows
    ]


def _proposition(setting: Setting, ready: bool) -> Prediction:
    sigma, u = _at_least_one(setting), setting.u_norm or 0.0
    return Prediction(
        name="s-prop31",
        statement=(
            "For n >= 2 the mean square error over queries is at most c_1 sigma^6 ln(n)"
            " n^{-c_2/sigma^2}."
        ),
        source="[S] Proposition 3.1",
        formula="c_1 sigma^6 ln(n) / n^{c_2/sigma^2}, c_2 = min(1/3, 1/(192 ||U||^2)) by its proof",
        status="proved",
        quantity="l2 mean square",
        conditions=(*conditions_of(setting), ("n >= 2 (at n = 1 the printed bound is 0)", True)),
        exponent=0.5 * min(1 / 3, reciprocal(192.0, 1.0, u)) / sigma / sigma if ready else None,
        numbers={"sigma": sigma, "u_norm": u} if ready else {},
    )


def _limit(setting: Setting, ready: bool) -> Prediction:
    sigma, u = setting.sigma or 1.0, setting.u_norm or 0.0
    bound = lemma_d1(setting.head.dim_query, sigma, setting.v_norm, u)
    return Prediction(
        name="s-d1",
        statement=(
            "The L4 norm over queries of the limit Gamma(x) - V E y is at most the bound,"
            " whatever n."
        ),
        source="[S] Lemma D.1",
        formula="4 sigma^2 ||V|| ||U|| sqrt(d)",
        status="proved",
        quantity="L4 norm of the limit",
        conditions=conditions_of(setting),
        exponent=0.0,
        value=(lambda n: np.full(np.shape(np.atleast_1d(n)), bound)) if ready else None,
        units="rms" if ready else "none",
        numbers={"sigma": sigma, "u_norm": u} if ready else {},
    )
