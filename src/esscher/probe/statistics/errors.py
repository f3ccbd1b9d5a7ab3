"""Exact errors of random keys, and what softmax makes of all keys: two statistics of deposits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from esscher.errors import grid as deposit
from esscher.errors.curve import CURVE
from esscher.errors.grid import Deposit
from esscher.probe.all_keys import AllKeys, add_keys
from esscher.probe.curves import (
    METRICS,
    curve_of,
    curve_rows,
    error_numbers,
    headline,
    headline_numbers,
    needed_column,
    percent,
    pool_place,
)
from esscher.probe.spec import COMPARED, FIT, ProbeSpec, drawn_ladder, kept_ladder
from esscher.probe.statistic import (
    ACCURACY,
    HEAD,
    LAYER,
    Head,
    HeadEnd,
    HeadView,
    Numbers,
    Result,
    Statistic,
)
from esscher.runs.columns import Column
from esscher.tails.regimes import share_frozen
from esscher.tails.scores import first_centres, score_histogram, softmax_statistics
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
    Column("sampling", "word", "sampling", "Keys are drawn with replacement, or each kept."),
)
STANDARD = Column("z", "float", "z", "Score in standard deviations above the query's mean.")
GAUSSIAN = Column("gaussian", "float", "Gaussian", "The same for a Gaussian of equal variance.")
SCORES = (
    STANDARD,
    Column("density", "float", "density", "Density of the standardised scores of all queries."),
    *(GAUSSIAN, LAYER, HEAD),
)
TAILS = (
    STANDARD,
    Column("survival", "float", "survival", "Share of the scores above z standard deviations."),
    *(GAUSSIAN, LAYER, HEAD),
)


class Draws(Statistic):
    """Keys drawn with replacement: the exact error at every n. Also the softmax weights and the
    shape of the scores on all keys, and whether the limit is the model's own output.

    The state is deposits of all queries on score grids, or all keys where scores are too wide.
    """

    name = "draws"
    sampling = "replacement"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        ends = {number.key: (number.low, number.high) for number in headline_numbers(spec)}
        needed = (_needed(spec, eps, first) for first, eps in enumerate(spec.epsilons, start=3))
        found = (_exponent(spec), *AT_POOL, *_compared(spec), *needed, *FINAL, *SOFTMAX, ACCURACY)
        if spec.pool == "sequence":
            found = (*found, DIFFERENCE)
        return tuple(replace(column, ends=ends.get(column.key)) for column in found)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES, "scores": SCORES, "tails": TAILS}

    def init(self, head: HeadView) -> Deposit:
        grid = deposit.choose_grid(head.queries.dtype, self.sampling)
        return deposit.init(len(head.queries), grid, head.center)

    def update(self, state: Deposit | AllKeys, head: HeadView) -> Deposit | AllKeys:
        return add_keys(state, head.scores, head.values, head.all_keys)

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def reduce(self, state: Deposit | AllKeys, head: Head) -> Numbers:
        ladder = drawn_ladder(head.spec, head.n_keys)
        found = error_numbers(state, ladder, self.sampling, head.n_keys, head.notes)
        masses = state
        if isinstance(state, AllKeys):
            masses = state.masses(deposit.choose_grid(state.q.dtype, self.sampling))
        assert isinstance(masses, Deposit)
        grid, cells = masses.grid, masses.cells[-2].clamp_min(0.0)  # splines may round below 0
        first = first_centres(masses)
        softmax = (
            state.softmax()
            if isinstance(state, AllKeys)
            else softmax_statistics(cells, first, grid.spacing, grid.points)
        )
        each = torch.ones(len(first), dtype=torch.float64)
        return found | {
            "effective": torch.from_numpy(softmax.effective_tokens),
            "entropy": torch.from_numpy(softmax.entropy),
            "sd": torch.from_numpy(softmax.sd),
            "cells": cells,
            "last": first + (cells.shape[1] - 1) * grid.spacing,
            "spacing": grid.spacing * each,
            "points": grid.points * each,
        }

    def measure(self, head: HeadView) -> Numbers:
        found = super().measure(head)
        return found if head.outputs is None else {**found, "outputs": head.outputs}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        curve = curve_of(found, drawn_ladder(end.spec, end.n_keys), self.sampling)
        place = pool_place(curve, end.row["n_keys"])
        spread = float(np.median(found["sd"].numpy()))
        spacing, points = float(found["spacing"][0]), int(found["points"][0])
        first = found["last"] - (found["cells"].shape[1] - 1) * spacing
        shape = score_histogram(found["cells"], first, spacing, points=points)
        row = headline(curve, end.spec, end.n_keys) | {
            "rms_at_n": float(curve.rms[place]),
            "relative_at_n": float(curve.relative[place]),
            "delta_constant": math.nan if curve.delta is None else math.sqrt(curve.delta),
            "limit_rms": curve.scale,
            "effective_tokens": float(1 / (1 / found["effective"]).mean()),
            "entropy": float(found["entropy"].mean()),
            "score_sd": spread,
            "share_frozen": share_frozen(found["sd"].numpy(), found["keys"].double()),
            "freezing_tokens": freezing_tokens(spread),
            "score_verdict": shape.verdict,
            "accuracy": curve.accuracy,
        }
        if end.spec.pool == "sequence":
            row["output_difference"] = _difference(found)
        middle = 0.5 * (shape.edges[1:] + shape.edges[:-1])
        scores = {"z": middle, "density": shape.density, "gaussian": shape.gaussian_density}
        tails = {"z": shape.at, "survival": shape.survival, "gaussian": shape.gaussian_survival}
        frames = {"scores": pd.DataFrame(scores), "tails": pd.DataFrame(tails)}
        return Result(row, {"curves": curve_rows(curve), **frames})


def _difference(found: Numbers) -> float:
    """Of the limits from the model's own outputs, relative to the largest of these."""
    if "outputs" not in found:
        return math.nan
    outputs = found["outputs"].double()
    size, apart = float(outputs.abs().max()), float((found["limit"] - outputs).abs().max())
    return apart / size if size > 0 else apart


