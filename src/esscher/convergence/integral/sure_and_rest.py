"""The integral for keys of which some are kept surely and each of the others with one probability, on deposits of the others.

With one probability f for the rest the sums of integral.inclusion are sums over keys of kernels of tau + score, as those of
integral.bernoulli: one deposit of the rest serves every f. Sure keys are a few numbers of each query. Weights are divided by
that of the rest, so that the rest counts once and a sure key 1/w times, w = 1, or 1/f where the rule reweights: the softmax
does not change. Since sum e c over all keys is 0, B = M (1/w - f), M the sum over the sure ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esscher.convergence.integral.formulas import HIGHEST, Family, Source, Vectors, aliasing, march
from esscher.convergence.integral.inclusion import LEAST, InclusionErrors

__all__ = ["SureKeys", "sure_and_rest_error"]


@dataclass(frozen=True)
class SureKeys:
    """Sums over the sure keys of each query, e measured from the anchor of its rest."""

    total: Tensor  # of e, (m,)
    pair: Tensor  # of e^2, (m,)
    vector: Tensor  # of e c, (m, d)
    spread: Tensor  # of |c|^2, (m,)
    count: Tensor  # (m,)


def sure_and_rest_error(
    source: Source, keys: Tensor, sure: SureKeys, share: float, reweight: bool, *, step: float, tol: float
) -> InclusionErrors:
    """``source`` and ``keys`` (m,): the others; c is measured from the limit of all keys. ``share``: f, below 1."""
    sums = _Sums(source, keys.double()[:, None], sure, share, reweight, step)
    march(sums, sums, sums.start(tol), sums.lowest(), step, tol)
    return sums.result(aliasing(step) / 2 + tol)


def _kernels(kept: float) -> tuple[Family, float]:
    """As those of integral.bernoulli without derivatives, and the tau up to which the vector is taken in its early form."""
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


def _tail(kept: float) -> Family:
    def family(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        x = torch.exp(-torch.exp(u.clamp(max=HIGHEST)) / 2)
        d = 1 - kept + kept * x
        return {"log_d": ("mass", d.log()), "square": ("spread", kept * x / d), "pair": ("mass", kept * x / d)}

    return family


class _Sums:
    """Running sums over nodes, for m queries and one share."""

    def __init__(self, source: Source, keys: Tensor, sure: SureKeys, share: float, reweight: bool, step: float) -> None:
        self.source, self.keys, self.kept, self.step = source, keys, share, step
        self.family, self.early = _kernels(share)
        light = share if reweight else 1.0  # 1/w
        self.total, self.pair, self.vector = sure.total * light, sure.pair * light**2, sure.vector * light
        self.sure = sure
        self.first = sure.vector * (light - share)  # B
        self.sums = torch.zeros(2, len(keys), dtype=torch.float64, device=keys.device)
        self.drift = torch.zeros_like(sure.vector)
        self.bottom = math.inf
        self.log_most = float((self.total + keys[:, 0] * source.moments.log_first.exp()).log().max())

    @property
    def span(self) -> float:
        least = torch.where(self.total > 0, self.total.log(), -self.source.span)
        return -float(least.clamp(max=0).min())

    @property
    def chunk(self) -> int:
        return 16

    def start(self, tol: float) -> float:
        return 0.5 * math.log(2 * tol) - self.log_most

    def lowest(self) -> float:
        return -self.log_most - 18

    def add(self, tau: Tensor) -> None:
        self.bottom = min(self.bottom, float(tau.min()))
        f, t = self.source.contract(tau, self.family), tau.exp()
        chance = torch.exp((self.keys * f["log_d"] - t * self.total[:, None]).clamp_min(LEAST)) * self.step
        early = tau <= self.early
        length = self._vector(f.vectors["single"], torch.where(early, 0.0, t), torch.where(early, t, 0.0), chance)
        mse = length + self.keys * f["square"]
        sum_p2 = t.square() * self.pair[:, None] + self.keys * f["pair"]
        self.sums += torch.stack([(chance * mse).sum(1), (chance * sum_p2).sum(1)])

    def _vector(self, single: Vectors, late: Tensor, early: Tensor, chance: Tensor) -> Tensor:
        """|t M + sum g c|^2 at each query and node, coordinate by coordinate; its sums with the chances are the bias."""
        factor = self.keys * single.factor
        out = torch.zeros_like(chance)
        for i, sums in enumerate(single.sums):
            x = sums.double() * factor + self.vector[:, i, None] * late + self.first[:, i, None] * early
            out.addcmul_(x, x)
            self.drift[:, i] += (x * chance).sum(1)
        return out

    def found(self) -> Tensor:
        return self.sums

    def above(self, tau: float) -> Tensor:
        f = self.source.contract(self.sums.new_full((1,), tau), _tail(self.kept))
        log_chance = self.keys[:, 0] * f["log_d"][:, 0] - math.exp(min(tau, 700.0)) / 2 * self.total
        rest = self.keys * torch.cat([f["square"], f["pair"]], dim=1)
        kept = torch.stack([self.sure.spread, self.sure.count]) + rest.T
        return 2 * torch.exp(log_chance.clamp_min(LEAST)) * kept

    def below(self, tau: float) -> Tensor:
        pool, keys = self.source.moments, self.keys[:, 0]
        square = self.first.square().sum(1) + self.kept * (1 - self.kept) * keys * pool.log_spread.exp()
        return math.exp(2 * tau) / 2 * torch.stack([square, self.pair + self.kept * keys * pool.log_pair.exp()])

    def result(self, accuracy: float) -> InclusionErrors:
        rest = math.exp(self.bottom) * self.step / math.expm1(self.step)
        return InclusionErrors(self.sums[0], self.drift + rest * self.first, self.sums[1], accuracy)
