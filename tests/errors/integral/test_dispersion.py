"""Summed squares, entropy and largest weights against all sequences, all counts, and
quadrature in many digits.
"""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch

from esscher.errors.dispersion import dispersion
from esscher.errors.gaussian import largest_weights
from esscher.errors.nodes import STEP, TOL, KeySource
from tests.errors.pools import softmax

Floats = npt.NDArray[np.float64]


def computed(scores: Floats, weights: Floats, n: list[int]) -> Floats:
    """(3, len n): summed squares, entropy, largest."""
    score, log_weight = torch.from_numpy(scores)[None], torch.from_numpy(np.log(weights))[None]
    empty = torch.zeros(1, len(scores), 0, dtype=torch.float64)
    source = KeySource.build(score, log_weight, empty, torch.zeros_like(score))
    counts, top = torch.tensor(n, dtype=torch.float64), scores.max()
    sum_p2, entropy = dispersion(source, counts, step=STEP, tol=TOL)
    order = np.argsort(scores)
    rising, share = (torch.from_numpy(x[order])[None] for x in (scores - top, weights))
    largest = largest_weights(rising, share, counts, sum_p2, 1e-13)
    return np.stack([sum_p2[0], entropy[0], largest[0]])


def of_weights(p: Floats) -> Floats:
    return np.array([p @ p, -p @ np.log(p), p.max()])


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
def test_all_sequences(spread: float) -> None:
    """Four keys of unequal weight, two of them with one score."""
    random = np.random.default_rng(1)
    scores, weights = spread * random.normal(size=4) + 7, np.array([0.4, 0.1, 0.3, 0.2])
    scores[1] = scores[0]
    n = [1, 2, 3, 5]
    found = computed(scores, weights, n)
    for j, count in enumerate(n):
        truth = np.zeros(3)
        for draw in itertools.product(range(4), repeat=count):
            truth += weights[list(draw)].prod() * of_weights(softmax(scores[list(draw)]))
        np.testing.assert_allclose(found[:, j], truth, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("scores", [[0.0, 1.0, 2.5], [0.0, 5.0, 5.0], [-40.0, 0.0, 12.0]])
def test_all_counts_of_many_draws(scores: list[float]) -> None:
    """A key drawn c times counts c times: sums over all counts that add up to n = 60."""
    n, s, w = 60, np.array(scores), np.array([0.5, 0.45, 0.05])
    truth = np.zeros(3)
    for a, b in itertools.product(range(n + 1), repeat=2):
        c = n - a - b
        if c >= 0:
            drawn = np.repeat(s, [a, b, c])
            chance = math.comb(n, a) * math.comb(n - a, b) * w[0] ** a * w[1] ** b * w[2] ** c
            truth += chance * of_weights(softmax(drawn) + 1e-300)
    np.testing.assert_allclose(computed(s, w, [n])[:, 0], truth, rtol=1e-11)


def test_entropy_is_that_of_log_partition_and_mean_score() -> None:
    """E entropy = E log Z - E sum p s, each by its own integral in 30 digits; n = 1000."""
    s, w, n = [0.0, 1.5, 4.0], [0.7, 0.25, 0.05], 1000
    mpmath.mp.dps = 30
    e = [mpmath.exp(x) for x in s]

    def phi(t: mpmath.mpf) -> mpmath.mpf:
        return mpmath.fsum(a * mpmath.exp(-t * b) for a, b in zip(w, e, strict=True))

    def log_z(tau: mpmath.mpf) -> mpmath.mpf:
        t = mpmath.exp(tau)
        return mpmath.exp(-t) - phi(t) ** n

    def mean_score(tau: mpmath.mpf) -> mpmath.mpf:
        t = mpmath.exp(tau)
        first = mpmath.fsum(a * x * b * mpmath.exp(-t * b) for a, x, b in zip(w, s, e, strict=True))
        return n * t * first * phi(t) ** (n - 1)

    places = [-60, -30, *range(-20, 6)]
    truth = mpmath.quad(log_z, places) - mpmath.quad(mean_score, places)
    assert computed(np.array(s), np.array(w), [n])[1, 0] == pytest.approx(float(truth), rel=1e-11)


def test_equal_scores_share_alike() -> None:
    n = [1, 2, 1000, 10**9, 10**15]
    found = computed(np.full(3, 5.0), np.full(3, 1 / 3), n)
    share = 1 / np.array(n)
    np.testing.assert_allclose(found, np.stack([share, -np.log(share), share]), rtol=1e-11)
