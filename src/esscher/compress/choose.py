"""What is kept of a cache: decided at the end of a prefill on all keys, for every layer and
key-value head.

A size is a share of what the cache holds: the keys that the query at the last place sees, of a
sliding-window layer at most its window. Uniform is the same share for every head.

One set of keys serves all later queries, so that a rule decides for the query at the last place of
the prefill; the queries it observes are the last ones. Where heads share a total, one cut over the
scores of all heads says how much each keeps, or errors that a probe measured do.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esscher.attention import horizon_of_covariances
from esscher.compress.session import DownstreamContext
from esscher.compress.spec import CUT, UNIFORM
from esscher.hf.call import AttentionCall
from esscher.hf.interventions import Kept
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Inclusion, Placed, Ranked, Rule
from esscher.probe.budget import ALIKE, rule_budget, split_weights
from esscher.runs import load_run

Place = tuple[int, int]  # layer and key-value head
# by rule and size, the share of its cache that each head keeps
Budgets = Mapping[str, Mapping[float, Mapping[Place, float]]]


@dataclass(frozen=True)
class Cell:
    """One way to keep keys: a rule, the split between heads, the size asked for, and which draw
    where chance decides.
    """

    rule: str
    split: str
    size: float
    draw: int


@dataclass(frozen=True)
class Choice:
    """Keys of the prefill that are kept, by layer: (kv_heads, P) bool, and what they count where
    that is not 1.
    """

    kept: Mapping[int, Tensor]
    weight: Mapping[int, Tensor] = field(default_factory=dict)

    def left(self, captured: AttentionCall, drops: Tensor | None) -> Kept:
        """What the queries of a decode have left; ``drops``: the query heads that lose anything,
        all when left out.
        """
        kept, (batch, heads, _, _) = self.kept[captured.layer], captured.query.shape
        later = captured.key.shape[2] - kept.shape[1]
        shared = heads // captured.kv_heads
        allowed = torch.nn.functional.pad(kept, (0, later), value=True).repeat_interleave(shared, 0)
        weight = self.weight.get(captured.layer)
        if weight is not None:
            weight = torch.nn.functional.pad(weight, (0, later), value=1.0).repeat_interleave(
                shared, 0
            )
        if drops is not None:
            allowed = allowed | ~drops[:, None].to(allowed.device)
            weight = (
                None
                if weight is None
                else torch.where(drops[:, None].to(weight.device), weight, 1.0)
            )
        rows = allowed[None, :, None].expand(batch, -1, -1, -1)
        return Kept(
            rows, None if weight is None else weight[None, :, None].expand(batch, -1, -1, -1)
        )


def once(rule: Rule, context: Context, n: int) -> Inclusion:
    """Probabilities and weights (1, N) of one set of n keys for whoever comes later: those of the
    query at the last place, chosen by all of the context.
    """
    last = torch.tensor([int(context.positions.argmax())], device=context.positions.device)
    return rule.include(replace(context.take(last), choosers=context), n)


@dataclass(frozen=True)
class _Scores:
    """Of one key-value head under a rule: keys that are kept anyway (N,), and the order (N,) of the
    others, -inf of keys that the cache does not hold.
    """

    held: Tensor
    order: Tensor | None


class Plan:
    """Sees a prefill layer by layer; then knows what every cell keeps."""

    def __init__(self, source: DownstreamContext, budgets: Budgets) -> None:
        self.source, self.budgets = source, budgets
        self.rules = {text: parse(text) for text in source.spec.compared}
        for text, rule in self.rules.items():
            if any(part.per_query for part in rule.parts):
                raise ValueError(
                    f"rules: {text} chooses keys for each query, and a cache is chosen once; use"
                    " --when every"
                )
        self.contexts: dict[Place, Context] = {}

    def see(self, captured: AttentionCall) -> None:
        """The sink of the prefill: what the rules see of each key-value head."""
        tokens = captured.key.shape[2]
        rows = torch.arange(
            max(0, tokens - self.source.spec.observe), tokens, device=captured.query.device
        )
        shared = captured.heads // captured.kv_heads
        output = self.source.outputs[captured.layer]
        for kv in range(captured.kv_heads):
            made = captured.context(kv, rows)
            self.contexts[captured.layer, kv] = replace(
                made, output=output[kv * shared : (kv + 1) * shared]
            )

    def held(self, place: Place) -> int:
        """Keys that a head's cache holds: those that the query at the last place sees."""
        return int(_last(self.contexts[place]).sum())

    @property
    def keys(self) -> float:
        """The same on average over key-value heads."""
        return sum(map(self.held, self.contexts)) / len(self.contexts)

    def kept(self, choice: Choice) -> float:
        """Keys that a key-value head keeps on average. Of a cache that some query head reads whole
        all keys are kept.
        """
        total = 0
        for layer, kv in self.contexts:
            own, drops = choice.kept[layer][kv], self.source.drops(layer)
            shared = self.source.loaded.shapes[layer].heads // len(choice.kept[layer])
            whole = drops is not None and not bool(drops[kv * shared : (kv + 1) * shared].all())
            total += self.held((layer, kv)) if whole else int(own.sum())
        return total / len(self.contexts)

    def size(self, cell: Cell, place: Place) -> int:
        """Keys that a head keeps under a cell without a cut: its share of its own cache."""
        share = self.source.spec.share(cell.size, self.keys)
        if cell.split not in (UNIFORM, CUT):
            share = self.budgets[cell.rule][cell.size][place]
        return max(1, round(share * self.held(place)))

    def cells(self) -> Iterator[Cell]:
        """Every way to keep keys that is asked for, but sizes that leave a rule nothing to choose
        in some cache; chance is drawn several times, one draw a cell.
        """
        spec = self.source.spec
        for text, rule in self.rules.items():
            by_chance = any(isinstance(part, Chance) for part in rule.parts)
            for size in spec.sizes:
                uniform = Cell(text, UNIFORM, size, 0)
                if any(
                    self.size(uniform, place) <= rule.least(context)
                    for place, context in self.contexts.items()
                ):
                    continue
                for split in spec.splits:
                    if self._has(text, rule, split, size):
                        yield from (
                            Cell(text, split, size, draw)
                            for draw in range(spec.draws if by_chance else 1)
                        )

    def _has(self, text: str, rule: Rule, split: str, size: float) -> bool:
        if split == CUT:  # places have no height that heads could be compared by
            ranked = isinstance(rule.free, Ranked) and not isinstance(rule.free, Placed)
            return ranked and not any(isinstance(part, Chance) for part in rule.parts)
        return split == UNIFORM or size in self.budgets.get(text, {})

    def choose(self, cell: Cell) -> Choice:
        """What a cell keeps; the same for the same cell and text."""
        if cell.split == CUT:
            return self._cut(self.rules[cell.rule], cell.size)
        kept: dict[Place, Tensor] = {}
        weight: dict[Place, Tensor] = {}
        for place, context in self.contexts.items():
            found = self.inclusion(cell, place)
            state = torch.Generator().manual_seed(
                self.source.spec.unit_seed({"draw": cell.draw, "place": list(place)})
            )
            drawn = torch.rand(context.keys, generator=state, dtype=torch.float64).to(
                found.probability.device
            )
            kept[place] = drawn < found.probability[0]
            if found.weight is not None:
                weight[place] = found.weight[0]
        return Choice(_by_layer(kept), _by_layer(weight))

    def inclusion(self, cell: Cell, place: Place) -> Inclusion:
        """Chances and weights (1, N) of the keys of one key-value head, of a cell without a cut."""
        rule, context = self.rules[cell.rule], self.contexts[place]
        n = max(rule.least(context), self.size(cell, place))
        return once(rule, context, min(self.held(place), n))

    def _cut(self, rule: Rule, size: float) -> Choice:
        """One threshold on the scores of all heads, so that they keep a share of all caches."""
        scores = {place: _scores(rule, context) for place, context in self.contexts.items()}
        kept = {place: one.held.clone() for place, one in scores.items()}
        total = round(self.source.spec.share(size, self.keys) * self.keys * len(scores))
        free = total - sum(int(held.sum()) for held in kept.values())
        heights = torch.cat(
            [
                torch.where(one.held, -torch.inf, one.order)
                for one in scores.values()
                if one.order is not None
            ]
        )
        first = torch.zeros_like(heights, dtype=torch.bool)
        first[heights.topk(max(0, min(free, int((heights > -torch.inf).sum())))).indices] = True
        for place, own in zip(
            scores, torch.split(first, [one.held.numel() for one in scores.values()]), strict=True
        ):
            kept[place] |= own
        return Choice(_by_layer(kept))


