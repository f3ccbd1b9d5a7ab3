"""The exact error of keys drawn with replacement: its curve, and the numbers of a head that are
read off it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.convergence.budget import asymptotic_from
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit, Grid
from esscher.models.probe.curves import METRICS, Errors, curve_rows, errors_of
from esscher.models.probe.headline import headline, headline_numbers, needed_column, or_nan, percent
from esscher.models.probe.spec import FIT, FIXED, ProbeSpec, drawn_ladder
from esscher.models.probe.statistics.curve_table import CURVES
from esscher.models.probe.statistics.statistic import (
    Block,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
    stacked,
)
from esscher.models.probe.wide import Held, add_keys_or_hold
from esscher.runs.columns import Column
from esscher.tails.scores import first_centres, softmax_statistics

__all__ = ["Drawn", "Replacement", "pool_place"]


@dataclass(frozen=True)
class Weights:
    """How softmax spreads its weight over each query's keys, (m,)."""

    effective_tokens: Tensor
    entropy: Tensor
    sd: Tensor  # of the scores


@dataclass(frozen=True)
class Masses:
    """Keys in the cells of each query's score grid; of some other multiple of the scores where they
    are too wide for one.
    """

    grid: Grid
    cells: Tensor  # (m, L)
    first: Tensor  # (m,): the score at the centre of the first cell

    @classmethod
    def of(cls, state: Deposit) -> Masses:
        """The values go; weights of splines may be below 0 by rounding."""
        return cls(state.grid, state.cells[-2].clamp_min(0.0), first_centres(state))

    @classmethod
    def stack(cls, states: Sequence[Masses], order: Tensor) -> Masses:
        """Of different queries; shorter ranges grow at their low end."""
        grid, longest = states[0].grid, max(state.cells.shape[1] for state in states)
        more = [longest - state.cells.shape[1] for state in states]
        cells = torch.cat(
            [pad(state.cells, (size, 0)) for state, size in zip(states, more, strict=True)]
        )
        first = torch.cat(
            [state.first - size * grid.spacing for state, size in zip(states, more, strict=True)]
        )
        return cls(grid, cells[order], first[order])


@dataclass(frozen=True)
class Drawn:
    """What is left of the keys: errors, softmax weights, and where the scores lie."""

    errors: Errors
    weights: Weights
    masses: Masses


class Replacement(Statistic):
    """The state is the deposits of all queries, or all keys; who reads this statistic finds its
    curve.
    """

    name = "replacement"
    together = True
    reads = ("identity",)
    state = Deposit
    settled = Drawn

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        ends = {number.key: (number.low, number.high) for number in headline_numbers(spec)}
        needed = (
            _needed(spec, epsilon, first) for first, epsilon in enumerate(spec.epsilons, start=3)
        )
        found = (_exponent(spec), *AT_POOL, *_at_fixed(spec), *needed, *FINAL)
        return tuple(replace(column, ends=ends.get(column.key)) for column in found)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES}

    def init(self, start: Start) -> Deposit:
        return deposit.init(
            start.queries, deposit.choose_grid(start.dtype, self.name), start.center
        )

    def update(self, state: Deposit | Held, block: Block) -> Deposit | Held:
        return add_keys_or_hold(state, block.scores, block.values, block.pool)

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def settle(self, state: Deposit | Held, met: Met) -> Drawn:
        errors = errors_of(state, drawn_ladder(met.spec, met.keys), self.name, met.keys, met.notes)
        if isinstance(state, Held):
            softmax, masses = (
                state.softmax(),
                Masses.of(state.masses(deposit.choose_grid(state.q.dtype, self.name))),
            )
        else:
            masses = Masses.of(state)
            softmax = softmax_statistics(
                masses.cells, masses.first, masses.grid.spacing, masses.grid.points
            )
        weights = (
            torch.from_numpy(x) for x in (softmax.effective_tokens, softmax.entropy, softmax.sd)
        )
        return Drawn(errors, Weights(*weights), masses)

    def stack(self, states: Sequence[Drawn], order: Order) -> Drawn:
        errors, weights = (
            stacked([getattr(one, part) for one in states], order.queries)
            for part in ("errors", "weights")
        )
        return Drawn(errors, weights, Masses.stack([one.masses for one in states], order.queries))

    def single(self, state: Deposit | Drawn) -> tuple[str, ...]:
        masses = state.masses if isinstance(state, Drawn) else state
        return (
            (".masses.cells" if isinstance(state, Drawn) else ".cells",)
            if masses.grid.tol > 1e-8
            else ()
        )

    def finish(self, state: Drawn, found: Found) -> Findings:
        keys = found.row["n_keys"]
        curve = state.errors.curve(drawn_ladder(found.spec, found.keys), self.name)
        row = headline(curve, found.spec, found.keys) | self._at_pool(curve, keys)
        row |= {
            "asymptotic_from": or_nan(asymptotic_from, curve, 0.1),
            "delta_constant": math.nan if curve.delta is None else math.sqrt(curve.delta),
            "limit_rms": curve.scale,
        }
        return Findings(row, {"curves": curve_rows(curve)}, curve)

    def _at_pool(self, curve: ErrorCurve, keys: int) -> dict[str, float]:
        """The error at the pool's size."""
        last = pool_place(curve, keys)
        return {
            "local_slope_at_n": math.nan if curve.slope is None else float(curve.slope[last]),
            "rms_at_n": float(curve.rms[last]),
            "relative_at_n": float(curve.relative[last]),
            "q95_at_n": math.nan if curve.q95 is None else float(curve.q95[last]),
        }


