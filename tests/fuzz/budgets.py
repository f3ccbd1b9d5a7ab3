"""From curves to rates and token numbers, against curves whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.draw import Draw
from tests.fuzz.outcome import Finding, Refused

__all__ = ["COVERS", "one"]

COVERS = (
    "ErrorCurve",
    "FitError",
    "RateFit",
    "fit_rate",
    "tokens_needed",
)


def _ladder(draw: Draw, least: int = 1) -> np.ndarray:
    n = np.array(draw.counts(length=8), dtype=np.int64)
    while n.size < least:
        n = np.unique(np.append(n, draw.whole(1, 10**6)))
    return n


def power_curve(draw: Draw, n: np.ndarray, **more: Any) -> tuple[Any, float, float, float]:
    """rms = constant n^-exponent, and its scale."""
    exponent = 0.0 if draw.chance(0.1) else float(draw.rng.uniform(0.05, 1.2))
    constant, scale = draw.size(odds=0.05), draw.size(odds=0.05)
    with np.errstate(all="ignore"):
        rms = constant * n.astype(float) ** -exponent
    if not 1e-250 < rms.min() <= rms.max() < 1e250:
        draw.extreme = draw.extreme or "errors of extreme size"
    slope = np.full(n.size, -exponent) if draw.chance(0.5) else None
    return (
        draw.public("ErrorCurve", n=n, rms=rms, kind="exact", scale=scale, slope=slope, **more),
        exponent,
        constant,
        scale,
    )


def one(draw: Draw) -> None:
    kinds = [_fit, _noisy, _needed]
    kinds[draw.pick(range(3), p=[0.4, 0.2, 0.4])](draw)


def _fit(draw: Draw) -> None:
    curve, exponent, constant, scale = power_curve(draw, _ladder(draw))
    usable = int((curve.rms > 1e-12 * scale).sum())
    failing = usable < 3
    level = float(draw.rng.uniform(0.5, 0.99))
    raises = draw.chance(0.7)
    if failing and raises:
        draw.extreme = "too few points"
    given = draw.spoil(
        {"curve": curve, "level": level, "window": "auto"},
        {"curve": "curve", "level": "positive", "window": "choice"},
    )
    try:
        fit = draw.public("fit_rate", **given, raise_on_failure=raises)
    except Refused as refusal:
        draw.called.add(type(refusal.__cause__).__name__)
        raise
    if draw.junk:
        return
    if failing:
        if not fit.status.failed or raises:
            raise Finding("wrong", f"{usable} usable points were fitted: {fit.status.code}")
        draw.checks += 1  # a failed status says why; its numbers are NaN by rule
        return
    reach = float(np.log(fit.window.n_max / fit.window.n_min))
    off = 1e-10 * (1 + 1 / reach)
    draw.agree("exponent", fit.exponent, exponent, off)
    with np.errstate(all="ignore"):
        middle = float(np.exp(np.log(fit.n.astype(float)).mean()))
        draw.agree(
            "fitted error",
            fit.constant * middle**-fit.exponent,
            constant * middle**-exponent,
            1e-7 * constant * middle**-exponent + 1e-300,
        )
    low, high = fit.interval
    if not low - off <= exponent <= high + off:
        raise Finding("wrong", f"interval [{low}, {high}] without the exponent {exponent}")


def _noisy(draw: Draw) -> None:
    """With standard errors: weighted least squares of numpy. With repeats: finite, in order."""
    n = _ladder(draw, 3)
    truth = float(draw.rng.uniform(0.1, 1.0))
    rms = n.astype(float) ** -truth
    if draw.chance(0.5):
        relative = draw.rng.uniform(0.01, 0.2, n.size)
        rms = rms * np.exp(relative * draw.rng.standard_normal(n.size))
        curve = draw.public(
            "ErrorCurve", n=n, rms=rms, kind="montecarlo", scale=1.0, stderr=rms * relative
        )
        keep = rms > 1e-12
        if keep.sum() < 3:
            draw.extreme = "too few points"
        fit = draw.public("fit_rate", curve)
        slope = np.polyfit(np.log(n[keep]), np.log(rms[keep]), 1, w=1 / relative[keep])[0]
        draw.agree("exponent", fit.exponent, -slope, 1e-7 * (1 + abs(slope)))
        return
    repeats = draw.pick([2, 4, 20, 60])
    samples = rms**2 * draw.rng.exponential(size=(repeats, n.size))
    curve = draw.public("ErrorCurve.from_repeats", n, samples, scale=1.0)
    if repeats < 20 or (curve.rms <= 1e-12).any():
        draw.extreme = "few repeats, noisy points"
    fit = draw.public("fit_rate", curve)
    values = [fit.exponent, fit.constant, *fit.interval]
    if not np.isfinite(values).all():
        raise Finding("silent", f"fit with {repeats} repeats: {values}")
    if not fit.interval[0] <= fit.exponent <= fit.interval[1]:
        raise Finding("wrong", f"interval {fit.interval} without its exponent {fit.exponent}")
    draw.checks += 1


def _needed(draw: Draw) -> None:
    curve, exponent, constant, scale = power_curve(draw, _ladder(draw))
    epsilon = draw.size(0.1)
    with np.errstate(all="ignore"):
        relative = curve.rms / scale
        reached = relative[-1] * (1 - 1e-9) <= epsilon
        if not relative[-1] * (1 + 1e-9) <= epsilon:
            draw.extreme = "not reached"
        if not np.isfinite(relative).all() or relative.max() == 0:
            draw.extreme = "relative errors beyond the range"
    given = draw.spoil(
        {"curve": curve, "epsilon": epsilon}, {"curve": "curve", "epsilon": "positive"}
    )
    got = draw.public("tokens_needed", **given)
    if draw.junk:
        return
    if not reached:
        raise Finding("wrong", f"tokens_needed {got} where the error is {relative[-1]} > {epsilon}")
    if relative[0] <= epsilon:
        draw.agree("tokens needed", got, np.float64(curve.n[0]), 1e-9)
        return
    wanted = np.exp((np.log(constant) - np.log(epsilon) - np.log(scale)) / exponent)
    draw.agree("tokens needed", got, wanted, 1 + 1e-8 * wanted * (1 + 1 / exponent))
