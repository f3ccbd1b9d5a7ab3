"""A proved bound at one query whose leading term is the delta method's: any law with a transform at
twice the tilt.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.attention.head import Head
from esscher.attention.second_tilt import second_tilt
from esscher.inputs import as_counts, as_tensor
from esscher.measures.base import Measure
from esscher.measures.matrices import product
from esscher.theory.prediction import Prediction
from esscher.theory.setting import Setting

__all__ = ["delta_bound", "delta_bound_numbers"]

Floats = npt.NDArray[np.float64]

SHARES = np.concatenate([np.linspace(0.05, 0.9, 35), 1.0 - np.geomspace(0.09, 1e-4, 40)])


def delta_bound(n: Any, ratio: float, delta: float, fourth: float, centre: float) -> Floats:
    """E|Gamma_n(x) - Gamma(x)|^2 at most

        min over 0 < a < 1 of  delta / (a^2 n) + 2 sqrt(n fourth P) + 2 centre^2 P,   P =
        exp(-(1-a)^2 n / (2 ratio)),

    and at most 2 sqrt(n fourth) + 2 centre^2. Here e = exp<theta, y>, c = V y - Gamma(x), and
    ``ratio`` = E e^2 / (E e)^2, ``delta`` = E e^2 |c|^2 / (E e)^2 (so delta/n is the delta method's
    value), ``fourth`` = E|V (y - E y)|^4, ``centre`` = |Gamma(x) - V E y|.

    Proof: with S_n = sum e_k, P(S_n < a n E e) <= P (Chung-Lu). Where S_n >= a n E e the error is
    at most
    |sum e_k c_k| / (a n E e), of mean square delta / (a^2 n); elsewhere its square is at most 2
    max_k |V (y_k - E y)|^2 + 2 centre^2: Cauchy-Schwarz, and max <= sum. As n grows a -> 1 and the
    bound tends to the delta method's value. Source: derived here.
    """
    counts = as_counts(n, "n").astype(np.float64)[:, None]
    square = centre * centre
    with np.errstate(over="ignore", under="ignore"):  # infinite where a number is beyond float64
        chance = np.exp(-((1.0 - SHARES) ** 2) * counts / (2.0 * ratio))
        rare = 2.0 * np.sqrt(counts * chance) * math.sqrt(fourth) + 2.0 * square * chance
        split = (delta / (SHARES**2 * counts) + rare).min(axis=1)
        most = 2.0 * np.sqrt(counts[:, 0]) * math.sqrt(fourth) + 2.0 * square
    return np.asarray(np.nan_to_num(np.fmin(split, most), nan=np.inf, posinf=np.inf), np.float64)


def delta_bound_numbers(head: Head, measure: Measure, query: Any) -> dict[str, float]:
    """ratio, delta, fourth and centre of ``delta_bound`` for one query.

    With K the log-Laplace transform and theta the tilt, ratio = exp(K(2 theta) - 2 K(theta)) and
    delta = ratio (tr V Hess K(2 theta) V^T + |V (grad K(2 theta) - grad K(theta))|^2).
    """
    theta = head.tilt(as_tensor(query, "query", ndim=1).double())
    V = head.V.double()
    fourth = measure.value_fourth_moment(V)
    if fourth is None:
        raise ValueError(f"measure: the fourth moment of {type(measure).__name__} is not known")
    twice = second_tilt(head, measure, theta)
    log_ratio = float(twice.log_growth)
    spread = float((product(V, twice.cov) * V).sum() + twice.shift @ twice.shift)
    ratio = math.exp(log_ratio) if log_ratio < 700.0 else math.inf
    centre = float((V @ (measure.tilted_mean(theta) - measure.mean.double())).norm())
    return {
        "ratio": ratio,
        "delta": ratio * spread if spread > 0.0 else 0.0,
        "fourth": fourth,
        "centre": centre,
    }


def predictions(setting: Setting) -> list[Prediction]:
    """The bound at ``setting.query``, and the limit it proves: the rate of keys taken as they
    come.
    """
    try:
        numbers = delta_bound_numbers(setting.head, setting.measure, setting.query)
        reason = True
    except ValueError:  # the transform is infinite at twice the tilt, or a moment is not known
        numbers, reason = {}, False
    conditions = (("E exp<2 theta, y> is finite and E|V (y - E y)|^4 is known", reason),)
    bound = Prediction(
        name="delta-bound",
        statement=(
            "The mean square error at the query R v, v the direction A stretches most, is at most"
            " the bound."
        ),
        source="derived here",
        formula=(
            "min over a of delta/(a^2 n) + 2 sqrt(n E|V y|^4 P) + 2 |Gamma - V E y|^2 P, "
            "P = exp(-(1-a)^2 n (E e)^2 / (2 E e^2))"
        ),
        status="proved",
        quantity="mean square error at one query",
        conditions=conditions,
        exponent=0.5,
        value=(lambda n: delta_bound(n, **numbers)) if numbers else None,
        units="squared" if numbers else "none",
        numbers=numbers,
    )
    limit = Prediction(
        name="keep-random",
        statement=(
            "n keys taken as they come err by sqrt(constant/n) at large n; the constant is"
            " exponential in s^2."
        ),
        source="derived here",
        formula=(
            "n MSE -> E[e^2 |c|^2]/(E e)^2; Gaussian tokens: exp(s^2) (tr V Sigma V^T + |V Sigma"
            " theta|^2)"
        ),
        status="proved (asymptotic)",
        quantity="kept keys at one query: random",
        conditions=conditions,
        exponent=0.5,
        numbers={"constant": numbers["delta"]} if numbers else {},
    )
    return [bound, limit]
