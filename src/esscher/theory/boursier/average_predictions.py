"""Predictions averaged over queries, from [S] sections C.3, C.5 to C.7 and D.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.measures.moments import power as raised
from esscher.theory.boursier import average as paper
from esscher.theory.boursier.query_predictions import PRINTED, token_conditions, zero_without_values
from esscher.theory.prediction import Conditions, Prediction, Status
from esscher.theory.setting import Setting, tilted_moment

__all__ = ["average_predictions"]

Floats = npt.NDArray[np.float64]


def average_predictions(setting: Setting) -> list[Prediction]:
    """Bounds on errors averaged over the law of the queries."""
    ready = None not in (setting.sigma, setting.fourth, setting.u_norm, setting.token_fourth)
    return [
        *_second_power(setting, ready),
        *_fourth_power(setting, ready),
        _proposition(setting, ready),
        _limit(setting, ready),
        _gradient_v(setting, ready),
        _gradient_u(setting, ready),
    ]


def _conditions(setting: Setting) -> Conditions:
    return (
        *token_conditions(setting),
        ("queries are sub-Gaussian (parameter tau; [S] has tau = 1 and U in place of tau A)", setting.tau is not None),
        ("queries are centred", setting.queries_centred),
        ("the head has no tilt bias", setting.head.tilt_bias is None or not bool(setting.head.tilt_bias.any())),
    )


def _at_least_one(setting: Setting) -> float:
    """[S] asks for sigma >= 1; a law that is sigma sub-Gaussian is so for every larger sigma."""
    return max(setting.sigma or 1.0, 1.0)


def _limit_power(setting: Setting, power: int, sigma: float) -> float:
    """Bound on E|Gamma - V E y|^power over queries: |grad K(theta)| <= 2 sigma^2 |theta|, as in Lemma D.1."""
    d, u, v = setting.head.dim_query, setting.u_norm or 0.0, setting.v_norm
    if power == 4:
        return raised(paper.lemma_d1(d, sigma, v, u), 4)
    # E w_i^8 <= 8! exp(lambda^2/2) / lambda^8 at lambda^2 = 8 for a 1-sub-Gaussian coordinate; E|w|^8 <= d^4 max_i E
    # w_i^8
    return raised(2.0 * sigma * sigma * v * u, 8) * float(d) ** 4 * 40320.0 * float(np.exp(4.0)) / 8.0**4


def _second_power(setting: Setting, ready: bool) -> list[Prediction]:
    d, dq, u = setting.head.dim, setting.head.dim_query, setting.u_norm or 0.0
    own, wide, fourth, c_f = setting.sigma or 1.0, _at_least_one(setting), setting.fourth or 0.0, setting.v_norm

    def numbers(sigma: float) -> dict[str, Any]:
        limit4 = _limit_power(setting, 4, sigma)
        return {"d": d, "d_query": dq, "sigma": sigma, "u_norm": u, "fourth": fourth, "c_f": c_f, "limit4": limit4}

    printed, mended, sharp = paper.equation_16_printed, paper.equation_16_mended, paper.equation_16_sharpened
    third = "2 ( sigma^2 ||V||^2 sqrt(2 C_4 (d^2 + ln(n)^2)) + sqrt(2 E|Gamma|^4) ) e^d n^{-1/(192 sigma^2 ||U||^2)}"
    whole = f"(17) + (second term of C.4 at |x| = B) + {third}"
    near = "216 E|V y|^4^{1/2} ln(n) / n^{1/3}"
    inside = "part of the mean square L2 error from queries |x| <= B"
    rows: list[tuple[str, str, Status, str, str, float, float, Callable[[Any], Floats]]] = [
        ("s-17-printed", "[S] equation (17)", PRINTED, near, inside, 1 / 6, wide,
         lambda n: paper.equation_17_printed(n, fourth)),
        ("s-17-mended", "[S] equation (17), mended", "proved", near.replace("ln(n)", "ln(max(n,2))"), inside, 1 / 6,
         own, lambda n: paper.equation_17_mended(n, fourth)),
        ("s-16-printed", "[S] Lemma C.6, equation (16)", PRINTED, whole, "l2",
         paper.proposition_31_exponent(wide, u), wide, lambda n: printed(n, **numbers(wide))),
        ("s-16-mended", "[S] Lemma C.6, equation (16), mended", "proved", whole, "l2",
         paper.proposition_31_exponent(own, u), own, lambda n: mended(n, **numbers(own))),
        ("s-16-sharpened", "derived here on [S] Lemma C.6", "proved",
         "min over B of 60 exp(4 sigma^2 ||U||^2 B^2) E|V y|^4^{1/2} / n + 2 ( .. ) exp(d - B^2/32)", "l2",
         paper.sharpened_exponent(own, u), own, lambda n: sharp(n, **numbers(own))),
    ]  # fmt: skip
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
                conditions=_conditions(setting),
                exponent=exponent if ready else None,
                value=zero_without_values(setting, value) if ready else None,
                units="squared" if ready else "none",
                numbers={"sigma": sigma, "u_norm": u, "fourth": fourth, "c_f": c_f} if ready else {},
            )
        )
    return out


def _fourth_power(setting: Setting, ready: bool) -> list[Prediction]:
    d, dq, u, sigma = setting.head.dim, setting.head.dim_query, setting.u_norm or 0.0, setting.sigma or 1.0
    fourth, token_fourth, c_f = setting.fourth or 0.0, setting.token_fourth or 0.0, setting.v_norm
    limit8 = _limit_power(setting, 8, sigma)
    rows: list[tuple[str, str, str, str, float, Callable[[Any], Floats]]] = [
        ("s-19", "[S] equation (19)", "216 E|V y|^4 / n^{1/6}",
         "part of the l4 mean fourth power from queries |x| <= B", 1 / 24,
         lambda n: paper.equation_19(n, fourth)),
        ("s-18", "[S] Lemma C.9, equation (18)",
         "(19) + (second term of C.7 at |x| = B) + 8 ( .. ) e^d n^{-1/(384 sigma^2 ||U||^2)}",
         "l4 mean fourth power", min(1 / 24, paper.reciprocal(1536.0, sigma, u)),
         lambda n: paper.equation_18(n, d=d, d_query=dq, sigma=sigma, u_norm=u, fourth=fourth, c_f=c_f,
                                     token_fourth=token_fourth, limit8=limit8)),
    ]  # fmt: skip
    return [
        Prediction(
            name=name,
            statement=f"The {quantity} of the error is at most the bound.",
            source=source,
            formula=formula,
            status="proved",
            quantity=quantity,
            conditions=_conditions(setting),
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
        statement="For n >= 2 the mean square error over queries is at most c_1 sigma^6 ln(n) n^{-c_2/sigma^2}.",
        source="[S] Proposition 3.1",
        formula="c_1 sigma^6 ln(n) / n^{c_2/sigma^2}, c_2 = min(1/3, 1/(192 ||U||^2)) by its proof",
        status="proved",
        quantity="l2 mean square",
        conditions=(*_conditions(setting), ("n >= 2 (at n = 1 the printed bound is 0)", True)),
        exponent=0.5 * min(1 / 3, paper.reciprocal(192.0, 1.0, u)) / sigma / sigma if ready else None,
        numbers={"sigma": sigma, "u_norm": u} if ready else {},
    )


def _limit(setting: Setting, ready: bool) -> Prediction:
    sigma, u = setting.sigma or 1.0, setting.u_norm or 0.0
    bound = paper.lemma_d1(setting.head.dim_query, sigma, setting.v_norm, u)
    return Prediction(
        name="s-d1",
        statement="The L4 norm over queries of the limit Gamma(x) - V E y is at most the bound, whatever n.",
        source="[S] Lemma D.1",
        formula="4 sigma^2 ||V|| ||U|| sqrt(d)",
        status="proved",
        quantity="L4 norm of the limit",
        conditions=_conditions(setting),
        exponent=0.0,
        value=(lambda n: np.full(np.shape(np.atleast_1d(n)), bound)) if ready else None,
        units="rms" if ready else "none",
        numbers={"sigma": sigma, "u_norm": u} if ready else {},
    )


def _gradient_v(setting: Setting, ready: bool) -> Prediction:
    sigma, u, dq = setting.sigma or 1.0, setting.u_norm or 0.0, setting.head.dim_query
    limit4 = raised(paper.lemma_d1(dq, sigma, 1.0, u), 4)
    args: dict[str, Any] = {
        "d": setting.head.dim,
        "d_query": dq,
        "sigma": sigma,
        "u_norm": u,
        "c_f": 1.0,
        "limit4": limit4,
    }
    args["fourth"] = setting.token_fourth or 0.0
    return Prediction(
        name="s-gradient-v",
        statement="The mean square error of each row of the gradient in V is at most the bound.",
        source="[S] Proposition 3.4, first part, mended",
        formula="(16) with f(y) = y, g = 1",
        status="proved",
        quantity="gradient in V, mean square of one row",
        conditions=_conditions(setting),
        exponent=paper.proposition_31_exponent(sigma, u) if ready else None,
        value=(lambda n: paper.equation_16_mended(n, **args)) if ready else None,
        units="squared" if ready else "none",
        numbers={"sigma": sigma, "u_norm": u} if ready else {},
    )


def _gradient_u(setting: Setting, ready: bool) -> Prediction:
    moments = {pq: tilted_moment(setting, *pq) for pq in ((4, 0), (8, 0), (4, 4), (8, 4), (8, 8))}
    g = [setting.queries.norm_moment(q) for q in (2, 4, 8)]
    known = ready and None not in moments.values() and None not in g and setting.token_eighth is not None
    conditions = (*_conditions(setting), ("the moments of Assumption 3.3 and E|y|^8 are known", known))
    value = _gradient_u_value(setting, {k: m or 0.0 for k, m in moments.items()}, [m or 0.0 for m in g]) if known else None
    sigma, u = setting.sigma or 1.0, setting.u_norm or 0.0
    return Prediction(
        name="s-gradient-u",
        statement="The mean square error of the gradient in U (all rows, Frobenius norm) is at most the bound.",
        source="[S] Proposition 3.4, second part, mended",
        formula="2 (16) for f(y) = V y y^T, g(z) = z, p = 2, plus 2 (21) with (18) for X and Y",
        status="proved",
        quantity="gradient in U, mean square",
        conditions=conditions,
        exponent=min(1 / 24, paper.reciprocal(1536.0, sigma, u)) if known else None,
        value=zero_without_values(setting, value) if value is not None else None,
        units="squared" if known else "none",
        numbers={f"tilted_moment_{p}_{q}": m for (p, q), m in moments.items() if m is not None},
    )


def _gradient_u_value(setting: Setting, moments: dict[tuple[int, int], float], g: list[float]) -> Callable[[Any], Floats]:
    v = setting.v_norm
    base: dict[str, Any] = {"d": setting.head.dim, "d_query": setting.head.dim_query, "sigma": setting.sigma}
    base["u_norm"] = setting.u_norm
    eighth, token_fourth = setting.token_eighth or 0.0, setting.token_fourth or 0.0

    def value(n: Any) -> Floats:
        squares: dict[str, Any] = {"fourth": raised(v, 4) * eighth, "limit4": raised(v, 4) * moments[8, 4]}  # of f(y) = V y y^T
        product = paper.equation_16_mended(n, **base, **squares, c_f=v, p=2, eighth=eighth, g2=g[0], g4=g[1])
        x_error = paper.equation_18(
            n, **base, fourth=setting.fourth or 0.0, c_f=v, token_fourth=token_fourth, limit8=raised(v, 8) * moments[8, 0]
        )
        y_error = paper.equation_18(
            n, **base, fourth=token_fourth, c_f=1.0, token_fourth=token_fourth, limit8=moments[8, 8], g4=g[1], g8=g[2]
        )
        return paper.gradient_u_bound(product, raised(v, 4) * moments[4, 0], x_error, moments[4, 4], y_error)

    return value
