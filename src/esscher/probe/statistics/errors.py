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

from esscher.errors import grid as deposit
from esscher.errors.budget import asymptotic_from
from esscher.errors.curve import CURVE, ErrorCurve
from esscher.errors.grid import Deposit, Grid
from esscher.probe.curves import (
    METRICS,
    Errors,
    curve_rows,
    errors_of,
    headline,
    headline_numbers,
    needed_column,
    or_nan,
    percent,
)
from esscher.probe.moments import moment_row
from esscher.probe.spec import FIT, FIXED, ProbeSpec, drawn_ladder, kept_ladder
from esscher.probe.statistics.base import (
    HEAD,
    LAYER,
    Block,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
    stacked,
)
from esscher.probe.wide import Held, add_keys_or_hold
from esscher.runs.columns import Column
from esscher.tails.regimes import share_frozen
from esscher.tails.scores import first_centres, softmax_statistics
from esscher.theory.sharp import freezing_tokens

EFFECTIVE_TOKENS = Column(
    "effective_tokens",
    "float",
    "effective tokens",
    "One over the summed squared weights: how many keys share the attention.",
    scale="log",
    first=12,
    short="effective",
)


class Softmax(Statistic):
    name = "softmax"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            EFFECTIVE_TOKENS,
            Column(
                "entropy",
                "float",
                "entropy",
                "Entropy of the attention weights in nats; its exponential is another count of"
                " keys.",
            ),
            Column(
                "score_sd",
                "float",
                "score spread",
                "Median over queries of the standard deviation s of their scores.",
            ),
            Column(
                "share_frozen",
                "float",
                "frozen queries",
                "Share of queries whose scores spread so widely (s² > 2 log n) that a few keys take"
                " all.",
            ),
            Column(
                "freezing_tokens",
                "float",
                "freezing point",
                "Below about this many tokens the softmax of a typical query rests on its few"
                " largest scores.",
            ),
        )

    def finish(self, state: None, found: Found) -> Findings:
        drawn = found.states["replacement"]
        tokens, entropy, sd = (
            x.numpy()
            for x in (drawn.weights.effective_tokens, drawn.weights.entropy, drawn.weights.sd)
        )
        spread = float(np.median(sd))
        row = {"effective_tokens": float(1 / np.mean(1 / tokens)), "entropy": float(entropy.mean())}
        row |= {"score_sd": spread, "share_frozen": share_frozen(sd, drawn.errors.keys.double())}
        return Findings(row | {"freezing_tokens": freezing_tokens(spread)})


# ---- The columns of the table ``curves``, which several statistics fill.

METRIC = replace(
    CURVE[0],
    words=(*METRICS.values(), "mean", "cov"),
    meanings=(
        "exact, keys drawn with replacement",
        "exact, each key kept at random",
        "mean of the output",
        "covariance of the output",
    ),
)
CURVES = (
    LAYER,
    HEAD,
    *(METRIC if column.key == METRIC.key else column for column in CURVE),
    Column("local_slope", "float", "local slope", "Slope of log error against log n at this n."),
    EFFECTIVE_TOKENS,
    Column(
        "sampling",
        "word",
        "sampling",
        "How keys are drawn: with replacement, or each kept at random.",
    ),
)


# ---- The exact error of keys drawn with replacement: its curve, and the numbers of a head that
# are read off it.


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


# ---- The exact error of keys kept at random, of some of the queries: rows of curves.


