"""A finite pool of tokens: attention over the pool is its limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure
from esscher.measures.line import Line, points
from esscher.measures.matrices import ball_radius, in_range

BLOCK = 1 << 21  # scores held at once (16 MiB in float64), whatever the size of the pool


class Pool(Measure):
    """N tokens drawn with replacement, each alike; with other weights: a mixture of pools.

    K(theta) = log (1/N) sum_j exp<theta, y_j>; the tilted mean is attention over the pool. Scores
    are computed in float64 block by block, so memory stays flat in N.
    """

    is_entire: ClassVar[bool] = True

    def __init__(self, tokens: Any) -> None:
        tokens = in_range(as_tensor(tokens, "tokens", ndim=2), "tokens")
        if tokens.shape[0] == 0 or tokens.shape[1] == 0:
            raise ValueError(
                "tokens: expected at least one token of at least one number, got shape"
                f" {tuple(tokens.shape)}"
            )
        super().__init__(tokens.shape[1], tokens.dtype, tokens.device)
        self.tokens: Tensor = tokens

    def __repr__(self) -> str:
        return f"Pool(dim={self.dim}, {self.size} tokens)"

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        parts = [torch.logsumexp(scores, dim=-1) for _, scores in self._blocks(rows)]
        return torch.logsumexp(torch.stack(parts), dim=0) - math.log(self.size)

    def _best(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """The largest score."""
        tops = [scores.amax(-1) for _, scores in self._blocks(rows.detach())]
        return torch.stack(tops).amax(0)

    def _weights(self, rows: Float64[Tensor, "m d"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of tokens with exp(<theta, y_j> - the largest score), not normalised."""
        best = self._best(rows)[:, None]
        for tokens, scores in self._blocks(rows):
            yield tokens, torch.exp((scores - best).clamp_max(0.0))

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        mean, mass = torch.zeros_like(rows), torch.zeros_like(rows[:, :1])
        for tokens, weights in self._weights(rows):
            mean, mass = mean + weights @ tokens, mass + weights.sum(-1, keepdim=True)
        return mean / mass

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        mean, mass = self._tilted_mean(rows), torch.zeros_like(rows[:, 0])
        cov = rows.new_zeros(rows.shape[0], self.dim, self.dim)
        for tokens, weights in self._weights(rows):
            mass = mass + weights.sum(-1)
            # centred on each query's own mean: no cancellation, flat memory
            for i in range(rows.shape[0]):
                apart = tokens - mean[i]
                cov[i] += (weights[i, :, None] * apart).T @ apart
        return cov / mass[:, None, None]

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        """Mean of the tokens with the largest score."""
        best = self._best(rows)
        total, mass = torch.zeros_like(rows), torch.zeros_like(best)
        for tokens, scores in self._blocks(rows):
            tied = (scores == best[:, None]).double()
            total, mass = total + tied @ tokens, mass + tied.sum(-1)
        return total / mass[:, None]

    def _blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of tokens with their scores <theta, y_j>."""
        step = max(1, BLOCK // max(1, rows.shape[0]))
        for start in range(0, self.size, step):
            tokens = self.tokens[start : start + step].double()
            yield tokens, rows @ tokens.T

    def _sample(self, n: int, generator: torch.Generator | None) -> Float[Tensor, "n d"]:
        device = self.device if generator is None else generator.device
        chosen = torch.randint(self.size, (n,), device=device, generator=generator)
        return self.tokens[chosen.to(self.device)]

    def as_pool(self) -> Pool:
        return self

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line]:
        return [points(theta, self.tokens.double())]

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d d"]:
        """In a ball of radius r <theta, y> lies in an interval of length 2 r |theta|, so S = r^2 I
        (Hoeffding).
        """
        return self._times_identity(ball_radius(self.tokens.double()))

    def support_radius(self) -> float:
        return float((self.tokens.double() - self.mean.double()).norm(dim=1).max())

    def norm_moment(self, order: int, V: Float64[Tensor, "d_out d"] | None = None) -> float:
        apart = self.tokens.double() - self.mean.double()
        apart = apart if V is None else apart @ V.T
        return float((apart.norm(dim=1) ** order).mean())
