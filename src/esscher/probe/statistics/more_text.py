"""Would the numbers of a head hold on more text? The same numbers on halves, quarters and eighths
of the pool.

The kept queries meet each piece of the pool apart. Deposits add, so that pieces make every part of
the pool, and the whole without one piece. Where each query has its own context, windows of text
take the place of pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
    CONVERGED,
    NOT_CONVERGED,
    PIECES,
    STATUSES,
    TEXT,
    Extrapolation,
    extrapolate,
    other_text,
)
from esscher.probe.curves import (
    Number,
    error_numbers,
    headline_numbers,
    no_keys,
    read_numbers,
    too_wide,
)
from esscher.probe.spec import COMPARED, ProbeSpec, drawn_ladder
from esscher.probe.statistic import HEAD, LAYER, Head, HeadEnd, HeadView, Numbers, Result, Statistic
from esscher.probe.statistics.errors import Draws
from esscher.runs.columns import Column

Floats = npt.NDArray[np.float64]

INSIDE = 0.5  # of the pool's keys: the largest n that a pool tells of
FEWEST = 30  # effective tokens of the pool below which a few keys decide
NEEDED, EXPONENT = "tokens_needed_10pct", "beta_fit"
ERROR, EFFECTIVE = f"relative_{COMPARED}", f"effective_{COMPARED}"
ROOM = 2**21  # cells of pieces at once: 16 MB
SIZES = ("whole", "half", "quarter", "eighth")


@dataclass(frozen=True)
class Pieces:
    """Deposits of the kept queries for each piece of the pool that has come by."""

    empty: Deposit
    parts: dict[str, Deposit]
    wide: bool = False  # scores of some query are too wide for a grid


class MoreText(Statistic):
    name = "more_text"
    state = (Pieces,)
    alike = TEXT  # how alike pieces are, 1 where they are independent (esscher.errors.more_text)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        ends = [
            Column(key, "float", key.replace("_", " "), f"{number.key}: {side} {INTERVAL}")
            for number in headline_numbers(spec)
            for key, side in ((number.low, "lower"), (number.high, "upper"))
        ]
        return (*ends, CONVERGED_COLUMN)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"endless": ENDLESS}

    def init(self, head: HeadView) -> Pieces:
        return Pieces(no_keys(head, len(head.kept)), {})

    def update(self, state: Pieces, head: HeadView) -> Pieces:
        if head.pieces is None or state.wide or not len(head.kept):
            return state
        parts, start = dict(state.parts), 0
        found, counts = torch.unique_consecutive(head.pieces, return_counts=True)
        for piece, count in zip(map(str, found.tolist()), counts.tolist(), strict=True):
            some = slice(start, start + count)
            start += count
            known, scores = parts.get(piece, state.empty), head.kept_scores[:, some]
            extent = deposit.reach(known, scores)
            if too_wide(extent):
                return replace(state, parts={}, wide=True)
            owned = piece in parts
            parts[piece] = deposit.update(
                known, scores, head.values[some], extent=extent, owned=owned
            )
        return replace(state, parts=parts)

    def merge(self, a: Pieces, b: Pieces) -> Pieces:
        if a.wide or b.wide:
            return replace(a, parts={}, wide=True)
        parts = {}
        for name in sorted({*a.parts, *b.parts}):
            both = [state.parts[name] for state in (a, b) if name in state.parts]
            parts[name] = reduce(deposit.merge, both)
        return replace(a, parts=parts)

    def reduce(self, state: Pieces, head: Head) -> Numbers:
        """Means over the queries on parts of the pool of each size."""
        if len(state.parts) < PIECES:  # an own context, too wide, or fewer keys than pieces
            return {}
        n, found = drawn_ladder(head.spec, head.n_keys), defaultdict[str, list[Tensor]](list)
        pieces = [state.parts[name] for name in sorted(state.parts)]
        largest = max(piece.cells[:, :1].numel() for piece in pieces)
        step, device = max(1, ROOM // (PIECES * largest)), state.empty.keys.device
        for start in range(0, len(state.empty.keys), step):
            stop = min(start + step, len(state.empty.keys))
            rows = torch.arange(start, stop, device=device)
            for name, parts in _subsets(pieces, rows):
                # the grid's own error is that of the whole pool's curve, and not measured again
                errors = error_numbers(parts, n)
                errors["limit"] = errors["limit"].square().sum(1)
                for key in ("mse", "limit", "sum_p2"):
                    x = errors[key]
                    found[f"{name} {key}"].append(x.reshape(-1, len(rows), *x.shape[1:]))
        return {name: torch.cat(values, 1).mean(1) for name, values in found.items()}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        numbers = headline_numbers(end.spec)
        value = self._read(end, np.ones((1, len(end.queries))))[0]
        near = np.array([number.near for number in numbers])
        ladder, sizes = drawn_ladder(end.spec, end.n_keys), dict[str, Floats]()
        for name in (*SIZES, "without") if found else ():  # on parts of the pool, (R, k)
            parts = (found[f"{name} {key}"].numpy() for key in ("mse", "limit", "sum_p2"))
            sizes[name] = read_numbers(end.spec, end.n_keys, ladder, *parts)
        if sizes:
            text = self._of_pool(sizes, end, numbers, value)
        elif end.spec.pool == "sequence":
            text = other_text(value, self._without(end, end.queries.windows), near)
        else:  # nothing is known but the pool
            far = np.full(len(value), np.inf)
            text = Extrapolation(value, -far, far, np.full(len(value), BEYOND))
        rows = _rows(sizes, numbers, value, text)
        row: dict[str, Any] = {}
        for i, number in enumerate(numbers):
            row |= {number.low: number.plain(text.low[i]), number.high: number.plain(text.high[i])}
        known = dict(zip(rows["number"], rows["status"], strict=True))
        told = [known[key] for key in (ERROR, EXPONENT, NEEDED, EFFECTIVE) if key in known]
        row["converged"] = max(told, key=STATUSES.index)
        return Result(row, {"endless": rows})

    def _without(self, end: HeadEnd, groups: npt.NDArray[np.int64]) -> Floats:
        """(G, k): without the queries of each group; a group that has all of them says nothing."""
        weights = (groups[None, :] != np.unique(groups)[:, None]).astype(float)
        return self._read(end, weights[weights.any(axis=1)])

    def _read(self, end: HeadEnd, weights: Floats) -> Floats:
        """(R, k): the numbers on all keys, from (R, m) weights of the queries."""
        draws, share = end.found[Draws.name], weights / weights.sum(axis=1, keepdims=True)
        limit = draws["limit"].square().sum(1).numpy()
        mse, sum_p2 = share @ draws["mse"].numpy(), share @ draws["sum_p2"].numpy()
        ladder = drawn_ladder(end.spec, end.n_keys)
        return read_numbers(end.spec, end.n_keys, ladder, mse, share @ limit, sum_p2)

    def _of_pool(
        self, read: Mapping[str, Floats], end: HeadEnd, numbers: Sequence[Number], value: Floats
    ) -> Extrapolation:
        queries = np.repeat(value[None], PIECES, axis=0)
        present = np.unique(end.queries.pieces)
        if len(present) > 1:
            queries[present] = self._without(end, end.queries.pieces)
        pairs = zip(numbers, value, strict=True)
        at = np.array([math.exp(x) if number.n is None else number.n for number, x in pairs])
        whole, half, quarter, eighth = (read[name].mean(axis=0) for name in SIZES)
        return extrapolate(
            value,
            (whole, half, quarter, eighth),
            (read["without"], queries),
            np.array([number.near for number in numbers]),
            np.array([number.far for number in numbers]),
            at <= INSIDE * end.row["n_keys"],
            frozen=end.row["effective_tokens"] < FEWEST,
            alike=self.alike,
        )


def _subsets(pieces: Sequence[Deposit], rows: Tensor) -> Iterator[tuple[str, Deposit]]:
    """The parts of the pool of each size for some queries, those of one part after those of the
    other; the pool without each piece, from the other one of each pair on the way up.
    """
    first = torch.stack([piece.first[rows] for piece in pieces]).amin(0)
    end = torch.stack([piece.end[rows] for piece in pieces]).amax(0)
    empty = deposit.init(len(rows), pieces[0].grid, pieces[0].center)
    frame = replace(empty, first=first, end=end)  # of all pieces, so that their cells add

    def below(cells: Tensor, keys: Tensor) -> Deposit:
        parts = len(keys)
        cells, keys = cells.flatten(1, 2), keys.flatten()
        edges = first.repeat(parts), end.repeat(parts)
        return Deposit(frame.grid, frame.center, cells, edges[0], edges[1], keys)

    length = int((end - first).max())
    cells = [frame.cells.new_empty(len(frame.cells), len(pieces), len(rows), length)]
    for i, piece in enumerate(pieces):
        cells[0][:, i] = deposit.merge(frame, deposit.take(piece, rows)).cells
    keys = [torch.stack([piece.keys[rows] for piece in pieces])]
    yield SIZES[-1], below(cells[0], keys[0])
    for name in SIZES[-2::-1]:
        cells.append(cells[-1][:, ::2] + cells[-1][:, 1::2])
        keys.append(keys[-1][::2] + keys[-1][1::2])
        yield name, below(cells[-1], keys[-1])
    place = torch.arange(len(pieces), device=first.device)
    rest, counts = torch.zeros_like(cells[0]), torch.zeros_like(keys[0])
    for height in range(len(cells) - 1):
        rest += cells[height][:, (place >> height) ^ 1]
        counts += keys[height][(place >> height) ^ 1]
    yield "without", below(rest, counts)


def _rows(
    read: Mapping[str, Floats], numbers: Sequence[Number], value: Floats, text: Extrapolation
) -> pd.DataFrame:
    # changes of some of the queries, as changes of the number of all
    shift = value - read["whole"][0] if read else np.full(len(numbers), np.nan)
    columns = {"value": value, "estimate": text.estimate, "low": text.low, "high": text.high}
    columns |= {name: read[name].mean(axis=0) + shift if read else shift for name in SIZES[1:]}
    plain = {
        name: [number.plain(x) for number, x in zip(numbers, values, strict=True)]
        for name, values in columns.items()
    }
    keys = [number.key for number in numbers]
    return pd.DataFrame({"number": keys, **plain, "status": text.status})


# ---- columns

INTERVAL = "end of the 90 % interval for more text of the same kind; empty where it is not known."


MEANINGS = (
    "more text of the same kind would change it little",
    "it still changes as more text is read; the interval says how far",
    "this much text does not tell it; there is a bound at best",
)
CONVERGED_COLUMN = Column(
    "converged",
    "word",
    "converged",
    "Whether the numbers of the head would hold on more text.",
    scale="words",
    first=9,
    words=(CONVERGED, NOT_CONVERGED, BEYOND, "unknown"),
    meanings=(*MEANINGS, "not measured"),
)
ENDLESS = (
    LAYER,
    HEAD,
    Column("number", "word", "number", "Which number of the head."),
    Column("value", "float", "this text", "The number on all keys of this text."),
    Column("half", "float", "half of it", "Mean of the number over halves of the text."),
    Column("quarter", "float", "a quarter", "Mean of the number over quarters of the text."),
    Column("eighth", "float", "an eighth", "Mean of the number over eighths of the text."),
    Column("estimate", "float", "unlimited text", "Extrapolation to an unlimited text."),
    Column("low", "float", "low", f"Lower {INTERVAL}", ends=None),
    Column("high", "float", "high", f"Upper {INTERVAL}"),
    Column(
        "status",
        "word",
        "status",
        "Whether the number converged.",
        words=STATUSES,
        meanings=MEANINGS,
    ),
)
