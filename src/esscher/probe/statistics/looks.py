"""Which tokens a head looks at: the heaviest keys of a few queries, and the token of most weight.

Weights are the softmax over all keys that a query sees in its own window, whatever the pool is. The
sink of a head is the token t that gets most beyond its share of the keys,

    w(t) = mean over queries of  sum_j p_j [key j is t],        sink = argmax_t  w(t) - u(t),

where p is the softmax of a query and u is w with equal weights on all keys that the query sees: a
token that is merely common is no sink, and where nothing gets LEAST beyond its share there is none.
What stands first in a window is a token of its own, unless it is a special one: heads rest on first
tokens whatever these are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import pad

from esscher.probe.session import Indices, Session, tokenizer_of
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import HEAD, LAYER, HeadEnd, Numbers, Result, Statistic
from esscher.probe.window import WindowQueries
from esscher.runs.columns import Column

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
