"""How far the flow on L tokens can be from the flow on infinitely many: Lemma E.1 of [S] beside the
measured distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.icl.flow.coordinates import flatten, unflatten
from esscher.icl.flow.trajectory import Flow
from esscher.icl.layer import Parameters, tensors
from esscher.icl.risk.exact import risk_gradient, risk_tensor
from esscher.icl.tasks import LinearTask

__all__ = ["FlowBound", "flow_bound"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FlowBound:
    """Distance between two flows and what Groenwall's inequality allows, at the times of the flows.

    gap g2: largest |grad R_L - grad R_infinity| along the flow on L tokens. beta: largest norm of
    the Hessian of R_infinity between the two flows. ``bound`` = g2 t exp(beta t) as in (26) of [S];
    ``sharper`` = g2 (exp(m t) - 1) / m with m the most negative curvature met, which is what the
    same proof gives from <theta - theta', grad - grad'> alone.
    """

    times: Floats
    distance: Floats
    bound: Floats
    sharper: Floats
    gap: float
    beta: float
    curvature: float


def flow_bound(task: LinearTask, finite: Flow, infinite: Flow, stations: int = 5) -> FlowBound:
    """Lemma E.1 of [S] with the constants that its proof uses, measured where the proof uses them.

    The paper takes g2 and beta as suprema over a ball of radius 2 rho; the proof needs them only
    along the flow on L tokens, and on the segments between the two flows, where they are taken here
    at ``stations`` points each. Maxima over the recorded times, so record them densely. Past
    exp(700) the bound is infinite.
    """
    if not math.isinf(infinite.length):
        raise ValueError(
            f"infinite: expected a flow on an infinite prompt, got length {infinite.length:g}"
        )
    distance = finite.distance(infinite)
    like = finite.start
    gap, beta, curvature = 0.0, 0.0, 0.0
    for row, other in zip(finite.states, infinite.states, strict=True):
        params = unflatten(row, like)
        own = flatten(
            risk_gradient(task, params, finite.length, finite.kind, None, finite.query_inside)[1]
        )
        limit = flatten(risk_gradient(task, params, math.inf)[1])
        gap = max(gap, float(np.linalg.norm(own - limit)))
        for share in np.linspace(0.0, 1.0, stations):
            values = np.linalg.eigvalsh(
                _hessian(task, unflatten(row + share * (other - row), like))
            )
            beta, curvature = (
                max(beta, float(np.abs(values).max())),
                max(curvature, -float(values[0])),
            )
    t = finite.times
    with np.errstate(over="ignore"):
        bound = gap * t * np.exp(beta * t)
        sharper = gap * (np.expm1(curvature * t) / curvature if curvature > 0 else t)
    return FlowBound(t, distance, bound, sharper, gap, beta, curvature)


def _hessian(task: LinearTask, params: Parameters) -> Floats:
    """Hessian of R_infinity in the parametrisation of ``params``."""
    flat = torch.from_numpy(flatten(params))
    shapes = [tensor.shape for tensor in tensors(params)]
    ends = np.cumsum([shape.numel() for shape in shapes])

    def value(vector: Tensor) -> Tensor:
        parts = [
            vector[end - shape.numel() : end].reshape(shape)
            for end, shape in zip(ends, shapes, strict=True)
        ]
        return risk_tensor(task, type(params)(*parts), math.inf)

    hessian: Tensor = torch.autograd.functional.hessian(value, flat)  # type: ignore[no-untyped-call]
    return hessian.numpy()
