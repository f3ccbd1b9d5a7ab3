"""Inputs held fixed: the error of every layer under a keep rule, predicted from its queries, keys
and values, and measured.

Measured: the model runs with keys dropped in every layer at once, but each layer hands on what it
gives on all keys, so that the next one has the full model's inputs. Predicted: heads whose keys are
drawn together (they read one cache) err together, by the integral of two heads; others share their
mean errors alone. A rule without chance errs for sure: then both are one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.convergence.integral.inclusion import inclusion_error
from esscher.convergence.integral.pairs import pair_error
from esscher.intervals import Interval, mean_interval
from esscher.keep import parse
from esscher.keep.rule import Chance
from esscher.models.downstream.cache import Cell
from esscher.models.downstream.every import EveryText
from esscher.models.downstream.text import Text
from esscher.models.huggingface.capture import AttentionCall

__all__ = ["agreement_of", "fixed_rows"]

QUERIES = 2  # of each layer, evenly spread
DRAWS = 60
ROUNDING = 1e-3  # relative, of errors in float32 without chance


@dataclass(frozen=True)
class _Layer:
    """Some queries of one layer: of each (m of them) the heads' scores (H, N), values (H, N, v),
    chances and weights (H, N).

    ``groups``: heads of one number have their keys drawn together. ``output``: W_O, (H, v, d).
    """

    rows: Tensor
    scores: Tensor
    values: Tensor
    chance: Tensor
    weight: Tensor
    groups: Sequence[int]
    output: Tensor
    limit: Tensor  # (H, m, v)

    def squares(self) -> tuple[float, float]:
        """E |sum_h W_h e_h|^2 over the queries, and the sum over heads of E |W_h e_h|^2."""
        found = [self._query(i) for i in range(len(self.rows))]
        return sum(total for total, _ in found), sum(alone for _, alone in found)

    def _query(self, i: int) -> tuple[float, float]:
        heads = range(len(self.groups))
        bias = torch.stack([self._bias(h, i) for h in heads])
        among = {
            (h, h): self._pair(h, h, i) if self._drawn(h, i) else float(bias[h].square().sum())
            for h in heads
        }
        for h in heads:
            for g in range(h):
                together = self.groups[g] == self.groups[h] and self._drawn(h, i)
                among[g, h] = 2 * (
                    self._pair(g, h, i) if together else float((bias[g] * bias[h]).sum())
                )
        return sum(among.values()), sum(among[h, h] for h in heads)

    def _drawn(self, h: int, i: int) -> bool:
        """Whether chance has a say."""
        p = self.chance[h, i]
        return bool(((p > 0) & (p < 1)).any())

    def _bias(self, h: int, i: int) -> Tensor:
        chance, weight = self.chance[h, i][None], self.weight[h, i][None]
        return (
            inclusion_error(self.scores[h, i][None], self.values[h], chance, weight)
            .bias[0]
            .double()
            @ self.output[h]
        )

    def _pair(self, g: int, h: int, i: int) -> float:
        between = self.output[g] @ self.output[h].T
        centred = (self.values[g] - self.limit[g, i]) @ between, self.values[h] - self.limit[h, i]
        return pair_error(
            (self.scores[g, i], self.scores[h, i]), centred, self.chance[h, i], self.weight[h, i]
        )

    @property
    def size(self) -> float:
        """|sum_h W_h limit|^2 over the queries."""
        return float(torch.bmm(self.limit, self.output).sum(0).square().sum())


def fixed_rows(text: Text | EveryText, rule: str) -> Iterator[dict[str, Any]]:
    """A row for each layer that drops keys: its error predicted and measured, and what of it heads
    have in common.
    """
    cell = next((cell for cell in text.cells() if cell.rule == rule), None)
    if cell is None:
        return
    layers = dict(_layers(text, cell))
    chance = any(isinstance(part, Chance) for part in parse(rule).parts)
    measured = np.stack(
        [
            _measured(text, replace(cell, draw=draw), layers)
            for draw in range(DRAWS if chance else 1)
        ]
    )
    for i, (number, layer) in enumerate(layers.items()):
        total, alone = (value / layer.size for value in layer.squares())
        draws = measured[:, i] / layer.size  # (draws, 2)
        mean, low, high = _interval(draws[:, 0], least=0.0)
        row = {
            "rule": rule,
            "size": cell.size,
            "layer": number,
            "draws": len(draws),
            "predicted": math.sqrt(max(total, 0.0)),
        }
        row |= {"measured": math.sqrt(mean), "low": math.sqrt(low), "high": math.sqrt(high)}
        common = _interval(draws[:, 0] - draws[:, 1])
        yield row | {"common": total - alone} | dict(zip(COMMON, common, strict=True))


COMMON = ("common_measured", "common_low", "common_high")


def _interval(values: npt.NDArray[np.float64], least: float = -math.inf) -> Interval:
    """Mean over draws with its interval; of a rule without chance, which is drawn once, no
    width.
    """
    return mean_interval(values, least=least) if len(values) > 1 else (float(values[0]),) * 3


def agreement_of(fixed: pd.DataFrame) -> pd.DataFrame:
    """By rule: of how many layers the prediction lies in the interval, or differs by rounding; the
    same of what is common.
    """
    rows = []
    for (rule, size), own in fixed.groupby(["rule", "size"], sort=False):
        slack = ROUNDING * own["measured"]
        inside = (own["predicted"] >= own["low"] - slack) & (
            own["predicted"] <= own["high"] + slack
        )
        slack = 2 * slack * own["measured"]
        common = (own["common"] >= own["common_low"] - slack) & (
            own["common"] <= own["common_high"] + slack
        )
        apart = float(
            ((own["predicted"] - own["measured"]).abs() / own["measured"].clip(lower=1e-12)).max()
        )
        row = {
            "rule": rule,
            "size": size,
            "layers": len(own),
            "inside": int(inside.sum()),
            "common": int(common.sum()),
        }
        rows.append(row | {"apart": apart, "draws": int(own["draws"].iloc[0])})
    return pd.DataFrame(rows)


def _measured(
    text: Text | EveryText, cell: Cell, layers: Mapping[int, _Layer]
) -> npt.NDArray[np.float64]:
    """(layers, 2): the two sums of squares of one draw, of every layer at the full model's
    inputs.
    """
    found = {}

    def hand_on(captured: AttentionCall, out: Tensor) -> Tensor:
        layer = layers.get(captured.layer)
        full = text.limits[captured.layer]
        if layer is not None:
            error = torch.bmm((out[0] - full)[:, layer.rows].double(), layer.output)
            found[captured.layer] = float(error.sum(0).square().sum()), float(error.square().sum())
        return full[None].to(out.dtype)

    text.under(cell, after=hand_on)
    return np.array([found[number] for number in layers])


def _layers(text: Text | EveryText, cell: Cell) -> Iterator[tuple[int, _Layer]]:
    for call in text.calls:
        if call.layer not in text.source.layers:
            continue
        shared = call.shared
        rows = (
            torch.linspace(0, call.query.shape[2] - 1, QUERIES + 2)
            .round()
            .long()[1:-1]
            .to(call.query.device)
        )
        parts, drops = [], text.source.drops(call.layer)
        for kv in range(call.kv_heads):
            context = call.context(kv, rows).whole
            decided, keys = text.inclusion(cell, call, kv), context.keys
            chance, weight = (
                _of_rows(one, shared, rows, keys) for one in (decided.probability, decided.weight)
            )
            seen = context.visible.view(shared, len(rows), keys)
            chance = chance.expand(shared, len(rows), keys) * seen
            weight = (
                torch.ones_like(chance)
                if weight is None
                else weight.expand(shared, len(rows), keys)
            )
            if drops is not None:
                own = drops[kv * shared : (kv + 1) * shared, None, None].to(chance.device)
                chance, weight = (
                    torch.where(own, chance, seen.double()),
                    torch.where(own, weight, 1.0),
                )
            scores, values = context.scores.view(shared, len(rows), keys), context.v.double()
            parts.append((scores, values.expand(shared, -1, -1), chance, weight))
        scores, values, chance, weight = (torch.cat(part) for part in zip(*parts, strict=True))
        groups = [h // shared if text.once else h for h in range(call.heads)]
        limit = torch.einsum("hmn,hnv->hmv", scores.softmax(2), values)
        output = text.source.outputs[call.layer].double()
        yield call.layer, _Layer(rows, scores, values, chance, weight, groups, output, limit)


def _of_rows(found: Tensor | None, shared: int, rows: Tensor, keys: int) -> Any:
    """(shared, m, N) of what was decided for all queries of the heads that share keys; of one
    decision for all (1, 1, N). A sink logit is always kept.
    """
    if found is None:
        return None
    found = torch.nn.functional.pad(found, (0, keys - found.shape[1]), value=1.0)
    return found[None] if len(found) == 1 else found.view(shared, -1, found.shape[1])[:, rows]
