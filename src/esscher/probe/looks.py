"""Which tokens the heads of a model look at, in their text: the heaviest keys of a few queries, and
the token of most weight.

As the model runs, whatever the pool is: weights are the softmax over all keys that a query sees in
its own window, special tokens included. The sink of a head is the token t that gets most beyond its
share of the keys,

    w(t) = mean over queries of  sum_j p_j [key j is t],        sink = argmax_t  w(t) - u(t),

where p is the softmax of a query and u is w with equal weights on all keys that the query sees: a
token that is merely common is no sink, and where nothing gets LEAST beyond its share there is none.
What stands first in a window is a token of its own, unless it is a special one: heads rest on first
tokens whatever these are. One pass over few windows, at the end of a probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.hf.call import AttentionCall, softmax
from esscher.probe.queries import WindowQueries
from esscher.probe.session import Indices, Places, ProbeContext, tokenizer_of
from esscher.probe.statistics.base import HEAD, LAYER
from esscher.probe.tokens import LayerInfo
from esscher.runs.columns import Column

QUERIES = 4  # whose keys are told
KEYS = 5  # of each, the heaviest
ASKING = 32  # queries of a window that sinks are found from
TOKENS = 2048  # that pass through the model, one window at least
AROUND = 8  # tokens on either side of a token that is told
LONGEST = 60  # characters of a text
LEAST = 0.05  # of the attention, that a sink gets beyond its share of the keys
FIRST, LOGIT = "first token", "sink logit"

SINK = (  # of the table of heads
    Column(
        "sink_token",
        "word",
        "sink token",
        "Token that gets most attention beyond its share of the keys, in queries' own windows;"
        " empty where none does. first token: whatever stands first.",
        first=15,
        short="sink",
    ),
    Column(
        "sink_weight",
        "float",
        "weight of the sink",
        "Share of the attention that the sink token gets.",
    ),
)
LOOKS = (
    LAYER,
    HEAD,
    Column("query", "int", "query", "Number of the query, from 0."),
    Column("query_before", "word", "before the query", "Text before the token that asks."),
    Column("query_token", "word", "query token", "The token that asks."),
    Column("query_after", "word", "after the query", "Text after it."),
    Column(
        "rank",
        "int",
        "rank",
        "Place of the key among those of the query, the heaviest first, from 0.",
    ),
    Column(
        "distance",
        "int",
        "distance",
        "Tokens from the key to the query; below 0 where the key comes later.",
    ),
    Column("key_before", "word", "before the key", "Text before the token that is looked at."),
    Column("key_token", "word", "key token", "The token that is looked at."),
    Column("key_after", "word", "after the key", "Text after that."),
    Column(
        "weight",
        "float",
        "weight",
        "Share of the query's attention that the key gets, in the query's own window.",
    ),
)


def with_sinks(heads: Sequence[Column]) -> tuple[Column, ...]:
    """The columns of heads, those of sinks after the weight on first and special tokens."""
    place = [column.key for column in heads].index("sink_mass") + 1
    return (*heads[:place], *SINK, *heads[place:])


def looks(context: ProbeContext) -> tuple[pd.DataFrame, pd.DataFrame]:
    """By layer and head the sink; and the table ``looks``."""
    asking = _asking(context)
    seen = _Seen(context, replace(context, places=asking.places), asking.told)
    seen.context.run(np.unique(asking.places.windows), context.layers, seen)
    sinks = pd.DataFrame(seen.sinks, columns=[column.key for column in (LAYER, HEAD, *SINK)])
    return sinks, pd.DataFrame(seen.rows, columns=[column.key for column in LOOKS])


@dataclass(frozen=True)
class _Asking:
    places: Places
    told: dict[int, int]  # number of a query among them -> its number in the table


def _asking(context: ProbeContext) -> _Asking:
    """Queries spread over text of a few windows, from full ones; of each window some are told, ever
    deeper ones.
    """
    sizes = context.windows.text.sum(axis=1)
    full = np.flatnonzero(sizes >= max(1, sizes.max() // 2))
    few = min(QUERIES, len(full), max(1, TOKENS // context.windows.length))
    windows = full[np.unique(np.linspace(0, len(full) - 1, few).round().astype(np.int64))]
    found: list[tuple[int, int]] = []
    told: dict[tuple[int, int], int] = {}
    texts = {int(window): np.flatnonzero(context.windows.text[window]) for window in windows}
    for number in range(QUERIES):
        window = int(windows[number % len(windows)])
        text = texts[window]
        told.setdefault((window, int(text[int(len(text) * (number + 0.5) / QUERIES)])), number)
    for window, text in texts.items():
        spread = text[
            np.unique(
                np.linspace(0, len(text) - 1, min(ASKING, len(text))).round().astype(np.int64)
            )
        ]
        own = {position for where, position in told if where == window}
        found += [(window, position) for position in sorted({*spread.tolist(), *own})]
    where, at = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
    places = Places(where, at, np.zeros_like(at), np.zeros_like(at))
    return _Asking(places, {found.index(place): number for place, number in told.items()})


@dataclass
class _Seen:
    """What is found while layers go by."""

    whole: ProbeContext
    context: ProbeContext  # the same with the queries that are asked
    told: dict[int, int]
    sinks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    # (2, H, tokens + 1): w and u by layer, until its last window
    sums: dict[int, Tensor] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # windows to come

    def __post_init__(self) -> None:
        self.reader = _Reader(
            tokenizer_of(self.whole.loaded), self.whole.windows.ids, ~self.whole.windows.padding
        )
        self.windows = np.unique(self.context.places.windows)
        codes = self.whole.windows.ids[self.windows].astype(np.int64)
        codes[~self.whole.windows.special[self.windows, 0], 0] = -1  # what stands first
        self.tokens, self.groups = np.unique(codes, return_inverse=True)
        self.groups = self.groups.reshape(codes.shape)

    def __call__(self, captured: AttentionCall, batch: Indices) -> None:
        info = LayerInfo.of(captured, own=True)
        for place, window in enumerate(batch.tolist()):
            own = WindowQueries.of(self.context, captured, place, window)
            weights = softmax(own.scores.double(), own.sinks).cpu()  # (H, m, T)
            even = (own.seen.double() / own.seen.sum(-1, keepdim=True)).cpu().expand_as(weights)
            if own.sinks is not None:  # the last, which has no share of the keys
                rest = (1 - weights.sum(-1, keepdim=True)).clamp_min(0)
                weights, even = torch.cat([weights, rest], -1), pad(even, (0, 1))
            self._add(info, window, torch.stack([weights.sum(1), even.sum(1)]))
            for row, query in enumerate(own.rows.tolist()):
                if query in self.told:
                    self._tell(info.layer, query, weights[:, row])

    def _add(self, info: LayerInfo, window: int, weights: Tensor) -> None:
        """The summed weights (2, H, T) of each token, and of a sink logit after them."""
        groups = torch.from_numpy(self.groups[int(np.searchsorted(self.windows, window))])
        groups = pad(groups, (0, weights.shape[2] - len(groups)), value=len(self.tokens))
        sums = self.sums.setdefault(
            info.layer, torch.zeros(2, info.heads, len(self.tokens) + 1, dtype=torch.float64)
        )
        sums.index_add_(2, groups, weights)
        self.left[info.layer] = self.left.get(info.layer, len(self.windows)) - 1
        if self.left[info.layer]:
            return
        weight, share = self.sums.pop(info.layer) / len(self.context.places)
        for head in self.whole.heads(info.layer):
            beyond = weight[head] - share[head]
            best = int(beyond.argmax())
            if beyond[best] >= LEAST:  # not where scores overflow either
                sink = {"sink_token": self._named(best), "sink_weight": float(weight[head, best])}
                self.sinks.append({"layer": info.layer, "head": head, **sink})

    def _named(self, group: int) -> str:
        if group == len(self.tokens):
            return LOGIT
        return FIRST if self.tokens[group] < 0 else self.reader.token(int(self.tokens[group]))

    def _tell(self, layer: int, query: int, weights: Tensor) -> None:
        """The heaviest keys of one query in every head; equal ones as they stand. ``weights``: (H,
        T), or with a sink logit after them (H, T + 1).
        """
        places = self.context.places
        window, at, number = (
            int(places.windows[query]),
            int(places.positions[query]),
            self.told[query],
        )
        asks = self.reader.around(window, at)
        order = weights.argsort(dim=1, descending=True, stable=True)[:, :KEYS]
        for head in self.whole.heads(layer):
            for rank, key in enumerate(order[head].tolist()):
                weight, logit = float(weights[head, key]), key == self.groups.shape[1]
                if weight > 0:
                    text = ("", LOGIT, "") if logit else self.reader.around(window, key)
                    distance = at + 1 if logit else at - key  # as if it stood before the first
                    self.rows.append((layer, head, number, *asks, rank, distance, *text, weight))


@dataclass(frozen=True)
class _Reader:
    """Tokens of windows as text."""

    tokenizer: Any
    ids: npt.NDArray[np.int32]
    real: npt.NDArray[np.bool_]  # all but padding

    known: dict[tuple[int, int], tuple[str, str, str]] = field(default_factory=dict)

    def token(self, number: int) -> str:
        return _cut(self._decoded([number]))

    def around(self, window: int, position: int) -> tuple[str, str, str]:
        """The text before a token, the token, and the text after it; heads often look at the same
        ones.
        """
        if (window, position) not in self.known:
            self.known[window, position] = self._around(window, position)
        return self.known[window, position]

    def _around(self, window: int, position: int) -> tuple[str, str, str]:
        start, end = max(0, position - AROUND), position + 1 + AROUND
        before, after = (
            self.ids[window, part][self.real[window, part]]
            for part in (slice(start, position), slice(position + 1, end))
        )
        return (
            _cut(self._decoded(before.tolist()), end=True),
            self.token(int(self.ids[window, position])),
            _cut(self._decoded(after.tolist())),
        )

    def _decoded(self, ids: list[int]) -> str:
        return (
            str(
                self.tokenizer.decode(
                    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )
            if ids
            else ""
        )


def _cut(text: str, *, end: bool = False) -> str:
    """A text, or the beginning or the end of a long one."""
    if len(text) <= LONGEST:
        return text
    return f"…{text[-LONGEST:]}" if end else f"{text[:LONGEST]}…"
