"""converge: the error of a head on n tokens against its limit, measured by drawing tokens.

Which error is measured is a metric, a subclass of :class:`Metric` with one required method,
``error``; ``register`` adds one from outside.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.finite import attend_hardmax, attend_prefixes
from esscher.attention.head import Head, check_pair
from esscher.attention.limit import Pushforward, hardmax_limit, limit
from esscher.attention.state import AttentionState, attention_state, init, merge
from esscher.errors.curve import ErrorCurve, Floats
from esscher.errors.exact import exact_curve
from esscher.inputs import (
    as_count,
    as_counts,
    as_kind,
    as_positive,
    as_tensor,
    generator_for,
)
from esscher.measures.base import Measure
from esscher.theory.bohbot import moment_exponent, moment_exponent_experimental
from esscher.theory.prediction import proved_coupling
from esscher.theory.sharp import gaussian_centred, l2_exponent_rms, moment_exponent_rms

Errors = tuple[Floats, float]
"""Squared error at each n of a draw, and the squared size of the limit."""

SAMPLINGS = ("nested", "independent")
SEEN = 64  # tokens on which sizes are seen
ROUNDING = 8.0  # rounding of an output, in units of its size times the precision
NEGLIGIBLE = 1e-3  # of the measured error
PROBES = 64  # tokens of the law at which a limit must exist before any work is done
FRESH_QUERIES = 64  # drawn from the law in each repeat, where no queries are given
# the ladder of n stops where the limit's own error is above this share of the measured error
LIMIT_SHARE = 0.2


@torch.no_grad()
def converge(
    head: Head,
    measure: Measure,
    n: Any,
    repeats: Any,
    metrics: Any = ("mean", "cov", "l2", "uniform"),
    seed: Any = 0,
    **options: Any,
) -> dict[str, ErrorCurve]:
    """Root mean square error against the limit at each n, over repeated draws of the tokens: one
    curve for each metric.

    ``mean``, ``cov``: moments of self-attention's outputs, in L2 and Frobenius norm [B]. ``l2``:
    outputs over queries x ~ nu, nu the measure or the given ``queries`` (rows, or how many fresh
    ones a repeat). ``uniform``: sup over |x| <= ``radius`` (default: the root mean square norm of a
    token). ``hardmax``: mean output for Gaussian tokens [B, Proposition 5.1 on the line], or
    outputs over x ~ nu for bounded laws.

    Options. ``sampling``: "nested" prefixes of i.i.d. tokens, one pass for all n, or "independent"
    tokens for every n. ``query_inside`` adds a query of nu to its own prompt [S, Remark 3.2], for
    ``l2``. ``dtype``: of the attention, by default float32 where its rounding is below a thousandth
    of the measured error, else float64. ``device``: by default the law's. ``experiment``: a name;
    numbers depend on (experiment, seed, n or "nested", repeat) alone. Where the limit's own error
    is above 20 % of the measured one the ladder of n stops, and ``origin`` says so.
    """
    plan = Plan(head, measure, n, metrics, seed, **options)
    count = as_count(repeats, "repeats")
    if count < 2:
        raise ValueError(
            "repeats: expected at least 2, since standard errors come from the repeats, got 1"
        )
    return plan.curves({number: plan.repeat(number) for number in range(count)})


class Plan:
    """A checked Monte Carlo experiment with the arguments of :func:`converge`; ValueError names the
    argument that is wrong.
    """

    def __init__(
        self,
        head: Head,
        measure: Measure,
        n: Any,
        metrics: Any = ("mean", "cov", "l2", "uniform"),
        seed: Any = 0,
        *,
        sampling: str = "nested",
        query_inside: bool = False,
        queries: Any = None,
        radius: Any = None,
        experiment: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_pair(head, measure)
        self.head, self.measure = head, measure
        self.metrics = _names(metrics)
        ladder = as_counts(n, "n")
        if (np.diff(ladder) <= 0).any():
            raise ValueError(f"n: expected increasing numbers, each once, got {ladder.tolist()}")
        self.n: tuple[int, ...] = tuple(ladder.tolist())
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling: expected one of {', '.join(SAMPLINGS)}, got {sampling!r}")
        if not isinstance(seed, int | np.integer):
            raise ValueError(f"seed: expected a whole number, got {seed!r}")
        self.seed, self.sampling, self.query_inside = int(seed), sampling, query_inside
        self.queries = _queries(queries, head)
        asked = {METRICS[name].asked_by: name for name in reversed(self.metrics)}
        if head.dim_query != measure.dim:
            dims = f"queries have dimension {head.dim_query}, tokens {measure.dim}"
            for wrong, text in (
                ("tokens" in asked, "metrics: expected none of self-attention's (mean, cov)"),
                (
                    "queries" in asked and isinstance(self.queries, int),
                    f"queries: expected rows of length {head.dim_query}, got {queries!r}",
                ),
                ("ball" in asked and radius is None, "radius: expected a number above 0, got None"),
                (query_inside, "query_inside: expected False"),
            ):
                if wrong:
                    raise ValueError(f"{text}; {dims}")
        if query_inside and "ball" in asked:
            raise ValueError(f"query_inside: expected False for {asked['ball']}")
        self.radius = math.nan  # of the ball of queries, where a metric asks for one
        if "ball" in asked:
            size = measure.cov.double().trace() + measure.mean.double().square().sum()
            self.radius = math.sqrt(size) if radius is None else as_positive(radius, "radius")
        self.experiment = str(experiment)
        self.dtype = dtype or _enough(head, measure, self.n[-1])
        self.device = measure.device if device is None else torch.device(device)
        self._check_limit_exists()

    def _check_limit_exists(self) -> None:
        """Refuse before any work where some query has no limit to compare with."""
        asked = [METRICS[name] for name in self.metrics]
        limits = [metric for metric in asked if metric.of_softmax]
        origin = torch.zeros(
            1, self.head.dim_query, dtype=torch.float64, device=self.measure.device
        )
        try:
            if limits:
                x = torch.cat([origin, *(metric.probes(self) for metric in limits)])
                self.measure.log_laplace(self.head.tilt(x))
        except ValueError as cause:
            names = ", ".join(metric.name for metric in limits)
            raise ValueError(
                f"metrics: {names} compare with attention's limit, which is missing: {cause}"
            ) from cause
        for metric in asked:
            metric.check(self)

    @cached_property
    def pushforward(self) -> Pushforward:
        return limit(self.head, self.measure).pushforward()

    def draws(self, repeat: int) -> Iterator[Draw]:
        """One draw for all n where prompts are nested, else one for each n."""
        if self.sampling == "independent":
            for n in self.n:
                yield Draw(self, n, repeat, (n,))
        else:
            yield Draw(self, "nested", repeat, self.n)

    @torch.no_grad()
    def repeat(self, number: int) -> dict[str, Errors]:
        """Errors of one repeat by metric, the same whichever process computes them."""
        parts: dict[str, list[Errors]] = {name: [] for name in self.metrics}
        for draw in self.draws(number):
            for name, found in parts.items():
                found.append(METRICS[name].error(draw))
        return {
            name: (
                np.concatenate([x for x, _ in found]),
                float(np.mean([size for _, size in found])),
            )
            for name, found in parts.items()
        }

    def curves(self, repeats: Mapping[int, Mapping[str, Errors]]) -> dict[str, ErrorCurve]:
        """One curve for each metric from the errors of repeats, by number."""
        ordered = [repeats[number] for number in sorted(repeats)]
        return {name: self._curve(name, [one[name] for one in ordered]) for name in ordered[0]}

    def _curve(self, name: str, repeats: list[Errors]) -> ErrorCurve:
        samples = np.stack([squared for squared, _ in repeats])
        scale = math.sqrt(float(np.mean([size for _, size in repeats])))
        rms = np.sqrt(samples.mean(axis=0))
        metric = METRICS[name]
        own_error, method = metric.limit_error(self)
        dtype = torch.float64 if metric.in_float64 else self.dtype
        floor = own_error + ROUNDING * torch.finfo(dtype).eps * scale
        beyond = np.flatnonzero(~(floor <= LIMIT_SHARE * rms))
        kept = int(beyond[0]) if beyond.size else len(self.n)
        rms = rms[:kept]
        drawn = "nested prefixes, so that errors at different n are correlated"
        if self.sampling == "independent":
            drawn = "drawn afresh for every n"
        origin = (
            f"Monte Carlo, {len(repeats)} repeats in {str(dtype).removeprefix('torch.')}; i.i.d."
            f" tokens of {type(self.measure).__name__}, {drawn}; {metric.describe_queries(self)};"
            f" limit: {method}"
        )
        if beyond.size:
            left_out = ", ".join(map(str, self.n[kept:]))
            origin += (
                f"; left out n = {left_out}, where the error of the limit and of rounding"
                f" ({floor:.2g}) is above 20 % of the measured error"
            )
        # 0 / 0 is exact
        accuracy = np.divide(floor, rms, out=np.zeros_like(rms), where=rms > 0).max(initial=0.0)
        return ErrorCurve.from_repeats(
            np.array(self.n[:kept], dtype=np.int64),
            samples[:, :kept],
            metric=name,
            scale=scale,
            accuracy=float(accuracy),
            origin=origin,
        )


@dataclass(frozen=True)
class Draw:
    """Tokens of one repeat: for every n of ``ladder`` the first n are the prompt.

    ``key`` names the draw: "nested" or n. Tokens and queries are the same in every process.
    """

    plan: Plan
    key: str | int
    repeat: int
    ladder: tuple[int, ...]

    def generator(self, purpose: str) -> torch.Generator:
        return generator_for(self.plan.experiment, self.plan.seed, self.key, self.repeat, purpose)

    @cached_property
    def tokens(self) -> Tensor:
        rows = self.plan.measure.sample(self.ladder[-1], self.generator("tokens"))
        return rows.to(dtype=self.plan.dtype, device=self.plan.device)

    @cached_property
    def queries(self) -> Tensor:
        """Rows of nu in float64, on the law's device: those given, or fresh ones from the law."""
        rows = self.plan.queries
        if isinstance(rows, int):
            rows = self.plan.measure.sample(rows, self.generator("queries"))
        return rows.to(dtype=torch.float64, device=self.plan.measure.device)

    @cached_property
    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and covariance of self-attention's outputs at each n, all from one pass."""
        head, tokens = self.plan.head, self.tokens
        q, k, v = head.queries(tokens), head.keys(tokens), head.values(tokens)
        return attend_prefixes(q, k, v, self.ladder, 1.0)


