"""How softmax spreads its weight over n keys drawn independently: summed squares, entropy, and the
weight of a planted key.

With e = exp(score), phi(t) = E exp(-te), S the sum over the keys drawn, p = e / S, u = log t +
score and dtau = dt / t,

    E sum_j p_j^2      = n int E[e^2u exp(-e^u)] phi^(n-1) dtau
    E entropy          = - n int E[(u + gamma) e^u exp(-e^u)] phi^(n-1) dtau,        gamma =
        0.5772... (Euler)
    E e' / (e' + S')   = int e^u' exp(-e^u') phi^(n-1) dtau

the last for a planted key of weight e', always there, beside n - 1 drawn ones. The entropy is the
sum over the keys of (log S - score) e / S, and -log(S) / S = int (log t + gamma) exp(-tS) dt, the
derivative at a = 1 of S^-a = int t^(a-1) exp(-tS) dt / Gamma(a). So an offset of all scores cancels
inside the kernel.

A key drawn twice counts as two, each with its own weight: draws stand for tokens of a law, of which
the pool is a sample. The largest weight is in integral.largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esscher.convergence.integral.formulas import HIGHEST, TINY, Floats, Source, as_numpy, march

__all__ = ["Dispersion", "dispersion"]

LEAST = -700.0  # logarithm of the smallest power worth telling from 0
LOWEST = 40.0  # below -log n - LOWEST, exp(-40) of anything is left


@dataclass(frozen=True)
class Dispersion:
    """Expectations for each query and n, (m, len n); ``planted`` is None where no key is."""

    sum_p2: Floats
    entropy: Floats  # nats
    planted: Floats | None


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
    source: Source, n: Tensor, *, planted: Tensor | None, step: float, tol: float
) -> Dispersion:
    """For n keys drawn independently, every n at once. ``n``: float64, at least 1.

    ``planted`` (m,): the scores of planted keys, measured from the source's anchor as its own
    scores are, none above it.
    """
    sums = _Dispersion(source, n, planted, step)
    most = math.log(float(n.max()))
    start = float((math.log(tol) - most - source.moments.log_first).min())
    march(source, sums, start, -most - LOWEST - source.span * (planted is not None), step, tol)
    return sums.result()


class _Dispersion:
    """Running sums over nodes, for m queries and all n."""

    def __init__(self, source: Source, n: Tensor, planted: Tensor | None, step: float) -> None:
        self.source, self.n, self.planted, self.step = source, n, planted, step
        self.sums = n.new_zeros(len(source.moments.log_first), 3, len(n))
        self.log_phi = n.new_zeros(len(self.sums))  # at the last node added

    def add(self, tau: Tensor) -> None:
        f = self.source.contract(tau, _kernels)
        phi = f["left"].clamp_min(TINY)
        log_phi = torch.where(f["lost"] < 0.5, torch.log1p(-f["lost"].clamp(0, 0.5)), phi.log())
        rows = torch.stack([f["pair"], f["entropy"], self._own(tau)], dim=1)
        self.sums += rows @ (self._power(log_phi) * self.step)
        self.log_phi = log_phi[:, -1]

    def _own(self, tau: Tensor) -> Tensor:
        """e^u exp(-e^u) of the planted keys, (m, nodes)."""
        if self.planted is None:
            return tau.new_zeros(len(self.sums), len(tau))
        grown = torch.exp((tau + self.planted[:, None]).clamp(max=HIGHEST))
        return grown * torch.exp(-grown)

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
        own = torch.zeros_like(power)
        if self.planted is not None:
            own = power * torch.exp(-torch.exp((tau + self.planted).clamp(max=HIGHEST)))[:, None]
        return torch.stack([self.n * power * f["pair"], self.n * power * f["entropy"], own])

    def below(self, tau: float) -> Tensor:
        """n t^2 E e^2 / 2; n t E[e (|u| + 1.6)], where E[e |score|] <= - E e log E e; t e'."""
        pool = self.source.moments
        pair = self.n * torch.exp(2 * tau + pool.log_pair)[:, None] / 2
        entropy = (
            self.n * (torch.exp(tau + pool.log_first) * (abs(tau) + 1.6 - pool.log_first))[:, None]
        )
        own = (
            torch.zeros_like(pair)
            if self.planted is None
            else torch.exp(tau + self.planted)[:, None].expand_as(pair)
        )
        return torch.stack([pair, entropy, own])

    def result(self) -> Dispersion:
        one = self.n == 1  # known without an integral
        pair, entropy, own = self.sums.unbind(1)
        return Dispersion(
            sum_p2=as_numpy(torch.where(one, 1.0, self.n * pair)),
            entropy=as_numpy(torch.where(one, 0.0, (self.n * entropy).clamp_min(0))),
            planted=None if self.planted is None else as_numpy(torch.where(one, 1.0, own)),
        )
