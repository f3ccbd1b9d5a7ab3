"""One text whose every query keeps a few keys: encoders, classifiers, and language models that are asked so."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Rule
from esscher.models.downstream.cache import Cell
from esscher.models.downstream.context import DownstreamContext
from esscher.models.downstream.horizon import Horizons
from esscher.models.downstream.readings import Outcome
from esscher.models.downstream.spec import UNIFORM
from esscher.models.huggingface.capture import Captured, forward, without_cache
from esscher.models.huggingface.interventions import Kept, check_acted, intervene, rule_for_every_query

__all__ = ["EveryText"]


class EveryText:
    """The full model on one text, and then under each cell."""

    def __init__(self, source: DownstreamContext, window: int) -> None:
        self.source, self.window, self.ids, self.horizons = source, window, source.ids(window), Horizons()
        self.full = self._outcome(forward(source.loaded.model, {"input_ids": self.ids}, self.horizons.see))

    def cells(self) -> Iterator[Cell]:
        """Every rule and size; chance is drawn several times, one draw a cell."""
        spec = self.source.spec
        for text in spec.compared:
            rule = parse(text)
            by_chance = any(isinstance(part, Chance) for part in rule.parts)
            for size in spec.sizes:
                if spec.keys_of(size, self.ids.shape[1]) <= self._held(rule):
                    continue
                yield from (Cell(text, UNIFORM, size, draw) for draw in range(spec.draws if by_chance else 1))

    def _held(self, rule: Rule) -> float:
        """Keys that a rule's numbers alone keep, of the query at the last place."""
        one = torch.ones(self.ids.shape[1], 1, dtype=torch.float64)
        last = torch.tensor([len(one) - 1])
        return float(rule.held(Context(one[:1], one, one, 1.0, last)).sum())

    def run(self, cell: Cell) -> tuple[float, Outcome]:
        """Keys kept on average by a query, and what the model says."""
        source, model = self.source, self.source.loaded.model
        n = source.spec.keys_of(cell.size, self.ids.shape[1])
        seed = source.spec.unit_seed({"draw": cell.draw, "window": self.window, "rule": cell.rule, "size": cell.size})
        drawn = torch.Generator().manual_seed(seed)
        decide = rule_for_every_query(parse(cell.rule), self._sizes(n), drawn, outputs=source.outputs)
        kept: list[float] = []

        def own(captured: Captured) -> Kept | None:
            found, drops = decide(captured), source.drops(captured.layer)
            if found is None:
                return None
            allowed = found.allowed if drops is None else found.allowed | ~drops[:, None, None].to(found.allowed.device)
            kept.append(float(found.allowed.sum(-1).double().mean()))
            return Kept(allowed, found.weight)

        with torch.no_grad(), intervene(model, own) as acted:
            outcome = self._outcome(model(input_ids=self.ids, **without_cache(model)))
        check_acted(acted, self.full.rows, outcome.rows)
        return sum(kept) / max(1, len(kept)), outcome

    def _sizes(self, n: int) -> Any:
        dropping = set(self.source.layers)
        return lambda layer, kv_head, keys: n if layer in dropping else None

    def _outcome(self, result: Any) -> Outcome:
        task = self.source.task
        if task == "encoder":
            found = embedding(result)
            same = {"neighbour": float(self._nearest(found) == self._nearest(None))} if len(self.source.texts) > 1 else {}
            return Outcome(task, found[None], known=same)
        if task == "classifier":
            return Outcome(task, result.logits)
        last = self.source.decode
        return Outcome(task, result.logits[0, -last:], self.ids[0, 1:][-last:][1:] if last > 1 else None)

    def _nearest(self, found: Tensor | None) -> int:
        """The other text whose full embedding is nearest; of this text's own full embedding where none is given."""
        all_of_them = embeddings(self.source)
        place = self.source.texts.tolist().index(self.window)
        own = all_of_them[place] if found is None else found
        cosine = torch.nn.functional.cosine_similarity(own[None], all_of_them)
        cosine[place] = -torch.inf
        return int(cosine.argmax())


def embedding(result: Any) -> Tensor:
    """(d,): the mean of the last hidden states."""
    found: Tensor = result.last_hidden_state[0].mean(0)
    return found


@functools.lru_cache(maxsize=1)
def embeddings(source: DownstreamContext) -> Tensor:
    """(texts, d): of all texts, by the full model."""
    model = source.loaded.model
    with torch.no_grad():
        return torch.stack([embedding(model(input_ids=source.ids(window))) for window in source.texts.tolist()])
