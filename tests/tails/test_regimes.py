"""The rule: hand-made evidence for every label and signature, monotone, and right about simulated
Gaussian scores.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from esscher.tails.regimes import REGIMES, SIGNATURES, HeadEvidence, classify
from esscher.tails.scores import gaussian_khat

DIFFUSE = HeadEvidence(
    n_keys=16384,
    score_sd=0.6,
    effective_tokens=11430,
    share_frozen=0.0,
    sink_mass=0.02,
    khat=0.1,
    beta_fit=0.5,
    beta_low=0.49,
    beta_high=0.51,
    token_verdict="sub-Gaussian",
    score_verdict="sub-Gaussian",
)
SELECTIVE = replace(DIFFUSE, score_sd=2.5, effective_tokens=60, khat=0.8)
FROZEN = replace(
    DIFFUSE,
    score_sd=6,
    effective_tokens=1.6,
    share_frozen=0.9,
    khat=2.0,
)
SLOW: dict[str, Any] = {"beta_fit": 0.3, "beta_low": 0.28, "beta_high": 0.33, "coupling": 40.0}
SINK = replace(DIFFUSE, sink_mass=0.83, effective_tokens=1.4)


@pytest.mark.parametrize(
    ("evidence", "label", "words"),
    [
        (DIFFUSE, "diffuse", "11430 of 16384 tokens are effective, a share of 0.7"),
        (SELECTIVE, "selective", "60.0 of 16384 tokens are effective"),
        (FROZEN, "frozen", "90% of the queries have s^2 > 2 log n = 19.4, median s = 6.00"),
        (SINK, "sink-dominated", "Sink tokens hold 83% of the weight"),
        (replace(FROZEN, sink_mass=0.6), "sink-dominated", "60%"),
        (replace(DIFFUSE, sink_mass=math.nan), "diffuse", "effective"),
    ],
)
def test_labels(evidence: HeadEvidence, label: str, words: str) -> None:
    found, reason, _ = classify(evidence)
    assert found == label
    assert label in REGIMES
    assert words in reason
    assert reason.endswith(".")
    assert "nan" not in reason
    assert reason.count("\n") == 0


@pytest.mark.parametrize(
    ("evidence", "names"),
    [
        (DIFFUSE, set()),
        (SELECTIVE, set()),
        (replace(SELECTIVE, **SLOW), {"exploded constants"}),
        (replace(SELECTIVE, **{**SLOW, "coupling": 3.0}), set()),
        (replace(SELECTIVE, **{**SLOW, "beta_high": 0.47}), set()),
        (FROZEN, {"hardmax regime"}),
        (replace(DIFFUSE, effective_tokens=1.2), {"hardmax regime"}),
        (replace(DIFFUSE, token_verdict="heavier"), {"distribution mismatch"}),
        (
            replace(DIFFUSE, score_verdict="heavier", token_verdict="lighter"),
            {"distribution mismatch"},
        ),
        (replace(DIFFUSE, khat=1.1), {"distribution mismatch"}),
        (replace(FROZEN, score_verdict="heavier"), {"hardmax regime", "distribution mismatch"}),
        # nothing to compare with but the threshold
        (replace(DIFFUSE, score_sd=0.0, khat=0.9), {"distribution mismatch"}),
    ],
)
def test_signatures(evidence: HeadEvidence, names: set[str]) -> None:
    signatures = classify(evidence)[2]
    assert set(signatures) == names <= set(SIGNATURES)
    assert all("nan" not in why and why.endswith(".") for why in signatures.values())


def test_exploded_constants_say_the_numbers() -> None:
    why = classify(replace(SELECTIVE, **SLOW))[2]["exploded constants"]
    assert "n^-0.30 (0.28 to 0.33)" in why
    assert "Psi is 40" in why


def test_a_heavy_khat_of_gaussian_scores_is_no_mismatch() -> None:
    """s = 4 gives a k-hat beyond every threshold, though nothing is wrong with the law."""
    own = float(gaussian_khat([4.0], 16384)[0])
    assert own > 1
    assert (
        "distribution mismatch" not in classify(replace(SELECTIVE, score_sd=4.0, khat=own + 0.1))[2]
    )
    assert "distribution mismatch" in classify(replace(SELECTIVE, score_sd=4.0, khat=own + 0.3))[2]


def test_monotone() -> None:
    """More frozen queries, fewer effective tokens: never back towards diffuse."""
    order = ["diffuse", "selective", "frozen"]
    by_effective = [
        classify(replace(DIFFUSE, effective_tokens=2.0**-i * 16384))[0] for i in range(14)
    ]
    by_frozen = [classify(replace(DIFFUSE, share_frozen=i / 20))[0] for i in range(21)]
    for labels in (by_effective, by_frozen):
        ranks = [order.index(label) for label in labels]
        assert ranks == sorted(ranks)
        assert ranks[0] < ranks[-1]
    sinks = [classify(replace(DIFFUSE, sink_mass=i / 20))[0] == "sink-dominated" for i in range(21)]
    assert sinks == sorted(sinks)
    assert any(sinks)


def test_freezing_separates_simulated_scores() -> None:
    """Random energy model, s = c sqrt(2 log n): effective tokens grow with n for c < 1 and stay
    bounded for c > 1.

    Beyond freezing E sum p^2 -> 1 - 1/c as n grows (Derrida 1981). 200 queries have standard error
    0.02, and log n is no more than 11 here: within 0.06 at c = 2 and 3.
    """
    effective = {}
    for n in (256, 65536):
        noise = torch.randn(200, n, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
        labels = []
        for c in (0.2, 0.6, 1.3, 2.0, 3.0):
            scores = c * math.sqrt(2 * math.log(n)) * noise
            squares = scores.softmax(1).square().sum(1)
            effective[n, c] = float((1 / squares).median())
            frozen = scores.var(1) > 2 * math.log(n)
            evidence = HeadEvidence(
                n_keys=n,
                effective_tokens=effective[n, c],
                share_frozen=float(frozen.double().mean()),
                score_sd=c,
            )
            labels.append(classify(evidence)[0])
            if c >= 2:
                assert abs(float(squares.mean()) - (1 - 1 / c)) < 0.06
        assert labels == ["diffuse", "selective", "frozen", "frozen", "frozen"]
    assert effective[65536, 0.6] > 5 * effective[256, 0.6]
    assert effective[65536, 2.0] < 1.2 * effective[256, 2.0]
