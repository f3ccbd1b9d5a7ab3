"""Weights of a mixture or a pool, and logarithms of weighted means."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor

__all__ = ["check_weights", "log_mean_exp"]


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


def log_mean_exp(
    scores: Float64[Tensor, "m k"], weights: Float64[Tensor, " k"]
) -> Float64[Tensor, " m"]:
    """log sum_k w_k exp(s_k), the weights summing to one; small scores by log1p and expm1, which do
    not round at one.
    """
    large = torch.logsumexp(scores + weights.log(), dim=-1)
    small = scores.detach().abs().amax(-1) < 0.5
    if not bool(small.any()):
        return large
    return torch.where(small, torch.log1p(torch.expm1(scores.clamp(-1.0, 1.0)) @ weights), large)
