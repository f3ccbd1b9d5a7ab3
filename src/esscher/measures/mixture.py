"""Mixtures of laws: tilting re-weights the components, then tilts each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float64
from pydantic import Field, model_validator
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure, power
from esscher.measures.fields import LawFields, LawSpec
from esscher.measures.line import Line
from esscher.measures.matrices import ball_radius


def check_weights(weights: Any, size: int) -> Float64[Tensor, " k"]:
    """Non-negative weights of the given number, normalised to sum to one."""
    checked = as_tensor(weights, "weights", ndim=1).double()
    largest = checked.max() if checked.numel() == size else checked.new_zeros(())
    if float(largest.detach()) <= 0 or bool((checked < 0).any()):
        raise ValueError(
            f"weights: expected {size} numbers of at least 0, one of them above, got {weights!r}"
        )
    checked = checked / largest  # so that the sum cannot overflow
    return checked / checked.sum()


class Mixture(Measure):
    """sum_k pi_k mu_k, of any measures of one dimension. Under the tilt the weights become pi_k
    exp(K_k(theta)), normalised; tilted covariance by the law of total covariance.
    """

    def __init__(self, weights: Any, components: Sequence[Measure]) -> None:
        known = isinstance(components, Sequence) and len(components) > 0
        if not known or not all(isinstance(part, Measure) for part in components):
            raise ValueError(f"components: expected a list of measures, got {components!r}")
        dims = {component.dim for component in components}
        if len(dims) > 1:
            raise ValueError(
                f"components: expected measures of one dimension, got dimensions {sorted(dims)}"
            )
        first = components[0]
        super().__init__(first.dim, first.dtype, first.device)
        self.weights = check_weights(weights, len(components)).to(self.device)
        self.components = tuple(components)

    def __repr__(self) -> str:
        parts = " + ".join(
            f"{weight:.3g} {part}"
            for weight, part in zip(self.weights.tolist(), self.components, strict=True)
        )
        return f"Mixture({parts})"

    def _log_weights(self, rows: Tensor) -> Float64[Tensor, "m k"]:
        """log pi_k + K_k(theta)."""
        transforms = [c.log_laplace(rows) for c in self.components]
        return torch.stack(transforms, dim=-1) + self.weights.log()

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return torch.logsumexp(self._log_weights(rows), dim=-1)

    def _apart(
        self, rows: Tensor, weights: Tensor
    ) -> tuple[Float64[Tensor, "m d"], Float64[Tensor, "k m d"]]:
        """The tilted mean, and the components' means seen from it; taken from the heaviest
        component, which cancels least.
        """
        means = torch.stack([c.tilted_mean(rows) for c in self.components])
        heaviest = means[weights.argmax(-1), torch.arange(rows.shape[0], device=rows.device)]
        apart = means - heaviest
        offset = torch.einsum("mk,kmd->md", weights, apart)
        return heaviest + offset, apart - offset

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._apart(rows, self._log_weights(rows).softmax(-1))[0]

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        weights = self._log_weights(rows).softmax(-1)
        apart = weights.T.sqrt()[:, :, None] * self._apart(rows, weights)[1]
        between = torch.einsum("kmi,kmj->mij", apart, apart)
        return between + sum(
            weights[:, k, None, None] * c.tilted_cov(rows) for k, c in enumerate(self.components)
        )

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        here = self.weights if generator is None else self.weights.to(generator.device)
        labels = torch.multinomial(here, n, replacement=True, generator=generator).to(self.device)
        tokens = torch.empty(n, self.dim, dtype=torch.float64, device=self.device)
        for k, component in enumerate(self.components):
            chosen = labels == k
            count = int(chosen.sum())
            if count:
                tokens[chosen] = component.sample(count, generator).double()
        return tokens

    @cached_property
    def _used(self) -> list[tuple[float, Measure]]:
        """Components of weight above 0."""
        pairs = zip(self.weights.tolist(), self.components, strict=True)
        return [(weight, component) for weight, component in pairs if weight > 0]

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        parts = [(weight, component.along(theta)) for weight, component in self._used]
        if any(lines is None for _, lines in parts):
            return None
        return [
            replace(line, log_weights=line.log_weights + math.log(weight))
            for weight, lines in parts
            for line in lines or ()
        ]

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d d"] | None:
        """S = (max_k sigma_k^2 + r^2) I for means in a ball of radius r: exp of the components'
        transforms is at most exp(sigma_k^2 theta^2 / 2) times the transform of the means, a pool.
        """
        sigmas = [component.sigma for _, component in self._used]
        if None in sigmas:
            return None
        means = torch.stack([component.mean.double() for _, component in self._used])
        largest = max(sigma or 0.0 for sigma in sigmas)
        return self._times_identity(math.hypot(largest, ball_radius(means)))

    def _apart_means(self) -> list[Tensor]:
        return [component.mean.double() - self.mean.double() for _, component in self._used]

    def support_radius(self) -> float | None:
        radii = [component.support_radius() for _, component in self._used]
        if None in radii:
            return None
        pairs = zip(radii, self._apart_means(), strict=True)
        return max((radius or 0.0) + float(apart.norm()) for radius, apart in pairs)

    def norm_moment(self, order: int, V: Float64[Tensor, "d_out d"] | None = None) -> float | None:
        """From above (Minkowski)."""
        total = 0.0
        for (weight, component), apart in zip(self._used, self._apart_means(), strict=True):
            own = component.norm_moment(order, V)
            if own is None:
                return None
            shift = float((apart if V is None else V @ apart).norm())
            total += weight * power(shift + own ** (1.0 / order), order)
        return total


class MixtureFields(LawFields):
    law: Literal["mixture"]
    weights: Annotated[tuple[float, ...], Field(min_length=1)]
    components: tuple[LawSpec, ...]

    @model_validator(mode="after")
    def _one_each(self) -> MixtureFields:
        if len(self.weights) != len(self.components):
            raise ValueError(f"weights: expected {len(self.components)}, got {len(self.weights)}")
        return self

    def build(self, dtype: torch.dtype, device: str) -> Mixture:
        return Mixture(
            list(self.weights), [component.build(dtype, device) for component in self.components]
        )
