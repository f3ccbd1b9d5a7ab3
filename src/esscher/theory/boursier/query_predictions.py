"""Predictions at one query, from [S] sections C.1, C.2, C.4, D and from the delta bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.measures.moments import power
from esscher.theory.boursier import query as paper
from esscher.theory.delta_bound import delta_bound, delta_bound_numbers
from esscher.theory.prediction import Conditions, Prediction, Status
from esscher.theory.setting import Setting

__all__ = ["query_predictions"]

Floats = npt.NDArray[np.float64]

DELTA = 0.01  # chance left out by the statements "with high probability"
PRINTED: Status = "printed (not proved as printed)"


def query_predictions(setting: Setting) -> list[Prediction]:
    """Bounds for every query |x| <= radius; the delta bound for ``setting.query``."""
    return [
        *_with_high_chance(setting),
        *_mean_square(setting),
        *_second_moment(setting),
        *_rest(setting),
        _delta(setting),
    ]


def token_conditions(setting: Setting) -> Conditions:
    """Hypotheses of [S] on the law of the tokens. A mean of the tokens shifts all scores of a query alike and the
    output by V E y, so it cancels in the error and the centred law may be used."""
    return (
        ("tokens are sub-Gaussian: E exp<u, y - E y> <= exp(sigma^2 |u|^2 / 2)", setting.sigma is not None),
        ("E|V (y - E y)|^4 is known", setting.fourth is not None),
    )


def _ready(setting: Setting) -> bool:
    return setting.sigma is not None and setting.fourth is not None


def zero_without_values(setting: Setting, bound: Callable[[Any], Floats]) -> Callable[[Any], Floats]:
    """V = 0 has no error, and the formulas divide by ||V||."""
    if setting.v_norm > 0:
        return bound
    return lambda n: np.zeros(paper.counts_of(n).shape)


def _numbers(setting: Setting) -> dict[str, float]:
    known = {"radius": setting.radius, "tilt": setting.tilt, "d": float(setting.head.dim)}
    optional = {"sigma": setting.sigma, "fourth": setting.fourth, "c_f": setting.v_norm}
    return known | {key: value for key, value in optional.items() if value is not None}


def _with_high_chance(setting: Setting) -> list[Prediction]:
    sigma, fourth, tilt = setting.sigma or 1.0, setting.fourth or 0.0, setting.tilt

    def within(threshold: Callable[[Any], Floats], bound: Callable[[Any], Floats]) -> Callable[[Any], Floats]:
        return lambda n: np.where(threshold(n) <= DELTA, bound(n), np.inf)

    def c1(n: Any) -> Floats:
        return paper.lemma_c1(n, DELTA, sigma, tilt, fourth)

    def c3(n: Any) -> Floats:
        return paper.corollary_c3(n, DELTA, sigma, tilt, fourth)

    rows: list[tuple[str, str, Status, str, Callable[[Any], Floats]]] = [
        ("s-c1-printed", "[S] Lemma C.1", PRINTED, "for delta >= exp(-(n/8) exp(-2 |theta|^2))",
         within(lambda n: paper.lemma_c1_threshold_printed(n, tilt), c1)),
        ("s-c1-mended", "[S] Lemma C.1, mended", "proved", "for every delta in (0, 1)", c1),
        ("s-c3-printed", "[S] Corollary C.3", PRINTED, "for delta >= 64 exp(4 sigma^2 |theta|^2) / n^2",
         within(lambda n: paper.corollary_c3_threshold_printed(n, sigma, tilt), c3)),
        ("s-c3-mended", "[S] Corollary C.3, mended", "proved", "for every delta in (0, 1)", c3),
    ]  # fmt: skip
    out = []
    for name, source, status, where, value in rows:
        first = name.startswith("s-c1")
        chance = 1.0 - (4.0 if first else 1.0) * DELTA
        body = "27 exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2}" if first else "108 exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2}"
        out.append(
            Prediction(
                name=name,
                statement=f"With chance {chance:g} or more the squared error at a query is at most the bound, {where}.",
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
        ("s-c4-printed", "[S] Lemma C.4", PRINTED, f"2 C ln(n)/n + 32 sigma^2 n ||V|| {second}",
         lambda n: paper.lemma_c4_printed(n, d, sigma, tilt, fourth, c_f)),
        ("s-c4-mended", "[S] Lemma C.4, mended", "proved", f"2 C ln(max(n,2))/n + 32 sigma^2 n ||V||^2 {second}",
         lambda n: paper.lemma_c4_mended(n, d, sigma, tilt, fourth, c_f)),
        ("s-c4-sharpened", "derived here on [S] Lemma C.4", "proved", "60 exp(4 sigma^2 |theta|^2) E|V y|^4^{1/2} / n",
         lambda n: paper.lemma_c4_sharpened(n, sigma, tilt, fourth)),
    ]  # fmt: skip
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
        ("s-c4-p2-printed", "[S] Lemma C.4, p = 2", PRINTED, lambda n: paper.lemma_c4_printed(n, *args)),
        ("s-c4-p2-mended", "[S] Lemma C.4, p = 2, mended", "proved", lambda n: paper.lemma_c4_mended(n, *args)),
    ]
    centred = float(setting.measure.mean.double().norm()) <= 1e-9 * float(setting.measure.cov.double().trace()) ** 0.5
    conditions: Conditions = (
        token_conditions(setting)[0],
        ("tokens are centred", centred),
        ("E|y|^8 is known", setting.token_eighth is not None),
    )
    return [
        Prediction(
            name=name,
            statement="The mean square error of the softmax average of V y y^T at a query is at most the bound.",
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
        formula="2 C E|V y|^4^{1/2} / sqrt(n) "
        "+ 16^3 sigma^4 n ||V||^4 e^{2d} (1 + ..) exp(-(sqrt(n/8) - exp(2 sigma^2 |theta|^2)) ..)",
        status="proved",
        quantity="mean fourth power of the error at one query",
        conditions=token_conditions(setting),
        exponent=0.125,
        value=zero_without_values(
            setting, lambda n: paper.lemma_c7(n, d, sigma, setting.tilt, fourth, setting.v_norm, token_fourth)
        )
        if ready
        else None,
        units="fourth power" if ready else "none",
        numbers=_numbers(setting),
    )

    def furthest(n: Any) -> Floats:
        return np.asarray(4.0 * sigma * np.sqrt(2.0 * d + np.log(paper.counts_of(n) / DELTA)), np.float64)

    d2 = Prediction(
        name="s-d2",
        statement="With chance at least 0.99 no token of n lies further from the mean than the bound.",
        source="[S] Lemma D.2, part 1, and a union bound",
        formula="4 sigma sqrt(2d + ln(n / delta))",
        status="proved",
        quantity="largest |y - E y| of n tokens, with chance 0.99",
        conditions=token_conditions(setting)[:1],
        value=furthest if setting.sigma is not None else None,
        units="rms" if setting.sigma is not None else "none",
        numbers={"sigma": sigma, "delta": DELTA, "d": float(d)} if setting.sigma is not None else {},
    )
    return [c7, d2]


def _delta(setting: Setting) -> Prediction:
    try:
        numbers = delta_bound_numbers(setting.head, setting.measure, setting.query)
        reason = True
    except ValueError:  # the transform is infinite at twice the tilt, or a moment is not known
        numbers, reason = {}, False
    return Prediction(
        name="delta-bound",
        statement="The mean square error at the query R v, v the direction A stretches most, is at most the bound.",
        source="derived here",
        formula="min over a of delta/(a^2 n) + 2 sqrt(n E|V y|^4 P) + 2 |Gamma - V E y|^2 P, "
        "P = exp(-(1-a)^2 n (E e)^2 / (2 E e^2))",
        status="proved",
        quantity="mean square error at one query",
        conditions=(("E exp<2 theta, y> is finite and E|V (y - E y)|^4 is known", reason),),
        exponent=0.5,
        value=(lambda n: delta_bound(n, **numbers)) if numbers else None,
        units="squared" if numbers else "none",
        numbers=numbers,
    )
