"""How the softmax weights of a head are spread: their tail, sinks, and how they disperse over n
keys as n grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.errors import grid as deposit
from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.dispersion import (
    GRID,
    TOP,
    DispersionCurve,
    critical_scale,
    from_masses,
    from_scores,
    gap_counts,
    gaps_from_masses,
)
from esscher.errors.grid import Deposit
from esscher.errors.rate import fit_rate
from esscher.probe.curves import EFFECTIVE_TOKENS, AllKeys, add_keys
from esscher.probe.session import FEWEST
from esscher.probe.spec import SMALLEST, ProbeSpec
from esscher.probe.statistic import HEAD, LAYER, Head, HeadEnd, HeadView, Numbers, Result, Statistic
from esscher.runs.columns import Column
from esscher.tails import scores as tails
from esscher.tails.scores import TopScores, tail_length

if TYPE_CHECKING:
    from esscher.probe.pools import WindowQueries

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


# ---- tail and sinks

TAIL = (
    Column(
        "khat",
        "float",
        "k-hat",
        "Shape of the weights' tail: below 0.5 averages behave, above 0.7 a few keys decide.",
        scale="linear",
        first=13,
        ends=("khat_low", "khat_high"),
    ),
    Column("khat_low", "float", "k-hat, low", "Lower end of the interval of k-hat."),
    Column("khat_high", "float", "k-hat, high", "Upper end of the interval of k-hat."),
    Column("khat_label", "word", "tail", "The usual verdict on k-hat."),
)


class Tail(Statistic):
    """Pareto k-hat of the weights of the kept queries; the state is their largest scores."""

    name = "tail"
    state = (TopScores,)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return TAIL

    def init(self, head: HeadView) -> TopScores:
        keep = tail_length(head.most_keys) + 1
        return tails.init(len(head.kept), keep, device=head.values.device)

    def update(self, state: TopScores, head: HeadView) -> TopScores:
        return tails.update(state, head.kept_scores)

    def merge(self, a: TopScores, b: TopScores) -> TopScores:
        return tails.merge(a, b)

    def reduce(self, state: TopScores, head: Head) -> Numbers:
        missing = state.keep - state.scores.shape[1]
        return {"top": pad(state.scores, (0, missing), value=-math.inf), "count": state.count}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        top = found["top"]
        seen = torch.isfinite(top).any(0)
        tail = tails.finish(TopScores(top.shape[1], found["count"], top[:, seen]))
        low, high = tail.interval
        row = {"khat": tail.median, "khat_low": low, "khat_high": high, "khat_label": tail.label}
        return Result(row, {})


class Sinks(Statistic):
    """The weight that queries put on the first and the special tokens of their own window, and on
    a sink logit.
    """

    name = "sinks"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        what = "Share of the attention that goes to first and special tokens."
        return (Column("sink_mass", "float", "sink mass", what, "linear", first=14, short="sinks"),)

    def in_window(self, window: WindowQueries) -> Numbers:
        resting = torch.from_numpy(window.session.windows.special[window.window].copy())
        resting[0] = True
        mass = (window.weights * resting.to(window.weights.device)).sum(-1)
        if window.sinks is not None:
            mass = mass + (1 - window.weights.sum(-1)).clamp_min(0)
        return {"mass": mass, "seen": window.seen.sum(-1).expand(window.heads, -1)}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        used = found["mass"]
        if end.spec.pool == "sequence":
            used = used[found["seen"] >= FEWEST]
        return Result({"sink_mass": float(used.double().mean())}, {})


# ---- dispersion

BELOW = (2, 4, 8)  # n before the ladder's first: where the largest weight falls below a half
HALF = 0.5
CURVES = ("sum_p2", "entropies", "largest")
GAPS = 2.0 ** np.arange(-4, 7)  # from the largest score, at which keys are counted


@dataclass(frozen=True)
class Scores:
    """Of the kept queries: deposits without values, and the largest ones."""

    masses: Deposit | AllKeys  # all keys, where the scores are too wide for deposits
    top: TopScores


class Dispersion(Statistic):
    """How softmax spreads over n keys as n grows: effective tokens, entropy and largest weight of
    the kept queries. Also how many of all keys lie within a gap of the largest score, and the
    critical scale that follows.

    The n keys are drawn at random from those that the query sees: exact expectations
    (esscher.errors.dispersion).
    """

    name = "dispersion"
    state = (Scores, TopScores)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return SPREAD

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"dispersion": DISPERSION, "gaps": GAP_COLUMNS}

    def init(self, head: HeadView) -> Scores:
        m, keep = len(head.kept), max(TOP, tail_length(head.most_keys))
        top = tails.init(m, keep, device=head.values.device)
        return Scores(deposit.init(m, GRID, head.center[:0]), top)

    def update(self, state: Scores, head: HeadView) -> Scores:
        if not len(head.kept):
            return state
        scores = head.kept_scores
        masses = add_keys(state.masses, scores, head.values[:, :0], head.kept_keys)
        return Scores(masses, tails.update(state.top, scores))

    def merge(self, a: Scores, b: Scores) -> Scores:
        assert isinstance(a.masses, Deposit)
        assert isinstance(b.masses, Deposit)
        return Scores(deposit.merge(a.masses, b.masses), tails.merge(a.top, b.top))

    def reduce(self, state: Scores, head: Head) -> Numbers:
        """Expectations over n random keys for each kept query, (m_kept, len n)."""
        if not len(state.top.count):
            return {}
        n = ladder(head.spec, head.n_keys)
        if isinstance(state.masses, Deposit):
            curve = from_masses(state.masses, state.top.scores[:, :TOP], n)
            gaps = [gaps_from_masses(state.masses, state.top.scores)]
        else:
            rows = [row[row > -torch.inf][None] for row in state.masses.rows()]
            curve = DispersionCurve.of_all([from_scores(row, n) for row in rows])
            gaps = [gap_counts(row) for row in rows]
        found = {name: torch.from_numpy(np.array(getattr(curve, name))) for name in CURVES}
        return found | {
            "critical": torch.cat([critical_scale(*part) for part in gaps]).cpu(),
            "within": torch.cat([_within(*part) for part in gaps]).cpu(),
        }

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        arrays = [found[name].numpy() for name in CURVES]
        curve = DispersionCurve(ladder(end.spec, end.n_keys), *arrays)
        row = _summary(curve, end.queries.windows[end.kept])
        row["critical_scale"] = float(np.median(found["critical"]))
        keys = found["within"].log().mean(0).exp().numpy()  # geometric mean over queries
        gaps = pd.DataFrame({"gap": GAPS, "keys": keys})
        return Result(row, {"dispersion": curve.to_frame(), "gaps": gaps})


def _within(gaps: Tensor, counts: Tensor) -> Tensor:
    """Keys within GAPS of each query's largest score, (m, len GAPS)."""
    at = torch.from_numpy(GAPS).to(gaps).expand(len(gaps), -1).contiguous()
    return counts.gather(1, torch.searchsorted(gaps, at, right=True) - 1)


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


