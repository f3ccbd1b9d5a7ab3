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

from esscher.errors.keep_curve import KeepErrors
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.keep.rule import Rule
from esscher.probe.queries import WindowQueries
from esscher.probe.session import Asked
from esscher.probe.spec import SHARES, ProbeSpec, kept_sizes
from esscher.probe.tokens import LayerInfo

OVERFLOW = (
    "scores or values are not finite: the activations of the model overflow; try --dtype float32"
)


@dataclass(frozen=True)
class RuleErrors:
    """Of m judged queries, R rules and S shares of the cached keys; NaN where the window has too
    few keys for what a rule keeps surely.

    Heads that share keys are one cache: ``kept`` is the mean over the queries of all of them.
    """

    mse: Tensor  # (m, R, S): E|output - limit|^2
    oracle: Tensor  # (m, R, S): the same where the judged queries choose for themselves
    kept: Tensor  # (m, R, S)
    keys: Tensor  # (m,): of the cache, that each query sees
    limit: Tensor  # (m,): |limit|^2
    accuracy: Tensor  # (m, R): relative, of the roots of mse
    choosing: Tensor  # (m, R): positions whose queries chose the keys; 0 where none did

    def take(self, rows: Tensor) -> RuleErrors:
        """Those of some queries."""
        return RuleErrors(*(getattr(self, field.name)[rows] for field in fields(self)))


class Window:
    """The keys of a window for the queries of all heads that share them; nothing but the errors is
    held.

    ``queries``: those that choose, and then those that are judged, as ``asked`` has them;
    ``output``: W_O of the layer, (heads, width, d), for rules that ask what lies behind a head.
    """

    def __init__(
        self,
        queries: WindowQueries,
        asked: Asked,
        info: LayerInfo,
        kv_head: int,
        rules: Sequence[Rule],
        output: Tensor | None = None,
    ) -> None:
        self.queries, self.asked, self.info, self.kv_head = queries, asked, info, kv_head
        self.rules, self.output = rules, output
        self.sharing = [head for head in range(info.heads) if info.kv_head(head) == kv_head]

    def errors(self, head: int) -> RuleErrors:
        """Of the judged queries of one head."""
        heads, found = self._found
        if found is None or head not in heads:
            raise ValueError(OVERFLOW)
        judged = len(self.asked.judged)
        return found.take(heads.index(head) * judged + torch.arange(judged))

    @cached_property
    def _found(self) -> tuple[list[int], RuleErrors | None]:
        """A head whose scores overflow has no errors, and no say in what the others keep."""
        queries, choosing = self.queries, len(self.asked.choosing)
        seen = torch.stack([queries.seen_by(head) for head in self.sharing])  # (heads, m, T)
        keys = seen.any(0).any(0).nonzero()[:, 0]
        logits = queries.scores[self.sharing][:, :, keys].masked_fill(~seen[:, :, keys], 0.0)
        finite = torch.isfinite(logits).flatten(1).all(1)
        heads = [head for head, fine in zip(self.sharing, finite.tolist(), strict=True) if fine]
        if not heads or not bool(torch.isfinite(queries.v[self.kv_head, keys]).all()):
            return heads, None
        choosers = self._context(heads, keys, slice(None, choosing))
        judged = self._context(heads, keys, slice(choosing, None))
        cached = judged.visible.any(0)  # what no judged query sees is no key of theirs
        if self.asked.cut is not None:
            cached &= keys < self.asked.cut
        if not bool(cached.all()):
            columns = cached.nonzero()[:, 0]
            choosers, judged = choosers.restrict(columns), judged.restrict(columns)
        return heads, _errors(judged, choosers, choosing, self.rules)

    def _context(self, heads: list[int], keys: Tensor, rows: slice) -> Context:
        """What some of the queries see of these keys, all heads below each other."""
        queries, device = self.queries, keys.device
        seen = torch.stack([queries.seen_by(head)[rows][:, keys] for head in heads])
        at = torch.from_numpy(self.asked.positions[rows]).to(device)
        place = (torch.searchsorted(keys, at, right=True) - 1).clamp_min(0)
        causal = bool((seen == (torch.arange(len(keys), device=device) <= place[:, None])).all())
        logits = queries.scores[heads][:, rows][:, :, keys].masked_fill(~seen, 0.0)
        context = Context(
            queries.q[heads][:, rows].flatten(0, 1),
            queries.k[self.kv_head, keys],
            queries.v[self.kv_head, keys],
            self.info.scale,
            place.repeat(len(heads)),
            None if causal else seen.flatten(0, 1),
            logits.flatten(0, 1),
            sink=None
            if queries.sinks is None
            else queries.sinks[heads].repeat_interleave(len(place)),
        )
        if self.output is None:
            return context
        of = torch.arange(len(heads), device=device).repeat_interleave(len(place))
        return replace(context, heads=of, output=self.output[heads])


def _errors(
    context: Context, choosers: Context, choosing: int, rules: Sequence[Rule]
) -> RuleErrors:
    """``context``: of the judged queries; without ``choosers`` they choose for themselves."""
    ladder = kept_sizes(context.keys)
    n, place = np.unique(ladder, return_inverse=True)
    mse = np.full((len(context.q), len(rules), len(n)), np.nan)
    oracle, kept = np.full_like(mse, np.nan), np.full_like(mse, np.nan)
    accuracy, chose = np.full(mse.shape[:2], np.nan), np.zeros(mse.shape[:2], dtype=np.int64)
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
    seen, limit = context.visible.sum(1).cpu(), context.limit.square().sum(1).cpu()
    return RuleErrors(
        torch.from_numpy(mse[..., place]),
        torch.from_numpy(oracle[..., place]),
        torch.from_numpy(kept[..., place]),
        seen,
        limit,
        torch.from_numpy(accuracy),
        torch.from_numpy(chose),
    )


def check_rules(spec: ProbeSpec, keys: int) -> None:
    """Refuse rules where the pool is the corpus, and those that keep more keys surely than the
    ladder of the largest cache has, of ``keys`` keys.
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
                " that the cache of a window has; use smaller numbers or a larger --window"
            )


def _least(rule: Rule, context: Context) -> float:
    try:
        rule.check(context, context.keys)
        return float(rule.least(context))
    except ValueError:  # a number of the rule is larger than the number of keys
        return math.inf
