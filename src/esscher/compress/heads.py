"""Heads one at a time, and heads of a layer together.

One at a time: what the predicted error of a head says of the measured change of the next tokens.
Together: behind W_O errors of heads add, and heads that lose the same random keys may err together;
E |sum_h W_h e_h|^2 is exact by the integrals of one head and of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from esscher.compress.choose import UNIFORM, inclusion
from esscher.compress.metrics import Divergence
from esscher.compress.text import Cell, Text
from esscher.errors.doubling import inclusion_error
from esscher.errors.integral import pair_error
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import DRAWS, drawn_gradients
from esscher.hf.interventions import Kept
from esscher.keep.chance import Random

QUERIES = 2  # of a continuation, evenly spread
SHARED, ALONE = "one for all heads", "one for each head"


def head_rows(text: Text, cell: Cell, layers: Iterable[int], seed: int) -> Iterator[dict[str, Any]]:
    """A row for each head of some layers: its error on what a cell keeps, and the divergence when
    it alone is compressed.

    ``relative``, ``plain``: root mean square error of its output, over the output and by itself;
    ``first_order``: of the change of log p of drawn next tokens; ``nats``: by its Fisher metric.
    """
    choice, measure = replace(text.choice(cell), values={}), Divergence()
    generator = torch.Generator().manual_seed(seed)
    ids = text.ids[:, text.tokens :]
    gradients = drawn_gradients(text.prompt.held, ids, DRAWS, generator)
    calls = {call.layer: call for call in text.calls}
    errors, metric = text.errors(choice), text.prompt.metric
    assert metric is not None
    for layer in layers:
        call, error = calls[layer], errors[layer]
        own = torch.stack([draw[layer] for draw in gradients]).to(error.dtype)
        size = _rms(text.limits[layer]).clamp_min(torch.finfo(error.dtype).tiny)
        predicted = {
            "relative": _rms(error) / size,
            "plain": _rms(error),
            "first_order": (own * error).sum((2, 3)).square().mean(0).div(error.shape[1]).sqrt(),
            "nats": metric.nats(layer, error).mean(1),
        }
        for head in range(call.heads):

            def alone(other: AttentionCall, layer: int = layer, head: int = head) -> Kept | None:
                if other.layer != layer:
                    return None
                return choice.left(other, torch.arange(other.heads) == head)

            kl = measure.value(text.full, text.outcome(text.decode(alone)))
            row = {"layer": layer, "head": head, "kv_head": head // call.shared, "kl": kl}
            yield row | {name: float(values[head]) for name, values in predicted.items()}


def _rms(rows: Tensor) -> Tensor:
    """(heads,): root mean square length over the positions."""
    return rows.square().sum(-1).mean(1).sqrt()


def random_cell(text: Text) -> Cell | None:
    """The first cell of random keys that count once."""
    for cell in text.cells():
        free = text.source.rules[cell.rule].free
        if isinstance(free, Random) and not free.reweight:
            return Cell(cell.rule, UNIFORM, cell.keep, 0)
    return None


def together_rows(text: Text, cell: Cell, layers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Rows of some layers under random keys, one set for all heads and one for each: exact error
    relative to what attention adds to the stream, and the error of independent heads.
    """
    calls = {call.layer: call for call in text.calls}
    for layer in layers:
        call = calls[layer]
        chance = inclusion(
            text.prompt, text.source.rules[cell.rule], (layer, 0), cell.keep
        ).probability[0]
        found = [_squares(text, call, int(row), chance) for row in _spread(call)]
        size = sum(one["size"] for one in found)
        for subset in (SHARED, ALONE):
            row = {"rule": cell.rule, "keep": cell.keep, "layer": layer, "subset": subset}
            row["exact"] = math.sqrt(sum(one[subset] for one in found) / size)
            yield row | {"independent": math.sqrt(sum(one["independent"] for one in found) / size)}


def _spread(call: AttentionCall) -> Tensor:
    return torch.linspace(0, call.query.shape[2] - 1, QUERIES + 2).round().long()[1:-1]


def _squares(text: Text, call: AttentionCall, row: int, chance: Tensor) -> dict[str, float]:
    """Mean squared error of the layer at one query, by integrals over pairs of heads."""
    at = torch.tensor([row], device=call.query.device)
    contexts = [call.context(kv, at).whole for kv in range(call.kv_heads)]
    # later keys and a sink logit are always kept
    chance = torch.nn.functional.pad(chance, (0, contexts[0].keys - len(chance)), value=1.0)
    scores = torch.cat([context.scores for context in contexts])
    seen = torch.isfinite(scores).all(0)
    scores, chance = scores[:, seen], chance[seen]
    values = [contexts[h // call.shared].v.double()[seen] for h in range(call.heads)]
    output = text.source.outputs[call.layer].double()
    limit = [scores[h].softmax(0) @ values[h] for h in range(call.heads)]

    def pair(g: int, h: int) -> float:
        between = output[g] @ output[h].T
        centred = (values[g] - limit[g]) @ between, values[h] - limit[h]
        return pair_error((scores[g], scores[h]), centred, chance)

    heads = range(call.heads)
    bias = []
    for h in heads:
        mean = inclusion_error(scores[h][None], values[h], chance[None], None).bias
        bias.append(torch.as_tensor(mean)[0, 0] @ output[h])
    shift = torch.stack(bias)
    alone = sum(pair(h, h) for h in heads)
    across = sum(2 * pair(g, h) for h in heads for g in range(h))
    common = float(shift.sum(0).square().sum() - shift.square().sum())
    total = sum((limit[h] @ output[h] for h in heads), torch.zeros((), dtype=torch.float64))
    return {
        SHARED: alone + across,
        ALONE: alone + common,
        "independent": alone,
        "size": float(total.square().sum()),
    }
