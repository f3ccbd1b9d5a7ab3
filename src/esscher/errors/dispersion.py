"""dispersion_curve: how far softmax spreads over n keys as n grows, exactly and for every n at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from esscher.inputs import as_attention, as_counts, as_pair, as_place, is_finite

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


def dispersion(
    source: Source, n: Tensor, *, planted: Tensor, step: float, tol: float
) -> tuple[Floats, Floats, Floats]:
    """E sum p^2, entropy in nats and weight of a planted key, (m, len n) each, for n keys drawn
    independently, every n at once. ``n``: float64, at least 1.

    ``planted`` (m,): the scores of planted keys, measured from the source's anchor as its own
    scores are, none above it; NaN: no key is planted.
    """
    sums = _Dispersion(source, n, planted, step)
    most = math.log(float(n.max()))
    start = float((math.log(tol) - most - source.log_first).min())
    lowest = -most - LOWEST - source.span * (not bool(planted.isnan().all()))
    march(sums, start, lowest, step, tol, span=source.span, chunk=source.chunk)
    return sums.result()


class _Dispersion:
    """Running sums over nodes, for m queries and all n."""

    def __init__(self, source: Source, n: Tensor, planted: Tensor, step: float) -> None:
        self.source, self.n, self.planted, self.step = source, n, planted, step
        self.sums = n.new_zeros(len(source.log_first), 3, len(n))
        self.log_phi = n.new_zeros(len(self.sums))  # at the last node added

    def add(self, tau: Tensor) -> None:
        f = self.source.contract(tau, _kernels)
        phi = f["left"].clamp_min(TINY)
        log_phi = torch.where(f["lost"] < 0.5, torch.log1p(-f["lost"].clamp(0, 0.5)), phi.log())
        grown = torch.exp((tau + self.planted[:, None]).clamp(max=HIGHEST))
        own = (grown * torch.exp(-grown)).nan_to_num(0.0)  # e^u exp(-e^u) of the planted keys
        rows = torch.stack([f["pair"], f["entropy"], own], dim=1)
        self.sums += rows @ (self._power(log_phi) * self.step)
        self.log_phi = log_phi[:, -1]

    def _power(self, log_phi: Tensor) -> Tensor:
        """phi^(n-1)."""
        return torch.exp((log_phi[..., None] * (self.n - 1)).clamp_min(LEAST))

    def found(self) -> Tensor:
        """What the parts cut off are compared with: the entropy's against 1 nat."""
        pair, _, own = self.sums.unbind(1)
        return torch.stack([self.n * pair, torch.ones_like(pair), own])

    def above(self, tau: float) -> Tensor:
        f = self.source.contract(self.n.new_full((1,), tau), _tails)
        power = self._power(self.log_phi)
        own = power * torch.exp(-torch.exp((tau + self.planted).clamp(max=HIGHEST)))[:, None]
        return torch.stack(
            [self.n * power * f["pair"], self.n * power * f["entropy"], own.nan_to_num(0.0)]
        )

    def below(self, tau: float) -> Tensor:
        """n t^2 E e^2 / 2; n t E[e (|u| + 1.6)], where E[e |score|] <= - E e log E e; t e'."""
        pool = self.source
        pair = self.n * torch.exp(2 * tau + pool.log_pair)[:, None] / 2
        entropy = (
            self.n * (torch.exp(tau + pool.log_first) * (abs(tau) + 1.6 - pool.log_first))[:, None]
        )
        own = torch.exp(tau + self.planted).nan_to_num(0.0)[:, None].expand_as(pair)
        return torch.stack([pair, entropy, own])

    def result(self) -> tuple[Floats, Floats, Floats]:
        one = self.n == 1  # known without an integral
        pair, entropy, own = self.sums.unbind(1)
        return (
            as_numpy(torch.where(one, 1.0, self.n * pair)),
            as_numpy(torch.where(one, 0.0, (self.n * entropy).clamp_min(0))),
            as_numpy(torch.where(one, 1.0, own) + 0 * self.planted[:, None]),
        )


# ---- Curves over n, from scores key by key or from score grids.

Counts = npt.NDArray[np.int64]

COARSEST = 0.25  # spacing of a score grid, times the temperature, up to which it is read
TOP = 16  # largest scores of a query that are taken as they are, and not from its grid
FINEST = 1 / 32  # spacing of the grids of dispersion_curve, unless a temperature asks for less
FEW_PAIRS = 2**14  # up to here the sum key by key takes about a second
ROWS = 256  # queries at once
TOL_LARGEST = 1e-4  # of the largest weight on a grid


