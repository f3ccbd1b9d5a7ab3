"""Attention calls of models: grouped heads, sliding windows, soft caps, biases and sink logits, and
the exact error of keep rules under them, against plain softmax and every kept set by itself.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from esscher.errors.keep_curve import KeepErrors
from esscher.hf.call import AttentionCall
from esscher.keep import parse
from tests.fuzz.draw import Draw

__all__ = ["COVERS", "one"]

COVERS = ()
Array = np.ndarray


def one(draw: Draw) -> None:
    rng, tokens, width = draw.rng, draw.whole(3, 9), draw.whole(1, 4)
    kv_heads, shared = draw.whole(1, 2), draw.whole(1, 3)
    heads = kv_heads * shared
    dtype = draw.pick([torch.float64, torch.float32])
    window = draw.pick([None, draw.whole(1, tokens)])
    softcap = draw.pick([None, float(rng.uniform(0.5, 5.0))])

    def rows(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * draw.pick([0.3, 1.0, 3.0])).to(dtype)

    q, k = rows(1, heads, tokens, width), rows(1, kv_heads, tokens, width)
    v = rows(1, kv_heads, tokens, draw.pick([width, width + 1]))
    bias = rows(1, heads, tokens, tokens) if draw.chance(0.3) else None
    sinks = rows(heads) if draw.chance(0.5) else None
    back = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (back >= 0) & (back < (window or tokens))
    mask = torch.from_numpy(seen)[None, None]
    call = AttentionCall(0, "layer", q, k, v, 0.7, mask, bias, softcap, sinks, None, window)
    score = _scores(call, seen)
    slack = 1e-11 if dtype == torch.float64 else 3e-5
    weights, output = call.weights()[0].numpy(), call.output()[0].numpy()
    values = v[0].double().numpy()
    for head in range(heads):
        sink = None if sinks is None else float(sinks[head])
        for row in range(tokens):
            p = _weights(score[head, row], sink)
            draw.agree("weights", weights[head, row], p, np.full(tokens, slack))
            out = p @ values[head // shared]
            draw.agree("output", output[head, row], out, slack * (1 + np.abs(out)) * 10)
    _rules(draw, call, score, values, slack)


def _rules(draw: Draw, call: AttentionCall, score: Array, values: Array, slack: float) -> None:
    """Errors of rules on the last query, which sees ``window`` keys and no others."""
    last, kv = score.shape[1] - 1, draw.whole(1, call.kv_heads) - 1
    rule = draw.pick(["recent", "topk", "random", "random:reweight", "sinks:1+recent"])
    visible = np.flatnonzero(np.isfinite(score[0, last]))
    n = draw.whole(1, len(visible))
    context = call.context(kv, torch.tensor([last]))
    curve = KeepErrors(context).curve(parse(rule), [n])
    for i in range(call.shared):
        head = kv * call.shared + i
        own, sink = score[head, last], None if call.sinks is None else float(call.sinks[head])
        chance = _chance(own, visible, rule, n)
        weight = 1 / np.where(chance > 0, chance, 1.0) if "reweight" in rule else np.ones(len(own))
        expected = _every_set(own, values[kv], chance, weight, sink)
        allowed = 200 * slack * expected + slack * np.sqrt(expected) + slack**2
        draw.agree("mse", curve.queries.mse[i], np.array([expected]), np.array([allowed]))


def _scores(call: AttentionCall, seen: Array) -> Array:
    """(heads, queries, keys) in float64; -inf where a key is not seen."""
    found = np.full((call.heads, *seen.shape), -np.inf)
    q, k = call.query[0].double().numpy(), call.key[0].double().numpy()
    for head, row, key in itertools.product(*(range(size) for size in found.shape)):
        if seen[row, key]:
            s = call.scale * float(q[head, row] @ k[head // call.shared, key])
            s = s if call.softcap is None else call.softcap * float(np.tanh(s / call.softcap))
            found[head, row, key] = s + (
                0 if call.bias is None else float(call.bias[0, head, row, key])
            )
    return found


def _weights(score: Array, sink: float | None) -> Array:
    top = max(score.max(), -np.inf if sink is None else sink)
    e = np.exp(score - top)
    return np.asarray(e / (e.sum() + (0.0 if sink is None else np.exp(sink - top))))


def _chance(score: Array, visible: Array, rule: str, n: int) -> Array:
    """Of each key to be kept."""
    p = np.zeros(len(score))
    if rule == "recent":
        p[visible[-n:]] = 1.0
    elif rule == "sinks:1+recent":  # the first key that the query sees
        p[visible[0]] = 1.0
        p[visible[len(visible) - (n - 1) :]] = 1.0
    elif rule == "topk":
        p[sorted(visible, key=lambda j: (score[j], j), reverse=True)[:n]] = 1.0
    else:
        p[visible] = n / len(visible)
    return p


def _every_set(score: Array, v: Array, p: Array, weight: Array, sink: float | None) -> float:
    """E|output - limit|^2; a query without keys and without a sink counts as no error."""
    limit = _weights(score, sink) @ v
    sure, free = np.flatnonzero(p == 1.0), np.flatnonzero((p > 0.0) & (p < 1.0))
    total = 0.0
    for taken in itertools.product([False, True], repeat=len(free)):
        chosen = np.array(taken, dtype=bool)
        kept = np.concatenate([sure, free[chosen]])
        if not len(kept) and sink is None:
            continue
        left = np.full(len(score), -np.inf)
        left[kept] = score[kept] + np.log(weight[kept])
        out = _weights(left, sink) @ v
        chance = float(np.prod(np.where(chosen, p[free], 1.0 - p[free])))
        total += chance * float(((out - limit) ** 2).sum())
    return total
