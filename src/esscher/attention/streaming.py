"""Softmax attention over any number of keys in flat memory, over all of them or over those that a
rule keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.attention.kept import attend_kept
from esscher.attention.softmax import attention_inputs
from esscher.attention.state import attention_state, finish
from esscher.inputs import as_count, finite_result
from esscher.keep.context import Context
from esscher.keep.text import parse

__all__ = ["attend"]


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
