"""Each bound of [S] written out a second time: by the integral its proof bounds, and in mpmath from
the page.
"""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate

from esscher.theory import boursier

CASES = [
    # n, d, sigma, tilt, fourth, c_f, eighth
    (40, 2, 1.3, 0.4, 7.0, 1.7, 900.0),
    (3, 1, 0.6, 0.2, 0.4, 0.3, 0.2),
    (2000, 5, 1.0, 0.8, 30.0, 2.5, 4000.0),
]


@pytest.mark.parametrize("case", CASES)
def test_second_term_of_lemma_c4_is_the_integral_of_its_proof(case: tuple[float, ...]) -> None:
    """2 n e^{2d} int_T^inf exp(-t^{1/p} / (16 sigma^2 c_f^{2/p})) dt, T = (n/2 - exp(2 sigma^2
    tilt^2))_+ sqrt(fourth).

    p = 1: the mended second term equals it where T > 0, so c_f enters squared. p = 2: it lies
    above.
    """
    n, d, sigma, tilt, fourth, c_f, eighth = case
    x = (sigma * tilt) ** 2
    start = max(n / 2 - math.exp(2 * x), 0.0) * math.sqrt(fourth)
    first = boursier.corollary_c3(n, 0.5, sigma, tilt, fourth)[0] * math.log(n)
    for p in (1, 2):
        width = 16 * sigma**2 * c_f ** (2 / p)
        tail = lambda u, width=width, p=p: p * u ** (p - 1) * math.exp(-u / width)  # noqa: E731
        low = start ** (1 / p)
        integral = 2 * n * math.exp(2 * d) * integrate.quad(tail, low, low + 60 * width)[0]
        extra = {"p": 2, "eighth": max(eighth, fourth**2 / c_f**8)} if p == 2 else {}
        mended = boursier.lemma_c4(int(n), int(d), sigma, tilt, fourth, c_f, **extra)[0] - first
        if p == 1 and start > 0:
            assert mended == pytest.approx(integral, rel=1e-6)
        else:
            assert mended >= integral * (1 - 1e-9)


def _mp(*numbers: float) -> list[mp.mpf]:
    return [mp.mpf(number) for number in numbers]


