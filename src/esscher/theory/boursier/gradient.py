"""[S] Proposition 3.4: the gradients of attention in V and in U, averaged over queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.measures.moments import power as raised
from esscher.theory.boursier import average
from esscher.theory.boursier.logs import from_logs, log_of
from esscher.theory.boursier.query import zero_without_values
from esscher.theory.prediction import Prediction
from esscher.theory.setting import Setting, tilted_moment

__all__ = ["gradient_u_bound", "predictions"]

Floats = npt.NDArray[np.float64]


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


def predictions(setting: Setting) -> list[Prediction]:
    """Bounds on the error of one row of the gradient in V, and of the gradient in U."""
    ready = average.is_ready(setting)
    return [_gradient_v(setting, ready), _gradient_u(setting, ready)]


def _gradient_v(setting: Setting, ready: bool) -> Prediction:
    sigma, u, dq = setting.sigma or 1.0, setting.u_norm or 0.0, setting.head.dim_query
    limit4 = raised(average.lemma_d1(dq, sigma, 1.0, u), 4)
    numbers = average.Numbers(
        d=setting.head.dim,
        d_query=dq,
        sigma=sigma,
        u_norm=u,
        fourth=setting.token_fourth or 0.0,
        c_f=1.0,
        limit4=limit4,
    )
    return Prediction(
        name="s-gradient-v",
        statement="The mean square error of each row of the gradient in V is at most the bound.",
        source="[S] Proposition 3.4, first part, mended",
        formula="(16) with f(y) = y, g = 1",
        status="proved",
        quantity="gradient in V, mean square of one row",
        conditions=average.conditions_of(setting),
        exponent=average.proposition_31_exponent(sigma, u) if ready else None,
        value=(lambda n: average.equation_16_mended(n, numbers)) if ready else None,
        units="squared" if ready else "none",
        numbers={"sigma": sigma, "u_norm": u} if ready else {},
    )


def _gradient_u(setting: Setting, ready: bool) -> Prediction:
    moments = {pq: tilted_moment(setting, *pq) for pq in ((4, 0), (8, 0), (4, 4), (8, 4), (8, 8))}
    g = [setting.queries.norm_moment(q) for q in (2, 4, 8)]
    known = (
        ready
        and None not in moments.values()
        and None not in g
        and setting.token_eighth is not None
    )
    conditions = (
        *average.conditions_of(setting),
        ("the moments of Assumption 3.3 and E|y|^8 are known", known),
    )
    value = (
        _gradient_u_value(setting, {k: m or 0.0 for k, m in moments.items()}, [m or 0.0 for m in g])
        if known
        else None
    )
    sigma, u = setting.sigma or 1.0, setting.u_norm or 0.0
    return Prediction(
        name="s-gradient-u",
        statement=(
            "The mean square error of the gradient in U (all rows, Frobenius norm) is at most the"
            " bound."
        ),
        source="[S] Proposition 3.4, second part, mended",
        formula="2 (16) for f(y) = V y y^T, g(z) = z, p = 2, plus 2 (21) with (18) for X and Y",
        status="proved",
        quantity="gradient in U, mean square",
        conditions=conditions,
        exponent=min(1 / 24, average.reciprocal(1536.0, sigma, u)) if known else None,
        value=zero_without_values(setting, value) if value is not None else None,
        units="squared" if known else "none",
        numbers={f"tilted_moment_{p}_{q}": m for (p, q), m in moments.items() if m is not None},
    )


def _gradient_u_value(
    setting: Setting, moments: dict[tuple[int, int], float], g: list[float]
) -> Callable[[Any], Floats]:
    v = setting.v_norm
    eighth, token_fourth = setting.token_eighth or 0.0, setting.token_fourth or 0.0
    x = average.Numbers(
        d=setting.head.dim,
        d_query=setting.head.dim_query,
        sigma=setting.sigma or 1.0,
        u_norm=setting.u_norm or 0.0,
        fourth=setting.fourth or 0.0,
        c_f=v,
        token_fourth=token_fourth,
        limit8=raised(v, 8) * moments[8, 0],
    )
    y = replace(x, fourth=token_fourth, c_f=1.0, limit8=moments[8, 8], g4=g[1], g8=g[2])
    squares = replace(  # of f(y) = V y y^T
        x,
        fourth=raised(v, 4) * eighth,
        limit4=raised(v, 4) * moments[8, 4],
        p=2,
        eighth=eighth,
        g2=g[0],
        g4=g[1],
    )

    def value(n: Any) -> Floats:
        product, x_error = average.equation_16_mended(n, squares), average.equation_18(n, x)
        y_error = average.equation_18(n, y)
        return gradient_u_bound(
            product, raised(v, 4) * moments[4, 0], x_error, moments[4, 4], y_error
        )

    return value
