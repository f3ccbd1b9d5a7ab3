"""One text of a language model: prefilled once on all keys, continued once in full, then on what
each cell keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from esscher.keep.rule import Inclusion
from esscher.models.downstream.cache import Budgets, Cell, Choice, Plan
from esscher.models.downstream.context import DownstreamContext
from esscher.models.downstream.horizon import Horizons
from esscher.models.downstream.readings import Outcome
from esscher.models.huggingface.capture import AttentionCall
from esscher.models.huggingface.interventions import Kept, check_acted, prefill, with_kept

__all__ = ["LayerErrors", "Text"]

QUANTILE = 0.95


@dataclass(frozen=True)
class LayerErrors:
    """Of one layer under a choice, relative to what its attention adds to the stream, root mean
    square over positions.

    ``fixed``: at the full model's inputs; ``independent``: the same if the errors of its heads were
    uncorrelated, the root of their summed squares; ``inputs``: of what enters its attention when
    all layers before it kept few keys.
    """

    layer: int
    fixed: float
    independent: float
    inputs: float


class Text:
    """``ids`` (1, P + D): the first ``tokens`` are the prefill, the others the continuation, all on
    one choice of keys.
    """

    once: ClassVar[bool] = True

    def __init__(
        self, source: DownstreamContext, ids: Tensor, tokens: int, budgets: Budgets
    ) -> None:
        self.source, self.ids, self.tokens = source, ids, tokens
        self.plan, self.horizons = Plan(source, budgets), Horizons()
        self.held = prefill(source.loaded.model, ids[:, :tokens], self._see)
        self.calls: list[AttentionCall] = []
        result, _ = self.decode(lambda captured: None, sink=self.calls.append, hidden=True)
        self.full = self.outcome(result)
        self.limits = {call.layer: call.output()[0] for call in self.calls}  # (heads, D, width)
        self.added = {layer: self.behind(layer, output) for layer, output in self.limits.items()}

    def _see(self, captured: AttentionCall) -> None:
        self.plan.see(captured)
        self.horizons.see(captured)

    def decode(self, decide: Any, **watch: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            return self.held.decode(self.ids[:, self.tokens :], decide, **watch)

    def outcome(self, result: Any, known: dict[str, float] | None = None) -> Outcome:
        return Outcome("language", result.logits[0], self.ids[0, self.tokens + 1 :], known or {})

    def left(self, choice: Choice, captured: AttentionCall) -> Kept | None:
        """What a layer's queries have left under a choice; None where the layer drops nothing."""
        drops = self.source.drops(captured.layer)
        return None if drops is not None and not bool(drops.any()) else choice.left(captured, drops)

    def cells(self) -> Iterator[Cell]:
        return self.plan.cells()

    def inclusion(self, cell: Cell, call: AttentionCall, kv_head: int) -> Inclusion:
        """What a cell keeps of a key-value head, as chances and weights (1, N): once for all
        queries of the continuation.
        """
        found = self.plan.inclusion(cell, (call.layer, kv_head))
        later = call.key.shape[2] - found.probability.shape[1]
        chance, weight = (
            None if one is None else torch.nn.functional.pad(one, (0, later), value=1.0)
            for one in (found.probability, found.weight)
        )
        assert chance is not None
        return Inclusion(chance, weight)

    def under(self, cell: Cell, **watch: Any) -> None:
        """The continuation on what a cell keeps, for who watches."""
        choice = self.plan.choose(cell)
        self.decode(lambda captured: self.left(choice, captured), **watch)

    def run(self, cell: Cell) -> tuple[Choice, Outcome, list[LayerErrors]]:
        """The continuation on what a cell keeps."""
        choice, entered = self.plan.choose(cell), {}

        def see(captured: AttentionCall) -> None:
            entered[captured.layer] = captured.hidden

        result, acted = self.decode(
            lambda captured: self.left(choice, captured), sink=see, hidden=True
        )
        layers, worst = self.layer_errors(choice, entered)
        kept = self.outcome(result, {"q95": worst})
        check_acted(acted, self.full.rows, kept.rows)
        return choice, kept, layers

    def head_errors(self, choice: Choice, call: AttentionCall) -> Tensor:
        """(heads, D, width): output on the keys kept minus that on all, at the full model's
        inputs.
        """
        kept = self.left(choice, call)
        if kept is None:
            return torch.zeros_like(self.limits[call.layer])
        return with_kept(call, kept)[0].output()[0] - self.limits[call.layer]

    def behind(self, layer: int, rows: Tensor) -> Tensor:
        """(heads, D, d): what outputs of heads (heads, D, width), or their errors, add to the
        stream.
        """
        return torch.bmm(rows, self.source.outputs[layer].to(rows.dtype))

    def layer_errors(
        self, choice: Choice, entered: Mapping[int, Tensor | None]
    ) -> tuple[list[LayerErrors], float]:
        """Of every layer; and the relative error that QUANTILE of all queries and heads stay
        below.
        """
        found, relative = [], []
        for call in self.calls:
            error, output = (
                self.behind(call.layer, self.head_errors(choice, call)),
                self.added[call.layer],
            )
            size = float(output.sum(0).square().sum()) or 1.0
            own = error.square().sum(-1)
            heads = (
                output.square().sum(-1).mean(1, keepdim=True).clamp_min(torch.finfo(own.dtype).tiny)
            )
            relative.append((own / heads).sqrt().flatten())
            before, after = call.hidden, entered.get(call.layer)
            moved = 0.0
            if before is not None and after is not None:
                moved = float((after - before).square().sum() / before.square().sum()) ** 0.5
            fixed = (float(error.sum(0).square().sum()) / size) ** 0.5
            found.append(LayerErrors(call.layer, fixed, (float(own.sum()) / size) ** 0.5, moved))
        return found, float(torch.cat(relative).double().quantile(QUANTILE))
