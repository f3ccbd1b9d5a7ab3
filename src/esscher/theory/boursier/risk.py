"""[S] for in-context risks: Lemmas E.2 and E.4, as printed and mended, as functions of plain
numbers.

R_n and R are the risks E loss(Gamma_n(z), y) and E loss(Gamma(z), y). All norms are over tasks,
tokens and queries together:

    error2, error4        (E|Gamma_n - Gamma|^2)^{1/2}, (E|Gamma_n - Gamma|^4)^{1/4}, or bounds on
    them gradient_error2       (E|grad Gamma_n - grad Gamma|^2)^{1/2}, gradients in (U, V) limit2,
    limit4        (E|Gamma|^2)^{1/2}, (E|Gamma|^4)^{1/4} label2, label4        (E|y|^2)^{1/2},
    (E|y|^4)^{1/4}

The loss satisfies |grad_1 loss(a, y)| <= |a| + |y| and |grad_1 loss(a, y) - grad_1 loss(b, y)| <=
|a - b|; the quadratic loss |a - y|^2 / 2 does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "gaussian_gradient2",
    "gaussian_limit2",
    "gaussian_limit4",
    "lemma_e2_mended",
    "lemma_e2_printed",
    "lemma_e4",
]

Floats = npt.NDArray[np.float64]


def lemma_e2_printed(error2: Any, error4: Any, label4: float, limit4: float) -> Floats:
    """|R_n - R| as printed: 2 label4 error2 (error4 + limit4). Source: [S] Lemma E.2.

    False: the proof bounds |(a, y)| by |y| |a| where it needs |y| + |a|, so the bound is 0 for
    labels that are 0.
    """
    second, fourth = np.asarray(error2, dtype=np.float64), np.asarray(error4, dtype=np.float64)
    return np.asarray(2.0 * label4 * second * (fourth + limit4), np.float64)


def lemma_e2_mended(error2: Any, label2: float, limit2: float) -> Floats:
    """|R_n - R| <= error2 (label2 + limit2 + error2).

    From |loss(a, y) - loss(b, y)| <= (|y| + max(|a|, |b|)) |a - b|, max(|a|, |b|) <= |b| + |a - b|
    and Cauchy-Schwarz; second moments suffice. Source: [S] Lemma E.2, mended.
    """
    second = np.asarray(error2, dtype=np.float64)
    return np.asarray(second * (label2 + limit2 + second), np.float64)


def lemma_e4(
    error2: Any, gradient_error2: Any, label2: float, limit2: float, gradient2: float
) -> Floats:
    """|grad R_n - grad R| <= gradient_error2 (limit2 + error2 + label2) + error2 gradient2,
    gradient2 = (E|grad Gamma|^2)^{1/2}.

    Source: the proof of [S] Lemma E.4 up to (28). Its last step replaces (E_mu X^2)^{1/2} by E_mu
    X, which is smaller when the tasks differ in sigma_mu, so the displayed statement holds only for
    one common sigma_mu.
    """
    second, gradient = (
        np.asarray(error2, dtype=np.float64),
        np.asarray(gradient_error2, dtype=np.float64),
    )
    return np.asarray(gradient * (limit2 + second + label2) + second * gradient2, np.float64)


def gaussian_limit4(d: int, v_norm: float, u_norm: float, sigma8: float) -> float:
    """(E|Gamma|^4)^{1/4} <= 2 sqrt(d) ||V|| ||U|| (E sigma_mu^8)^{1/4} for Gaussian tokens;
    ``sigma8`` = E sigma_mu^8.

    Source: [S] Lemma E.2, which prints E sigma_mu^4: the limit is V Gamma U z with ||Gamma|| =
    sigma_mu^2.
    """
    return 2.0 * math.sqrt(d) * v_norm * u_norm * math.sqrt(math.sqrt(sigma8))


def gaussian_limit2(d: int, v_norm: float, u_norm: float, sigma4: float) -> float:
    """(E|Gamma|^2)^{1/2} <= 2 sqrt(d) ||V|| ||U|| (E sigma_mu^4)^{1/2}. Source: [S] Lemma E.4
    (prints E sigma_mu^2).
    """
    return 2.0 * math.sqrt(d) * v_norm * u_norm * math.sqrt(sigma4)


def gaussian_gradient2(d: int, v_norm: float, u_norm: float, sigma4: float) -> float:
    """(E|grad Gamma|^2)^{1/2} <= 2 sqrt(d) (||V|| + ||U||) (E sigma_mu^4)^{1/2}, operator norm of
    the gradient.

    Source: [S] Lemma E.4, which prints E sigma_mu^2.
    """
    return 2.0 * math.sqrt(d) * (v_norm + u_norm) * math.sqrt(sigma4)
