"""Ellipsoids round finitely many points: what bounds the transform of a pool, and of the means of a
mixture.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["above", "ellipsoids"]

FLAT = 1e-6  # share of the trace that makes a flat ellipsoid solid


def ellipsoids(points: Float64[Tensor, "N d"]) -> list[Float64[Tensor, "d d"]]:
    """Matrices E with (y - c)^T E^{-1} (y - c) <= 1 for all points and some c.

    A ball first, and k (C + eps I) with C the scatter about c and k the largest (y - c)^T (C + eps
    I)^{-1} (y - c), for c the mean and c the middle of the bounding box.
    """
    centres = points.mean(dim=0), 0.5 * (points.min(dim=0).values + points.max(dim=0).values)
    eye = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    radius = min(float((points - centre).norm(dim=1).max()) for centre in centres)
    out = [radius**2 * eye]
    for centre in centres:
        apart = points - centre
        scatter = apart.T @ apart / points.shape[0]
        size = float(scatter.trace())
        if size > 0.0 and math.isfinite(size):
            shape = scatter + FLAT * size * eye
            reach = (apart * torch.linalg.solve(shape, apart.T).T).sum(dim=1).max()
            out.append(float(reach) * (1.0 + FLAT) * shape)  # the solution's rounding
    return out


def above(first: Float64[Tensor, "d d"], second: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
    """first + (second - first)_+, the positive part: at least both in Loewner's order."""
    values, vectors = torch.linalg.eigh(second - first)
    upper: Tensor = first + (vectors * values.clamp_min(0.0)) @ vectors.T
    return upper
