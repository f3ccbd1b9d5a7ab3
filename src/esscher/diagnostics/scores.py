"""The shape of a head's scores against the Gaussian of equal variance, and softmax statistics, from
binned masses.

The masses are the deposits of keys on each query's uniform score grid
(esscher.convergence.grid.state: its channel ``cells[-2]``), which are kept anyway for the exact
error. A key's unit of mass is spread over ``points`` cells by B-spline weights, which is a
smoothing of known effect: its mean is 0, its variance w = points spacing^2 / 12, its fourth moment
3 w^2 - points spacing^4 / 120 on average over the places in a cell, and it multiplies sums of exp(a
score) by a known gain (esscher.convergence.grid.bspline). All of that is taken out here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
from torch import Tensor

from esscher.convergence.grid.bspline import exponential_gain, weight_table
from esscher.convergence.grid.state import Deposit
from esscher.inputs import as_positive, as_tensor

__all__ = [
    "ScoreShape",
    "SoftmaxStatistics",
    "first_centres",
    "score_histogram",
    "softmax_statistics",
]

Floats = npt.NDArray[np.float64]

SURVIVAL_AT = np.arange(1.0, 9.0)
EDGES = np.linspace(-10.0, 10.0, 81)
HEAVIER, LIGHTER = 2.0, 0.5  # survival over the Gaussian's beyond which tails differ
EXPECTED = 10.0  # keys a Gaussian leaves beyond the point where tails are compared
RESOLVED = 2.0  # cells per standard deviation that a query needs for its shape to be seen


@dataclass(frozen=True)
class ScoreShape:
    """Scores of all queries, each standardised by its own mean and deviation, pooled. Arrays of
    survival go with ``at``.
    """

    edges: Floats  # of z
    density: Floats
    gaussian_density: Floats  # averaged over each bin, as the density is
    at: Floats  # z = 1 .. 8
    survival: Floats  # share of scores above +z: what the softmax sees
    survival_below: Floats  # share below -z
    gaussian_survival: Floats
    skewness: float
    kurtosis: float
    proxy: float  # median over queries of 2 (log mean exp(score) - mean) / sd^2: 1 for a Gaussian
    compared_at: float  # the z of the verdict
    # share of queries whose deviation exceeds the grid's spacing; the others are left out
    resolved: float
    verdict: str  # sub-Gaussian, heavier, lighter or unknown
    reason: str

    @property
    def excess(self) -> float:
        """Kurtosis less the Gaussian's 3."""
        return self.kurtosis - 3.0


@dataclass(frozen=True)
class SoftmaxStatistics:
    """Per query (m,): log sum exp of the scores, effective tokens 1/sum p^2, entropy in nats, mean
    and deviation.
    """

    log_sum_exp: Floats
    effective_tokens: Floats
    entropy: Floats
    mean: Floats
    sd: Floats


def first_centres(state: Deposit) -> Tensor:
    """The score at the centre of each query's first cell, (m,): cell number c is centred at (c +
    points/2) spacing.
    """
    first = state.end - state.cells.shape[2]
    return (first.double() + state.grid.points / 2) * state.grid.spacing


