"""Output metrics against torch and scipy, and tables of texts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch.distributions import Categorical, kl_divergence

from esscher.compress.metrics import Outcome, metrics
from esscher.compress.tables import finished

KNOWN = metrics()


def outcomes() -> tuple[Outcome, Outcome]:
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(11, (6,), generator=g)
    full, kept = (Outcome("language", torch.randn(7, 11, generator=g), targets) for _ in "ab")
    return full, kept


def test_against_torch() -> None:
    full, kept = outcomes()
    p, q = (Categorical(logits=outcome.rows.double()) for outcome in (full, kept))
    assert KNOWN["kl"].value(full, kept) == pytest.approx(float(kl_divergence(p, q).mean()))
    assert full.targets is not None
    assert KNOWN["loss"].value(full, kept) == pytest.approx(
        -float(q.log_prob(torch.cat([full.targets, full.targets[:1]]))[:6].mean())
    )
    same = (full.rows.argmax(1) == kept.rows.argmax(1)).double().mean()
    assert KNOWN["agreement"].value(full, kept) == pytest.approx(float(same))
    # the softmax does not see it
    shifted = Outcome("language", full.rows + torch.arange(7)[:, None], full.targets)
    assert KNOWN["error"].value(full, shifted) == pytest.approx(0, abs=1e-6)
    assert KNOWN["kl"].value(full, shifted) == pytest.approx(0, abs=1e-6)


def test_embeddings() -> None:
    one, other = (Outcome("encoder", torch.tensor([row])) for row in ([3.0, 4.0], [4.0, 3.0]))
    assert KNOWN["cosine"].value(one, other) == pytest.approx(24 / 25)
    assert KNOWN["error"].value(one, other) == pytest.approx(math.sqrt(2) / 5)


def test_nothing_changes_nothing() -> None:
    full, _ = outcomes()
    assert [KNOWN[name].value(full, full) for name in ("kl", "agreement", "error")] == [0, 1, 0]


def drawn(values: dict[str, dict[str, list[float]]], keep: float = 0.1) -> pd.DataFrame:
    """A table of draws: by metric and rule, a value for each text."""
    rows = []
    for metric, rules in values.items():
        for rule, texts in rules.items():
            full = rule == "full"
            cell = {"rule": rule, "split": "full" if full else "uniform"}
            cell |= {"keep": 1.0 if full else keep, "draw": 0}
            count = {"kept": math.nan, "keys": 0.0} if full else {"kept": 6.0, "keys": 60.0}
            rows += [
                {"text": i, "horizon": 1.0, **cell, **count, "metric": metric, "value": value}
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
    raw = {"draws": drawn({"loss": losses, "kl": divergence})}
    found = finished(raw, 1000.0)["compress"].set_index("rule")
    assert found.loc["near", "bytes"] == pytest.approx(100)
    refitted = {"draws": drawn({"kl": {"near+refit": divergence["near"]}})}
    row = finished(refitted, 1000.0, 8.0)["compress"].iloc[0]
    assert row["bytes"] == pytest.approx(100.8)  # a weight for each key
    for name, of in (("loss", losses), ("kl", divergence)):
        row, best = found.loc["far"], found.loc["near"]
        assert row[f"{name}_low"] < best[f"{name}_high"]  # as means they cannot be told apart
        ends = stats.ttest_rel(of["far"], of["near"]).confidence_interval(0.95)
        wanted = np.mean(of["far"]) - np.mean(of["near"]), ends.low, ends.high
        behind = [row[f"{name}_behind{end}"] for end in ("", "_low", "_high")]
        assert behind == pytest.approx(wanted)
        assert behind[1] > 0
        assert best[f"{name}_behind"] == 0
    ends = stats.ttest_rel(near, full).confidence_interval(0.95)
    told = found.loc["near"]
    assert (told["loss_added_low"], told["loss_added_high"]) == pytest.approx((ends.low, ends.high))
    assert math.isnan(found.loc["full", "loss_added"])


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_intervals_stay_in_their_range(name: str) -> None:
    """Texts at the ends of the range: of a divergence nothing below 0, of a share
    nothing above 1.
    """
    known = KNOWN[name]
    most = min(known.most, 3.0)
    samples = [[known.least, most, most], [most] * 3, [known.least] * 3, [most, most, 0.9 * most]]
    for sample in samples if not known.binary else samples[:3]:
        row = finished({"draws": drawn({name: {"recent": sample}})}, 1.0)["compress"].iloc[0]
        assert known.least <= row[f"{name}_low"] <= row[name] <= row[f"{name}_high"] <= known.most