# ---- columns

SPREAD = (
    Column(
        "tokens_exponent",
        "float",
        "exponent of effective tokens",
        "Effective tokens of n random keys grow as n to this power: 1 is uniform attention, 0 a few"
        " keys.",
        scale="linear",
        ends=("tokens_exponent_low", "tokens_exponent_high"),
        short="spread",
    ),
    Column("tokens_exponent_low", "float", "spread, low", "Lower end of its interval."),
    Column("tokens_exponent_high", "float", "spread, high", "Upper end of its interval."),
    Column(
        "half_weight_at",
        "float",
        "no key has half from",
        "Random keys from which on the largest weight stays below a half; empty: it does not.",
        scale="log",
        short="half from",
    ),
    Column(
        "critical_scale",
        "float",
        "critical scale",
        "Factor on the scores at which the softmax over all keys freezes on the largest, median"
        " over queries: sup over gaps t of log N(t) / t, N(t) the keys within t of the largest"
        " score. Below 1 it is frozen as it is.",
        scale="log",
        short="critical",
    ),
)
GAP_COLUMNS = (
    LAYER,
    HEAD,
    Column("gap", "float", "gap", "Gap from a query's largest score.", "log"),
    Column("keys", "float", "keys", "Keys within that gap, geometric mean over queries.", "log"),
)
DISPERSION = (
    LAYER,
    HEAD,
    Column("n", "int", "keys n", "Number of keys.", "log"),
    EFFECTIVE_TOKENS,
    Column("entropy", "float", "entropy", "Mean entropy of the softmax weights, in nats."),
    Column("largest_weight", "float", "largest weight", "Mean weight of the key that has most."),
)
