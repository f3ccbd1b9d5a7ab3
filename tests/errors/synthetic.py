"""Synthetic error curves with a known rate, for the tests of fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from esscher.errors.curve import ErrorCurve
from esscher.errors.rate import RateFit, fit_rate

Floats = npt.NDArray[np.float64]
Law = Callable[[Floats], Floats]


def ladder(points: int, low: float = 100, high: float = 30_000) -> npt.NDArray[np.int64]:
    return np.geomspace(low, high, points).round().astype(np.int64)


def squared_errors(
    generator: np.random.Generator,
    repeats: int,
    n: npt.NDArray[np.int64],
    rms: Floats,
    *,
    dof: int,
    nested: bool,
) -> Floats:
    """rms^2 chi-square(dof) / dof; nested repeats have correlation n / m between n < m, as a mean
    over prefixes has.
    """
    normal = generator.standard_normal((repeats, dof, n.size))
    if nested:
        for j in range(1, n.size):
            tie = np.sqrt(n[j - 1] / n[j])
            normal[..., j] = tie * normal[..., j - 1] + np.sqrt(1 - tie**2) * normal[..., j]
    squares: Floats = (normal**2).mean(axis=1)
    return squares * rms**2


def montecarlo(n: npt.NDArray[np.int64], samples: Floats) -> ErrorCurve:
    mean = samples.mean(axis=0)
    stderr = samples.std(axis=0, ddof=1) / np.sqrt(samples.shape[0]) / (2 * np.sqrt(mean))
    return ErrorCurve(n=n, rms=np.sqrt(mean), kind="montecarlo", stderr=stderr, samples=samples)


def fits(
    sets: int, repeats: int, points: int, law: Law, *, dof: int, nested: bool, seed: int = 7
) -> list[RateFit]:
    generator, n = np.random.default_rng(seed), ladder(points)
    rms = law(n.astype(float))
    curves = (
        montecarlo(n, squared_errors(generator, repeats, n, rms, dof=dof, nested=nested))
        for _ in range(sets)
    )
    return [fit_rate(curve, seed=i) for i, curve in enumerate(curves)]


def power(exponent: float, constant: float = 2.0) -> Law:
    return lambda n: constant * n**-exponent


def bent(n: Floats) -> Floats:
    """n^-0.3 with a local slope that goes from -0.5 to -0.1 over the ladder."""
    middle = np.log(n).mean()
    return np.asarray(np.exp(-0.3 * np.log(n) + 0.07 * (np.log(n) - middle) ** 2))


def covered(found: list[RateFit], exponent: float) -> float:
    return float(np.mean([fit.interval[0] <= exponent <= fit.interval[1] for fit in found]))


def noisy_curve(rms: Law, n: npt.NDArray[np.int64], relative: float, seed: int) -> ErrorCurve:
    """Errors with independent relative noise whose standard error is known, and no repeats."""
    exact = rms(n.astype(float))
    noise = np.random.default_rng(seed).standard_normal(n.size)
    return ErrorCurve(
        n=n, rms=exact * np.exp(relative * noise), kind="montecarlo", stderr=relative * exact
    )
