"""The integral for keys of which some are kept surely and each of the others with one probability,
on deposits of the others.

With one probability f for the rest the sums of integral.inclusion are sums over keys of kernels of
tau + score, as those of integral.bernoulli: one deposit of the rest serves every f. Sure keys are a
few numbers of each query. Weights are divided by that of the rest, so that the rest counts once and
a sure key 1/w times, w = 1, or 1/f where the rule reweights: the softmax does not change. Since sum
e c over all keys is 0, B = M (1/w - f), M the sum over the sure ones.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from esscher.convergence.integral.formulas import HIGHEST, Family, Source, Vectors
from esscher.convergence.integral.inclusion import LEAST, InclusionErrors, Sums, SureKeys

__all__ = ["sure_and_rest_error"]


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
