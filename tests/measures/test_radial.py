"""Sphere and ball functions against mpmath: d from 1 to 8192, r from 0 to 1e12."""

from __future__ import annotations

import mpmath
import pytest
import torch

import esscher as es
from esscher.measures.radial import radial

DIMS = [1, 2, 3, 5, 50, 61, 384, 768, 8192]
RADII = [0.0, 1e-12, 1e-5, 0.3, 1.0, 7.0, 50.0, 1e3, 1e5, 1e9, 1e12]


def reference(v: mpmath.mpf, r: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
    """K, B / r and B' with 60 digits: power series and continued fraction for small r, see
    ``log_bessel`` for large r.
    """
    if r == 0:
        return mpmath.mpf(0), 1 / (2 * v), 1 / (2 * v)
    if r < 2000:
        total, term, k = mpmath.mpf(0), mpmath.mpf(1), 0
        while k < 10 or term > mpmath.mpf(10) ** -75 * (1 + total):
            k += 1
            term *= (r * r / 4) / (k * (v + k - 1))
            total += term
        log = mpmath.log1p(total)
    else:
        log = log_bessel(v - 1, r) + mpmath.loggamma(v) - (v - 1) * mpmath.log(r / 2)
    ratio = quotient(v, r)
    if v == mpmath.mpf(1) / 2:  # 1 - tanh^2 would need more digits than there are
        return log, ratio / r, mpmath.sech(r) ** 2
    return log, ratio / r, 1 - ratio**2 - (2 * v - 1) / r * ratio


def log_bessel(order: mpmath.mpf, r: mpmath.mpf) -> mpmath.mpf:
    """log I_order(r): Hankel's series in 1/r where it ends below 1e-60, else Poisson's integral by
    a fine trapezoid rule.
    """
    if r > 30 * (1 + order * order):
        total, term, k = mpmath.mpf(1), mpmath.mpf(1), 0
        while abs(term) > mpmath.mpf(10) ** -60 and k < 400:
            k += 1
            term *= -(4 * order * order - (2 * k - 1) ** 2) / (8 * k * r)
            total += term
        return r - mpmath.log(2 * mpmath.pi * r) / 2 + mpmath.log(total)
    # with cos t = tanh x the integrand exp(r cos t) sin^(2 order) t dt becomes smooth on the whole
    # line
    centre = mpmath.log(r / (order + mpmath.sqrt(order * order + r * r)))

    def exponent(x: mpmath.mpf) -> mpmath.mpf:
        return r * mpmath.tanh(x) - (2 * order + 1) * mpmath.log(mpmath.cosh(x))

    peak = mpmath.findroot(
        lambda x: r * mpmath.sech(x) ** 2 - (2 * order + 1) * mpmath.tanh(x), -centre / 2 + 0.1
    )
    width = 1 / mpmath.sqrt(
        2 * r * mpmath.tanh(peak) * mpmath.sech(peak) ** 2
        + (2 * order + 1) * mpmath.sech(peak) ** 2
    )
    top = exponent(peak)
    step = width / 8
    total = (
        mpmath.fsum(mpmath.exp(exponent(peak + j * step) - top) for j in range(-140, 141)) * step
    )
    norm = mpmath.loggamma(order + mpmath.mpf(1) / 2) + mpmath.log(mpmath.pi) / 2
    return order * mpmath.log(r / 2) - norm + top + mpmath.log(total)


def quotient(v: mpmath.mpf, r: mpmath.mpf) -> mpmath.mpf:
    """I_v(r) / I_{v-1}(r)."""
    if r >= 2000:  # the continued fraction would need about r steps
        return mpmath.exp(log_bessel(v, r) - log_bessel(v - 1, r))
    depth = int(r + 60 + 12 * mpmath.sqrt(r))
    value = mpmath.mpf(0)
    for k in range(depth, -1, -1):
        value = r / (2 * (v + k) + r * value)
    return value


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("law", ["sphere", "ball"])
def test_against_mpmath(dim: int, law: str) -> None:
    """Relative accuracy 1e-10 of transform, ratio and curvature (measured: 1e-12 and better)."""
    order = dim / 2 + (law == "ball")
    with mpmath.workdps(60):
        for r in RADII:
            ours = radial(order, torch.tensor(r, dtype=torch.float64) ** 2)
            expected = reference(mpmath.mpf(order), mpmath.mpf(r))
            for got, want in zip((ours.log, ours.ratio, ours.curvature), expected, strict=True):
                # cosh^-2 underflows for d = 1, and 0 has no relative error
                if abs(want) < mpmath.mpf(10) ** -300:
                    assert abs(got.item()) < 1e-300
                else:
                    assert abs(mpmath.mpf(got.item()) / want - 1) < 1e-10, (dim, law, r)


def test_existing_failures_do_not_happen() -> None:
    """A direct Bessel quotient gives 0 at these places."""
    assert es.Sphere(384).tilted_mean(torch.nn.functional.pad(torch.ones(1, 1), (0, 383)).double())[
        0, 0
    ] == pytest.approx(0.0026, abs=5e-6)
    theta = torch.zeros(768, dtype=torch.float64)
    theta[3] = 50.0
    assert es.Sphere(768).tilted_mean(theta)[3] == pytest.approx(0.065, abs=5e-4)
    theta[3] = 1e12
    assert es.Sphere(768).tilted_mean(theta)[3] == pytest.approx(1.0, abs=1e-9)


def test_cov_trace_identities() -> None:
    """On the sphere |y| = R, so tr Cov = R^2 - |mean|^2 for every tilt."""
    for dim, radius in ((2, 0.5), (17, 3.0), (384, 20.0)):
        measure = es.Sphere(dim, radius)
        theta = torch.randn(
            4, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim)
        )
        trace = measure.tilted_cov(theta).diagonal(dim1=-2, dim2=-1).sum(-1)
        torch.testing.assert_close(
            trace, radius**2 - (measure.tilted_mean(theta) ** 2).sum(-1), rtol=1e-11, atol=1e-11
        )
