"""[S] at one query: Lemmas C.1, C.4, C.7, D.2 and Corollary C.3 as functions of plain numbers, and
what they predict.

Each bounds the error R_n/S_n - R/S of the softmax average of f over n tokens, with

    n      number of tokens                    (paper's L)
    d      dimension of a token
    sigma  sub-Gaussian parameter of the centred token law, E exp<u, y> <= exp(sigma^2 |u|^2 / 2)
    tilt   length |theta| of the query's tilt   (paper's ||Uz||)
    fourth E|f(y)|^4, or any number above it
    c_f    sup |f(y)| / |y|^p                   (paper's C_f; f(y) = V y has p = 1, c_f = ||V||_2)

A name ends in ``_printed`` where the formula is the paper's and its proof does not give it as it
stands, in ``_mended`` where it is what the proof gives, in ``_sharpened`` where a shorter proof
gives more. A name without ending is printed and proved. Proofs and counterexamples: "Bounds" in the
documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.inputs import as_count
from esscher.measures.moments import power
from esscher.theory.boursier.logs import counts_of, from_logs, log_of
from esscher.theory.prediction import Conditions, Prediction, Status
from esscher.theory.setting import Setting

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
    "predictions",
]

Floats = npt.NDArray[np.float64]

DELTA = 0.01  # chance left out by the statements "with high probability"
PRINTED: Status = "printed (not proved as printed)"
SHARPENED = 60.0  # 4/a^2 + 12 sqrt(6) e^{-3/2} / (1-a)^3 + 4 e^{-1} / (1-a)^2 at a = 2/5 is 59.5


def lemma_c1(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Floats:
    """Squared error not exceeded with chance at least 1 - 4 delta.

        27 beta^2,   beta = exp(2 sigma^2 tilt^2) fourth^{1/4} / sqrt(delta n)

    Source: [S] Lemma C.1. The paper asks for delta above a threshold, see the two functions below;
    the statement holds for every delta in (0, 1), by the proof in "Bounds".
    """
    return from_logs(
        math.log(27.0)
        + _growth(4.0, sigma, tilt)
        + 0.5 * log_of(fourth)
        - np.log(_share(delta) * counts_of(n))
    )


def lemma_c1_threshold_printed(n: Any, tilt: float) -> Floats:
    """exp(-(n/8) exp(-2 tilt^2)), the least delta in [S] Lemma C.1; its proof needs sigma^2 in the
    exponent.
    """
    return np.exp(-counts_of(n) / 8.0 * math.exp(-2.0 * tilt * tilt))


def lemma_c1_threshold_mended(n: Any, sigma: float, tilt: float) -> Floats:
    """exp(-(n/8) exp(-2 sigma^2 tilt^2)), the least delta that the paper's proof of Lemma C.1
    covers (delta_min).
    """
    return np.exp(-counts_of(n) / 8.0 * math.exp(-_growth(2.0, sigma, tilt)))


def corollary_c3_constant(sigma: float, tilt: float, fourth: float) -> float:
    """C = 108 exp(4 sigma^2 tilt^2) sqrt(fourth). Source: [S] Corollary C.3."""
    return float(from_logs(_log_c3(sigma, tilt, fourth)))


def corollary_c3(n: Any, delta: float, sigma: float, tilt: float, fourth: float) -> Floats:
    """Squared error not exceeded with chance at least 1 - delta: C / (delta n). Source: [S]
    Corollary C.3.
    """
    return from_logs(_log_c3(sigma, tilt, fourth) - np.log(_share(delta) * counts_of(n)))


def corollary_c3_threshold_printed(n: Any, sigma: float, tilt: float) -> Floats:
    """delta_0 = 64 exp(4 sigma^2 tilt^2) / n^2, the least delta in [S] Corollary C.3."""
    return from_logs(math.log(64.0) + _growth(4.0, sigma, tilt) - 2.0 * np.log(counts_of(n)))


def corollary_c3_threshold_mended(n: Any, sigma: float, tilt: float) -> Floats:
    """4 exp(-(n/8) exp(-2 sigma^2 tilt^2)): Lemma C.1 is used at delta/4, so delta must be four
    times its threshold.

    The printed delta_0 is smaller than this where 5.7 < n exp(-2 sigma^2 tilt^2) < 34.5.
    """
    return 4.0 * lemma_c1_threshold_mended(n, sigma, tilt)


def lemma_c4_printed(
    n: Any,
    d: int,
    sigma: float,
    tilt: float,
    fourth: float,
    c_f: float,
    p: int = 1,
    eighth: float = 0.0,
) -> Floats:
    """Mean square error at one query, as printed.

        2 C ln(n)/n + 2 16^p sigma^{2p} n p c_f e^{2d} (1 + [p=2] sqrt(n) eighth^{1/4} / (22
        sigma^2))
            exp( -( (n/2)^{1/p} - exp(2 sigma^2 tilt^2 / p) ) fourth^{1/2p} / (16 sigma^2 c_f^{2/p})
            )

    with C of Corollary C.3 and ``eighth`` = E|y|^8 (used for p = 2 only). Source: [S] Lemma C.4.
    Fails at n = 1 for large c_f.
    """
    counts = counts_of(n)
    first = _log_c3(sigma, tilt, fourth) + log_of(2.0 * np.log(counts) / counts)
    return from_logs(
        first, log_of(c_f) + log_tail_c4(counts, d, sigma, tilt, fourth, c_f, p, eighth)
    )


def lemma_c4_mended(
    n: Any,
    d: int,
    sigma: float,
    tilt: float,
    fourth: float,
    c_f: float,
    p: int = 1,
    eighth: float = 0.0,
) -> Floats:
    """Mean square error at one query as the proof gives it: [S] Lemma C.4 with c_f^2 for c_f, ln
    max(n, 2) for ln n.
    """
    counts = counts_of(n)
    first = _log_c3(sigma, tilt, fourth) + np.log(2.0 * np.log(np.maximum(counts, 2.0)) / counts)
    return from_logs(
        first, 2.0 * log_of(c_f) + log_tail_c4(counts, d, sigma, tilt, fourth, c_f, p, eighth)
    )


def lemma_c4_sharpened(n: Any, sigma: float, tilt: float, fourth: float) -> Floats:
    """Mean square error at one query: 60 exp(4 sigma^2 tilt^2) sqrt(fourth) / n, for every n and
    every f.

    No logarithm, no second term, no c_f and no dimension. It implies the printed Lemma C.4 for n >=
    2. Source: derived here from the estimates of [S] section C.1 (Chebyshev on the centred
    numerator, Chung-Lu on the denominator).
    """
    return from_logs(
        math.log(SHARPENED)
        + _growth(4.0, sigma, tilt)
        + 0.5 * log_of(fourth)
        - np.log(counts_of(n))
    )


def lemma_c7(
    n: Any, d: int, sigma: float, tilt: float, fourth: float, c_f: float, token_fourth: float
) -> Floats:
    """Mean fourth power of the error at one query, p = 1.

        2 C sqrt(fourth) / sqrt(n) + 16^3 sigma^4 n c_f^4 e^{2d} (1 + sqrt(n) token_fourth^{1/2} /
        (32 sqrt(2) sigma^2))
            exp( -( sqrt(n)/(2 sqrt(2)) - exp(2 sigma^2 tilt^2) ) fourth^{1/2} / (16 sigma^2 c_f^2)
            )

    ``token_fourth`` = E|y|^4. Source: [S] Lemma C.7. Its proof drops a term, which the second one
    absorbs.
    """
    counts = counts_of(n)
    first = math.log(2.0) + _log_c3(sigma, tilt, fourth) + 0.5 * (log_of(fourth) - np.log(counts))
    return from_logs(
        first, log_tail_c7(counts, d, sigma, _growth(2.0, sigma, tilt), fourth, c_f, token_fourth)
    )


def lemma_d2_tail(t: Any, d: int, sigma: float = 1.0) -> Floats:
    """P(|y| >= t) <= exp(2d - t^2 / (16 sigma^2)). Source: [S] Lemma D.2, part 1."""
    return np.asarray(
        np.exp(2.0 * d - (np.asarray(t, dtype=np.float64) / sigma) ** 2 / 16.0), np.float64
    )


def lemma_d2_maximum_moment(n: Any, d: int, p: int, sigma: float = 1.0) -> Floats:
    """E max_k |y_k|^p <= C_p sigma^p (d^{p/2} + ln(n)^{p/2}) with the constant its proof gives, p
    even.

        C_p = 64^{p/2} (1 + (p/2) c_p),   c_p = Gamma(p/2, 4) e^4 / 4^{p/2}

    The proof needs Gamma(p/2, x) <= c_p e^{-x} x^{p/2} only from x = 4 on, since d >= 1; there
    x^{-p/2} e^x Gamma(p/2, x) falls. Source: [S] Lemma D.2, part 2, which states that C_p exists.
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


