"""Risks of in-context prediction without sampling prompts: closed forms, quadrature, cubature.

Given w, tokens z = (x, y) are N(0, Gamma_w). A layer (U, V) acts through A1 (d x d) and a^T, the
first d columns of U, and r = (r1, v), the last row of V. With theta = U z_q its prediction on
infinitely many tokens is

    kappa = r^T Gamma_w theta = h(w)^T x_q,
    h(w) = A1^T Sigma (r1 + v w) + (r1^T Sigma w + v (w^T Sigma w + tau^2)) a .

Averages of products of quadratic polynomials of w ~ N(0, W) give the risk of an infinite prompt and
of linear attention [S, section 5]. Softmax attention on L tokens adds, with s^2 = theta^T Gamma_w
theta, y = <w, x_q> and f1, f2 of ``gaussian_error`` at (L, s),

    R_L - R_infinity = 1/2 E[ f2 (r^T Gamma_w r - kappa^2/s^2) + f1 kappa^2/s^2
                              - 2 f2 kappa (kappa - y) ] .

In the block form of [S], Assumption 5.1, s does not depend on w, the average over w is a trace, and
the average over x_q is a sum over ``score_law``. In general it is a cubature over (w, x_q).

The query inside its prompt, (L mu_L + delta_q) / (L + 1) [S, Remark 3.2], is L tokens and one known
key z_q = (x_q, 0), of score b = x_q^T A1 x_q and value a = r1^T x_q. With q1, q2, c of
``gaussian_sure`` at (L, s, b) the prediction has mean kappa + delta, delta = (a - kappa) q1 - kappa
f2, and (a - kappa)^2 q2 - 2 kappa (a - kappa) c + 2 (kappa - y) (a - kappa) q1 comes to the bracket
above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esscher.icl.layer import KINDS, UV, Block, Parameters, as_uv, tensors
from esscher.icl.quadrature import (
    ONCE,
    Rule,
    ScoreLaw,
    error_table,
    inside_table,
    product_rule,
    score_law,
)
from esscher.icl.tasks import LinearTask, Task
from esscher.inputs import as_count

Floats = npt.NDArray[np.float64]

CLOSED, QUADRATURE, CUBATURE, SIMULATION = "closed form", "quadrature", "cubature", "simulation"
NUMERICAL = 1e-9  # error of the quadratures, relative to what finitely many tokens add to the risk
RADIAL = 1e-4  # the same for the shells of a cubature
SMALL = 0.05  # score deviation below which profiles are continued


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


@dataclass(frozen=True)
class RiskParts:
    """risk = noise + approximation + bias + variance.

    noise: tau^2 / 2, which nobody avoids. approximation: what the layer misses with infinitely many
    tokens. bias: the change of the squared bias 1/2 E (E[prediction | w, x_q] - <w, x_q>)^2 from
    there to L tokens, which may be negative. variance: 1/2 E Var(prediction | w, x_q) on L tokens.
    """

    noise: float
    approximation: float
    bias: float
    variance: float

    @property
    def total(self) -> float:
        return self.noise + self.approximation + self.bias + self.variance


def risk(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> Risk:
    """R_L = 1/2 E (prediction - label)^2 on prompts of ``length`` tokens (``math.inf`` allowed),
    without sampling prompts.

    Linear attention and infinite prompts: closed form. Softmax in the block form of [S], Assumption
    5.1: quadrature, to about nine digits of R_L - R_infinity. Softmax in general: a cubature over
    (w, x_q), ``product_rule(dim, rotations)`` unless given. ``query_inside`` adds the query's own
    token to the prompt [S, Remark 3.2]: a closed form for linear attention, a cubature for softmax,
    in the block form over x_q alone.
    """
    task, length, uv = _check(task, params, length, kind)
    with torch.no_grad():
        if math.isinf(length) or kind == "linear":
            return Risk(float(_closed(uv, task, length, query_inside)), 0.0, CLOSED)
        limit, block = float(limit_risk(uv, task)), _as_block(uv)
        if block is not None and not query_inside:
            excess = block_excess(block.U11.numpy(), float(block.v), task, int(length))[0]
            return Risk(limit + excess, NUMERICAL * abs(excess), QUADRATURE)
        rule = rule or _default_rule(uv, query_inside)
        estimates = _excess(uv, task, int(length), rule, query_inside)
        mean, count = float(estimates.mean()), estimates.numel()
        spread = float(estimates.std()) / math.sqrt(count) if count > 1 else 0.0
        return Risk(limit + mean, math.hypot(spread, RADIAL * mean), CUBATURE)


def risk_tensor(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> Float64[Tensor, ""]:
    """``risk`` as a tensor, differentiable once in the tensors of ``params``."""
    task, length, uv = _check(task, params, length, kind)
    if math.isinf(length) or kind == "linear":
        return _closed(uv, task, length, query_inside)
    if isinstance(params, Block) and not query_inside:
        excess: Tensor = _BlockExcess.apply(  # type: ignore[no-untyped-call]
            params.U11.double(), params.v.double(), task, int(length)
        )
    else:
        rule = rule or _default_rule(uv, query_inside)
        excess = _excess(uv, task, int(length), rule, query_inside).mean()
    return limit_risk(uv, task) + excess


def risk_gradient(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> tuple[float, Parameters]:
    """The risk and its gradient, in the parametrisation given: a gradient in (O, V, K, Q) for
    ``OVKQ``, and so on.
    """
    if isinstance(params, Block) and not query_inside:  # without a graph
        task, length = _check_task(task, params.dim, length, kind)
        U, v = params.U11.detach().double().numpy(), float(params.v)
        plain = math.inf if kind == "softmax" else length
        found = block_linear(U, v, task, plain)
        if kind == "softmax" and not math.isinf(length):
            added = block_excess(U, v, task, int(length))
            found = found[0] + added[0], found[1] + added[1], found[2] + added[2]
        slope = torch.tensor(found[2], dtype=torch.float64)
        return found[0], Block(torch.from_numpy(found[1]), slope)
    leaves = [tensor.detach().double().requires_grad_(True) for tensor in tensors(params)]
    with torch.enable_grad():
        value = risk_tensor(task, type(params)(*leaves), length, kind, rule, query_inside)
        gradient = torch.autograd.grad(value, leaves)
    return float(value.detach()), type(params)(*gradient)


def decompose(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> RiskParts:
    """The risk on ``length`` tokens in four parts; their sum is ``risk``."""
    task, length, uv = _check(task, params, length, kind)
    with torch.no_grad():
        noise = 0.5 * task.noise
        approximation = float(limit_risk(uv, task)) - noise
        if math.isinf(length):
            return RiskParts(noise, approximation, 0.0, 0.0)
        if kind == "linear" and query_inside:
            square, variance = linear_inside(uv, task, int(length))
            return RiskParts(noise, approximation, float(square) - approximation, float(variance))
        if kind == "linear":
            return RiskParts(noise, approximation, 0.0, float(linear_variance(uv, task)) / length)
        rule, block = rule or _default_rule(uv, query_inside), _as_block(uv)
        if block is not None and not query_inside:
            bias = block_bias(block, task, int(length))
        else:
            bias = float(_bias(uv, task, int(length), rule, query_inside).mean())
        total = float(risk(task, params, length, kind, rule, query_inside))
    return RiskParts(noise, approximation, bias, total - noise - approximation - bias)


def bayes_risk(
    task: Task, length: Any, draws: Any = 4000, generator: torch.Generator | None = None
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
    rows = wishart_root(int(length), task.dim, draws, rng)
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


def wishart_root(freedom: int, dim: int, draws: int, rng: np.random.Generator) -> Floats:
    """``draws`` matrices T with T T^T a sum of ``freedom`` products g g^T, g ~ N(0, I): Bartlett's
    triangle, or the vectors themselves where there are fewer than ``dim``.
    """
    if freedom < dim:
        return rng.standard_normal((draws, dim, freedom))
    rows = np.tril(rng.standard_normal((draws, dim, dim)), -1)
    index = np.arange(dim)
    rows[:, index, index] = np.sqrt(rng.chisquare(np.asarray(freedom - index, float), (draws, dim)))
    return np.asarray(rows)


def as_length(length: Any) -> float | int:
    """A prompt length: a whole number of at least 1, or infinity."""
    if isinstance(length, float) and math.isinf(length) and length > 0:
        return math.inf
    return as_count(length, "length")


def _check(
    task: Task, params: Parameters, length: Any, kind: str
) -> tuple[LinearTask, float | int, UV]:
    uv = as_uv(params)
    return *_check_task(task, uv.dim, length, kind), uv


def _check_task(task: Task, dim: int, length: Any, kind: str) -> tuple[LinearTask, float | int]:
    if not isinstance(task, LinearTask):
        raise ValueError(
            f"task: expected a LinearTask, got {type(task).__name__}; use sampled_risk for other"
            " tasks"
        )
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if dim != task.dim:
        raise ValueError(f"params and task: the layer takes d = {dim}, the task has d = {task.dim}")
    return task, as_length(length)


# Infinite prompts and linear attention: polynomials in (U, V).


class Acting(NamedTuple):
    """The parts of (U, V) that act on the prediction, in float64."""

    A1: Tensor
    a: Tensor
    r1: Tensor
    v: Tensor


def acting(uv: UV) -> Acting:
    """A1, a, r1, v of (U, V)."""
    d = uv.dim
    U, r = uv.U.double(), uv.V.double()[-1]
    return Acting(U[:d, :d], U[d, :d], r[:d], r[d])


def limit_risk(uv: UV, task: LinearTask) -> Float64[Tensor, ""]:
    """R_infinity = 1/2 E (kappa - <w, x_q>)^2 + tau^2 / 2, for softmax and for linear attention.
    [S], section 5.
    """
    constant, slope, quadratic = _prediction(acting(uv), task)
    slope = slope - torch.eye(task.dim, dtype=torch.float64)
    return 0.5 * _mean_square(constant, slope, quadratic, task) + 0.5 * task.noise


def linear_variance(uv: UV, task: LinearTask) -> Float64[Tensor, ""]:
    """L times 1/2 E Var(prediction | w, x_q): 1/2 E[(r^T Gamma_w r)(theta^T Gamma_w theta) +
    kappa^2], theta = U z_q.

    The empirical second moment of L tokens is Wishart with mean Gamma_w.
    """
    A1, a, r1, v = parts = acting(uv)
    sigma, query, W, tau2 = task.sigma, task.query_sigma, task.task_cov, task.noise
    spread = a @ query @ a
    # both factors are constant + linear^T w + w^T square w
    score = (
        torch.sum((A1 @ query) * (sigma @ A1)) + tau2 * spread,
        2.0 * sigma @ A1 @ query @ a,
        spread * sigma,
    )
    value = (r1 @ sigma @ r1 + tau2 * v * v, 2.0 * v * sigma @ r1, v * v * sigma)
    means = [constant + torch.sum(square * W) for constant, _, square in (score, value)]
    crossed = score[1] @ W @ value[1] + 2.0 * torch.trace(score[2] @ W @ value[2] @ W)
    square = _mean_square(*_prediction(parts, task), task)
    return 0.5 * (means[0] * means[1] + crossed + square)


def linear_inside(
    uv: UV, task: LinearTask, length: int
) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
    """1/2 E (E[prediction | w, x_q] - y)^2 and 1/2 E Var(prediction | w, x_q) of linear attention
    with the query inside.

    The prediction is (L/(L+1)) times that on L tokens plus a b / (L+1). With S = Sigma_q and A the
    symmetric part of A1,

        E[(x^T A x) x x^T]   = tr(AS) S + 2 SAS
        E[(x^T A x)^2 x x^T] = (tr(AS)^2 + 2 tr(ASAS)) S + 4 tr(AS) SAS + 8 SASAS .
    """
    A1, _, r1, _ = parts = acting(uv)
    S, A, share = task.query_sigma, 0.5 * (A1 + A1.mT), length / (length + 1.0)
    moved = A @ S
    trace, turned = torch.trace(moved), S @ moved
    third = trace * S + 2.0 * turned
    sixth = (trace**2 + 2.0 * torch.trace(moved @ moved)) * S + 4.0 * trace * turned
    sixth = sixth + 8.0 * turned @ moved
    constant, slope, quadratic = _prediction(parts, task)
    mean = constant + torch.sum(task.sigma * task.task_cov) * quadratic  # of h(w)
    eye = torch.eye(task.dim, dtype=torch.float64)
    square = _mean_square(share * constant, share * slope - eye, share * quadratic, task)
    square = square + 2.0 * share * (1.0 - share) * (mean @ third @ r1)
    square = square + (1.0 - share) ** 2 * (r1 @ sixth @ r1)
    return 0.5 * square, share**2 * linear_variance(uv, task) / length


def _closed(
    uv: UV, task: LinearTask, length: float | int, query_inside: bool
) -> Float64[Tensor, ""]:
    """The risk of linear attention, or of an infinite prompt, in which the query's own token has
    no share.
    """
    if math.isinf(length):
        return limit_risk(uv, task)
    if query_inside:
        square, variance = linear_inside(uv, task, int(length))
        return square + variance + 0.5 * task.noise
    return limit_risk(uv, task) + linear_variance(uv, task) / length


def _prediction(parts: Acting, task: LinearTask) -> tuple[Tensor, Tensor, Tensor]:
    """h(w) = constant + slope w + (w^T Sigma w) (v a)."""
    A1, a, r1, v = parts
    weighted = task.sigma @ r1
    constant = A1.mT @ weighted + task.noise * v * a
    slope = v * A1.mT @ task.sigma + torch.outer(a, weighted)
    return constant, slope, v * a


def _mean_square(constant: Tensor, slope: Tensor, a: Tensor, task: LinearTask) -> Tensor:
    """E_{w, x} of (h(w)^T x)^2 for h = constant + slope w + (w^T Sigma w) a: odd moments of w
    vanish.
    """
    sigma, query, W = task.sigma, task.query_sigma, task.task_cov
    mean = torch.sum(sigma * W)
    fourth = mean**2 + 2.0 * torch.trace(sigma @ W @ sigma @ W)
    linear = torch.sum((slope @ W) * (query @ slope))
    square = constant @ query @ constant + linear + fourth * (a @ query @ a)
    return square + 2.0 * mean * (constant @ query @ a)


# Softmax attention in the block form: sums over the law of s.


def _as_block(uv: UV) -> Block | None:
    """The block form, if (U, V) has it in the entries that act."""
    A1, a, r1, v = acting(uv)
    return None if bool(a.any()) or bool(r1.any()) else Block(A1, v)


def block_linear(
    U: Floats, v: float, task: LinearTask, length: float | int
) -> tuple[float, Floats, float]:
    """The risk of linear attention in the block form and its gradient in U11 and v, without a
    graph.

        R_L = 1/2 tr(W B Sigma_q B^T) + (v^2 / 2L) tr(((tr(Sigma W) + tau^2) I + Sigma W) Sigma
            U Sigma_q U^T) + tau^2 / 2,

    B = v Sigma U - I.
    """
    sigma, query, W = task.sigma.numpy(), task.query_sigma.numpy(), task.task_cov.numpy()
    moved = sigma @ U
    left = v * moved - np.eye(U.shape[0])
    weighted = W @ left @ query
    value, grad_U, grad_v = 0.5 * np.sum(weighted * left), v * sigma @ weighted, weighted * moved
    slope = float(np.sum(grad_v))
    if not math.isinf(length):
        inner = ((np.sum(sigma * W) + task.noise) * U + W @ moved) @ query / length
        square = np.sum(inner * moved)
        value, grad_U = value + 0.5 * v * v * square, grad_U + v * v * sigma @ inner
        slope += float(v * square)
    return float(value) + 0.5 * task.noise, grad_U, slope


def block_excess(U: Floats, v: float, task: LinearTask, length: int) -> tuple[float, Floats, float]:
    """R_L - R_infinity of softmax attention in the block form and its gradient in U11 and v,
    without a graph; relative error about 1e-10.

        1/2 (v^2 (tr(Sigma W) + tau^2) E f2 + v^2 E[phi k^2] + 2 v E[f2 k <w, x>]),
        phi = (f1 - f2)/s^2 - 2 f2,

    k = kappa / v. Gradients of E[phi(|M g|) g^T N g] in M^T M are fourth moments with phi'/(2s).
    """
    M, cov, mixed, law = _setting(U, task)
    f2 = error_table(length).evaluate(law.s)[1]
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
    grad_U = task.root.numpy() @ grad_M @ task.query_root.numpy().T
    return value, grad_U, v * (spread * mean + squares) + products


def block_bias(block: Block, task: LinearTask, length: int) -> float:
    """What finitely many tokens change in the squared bias: 1/2 E[f2^2 kappa^2 - 2 f2 kappa (kappa
    - <w, x_q>)].
    """
    M, cov, mixed, law = _setting(block.U11.detach().double().numpy(), task)
    f2, v = error_table(length).evaluate(law.s)[1], float(block.v)
    squares = np.sum((M.T @ cov @ M) * law.second_moment(f2 * f2 - 2.0 * f2))
    return 0.5 * v * v * float(squares) + v * float(np.sum((M.T @ mixed) * law.second_moment(f2)))


class _BlockExcess(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, U: Tensor, v: Tensor, task: LinearTask, length: int) -> Tensor:
        value, grad_U, grad_v = block_excess(U.detach().numpy(), float(v), task, length)
        ctx.save_for_backward(torch.from_numpy(grad_U), torch.tensor(grad_v, dtype=torch.float64))
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        grad_U, grad_v = ctx.saved_tensors
        return grad * grad_U, grad * grad_v, None, None


def _setting(U: Floats, task: LinearTask) -> tuple[Floats, Floats, Floats, ScoreLaw]:
    """M = R^T U11 R_q, the task covariance between the roots of Sigma and of Sigma and Sigma_q, and
    the law of s = |M g|; Sigma = R R^T, x_q = R_q g.
    """
    root, query, W = task.root.numpy(), task.query_root.numpy(), task.task_cov.numpy()
    M = root.T @ U @ query
    return M, root.T @ W @ root, root.T @ W @ query, score_law(M.T @ M)


def _profiles(s: Floats, length: int) -> tuple[Floats, Floats, Floats]:
    """phi = (f1 - f2)/s^2 - 2 f2, phi'/(2s) and f2'/(2s).

    All are smooth in s^2 but lose their digits at small s: below ``SMALL`` they are continued as
    straight lines in s^2.
    """

    def direct(s: Floats) -> Floats:
        f1, f2, df1, df2 = error_table(length).evaluate(s)
        ratio = (f1 - f2) / s**2
        slope = (df1 - df2) / s**2 - 2.0 * ratio / s
        return np.array([ratio - 2.0 * f2, (slope - 2.0 * df2) / (2.0 * s), df2 / (2.0 * s)])

    near, far = direct(np.array([SMALL, 2.0 * SMALL])).T
    line = near[:, None] + ((far - near) / (3.0 * SMALL**2))[:, None] * (s**2 - SMALL**2)
    phi, psi, psi_f2 = np.where(s < SMALL, line, direct(np.maximum(s, SMALL)))
    return phi, psi, psi_f2


# Softmax attention in general, and with the query inside: a cubature over (w, x_q).


class Products(NamedTuple):
    """s, r^T Gamma_w r and the products of kappa, a and y for every task and query of a rule, or
    averaged over tasks. b and the products with a are read with the query inside only.
    """

    s: Tensor
    spread: Tensor
    kappa_kappa: Tensor
    kappa_y: Tensor
    b: Tensor
    a_kappa: Tensor
    a_y: Tensor
    a_a: Tensor


def _default_rule(uv: UV, query_inside: bool) -> Rule:
    """In the block form tasks are averaged exactly, and queries are cheap."""
    return product_rule(uv.dim, 64 if query_inside and _as_block(uv) is not None else 8)


def _excess(
    uv: UV, task: LinearTask, length: int, rule: Rule, query_inside: bool
) -> Float64[Tensor, " rotations"]:
    """R_L - R_infinity of softmax attention, one estimate for each rotation of the rule;
    differentiable once.
    """
    at = _products(uv, task, rule, query_inside)
    if not query_inside:
        f1, f2 = error_table(length)(at.s)
        square = f2 * at.spread + (f1 - f2) * at.kappa_kappa / at.s**2
        return 0.5 * rule.average(square - 2.0 * f2 * (at.kappa_kappa - at.kappa_y))
    f1, f2, q1, q2, c = inside_table(length)(at.s, at.b)
    apart = at.a_a - 2.0 * at.a_kappa + at.kappa_kappa
    square = f2 * at.spread + (f1 - f2) * at.kappa_kappa / at.s**2 + apart * q2
    square = square - 2.0 * (at.a_kappa - at.kappa_kappa) * c
    return 0.5 * rule.average(square + 2.0 * _moved(at, f2, q1))


def _bias(
    uv: UV, task: LinearTask, length: int, rule: Rule, query_inside: bool
) -> Float64[Tensor, " rotations"]:
    """What finitely many tokens change in the squared bias: 1/2 E[delta^2 + 2 (kappa - y)
    delta].
    """
    at = _products(uv, task, rule, query_inside)
    if not query_inside:
        f2 = error_table(length)(at.s)[1]
        return 0.5 * rule.average(at.kappa_kappa * f2**2 - 2.0 * f2 * (at.kappa_kappa - at.kappa_y))
    _, f2, q1, _, _ = inside_table(length)(at.s, at.b)
    apart = at.a_a - 2.0 * at.a_kappa + at.kappa_kappa
    square = apart * q1**2 - 2.0 * (at.a_kappa - at.kappa_kappa) * q1 * f2 + at.kappa_kappa * f2**2
    return 0.5 * rule.average(square + 2.0 * _moved(at, f2, q1))


def _moved(at: Products, f2: Tensor, q1: Tensor) -> Tensor:
    """(kappa - y) delta."""
    own = at.a_kappa - at.kappa_kappa - at.a_y + at.kappa_y
    return own * q1 - (at.kappa_kappa - at.kappa_y) * f2


def _products(uv: UV, task: LinearTask, rule: Rule, query_inside: bool) -> Products:
    """theta^T z = (A1 x_q + w <a, x_q>)^T x + <a, x_q> noise, and r^T z = (r1 + v w)^T x + v
    noise.
    """
    A1, a, r1, v = acting(uv)
    x = rule.queries.points @ task.query_root.mT
    moved = x @ A1.mT
    own_score = torch.sum(moved * x, dim=-1)[:, None, :]
    plain = torch.sum((moved @ task.sigma) * moved, dim=-1)[:, None, :]
    if not bool(a.any()) and not bool(r1.any()):  # averaged over tasks
        along, zero = v * moved @ task.sigma, torch.zeros_like(own_score)
        square, crossed = (
            torch.sum((along @ task.task_cov) * other, dim=-1)[:, None, :] for other in (along, x)
        )
        spread = v**2 * (torch.sum(task.sigma * task.task_cov) + task.noise)
        s = plain.clamp_min(1e-24).sqrt()
        return Products(s, spread, square, crossed, own_score, zero, zero, zero)
    w, tilt = rule.tasks.points @ task.task_root.mT, (x @ a)[:, None, :]
    value = r1 + v * w
    w_sigma, value_sigma = w @ task.sigma, value @ task.sigma
    label_square = (torch.sum(w_sigma * w, dim=-1) + task.noise)[:, :, None]
    square = plain + 2.0 * tilt * (w_sigma @ moved.mT) + tilt**2 * label_square
    mixed = (torch.sum(value_sigma * w, dim=-1) + task.noise * v)[:, :, None]
    kappa = value_sigma @ moved.mT + tilt * mixed
    spread = (torch.sum(value_sigma * value, dim=-1) + task.noise * v * v)[:, :, None]
    s, label = square.clamp_min(1e-24).sqrt(), w @ x.mT
    own = (x @ r1)[:, None, :].expand_as(kappa)
    inside = (own * kappa, own * label, own**2) if query_inside else (own, own, own)
    return Products(s, spread, kappa**2, kappa * label, own_score.expand_as(s), *inside)
