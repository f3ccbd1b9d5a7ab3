"""Mixtures of laws: tilting re-weights the components, then tilts each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure, noise_device
from esscher.measures.wide import split

__all__ = ["Mixture", "check_weights", "log_mean_exp"]


class Mixture(Measure):
    """sum_k pi_k mu_k. Under the tilt the weights become pi_k exp(K_k(theta)), normalised.

    Tilted mean: the average of the components' tilted means; tilted covariance by the law of total covariance.
    Components may be any measures of one dimension, mixtures included.
    """

    def __init__(self, weights: Any, components: Sequence[Measure]) -> None:
        if not isinstance(components, Sequence) or not all(isinstance(component, Measure) for component in components):
            raise ValueError(f"components: expected a list of measures, got {components!r}")
        if len(components) == 0:
            raise ValueError("components: expected at least one measure, got none")
        dims = {component.dim for component in components}
        if len(dims) > 1:
            raise ValueError(f"components: expected measures of one dimension, got dimensions {sorted(dims)}")
        first = components[0]
        super().__init__(first.dim, first.dtype, first.device)
        self.weights = check_weights(weights, len(components)).to(self.device)
        self.components = tuple(components)

    def _check_domain(self, rows: Float64[Tensor, "m d"]) -> None:
        for component in self.components:
            component._check_domain(rows)

    def _transforms(self, rows: Tensor) -> Float64[Tensor, "m k"]:
        return torch.stack([c.log_laplace(rows) for c in self.components], dim=-1)

    def _tilted_weights(self, rows: Tensor) -> Float64[Tensor, "m k"]:
        return (self.weights.log() + self._transforms(rows)).softmax(-1)

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return log_mean_exp(self._transforms(rows), self.weights)

    def _apart(self, rows: Tensor, weights: Tensor) -> tuple[Float64[Tensor, "m d"], Float64[Tensor, "k m d"]]:
        """The tilted mean, and the components' means seen from it; taken from the heaviest component, which cancels least."""
        means = torch.stack([c.tilted_mean(rows) for c in self.components])
        heaviest = means[weights.argmax(-1), torch.arange(rows.shape[0], device=rows.device)]
        apart = means - heaviest
        offset = torch.einsum("mk,kmd->md", weights, apart)
        return heaviest + offset, apart - offset

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._apart(rows, self._tilted_weights(rows))[0]

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        weights = self._tilted_weights(rows)
        apart = weights.T.sqrt()[:, :, None] * self._apart(rows, weights)[1]
        between = torch.einsum("kmi,kmj->mij", apart, apart)
        return between + sum(weights[:, k, None, None] * c.tilted_cov(rows) for k, c in enumerate(self.components))

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        rows, _ = split(rows, ordinary=0.0)
        points = torch.stack([c.extreme(rows) for c in self.components])
        heights = torch.einsum("kmd,md->mk", points, rows)
        best = heights.max(-1, keepdim=True).values
        tied = heights >= best - 1e-12 * best.abs()
        if bool((tied.sum(-1) > 1).any()):
            raise ValueError(
                "hardmax limit: two components of the mixture reach the same largest score for this query, "
                "so their order at the edge decides; perturb the query or use one component"
            )
        return torch.einsum("mk,kmd->md", tied.to(points), points)

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        labels = torch.multinomial(self.weights.to(device), n, replacement=True, generator=generator).to(self.device)
        tokens = torch.empty(n, self.dim, dtype=torch.float64, device=self.device)
        for k, component in enumerate(self.components):
            chosen = labels == k
            count = int(chosen.sum())
            if count:
                tokens[chosen] = component.sample(count, generator).double()
        return tokens


def check_weights(weights: Any, size: int) -> Float64[Tensor, " k"]:
    """Non-negative weights of the given number, normalised to sum to one."""
    checked = as_tensor(weights, "weights", ndim=1).double()
    if checked.numel() != size:
        raise ValueError(f"weights: expected {size} numbers, got {checked.numel()}")
    if bool((checked < 0).any()):
        raise ValueError(f"weights: expected no negative number, got {float(checked.detach().min())}")
    largest = checked.max()
    if float(largest.detach()) <= 0:
        raise ValueError("weights: expected at least one above 0, got only zeros")
    checked = checked / largest  # so that the sum cannot overflow
    return checked / checked.sum()


def log_mean_exp(scores: Float64[Tensor, "m k"], weights: Float64[Tensor, " k"]) -> Float64[Tensor, " m"]:
    """log sum_k w_k exp(s_k), the weights summing to one; small scores by log1p and expm1, which do not round at one."""
    large = torch.logsumexp(scores + weights.log(), dim=-1)
    small = scores.detach().abs().amax(-1) < 0.5
    if not bool(small.any()):
        return large
    return torch.where(small, torch.log1p(torch.expm1(scores.clamp(-1.0, 1.0)) @ weights), large)