def _names(metrics: Any) -> tuple[str, ...]:
    """Names of metrics, each once, in the order of the table."""
    names = (metrics,) if isinstance(metrics, str) or not isinstance(metrics, Iterable) else metrics
    given = tuple(names)
    unknown = [name for name in given if not isinstance(name, str) or name not in METRICS]
    if unknown or not given or len(set(given)) < len(given):
        got = repr(unknown[0]) if unknown else repr(given)
        raise ValueError(f"metrics: expected some of {', '.join(METRICS)}, each once, got {got}")
    return tuple(name for name in METRICS if name in given)


def _queries(queries: Any, head: Head) -> Tensor | int:
    """Rows, or the number of fresh ones in each repeat."""
    if queries is None:
        return FRESH_QUERIES
    if np.isscalar(queries) or getattr(queries, "ndim", None) == 0:
        return as_count(queries, "queries")
    rows = as_tensor(queries, "queries", ndim=2, last=head.dim_query)
    if rows.shape[0] == 0:
        raise ValueError(
            "queries: expected at least one row, or the number of fresh ones in each repeat, got"
            " none"
        )
    return rows


def _enough(head: Head, measure: Measure, largest: int) -> torch.dtype:
    """float32 where its rounding is below a thousandth of the measured error, else float64.

    The error at the largest n is about sqrt(tr(V Sigma V^T) / n); the rounding of an output is that
    of its size and of the scores, seen on a few tokens.
    """
    tokens = measure.sample(SEEN, torch.Generator().manual_seed(0)).double()
    x = tokens if head.dim_query == measure.dim else tokens.new_zeros(1, head.dim_query)
    values, scores = head.values(tokens), head.queries(x).double() @ head.keys(tokens).double().T
    size = float(values.square().sum(1).mean().sqrt())
    spread = float((values - values.mean(0)).square().sum(1).mean().sqrt())
    rounding = (
        ROUNDING * torch.finfo(torch.float32).eps * size * max(1.0, float(scores.abs().max()))
    )
    enough = rounding <= NEGLIGIBLE * spread / math.sqrt(largest)
    return torch.float32 if enough else torch.float64


