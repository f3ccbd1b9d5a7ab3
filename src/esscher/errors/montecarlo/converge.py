"""converge: the error of a head on n tokens against its limit, measured by drawing tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.errors.curve import ErrorCurve
from esscher.errors.montecarlo.draw import Plan
from esscher.errors.montecarlo.metrics import METRICS, Discrepancy, discrepancies, unknown
from esscher.errors.montecarlo.spec import HeadSpec
from esscher.errors.rate import log_slope
from esscher.inputs import as_count, as_counts, as_positive, as_seed, as_tensor
from esscher.measures.base import Measure

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
        if asked_by == "queries" and (design.queries is None or _is_number(design.queries)):
            raise ValueError(
                f"queries: expected rows of length {head.dim_query} for {name}, got"
                f" {design.queries!r}; {dims}"
            )
    if _ball(names) and design.radius is None:
        raise ValueError(f"radius: expected a number above 0, got None; {dims}")
    if design.query_inside:
        raise ValueError(f"query_inside: expected False, since {dims}")


def _is_number(queries: Any) -> bool:
    """Whether it says how many queries, not which."""
    return bool(np.isscalar(queries)) or getattr(queries, "ndim", None) == 0


def _queries(queries: Any, head: Head) -> Tensor | int:
    if queries is None:
        return FRESH_QUERIES
    if _is_number(queries):
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


# ---- converge: the error of a head on n tokens against its limit, measured by drawing tokens.

Floats = npt.NDArray[np.float64]

# the ladder of n stops where the limit's own error is above this share of the measured error
LIMIT_SHARE = 0.2
AUTO_FIRST = 32  # repeats before "auto" looks at the slope; then half as many again each time
AUTO_CAP = 4096
AUTO_WIDTH = 0.1  # width of the slope's 95 % interval


@dataclass(frozen=True)
class Unit:
    """One repeat: squared error at each n by metric, and the squared size of the limit."""

    repeat: int
    squared: dict[str, Floats]  # (len n,)
    limit_squared: dict[str, float]


@torch.no_grad()
def converge(
    head: Head,
    measure: Measure,
    n: Any,
    repeats: Any,
    metrics: Any = ("mean", "cov", "l2", "uniform"),
    seed: Any = 0,
    *,
    sampling: str = "nested",
    query_inside: bool = False,
    queries: Any = None,
    radius: Any = None,
    experiment: str = "",
    target: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, ErrorCurve]:
    """Root mean square error against the limit at each n, over repeated draws of the tokens: one
    curve for each metric.

    ``mean``, ``cov`` (and ``cov_op``): moments of self-attention's outputs, in L2, Frobenius and
    operator norm [B]. ``l2``: outputs over queries x ~ nu, nu the measure or the given ``queries``
    (rows, or how many fresh ones a repeat). ``uniform``: sup over |x| <= ``radius`` (default: the
    root mean square norm of a token). ``grad_v``, ``grad_u``: gradients in V and U = A over x ~ nu
    [S, Proposition 3.4]. ``hardmax``: mean output on the line [B, Proposition 5.1], or outputs over
    x ~ nu for bounded laws; :func:`mean_error` turns a curve into E|error|.

    ``sampling``: "nested" prefixes of i.i.d. tokens, one pass for all n; "independent" tokens for
    every n; "replacement" and "without_replacement" from a :class:`Pool`. ``query_inside`` adds a
    query of nu or of the ball to its own prompt [S, Remark 3.2]; self-attention's queries are in it
    anyway. ``repeats`` "auto" goes on until the 95 % interval of every curve's log-log slope is
    narrower than ``target`` (0.1), up to 4096 repeats. ``progress`` is called with (done, of how
    many). ``dtype``: of the attention, float32 where its rounding is below a thousandth of the
    measured error and float64 elsewhere, unless told; sums are in float64. Numbers depend on
    (experiment, seed, n or "nested", repeat) alone. Where the limit's own error is above 20 % of
    the measured one the ladder of n stops, and ``origin`` says so.

    Heavy tails: Student tokens have no limit, so every metric is refused with the reason unless A =
    0. Seen on samples, the outputs grow with n as the largest token does, like n^(1/df), and no
    rate can be fitted.
    """
    design = Design(sampling, query_inside, queries, radius, experiment, dtype, device)
    made = plan(head, measure, n, metrics, seed, design)
    auto = isinstance(repeats, str)
    most = _repeats(repeats, made)
    width = AUTO_WIDTH if target is None else as_positive(target, "target")
    units: list[Unit] = []
    check = AUTO_FIRST if auto else most
    while True:
        units.append(converge_unit(made, len(units)))
        if progress is not None:
            progress(len(units), most)
        if len(units) < check:
            continue
        curves = assemble(made, units)
        if len(units) >= most or _narrow(curves, width):
            return curves
        check = min(most, check + check // 2)


@torch.no_grad()
def converge_unit(made: Plan, repeat: int) -> Unit:
    """One repeat of a plan, the same whoever computes it and when; ``assemble`` makes the curves of
    them.
    """
    parts: dict[str, list[Discrepancy]] = {}
    for draw in made.draws(repeat):
        for name, found in discrepancies(draw).items():
            parts.setdefault(name, []).append(found)
    return Unit(
        repeat=repeat,
        squared={
            name: np.concatenate([part.squared for part in found]) for name, found in parts.items()
        },
        limit_squared={
            name: float(np.mean([part.limit_squared for part in found]))
            for name, found in parts.items()
        },
    )


def assemble(made: Plan, units: Iterable[Unit]) -> dict[str, ErrorCurve]:
    """The curves of some repeats of a plan, in whatever order they come."""
    ordered = sorted(units, key=lambda unit: unit.repeat)
    numbers = [unit.repeat for unit in ordered]
    if len(ordered) < 2 or len(set(numbers)) < len(numbers):
        raise ValueError(f"units: expected at least 2 repeats, each once, got repeats {numbers}")
    return {name: _curve(made, name, ordered) for name in ordered[0].squared}


def _curve(made: Plan, name: str, units: list[Unit]) -> ErrorCurve:
    samples = np.stack([unit.squared[name] for unit in units])
    scale = math.sqrt(float(np.mean([unit.limit_squared[name] for unit in units])))
    rms = np.sqrt(samples.mean(axis=0))
    metric = METRICS[name]
    own_error, method = metric.target_error(made)
    dtype = torch.float64 if metric.in_float64 else made.dtype
    floor = own_error + ROUNDING * torch.finfo(dtype).eps * scale
    beyond = np.flatnonzero(~(floor <= LIMIT_SHARE * rms))
    kept = int(beyond[0]) if beyond.size else len(made.n)
    samples, rms = samples[:, :kept], rms[:kept]
    drawn = (
        f"{len(units)} repeats in {str(dtype).removeprefix('torch.')}; {made.describe_sampling()}"
    )
    origin = f"Monte Carlo, {drawn}; {metric.describe_queries(made)}; limit: {method}"
    if beyond.size:
        left_out = ", ".join(map(str, made.n[kept:]))
        origin += (
            f"; left out n = {left_out}, where the error of the limit and of rounding ({floor:.2g})"
            " is above 20 % of the measured error"
        )
    return ErrorCurve.from_repeats(
        np.array(made.n[:kept], dtype=np.int64),
        samples,
        metric=name,
        scale=scale,
        # 0 / 0 is exact
        accuracy=float(
            np.divide(floor, rms, out=np.zeros_like(rms), where=rms > 0).max(initial=0.0)
        ),
        origin=origin,
    )


def _repeats(repeats: Any, made: Plan) -> int:
    if isinstance(repeats, str):
        if repeats != "auto":
            raise ValueError(
                f"repeats: expected 'auto' or a whole number of at least 2, got {repeats!r}"
            )
        if len(made.n) < 2:
            raise ValueError(
                f"repeats: 'auto' needs a slope, so at least 2 values of n, got n = {list(made.n)}"
            )
        return AUTO_CAP
    try:
        count = int(as_counts([repeats], "repeats")[0])
    except ValueError as cause:
        raise ValueError(
            f"repeats: expected 'auto' or a whole number of at least 2, got {repeats!r}"
        ) from cause
    if count < 2:
        raise ValueError(
            "repeats: expected 'auto' or at least 2, since standard errors come from the repeats,"
            f" got {count}"
        )
    return count


def _narrow(curves: dict[str, ErrorCurve], width: float) -> bool:
    """Is the 95 % interval of every slope narrow enough? Curves without a slope have nothing to
    wait for.
    """
    return not any(2 * 1.96 * _slope_stderr(curve) > width for curve in curves.values())


def _slope_stderr(curve: ErrorCurve) -> float:
    """0 for a curve cut below 2 values of n, or whose repeats are all alike."""
    try:
        return log_slope(curve)[1]
    except ValueError:
        return 0.0


def mean_error(curve: ErrorCurve) -> tuple[Floats, Floats]:
    """E|error| at each n and its standard error, where ``rms`` is the root of E|error|^2: what [B,
    Prop. 5.1] speaks of.
    """
    if curve.samples is None:
        raise ValueError(f"curve: expected samples of repeats, got none ({curve.kind})")
    sizes = np.sqrt(curve.samples)
    return sizes.mean(axis=0), sizes.std(axis=0, ddof=1) / math.sqrt(sizes.shape[0])


# ---- The head that a spec describes, for a given law.


def build_head(spec: HeadSpec, measure: Measure) -> Head:
    """Identity or random maps in the law's dimension, scaled to the spec's horizon for this law, or
    by its factor.
    """
    d = measure.dim
    if spec.kind == "identity":
        eye = torch.eye(d, dtype=torch.float64, device=measure.device)
        head = Head(eye, eye)
    else:
        generator = torch.Generator().manual_seed(spec.seed)
        weights = torch.randn(3, d, d, dtype=torch.float64, generator=generator) / math.sqrt(d)
        head = Head.from_weights(*weights.to(measure.device))
    if spec.horizon is not None:
        return head.scaled(spec.horizon / head.horizon(measure))
    return head if spec.scale is None else head.scaled(spec.scale)
