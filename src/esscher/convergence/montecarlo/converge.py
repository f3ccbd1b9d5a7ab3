"""converge: the error of a head on n tokens against its limit, measured by drawing tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.montecarlo.draw import Plan
from esscher.convergence.montecarlo.metrics import METRICS, Discrepancy, discrepancies
from esscher.convergence.montecarlo.plan import ROUNDING, Design, plan
from esscher.convergence.rate.fit import log_slope
from esscher.inputs import as_counts, as_positive
from esscher.measures.base import Measure

__all__ = ["Unit", "assemble", "converge", "converge_unit", "mean_error"]

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
