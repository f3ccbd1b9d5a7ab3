"""dispersion_curve against simulation, its own sums key by key, and what is known of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors import dispersion as module


def pool(
    spread: float, keys: int = 1500, queries: int = 6, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys in 8 dimensions, scores of about this deviation."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(rows, 8, dtype=torch.float64, generator=generator) for rows in (queries, keys)
    )
    return spread * q, k


def test_simulation() -> None:
    """20000 draws at each n: 9 numbers within 4.5 standard errors, a false alarm in 10^4 of them;
    fixed seed.
    """
    q, k = pool(2.0, keys=300, queries=1)
    repeats = 20000
    curve = es.dispersion_curve(q, k, [2, 16, 100])
    scores, random = (q @ k.T / 8**0.5)[0].numpy(), np.random.default_rng(3)
    for j, n in enumerate(curve.n):
        drawn = scores[random.integers(300, size=(repeats, n))]
        p = np.exp(drawn - drawn.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        for found, sample in (
            (curve.sum_p2[0, j], (p * p).sum(axis=1)),
            (curve.entropy[j], -(p * np.log(p)).sum(axis=1)),
            (curve.largest_weight[j], p.max(axis=1)),
        ):
            assert abs(sample.mean() - found) < 4.5 * sample.std() / repeats**0.5


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0, 18.0])
def test_grids_against_keys(spread: float) -> None:
    """What the grids get wrong: 1e-5, and 4e-3 of the largest weight."""
    q, k = pool(spread, keys=6000, queries=3)
    n = np.array([2, 16, 256, 4096])
    grids, keys = es.dispersion_curve(q, k, n), module.from_scores(q @ k.T / 8**0.5, n)
    np.testing.assert_allclose(grids.sum_p2, keys.sum_p2, rtol=2e-5)
    np.testing.assert_allclose(grids.entropies, keys.entropies, atol=2e-5)
    np.testing.assert_allclose(grids.largest, keys.largest, rtol=4e-3)


def test_keys_hundreds_of_nats_apart_take_all_or_nothing() -> None:
    """Scores 0, 1e4, 2e4: the largest of those drawn has all; it is drawn c times of 5 with the
    chance of these counts.
    """
    curve = es.dispersion_curve([[1e4]], [[0.0], [1.0], [2.0]], [5], scale=1.0)
    truth = np.zeros(2)
    for draw in np.ndindex(*[3] * 5):
        share = 1 / draw.count(max(draw))
        truth += np.array([share, -np.log(share)]) / 3**5
    assert curve.largest_weight[0] == pytest.approx(truth[0], rel=1e-9)
    assert 1 / curve.effective_tokens[0] == pytest.approx(truth[0], rel=1e-9)
    assert curve.entropy[0] == pytest.approx(truth[1], rel=1e-9)


def test_scores_beyond_the_floating_range_are_refused() -> None:
    q, k = pool(1.0, keys=20)
    with pytest.raises(ValueError, match="scores are beyond the floating range"):
        es.dispersion_curve(q, k, [10, 1000], scale=1e308)


def rows_of_scores() -> torch.Tensor:
    """Wide and narrow rows, some with a key far above the rest."""
    scores = torch.randn(12, 3000, generator=torch.Generator().manual_seed(1)).double()
    scores *= torch.tensor([0.05, 0.3, 1.0, 4.0, 12.0, 40.0]).repeat(2)[:, None]
    scores[6:, 5] += 10
    return scores


def test_the_critical_scale_holds_the_largest_weight() -> None:
    """Softmax itself, at scores times 0.1 to 10 of Lambda: p >= 1 - Lambda / b above it, p <=
    N(t)^-(1 - b / Lambda) below; and Lambda from its definition.
    """
    scores = rows_of_scores()
    gaps, counts = module.gap_counts(scores)
    found = module.critical_scale(gaps, counts)
    for i, row in enumerate(scores.numpy()):
        gap = row.max() - np.sort(row)[::-1][1:]
        rate = np.log(np.arange(2, row.size + 1)) / gap
        assert float(found[i]) == pytest.approx(rate.max(), rel=1e-12)
        keys = 2 + rate.argmax()
        for share in (0.1, 0.5, 0.9, 1.1, 2.0, 10.0):
            p = torch.softmax(share * found[i] * scores[i], 0).max().item()
            if share > 1:
                assert p >= 1 - 1 / share
            else:
                assert p <= keys ** -(1 - share) * (1 + 1e-9)
    tied = torch.tensor([[1.0, 1.0, 0.0], [1.0, -torch.inf, -torch.inf]])
    assert module.critical_scale(*module.gap_counts(tied)).tolist() == [torch.inf, 0.0]


def test_critical_scales_from_grids() -> None:
    """One in a hundred where a key stands apart or scores deviate by 1; one in ten where all
    scores are within two cells.
    """
    scores = rows_of_scores()
    truth = module.critical_scale(*module.gap_counts(scores))
    state = module.deposit.init(12, module.GRID, scores.new_zeros(0))
    masses = module.deposit.update(state, scores, scores.new_zeros(3000, 0))
    top = scores.topk(160, dim=1).values
    apart = (module.critical_scale(*module.gaps_from_masses(masses, top)) / truth - 1).abs()
    assert float(apart.max()) < 0.1
    assert float(apart[[2, 3, 4, 5, *range(6, 12)]].max()) < 0.01
