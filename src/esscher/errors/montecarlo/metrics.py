"""The contract of a metric: which error of a head on n tokens a Monte Carlo experiment measures,
and against what.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.finite import attend_hardmax
from esscher.attention.head import Head
from esscher.attention.limit import hardmax_limit, limit
from esscher.attention.state import AttentionState, attention_state, init, merge
from esscher.errors.curve import ErrorCurve
from esscher.errors.exact import exact_curve
from esscher.errors.montecarlo.draw import Draw, Plan
from esscher.inputs import as_kind, as_positive, as_tensor
from esscher.measures.base import Measure
from esscher.theory.bohbot import moment_exponent, moment_exponent_experimental
from esscher.theory.prediction import proved_coupling
from esscher.theory.sharp import l2_exponent_rms, moment_exponent_rms, speaks_of

Floats = npt.NDArray[np.float64]
PROBES = 64  # tokens of the law at which a limit must exist before any work is done


@dataclass(frozen=True)
class Discrepancy:
    """Squared error at each n of a draw, the squared size of what it is compared with, where a
    largest error is attained.
    """

    squared: Floats  # (len ladder,)
    limit_squared: float
    points: Floats | None = None  # (len ladder, d_query)


@dataclass(frozen=True)
class Exponents:
    """What theory says of the rate of a metric, nan where it says nothing; the names are columns of
    ``rates``.
    """

    bohbot: float = math.nan
    bohbot_experimental: float = math.nan
    sharp: float = math.nan


class Metric(ABC):
    """One error of a head on n tokens. A new one is a file: a subclass, and ``register`` of its one
    object.

    ``asked_by`` says who the queries are: the "tokens" of the prompt themselves (self-attention),
    the "queries" x ~ nu (rows given, or fresh ones of the law), or a "ball" |x| <= R.
    ``description`` is one line for lists and manuals.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    asked_by: ClassVar[Literal["tokens", "queries", "ball"]]
    brings: ClassVar[tuple[str, ...]] = ()  # metrics that come with it at no cost
    # compares with the limit of softmax attention, which must exist
    of_softmax: ClassVar[bool] = True
    in_float64: ClassVar[bool] = False  # whatever the dtype of the experiment

    @abstractmethod
    def target(self, plan: Plan, x: Tensor) -> Tensor:
        """What n tokens are compared with: a limit at the rows x, or one for the whole law,
        whatever x.
        """

    @abstractmethod
    def error(self, draw: Draw) -> Discrepancy:
        """The squared difference between the head on the first n tokens of the draw and the target,
        at each n.
        """

    def at_queries(self, draw: Draw) -> Tensor:
        """The target at the queries of a draw; computed once where these are always the same."""
        return draw.target(self.name, lambda x: self.target(draw.plan, x))

    def check(self, plan: Plan) -> None:
        """Raise ValueError where the experiment is not one for this metric; by default every one
        is.
        """
        return

    def probes(self, plan: Plan) -> Tensor:
        """Queries at which the limit has to exist."""
        if self.asked_by == "ball":
            eye = torch.eye(plan.head.dim_query, dtype=torch.float64, device=plan.measure.device)
            return plan.radius * torch.cat([eye, -eye])
        if self.asked_by == "queries" and isinstance(plan.queries, Tensor):
            return plan.queries.double().to(plan.measure.device)
        return plan.measure.sample(PROBES, torch.Generator().manual_seed(0)).double()

    def target_error(self, plan: Plan) -> tuple[float, str]:
        """Own error of the target, and how it was found."""
        return 0.0, "exact"

    def describe_queries(self, plan: Plan) -> str:
        if self.asked_by == "tokens":
            return "queries are the tokens"
        inside = ", each in its own prompt" if plan.query_inside else ""
        if self.asked_by == "ball":
            return f"queries |x| <= {plan.radius:.4g}{inside}, by gradient ascent"
        rows = plan.queries
        if isinstance(rows, int):
            return f"{rows} fresh queries of the law a repeat{inside}"
        return f"{rows.shape[0]} given queries{inside}"

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        """Of this metric for this head and law."""
        return Exponents()

    @property
    def has_exact(self) -> bool:
        """Whether it may have a curve without sampling."""
        return type(self).exact is not Metric.exact

    def exact(self, head: Head, measure: Measure, n: list[int], seed: int) -> ErrorCurve | None:
        """The same curve without sampling tokens, for queries of the law outside their prompts;
        None where none is known.
        """
        return None


