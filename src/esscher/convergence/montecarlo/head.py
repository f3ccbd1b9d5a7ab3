"""The head that a spec describes, for a given law."""

from __future__ import annotations

import math

import torch

from esscher.attention.head import Head
from esscher.convergence.montecarlo.spec import HeadSpec
from esscher.measures.base import Measure

__all__ = ["build_head"]


def build_head(spec: HeadSpec, measure: Measure) -> Head:
    """Identity or random maps in the law's dimension, scaled to the spec's horizon for this law, or
    by its factor.
    """
    d = measure.dim
    if spec.kind == "identity":
        eye = torch.eye(d, dtype=torch.float64, device=measure.device)
        head = Head(eye, eye)
    else:
        generator = torch.Generator().manual_seed(spec.seed)
        weights = torch.randn(3, d, d, dtype=torch.float64, generator=generator) / math.sqrt(d)
        head = Head.from_weights(*weights.to(measure.device))
    if spec.horizon is not None:
        return head.scaled(spec.horizon / head.horizon(measure))
    return head if spec.scale is None else head.scaled(spec.scale)