# ---- Metrics.


class Metric(ABC):
    """One error of a head on n tokens.

    ``asked_by`` says who the queries are: the "tokens" of the prompt themselves (self-attention),
    the "queries" x ~ nu (rows given, or fresh ones of the law), or a "ball" |x| <= R.
    """

    name: ClassVar[str]
    asked_by: ClassVar[Literal["tokens", "queries", "ball"]] = "queries"
    of_softmax: ClassVar[bool] = True  # compares with softmax attention's limit, which must exist
    in_float64: ClassVar[bool] = False  # whatever the dtype of the experiment

    @abstractmethod
    def error(self, draw: Draw) -> Errors:
        """Squared error of the head on the first n tokens of the draw, at each n."""

    def check(self, plan: Plan) -> None:
        """Raise ValueError where the metric does not apply to the experiment."""
        return

    def probes(self, plan: Plan) -> Tensor:
        """Queries at which the limit has to exist."""
        if self.asked_by == "ball":
            eye = torch.eye(plan.head.dim_query, dtype=torch.float64, device=plan.measure.device)
            return plan.radius * torch.cat([eye, -eye])
        if self.asked_by == "queries" and isinstance(plan.queries, Tensor):
            return plan.queries.double().to(plan.measure.device)
        return plan.measure.sample(PROBES, torch.Generator().manual_seed(0)).double()

    def limit_error(self, plan: Plan) -> tuple[float, str]:
        """The limit's own error, and how the limit was computed."""
        return 0.0, "exact"

    def describe_queries(self, plan: Plan) -> str:
        if self.asked_by == "tokens":
            return "queries are the tokens"
        if self.asked_by == "ball":
            return f"queries |x| <= {plan.radius:.4g}, by gradient ascent"
        inside = ", each in its own prompt" if plan.query_inside else ""
        if isinstance(plan.queries, int):
            return f"{plan.queries} fresh queries of the law a repeat{inside}"
        return f"{plan.queries.shape[0]} given queries{inside}"

    def exponents(self, head: Head, measure: Measure) -> dict[str, float]:
        """Theory's exponents by column of ``rates``: bohbot, bohbot_experimental, sharp."""
        return {}

    def exact(self, head: Head, measure: Measure, n: list[int], seed: int) -> ErrorCurve | None:
        """The curve without sampling tokens, queries outside their prompts; None: not known."""
        return None


