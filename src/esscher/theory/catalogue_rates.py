"""Predictions of rates: [B], the hardmax limit and the sharp heuristics."""

from __future__ import annotations

from esscher.theory import bohbot, sharp
from esscher.theory.hardmax import hardmax_mean_abs, hardmax_mean_abs_asymptotic
from esscher.theory.prediction import Conditions, Prediction
from esscher.theory.setting import Setting

__all__ = ["bohbot_predictions", "hardmax_predictions", "sharp_predictions"]


def bohbot_predictions(setting: Setting) -> list[Prediction]:
    """[B] Theorem 4.4, the curve of its experiments, and its uniform bound."""
    conditions: Conditions = (
        ("tokens are sub-Gaussian", setting.sigma is not None),
        ("queries are the tokens (self-attention)", setting.own_queries),
    )
    psi, horizon = setting.coupling, setting.horizon
    growth = None if horizon is None else bohbot.uniform_log_growth(horizon, setting.radius)
    numbers = {} if psi is None else {"coupling": psi}
    uniform = {"radius": setting.radius}
    if horizon is not None and growth is not None:
        uniform |= {"horizon": horizon, "log_growth": growth}
    return [
        Prediction(
            name="b-moments",
            statement="The mean and the covariance of the outputs err by O(n^-beta), "
            "with a constant polynomial in the size of the support.",
            source="[B] Theorem 4.4",
            formula="beta = 1 / (2 (1 + 32 Psi)), Psi = ||S||_2 ||S^{1/2} A||_2^2, "
            "S sub-Gaussian: E exp<u, y - E y> <= exp(u^T S u / 2)",
            status="proved (asymptotic)",
            quantity="mean and cov",
            conditions=conditions,
            exponent=None if psi is None else bohbot.moment_exponent(psi),
            numbers=numbers,
        ),
        Prediction(
            name="b-moments-experimental",
            statement="The curve that measured exponents of the mean and the covariance are compared with.",
            source="[B] experiments",
            formula="beta = 1 / (2 (1 + Psi))",
            status="experimental",
            quantity="mean and cov",
            conditions=conditions,
            exponent=None if psi is None else bohbot.moment_exponent_experimental(psi),
            numbers=numbers,
        ),
        Prediction(
            name="b-uniform",
            statement="Uniformly over queries |x| <= R the error is at most C(R)/sqrt(n), C(R) growing like "
            "exp(R^2 ||S^{1/2} A||^2); the constant in front is not given in the sources used here.",
            source="[B] Theorem 3.4 and section 4.1",
            formula="C(R) / sqrt(n), ln C(R) of order R^2 ||S^(1/2) A||^2" + ("" if growth is None else f" = {growth:.4g}"),
            status="proved (asymptotic)",
            quantity="uniform",
            conditions=(("tokens are sub-Gaussian", setting.sigma is not None),),
            exponent=0.5,
            numbers=uniform,
        ),
    ]


def hardmax_predictions(setting: Setting) -> list[Prediction]:
    """[B] Proposition 5.1 beside the exact expectation; only for d = 1."""
    head, measure = setting.head, setting.measure
    if head.dim != 1 or head.dim_query != 1 or head.dim_out != 1:
        return []
    a = float(head.A.double()[0, 0])
    mean = float(measure.mean.double()[0])
    scale = abs(float(head.V.double()[0, 0])) * float(measure.cov.double()[0, 0]) ** 0.5
    conditions: Conditions = (
        ("d = 1 and tokens are N(0, sigma^2)", measure.is_gaussian and mean == 0.0 and scale > 0.0),
        ("queries are the tokens (self-attention)", setting.own_queries),
        ("no tilt bias and A is not 0", head.tilt_bias is None and a != 0.0),
    )
    known = scale > 0.0
    exact = Prediction(
        name="hardmax-exact",
        statement="The mean over all tokens of the hardmax output has this mean absolute value; its limit is 0.",
        source="derived here; the quantity of [B] Proposition 5.1",
        formula="sum_k C(n,k) 2^-n |V| E|(k/n) M_k - ((n-k)/n) M'_{n-k}|, M_k the largest of k half-normals",
        status="exact",
        quantity="hardmax mean",
        conditions=conditions,
        exponent=0.0,
        value=(lambda n: hardmax_mean_abs(n, scale, positive=a > 0)) if known else None,
        units="mean absolute" if known else "none",
        numbers={"sigma": scale, "A": a},
    )
    asymptote = Prediction(
        name="b-hardmax",
        statement="The mean over all tokens of the hardmax output falls only like 1/sqrt(ln n).",
        source="[B] Proposition 5.1",
        formula="ln(4) sigma |V| / (2 sqrt(2 ln n)) (1 + o(1))",
        status="proved (asymptotic)",
        quantity="hardmax mean",
        conditions=conditions,
        exponent=0.0,
        value=(lambda n: hardmax_mean_abs_asymptotic(n, scale)) if known else None,
        units="mean absolute" if known else "none",
        numbers={"sigma": scale},
    )
    return [asymptote, exact]


def sharp_predictions(setting: Setting) -> list[Prediction]:
    """Exponents of the random energy model and the freezing threshold; heuristic."""
    h, s = setting.horizon2, setting.score_deviation
    gaussian: Conditions = (
        ("tokens are Gaussian", setting.measure.is_gaussian),
        ("queries are Gaussian and centred", setting.queries.is_gaussian and setting.queries_centred),
    )
    rows = [
        ("sharp-l2", "typical l2", "min(1/2, 1/(1 + 2 h^2))", sharp.l2_exponent_typical(h),
         "The L2 norm over queries of the error falls like n^-beta in a typical draw and in mean."),
        ("sharp-l2-rms", "l2 mean square", "min(1/2, (sqrt(1 + 4/h^2) - 1)/4)", sharp.l2_exponent_rms(h),
         "The root of the mean square error averaged over queries falls like n^-beta; rare draws carry it."),
        ("sharp-moments", "typical mean and cov", "min(1/2, 1/(1 + h^2))", sharp.moment_exponent_typical(h),
         "The mean and the covariance of the outputs err like n^-beta in a typical draw and in mean absolute value."),
        ("sharp-moments-rms", "mean and cov", "min(1/2, (sqrt(1 + 8/h^2) - 1)/4)", sharp.moment_exponent_rms(h),
         "The mean and the covariance of the outputs have root mean square error like n^-beta; rare draws carry it."),
    ]  # fmt: skip
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
        statement="Below n* tokens the softmax of a query with score deviation s rests on its few largest scores.",
        source="random energy model",
        formula="n* = exp(s^2/2), s the root mean square score deviation over queries",
        status="heuristic",
        quantity="freezing threshold",
        conditions=gaussian[:1],
        numbers={"score_deviation": s, "n_star": sharp.freezing_tokens(s)},
    )
    return [*exponents, freezing]
