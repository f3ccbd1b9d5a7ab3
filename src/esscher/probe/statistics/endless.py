"""How far the numbers of a head are those of an endless text: the same on halves, quarters and
eighths of the pool.

Some of the queries meet each piece of the pool apart. Deposits add, so that pieces make every part
of the pool, and the whole without one piece. Where each query has a context of its own, that is all
there is for it: other windows of text alone can give other numbers.

Halves of the pool also tell what it means that queries and keys are of one text: a query's own half
against the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.grid import Deposit
from esscher.errors.more_text import (
    BEYOND,
    MOVING,
    PIECES,
    SETTLED,
    STATUSES,
    TEXT,
    Extrapolation,
    extrapolate,
    other_text,
)
from esscher.probe.curves import Errors, Number, headline_numbers, read_numbers, settled_sentence
from esscher.probe.spec import ProbeSpec, drawn_ladder
from esscher.probe.statistics.base import (
    HEAD,
    LAYER,
    Block,
    Failure,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
)
from esscher.runs.columns import Column

Floats = npt.NDArray[np.float64]

SAMPLING = "replacement"
INSIDE = 0.5  # of the pool's keys: the largest n that a pool tells of
FEWEST = 30  # effective tokens of the pool below which a few keys decide
# whose statuses make that of a head
HEADLINE = ("relative_1024", "beta_fit", "tokens_needed_10pct", "effective_1024")
COMPARED = 1024  # the n at which a query's own half of the text is compared with the other one


@dataclass(frozen=True)
class Pieces:
    """Deposits of the kept queries for each piece of the pool that has come by."""

    asked: Tensor  # (m,) bool: which of all queries these are
    empty: Deposit
    parts: dict[str, Deposit]
    wide: bool = False  # scores of some query are too wide for a grid


@dataclass(frozen=True)
class Replicates:
    """Errors of the kept queries on parts of the pool, by name; ``half`` (m_kept, 2, len n) those
    on each half of it.
    """

    asked: Tensor
    mse: dict[str, Tensor]  # (R, len n): means over the queries, of R parts of a size
    limit: dict[str, Tensor]  # (R,)
    sum_p2: dict[str, Tensor]  # (R, len n)
    half: Tensor


class EndlessText(Statistic):
    name = "endless"
    reads = ("identity", "replacement")
    state = Pieces
    settled = Replicates

    def __init__(self, alike: float = TEXT) -> None:
        """``alike``: how alike pieces are, 1 where they are independent
        (esscher.errors.more_text).
        """
        self.alike = alike

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            *(column for number in headline_numbers(spec) for column in _ends(number)),
            *HEAD_COLUMNS,
        )

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"endless": ENDLESS}

    def init(self, start: Start) -> Pieces:
        asked = torch.zeros(start.queries, dtype=torch.bool)
        asked[start.kept] = True
        return Pieces(
            asked,
            deposit.init(len(start.kept), deposit.choose_grid(start.dtype, SAMPLING), start.center),
            {},
        )

    def update(self, state: Pieces, block: Block) -> Pieces:
        if block.pieces is None or state.wide or not len(block.kept):
            return state
        parts = dict(state.parts)
        for piece, some in _runs(block.pieces):
            known, scores = parts.get(piece, state.empty), block.kept_scores[:, some]
            extent = deposit.reach(known, scores)
            if extent.cells > deposit.MAX_CELLS or not extent.largest < deposit.FAR:
                return replace(state, parts={}, wide=True)
            parts[piece] = deposit.update(
                known, scores, block.values[some], extent=extent, owned=piece in parts
            )
        return replace(state, parts=parts)

    def merge(self, a: Pieces, b: Pieces) -> Pieces:
        if a.wide or b.wide:
            return replace(a, parts={}, wide=True)
        both = [state.parts for state in (a, b)]
        names = sorted({*a.parts, *b.parts})
        return replace(
            a,
            parts={
                name: reduce(deposit.merge, [parts[name] for parts in both if name in parts])
                for name in names
            },
        )

    def single(self, state: Pieces | Replicates) -> tuple[str, ...]:
        if isinstance(state, Replicates) or state.empty.grid.tol <= 1e-8:
            return ()
        return tuple(f".parts.{name}.cells" for name in state.parts)

    def settle(self, state: Pieces, met: Met) -> Replicates:
        if len(state.parts) < PIECES:  # a context of its own, too wide, or fewer keys than pieces
            return Replicates(state.asked, {}, {}, {}, torch.zeros(0, 2, 0, dtype=torch.float64))
        n = drawn_ladder(met.spec, met.keys)
        pieces = [state.parts[name] for name in sorted(state.parts)]
        found = {
            name: [self._errors(part, n, met) for part in parts] for name, parts in _subsets(pieces)
        }
        mse = {
            name: torch.stack([one.mse.mean(0) for one in errors]) for name, errors in found.items()
        }
        limit = {
            name: torch.stack([one.limit.square().sum(1).mean() for one in errors])
            for name, errors in found.items()
        }
        sum_p2 = {
            name: torch.stack([one.sum_p2.mean(0) for one in errors])
            for name, errors in found.items()
        }
        half = torch.stack([_relative(one, n) for one in found["half"]], dim=1)
        return Replicates(state.asked, mse, limit, sum_p2, half)

    def _errors(self, part: Deposit, n: npt.NDArray[np.int64], met: Met) -> Errors:
        """The grid's own error is that of the whole pool's curve, and not measured again."""
        return Errors.of(
            deposit.finish(part, n, SAMPLING, of=met.keys, interpolation=0.0), part.keys
        )

    def stack(self, states: Sequence[Replicates], order: Order) -> Replicates:
        """Contexts of their own have no parts."""
        return replace(states[0], asked=torch.cat([state.asked for state in states])[order.queries])

    def finish(self, state: Replicates, found: Found) -> Findings:
        numbers, value, text = headline_numbers(found.spec), self._value(found), None
        read = self._sizes(state, found)
        if read:
            text = self._of_pool(read, found, numbers, value)
        elif found.spec.pool == "sequence":
            text = other_text(
                value, self._without_queries(found, found.places.windows), _each(numbers, "near")
            )
        ends = _unknown(value) if text is None else text
        row: dict[str, Any] = {}
        for i, number in enumerate(numbers):
            row |= {number.low: number.plain(ends.low[i]), number.high: number.plain(ends.high[i])}
        status = _of_head(
            dict(zip((number.key for number in numbers), ends.status.tolist(), strict=True))
        )
        rows = self._rows(read, numbers, value, ends)
        own, other = _own_text(state, found)
        row |= {"settled": status, "own_text_bias": own / other - 1 if other > 0 else math.nan}
        row["settled_reason"] = settled_sentence(
            rows, status, found.row["n_keys"], own=found.spec.pool == "sequence"
        )
        return Findings(row, {"endless": rows})

    def _value(self, found: Found) -> Floats:
        """The headline numbers on the whole pool and all queries."""
        value: Floats = self._read(found, np.ones((1, len(found.places))))[0]
        return value

    def _without_queries(self, found: Found, groups: npt.NDArray[np.int64]) -> Floats:
        """(G, k): without the queries of each group; a group that has all of them says nothing."""
        weights = (groups[None, :] != np.unique(groups)[:, None]).astype(float)
        return self._read(found, weights[weights.any(axis=1)])

    def _read(self, found: Found, weights: Floats) -> Floats:
        """(R, k) from (R, m) weights of the queries."""
        errors: Errors = found.states["replacement"].errors
        share = weights / weights.sum(axis=1, keepdims=True)
        mse, sum_p2, limit = (
            errors.mse.numpy(),
            errors.sum_p2.numpy(),
            errors.limit.square().sum(1).numpy(),
        )
        return read_numbers(
            found.spec,
            found.keys,
            drawn_ladder(found.spec, found.keys),
            share @ mse,
            share @ limit,
            share @ sum_p2,
        )

    def _of_pool(
        self, read: Mapping[str, Floats], found: Found, numbers: Sequence[Number], value: Floats
    ) -> Extrapolation:
        """``read``: as ``_sizes`` gives it."""
        queries = np.repeat(value[None], PIECES, axis=0)
        present = np.unique(found.places.pieces)
        if len(present) > 1:
            queries[present] = self._without_queries(found, found.places.pieces)
        keys = found.row["n_keys"]
        at = np.array(
            [
                math.exp(value[i]) if number.n is None else number.n
                for i, number in enumerate(numbers)
            ]
        )
        frozen = (
            float(1 / np.mean(1 / found.states["replacement"].weights.effective_tokens.numpy()))
            < FEWEST
        )
        whole, half, quarter, eighth = (
            read[name].mean(axis=0) for name in ("whole", "half", "quarter", "eighth")
        )
        return extrapolate(
            value,
            (whole, half, quarter, eighth),
            (read["without"], queries),
            _each(numbers, "near"),
            _each(numbers, "far"),
            at <= INSIDE * keys,
            frozen=frozen,
            alike=self.alike,
        )

    def _sizes(self, state: Replicates, found: Found) -> dict[str, Floats]:
        """The numbers on parts of the pool, (R, k) by name of the parts."""
        n = drawn_ladder(found.spec, found.keys)
        return {
            name: read_numbers(
                found.spec,
                found.keys,
                n,
                state.mse[name].numpy(),
                state.limit[name].numpy(),
                state.sum_p2[name].numpy(),
            )
            for name in state.mse
        }

    def _rows(
        self,
        read: Mapping[str, Floats],
        numbers: Sequence[Number],
        value: Floats,
        ends: Extrapolation,
    ) -> pd.DataFrame:
        parts = {
            name: read[name].mean(axis=0) if read else np.full(len(numbers), np.nan)
            for name in ("half", "quarter", "eighth")
        }
        # changes of some of the queries, as changes of the number of all
        shift = value - read["whole"][0] if read else np.zeros(len(numbers))
        columns = {"value": value, "estimate": ends.estimate, "low": ends.low, "high": ends.high}
        columns |= {name: parts[name] + shift for name in parts}
        plain = {
            name: [number.plain(x) for number, x in zip(numbers, values, strict=True)]
            for name, values in columns.items()
        }
        return pd.DataFrame(
            {"number": [number.key for number in numbers], **plain, "status": ends.status}
        )

    def failed(self, failure: Failure) -> dict[str, str]:
        return {"settled": "unknown"}


def _runs(pieces: Tensor) -> Iterator[tuple[str, slice]]:
    """Where each piece lies in a block, whose pieces rise."""
    found, counts = torch.unique_consecutive(pieces, return_counts=True)
    start = 0
    for piece, count in zip(found.tolist(), counts.tolist(), strict=True):
        yield str(piece), slice(start, start + count)
        start += count


def _subsets(pieces: Sequence[Deposit]) -> Iterator[tuple[str, list[Deposit]]]:
    """Parts of the pool by their size, one size in memory at a time; the pool without each
    piece.
    """
    levels = [list(pieces)]
    while len(levels[-1]) > 1:
        levels.append(
            [deposit.merge(a, b) for a, b in zip(levels[-1][::2], levels[-1][1::2], strict=True)]
        )
    yield from zip(("eighth", "quarter", "half", "whole"), levels, strict=True)
    yield "without", [reduce(deposit.merge, _others(levels, piece)) for piece in range(len(pieces))]


def _others(levels: Sequence[Sequence[Deposit]], piece: int) -> list[Deposit]:
    """A few parts that are the pool without one piece: the other one of each pair on the way up."""
    return [level[(piece >> height) ^ 1] for height, level in enumerate(levels[:-1])]


def _relative(errors: Errors, n: npt.NDArray[np.int64]) -> Tensor:
    """(m, 2): squared error at COMPARED, and squared norm of the limit, of each query."""
    return torch.stack(
        [errors.mse[:, int(np.searchsorted(n, COMPARED))], errors.limit.square().sum(1)], dim=1
    )


def _own_text(state: Replicates, found: Found) -> tuple[float, float]:
    """Relative error at COMPARED against the half of the pool that a query stands in, and against
    the other half.
    """
    if not state.mse:
        return math.nan, math.nan
    upper = torch.from_numpy(found.places.pieces[state.asked.numpy()] >= PIECES // 2).long()
    rows = torch.arange(len(upper))
    own, other = (state.half[rows, half].mean(0) for half in (upper, 1 - upper))
    return tuple(
        math.sqrt(float(mse / limit)) if limit > 0 else math.nan for mse, limit in (own, other)
    )  # type: ignore[return-value]


def _each(numbers: Sequence[Number], name: str) -> Floats:
    return np.array([getattr(number, name) for number in numbers])


def _unknown(value: Floats) -> Extrapolation:
    """Nothing is known but the pool."""
    open_end = np.full(len(value), np.inf)
    return Extrapolation(value, -open_end, open_end, np.full(len(value), BEYOND))


def _of_head(statuses: dict[str, str]) -> str:
    """The least settled of HEADLINE."""
    return max((statuses[key] for key in HEADLINE if key in statuses), key=STATUSES.index)


# ---- columns
# ------------------------------------------------------------------------------------------

INTERVAL = (
    "end of the 90 % interval for an endless text of the same kind; empty where it is not known."
)


def _ends(number: Number) -> tuple[Column, Column]:
    return (
        Column(
            number.low,
            "float",
            f"{number.low.replace('_', ' ')}",
            f"{number.key}: lower {INTERVAL}",
        ),
        Column(
            number.high,
            "float",
            f"{number.high.replace('_', ' ')}",
            f"{number.key}: upper {INTERVAL}",
        ),
    )


MEANINGS = (
    "more text of the same kind would change it little",
    "it still changes as more text is read; the interval says how far",
    "this much text does not tell it; there is a bound at best",
)

HEAD_COLUMNS = (
    Column(
        "settled",
        "word",
        "settled",
        "Whether the numbers of the head would stay if the text went on: settled, moving or beyond"
        " the pool.",
        scale="words",
        first=9,
        words=(SETTLED, MOVING, BEYOND, "unknown"),
        meanings=(*MEANINGS, "not measured"),
    ),
    Column(
        "settled_reason", "word", "how settled", "What the numbers do as the pool grows, in words."
    ),
    Column(
        "own_text_bias",
        "float",
        "own text, bias",
        f"By how much the relative error of {COMPARED:,} keys is larger where the query stands in"
        " the text that they are of: its own half of the pool against the other half. For the"
        " whole pool it is about half of that.",
    ),
)

ENDLESS = (
    LAYER,
    HEAD,
    Column("number", "word", "number", "Which number of the head."),
    Column("value", "float", "on this pool", "The number on the whole pool."),
    Column("half", "float", "on halves", "The same on halves of the pool, their mean."),
    Column("quarter", "float", "on quarters", "On quarters of the pool."),
    Column("eighth", "float", "on eighths", "On eighths of the pool."),
    Column(
        "estimate",
        "float",
        "endless text",
        "What it would be on an endless text, if changes go on to shrink as they do.",
    ),
    Column("low", "float", "low", f"Lower {INTERVAL}", ends=None),
    Column("high", "float", "high", f"Upper {INTERVAL}"),
    Column(
        "status",
        "word",
        "status",
        "settled, moving or beyond the pool.",
        words=STATUSES,
        meanings=MEANINGS,
    ),
)
