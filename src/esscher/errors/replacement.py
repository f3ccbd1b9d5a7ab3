"""The integrals for n keys drawn independently: one set of nodes serves every n. Formulas:
integral.formulas.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.errors.formulas import (
    HIGHEST,
    TINY,
    NodeErrors,
    Source,
    aliasing,
    as_numpy,
    march,
)

LEAST = -700.0  # logarithm of the smallest power worth telling from 0: smaller numbers are slow


def _replacement(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Kernels 1 - exp(-e^u), exp(-e^u), e^2u exp(-e^u) and e^u exp(-e^u).

    Since E[e c] = 0, e^u may be taken from the last one: e^u (exp(-e^u) - 1). That is the smaller
    of the two below t e_max = log 2, and keeps the digits that cancel when n is large.
    """
    grown = torch.exp(u.clamp(max=HIGHEST))
    left = torch.exp(-grown)
    lost = torch.expm1(-grown)
    pair = grown * grown * left
    single = grown * torch.where(tau <= math.log(math.log(2)), lost, left)
    return {
        "lost": ("mass", -lost),
        "left": ("mass", left),
        "pair": ("mass", pair),
        "square": ("spread", pair),
        "single": ("value", single),
    }


def _replacement_tail(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
    """int over t' > t of t' e^2 exp(-t'e) dt' = (1 + te) exp(-te)."""
    grown = torch.exp(u.clamp(max=HIGHEST))
    tail = (1 + grown) * torch.exp(-grown)
    return {"square": ("spread", tail), "pair": ("mass", tail)}


def replacement_errors(
    source: Source, n: Tensor, *, step: float, tol: float, details: bool = False
) -> NodeErrors:
    """The error for n keys drawn independently, every n at once. ``n``: float64, at least 1."""
    sums = _Replacement(source, n, step, details)
    most = math.log(float(n.max()))
    start = float((0.5 * math.log(2 * tol) - most - source.moments.log_first).min())
    march(source, sums, start, -most - 18, step, tol)
    return sums.result((aliasing(step) + 2 * tol) / 2)


class _Replacement:
    """Running sums over nodes, for m queries and all n."""

    def __init__(self, source: Source, n: Tensor, step: float, details: bool) -> None:
        self.source, self.n, self.step, self.details = source, n, step, details
        m, width = source.moments.limit.shape
        # integrals of square phi^(n-1), cross phi^(n-1), pair phi^(n-1), and of the first two times
        # log phi
        self.sums = n.new_zeros(m, 5, len(n))
        self.drift = n.new_zeros(m, width, len(n))
        self.log_phi = n.new_zeros(m)  # at the last node added

    def add(self, tau: Tensor) -> None:
        f = self.source.contract(tau, _replacement)
        phi = (f["left"] + self.source.moments.missing).clamp_min(TINY)
        log_phi = torch.where(f["lost"] < 0.5, torch.log1p(-f["lost"].clamp(0, 0.5)), phi.log())
        # |E[e c x]|^2 <= phi E[e^2 |c|^2 x] (Cauchy-Schwarz), which rounding must not break where
        # phi underflows
        single = f.vectors["single"]
        cross = torch.minimum(single.dot(single) / phi, f["square"])
        rows = torch.stack(
            [f["square"], cross, f["pair"], f["square"] * log_phi, cross * log_phi], dim=1
        )
        power = self._power(log_phi) * self.step
        self.sums += rows @ power
        if self.details:
            self.drift += single.along(power)
        self.log_phi = log_phi[:, -1]

    def _power(self, log_phi: Tensor) -> Tensor:
        """phi^(n-1)."""
        return torch.exp((log_phi[..., None] * (self.n - 1)).clamp_min(LEAST))

    def found(self) -> Tensor:
        square, cross, pair = self.sums[:, :3].unbind(1)
        return torch.stack([self.n * square + self.n * (self.n - 1) * cross, self.n * pair])

    def above(self, tau: float) -> Tensor:
        """The cross term is below (n - 1) times the other, by Cauchy-Schwarz; phi only falls."""
        f = self.source.contract(self.n.new_full((1,), tau), _replacement_tail)
        power = self.n * self._power(self.log_phi)
        return torch.stack([self.n * power * f["square"], power * f["pair"]])

    def below(self, tau: float) -> Tensor:
        """E[|sum e c|^2 t^2 exp(-tS)] <= t^2 n E[e^2 |c|^2], because E[e c] = 0."""
        pool = self.source.moments
        return (
            self.n
            * torch.exp(2 * tau + torch.stack([pool.log_spread, pool.log_pair]))[:, :, None]
            / 2
        )

    def result(self, accuracy: float) -> NodeErrors:
        n, pool = self.n, self.source.moments
        one = n == 1  # known without an integral
        first, cross, pair, first_log, cross_log = self.sums.unbind(1)
        slope = (
            n * first
            + n.square() * first_log
            + n * (2 * n - 1) * cross
            + n.square() * (n - 1) * cross_log
        )
        bias = torch.where(one, pool.mean[:, :, None], n * self.drift).transpose(1, 2)
        return NodeErrors(
            mse=as_numpy(torch.where(one, pool.variance[:, None], self.found()[0])),
            sum_p2=as_numpy(torch.where(one, 1.0 - pool.missing, n * pair)),
            dmse_dlogn=as_numpy(slope),
            limit=as_numpy(pool.limit),
            delta=as_numpy(pool.delta),
            bias=as_numpy(bias) if self.details else None,
            accuracy=accuracy,
        )


# ---- Errors of two heads on one random set of keys: they lose the same keys, so that their
# errors are correlated.

STEP = 0.4  # of log s and log t: the trapezoid rule converges geometrically
SMALL, LARGE = 1e-9, 45.0  # where s S begins and where exp(-s S) ends


def pair_error(
    scores: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    centred: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]],
    probability: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] | None = None,
    *,
    step: float = STEP,
) -> float:
    """E <e_1, e_2> of one query of each head; ``centred``: values minus the limit, in one space."""
    p = probability.double()
    seen = p > 0
    p = p[seen]
    w = torch.ones_like(p) if weight is None else weight.double()[seen]
    eps, phi = (w * torch.exp(one.double()[seen] - one.double()[seen].max()) for one in scores)
    c, d = (values.double()[seen] for values in centred)
    inner = (c * d).sum(1)
    total = 0.0
    across = _nodes(phi, p, step)
    for s in _nodes(eps, p, step).tolist():
        decay = p * torch.exp(-s * eps - across[:, None] * phi)  # (nodes, n)
        denominator = 1 - p + decay
        g = decay / denominator
        first, second = (g * eps) @ c, (g * phi) @ d
        inside = (first * second).sum(1) + (g * (1 - g) * (eps * phi)) @ inner
        product = torch.log(denominator).sum(1).exp()
        total += s * float((across * product * inside).sum())
    return step * step * total


def _nodes(eps: Tensor, p: Tensor, step: float) -> Tensor:
    """From well below 1 / E S to where exp(-s S) is gone, whichever keys are kept: with sure keys
    that is sooner.
    """
    sure = float(eps[p == 1].sum())
    end = LARGE / (sure if sure > 0 else float(eps.min()))
    first = math.log(SMALL / float((p * eps).sum()))
    return torch.exp(
        torch.arange(first, math.log(end) + step, step, dtype=torch.float64, device=eps.device)
    )


def first_order_pair(
    attention: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    centred: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]],
    probability: Float[Tensor, " n"],
) -> float:
    """sum_j (1/p_j - 1) pi_j rho_j <c_j, d_j>; where chances differ, of reweighted keys."""
    p = probability.double().clamp_min(torch.finfo(torch.float64).tiny)
    pi, rho = (weights.double() for weights in attention)
    c, d = (values.double() for values in centred)
    return float(((1 / p - 1) * pi * rho * (c * d).sum(1)).sum())
