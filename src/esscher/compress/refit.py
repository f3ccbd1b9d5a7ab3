"""Refit the values of kept keys, so that the outputs of a compressed cache come close to the full
ones. Keys stay as they are, and the cache does not grow.

At reference queries (the last ones of the prompt and those of its replay) let W be the softmax
weights on the kept keys, V their values, and T the outputs on all keys less the outputs on the
kept ones. The new values are V + D, where D minimises

    |T - W D|^2 + ridge s |D|^2,    D = W' (W W' + ridge s I)^-1 T,

s the mean of |row of W|^2. Rows of a head are weighed by the trace of its Fisher metric, both kinds
of queries alike. Attention matching (arXiv 2602.16284) fits values by least squares; the ridge
keeps them where few queries look. Fitted to one kind of queries alone, values get worse at others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from esscher.compress.choose import Choice
from esscher.compress.prompt import Prompt
from esscher.hf.call import AttentionCall
from esscher.hf.interventions import with_kept

RIDGE = 1.0

References = Mapping[str, Sequence[AttentionCall]]


def refit(
    prompt: Prompt, choice: Choice, references: References | None = None, ridge: float = RIDGE
) -> Choice:
    """The choice with refitted values; ``references``: calls by kind of queries, those of the
    prompt when left out.
    """
    calls: dict[int, list[tuple[AttentionCall, AttentionCall, float]]] = {}
    for kind, own in (references or prompt.references).items():
        held = choice.sparing(prompt.spared[kind])
        layers = [call.layer for call in own]
        for call in own:
            share = 1 / (call.query.shape[2] * layers.count(call.layer))
            left = with_kept(call, held.left(call))[0]
            calls.setdefault(call.layer, []).append((call, left, share))
    values = {layer: _values(prompt, choice, layer, own, ridge) for layer, own in calls.items()}
    return replace(choice, values=values)


def _values(
    prompt: Prompt,
    choice: Choice,
    layer: int,
    calls: Sequence[tuple[AttentionCall, AttentionCall, float]],
    ridge: float,
) -> Tensor:
    """(kv_heads, P, width): values of a layer, those of kept keys refitted."""
    assert prompt.metric is not None
    size = prompt.metric.of_layer[layer].diagonal(dim1=1, dim2=2).sum(1).double()
    weights, missing = [], []
    for call, left, share in calls:
        factor = (size * share).sqrt()[:, None, None]
        weights.append(factor * left.weights()[0, ..., : prompt.keys].double())
        missing.append(factor * (call.output() - left.output())[0].double())
    per = calls[0][0].shared
    values = calls[0][0].value[0, :, : prompt.keys].clone()
    for kv, rows in enumerate(choice.kept[layer]):
        own, at = slice(kv * per, (kv + 1) * per), rows.nonzero()[:, 0]
        w = torch.cat([x[own][..., at].flatten(0, 1) for x in weights])
        t = torch.cat([x[own].flatten(0, 1) for x in missing])
        gram = w @ w.T
        gram.diagonal().add_(ridge * gram.diagonal().mean())
        values[kv, at] += (w.T @ torch.linalg.solve(gram, t)).to(values.dtype)
    return values
