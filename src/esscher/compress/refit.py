"""Refit a compressed cache, so that its outputs come close to the full ones: weights of the kept
keys, then new values. Keys stay as they are.

The reference queries are the last ones of the prompt, those of its replay, and moved ones, all
kinds alike. The softmax of a query on the kept keys is short of the mass of the dropped ones. Only
keys that a rule chose by their scores stand for others: with A (queries, n) their weights in the
full softmax, and S the mass on keys that every rule keeps, on later keys and on a sink logit,
weights w of the chosen keys minimise

    |1 - S - A w|^2 + ridge s |w - c|^2,    s the mean of |row of A|^2,

around the best common weight c >= 1, no further from it than RANGE times.

Let W then be the softmax weights on the kept keys, V their values, and T the outputs on all keys
less the outputs on the kept ones. The new values are V + D, where D minimises

    |T - W D|^2 + ridge s |D|^2,    D = W' (W W' + ridge s I)^-1 T.

Rows of a head are weighed by the trace of its Fisher metric. Attention matching (arXiv 2602.16284)
fits weights and values by least squares; the ridge keeps them where few queries look. Fitted to one
kind of queries alone, values get worse at others.

The predicted loss is by queries that values were not fitted to: each is left out once. With h_i the
diagonal of W (W' W + ridge s I)^-1 W', its error is then (T - W D)_i / (1 - h_i).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esscher.compress.choose import Choice, choose
from esscher.compress.prompt import Prompt
from esscher.compress.spec import REFIT
from esscher.hf.call import AttentionCall
from esscher.keep.rule import Rule

RIDGE = 0.1  # of values
FIRM = 0.003  # ridge of weights
MOST, RANGE = 20.0, 4.0


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
    end: str = "",
) -> Choice:
    """The keys that a rule keeps of a prompt, refitted as the end of its text says."""
    choice = choose(prompt, rule, share, split, generator)
    return refit(prompt, choice, prompt.sure(rule), weighted=end == REFIT) if end else choice


def refit(
    prompt: Prompt,
    choice: Choice,
    sure: Mapping[int, Tensor],
    ridge: float = RIDGE,
    *,
    weighted: bool = True,
) -> Choice:
    """The choice with weights and refitted values, and its predicted loss by kind of queries.

    ``sure``: keys that the rule keeps whatever their score, by layer; their weight is 1.
    ``weighted``: whether the others get one.
    """
    assert prompt.metric is not None
    spared = {kind: choice.sparing(last) for kind, last in prompt.spared.items()}
    values, weights = {}, {}
    losses = dict.fromkeys((k for k, own in prompt.references.items() if own), 0.0)
    for layer, rows in choice.kept.items():
        calls = {kind: call for kind in losses for call in prompt.calls(kind, layer)}
        call = calls["last"]
        values[layer] = call.value[0, :, : prompt.keys].clone()
        known = choice.weight.get(layer)
        weights[layer] = torch.ones_like(rows, dtype=torch.float64) if known is None else known
        weights[layer] = weights[layer].clone()
        for kv, kept in enumerate(rows):
            free = kept & ~sure[layer][kv]
            if bool((kept | ~prompt.held_by((layer, kv))).all()):
                continue  # nothing is dropped
            parts = [
                _Seen.of(kind, one, kv, spared[kind], free, prompt.spared[kind])
                for kind, one in calls.items()
            ]
            if weighted and bool(free.any()):
                weights[layer][kv, free] *= _weights(parts, free)
            metric = prompt.metric.of_layer[layer][parts[0].heads]
            left = [part.rows(weights[layer][kv], kept) for part in parts]
            moved = _fitted(left, metric, ridge, losses)
            values[layer][kv, kept] += moved.to(values[layer].dtype)
    return replace(choice, values=values, weight=weights, losses=losses)


@dataclass(frozen=True)
class _Seen:
    """The reference queries of one kind at the heads of one key-value head: ``full`` (heads, m, N),
    softmax weights on all keys, ``count`` (N,), how much each counts among the kept ones, ``free``
    (N,), those whose weight is sought, ``value`` (N, width).
    """

    kind: str
    heads: slice
    full: Tensor
    count: Tensor
    free: Tensor
    value: Tensor

    @classmethod
    def of(
        cls, kind: str, call: AttentionCall, kv: int, choice: Choice, free: Tensor, spared: int
    ) -> _Seen:
        """``spared``: so many last keys of the prompt count as later ones, which stay."""
        heads = slice(kv * call.shared, (kv + 1) * call.shared)
        full = call.weights(heads=heads)[0]
        later = full.shape[2] - len(free)
        count = choice.kept[call.layer][kv].to(full)
        if call.layer in choice.weight:
            count = count * choice.weight[call.layer][kv].to(full)
        free = torch.nn.functional.pad(free[: len(free) - spared], (0, spared + later))
        count = torch.nn.functional.pad(count, (0, later), value=1.0)
        return cls(kind, heads, full, count, free, call.value[0, kv].to(full.dtype))

    @property
    def sink(self) -> Tensor:
        """(heads, m): what a sink logit takes of the softmax."""
        return (1 - self.full.sum(-1)).clamp_min(0)

    def masses(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """A (heads m, n) and 1 - S (heads m,), each query with weight 1 / sqrt(heads m)."""
        own = (self.full * (self.count * self.free))[..., : len(free)][..., free].flatten(0, 1)
        others = self.full @ (self.count * ~self.free) + self.sink
        return own / len(own) ** 0.5, (1 - others.flatten()) / len(own) ** 0.5

    def rows(self, weight: Tensor, kept: Tensor) -> _Rows:
        """Weights and what is missing where the free keys count ``weight`` (P,)."""
        weight = torch.nn.functional.pad(weight.to(self.full), (0, len(self.count) - len(weight)))
        left = self.full * torch.where(self.free, weight, self.count)
        mass = left.sum(-1) + self.sink
        left /= mass.clamp_min(torch.finfo(left.dtype).tiny)[..., None]
        missing = (self.full - left) @ self.value
        return _Rows(self.kind, left[..., : len(kept)][..., kept], missing)


def _weights(parts: Sequence[_Seen], free: Tensor) -> Tensor:
    """Factors (n,) of the free keys."""
    own, wanted = (torch.cat(x) for x in zip(*(part.masses(free) for part in parts), strict=True))
    total = own.sum(1)
    common = float((total @ wanted) / (total @ total).clamp_min(torch.finfo(total.dtype).tiny))
    common = min(max(1.0, common), MOST)
    shift = FIRM * float(own.square().sum(1).mean())
    moved, _ = _ridge(own, (wanted - common * total)[:, None], shift)
    return (common + moved[:, 0]).clamp(common / RANGE, common * RANGE).double()


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
