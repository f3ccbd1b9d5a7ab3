"""What a Monte Carlo experiment compares, on which tokens: checked once, then the same in every process."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.attention.limit import limit
from esscher.attention.pushforward import Pushforward
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.inputs import as_count, as_counts, as_positive, as_tensor
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.pool import Pool

__all__ = ["METRICS", "SAMPLINGS", "Draw", "Plan", "finite_pool_factor", "plan"]

METRICS = ("mean", "cov", "l2", "uniform", "grad_v", "grad_u", "hardmax")
SAMPLINGS = ("nested", "independent", "replacement", "without_replacement")
FRESH_QUERIES = 64  # drawn from the law in each repeat, where no queries are given
SELF_ATTENTION = ("mean", "cov")
WITH_QUERIES = ("l2", "grad_v", "grad_u")


@dataclass(frozen=True)
class Draw:
    """Tokens of one repeat, for every n of ``ladder``: the first n are the prompt. ``key`` names it: "nested" or n."""

    plan: Plan
    key: str | int
    repeat: int
    ladder: tuple[int, ...]

    def generator(self, purpose: str) -> torch.Generator:
        return generator_for(self.plan.experiment, self.plan.seed, self.key, self.repeat, purpose)

    @cached_property
    def tokens(self) -> Tensor:
        measure, n = self.plan.measure, self.ladder[-1]
        if self.plan.sampling == "without_replacement":
            assert isinstance(measure, Pool)
            chosen = torch.randperm(measure.size, generator=self.generator("tokens"))[:n]
            rows = measure.tokens[chosen.to(measure.device)]
        else:
            rows = measure.sample(n, self.generator("tokens"))
        return rows.to(dtype=self.plan.dtype, device=self.plan.device)

    @cached_property
    def queries(self) -> Tensor:
        """Rows of nu: those given, or fresh ones from the law."""
        rows = self.plan.queries
        if isinstance(rows, int):
            rows = self.plan.measure.sample(rows, self.generator("queries"))
        return rows.to(dtype=torch.float64, device=self.plan.device)

    def target(self, name: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """A limit at the queries, on the device of the law; computed once where the queries are always the same."""
        known = self.plan.known
        if isinstance(self.plan.queries, int):
            return compute(self.queries.to(self.plan.measure.device))
        if name not in known:
            known[name] = compute(self.queries.to(self.plan.measure.device))
        return known[name]


@dataclass(frozen=True)
class Plan:
    """A checked Monte Carlo experiment; made by :func:`plan`."""

    head: Head
    measure: Measure
    n: tuple[int, ...]
    metrics: tuple[str, ...]
    seed: int
    sampling: str
    query_inside: bool
    queries: Tensor | int  # rows, or the number of fresh ones a repeat
    radius: float  # of the ball of the uniform error; nan where that is not asked for
    experiment: str
    dtype: torch.dtype
    device: torch.device
    known: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)  # limits at given queries

    def draws(self, repeat: int) -> Iterator[Draw]:
        """One draw for all n where prompts are nested, one for each n where they are independent."""
        if self.sampling == "independent":
            for n in self.n:
                yield Draw(self, n, repeat, (n,))
        else:
            yield Draw(self, "nested", repeat, self.n)

    @cached_property
    def pushforward(self) -> Pushforward:
        return limit(self.head, self.measure).pushforward()

    def describe_sampling(self) -> str:
        law = type(self.measure).__name__
        nested = "nested prefixes, so that errors at different n are correlated"
        if self.sampling == "nested":
            return f"i.i.d. tokens of {law}, {nested}"
        if self.sampling == "independent":
            return f"i.i.d. tokens of {law}, drawn afresh for every n"
        assert isinstance(self.measure, Pool)
        size = self.measure.size
        if self.sampling == "replacement":
            return f"tokens drawn with replacement from a pool of {size}, {nested}"
        factors = ", ".join(f"{factor:.3g}" for factor in finite_pool_factor(self.n, size))
        return (
            f"tokens drawn without replacement from a pool of {size}, {nested}; "
            f"the errors carry the factor sqrt(1 - n/N) = {factors} for n = {', '.join(map(str, self.n))}"
        )


def finite_pool_factor(n: Any, N: Any) -> npt.NDArray[np.float64]:
    """sqrt(1 - n/N): what drawing n of N tokens without replacement does to the error of drawing them with replacement.

    The root of the finite population correction, to leading order; divide an error by it before comparing slopes.
    """
    counts, size = as_counts(n, "n"), as_count(N, "N")
    if counts.max() > size:
        raise ValueError(f"n: expected at most the {size} tokens of the pool, got {counts.max()}")
    return np.asarray(np.sqrt(1.0 - counts / size))


def plan(
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
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Plan:
    """Check an experiment, or raise ValueError naming the field and what it may be. The fields are those of ``converge``."""
    check_pair(head, measure)
    names = _metrics(metrics)
    ladder = as_counts(n, "n")
    if (np.diff(ladder) <= 0).any():
        raise ValueError(f"n: expected increasing numbers, each once, got {ladder.tolist()}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    _check_sampling(sampling, measure, int(ladder[-1]))
    _check_queries_from_law(head, measure, names, queries, radius, query_inside)
    made = Plan(
        head=head,
        measure=measure,
        n=tuple(ladder.tolist()),
        metrics=names,
        seed=_seed(seed),
        sampling=sampling,
        query_inside=query_inside,
        queries=_queries(queries, head),
        radius=_radius(radius, measure) if "uniform" in names else math.nan,
        experiment=str(experiment),
        dtype=dtype,
        device=measure.device if device is None else torch.device(device),
    )
    _check_limit_exists(made)
    return made


def _seed(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError as cause:
        raise ValueError(f"seed: expected a whole number, got {seed!r}") from cause


def _metrics(metrics: Any) -> tuple[str, ...]:
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics) if isinstance(metrics, Iterable) else (metrics,)
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names or len(set(names)) < len(names):
        got = repr(unknown[0]) if unknown else repr(names)
        raise ValueError(f"metrics: expected some of {', '.join(METRICS)}, each once, got {got}")
    return names


def _check_sampling(sampling: str, measure: Measure, largest: int) -> None:
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling: expected one of {', '.join(SAMPLINGS)}, got {sampling!r}")
    if sampling in ("nested", "independent"):
        return
    if not isinstance(measure, Pool):
        raise ValueError(f"sampling: {sampling} draws from a Pool, the measure is {type(measure).__name__}; use nested")
    if sampling == "without_replacement":
        if measure.weights is not None:
            raise ValueError("sampling: without_replacement expects a Pool of equal weights, this one has weights")
        if largest > measure.size:
            raise ValueError(f"n: expected at most the {measure.size} tokens of the pool, got {largest}")


def _check_queries_from_law(
    head: Head, measure: Measure, names: tuple[str, ...], queries: Any, radius: Any, query_inside: bool
) -> None:
    if head.dim_query == measure.dim:
        return
    dims = f"the head takes queries of dimension {head.dim_query}, the tokens have {measure.dim}"
    for name in names:
        if name in SELF_ATTENTION:
            raise ValueError(f"metrics: {name} is of self-attention, where queries are tokens; {dims}")
        if name != "uniform" and (queries is None or np.ndim(queries) == 0):
            raise ValueError(f"queries: expected rows of length {head.dim_query} for {name}, got {queries!r}; {dims}")
    if "uniform" in names and radius is None:
        raise ValueError(f"radius: expected a number above 0, got None; {dims}")
    if query_inside:
        raise ValueError(f"query_inside: expected False, since {dims}")


def _queries(queries: Any, head: Head) -> Tensor | int:
    if queries is None:
        return FRESH_QUERIES
    if np.ndim(queries) == 0:
        return as_count(queries, "queries")
    rows = as_tensor(queries, "queries", ndim=2, last=head.dim_query)
    if rows.shape[0] == 0:
        raise ValueError("queries: expected at least one row, or the number of fresh ones in each repeat, got none")
    return rows


def _radius(radius: Any, measure: Measure) -> float:
    """As given, or the root mean square norm of a token."""
    if radius is not None:
        return as_positive(radius, "radius")
    return math.sqrt(float(measure.cov.double().trace() + measure.mean.double().square().sum()))


def _check_limit_exists(made: Plan) -> None:
    """Refuse before any work where some query has no limit to compare with."""
    head, measure = made.head, made.measure
    names = [name for name in made.metrics if name != "hardmax"]
    probes = [torch.zeros(1, head.dim_query, dtype=torch.float64, device=measure.device)]
    if isinstance(made.queries, Tensor):
        probes.append(made.queries.double().to(measure.device))
    from_law = set(names) & set(SELF_ATTENTION) or (isinstance(made.queries, int) and set(names) & set(WITH_QUERIES))
    if head.dim_query == measure.dim and (from_law or "hardmax" in made.metrics):
        probes.append(measure.sample(FRESH_QUERIES, torch.Generator().manual_seed(0)).double())
    if "uniform" in names:
        eye = torch.eye(head.dim_query, dtype=torch.float64, device=measure.device)
        probes.append(made.radius * torch.cat([eye, -eye]))
    tilts = head.tilt(torch.cat(probes))
    try:
        if names:
            measure.log_laplace(tilts)
    except ValueError as cause:
        raise ValueError(f"metrics: {', '.join(names)} compare with attention's limit, which is missing: {cause}") from cause
    if "hardmax" in made.metrics and not on_the_line(made):
        measure.extreme(tilts[1:] if len(probes) > 1 else tilts)


def on_the_line(made: Plan) -> bool:
    """The setting of [B, Proposition 5.1]: centred Gaussian tokens in d = 1, where hardmax takes an extreme token."""
    head, measure = made.head, made.measure
    if not isinstance(measure, Gaussian) or measure.dim != 1 or head.dim_query != 1:
        return False
    bias = head.tilt_bias
    centred = float(measure.mean) == 0.0 and (bias is None or float(bias) == 0.0)
    if not centred or float(head.A) == 0.0:
        raise ValueError("metrics: hardmax on Gaussian tokens of the line needs mean 0, A other than 0, and no tilt bias")
    return True
