"""One text on which each query keeps keys of its own (``--when every``): encoders, classifiers, and
language models if asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esscher.compress.choose import UNIFORM
from esscher.compress.metrics import Outcome
from esscher.compress.session import Source
from esscher.compress.text import Cell, Horizons
from esscher.hf.call import AttentionCall
from esscher.hf.capture import accepted, forward
from esscher.hf.interventions import Kept, check_acted, intervene, rule_for_every_query
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Rule


class PerQueryText:
    """The full model on one text, then with each rule and size; each query keeps its own keys."""

    def __init__(self, source: Source, window: int) -> None:
        self.source, self.window, self.ids = source, window, source.ids(window)
        self.horizons = Horizons()
        # by layer: pairs of queries and keys that its heads see, most keys that a query sees
        self.pairs: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.full = self._outcome(forward(source.loaded.model, {"input_ids": self.ids}, self._see))

    def _see(self, call: AttentionCall) -> None:
        self.horizons.see(call)
        seen = _visible(call).sum(-1)
        self.pairs[call.layer], self.most[call.layer] = int(seen.sum()), int(seen.max())

    @property
    def queries(self) -> int:
        """Of all heads and layers."""
        shapes = self.source.loaded.shapes
        return sum(shapes[layer].heads for layer in self.pairs) * len(self.ids[0])

    @property
    def keys(self) -> float:
        """Keys that a query sees, on average over queries, heads and layers."""
        return sum(self.pairs.values()) / self.queries

    def size(self, share: float, layer: int) -> int:
        """Keys that a query keeps in a layer: a share of the most that a query there sees."""
        return max(1, round(share * self.most[layer]))

    def cells(self) -> Iterator[Cell]:
        """Every rule and size; chance is drawn several times."""
        spec = self.source.spec
        for text, rule in self.source.rules.items():
            by_chance = any(isinstance(part, Chance) for part in rule.parts)
            for share in spec.shares:
                least = {k: _surely(rule, self.most[k]) for k in self.source.layers}
                if all(self.size(share, layer) > least[layer] for layer in least):
                    for draw in range(spec.draws if by_chance else 1):
                        yield Cell(text, UNIFORM, share, draw)

    def run(self, cell: Cell) -> tuple[float, Outcome]:
        """Keys kept on average by a query, and what the model says."""
        source, model = self.source, self.source.loaded.model
        seed = source.spec.unit_seed(
            {"draw": cell.draw, "window": self.window, "rule": cell.rule, "size": cell.keep}
        )
        dropping = set(source.layers)
        decide = rule_for_every_query(
            source.rules[cell.rule],
            lambda layer, kv, keys: self.size(cell.keep, layer) if layer in dropping else None,
            torch.Generator().manual_seed(seed),
            outputs=source.outputs,
        )
        kept = dict(self.pairs)

        def own(call: AttentionCall) -> Kept | None:
            found = decide(call)
            if found is not None:
                kept[call.layer] = int((found.allowed & _visible(call)).sum())
            return found

        with torch.no_grad(), intervene(model, own):
            result = model(input_ids=self.ids, **accepted(model, use_cache=False))
        outcome, left = self._outcome(result), sum(kept.values())
        check_acted(left < sum(self.pairs.values()), self.full.rows, outcome.rows)
        return left / self.queries, outcome

    def _outcome(self, result: Any) -> Outcome:
        task = self.source.task
        if task == "encoder":
            return Outcome(task, result.last_hidden_state[0].mean(0)[None])
        if task == "classifier":
            return Outcome(task, result.logits)
        last = self.source.decode
        targets = self.ids[0, 1:][-last:][1:] if last > 1 else None
        return Outcome(task, result.logits[0, -last:], targets)


def _surely(rule: Rule, keys: int) -> float:
    """Keys that the numbers of a rule keep, of a query that sees so many."""
    one = torch.ones(keys, 1, dtype=torch.float64)
    return float(rule.held(Context(one[:1], one, one, 1.0, torch.tensor([keys - 1]))).sum())


def _visible(call: AttentionCall) -> Tensor:
    """(batch, heads, m, keys)"""
    queries = torch.arange(call.query.shape[2], device=call.query.device)
    return call.visible(queries).expand(-1, call.heads, -1, -1)
