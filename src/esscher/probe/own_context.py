"""A query's real context as its pool: all that the model lets it attend to in its own window.

A window goes through the model once. At each layer its queries meet their keys, of which a few
numbers of each query are left: memory does not grow with the number of windows, and windows are the
units of work. Every query that sees FEWEST keys is used, with its own number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.hf.call import AttentionCall
from esscher.keep import Impact, parse
from esscher.keep.rule import Rule
from esscher.probe.all_keys import AllKeys
from esscher.probe.measure import OVERFLOW, HeadNumbers, Known, LayerState
from esscher.probe.session import FEWEST, Indices, Session
from esscher.probe.statistic import HeadView, OwnWindow
from esscher.probe.statistics.frontier import compare_rules
from esscher.probe.statistics.registry import statistics_of
from esscher.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.probe.window import own_queries, window_gradients
from esscher.runs.progress import advance

FIRST = 0  # the head whose keys are counted where a number is for all


def window_layers(session: Session, window: int, take: Callable[[LayerState], object]) -> None:
    """A forward pass, and one for gradients where rules are compared: ``take`` gets each layer with
    the numbers of the window's queries.
    """
    ruled, gradients = window in session.rule_windows, dict[int, list[float]]()
    rules = [parse(text) for text in session.spec.compared] if ruled else []
    grams = session.grams  # what needs passes of its own comes before the capture
    if ruled:
        gradients = window_gradients(session, window)
    behind = any(isinstance(part, Impact) for rule in rules for part in rule.parts)
    projections = session.projections if behind else {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        layer = captured.layer
        about = gradients.get(layer), projections.get(layer)
        take(_WindowLayer(session, captured, window, rules, *about).state(grams.get(layer)))
        advance((session.layers.index(layer) + 1) / len(session.layers))

    session.run(np.array([window]), session.layers, sink)


class _WindowLayer(OwnWindow):
    """One layer while a window passes it."""

    def __init__(
        self,
        session: Session,
        captured: AttentionCall,
        window: int,
        rules: Sequence[Rule],
        gradients: list[float] | None,
        projection: Tensor | None,
    ) -> None:
        self.session, self.captured, self.number = session, captured, window
        self.rules, self.gradients, self.projection = rules, gradients, projection
        self.info = LayerInfo.of(captured, own=True)
        self.queries = own_queries(session, captured, 0, window)
        self.notes: dict[str, Any] = {}
        self._by_kv_head: dict[int, dict[int, dict[str, Tensor]]] = {}

    # ---- what statistics may ask

    @cached_property
    def _outputs(self) -> Tensor:
        return self.captured.output(self.queries.index)[0].to(self.queries.v.dtype)

    def outputs(self, head: int) -> Tensor:
        return self._outputs[head]

    def gradient(self, head: int) -> float | None:
        return None if self.gradients is None else self.gradients[head]

    def rule_errors(self, head: int) -> dict[str, Tensor] | None:
        """Of the judged queries; heads that share keys are compared together."""
        if not self.rules or not self._enough:
            return None
        kv_head = self.info.kv_head(head)
        if kv_head not in self._by_kv_head:
            asked = self.session.rule_queries(self.number)
            found = compare_rules(
                self._asking, asked, self.info, kv_head, self.rules, self.projection
            )
            self._by_kv_head = {kv_head: found}  # heads come in order
        if head not in self._by_kv_head[kv_head]:
            raise ValueError(OVERFLOW)
        return self._by_kv_head[kv_head][head]

    @cached_property
    def _asking(self) -> Any:
        return self.queries.at(self.session.rule_queries(self.number).positions)

    @cached_property
    def _enough(self) -> bool:
        """Whether the judged queries see enough keys."""
        asked = self.session.rule_queries(self.number)
        seen = self._asking.seen_by(FIRST)[len(asked.choosing) :].sum(1)
        return bool((seen >= FEWEST).all()) and len(seen) > 0

    # ---- the numbers of its heads

    def state(self, gram: Tensor | None) -> LayerState:
        session, layer = self.session, self.info.layer
        rows = Rows.of(self.captured, *session.masks(np.array([self.number])))
        statistics = statistics_of(session.spec)
        in_window = {each.name: each.in_window(self.queries) for each in statistics}
        heads: dict[int, Known] = {}
        for head in session.heads(layer):
            rows_seen = self.queries.seen_by(head).sum(1) >= FEWEST
            if not bool(rows_seen.any()):
                heads[head] = ""
                continue
            try:
                view = self._view(head, rows_seen.nonzero()[:, 0])
                found = {each.name: dict(each.measure(view)) for each in statistics}
            except ValueError as reason:
                heads[head] = str(reason)
                continue
            for name, more in in_window.items():
                found[name] |= {key: x[head] for key, x in more.items()}
            found = {n: {key: x.cpu() for key, x in part.items()} for n, part in found.items()}
            assert view.seen is not None
            assert view.rows is not None
            numbers = torch.from_numpy(session.queries.inside(self.number))[view.rows.cpu()]
            keys = (view.seen & (view.positions >= 0)).sum(1).cpu()
            heads[head] = HeadNumbers(found, numbers, numbers[view.kept], keys)
        return LayerState(self.info, LayerMoments.of(rows), gram, heads)

    def _view(self, head: int, rows: Tensor) -> HeadView:
        """The queries of one head that see enough keys, and all that they see."""
        queries, info = self.queries, self.info
        seen = queries.seen_by(head)[rows]
        some = seen.any(0)
        keys = slice(None) if bool(some.all()) else some.nonzero()[:, 0]
        seen, scores = seen[:, keys], queries.scores[head, rows][:, keys]
        own = info.kv_head(head)
        q, k, v = queries.q[head, rows], queries.k[own, keys], queries.v[own, keys]
        if not bool((torch.isfinite(scores) | ~seen).all()) or not bool(torch.isfinite(v).all()):
            raise ValueError(OVERFLOW)
        bias, sink = queries.bias_of(head), None
        if queries.sinks is not None:
            sink = queries.sinks[head].expand(len(rows))
        bias = None if bias is None else bias[rows][:, keys]
        everything = AllKeys(q, k, v, info.scale, bias, seen, info.softcap, sink)
        positions = torch.arange(queries.k.shape[1], device=k.device)[keys]
        if sink is not None:  # draws take it for one more key, of value 0
            scores = torch.cat([scores, sink[:, None]], 1)
            k, v, seen = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), pad(seen, (0, 1), value=True)
            positions = pad(positions, (0, 1), value=-1)
        numbers = self.session.queries.inside(self.number)[rows.cpu().numpy()]
        kept = np.flatnonzero(np.isin(numbers, self.session.kept_queries(info.layer)))
        return HeadView(
            *(self.session.spec, info, head, self.session.mean_keys(info.layer)),
            *(self.session.most_keys(info.layer), self.notes),
            *(q, k, v, positions, torch.from_numpy(kept), v.double().mean(0)),
            seen=seen,
            given=scores,
            all_keys=everything,
            window=self,
            rows=rows,
        )
