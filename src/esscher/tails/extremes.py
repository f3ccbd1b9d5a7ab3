"""The largest norms and coordinates of tokens, and the law their tails follow: Pareto or
sub-Gaussian.

The state (init, update, merge, finish) keeps the COORDINATES largest and smallest values of *every*
coordinate, since mean and deviation are known only at the end. From them all standardised values
|z| above u = the largest, over the 2 d lists, of the smallest |z| that a full list holds, are
known. With every value the norm of its token is kept: tokens alike in every digit count as one. A
norm is standardised by the mean and the deviation of norms; for Gaussian tokens it is then
sub-Gaussian with a scale of at most sqrt(||Sigma||) / deviation (Borell 1975; Tsirelson, Ibragimov,
Sudakov 1976). The tail is the upper tenth of norms (DuMouchel, Annals of Statistics 11, 1983),
NORMS of them at most, and the upper hundredth of coordinates, LISTED for each list at most.

Two laws of exceedances e = z - u of values z > u are fitted by likelihood:

    Pareto        P(e > x) = (1 + xi x / b)^(-1/xi), xi > 0;  exp(-x / b), the lightest, at xi = 0
    sub-Gaussian  P(z > x) = Q(x / sigma) / Q(u / sigma), Q the survival of the standard normal law

The first is the limit of exceedances of every law with a power tail of exponent 1/xi (Balkema, de
Haan 1974; Pickands 1975); laws of xi < 0 end somewhere, and are sub-Gaussian. The sign of the mean
log-likelihood ratio is believed where the mean is beyond its standard error (Vuong, Econometrica
57, 1989, 307-333; Clauset, Shalizi, Newman, SIAM Review 51, 2009, 661-703), that of sums over
groups of values of one token: sqrt(G/(G - 1) sum_g (sum_{i in g} l_i)^2) / M for G groups of M
values in all. The reported shape xi has the largest likelihood over xi > -1/2 and the deviation
(1 + xi) / sqrt(G) (Smith, Biometrika 72, 1985).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.inputs import as_tensor

Floats = npt.NDArray[np.float64]

NORMS = 2048
COORDINATES = 64
LISTED = 16
NORM_SHARE, COORDINATE_SHARE = 10, 100  # one in so many is tail
FEWEST = 30  # exceedances below which nothing is fitted
GROUPS = 10  # and groups of them
NORMAL = float(scipy.special.ndtri(0.975))  # of 95 % intervals, and of the verdict
SMALLEST_SHAPE = -0.5
FAR = 1e3  # thresholds in deviations from which the hazard's expansion has more digits

MEANINGS = {
    "sub-Gaussian": "the sub-Gaussian law fits better than any Pareto law",
    "between": (
        "heavier than the sub-Gaussian law, yet no power is seen: the Pareto shape may be 0, an"
        " exponential tail"
    ),
    "Pareto": "a Pareto law fits better, and its shape is above 0",
    "undecided": "neither law fits better beyond the error of the comparison",
    "unknown": "too few values, or too much alike",
}
HEAVIER = ("between", "Pareto")


@dataclass(frozen=True)
class TailComparison:
    """Both fits and which is better; NaN where there was too little to fit.

    ``ratio`` is the log-likelihood of the Pareto law less that of the sub-Gaussian one, per
    exceedance.
    """

    threshold: float  # u
    exceedances: int
    groups: int
    shape: float = math.nan  # xi
    shape_interval: tuple[float, float] = (math.nan, math.nan)
    sigma: float = math.nan
    ratio: float = math.nan
    ratio_interval: tuple[float, float] = (math.nan, math.nan)
    verdict: str = "unknown"  # one of MEANINGS
    reason: str = ""


@dataclass(frozen=True)
class Extremes:
    """State over the rows seen so far. The last place of ``mean`` and ``square`` is that of the
    norm.
    """

    count: int
    mean: Float64[Tensor, " e"]  # e = d + 1
    square: Float64[Tensor, " e"]  # sum of squares about the mean
    norms: Float64[Tensor, " m"]  # the largest, falling
    values: Float[Tensor, "2 d k"]  # of each coordinate, the largest and the smallest
    owners: Float64[Tensor, "2 d k"]  # the norms of the tokens that these are of


@dataclass(frozen=True)
class TokenTails:
    """Which law the largest norms and the largest coordinates follow."""

    norms: TailComparison
    coordinates: TailComparison

    @property
    def verdict(self) -> str:
        """Of both: heavier than a Gaussian where one of them is."""
        found = {self.norms.verdict, self.coordinates.verdict}
        if found & set(HEAVIER):
            return "heavier"
        return found.pop() if len(found) == 1 else "undecided"


def init(d: int, *, dtype: torch.dtype = torch.float64, device: Any = None) -> Extremes:
    """The state before any row; ``dtype``: of the rows."""
    zeros = torch.zeros(d + 1, dtype=torch.float64, device=device)
    values = torch.empty(2, d, 0, dtype=dtype, device=device)
    return Extremes(0, zeros, zeros, zeros[:0], values, values.double())


def update(state: Extremes, rows: Any) -> Extremes:
    """The state after one more block of rows (B, d)."""
    rows = as_tensor(rows, "rows", ndim=2, last=len(state.mean) - 1)
    if not len(rows):
        return state
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    wide = torch.cat([rows.double(), norms[:, None]], dim=1)
    mean = wide.mean(0)
    across = rows.T.contiguous()
    kept = min(COORDINATES, len(rows))
    largest, smallest = (across.topk(kept, largest=largest) for largest in (True, False))
    values = torch.stack([largest.values, smallest.values]).to(state.values.dtype)
    owners = norms[torch.stack([largest.indices, smallest.indices])]
    top = norms.topk(min(NORMS, len(rows))).values
    square = (wide - mean).square_().sum(0)
    return merge(state, Extremes(len(rows), mean, square, top, values, owners))


def merge(a: Extremes, b: Extremes) -> Extremes:
    """The state over the union of two disjoint sets of rows."""
    if a.count == 0 or b.count == 0:
        return a if b.count == 0 else b
    count, apart = a.count + b.count, b.mean - a.mean
    norms = torch.cat([a.norms, b.norms])
    values, owners = torch.cat([a.values, b.values], dim=2), torch.cat([a.owners, b.owners], dim=2)
    size = min(COORDINATES, values.shape[2])
    chosen = torch.stack([values[side].topk(size, largest=side == 0).indices for side in (0, 1)])
    return Extremes(
        count,
        a.mean + b.count / count * apart,
        a.square + b.square + a.count * b.count / count * apart.square(),
        norms.topk(min(NORMS, len(norms))).values,
        values.gather(2, chosen),
        owners.gather(2, chosen),
    )


def finish(state: Extremes) -> TokenTails:
    """Both laws fitted to the largest norms and to the largest coordinates."""
    if state.count == 0:
        raise ValueError("finish: the state has seen no row; update it first")
    mean, square, norms, values, owners = (
        x.double().cpu().numpy()
        for x in (state.mean, state.square, state.norms, state.values, state.owners)
    )
    deviation = np.sqrt(square / state.count)
    # a coordinate that varies by rounding alone has no tail
    varies = deviation > 1e-12 * np.abs(mean)
    norms = norms if varies[-1] else norms[:0]
    z = (norms - mean[-1]) / deviation[-1] if varies[-1] else norms
    of_norms = _tail(z, norms, state.count // NORM_SHARE)
    kept = varies[:-1]
    centre, values = mean[:-1][kept, None], values[:, kept]
    z = np.stack([values[0] - centre, centre - values[1]]) / deviation[:-1][kept, None]
    floor = float(z.min(axis=2).max()) if z.size and z.shape[2] < state.count else 0.0
    wanted = min(state.count * len(centre) // COORDINATE_SHARE, 2 * LISTED * len(centre))
    return TokenTails(of_norms, _tail(z.ravel(), owners[:, kept].ravel(), wanted, floor))


def _tail(z: Floats, owners: Floats, wanted: int, floor: float = 0.0) -> TailComparison:
    """The comparison over the ``wanted`` largest values above the next, and above the floor."""
    wanted, threshold = min(wanted, len(z) - 1), floor
    if wanted > 0:
        place = len(z) - wanted - 1
        threshold = max(floor, float(np.partition(z, place)[place]))
    return compare(z, threshold, np.unique(owners, return_inverse=True)[1])


def compare(values: Floats, threshold: float, groups: npt.NDArray[np.int64]) -> TailComparison:
    """Fit both laws to the values above a threshold; values of one group are one witness."""
    over = values > threshold
    z, (_, group) = values[over], np.unique(groups[over], return_inverse=True)
    count, witnesses = len(z), int(group.max(initial=-1)) + 1
    excess = z - threshold
    enough = count >= FEWEST and witnesses >= GROUPS and threshold > 0.0
    if not enough or not excess.max() > 1e-12 * abs(threshold):
        reason = (
            f"unknown: {count} values of {witnesses} tokens are too few or too much alike to fit a"
            f" tail (at least {FEWEST} of {GROUPS})"
        )
        return TailComparison(threshold, count, witnesses, reason=reason)
    shape, scale = _fit_pareto(excess)
    sigma, light = _fit_gaussian(z, threshold)
    heavy = scipy.stats.expon.logpdf(excess, scale=float(excess.mean()))
    if shape > 0.0:
        heavy = scipy.stats.genpareto.logpdf(excess, shape, scale=scale)
    ratio = float((heavy - light).mean())
    shape_half = NORMAL * (1.0 + shape) / math.sqrt(witnesses)
    sums = np.bincount(group, weights=heavy - light - ratio)
    spread = witnesses / (witnesses - 1) * float(np.square(sums).sum())
    ratio_half = NORMAL * math.sqrt(spread) / count
    verdict = "undecided"
    if ratio + ratio_half < 0.0:
        verdict = "sub-Gaussian"
    elif ratio - ratio_half > 0.0:
        verdict = "Pareto" if shape - shape_half > 0.0 else "between"
    reason = (
        f"{verdict}: {MEANINGS[verdict]} ({count} values of {witnesses} tokens beyond"
        f" {threshold:.2f} standard deviations, Pareto shape {shape:.2f}, {shape - shape_half:.2f}"
        f" to {shape + shape_half:.2f}; sub-Gaussian scale {sigma:.2f}; log-likelihood ratio"
        f" {ratio:+.2g} a value, {ratio - ratio_half:+.2g} to {ratio + ratio_half:+.2g})"
    )
    return TailComparison(
        threshold,
        count,
        witnesses,
        shape,
        (shape - shape_half, shape + shape_half),
        sigma,
        ratio,
        (ratio - ratio_half, ratio + ratio_half),
        verdict,
        reason,
    )


def _fit_pareto(excess: Floats) -> tuple[float, float]:
    """Shape and scale of largest likelihood; a shape below SMALLEST_SHAPE is told as that."""
    shape, _, scale = scipy.stats.genpareto.fit(excess, floc=0.0)
    return max(float(shape), SMALLEST_SHAPE), float(scale)


def _fit_gaussian(z: Floats, u: float) -> tuple[float, Floats]:
    """Scale sigma, and the log-density of each value.

    With x = u / sigma and the hazard h = phi/Q, sigma solves mean (z^2 - u^2)/2 = sigma^2 (1 + x
    (h(x) - x))/2, and the last factor lies between 1/2 and 1. Q(x) = exp(-x^2/2) erfcx(x / sqrt 2)
    / 2: no exponential is left to underflow.
    """
    half, root = 0.5 * (z - u) * (z + u), math.sqrt(2.0 / math.pi)
    mean = float(half.mean())

    def miss(variance: float) -> float:
        x = u / math.sqrt(variance)
        hazard = root / scipy.special.erfcx(x / math.sqrt(2.0))
        factor = 1.0 - 1.0 / x**2 if x > FAR else 0.5 + 0.5 * x * (hazard - x)
        return float(variance / mean * factor - 1.0)

    variance = float(scipy.optimize.brentq(miss, 0.99 * mean, 2.01 * mean, xtol=1e-15 * mean))
    sigma = math.sqrt(variance)
    beyond = sigma * scipy.special.erfcx(u / (sigma * math.sqrt(2.0))) / root
    density: Floats = -half / variance - math.log(beyond)
    return sigma, density
