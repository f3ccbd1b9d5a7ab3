"""Exact errors of keep rules in one window: all heads that share its keys, found together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esscher.errors.keep_curve import KeepErrors
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Rule
from esscher.probe.session import RuleQueries, Session
from esscher.probe.spec import SHARES, kept_sizes
from esscher.probe.tokens import LayerInfo
from esscher.probe.window import WindowQueries


def compare_rules(
    queries: WindowQueries,
    asked: RuleQueries,
    info: LayerInfo,
    kv_head: int,
    rules: Sequence[Rule],
    output: Tensor | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Errors of the judged queries, by head; a head whose scores overflow has none, and no say in
    what the others keep.

    ``queries``: those that choose, and then those that are judged. ``output``: W_O of the layer,
    (heads, width, d), for rules that ask what lies behind a head. The numbers are those of
    :func:`_errors`.
    """
    sharing = [head for head in range(info.heads) if info.kv_head(head) == kv_head]
    seen = torch.stack([queries.seen_by(head) for head in sharing])  # (heads, m, T)
    keys = seen.any(0).any(0).nonzero()[:, 0]
    logits = queries.scores[sharing][:, :, keys].masked_fill(~seen[:, :, keys], 0.0)
    finite = torch.isfinite(logits).flatten(1).all(1)
    heads = [head for head, fine in zip(sharing, finite.tolist(), strict=True) if fine]
    if not heads or not bool(torch.isfinite(queries.v[kv_head, keys]).all()):
        return {}
    first = len(asked.choosing)
    choosers, judged = (
        _context(queries, info, kv_head, heads, keys, rows, output)
        for rows in (slice(None, first), slice(first, None))
    )
    cached = judged.visible.any(0)  # what no judged query sees is no key of theirs
    if asked.cut is not None:
        cached &= keys < asked.cut
    if not bool(cached.all()):
        columns = cached.nonzero()[:, 0]
        choosers, judged = choosers.restrict(columns), judged.restrict(columns)
    found = _errors(judged, choosers, first, rules)
    size = len(asked.judged)
    return {
        head: {name: x[i * size : (i + 1) * size] for name, x in found.items()}
        for i, head in enumerate(heads)
    }


def _context(
    queries: WindowQueries,
    info: LayerInfo,
    kv_head: int,
    heads: list[int],
    keys: Tensor,
    rows: slice,
    output: Tensor | None,
) -> Context:
    """What some of the queries see of these keys, all heads below each other."""
    seen = torch.stack([queries.seen_by(head)[rows][:, keys] for head in heads])
    place = (torch.searchsorted(keys, queries.index[rows], right=True) - 1).clamp_min(0)
    causal = bool((seen == (torch.arange(len(keys), device=keys.device) <= place[:, None])).all())
    logits = queries.scores[heads][:, rows][:, :, keys].masked_fill(~seen, 0.0)
    sinks = queries.sinks
    context = Context(
        queries.q[heads][:, rows].flatten(0, 1),
        queries.k[kv_head, keys],
        queries.v[kv_head, keys],
        info.scale,
        place.repeat(len(heads)),
        None if causal else seen.flatten(0, 1),
        logits.flatten(0, 1),
        sink=None if sinks is None else sinks[heads].repeat_interleave(len(place)),
    )
    if output is None:
        return context
    of = torch.arange(len(heads), device=keys.device).repeat_interleave(len(place))
    return replace(context, heads=of, output=output[heads])


def _errors(
    context: Context, choosers: Context, choosing: int, rules: Sequence[Rule]
) -> dict[str, Tensor]:
    """Of m judged queries, R rules and S shares of the cached keys; NaN where the window has too
    few keys for what a rule keeps surely.

    ``mse`` (m, R, S): E|output - limit|^2; ``oracle``: the same where the judged queries choose for
    themselves; ``kept`` (m, R, S): keys, the mean over all heads that share them; ``keys`` (m,): of
    the cache; ``limit`` (m,): |limit|^2; ``accuracy`` (m, R); ``choosing`` (m, R): positions whose
    queries chose the keys, 0 where none did.
    """
    n, place = np.unique(kept_sizes(context.keys), return_inverse=True)
    shape = (len(context.q), len(rules), len(n))
    mse, oracle, kept = (np.full(shape, np.nan) for _ in range(3))
    accuracy, chose = np.full(shape[:2], np.nan), np.zeros(shape[:2], dtype=np.int64)
    own, held_out = KeepErrors(context), KeepErrors(replace(context, choosers=choosers))
    for i, rule in enumerate(rules):
        possible = n >= _least(rule, context)
        if not possible.any():
            continue
        curve = own.curve(rule, n[possible])
        assert curve.queries is not None
        oracle[:, i, possible] = curve.queries.mse
        if any(part.observes for part in rule.parts):
            chose[:, i] = choosing
            curve = held_out.curve(rule, n[possible])
        assert curve.queries is not None
        assert curve.kept is not None
        mse[:, i, possible], kept[:, i, possible] = curve.queries.mse, curve.kept
        accuracy[:, i] = curve.accuracy
    found = {"mse": mse[..., place], "oracle": oracle[..., place], "kept": kept[..., place]}
    found |= {"accuracy": accuracy, "choosing": chose}
    return {
        **{name: torch.from_numpy(x) for name, x in found.items()},
        "keys": context.visible.sum(1).cpu(),
        "limit": context.limit.square().sum(1).cpu(),
    }


def check_rules(session: Session) -> None:
    """Refuse rules where the pool is the corpus, and those that keep more keys surely than the
    ladder of the largest cache has.
    """
    spec = session.spec
    if spec.rules and not session.own:
        raise ValueError(
            "rules: they are of a query's own context; use --pool sequence, or leave --rules out"
        )
    if not spec.rules:
        return
    keys = session.cache_keys
    one = torch.ones(keys, 1, dtype=torch.float64)
    context = Context(one[:1], one, one, 1.0, torch.tensor([keys - 1]))
    most = int(kept_sizes(keys).max())
    for text in spec.rules:
        rule = parse(text)
        rule.check(context, most)
        if most < rule.least(context):
            raise ValueError(
                f"rules: {text} keeps more keys surely than {most}, {SHARES[-1]:.0%} of the {keys}"
                " that the cache of a window has; use smaller numbers or a larger --window"
            )


def _least(rule: Rule, context: Context) -> float:
    try:
        rule.check(context, context.keys)
        return float(rule.least(context))
    except ValueError:  # a number of the rule is larger than the number of keys
        return math.inf