class Kept(Statistic):
    """Keys kept at random, each with the same chance: the exact error, of the kept queries."""

    name = "kept"
    sampling = "bernoulli"

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES}

    def init(self, head: HeadView) -> Deposit:
        grid = deposit.choose_grid(head.queries.dtype, self.sampling)
        return deposit.init(len(head.kept), grid, head.center)

    def update(self, state: Deposit | AllKeys, head: HeadView) -> Deposit | AllKeys:
        if not len(head.kept):
            return state
        if head.kept_keys is not None and head.kept_keys.sink is not None:
            return head.kept_keys
        return add_keys(state, head.kept_scores, head.values, head.kept_keys)

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def reduce(self, state: Deposit | AllKeys, head: Head) -> Numbers:
        """Each key is kept with probability n / keys: one fraction of each query's own."""
        if not len(state.keys):
            return {}
        ladder = kept_ladder(head.spec, head.n_keys)
        return error_numbers(state, ladder, self.sampling, head.n_keys, head.notes)

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        ladder = kept_ladder(end.spec, end.n_keys)
        seen = round(float(found["keys"].double().mean()))
        if seen != end.n_keys:  # masks show another number of keys than was planned
            ladder = np.maximum(1, np.round(ladder * (seen / end.n_keys))).astype(np.int64)
        return Result({}, {"curves": curve_rows(curve_of(found, ladder, self.sampling))})


# ---- columns


def _needed(spec: ProbeSpec, epsilon: float, first: int) -> Column:
    """In own contexts these are draws, often more than there are keys."""
    error, own = percent(epsilon), spec.pool == "sequence"
    what = "tokens, drawn with replacement from the pool,"
    if own:
        what = "draws with replacement from the keys a query sees, however few,"
    kind = "draws" if own else "tokens"
    return Column(
        needed_column(epsilon),
        "float",
        f"{kind} for {error} %",
        f"Fewest {what} whose relative error is at most {error} %.",
        scale="log",
        first=first,
        short=f"{kind} {error} %",
    )


def _exponent(spec: ProbeSpec) -> Column:
    low, high = spec.fit or FIT
    where = f"from {low:,} to {high:,} drawn keys"
    if spec.fit is None and spec.pool == "sequence":
        where = "from 16 drawn keys to an eighth of those that a query sees"
    return Column(
        "beta_fit",
        "float",
        "measured exponent",
        f"Exponent of the exact error {where}: 0.5 is the square-root law, less is slower.",
        scale="linear",
        first=6,
        metric=METRICS["replacement"],
        short="exponent",
    )


def _compared(spec: ProbeSpec) -> tuple[Column, ...]:
    drawn = f"{COMPARED:,} keys drawn with replacement"
    relative = f"Error of {drawn} divided by the size of the limit; it compares between pools."
    effective = f"How many of {drawn} share the attention."
    return (
        Column(
            f"relative_{COMPARED}", "float", f"relative error, {COMPARED:,} keys", relative, "log"
        ),
        Column(
            f"effective_{COMPARED}",
            "float",
            f"effective tokens, {COMPARED:,} keys",
            effective,
            "log",
        ),
    )


AT_POOL = (
    Column("rms_at_n", "float", "rms error", "Error of as many drawn keys as the pool has.", "log"),
    Column("relative_at_n", "float", "relative error", "The same over the limit's size.", "log"),
)
FINAL = (
    Column(
        "delta_constant",
        "float",
        "delta constant",
        "The error is about this over the square root of n once n is large (delta method).",
    ),
    Column("limit_rms", "float", "size of the limit", "Root mean square output on all keys."),
)
SOFTMAX = (
    EFFECTIVE_TOKENS,
    Column("entropy", "float", "entropy", "Entropy of the attention weights in nats."),
    Column("score_sd", "float", "score spread", "Median standard deviation s of a query's scores."),
    Column(
        "share_frozen",
        "float",
        "frozen queries",
        "Share of queries whose scores spread so widely (s² > 2 log n) that a few keys take all.",
    ),
    Column(
        "freezing_tokens",
        "float",
        "freezing point",
        "Below about this many tokens the softmax of a typical query rests on its few largest"
        " scores.",
    ),
    Column("score_verdict", "word", "scores", "Scores are sub-Gaussian, heavier or lighter."),
)
DIFFERENCE = Column(
    "output_difference",
    "float",
    "difference from the model",
    "Largest difference between the limit and the model's own output for the same query, relative"
    " to the largest coordinate of these outputs.",
)
