"""Gradient flow of the population risk at any prompt length: no prompts are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.integrate import solve_ivp

from esscher.icl.flow.coordinates import Coordinates, flatten, unflatten
from esscher.icl.layer import Parameters
from esscher.icl.risk.exact import risk_gradient
from esscher.icl.risk.softmax_general import Rule
from esscher.icl.risk.value import as_length
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_positive, as_tensor

__all__ = ["Flow", "Solver", "flow_times", "gradient_flow"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Flow:
    """A trajectory: times, the parameters at each of them (one row a time), the risk and the norm
    of its gradient.

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
    query_inside: bool = False

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
        """|theta(t) - theta'(t)|, Euclidean over all parameters, at the common times of two
        flows.
        """
        if self.states.shape != other.states.shape or not np.array_equal(self.times, other.times):
            raise ValueError(
                "flows: expected the same times and parametrisation; pass the same times to"
                " gradient_flow"
            )
        return np.asarray(np.linalg.norm(self.states - other.states, axis=1))


@dataclass(frozen=True)
class Solver:
    """How a flow is solved: it ends when the norm of the gradient falls below ``tolerance``; the
    rest is ``solve_ivp``'s.
    """

    tolerance: float = 1e-9
    rtol: float = 1e-8
    atol: float = 1e-10
    method: str = "LSODA"


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
    rule: Rule | None = None,
    query_inside: bool = False,
    **solver: Any,
) -> Flow:
    """Solve d theta / dt = -grad R_L(theta) from ``start``, in its own parametrisation, by an
    adaptive solver.

    [S], equations (7) for finite ``length`` and (10) for an infinite one. ``times`` are where the
    flow is recorded (``flow_times()`` unless given); ``rule`` and ``query_inside`` are those of
    ``risk``; ``solver``: fields of ``Solver``, as in ``rtol=1e-6``.
    """
    chosen = Solver(**solver)
    length = as_length(length)
    grid = flow_times() if times is None else as_tensor(times, "times", ndim=1).double().numpy()
    if grid.size < 2 or grid[0] != 0 or (np.diff(grid) <= 0).any():
        raise ValueError("times: expected increasing times that begin with 0")
    form = Coordinates.of(task, start)

    def slope(_: float, state: Floats) -> Floats:
        return -form.pull(
            risk_gradient(task, form.unpack(state), length, kind, rule, query_inside)[1]
        )

    def still(t: float, state: Floats) -> float:
        return float(np.linalg.norm(slope(t, state))) - chosen.tolerance

    still.terminal = True  # type: ignore[attr-defined]
    accuracy = {"method": chosen.method, "rtol": chosen.rtol, "atol": chosen.atol}
    solution = solve_ivp(
        slope, (0.0, grid[-1]), form.pull(start), t_eval=grid, events=still, **accuracy
    )
    if not solution.success:
        raise RuntimeError(
            f"gradient flow: the solver stopped at t = {solution.t[-1]:g}: {solution.message}"
        )
    stopped = bool(solution.status == 1)
    known = list(solution.y.T) + (
        [solution.y_events[0][-1]] if stopped and solution.t.size < grid.size else []
    )
    params = [form.unpack(state) for state in known]
    found = [risk_gradient(task, each, length, kind, rule, query_inside) for each in params]
    states = _extend([flatten(each) for each in params], grid.size)
    risks = _extend([np.float64(value) for value, _ in found], grid.size)
    gradients = _extend([np.linalg.norm(flatten(gradient)) for _, gradient in found], grid.size)
    converged = stopped or bool(gradients[-1] <= chosen.tolerance)
    return Flow(grid, states, risks, gradients, length, kind, converged, start, query_inside)


def _extend(rows: list[Any], size: int) -> Floats:
    """The rows, the last repeated up to ``size``."""
    return np.asarray(rows + [rows[-1]] * (size - len(rows)))
