"""Readings against torch's own, and what they are where nothing changes."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch.distributions import Categorical, kl_divergence

from esscher.compress.metrics import READINGS, Outcome
from esscher.compress.spec import DownstreamSpec
from esscher.compress.tables import finished, tertiles

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


def drawn(values: dict[str, dict[str, list[float]]], size: float = 0.1) -> pd.DataFrame:
    """A downstream run's table of draws: by reading and rule, a value for each text."""
    rows = []
    for reading, rules in values.items():
        for rule, texts in rules.items():
            full = rule == "full"
            cell = {"rule": rule, "split": "full" if full else "uniform"}
            cell |= {"size": 1.0 if full else size, "draw": 0}
            count = {"kept": math.nan, "keys": 0.0} if full else {"kept": 6.0, "keys": 60.0}
            rows += [
                {"text": i, "horizon": 1.0, **cell, **count, "reading": reading, "value": value}
                for i, value in enumerate(texts)
            ]
    return pd.DataFrame(rows)


def test_rules_are_compared_on_the_same_texts() -> None:
    """Texts differ by nats, rules by tenths: intervals of the means overlap, those of the paired
    differences, scipy's own, do not hold 0.
    """
    full = [3.0, 1.2, 4.5, 2.4]
    near = [value + added for value, added in zip(full, (0.21, 0.18, 0.24, 0.2), strict=True)]
    far = [value + added for value, added in zip(full, (0.41, 0.36, 0.46, 0.39), strict=True)]
    divergence = {"near": [0.3, 1.4, 0.5, 2.9], "far": [0.5, 1.7, 0.6, 3.1]}
    losses = {"full": full, "far": far, "near": near}
    table = finished(DownstreamSpec(), {"draws": drawn({"loss": losses, "kl": divergence})})
    found = table["downstream"].set_index(["reading", "rule"])
    for reading, of in (("loss", losses), ("kl", divergence)):
        row, best = found.loc[reading, "far"], found.loc[reading, "near"]
        assert row["low"] < best["high"]  # as means they cannot be told apart
        paired = stats.ttest_rel(of["far"], of["near"])
        ends = paired.confidence_interval(0.95)
        assert row["behind"] == pytest.approx(np.mean(of["far"]) - np.mean(of["near"]))
        assert (row["behind_low"], row["behind_high"]) == pytest.approx((ends.low, ends.high))
        assert row["behind_low"] > 0
        assert best["behind"] == 0
    ends = stats.ttest_rel(near, full).confidence_interval(0.95)
    told = found.loc["loss", "near"]
    assert (told["added_low"], told["added_high"]) == pytest.approx((ends.low, ends.high))
    told = found.loc["kl", "near"]
    assert (told["added"], told["added_low"]) == (
        told["value"],
        told["low"],
    )  # the full model's is 0
    assert np.isnan(found.loc[("loss", "full"), ["added", "behind"]].astype(float)).all()


@pytest.mark.parametrize("reading", sorted(BY_NAME))
def test_intervals_of_readings_stay_in_their_range(reading: str) -> None:
    """Two or three texts at the ends of the range: of a divergence nothing below 0, of a share
    nothing above 1.
    """
    known = BY_NAME[reading]
    most = min(known.most, 3.0)
    samples = [[known.least, most], [most] * 3, [known.least] * 2, [most, most, 0.9 * most]]
    for sample in samples if not known.binary else samples[:3]:
        raw = {"draws": drawn({reading: {"recent": sample}})}
        row = finished(DownstreamSpec(), raw)["downstream"].iloc[0]
        assert known.least <= row["low"] <= row["value"] <= row["high"] <= known.most


def test_tertiles_are_thirds_by_rank() -> None:
    horizons = pd.Series([5.0, 1.0, 9.0, 2.0, 7.0, 3.0], index=[3, 4, 5, 6, 7, 8])
    assert tertiles(horizons).to_dict() == {
        4: "low",
        6: "low",
        8: "middle",
        3: "middle",
        7: "high",
        5: "high",
    }
