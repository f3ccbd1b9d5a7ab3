"""[S] on in-context learning, as functions of plain numbers: risks (Lemmas E.2 and E.4) and the
start of Theorem 5.2.

Risks: R_n and R are E loss(Gamma_n(z), y) and E loss(Gamma(z), y). All norms are over tasks, tokens
and queries together:

    error2, error4     (E|Gamma_n - Gamma|^2)^{1/2}, (E|Gamma_n - Gamma|^4)^{1/4}, or above them
    gradient_error2    (E|grad Gamma_n - grad Gamma|^2)^{1/2}, gradients in (U, V)
    limit2, limit4     (E|Gamma|^2)^{1/2}, (E|Gamma|^4)^{1/4}
    label2, label4     (E|y|^2)^{1/2}, (E|y|^4)^{1/4}

The loss satisfies |grad_1 loss(a, y)| <= |a| + |y| and |grad_1 loss(a, y) - grad_1 loss(b, y)| <=
|a - b|; the quadratic loss |a - y|^2 / 2 does. Start: d is the dimension of the covariates, alpha
the size of the start of Assumption 5.1: U11 = alpha G, v = alpha, G = Theta Theta^T, |G|_F = 1.
"""

from __future__ import annotations

import math
from typing import Any


def lemma_e2_printed(error2: Any, error4: Any, label4: float, limit4: float) -> Any:
    """|R_n - R| as printed: 2 label4 error2 (error4 + limit4). Source: [S] Lemma E.2.

    False: the proof bounds |(a, y)| by |y| |a| where it needs |y| + |a|, so the bound is 0 for
    labels that are 0.
    """
    return 2.0 * label4 * error2 * (error4 + limit4)


def lemma_e2_mended(error2: Any, label2: float, limit2: float) -> Any:
    """|R_n - R| <= error2 (label2 + limit2 + error2).

    From |loss(a, y) - loss(b, y)| <= (|y| + max(|a|, |b|)) |a - b|, max(|a|, |b|) <= |b| + |a - b|
    and Cauchy-Schwarz; second moments suffice. Source: [S] Lemma E.2, mended.
    """
    return error2 * (label2 + limit2 + error2)


def lemma_e4(
    error2: Any, gradient_error2: Any, label2: float, limit2: float, gradient2: float
) -> Any:
    """|grad R_n - grad R| <= gradient_error2 (limit2 + error2 + label2) + error2 gradient2,
    gradient2 = (E|grad Gamma|^2)^{1/2}.

    Source: the proof of [S] Lemma E.4 up to (28). Its last step replaces (E_mu X^2)^{1/2} by E_mu
    X, which is smaller when the tasks differ in sigma_mu, so the displayed statement holds only for
    one common sigma_mu.
    """
    return gradient_error2 * (limit2 + error2 + label2) + error2 * gradient2


def start_limit(d: int, norm: float, *, printed: bool = False) -> float:
    """Upper limit of alpha, sqrt(2) / (d^{1/4} ||Sigma||^{1/2}): below it the start has less risk
    than no weights at all, which the proof needs.

    R(start) - R(0) = alpha^4 tr(Sigma G Sigma G Sigma)/2 - alpha^2 tr(Sigma G Sigma) < 0 for
    alpha^2 ||Sigma|| < 2, since ||G|| <= |G|_F = 1; Zhang et al. (2024) have alpha^2 sqrt(d)
    ||Sigma|| < 2. Derived here for W = I. Printed, [S] Theorem 5.2: ||Sigma|| for its root. That is
    not dimensionless: with Sigma = s I the start is scaled right by s^{-1/2}, and for ||Sigma|| < 1
    the range is too wide.
    """
    if printed:
        return math.sqrt(2.0) / (math.sqrt(math.sqrt(d)) * norm)
    return math.sqrt(2.0) / math.sqrt(math.sqrt(d) * norm)