def log_tail_c4(
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
    factor = (
        0.0
        if p == 1
        else np.logaddexp(
            0.0, 0.5 * np.log(counts) + 0.25 * log_of(eighth) - math.log(22.0) - log_sigma2
        )
    )
    with np.errstate(over="ignore", invalid="ignore"):
        rate = np.exp(
            0.5 / p * log_of(fourth) - math.log(16.0) - log_sigma2 - 2.0 / p * log_of(c_f)
        )
        power = (np.exp(_growth(2.0 / p, sigma, tilt)) - (counts / 2.0) ** (1.0 / p)) * rate
        return np.asarray(
            math.log(2.0 * p * 16.0**p)
            + p * log_sigma2
            + np.log(counts)
            + factor
            + 2.0 * d
            + power,
            np.float64,
        )


def log_tail_c7(
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
    factor = np.logaddexp(
        0.0,
        0.5 * (np.log(counts) + log_of(token_fourth))
        - math.log(32.0 * math.sqrt(2.0))
        - log_sigma2,
    )
    with np.errstate(over="ignore", invalid="ignore"):
        rate = np.exp(0.5 * log_of(fourth) - math.log(16.0) - log_sigma2 - 2.0 * log_c_f)
        power = (np.exp(growth) - np.sqrt(counts / 8.0)) * rate
        size = math.log(16.0**3) + 2.0 * log_sigma2 + 4.0 * log_c_f + np.log(counts)
        return np.asarray(size + factor + 2.0 * d + power, np.float64)


def _log_c3(sigma: float, tilt: float, fourth: float) -> Floats:
    """Logarithm of ``corollary_c3_constant``."""
    return np.asarray(
        math.log(108.0) + _growth(4.0, sigma, tilt) + 0.5 * log_of(fourth), np.float64
    )


def _growth(power: float, sigma: float, tilt: Any) -> Any:
    """power sigma^2 tilt^2: the logarithm of exp(power sigma^2 tilt^2)."""
    with np.errstate(over="ignore"):
        return power * (sigma * tilt) * (sigma * tilt)


def _share(delta: float) -> float:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta: expected a number between 0 and 1, got {delta}")
    return delta


# ---- what they say of one head and one law
# --------------------------------------------------------------------------------


def predictions(setting: Setting) -> list[Prediction]:
    """Bounds for every query |x| <= radius."""
    return [
        *_with_high_chance(setting),
        *_mean_square(setting),
        *_second_moment(setting),
        *_rest(setting),
    ]


def token_conditions(setting: Setting) -> Conditions:
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


def _ready(setting: Setting) -> bool:
    return setting.sigma is not None and setting.fourth is not None


def zero_without_values(
    setting: Setting, bound: Callable[[Any], Floats]
) -> Callable[[Any], Floats]:
    """V = 0 has no error, and the formulas divide by ||V||."""
    if setting.v_norm > 0:
        return bound
    return lambda n: np.zeros(counts_of(n).shape)


def _numbers(setting: Setting) -> dict[str, float]:
    known = {"radius": setting.radius, "tilt": setting.tilt, "d": float(setting.head.dim)}
    optional = {"sigma": setting.sigma, "fourth": setting.fourth, "c_f": setting.v_norm}
    return known | {key: value for key, value in optional.items() if value is not None}


def _with_high_chance(setting: Setting) -> list[Prediction]:
    sigma, fourth, tilt = setting.sigma or 1.0, setting.fourth or 0.0, setting.tilt

    def within(
        threshold: Callable[[Any], Floats], bound: Callable[[Any], Floats]
    ) -> Callable[[Any], Floats]:
        return lambda n: np.where(threshold(n) <= DELTA, bound(n), np.inf)

    def c1(n: Any) -> Floats:
        return lemma_c1(n, DELTA, sigma, tilt, fourth)

    def c3(n: Any) -> Floats:
        return corollary_c3(n, DELTA, sigma, tilt, fourth)

    rows: list[tuple[str, str, Status, str, Callable[[Any], Floats]]] = [
        (
            "s-c1-printed",
            "[S] Lemma C.1",
            PRINTED,
            "for delta >= exp(-(n/8) exp(-2 |theta|^2))",
            within(lambda n: lemma_c1_threshold_printed(n, tilt), c1),
        ),
        ("s-c1-mended", "[S] Lemma C.1, mended", "proved", "for every delta in (0, 1)", c1),
        (
            "s-c3-printed",
            "[S] Corollary C.3",
            PRINTED,
            "for delta >= 64 exp(4 sigma^2 |theta|^2) / n^2",
            within(lambda n: corollary_c3_threshold_printed(n, sigma, tilt), c3),
        ),
        ("s-c3-mended", "[S] Corollary C.3, mended", "proved", "for every delta in (0, 1)", c3),
    ]
    out = []
    for name, source, status, where, value in rows:
        first = name.startswith("s-c1")
        chance = 1.0 - (4.0 if first else 1.0) * DELTA
        body = (
            "27 exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2}"
            if first
            else "108 exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2}"
        )
        out.append(
            Prediction(
                name=name,
                statement=(
                    f"With chance {chance:g} or more the squared error at a query is at most the"
                    f" bound, {where}."
                ),
                source=source,
                formula=f"{body} / (delta n), {where}",
                status=status,
                quantity=f"squared error at one query, with chance {chance:g}",
                conditions=token_conditions(setting),
                exponent=0.5,
                value=value if _ready(setting) else None,
                units="squared" if _ready(setting) else "none",
                numbers=_numbers(setting) | {"delta": DELTA},
            )
        )
    return out


def _mean_square(setting: Setting) -> list[Prediction]:
    sigma, fourth, c_f, tilt, d = (
        setting.sigma or 1.0,
        setting.fourth or 0.0,
        setting.v_norm,
        setting.tilt,
        setting.head.dim,
    )
    second = "e^{2d} exp(-(n/2 - exp(2 sigma^2 |theta|^2)) E|V y|^4^{1/2} / (16 sigma^2 ||V||^2))"
    rows: list[tuple[str, str, Status, str, Callable[[Any], Floats]]] = [
        (
            "s-c4-printed",
            "[S] Lemma C.4",
            PRINTED,
            f"2 C ln(n)/n + 32 sigma^2 n ||V|| {second}",
            lambda n: lemma_c4_printed(n, d, sigma, tilt, fourth, c_f),
        ),
        (
            "s-c4-mended",
            "[S] Lemma C.4, mended",
            "proved",
            f"2 C ln(max(n,2))/n + 32 sigma^2 n ||V||^2 {second}",
            lambda n: lemma_c4_mended(n, d, sigma, tilt, fourth, c_f),
        ),
        (
            "s-c4-sharpened",
            "derived here on [S] Lemma C.4",
            "proved",
            "60 exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2} / n",
            lambda n: lemma_c4_sharpened(n, sigma, tilt, fourth),
        ),
    ]
    return [
        Prediction(
            name=name,
            statement="The mean square error at a query is at most the bound.",
            source=source,
            formula=formula,
            status=status,
            quantity="mean square error at one query",
            conditions=token_conditions(setting),
            exponent=0.5,
            value=zero_without_values(setting, value) if _ready(setting) else None,
            units="squared" if _ready(setting) else "none",
            numbers=_numbers(setting),
        )
        for name, source, status, formula, value in rows
    ]


def _second_moment(setting: Setting) -> list[Prediction]:
    """Lemma C.4 with p = 2 for f(y) = V y y^T, the first part of the gradient in A."""
    ready = setting.sigma is not None and setting.token_eighth is not None
    sigma, eighth, c_f = setting.sigma or 1.0, setting.token_eighth or 0.0, setting.v_norm
    args = (setting.head.dim, sigma, setting.tilt, power(c_f, 4) * eighth, c_f, 2, eighth)
    rows: list[tuple[str, str, Status, Callable[[Any], Floats]]] = [
        ("s-c4-p2-printed", "[S] Lemma C.4, p = 2", PRINTED, lambda n: lemma_c4_printed(n, *args)),
        (
            "s-c4-p2-mended",
            "[S] Lemma C.4, p = 2, mended",
            "proved",
            lambda n: lemma_c4_mended(n, *args),
        ),
    ]
    centred = (
        float(setting.measure.mean.double().norm())
        <= 1e-9 * float(setting.measure.cov.double().trace()) ** 0.5
    )
    conditions: Conditions = (
        token_conditions(setting)[0],
        ("tokens are centred", centred),
        ("E|y|^8 is known", setting.token_eighth is not None),
    )
    return [
        Prediction(
            name=name,
            statement=(
                "The mean square error of the softmax average of V y y^T at a query is at most the"
                " bound."
            ),
            source=source,
            formula="Lemma C.4 with p = 2, C_f = ||V||, E|f|^4 <= ||V||^4 E|y|^8",
            status=status,
            quantity="mean square error of the average of V y y^T at one query",
            conditions=conditions,
            exponent=0.5,
            value=zero_without_values(setting, value) if ready else None,
            units="squared" if ready else "none",
            numbers=_numbers(setting),
        )
        for name, source, status, value in rows
    ]


def _rest(setting: Setting) -> list[Prediction]:
    ready = _ready(setting) and setting.token_fourth is not None
    sigma, fourth, d = setting.sigma or 1.0, setting.fourth or 0.0, setting.head.dim
    token_fourth = setting.token_fourth or 0.0
    c7 = Prediction(
        name="s-c7",
        statement="The mean fourth power of the error at a query is at most the bound.",
        source="[S] Lemma C.7",
        formula=(
            "2 C E|V y|^4^{1/2} / sqrt(n) + 16^3 sigma^4 n ||V||^4 e^{2d} (1 + ..) exp(-(sqrt(n/8)"
            " - exp(2 sigma^2 |theta|^2)) ..)"
        ),
        status="proved",
        quantity="mean fourth power of the error at one query",
        conditions=token_conditions(setting),
        exponent=0.125,
        value=(
            zero_without_values(
                setting,
                lambda n: lemma_c7(n, d, sigma, setting.tilt, fourth, setting.v_norm, token_fourth),
            )
            if ready
            else None
        ),
        units="fourth power" if ready else "none",
        numbers=_numbers(setting),
    )

    def furthest(n: Any) -> Floats:
        return np.asarray(4.0 * sigma * np.sqrt(2.0 * d + np.log(counts_of(n) / DELTA)), np.float64)

    d2 = Prediction(
        name="s-d2",
        statement=(
            "With chance at least 0.99 no token of n lies further from the mean than the bound."
        ),
        source="[S] Lemma D.2, part 1, and a union bound",
        formula="4 sigma sqrt(2d + ln(n / delta))",
        status="proved",
        quantity="largest |y - E y| of n tokens, with chance 0.99",
        conditions=token_conditions(setting)[:1],
        value=furthest if setting.sigma is not None else None,
        units="rms" if setting.sigma is not None else "none",
        numbers=(
            {"sigma": sigma, "delta": DELTA, "d": float(d)} if setting.sigma is not None else {}
        ),
    )
    return [c7, d2]
