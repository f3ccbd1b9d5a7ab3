"""Heads of a layer together: behind W_O their errors add, and heads that lose the same keys err
together.

Keys of a prefill are kept at random, one set for all heads of the layer or one for each. What the
layer adds to the stream is off by sum_h W_h e_h; its mean square is the sum over pairs of heads of
E <W_h e_h, W_g e_g>, exact by the integrals of one head and of two, beside the first order and
beside draws at the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from esscher.convergence.integral.inclusion import inclusion_error
from esscher.convergence.integral.pairs import first_order_pair, pair_error
from esscher.intervals import mean_interval
from esscher.keep import parse
from esscher.keep.random import Random
from esscher.models.downstream.cache import Cell
from esscher.models.downstream.text import Text
from esscher.models.huggingface.capture import AttentionCall

__all__ = ["random_rule", "together_rows"]

QUERIES = 2  # of a continuation, evenly spread
DRAWS = 400
SHARED, ALONE = "one for all heads", "one for each head"


@dataclass(frozen=True)
class _Query:
    """One query of all heads: scores (H, N) of the N keys that it sees, values (H, N, v), W_O (H,
    v, d), chances (N,).
    """

    scores: Tensor
    values: Tensor
    output: Tensor
    chance: Tensor

    @cached_property
    def attention(self) -> Tensor:
        return self.scores.softmax(1)

    @cached_property
    def limit(self) -> Tensor:
        """(H, v)"""
        return torch.einsum("hn,hnv->hv", self.attention, self.values)

    @cached_property
    def centred(self) -> Tensor:
        return self.values - self.limit[:, None]

    def pair(self, g: int, h: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Scores and centred values of two heads, in a space where products are those behind
        W_O.
        """
        between = self.output[g] @ self.output[h].T  # (v, v)
        return (self.scores[g], self.scores[h]), (self.centred[g] @ between, self.centred[h])

    def alone(self) -> tuple[float, Tensor]:
        """Summed mean square of the heads, and their mean errors behind W_O, (H, d)."""
        total, bias = 0.0, []
        for h in range(len(self.scores)):
            found = inclusion_error(self.scores[h][None], self.values[h], self.chance[None], None)
            bias.append(found.bias[0].double() @ self.output[h])
            total += pair_error(*self.pair(h, h), self.chance)
        return total, torch.stack(bias)

    def exact(self) -> dict[str, float]:
        """Mean square of the layer's error, for one set of keys and for one set a head; and if
        heads were independent.
        """
        heads = range(len(self.scores))
        alone, bias = self.alone()
        across = sum(
            2 * pair_error(*self.pair(g, h), self.chance) for g in heads for h in heads if g < h
        )
        mean = float(bias.sum(0).square().sum() - bias.square().sum())
        return {SHARED: alone + across, ALONE: alone + mean, "independent": alone}

    def first_order(self) -> dict[str, float]:
        """The same to first order, by which heads with sets of their own are independent."""
        heads = range(len(self.scores))
        pairs = {
            (g, h): first_order_pair(
                (self.attention[g], self.attention[h]), self.pair(g, h)[1], self.chance
            )
            for g in heads
            for h in heads
        }
        return {SHARED: sum(pairs.values()), ALONE: sum(pairs[h, h] for h in heads)}

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """(DRAWS,): squared error of the layer, of each draw."""
        return {
            SHARED: self._squares(generator, shared=True),
            ALONE: self._squares(generator, shared=False),
        }

    def _squares(self, generator: torch.Generator, *, shared: bool) -> Tensor:
        heads, keys = self.scores.shape
        e = torch.exp(self.scores - self.scores.max(1, keepdim=True).values)
        error = self.output.new_zeros(DRAWS, self.output.shape[2])
        drawn = torch.rand(DRAWS, keys, generator=generator, dtype=torch.float64)
        for h in range(heads):
            if not shared:
                drawn = torch.rand(DRAWS, keys, generator=generator, dtype=torch.float64)
            kept = (drawn < self.chance).double() * e[h]
            out = kept @ self.values[h] / kept.sum(1, keepdim=True) - self.limit[h]
            error += out @ self.output[h]
        return error.square().sum(1)


def together_rows(text: Text, layers: Iterable[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of some layers: one set of keys for all heads, and one for each; relative to what
    attention adds to the stream.
    """
    cell = _random_cell(text)
    calls = {call.layer: call for call in text.calls}
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        queries = list(_queries(text, cell, calls[layer]))
        size = sum(
            float((one.limit[:, None] @ one.output).sum((0, 1)).square().sum()) for one in queries
        )
        yield from _rows(cell, layer, queries, size, generator)


def _rows(
    cell: Cell, layer: int, queries: list[_Query], size: float, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    exact, first = [one.exact() for one in queries], [one.first_order() for one in queries]
    drawn = [one.drawn(generator) for one in queries]
    for subset in (SHARED, ALONE):
        squares = torch.stack([one[subset] for one in drawn]).sum(0)
        mean, low, high = mean_interval(squares.numpy(), least=0.0)
        numbers = {
            "exact": sum(one[subset] for one in exact),
            "first_order": sum(one[subset] for one in first),
            "independent": sum(one["independent"] for one in exact),
            "measured": mean,
            "low": low,
            "high": high,
        }
        place = {"rule": cell.rule, "size": cell.size, "layer": layer, "subset": subset}
        yield place | {name: math.sqrt(value / size) for name, value in numbers.items()}


def random_rule(rules: Iterable[str]) -> str | None:
    """The first rule of random keys that count once."""
    parts = ((text, parse(text).free) for text in rules)
    return next(
        (text for text, free in parts if isinstance(free, Random) and not free.reweight), None
    )


def _random_cell(text: Text) -> Cell:
    wanted = random_rule(text.plan.rules)
    found = next((cell for cell in text.plan.cells() if cell.rule == wanted), None)
    if found is None:
        raise ValueError(f"sizes: no size leaves {wanted} a key to choose; give larger sizes")
    return found


def _queries(text: Text, cell: Cell, call: AttentionCall) -> Iterator[_Query]:
    chance = text.plan.inclusion(cell, (call.layer, 0)).probability[0]
    rows = torch.linspace(0, call.query.shape[2] - 1, QUERIES + 2).round().long()[1:-1]
    contexts = [call.context(kv, rows).whole for kv in range(call.kv_heads)]
    keys, shared = contexts[0].keys, call.shared
    # later keys and a sink logit are always kept
    chance = torch.nn.functional.pad(chance, (0, keys - len(chance)), value=1.0)
    for i in range(len(rows)):
        scores = torch.cat(
            [context.scores.view(shared, len(rows), keys)[:, i] for context in contexts]
        )
        seen = torch.isfinite(scores).all(0)
        values = torch.stack([contexts[h // shared].v.double()[seen] for h in range(call.heads)])
        yield _Query(
            scores[:, seen], values, text.source.outputs[call.layer].double(), chance[seen]
        )
