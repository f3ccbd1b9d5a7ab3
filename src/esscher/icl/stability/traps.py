"""Critical points outside the block form, where flows get stuck: one direction of the task is read
the other way round.

The block form ([S], Assumption 5.1) scores tokens by their covariates and reads their labels:
prediction v <A^T omega, g>. Its mirror image, a and r alone, scores by labels and reads covariates:
<r, omega> <a, g>, one direction of the task. A *trap* has both: in an eigenbasis of R^T W R and
Sigma, A is diagonal and a and r lie along one eigenvector e, so that

    along e:  v A_ee + a r > 0 with v A_ee < 0,        across e:  v A_ii > 0 as in the block form .

Reflections of the other axes and (a, r) -> (-a, -r) with e -> -e leave the risk as it is, and this
set is what they fix: a critical point of the risk on it is one of the risk. What decides is the
Hessian in all directions: a minimum keeps flows for ever, a saddle for about a multiple of 1/|its
most negative curvature|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.integrate import solve_ivp

from esscher.icl.layer import KINDS
from esscher.icl.stability.flow import white_hessian
from esscher.icl.stability.gradient import PopulationRisk
from esscher.icl.tasks import LinearTask

__all__ = ["Trap", "traps"]

Floats = npt.NDArray[np.float64]
FLAT = 1e-5  # curvatures smaller than this are taken for none; differences of gradients give 1e-8
LONG = 300.0  # time of the flow to a trap, on its set; Newton does the rest
STEPS = 20  # of Newton
EQUAL = 1e-9  # eigenvalues closer than this are one


@dataclass(frozen=True, eq=False)
class Trap:
    """A critical point: the variance of Sigma along e, the error there, and its curvatures in white
    coordinates, ascending.

    Directions along which symmetries of the risk move the point have none and are left out of the
    curvatures. ``slope`` is the norm of the gradient left. ``white`` is the point.
    """

    variance: float
    mse: float
    slope: float
    curvatures: Floats
    white: Floats

    @property
    def falling(self) -> int:
        """Directions in which the risk falls: 0 at a minimum."""
        return int((self.curvatures < -FLAT).sum())

    @property
    def steepest(self) -> float:
        """The most negative curvature, 0 at a minimum."""
        return float(self.curvatures[0]) if self.falling else 0.0


def traps(task: LinearTask, length: float | int, kind: str = KINDS[0]) -> list[Trap]:
    """The traps of a task, one for each eigenvector of Sigma that has one, the largest variance
    first.

    W has to share the eigenvectors of Sigma. Equal eigenvalues give one trap for all of their
    directions.
    """
    values, basis = np.linalg.eigh(task.sigma.numpy())
    turned = basis.T @ task.task_cov.numpy() @ basis
    if not np.allclose(turned, np.diag(np.diag(turned)), atol=1e-12 * np.abs(turned).max()):
        raise ValueError(
            "task_cov: expected the eigenvectors of sigma; traps along other directions are not"
            " sought"
        )
    risk = PopulationRisk(
        LinearTask(np.diag(values), np.diag(np.diag(turned)), task.noise), length, kind
    )
    found: list[Trap] = []
    for k in np.argsort(-values):
        if any(abs(values[k] - trap.variance) < EQUAL for trap in found):
            continue
        white = _on_the_set(risk, int(k))
        if white is not None:
            found.append(_judged(risk, white, values, int(k)))
    return found


def _spread(state: Floats, k: int) -> Floats:
    """white from (diagonal of A, a, r, v)."""
    d = state.size - 3
    white = np.zeros((d + 1, d + 1))
    white[range(d), range(d)] = state[:d]
    white[d, k], white[k, d], white[d, d] = state[d:]
    return white


def _on_the_set(risk: PopulationRisk, k: int) -> Floats | None:
    """Where the flow on the set ends that begins with A_kk against v; None where that is in the
    block form.
    """
    d = risk.tasks.shape[1]
    start = np.full(d + 3, 0.7)
    start[k], start[d:] = -0.1, (0.3, 2.0, 1.0)

    def slope(_: float, state: Floats) -> Floats:
        gradient = risk.white(_spread(state, k))[1]
        return -np.array([*np.diag(gradient)[:d], gradient[d, k], gradient[k, d], gradient[d, d]])

    end = solve_ivp(slope, (0.0, LONG), start, "LSODA", rtol=1e-5, atol=1e-7).y[:, -1]
    return _spread(end, k) if abs(end[d] * end[d + 1]) > 1e-3 and end[k] * end[d + 2] < 0 else None


def _judged(risk: PopulationRisk, white: Floats, values: Floats, k: int) -> Trap:
    """Newton steps across the orbits of symmetries, since a cubature has not all of them; then the
    curvatures across.
    """
    for _ in range(STEPS):
        gradient, hessian = white_hessian(risk, white)
        across = _across(white, values, scale=risk.share > 0)
        step = across @ np.linalg.solve(across.T @ hessian @ across, -across.T @ gradient)
        white = white + (step * min(1.0, 0.1 / max(float(np.abs(step).max()), 1e-300))).reshape(
            white.shape
        )
        if np.abs(step).max() < 1e-9:
            break
    gradient, hessian = white_hessian(risk, white)
    across = _across(white, values, scale=risk.share > 0)
    curvatures: Floats = np.linalg.eigvalsh(across.T @ hessian @ across).astype(np.float64)
    return Trap(
        float(values[k]),
        2 * risk.white(white)[0],
        float(np.linalg.norm(across.T @ gradient)),
        curvatures,
        white,
    )


def _across(white: Floats, values: Floats, scale: bool) -> Floats:
    """An orthonormal basis across the directions in which the point moves without a change of the
    risk.

    Rotations among equal eigenvalues turn the axes of A, a and r together. Linear attention has the
    scale besides: A and a grow as r and v shrink.
    """
    d = values.size
    moves = []
    for i in range(d):
        for j in range(i):
            if abs(values[i] - values[j]) < EQUAL:
                turn = np.zeros_like(white)
                turn[i, j], turn[j, i] = 1.0, -1.0
                moves.append((turn @ white - white @ turn).ravel())
    if scale:
        moves.append((white * np.where(np.arange(d + 1) < d, 1.0, -1.0)).ravel())
    if not moves:
        return np.eye(white.size)
    vectors, sizes, _ = np.linalg.svd(np.stack(moves, axis=1))
    return np.asarray(vectors[:, int((sizes > 1e-6 * sizes[0]).sum()) :])
