"""Gradient flow of (o, V, K, Q) from any first weights: what training with small steps follows,
without a prompt drawn.

SGD with rate eta on the loss (f - y)^2, twice the risk, moves by 2 eta in time a step: the paper's
500 000 steps of 1e-3 are t = 1000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.integrate import solve_ivp

from esscher.icl.stability.gradient import PopulationRisk
from esscher.icl.training.white import Weights, chain, whiten

__all__ = ["WeightFlow", "pack", "unpack", "weight_flow", "weight_hessian", "white_hessian"]

Floats = npt.NDArray[np.float64]
RTOL, ATOL = 1e-4, 1e-6  # of the solver; ten times finer changes an error at t = 1000 by 1e-5
STEP = 1e-5  # of differences of gradients


@dataclass(frozen=True, eq=False)
class WeightFlow:
    """Weights at some times, one row a time, with the mean squared error (twice the risk) and the
    norm of the gradient.
    """

    times: Floats
    states: Floats
    mse: Floats
    slopes: Floats
    like: Weights

    def at(self, index: int) -> Weights:
        return unpack(self.states[index], self.like)


def weight_flow(risk: PopulationRisk, start: Weights, times: Floats) -> WeightFlow:
    """Solve d theta/dt = -grad R(theta) from ``start`` in (o, V, K, Q); ``times`` begin with 0."""

    def slope(_: float, state: Floats) -> Floats:
        return -pack(risk(unpack(state, start))[1])

    def curvature(_: float, state: Floats) -> Floats:
        return -weight_hessian(risk, unpack(state, start), sides=1)

    span = (0.0, float(times[-1]))
    solution = solve_ivp(
        slope, span, pack(start), "LSODA", times, jac=curvature, rtol=RTOL, atol=ATOL
    )
    if not solution.success:
        raise RuntimeError(
            f"gradient flow: the solver stopped at t = {solution.t[-1]:g}: {solution.message}"
        )
    found = [risk(unpack(state, start)) for state in solution.y.T]
    mse = np.array([2.0 * value for value, _ in found])
    return WeightFlow(
        times,
        solution.y.T,
        mse,
        np.array([np.linalg.norm(pack(slope)) for _, slope in found]),
        start,
    )


def white_hessian(risk: PopulationRisk, white: Floats, sides: int = 2) -> tuple[Floats, Floats]:
    """The gradient in ``white`` and the Hessian, by central or one-sided differences of gradients;
    both flattened.
    """
    base = risk.white(white)[1].ravel()
    rows = np.empty((white.size, white.size))
    for i in range(white.size):
        moved = white.copy()
        moved.flat[i] += STEP
        ahead = risk.white(moved)[1].ravel()
        if sides == 2:
            moved.flat[i] -= 2 * STEP
        rows[i] = (ahead - (risk.white(moved)[1].ravel() if sides == 2 else base)) / (sides * STEP)
    return base, 0.5 * (rows + rows.T)


def weight_hessian(risk: PopulationRisk, weights: Weights, sides: int = 2) -> Floats:
    """The Hessian of the risk in (o, V, K, Q).

    ``white`` is bilinear in the weights and ``chain`` linear in them, so that it follows exactly
    from the Hessian in ``white``, which has (d + 1)^2 rows instead of the weights' 3 (d + 1)^2 and
    more.
    """
    root, white = risk.task.root, whiten(weights, risk.task.root)
    gradient, hessian = white_hessian(risk, white, sides)
    state = pack(weights)
    rows = np.empty((state.size, state.size))
    for j in range(state.size):
        moved, unit = state.copy(), np.zeros_like(state)
        moved[j] += 1.0
        unit[j] = 1.0
        turned = hessian @ (whiten(unpack(moved, weights), root) - white).ravel()
        outer = chain(weights, root, turned.reshape(white.shape))
        inner = chain(unpack(unit, weights), root, gradient.reshape(white.shape))
        rows[j] = pack(outer) + pack(inner)
    return rows


def pack(weights: Weights) -> Floats:
    """All weights in one vector."""
    return np.concatenate([part.ravel() for part in weights])


def unpack(state: Floats, like: Weights) -> Weights:
    """The inverse of ``pack`` for weights of the shapes of ``like``."""
    parts: list[Any] = []
    first = 0
    for part in like:
        parts.append(np.ascontiguousarray(state[first : first + part.size]).reshape(part.shape))
        first += part.size
    return Weights(*parts)
