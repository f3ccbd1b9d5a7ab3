"""A prompt after its prefill, and how every eviction rule scores its keys.

Rules read queries of three kinds, which stand for those of a future that is unknown:

- last: the last queries of the prompt. They know how the text goes on.
- replay: the model is asked to repeat the prompt and sees it once more. These queries look up every
  part of the prompt, as later questions may. They go through the model piece by piece over the
  cache, so that memory does not grow with the square of the prompt. Every piece stands right behind
  the prompt, as the text that goes on will: short pieces score keys better than one long replay,
  whose later queries look at the replay itself.
- moved: the prompt's own queries, every piece of them turned to the positions right behind the
  prompt. They are of text as it comes, there are many, and they cost no pass through the model.

A rule that reads all of them scores a key by the mean of its scores by each kind, with WEIGHTS.
Keys that stand among the last queries have no score by these: for the last queries they count as
always kept, as neighbours of a decoded token are. Otherwise the budget would go to them, and later
queries have other neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esscher.hf.call import AttentionCall
from esscher.hf.gradients import FisherMetric, drawn_gradients, fisher_metric, output_slopes
from esscher.hf.interventions import Kept, Prefilled, prefill, with_kept
from esscher.hf.loading import positions
from esscher.hf.rotation import moved, rotations
from esscher.keep import Context
from esscher.keep.ranked import PIECE, Observed
from esscher.keep.rule import PAIRS, Ranked, Rule

Place = tuple[int, int]  # layer and key-value head
Scores = dict[int, Float[Tensor, "kv_heads keys"]]  # by layer; -inf: the cache does not hold it
Found = dict[tuple[str, Place], tuple[Context, Tensor]]  # by rule: queries seen last, joined scores

INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"
LEAST_PIECE = 8
GRADIENT_TOKENS = 256  # last tokens of a prompt that the Fisher metric comes from
GRADIENT_DRAWS = 2
REFERENCE = 64  # last queries by which a loss is predicted before anything is decoded
REPLAYED = 256  # replayed queries for the same, and for refits; as many moved ones
WEIGHTS = {"last": 1, "replay": 1, "moved": 2}  # chosen on the first halves of two texts
MOVED = 4  # every so many queries of the prompt are moved beside a replay, all without one
REFERRED = 16  # most pieces of a replay that these queries are taken from
TOGETHER = 1024  # replayed tokens that go through the model at once


@dataclass(frozen=True)
class Settings:
    """``observe``: last queries that rules read. ``sinks``, ``recent``: keys that are always kept
    where a rule does not name its own. ``replay``: share of the prompt that is replayed, in pieces
    spread evenly over it: less time, and later questions find less. 0: rules that read queries of
    all kinds do without.
    """

    observe: int = 64
    sinks: int = 4
    recent: int = 16
    replay: float = 1.0
    draws: int = GRADIENT_DRAWS
    seed: int = 0


class Prompt:
    """``ids`` (1, P) prefilled; ``outputs``: W_O of each layer, as far as it is known;
    ``tokenizer``: for the instruction of a replay, which is left out without one.
    """

    def __init__(
        self,
        model: Any,
        ids: Int[Tensor, "1 tokens"],
        rules: Sequence[Rule],
        outputs: Mapping[int, Float[Tensor, "heads width d"]],
        tokenizer: Any = None,
        settings: Settings | None = None,
        *,
        metric: bool = True,
        sink: Any = None,
    ) -> None:
        self.model, self.ids, self.outputs, self.tokenizer = model, ids, outputs, tokenizer
        self.settings = settings or Settings()
        self.contexts: dict[Place, Context] = {}
        self.replayed: dict[tuple[str, Place], Tensor] = {}
        # sample queries that predict the loss of a choice, by layer (``calls`` joins the prompt's
        # keys to replayed ones); how many of the prompt's last keys are always kept for them
        self.references: dict[str, dict[int, AttentionCall]] = {kind: {} for kind in WEIGHTS}
        self.spared = dict.fromkeys(WEIGHTS, 0)
        self.spared["last"] = min(self.settings.observe, ids.shape[1] // 2)
        self._sink = sink
        self._sure: dict[Rule, dict[int, Tensor]] = {}
        self._shared: dict[int, int] = {}  # by layer: heads that read one key-value head
        wanted = [
            part
            for rule in rules
            for part in rule.parts
            if isinstance(part, Observed) and part.queries != "last"
        ]
        every = {part.text(): part for part in wanted if part.queries == "all"}
        # queries to be moved, and where they stand
        self._queries: dict[int, list[Tensor]] | None = {} if every or metric else None
        step = MOVED if self.settings.replay else 1
        self._positions = torch.arange(0, self.keys, step, device=ids.device)
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.metric: FisherMetric | None = None
        tokens = ids.shape[1]
        tail = min(GRADIENT_TOKENS, tokens - 1) if metric else 0
        self.held: Prefilled = prefill(model, ids[:, : tokens - tail], self._see_whole)
        if tail:
            draws = drawn_gradients(
                self.held,
                ids[:, tokens - tail :],
                self.settings.draws,
                generator,
                extend=True,
                sink=self._see_whole,
            )
            self.metric = fisher_metric(draws)
            for (layer, kv), context in self.contexts.items():
                self.contexts[layer, kv] = replace(context, metric=self._metric(layer, kv))
        scores = self._moved(every) if self._queries is not None else {}
        self._queries = None
        if self.settings.replay:
            sizes = sorted({part.piece for part in wanted} or {PIECE} if wanted or metric else ())
            for size in sizes:
                own = {part.text(): part for part in wanted if part.piece == size}
                self._replay(size, own, refer=size == sizes[0])
        elif others := [part.text() for part in wanted if part.queries == "replay"]:
            raise ValueError(
                f"replay: {others[0]} scores keys by a replay; give a share of the prompt above 0,"
                " or a rule that does without, such as fisher or snapkv"
            )
        for text, part in every.items():
            for place in self.contexts:
                key = text, place
                known = {"replay": self.replayed.get(key), "moved": scores.get(key)}
                self.replayed[key] = self._joined(part, place, known)

    @property
    def keys(self) -> int:
        return int(self.ids.shape[1])

    def _see_whole(self, call: AttentionCall) -> None:
        """Keep what rules read of the last queries; a later piece of the prompt replaces it."""
        if self._sink is not None:
            self._sink(call)
        tokens, self._shared[call.layer] = call.query.shape[2], call.shared
        if self._queries is not None:
            at = self._positions - (call.key.shape[2] - tokens)
            at = at[(at >= 0) & (at < tokens)]
            self._queries.setdefault(call.layer, []).append(call.query[0, :, at].detach())
        rows = torch.arange(
            max(0, tokens - self.settings.observe), tokens, device=call.query.device
        )
        for kv in range(call.kv_heads):
            own = slice(kv * call.shared, (kv + 1) * call.shared)
            self.contexts[call.layer, kv] = replace(
                call.context(kv, rows), output=self._output(call.layer, own)
            )
        last = call.take(rows[-min(REFERENCE, self.spared["last"]) :])
        # of a sliding window earlier queries see keys that the cache no longer holds
        held = torch.stack([self.held_by((call.layer, kv)) for kv in range(call.kv_heads)])
        held = held.repeat_interleave(call.shared, 0)[None, :, None]
        self.references["last"][call.layer] = with_kept(last, Kept(held))

    def calls(self, kind: str, layer: int | None = None) -> Iterator[AttentionCall]:
        """The reference queries of one kind, of all layers or of one, with all their keys; those of
        the prompt are held once.
        """
        for at, call in self.references[kind].items():
            if layer is not None and at != layer:
                continue
            if kind == "replay":
                held = self.references["last"][at]
                key, value = (
                    torch.cat([one[:, :, : self.keys], own], 2)
                    for one, own in ((held.key, call.key), (held.value, call.value))
                )
                call = replace(call, key=key, value=value)
            yield call

    def _output(self, layer: int, own: slice) -> Tensor | None:
        return self.outputs[layer][own] if layer in self.outputs else None

    def _metric(self, layer: int, kv: int) -> Tensor | None:
        if self.metric is None:
            return None
        shared = self._shared[layer]
        return self.metric.of_layer[layer][kv * shared : (kv + 1) * shared]

    def held_by(self, place: Place) -> Tensor:
        """(P,): keys that the cache of a head holds: those that the last query sees."""
        context = self.contexts[place]
        return context.visible[int(context.positions.argmax())]

    # ---- moved queries

    def _moved(self, parts: Mapping[str, Observed]) -> dict[tuple[str, Place], Tensor]:
        """Scores of all keys by the prompt's queries, moved behind it, and some of these queries
        for reference; nothing where the model does not turn queries.
        """
        assert self._queries is not None
        # every piece of the prompt goes right behind it
        steps = -(-(self.keys - self._positions) // PIECE)
        turns = rotations(self.model, PIECE, int(steps[0]) + 1)
        found: dict[tuple[str, Place], Tensor] = {}
        for layer, turn in turns.items():
            query = moved(torch.cat(self._queries.pop(layer), 1), steps, turn)[None]
            held = torch.stack(
                [self.held_by((layer, kv)) for kv in range(len(query[0]) // self._shared[layer])]
            )
            mask = held.repeat_interleave(self._shared[layer], 0)[None, :, None]
            call = replace(
                self.references["last"][layer],
                query=query,
                mask=None if bool(held.all()) else mask.expand(-1, -1, len(steps), -1),
                causal=False,
                bias=None,
            )
            count = min(REPLAYED, len(steps))
            some = torch.linspace(0, len(steps) - 1, count, device=query.device)
            self.references["moved"][layer] = call.take(some.round().long())
            sums = Found()
            if parts:
                self._score(call, parts, sums, behind=True)
            for (text, place), (rows, total) in sums.items():
                score = parts[text].collect(rows, total)
                found[text, place] = parts[text].finish(score, len(steps))
        return found

    def _joined(self, part: Observed, place: Place, known: Mapping[str, Tensor | None]) -> Tensor:
        """The weighted mean of a key's scores by all kinds of queries that there are."""
        context, observed = self.contexts[place], self.spared["last"]
        earlier = torch.arange(self.keys - observed, device=context.k.device)
        last = part.finish(
            part.add(context.restrict(earlier)), len(torch.unique(context.positions))
        )
        total = torch.nn.functional.pad(WEIGHTS["last"] * last, (0, observed))
        weight = torch.full_like(total, WEIGHTS["last"])
        weight[len(earlier) :] = 0
        for kind, score in known.items():
            if score is not None:
                total += WEIGHTS[kind] * score
                weight += WEIGHTS[kind]
        return total / weight.clamp_min(1)

    # ---- replay

    def _pieces(self, size: int, needed: bool) -> tuple[list[int], list[Tensor]]:
        """Token ids of the instruction, and (1, m) of the pieces of a replay: ``size`` tokens of
        the prompt, or as many as the model's positions allow.
        """
        asked = _instruction(self.tokenizer)
        most = positions(self.model)
        room = len(asked) + size if most is None else min(len(asked) + size, most - self.keys)
        if room < len(asked) + LEAST_PIECE:
            asked = []
        if room < LEAST_PIECE and not needed:
            return [], []
        if room < LEAST_PIECE:
            raise ValueError(
                f"inputs: a replay needs room behind the prompt of {self.keys} tokens, and"
                f" {type(self.model).__name__} takes {most} positions; use a shorter prompt, or a"
                " rule without a replay, such as snapkv or restkv"
            )
        pieces = torch.split(self.ids, room - len(asked), 1)[:: round(1 / self.settings.replay)]
        if not needed:  # for reference queries alone
            pieces = pieces[:: math.ceil(len(pieces) / 4)]
        return asked, list(pieces)

    def _replay(self, size: int, parts: Mapping[str, Observed], *, refer: bool) -> None:
        """Score keys by replayed pieces of this size; ``refer``: keep some of the queries.

        The instruction goes through the model once, then pieces of one length side by side.
        Attention of a replay is spelled out: its softmax weights give the outputs and the scores.
        """
        asked, pieces = self._pieces(size, bool(parts))
        every = math.ceil(max(1, len(pieces)) / REFERRED)
        totals: dict[tuple[str, Place], Tensor] = {}
        need = {name for part in parts.values() for name in part.needs}
        by_outputs = {text: part for text, part in parts.items() if "slope" not in part.needs}
        by_slopes = {text: part for text, part in parts.items() if text not in by_outputs}
        calls = self.references["last"]
        # other caches hold what keys are made of (deepseek_v3)
        together = all(
            layer.keys.shape == calls[i].key.shape for i, layer in enumerate(self.held.cache.layers)
        )

        def add(found: Found) -> None:
            for key, (rows, total) in found.items():
                part = parts[key[0]]
                totals[key] = part.join(totals.get(key), part.collect(rows, total))

        def read(ids: Tensor, referred: Sequence[int] = ()) -> None:
            def attend(call: AttentionCall) -> Tensor:
                outputs, found = [], Found()
                for place, one in enumerate(self._apart(call)):
                    if place in referred:
                        self._refer(one, math.ceil(REPLAYED * every / len(pieces)))
                    outputs.append(self._score(one, by_outputs, found))
                add(found)
                return torch.stack(outputs)

            watch: dict[str, Any] = {"attend": attend, "hidden": "norm" in need}
            with self.held.beside() if together else contextlib.nullcontext():
                self.held.decode(ids, lambda call: None, logits=False, **watch)

        def read_slopes(ids: Tensor) -> None:
            calls: list[AttentionCall] = []
            slopes = output_slopes(self.held, ids, self.outputs, calls.append)
            for call in calls:
                found = Found()
                self._score(call, by_slopes, found, slopes[call.layer])
                add(found)

        with torch.no_grad(), self.held.restored():
            if asked and pieces:
                lead = torch.tensor([asked], dtype=self.ids.dtype, device=self.ids.device)
                if by_outputs:
                    read(lead)
                if by_slopes:
                    read_slopes(lead)
                self.held.decode(lead, lambda call: None, extend=True, logits=False)
            seen = 0
            for batch in _batches(pieces) if together else pieces:
                if by_outputs or refer:
                    some = [i for i in range(len(batch)) if refer and not (seen + i) % every]
                    read(batch, some)
                for ids in torch.split(batch, 1) if by_slopes else ():
                    read_slopes(ids)
                seen += len(batch)
        count = len(asked) + sum(ids.shape[1] for ids in pieces)
        for (text, place), total in totals.items():
            self.replayed[text, place] = parts[text].finish(total, count)

    def _apart(self, call: AttentionCall) -> Iterator[AttentionCall]:
        """The pieces of a batch one after the other, each behind the keys of the cache; the next
        one overwrites the keys of the last.
        """
        if call.key.shape[2] > call.query.shape[2]:
            yield call
            return
        cached = self.held.cache.layers[call.layer]
        before = cached.keys.shape[2]
        key = torch.cat([cached.keys, call.key[:1]], 2)
        value = torch.cat([cached.values, call.value[:1]], 2)
        for place in range(len(call.query)):
            key[:, :, before:], value[:, :, before:] = call.key[place], call.value[place]
            own = {"query": call.query, "mask": call.mask, "bias": call.bias, "hidden": call.hidden}
            named: dict[str, Any] = {
                name: x if x is None or len(x) == 1 else x[place : place + 1]
                for name, x in own.items()
            }
            yield replace(call, key=key, value=value, **named)

    def _score(
        self,
        call: AttentionCall,
        parts: Mapping[str, Observed],
        found: Found,
        slope: Tensor | None = None,
        *,
        behind: bool = False,
    ) -> Tensor:
        """Join the scores by the queries of one piece to ``found``; its output (heads, m,
        width). ``behind``: all of them stand behind the last key.
        """
        _, heads, queries, _ = call.query.shape
        out = call.query.new_empty(heads, queries, call.value.shape[3])
        columns = torch.arange(self.keys, device=self.ids.device)
        step = max(1, PAIRS // (call.shared * call.key.shape[2]))
        for at in torch.split(torch.arange(queries, device=columns.device), step):
            for kv, context in enumerate(call.contexts(at, behind=behind)):
                own = slice(kv * call.shared, (kv + 1) * call.shared)
                rows = replace(
                    context.restrict(columns),
                    output=self._output(call.layer, own),
                    metric=self._metric(call.layer, kv),
                    slope=None if slope is None else slope[at].repeat(call.shared),
                )
                if call.hidden is not None:
                    length = call.hidden[0, at].float().norm(dim=1)
                    rows = replace(rows, norm=length.repeat(call.shared))
                for text, part in parts.items():
                    key = text, (call.layer, kv)
                    before = found[key][1] if key in found else None
                    found[key] = rows, part.join(before, part.score(rows))
                out[own, at] = rows.attended.view(call.shared, len(at), -1).to(out)
        return out

    def _refer(self, call: AttentionCall, many: int) -> None:
        """Keep so many queries of a piece, with the keys of the piece."""
        last = call.query.shape[2] - 1
        some = torch.linspace(0, last, min(many, last + 1), device=self.ids.device).round().long()
        one = call.take(some)
        seen = one.visible(torch.arange(len(some), device=some.device))
        key, value = (x[:, :, self.keys :].clone() for x in (one.key, one.value))
        one = replace(one, key=key, value=value, mask=seen)
        known = self.references["replay"]
        before = known.get(call.layer)
        known[call.layer] = one if before is None else beside(before, one, self.keys)

    # ---- scores

    def scores(self, rule: Rule) -> Scores:
        """The score of every key under the ranking of a rule, by layer."""
        part = rule.free
        assert isinstance(part, Ranked)
        found = {}
        for place, context in self.contexts.items():
            if (part.text(), place) in self.replayed:
                order = self.replayed[part.text(), place]
            else:
                order = part.order(context)
                if order.ndim == 2:
                    order = order[int(context.positions.argmax())]
            found[place] = order.double().masked_fill(~self.held_by(place), -torch.inf)
        return by_layer(found)

    def sure(self, rule: Rule) -> dict[int, Tensor]:
        """Keys that a rule keeps whatever their score, by layer (kv_heads, P)."""
        if rule not in self._sure:
            found = {}
            for place, context in self.contexts.items():
                last = int(context.positions.argmax())
                found[place] = rule.held(context)[last]
            self._sure[rule] = by_layer(found)
        return self._sure[rule]


def _batches(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """Neighbouring pieces (1, m) of one length, (b, m), at most ``TOGETHER`` tokens at once."""
    for length, same in itertools.groupby(pieces, lambda piece: piece.shape[1]):
        rows = torch.cat(list(same))
        yield from torch.split(rows, max(1, TOGETHER // length))


def beside(a: AttentionCall, b: AttentionCall, shared: int) -> AttentionCall:
    """Both calls as one. The first ``shared`` keys are seen by all queries, and are in masks and
    biases alone; of the other keys, ``key`` and ``value``, each query sees those of its own call.
    """

    def joined(first: Tensor, second: Tensor) -> Tensor:
        first = torch.nn.functional.pad(first, (0, second.shape[3] - shared))
        apart = second.new_zeros(*second.shape[:3], first.shape[3] - second.shape[3])
        return torch.cat(
            [first, torch.cat([second[..., :shared], apart, second[..., shared:]], 3)], 2
        )

    assert a.mask is not None
    assert b.mask is not None
    query, key, value = (
        torch.cat(both, 2) for both in ((a.query, b.query), (a.key, b.key), (a.value, b.value))
    )
    bias = None if a.bias is None or b.bias is None else joined(a.bias, b.bias)
    return replace(a, query=query, key=key, value=value, mask=joined(a.mask, b.mask), bias=bias)


def _instruction(tokenizer: Any) -> list[int]:
    """Token ids of the instruction; none where the tokenizer has no words for it."""
    if tokenizer is None:
        return []
    try:
        return list(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])
    except Exception:  # tokenizers raise nothing narrower
        return []


def by_layer(places: Mapping[Place, Tensor]) -> dict[int, Tensor]:
    """(kv_heads, ...) by layer."""
    layers: dict[int, list[Tensor]] = {}
    for layer, kv in sorted(places):
        layers.setdefault(layer, []).append(places[layer, kv])
    return {layer: torch.stack(rows) for layer, rows in layers.items()}
