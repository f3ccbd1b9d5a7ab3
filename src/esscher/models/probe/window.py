"""What keep rules cost the queries of one window: exact errors of all heads that share its keys,
found once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from esscher.convergence.keep_curve import KeepErrors
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Rule
from esscher.models.probe.context import Indices, Places
from esscher.models.probe.queries import WindowQueries
from esscher.models.probe.spec import SHARES, ProbeSpec, kept_sizes
from esscher.models.probe.tokens import LayerInfo

__all__ = ["OVERFLOW", "RuleErrors", "Window", "check_rules"]

OVERFLOW = (
    "scores or values are not finite: the activations of the model overflow; try --dtype float32"
)


@dataclass(frozen=True)
class RuleErrors:
    """Of m queries, R rules and S shares of the keys; NaN where the window has too few keys for
    what a rule keeps surely.

    Heads that share keys are one cache: ``kept`` is the mean over the queries of all of them.
    """

    mse: Tensor  # (m, R, S): E|output - limit|^2
    kept: Tensor  # (m, R, S)
    keys: Tensor  # (m,): that each query sees
    limit: Tensor  # (m,): |limit|^2
    accuracy: Tensor  # (m, R): relative, of the roots of mse

    def take(self, rows: Tensor) -> RuleErrors:
        """Those of some queries."""
        return RuleErrors(*(getattr(self, field.name)[rows] for field in fields(self)))


class Window:
    """The keys of a window for some queries of all heads that share them; nothing but the errors is
    held.

    ``members``: places of these queries, rising, in the window's own list; ``output``: W_O of the
    layer, (heads, width, d), for rules that ask what lies behind a head.
    """

    def __init__(
        self,
        queries: WindowQueries,
        info: LayerInfo,
        kv_head: int,
        members: Indices,
        places: Places,
        rules: Sequence[Rule],
        output: Tensor | None = None,
    ) -> None:
        self.queries, self.info, self.kv_head, self.members, self.rules = (
            queries,
            info,
            kv_head,
            members,
            rules,
        )
        self.output = output
        self.numbers = queries.rows[members]
        self.positions = places.positions[self.numbers]
        self.sharing = [head for head in range(info.heads) if info.kv_head(head) == kv_head]

    def errors(self, head: int, numbers: Indices) -> RuleErrors:
        """Of one head, of those of the queries with these numbers that rules are compared for."""
        heads, found = self._found
        if found is None or head not in heads:
            raise ValueError(OVERFLOW)
        own = np.flatnonzero(np.isin(self.numbers, numbers))
        return found.take(torch.from_numpy(heads.index(head) * len(self.numbers) + own))

    @cached_property
    def _found(self) -> tuple[list[int], RuleErrors | None]:
        """A head whose scores overflow has no errors, and no say in what the others keep."""
        queries, device = self.queries, self.queries.k.device
        rows = torch.from_numpy(self.members).to(device)
        seen = torch.stack([queries.seen_by(head)[rows] for head in self.sharing])  # (heads, m, T)
        keys = seen.any(0).any(0).nonzero()[:, 0]
        k, v, seen = queries.k[self.kv_head, keys], queries.v[self.kv_head, keys], seen[:, :, keys]
        q = queries.q[self.sharing][:, rows]
        logits = queries.scores[self.sharing][:, rows][:, :, keys].masked_fill(~seen, 0.0)
        finite = torch.isfinite(logits).flatten(1).all(1)
        q, logits, seen = q[finite], logits[finite], seen[finite]
        at = torch.from_numpy(self.positions).to(device)
        place = (torch.searchsorted(keys, at, right=True) - 1).clamp_min(0)
        mask = None
        if not bool((seen == (torch.arange(len(keys), device=device) <= place[:, None])).all()):
            mask = seen.flatten(0, 1)
        heads = [head for head, fine in zip(self.sharing, finite.tolist(), strict=True) if fine]
        sink = None if queries.sinks is None else queries.sinks[heads].repeat_interleave(len(rows))
        context = Context(
            q.flatten(0, 1),
            k,
            v,
            self.info.scale,
            place.repeat(len(q)),
            mask,
            logits.flatten(0, 1),
            sink=sink,
        )
        if self.output is not None:
            of = torch.arange(len(heads), device=device).repeat_interleave(len(rows))
            context = replace(context, heads=of, output=self.output[heads])
        return heads, (
            _errors(context, self.rules) if heads and bool(torch.isfinite(v).all()) else None
        )


def _errors(context: Context, rules: Sequence[Rule]) -> RuleErrors:
    ladder = kept_sizes(context.keys)
    n, place = np.unique(ladder, return_inverse=True)
    mse = np.full((len(context.q), len(rules), len(n)), np.nan)
    kept, accuracy = np.full_like(mse, np.nan), np.full(mse.shape[:2], np.nan)
    errors = KeepErrors(context)
    for i, rule in enumerate(rules):
        possible = n >= _least(rule, context)
        if possible.any():
            curve = errors.curve(rule, n[possible])
            assert curve.queries is not None
            assert curve.kept is not None
            mse[:, i, possible], kept[:, i, possible], accuracy[:, i] = (
                curve.queries.mse,
                curve.kept,
                curve.accuracy,
            )
    seen, limit = context.visible.sum(1).cpu(), context.limit.square().sum(1).cpu()
    mse, kept = mse[..., place], kept[..., place]
    return RuleErrors(
        torch.from_numpy(mse), torch.from_numpy(kept), seen, limit, torch.from_numpy(accuracy)
    )


def check_rules(spec: ProbeSpec, keys: int) -> None:
    """Refuse rules where the pool is the corpus, and those that keep more keys surely than the
    largest window's ladder has.
    """
    if spec.rules and spec.pool != "sequence":
        raise ValueError(
            "rules: they are of a query's own context; use --pool sequence, or leave --rules out"
        )
    one = torch.ones(keys, 1, dtype=torch.float64)
    context = Context(one[:1], one, one, 1.0, torch.tensor([keys - 1]))
    most = int(kept_sizes(keys).max())
    for text in spec.rules or ():
        rule = parse(text)
        rule.check(context, most)
        if most < rule.least(context):
            raise ValueError(
                f"rules: {text} keeps more keys surely than {most}, {SHARES[-1]:.0%} of the {keys}"
                " that a window has; use smaller numbers or a larger --window"
            )


def _least(rule: Rule, context: Context) -> float:
    try:
        rule.check(context, context.keys)
        return float(rule.least(context))
    except ValueError:  # a number of the rule is larger than the number of keys
        return math.inf
