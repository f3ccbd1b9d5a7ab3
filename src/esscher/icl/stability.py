"""Flows of (O, V, K, Q) from the first weights of training: which of them get stuck, where, and how
far the two models part.

SGD with rate eta on the loss (f - y)^2, twice the risk, moves by 2 eta in time a step: the paper's
500 000 steps of 1e-3 are t = 1000. Weights are o (the last row of O, the only one that acts), V, K
and Q. A prompt meets them through U = K^T Q without its last column, which meets the query's 0, and
c = V^T o. With R the root of Sigma and 1 beside it, ``white`` = R^T [U, c] R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.integrate import solve_ivp
from scipy.stats import binomtest, rankdata

from esscher.icl.comparison import ABOVE, STUCK
from esscher.icl.exact import risk
from esscher.icl.layer import KINDS, OVKQ, UV, default_weights
from esscher.icl.quadrature import error_table, product_rule
from esscher.icl.tasks import LinearTask
from esscher.intervals import share_interval

Floats = npt.NDArray[np.float64]

RTOL, ATOL = 1e-4, 1e-6  # of the solver; ten times finer changes an error at t = 1000 by 1e-5
STEP = 1e-5  # of differences of gradients
# two shells are exact for the fourth degree; more of either change the excess by 1e-4
TASK_SHELLS, QUERY_SHELLS = 2, 4
ROTATIONS = 2  # of the cubature that gives the error where a flow ends
# norm of the gradient of the risk below which a flow is said to stay; it begins near 0.1 and passes
# 0.3
SLOW = 0.01
FLAT = 1e-5  # curvatures smaller than this are taken for none; differences of gradients give 1e-8
LONG = 300.0  # time of the flow to a trap, on its set; Newton does the rest
STEPS = 20  # of Newton
EQUAL = 1e-9  # eigenvalues closer than this are one
ALL = "all"


class Weights(NamedTuple):
    """o, V, K, Q of a model, or a gradient in them."""

    o: Floats
    V: Floats
    K: Floats
    Q: Floats

    def uv(self) -> UV:
        V = torch.zeros(self.V.shape[1], self.V.shape[1], dtype=torch.float64)
        V[-1] = torch.from_numpy(self.V.T @ self.o)
        return UV(torch.from_numpy(self.K.T @ self.Q), V)


def weights_of(params: OVKQ) -> Weights:
    """The parameters that act, as arrays of their own."""
    parts = (params.O[-1], params.V, params.K, params.Q)
    return Weights(*(np.array(part.numpy(), np.float64) for part in parts))


def first_weights(dim: int, seed: int) -> Weights:
    """The first weights that ``train`` draws with this seed."""
    return weights_of(default_weights(dim, torch.Generator().manual_seed(seed)))


class PopulationRisk:
    """R_L of one kind of attention and its gradient, as a function of ``white`` or of (o, V, K,
    Q); ``length`` may be infinite.

    In white coordinates the score of a token g' ~ N(0, I_{d+1}) is <theta, g'> and its value <c,
    g'>. With omega = R^T w the task, x_q = R g the query and ``white`` = [[A, r], [a^T, v]],

        theta = B g,   B = [A + omega a^T; tau a^T],   c = (r + v omega, tau v),   label = <omega,
        g> .

    For infinite prompts and for linear attention the average over g is a norm, and what is left is
    a polynomial of degree 4 in omega, which the cubature integrates exactly:

        R_infinity = 1/2 E|B^T c - omega|^2 + tau^2/2,
        R_L = R_infinity + (1/2L) E[ |c|^2 |B|_F^2 + |B^T c|^2 ]  (linear) .

    Softmax attention adds the excess of ``exact`` with s = |theta|, kappa = <c, theta>, averaged
    over the product of a cubature of tasks and one of queries.
    """

    def __init__(self, task: LinearTask, length: float | int, kind: str, seed: int = 0) -> None:
        if task.shifted:
            raise ValueError(
                "query_sigma: expected queries of the law of the prompt; a shifted task has risks"
                " and flows of the block form only"
            )
        self.root = np.eye(task.dim + 1)
        self.root[:-1, :-1] = task.root.numpy()
        self.noise, self.length = math.sqrt(task.noise), length
        self.share = 1.0 / length if kind == "linear" else 0.0
        self.excess = kind == "softmax" and not math.isinf(length)
        rule = product_rule(task.dim, 1, seed, (TASK_SHELLS, QUERY_SHELLS))
        task_root = (task.root.mT @ task.task_root).numpy()
        self.tasks = rule.tasks.points[0].numpy() @ task_root.T
        self.queries = rule.queries.points[0].numpy()
        self.task_weights = rule.tasks.weights.numpy()
        self.query_weights = rule.queries.weights.numpy()

    def white(self, white: Floats) -> tuple[float, Floats]:
        """The risk and its gradient at the matrix ``white``."""
        d, omega, tau, share = white.shape[0] - 1, self.tasks, self.noise, self.share
        B = np.empty((len(omega), d + 1, d))
        B[:, :d], B[:, d] = white[:d, :d] + omega[:, :, None] * white[d, :d], tau * white[d, :d]
        c = np.empty((len(omega), d + 1))
        c[:, :d], c[:, d] = white[:d, d] + white[d, d] * omega, tau * white[d, d]
        output = (c[:, None, :] @ B)[:, 0]
        miss = output - omega
        pull = miss + share * output
        scores, values = (B * B).sum(axis=(1, 2)), (c * c).sum(axis=1)
        loss = (miss**2 + share * output**2).sum(axis=1) + share * scores * values
        by_c = (B @ pull[:, :, None])[:, :, 0] + share * scores[:, None] * c
        by_B = c[:, :, None] * pull[:, None, :] + share * values[:, None, None] * B
        if self.excess:
            added, excess_B, excess_c = self._excess(B, c, values)
            loss, by_B, by_c = loss + added, by_B + excess_B, by_c + excess_c
        weights, gradient = self.task_weights, np.empty_like(white)
        by_B, by_c = weights[:, None, None] * by_B, weights[:, None] * by_c
        gradient[:d, :d], gradient[:d, d] = by_B[:, :d].sum(axis=0), by_c[:, :d].sum(axis=0)
        gradient[d, :d] = (omega[:, :, None] * by_B[:, :d]).sum(axis=(0, 1))
        gradient[d, :d] += tau * by_B[:, d].sum(axis=0)
        gradient[d, d] = (omega * by_c[:, :d]).sum() + tau * by_c[:, d].sum()
        return float(0.5 * weights @ loss + 0.5 * tau * tau), gradient

    def _excess(self, B: Floats, c: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
        """E (f2 |c|^2 + (f1 - f2) kappa^2/s^2 - 2 f2 kappa (kappa - label)) over queries for each
        task, and the gradients of half of it in B and c.
        """
        weight, size = self.query_weights, values[:, None]
        theta = B @ self.queries.T
        # below it f1 - f2 has no digits left, and kappa/s is bounded by |c|
        s = np.maximum(np.sqrt((theta * theta).sum(axis=1)), 1e-6)
        f1, f2, slope1, slope2 = error_table(int(self.length)).evaluate(s)
        kappa, label = (c[:, None, :] @ theta)[:, 0], self.tasks @ self.queries.T
        part, along, miss = (kappa / s) ** 2, f1 - f2, kappa - label
        square = f2 * size + along * part - 2.0 * f2 * kappa * miss
        by_kappa = weight * (along * kappa / s**2 - f2 * (kappa + miss))
        by_s = 0.5 * (slope2 * size + (slope1 - slope2) * part) - slope2 * kappa * miss
        by_s = weight * (by_s - along * part / s) / s
        by_c = (f2 @ weight)[:, None] * c + (theta @ by_kappa[:, :, None])[:, :, 0]
        by_theta = by_kappa[:, None, :] * c[:, :, None] + by_s[:, None, :] * theta
        return square @ weight, by_theta @ self.queries, by_c

    def __call__(self, weights: Weights) -> tuple[float, Weights]:
        """The risk and its gradient in (o, V, K, Q)."""
        risk, gradient = self.white(whiten(weights, self.root))
        return risk, chain(weights, self.root, gradient)


def whiten(weights: Weights, root: Floats) -> Floats:
    """R^T [U without its last column, c] R."""
    joined = weights.K.T @ weights.Q
    joined[:, -1] = weights.o @ weights.V
    return root.T @ joined @ root


def chain(weights: Weights, root: Floats, white: Floats) -> Weights:
    """The gradient in (o, V, K, Q) from that in ``white``: do = V dc, dV = o dc^T, dK = Q dU^T, dQ
    = K dU.
    """
    joined = root @ white @ root.T
    by_U, by_c = joined.copy(), joined[:, -1]
    by_U[:, -1] = 0.0
    o, V, K, Q = weights
    return Weights(V @ by_c, np.outer(o, by_c), Q @ by_U.T, K @ by_U)


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
    root, white = risk.root, whiten(weights, risk.root)
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


class Apart(NamedTuple):
    """Squared distances: of the weights, the least over the scale l of one of them, and of the
    products r (x) U.
    """

    plain: float
    modulo: float
    product: float


def apart(one: Weights, two: Weights) -> Apart:
    """The distances of two models with weights of the same shapes.

    Linear attention is the same for (o, V, K, Q) and (l o, l V, K/l, Q/l) with any l > 0: score
    times value does not change. So is softmax attention on infinitely many tokens, and nearly so on
    many: the flat valley v U11 = Sigma^{-1} of [S] is this orbit.

    modulo = min over l > 0 of |(o, V) - l (o', V')|^2 + |(K, Q) - (K', Q')/l|^2, at a root of a
    polynomial of degree 4. product = |r (x) U - r' (x) U'|_F^2, r = V^T o, U = K^T Q without its
    last column, which never acts.
    """
    a, b = (np.append(each.o, each.V) for each in (one, two))
    k, m = (np.append(each.K, each.Q) for each in (one, two))

    def squared(scale: float) -> float:
        return float(np.sum((a - scale * b) ** 2) + np.sum((k - m / scale) ** 2))

    roots = np.roots(np.array([b @ b, -(a @ b), 0.0, k @ m, -(m @ m)]))
    scales = [
        float(root.real) for root in roots if abs(root.imag) < 1e-9 * abs(root) and root.real > 0
    ]
    r, r2 = (each.V.T @ each.o for each in (one, two))
    U, U2 = ((each.K.T @ each.Q)[:, :-1] for each in (one, two))
    product = (r @ r) * np.sum(U * U) + (r2 @ r2) * np.sum(U2 * U2)
    product -= 2.0 * (r @ r2) * np.sum(U * U2)
    return Apart(squared(1.0), min(map(squared, [1.0, *scales])), max(float(product), 0.0))


def balance(weights: Weights) -> float:
    """|K|^2 + |Q|^2 - |o|^2 - |V|^2, which moves along the orbit alone: the flow of linear
    attention keeps it.
    """
    o, V, K, Q = (float(np.sum(part**2)) for part in weights)
    return K + Q - o - V


def pair_flows(
    task: LinearTask, length: float | int, seed: int, times: Any
) -> dict[str, WeightFlow]:
    """The flows of both models from the first weights that ``train`` draws with this seed."""
    start = first_weights(task.dim, seed)
    return {
        kind: weight_flow(PopulationRisk(task, length, kind), start, np.asarray(times, np.float64))
        for kind in KINDS
    }


def start_lead(task: LinearTask, seed: int) -> float:
    """v <C, A> - <a, C r> at the first weights of a seed, C = E omega omega^T in white coordinates
    (``PopulationRisk``).

    To first order in the products of weights both terms are what prediction and label have in
    common, E kappa y: that of the block form, and that of its mirror image (``traps``). The flow
    lets the larger grow first.
    """
    root = np.eye(task.dim + 1)
    root[:-1, :-1] = task.root.numpy()
    white = whiten(first_weights(task.dim, seed), root)
    C = (task.root.mT @ task.task_cov @ task.root).numpy()
    return float(white[-1, -1] * np.sum(C * white[:-1, :-1]) - white[-1, :-1] @ C @ white[:-1, -1])


def summary(
    task: LinearTask, length: float | int, kind: str, flow: WeightFlow, trained: int, end: float
) -> dict[str, Any]:
    """Where a flow is at the time numbered ``trained``, when it arrives, and where it stays before.

    ``end`` is the error at the end of the block form's flow: within 5 % of it a flow has arrived.
    """
    found = risk(task, flow.at(trained).uv(), length, kind, product_rule(task.dim, ROTATIONS))
    above = np.flatnonzero(flow.mse > (1 + ABOVE) * end)
    arrival = int(above[-1]) + 1 if above.size else 0
    before = max(1, min(arrival, trained + 1))
    slopes = flow.slopes[:before]
    slowest = int(np.argmin(slopes))
    return {
        "status": "ok" if 2 * found.value <= (1 + ABOVE) * end else STUCK,
        "mse": 2 * found.value,
        "error": 2 * found.error,
        "end": end,
        "last": float(flow.mse[-1]),
        "arrival": float(flow.times[arrival]) if arrival < flow.times.size else math.nan,
        "stay": float(np.diff(flow.times[:before])[slopes[:-1] < SLOW].sum()),
        "plateau": float(flow.mse[slowest]),
        "slowest": float(slopes[slowest]),
        "values": flow.states[trained].tolist(),
    }


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

    The block form ([S], Assumption 5.1) scores tokens by their covariates and reads their labels:
    prediction v <A^T omega, g>. Its mirror image, a and r alone, scores by labels and reads
    covariates: <r, omega> <a, g>, one direction of the task. A *trap* has both: in an eigenbasis of
    R^T W R and Sigma, A is diagonal and a and r lie along one eigenvector e, so that

        along e:  v A_ee + a r > 0 with v A_ee < 0,     across e:  v A_ii > 0 as in the block form .

    Reflections of the other axes and (a, r) -> (-a, -r) with e -> -e leave the risk as it is, and
    this set is what they fix: a critical point of the risk on it is one of the risk. What decides
    is the Hessian in all directions: a minimum keeps flows for ever, a saddle for about a multiple
    of 1/|its most negative curvature|. W has to share the eigenvectors of Sigma. Equal eigenvalues
    give one trap for all of their directions.
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


def verdict(flows: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, then one for all, from a table with covariance, length, seed, model,
    status, arrival and lead: is training linear attention less stable?

    [S], appendix A.2: "training softmax attention architectures appears to be more stable". A start
    is *stuck* for a model when its error after the paper's training time is more than 5 % above
    where the block form ends (``comparison.ABOVE``). Both models have the same starts, so only
    starts stuck for one model and not for the other tell them apart. In each setting: McNemar's
    exact test, a sign test of those starts. Over all settings, which share their starts: the sign
    test of, for each start, the settings stuck for linear minus those stuck for softmax attention.
    Two-sided, level 5 %; this last p-value decides.

    ``only_linear`` and ``only_softmax`` count starts stuck for one model alone; in the last row,
    starts stuck in more settings for one model than for the other. ``p`` is corrected by Holm's
    method in the rows of settings. ``*_lead`` tells how well the column lead predicts who is stuck:
    the chance that a start which is stuck has less of it than one which is not.
    """
    stuck, never = (
        _by_start(flows, column) for column in (flows["status"] != "ok", flows["arrival"].isna())
    )
    rows = [
        _row(str(name), int(length), part)
        for (name, length), part in stuck.groupby(level=[0, 1], sort=False)
    ]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p"] = p
    by_start = stuck.groupby(level="seed").sum()
    pooled = _row(ALL, 0, by_start)
    for kind in KINDS:
        pooled |= _shares(kind, int(stuck[kind].sum()), len(stuck), interval=False)
    missing = never.groupby(level=[0, 1], sort=False).mean()
    for kind in KINDS:
        for row, value in zip([*rows, pooled], [*missing[kind], never[kind].mean()], strict=True):
            row[f"{kind}_never"] = float(value)
        parts = [
            part
            for _, part in flows[flows["model"] == kind].groupby(
                ["covariance", "length"], sort=False
            )
        ]
        for row, part in zip(rows, parts, strict=True):
            row[f"{kind}_lead"] = _precedes(
                part["lead"].to_numpy(), (part["status"] != "ok").to_numpy()
            )
        pooled[f"{kind}_lead"] = np.nan
    return pd.DataFrame([*rows, pooled])


