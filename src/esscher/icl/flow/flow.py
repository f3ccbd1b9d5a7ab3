"""Gradient flow of the population risk at any prompt length: no prompts are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.integrate import solve_ivp

from esscher.icl.layer import Block, Parameters
from esscher.icl.risk.risk import as_length, risk_gradient, tensors
from esscher.icl.risk.softmax import Rule
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_positive, as_tensor

__all__ = ["Flow", "flow_times", "gradient_flow"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Flow:
    """A trajectory: times, the parameters at each of them (one row a time), the risk and the norm of its gradient.

    ``converged``: the norm of the gradient fell below the tolerance; from then on the rows repeat.
    """

    times: Floats
    states: Floats
    risks: Floats
    gradients: Floats
    length: float | int
    kind: str
    converged: bool
    start: Parameters

    def at(self, index: int) -> Parameters:
        """The parameters at one of the times."""
        return unflatten(self.states[index], self.start)

    @property
    def end(self) -> Parameters:
        return self.at(-1)

    @property
    def final_risk(self) -> float:
        return float(self.risks[-1])

    def distance(self, other: Flow) -> Floats:
        """|theta(t) - theta'(t)|, Euclidean over all parameters, at the common times of two flows."""
        if self.states.shape != other.states.shape or not np.array_equal(self.times, other.times):
            raise ValueError("flows: expected the same times and parametrisation; pass the same times to gradient_flow")
        return np.asarray(np.linalg.norm(self.states - other.states, axis=1))


def flow_times(until: Any = 1e4, points: int = 120) -> Floats:
    """0, then ``points`` times in geometric progression from until/1e6 to ``until``."""
    end = as_positive(until, "until")
    return np.concatenate([[0.0], np.geomspace(end * 1e-6, end, points)])


def gradient_flow(
    task: LinearTask,
    start: Parameters,
    length: Any = math.inf,
    kind: str = "softmax",
    times: Any = None,
    tolerance: float = 1e-9,
    rtol: float = 1e-8,
    atol: float = 1e-10,
    method: str = "LSODA",
    rule: Rule | None = None,
) -> Flow:
    """Solve d theta / dt = -grad R_L(theta) from ``start``, in its own parametrisation, by an adaptive solver.

    [S], equations (7) for finite ``length`` and (10) for an infinite one. ``times`` are where the flow is recorded
    (``flow_times()`` unless given); it stops when the norm of the gradient falls below ``tolerance``. ``method``: any of
    scipy's ``solve_ivp``.
    """
    length = as_length(length)
    grid = flow_times() if times is None else as_tensor(times, "times", ndim=1).double().numpy()
    if grid.size < 2 or grid[0] != 0 or (np.diff(grid) <= 0).any():
        raise ValueError("times: expected increasing times that begin with 0")
    form = Coordinates.of(task, start)

    def slope(_: float, state: Floats) -> Floats:
        return -form.pull(risk_gradient(task, form.unpack(state), length, kind, rule)[1])

    def still(t: float, state: Floats) -> float:
        return float(np.linalg.norm(slope(t, state))) - tolerance

    still.terminal = True  # type: ignore[attr-defined]
    begin = form.pull(start)
    solution = solve_ivp(slope, (0.0, grid[-1]), begin, method, t_eval=grid, events=still, rtol=rtol, atol=atol)
    if not solution.success:
        raise RuntimeError(f"gradient flow: the solver stopped at t = {solution.t[-1]:g}: {solution.message}")
    stopped = bool(solution.status == 1)
    known = list(solution.y.T) + ([solution.y_events[0][-1]] if stopped and solution.t.size < grid.size else [])
    params = [form.unpack(state) for state in known]
    found = [risk_gradient(task, each, length, kind, rule) for each in params]
    states = _extend([flatten(each) for each in params], grid.size)
    risks = _extend([np.float64(value) for value, _ in found], grid.size)
    gradients = _extend([np.linalg.norm(flatten(gradient)) for _, gradient in found], grid.size)
    return Flow(grid, states, risks, gradients, length, kind, stopped or bool(gradients[-1] <= tolerance), start)


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The vector that the solver sees: all parameters, or d + 1 numbers where the flow keeps U11 diagonal.

    When U11(0), Sigma and W share an eigenbasis, the columns of ``basis``, so do U11(t) and every gradient.
    """

    like: Parameters
    basis: Floats | None

    @classmethod
    def of(cls, task: LinearTask, start: Parameters) -> Coordinates:
        if not isinstance(start, Block):
            return cls(start, None)
        matrices = [start.U11.detach().double().numpy(), task.sigma.numpy(), task.task_cov.numpy()]
        mixture = matrices[0] + 0.7310 * matrices[1] + 0.5170 * matrices[2]  # so that its eigenbasis is that of all three
        basis = np.linalg.eigh(0.5 * (mixture + mixture.T))[1]
        turned = [basis.T @ matrix @ basis for matrix in matrices]
        shared = all(np.abs(m - np.diag(np.diag(m))).max() <= 1e-13 * np.abs(m).max() for m in turned)
        return cls(start, basis if shared else None)

    def pull(self, params: Parameters) -> Floats:
        """Coordinates of parameters, or of a gradient."""
        if self.basis is None or not isinstance(params, Block):
            return flatten(params)
        U = params.U11.detach().double().numpy()
        return np.append(np.einsum("ik,ij,jk->k", self.basis, U, self.basis), float(params.v))

    def unpack(self, state: Floats) -> Parameters:
        if self.basis is None:
            return unflatten(state, self.like)
        U = (self.basis * state[:-1]) @ self.basis.T
        return Block(torch.from_numpy(U), torch.tensor(state[-1], dtype=torch.float64))


def flatten(params: Parameters) -> Floats:
    """All parameters in one vector."""
    return np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors(params)])


def unflatten(state: Floats, like: Parameters) -> Parameters:
    """The inverse of ``flatten``, for the parametrisation of ``like``."""
    parts, first = [], 0
    for tensor in tensors(like):
        last = first + tensor.numel()
        parts.append(torch.from_numpy(state[first:last].copy()).reshape(tensor.shape))
        first = last
    return type(like)(*parts)


def _extend(rows: list[Any], size: int) -> Floats:
    """The rows, the last repeated up to ``size``."""
    return np.asarray(rows + [rows[-1]] * (size - len(rows)))
