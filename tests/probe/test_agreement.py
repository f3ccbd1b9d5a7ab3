"""Rank correlations of predicted and measured exponents: scipy's own, with intervals that hold what
they say.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from esscher.intervals import rank_correlation
from esscher.probe.measure import AGREEMENT, agreement_table
from esscher.runs import Column

COLUMNS = (
    Column("layer", "int", "layer", "."),
    Column("beta_paper", "float", "proved", ".", of="coupling"),
    Column("beta_mean", "float", "mean", ".", metric="mean"),
)


def test_rho_is_scipys_with_ties() -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=41)
    y = np.round(x + generator.normal(size=41), 0)  # ties
    rho, low, high = rank_correlation(x, y, 0)
    assert rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    assert low < rho < high
    assert rank_correlation(x, y, 0) == (rho, low, high)


def test_intervals_hold_the_truth() -> None:
    """Gaussian pairs of correlation r have rho = 6/pi asin(r/2); 72 pairs, 50 times, nominal 95 %.

    Fewer than 40 of 50 have a chance below 1e-3 if the coverage is 0.93, what percentiles of 72
    pairs reach.
    """
    truth = 6 / math.pi * math.asin(0.6 / 2)
    generator = np.random.default_rng(8)
    inside = 0
    for trial in range(50):
        x = generator.normal(size=72)
        _, low, high = rank_correlation(x, 0.6 * x + 0.8 * generator.normal(size=72), trial)
        inside += low <= truth <= high
    assert inside >= 40


def test_what_does_not_vary_has_no_rank() -> None:
    assert all(math.isnan(value) for value in rank_correlation(np.ones(9), np.arange(9.0), 0))
    few = np.array([0.0, 0.0, 0.0, 0.0, 1.0])  # a third of the resamples do not vary
    rho, low, high = rank_correlation(few, np.arange(5.0), 0)
    assert low <= rho <= high


def test_heads_and_layers_that_have_both() -> None:
    """A layer is predicted by its slowest head; a head without an exponent is left out; 5 are the
    fewest.
    """
    heads = pd.DataFrame(
        {
            "layer": np.repeat(np.arange(5), 2),
            "beta_paper": np.arange(10) / 20,
            "beta_mean": np.arange(10.0),
        }
    )
    heads.loc[9, "beta_mean"] = np.nan
    layers = pd.DataFrame({"layer": np.arange(5), "beta_mean": [4.0, 3.0, 2.0, 1.0, 0.0]})
    found = agreement_table({"heads": heads, "layers": layers}, COLUMNS, 0)
    assert list(found.columns) == [column.key for column in AGREEMENT]
    found["rho"] = found["rho"].round(12)
    assert found[["over", "rho", "count"]].to_numpy().tolist() == [
        ["heads", 1.0, 9],
        ["layers", -1.0, 5],
    ]
    assert agreement_table({"heads": heads[:4], "layers": layers[:2]}, COLUMNS, 0).empty
    assert len(agreement_table({"heads": heads}, COLUMNS, 0)) == 1  # layers failed
