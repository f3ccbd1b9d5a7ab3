"""Attention on n tokens, streamed in flat memory: softmax (over all keys, nested prefixes, or the
keys that a rule keeps), hardmax and linear.

On the keys that a rule keeps: where positions alone decide (windows, first and last keys, given
positions), a block of neighbouring queries looks only at the keys that one of them may keep.
Otherwise a block of queries looks at all keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.attention.state import (
    attend_block,
    attention_inputs,
    attention_state,
    finish,
    init,
    merge,
)
from esscher.inputs import as_count, as_counts, finite_result
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Part, Ranked, Rule, Union, blocks, parse

BLOCK = 1 << 22  # scores that hardmax holds at once
NEIGHBOURS = 192  # queries at neighbouring positions with one set of keys
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
    over blocks of keys.

    Memory does not grow with n beyond the inputs. ``scale`` None = 1/sqrt(width of q); ``mask``:
    booleans, true where a query may see a key. The answer has the dtype of the inputs; sums are
    carried in float64 between blocks. Inputs may lie in memory as they like.

    ``keep``: a rule that chooses the keys (esscher.keep, or its text), for each head of the leading
    axes by itself; attention runs on those it keeps, each with its weight: softmax of score + log
    w. Keys come in the order of their positions; queries stand at the last one, or at ``positions``
    (m,), and see no later key, or what ``mask`` says. ``n``: keys kept in all, for the part of the
    rule without a number. A rule with chance draws from ``generator``: for query after query and
    key after key u_ij uniform on [0, 1), kept where u_ij < p_ij; parts that are shared by the
    queries draw one u_j for each key. Where positions decide (window, global, sinks and recent with
    their numbers, and unions of these) a block of neighbouring queries looks only at keys that one
    of them may keep; otherwise at all keys, a block of queries at a time.
    """
    q, k, v, scale, mask = attention_inputs(q, k, v, scale, mask)
    if keep is None:
        for name, given in (("positions", positions), ("n", n), ("generator", generator)):
            if given is not None:
                raise ValueError(
                    f"{name}: matters to a rule that keeps keys; give keep too, or leave {name} out"
                )
        out = finish(attention_state(q, k, v, scale, mask))
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

# rows of queries, keys that one of them keeps, which keys each keeps, and their weights
Block = tuple[Tensor, Tensor, Tensor, Tensor | None]


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
    rule.check(context, n)
    by_position = all(part.near(0, 0) is not None for part in rule.parts)
    if by_position and context.mask is None:
        found = _by_position(rule, context.positions)
    else:
        found = _by_score(*precomputed(rule, context, n), context, generator)
    order, outs, blind = [], [], 0
    for rows, keys, mask, weight in found:
        if len(keys) == 0:
            keys, mask, weight = keys.new_zeros(1), mask.new_zeros(len(rows), 1), None
        bias = mask if weight is None else weight.log().masked_fill(~mask, -torch.inf)
        out, lse = attend_block(q[rows], k[keys], v[keys], context.scale, bias)
        blind += int((lse == -torch.inf).sum())
        order.append(rows)
        outs.append(out)
    if blind:
        raise ValueError(
            f"keep: {blind} of {len(q)} queries keep no key, so attention is undefined there; "
            "add a part that keeps one surely, such as recent:1"
        )
    return torch.cat(outs)[torch.cat(order).argsort()]


def _by_position(rule: Rule, positions: Tensor) -> Iterator[Block]:
    """Blocks of queries in the order of their positions, with the keys that these may keep."""
    for rows in torch.split(positions.argsort(stable=True), NEIGHBOURS):
        at = positions[rows][:, None]
        near = [part.near(int(at[0]), int(at[-1])) for part in rule.parts]
        keys = torch.unique(torch.cat([keys for keys in near if keys is not None]))
        keys = keys.to(at.device)
        mask = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=at.device)
        for part in rule.parts:
            mask |= part.keeps(at, keys)
        yield rows, keys, mask & (keys <= at), None


