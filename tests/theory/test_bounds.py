"""The bounds of [S] as plain functions: against exact errors of finite laws, closed forms, and
their own proofs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from esscher.theory import boursier
from tests.theory.finite_laws import mean_square_error, random_law, softmax_errors


def _corners() -> list[tuple[float, ...]]:
    """One row a random case: coupling sigma^2 tilt^2, n, size of the law, kind of f, seed."""
    rng = np.random.default_rng(11)
    rows = []
    for seed in range(400):
        size = int(rng.integers(2, 4))
        n = int(rng.choice([1, 2, 3, 5, 8, 13, 25]))
        rows.append(
            (
                float(rng.choice([0.0, 0.01, 0.1, 0.4, 1.0, 2.0])),
                n,
                size,
                int(rng.integers(3)),
                seed,
            )
        )
    return rows


def test_every_bound_at_one_query_on_random_finite_laws() -> None:
    """Exact law of the error by enumeration. Lemma C.1 and Corollary C.3 for all delta at once:
    both say t P(error^2 >= t) <= C/n for every t. Lemma C.4 in its mended and sharpened forms, and
    as printed from n = 2 on; Lemma C.7. f is the token, a random function, or 1 on one token and 0
    elsewhere.
    """
    for coupling, n, size, kind, seed in _corners():
        rng = np.random.default_rng(int(seed))
        law = random_law(rng, int(size))
        sigma = law.sigma()
        tilt = math.sqrt(coupling) / sigma
        f = [law.tokens, rng.standard_normal(int(size)), np.eye(int(size))[0]][int(kind)]
        errors, chances = softmax_errors(law.weights, tilt * law.tokens, f[:, None], int(n))
        squares = errors[:, 0] ** 2
        fourth, c_f = float(law.weights @ f**4), float(np.max(np.abs(f / law.tokens)))
        order = np.argsort(-squares)
        weak = float((squares[order] * np.cumsum(chances[order])).max())
        assert weak <= 0.5 * boursier.corollary_c3(n, 0.5, sigma, tilt, fourth)[0]
        second, fourth_power = float(chances @ squares), float(chances @ squares**2)
        assert second <= boursier.lemma_c4_sharpened(n, sigma, tilt, fourth)[0]
        assert second <= boursier.lemma_c4(n, 1, sigma, tilt, fourth, c_f)[0]
        if n >= 2:
            assert second <= boursier.lemma_c4(n, 1, sigma, tilt, fourth, c_f, printed=True)[0]
        token_fourth = float(law.weights @ law.tokens**4)
        assert fourth_power <= boursier.lemma_c7(n, 1, sigma, tilt, fourth, c_f, token_fourth)[0]


def test_second_moments_on_random_finite_laws() -> None:
    """Lemma C.4 with p = 2, f(y) = c y^2."""
    for coupling, n, size, _, seed in _corners()[:150]:
        rng = np.random.default_rng(int(seed))
        law = random_law(rng, int(size))
        sigma, scale = law.sigma(), math.exp(rng.uniform(-6, 6))
        tilt = math.sqrt(coupling) / sigma
        f = scale * law.tokens**2
        errors, chances = softmax_errors(law.weights, tilt * law.tokens, f[:, None], int(n))
        args = (
            1,
            sigma,
            tilt,
            float(law.weights @ f**4),
            scale,
            2,
            float(law.weights @ law.tokens**8),
        )
        second = float(chances @ errors[:, 0] ** 2)
        assert second <= boursier.lemma_c4(n, *args)[0]
        if n >= 2:
            assert second <= boursier.lemma_c4(n, *args, printed=True)[0]


def test_printed_lemma_c4_fails_at_one_token() -> None:
    """Tokens +1 or -1, U z = 0, f(y) = 1000 y, n = 1: the error is 1000 in every draw, the printed
    bound 2.5e5 < 1e6.

    C_f enters the proof squared (its substitution gives 16^p sigma^{2p} C_f^2) and ln(1) = 0
    removes the first term.
    """
    exact = mean_square_error(
        np.array([[-1.0], [1.0]]),
        np.array([0.5, 0.5]),
        np.zeros(1),
        np.array([[1000.0]]),
        np.array([1]),
    )
    assert exact[0] == pytest.approx(1e6, rel=1e-9)
    args = (1, 1, 1.0, 0.0, 1e12, 1000.0)
    assert boursier.lemma_c4(*args, printed=True)[0] < 0.3e6
    assert boursier.lemma_c4(*args)[0] > 1e6
    numbers = {
        "d": 1,
        "d_query": 1,
        "sigma": 1.0,
        "u_norm": 0.0,
        "fourth": 1e12,
        "c_f": 1000.0,
        "limit4": 0.0,
    }
    assert boursier.equation_16(1, boursier.Numbers(**numbers))[0] > 1e6
    assert boursier.equation_17(1, 1e12)[0] > 1e6


def test_thresholds() -> None:
    """The printed thresholds allow more delta than the printed proofs do."""
    for sigma, proof in ((2.0, 1.0 / 4.0), (1.0, 1.0)):
        printed = boursier.lemma_c1_threshold(100, sigma, 0.7, printed=True)[0]
        assert printed == pytest.approx(math.exp(-100 / 8 * math.exp(-2 * 0.7**2)))
        mended = boursier.lemma_c1_threshold(100, sigma, 0.7)[0]
        assert mended == pytest.approx(math.exp(-100 / 8 * math.exp(-2 * 0.7**2 / proof)))
        assert mended >= printed
    n = np.arange(1, 100)
    gap = boursier.corollary_c3_threshold(n, 1.0, 0.0, printed=True) < (
        boursier.corollary_c3_threshold(n, 1.0, 0.0)
    )
    assert (n[gap].min(), n[gap].max()) == (6, 34)


def test_lemma_c1_for_every_delta_step_by_step() -> None:
    """The three inequalities of the proof that needs no threshold, m = n exp(-2 sigma^2 tilt^2).

    delta >= e^{-m/8}: (1 + 16/27) delta; e^{-m/8}/3.4 <= delta: (3.4 + 16/27) delta; below: fourth
    moments.
    """
    assert 3.4 + 16 / 27 < 4
    m = np.geomspace(1e-3, 1e4, 200_001)
    delta = np.exp(-m / 8) / 3.4
    assert np.all(delta * m < 13.5)
    assert float((delta * m**3 / (13.5 - delta * m) ** 2).max()) < 1.3


def test_sharpened_constant() -> None:
    """4/a^2 + max_m 2 m^{3/2} exp(-(1-a)^2 m/4) + max_m 2 m exp(-(1-a)^2 m/2) at a = 2/5 stays
    below 60.
    """
    m = np.geomspace(1e-3, 1e4, 200_001)
    first = float((2 * m**1.5 * np.exp(-0.36 * m / 4)).max())
    second = float((2 * m * np.exp(-0.36 * m / 2)).max())
    assert 4 / 0.16 + first + second < boursier.SHARPENED


def test_lemma_c7_absorbs_the_term_its_proof_drops() -> None:
    """(8 e^{4x} - n)_+ F^2 is at most the slack of the second term over its integral, 16^3 sigma^4
    n c_f^4 e^{2d}.

    F^2 = E|f|^4 <= 11.1 d^2 sigma^4 c_f^4 for every sub-Gaussian law; sigma = c_f = 1.
    """
    rng = np.random.default_rng(3)
    for _ in range(4000):
        d = int(rng.integers(1, 4))
        x = float(rng.uniform(0, 6))
        n = max(1, int(8 * math.exp(4 * x) * rng.uniform() ** rng.integers(1, 30)))
        fourth = 11.1 * d**2 * math.exp(-rng.uniform(0, 30))
        dropped = max(8 * math.exp(4 * x) - n, 0.0) * fourth
        power = (math.exp(2 * x) - math.sqrt(n / 8)) * math.sqrt(fourth) / 16
        slack = 16**3 * n * math.exp(2 * d) * math.expm1(min(power, 600.0))
        assert dropped <= slack * (1 + 1e-12)


@pytest.mark.parametrize("d", [1, 2, 5, 20])
def test_lemma_d2_on_gaussian_tokens(d: int) -> None:
    """Tail and largest norm of N(0, sigma^2 I): chi-square survival, and E max by integration of
    its law.
    """
    sigma = 1.7
    t = np.linspace(0, 40 * sigma, 500)
    assert np.all(stats.chi2.sf((t / sigma) ** 2, d) <= boursier.lemma_d2_tail(t, d, sigma))
    for p in (2, 4, 8):
        for n in (1, 2, 100, 10**6):
            survival = lambda u, n=n, p=p: -np.expm1(n * stats.chi2.logcdf(u ** (2 / p), d))  # noqa: E731
            exact = sigma**p * integrate.quad(survival, 0, (60 + 10 * d) ** (p / 2), limit=2000)[0]
            assert exact <= boursier.lemma_d2_maximum_moment(n, d, p, sigma)[0]


def test_lemma_d2_constant() -> None:
    """C_p = 64^{p/2} (1 + (p/2) c_p), c_p = sup over x >= 4 of Gamma(p/2, x) e^x x^{-p/2}, by
    scipy.
    """
    for p in (2, 4, 8):
        x = np.linspace(4, 60, 2001)
        c_p = float(
            (special.gammaincc(p / 2, x) * special.gamma(p / 2) * np.exp(x) * x ** (-p / 2)).max()
        )
        expected = 64 ** (p / 2) * (1 + p / 2 * c_p)
        assert boursier.lemma_d2_maximum_moment(1, 1, p)[0] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="even"):
        boursier.lemma_d2_maximum_moment(1, 1, 3)


def test_lemma_d1_on_closed_limits() -> None:
    """Gaussian tokens: E|V Sigma U z|^4 = (sigma^2 v u)^4 d (d+2); Rademacher tokens: tanh,
    integrated.
    """
    for d in (1, 2, 7):
        exact = 1.3**2 * 0.7 * 2.1 * (d * (d + 2)) ** 0.25
        assert exact <= boursier.lemma_d1(d, 1.3, 0.7, 2.1)
    for u in (0.01, 0.5, 3.0, 40.0):
        cut = 12.0
        fourth = integrate.quad(
            lambda z, u=u: math.tanh(u * z) ** 4 * stats.norm.pdf(z), -cut, cut
        )[0]
        assert fourth**0.25 <= boursier.lemma_d1(1, 1.0, 1.0, u)


def test_overflow_is_infinite_and_input_is_checked() -> None:
    """Numbers too large for float64 give an infinite bound, never NaN."""
    for value in (
        boursier.lemma_c4([1, 10**12], 3, 5.0, 50.0, 2.0, 1.0),
        boursier.lemma_c7([1, 10**12], 3, 5.0, 50.0, 2.0, 1.0, 2.0),
        boursier.lemma_c1([1, 10**12], 0.1, 5.0, 50.0, 2.0),
    ):
        assert np.all(np.isposinf(value))
    with pytest.raises(ValueError, match="p: expected 1 or 2"):
        boursier.lemma_c4(5, 1, 1.0, 0.1, 1.0, 1.0, 3)
    assert boursier.lemma_c4(5, 1, 1.0, 0.1, 0.0, 0.0)[0] == 0.0  # f = 0
    with pytest.raises(ValueError, match="delta"):
        boursier.lemma_c1(5, 1.5, 1.0, 0.1, 1.0)


def test_sharpened_average_takes_the_best_split() -> None:
    """No other split of the queries does better, and the slope tends to the stated exponent."""
    numbers = {
        "d": 2,
        "d_query": 2,
        "sigma": 1.2,
        "u_norm": 0.3,
        "fourth": 5.0,
        "c_f": 0.8,
        "limit4": 0.4,
    }
    n = np.array([1, 2, 50, 10**4, 10**9])
    best = boursier.equation_16_sharpened(n, boursier.Numbers(**numbers))
    coupling = (1.2 * 0.3) ** 2
    spread = 0.8**2 * np.sqrt(2 * boursier.lemma_d2_maximum_moment(n, 2, 4, 1.2)) + math.sqrt(0.8)
    for square in np.linspace(0, 400, 4001):
        split = 60 * math.exp(min(4 * coupling * square, 700)) * math.sqrt(
            5.0
        ) / n + 2 * spread * math.exp(2 - square / 32)
        assert np.all(best <= split * (1 + 1e-4))
    # c_f = 0 leaves out the ln n of the largest token
    far = boursier.equation_16_sharpened(
        [10**13, 10**15], boursier.Numbers(**(numbers | {"c_f": 0.0}))
    )
    slope = -math.log(far[1] / far[0]) / math.log(100) / 2
    assert slope == pytest.approx(boursier.sharpened_exponent(1.2, 0.3), abs=0.003)
    assert boursier.sharpened_exponent(1.0, 0.5) > boursier.proposition_31_exponent(1.0, 0.5)