class Bernoulli(Statistic):
    """The state is the deposits of the kept queries, on finer grids, or all keys; settled, their
    errors.
    """

    name = "bernoulli"
    together = True
    state = Deposit
    settled = Errors

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES}

    def init(self, start: Start) -> Deposit:
        return deposit.init(
            len(start.kept), deposit.choose_grid(start.dtype, self.name), start.center
        )

    def update(self, state: Deposit | Held, block: Block) -> Deposit | Held:
        if not len(block.kept):
            return state
        pool = None if block.pool is None else block.pool.only(block.kept)
        if pool is not None and pool.sink is not None:
            return pool
        return add_keys_or_hold(state, block.kept_scores, block.values, pool)

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def settle(self, state: Deposit | Held, met: Met) -> Errors:
        """Each key is kept with probability n / keys: one fraction of each query's own."""
        ladder = kept_ladder(met.spec, met.keys)
        if not len(state.keys):
            return Errors.none(0 if isinstance(state, Held) else len(state.center), len(ladder))
        return errors_of(state, ladder, self.name, met.keys, met.notes)

    def stack(self, states: Sequence[Errors], order: Order) -> Errors:
        found: Errors = stacked(
            [state for state in states if len(state.keys)] or states[:1], order.kept
        )
        return found

    def single(self, state: Deposit | Errors) -> tuple[str, ...]:
        return (".cells",) if isinstance(state, Deposit) and state.grid.tol > 1e-8 else ()

    def finish(self, state: Errors, found: Found) -> Findings:
        ladder = kept_ladder(found.spec, found.keys)
        if state.mean_keys != found.keys:  # masks show another number of keys than was foreseen
            ladder = np.maximum(1, np.round(ladder * (state.mean_keys / found.keys))).astype(
                np.int64
            )
        curve = state.curve(ladder, self.name)
        return Findings(tables={"curves": curve_rows(curve)}, value=curve)


# ---- Fitted exponents of the sampled moments of a head's outputs, where the spec asks for them.


def moment_columns(spec: ProbeSpec) -> tuple[Column, ...]:
    """Those of a head; a layer has the same."""
    return _COLUMNS if spec.moments else ()


class OutputMoments(Statistic):
    """The curves are sampled from whole layers (esscher.probe.moments); here they are
    read.
    """

    name = "output_moments"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return moment_columns(spec)

    def finish(self, state: None, found: Found) -> Findings:
        return Findings(moment_row(found.layer.sampled, found.head) if found.spec.moments else {})


_COLUMNS = (
    Column(
        "beta_mean",
        "float",
        "exponent of the mean",
        "Exponent fitted to the sampled error of the mean output.",
        short="mean",
        ends=("beta_mean_low", "beta_mean_high"),
        metric="mean",
    ),
    Column("beta_mean_low", "float", "exponent of the mean, low", "Lower end of its interval."),
    Column("beta_mean_high", "float", "exponent of the mean, high", "Upper end of its interval."),
    Column(
        "beta_cov",
        "float",
        "exponent of the covariance",
        "Exponent fitted to the sampled error of the output covariance.",
        short="covariance",
        ends=("beta_cov_low", "beta_cov_high"),
        metric="cov",
    ),
    Column(
        "beta_cov_low", "float", "exponent of the covariance, low", "Lower end of its interval."
    ),
    Column(
        "beta_cov_high", "float", "exponent of the covariance, high", "Upper end of its interval."
    ),
)


# ---- Whether a head's limit is what the model itself computes: the output that its attention
# gives the same queries.


@dataclass(frozen=True)
class Outputs:
    """The model's own, (m, d_v); of no query where the pool is the corpus."""

    outputs: Tensor


class OwnOutput(Statistic):
    """Where the pool is a query's own context, its limit is attention on all that the model lets it
    see.
    """

    name = "own_output"
    reads = ("replacement",)
    state = Outputs

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if spec.pool != "sequence":
            return ()
        help_text = (
            "Largest difference between a coordinate of the limit and of the model's own output for"
            " the same query, relative to the largest coordinate of these outputs."
        )
        return (Column("output_difference", "float", "difference from the model", help_text),)

    def init(self, start: Start) -> Outputs:
        return Outputs(torch.zeros(0, len(start.center)))

    def update(self, state: Outputs, block: Block) -> Outputs:
        return state if block.outputs is None else Outputs(block.outputs.cpu())

    def merge(self, a: Outputs, b: Outputs) -> Outputs:
        return a

    def finish(self, state: Outputs, found: Found) -> Findings:
        if found.spec.pool != "sequence":
            return Findings()
        outputs = state.outputs.double()
        size = float(outputs.abs().max()) if outputs.numel() else math.nan
        apart = (
            float((found.states["replacement"].errors.limit - outputs).abs().max())
            if outputs.numel()
            else math.nan
        )
        return Findings({"output_difference": apart / size if size > 0 else apart})
