"""Which keys of a prefilled prompt are kept: a rule, a size and a split between heads.

A size is a share of what the cache holds, summed over layers and key-value heads: a sliding-window
layer holds at most its window. Splits: ``uniform`` (every head keeps the same share of its own
cache), ``cut`` (one threshold on the scores of all heads, for scores in one unit), ``layer`` (one
threshold in each layer, and each head is sure of a fifth of its equal share: AdaKV), ``pages``
(blocks of 16 neighbouring keys, the same for all heads of a layer, one threshold on the blocks:
what paged caches can evict), ``exact`` (for each head the exact loss in nats of its n best keys is
computed at all reference queries; each next key goes to the head where it saves most).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from esscher.compress.prompt import Place, Prompt, Scores, by_layer
from esscher.compress.spec import parted
from esscher.hf.call import AttentionCall
from esscher.hf.interventions import Kept
from esscher.keep import Recent, Sinks, parse
from esscher.keep.context import Context
from esscher.keep.ranked import Observed
from esscher.keep.rule import Chance, Inclusion, Ranked, Rule

UNIFORM, CUT, LAYER, PAGES, EXACT = SPLITS = ("uniform", "cut", "layer", "pages", "exact")
STEPS = 16  # sizes at which the exact error of a head is known
PAGE = 16
SAFE = 0.2  # of its equal share, which AdaKV leaves to each head


@dataclass(frozen=True)
class Choice:
    """Keys of the prompt that are kept, by layer: (kv_heads, P) bool; ``weight``: how much each
    counts, where that is not 1; ``values`` (kv_heads, P, width): refitted ones, and ``losses``: the
    predicted loss with them, by kind of queries.
    """

    kept: Mapping[int, Tensor]
    weight: Mapping[int, Tensor] = field(default_factory=dict)
    values: Mapping[int, Tensor] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)

    def sparing(self, last: int) -> Choice:
        """The same choice where the last keys of the prompt are all kept, with weight 1."""
        if not last:
            return self
        kept = {layer: rows.clone() for layer, rows in self.kept.items()}
        weight = {layer: rows.clone() for layer, rows in self.weight.items()}
        for rows in (*kept.values(), *weight.values()):
            rows[:, -last:] = 1
        return replace(self, kept=kept, weight=weight)

    def left(self, call: AttentionCall, drops: Tensor | None = None) -> Kept:
        """What the later queries of a layer see; ``drops``: the query heads that lose keys, by
        default all. If only some do, the others need the original values, so refitted values are
        not used.
        """
        later = call.key.shape[2] - self.kept[call.layer].shape[1]
        values = self.values.get(call.layer) if drops is None else None

        def of_heads(rows: Tensor, fill: bool | float) -> Tensor:
            wide = torch.nn.functional.pad(rows, (0, later), value=fill)
            wide = wide.repeat_interleave(call.shared, 0)
            if drops is not None:
                wide = torch.where(drops[:, None].to(wide.device), wide, fill)
            return wide[None, :, None].expand(len(call.query), -1, -1, -1)

        weight = self.weight.get(call.layer)
        allowed = of_heads(self.kept[call.layer], True).bool()
        return Kept(
            allowed,
            None if weight is None else of_heads(weight, 1.0),
            None if values is None else values[None].expand(len(call.query), -1, -1, -1),
        )


def cache_rule(text: str | Rule, sinks: int, recent: int) -> Rule:
    """The rule for a cache: a ranking by scores alone also keeps the first and the last keys."""
    rule = parse(parted(text)[0] if isinstance(text, str) else text)
    lone = len(rule.parts) == 1 and isinstance(rule.free, Ranked | Chance)
    if not lone or isinstance(rule.free, Sinks | Recent):
        return rule
    parts: list[Rule] = [Sinks(sinks)] * (sinks > 0) + [Recent(recent)] * (recent > 0)
    for part in parts:
        rule = part | rule
    return rule


def default_split(rule: Rule) -> str:
    """``cut`` if scores are in nats, ``exact`` for other scores by queries, otherwise
    ``uniform``.
    """
    if not splits_of(rule) or not isinstance(rule.free, Observed):
        return UNIFORM
    return CUT if rule.free.in_nats else EXACT


def splits_of(rule: Rule) -> bool:
    """Whether heads can be compared by the scores of a rule: a ranking, not by position alone."""
    ranked = isinstance(rule.free, Ranked) and not isinstance(rule.free, Sinks | Recent)
    return ranked and not any(isinstance(part, Chance) for part in rule.parts)


def choose(
    prompt: Prompt,
    rule: Rule,
    share: float,
    split: str,
    generator: torch.Generator | None = None,
) -> Choice:
    """The keys that a rule keeps of a prompt, a share of the whole cache."""
    if split == UNIFORM:
        return _uniform(prompt, rule, dict.fromkeys(prompt.contexts, share), generator)
    scores, sure = prompt.scores(rule), prompt.sure(rule)
    if split == EXACT:
        return Choice(_by_exact_error(prompt, scores, sure, share))
    return Choice(SPLIT[split](scores, sure, share))


def inclusion(prompt: Prompt, rule: Rule, place: Place, share: float) -> Inclusion:
    """Probabilities and weights (1, P) of the keys of one head that keeps a share of its cache."""
    context, held = prompt.contexts[place], int(prompt.held_by(place).sum())
    n = min(held, max(rule.least(context), 1, round(share * held)))
    text = rule.free.text() if rule.free is not None else ""
    if (text, place) in prompt.replayed:
        scores, sure = prompt.replayed[text, place].double()[None], prompt.sure(rule)
        scores = scores.masked_fill(~prompt.held_by(place), -torch.inf)
        kept = _first(scores, sure[place[0]][place[1]][None], torch.tensor([n]))
        return Inclusion(kept.double())
    return once(rule, context, n)


def once(rule: Rule, context: Context, n: int) -> Inclusion:
    """Probabilities and weights (1, N) of n keys that are chosen once, by all queries of the
    context, and kept for all later queries.
    """
    last = torch.tensor([int(context.positions.argmax())], device=context.positions.device)
    return rule.include(replace(context.take(last), choosers=context), n)


def _uniform(
    prompt: Prompt,
    rule: Rule,
    shares: Mapping[Place, float],
    generator: torch.Generator | None,
) -> Choice:
    kept: dict[Place, Tensor] = {}
    weight: dict[Place, Tensor] = {}
    for place in prompt.contexts:
        found = inclusion(prompt, rule, place, shares[place])
        drawn = torch.rand(found.probability.shape[1], generator=generator, dtype=torch.float64)
        kept[place] = drawn.to(found.probability.device) < found.probability[0]
        if found.weight is not None:
            weight[place] = found.weight[0]
    return Choice(by_layer(kept), by_layer(weight))


def _first(scores: Tensor, sure: Tensor, count: Tensor) -> Tensor:
    """Of each row the sure keys and those of largest score, ``count`` in all."""
    order = scores.masked_fill(sure, torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return ((rank < count.to(rank.device)[:, None]) & (scores > -torch.inf)) | sure


def _cut(scores: Scores, sure: Mapping[int, Tensor], share: float) -> dict[int, Tensor]:
    """One threshold for all heads of all layers."""
    shapes = {layer: rows.shape for layer, rows in scores.items()}
    flat = torch.cat([rows.flatten() for rows in scores.values()])
    always = torch.cat([sure[layer].flatten() for layer in scores])
    total = round(share * int((flat > -torch.inf).sum()))
    kept = _first(flat[None], always[None], torch.tensor([total]))[0]
    parts = torch.split(kept, [shape.numel() for shape in shapes.values()])
    return {layer: part.view(shapes[layer]) for layer, part in zip(scores, parts, strict=True)}


def _by_layer(scores: Scores, sure: Mapping[int, Tensor], share: float) -> dict[int, Tensor]:
    """One threshold for the heads of a layer; each is sure of SAFE of its equal share (AdaKV)."""
    found = {}
    for layer, rows in scores.items():
        own = (rows > -torch.inf).sum(1) * share
        safe = _first(rows, sure[layer], (SAFE * own).round().long())
        found[layer] = _cut({layer: rows}, {layer: safe}, share)[layer]
    return found


def _pages(scores: Scores, sure: Mapping[int, Tensor], share: float) -> dict[int, Tensor]:
    """Whole blocks of keys for all heads of a layer; the score of a block is the sum of its
    keys', over heads too.
    """
    blocks, always = {}, {}
    for layer, rows in scores.items():
        whole = torch.nn.functional.pad(rows, (0, -rows.shape[1] % PAGE), value=-torch.inf)
        pages = whole.view(len(rows), -1, PAGE)
        there = (pages > -torch.inf).any(2).any(0)
        total = pages.clamp_min(0).sum((0, 2))
        blocks[layer] = total.masked_fill(~there, -torch.inf)[None]
        held = torch.nn.functional.pad(sure[layer], (0, -rows.shape[1] % PAGE))
        always[layer] = held.view(len(rows), -1, PAGE).any(2).any(0)[None]
    kept = _cut(blocks, always, share)
    return {
        layer: kept[layer].repeat_interleave(PAGE, 1)[:, : rows.shape[1]] & (rows > -torch.inf)
        for layer, rows in scores.items()
    }


def _by_exact_error(
    prompt: Prompt, scores: Scores, sure: Mapping[int, Tensor], share: float
) -> dict[int, Tensor]:
    """Sizes of heads by greedy steps along the convex hulls of their exact errors in nats."""
    steps, sizes = [], {}
    known: dict[Place, list[tuple[Tensor, Tensor]]] = {}
    for kind in prompt.references:
        for call in prompt.calls(kind):
            found = _costs(prompt, call, scores, sure, prompt.spared[kind])
            for kv, pair in enumerate(found):
                known.setdefault((call.layer, kv), []).append(pair)
    for place, pieces in known.items():
        n = pieces[0][0]
        cost = torch.stack([cost for _, cost in pieces]).sum(0).cummin(0).values
        sizes[place], i = int(n[0]), 0
        while i < len(n) - 1:
            gain = (cost[i] - cost[i + 1 :]) / (n[i + 1 :] - n[i])
            j = i + 1 + int(gain.argmax())
            steps.append((float(gain.max()), int(n[j] - n[i]), place))
            i = j
    total = sum(int((rows > -torch.inf).sum()) for rows in scores.values())
    left = round(share * total) - sum(sizes.values())
    for _, more, place in sorted(steps, key=lambda step: -step[0]):
        taken = max(0, min(more, left))
        sizes[place] += taken
        left -= taken
    return {
        layer: _first(
            rows, sure[layer], torch.tensor([sizes[layer, kv] for kv in range(len(rows))])
        )
        for layer, rows in scores.items()
    }


def _costs(
    prompt: Prompt, call: AttentionCall, scores: Scores, sure: Mapping[int, Tensor], spared: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each key-value head of a layer sizes (S,) and the nats that its first keys cost, (S,);
    the last ``spared`` keys of the prompt stay for the queries of this call.
    """
    assert prompt.metric is not None
    weights = call.weights()[0]
    values = call.value[0].to(weights.dtype)
    for kv in range(call.kv_heads):
        rows, always = scores[call.layer][kv], sure[call.layer][kv]
        own = weights[kv * call.shared : (kv + 1) * call.shared]  # (heads, m, N)
        v = values[kv] - values[kv].mean(0)
        order = rows.masked_fill(always, torch.inf).argsort(descending=True)
        held = int((rows > -torch.inf).sum())
        least = max(1, int(always.sum()))
        n = torch.logspace(math.log10(least), math.log10(max(held, least)), STEPS).round().long()
        n = torch.unique(n.clamp(max=held))
        full, stay = own @ v, len(rows) - spared
        later = own[..., stay:]
        # what is in the softmax and in no cache: later keys, a sink logit
        mass = later.sum(-1) + (1 - own.sum(-1)).clamp_min(0)
        total, first, cost = later @ v[stay:], 0, []
        metric = prompt.metric.of_layer[call.layer][kv * call.shared : (kv + 1) * call.shared]
        for size in n.tolist():
            some = order[first:size]
            some = some[some < stay]
            mass = mass + own[..., some].sum(-1)
            total, first = total + own[..., some] @ v[some], size
            error = total / mass.clamp_min(1e-30)[..., None] - full
            nats = (error @ metric.to(error) * error).sum(-1).mean(1).sum() / 2
            cost.append(nats)
        yield n, torch.stack(cost)


SPLIT = {CUT: _cut, LAYER: _by_layer, PAGES: _pages}
