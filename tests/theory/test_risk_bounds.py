"""Lemmas E.2 and E.4 of [S] on a task with finite laws, where risks and gradients at n tokens are
sums.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from esscher.theory import boursier
from tests.theory.finite_laws import random_law, softmax_errors


@pytest.mark.parametrize("seed", range(40))
def test_risk_gap_and_gradient_gap(seed: int) -> None:
    """Quadratic loss, one query z, labels of two values; R_n - R and its gradient in (U, V) by
    enumeration, d = 1.
    """
    rng = np.random.default_rng(seed)
    law = random_law(rng, 3)
    tokens = law.tokens + rng.choice([0.0, 30.0])  # a large limit shows whether its norm is counted
    n, z, U, V = int(rng.integers(1, 12)), rng.normal(), rng.normal(), rng.normal() * 3
    labels = rng.normal(size=2) * rng.choice([0.0, 1.0, 10.0])
    moments = np.stack([tokens, tokens**2], axis=1)
    errors, chances = softmax_errors(law.weights, U * z * law.tokens, moments, n)
    e = law.weights * np.exp(U * z * law.tokens)
    limit = e @ moments / e.sum()
    first, second = limit[0] + errors[:, 0], limit[1] + errors[:, 1]
    output, goal = V * first, V * limit[0]
    gap = sum(0.25 * (chances @ (output - y) ** 2 - (goal - y) ** 2) for y in labels)
    error2 = math.sqrt(chances @ (output - goal) ** 2)
    label2 = math.sqrt(np.mean(labels**2))
    assert abs(gap) <= boursier.lemma_e2_mended(error2, label2, abs(goal)) * (1 + 1e-9)

    jacobian = np.stack([V * z * (second - first**2), first], axis=1)
    target = np.array([V * z * (limit[1] - limit[0] ** 2), limit[0]])
    gradient_gap = sum(
        0.5 * (chances @ (jacobian * (output - y)[:, None]) - target * (goal - y)) for y in labels
    )
    gradient_error2 = math.sqrt(chances @ ((jacobian - target) ** 2).sum(axis=1))
    bound = boursier.lemma_e4(
        error2, gradient_error2, label2, abs(goal), float(np.linalg.norm(target))
    )
    assert np.linalg.norm(gradient_gap) <= bound * (1 + 1e-9)


def test_printed_lemma_e2_fails_without_labels() -> None:
    """y = 0 and tokens +1 or -1 with U = 0, V = 1: R_1 = 1/2, R = 0, and the printed bound is 0."""
    errors, chances = softmax_errors(
        np.array([0.5, 0.5]), np.zeros(2), np.array([[-1.0], [1.0]]), 1
    )
    gap = 0.5 * float(chances @ errors[:, 0] ** 2)
    assert gap == pytest.approx(0.5)
    assert float(boursier.lemma_e2_printed(1.0, 1.0, 0.0, 0.0)) == 0.0
    assert float(boursier.lemma_e2_mended(1.0, 0.0, 0.0)) >= gap


def test_gaussian_limits_scale_with_the_square_of_sigma() -> None:
    """V Sigma U z, Sigma = sigma^2 I, z standard normal, d = 3, sigma = 20: the printed powers are
    too small.
    """
    d, sigma, v, u = 3, 20.0, 0.7, 1.4
    limit4 = sigma**2 * v * u * (d * (d + 2)) ** 0.25
    limit2 = sigma**2 * v * u * math.sqrt(d)
    gradient2 = sigma**2 * math.hypot(u, v) * math.sqrt(d)
    output, slopes = 2 * math.sqrt(d) * v * u, 2 * math.sqrt(d) * (v + u)
    assert max(limit4, limit2) <= output * sigma**2  # (E sigma_mu^8)^{1/4}, (E sigma_mu^4)^{1/2}
    assert gradient2 <= slopes * sigma**2
    assert min(limit4, limit2) > output * sigma  # as printed: (E sigma_mu^4)^{1/4}, ..
    assert gradient2 > slopes * sigma


def test_formulas() -> None:
    assert float(boursier.lemma_e2_printed(2.0, 3.0, 5.0, 7.0)) == pytest.approx(
        2 * 5 * 2 * (3 + 7)
    )
    assert float(boursier.lemma_e2_mended(2.0, 5.0, 7.0)) == pytest.approx(2 * (5 + 7 + 2))
    assert float(boursier.lemma_e4(2.0, 3.0, 5.0, 7.0, 11.0)) == pytest.approx(
        3 * (7 + 2 + 5) + 2 * 11
    )