@dataclass(frozen=True, repr=False)
class DispersionCurve:
    """Expectations at each n for each query, (m, len n), and over the queries, (len n).

    ``effective_tokens`` is 1 / E sum p^2, averaged over the queries before inversion; ``entropy``
    in nats; ``planted_weight`` is NaN where no key is planted.
    """

    n: Counts
    temperature: Floats  # what scores are multiplied with at each n
    sum_p2: Floats
    entropies: Floats
    largest: Floats
    planted: Floats

    def __repr__(self) -> str:
        queries, ends = len(self.sum_p2), f"n = {self.n[0]} to {self.n[-1]}"
        return (
            f"DispersionCurve({queries} queries, {ends}: {self.effective_tokens[-1]:.4g} effective"
            " tokens at the last)"
        )

    @classmethod
    def of_all(cls, parts: Sequence[DispersionCurve]) -> DispersionCurve:
        """Of the queries of all parts."""
        names = ("sum_p2", "entropies", "largest", "planted")
        whole = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(parts[0].n, parts[0].temperature, *whole)

    @property
    def effective_tokens(self) -> Floats:
        return np.asarray(1.0 / self.sum_p2.mean(axis=0))

    @property
    def entropy(self) -> Floats:
        return np.asarray(self.entropies.mean(axis=0))

    @property
    def largest_weight(self) -> Floats:
        return np.asarray(self.largest.mean(axis=0))

    @property
    def planted_weight(self) -> Floats:
        return np.asarray(self.planted.mean(axis=0))

    def to_frame(self) -> pd.DataFrame:
        """Tidy table: n temperature effective_tokens entropy largest_weight planted_weight."""
        import pandas as pd

        names = ("n", "temperature", "effective_tokens", "entropy", "largest_weight")
        return pd.DataFrame({name: getattr(self, name) for name in (*names, "planted_weight")})


def dispersion_curve(
    q: Any, k: Any, n: Any, scale: Any = None, *, temperature: Any = None, planted: Any = None
) -> DispersionCurve:
    """Effective tokens, entropy and largest weight of softmax over n keys drawn at random, with
    replacement, from a pool of N.

    ``q`` (m, k), ``k`` (N, k); scores are scale <q, k>, ``scale`` None = 1/sqrt(width of q); ``n``:
    numbers of keys. ``temperature`` (a, b): scores are multiplied with a + b log n at n keys.
    ``planted``: the row of a key that is always there, beside n - 1 drawn ones; ``.planted_weight``
    is its share.

    Expectations, not samples. A key drawn twice counts as two. Few pairs are summed key by key, to
    1e-12. Others go to score grids: to about 1e-5, the largest weight to a few thousandths.
    """
    query, key, _, factor = as_attention(q, k, k, scale)
    counts = as_counts(n, "n")
    place = None if planted is None else as_place(planted, "planted", key.shape[0])
    heat = factors(None if temperature is None else as_pair(temperature, "temperature"), counts)
    warmest, parts = float(heat.max()), []
    coarsest = min(COARSEST / warmest, FINEST)
    for rows in torch.split(query, ROWS):
        scores = (rows.double() * factor) @ key.double().T
        if not is_finite(scores) or not math.isfinite(float(scores.abs().max()) * warmest):
            raise ValueError(
                "q, k, scale: scores are beyond the floating range; make scale smaller"
            )
        span = float((scores.amax(1) - scores.amin(1)).max())
        if scores.numel() <= FEW_PAIRS or span > 0.9 * deposit.MAX_CELLS * coarsest:
            places = None if place is None else torch.full((len(rows),), place, device=key.device)
            parts.append(from_scores(scores, counts, heat, places))
            continue
        scores = scores - scores.mean(1, keepdim=True)  # so that cell numbers are small
        grid = Grid(2.0 ** math.floor(math.log2(coarsest)), 4, 1e-6)
        empty = deposit.init(len(rows), grid, scores.new_zeros(0))
        masses = deposit.update(empty, scores, scores.new_zeros(len(key), 0))
        top = scores.topk(min(TOP, len(key)), dim=1).values
        own = None if place is None else scores[:, place]
        parts.append(from_masses(masses, top, counts, heat, own))
    return DispersionCurve.of_all(parts)


