"""The integrals for keeping each of N keys with one probability. Formulas:
esscher.errors.formulas.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from esscher.errors.formulas import (
    HIGHEST,
    Family,
    NodeErrors,
    Source,
    Vectors,
    aliasing,
    as_numpy,
    march,
)
from esscher.errors.inclusion import LEAST, InclusionErrors, Sums, SureKeys


@lru_cache(maxsize=64)  # one function for one share: its kernels are remembered
def _bernoulli(kept: float, dropped: float) -> Family:
    """Kernels of D, w, f (1-f) e^2u x / D^2 and w' = f e^2u x / D at x = exp(-e^u), with their
    derivatives f d/df.

    f (1-f) e^2 x / D^2 is w' - w^2, without the cancellation that would spoil it near f = 1. Since
    sum e c = 0, f e may be taken from w: f (1-f) e (x - 1) / D, which vanishes at f = 1 and is the
    smaller one while x > (1-f)/(2-f).
    """
    early = math.log(math.log((1 + dropped) / dropped))

    def family(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        grown = torch.exp(u.clamp(max=HIGHEST))
        x = torch.exp(-grown)
        lost = torch.expm1(-grown)
        d = dropped + kept * x
        log_d = torch.where(kept * lost > -0.5, torch.log1p(kept * lost), d.log())
        rise = -kept * lost / d  # -f d log D / df
        mean = torch.where(tau <= early, dropped * grown * lost, grown * x) * kept / d
        dearly = kept * grown * lost / d * (dropped - kept + dropped * rise)
        dmean = torch.where(tau <= early, dearly, mean / d)
        square = grown * grown * x / d
        return {
            "log_d": ("mass", log_d),
            "rise": ("mass", rise),
            "pair": ("mass", kept * square),
            "square": ("spread", kept * dropped * square / d),
            "dsquare": ("spread", kept * square / d * (dropped - kept + 2 * dropped * rise)),
            "single": ("value", mean),
            "dsingle": ("value", dmean),
        }

    return family


@lru_cache(maxsize=64)
def _bernoulli_tail(kept: float, dropped: float) -> Family:
    """Kernels at t/2 of E[|Gamma_f - Gamma|^2 (1 + tS) exp(-tS)] <= 2 P(t/2) sum_j |c_j|^2 f x_j /
    D_j.
    """

    def family(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        grown = torch.exp(u.clamp(max=HIGHEST)) / 2
        x = torch.exp(-grown)
        d = dropped + kept * x
        log_d = torch.where(grown < 0.5, torch.log1p(kept * torch.expm1(-grown)), d.log())
        return {
            "log_d": ("mass", log_d),
            "square": ("spread", kept * x / d),
            "pair": ("mass", kept * x / d),
        }

    return family


def bernoulli_errors(
    source: Source,
    n: int,
    of: int,
    keys: Tensor | None = None,
    *,
    step: float,
    tol: float,
    details: bool = False,
) -> NodeErrors:
    """The error when each key is kept with probability f = n / of; no kept key counts as no error.

    ``keys`` (m,): how many equal keys each query has; None: ``of`` for all.
    """
    sums = _Kept(source, n, of, keys, step, details)
    if n == of:
        return sums.all_kept()
    total = sums.keys[:, 0].log() + source.moments.log_first  # log of the largest possible S
    start = float((0.5 * math.log(2 * tol) - math.log(n / of) - total).min())
    march(source, sums, start, -float(total.max()) - 18, step, tol)
    return sums.result((aliasing(step) + 2 * tol) / 2)


class _Kept:
    """Running sums over nodes, for m queries and one fraction f = n / of."""

    def __init__(
        self, source: Source, n: int, of: int, keys: Tensor | None, step: float, details: bool
    ) -> None:
        self.source, self.step, self.details = source, step, details
        self.kept, self.dropped = n / of, (of - n) / of
        limit = source.moments.limit
        # (m, 1)
        self.keys = (limit.new_full((len(limit),), of) if keys is None else keys.to(limit))[:, None]
        self.sums = torch.zeros(3, limit.shape[0], dtype=torch.float64, device=limit.device)
        self.drift = torch.zeros_like(limit)

    def add(self, tau: Tensor) -> None:
        keys = self.keys
        f = self.source.contract(tau, _bernoulli(self.kept, self.dropped))
        single, dsingle = f.vectors["single"], f.vectors["dsingle"]
        square = keys * f["square"] + keys**2 * single.dot(single)
        dsquare = keys * f["dsquare"] + 2 * keys**2 * single.dot(dsingle)
        chance = torch.exp(keys * f["log_d"]) * self.step
        rows = torch.stack([square, keys * f["pair"], dsquare - keys * f["rise"] * square])
        self.sums += (rows * chance).sum(2)
        if self.details:
            self.drift += keys * single.along(chance[:, :, None])[:, :, 0]

    def found(self) -> Tensor:
        return self.sums[:2]

    def above(self, tau: float) -> Tensor:
        f = self.source.contract(
            self.sums.new_full((1,), tau), _bernoulli_tail(self.kept, self.dropped)
        )
        chance = 2 * self.keys * torch.exp(self.keys * f["log_d"])
        return (chance * torch.stack([f["square"], f["pair"]]))[:, :, 0]

    def below(self, tau: float) -> Tensor:
        """E[|sum e c|^2 t^2 exp(-tS)] <= t^2 f (1-f) sum_j e_j^2 |c_j|^2, because sum_j e_j c_j =
        0.
        """
        pool = self.source.moments
        square = self.dropped * torch.exp(2 * tau + pool.log_spread)
        return torch.stack([square, torch.exp(2 * tau + pool.log_pair)]) * (
            self.kept * self.keys[:, 0] / 2
        )

    def result(self, accuracy: float) -> NodeErrors:
        pool = self.source.moments
        mse, sum_p2, slope = (as_numpy(row[:, None]) for row in self.sums)
        return NodeErrors(
            mse=mse,
            sum_p2=sum_p2,
            dmse_dlogn=slope,
            limit=as_numpy(pool.limit),
            delta=as_numpy(pool.delta),
            bias=as_numpy(self.drift[:, None, :]) if self.details else None,
            accuracy=accuracy,
        )

    def all_kept(self) -> NodeErrors:
        """f = 1: the pool itself. No error, and no slope of its logarithm."""
        pool = self.source.moments
        self.sums[1] = torch.exp(pool.log_pair - 2 * pool.log_first) / self.keys[:, 0]
        self.sums[2] = math.nan
        return self.result(0.0)


# ---- The integral for keys of which some are kept surely and each of the others with one
# probability, on deposits of the others.


def sure_and_rest_error(
    source: Source,
    keys: Tensor,
    sure: SureKeys,
    share: float,
    reweight: bool,
    *,
    step: float,
    tol: float,
) -> InclusionErrors:
    """``source`` and ``keys`` (m,): the others; c is measured from the limit of all keys.
    ``share``: f, below 1.
    """
    return _Rest(source, keys.double()[:, None], sure, share, reweight, step).integrate(tol)


@lru_cache(maxsize=64)  # one function for one share: its kernels are remembered
def _kernels(kept: float) -> tuple[Family, float]:
    """As those of integral.bernoulli without derivatives, and the tau up to which the vector is
    taken in its early form.
    """
    dropped = 1 - kept
    early = math.log(math.log((1 + dropped) / dropped))

    def family(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        grown = torch.exp(u.clamp(max=HIGHEST))
        x, lost = torch.exp(-grown), torch.expm1(-grown)
        d = dropped + kept * x
        log_d = torch.where(kept * lost > -0.5, torch.log1p(kept * lost), d.log())
        pair = kept * grown * grown * x / d
        single = torch.where(tau <= early, dropped * grown * lost, grown * x) * kept / d
        return {
            "log_d": ("mass", log_d),
            "pair": ("mass", pair),
            "square": ("spread", dropped * pair / d),
            "single": ("value", single),
        }

    return family, early


@lru_cache(maxsize=64)
def _tail(kept: float) -> Family:
    def family(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        x = torch.exp(-torch.exp(u.clamp(max=HIGHEST)) / 2)
        d = 1 - kept + kept * x
        return {
            "log_d": ("mass", d.log()),
            "square": ("spread", kept * x / d),
            "pair": ("mass", kept * x / d),
        }

    return family


class _Rest(Sums):
    """For m queries and one share."""

    def __init__(
        self,
        source: Source,
        keys: Tensor,
        sure: SureKeys,
        share: float,
        reweight: bool,
        step: float,
    ) -> None:
        self.source, self.keys, self.sure, self.kept = source, keys, sure, share
        self.family, self.early = _kernels(share)
        light = share if reweight else 1.0  # 1/w
        self.pair, self.vector = sure.pair * light**2, sure.vector * light
        self.total = sure.total * light
        log_most = float((self.total + keys[:, 0] * source.moments.log_first.exp()).log().max())
        super().__init__(self.total.log(), sure.vector * (light - share), log_most, step)

    def lightest(self) -> Tensor:
        return torch.full_like(self.total, -self.source.span)

    def add(self, tau: Tensor) -> None:
        self.bottom = min(self.bottom, float(tau.min()))
        f, t = self.source.contract(tau, self.family), tau.exp()
        chance = (
            torch.exp((self.keys * f["log_d"] - t * self.total[:, None]).clamp_min(LEAST))
            * self.step
        )
        early = tau <= self.early
        length = self._vector(
            f.vectors["single"], torch.where(early, 0.0, t), torch.where(early, t, 0.0), chance
        )
        mse = length + self.keys * f["square"]
        sum_p2 = t.square() * self.pair[:, None] + self.keys * f["pair"]
        self.sums += torch.stack([(chance * mse).sum(1), (chance * sum_p2).sum(1)])

    def _vector(self, single: Vectors, late: Tensor, early: Tensor, chance: Tensor) -> Tensor:
        """|t M + sum g c|^2 at each query and node; its sums with the chances are the bias."""
        x = single.sums.double().mul_(self.keys * single.factor)  # (d, m, nodes)
        x += self.vector.T[:, :, None] * late
        x += self.first.T[:, :, None] * early
        self.drift += torch.einsum("dmt,mt->md", x, chance)
        return x.square_().sum(0)

    def above(self, tau: float) -> Tensor:
        f = self.source.contract(self.sums.new_full((1,), tau), _tail(self.kept))
        log_chance = self.keys[:, 0] * f["log_d"][:, 0] - math.exp(min(tau, 700.0)) / 2 * self.total
        rest = self.keys * torch.cat([f["square"], f["pair"]], dim=1)
        kept = torch.stack([self.sure.spread, self.sure.count]) + rest.T
        return 2 * torch.exp(log_chance.clamp_min(LEAST)) * kept

    def below(self, tau: float) -> Tensor:
        pool, keys = self.source.moments, self.keys[:, 0]
        square = (
            self.first.square().sum(1) + self.kept * (1 - self.kept) * keys * pool.log_spread.exp()
        )
        return (
            math.exp(2 * tau)
            / 2
            * torch.stack([square, self.pair + self.kept * keys * pool.log_pair.exp()])
        )
