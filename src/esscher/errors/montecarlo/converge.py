"""converge: the error of a head on n tokens against its limit, measured by drawing tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esscher.attention.finite import attend_prefixes
from esscher.attention.head import Head, check_pair
from esscher.attention.limit import Pushforward, limit
from esscher.errors.curve import ErrorCurve
from esscher.errors.montecarlo.metrics import METRICS, Errors
from esscher.inputs import as_count, as_counts, as_positive, as_seed, as_tensor, generator_for
from esscher.measures.base import Measure

SAMPLINGS = ("nested", "independent")
SEEN = 64  # tokens on which sizes are seen
ROUNDING = 8.0  # rounding of an output, in units of its size times the precision
NEGLIGIBLE = 1e-3  # of the measured error
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
    ``l2``; self-attention's queries are in it anyway. ``dtype``: of the attention, by default
    float32 where its rounding is below a thousandth of the measured error, else float64; sums are
    in float64. ``device``: by default the law's. ``experiment``: a name; numbers depend on
    (experiment, seed, n or "nested", repeat) alone. Where the limit's own error is above 20 % of
    the measured one the ladder of n stops, and ``origin`` says so.

    Student tokens have no limit, so every metric is refused with the reason unless A = 0.
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
        self.seed, self.sampling, self.query_inside = as_seed(seed), sampling, query_inside
        self.queries = _queries(queries, head)
        asked = {METRICS[name].asked_by: name for name in reversed(self.metrics)}
        if head.dim_query != measure.dim:
            dims = f"queries have dimension {head.dim_query}, tokens {measure.dim}"
            if "tokens" in asked:
                raise ValueError(
                    f"metrics: {asked['tokens']} is of self-attention, where queries are tokens;"
                    f" {dims}"
                )
            if "queries" in asked and isinstance(self.queries, int):
                raise ValueError(
                    f"queries: expected rows of length {head.dim_query} for {asked['queries']}, got"
                    f" {queries!r}; {dims}"
                )
            if "ball" in asked and radius is None:
                raise ValueError(f"radius: expected a number above 0, got None; {dims}")
            if query_inside:
                raise ValueError(f"query_inside: expected False, since {dims}")
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
