"""Readings against torch's own, and what they are where nothing changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Categorical, kl_divergence

from esscher.models.downstream.interval import interval
from esscher.models.downstream.readings import READINGS, Outcome
from esscher.models.downstream.tables import tertiles

BY_NAME = {reading.name: reading for reading in READINGS}


def outcomes() -> tuple[Outcome, Outcome]:
    g = torch.Generator().manual_seed(2)
    rows, targets = torch.randn(2, 7, 11, generator=g), torch.randint(11, (6,), generator=g)
    return Outcome("language", rows[0], targets), Outcome("language", rows[1], targets)


def test_against_torch() -> None:
    full, kept = outcomes()
    p, q = (Categorical(logits=outcome.rows.double()) for outcome in (full, kept))
    assert BY_NAME["kl"].value(full, kept) == pytest.approx(float(kl_divergence(p, q).mean()))
    assert full.targets is not None
    assert BY_NAME["loss"].value(full, kept) == pytest.approx(
        -float(q.log_prob(torch.cat([full.targets, full.targets[:1]]))[:6].mean())
    )
    same = [
        int(a == b)
        for a, b in zip(full.rows.argmax(1).tolist(), kept.rows.argmax(1).tolist(), strict=True)
    ]
    assert BY_NAME["agreement"].value(full, kept) == pytest.approx(sum(same) / 7)
    # the softmax does not see it
    shifted = Outcome("language", full.rows + torch.arange(7)[:, None], full.targets)
    assert BY_NAME["error"].value(full, shifted) == pytest.approx(0, abs=1e-6)
    assert BY_NAME["kl"].value(full, shifted) == pytest.approx(0, abs=1e-6)


def test_embeddings() -> None:
    one, other = (
        Outcome("encoder", torch.tensor([[3.0, 4.0]])),
        Outcome("encoder", torch.tensor([[4.0, 3.0]])),
    )
    assert BY_NAME["cosine"].value(one, other) == pytest.approx(24 / 25)
    assert BY_NAME["error"].value(one, other) == pytest.approx(math.sqrt(2) / 5)


def test_nothing_changes_nothing() -> None:
    full, _ = outcomes()
    assert BY_NAME["kl"].value(full, full) == 0
    assert BY_NAME["agreement"].value(full, full) == 1
    assert BY_NAME["error"].value(full, full) == 0


def test_intervals_are_those_of_scipy() -> None:
    values = np.array([0.3, 0.1, 0.7, 0.4])
    ends = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert interval(values) == pytest.approx((values.mean(), *ends))
    found = stats.binomtest(3, 5).proportion_ci(0.95, method="wilson")
    assert interval(np.array([1.0, 1, 1, 0, 0]), binary=True) == pytest.approx(
        (0.6, found.low, found.high)
    )
    assert np.isnan(interval(np.array([0.3]))[1:]).all()


def test_tertiles_are_thirds_by_rank() -> None:
    import pandas as pd

    horizons = pd.Series([5.0, 1.0, 9.0, 2.0, 7.0, 3.0], index=[3, 4, 5, 6, 7, 8])
    assert tertiles(horizons).to_dict() == {
        4: "low",
        6: "low",
        8: "middle",
        3: "middle",
        7: "high",
        5: "high",
    }
