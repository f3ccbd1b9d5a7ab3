"""One text of a language model: prefilled once on all keys, continued once in full, then on what
each cell keeps.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from esscher.compress.choose import Budgets, Cell, Choice, Horizons, Plan
from esscher.compress.metrics import Outcome
from esscher.compress.session import DownstreamContext
from esscher.compress.spec import UNIFORM
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward, without_cache
from esscher.hf.interventions import (
    Acted,
    Kept,
    check_acted,
    intervene,
    prefill,
    rule_for_every_query,
    with_kept,
)
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Inclusion, Rule

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


# ---- One text whose every query keeps a few keys: encoders, classifiers, and language models
# that are asked so.


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


# ---- A fact planted in real text: a sentence at some depth of a prefill, asked for again where
# the text ends.

PLACES = (
    "Lisbon",
    "Oslo",
    "Cairo",
    "Lima",
    "Dublin",
    "Prague",
    "Havana",
    "Warsaw",
    "Athens",
    "Geneva",
)
FACT = " The secret code of {place} is {number}."
QUESTION = "\n\nThe secret code of {place} is"
DIGITS = 5


class Needle:
    """``ids`` (1, T): text with the fact in it, the question and the answer; the prefill has
    ``tokens`` of them.
    """

    def __init__(self, ids: Tensor, tokens: int, answer: Tensor) -> None:
        self.ids, self.tokens, self.answer = ids, tokens, answer

    def found(self, outcome: Outcome) -> float:
        """1 where every token of the answer is the likeliest, those before it given; else 0."""
        said = outcome.rows[-len(self.answer) - 1 : -1].argmax(-1)
        return float(bool((said == self.answer).all()))


def plant(source: DownstreamContext, number: int) -> Needle:
    """The needle of this number: its text, depth, place and code follow from the seed."""
    state = random.Random(source.spec.unit_seed({"needle": number}))
    named = {
        "place": PLACES[number % len(PLACES)],
        "number": "".join(str(state.randrange(10)) for _ in range(DIGITS)),
    }
    written = [text.format(**named) for text in (FACT, QUESTION, QUESTION + " {number}")]
    fact, asked, full = (_tokens(source.loaded.tokenizer, text) for text in written)
    answer = full[len(asked) :]
    if not answer or full[: len(asked)] != asked or len(fact) >= source.prefill // 2:
        raise ValueError(
            f"needles: a fact of {len(fact)} tokens does not fit a prefill of {source.prefill}; use"
            " a longer --window"
        )
    text = source.ids(int(source.texts[number % len(source.texts)]))[0].tolist()
    depth = (number + 0.5) / max(1, source.spec.needles)
    place = 1 + int(depth * (source.prefill - len(fact) - 1))
    ids = [*text[:place], *fact, *text[place : source.prefill - len(fact)], *full]
    return Needle(
        torch.tensor([ids], device=source.loaded.device), source.prefill, torch.tensor(answer)
    )


def _tokens(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found
