"""dispersion_curve: how far softmax spreads over n keys as n grows, exactly and for every n at
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.gaussian import largest_weights
from esscher.errors.grid import Deposit, DepositSource, Grid
from esscher.errors.integral import HIGHEST, TINY, Floats, Source, as_numpy, march, step_for
from esscher.errors.nodes import REACH, STEP, TOL, WIDE, sources
from esscher.inputs import as_attention, as_counts, is_finite

if TYPE_CHECKING:
    import pandas as pd

LEAST = -700.0  # logarithm of the smallest power worth telling from 0
LOWEST = 40.0  # below -log n - LOWEST, exp(-40) of anything is left


def _kernels(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
    grown = torch.exp(u.clamp(max=HIGHEST))
    left = torch.exp(-grown)
    single = grown * left
    return {
        "lost": ("mass", -torch.expm1(-grown)),
        "left": ("mass", left),
        "pair": ("mass", grown * single),
        "entropy": ("mass", -(u.clamp(max=HIGHEST) + np.euler_gamma) * single),
    }


def _tails(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Of the integrals over u' > u: (1 + e^u) exp(-e^u), and at most (1.6 + u) exp(-e^u) for the
    size of the entropy's.
    """
    grown = torch.exp(u.clamp(max=HIGHEST))
    left = torch.exp(-grown)
    return {
        "pair": ("mass", (1 + grown) * left),
        "entropy": ("mass", (1.6 + u.clamp(0, HIGHEST)) * left),
    }


def dispersion(source: Source, n: Tensor, *, step: float, tol: float) -> tuple[Floats, Floats]:
    """E sum p^2 and entropy in nats, (m, len n) each, for n keys drawn independently, every n at
    once. ``n``: float64, at least 1.
    """
    sums = _Dispersion(source, n, step)
    most = math.log(float(n.max()))
    start = float((math.log(tol) - most - source.log_first).min())
    march(sums, start, -most - LOWEST, step, tol, span=source.span, chunk=source.chunk)
    one, (pair, entropy) = n == 1, sums.sums.unbind(1)  # a single key is known without an integral
    return (
        as_numpy(torch.where(one, 1.0, n * pair)),
        as_numpy(torch.where(one, 0.0, (n * entropy).clamp_min(0))),
    )


class _Dispersion:
    """Running sums over nodes, for m queries and all n."""

    def __init__(self, source: Source, n: Tensor, step: float) -> None:
        self.source, self.n, self.step = source, n, step
        self.sums = n.new_zeros(len(source.log_first), 2, len(n))
        self.log_phi = n.new_zeros(len(self.sums))  # at the last node added

    def add(self, tau: Tensor) -> None:
        f = self.source.contract(tau, _kernels)
        phi = f["left"].clamp_min(TINY)
        log_phi = torch.where(f["lost"] < 0.5, torch.log1p(-f["lost"].clamp(0, 0.5)), phi.log())
        rows = torch.stack([f["pair"], f["entropy"]], dim=1)
        self.sums += rows @ (self._power(log_phi) * self.step)
        self.log_phi = log_phi[:, -1]

    def _power(self, log_phi: Tensor) -> Tensor:
        """phi^(n-1)."""
        return torch.exp((log_phi[..., None] * (self.n - 1)).clamp_min(LEAST))

    def found(self) -> Tensor:
        """What the parts cut off are compared with: the entropy's against 1 nat."""
        pair = self.sums[:, 0]
        return torch.stack([self.n * pair, torch.ones_like(pair)])

    def above(self, tau: float) -> Tensor:
        f = self.source.contract(self.n.new_full((1,), tau), _tails)
        power = self._power(self.log_phi)
        return torch.stack([self.n * power * f["pair"], self.n * power * f["entropy"]])

    def below(self, tau: float) -> Tensor:
        """n t^2 E e^2 / 2; n t E[e (|u| + 1.6)], where E[e |score|] <= - E e log E e."""
        pool = self.source
        pair = self.n * torch.exp(2 * tau + pool.log_pair)[:, None] / 2
        size = torch.exp(tau + pool.log_first) * (abs(tau) + 1.6 - pool.log_first)
        return torch.stack([pair, self.n * size[:, None]])


# ---- Curves over n, from scores key by key or from score grids.

Counts = npt.NDArray[np.int64]

GRID = Grid(1 / 8, 4, 1e-6)
FINE = Grid(1 / 32, 4, 1e-6)  # of dispersion_curve
TOP = 16  # largest scores of a query that are taken as they are, and not from its grid
FEW_PAIRS = 2**14  # up to here the sum key by key takes about a second
ROWS = 256  # queries at once
TOL_LARGEST = 1e-4  # of the largest weight on a grid


