"""Attention on n tokens, streamed in flat memory: softmax (over all keys, nested prefixes, or the
keys that a rule keeps), hardmax and linear.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.attention.state import (
    attend_block,
    attention_inputs,
    attention_state,
    init,
    merge,
)
from esscher.inputs import as_count, as_counts, finite_result
from esscher.keep.context import Context
from esscher.keep.rule import PAIRS, Chance, Rule, parse

BLOCK = 1 << 22  # scores that hardmax holds at once
# scores this close, relative to |q| |k_j|, are equal: repeated keys differ by rounding only
TIE = 1e-12


def attend(
    q: Any,
    k: Any,
    v: Any,
    scale: Any = None,
    mask: Any = None,
    *,
    keep: Any = None,
    positions: Any = None,
    n: Any = None,
    generator: Any = None,
) -> Float[Tensor, "*batch m d_v"]:
    """Softmax attention of queries q (m x k) on keys k (n x k) with values v (n x d_v), streamed
    over blocks of keys: memory does not grow with n beyond the inputs.

    ``scale`` None = 1/sqrt(width of q); ``mask``: booleans, true where a query may see a key. The
    answer has the dtype of the inputs; sums are carried in float64 between blocks.

    ``keep``: a rule that chooses the keys (esscher.keep, or its text), for each head of the leading
    axes by itself; attention is the softmax of score + log w over those it keeps. Keys come in the
    order of their positions; queries stand at the last one, or at ``positions`` (m,), and see no
    later key, or what ``mask`` says. ``n``: keys kept in all, for the part of the rule without a
    number. A rule with chance draws from ``generator``: for query after query and key after key
    u_ij uniform on [0, 1), kept where u_ij < p_ij; parts that are shared by the queries draw one
    u_j for each key. Memory is that of all pairs of queries and keys where a rule chooses by
    several queries or by chance, else of a block of queries.
    """
    q, k, v, scale, mask = attention_inputs(q, k, v, scale, mask)
    if keep is None:
        for name, given in (("positions", positions), ("n", n), ("generator", generator)):
            if given is not None:
                raise ValueError(
                    f"{name}: matters to a rule that keeps keys; give keep too, or leave {name} out"
                )
        out = attention_state(q, k, v, scale, mask).out
    else:
        rule, count = parse(keep), None if n is None else as_count(n, "n")
        heads = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
        masks = [None] * len(heads[0]) if mask is None else mask.reshape(-1, *mask.shape[-2:])
        outs = []
        for queries, keys, values, visible in zip(*heads, masks, strict=True):
            context = Context.of(queries, keys, values, scale, positions)
            if visible is not None:
                context = replace(context, mask=visible.to(context.k.device))
            outs.append(attend_kept(queries, keys, values, context, rule, count, generator))
        out = torch.stack(outs).reshape(*q.shape[:-1], v.shape[-1])
    return finite_result(out.to(q.dtype), "attend", "scale v down or use float64")


# ---- on the keys that a rule keeps


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, context: Context, rule: Rule, n: int | None, generator: Any
) -> Tensor:
    """(m, d_v): one head on the keys kept; ``context`` has q, k and v without their gradients."""
    chances = [part for part in rule.parts if isinstance(part, Chance)]
    if chances and not isinstance(generator, torch.Generator):
        names = ", ".join(part.name for part in chances)
        raise ValueError(
            f"generator: {names} keeps keys by chance; expected a torch.Generator, got"
            f" {generator!r}"
        )
    # each query decides by itself: some at a time
    together = bool(chances) or n is not None or any(part.observes for part in rule.parts)
    step = len(q) if together else max(1, PAIRS // context.keys)
    outs, blind = [], 0
    for rows in torch.split(torch.arange(len(q), device=context.k.device), step):
        kept = rule.include(context.take(rows), n)
        mask, bias = kept.sure, kept.sure
        if chances:
            one = all(part.shared for part in chances)
            shape, on = (1 if one else len(rows), context.keys), generator.device
            drawn = torch.rand(shape, generator=generator, device=on, dtype=torch.float64)
            mask = bias = drawn.to(mask.device) < kept.probability
        if kept.weight is not None:
            bias = kept.weight.log().masked_fill(~mask, -torch.inf)
        out, lse = attend_block(q[rows], k, v, context.scale, bias)
        blind += int((lse == -torch.inf).sum())
        outs.append(out)
    if blind:
        raise ValueError(
            f"keep: {blind} of {len(q)} queries keep no key, so attention is undefined there; "
            "add a part that keeps one surely, such as recent:1"
        )
    return torch.cat(outs)


# ---- on nested prefixes, by hardmax, linear


def attend_prefixes(
    q: Any, k: Any, v: Any, sizes: Any, scale: Any = None
) -> list[tuple[Float64[Tensor, " d_v"], Float64[Tensor, "d_v d_v"]]]:
    """Mean and covariance (divided by n) of the outputs of self-attention on the first n_1 < n_2 <
    ... < n_m tokens, for every size.

    After the keys n_{i-1} .. n_i the states of the first n_i queries are those of the prefix: each
    of the n_m^2 pairs is visited once, where one attention per size visits sum_i n_i^2.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale)
    if q.ndim != 2 or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q, k: expected one query for each key, got shapes {tuple(q.shape)} and"
            f" {tuple(k.shape)}"
        )
    ladder = as_counts(sizes, "sizes")
    if bool((np.diff(ladder) <= 0).any()) or ladder[-1] > k.shape[0]:
        raise ValueError(
            f"sizes: expected increasing numbers up to the {k.shape[0]} tokens given, got"
            f" {ladder.tolist()}"
        )
    q = q[: int(ladder[-1])]
    state = init(q, v.shape[1])
    result = []
    for old, new in itertools.pairwise([0, *ladder.tolist()]):
        state = merge(state, attention_state(q, k[old:new], v[old:new], scale))
        known = state.out[:new]
        mean = known.mean(dim=0)
        result.append((mean, (known - mean).T @ (known - mean) / new))
    return result


def attend_hardmax(q: Any, k: Any, v: Any) -> Float[Tensor, "m d_v"]:
    """Mean of the values of the keys with the largest score <q, k_j>, the limit of softmax
    attention as its scores grow without bound [B, section 5]; scores in float64.
    """
    q, k, v, _, _ = attention_inputs(q, k, v, 1.0)
    if q.ndim != 2:
        raise ValueError(f"q: expected two axes, got shape {tuple(q.shape)}")
    keys, sizes, outs = k.double(), k.double().norm(dim=1), []
    for rows in torch.split(q.double(), max(1, BLOCK // k.shape[0])):
        scores = rows @ keys.T
        slack = TIE * rows.norm(dim=1)
        tied = torch.addr(scores, slack, sizes) >= scores.amax(dim=1, keepdim=True)
        outs.append(tied.double() @ v.double() / tied.sum(dim=1, keepdim=True))
    return finite_result(torch.cat(outs).to(q.dtype), "attend_hardmax", "scale v down")


def attend_linear(q: Any, k: Any, v: Any, scale: Any = None) -> Float[Tensor, "*batch m d_v"]:
    """(1/n) sum_j scale <q_i, k_j> v_j, in O(n) by forming sum_j k_j v_j^T first; sums in float64
    [S, B.2].
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale)
    sums = k.double().mT @ v.double() / k.shape[-2]
    out = (scale * (q.double() @ sums)).to(q.dtype)
    remedy = "lower the scale or the size of q, k and v, or use float64"
    return finite_result(out, "attend_linear", remedy)
