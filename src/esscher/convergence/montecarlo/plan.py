"""Check a Monte Carlo experiment once: what is compared, on which tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.convergence.montecarlo.draw import Plan
from esscher.convergence.montecarlo.metrics import METRICS, unknown
from esscher.inputs import as_count, as_counts, as_positive, as_seed, as_tensor
from esscher.measures.base import Measure

__all__ = ["ROUNDING", "SAMPLINGS", "Design", "plan"]

SAMPLINGS = ("nested", "independent", "replacement", "without_replacement")
SEEN = 64  # tokens on which sizes are seen
ROUNDING = 8.0  # rounding of an output, in units of its size times the precision
NEGLIGIBLE = 1e-3  # of the measured error
FRESH_QUERIES = 64  # drawn from the law in each repeat, where no queries are given


@dataclass(frozen=True)
class Design:
    """How tokens and queries are drawn and computed, as given to ``converge``, whose fields of
    these names they are.
    """

    sampling: str = "nested"
    query_inside: bool = False
    queries: Any = None
    radius: Any = None
    experiment: str = ""
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None


USUAL = Design()


def plan(
    head: Head,
    measure: Measure,
    n: Any,
    metrics: Any = ("mean", "cov", "l2", "uniform"),
    seed: Any = 0,
    design: Design = USUAL,
) -> Plan:
    """Check an experiment, or raise ValueError naming the field and what it may be. The fields are
    those of ``converge``.
    """
    check_pair(head, measure)
    names = _metrics(metrics)
    ladder = as_counts(n, "n")
    if (np.diff(ladder) <= 0).any():
        raise ValueError(f"n: expected increasing numbers, each once, got {ladder.tolist()}")
    if design.dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {design.dtype}")
    _check_sampling(design.sampling, measure, int(ladder[-1]))
    _check_queries_from_law(head, measure, names, design)
    made = Plan(
        head=head,
        measure=measure,
        n=tuple(ladder.tolist()),
        metrics=names,
        seed=as_seed(seed),
        sampling=design.sampling,
        query_inside=design.query_inside,
        queries=_queries(design.queries, head),
        radius=_radius(design.radius, measure) if _ball(names) else math.nan,
        experiment=str(design.experiment),
        dtype=(
            _enough(head, measure, design.sampling, int(ladder[-1]))
            if design.dtype is None
            else design.dtype
        ),
        device=measure.device if design.device is None else torch.device(design.device),
    )
    _check_limit_exists(made)
    return made


def _enough(head: Head, measure: Measure, sampling: str, largest: int) -> torch.dtype:
    """float32 where its rounding is below a thousandth of the error that is measured, else float64;
    sums are in float64.

    The error at the largest n is about sqrt(tr(V Sigma V^T) / n), the rounding of an output that of
    its size and of the scores, seen on a few tokens. Without replacement the error falls to 0 as
    the pool ends, and nothing is below it.
    """
    if sampling == "without_replacement":
        return torch.float64
    tokens = measure.sample(SEEN, torch.Generator().manual_seed(0)).double()
    x = (
        tokens
        if head.dim_query == measure.dim
        else torch.zeros(1, head.dim_query, dtype=torch.float64, device=tokens.device)
    )
    values, scores = head.values(tokens), head.queries(x).double() @ head.keys(tokens).double().T
    size, spread = (
        values.square().sum(1).mean().sqrt(),
        (values - values.mean(0)).square().sum(1).mean().sqrt(),
    )
    rounding = (
        ROUNDING
        * torch.finfo(torch.float32).eps
        * float(size)
        * max(1.0, float(scores.abs().max()))
    )
    return (
        torch.float32
        if rounding <= NEGLIGIBLE * float(spread) / math.sqrt(largest)
        else torch.float64
    )


def _metrics(metrics: Any) -> tuple[str, ...]:
    names = (
        (metrics,)
        if isinstance(metrics, str)
        else tuple(metrics)
        if isinstance(metrics, Iterable)
        else (metrics,)
    )
    strange = unknown(names)
    if strange or not names or len(set(names)) < len(names):
        got = repr(strange[0]) if strange else repr(names)
        raise ValueError(f"metrics: expected some of {', '.join(METRICS)}, each once, got {got}")
    return names


def _check_sampling(sampling: str, measure: Measure, largest: int) -> None:
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling: expected one of {', '.join(SAMPLINGS)}, got {sampling!r}")
    if sampling in ("nested", "independent"):
        return
    pool = measure.as_pool()
    if pool is None:
        raise ValueError(
            f"sampling: {sampling} draws from a Pool, the measure is {type(measure).__name__}; use"
            " nested"
        )
    if sampling == "without_replacement":
        if pool.weights is not None:
            raise ValueError(
                "sampling: without_replacement expects a Pool of equal weights, this one has"
                " weights"
            )
        if largest > pool.size:
            raise ValueError(
                f"n: expected at most the {pool.size} tokens of the pool, got {largest}"
            )


def _check_queries_from_law(
    head: Head, measure: Measure, names: tuple[str, ...], design: Design
) -> None:
    if head.dim_query == measure.dim:
        return
    dims = f"the head takes queries of dimension {head.dim_query}, the tokens have {measure.dim}"
    for name in names:
        asked_by = METRICS[name].asked_by
        if asked_by == "tokens":
            raise ValueError(
                f"metrics: {name} is of self-attention, where queries are tokens; {dims}"
            )
        if asked_by == "queries" and (design.queries is None or np.ndim(design.queries) == 0):
            raise ValueError(
                f"queries: expected rows of length {head.dim_query} for {name}, got"
                f" {design.queries!r}; {dims}"
            )
    if _ball(names) and design.radius is None:
        raise ValueError(f"radius: expected a number above 0, got None; {dims}")
    if design.query_inside:
        raise ValueError(f"query_inside: expected False, since {dims}")


def _queries(queries: Any, head: Head) -> Tensor | int:
    if queries is None:
        return FRESH_QUERIES
    if np.ndim(queries) == 0:
        return as_count(queries, "queries")
    rows = as_tensor(queries, "queries", ndim=2, last=head.dim_query)
    if rows.shape[0] == 0:
        raise ValueError(
            "queries: expected at least one row, or the number of fresh ones in each repeat, got"
            " none"
        )
    return rows


def _radius(radius: Any, measure: Measure) -> float:
    """As given, or the root mean square norm of a token."""
    if radius is not None:
        return as_positive(radius, "radius")
    return math.sqrt(float(measure.cov.double().trace() + measure.mean.double().square().sum()))


def _ball(names: tuple[str, ...]) -> bool:
    return any(METRICS[name].asked_by == "ball" for name in names)


def _check_limit_exists(made: Plan) -> None:
    """Refuse before any work where some query has no limit to compare with."""
    asked = [METRICS[name] for name in made.metrics]
    limits = [metric for metric in asked if metric.of_softmax]
    origin = torch.zeros(1, made.head.dim_query, dtype=torch.float64, device=made.measure.device)
    tilts = made.head.tilt(torch.cat([origin, *(metric.probes(made) for metric in limits)]))
    try:
        if limits:
            made.measure.log_laplace(tilts)
    except ValueError as cause:
        names = ", ".join(metric.name for metric in limits)
        raise ValueError(
            f"metrics: {names} compare with attention's limit, which is missing: {cause}"
        ) from cause
    for metric in asked:
        metric.check(made)