@dataclass(frozen=True, repr=False)
class DispersionCurve:
    """Expectations at each n for each query, (m, len n), and over the queries, (len n).

    ``effective_tokens`` is 1 / E sum p^2, averaged over the queries before inversion; ``entropy``
    in nats.
    """

    n: Counts
    sum_p2: Floats
    entropies: Floats
    largest: Floats

    def __repr__(self) -> str:
        queries, ends = len(self.sum_p2), f"n = {self.n[0]} to {self.n[-1]}"
        return (
            f"DispersionCurve({queries} queries, {ends}: {self.effective_tokens[-1]:.4g} effective"
            " tokens at the last)"
        )

    @classmethod
    def of_all(cls, parts: Sequence[DispersionCurve]) -> DispersionCurve:
        """Of the queries of all parts."""
        names = ("sum_p2", "entropies", "largest")
        whole = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(parts[0].n, *whole)

    @property
    def effective_tokens(self) -> Floats:
        return np.asarray(1.0 / self.sum_p2.mean(axis=0))

    @property
    def entropy(self) -> Floats:
        return np.asarray(self.entropies.mean(axis=0))

    @property
    def largest_weight(self) -> Floats:
        return np.asarray(self.largest.mean(axis=0))

    def to_frame(self) -> pd.DataFrame:
        """Tidy table: n effective_tokens entropy largest_weight."""
        import pandas as pd

        names = ("n", "effective_tokens", "entropy", "largest_weight")
        return pd.DataFrame({name: getattr(self, name) for name in names})


def dispersion_curve(q: Any, k: Any, n: Any, scale: Any = None) -> DispersionCurve:
    """Effective tokens, entropy and largest weight of softmax over n keys drawn at random, with
    replacement, from a pool of N.

    ``q`` (m, k), ``k`` (N, k); scores are scale <q, k>, ``scale`` None = 1/sqrt(width of q); ``n``:
    numbers of keys.

    Expectations, not samples. A key drawn twice counts as two. Few pairs are summed key by key, to
    1e-12. Others go to score grids: to about 1e-5, the largest weight to a few thousandths.
    """
    query, key, _, factor = as_attention(q, k, k, scale)
    counts, parts = as_counts(n, "n"), []
    for rows in torch.split(query, ROWS):
        scores = (rows.double() * factor) @ key.double().T
        if not is_finite(scores):
            raise ValueError(
                "q, k, scale: scores are beyond the floating range; make scale smaller"
            )
        span = float((scores.amax(1) - scores.amin(1)).max())
        if scores.numel() <= FEW_PAIRS or span > 0.9 * deposit.MAX_CELLS * FINE.spacing:
            parts.append(from_scores(scores, counts))
            continue
        scores = scores - scores.mean(1, keepdim=True)  # so that cell numbers are small
        empty = deposit.init(len(rows), FINE, scores.new_zeros(0))
        masses = deposit.update(empty, scores, scores.new_zeros(len(key), 0))
        parts.append(from_masses(masses, scores.topk(min(TOP, len(key)), dim=1).values, counts))
    return DispersionCurve.of_all(parts)


def from_scores(scores: Tensor, n: Counts) -> DispersionCurve:
    """Key by key, in float64, to about 1e-12: scores (m, N) of equally likely keys."""
    near = _near(scores.double())
    count = torch.from_numpy(n.astype(np.float64)).to(near.device)
    equal = torch.full_like(near, -math.log(near.shape[1]))
    empty, parts = near.new_zeros(near.shape[1], 0), []
    for i, source in sources(near, equal, empty, torch.zeros_like(near)):
        sum_p2, entropy = dispersion(source, count, step=STEP, tol=TOL)
        rising = near[i].sort(dim=1).values
        weight = torch.full_like(rising, 1 / rising.shape[1])
        largest = largest_weights(rising, weight, count, sum_p2, TOL)
        parts.append(DispersionCurve(n, sum_p2, entropy, largest))
    return DispersionCurve.of_all(parts)


def from_masses(masses: Deposit, top: Tensor, n: Counts) -> DispersionCurve:
    """From deposits of keys without values, and ``top`` (m, K), the largest scores of each query.

    Sums of squares and entropies have the grid's accuracy, 1e-6 to 1e-4. The largest weight has no
    kernel that would undo the spreading of keys over cells: the top keys are taken as they are and
    the others where _places says. Measured against sums key by key, with spacings 1/8: a thousandth
    where scores deviate by 1 or more, a hundredth where they deviate by less than a cell.
    """
    grid, count = masses.grid, torch.from_numpy(n.astype(np.float64)).to(top.device)
    source = DepositSource(masses.cells, grid, masses.center)
    sum_p2, entropy = dispersion(source, count, step=step_for(grid.tol), tol=grid.tol)
    places, keys = _placed(masses, top)
    score, order = places.sort(dim=1)
    rising, share = score - score[:, -1:], (keys / masses.keys[:, None]).gather(1, order)
    largest = largest_weights(rising, share, count, sum_p2, TOL_LARGEST)
    return DispersionCurve(n, sum_p2, entropy, largest)


