"""Sharp exponents from the random energy model: heuristic, not proved. Gaussian tokens, Gaussian
queries.

At one query of score deviation s = c sqrt(2 ln n) the error of the softmax over n Gaussian scores
is n^{-b}:

    root mean square   b = 1/2 - c^2  for c < 1/sqrt(3),   b = (1 - c^2)^2 / (8 c^2)  for 1/sqrt(3)
    < c < 1 typical            b = 1/2 - c^2  for c < 1/2,         b = (1 - c)^2              for
    1/2 < c < 1

They differ because the mean square is carried by rare draws in which one token beats the rest: a
token sqrt(2 ln n) y out, y > 1, is there with chance n^{1-y^2}, and takes the softmax over once y
>= (1 + c^2) / (2c). Queries with s >= c sqrt(2 ln n) have chance n^{-c^2/h^2}, h the two-sided
horizon; the exponents below are the minima over c of the sum.
"""

from __future__ import annotations

import math

from esscher.measures.base import Measure
from esscher.theory.prediction import Conditions, Prediction
from esscher.theory.setting import Setting

__all__ = [
    "RMS",
    "TYPICAL",
    "freezing_tokens",
    "l2_exponent_rms",
    "l2_exponent_typical",
    "moment_exponent_rms",
    "moment_exponent_typical",
    "predictions",
    "speaks_of",
]

RMS = "min(1/2, (√(1+4/h²)−1)/4)"  # the exponents as pictures write them
TYPICAL = "min(1/2, 1/(1+2h²))"


def l2_exponent_typical(horizon2: float) -> float:
    """min(1/2, 1/(1 + 2 h^2)): the L2(nu) norm of Gamma_n - Gamma in a typical draw of the tokens,
    and in mean.
    """
    return min(0.5, 1.0 / (1.0 + 2.0 * horizon2 * horizon2))


def l2_exponent_rms(horizon2: float) -> float:
    """min(1/2, (sqrt(1 + 4/h^2) - 1)/4): root of the mean square L2(nu) norm, which is what an
    exact curve holds.

    min over c of (1 - c^2)^2/(4 c^2) + c^2/h^2 is (sqrt(1 + 4/h^2) - 1)/2, at c^2 = h/sqrt(h^2 +
    4); 1/2 takes over at h^2 = 1/2.
    """
    return min(0.5, _saddle(4.0, horizon2))


def moment_exponent_typical(horizon2: float) -> float:
    """min(1/2, 1/(1 + h^2)): typical and mean absolute error of the mean and covariance of the
    outputs.
    """
    return min(0.5, 1.0 / (1.0 + horizon2 * horizon2))


def moment_exponent_rms(horizon2: float) -> float:
    """min(1/2, (sqrt(1 + 8/h^2) - 1)/4): root mean square error of the mean and covariance of the
    outputs.

    As for ``l2_exponent_rms`` with the chance of the query squared, since the error is averaged
    before it is squared.
    """
    return min(0.5, _saddle(8.0, horizon2))


def speaks_of(measure: Measure) -> bool:
    """Whether these exponents are of tokens of this law that are their own queries: Gaussian, and
    centred.
    """
    return measure.is_gaussian and not bool(measure.mean.any())


def freezing_tokens(score_deviation: float) -> float:
    """n* = exp(s^2/2): below it the softmax of n Gaussian scores of standard deviation s rests on
    its few largest.
    """
    exponent = 0.5 * score_deviation * score_deviation
    return math.exp(exponent) if exponent < 709.0 else math.inf


def _saddle(constant: float, horizon2: float) -> float:
    if horizon2 <= 0.0:
        return math.inf
    ratio = constant / horizon2 / horizon2
    return 0.25 * ratio / (math.sqrt(1.0 + ratio) + 1.0)  # (sqrt(1 + r) - 1)/4 without cancellation


def predictions(setting: Setting) -> list[Prediction]:
    """Exponents of the random energy model and the freezing threshold; heuristic."""
    h, s = setting.horizon2, setting.score_deviation
    gaussian: Conditions = (
        ("tokens are Gaussian", setting.measure.is_gaussian),
        (
            "queries are Gaussian and centred",
            setting.queries.is_gaussian and setting.queries_centred,
        ),
    )
    rows = [
        (
            "sharp-l2",
            "typical l2",
            "min(1/2, 1/(1 + 2 h^2))",
            l2_exponent_typical(h),
            (
                "The L2 norm over queries of the error falls like n^-beta in a typical draw and in"
                " mean."
            ),
        ),
        (
            "sharp-l2-rms",
            "l2 mean square",
            "min(1/2, (sqrt(1 + 4/h^2) - 1)/4)",
            l2_exponent_rms(h),
            (
                "The root of the mean square error averaged over queries falls like n^-beta; rare"
                " draws carry it."
            ),
        ),
        (
            "sharp-moments",
            "typical mean and cov",
            "min(1/2, 1/(1 + h^2))",
            moment_exponent_typical(h),
            (
                "The mean and the covariance of the outputs err like n^-beta in a typical draw and"
                " in mean absolute value."
            ),
        ),
        (
            "sharp-moments-rms",
            "mean and cov",
            "min(1/2, (sqrt(1 + 8/h^2) - 1)/4)",
            moment_exponent_rms(h),
            (
                "The mean and the covariance of the outputs have root mean square error like"
                " n^-beta; rare draws carry it."
            ),
        ),
    ]
    exponents = [
        Prediction(
            name=name,
            statement=statement,
            source="random energy model, derived here",
            formula=f"beta = {formula}, h = ||Sigma^(1/2) A Sigma_q^(1/2)||_2",
            status="heuristic",
            quantity=quantity,
            conditions=gaussian,
            exponent=exponent,
            numbers={"horizon2": h},
        )
        for name, quantity, formula, exponent, statement in rows
    ]
    freezing = Prediction(
        name="freezing",
        statement=(
            "Below n* tokens the softmax of a query with score deviation s rests on its few largest"
            " scores."
        ),
        source="random energy model",
        formula="n* = exp(s^2/2), s the root mean square score deviation over queries",
        status="heuristic",
        quantity="freezing threshold",
        conditions=gaussian[:1],
        numbers={"score_deviation": s, "n_star": freezing_tokens(s)},
    )
    return [*exponents, freezing]
