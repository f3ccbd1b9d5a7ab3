"""What claims measure themselves, against something else: simulation, the package's own functions,
a second formula.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from esscher.errors.region import confidence_region
from esscher.papers import claims_icl, claims_laws
from tests.papers.made import made_conventions


def test_exact_errors_of_two_point_laws_are_those_of_simulated_tokens() -> None:
    rows = [
        row for row in claims_laws.measure_support(2, np.random.default_rng(0)) if row["p"] > 0.05
    ]
    chosen = rows[len(rows) // 2]
    n, p, r = int(chosen["n"]), chosen["p"], math.sqrt(2.0)
    found = {row["what"]: row["rms"] for row in rows if row["n"] == chosen["n"] and row["p"] == p}
    k = np.random.default_rng(1).binomial(n, p, 20_000)[:, None]
    x = np.linspace(-r, r, 41)

    def attention(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return (
            r
            * (high * np.exp(r * x) - low * np.exp(-r * x))
            / (high * np.exp(r * x) + low * np.exp(-r * x))
        )

    out, limit = attention(k, n - k), attention(np.array(p), np.array(1 - p))
    uniform = np.abs(out - limit).max(axis=1)
    mean = (k[:, 0] * out[:, -1] + (n - k[:, 0]) * out[:, 0]) / n - (
        p * limit[-1] + (1 - p) * limit[0]
    )
    for what, error in (("uniform", uniform), ("mean", mean)):
        square = error**2
        assert found[what] ** 2 == pytest.approx(
            square.mean(), abs=5 * square.std() / math.sqrt(len(square))
        )


def test_a_prompt_counts_as_covered_where_its_region_holds_the_limit() -> None:
    rows = claims_laws.measure_draws("mixture", 50, 40, np.random.default_rng(3))
    law = claims_laws.LAWS["mixture"]
    seed = int(np.random.default_rng(3).integers(1 << 62))
    tokens = law.sample(40 * 50, torch.Generator().manual_seed(seed)).double().reshape(40, 50, 2)
    limit = law.tilted_mean(claims_laws.QUERY)
    for row, y in zip(rows, tokens, strict=True):
        region = confidence_region(claims_laws.QUERY, y, y, 0.8, scale=1.0)
        assert (row["own_size"] <= scipy.stats.chi2.ppf(0.8, 2)) == bool(region.contains(limit)[0])
        assert row["squared"] == pytest.approx(float((region.center - limit).square().sum()))


def test_long_prompts_fit_the_formula_and_short_ones_do_not() -> None:
    long, short = (
        claims_icl.measure_limit(0.0, 2, 2, tokens, 10, np.random.default_rng(7))
        for tokens in (5000, 5)
    )
    assert np.mean([row["slope"] for row in long]) == pytest.approx(1.0, abs=0.05)
    assert np.mean([row["slope"] for row in short]) < 0.95


def test_a_gap_of_exponents_on_the_same_draws_is_found_to_a_hundredth() -> None:
    tables = made_conventions(0.5, 1)
    outer = tables["outside"]["errors"]
    own = outer[outer["point"] == 0]
    faster = own.assign(squared=own["squared"] * own["n"] ** -0.1)
    value, low, high = claims_icl.exponent_gap(faster, own)
    assert value == pytest.approx(0.05, abs=1e-9)
    assert high - low < 0.01