def as_floats(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().double().cpu().numpy())


# ---- What theory says of the moments of self-attention's outputs: one answer for mean and
# covariance.


def moment_exponents(head: Head, measure: Measure) -> Exponents:
    """1/(2(1 + 32 Psi)) as proved, 1/(2(1 + Psi)) as conjectured [B], where Psi is known; the sharp
    one for Gaussian tokens.
    """
    _, proved = proved_coupling(head, measure)
    psi = math.nan if proved is None else proved
    return Exponents(
        bohbot=float(moment_exponent(psi)),
        bohbot_experimental=float(moment_exponent_experimental(psi)),
        sharp=float(moment_exponent_rms(head.horizon(measure))) if speaks_of(measure) else math.nan,
    )


# ---- mean: the mean of self-attention's outputs.


class Mean(Metric):
    """|mean of the n outputs - mean of the push-forward|, self-attention [B]."""

    name = "mean"
    description = "mean of self-attention's outputs, L2 norm"
    asked_by = "tokens"

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.pushforward.mean

    def error(self, draw: Draw) -> Discrepancy:
        tokens, push = draw.tokens, draw.plan.pushforward
        mean, cov = self.target(draw.plan, tokens).to(tokens.device), push.cov.to(tokens.device)
        squared = torch.stack([prefix.mean - mean for prefix in draw.moments]).square().sum(1)
        # of an output, since the mean itself may be 0
        size = float(mean.square().sum() + cov.trace())
        return Discrepancy(as_floats(squared), size)

    def target_error(self, plan: Plan) -> tuple[float, str]:
        push = plan.pushforward
        return push.mean_error, f"{push.method}, own error {push.mean_error:.2g}"

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        return moment_exponents(head, measure)


# ---- cov and cov_op: the covariance of self-attention's outputs, in Frobenius and in operator
# norm.