def factors(temperature: tuple[float, float] | None, n: Counts) -> Floats:
    """a + b log n, what scores are multiplied with at n keys; 1 without a temperature."""
    if temperature is None:
        return np.ones(n.size)
    a, b = temperature
    found: Floats = a + b * np.log(n.astype(np.float64))
    if not (np.isfinite(found).all() and (found > 0).all()):
        worst = int(np.argmin(np.where(np.isfinite(found), found, -np.inf)))
        raise ValueError(
            f"temperature: expected a + b log n above 0 for every n, got {found[worst]:g} at n ="
            f" {n[worst]} for a = {a:g}, b = {b:g}"
        )
    return found


def from_scores(
    scores: Tensor, n: Counts, temperature: Floats, planted: Tensor | None = None
) -> DispersionCurve:
    """Key by key, in float64, to about 1e-12: scores (m, N) of equally likely keys; ``planted``
    (m,): places of such keys.
    """

    def at(factor: float, count: Tensor) -> Iterator[tuple[Floats, ...]]:
        near = _near(scores.double() * factor)
        own = near.new_full((len(near),), torch.nan)
        if planted is not None:
            own = near.gather(1, planted[:, None])[:, 0]
        equal = torch.full_like(near, -math.log(near.shape[1]))
        empty = near.new_zeros(near.shape[1], 0)
        for i, source in sources(near, equal, empty, torch.zeros_like(near)):
            sum_p2, entropy, held = dispersion(source, count, planted=own[i], step=STEP, tol=TOL)
            rising = near[i].sort(dim=1).values
            weight = torch.full_like(rising, 1 / rising.shape[1])
            yield sum_p2, entropy, largest_weights(rising, weight, count, sum_p2, TOL), held

    return _at_each(at, len(scores), n, temperature, scores.device)


def from_masses(
    masses: Deposit, top: Tensor, n: Counts, temperature: Floats, planted: Tensor | None
) -> DispersionCurve:
    """From deposits of keys without values, and the largest scores of each query.

    ``top`` (m, K): some of them; ``planted`` (m,): scores of planted keys. Sums of squares,
    entropies and planted weights have the grid's accuracy, 1e-6 to 1e-4. The largest weight has no
    kernel that would undo the spreading of keys over cells: the top keys are taken as they are and
    the others where _places says. Measured against sums key by key, with spacings 1/8: a thousandth
    where scores deviate by 1 or more, a hundredth where they deviate by less than a cell.
    """
    grid = masses.grid
    anchor = (masses.end * grid.spacing).double()[:, None]
    rest = deposit.without(masses, top, top.new_zeros(top.shape[1], 0))
    mass = rest.cells[-2].clamp_min(0)
    weight = torch.cat([mass, torch.ones_like(top, dtype=torch.float64)], dim=1)
    weight = weight / masses.keys[:, None]
    places = torch.cat([_places(mass, grid), top.double() - anchor], dim=1)
    own = anchor[:, 0] * torch.nan if planted is None else planted.double() - anchor[:, 0]

    def at(factor: float, count: Tensor) -> Iterator[tuple[Floats, ...]]:
        warmed = replace(grid, spacing=factor * grid.spacing)
        source = DepositSource(masses.cells, warmed, masses.center)
        step = step_for(grid.tol)
        sum_p2, entropy, held = dispersion(
            source, count, planted=factor * own, step=step, tol=grid.tol
        )
        score, order = (factor * places).sort(dim=1)
        rising, share = score - score[:, -1:], weight.gather(1, order)
        yield sum_p2, entropy, largest_weights(rising, share, count, sum_p2, TOL_LARGEST), held

    return _at_each(at, len(top), n, temperature, top.device)


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


def _at_each(
    at: Callable[[float, Tensor], Iterator[tuple[Floats, ...]]],
    queries: int,
    n: Counts,
    temperature: Floats,
    device: torch.device,
) -> DispersionCurve:
    """All n of one temperature at once."""
    found = np.empty((4, queries, n.size))
    for factor in np.unique(temperature):
        here = np.flatnonzero(temperature == factor)
        count = torch.as_tensor(n[here], dtype=torch.float64, device=device)
        columns = zip(*at(float(factor), count), strict=True)
        found[:, :, here] = np.stack([np.concatenate(column) for column in columns])
    return DispersionCurve(n, temperature, *found)
