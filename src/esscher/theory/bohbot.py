"""[B]: exponents for the moments of the outputs and the growth of the uniform bound."""

from __future__ import annotations

from esscher.theory.prediction import Conditions, Prediction
from esscher.theory.setting import Setting

__all__ = [
    "EXPERIMENTAL",
    "PROVED",
    "moment_exponent",
    "moment_exponent_experimental",
    "predictions",
    "uniform_log_growth",
]

PROVED = "1/(2(1+32Ψ))"  # the exponent as pictures and tables write it
EXPERIMENTAL = "1/(2(1+Ψ))"


def moment_exponent(coupling: float) -> float:
    """beta = 1 / (2 (1 + 32 Psi)): mean and covariance of the outputs err by O(n^-beta). Source:
    [B] Theorem 4.4.

    Psi = ||Sigma||_2 ||Sigma^{1/2} A||_2^2 is ``Head.coupling``.
    """
    return 0.5 / (1.0 + 32.0 * coupling)


def moment_exponent_experimental(coupling: float) -> float:
    """1 / (2 (1 + Psi)), from an experiment that a summary of [B] suggests; no proof is claimed for
    it.
    """
    return 0.5 / (1.0 + coupling)


def uniform_log_growth(horizon: float, radius: float) -> float:
    """R^2 ||Sigma^{1/2} A||_2^2: logarithm of the growth of C(R) in the uniform bound C(R)/sqrt(n)
    over |x| <= R.

    Source: [B] section 4.1 after Theorem 3.4. The constant in front is not given in the sources
    used here.
    """
    return (radius * horizon) * (radius * horizon)


def predictions(setting: Setting) -> list[Prediction]:
    """[B] Theorem 4.4, the curve of its experiments, and its uniform bound."""
    conditions: Conditions = (
        ("tokens are sub-Gaussian", setting.sigma is not None),
        ("queries are the tokens (self-attention)", setting.own_queries),
    )
    psi, horizon = setting.coupling, setting.horizon
    growth = None if horizon is None else uniform_log_growth(horizon, setting.radius)
    numbers = {} if psi is None else {"coupling": psi}
    uniform = {"radius": setting.radius}
    if horizon is not None and growth is not None:
        uniform |= {"horizon": horizon, "log_growth": growth}
    return [
        Prediction(
            name="b-moments",
            statement=(
                "The mean and the covariance of the outputs err by O(n^-beta), "
                "with a constant polynomial in the size of the support."
            ),
            source="[B] Theorem 4.4",
            formula=(
                "beta = 1 / (2 (1 + 32 Psi)), Psi = ||S||_2 ||S^{1/2} A||_2^2, "
                "S sub-Gaussian: E exp<u, y - E y> <= exp(u^T S u / 2)"
            ),
            status="proved (asymptotic)",
            quantity="mean and cov",
            conditions=conditions,
            exponent=None if psi is None else moment_exponent(psi),
            numbers=numbers,
        ),
        Prediction(
            name="b-moments-experimental",
            statement=(
                "The curve that measured exponents of the mean and the covariance are compared"
                " with."
            ),
            source="a summary of [B], in an experiment it suggests",
            formula="beta = 1 / (2 (1 + Psi))",
            status="experimental",
            quantity="mean and cov",
            conditions=conditions,
            exponent=None if psi is None else moment_exponent_experimental(psi),
            numbers=numbers,
        ),
        Prediction(
            name="b-uniform",
            statement=(
                "Uniformly over queries |x| <= R the error is at most C(R)/sqrt(n), C(R) growing"
                " like exp(R^2 ||S^{1/2} A||^2); the constant in front is not given in the sources"
                " used here."
            ),
            source="[B] Theorem 3.4 and section 4.1",
            formula="C(R) / sqrt(n), ln C(R) of order R^2 ||S^(1/2) A||^2"
            + ("" if growth is None else f" = {growth:.4g}"),
            status="proved (asymptotic)",
            quantity="uniform",
            conditions=(("tokens are sub-Gaussian", setting.sigma is not None),),
            exponent=0.5,
            numbers=uniform,
        ),
    ]