def softmax_statistics(
    mass: Any, first_centre: Any, spacing: Any, points: int = 4
) -> SoftmaxStatistics:
    """Statistics of softmax over the keys whose masses (m, L) lie in cells at first_centre_i + l *
    spacing.

    sum_j exp(a s_j) = sum_l mass_l exp(a centre_l) / gain(a), and the entropy is log sum exp less
    its derivative in a at 1. The relative error, about 2 (a spacing / 2 pi)^points, is 3e-7 (a = 1)
    and 5e-6 (a = 2) at 4 points and 1/8.
    """
    cells, centre, spacing = _cells(mass, first_centre, spacing)
    mean, variance, _, _ = _moments(cells, centre, spacing, points)
    with np.errstate(divide="ignore"):
        logs = np.log(cells)
    first, slope = _tilted(logs, centre, 1.0)
    second, _ = _tilted(logs, centre, 2.0)
    first -= math.log(exponential_gain(points, spacing))
    second -= math.log(exponential_gain(points, 2.0 * spacing))
    taps = np.arange(points) - (points // 2 - 1)
    weight = weight_table(points)[:, 0] * np.exp(spacing * taps)
    slope -= spacing * float(taps @ weight) / float(weight.sum())
    return SoftmaxStatistics(
        first, np.exp(2.0 * first - second), np.maximum(first - slope, 0.0), mean, np.sqrt(variance)
    )


def score_histogram(
    mass: Any, first_centre: Any, spacing: Any, mean: Any = None, sd: Any = None, *, points: int = 4
) -> ScoreShape:
    """Pooled shape of the standardised scores z = (score - mean_i) / sd_i from masses (m, L).

    ``mean`` and ``sd`` (m,) are those of each query, scale q_i . E k and scale sqrt(q_i^T Cov_k
    q_i); None takes them from the masses, which give them exactly. Within a cell the mass is spread
    evenly: with the B-spline that adds (points + 1) spacing^2 / 12 to the variance, and z is
    measured in the deviation that includes it.
    """
    cells, centre, spacing = _cells(mass, first_centre, spacing)
    own_mean, own_variance, third, fourth = _moments(cells, centre, spacing, points)
    mean = own_mean if mean is None else _per_query(mean, "mean", len(cells))
    variance = own_variance if sd is None else _per_query(sd, "sd", len(cells)) ** 2
    seen = np.sqrt(variance) >= RESOLVED * spacing
    if not seen.any():
        return _unresolved(spacing, float(np.median(np.sqrt(variance))))
    cells, centre, mean, variance = cells[seen], centre[seen], mean[seen], variance[seen]
    wide = np.sqrt(variance + (points + 1) * spacing**2 / 12.0)
    below = _cumulative(cells, centre, spacing, mean, wide, EDGES)
    density = np.diff(below.mean(axis=0)) / np.diff(EDGES)
    gaussian = np.diff(scipy.special.ndtr(EDGES)) / np.diff(EDGES)
    above = 1.0 - _cumulative(cells, centre, spacing, mean, wide, SURVIVAL_AT).mean(axis=0)
    under = _cumulative(cells, centre, spacing, mean, wide, -SURVIVAL_AT).mean(axis=0)
    skewness = float((third[seen] / own_variance[seen] ** 1.5).mean())
    kurtosis = float((fourth[seen] / own_variance[seen] ** 2).mean())
    proxy = _proxy(cells, centre, spacing, points, mean, variance)
    keys = float(np.median(cells.sum(axis=1)))
    where, verdict, reason = _judge(np.maximum(above, 0.0), keys, skewness, kurtosis, proxy)
    return ScoreShape(
        edges=EDGES,
        density=density,
        gaussian_density=gaussian,
        at=SURVIVAL_AT,
        survival=np.maximum(above, 0.0),
        survival_below=under,
        gaussian_survival=scipy.special.ndtr(-SURVIVAL_AT),
        skewness=skewness,
        kurtosis=kurtosis,
        proxy=proxy,
        compared_at=where,
        resolved=float(seen.mean()),
        verdict=verdict,
        reason=reason,
    )


def _cells(mass: Any, first_centre: Any, spacing: Any) -> tuple[Floats, Floats, float]:
    """Checked masses (m, L), centres (m, L) and spacing."""
    cells = as_tensor(mass, "mass", ndim=2).detach().double().cpu().numpy()
    first = _per_query(first_centre, "first_centre", len(cells))
    width = as_positive(spacing, "spacing")
    empty = int((cells.sum(axis=1) <= 0.0).sum()) if cells.size else len(cells)
    if empty or not len(cells):
        raise ValueError(
            f"mass: expected every query to have seen a key, got {empty} of {len(cells)} without"
        )
    if float(cells.min()) < 0.0:
        raise ValueError(f"mass: expected masses of at least 0, got {float(cells.min())}")
    return cells, first[:, None] + width * np.arange(cells.shape[1]), width


def _per_query(value: Any, name: str, queries: int) -> Floats:
    result: Floats = as_tensor(value, name, ndim=1, last=queries).detach().double().cpu().numpy()
    return result


def _tilted(logs: Floats, centre: Floats, rate: float) -> tuple[Floats, Floats]:
    """log sum_l mass_l exp(rate centre_l), and the mean centre under these weights."""
    exponent = logs + rate * centre
    top = exponent.max(axis=1, keepdims=True)
    weight = np.exp(exponent - top)
    total = weight.sum(axis=1)
    return np.log(total) + top[:, 0], (weight * centre).sum(axis=1) / total


def _moments(
    cells: Floats, centre: Floats, spacing: float, points: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Mean and second to fourth central moments of the scores, the smoothing taken out; the fourth
    on average only.
    """
    share = cells / cells.sum(axis=1, keepdims=True)
    mean = (share * centre).sum(axis=1)
    apart = centre - mean[:, None]
    square = apart * apart
    widening = points * spacing**2 / 12.0
    second = np.maximum((share * square).sum(axis=1) - widening, 0.0)
    third = (share * square * apart).sum(axis=1)
    own_fourth = 3.0 * widening**2 - points * spacing**4 / 120.0
    fourth = (share * square * square).sum(axis=1) - 6.0 * second * widening - own_fourth
    return mean, second, third, fourth


def _cumulative(
    cells: Floats, centre: Floats, spacing: float, mean: Floats, sd: Floats, z: Floats
) -> Floats:
    """Share of each query's mass below mean + sd z, (m, len(z)); even within a cell."""
    sums = np.concatenate([np.zeros((len(cells), 1)), np.cumsum(cells, axis=1)], axis=1)
    sums /= sums[:, -1:]
    place = (mean[:, None] + sd[:, None] * z - centre[:, :1]) / spacing + 0.5
    place = np.clip(place, 0.0, cells.shape[1])
    left = np.minimum(place.astype(np.int64), cells.shape[1] - 1)
    low, high = np.take_along_axis(sums, left, axis=1), np.take_along_axis(sums, left + 1, axis=1)
    below: Floats = low + (place - left) * (high - low)
    return below


def _proxy(
    cells: Floats, centre: Floats, spacing: float, points: int, mean: Floats, variance: Floats
) -> float:
    """Median of 2 K / s^2, K = log E exp(score - mean): the sub-Gaussian parameter that the softmax
    meets, over s^2.
    """
    with np.errstate(divide="ignore"):
        first, _ = _tilted(np.log(cells / cells.sum(axis=1, keepdims=True)), centre, 1.0)
    K = first - math.log(exponential_gain(points, spacing)) - mean
    return float(np.median(2.0 * K / variance))


def _judge(
    above: Floats, keys: float, skewness: float, kurtosis: float, proxy: float
) -> tuple[float, str, str]:
    """Compare the upper tail at the last z that a Gaussian would still fill with EXPECTED keys."""
    gaussian = scipy.special.ndtr(-SURVIVAL_AT)
    enough = np.flatnonzero(keys * gaussian >= EXPECTED)
    if enough.size == 0:
        return (
            math.nan,
            "unknown",
            f"{keys:.0f} keys are too few to see a tail; {EXPECTED / gaussian[0]:.0f} are needed.",
        )
    last = int(enough[-1])
    ratio = float(above[last] / gaussian[last])
    facts = (
        f"{above[last]:.2g} of the scores lie above {SURVIVAL_AT[last]:.0f} standard deviations,"
        f" {ratio:.2f} times the Gaussian share (skewness {skewness:.2f}, excess kurtosis"
        f" {kurtosis - 3:.2f}, variance proxy {proxy:.2f})"
    )
    if ratio > HEAVIER:
        return float(SURVIVAL_AT[last]), "heavier", f"Heavier upper tail than a Gaussian: {facts}."
    if ratio < LIGHTER:
        return float(SURVIVAL_AT[last]), "lighter", f"Lighter upper tail than a Gaussian: {facts}."
    return float(SURVIVAL_AT[last]), "sub-Gaussian", f"Upper tail like a Gaussian's: {facts}."


def _unresolved(spacing: float, sd: float) -> ScoreShape:
    nothing, bins = np.full(SURVIVAL_AT.shape, np.nan), np.full(len(EDGES) - 1, np.nan)
    reason = (
        f"The scores' standard deviation, {sd:.2g} in the median, is below the grid's spacing"
        f" {spacing:g}: softmax over them is nearly uniform, and their shape does not matter."
    )
    return ScoreShape(
        edges=EDGES,
        density=bins,
        gaussian_density=np.diff(scipy.special.ndtr(EDGES)) / np.diff(EDGES),
        at=SURVIVAL_AT,
        survival=nothing,
        survival_below=nothing,
        gaussian_survival=scipy.special.ndtr(-SURVIVAL_AT),
        skewness=math.nan,
        kurtosis=math.nan,
        proxy=math.nan,
        compared_at=math.nan,
        resolved=0.0,
        verdict="unknown",
        reason=reason,
    )