def _scores(rule: Rule, context: Context) -> _Scores:
    assert isinstance(rule.free, Ranked)
    order = rule.free.order(context)
    last = int(context.positions.argmax())
    own = (order if order.ndim == 1 else order[last]).double()
    return _Scores(rule.held(context)[last], own.masked_fill(~_last(context), -torch.inf))


def _last(context: Context) -> Tensor:
    """(N,): keys that the query at the last place sees."""
    return context.visible[int(context.positions.argmax())]


def _by_layer(places: Mapping[Place, Tensor]) -> dict[int, Tensor]:
    layers = sorted({layer for layer, _ in places})
    return {
        layer: torch.stack([places[place] for place in sorted(places) if place[0] == layer])
        for layer in layers
    }


# ---- How many keys each head keeps by the errors that a probe measured: the split of least
# predicted error at the same total.


@functools.lru_cache(maxsize=1)
def budgets_of(source: DownstreamContext) -> Budgets:
    """By rule and size, the share of its cache that every key-value head keeps, for rules that the
    probe measured.
    """
    spec = source.spec
    if spec.budget is None:
        return {}
    run = load_run(Path(spec.budget))
    if "frontier" not in run.tables:
        raise ValueError(
            f"budget: {spec.budget} has no errors of keep rules; probe with --pool sequence and"
            " --rules"
        )
    frontier = run.table("frontier")
    weights, _ = split_weights(run, spec.weights)
    found: dict[str, dict[float, dict[Place, float]]] = {}
    caches = frontier.groupby(["layer", "kv_head"])["keys"].mean()
    wanted = {
        (layer, kv)
        for layer, shape in enumerate(source.loaded.shapes)
        for kv in range(shape.kv_heads)
    }
    if missing := sorted(wanted - set(caches.index)):
        raise ValueError(
            f"budget: {spec.budget} has no errors of key-value head"
            f" {missing[0][0]}.{missing[0][1]}; probe all layers"
        )
    for rule in spec.compared:
        if rule not in set(frontier["rule"]):
            continue
        for size in spec.sizes:
            total = round(spec.share(size, source.held) * float(caches.sum()))
            try:
                rows = rule_budget(frontier, rule, total=total, weights=weights).caches
            except ValueError:  # fewer keys than the probe's smallest sizes
                continue
            own = {
                (int(row.layer), int(row.kv_head)): float(row.ratio) for row in rows.itertuples()
            }
            found.setdefault(rule, {})[size] = own
    if not found:
        known = ", ".join(dict.fromkeys(frontier["rule"]))
        raise ValueError(
            f"budget: {spec.budget} measured {known}; expected one of {', '.join(spec.compared)}"
        )
    return found


def budget_hashes(source: DownstreamContext) -> dict[str, str]:
    """What the budget depends on."""
    if source.spec.budget is None:
        return {}
    budget, weights = Path(source.spec.budget), source.spec.weights
    files = {"budget": budget / "frontier.parquet"}
    if weights != ALIKE:
        files["weights"] = (
            budget / "heads.parquet" if weights is None else Path(weights) / "sensitivity.parquet"
        )
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


# ---- The horizon of a text: known of the full model, before any key is dropped.


class Horizons:
    """A sink: the two-sided horizon of every head on one text, scale ||Sigma_k^{1/2}
    Sigma_q^{1/2}||.
    """

    def __init__(self) -> None:
        self.found: list[float] = []

    def see(self, captured: AttentionCall) -> None:
        shared = captured.heads // captured.kv_heads
        keys = [_covariance(head) for head in captured.key[0]]
        for i, head in enumerate(captured.query[0]):
            self.found.append(
                horizon_of_covariances(keys[i // shared], _covariance(head), captured.scale)
            )

    @property
    def median(self) -> float:
        """Over all heads."""
        return float(np.median(self.found))


def _covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.double().T, correction=0)
