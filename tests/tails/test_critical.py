"""The critical scale of a row of scores: its definition, its bounds on softmax, and grids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esscher.errors import grid as deposit
from esscher.tails import scores as module


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
    state = deposit.init(12, module.SCORES, scores.new_zeros(0))
    masses = deposit.update(state, scores, scores.new_zeros(3000, 0))
    top = scores.topk(160, dim=1).values
    apart = (module.critical_scale(*module.gaps_from_masses(masses, top)) / truth - 1).abs()
    assert float(apart.max()) < 0.1
    assert float(apart[[2, 3, 4, 5, *range(6, 12)]].max()) < 0.01
