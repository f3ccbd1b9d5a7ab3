"""Exact mean of hardmax self-attention in one dimension: closed forms, brute-force integrals,
simulation, asymptote.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import esscher as es
from esscher.theory import bohbot
from esscher.theory.bohbot import hardmax_mean_abs, hardmax_mean_abs_asymptotic

ROOT = math.sqrt(2 / math.pi)


def test_one_and_two_tokens_have_closed_forms() -> None:
    """n = 1: E|g|. n = 2: half of the draws have one sign; E max of two half-normals is
    2/sqrt(pi).
    """
    assert float(hardmax_mean_abs(1, 1.7)) == pytest.approx(1.7 * ROOT, rel=1e-12)
    assert float(hardmax_mean_abs(1, positive=False)) == pytest.approx(ROOT, rel=1e-12)
    assert float(hardmax_mean_abs(2)) == pytest.approx(2 / math.sqrt(math.pi) - ROOT / 2, rel=1e-12)
    assert float(hardmax_mean_abs(2, positive=False)) == pytest.approx(ROOT / 2, rel=1e-12)


@pytest.mark.parametrize("positive", [True, False])
def test_three_tokens_against_a_triple_integral(positive: bool) -> None:
    """All sign patterns of three tokens, the two equal-sign tokens integrated one inside the
    other.
    """

    def density(t: float) -> float:
        return 2 * math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

    def mixed(own: float, other: float) -> float:
        """E|own M_2 - other X|, M_2 the larger of two half-normals and X one more."""

        def inner(m: float) -> float:
            weight = 2 * density(m) * math.erf(m / math.sqrt(2))
            kink = own * m / other
            gap = lambda x: abs(own * m - other * x) * density(x)  # noqa: E731
            return weight * (
                integrate.quad(gap, 0, kink)[0] + integrate.quad(gap, kink, kink + 40)[0]
            )

        return integrate.quad(inner, 0, 12, epsabs=1e-11)[0]

    if positive:
        edge = integrate.quad(lambda t: 1 - (2 * stats.norm.cdf(t) - 1) ** 3, 0, 12, epsabs=1e-12)[
            0
        ]
    else:
        edge = integrate.quad(lambda t: (2 * stats.norm.sf(t)) ** 3, 0, 12, epsabs=1e-12)[0]
    shares = (2 / 3, 1 / 3) if positive else (1 / 3, 2 / 3)
    expected = edge / 4 + 3 / 4 * mixed(*shares)
    assert float(hardmax_mean_abs(3, positive=positive)) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_against_hardmax_attention(sign: float, generator: torch.Generator) -> None:
    """Self-attention by ``attend_hardmax``, 1200 prompts of 7 tokens; false alarm rate 6e-5 (four
    standard errors).
    """
    sigma, n, repeats = 1.3, 7, 1200
    means = []
    for _ in range(repeats):
        y = sigma * torch.randn(n, 1, dtype=torch.float64, generator=generator)
        means.append(float(es.attend_hardmax(sign * y, y, y).mean().abs()))
    error = np.std(means) / math.sqrt(repeats)
    assert abs(np.mean(means) - float(hardmax_mean_abs(n, sigma, positive=sign > 0))) < 4 * error


@pytest.mark.parametrize("n", [12, 10**4, 10**12])
@pytest.mark.parametrize("positive", [True, False])
def test_against_sampled_order_statistics(n: int, positive: bool) -> None:
    """Largest of k half-normals by inversion, so any n can be simulated; false alarm rate 6e-5 a
    case.
    """
    rng = np.random.default_rng(5)
    k = rng.binomial(n, 0.5, size=100_000)
    k = k[(k > 0) & (k < n)]
    top, bottom = (
        stats.norm.isf(-np.expm1(np.log(rng.random(k.size)) / m) / 2) for m in (k, n - k)
    )
    share = k / n if positive else 1 - k / n
    sizes = np.abs(share * top - (1 - share) * bottom)
    # both one-sided patterns of 12 tokens, at most 2^-11 E max
    edge = 2.0**-11 * 1.6 if n == 12 else 0.0
    expected = float(hardmax_mean_abs(n, positive=positive))
    assert abs(sizes.mean() - expected) < 4 * sizes.std() / math.sqrt(k.size) + edge


def test_grid_of_splits_agrees_with_the_full_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    thinned = hardmax_mean_abs([1001, 2501])
    monkeypatch.setattr(bohbot, "EVERY_SPLIT", 2600)
    np.testing.assert_allclose(thinned, hardmax_mean_abs([1001, 2501]), rtol=1e-11)


def test_asymptote() -> None:
    """[B] Proposition 5.1: the ratio tends to 1, slowly; 2 % off at 1e12, and the sign of A no
    longer matters there.
    """
    n = [10**4, 10**6, 10**9, 10**12, 10**15]
    ratio = hardmax_mean_abs(n) / hardmax_mean_abs_asymptotic(n)
    assert np.all(np.diff(ratio) < 0)
    assert 1.0 < ratio[-2] < 1.02
    np.testing.assert_allclose(
        hardmax_mean_abs(n, positive=False)[3:], hardmax_mean_abs(n)[3:], rtol=1e-9
    )
    assert np.isinf(hardmax_mean_abs_asymptotic(1))


def test_scales_with_sigma_and_keeps_shapes() -> None:
    assert hardmax_mean_abs(5).shape == ()
    np.testing.assert_allclose(
        hardmax_mean_abs([5, 50], 2.5), 2.5 * hardmax_mean_abs([5, 50]), rtol=1e-14
    )
    with pytest.raises(ValueError, match="sigma"):
        hardmax_mean_abs(3, -1.0)
