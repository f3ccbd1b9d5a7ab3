"""The rule: hand-made evidence for every label and signature, monotone, and right about simulated
Gaussian scores.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from esscher.tails.regimes import LABELS, SIGNATURES, HeadEvidence, classify
from esscher.tails.scores import gaussian_khat

DIFFUSE = HeadEvidence(
    n=16384,
    s=0.6,
    effective_tokens=11430,
    share_frozen=0.0,
    sink_mass=0.02,
    khat=0.1,
    exponent=0.5,
    exponent_low=0.49,
    exponent_high=0.51,
    relative_rms=0.01,
    constant_ratio=1.2,
    tokens="sub-Gaussian",
    scores="sub-Gaussian",
)
SELECTIVE = replace(
    DIFFUSE, s=2.5, effective_tokens=60, khat=0.8, relative_rms=0.08, constant_ratio=15
)
FROZEN = replace(
    DIFFUSE,
    s=6,
    effective_tokens=1.6,
    share_frozen=0.9,
    khat=2.0,
    relative_rms=0.9,
    constant_ratio=90,
)
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
        (
            HeadEvidence(),
            "unknown",
            "the number of tokens and effective tokens and the share of frozen queries",
        ),
        (
            replace(DIFFUSE, effective_tokens=math.nan),
            "unknown",
            "No regime without effective tokens",
        ),
        (replace(DIFFUSE, share_frozen=math.inf), "unknown", "frozen"),
    ],
)
def test_labels(evidence: HeadEvidence, label: str, words: str) -> None:
    regime = classify(evidence)
    assert regime.label == label
    assert label in LABELS
    assert words in regime.reason
    assert regime.reason.endswith(".")
    assert "nan" not in regime.reason
    assert regime.reason.count("\n") == 0


@pytest.mark.parametrize(
    ("evidence", "names"),
    [
        (DIFFUSE, set()),
        (SELECTIVE, set()),  # its error is small, whatever its constant
        (replace(SELECTIVE, relative_rms=0.4), {"exploded constants"}),
        (replace(SELECTIVE, relative_rms=0.4, constant_ratio=3), set()),
        (FROZEN, {"hardmax regime"}),
        (replace(DIFFUSE, effective_tokens=1.2), {"hardmax regime"}),
        (replace(DIFFUSE, tokens="heavier"), {"distribution mismatch"}),
        (replace(DIFFUSE, scores="heavier", tokens="lighter"), {"distribution mismatch"}),
        (replace(DIFFUSE, khat=1.1), {"distribution mismatch"}),
        (replace(FROZEN, scores="heavier"), {"hardmax regime", "distribution mismatch"}),
        (HeadEvidence(), set()),
        # nothing to compare with but the threshold
        (HeadEvidence(khat=0.9), {"distribution mismatch"}),
    ],
)
def test_signatures(evidence: HeadEvidence, names: set[str]) -> None:
    signatures = classify(evidence).signatures
    assert set(signatures) == names <= set(SIGNATURES)
    assert all("nan" not in why and why.endswith(".") for why in signatures.values())


def test_exploded_constants_say_the_numbers() -> None:
    why = classify(replace(SELECTIVE, relative_rms=0.4, coupling=7.0)).signatures[
        "exploded constants"
    ]
    assert "40%" in why
    assert "n^-0.50 (0.49 to 0.51)" in why
    assert "15 times" in why
    assert "Psi is 7" in why


def test_a_heavy_khat_of_gaussian_scores_is_no_mismatch() -> None:
    """s = 4 gives a k-hat beyond every threshold, though nothing is wrong with the law."""
    own = float(gaussian_khat([4.0], 16384)[0])
    assert own > 1
    assert (
        "distribution mismatch"
        not in classify(replace(SELECTIVE, s=4.0, khat=own + 0.1)).signatures
    )
    assert "distribution mismatch" in classify(replace(SELECTIVE, s=4.0, khat=own + 0.3)).signatures


def test_monotone() -> None:
    """More frozen queries, fewer effective tokens: never back towards diffuse."""
    order = ["diffuse", "selective", "frozen"]
    by_effective = [
        classify(replace(DIFFUSE, effective_tokens=2.0**-i * 16384)).label for i in range(14)
    ]
    by_frozen = [classify(replace(DIFFUSE, share_frozen=i / 20)).label for i in range(21)]
    for labels in (by_effective, by_frozen):
        ranks = [order.index(label) for label in labels]
        assert ranks == sorted(ranks)
        assert ranks[0] < ranks[-1]
    sinks = [
        classify(replace(DIFFUSE, sink_mass=i / 20)).label == "sink-dominated" for i in range(21)
    ]
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
                n=n, effective_tokens=effective[n, c], share_frozen=float(frozen.double().mean())
            )
            labels.append(classify(evidence).label)
            if c >= 2:
                assert abs(float(squares.mean()) - (1 - 1 / c)) < 0.06
        assert labels == ["diffuse", "selective", "frozen", "frozen", "frozen"]
    assert effective[65536, 0.6] > 5 * effective[256, 0.6]
    assert effective[65536, 2.0] < 1.2 * effective[256, 2.0]