def _placed(masses: Deposit, top: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of all keys, measured from the grid's end, (m, L + K), and how many stand at each: the
    top ones as they are, the others where _places says.
    """
    anchor = (masses.end * masses.grid.spacing).double()[:, None]
    rest = deposit.without(masses, top, top.new_zeros(top.shape[1], 0))
    mass = rest.cells[-2].clamp_min(0)
    keys = torch.cat([mass, (top > -torch.inf).double()], dim=1)
    return torch.cat([_places(mass, masses.grid), top.double() - anchor], dim=1), keys


def _places(mass: Tensor, grid: Grid) -> Tensor:
    """Where the masses (m, L) of cells are put, measured from the grid's end: nearer to their mean.

    Deposits are wider than the scores by the variance points spacing^2 / 12 of a B-spline; drawn
    together by the root of what is left of their variance they have the scores' own mean and
    variance.
    """
    length = mass.shape[1]
    index = torch.arange(length, dtype=torch.float64, device=mass.device) - length
    centre = (index + grid.points / 2) * grid.spacing
    total = mass.sum(1, keepdim=True)
    mean = (mass @ centre)[:, None] / total.clamp_min(TINY)
    apart = centre - mean
    wide = (mass * apart.square()).sum(1, keepdim=True) / total.clamp_min(TINY)
    own = (wide - grid.points * grid.spacing**2 / 12).clamp_min(0)
    return mean + apart * torch.sqrt(own / wide.clamp_min(TINY))


# ---- The critical scale of a row.


def gap_counts(scores: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gaps t of each row's scores (m, K) from its largest, rising, and N(t): how many keys lie
    within t of the largest. ``keys`` (m, K): how many stand at each score, 1 unless given; several
    stand for keys around it, of which the middle one is counted.
    """
    falling, order = scores.double().sort(dim=1, descending=True)
    mass = torch.ones_like(falling) if keys is None else keys.gather(1, order)
    return falling[:, :1] - falling, mass.cumsum(1) - (mass - mass.clamp_max(1)) / 2


def gaps_from_masses(masses: Deposit, top: Tensor) -> tuple[Tensor, Tensor]:
    """The same from deposits of keys without values, none of them above the largest scores ``top``
    (m, K), which are exact.
    """
    places, keys = _placed(masses, top)
    rest = places[:, : -top.shape[1]].minimum(places[:, -top.shape[1] :].amin(1, keepdim=True))
    return gap_counts(torch.cat([rest, places[:, -top.shape[1] :]], dim=1), keys)


def critical_scale(gaps: Tensor, counts: Tensor) -> Tensor:
    """Lambda = sup over t > 0 of log N(t) / t of each row: what its scores may be multiplied with
    before softmax freezes on the largest; infinite where the largest is not alone.

    Where scores are multiplied with b, the largest weight p has, t the gap of Lambda,

        b > Lambda:   p >= 1 - Lambda / b,         b < Lambda:   p <= N(t)^-(1 - b / Lambda).

    Proof: 1/p = sum_j exp(-b t_j) = b int exp(-b t) N(t) dt is at most b / (b - Lambda), as N(t) <=
    exp(Lambda t), and at least N(t) exp(-b t). Source: Hayase, Karakida, arXiv 2605.12697, by its
    abstract and by others' accounts of its definition; the bounds at finite b are derived here.
    """
    near = (counts > 1 + 1e-9) & (gaps < torch.inf)
    rates = torch.where(near, counts.clamp_min(1).log() / gaps, 0.0)
    return rates.amax(1)


def _near(scores: Tensor) -> Tensor:
    """Scores from each query's largest. Gaps between neighbours beyond REACH are shortened to it:
    such keys never compete.
    """
    below = scores - scores.amax(1, keepdim=True)
    if float(below.min()) > -WIDE:
        return below
    falling, order = below.sort(dim=1, descending=True)
    gaps = torch.diff(falling, dim=1).clamp_min(-REACH)
    shortened = torch.nn.functional.pad(gaps.cumsum(1), (1, 0))
    return torch.empty_like(below).scatter_(1, order, shortened)