def pool_place(curve: ErrorCurve, keys: int) -> int:
    """Where the curve has as many keys as the pool, or the most below."""
    return int(np.flatnonzero(curve.n <= keys)[-1])


# ---- columns
# ------------------------------------------------------------------------------------------


def _needed(spec: ProbeSpec, epsilon: float, first: int) -> Column:
    """Of own contexts these are draws, often more than there are keys; what a rule keeps is the
    frontier's.
    """
    error, own = percent(epsilon), spec.pool == "sequence"
    what = (
        "draws with replacement from the keys a query sees"
        if own
        else "tokens, drawn with replacement from the pool,"
    )
    more = " It may be more than these keys; a keep rule keeps fewer of them." if own else ""
    return Column(
        needed_column(epsilon),
        "float",
        f"{'draws' if own else 'tokens'} for {error} %",
        f"Fewest {what} whose relative error is at most {error} %.{more}",
        scale="log",
        first=first,
        short=f"{'draws' if own else 'tokens'} {error} %",
    )


def _exponent(spec: ProbeSpec) -> Column:
    low, high = spec.fit or FIT
    if spec.fit is None and spec.pool == "sequence":
        where = "from 16 drawn keys to an eighth of those that a query sees"
    else:
        where = f"from {low:,} to {high:,} drawn keys, a range that is the same for every pool"
    return Column(
        "beta_fit",
        "float",
        "measured exponent",
        f"Exponent of the exact error {where}: 0.5 is the usual square-root law, less is"
        f" slower.{_drawn(spec)}",
        scale="linear",
        first=6,
        metric=METRICS["replacement"],
        short="exponent",
    )


def _at_fixed(spec: ProbeSpec) -> tuple[Column, ...]:
    errors = (
        Column(
            f"relative_{n}",
            "float",
            f"relative error, {n:,} keys",
            f"Error of {n:,} drawn keys divided by the size of the limit; it compares between"
            f" pools.{_drawn(spec)}",
            scale="log",
        )
        for n in FIXED
    )
    slopes = (
        Column(
            f"local_slope_{n}",
            "float",
            f"local slope, {n:,} keys",
            f"Slope of log error against log n at {n:,} drawn keys; -0.5 is the square-root"
            f" law.{_drawn(spec)}",
        )
        for n in FIXED
    )
    tokens = (
        Column(
            f"effective_{n}",
            "float",
            f"effective tokens, {n:,} keys",
            f"How many of {n:,} drawn keys share the attention, one over the summed squared"
            f" weights.{_drawn(spec)}",
            scale="log",
        )
        for n in FIXED
    )
    return (*errors, *slopes, *tokens)


def _drawn(spec: ProbeSpec) -> str:
    """What is drawn, where a query may see fewer keys than that."""
    return (
        " Keys are drawn with replacement from those a query sees, however few."
        if spec.pool == "sequence"
        else ""
    )


AT_POOL = (
    Column(
        "local_slope_at_n",
        "float",
        "local slope",
        "Slope of log error against log n at the size of the pool; -0.5 is the square-root law.",
    ),
    Column(
        "rms_at_n",
        "float",
        "rms error",
        "Root mean square error when as many keys are drawn as the pool has.",
        "log",
    ),
    Column(
        "relative_at_n",
        "float",
        "relative error",
        "The same error divided by the size of the limit.",
        scale="log",
    ),
    Column(
        "q95_at_n",
        "float",
        "95 % quantile",
        "Error that 95 % of the queries stay below with as many keys as the pool has.",
    ),
)

FINAL = (
    Column(
        "asymptotic_from",
        "float",
        "asymptotic from",
        "Tokens from which the error follows its final square-root law.",
    ),
    Column(
        "delta_constant",
        "float",
        "delta constant",
        "The error is about this over the square root of n once n is large (delta method).",
    ),
    Column(
        "limit_rms",
        "float",
        "size of the limit",
        "Root mean square of the output on infinitely many tokens; relative errors divide by it.",
    ),
)
