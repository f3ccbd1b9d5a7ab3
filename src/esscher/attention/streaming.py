"""Softmax attention over any number of keys in flat memory, over all of them or over those that a
rule keeps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.attention.kept import attend_kept
from esscher.attention.softmax import attention_inputs
from esscher.attention.state import attention_state, finish, init, merge
from esscher.inputs import as_count, as_counts, finite_result
from esscher.keep.context import Context
from esscher.keep.text import parse


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
    carried in float64 between blocks. Inputs may lie in memory as they like. ValueError where
    scores are beyond float64.

    ``keep``: a rule that chooses the keys (esscher.keep, or its text), for each head of the leading
    axes by itself; attention runs on those it keeps, each with its weight: softmax of score + log
    w. Keys come in the order of their positions; queries stand at the last one, or at ``positions``
    (m,), and see no later key, or what ``mask`` says. ``n``: keys kept in all, for the part of the
    rule without a number. A rule with chance draws from ``generator``: for query after query and
    key after key u_ij uniform on [0, 1), kept where u_ij < p_ij; parts that are shared by the
    queries draw one u_j for each key. Time and memory follow the keys kept where places decide
    (window, sinks, recent, strided, global and their unions; heavy, keynorm and expected beside the
    one pass that ranks the keys); where scores or chance of each query decide, all pairs are looked
    at, a block of queries at a time.
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
        out = _kept(q, k, v, scale, mask, keep=keep, positions=positions, n=n, generator=generator)
    return finite_result(out.to(q.dtype), "attend", "scale v down or use float64")


def _kept(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, **options: Any
) -> Tensor:
    """Head by head, in the order of the leading axes."""
    rule, count = (
        parse(options["keep"]),
        None if options["n"] is None else as_count(options["n"], "n"),
    )
    heads = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    seen = None if mask is None else mask.reshape(-1, *mask.shape[-2:])
    # their numbers are checked already: a column is enough
    one, other, third = (x[0].detach()[:, :1] for x in heads)
    places = Context.of(one, other, third, 1.0, options["positions"]).positions
    outs = []
    for number, (queries, keys, values) in enumerate(zip(*heads, strict=True)):
        visible = None if seen is None else seen[number].to(keys.device)
        context = Context(queries.detach(), keys.detach(), values.detach(), scale, places, visible)
        outs.append(
            attend_kept((queries, keys, values), context, rule, count, options["generator"])
        )
    return (outs[0] if len(outs) == 1 else torch.stack(outs)).reshape(*q.shape[:-1], v.shape[-1])


# ---- Self-attention on nested prefixes of a sequence: every size from one pass over the largest
# size's pairs.


@dataclass(frozen=True)
class PrefixOutputs:
    """Outputs of self-attention on the first n tokens: their mean, their covariance (divided by n),
    themselves on request.
    """

    n: int
    mean: Float64[Tensor, " d_v"]
    cov: Float64[Tensor, "d_v d_v"]
    outputs: Float64[Tensor, "n d_v"] | None = None


def attend_prefixes(
    q: Any, k: Any, v: Any, sizes: Any, scale: Any = None, *, outputs: bool = False
) -> list[PrefixOutputs]:
    """Statistics of self-attention on the first n_1 < n_2 < ... < n_m tokens, for every size.

    All queries meet the keys segment by segment, keys n_{i-1} .. n_i in one block; after segment i
    the states of the first n_i queries are those of the prefix. Each of the n_m^2 pairs is visited
    once, where one attention per size visits sum_i n_i^2.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
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
    largest = int(ladder[-1])
    state = init(q[:largest], v.shape[1])
    result = []
    for old, new in itertools.pairwise([0, *ladder.tolist()]):
        state = merge(state, attention_state(q[:largest], k[old:new], v[old:new], scale))
        known = state.out[:new]
        mean = finite_result(known.mean(dim=0), "attend_prefixes", "scale v down")
        centred = known - mean
        cov = finite_result(
            centred.T @ centred / new, "attend_prefixes: the covariance", "scale v down"
        )
        result.append(PrefixOutputs(new, mean, cov, known.clone() if outputs else None))
    return result
