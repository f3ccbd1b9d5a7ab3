"""How softmax spreads over n keys as n grows: effective tokens, entropy, largest weight, and the
weight of a planted key.

Of the kept queries. ``random keys``: n keys drawn at random from those that the query sees, exact
expectations (esscher.errors.dispersion). ``position``: the queries as they stand, with all the keys
that they see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.dispersion import (
    COARSEST,
    TOP,
    DispersionCurve,
    factors,
    from_masses,
    from_scores,
)
from esscher.errors.grid import Deposit, Grid
from esscher.errors.rate import fit_rate
from esscher.probe.all_keys import AllKeys, add_keys
from esscher.probe.session import FEWEST, Session
from esscher.probe.spec import SMALLEST, ProbeSpec
from esscher.probe.statistic import HEAD, LAYER, Head, HeadEnd, HeadView, Numbers, Result, Statistic
from esscher.probe.statistics.errors import EFFECTIVE_TOKENS
from esscher.runs.columns import Column
from esscher.tails import scores as tails
from esscher.tails.scores import TopScores, first_centres, softmax_statistics

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

GRID = Grid(1 / 8, 4, 1e-6)
BELOW = (2, 4, 8)  # n before the ladder's first: where the largest weight falls below a half
HALF = 0.5
TEMPERED = "_tempered"  # ends the names of columns at a temperature
ORIGINS = ("random keys", "random keys, tempered")
POSITION = "position"


@dataclass(frozen=True)
class Scores:
    """Of the kept queries: deposits without values, the largest ones, and those of planted keys."""

    masses: Deposit | AllKeys  # all keys, where the scores are too wide for deposits
    top: TopScores
    planted: Tensor  # (m_kept,) float64; NaN: none
    place: int = -1  # of the planted key among those of its block


class Dispersion(Statistic):
    name = "dispersion"
    state = (Scores, TopScores)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (*_columns(None), *(_columns(spec.temperature) if spec.temperature else ()))

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"dispersion": DISPERSION}

    def init(self, head: HeadView) -> Scores:
        """The grid is so fine that it can be read at every temperature of the ladder."""
        m, device, grid = len(head.kept), head.values.device, GRID
        ends = np.array([BELOW[0], head.most_keys])
        while grid.spacing * factors(head.spec.temperature, ends).max() > COARSEST:
            grid = replace(grid, spacing=grid.spacing / 2)
        masses = deposit.init(m, grid, head.center[:0])
        planted = torch.full((m,), math.nan, dtype=torch.float64, device=device)
        return Scores(masses, tails.init(m, TOP, device=device), planted)

    def update(self, state: Scores, head: HeadView) -> Scores:
        if not len(head.kept):
            return state
        scores = head.kept_scores
        if head.spec.planted is not None:
            there = (head.positions == head.spec.planted).nonzero()[:, 0]
            if len(there):
                place = int(there[0])
                state = replace(state, planted=scores[:, place].double(), place=place)
        masses = add_keys(state.masses, scores, head.values[:, :0], head.kept_keys)
        return replace(state, masses=masses, top=tails.update(state.top, scores))

    def merge(self, a: Scores, b: Scores) -> Scores:
        assert isinstance(a.masses, Deposit)
        assert isinstance(b.masses, Deposit)
        planted = torch.where(a.planted.isnan(), b.planted, a.planted)
        masses, top = deposit.merge(a.masses, b.masses), tails.merge(a.top, b.top)
        return replace(a, masses=masses, top=top, planted=planted)

    def reduce(self, state: Scores, head: Head) -> Numbers:
        if not len(state.planted):
            return {}
        n, temperature = ladder(head.spec, head.n_keys), head.spec.temperature
        found = _numbers(_curve(state, n, factors(None, n)), "")
        if temperature is not None:
            found |= _numbers(_curve(state, n, factors(temperature, n)), TEMPERED)
        return found | _as_they_stand(state)

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        spec, windows = end.spec, end.queries.windows[end.kept]
        n, row, frames = ladder(spec, end.n_keys), dict[str, Any](), []
        temperatures = [None] + ([spec.temperature] if spec.temperature else [])
        for heat, mark, origin in zip(temperatures, ("", TEMPERED), ORIGINS, strict=False):
            arrays = [found[name + mark].numpy() for name in CURVES]
            curve = DispersionCurve(n, factors(heat, n), *arrays)
            row |= {f"{key}{mark}": value for key, value in _summary(curve, windows).items()}
            frames.append(curve.to_frame().assign(origin=origin))
        if spec.pool == "sequence":
            frames.append(_positions(found))
        return Result(row, {"dispersion": pd.concat(frames, ignore_index=True)})


CURVES = ("sum_p2", "entropy", "largest", "planted")


def _numbers(curve: DispersionCurve, mark: str) -> dict[str, Tensor]:
    """Expectations over n random keys for each kept query, (m_kept, len n)."""
    arrays = (curve.sum_p2, curve.entropies, curve.largest, curve.planted)
    return {
        name + mark: torch.from_numpy(np.ascontiguousarray(array))
        for name, array in zip(CURVES, arrays, strict=True)
    }


def _curve(state: Scores, n: Counts, heat: Floats) -> DispersionCurve:
    there = bool(torch.isfinite(state.planted).all())
    if isinstance(state.masses, Deposit):
        planted = state.planted if there else None
        return from_masses(state.masses, state.top.scores, n, heat, planted)
    found = []
    for row in state.masses.rows():
        own = row > -torch.inf
        place = own[: state.place].sum()[None] if there else None
        found.append(from_scores(row[own][None], n, heat, place))
    return DispersionCurve.of_all(found)


def _as_they_stand(state: Scores) -> dict[str, Tensor]:
    """Keys, effective tokens, entropy, largest and planted weight of each query, (m_kept,)."""
    masses = state.masses
    if isinstance(masses, AllKeys):
        softmax = masses.softmax()
        top = torch.stack([row.max() for row in masses.rows()])
    else:
        grid, first = masses.grid, first_centres(masses)
        softmax = softmax_statistics(masses.cells[-2], first, grid.spacing, grid.points)
        top = state.top.scores[:, 0]
    log_sum = torch.from_numpy(softmax.log_sum_exp)
    largest, planted = (
        torch.exp(score.double().cpu() - log_sum).clamp(max=1) for score in (top, state.planted)
    )
    return {
        "keys": masses.keys.double().cpu(),
        "own_tokens": torch.from_numpy(softmax.effective_tokens),
        "own_entropy": torch.from_numpy(softmax.entropy),
        "own_largest": largest,
        "own_planted": planted,
    }


def ladder(spec: ProbeSpec, keys: int) -> Counts:
    """Octaves from 2 on and the number of keys, or the numbers given."""
    octaves = SMALLEST * 2 ** np.arange(max(int(np.log2(max(keys, SMALLEST) / SMALLEST)), 0) + 1)
    chosen: Sequence[int] = [*octaves[octaves <= keys], keys] if spec.n is None else spec.n
    return np.unique([*BELOW, *chosen]).astype(np.int64)


def _summary(curve: DispersionCurve, windows: Counts) -> dict[str, float]:
    """The exponent of effective tokens, with its interval over windows, and where the largest
    weight falls below a half.

    Effective tokens are 1 / E sum p^2: their exponent is twice that of the root of E sum p^2.
    """
    p2, none = curve.sum_p2, np.zeros((len(curve.sum_p2), 1))
    queries = QueryErrors(mse=p2, sum_p2=p2, limit=none, delta=none[:, 0], clusters=windows)
    roots = ErrorCurve.from_queries(curve.n, queries, kind="exact", origin="root of E sum p^2")
    # all there is, where n was given smaller
    first = SMALLEST if curve.n[-1] > SMALLEST else int(curve.n[0])
    fit = fit_rate(roots, window=(first - 0.5, float(curve.n[-1]) + 0.5), raise_on_failure=False)
    return {
        "tokens_exponent": 2 * fit.exponent,
        "tokens_exponent_low": 2 * fit.interval[0],
        "tokens_exponent_high": 2 * fit.interval[1],
        "half_weight_at": _crossing(curve.n, curve.largest_weight),
    }


def _crossing(n: Counts, weight: Floats) -> float:
    """The n from which on the weight stays below a half, linear in log n; NaN where it does not, up
    to the last n.
    """
    above = np.flatnonzero(weight >= HALF)
    if not above.size or above[-1] == n.size - 1:
        return math.nan if above.size else float(n[0])
    i = int(above[-1])
    share = (weight[i] - HALF) / (weight[i] - weight[i + 1])
    return float(n[i] * (n[i + 1] / n[i]) ** share)


def _positions(found: Numbers) -> pd.DataFrame:
    """Queries that see about as many keys, to a quarter of an octave, together: their means."""
    keys = found["keys"].numpy()
    group = np.unique(np.round(4 * np.log2(keys)), return_inverse=True)[1]
    count = np.bincount(group)
    names = ("own_entropy", "own_largest", "own_planted")
    entropy, largest, planted = (np.bincount(group, found[x].numpy()) / count for x in names)
    return pd.DataFrame(
        {
            "n": np.round(np.bincount(group, keys) / count).astype(np.int64),
            "temperature": 1.0,
            "effective_tokens": count / np.bincount(group, 1 / found["own_tokens"].numpy()),
            "entropy": entropy,
            "largest_weight": largest,
            "planted_weight": planted,
            "origin": POSITION,
        }
    )


def check_dispersion(session: Session) -> None:
    """Refuse a temperature that is not above 0 at some n, and a planted key that some query does
    not see.
    """
    spec, places = session.spec, session.queries.positions
    most = max(session.most_keys(layer) for layer in session.layers)
    factors(spec.temperature, np.array([BELOW[0], most]))
    if spec.planted is None:
        return
    if not session.own:
        raise ValueError(
            "planted: a key has a place in a query's own context; use --pool sequence, or leave"
            " --planted out"
        )
    real = (~session.windows.padding).sum(axis=1)[session.queries.windows]
    for layer in session.layers:
        shape, seen = session.loaded.shapes[layer], session.seen_keys(layer)
        reach = real if shape.window is None else np.full_like(real, shape.window)
        low, high = np.maximum(places - reach, 0), np.minimum(places + reach, real - 1)
        if shape.causal:
            low, high = places - seen + 1, places
        unseen = np.flatnonzero(((spec.planted < low) | (spec.planted > high)) & (seen >= FEWEST))
        if unseen.size:
            i = int(unseen[0])
            raise ValueError(
                f"planted: expected a position that every query sees, got {spec.planted}; in layer"
                f" {layer} the query at position {places[i]} sees those from {low[i]} to {high[i]}"
            )


# ---- columns


def _columns(temperature: tuple[float, float] | None) -> tuple[Column, ...]:
    """Those of scores times a + b log n."""
    end = note = heated = ""
    if temperature is not None:
        end, note = TEMPERED, ", tempered"
        heated = f", scores times {temperature[0]:g} + {temperature[1]:g} log n"
    low, high = f"tokens_exponent_low{end}", f"tokens_exponent_high{end}"
    return (
        Column(
            f"tokens_exponent{end}",
            "float",
            f"exponent of effective tokens{note}",
            f"Effective tokens of n random keys grow as n to this power{heated}: 1 is uniform"
            " attention, 0 a few keys.",
            scale="linear",
            ends=(low, high),
            short=f"spread{note}",
        ),
        Column(low, "float", f"spread, low{note}", "Lower end of its interval."),
        Column(high, "float", f"spread, high{note}", "Upper end of its interval."),
        Column(
            f"half_weight_at{end}",
            "float",
            f"no key has half from{note}",
            f"Random keys from which on the largest weight stays below a half{heated}; empty: it"
            " does not.",
            scale="log",
            short=f"half from{note}",
        ),
    )


DISPERSION = (
    LAYER,
    HEAD,
    Column(
        "origin",
        "word",
        "origin",
        "Which n keys: drawn at random from those a query sees, or all that queries so deep see.",
        words=(*ORIGINS, POSITION),
        meanings=(
            "n keys drawn at random",
            "the same, scores times the temperature",
            "queries that see n keys, as they stand",
        ),
    ),
    Column("n", "int", "keys n", "Number of keys; the mean of positions taken together.", "log"),
    Column("temperature", "float", "temperature", "What the scores are multiplied with at this n."),
    EFFECTIVE_TOKENS,
    Column("entropy", "float", "entropy", "Mean entropy of the softmax weights, in nats."),
    Column("largest_weight", "float", "largest weight", "Mean weight of the key that has most."),
    Column("planted_weight", "float", "planted weight", "Mean weight of the planted key."),
)
