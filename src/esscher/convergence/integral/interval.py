"""The probability that a sum of independent terms falls between two bounds, from its Laplace
transform.

With M(z) = E exp(-z S), S >= 0, and nodes z_k = theta + 2 pi i k / T,

    P(low < S < high) = (1/T) sum_k M(z_k) (exp(z_k high) - exp(z_k low)) / z_k,
    k from -inf to inf,

is the Fourier series of exp(-theta s) times the density, taken periodically: what lies beyond T
comes back damped by exp(-theta T) = exp(-DAMPED) (Abate and Whitt 1992). The series ends where M
has died out. A sum of few terms or of few values has atoms, M does not die, and there is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Exponentials", "interval_probability"]

DAMPED = 30.0  # exp(-30) = 1e-13
TOL = 1e-9


def interval_probability(
    transform: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, most: int
) -> Tensor | None:
    """For B sums at once: ``transform`` takes nodes (K,) to M (K, B), complex; ``low`` and ``high``
    (B,), high > 0.

    To about 1e-9; None where M does not die out within ``most`` nodes. Nothing lies below 0: a
    ``low`` there is as none.
    """
    period = 2 * float(high.max())
    theta = DAMPED / period
    low = torch.where(low > 0, low, -high / 2)
    total = torch.zeros_like(high)
    chunk = max(64, most // 64)
    for start in range(0, most, chunk):
        k = torch.arange(start, start + chunk, dtype=torch.float64, device=high.device)
        z = torch.complex(torch.full_like(k, theta), 2 * math.pi / period * k)
        term = transform(z) / z[:, None]
        up, down = (term * torch.exp(z[:, None] * bound) for bound in (high, low))
        twice = torch.where(k == 0, 1.0, 2.0)[:, None]
        total += (twice * (up - down).real).sum(0) / period
        if float(up[-chunk // 2 :].abs().max()) / period * (start + chunk) < TOL:
            return total.clamp(0, 1)
    return None


class Exponentials:
    """exp(-z x) at nodes in equal steps, chunk after chunk: the powers of the step are computed
    once.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.powers = x.new_zeros(0, dtype=torch.complex128)

    def at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """exp(-z_0 x), (n,), and what it is multiplied with for each node, (K, n)."""
        if len(self.powers) != len(z):
            self.powers = torch.exp(-(z - z[0])[:, None] * self.x)
        return torch.exp(-z[0] * self.x), self.powers