def _precedes(values: npt.NDArray[np.float64], those: npt.NDArray[np.bool_]) -> float:
    """The chance that a value of ``those`` is below one of the others, ties counted half (Mann and
    Whitney's U, normed).
    """
    some, others = int(those.sum()), int((~those).sum())
    if not some or not others:
        return float("nan")
    return float((rankdata(values)[~those].sum() - others * (others + 1) / 2) / (some * others))


def _by_start(flows: pd.DataFrame, what: Any) -> pd.DataFrame:
    """A row for each setting and start, a column for each model: 1 where ``what`` holds."""
    keys = ["covariance", "length", "seed"]
    table = flows.assign(what=what.astype(int)).pivot_table(
        index=keys, columns="model", values="what", sort=False
    )
    return table[list(KINDS)].astype(int)


def _row(covariance: str, length: int, counts: pd.DataFrame) -> dict[str, Any]:
    """Counts of each start for both models, compared."""
    difference = (counts["linear"] - counts["softmax"]).to_numpy()
    linear, softmax = int((difference > 0).sum()), int((difference < 0).sum())
    p = float(binomtest(linear, linear + softmax).pvalue) if linear + softmax else 1.0
    row: dict[str, Any] = {"covariance": covariance, "length": length, "starts": len(counts)}
    for kind in KINDS:
        row |= _shares(kind, int((counts[kind] > 0).sum()), len(counts))
    return row | {"only_softmax": softmax, "only_linear": linear, "p": p}


def _shares(kind: str, count: int, of: int, interval: bool = True) -> dict[str, float]:
    """Of all settings together no interval is given: their starts are the same."""
    value, low, high = share_interval(count, of)
    return {
        kind: value,
        f"{kind}_low": low if interval else np.nan,
        f"{kind}_high": high if interval else np.nan,
    }


def holm(values: list[float]) -> npt.NDArray[np.float64]:
    """Holm's corrected p-values, in the order given."""
    order, corrected, largest = np.argsort(values, kind="stable"), np.empty(len(values)), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected
