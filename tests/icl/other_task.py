"""A task from outside: covariates of any law, labels through a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import esscher as es
from esscher.icl import Prompts


@dataclass
class OtherTask:
    """y = link(<w, x>) + N(0, noise), w ~ N(0, variance I), I/d unless given."""

    covariates: es.measures.Measure
    link: Callable[[Tensor], Tensor] = lambda y: y
    noise: float = 0.1
    variance: float | None = None

    def __post_init__(self) -> None:
        self.dim = self.covariates.dim

    def sample(self, batch: int, length: int, generator: torch.Generator | None = None) -> Prompts:
        w = torch.randn(batch, self.dim, 1, dtype=torch.float64, generator=generator)
        w *= (self.variance or 1 / self.dim) ** 0.5
        x = self.covariates.sample(batch * (length + 1), generator).double()
        x = x.reshape(batch, length + 1, self.dim)
        y = self.link(x @ w)
        y = y + self.noise**0.5 * torch.randn(y.shape, dtype=torch.float64, generator=generator)
        return Prompts(torch.cat([x, y], dim=-1)[:, :-1], x[:, -1], y[:, -1, 0])