def _by_score(rule: Rule, n: int | None, context: Context, generator: Any) -> Iterator[Block]:
    """Blocks of queries that look at all keys."""

    def uniform(*shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return drawn.to(context.k.device)

    chances = [part for part in rule.parts if isinstance(part, Chance)]
    shared = all(part.shared for part in chances)
    once = uniform(context.keys) if chances and shared else None
    for rows, seen in blocks(context):
        part = Union(
            tuple(one.take(rows) if isinstance(one, Chance) else one for one in rule.parts)
        )
        mask, weight = part.filled(seen, part.held(seen), n), None
        if chances:
            kept = part.decide(seen, mask, n)
            drawn = uniform(len(rows), context.keys) if once is None else once
            mask, weight = drawn < kept.probability, kept.weight
        keys = mask.any(0).nonzero()[:, 0]
        yield rows, keys, mask[:, keys], None if weight is None else weight[:, keys]


@dataclass(frozen=True, eq=False)
class _GivenOrder(Ranked):
    """A ranking whose order of the keys (N,) was computed from all queries."""

    name: ClassVar[str] = "order"
    size: int | None
    given: Tensor = field(repr=False)

    def order(self, context: Context) -> Tensor:
        return self.given


def precomputed(rule: Rule, context: Context, n: int | None) -> tuple[Rule, int | None]:
    """The rule with the numbers that it finds from all queries together, so that blocks of queries
    can follow it one by one, and n where the rule still leaves a number open.
    """

    def ordered(part: Part) -> Part:
        if not isinstance(part, Ranked) or part.per_query or part.near(0, 0) is not None:
            return part
        order = part.order(context)
        return part if order.ndim == 2 else _GivenOrder(part.size, order)

    def seen(is_open: bool) -> Iterator[tuple[Context, Tensor, Tensor | None]]:
        """What the chance of a key depends on, for blocks of queries."""
        for _, block in blocks(context):
            sure = ranked.filled(block, ranked.held(block), n)
            wanted = n - sure.sum(1).double() if is_open and n is not None else None
            yield block, block.visible & ~sure, wanted

    ranked = Union(tuple(ordered(part) for part in rule.parts))
    if n is not None:
        held = sum(int(ranked.held(block).sum()) for _, block in blocks(context))
        rule.check_least(n, held / len(context.q))
    found = Union(
        tuple(
            part.precomputed(seen(part.is_open)) if isinstance(part, Chance) else part
            for part in ranked.parts
        )
    )
    return found, n if found.free else None


# ---- on nested prefixes, by hardmax, linear


def attend_prefixes(
    q: Any, k: Any, v: Any, sizes: Any, scale: Any = None
) -> list[tuple[Float64[Tensor, " d_v"], Float64[Tensor, "d_v d_v"]]]:
    """Mean and covariance (divided by n) of the outputs of self-attention on the first n_1 < n_2 <
    ... < n_m tokens, for every size.

    All queries meet the keys segment by segment, keys n_{i-1} .. n_i in one block; after segment i
    the states of the first n_i queries are those of the prefix. Each of the n_m^2 pairs is visited
    once, where one attention per size visits sum_i n_i^2.
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
    """Mean of the values of the keys with the largest score <q, k_j>; scores in float64, a block of
    queries at a time.

    The limit of softmax attention as its scores are multiplied by a factor that grows without
    bound. [B, section 5].
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
    """(1/n) sum_j scale <q_i, k_j> v_j, in O(n) by forming sum_j k_j v_j^T first; sums in float64.

    Linear attention normalised by the number of tokens, the model of much in-context-learning
    theory [S, B.2].
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale)
    sums = k.double().mT @ v.double() / k.shape[-2]
    out = (scale * (q.double() @ sums)).to(q.dtype)
    remedy = "lower the scale or the size of q, k and v, or use float64"
    return finite_result(out, "attend_linear", remedy)
