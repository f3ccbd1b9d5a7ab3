"""E sum p^2 of n draws against all sequences and all counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from esscher.errors.integral import error_from_nodes
from tests.errors.pools import softmax

Floats = npt.NDArray[np.float64]


def computed(scores: Floats, weights: Floats, n: list[int]) -> Floats:
    """E sum p^2, (len n)."""
    values = np.zeros((len(scores), 1))
    return error_from_nodes(scores[None], np.log(weights), values, None, n).sum_p2[0]


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
def test_all_sequences(spread: float) -> None:
    """Four keys of unequal weight, two of them with one score."""
    random = np.random.default_rng(1)
    scores, weights = spread * random.normal(size=4) + 7, np.array([0.4, 0.1, 0.3, 0.2])
    scores[1] = scores[0]
    n = [1, 2, 3, 5]
    found = computed(scores, weights, n)
    for j, count in enumerate(n):
        truth = 0.0
        for draw in itertools.product(range(4), repeat=count):
            truth += weights[list(draw)].prod() * (softmax(scores[list(draw)]) ** 2).sum()
        np.testing.assert_allclose(found[j], truth, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("scores", [[0.0, 1.0, 2.5], [0.0, 5.0, 5.0], [-40.0, 0.0, 12.0]])
def test_all_counts_of_many_draws(scores: list[float]) -> None:
    """A key drawn c times counts c times: sums over all counts that add up to n = 60."""
    n, s, w = 60, np.array(scores), np.array([0.5, 0.45, 0.05])
    truth = 0.0
    for a, b in itertools.product(range(n + 1), repeat=2):
        c = n - a - b
        if c >= 0:
            drawn = np.repeat(s, [a, b, c])
            chance = math.comb(n, a) * math.comb(n - a, b) * w[0] ** a * w[1] ** b * w[2] ** c
            truth += chance * (softmax(drawn) ** 2).sum()
    np.testing.assert_allclose(computed(s, w, [n])[0], truth, rtol=1e-11)


def test_equal_scores_share_alike() -> None:
    n = [1, 2, 1000, 10**9, 10**15]
    found = computed(np.full(3, 5.0), np.full(3, 1 / 3), n)
    np.testing.assert_allclose(found, 1 / np.array(n), rtol=1e-11)