class _Covariance(Metric):
    """|Cov_n - covariance of the push-forward|, Cov_n that of the empirical measure of the n
    outputs, divided by n [B].
    """

    asked_by = "tokens"

    @abstractmethod
    def squared_norm(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
        """Of each matrix."""

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.pushforward.cov

    def error(self, draw: Draw) -> Discrepancy:
        cov = self.target(draw.plan, draw.tokens).to(draw.tokens.device)
        differences = torch.stack([prefix.cov - cov for prefix in draw.moments])
        return Discrepancy(
            as_floats(self.squared_norm(differences)), float(self.squared_norm(cov[None]))
        )

    def target_error(self, plan: Plan) -> tuple[float, str]:
        push = plan.pushforward
        return push.cov_error, f"{push.method}, own error {push.cov_error:.2g}"

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        return moment_exponents(head, measure)


class Cov(_Covariance):
    name = "cov"
    description = "covariance of self-attention's outputs, Frobenius norm"
    brings = ("cov_op",)

    def squared_norm(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
        return matrices.square().sum((1, 2))


class CovOp(_Covariance):
    name = "cov_op"
    description = "covariance of self-attention's outputs, operator norm"

    def squared_norm(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
        largest: Tensor = torch.linalg.eigvalsh(matrices).abs().amax(dim=1)
        return largest.square()


# ---- Softmax means of some rows over the keys, for every n of a draw, against a target.


def against(draw: Draw, values: Callable[[Tensor], Tensor], target: Tensor) -> Discrepancy:
    """Mean over queries of |sum_j p_j values(y_j) - target|^2; segments between the n are merged,
    each key seen once.
    """
    head, tokens = draw.plan.head, draw.tokens
    x, target = draw.queries.to(tokens), target.double().to(tokens.device)
    q, k, v = head.queries(x), head.keys(tokens), values(tokens)
    state = init(q, v.shape[1])
    own = (
        AttentionState((q.double() * head.keys(x).double()).sum(1), values(x).double())
        if draw.plan.query_inside
        else None
    )
    squared = []
    for start, stop in segments(draw.ladder):
        state = merge(state, attention_state(q, k[start:stop], v[start:stop], 1.0))
        out = state.out if own is None else merge(state, own).out
        squared.append((out - target).square().sum(1).mean())
    return Discrepancy(as_floats(torch.stack(squared)), float(target.square().sum(1).mean()))


def segments(ladder: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip((0, *ladder[:-1]), ladder, strict=True)


# ---- l2: the outputs over queries of a law.


class L2(Metric):
    """Mean over queries x ~ nu of |Gamma_n(x) - Gamma(x)|^2 [S, Proposition 3.1]."""

    name = "l2"
    description = "outputs over queries x ~ nu"
    asked_by = "queries"

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return limit(plan.head, plan.measure)(x)

    def error(self, draw: Draw) -> Discrepancy:
        return against(draw, draw.plan.head.values, self.at_queries(draw))

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        """The sharp one speaks of Gaussian tokens and of queries that are Gaussian and centred."""
        return (
            Exponents(sharp=float(l2_exponent_rms(head.horizon(measure))))
            if speaks_of(measure)
            else Exponents()
        )

    def exact(self, head: Head, measure: Measure, n: list[int], seed: int) -> ErrorCurve | None:
        return exact_curve(head, measure, measure, n, seed=seed)


# ---- The largest error of a head over a ball of queries, by gradient ascent from many starts.

RANDOM_STARTS = 8  # on the sphere, and half as many inside
SINGULAR_STARTS = 3  # right singular directions of A, with both signs
TOKEN_STARTS = 4  # directions that favour the tokens of largest reach, with both signs
SCOUT_STEPS = 8  # with every start
FINISHERS = 4  # the best starts go on
FINISH_STEPS = 60
# of the radius: at a smooth maximum the height is then known to about the square of this
SHORTEST = 1e-5
BLOCK = 1 << 21  # scores held at once


@dataclass(frozen=True)
class UniformError:
    """sup over |x| <= R of |Gamma_n(x) - Gamma(x)|, as found, and the query where it is
    attained.
    """

    error: float
    point: Float64[Tensor, " d_query"]


def uniform_error(
    head: Head,
    measure: Measure,
    tokens: Any,
    radius: Any,
    generator: torch.Generator | None = None,
    *,
    query_inside: bool = False,
) -> UniformError:
    """The largest error of ``head`` on the given tokens over the queries |x| <= ``radius``; a lower
    bound that is attained.

    Projected gradient ascent of |Gamma_n(x) - Gamma(x)|^2 on the ball, with each start's own step
    length. Starts: random points on the sphere and inside, singular directions of A, and the
    directions in which the tokens of largest |A^T y| win the softmax. The quantity is that of the
    uniform bound of [B] (error C(R)/sqrt(n)). In float64; memory flat in n.
    """
    R = as_positive(radius, "radius")
    y = as_tensor(tokens, "tokens", ndim=2, last=head.dim).double().to(measure.device)
    x = _starts(head, y, R, generator)
    x, height = _ascend(head, measure, y, x, R, SCOUT_STEPS, query_inside)
    best = height.topk(min(FINISHERS, height.numel())).indices
    x, height = _ascend(head, measure, y, x[best], R, FINISH_STEPS, query_inside)
    top = int(height.argmax())
    return UniformError(float((2.0 * height[top]).sqrt()), x[top].clone())


def _starts(
    head: Head, y: Tensor, R: float, generator: torch.Generator | None
) -> Float64[Tensor, "starts d_query"]:
    d = head.dim_query
    device = torch.device("cpu") if generator is None else generator.device
    noise = torch.randn(
        RANDOM_STARTS + RANDOM_STARTS // 2,
        d,
        dtype=torch.float64,
        device=device,
        generator=generator,
    ).to(y)
    random = _unit(noise)
    inside = torch.rand(
        RANDOM_STARTS // 2, 1, dtype=torch.float64, device=device, generator=generator
    ).to(y)
    random[RANDOM_STARTS:] *= inside
    A = head.A.to(y)
    singular = torch.linalg.svd(A, full_matrices=False).Vh[:SINGULAR_STARTS]
    pulls = (y - y.mean(dim=0)) @ A
    strongest = pulls.norm(dim=1).topk(min(TOKEN_STARTS, y.shape[0])).indices
    tokens = _unit(pulls[strongest])
    return R * torch.cat([random, singular, -singular, tokens, -tokens])


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, eps=1e-300)


def _ascend(
    head: Head, measure: Measure, y: Tensor, x: Tensor, R: float, steps: int, query_inside: bool
) -> tuple[Tensor, Tensor]:
    """Points after some steps of projected ascent, and |error|^2 / 2 there. A step that does not
    climb is shortened.
    """
    height, slope = error_and_gradient(head, measure, y, x, query_inside=query_inside)
    length = torch.full_like(height, 0.3 * R)
    for _ in range(steps):
        trial = x + length[:, None] * _feasible_direction(x, slope, R)
        trial = trial * (R / trial.norm(dim=1, keepdim=True).clamp_min(R))
        new_height, new_slope = error_and_gradient(
            head, measure, y, trial, query_inside=query_inside
        )
        climbs = new_height > height
        x, slope = (
            torch.where(climbs[:, None], trial, x),
            torch.where(climbs[:, None], new_slope, slope),
        )
        height = torch.where(climbs, new_height, height)
        length = torch.where(climbs, 1.5 * length, 0.4 * length).clamp_max(R)
        if float(length.max()) < SHORTEST * R:
            break
    return x, height


def _feasible_direction(x: Tensor, slope: Tensor, R: float) -> Tensor:
    """The gradient's direction; at the edge without its outward part, which the projection would
    undo.
    """
    outward = (slope * x).sum(dim=1, keepdim=True) / R**2
    at_edge = (x.norm(dim=1, keepdim=True) >= R * (1.0 - 1e-12)) & (outward > 0)
    return _unit(torch.where(at_edge, slope - outward * x, slope))


def error_and_gradient(
    head: Head, measure: Measure, y: Tensor, x: Tensor, *, query_inside: bool = False
) -> tuple[Float64[Tensor, " m"], Float64[Tensor, "m d_query"]]:
    """h = |Gamma_n(x) - Gamma(x)|^2 / 2 for each row x, and its gradient in x.

    With error e and w = V^T e:  grad h = A^T (Cov_n(theta) - Cov(theta)) w, the covariances of the
    tokens under softmax weights and under the tilted law. With the query in its own prompt, of
    weight p:  grad h = A^T ((1-p) Cov_n - Cov) w + p w + p (1-p) <V x + v0 - Gamma_n, e> (A^T (x -
    m_n) + theta), m_n the softmax mean of the tokens.
    """
    theta, V, A = head.tilt(x), head.V.to(x), head.A.to(x)
    state = attention_state(theta, y, y, 1.0)
    mean, weight = state.out, torch.zeros_like(state.lse)
    finite = head.values(mean)
    own = finite
    if query_inside:
        weight = torch.sigmoid((theta * x).sum(dim=1) - state.lse)
        own = head.values(x)
    error = torch.lerp(finite, own, weight[:, None]) - limit(head, measure)(x)
    w = error @ V
    spread = (1.0 - weight)[:, None] * _covariance_times(theta, y, state.lse, mean, w)
    spread = spread - torch.einsum("mij,mj->mi", measure.tilted_cov(theta), w)
    slope = spread @ A
    if query_inside:
        turn = (weight * (1.0 - weight) * ((own - finite) * error).sum(dim=1))[:, None]
        slope = slope + weight[:, None] * w + turn * ((x - mean) @ A + theta)
    return 0.5 * (error * error).sum(dim=1), slope


def _covariance_times(theta: Tensor, y: Tensor, lse: Tensor, mean: Tensor, w: Tensor) -> Tensor:
    """Cov_n(theta) w = sum_j p_j (y_j - m_n) <y_j - m_n, w>, block by block."""
    total = torch.zeros_like(mean)
    step = max(1, BLOCK // theta.shape[0])
    height = (mean * w).sum(dim=1, keepdim=True)
    for start in range(0, y.shape[0], step):
        block = y[start : start + step]
        share = torch.exp(theta @ block.T - lse[:, None]) * (w @ block.T - height)
        total += share @ block - share.sum(dim=1, keepdim=True) * mean
    return total


# ---- uniform: the largest error over a ball of queries.


class Uniform(Metric):
    """sup over |x| <= R of |Gamma_n(x) - Gamma(x)| [B]; the size of the limit is that where it is
    attained.
    """

    name = "uniform"
    description = "largest error over queries |x| <= radius"
    asked_by = "ball"
    in_float64 = True

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return limit(plan.head, plan.measure)(x)

    def error(self, draw: Draw) -> Discrepancy:
        plan, tokens = draw.plan, draw.tokens
        worst = [
            uniform_error(
                plan.head,
                plan.measure,
                tokens[:n],
                plan.radius,
                draw.generator(f"starts {n}"),
                query_inside=plan.query_inside,
            )
            for n in draw.ladder
        ]
        points = torch.stack([at.point for at in worst])
        size = float(self.target(plan, points).square().sum(1).mean())
        return Discrepancy(np.array([at.error for at in worst]) ** 2, size, as_floats(points))


# ---- hardmax: attention that takes the token of largest score.


class Hardmax(Metric):
    """Hardmax. Centred Gaussian tokens on the line: |mean output of self-attention|, whose limit is
    0 [B, Prop. 5.1].

    Bounded laws: mean over queries x ~ nu of the squared error against the support's furthest point
    along the tilt.
    """

    name = "hardmax"
    description = (
        "mean hardmax output on the line; for bounded laws hardmax outputs over queries x ~ nu"
    )
    asked_by = "queries"
    of_softmax = False
    in_float64 = True

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        if on_the_line(plan):
            return torch.zeros(plan.head.dim_out, dtype=torch.float64)
        return hardmax_limit(plan.head, plan.measure)(x)

    def check(self, plan: Plan) -> None:
        if not on_the_line(plan):
            plan.measure.extreme(plan.head.tilt(self.probes(plan)))

    def describe_queries(self, plan: Plan) -> str:
        if on_the_line(plan):
            return "queries are the tokens"
        # hardmax leaves a query out of its prompt
        return super().describe_queries(replace(plan, query_inside=False))

    def error(self, draw: Draw) -> Discrepancy:
        plan = draw.plan
        if on_the_line(plan):
            return _on_the_line(draw)
        x, tokens = (
            draw.queries.to(plan.measure.device),
            draw.tokens.double().to(plan.measure.device),
        )
        target = self.at_queries(draw)
        q, k, v = plan.head.queries(x), plan.head.keys(tokens), plan.head.values(tokens)
        squared = [
            (attend_hardmax(q, k[:n], v[:n]) - target).square().sum(1).mean() for n in draw.ladder
        ]
        return Discrepancy(as_floats(torch.stack(squared)), float(target.square().sum(1).mean()))


def _on_the_line(draw: Draw) -> Discrepancy:
    """A query of positive tilt takes the largest token, one of negative tilt the smallest: O(n),
    any number of tokens.
    """
    head = draw.plan.head
    y = as_floats(draw.tokens)[:, 0]
    at = np.array(draw.ladder) - 1
    upward = np.cumsum(y * float(head.A) > 0)[at] / (at + 1.0)
    mean = upward * np.maximum.accumulate(y)[at] + (1.0 - upward) * np.minimum.accumulate(y)[at]
    size = float(head.V.double().square().sum())
    return Discrepancy(size * mean**2, size * float(draw.plan.measure.cov))


def on_the_line(plan: Plan) -> bool:
    """The setting of [B, Proposition 5.1]: centred Gaussian tokens in d = 1, where hardmax takes an
    extreme token.
    """
    head, measure = plan.head, plan.measure
    if not measure.is_gaussian or measure.dim != 1 or head.dim_query != 1:
        return False
    bias = head.tilt_bias
    centred = float(measure.mean) == 0.0 and (bias is None or float(bias) == 0.0)
    if not centred or float(head.A) == 0.0:
        raise ValueError(
            "metrics: hardmax on Gaussian tokens of the line needs mean 0, A other than 0, and no"
            " tilt bias"
        )
    return True


# ---- grad_u: the gradient in the score matrix.

KEY_BLOCK = 4096  # keys whose weights are held at once


class GradU(Metric):
    """The gradient in U = A is the tensor V Cov(theta) (x) x, so the error is ||V (Cov_n - Cov)||_F
    |x| [S, Prop. 3.4].
    """

    name = "grad_u"
    description = "gradient in U = A over queries x ~ nu"
    asked_by = "queries"
    in_float64 = True

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.head.V.to(x) @ plan.measure.tilted_cov(plan.head.tilt(x))

    def error(self, draw: Draw) -> Discrepancy:
        plan = draw.plan
        device = plan.measure.device
        x, tokens = draw.queries.to(device), draw.tokens.double().to(device)
        theta, V, target = plan.head.tilt(x), plan.head.V.to(x), self.at_queries(draw)
        # a common shift changes no covariance and no softmax; it saves digits
        centre = plan.measure.mean.double()
        inside = x - centre if plan.query_inside else None
        weight = x.square().sum(1)
        squared = [
            (weight * (scatter - target).square().sum((1, 2))).mean()
            for scatter in softmax_scatter(theta, tokens - centre, V, draw.ladder, inside)
        ]
        return Discrepancy(
            as_floats(torch.stack(squared)), float((weight * target.square().sum((1, 2))).mean())
        )


def softmax_scatter(
    theta: Float64[Tensor, "m d"],
    tokens: Float64[Tensor, "n d"],
    V: Float64[Tensor, "d_out d"],
    ladder: tuple[int, ...],
    inside: Float64[Tensor, "m d"] | None = None,
) -> Iterator[Float64[Tensor, "m d_out d"]]:
    """V Cov_n(theta) for every n of the ladder; ``inside`` adds one own token to each query's
    prompt.
    """
    mean_and_second = init(theta, tokens.shape[1] * (1 + V.shape[0]))
    for start, stop in segments(ladder):
        for first in range(start, stop, KEY_BLOCK):
            block = tokens[first : min(first + KEY_BLOCK, stop)]
            mean_and_second = merge(mean_and_second, _second_moments(theta, block, V))
        state = mean_and_second
        if inside is not None:
            own = torch.cat([inside, _outer(inside @ V.T, inside).flatten(1)], dim=1)
            state = merge(state, AttentionState((theta * inside).sum(1), own))
        mean, second = state.out[:, : tokens.shape[1]], state.out[:, tokens.shape[1] :]
        yield second.reshape(-1, *V.shape) - _outer(mean @ V.T, mean)


def _second_moments(theta: Tensor, block: Tensor, V: Tensor) -> AttentionState:
    """Softmax means of y and of (V y) y^T over some keys. Query by query: the products of all keys
    are never held.
    """
    scores = theta @ block.T
    lse = torch.logsumexp(scores, dim=1)
    weights = torch.exp(scores - lse[:, None])
    values = (block @ V.T).T
    second = torch.stack([(values * row) @ block for row in weights])
    return AttentionState(lse, torch.cat([weights @ block, second.flatten(1)], dim=1))


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] * right[:, None, :]


# ---- grad_v: the gradient in the value map.


class GradV(Metric):
    """The gradient in V, row by row: every row has the tilted mean m(theta) as its gradient, so the
    error is |m_n - m|.

    [S, Proposition 3.4], gradients as in [S, C.7]; the gradient in all of V is larger by the factor
    sqrt(d_out).
    """

    name = "grad_v"
    description = "gradient in V over queries x ~ nu"
    asked_by = "queries"

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.measure.tilted_mean(plan.head.tilt(x))

    def error(self, draw: Draw) -> Discrepancy:
        return against(draw, lambda rows: rows, self.at_queries(draw))


# ---- The metrics of Monte Carlo experiments: one table, one file each; a metric from outside
# enters by ``register``.

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (Mean(), Cov(), L2(), Uniform(), GradV(), GradU(), Hardmax(), CovOp())
}
"""Name -> metric. Only :func:`register` adds to it; no file of a run can."""


def register(metric: Any) -> None:
    """Let experiments, in Python and in YAML, ask for a metric by its name. Processes that compute
    have to import it too.
    """
    metric = as_kind(metric, Metric, "metric")
    if type(METRICS.setdefault(metric.name, metric)) is not type(metric):
        raise ValueError(
            f"metric {metric.name}: already registered, as {METRICS[metric.name].description}"
        )


def unknown(names: tuple[object, ...]) -> list[object]:
    """Those of the names that no metric has."""
    return [name for name in names if not isinstance(name, str) or name not in METRICS]


def discrepancies(draw: Draw) -> dict[str, Discrepancy]:
    """Every metric of the plan on one draw, and what these bring with them, in the order of the
    table.
    """
    found: dict[str, Discrepancy] = {}
    for name, metric in METRICS.items():
        if name in draw.plan.metrics:
            for each in (name, *metric.brings):
                if each not in found:
                    found[each] = METRICS[each].error(draw)
    return found
