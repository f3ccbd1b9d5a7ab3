"""How softmax spreads over n keys as n grows: effective tokens, entropy, largest weight, and the
weight of a planted key.

Of some of the queries. ``random keys``: n keys drawn at random from those that the query sees,
exact expectations (esscher.errors.dispersion). ``position``: the queries as they stand, with
all the keys that they see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
from esscher.probe.session import Mode, ProbeContext
from esscher.probe.spec import SMALLEST, ProbeSpec
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
from esscher.probe.statistics.errors import EFFECTIVE_TOKENS
from esscher.probe.wide import Held, add_keys_or_hold
from esscher.runs.columns import Column
from esscher.tails import scores as tails
from esscher.tails.scores import TopScores, first_centres, softmax_statistics

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Pair = tuple[float, float]

GRID = Grid(1 / 8, 4, 1e-6)
# n before the ladder's first, which show where the largest weight falls below a half
BELOW = (2, 4, 8)
HALF = 0.5
TEMPERED = "_tempered"  # ends the names of columns at a temperature


@dataclass(frozen=True)
class Keys:
    """Scores of the kept queries: deposits without values, the largest ones, and those of planted
    keys.
    """

    asked: Tensor  # (m,) bool: which of all queries these are
    masses: Deposit
    top: TopScores
    planted: Tensor  # (m_kept,) float64; NaN: none
    place: int = -1  # of the planted key among those of its block
    held: Held | None = None  # all keys, where the scores are too wide for the deposits


@dataclass(frozen=True)
class Curves:
    """Expectations over n random keys for each kept query, (m_kept, len n); (m_kept, 0) where they
    were not asked for.
    """

    sum_p2: Tensor
    entropy: Tensor
    largest: Tensor
    planted: Tensor

    @classmethod
    def of(cls, curve: DispersionCurve | None, queries: int, size: int) -> Curves:
        if curve is None:
            return cls(*(torch.zeros(queries, size, dtype=torch.float64) for _ in range(4)))
        planted = np.full_like(curve.sum_p2, np.nan) if curve.planted is None else curve.planted
        arrays = (curve.sum_p2, curve.entropies, curve.largest, planted)
        sum_p2, entropy, largest, own = (
            torch.from_numpy(np.ascontiguousarray(array)) for array in arrays
        )
        return cls(sum_p2, entropy, largest, own)

    def read(self, n: Counts, temperature: Pair | None) -> DispersionCurve:
        sum_p2, entropy, largest, planted = (
            x.numpy() for x in (self.sum_p2, self.entropy, self.largest, self.planted)
        )
        return DispersionCurve(n, factors(temperature, n), sum_p2, entropy, largest, planted)


@dataclass(frozen=True)
class Spread:
    """What is left of them: of the kept queries, and, as each of them stands, (m_kept,)."""

    asked: Tensor  # as in Keys
    plain: Curves
    tempered: Curves
    keys: Tensor
    own_tokens: Tensor
    own_entropy: Tensor
    own_largest: Tensor
    own_planted: Tensor


class Dispersion(Statistic):
    """``temperature`` (a, b): scores times a + b log n as well. ``planted``: the position of a key
    that is always there.
    """

    name = "dispersion"
    together = True
    state = Keys
    settled = Spread

    def __init__(self, temperature: Pair | None = None, planted: int | None = None) -> None:
        self.temperature, self.planted = temperature, planted

    def asked(self, spec: ProbeSpec) -> Dispersion:
        return Dispersion(spec.temperature, spec.planted)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            *_columns("", ""),
            *(_columns(TEMPERED, _heated(spec.temperature)) if spec.temperature else ()),
        )

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"dispersion": DISPERSION}

    def init(self, start: Start) -> Keys:
        m, device = len(start.kept), start.center.device
        asked = torch.zeros(start.queries, dtype=torch.bool)
        asked[start.kept] = True
        masses = deposit.init(m, self._grid(start.keys), start.center[:0])
        planted = torch.full((m,), math.nan, dtype=torch.float64, device=device)
        return Keys(asked, masses, tails.init(m, TOP, device=device), planted)

    def _grid(self, keys: int) -> Grid:
        """So fine that it can be read at every temperature of the ladder."""
        warmest = (
            1.0
            if self.temperature is None
            else float(factors(self.temperature, np.array([BELOW[0], keys])).max())
        )
        spacing = GRID.spacing
        while spacing * warmest > COARSEST:
            spacing /= 2
        return replace(GRID, spacing=spacing)

    def update(self, state: Keys, block: Block) -> Keys:
        if not len(block.kept):
            return state
        scores = block.kept_scores
        if self.planted is not None:
            there = (block.positions == self.planted).nonzero()[:, 0]
            if len(there):
                place = int(there[0])
                state = replace(state, planted=scores[:, place].double(), place=place)
        if state.held is not None:
            return state
        pool = None if block.pool is None else block.pool.only(block.kept)
        found = add_keys_or_hold(state.masses, scores, block.values[:, :0], pool)
        if isinstance(found, Held):
            return replace(state, held=found)
        return replace(state, masses=found, top=tails.update(state.top, scores))

    def merge(self, a: Keys, b: Keys) -> Keys:
        masses, top = deposit.merge(a.masses, b.masses), tails.merge(a.top, b.top)
        return replace(
            a, masses=masses, top=top, planted=torch.where(a.planted.isnan(), b.planted, a.planted)
        )

    def settle(self, state: Keys, met: Met) -> Spread:
        n = _ladder(met.spec, met.keys)
        queries, heated, size = len(state.planted), None, 0
        if self.temperature is not None:
            heated, size = self._curve(state, n, self.temperature), n.size
        plain = Curves.of(self._curve(state, n, None), queries, n.size)
        return Spread(state.asked, plain, Curves.of(heated, queries, size), *self._own(state))

    def _curve(self, state: Keys, n: Counts, temperature: Pair | None) -> DispersionCurve | None:
        heat = factors(temperature, n)
        if not len(state.planted):
            return None
        there = bool(torch.isfinite(state.planted).all())
        if state.held is None:
            return from_masses(
                state.masses, state.top.scores, n, heat, state.planted if there else None
            )
        found = []
        for row in _rows(state.held):
            own = row > -torch.inf
            place = own[: state.place].sum()[None] if there else None
            found.append(from_scores(row[own][None], n, heat, place))
        return DispersionCurve.of_all(found)

    def _own(self, state: Keys) -> Iterator[Tensor]:
        """Of the queries as they stand: keys, effective tokens, entropy, largest and planted
        weight.
        """
        if not len(state.planted):
            return iter([torch.zeros(0, dtype=torch.float64)] * 5)
        if state.held is not None:
            keys, softmax = state.held.keys, state.held.softmax()
            top = torch.stack([row.max() for row in _rows(state.held)])
        else:
            masses = state.masses
            softmax = softmax_statistics(
                masses.cells[-2], first_centres(masses), masses.grid.spacing, masses.grid.points
            )
            keys, top = masses.keys, state.top.scores[:, 0]
        log_sum = torch.from_numpy(softmax.log_sum_exp)
        weights = [
            torch.exp(score.double().cpu() - log_sum).clamp(max=1) for score in (top, state.planted)
        ]
        numbers = [torch.from_numpy(x) for x in (softmax.effective_tokens, softmax.entropy)]
        return iter([keys.double().cpu(), *numbers, *weights])

    def stack(self, states: Sequence[Spread], order: Order) -> Spread:
        asked = torch.cat([state.asked for state in states])[order.queries]
        names = [part.name for part in fields(Spread) if part.name != "asked"]
        return Spread(
            asked,
            **{
                name: stacked([getattr(state, name) for state in states], order.kept)
                for name in names
            },
        )

    def single(self, state: Keys | Spread) -> tuple[str, ...]:
        return (".masses.cells",) if isinstance(state, Keys) else ()

    def finish(self, state: Spread, found: Found) -> Findings:
        spec, windows = found.spec, found.windows[state.asked.numpy()]
        n = _ladder(spec, found.keys)
        curves = [state.plain.read(n, None)] + (
            [state.tempered.read(n, spec.temperature)] if spec.temperature else []
        )
        row: dict[str, Any] = {}
        for curve, end in zip(curves, ("", TEMPERED), strict=False):
            row |= {f"{key}{end}": value for key, value in _summary(curve, windows).items()}
        frames = [
            curve.to_frame().assign(origin=origin)
            for curve, origin in zip(curves, ORIGINS, strict=False)
        ]
        if spec.pool == "sequence":
            frames.append(_positions(state))
        return Findings(row, {"dispersion": pd.concat(frames, ignore_index=True)}, curves[0])


def check_spread(context: ProbeContext) -> None:
    """Refuse a temperature that is not above 0 at some n, and a planted key that some query does
    not see.
    """
    spec, own = context.spec, context.mode is Mode.OWN
    most = (
        context.keys
        if not own
        else max(int(context.foreseen(layer).max()) for layer in context.layers)
    )
    factors(spec.temperature, np.array([BELOW[0], most]))
    if spec.planted is None:
        return
    if not own:
        raise ValueError(
            "planted: a key has a place in a query's own context; use --pool sequence, or leave"
            " --planted out"
        )
    places = context.places.positions
    for layer in context.layers:
        low, high = _seen(context, layer)
        unseen = np.flatnonzero(
            ((spec.planted < low) | (spec.planted > high)) & (context.foreseen(layer) >= SMALLEST)
        )
        if unseen.size:
            i = int(unseen[0])
            raise ValueError(
                f"planted: expected a position that every query sees, got {spec.planted}; in layer"
                f" {layer} the query at position {places[i]} sees those from {low[i]} to {high[i]}"
            )


def _seen(context: ProbeContext, layer: int) -> tuple[Counts, Counts]:
    """The first and the last position that each query sees."""
    shape, places = context.loaded.shapes[layer], context.places.positions
    if shape.causal:
        return places - context.foreseen(layer) + 1, places
    real = (~context.windows.padding).sum(axis=1)[context.places.windows]
    reach = real if shape.window is None else np.full_like(real, shape.window)
    return np.maximum(places - reach, 0), np.minimum(places + reach, real - 1)


def _ladder(spec: ProbeSpec, keys: int) -> Counts:
    """Octaves from 2 on and the number of keys, or the numbers given."""
    octaves = SMALLEST * 2 ** np.arange(max(int(np.log2(max(keys, SMALLEST) / SMALLEST)), 0) + 1)
    chosen = [*octaves[octaves <= keys], keys] if spec.n is None else spec.n
    return np.unique([*BELOW, *chosen]).astype(np.int64)


def _rows(held: Held) -> Iterator[Tensor]:
    for scores in held.scores():
        yield from scores


def _summary(curve: DispersionCurve, windows: npt.NDArray[np.int64]) -> dict[str, float]:
    """The exponent of effective tokens, with its interval over windows, and where the largest
    weight falls below a half.

    Effective tokens are 1 / E sum p^2, so that their exponent is twice the one of the root of E sum
    p^2.
    """
    p2 = curve.sum_p2
    none = np.zeros((len(p2), 1))
    queries = QueryErrors(mse=p2, sum_p2=p2, limit=none, delta=none[:, 0], clusters=windows)
    roots = ErrorCurve.from_queries(curve.n, queries, kind="exact", origin="root of E sum p^2")
    # all there is, where n was given smaller
    first = SMALLEST if curve.n[-1] > SMALLEST else int(curve.n[0])
    fit = fit_rate(roots, window=(first - 0.5, float(curve.n[-1]) + 0.5), raise_on_failure=False)
    low, high = (2 * end for end in fit.interval)
    return {
        "tokens_exponent": 2 * fit.exponent,
        "tokens_exponent_low": low,
        "tokens_exponent_high": high,
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


def _positions(state: Spread) -> pd.DataFrame:
    """Queries that see about as many keys, to a quarter of an octave, together: their means."""
    keys = state.keys.numpy()
    group = np.unique(np.round(4 * np.log2(keys)), return_inverse=True)[1]
    count = np.bincount(group)
    own = (state.own_entropy, state.own_largest, state.own_planted)
    entropy, largest, planted = (np.bincount(group, x.numpy()) / count for x in own)
    return pd.DataFrame(
        {
            "n": np.round(np.bincount(group, keys) / count).astype(np.int64),
            "temperature": 1.0,
            "effective_tokens": count / np.bincount(group, 1 / state.own_tokens.numpy()),
            "entropy": entropy,
            "largest_weight": largest,
            "planted_weight": planted,
            "origin": POSITION,
        }
    )


# ---- columns
# ------------------------------------------------------------------------------------------

ORIGINS = ("random keys", "random keys, tempered")
POSITION = "position"


def _heated(temperature: Pair | None) -> str:
    a, b = temperature or (1.0, 0.0)
    return f", scores times {a:g} + {b:g} log n"


def _columns(end: str, heated: str) -> tuple[Column, ...]:
    note = ", tempered" if heated else ""
    return (
        Column(
            f"tokens_exponent{end}",
            "float",
            f"exponent of effective tokens{note}",
            f"Effective tokens of n random keys grow as n to this power{heated}: 1 is uniform"
            " attention, 0 a few keys.",
            scale="linear",
            ends=(f"tokens_exponent_low{end}", f"tokens_exponent_high{end}"),
            short=f"spread{note}",
        ),
        Column(
            f"tokens_exponent_low{end}",
            "float",
            f"spread, low{note}",
            "Lower end of the exponent of effective tokens.",
        ),
        Column(
            f"tokens_exponent_high{end}",
            "float",
            f"spread, high{note}",
            "Upper end of the exponent of effective tokens.",
        ),
        Column(
            f"half_weight_at{end}",
            "float",
            f"no key has half from{note}",
            f"Random keys from which on the largest weight stays below a half, on average{heated};"
            " empty: it does not.",
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
        "Which n keys: drawn at random from those a query sees (exact expectations), or all that"
        " queries so deep see.",
        words=(*ORIGINS, POSITION),
        meanings=(
            "n keys drawn at random",
            "the same, scores times the temperature",
            "queries that see n keys, as they stand",
        ),
    ),
    Column(
        "n",
        "int",
        "keys n",
        "Number of keys; of positions the mean of those taken together.",
        "log",
    ),
    Column("temperature", "float", "temperature", "What the scores are multiplied with at this n."),
    EFFECTIVE_TOKENS,
    Column("entropy", "float", "entropy", "Mean entropy of the softmax weights, in nats."),
    Column("largest_weight", "float", "largest weight", "Mean weight of the key that has most."),
    Column(
        "planted_weight",
        "float",
        "planted weight",
        "Mean weight left on the planted key; empty where none was.",
    ),
)
