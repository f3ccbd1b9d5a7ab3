"""Refit the values of kept keys, so that the outputs of a compressed cache come close to the full
ones. Keys stay as they are, and the cache does not grow.

At reference queries (the last ones of the prompt and those of its replay) let W be the softmax
weights on the kept keys, V their values, and T the outputs on all keys less the outputs on the
kept ones. The new values are V + D, where D minimises

    |T - W D|^2 + ridge s |D|^2,    D = W' (W W' + ridge s I)^-1 T,

s the mean of |row of W|^2. Rows of a head are weighed by the trace of its Fisher metric, both kinds
of queries alike. Attention matching (arXiv 2602.16284) fits values by least squares; the ridge
keeps them where few queries look. Fitted to one kind of queries alone, values get worse at others.

The predicted loss is by queries that values were not fitted to: each is left out once. With h_i the
diagonal of W (W' W + ridge s I)^-1 W', its error is then (T - W D)_i / (1 - h_i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esscher.compress.choose import Choice, choose
from esscher.compress.prompt import Prompt
from esscher.hf.call import AttentionCall
from esscher.keep.rule import Rule

RIDGE = 0.1


@dataclass(frozen=True)
class _Rows:
    """The reference queries of one kind of the heads that share keys: softmax weights (heads, m, n)
    on the kept keys, and what is missing from the outputs (heads, m, width).
    """

    kind: str
    weights: Tensor
    missing: Tensor


def chosen(
    prompt: Prompt,
    rule: Rule,
    share: float,
    split: str,
    generator: torch.Generator | None = None,
    *,
    refitted: bool,
) -> Choice:
    """The keys that a rule keeps of a prompt, with refitted values where that is asked for."""
    choice = choose(prompt, rule, share, split, generator)
    return refit(prompt, choice) if refitted else choice


def refit(prompt: Prompt, choice: Choice, ridge: float = RIDGE) -> Choice:
    """The choice with refitted values, and its predicted loss by kind of queries."""
    assert prompt.metric is not None
    spared = {kind: choice.sparing(last).kept for kind, last in prompt.spared.items()}
    values, losses = {}, dict.fromkeys((k for k, own in prompt.references.items() if own), 0.0)
    for layer in choice.kept:
        calls = {kind: call for kind in losses for call in prompt.calls(kind, layer)}
        call = calls["last"]
        values[layer] = call.value[0, :, : prompt.keys].clone()
        for kv, kept in enumerate(choice.kept[layer]):
            heads = slice(kv * call.shared, (kv + 1) * call.shared)
            metric = prompt.metric.of_layer[layer][heads]
            rows = [
                _on_kept(kind, one, kv, kept, spared[kind][layer][kv])
                for kind, one in calls.items()
            ]
            moved = _fitted(rows, metric, ridge, losses)
            values[layer][kv, kept] += moved.to(values[layer].dtype)
    return replace(choice, values=values, losses=losses)


def _on_kept(kind: str, call: AttentionCall, kv: int, kept: Tensor, stay: Tensor) -> _Rows:
    """The heads of one key-value head where, of the keys of the prompt, only those that ``stay``,
    (P,), are there; weights of those ``kept``. Later keys and a sink logit stay.
    """
    heads = slice(kv * call.shared, (kv + 1) * call.shared)
    full = call.weights(heads=heads)[0]
    left = full.clone()
    left[..., : len(stay)] *= stay
    mass = left.sum(-1, keepdim=True)
    if call.sinks is not None:
        mass += (1 - full.sum(-1, keepdim=True)).clamp_min(0)
    left /= mass.clamp_min(torch.finfo(left.dtype).tiny)
    missing = full.sub_(left) @ call.value[0, kv].to(left.dtype)
    return _Rows(kind, left[..., : len(kept)][..., kept], missing)


def _fitted(
    rows: Sequence[_Rows], metric: Tensor, ridge: float, losses: dict[str, float]
) -> Tensor:
    """What is added to the values of the kept keys of one head, (n, width); its predicted loss is
    added to ``losses``. ``metric`` (heads, width, width): of the heads that share the keys.
    """
    heads = len(metric)
    size = metric.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo(metric.dtype).tiny)
    factors = [(size / part.weights.shape[1]).sqrt()[:, None, None] for part in rows]
    pairs = list(zip(factors, rows, strict=True))
    w = torch.cat([(f * part.weights).flatten(0, 1) for f, part in pairs])
    t = torch.cat([(f * part.missing).flatten(0, 1) for f, part in pairs])
    shift = ridge * float(w.square().sum(1).mean())
    moved, left_out = _ridge(w, t, shift)
    ends = [x.weights.shape[1] * heads for x in rows]
    for f, part, error in zip(factors, rows, torch.split(left_out, ends), strict=True):
        error = error.view(heads, -1, t.shape[1]) / f
        losses[part.kind] += float((error @ metric * error).sum()) / (2 * error.shape[1])
    return moved


def _ridge(w: Tensor, t: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """D of least |t - w D|^2 + shift |D|^2, by the smaller of its two systems, and each row of
    t - w D where D is fitted to the other rows.
    """
    shift = max(shift, torch.finfo(w.dtype).tiny)
    tall = len(w) > w.shape[1]
    gram = w.T @ w if tall else w @ w.T
    gram.diagonal().add_(shift)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    if tall:
        moved = inverse @ (w.T @ t)
        left = (1 - ((w @ inverse) * w).sum(1)).clamp_min(torch.finfo(w.dtype).eps)
        return moved, (t - w @ moved) / left[:, None]
    dual = inverse @ t
    return w.T @ dual, dual / inverse.diagonal()[:, None]