def as_floats(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().double().cpu().numpy())


# mean, cov: moments of self-attention's outputs.


class _Moment(Metric):
    asked_by = "tokens"

    def limit_error(self, plan: Plan) -> tuple[float, str]:
        push = plan.pushforward
        own = push.mean_error if self.name == "mean" else push.cov_error
        return own, f"{push.method}, own error {own:.2g}"

    def exponents(self, head: Head, measure: Measure) -> dict[str, float]:
        """1/(2(1 + 32 Psi)) as proved, 1/(2(1 + Psi)) as conjectured [B]; sharp: Gaussian."""
        _, proved = proved_coupling(head, measure)
        psi = math.nan if proved is None else proved
        found = {
            "bohbot": float(moment_exponent(psi)),
            "bohbot_experimental": float(moment_exponent_experimental(psi)),
        }
        if gaussian_centred(measure):
            found["sharp"] = float(moment_exponent_rms(head.horizon(measure)))
        return found


class Mean(_Moment):
    """|mean of the n outputs - mean of the push-forward|, self-attention [B]."""

    name = "mean"

    def error(self, draw: Draw) -> Errors:
        push = draw.plan.pushforward
        apart = torch.stack([mean for mean, _ in draw.moments]) - push.mean.to(draw.tokens.device)
        # the size of an output, since the mean itself may be 0
        return as_floats(apart.square().sum(1)), float(push.mean.square().sum() + push.cov.trace())


