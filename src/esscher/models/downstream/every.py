"""One text whose every query keeps a few keys: encoders, classifiers, and language models that are
asked so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Inclusion, Rule
from esscher.models.downstream.cache import Cell
from esscher.models.downstream.context import DownstreamContext
from esscher.models.downstream.horizon import Horizons
from esscher.models.downstream.readings import Outcome
from esscher.models.downstream.spec import UNIFORM
from esscher.models.huggingface.capture import AttentionCall, forward, without_cache
from esscher.models.huggingface.interventions import (
    Acted,
    Kept,
    check_acted,
    intervene,
    rule_for_every_query,
)

__all__ = ["EveryText"]


class EveryText:
    """The full model on one text, and then under each cell, every query with keys of its own."""

    once: ClassVar[bool] = False

    def __init__(self, source: DownstreamContext, window: int) -> None:
        self.source, self.window, self.ids, self.horizons = (
            source,
            window,
            source.ids(window),
            Horizons(),
        )
        # by layer: pairs of queries and keys that its heads see, most keys that a query sees
        self.pairs: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.full = self._outcome(forward(source.loaded.model, {"input_ids": self.ids}, self._see))

    def _see(self, captured: AttentionCall) -> None:
        self.horizons.see(captured)
        seen = _visible(captured).sum(-1)
        self.pairs[captured.layer], self.most[captured.layer] = int(seen.sum()), int(seen.max())

    @property
    def queries(self) -> int:
        """Of all heads and layers."""
        return sum(self.source.loaded.shapes[layer].heads for layer in self.pairs) * len(
            self.ids[0]
        )

    @property
    def keys(self) -> float:
        """Keys that a query sees, on average over queries, heads and layers."""
        return sum(self.pairs.values()) / self.queries

    def size(self, size: float, layer: int) -> int:
        """Keys that a query keeps in a layer: a share of the most that a query there sees."""
        most = list(self.most.values())
        return max(1, round(self.source.spec.share(size, sum(most) / len(most)) * self.most[layer]))

    def cells(self) -> Iterator[Cell]:
        """Every rule and size; chance is drawn several times, one draw a cell."""
        spec = self.source.spec
        for text in spec.compared:
            rule = parse(text)
            by_chance = any(isinstance(part, Chance) for part in rule.parts)
            for size in spec.sizes:
                if any(
                    self.size(size, layer) <= self._held(rule, self.most[layer])
                    for layer in self.source.layers
                ):
                    continue
                yield from (
                    Cell(text, UNIFORM, size, draw)
                    for draw in range(spec.draws if by_chance else 1)
                )

    def _held(self, rule: Rule, keys: int) -> float:
        """Keys that a rule's numbers alone keep, of a query that sees so many."""
        one = torch.ones(keys, 1, dtype=torch.float64)
        last = torch.tensor([len(one) - 1])
        return float(rule.held(Context(one[:1], one, one, 1.0, last)).sum())

    def run(self, cell: Cell) -> tuple[float, Outcome]:
        """Keys kept on average by a query, and what the model says."""
        kept, acted, result = self.under(cell)
        outcome = self._outcome(result)
        check_acted(acted, self.full.rows, outcome.rows)
        return kept, outcome

    def under(self, cell: Cell, **watch: Any) -> tuple[float, Acted, Any]:
        """Keys kept on average by a query, what was done, and what the model returns; ``watch``: as
        of :func:`intervene`.
        """
        source, model = self.source, self.source.loaded.model
        seed = source.spec.unit_seed(
            {"draw": cell.draw, "window": self.window, "rule": cell.rule, "size": cell.size}
        )
        drawn = torch.Generator().manual_seed(seed)
        decide = rule_for_every_query(
            parse(cell.rule), self._sizes(cell.size), drawn, outputs=source.outputs
        )
        kept = dict(self.pairs)

        def own(captured: AttentionCall) -> Kept | None:
            found, drops = decide(captured), source.drops(captured.layer)
            if found is None:
                return None
            allowed = (
                found.allowed
                if drops is None
                else found.allowed | ~drops[:, None, None].to(found.allowed.device)
            )
            kept[captured.layer] = int((allowed & _visible(captured)).sum())
            return Kept(allowed, found.weight)

        with torch.no_grad(), intervene(model, own, **watch) as acted:
            result = model(input_ids=self.ids, **without_cache(model))
        return sum(kept.values()) / self.queries, acted, result

    @functools.cached_property
    def calls(self) -> list[AttentionCall]:
        """Attention of every layer on all keys."""
        found: list[AttentionCall] = []
        forward(self.source.loaded.model, {"input_ids": self.ids}, found.append)
        return found

    @functools.cached_property
    def limits(self) -> dict[int, Tensor]:
        """(heads, T, width) by layer."""
        return {call.layer: call.output()[0] for call in self.calls}

    def inclusion(self, cell: Cell, call: AttentionCall, kv_head: int) -> Inclusion:
        """What every query keeps, as chances and weights; of heads that share keys below each
        other.
        """
        rule, shared = parse(cell.rule), call.heads // call.kv_heads
        rows = torch.arange(call.query.shape[2], device=call.query.device)
        output = self.source.outputs[call.layer][kv_head * shared : (kv_head + 1) * shared]
        context = replace(call.context(kv_head, rows), output=output)
        return rule.include(context, self.size(cell.size, call.layer) if rule.free else None)

    def _sizes(self, size: float) -> Any:
        dropping = set(self.source.layers)
        return lambda layer, kv_head, keys: self.size(size, layer) if layer in dropping else None

    def _outcome(self, result: Any) -> Outcome:
        task = self.source.task
        if task == "encoder":
            found = embedding(result)
            same = (
                {"neighbour": float(self._nearest(found) == self._nearest(None))}
                if len(self.source.texts) > 1
                else {}
            )
            return Outcome(task, found[None], known=same)
        if task == "classifier":
            return Outcome(task, result.logits)
        last = self.source.decode
        return Outcome(
            task, result.logits[0, -last:], self.ids[0, 1:][-last:][1:] if last > 1 else None
        )

    def _nearest(self, found: Tensor | None) -> int:
        """The other text whose full embedding is nearest; of this text's own full embedding where
        none is given.
        """
        all_of_them = embeddings(self.source)
        place = self.source.texts.tolist().index(self.window)
        own = all_of_them[place] if found is None else found
        cosine = torch.nn.functional.cosine_similarity(own[None], all_of_them)
        cosine[place] = -torch.inf
        return int(cosine.argmax())


def _visible(captured: AttentionCall) -> Tensor:
    """(batch, heads, m, keys)"""
    queries = torch.arange(captured.query.shape[2], device=captured.query.device)
    return captured.visible(queries).expand(-1, captured.heads, -1, -1)


def embedding(result: Any) -> Tensor:
    """(d,): the mean of the last hidden states."""
    found: Tensor = result.last_hidden_state[0].mean(0)
    return found


@functools.lru_cache(maxsize=1)
def embeddings(source: DownstreamContext) -> Tensor:
    """(texts, d): of all texts, by the full model."""
    model = source.loaded.model
    with torch.no_grad():
        return torch.stack(
            [embedding(model(input_ids=source.ids(window))) for window in source.texts.tolist()]
        )
