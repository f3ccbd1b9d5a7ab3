"""How the softmax weights of a head are spread: their tail, sinks, the tokens it looks at, and how
they disperse over n keys as n grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

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
from esscher.probe.curves import EFFECTIVE_TOKENS, AllKeys, add_keys
from esscher.probe.session import FEWEST, Indices, Session, tokenizer_of
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


# ---- which tokens a head looks at

QUERIES = 4  # whose keys are told
KEYS = 5  # of each, the heaviest
ASKING = 32  # queries of a window that sinks are found from
TOKENS = 2048  # of the windows that are looked at, one window at least
AROUND = 8  # tokens on either side of a token that is told
LONGEST = 60  # characters of a text
LEAST = 0.05  # of the attention, that a sink gets beyond its share of the keys
FIRST, LOGIT = "first token", "sink logit"
FIRST_ID, LOGIT_ID = -1, -2

COLUMNS = (
    Column(
        "sink_token",
        "word",
        "sink token",
        "Token that gets most attention beyond its share of the keys, in queries' own windows;"
        " empty where none does. first token: whatever stands first.",
        first=15,
        short="sink",
    ),
    Column("sink_weight", "float", "weight of the sink", "Share of the attention that it gets."),
)
LOOKS = (
    LAYER,
    HEAD,
    Column("query", "int", "query", "Number of the query, from 0."),
    Column("query_before", "word", "before the query", "Text before the query token."),
    Column("query_token", "word", "query token", "The token that asks."),
    Column("query_after", "word", "after the query", "Text after it."),
    Column("rank", "int", "rank", "Place of the key among those of the query, heaviest first."),
    Column("distance", "int", "distance", "Tokens from the key to the query; below 0: later keys."),
    Column("key_before", "word", "before the key", "Text before the key token."),
    Column("key_token", "word", "key token", "The token that is looked at."),
    Column("key_after", "word", "after the key", "Text after that."),
    Column("weight", "float", "weight", "Share of the query's attention that the key gets."),
)


class Looks(Statistic):
    """Which tokens a head looks at: the heaviest keys of a few queries, and the token of most
    weight.

    Weights are the softmax over all keys that a query sees in its own window, whatever the pool is.
    The sink of a head is the token t that gets most beyond its share of the keys,

        w(t) = mean over queries of  sum_j p_j [key j is t],        sink = argmax_t  w(t) - u(t),

    where p is the softmax of a query and u is w with equal weights on all keys that the query sees:
    a token that is merely common is no sink, and where nothing gets LEAST beyond its share there is
    none. What stands first in a window is a token of its own, unless it is a special one: heads
    rest on first tokens whatever these are.
    """

    name = "looks"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return COLUMNS

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"looks": LOOKS}

    def in_window(self, window: WindowQueries) -> Numbers:
        """Summed weights of each token (H, tokens), and the heaviest keys (H, told, KEYS)."""
        session, number = window.session, window.window
        told = session.once(told_queries).get(number)
        if told is None:
            return {}
        text = np.flatnonzero(session.windows.text[number])
        spread = np.linspace(0, len(text) - 1, min(ASKING, len(text))).round().astype(np.int64)
        asking = window.at(np.unique(np.concatenate([text[spread], list(told)])))
        weights = asking.weights.double()  # (H, m, T)
        even = asking.seen.double() / asking.seen.sum(-1, keepdim=True)
        even = even.expand_as(weights)
        ids = session.windows.ids[number].astype(np.int64)
        if not session.windows.special[number, 0]:
            ids[0] = FIRST_ID
        if asking.sinks is not None:  # the last, which has no share of the keys
            rest = (1 - weights.sum(-1, keepdim=True)).clamp_min(0)
            weights, even = torch.cat([weights, rest], -1), pad(even, (0, 1))
            ids = np.append(ids, LOGIT_ID)
        tokens, group = np.unique(ids, return_inverse=True)
        sums = torch.zeros(2, window.heads, len(tokens), dtype=torch.float64, device=weights.device)
        both = torch.stack([weights.sum(1), even.sum(1)])
        sums.index_add_(2, torch.from_numpy(group).to(weights.device), both)
        rows = torch.from_numpy(np.searchsorted(asking.positions, list(told)))
        heaviest = weights[:, rows].sort(dim=-1, descending=True, stable=True)

        def for_heads(x: Any) -> torch.Tensor:
            given = torch.as_tensor(x)
            return given.expand(window.heads, *given.shape)

        return {
            "token": for_heads(tokens),
            "weight": sums[0],
            "even": sums[1],
            "queries": for_heads([len(asking.positions)]),
            "told": for_heads(list(told.values())),
            "told_window": for_heads([number] * len(told)),
            "told_at": for_heads(list(told)),
            "key": heaviest.indices[..., :KEYS],
            "key_weight": heaviest.values[..., :KEYS],
        }

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        reader = end.session.once(Reader.of)
        tokens, group = np.unique(found["token"].numpy(), return_inverse=True)
        weight, even = (
            np.bincount(group, found[name].numpy()) / int(found["queries"].sum())
            for name in ("weight", "even")
        )
        best, row = int((weight - even).argmax()), {"sink_token": "", "sink_weight": np.nan}
        if weight[best] - even[best] >= LEAST:  # not where scores overflow either
            token = int(tokens[best])
            name = {FIRST_ID: FIRST, LOGIT_ID: LOGIT}.get(token) or reader.token(token)
            row = {"sink_token": name, "sink_weight": float(weight[best])}
        return Result(row, {"looks": self._rows(found, reader)})

    def _rows(self, found: Numbers, reader: Reader) -> pd.DataFrame:
        rows = []
        length = reader.ids.shape[1]
        for place in np.argsort(found["told"].numpy(), kind="stable").tolist():
            query, window, at = (int(found[x][place]) for x in ("told", "told_window", "told_at"))
            asks = reader.around(window, at)
            keys, weights = found["key"][place].tolist(), found["key_weight"][place].tolist()
            for rank, (key, weight) in enumerate(zip(keys, weights, strict=True)):
                if weight > 0:
                    logit = key == length  # as if it stood before the first
                    text = ("", LOGIT, "") if logit else reader.around(window, key)
                    distance = at + 1 if logit else at - key
                    rows.append((query, *asks, rank, distance, *text, weight))
        return pd.DataFrame(rows, columns=[column.key for column in LOOKS[2:]])


def told_queries(session: Session) -> dict[int, dict[int, int]]:
    """By window the positions of the queries that are told, and their numbers: spread over a few of
    the probe's windows, ever deeper ones.
    """
    asking = session.query_windows
    few = min(QUERIES, len(asking), max(1, TOKENS // session.windows.length))
    windows: Indices = asking[np.linspace(0, len(asking) - 1, few).round().astype(np.int64)]
    told: dict[int, dict[int, int]] = {}
    for number in range(QUERIES):
        window = int(windows[number % len(windows)])
        text = np.flatnonzero(session.windows.text[window])
        position = int(text[int(len(text) * (number + 0.5) / QUERIES)])
        told.setdefault(window, {}).setdefault(position, number)
    return {window: dict(sorted(own.items())) for window, own in told.items()}


@dataclass(frozen=True, eq=False)
class Reader:
    """Tokens of windows as text."""

    tokenizer: Any
    ids: Any  # (W, T)
    real: Any  # (W, T): all but padding
    known: dict[tuple[int, int], tuple[str, str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Reader:
        windows = session.windows
        return cls(tokenizer_of(session.loaded), windows.ids, ~windows.padding)

    def token(self, number: int) -> str:
        return _cut(self._decoded([number]))

    def around(self, window: int, position: int) -> tuple[str, str, str]:
        """The text before a token, the token, and the text after it; heads often look at the same
        ones.
        """
        if (window, position) not in self.known:
            ids, real = self.ids[window], self.real[window]
            parts = (
                slice(max(0, position - AROUND), position),
                slice(position + 1, position + 1 + AROUND),
            )
            before, after = (self._decoded(ids[part][real[part]].tolist()) for part in parts)
            token = self.token(int(ids[position]))
            self.known[window, position] = _cut(before, end=True), token, _cut(after)
        return self.known[window, position]

    def _decoded(self, ids: list[int]) -> str:
        if not ids:
            return ""
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(ids, **plain))


def _cut(text: str, *, end: bool = False) -> str:
    """A text, or the beginning or the end of a long one."""
    if len(text) <= LONGEST:
        return text
    return f"…{text[-LONGEST:]}" if end else f"{text[:LONGEST]}…"


# ---- dispersion

GRID = Grid(1 / 8, 4, 1e-6)
BELOW = (2, 4, 8)  # n before the ladder's first: where the largest weight falls below a half
HALF = 0.5
TEMPERED = "_tempered"  # ends the names of columns at a temperature
ORIGINS = ("random keys", "random keys, tempered")


@dataclass(frozen=True)
class Scores:
    """Of the kept queries: deposits without values, the largest ones, and those of planted keys."""

    masses: Deposit | AllKeys  # all keys, where the scores are too wide for deposits
    top: TopScores
    planted: Tensor  # (m_kept,) float64; NaN: none
    place: int = -1  # of the planted key among those of its block


class Dispersion(Statistic):
    """How softmax spreads over n keys as n grows: effective tokens, entropy, largest weight, and
    the weight of a planted key, of the kept queries.

    The n keys are drawn at random from those that the query sees: exact expectations
    (esscher.errors.dispersion).
    """

    name = "dispersion"
    state = (Scores, TopScores)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (*_columns(None), *(_columns(spec.temperature) if spec.temperature else ()))

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"dispersion": DISPERSION}

    def check(self, session: Session) -> None:
        """Refuse a temperature that is not above 0 at some n, and a planted key that some query
        does not see.
        """
        spec = session.spec
        most = max(session.most_keys(layer) for layer in session.layers)
        factors(spec.temperature, np.array([BELOW[0], most]))
        if spec.planted is None:
            return
        if not session.own:
            raise ValueError(
                "planted: a key has a place in a query's own context; use --pool sequence, or leave"
                " --planted out"
            )
        last = int((~session.windows.padding).sum(axis=1).min()) - 1
        if any(session.loaded.shapes[layer].causal for layer in session.layers):
            last = int(session.queries.positions.min())
        if spec.planted > last:
            raise ValueError(
                f"planted: expected a position that every query sees, got {spec.planted}; use 0 to"
                f" {last}, or later queries (--positions)"
            )

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
        return found

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        spec, windows = end.spec, end.queries.windows[end.kept]
        n, row, frames = ladder(spec, end.n_keys), dict[str, Any](), []
        temperatures = [None] + ([spec.temperature] if spec.temperature else [])
        for heat, mark, origin in zip(temperatures, ("", TEMPERED), ORIGINS, strict=False):
            arrays = [found[name + mark].numpy() for name in CURVES]
            curve = DispersionCurve(n, factors(heat, n), *arrays)
            row |= {f"{key}{mark}": value for key, value in _summary(curve, windows).items()}
            frames.append(curve.to_frame().assign(origin=origin))
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
        "Random keys with the model's own scores, or with scores times the temperature.",
        words=ORIGINS,
        meanings=("n keys drawn at random", "the same, scores times the temperature"),
    ),
    Column("n", "int", "keys n", "Number of keys.", "log"),
    Column("temperature", "float", "temperature", "What the scores are multiplied with at this n."),
    EFFECTIVE_TOKENS,
    Column("entropy", "float", "entropy", "Mean entropy of the softmax weights, in nats."),
    Column("largest_weight", "float", "largest weight", "Mean weight of the key that has most."),
    Column("planted_weight", "float", "planted weight", "Mean weight of the planted key."),
)
