"""Mixtures of laws: tilting re-weights the components, then tilts each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure, noise_device

__all__ = ["Mixture", "check_weights"]


class Mixture(Measure):
    """sum_k pi_k mu_k. Under the tilt the weights become pi_k exp(K_k(theta)), normalised.

    Tilted mean: the average of the components' tilted means; tilted covariance by the law of total covariance.
    Components may be any measures of one dimension, mixtures included.
    """

    def __init__(self, weights: Any, components: Sequence[Measure]) -> None:
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

    def _log_tilted_weights(self, rows: Tensor) -> Float64[Tensor, "m k"]:
        return self.weights.log() + torch.stack([c.log_laplace(rows) for c in self.components], dim=-1)

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return torch.logsumexp(self._log_tilted_weights(rows), dim=-1)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        weights = self._log_tilted_weights(rows).softmax(-1)
        return torch.einsum("mk,kmd->md", weights, torch.stack([c.tilted_mean(rows) for c in self.components]))

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        weights = self._log_tilted_weights(rows).softmax(-1)
        means = torch.stack([c.tilted_mean(rows) for c in self.components])
        apart = means - torch.einsum("mk,kmd->md", weights, means)
        between = torch.einsum("mk,kmi,kmj->mij", weights, apart, apart)
        return between + sum(weights[:, k, None, None] * c.tilted_cov(rows) for k, c in enumerate(self.components))

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
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
        raise ValueError(f"weights: expected no negative number, got {float(checked.min())}")
    total = float(checked.sum())
    if total <= 0:
        raise ValueError("weights: expected at least one above 0, got only zeros")
    return checked / total
