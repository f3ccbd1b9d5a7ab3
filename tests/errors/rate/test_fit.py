"""Rates fitted to data made from a known law: recovered, covered, tested for straightness, or
refused with a reason.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

import esscher as es
from esscher.errors.curve import ErrorCurve
from esscher.errors.exact import exact_curve
from esscher.errors.rate import FitError, fit_rate, misfit_p_value
from tests.errors.synthetic import (
    bent,
    covered,
    fits,
    ladder,
    montecarlo,
    noisy_curve,
    power,
    squared_errors,
)

# ------------------------------------------------------------------------------------------
# known laws come back


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("exponent", [0.0, 0.1, 0.5, 1.0])
def test_known_law_is_recovered(exponent: float, nested: bool) -> None:
    """Exponent and constant within 4 standard errors; false alarms below 1e-4 each."""
    (fit,) = fits(1, 400, 10, power(exponent), dof=4, nested=nested)
    assert abs(fit.exponent - exponent) < 4 * fit.stderr < 0.1
    found = fit.constant * 2000.0**-fit.exponent
    assert found == pytest.approx(2.0 * 2000.0**-exponent, rel=0.1)
    assert fit.status.code == "ok"
    assert "bootstrap over 400 repeats" in fit.status.text
    assert fit.window.rule == "all points"
    assert (fit.window.n_min, fit.window.n_max, fit.window.points) == (100, 30_000, 10)


@pytest.mark.parametrize(
    ("repeats", "points", "dof", "nested", "sets"),
    [(20, 8, 3, False, 200), (20, 8, 3, True, 200), (20, 8, 1, True, 200), (200, 12, 3, True, 60)],
)
def test_coverage_in_brief(repeats: int, points: int, dof: int, nested: bool, sets: int) -> None:
    """Sets that the 95 % interval covers; outside the binomial's central 99.9 % a false alarm, one
    in a thousand each.
    """
    found = fits(sets, repeats, points, power(0.3), dof=dof, nested=nested)
    low, high = scipy.stats.binom.interval(0.999, sets, 0.95)
    assert low <= sets * covered(found, 0.3) <= high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repeats", "points", "dof", "nested"),
    [
        (20, 8, 3, False),
        (20, 8, 3, True),
        (20, 8, 1, False),
        (20, 8, 1, True),
        (200, 12, 3, False),
        (200, 12, 3, True),
        (200, 12, 1, True),
        (10, 5, 3, True),
        (50, 20, 3, True),
    ],
)
def test_coverage_and_size(repeats: int, points: int, dof: int, nested: bool) -> None:
    """2000 data sets from n^-0.3: the 95 % interval covers 93 to 97 %, tests reject at their level.

    The standard error of a coverage near 95 % is 0.5 %. Straightness is calibrated less finely: 2
    to 8 % of 5 %.
    """
    found = fits(2000, repeats, points, power(0.3), dof=dof, nested=nested)
    coverage = covered(found, 0.3)
    misfits = float(np.mean([fit.p_value < 0.05 for fit in found]))
    false_curved = float(np.mean([fit.status.code == "curved" for fit in found]))
    print(
        f"\nrepeats {repeats} points {points} dof {dof} nested {nested}: coverage {coverage:.4f},"
        f" straightness {misfits:.4f}, curved {false_curved:.4f}"
    )
    assert 0.93 <= coverage <= 0.97
    assert 0.02 <= misfits <= 0.08
    assert false_curved <= 0.005


def test_coverage_from_standard_errors_alone() -> None:
    """1000 sets, normal theory, exact here; each bound is 3.8 standard errors away: false alarms 2
    in 10 000.
    """
    n = ladder(6)
    found = [fit_rate(noisy_curve(power(0.3), n, 0.05, seed)) for seed in range(1000)]
    assert 0.924 <= covered(found, 0.3) <= 0.976
    assert 0.024 <= np.mean([fit.p_value < 0.05 for fit in found]) <= 0.076
    assert found[0].status.code == "ok"
    assert "independent" in found[0].status.text


def test_a_misfit_is_compared_with_a_scaled_chi_square() -> None:
    resampled = 1.7 * np.random.default_rng(0).chisquare(5, 200_000)
    for quantile in (3.0, 9.0, 20.0):
        found = misfit_p_value(1.7 * quantile, resampled)
        assert found == pytest.approx(scipy.stats.chi2.sf(quantile, 5), rel=0.05)


def test_level_widens_the_interval() -> None:
    n = ladder(8)
    curve = montecarlo(
        n, squared_errors(np.random.default_rng(0), 50, n, n**-0.5, dof=2, nested=True)
    )
    widths = [np.ptp(fit_rate(curve, level=level).interval) for level in (0.5, 0.8, 0.95, 0.99)]
    assert widths == sorted(widths)
    assert widths[3] > 1.2 * widths[2]


# ---- straightness, two laws


def test_straightness_has_size_and_power() -> None:
    """200 sets at 5 %: straight ones rejected 1 to 22 times (99.9 % of the binomial), bent ones
    nearly always.
    """
    straight = fits(200, 20, 8, power(0.3), dof=3, nested=True)
    assert 1 <= sum(fit.p_value < 0.05 for fit in straight) <= 22
    curved = fits(20, 60, 8, bent, dof=3, nested=True)
    assert sum(fit.p_value < 0.05 for fit in curved) >= 19


def test_curved_points_are_reported_and_kept() -> None:
    """A floor under n^-1/2: the whole ladder is fitted; its upper end alone is straight."""
    n = ladder(12)
    rms = np.sqrt(1.0 / n + 300.0 / n.astype(float) ** 2)
    curve = montecarlo(n, squared_errors(np.random.default_rng(1), 400, n, rms, dof=3, nested=True))
    fit = fit_rate(curve)
    assert fit.status.code == "curved"
    assert not fit.status.failed
    assert fit.window.points == 12
    assert fit.p_value < 1e-3
    assert "give larger n or a window" in fit.status.text
    again = fit_rate(curve, window=(3000, 30_000))
    assert again.status.code == "ok"
    assert again.p_value >= 0.01
    assert again.window.rule == "points with n from 3000 to 30000, as given"
    assert abs(again.exponent - 0.5) < abs(fit.exponent - 0.5)


# ------------------------------------------------------------------------------------------
# exact curves


def test_exact_curve_has_the_range_of_local_slopes() -> None:
    n = ladder(9, 10, 1e6)
    mse = 1.0 / n + 30.0 / n.astype(float) ** 2
    slope = 0.5 * (-1.0 / n - 60.0 / n.astype(float) ** 2) / mse
    fit = fit_rate(ErrorCurve(n=n, rms=np.sqrt(mse), kind="exact", slope=slope))
    assert fit.interval == (pytest.approx(-slope.max()), pytest.approx(-slope.min()))
    assert fit.interval[0] < fit.exponent < fit.interval[1]
    assert fit.exponent == pytest.approx(-np.polyfit(np.log(n), 0.5 * np.log(mse), 1)[0], rel=1e-10)
    assert fit.stderr == 0
    assert fit.status.code == "exact"
    assert "no sampling error; the interval is the range of local slopes" in fit.status.text
    np.testing.assert_array_equal(fit.local_slopes, slope)
    assert np.isnan(fit.p_value)
    bare = fit_rate(ErrorCurve(n=n, rms=np.sqrt(mse), kind="pool"))
    np.testing.assert_allclose(bare.local_slopes[1:-1], slope[1:-1], atol=0.06)
    assert bare.interval[0] < bare.exponent < bare.interval[1]


def test_range_of_local_slopes_includes_those_between_points() -> None:
    """A step between points where the curve is flatter: the slopes at the points alone would not
    hold the exponent.
    """
    n = np.array([100, 1000, 10_000])
    rms = np.array([1.0, 0.5, 0.25])
    slope = np.full(3, -0.1)
    fit = fit_rate(ErrorCurve(n=n, rms=rms, kind="exact", slope=slope))
    assert fit.interval == (pytest.approx(0.1), pytest.approx(np.log10(2)))


def test_accuracy_of_an_exact_curve_widens_its_interval() -> None:
    n = ladder(5)
    straight = ErrorCurve(n=n, rms=n**-0.5, kind="exact")
    assert np.ptp(fit_rate(straight).interval) < 1e-12
    worst = np.where(np.arange(5) < 2, 1.009, 0.991)
    off = fit_rate(replace(straight, rms=straight.rms * worst)).exponent
    low, high = fit_rate(replace(straight, accuracy=0.01)).interval
    assert low < 0.5 < off < high < 0.51


def test_fit_of_a_real_exact_curve() -> None:
    """Gaussian tokens, small horizon: the rate is 1/2, and local slopes come from the curve."""
    law = es.Gaussian(torch.eye(3, dtype=torch.float64))
    head = es.Head(A=0.3 * torch.eye(3, dtype=torch.float64), V=torch.eye(3, dtype=torch.float64))
    queries = law.sample(16, torch.Generator().manual_seed(1))
    curve = exact_curve(head, law, queries, ladder(8, 1e4, 1e7))
    fit = fit_rate(curve)
    assert fit.status.code == "exact"
    assert fit.exponent == pytest.approx(0.5, abs=0.01)
    assert curve.slope is not None
    np.testing.assert_array_equal(fit.local_slopes, curve.slope)


# ------------------------------------------------------------------------------------------
# windows and refusals

N6 = np.array([10, 30, 100, 300, 1000, 3000])
GOOD = ErrorCurve(n=N6, rms=N6**-0.5, kind="exact", scale=1.0)


def with_errors(*errors: float) -> ErrorCurve:
    return replace(GOOD, rms=np.array(errors))


REFUSED = {
    "two points": (
        ErrorCurve(n=N6[:2], rms=GOOD.rms[:2], kind=GOOD.kind),
        "too_few_points",
        "longer ladder",
    ),
    "one point": (
        ErrorCurve(n=N6[:1], rms=GOOD.rms[:1], kind=GOOD.kind),
        "too_few_points",
        "1 usable point,",
    ),
    "rounding": (replace(GOOD, scale=1e12), "rounding", "give smaller n"),
    "below a third": (replace(GOOD, accuracy=0.4), "rounding", "more accurately"),
    "noise": (replace(GOOD, kind="montecarlo", stderr=0.6 * GOOD.rms), "noisy", "more repeats"),
    "nan": (with_errors(1, 0.5, np.nan, 0.2, 0.1, 0.1), "invalid", "the error is nan at n = 100"),
    "infinite": (with_errors(1, 0.5, 0.3, np.inf, 0.1, 0.1), "invalid", "inf at n = 300"),
    "zero": (with_errors(1, 0.5, 0.3, 0.2, 0.1, 0), "invalid", "0.0 at n = 3000"),
    "negative": (with_errors(-1, 0.5, 0.3, 0.2, 0.1, 0.1), "invalid", "-1.0 at n = 10"),
    "all n equal": (replace(GOOD, n=np.full(6, 50)), "invalid", "one point"),
    "some n equal": (
        replace(GOOD, n=np.array([10, 30, 30, 40, 50, 60])),
        "invalid",
        "10, 30, 30, 40, 50, ...",
    ),
    "mixed stderr": (replace(GOOD, stderr=np.array([0, 0, 0, 0, 0.1, 0.1])), "invalid", "stderr"),
    "no stderr": (replace(GOOD, kind="montecarlo"), "invalid", "two repeats"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused_with_cause_and_remedy(name: str) -> None:
    curve, code, words = REFUSED[name]
    with pytest.raises(FitError) as caught:
        fit_rate(curve)
    fit = fit_rate(curve, raise_on_failure=False)
    for status in (caught.value.fit.status, fit.status):
        assert status.code == code
        assert status.failed
        assert words in status.text
    assert words in str(caught.value)
    assert np.isnan(fit.interval).all()
    assert isinstance(caught.value, ValueError)


def test_refused_fit_carries_what_there_is() -> None:
    fit = fit_rate(REFUSED["two points"][0], raise_on_failure=False)
    assert fit.exponent == pytest.approx(0.5)
    assert fit.window.points == 2
    assert np.isnan(fit_rate(REFUSED["nan"][0], raise_on_failure=False).exponent)
    empty = fit_rate(GOOD, window=(40, 50), raise_on_failure=False)
    assert empty.window.points == 0
    assert empty.status.code == "too_few_points"


def test_points_at_rounding_level_or_lost_in_noise_are_left_out() -> None:
    rms = GOOD.rms * np.array([1, 1, 1, 1, 1e-12, 1e-13])
    fit = fit_rate(replace(GOOD, rms=rms))
    assert fit.exponent == pytest.approx(0.5)
    assert (fit.window.n_min, fit.window.n_max, fit.window.points) == (10, 300, 4)
    assert (
        fit.window.rule
        == "all points, without the 2 whose error is at rounding level (n = 1000, 3000)"
    )
    stderr = GOOD.rms * np.array([0.01, 0.01, 0.9, 0.01, 0.01, 0.01])
    noisy = fit_rate(replace(GOOD, kind="montecarlo", stderr=stderr))
    assert noisy.n.tolist() == [10, 30, 300, 1000, 3000]
    assert (
        noisy.window.rule
        == "all points, without the 1 whose standard error exceeds half the error (n = 100)"
    )
    assert fit_rate(with_errors(1, 0.5, 0.3, 0.2, 0.1, 0), window=(10, 1000)).window.points == 5


@pytest.mark.parametrize("scale", [float("nan"), 0.0])
def test_rounding_level_without_a_limit_to_compare_with(scale: float) -> None:
    rms = GOOD.rms * np.array([1, 1, 1, 1, 1, 1e-13])
    assert fit_rate(replace(GOOD, rms=rms, scale=scale)).window.points == 5


def test_notes_on_repeats() -> None:
    n = ladder(5)
    few = squared_errors(np.random.default_rng(1), 3, n, n**-0.5, dof=20, nested=False)
    fit = fit_rate(montecarlo(n, few))
    assert fit.status.code == "few_repeats"
    assert np.isfinite(fit.interval).all()
    assert np.isnan(fit.p_value)
    half_width = scipy.stats.t.ppf(0.975, 2) * fit.stderr
    assert fit.interval[1] - fit.exponent == pytest.approx(half_width)
    heavy = squared_errors(np.random.default_rng(1), 30, n, n**-0.5, dof=20, nested=False)
    heavy[4, 2] *= 40
    fit = fit_rate(montecarlo(n, heavy))
    assert fit.status.code == "heavy_tail"
    assert f"at n = {n[2]}" in fit.status.text
    single = fit_rate(
        replace(montecarlo(n, few), stderr=np.zeros(5), samples=few.mean(axis=0)[None]),
        raise_on_failure=False,
    )
    assert single.status.code == "invalid"
    same = np.linspace(1, 2, 10)[:, None] * n.astype(float) ** -1
    fit = fit_rate(montecarlo(n, same))
    assert fit.exponent == pytest.approx(0.5)
    assert np.ptp(fit.interval) < 1e-10, "repeats that differ by a factor have no spread of slopes"


def test_same_seed_same_fit_and_order_does_not_matter() -> None:
    n = ladder(7)
    curve = montecarlo(
        n, squared_errors(np.random.default_rng(0), 30, n, n**-0.5, dof=2, nested=True)
    )
    first = fit_rate(curve, seed=3)
    assert fit_rate(curve, seed=3).interval == first.interval
    assert fit_rate(curve, seed=4).interval != first.interval
    mixed = np.random.default_rng(1).permutation(7)
    assert curve.samples is not None
    shuffled = ErrorCurve(
        n=n[mixed],
        rms=curve.rms[mixed],
        kind="montecarlo",
        stderr=curve.stderr[mixed],
        samples=curve.samples[:, mixed],
    )
    assert fit_rate(shuffled, seed=3).interval == first.interval


def test_unit_of_error_changes_the_constant_only() -> None:
    n = ladder(7)
    samples = squared_errors(np.random.default_rng(0), 30, n, n**-0.5, dof=2, nested=True)
    first, second = fit_rate(montecarlo(n, samples)), fit_rate(montecarlo(n, 1e-8 * samples))
    assert second.exponent == pytest.approx(first.exponent, rel=1e-9)
    assert second.interval == pytest.approx(first.interval, rel=1e-9)
    assert second.constant == pytest.approx(1e-4 * first.constant, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": "all"}, '"auto" or (n_min, n_max)'),
        ({"window": (100,)}, "window"),
        ({"window": (100, float("nan"))}, "window"),
        ({"window": (100, 10)}, "n_min < n_max"),
        ({"window": 7}, "window"),
        ({"level": 1.0}, "between 0 and 1"),
        ({"level": 95}, "between 0 and 1"),
        ({"level": 0}, "level"),
        ({"seed": -1}, "seed"),
        ({"seed": "a"}, "seed"),
    ],
)
def test_bad_arguments(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        fit_rate(GOOD, raise_on_failure=False, **options)
    assert words in str(caught.value)
    assert not isinstance(caught.value, FitError)


def test_samples_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"expected squared errors, \(repeats, 6\)"):
        fit_rate(replace(GOOD, samples=np.ones((3, 5))))


def test_a_fit_reads_as_a_sentence() -> None:
    assert str(fit_rate(GOOD)).startswith(
        "error ~ 1 n^-0.5, interval [0.5, 0.5], 6 points from n = 10 to 3000; exact: "
    )