class Cov(_Moment):
    """|Cov_n - covariance of the push-forward| in Frobenius norm, Cov_n divided by n [B]."""

    name = "cov"

    def error(self, draw: Draw) -> Errors:
        cov = draw.plan.pushforward.cov.to(draw.tokens.device)
        apart = torch.stack([own for _, own in draw.moments]) - cov
        return as_floats(apart.square().sum((1, 2))), float(cov.square().sum())


# l2: over queries of a law.


class L2(Metric):
    """Mean over queries x ~ nu of |Gamma_n(x) - Gamma(x)|^2 [S, Proposition 3.1]."""

    name = "l2"

    def error(self, draw: Draw) -> Errors:
        head, measure, tokens = draw.plan.head, draw.plan.measure, draw.tokens
        target = limit(head, measure)(draw.queries).double().to(tokens.device)
        x = draw.queries.to(tokens)
        q, k, v = head.queries(x), head.keys(tokens), head.values(tokens)
        own, state, squared = None, init(q, v.shape[1]), []
        if draw.plan.query_inside:
            lse = (q.double() * head.keys(x).double()).sum(1)
            own = AttentionState(lse, head.values(x).double())
        for start, stop in zip((0, *draw.ladder[:-1]), draw.ladder, strict=True):
            state = merge(state, attention_state(q, k[start:stop], v[start:stop], 1.0))
            out = state.out if own is None else merge(state, own).out
            squared.append((out - target).square().sum(1).mean())
        return as_floats(torch.stack(squared)), float(target.square().sum(1).mean())

    def exponents(self, head: Head, measure: Measure) -> dict[str, float]:
        if not gaussian_centred(measure):  # of Gaussian tokens and of centred Gaussian queries
            return {}
        return {"sharp": float(l2_exponent_rms(head.horizon(measure)))}

    def exact(self, head: Head, measure: Measure, n: list[int], seed: int) -> ErrorCurve | None:
        return exact_curve(head, measure, measure, n, seed=seed)


# hardmax: attention that takes the token of largest score.


class Hardmax(Metric):
    """Hardmax. Centred Gaussian tokens: |mean output of self-attention|, whose limit is 0 by
    symmetry [B, Prop. 5.1 on the line].

    Bounded laws: mean over queries x ~ nu of the squared error against the support's furthest point
    along the tilt.
    """

    name = "hardmax"
    of_softmax = False
    in_float64 = True

    def check(self, plan: Plan) -> None:
        if not _gaussian_tokens(plan):
            plan.measure.extreme(plan.head.tilt(self.probes(plan)))

    def describe_queries(self, plan: Plan) -> str:
        if _gaussian_tokens(plan):
            return "queries are the tokens"
        return super().describe_queries(plan).removesuffix(", each in its own prompt")

    def error(self, draw: Draw) -> Errors:
        head, measure = draw.plan.head, draw.plan.measure
        tokens = draw.tokens.double().to(measure.device)
        if _gaussian_tokens(draw.plan):
            V = head.V.double().to(tokens)
            mean = _line_means(draw) if measure.dim == 1 else _means(draw, tokens)
            return as_floats((mean @ V.T).square().sum(1)), float((V @ measure.root).square().sum())
        target = hardmax_limit(head, measure)(draw.queries)
        q = head.queries(draw.queries)
        k, v = head.keys(tokens), head.values(tokens)
        squared = [
            (attend_hardmax(q, k[:n], v[:n]) - target).square().sum(1).mean() for n in draw.ladder
        ]
        return as_floats(torch.stack(squared)), float(target.square().sum(1).mean())


