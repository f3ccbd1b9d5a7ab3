"""Critical points outside the block form, where flows get stuck: one direction of the task is read the other way round.

The block form ([S], Assumption 5.1) scores tokens by their covariates and reads their labels: prediction v <A^T omega, g>. Its
mirror image, a and r alone, scores by labels and reads covariates: <r, omega> <a, g>, one direction of the task. A *trap* has
both: in an eigenbasis of R^T W R and Sigma, A is diagonal and a and r lie along one eigenvector e, so that

    along e:  v A_ee + a r > 0 with v A_ee < 0,        across e:  v A_ii > 0 as in the block form .

Reflections of the other axes and (a, r) -> (-a, -r) with e -> -e leave the risk as it is, and this set is what they fix: a
critical point of the risk on it is one of the risk. What decides is the Hessian in all directions: a minimum keeps flows
for ever, a saddle for about a multiple of 1/|its most negative curvature|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from esscher.icl.layer import KINDS
from esscher.icl.stability.flow import white_hessian
from esscher.icl.stability.gradient import PopulationRisk
from esscher.icl.tasks import LinearTask

__all__ = ["Trap", "traps"]

Floats = npt.NDArray[np.float64]
FLAT = 1e-4  # of the largest curvature: smaller ones are those of symmetries (scale, rotations) and of differences
STEPS = 20  # of Newton


@dataclass(frozen=True, eq=False)
class Trap:
    """A critical point: the variance of Sigma along e, the error there, and its curvatures in white coordinates, ascending.

    ``slope`` is the norm of the gradient left. ``white`` is the point.
    """

    variance: float
    mse: float
    slope: float
    curvatures: Floats
    white: Floats

    @property
    def falling(self) -> int:
        """Directions in which the risk falls: 0 at a minimum."""
        return int((self.curvatures < -FLAT * self.curvatures[-1]).sum())

    @property
    def steepest(self) -> float:
        """The most negative curvature, 0 at a minimum."""
        return float(min(self.curvatures[0], 0.0)) if self.falling else 0.0


def traps(task: LinearTask, length: float | int, kind: str = KINDS[0]) -> list[Trap]:
    """The traps of a task, one for each eigenvector of Sigma that has one, the largest variance first.

    W has to share the eigenvectors of Sigma. Equal eigenvalues give one trap for all of their directions.
    """
    values, basis = np.linalg.eigh(task.sigma.numpy())
    turned = basis.T @ task.task_cov.numpy() @ basis
    if not np.allclose(turned, np.diag(np.diag(turned)), atol=1e-12 * np.abs(turned).max()):
        raise ValueError("task_cov: expected the eigenvectors of sigma; traps along other directions are not sought")
    risk = PopulationRisk(LinearTask(np.diag(values), np.diag(np.diag(turned)), task.noise), length, kind)
    found: list[Trap] = []
    for k in np.argsort(-values):
        if any(abs(values[k] - trap.variance) < 1e-9 for trap in found):
            continue
        white = _on_the_set(risk, int(k))
        if white is not None:
            found.append(_judged(risk, white, float(values[k])))
    return found


def _spread(state: Floats, k: int) -> Floats:
    """white from (diagonal of A, a, r, v)."""
    d = state.size - 3
    white = np.zeros((d + 1, d + 1))
    white[range(d), range(d)] = state[:d]
    white[d, k], white[k, d], white[d, d] = state[d:]
    return white


def _on_the_set(risk: PopulationRisk, k: int) -> Floats | None:
    """The minimum on the set with A_kk against v, or None where it falls back into the block form or its mirror image."""
    d = risk.tasks.shape[1]
    start = np.full(d + 3, 0.7)
    start[k] = -0.1
    start[d] = 0.4

    def objective(state: Floats) -> tuple[float, Floats]:
        value, gradient = risk.white(_spread(state, k))
        return value, np.array([*np.diag(gradient)[:d], gradient[d, k], gradient[k, d], gradient[d, d]])

    end = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 2000}).x
    return _spread(end, k) if abs(end[d] * end[d + 1]) > 1e-3 and end[k] * end[d + 2] < 0 else None


def _judged(risk: PopulationRisk, white: Floats, variance: float) -> Trap:
    """Newton steps in all directions, flat ones left alone, since a cubature has not all symmetries of the risk; then curvatures."""
    for _ in range(STEPS):
        gradient, hessian = white_hessian(risk, white)
        if np.linalg.norm(gradient) < 1e-10:
            break
        step = np.linalg.lstsq(hessian, -gradient, rcond=FLAT)[0]
        white = white + (step * min(1.0, 0.1 / max(float(np.abs(step).max()), 1e-300))).reshape(white.shape)
    gradient, hessian = white_hessian(risk, white)
    return Trap(variance, 2 * risk.white(white)[0], float(np.linalg.norm(gradient)), np.linalg.eigvalsh(hessian), white)
