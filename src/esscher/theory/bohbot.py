"""Bohbot et al. [B]: exponents for the moments of the outputs, the uniform bound, hardmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from esscher.inputs import as_counts, as_positive
from esscher.theory.prediction import Conditions, Floats, Prediction, Setting, state

PROVED = "1/(2(1+32Ψ))"  # the exponent as pictures and tables write it
EXPERIMENTAL = "1/(2(1+Ψ))"


def moment_exponent(coupling: float) -> float:
    """beta = 1 / (2 (1 + 32 Psi)): mean and covariance of the outputs err by O(n^-beta), Psi the
    ``Head.coupling``. Source: [B] Theorem 4.4.
    """
    return 0.5 / (1.0 + 32.0 * coupling)


def moment_exponent_experimental(coupling: float) -> float:
    """1 / (2 (1 + Psi)), from an experiment that a summary of [B] suggests; not proved."""
    return 0.5 / (1.0 + coupling)


def moments(setting: Setting) -> list[Prediction]:
    """[B] Theorem 4.4, the curve of its experiments, and its uniform bound."""
    subgaussian = ("tokens are sub-Gaussian", setting.sigma is not None)
    conditions: Conditions = (
        subgaussian,
        ("queries are the tokens (self-attention)", setting.own_queries),
    )
    psi, horizon = setting.coupling, setting.horizon
    uniform = {"radius": setting.radius}
    if horizon is not None:  # the constant before exp(log_growth) is not given in the sources
        uniform |= {"horizon": horizon, "log_growth": (setting.radius * horizon) ** 2}
    known, psi = psi is not None, psi or 0.0
    beta, seen, numbers = moment_exponent(psi), moment_exponent_experimental(psi), {"coupling": psi}
    return [
        state("b-moments", conditions, beta, numbers=numbers, known=known),
        state("b-moments-experimental", conditions, seen, numbers=numbers, known=known),
        state("b-uniform", (subgaussian,), 0.5, numbers=uniform),
    ]


# ---- hardmax


def hardmax_mean_abs_asymptotic(n: Any, sigma: Any = 1.0) -> Floats:
    """Leading term of E|mean output| of hardmax self-attention as n grows, infinite at n = 1:

        E|Gamma-bar_n| = ln(4) sigma / (2 sqrt(2 ln n)) (1 + o(1))

    Source: [B] Proposition 5.1 (d = 1, tokens N(0, sigma^2)).
    """
    size = math.log(4.0) * as_positive(sigma, "sigma") / 2.0
    with np.errstate(divide="ignore"):
        return np.asarray(size / np.sqrt(2.0 * np.log(as_counts(n, "n"))), np.float64)


def hardmax(setting: Setting) -> list[Prediction]:
    """[B] Proposition 5.1; only for d = 1."""
    head, measure = setting.head, setting.measure
    if head.dim != 1 or head.dim_query != 1 or head.dim_out != 1:
        return []
    a = float(head.A)
    scale = abs(float(head.V)) * float(measure.cov) ** 0.5
    centred = measure.is_gaussian and not bool(measure.mean.any())
    conditions = (
        ("d = 1 and tokens are N(0, sigma^2)", centred and scale > 0.0),
        ("queries are the tokens (self-attention)", setting.own_queries),
        ("no tilt bias and A is not 0", setting.no_bias and a != 0.0),
    )
    value = (lambda n: hardmax_mean_abs_asymptotic(n, scale)) if scale > 0.0 else None
    return [state("b-hardmax", conditions, 0.0, value, {"sigma": scale, "A": a})]