def _means(draw: Draw, tokens: Tensor) -> Tensor:
    """Mean of the tokens that the first n tokens take, at each n."""
    q, k = draw.plan.head.queries(tokens), draw.plan.head.keys(tokens)
    return torch.stack([attend_hardmax(q[:n], k[:n], tokens[:n]).mean(0) for n in draw.ladder])


def _line_means(draw: Draw) -> Tensor:
    """The same on the line, in O(n): a query of positive tilt takes the largest token, one of
    negative tilt the smallest.
    """
    y, at = as_floats(draw.tokens)[:, 0], np.array(draw.ladder) - 1
    upward = np.cumsum(y * float(draw.plan.head.A) > 0)[at] / (at + 1.0)
    highest, lowest = np.maximum.accumulate(y)[at], np.minimum.accumulate(y)[at]
    return torch.from_numpy(upward * highest + (1.0 - upward) * lowest)[:, None]


def _gaussian_tokens(plan: Plan) -> bool:
    """Whether the tokens are Gaussian, and then the queries too; refuse those without a limit."""
    head, measure = plan.head, plan.measure
    if not measure.is_gaussian or head.dim_query != measure.dim:
        return False
    bias = head.tilt_bias
    centred = not bool(measure.mean.any()) and (bias is None or not bool(bias.any()))
    if not centred or not bool(head.A.any()):
        raise ValueError(
            "metrics: hardmax on Gaussian tokens needs mean 0, A other than 0, and no tilt bias"
        )
    return True


# uniform: the largest error over a ball of queries, by gradient ascent from many starts.

RANDOM_STARTS = 8  # on the sphere, and half as many inside
SINGULAR_STARTS = 3  # right singular directions of A, with both signs
TOKEN_STARTS = 4  # directions that favour the tokens of largest reach, with both signs
SCOUT_STEPS = 8  # with every start
FINISHERS = 4  # the best starts go on
FINISH_STEPS = 60
# of the radius: at a smooth maximum the height is then known to about the square of this
SHORTEST = 1e-5


class Uniform(Metric):
    """sup over |x| <= R of |Gamma_n(x) - Gamma(x)| [B]; the limit's size is taken there."""

    name = "uniform"
    asked_by = "ball"
    in_float64 = True

    def error(self, draw: Draw) -> Errors:
        head, measure, radius, found = draw.plan.head, draw.plan.measure, draw.plan.radius, []
        for n in draw.ladder:
            generator = draw.generator(f"starts {n}")
            found.append(uniform_error(head, measure, draw.tokens[:n], radius, generator))
        errors, points = zip(*found, strict=True)
        size = limit(head, measure)(torch.stack(points)).square().sum(1).mean()
        return np.array(errors) ** 2, float(size)


