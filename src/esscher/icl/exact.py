"""Risks of in-context prediction without sampling prompts: closed forms, quadrature, cubature.

Given w, tokens z = (x, y) are N(0, Gamma_w). A layer (U, V) acts through A1 (d x d) and a^T, the
first d columns of U, and r = (r1, v), the last row of V. With theta = U z_q its prediction on
infinitely many tokens is kappa = r^T Gamma_w theta for softmax and for linear attention alike, and
with y = <w, x_q>

    R_infinity = 1/2 E (kappa - y)^2 + tau^2 / 2                               [S, section 5].

On L tokens the empirical second moment of linear attention is Wishart with mean Gamma_w. Softmax
attention has f1, f2 of ``gaussian_error`` at (L, s), s^2 = theta^T Gamma_w theta:

    linear:   R_L - R_infinity = (1/2L) E[ (r^T Gamma_w r) s^2 + kappa^2 ]
    softmax:  R_L - R_infinity = 1/2 E[ f2 (r^T Gamma_w r - kappa^2/s^2) + f1 kappa^2/s^2
                                        - 2 f2 kappa (kappa - y) ] .

In the block form of [S], Assumption 5.1, s does not depend on w, the average over w is a trace, and
the average over x_q is a sum over ``score_law``. In general it is a cubature over (w, x_q).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from esscher.icl.layer import KINDS, Block, Floats, Parameters
from esscher.icl.quadrature import Rule, error_functions, product_rule, score_law
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_count

CLOSED, QUADRATURE, CUBATURE, SIMULATION = "closed form", "quadrature", "cubature", "simulation"
# numerical error of a quadrature, and of the shells of a cubature, as a share of R_L - R_infinity
NUMERICAL = {CLOSED: 0.0, QUADRATURE: 1e-9, CUBATURE: 1e-4}
SMALL = 0.05  # score deviation below which profiles are continued
AT_ONCE = 2**22  # numbers in the largest array of a cubature


@dataclass(frozen=True)
class Risk:
    """A risk, its error, and where it comes from.

    ``error`` is 0 for a closed form, a bound on the numerical error for a quadrature, one standard
    error for a cubature (over its random rotations) and for a simulation.
    """

    value: float
    error: float
    origin: str

    def __float__(self) -> float:
        return self.value


def risk(
    task: Any,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
) -> Risk:
    """R_L = 1/2 E (prediction - label)^2 on prompts of ``length`` tokens (``math.inf`` allowed),
    without sampling prompts.

    Linear attention and infinite prompts: closed form. Softmax in the block form of [S], Assumption
    5.1: quadrature, to about nine digits of R_L - R_infinity. Softmax in general: a cubature over
    (w, x_q), ``product_rule(dim)`` unless given.
    """
    task, length = _check(task, params, length, kind)
    found = _terms(task, _as_block(params), length, kind, rule)
    mean, count = float(found.excess.mean()), found.excess.size
    spread = float(found.excess.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    error = math.hypot(spread, NUMERICAL[found.origin] * mean)
    return Risk(found.limit + mean, error, found.origin)


def risk_gradient(
    task: Any,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
) -> tuple[float, Any]:
    """The risk and its gradient, in the parametrisation given: a gradient in (O, V, K, Q) for
    ``OVKQ``, and so on.
    """
    task, length = _check(task, params, length, kind)
    found = _terms(task, params, length, kind, rule)
    slope, dim = torch.from_numpy(found.gradient), task.dim
    by_U, by_V = torch.zeros_like(slope), torch.zeros_like(slope)
    by_U[:, :dim], by_V[-1] = slope[:, :dim], slope[:, dim]
    return found.limit + float(found.excess.mean()), params.pull(by_U, by_V)


def bayes_risk(
    task: Any, length: Any, draws: Any = 4000, generator: torch.Generator | None = None
) -> Risk:
    """1/2 E[x_q^T P x_q] + tau^2 / 2, P the posterior covariance of w given L labelled tokens.

        P = W^{1/2} (I + W^{1/2} X^T X W^{1/2} / tau^2)^{-1} W^{1/2},     X^T X ~ Wishart(L, Sigma)

    The best possible risk on L tokens, that of ridge regression; the L-Bayes-optimal estimator of
    [S], section 6. Labels, noise and query are averaged exactly; only X^T X is drawn, ``draws``
    times, by Bartlett's decomposition, so that L may be as large as you like. Without noise P is
    the projection on what the tokens leave open.
    """
    if not isinstance(task, LinearTask):
        raise ValueError(f"task: expected a LinearTask, got {type(task).__name__}")
    length, draws = as_length(length), as_count(draws, "draws")
    floor = 0.5 * task.noise
    if math.isinf(length):
        return Risk(floor, 0.0, CLOSED)
    rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    if length < task.dim:  # the tokens themselves, else Bartlett's triangle
        rows = rng.standard_normal((draws, task.dim, int(length)))
    else:
        rows = np.tril(rng.standard_normal((draws, task.dim, task.dim)), -1)
        index = np.arange(task.dim)
        freedom = np.asarray(length - index, float)
        rows[:, index, index] = np.sqrt(rng.chisquare(freedom, (draws, task.dim)))
    grams = rows @ rows.transpose(0, 2, 1)
    seen = (task.root.T @ task.task_root).numpy()  # X^T X = R G R^T in the basis of Sigma = R R^T
    values, vectors = np.linalg.eigh(seen.T @ grams @ seen)
    values = np.where(values > 1e-12 * values[:, -1:], values, 0.0)
    with np.errstate(invalid="ignore"):
        left = np.where(values > 0, task.noise / (task.noise + values), 1.0)
    asked = (task.query_root.T @ task.task_root).numpy()
    spread = np.einsum("nik,ij,njk->nk", vectors, asked.T @ asked, vectors)
    loss = 0.5 * (left * spread).sum(axis=1)
    return Risk(floor + float(loss.mean()), float(loss.std() / math.sqrt(draws)), SIMULATION)


def as_length(length: Any) -> float | int:
    """A prompt length: a whole number of at least 1, or infinity."""
    if isinstance(length, float) and math.isinf(length) and length > 0:
        return math.inf
    return as_count(length, "length")


def _check(task: Any, params: Parameters, length: Any, kind: str) -> tuple[LinearTask, float | int]:
    if not isinstance(task, LinearTask):
        raise ValueError(
            f"task: expected a LinearTask, got {type(task).__name__}; use sampled_risk for other"
            " tasks"
        )
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    dim = int(params.uv().U.shape[0]) - 1
    if dim != task.dim:
        raise ValueError(f"params and task: the layer takes d = {dim}, the task has d = {task.dim}")
    return task, as_length(length)


def acting(params: Parameters) -> Floats:
    """[[A1, r1], [a^T, v]]: U without its last column, beside the last row of V; what acts."""
    uv = params.uv()
    return torch.cat([uv.U[:, :-1], uv.V[-1][:, None]], dim=1).detach().double().numpy()


def _as_block(params: Parameters) -> Parameters:
    """The block form, if the parameters that act have it."""
    own = acting(params)
    if own[-1, :-1].any() or own[:-1, -1].any():
        return params
    return Block(torch.from_numpy(own[:-1, :-1]), torch.tensor(own[-1, -1], dtype=torch.float64))


class Terms(NamedTuple):
    """R_infinity; R_L - R_infinity, an estimate for each rotation of a cubature; and the gradient
    of their sum in ``acting``.
    """

    limit: float
    excess: Floats
    origin: str
    gradient: Floats


def _terms(
    task: LinearTask, params: Parameters, length: float | int, kind: str, rule: Rule | None
) -> Terms:
    plain = kind == "linear" or math.isinf(length)
    if not isinstance(params, Block):
        default = product_rule(task.dim, 1, 0, (2, 1)) if plain else product_rule(task.dim)
        return _general(params, task, length, kind, rule or default)
    U, v = params.U11.detach().double().numpy(), float(params.v)
    limit, by_U, by_v = block_linear(U, v, task, math.inf)
    excess, origin = 0.0, CLOSED
    if plain and not math.isinf(length):
        value, by_U, by_v = block_linear(U, v, task, length)
        excess = value - limit
    elif not plain:
        origin = QUADRATURE
        excess, added_U, added_v = _block_excess(U, v, task, int(length))
        by_U, by_v = by_U + added_U, by_v + added_v
    gradient = np.zeros((task.dim + 1, task.dim + 1))
    gradient[:-1, :-1], gradient[-1, -1] = by_U, by_v
    return Terms(limit, np.array([excess]), origin, gradient)


# The block form: matrix formulas, and sums over the law of s.


def block_linear(
    U: Floats, v: float, task: LinearTask, length: float | int
) -> tuple[float, Floats, float]:
    """The risk of linear attention in the block form, or of an infinite prompt, and its gradient in
    U11 and v.

        R_L = 1/2 tr(W B Sigma_q B^T) + (v^2 / 2L) tr(((tr(Sigma W) + tau^2) I + Sigma W) Sigma
            U Sigma_q U^T) + tau^2 / 2,

    B = v Sigma U - I.
    """
    sigma, query, W = task.sigma.numpy(), task.query_sigma.numpy(), task.task_cov.numpy()
    moved = sigma @ U
    left = v * moved - np.eye(U.shape[0])
    weighted = W @ left @ query
    value, grad_U, slope = 0.5 * np.sum(weighted * left), v * sigma @ weighted, weighted * moved
    grad_v = float(np.sum(slope))
    if not math.isinf(length):
        inner = ((np.sum(sigma * W) + task.noise) * U + W @ moved) @ query / length
        square = np.sum(inner * moved)
        value, grad_U = value + 0.5 * v * v * square, grad_U + v * v * sigma @ inner
        grad_v += float(v * square)
    return float(value) + 0.5 * task.noise, grad_U, grad_v


def _block_excess(
    U: Floats, v: float, task: LinearTask, length: int
) -> tuple[float, Floats, float]:
    """R_L - R_infinity of softmax attention in the block form, and its gradient in U11 and v;
    relative error about 1e-10.

        1/2 (v^2 (tr(Sigma W) + tau^2) E f2 + v^2 E[phi k^2] + 2 v E[f2 k <w, x>]),
        phi = (f1 - f2)/s^2 - 2 f2,

    k = kappa / v. With Sigma = R R^T, x_q = R_q g and M = R^T U11 R_q, s = |M g|, and gradients of
    E[phi(s) g^T N g] in M^T M are fourth moments with phi'/(2s).
    """
    root, query, W = task.root.numpy(), task.query_root.numpy(), task.task_cov.numpy()
    M, cov, mixed = root.T @ U @ query, root.T @ W @ root, root.T @ W @ query
    law = score_law(M.T @ M)
    f2 = error_functions(length, law.s)[1]
    phi, psi, psi_f2 = _profiles(law.s, length)
    spread = float(np.trace(cov)) + task.noise
    own, crossed = M.T @ cov @ M, M.T @ mixed
    crossed = 0.5 * (crossed + crossed.T)
    Z_phi, Z_f2 = law.second_moment(phi), law.second_moment(f2)
    mean, squares = float(law.one @ f2), float(np.sum(own * Z_phi))
    products = float(np.sum(crossed * Z_f2))
    value = 0.5 * (v * v * (spread * mean + squares) + 2.0 * v * products)
    grad_C = v * v * (spread * law.second_moment(psi_f2) + law.fourth_moment(psi, own))
    grad_C += 2.0 * v * law.fourth_moment(psi_f2, crossed)
    grad_M = M @ grad_C + v * v * (cov @ M @ Z_phi) + v * (mixed @ Z_f2)
    return value, root @ grad_M @ query.T, v * (spread * mean + squares) + products


def _profiles(s: Floats, length: int) -> tuple[Floats, Floats, Floats]:
    """phi = (f1 - f2)/s^2 - 2 f2, phi'/(2s) and f2'/(2s).

    All are smooth in s^2 but lose their digits at small s: below ``SMALL`` they are continued as
    straight lines in s^2.
    """

    def direct(s: Floats) -> Floats:
        f1, f2, df1, df2 = error_functions(length, s)
        ratio = (f1 - f2) / s**2
        slope = (df1 - df2) / s**2 - 2.0 * ratio / s
        return np.array([ratio - 2.0 * f2, (slope - 2.0 * df2) / (2.0 * s), df2 / (2.0 * s)])

    near, far = direct(np.array([SMALL, 2.0 * SMALL])).T
    line = near[:, None] + ((far - near) / (3.0 * SMALL**2))[:, None] * (s**2 - SMALL**2)
    phi, psi, psi_f2 = np.where(s < SMALL, line, direct(np.maximum(s, SMALL)))
    return phi, psi, psi_f2


# Any weights: a cubature over tasks, exact for polynomials of degree 5, times one over queries.


def _general(
    params: Parameters, task: LinearTask, length: float | int, kind: str, rule: Rule
) -> Terms:
    """The risk of weights [[A1, r1], [a^T, v]].

    In coordinates in which tokens g' and queries g are N(0, I), with omega = R^T w, omega_q = R_q^T
    w and A, a, r in these coordinates, a token scores <B g, g'> and has the value <c, g'>,

        B = [A + omega a^T; tau a^T],   c = (r + v omega, tau v),   label <omega_q, g> .

    For infinite prompts and linear attention the average over g is a norm, and what is left is a
    polynomial of degree 4 in omega, which the cubature integrates exactly:

        R_infinity = 1/2 E|B^T c - omega_q|^2 + tau^2/2,
        R_L = R_infinity + (1/2L) E[ |c|^2 |B|_F^2 + |B^T c|^2 ]  (linear) .
    """
    dim, weights = task.dim, acting(params)
    share = 1.0 / length if kind == "linear" else 0.0
    softmax = kind == "softmax" and not math.isinf(length)
    rotations = len(rule.tasks.points) if softmax else 1
    limits, excess = np.zeros(rotations), np.zeros(rotations)
    gradient, root, query_root = np.zeros_like(weights), task.root.numpy(), task.query_root.numpy()
    chances, points = rule.tasks.weights.numpy(), (rule.tasks.points @ task.task_root.mT).numpy()
    step = max(1, AT_ONCE // ((dim + 1) * (len(rule.queries.weights) if softmax else dim)))
    for place, first in itertools.product(range(rotations), range(0, len(chances), step)):
        w, chance = points[place, first : first + step], chances[first : first + step]
        to_token = np.zeros((len(w), dim + 1, dim + 1))  # tokens are [[R, 0], [omega^T, tau]] g'
        to_token[:, :dim, :dim], to_token[:, dim, :dim] = root, w @ root
        to_token[:, dim, dim] = math.sqrt(task.noise)
        from_token, label = to_token.transpose(0, 2, 1), w @ query_root
        B, c = from_token @ (weights[:, :dim] @ query_root), from_token @ weights[:, dim]
        output = (c[:, None, :] @ B)[:, 0]
        miss = output - label
        pull = miss + share * output
        scores, values = (B * B).sum(axis=(1, 2)), (c * c).sum(axis=1)
        by_c = (B @ pull[:, :, None])[:, :, 0] + share * scores[:, None] * c
        by_B = c[:, :, None] * pull[:, None, :] + share * values[:, None, None] * B
        added = share * ((output**2).sum(axis=1) + scores * values)
        if softmax:
            queries, mass = rule.queries.points[place].numpy(), rule.queries.weights.numpy()
            added, more_B, more_c = _softmax_excess(
                B, c, queries, mass, label @ queries.T, int(length)
            )
            by_B, by_c = by_B + more_B, by_c + more_c
        limits[place] += 0.5 * chance @ (miss**2).sum(axis=1)
        excess[place] += 0.5 * chance @ added
        gradient[:, :dim] += np.tensordot(chance, to_token @ by_B, 1) @ query_root.T
        gradient[:, dim] += chance @ (to_token @ by_c[:, :, None])[:, :, 0]
    limit, origin = float(limits[0]) + 0.5 * task.noise, CUBATURE if softmax else CLOSED
    return Terms(limit, excess, origin, gradient / rotations)


def _softmax_excess(
    B: Floats, c: Floats, queries: Floats, weights: Floats, label: Floats, length: int
) -> tuple[Floats, Floats, Floats]:
    """Averages over queries, for each task, of the bracket of softmax attention; and the gradients
    of half of it in B and c.
    """
    size, theta = (c * c).sum(axis=1)[:, None], B @ queries.T
    # below it f1 - f2 has no digits left, and kappa/s is bounded by |c|
    s = np.maximum(np.sqrt((theta * theta).sum(axis=1)), 1e-6)
    f1, f2, slope1, slope2 = error_functions(length, s)
    kappa = (c[:, None, :] @ theta)[:, 0]
    part, along, miss = (kappa / s) ** 2, f1 - f2, kappa - label
    square = f2 * size + along * part - 2.0 * f2 * kappa * miss
    by_kappa = weights * (along * kappa / s**2 - f2 * (kappa + miss))
    by_s = 0.5 * (slope2 * size + (slope1 - slope2) * part) - slope2 * kappa * miss
    by_s = weights * (by_s - along * part / s) / s
    by_c = (f2 @ weights)[:, None] * c + (theta @ by_kappa[:, :, None])[:, :, 0]
    by_theta = by_kappa[:, None, :] * c[:, :, None] + by_s[:, None, :] * theta
    return square @ weights, by_theta @ queries, by_c
