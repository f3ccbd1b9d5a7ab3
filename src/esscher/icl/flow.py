"""Gradient flow of the population risk at any prompt length, and where it ends: no prompts are
drawn.

``start_block`` is where Theorem 5.2 of [S] begins, ``gradient_flow`` the way, ``flow_limit`` and
``final_parameters`` the end.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

from esscher.icl.exact import as_length, block_linear, risk, risk_gradient
from esscher.icl.layer import Block, Floats, Parameters, flatten, unflatten
from esscher.icl.quadrature import Rule
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_positive, as_tensor

SINGULAR = 1e-12  # an eigenvalue of Sigma below this share of the largest is 0
HANDOVER = 30.0  # time at which the flow is taken to have chosen its valley
LONGEST = 10**12
ROUNDING = 1e-11  # relative error of a risk


def start_limit(d: int, norm: float, *, printed: bool = False) -> float:
    """Upper limit of alpha, sqrt(2) / (d^{1/4} ||Sigma||^{1/2}): below it the start U11 = alpha G,
    v = alpha, |G|_F = 1, has less risk than no weights at all, which the proof needs.

    R(start) - R(0) = alpha^4 tr(Sigma G Sigma G Sigma)/2 - alpha^2 tr(Sigma G Sigma) < 0 for
    alpha^2 ||Sigma|| < 2, since ||G|| <= |G|_F = 1; Zhang et al. (2024) have alpha^2 sqrt(d)
    ||Sigma|| < 2. Derived here for W = I. Printed, [S] Theorem 5.2: ||Sigma|| for its root, which
    is not dimensionless and too wide for ||Sigma|| < 1.
    """
    if printed:
        return math.sqrt(2.0) / (math.sqrt(math.sqrt(d)) * norm)
    return math.sqrt(2.0) / math.sqrt(math.sqrt(d) * norm)


def alpha_limit(task: LinearTask) -> float:
    """The smaller of the two limits of alpha: Theorem 5.2 of [S] is for 0 < alpha below it."""
    norm = float(torch.linalg.matrix_norm(task.sigma, ord=2))
    return min(start_limit(task.dim, norm, printed=True), start_limit(task.dim, norm))


def start_block(task: LinearTask, alpha: Any = None, theta: Any = None) -> Block:
    """U11 = alpha Theta Theta^T / |Theta Theta^T|_F, v = alpha > 0: the start of [S], Assumption
    5.1.

    ``alpha`` is half of ``alpha_limit`` and Theta the identity unless given; Theta of any size is
    taken, since it is scaled. Theta^T Sigma = 0 is refused, which is what the proof needs where the
    paper prints Theta Sigma. Warns when alpha is outside the range of Theorem 5.2, and when the
    start has no less risk than no weights at all: then the flow may end at 0.
    """
    high = alpha_limit(task)
    alpha = 0.5 * high if alpha is None else as_positive(alpha, "alpha")
    root = torch.eye(task.dim) if theta is None else as_tensor(theta, "theta", ndim=2)
    if root.shape[0] != task.dim:
        raise ValueError(
            f"theta: expected {task.dim} rows, one for each covariate, got shape"
            f" {tuple(root.shape)}"
        )
    gram = root.double() @ root.double().mT
    if float(torch.linalg.matrix_norm(gram @ task.sigma)) == 0:
        raise ValueError(
            "theta: expected Theta Theta^T Sigma other than zero, since the flow never leaves such"
            " a start"
        )
    start = Block(alpha * gram / torch.linalg.matrix_norm(gram), alpha)
    own, nothing = (
        block_linear(share * start.U11.numpy(), share * alpha, task, math.inf)[0]
        for share in (1.0, 0.0)
    )
    if alpha >= high or own >= nothing > 0.5 * task.noise:
        warnings.warn(
            f"alpha = {alpha:g}: expected one below {high:g}, as Theorem 5.2 does, and a risk at"
            f" the start, here {own:.3g}, below that of no weights, {nothing:.3g}: the flow may not"
            " reach the Bayes risk",
            stacklevel=2,
        )
    return start


def flow_limit(task: LinearTask, start: Block, length: Any = math.inf) -> Block:
    """Where the gradient flow of linear attention ends; for an infinite prompt also that of softmax
    attention.

        v U11 -> A + v P(U11(0)),
        v^2 = (q + sqrt(q^2 + 4 |A|_F^2)) / 2,
        q = |P(U11(0))|_F^2 + v(0)^2 - |U11(0)|_F^2

    Sigma_L = (1 + 1/L) Sigma + (1/L) (tr(Sigma W) + tau^2) W^{-1}, which for W = I and no noise is
    (1 + 1/L) Sigma + (1/L) tr(Sigma) I of Zhang et al. (2024), Theorem 4.1. A = Sigma_L^{-1} on the
    range of Sigma and 0 off it, P(M) = M - Pi M Pi with Pi the projection
    on that range: the flow never moves P(U11), and |U11|_F^2 - v^2 is constant along it. With q = 0
    and A = Sigma^{-1} this is Remark 5.3 of [S], with singular Sigma its appendix F.3, with finite
    L Theorem 4.1 of Zhang et al. (2024). v(0) > 0 is assumed.

    Queries of another covariance than the prompt's change the way and not the end, as long as both
    are invertible.
    """
    length = as_length(length)
    if float(start.v) <= 0:
        raise ValueError(f"start: expected v above 0, got {float(start.v):g}")
    values, vectors = torch.linalg.eigh(task.sigma)
    basis = vectors[:, values > SINGULAR * values[-1]]
    rank = min(basis.shape[1], int(torch.linalg.matrix_rank(task.query_sigma)))
    if rank < task.dim and not torch.equal(task.query_sigma, task.sigma):
        raise ValueError(
            "query_sigma: expected both covariances invertible where they differ; otherwise the"
            " limit is not known"
        )
    sigma, W = basis.mT @ task.sigma @ basis, basis.mT @ task.task_cov @ basis
    share = 0.0 if math.isinf(length) else 1.0 / length
    eye = torch.eye(sigma.shape[0], dtype=torch.float64)
    system = (1.0 + share) * W @ sigma + share * (torch.sum(sigma * W) + task.noise) * eye
    if float(torch.linalg.cond(system)) > 1.0 / SINGULAR:
        raise ValueError(
            "task_cov: expected a law of tasks that fills the range of sigma; otherwise the limit"
            " is not unique"
        )
    best = basis @ torch.linalg.solve(system, W) @ basis.mT
    U = start.U11.detach().double()
    projection = basis @ basis.mT
    frozen = U - projection @ U @ projection
    offset = torch.sum(frozen**2) + float(start.v) ** 2 - torch.sum(U**2)
    v = torch.sqrt(0.5 * (offset + torch.sqrt(offset**2 + 4.0 * torch.sum(best**2))))
    return Block(best / v + frozen, v)


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
    converged: bool
    start: Parameters

    def at(self, index: int) -> Any:
        """The parameters at one of the times."""
        return unflatten(self.states[index], self.start)

    @property
    def end(self) -> Any:
        return self.at(-1)


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
    *,
    tolerance: float = 1e-9,
    rtol: float = 1e-8,
    atol: float = 1e-10,
) -> Flow:
    """Solve d theta / dt = -grad R_L(theta) from ``start``, in its own parametrisation, by LSODA of
    ``scipy.integrate.solve_ivp``, which has ``rtol`` and ``atol``.

    [S], equations (7) for finite ``length`` and (10) for an infinite one. ``times`` are where the
    flow is recorded (``flow_times()`` unless given); ``rule`` is that of ``risk``. The
    flow ends when the norm of the gradient falls below ``tolerance``.
    """
    length = as_length(length)
    grid = flow_times() if times is None else as_tensor(times, "times", ndim=1).double().numpy()
    if grid.size < 2 or grid[0] != 0 or (np.diff(grid) <= 0).any():
        raise ValueError("times: expected increasing times that begin with 0")

    def gradient(params: Parameters) -> tuple[float, Any]:
        return risk_gradient(task, params, length, kind, rule)

    def slope(_: float, state: Floats) -> Floats:
        return -flatten(gradient(unflatten(state, start))[1])

    def still(t: float, state: Floats) -> float:
        return float(np.linalg.norm(slope(t, state))) - tolerance

    still.terminal = True  # type: ignore[attr-defined]
    more: dict[str, Any] = {"events": still} if tolerance > 0 else {}
    span, first = (0.0, grid[-1]), flatten(start)
    solution = solve_ivp(slope, span, first, "LSODA", grid, rtol=rtol, atol=atol, **more)
    if not solution.success:
        raise RuntimeError(
            f"gradient flow: the solver stopped at t = {solution.t[-1]:g}: {solution.message}"
        )
    stopped, known = bool(solution.status == 1), list(solution.y.T)
    if stopped and len(known) < grid.size:
        known.append(solution.y_events[0][-1])
    known += [known[-1]] * (grid.size - len(known))
    found = [gradient(unflatten(state, start)) for state in known]
    risks = np.array([value for value, _ in found])
    gradients = np.array([np.linalg.norm(flatten(slope)) for _, slope in found])
    converged = stopped or bool(gradients[-1] <= tolerance)
    states = np.array(known)
    return Flow(grid, states, risks, gradients, converged, start)


def final_parameters(
    task: LinearTask,
    start: Block,
    length: Any = math.inf,
    kind: str = "softmax",
) -> Block:
    """The limit of the gradient flow from ``start`` in the block form.

    Closed form for linear attention and infinite prompts. Softmax attention on L tokens: the flow
    itself until t = 30, then a quasi-Newton descent down the valley it has reached, to a gradient
    of 1e-9. The valley is flat: along it v U11 is nearly constant, and the flow alone would need a
    time that grows with L.
    """
    length = as_length(length)
    if kind == "linear" or math.isinf(length):
        return flow_limit(task, start, length)
    flow = gradient_flow(task, start, length, kind, flow_times(HANDOVER, 8), rtol=1e-6, atol=1e-8)
    end: Block = flow.end
    if flow.converged:
        return end

    def objective(state: Floats) -> tuple[float, Floats]:
        params = unflatten(state, start)
        value, gradient = risk_gradient(task, params, length, kind)
        return value, flatten(gradient)

    options = {"gtol": 1e-9, "maxiter": 500}
    found = minimize(objective, flatten(end), jac=True, method="BFGS", options=options)
    end = unflatten(found.x, start)
    return end


def prompt_length_for(
    task: LinearTask, eps: Any, kind: str = "softmax", start: Block | None = None
) -> int:
    """L(eps) of Theorem 5.2: the shortest prompts on which the flow ends within ``eps`` of the best
    risk, tau^2 / 2.

    The final risk is taken to fall with L: the answer reaches the goal, and one token fewer does
    not.
    """
    goal = as_positive(eps, "eps")
    start = start_block(task) if start is None else start

    def reached(length: int) -> bool:
        end = final_parameters(task, start, length, kind)
        found = float(risk(task, end, length, kind)) - 0.5 * task.noise
        return found <= goal * (1 + ROUNDING)

    low, high = 0, 1
    while not reached(high):
        if high >= LONGEST:
            raise ValueError(
                f"eps: expected an excess risk that {LONGEST:g} tokens reach, got {goal:g}"
            )
        low, high = high, 10 * high
    return low + 1 + bisect_left(range(low + 1, high), True, key=reached)