@pytest.mark.parametrize("case", CASES)
def test_one_query_from_the_page(case: tuple[float, ...]) -> None:
    """Lemmas C.1, C.4 (printed, both p), C.7 and Corollary C.3 in 50 digits."""
    with mp.workdps(50):
        n, d, sigma, tilt, fourth, c_f, eighth = _mp(*case)
        plain = (int(case[0]), int(case[1]), *case[2:6])
        g = (sigma * tilt) ** 2
        C = 108 * mp.exp(4 * g) * mp.sqrt(fourth)
        delta = mp.mpf("0.03")
        beta = mp.exp(2 * g) * mp.root(fourth, 4) * mp.sqrt(1 / (delta * n))
        rest = plain[2:5]
        assert boursier.lemma_c1(plain[0], 0.03, *rest)[0] == pytest.approx(
            float(27 * beta**2), rel=1e-12
        )
        assert boursier.corollary_c3(plain[0], 0.03, *rest)[0] == pytest.approx(
            float(C / (delta * n)), rel=1e-12
        )
        assert boursier.lemma_c1(plain[0], 0.03 / 4, *rest)[0] == pytest.approx(
            boursier.corollary_c3(plain[0], 0.03, *rest)[0]
        )
        low = 1 - mp.exp(g) * mp.sqrt(2 * mp.log(1 / delta) / n)
        high = mp.exp(g) * mp.sqrt(3 / (delta * n))
        found = boursier.denominator_below(plain[0], 0.03, *rest[:2])[0]
        assert found == pytest.approx(max(float(low), 0.0), rel=1e-12)
        found = boursier.denominator_above(plain[0], 0.03, *rest[:2], printed=True)[0]
        assert found == pytest.approx(float(1 + high), rel=1e-12)
        if low > 0:
            own = max(high, (1 - low) / low) * 2 + mp.sqrt(3) * beta / low
            found = boursier.equation_14(plain[0], 0.03, *rest, 2.0)[0]
            assert found == pytest.approx(float(own), rel=1e-12)
        for p in (1, 2):
            factor = 1 + (mp.sqrt(n) / (22 * sigma**2) * mp.root(eighth, 4) if p == 2 else 0)
            inner = (mp.root(n, p) / mp.root(2, p) - mp.exp(mp.mpf(2) / p * g)) * fourth ** (
                mp.mpf(1) / (2 * p)
            )
            body = 2 * 16**p * sigma ** (2 * p) * n * p * mp.exp(2 * d) * factor
            body *= mp.exp(-inner / (16 * sigma**2 * c_f ** (mp.mpf(2) / p)))
            extra = {"p": p, "eighth": case[6]}
            printed, mended = (
                2 * C * mp.log(n) / n + c_f * body,
                2 * C * mp.log(n) / n + c_f**2 * body,
            )
            assert boursier.lemma_c4(*plain, **extra, printed=True)[0] == pytest.approx(
                float(printed), rel=1e-11
            )
            assert boursier.lemma_c4(*plain, **extra)[0] == pytest.approx(float(mended), rel=1e-11)
        token = mp.mpf(11)
        second = (
            16**3
            * sigma**4
            * n
            * c_f**4
            * mp.exp(2 * d)
            * (1 + mp.sqrt(n * token) / (32 * mp.sqrt(2) * sigma**2))
        )
        second *= mp.exp(
            -(mp.sqrt(n) / (2 * mp.sqrt(2)) - mp.exp(2 * g))
            * mp.sqrt(fourth)
            / (16 * sigma**2 * c_f**2)
        )
        expected = 2 * C * mp.sqrt(fourth) / mp.sqrt(n) + second
        assert boursier.lemma_c7(*plain, 11.0)[0] == pytest.approx(float(expected), rel=1e-11)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_averages_from_the_page(case: tuple[float, ...], p: int) -> None:
    """Equations (16) to (19) in 50 digits, with B^2 = ln n / (6 sigma^2 u^2) and 12 in place
    of 6.
    """
    u, limit4, limit8, g2, g4, g8, token = 0.35, 2.0, 9.0, 1.5, 3.0, 20.0, 11.0
    with mp.workdps(50):
        n, d, sigma, _, fourth, c_f, eighth = _mp(*case)
        dq = d + 1
        first = 216 * mp.sqrt(fourth) * g2 * mp.log(n) / mp.cbrt(n)
        factor = 1 + (mp.sqrt(n) / (22 * sigma**2) * mp.root(eighth, 4) if p == 2 else 0)
        inner = (mp.root(n, p) / mp.root(2, p) - n ** (mp.mpf(1) / (3 * p))) * fourth ** (
            mp.mpf(1) / (2 * p)
        )
        second = 2 * 16**p * sigma ** (2 * p) * n * p * mp.exp(2 * d) * factor * g2
        second *= mp.exp(-inner / (16 * sigma**2 * c_f ** (mp.mpf(2) / p)))

        def constant(order: int) -> mp.mpf:
            half = order // 2
            return mp.mpf(64) ** half * (
                1 + half * mp.gammainc(half, 4) * mp.exp(4) / mp.mpf(4) ** half
            )

        spread = sigma ** (2 * p) * mp.sqrt(
            2 * g4 * c_f**4 * constant(4 * p) * (d ** (2 * p) + mp.log(n) ** (2 * p))
        )
        B2 = mp.log(n) / (6 * sigma**2 * mp.mpf(u) ** 2)
        third = 2 * (spread + mp.sqrt(2 * mp.mpf(limit4))) * mp.exp(dq - B2 / 32)
        numbers = {
            "d": int(case[1]), "d_query": int(case[1]) + 1, "sigma": case[2],
            "u_norm": u, "fourth": case[4], "c_f": case[5],
        }  # fmt: skip
        extra = {"limit4": limit4, "p": p, "eighth": case[6], "g2": g2, "g4": g4}
        found = boursier.equation_16(int(case[0]), boursier.Numbers(**numbers, **extra))[0]
        assert found == pytest.approx(float(first + c_f**2 * second + third), rel=1e-11)
        assert boursier.equation_17(int(case[0]), case[4], g2)[0] == pytest.approx(
            float(first), rel=1e-12
        )

        first4 = 216 * fourth * g4 / n ** (mp.mpf(1) / 6)
        second4 = 16**3 * sigma**4 * n * c_f**4 * mp.exp(2 * d) * g4
        second4 *= 1 + mp.sqrt(n * mp.mpf(token)) / (32 * mp.sqrt(2) * sigma**2)
        inner4 = (mp.sqrt(n) / (2 * mp.sqrt(2)) - n ** (mp.mpf(1) / 6)) * mp.sqrt(fourth)
        second4 *= mp.exp(-inner4 / (16 * sigma**2 * c_f**2))
        spread4 = sigma**4 * mp.sqrt(2 * g8 * c_f**8 * constant(8) * (d**4 + mp.log(n) ** 4))
        third4 = 8 * (spread4 + mp.sqrt(2 * mp.mpf(limit8))) * mp.exp(dq - B2 / 2 / 32)
        extra = {"token_fourth": token, "limit8": limit8, "g4": g4, "g8": g8}
        found = boursier.equation_18(int(case[0]), boursier.Numbers(**numbers, **extra))[0]
        assert found == pytest.approx(float(first4 + second4 + third4), rel=1e-11)
        assert boursier.equation_19(int(case[0]), case[4], g4)[0] == pytest.approx(
            float(first4), rel=1e-12
        )


def test_small_formulas_from_the_page() -> None:
    """Lemma D.1, Lemma D.2 part 1, the exponents, (21) and the sharpened Lemma C.4."""
    assert boursier.lemma_d1(4, 1.5, 2.0, 3.0) == pytest.approx(4 * 2.25 * 6 * 2)
    assert boursier.lemma_d2_tail(9.0, 3, 1.5) == pytest.approx(math.exp(6 - 36 / 16))
    assert boursier.proposition_31_exponent(1.0, 0.01) == pytest.approx(1 / 6)
    assert boursier.proposition_31_exponent(2.0, 1.0) == pytest.approx(1 / (2 * 192 * 4))
    assert boursier.sharpened_exponent(2.0, 0.5) == pytest.approx(1 / 258)
    assert boursier.lemma_c4_sharpened(10, 2.0, 0.5, 16.0)[0] == pytest.approx(6 * math.e**4 * 4)
    found = boursier.gradient_u_bound(np.array([5.0]), 2.0, np.array([0.5]), 3.0, np.array([0.1]))
    assert found[0] == pytest.approx(10 + 4 * math.sqrt(8 * 2.5 * 0.1) + 4 * math.sqrt(1.5))
