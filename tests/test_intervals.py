"""Intervals of means and shares: scipy's own where it has them, coverage by simulation, and ends
that stay in the range whatever the sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from esscher.intervals import mean_interval, share_interval, t_quantile

SRC = Path(__file__).parents[1] / "src"
REPEATS = 4000


def test_means_without_bounds_have_students_interval() -> None:
    values = np.array([0.3, 1.2, -0.4, 0.9])
    ends = stats.t.interval(0.9, 3, values.mean(), stats.sem(values))
    assert mean_interval(values, 0.9) == pytest.approx((values.mean(), *ends))
    assert t_quantile(3, 0.9) * stats.sem(values) == pytest.approx(values.mean() - ends[0])


def test_shares_have_wilsons_interval() -> None:
    for hits, total, level in ((3, 5, 0.95), (0, 4, 0.95), (7, 7, 0.999)):
        found = stats.binomtest(hits, total).proportion_ci(level, method="wilson")
        assert share_interval(hits, total, level) == pytest.approx(
            (hits / total, found.low, found.high), abs=1e-12
        )
    assert np.isnan(share_interval(0, 0)[0])
    assert share_interval(0, 0)[1:] == (0, 1)


def test_log_scale_by_hand() -> None:
    """Values 1, 2 and 3: mean 2, standard error 1/sqrt(3), t of two degrees of freedom 4.303."""
    _, low, high = mean_interval([1.0, 2.0, 3.0], least=0.0)
    factor = math.exp(stats.t.ppf(0.975, 2) / math.sqrt(3) / 2)
    assert (low, high) == pytest.approx((2 / factor, 2 * factor))
    shifted = mean_interval([6.0, 7.0, 8.0], least=5.0)
    assert shifted == pytest.approx((7.0, 5 + 2 / factor, 5 + 2 * factor))


def test_values_of_0_and_1_are_shares() -> None:
    """Their standard error is that of count - 1 trials; with many of them Wilson's interval is
    left.
    """
    values = np.repeat([0.0, 1.0], [300, 700])
    wilson = share_interval(700, 1000)
    assert mean_interval(values, least=0.0, most=1.0) == pytest.approx(wilson, abs=2e-4)


RANGES = {"kl": (0.0, math.inf), "agreement": (0.0, 1.0), "cosine": (-1.0, 1.0)}
ADVERSARIAL = {
    "texts far apart": (0.02, 0.98, 0.02),
    "texts alike": (0.7, 0.7, 0.7),
    "all at the upper end": (1.0, 1.0, 1.0),
    "all at the lower end": (0.0, 0.0, 0.0),
    "one below the upper end": (1.0, 1.0, 0.99),
    "one above the lower end": (0.0, 0.0, 1e-12),
    "both ends": (0.0, 1.0, 0.0),
    "rounding beyond the end": (1.0 + 1e-16, 1.0, 1.0),
    "a value so small that its square is 0": (1e-200, 0.0, 0.0),
}


@pytest.mark.parametrize("level", [0.95, 0.999])
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("sample", ADVERSARIAL)
def test_ends_stay_in_the_range(sample: str, name: str, level: float) -> None:
    least, most = RANGES[name]
    values = np.array(ADVERSARIAL[sample])
    values = 2 * values - 1 if name == "cosine" else values
    mean, low, high = mean_interval(values, level, least=least, most=most)
    assert least <= low <= mean <= high <= most
    assert math.isfinite(high)


def test_texts_that_all_agree_leave_doubt() -> None:
    """Three of three: as little is known of a share as Wilson says."""
    t = stats.t.ppf(0.975, 2)
    assert mean_interval([1.0] * 3, least=0.0, most=1.0) == pytest.approx(
        (1.0, 1 / (1 + t * t / 3), 1.0)
    )


@pytest.mark.parametrize("count", [1, 2])
def test_one_value_has_no_interval_and_two_say_nothing(count: int) -> None:
    for least, most in ((-math.inf, math.inf), *RANGES.values()):
        mean, low, high = mean_interval([0.3] * count, least=least, most=most)
        assert mean == 0.3
        assert math.isnan(low)
        assert math.isnan(high)


Draw = Callable[[np.random.Generator, int], np.ndarray]
LAWS: dict[str, tuple[Draw, float, tuple[float, float], float]] = {
    # a sample, its true mean, its range, and the coverage that is claimed of the 95 % interval
    "gamma of shape 4, as KL": (lambda g, n: g.gamma(4.0, 0.25, n), 1.0, RANGES["kl"], 0.93),
    "lognormal, as KL": (
        lambda g, n: np.exp(0.5 * g.standard_normal(n) - 0.125),
        1.0,
        RANGES["kl"],
        0.93,
    ),
    "beta(8, 2), as agreement": (lambda g, n: g.beta(8.0, 2.0, n), 0.8, RANGES["agreement"], 0.93),
    "32 positions of a text, 97 % alike": (
        lambda g, n: g.binomial(32, 0.97, n) / 32,
        0.97,
        RANGES["agreement"],
        0.93,
    ),
    "beta(30, 1) on [-1, 1], as cosine": (
        lambda g, n: 2 * g.beta(30.0, 1.0, n) - 1,
        2 * 30 / 31 - 1,
        RANGES["cosine"],
        0.90,
    ),
    "normal": (lambda g, n: g.standard_normal(n), 0.0, (-math.inf, math.inf), 0.95),
}


@pytest.mark.parametrize("count", [3, 9])
@pytest.mark.parametrize("law", LAWS)
def test_coverage(law: str, count: int) -> None:
    """4000 samples of 3 and of 9 texts: the share of intervals that hold the true mean is no
    smaller than claimed, less 4 binomial standard errors (false alarm below 1 in 30,000 each).
    """
    draw, truth, (least, most), claimed = LAWS[law]
    generator = np.random.default_rng(7)
    found = [mean_interval(draw(generator, count), least=least, most=most) for _ in range(REPEATS)]
    covered = np.mean([low <= truth <= high for _, low, high in found])
    assert covered >= claimed - 4 * math.sqrt(claimed * (1 - claimed) / REPEATS)


def test_shares_cover_on_average() -> None:
    """Wilson's coverage, enumerated: 95 % on average over p, within 1.5 %."""
    total, p = 9, np.linspace(0.02, 0.98, 193)
    ends = np.array([share_interval(hits, total)[1:] for hits in range(total + 1)])
    holds = (ends[:, :1] <= p) & (p <= ends[:, 1:])
    covered = (stats.binom.pmf(np.arange(total + 1)[:, None], total, p) * holds).sum(0)
    assert covered.mean() == pytest.approx(0.95, abs=0.015)


def test_intervals_are_made_in_one_module() -> None:
    """No other module has quantiles of Student's law, or an interval of a share."""
    own = re.compile(r"\bt\.(ppf|interval|isf)\(|stdtrit|student\.ppf|proportion_ci|betaincinv")
    found = {
        str(file.relative_to(SRC))
        for file in SRC.rglob("*.py")
        if own.search(file.read_text("utf-8"))
    }
    assert found == {"esscher/intervals.py"}