def uniform_error(
    head: Head,
    measure: Measure,
    tokens: Any,
    radius: Any,
    generator: torch.Generator | None = None,
) -> tuple[float, Float64[Tensor, " d_query"]]:
    """The largest error over the queries |x| <= ``radius``, and the query that attains it.

    A lower bound that is attained, by projected gradient ascent of |Gamma_n(x) - Gamma(x)|^2 on the
    ball, each start with its own step length. Starts: random points on the sphere and inside,
    singular directions of A, and the directions in which the tokens of largest |A^T y| win the
    softmax. In float64.
    """
    R = as_positive(radius, "radius")
    y = as_tensor(tokens, "tokens", ndim=2, last=head.dim).double().to(measure.device)
    x = _starts(head, y, R, generator)
    x, height = _ascend(head, measure, y, x, R, SCOUT_STEPS)
    best = height.topk(min(FINISHERS, height.numel())).indices
    x, height = _ascend(head, measure, y, x[best], R, FINISH_STEPS)
    top = int(height.argmax())
    return float((2.0 * height[top]).sqrt()), x[top].clone()


def _starts(
    head: Head, y: Tensor, R: float, generator: torch.Generator | None
) -> Float64[Tensor, "starts d_query"]:
    device = torch.device("cpu") if generator is None else generator.device
    kind: dict[str, Any] = {"dtype": torch.float64, "device": device, "generator": generator}
    half = RANDOM_STARTS // 2
    random = _unit(torch.randn(RANDOM_STARTS + half, head.dim_query, **kind).to(y))
    random[RANDOM_STARTS:] *= torch.rand(half, 1, **kind).to(y)
    A = head.A.to(y)
    singular = torch.linalg.svd(A, full_matrices=False).Vh[:SINGULAR_STARTS]
    pulls = (y - y.mean(dim=0)) @ A
    strongest = pulls.norm(dim=1).topk(min(TOKEN_STARTS, y.shape[0])).indices
    tokens = _unit(pulls[strongest])
    return R * torch.cat([random, singular, -singular, tokens, -tokens])


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, eps=1e-300)


def _ascend(
    head: Head, measure: Measure, y: Tensor, x: Tensor, R: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Points after some steps of projected ascent, and |error|^2 / 2 there. A step that does not
    climb is shortened.
    """
    height, slope = error_and_gradient(head, measure, y, x)
    length = torch.full_like(height, 0.3 * R)
    for _ in range(steps):
        # at the edge the projection would undo the outward part of the gradient
        outward = (slope * x).sum(dim=1, keepdim=True) / R**2
        at_edge = (x.norm(dim=1, keepdim=True) >= R * (1.0 - 1e-12)) & (outward > 0)
        direction = _unit(torch.where(at_edge, slope - outward * x, slope))
        trial = x + length[:, None] * direction
        trial = trial * (R / trial.norm(dim=1, keepdim=True).clamp_min(R))
        new_height, new_slope = error_and_gradient(head, measure, y, trial)
        climbs = new_height > height
        x = torch.where(climbs[:, None], trial, x)
        slope = torch.where(climbs[:, None], new_slope, slope)
        height = torch.where(climbs, new_height, height)
        length = torch.where(climbs, 1.5 * length, 0.4 * length).clamp_max(R)
        if float(length.max()) < SHORTEST * R:
            break
    return x, height


def error_and_gradient(
    head: Head, measure: Measure, y: Tensor, x: Tensor
) -> tuple[Float64[Tensor, " m"], Float64[Tensor, "m d_query"]]:
    """|Gamma_n(x) - Gamma(x)|^2 / 2 for each row x, and its gradient in x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        finite = attention_state(head.queries(x), head.keys(y), head.values(y), 1.0).out
        height = 0.5 * (finite - limit(head, measure)(x)).square().sum(dim=1)
        (slope,) = torch.autograd.grad(height.sum(), x)
    return height.detach(), slope


METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (Mean(), Cov(), L2(), Uniform(), Hardmax())
}
"""Name -> metric. Only :func:`register` adds to it; no file of a run can."""


def register(metric: Any) -> None:
    """Let experiments ask for a metric by its name. Processes that compute must import it too."""
    metric = as_kind(metric, Metric, "metric")
    if type(METRICS.setdefault(metric.name, metric)) is not type(metric):
        raise ValueError(f"metric {metric.name}: already registered; give it another name")
