"""f1 and f2 against their definitions: mpmath at 25 digits, simulation, exact cases, limits, and
their slopes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mpmath as mp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BarycentricInterpolator

from esscher.errors.gaussian import (
    COLUMNS,
    S_MAX,
    gaussian_error,
    gaussian_error_slopes,
    integrate_pairs,
)

Floats = npt.NDArray[np.float64]
ACCURACY = 1e-12  # promised, relative


def laplace_reference(counts: list[int], s: float) -> dict[int, tuple[float, float]]:
    """f1 and f2 for each n from 1/S^2 = int t exp(-tS) dt as it stands, expectations over a grid of
    g, 25 digits.

    f2 = n int t E[e^2 exp(-te)] phi^(n-1) dt, f1 = n int t E[e^2 (g-s)^2 exp(-te)] phi^(n-1) dt +
    n(n-1) int t E[e (g-s) exp(-te)]^2 phi^(n-2) dt, without Stein's lemma, integration by parts or
    any cut-off that the code under test makes. The spacing of log(t e) is at most 1/5 and g runs
    over [-14, 14]; t = exp(tau) with tau on every ``stride``-th point of the same grid.
    """
    with mp.workdps(25):
        unit = min(mp.mpf(1) / 5, s * mp.mpf(2) / 5)
        stride = max(1, round(0.2 * max(1, s / 9) / unit))
        half = int(14 * s / unit)
        g = [j * unit / s for j in range(-half, half + 1)]
        weight = [mp.npdf(x) * unit / s for x in g]
        weight_1 = [w * (x - s) for w, x in zip(weight, g, strict=True)]
        weight_2 = [w * (x - s) ** 2 for w, x in zip(weight, g, strict=True)]
        freezing = math.sqrt(2 * math.log(max(counts)))
        low = (
            -math.log(max(counts)) - s * s / 2 - 40
            if s < freezing
            else -s * math.sqrt(freezing**2 + 90) - 10
        )
        tau = range(int(low / unit) // stride, int((10 * s + 5) / unit) // stride + 1)
        first, last = tau[0] * stride - half, tau[-1] * stride + half
        # beyond, exp(-y) is below 1e-60
        y = [mp.exp(k * unit) for k in range(first, min(last, int(5 / unit)) + 1)]
        kept = [mp.exp(-v) for v in y]
        lost = [-mp.expm1(-v) for v in y] + [mp.mpf(1)] * (last - first + 1 - len(y))
        kept_1 = [v * k for v, k in zip(y, kept, strict=True)]
        kept_2 = [v * k for v, k in zip(y, kept_1, strict=True)]
        sums = {n: [mp.mpf(0), mp.mpf(0)] for n in counts}
        for i in tau:
            part = slice(i * stride - half - first, i * stride + half + 1 - first)
            missing, phi = fdot(weight, lost[part]), fdot(weight, kept[part])
            log_phi = mp.log1p(-missing) if missing < 0.5 else mp.log(phi)
            across, along = fdot(weight, kept_2[part]), fdot(weight_2, kept_2[part])
            pair = fdot(weight_1, kept_1[part]) ** 2
            for n in counts:
                power = mp.exp((n - 2) * log_phi)
                sums[n][0] += n * power * (along * phi + (n - 1) * pair)
                sums[n][1] += n * power * across * phi
        return {
            n: (float(f1 * unit * stride), float(f2 * unit * stride))
            for n, (f1, f2) in sums.items()
        }


def fdot(weight: list[mp.mpf], values: list[mp.mpf]) -> mp.mpf:
    return mp.fdot(zip(weight, values, strict=False))


def pair_reference(s: float) -> tuple[float, float]:
    """Two tokens: p_1 = 1/(1 + exp(-sd)), d = g_1 - g_2 ~ N(0, 2), and the mean of g_1, g_2 is
    independent of d.

    sum_j p_j (g_j - s) = mean + (p_1 - 1/2) d - s: f1 = 1/2 + E ((p_1 - 1/2) d - s)^2 and f2 = E
    p_1^2 + (1 - p_1)^2.
    """

    def expect(function: Callable[[mp.mpf], mp.mpf]) -> float:
        ends = [-20, -4, -1, *(x / (1 + s) for x in (-3, 0, 3)), 1, 4, 20]
        return float(mp.quad(lambda d: function(d) * mp.npdf(d, 0, mp.sqrt(2)), sorted(set(ends))))

    def p(d: mp.mpf) -> mp.mpf:
        return 1 / (1 + mp.exp(-s * d))

    with mp.workdps(25):
        f1 = expect(lambda d: ((p(d) - 0.5) * d - s) ** 2)
        return 0.5 + f1, expect(lambda d: p(d) ** 2 + p(-d) ** 2)


def check_against(counts: list[int], s: float) -> float:
    """The largest relative error over f1 and f2 at these n."""
    expected = np.array(list(laplace_reference(counts, s).values())).T
    return float(np.abs(np.stack(gaussian_error(counts, s)) / expected - 1).max())


@pytest.mark.parametrize(
    ("s", "counts"),
    [
        (0.05, [3, 10**15]),
        (0.3, [1, 2, 10**6, 10**15]),
        (0.5, [1, 3, 100, 10**15]),
        (1.0, [1, 2, 5, 100, 10**4, 10**9, 10**15]),
        (2.2, [1, 3, 10, 100, 10**12]),
        (4.0, [1000, 10**8, 10**15]),
        (8.3, [10**15]),
    ],
)
def test_agrees_with_laplace_integrals_at_25_digits(s: float, counts: list[int]) -> None:
    assert check_against(counts, s) < ACCURACY


@pytest.mark.slow
@pytest.mark.parametrize(
    "s",
    [0.002, 0.1, 0.499, 0.8, 1.3, 1.8, 2.7, 3.5, 5.0, 6.0, 7.0, 8.3, 9.5, 12.0, 18.0, 27.0, 40.0],
)
def test_agrees_with_laplace_integrals_on_a_large_grid(s: float) -> None:
    counts = [1, 2, 3, 4, 7, 10, 31, 100, 1000, *(10**k for k in range(4, 16))]
    frozen = [round(math.exp(min((s * c) ** 2 / 2, 34))) for c in (0.7, 1.0, 1.4)]
    assert check_against(sorted({*counts, *frozen}), s) < ACCURACY


@pytest.mark.parametrize("s", [0.0, 1e-3, 0.2, 0.5, 1.0, 3.0, 9.0, 40.0, S_MAX])
def test_two_tokens_against_one_dimensional_integral(s: float) -> None:
    np.testing.assert_allclose(gaussian_error(2, s), pair_reference(s), rtol=ACCURACY)


def test_known_digits() -> None:
    f1, f2 = gaussian_error([100, 1000, 10**12], [1.0, 4.0, 4.0])
    np.testing.assert_allclose(f1, [0.0465884, 1.39157, 8.72e-5], rtol=1e-3)
    np.testing.assert_allclose(f2, [0.0255385, 0.273831, 6.50e-6], rtol=1e-3)


@pytest.mark.parametrize(
    ("n", "s", "repeats"), [(3, 1.0, 400_000), (50, 2.0, 100_000), (1000, 4.0, 10_000)]
)
def test_agrees_with_simulation(n: int, s: float, repeats: int) -> None:
    """Within 5 standard errors; six comparisons with a fixed seed, false alarms about 4e-6."""
    generator = np.random.default_rng(20_11)
    g = generator.standard_normal((repeats, n))
    p = np.exp(s * (g - g.max(axis=1, keepdims=True)))
    p /= p.sum(axis=1, keepdims=True)
    for exact, sample in zip(
        gaussian_error(n, s), (((p * (g - s)).sum(1)) ** 2, (p**2).sum(1)), strict=True
    ):
        assert abs(sample.mean() - exact) < 5 * sample.std() / math.sqrt(repeats)


@given(s=st.floats(0, S_MAX))
def test_one_token(s: float) -> None:
    f1, f2 = gaussian_error(1, s)
    assert f1 == pytest.approx(1 + s * s, rel=ACCURACY)
    assert f2 == pytest.approx(1, rel=ACCURACY)


@given(n=st.integers(1, 2**53))
def test_flat_scores_weigh_tokens_equally(n: int) -> None:
    assert gaussian_error(n, 0.0) == pytest.approx((1 / n, 1 / n), rel=ACCURACY)


@pytest.mark.parametrize("s", [0.1, 0.5, 1.0, 2.0])
def test_many_tokens_reach_the_delta_method(s: float) -> None:
    """n f2 -> exp(s^2) and n f1 -> (1 + s^2) exp(s^2); the next term is smaller by about exp(6
    s^2)/n.
    """
    n = 10**15
    f1, f2 = gaussian_error(n, s)
    tolerance = 100 * math.exp(6 * s * s) / n + ACCURACY
    assert n * f2 == pytest.approx(math.exp(s * s), rel=tolerance)
    assert n * f1 == pytest.approx((1 + s * s) * math.exp(s * s), rel=tolerance)


any_count = st.one_of(st.integers(1, 100), st.floats(0, 53).map(lambda bits: int(2**bits)))


@settings(max_examples=200)
@given(n=any_count, s=st.floats(0, S_MAX))
def test_ranges(n: int, s: float) -> None:
    """1/n <= sum p^2 <= 1; f1 is at least the squared mean (s f2)^2."""
    value = gaussian_error_slopes(n, s)
    assert 1 / n <= value.f2 <= 1
    assert value.f1 >= (s * value.f2) ** 2 * (1 - ACCURACY)


@given(n=st.integers(2, 10**15), s=st.floats(0, 39), more=st.floats(0.01, 1))
def test_sharper_scores_concentrate_the_weights(n: int, s: float, more: float) -> None:
    _, f2 = gaussian_error(n, np.array([s, s + more]))
    assert f2[0] <= f2[1] * (1 + 1e-13)


def slope(function: Callable[[Floats], Floats], x: float, low: float, high: float) -> Floats:
    """Derivative at x of the polynomial through 12 Chebyshev points of [low, high]."""
    nodes = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(12) + 0.5) / 12)
    return np.asarray(BarycentricInterpolator(nodes, function(nodes)).derivative(x))


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 10**9, 10**15])
@pytest.mark.parametrize("s", [0.0, 0.3, 0.5, 1.0, 4.0, 8.3, 20.0, 40.0])
def test_slopes_in_log_n(n: int, s: float) -> None:
    """The quadrature takes real n, of which the public functions pass on whole ones."""

    def real_n(log_n: Floats) -> Floats:
        out = np.empty((log_n.size, COLUMNS))
        integrate_pairs(np.exp(log_n), np.full(log_n.size, s), out)
        return out[:, :2]

    value = gaussian_error_slopes(n, s)
    expected = slope(real_n, math.log(n), max(0.0, math.log(n) - 0.2), math.log(n) + 0.2)
    error = np.array([value.df1_dlogn, value.df2_dlogn]) - expected
    assert np.all(np.abs(error) < 1e-9 * np.abs([value.f1, value.f2]))


def test_numbers_arrays_and_tensors() -> None:
    assert isinstance(gaussian_error(5, 1)[0], np.float64)
    f1, f2 = gaussian_error([[2], [3], [5]], np.linspace(0, 2, 7))
    assert f1.shape == f2.shape == (3, 7)
    assert f1.dtype == np.float64
    assert f1[1, 4] == gaussian_error(3, np.linspace(0, 2, 7)[4])[0]
    tensors = gaussian_error(
        torch.tensor([[2], [3], [5]]), torch.linspace(0, 2, 7, dtype=torch.float64)
    )
    np.testing.assert_allclose(tensors[0], f1, rtol=1e-13)
    assert gaussian_error(5, np.zeros((0, 3)))[0].shape == (0, 3)


def test_threads_and_order_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs one by one, in one thread, in three, and from callers in four threads: the same
    bits.
    """
    generator = np.random.default_rng(0)
    n = np.floor(10 ** generator.uniform(0, 15, 211))
    s = np.round(generator.uniform(0, 12, 211), 1)  # some coincide
    alone = np.array([gaussian_error(a, b) for a, b in zip(n, s, strict=True)]).T
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        np.testing.assert_array_equal(np.stack(gaussian_error(n, s)), alone)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: np.stack(gaussian_error(n, s)), range(8)):
            np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("n", [0, -3, 1.5, math.nan, math.inf, 2**60, "many", None, [], [3, 0]])
def test_bad_n(n: object) -> None:
    with pytest.raises(ValueError, match="n: expected"):
        gaussian_error(n, 1.0)


@pytest.mark.parametrize("s", [-1e-9, math.nan, math.inf, S_MAX + 0.1, "wide", [1.0, -2.0]])
def test_bad_s(s: object) -> None:
    with pytest.raises(ValueError, match="s: expected"):
        gaussian_error(10, s)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) and arg 1 with shape \(5,\)"):
        gaussian_error([1, 2, 3], [0.1] * 5)
