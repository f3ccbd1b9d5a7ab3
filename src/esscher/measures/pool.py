"""A finite pool of tokens: attention over the pool is its limit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure
from esscher.measures.line import Line, points
from esscher.measures.matrices import ball_radius, in_range

BLOCK = 1 << 21  # scores held at once (16 MiB in float64), whatever the size of the pool


class Pool(Measure):
    """N tokens drawn with replacement, with equal or given weights w_j.

    K(theta) = log sum_j w_j exp<theta, y_j>; the tilted mean is the softmax-weighted mean of the
    pool, which is attention over the pool. Scores are computed in float64 block by block, so memory
    stays flat in N.
    """

    is_entire: ClassVar[bool] = True

    def __init__(self, tokens: Any, weights: Any = None) -> None:
        tokens = in_range(as_tensor(tokens, "tokens", ndim=2), "tokens")
        if tokens.shape[0] == 0 or tokens.shape[1] == 0:
            raise ValueError(
                "tokens: expected at least one token of at least one number, got shape"
                f" {tuple(tokens.shape)}"
            )
        super().__init__(tokens.shape[1], tokens.dtype, tokens.device)
        self.tokens: Tensor = tokens
        self.weights: Tensor | None = None
        if weights is not None:
            self.weights = check_weights(weights, tokens.shape[0]).to(self.device)

    def __repr__(self) -> str:
        weighted = "" if self.weights is None else ", weighted"
        return f"Pool(dim={self.dim}, {self.size} tokens{weighted})"

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        parts = [
            torch.logsumexp(scores + share.log(), dim=-1) for _, scores, share in self._blocks(rows)
        ]
        return torch.logsumexp(torch.stack(parts), dim=0)

    def _best(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """The largest score; tokens of weight 0 do not count."""
        best = torch.full_like(rows[:, 0], -torch.inf)
        for _, scores, share in self._blocks(rows.detach()):
            best = torch.maximum(best, scores.masked_fill(share == 0, -torch.inf).max(-1).values)
        return best

    def _weights(self, rows: Float64[Tensor, "m d"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of tokens with w_j exp(<theta, y_j> - the largest score), not normalised: a
        logarithm of all would be known only to the rounding of large scores.
        """
        best = self._best(rows)[:, None]
        for tokens, scores, share in self._blocks(rows):
            yield tokens, torch.exp((scores - best).clamp_max(0.0)) * share

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
        """Mean of the tokens with the largest score, by weight; tokens of weight 0 do not count."""
        best = self._best(rows)
        total, mass = torch.zeros_like(rows), torch.zeros_like(best)
        for tokens, scores, share in self._blocks(rows):
            tied = (scores == best[:, None]) * share
            total, mass = total + tied @ tokens, mass + tied.sum(-1)
        return total / mass[:, None]

    def _blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of tokens with their scores <theta, y_j> and their weights, which sum to one."""
        step = max(1, BLOCK // max(1, rows.shape[0]))
        even = torch.full((step,), 1.0 / self.size, dtype=torch.float64, device=self.device)
        for start in range(0, self.size, step):
            tokens = self.tokens[start : start + step].double()
            share = even if self.weights is None else self.weights[start : start + step]
            yield tokens, rows @ tokens.T, share[: len(tokens)]

    def _sample(self, n: int, generator: torch.Generator | None) -> Float[Tensor, "n d"]:
        if self.weights is not None:
            return self.tokens[choose(self.weights, n, generator)]
        device = self.device if generator is None else generator.device
        chosen = torch.randint(self.size, (n,), device=device, generator=generator)
        return self.tokens[chosen.to(self.device)]

    def _used(self) -> Float64[Tensor, "k d"]:
        """Tokens of weight above 0."""
        tokens = self.tokens.double()
        return tokens if self.weights is None else tokens[self.weights > 0]

    def as_pool(self) -> Pool:
        return self

    def points(self) -> Float64[Tensor, "N d"] | None:
        return self.tokens.double() if self.weights is None else None

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line]:
        log_weights = None if self.weights is None else self.weights.log()
        return [points(theta, self.tokens.double(), log_weights)]

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d d"]:
        """In a ball of radius r <theta, y> lies in an interval of length 2 r |theta|, so S = r^2 I
        (Hoeffding).
        """
        return self._times_identity(ball_radius(self._used()))

    def support_radius(self) -> float:
        return float((self._used() - self.mean.double()).norm(dim=1).max())

    def norm_moment(self, order: int) -> float:
        return self._average((self.tokens.double() - self.mean.double()).norm(dim=1) ** order)

    def value_fourth_moment(self, V: Float64[Tensor, "d_out d"]) -> float:
        return self._average(((self.tokens.double() - self.mean.double()) @ V.T).norm(dim=1) ** 4)

    def _average(self, sizes: Float64[Tensor, " N"]) -> float:
        return float(sizes.mean() if self.weights is None else sizes @ self.weights)


def check_weights(weights: Any, size: int) -> Float64[Tensor, " k"]:
    """Non-negative weights of the given number, normalised to sum to one."""
    checked = as_tensor(weights, "weights", ndim=1).double()
    if checked.numel() != size:
        raise ValueError(f"weights: expected {size} numbers, got {checked.numel()}")
    if bool((checked < 0).any()):
        raise ValueError(
            f"weights: expected no negative number, got {float(checked.detach().min())}"
        )
    largest = checked.max()
    if float(largest.detach()) <= 0:
        raise ValueError("weights: expected at least one above 0, got only zeros")
    checked = checked / largest  # so that the sum cannot overflow
    return checked / checked.sum()


def choose(
    weights: Float64[Tensor, " k"], n: int, generator: torch.Generator | None
) -> Int64[Tensor, " n"]:
    """n places drawn by weight, with replacement, where the generator lives."""
    here = weights if generator is None else weights.to(generator.device)
    return torch.multinomial(here, n, replacement=True, generator=generator).to(weights.device)
