"""The exact error of a keep rule on tokens of a law, against the limit of the law.

A law has no list of keys, so a rule says with which chance p(y) a token y is kept, by its score and
its value alone, and what it then counts: w(y) = 1, or 1/p(y) where it reweights. Two contexts give
this a meaning.

A context of N tokens: N independent tokens of the law, each kept with chance p(y). What the rule
must know, the score above which it keeps surely or its share, is set on the law so that N E p(y) =
n keys are kept on average. A token that is not kept has e = 0 and is independent of the others, so
the formulas for N draws hold as they stand; with eps = w e,

    phi(t) = 1 - E[p (1 - exp(-t eps))],
    E||Gamma_keep - Gamma||^2 = N int t E[p eps^2 |c|^2 exp(-t eps)] phi^(N-1) dt
                                + N (N-1) int t |E[p eps c exp(-t eps)]|^2 phi^(N-2) dt.

No key kept counts as no error. The context's own error is part of it: at n = N every rule is
attention on N tokens.

A context without end: N grows at fixed n, given that n keys are kept. They are n independent draws
from the law of density p / E p, and N is gone from the formula. For ``random`` this is the error at
n tokens. For ``neyman`` p is proportional to e |c|, so that eps is to 1/|c| and the score counts no
more: n draws from the tilted law by their size |c|, and

    Gamma_keep - Gamma = sum_j u_j / sum_j |c_j|^-1,     u = c / |c|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.errors.curve import ErrorCurve, QueryErrors, concatenate, side_by_side
from esscher.errors.nodes import error_from_nodes, error_of_kept
from esscher.errors.pool_curve import pool_stderr
from esscher.errors.query_laws import drawn_sizes, tilted_sizes
from esscher.inputs import as_counts
from esscher.keep.chance import Neyman, Random, fill_up
from esscher.keep.ranked import TopK
from esscher.keep.rule import Rule
from esscher.measures.base import Measure
from esscher.measures.line import Line

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

KNOWN = "random, topk, topk + random, neyman"


@dataclass(frozen=True)
class Shares:
    """Of the tokens: kept surely, those of largest score; of the others, kept by chance."""

    top: float
    rest: float
    reweight: bool

    @property
    def kept(self) -> float:
        return self.top + (1.0 - self.top) * self.rest


@dataclass(frozen=True)
class LawRule:
    """A rule that a law can follow, the sizes n of its ladder, and at each n the tokens of the
    context; None: without end.
    """

    rule: Rule
    n: Counts
    context: Counts | None

    @property
    def plain(self) -> bool:
        """Whether it draws n tokens as they come."""
        return self.context is None and isinstance(self.rule.parts[0], Random)

    @property
    def is_neyman(self) -> bool:
        return isinstance(self.rule.parts[0], Neyman)

    def curve(
        self, head: Head, measure: Measure, x: Tensor, details: bool, pool_size: int, seed: int
    ) -> ErrorCurve:
        """Over the rows ``x``."""
        assert not self.plain
        where = (
            "without end"
            if self.context is None
            else "of " + ", ".join(map(str, self.context)) + " tokens"
        )
        origin, kind, tokens = (
            f"exact, {type(measure).__name__} tokens: what {self.rule} keeps of a context {where}",
            "exact",
            None,
        )
        theta, target = _tilts(head, measure, x[:1])[0]
        if self.is_neyman and (
            self.context is not None or tilted_sizes(head, measure, theta, target) is None
        ):
            tokens, kind = (
                measure.sample(pool_size, torch.Generator().manual_seed(seed)).double(),
                "pool",
            )
            origin += f", on a pool of {pool_size} tokens drawn from the law (seed {seed})"
        found = concatenate([self._row(head, measure, row, tokens, details) for row in x])
        slope = found.dmse_dlogn if self.context is None else None
        queries = replace(found, bias=found.bias if details else None, dmse_dlogn=slope)
        kept = self.n.astype(np.float64)
        if self.context is not None and not self.is_neyman:
            pairs = zip(self.n.tolist(), self.context.tolist(), strict=True)
            kept = np.array([N * _shares(self.rule, n, N).kept for n, N in pairs])
        curve = ErrorCurve.from_queries(self.n, queries, kind=kind, origin=origin)
        doubt = (
            None
            if tokens is None
            else pool_stderr(tokens, lambda part: self._rms(head, measure, x, part))
        )
        return replace(
            curve, kept=kept, delta=curve.delta if self.context is None else None, pool_stderr=doubt
        )

    def _rms(self, head: Head, measure: Measure, x: Tensor, tokens: Tensor) -> Floats:
        mse = concatenate([self._row(head, measure, row, tokens, False) for row in x]).mse
        return np.asarray(np.sqrt(mse.mean(axis=0)))

    def _row(
        self, head: Head, measure: Measure, row: Tensor, tokens: Tensor | None, details: bool
    ) -> QueryErrors:
        """One query, every size."""
        ((theta, target),) = _tilts(head, measure, row[None])
        if self.context is None:
            return self._drawn_by_size(head, measure, theta, target, tokens, details)
        parts = []
        for n, N in zip(self.n.tolist(), self.context.tolist(), strict=True):
            if tokens is None:
                part = _by_score(head, measure, theta, target, _shares(self.rule, n, N), N)
            else:
                part = _by_size(head, tokens, theta, n / N, N)
            parts.append(replace(part, delta=np.full(1, np.nan), limit=target.cpu().numpy()[None]))
        return side_by_side(parts)

    def _drawn_by_size(
        self,
        head: Head,
        measure: Measure,
        theta: Tensor,
        target: Tensor,
        tokens: Tensor | None,
        details: bool,
    ) -> QueryErrors:
        """Neyman's keys of a context without end."""
        sizes = (
            tilted_sizes(head, measure, theta, target)
            if tokens is None
            else drawn_sizes(head, tokens, theta)
        )
        assert sizes is not None  # a law has them at every tilt or at none
        used = sizes.size > 0
        size, weight, centre = sizes.size[used], sizes.log_weights[used], sizes.centre[used]
        extra = (size.square() - centre.square().sum(1)).clamp_min(0.0) if tokens is None else None
        if size.numel() == 0:  # every value is the limit
            size, weight, centre, extra = (
                size.new_ones(1),
                size.new_zeros(1),
                sizes.centre[:1],
                None,
            )
        found = error_from_nodes(
            -size.log()[None], weight + size.log(), centre, extra, self.n, details=details
        )
        return replace(found, limit=target.cpu().numpy()[None])


def _by_score(
    head: Head, measure: Measure, theta: Tensor, target: Tensor, share: Shares, tokens: int
) -> QueryErrors:
    """Keys of a context of so many tokens, kept by their scores."""
    lines, cut = _cut_lines(measure, theta, share.top)
    score, weight = (
        torch.cat([line.scores for line in lines]),
        torch.cat([line.log_weights for line in lines]),
    )
    chance = torch.full_like(score, share.rest).masked_fill(score > cut, 1.0)
    used = chance > 0
    counted, mass = score - chance.log() if share.reweight else score, weight + chance.log()
    value = head.values(torch.cat([line.means for line in lines]))
    extra = torch.cat([line.extra(head.V.double()) for line in lines])
    return error_of_kept(counted[used], mass[used], value[used], extra[used], tokens, target)


def _by_size(head: Head, pool: Tensor, theta: Tensor, share: float, tokens: int) -> QueryErrors:
    """Neyman's keys, p = min(1, lambda e |c|), of a context of so many tokens drawn from the
    pool.
    """
    sizes = drawn_sizes(head, pool, theta)
    gain = sizes.log_weights.exp() * sizes.size
    chance = torch.full_like(gain, share)
    if bool(gain.any()):
        chance = next(fill_up(gain[None], gain.new_tensor([[share * len(pool)]])))[0]
    used = chance > 0
    log_p, centre = chance[used].log(), sizes.centre[used]
    mass, zero = log_p - math.log(len(pool)), torch.zeros_like(centre[0])
    return error_of_kept(
        (pool @ theta)[used] - log_p, mass, centre, torch.zeros_like(mass), tokens, zero
    )


def law_rule(rule: Rule, n: Any, context: Any) -> LawRule:
    """The rule with its ladder, checked."""
    kinds = sorted(type(part).__name__ for part in rule.parts)
    if kinds not in (["Random"], ["TopK"], ["Random", "TopK"], ["Neyman"]) or getattr(
        rule.parts[0], "shared", False
    ):
        raise ValueError(
            f"keep: expected a rule that a law can follow ({KNOWN}), got {rule}; for others draw"
            " tokens from the law and use exact_pool_curve"
        )
    tokens = None if context is None else as_counts(context, "context")
    if tokens is None and kinds not in (["Random"], ["Neyman"]):
        raise ValueError(
            f"context: {rule} keeps the largest scores, expected how many tokens they are the"
            " largest of; got none"
        )
    if (n is None) != (rule.free is None):
        wanted = (
            "no n: every number of the rule is given"
            if rule.free is None
            else "n: a part has no number of its own"
        )
        raise ValueError(f"n: the rule {rule} expects {wanted}; got {n!r}")
    part = rule.parts[0]
    if n is not None:
        sizes = as_counts(n, "n")
    elif isinstance(part, Neyman):
        sizes = as_counts(part.size, "n")
    elif tokens is not None:
        sizes = np.array([max(1, round(N * _shares(rule, None, N).kept)) for N in tokens.tolist()])
    else:
        raise ValueError(
            f"n: {rule} keeps keys of a context without end; write it without its number and give n"
        )
    if tokens is None:
        return LawRule(rule, sizes, None)
    if tokens.size not in (1, sizes.size):
        raise ValueError(
            f"context: expected one number of tokens, or one for each of {sizes.size} n, got"
            f" {tokens.size}"
        )
    tokens = np.broadcast_to(tokens, sizes.shape)
    if (sizes > tokens).any():
        worst = int((sizes - tokens).argmax())
        raise ValueError(
            f"n: expected at most {tokens[worst]}, the tokens of the context, got {sizes[worst]}"
        )
    return LawRule(rule, sizes, tokens)


def _shares(rule: Rule, n: int | None, tokens: int) -> Shares:
    """From the numbers of the parts, or from n for the part without one; chance comes on top of the
    n that topk keeps.
    """
    chance = next((part for part in rule.parts if isinstance(part, Random)), None)
    ranked = next((part for part in rule.parts if isinstance(part, TopK)), None)
    reweight = chance is not None and chance.reweight
    rest = 0.0 if chance is None else chance.share
    if ranked is None:
        return Shares(0.0, n / tokens if rest is None and n is not None else rest or 0.0, reweight)
    if ranked.size is None:
        assert n is not None
        return Shares(n / tokens, rest or 0.0, reweight)
    if ranked.size > tokens or (n is not None and n < ranked.size):
        raise ValueError(
            f"n: {rule} keeps {ranked.size} keys surely; expected that many at least, got {n} of"
            f" {tokens} tokens"
        )
    if rest is None:
        assert n is not None
        rest = (n - ranked.size) / (tokens - ranked.size) if tokens > ranked.size else 0.0
    return Shares(ranked.size / tokens, rest, reweight)


def _tilts(head: Head, measure: Measure, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(head.tilt(x).double(), limit(head, measure)(x).double(), strict=True))


def _cut_lines(measure: Measure, theta: Tensor, top: float) -> tuple[list[Line], float]:
    """Nodes along the tilt, and the score that a share ``top`` of the tokens exceeds; no node lies
    on both sides of it.
    """
    whole = measure.along(theta)
    if whole is None or (0.0 < top < 1.0 and measure.score_tail(theta, 0.0) is None):
        raise ValueError(
            "measure: expected Gaussian, Sphere, Ball or a mixture of these, got"
            f" {type(measure).__name__}; draw tokens from it and use exact_pool_curve"
        )
    if not 0.0 < top < 1.0:
        return whole, -np.inf if top == 1.0 else np.inf
    low, high = (float(edge) for edge in torch.aminmax(torch.cat([line.scores for line in whole])))
    width = high - low
    low, high = low - 1.0 - width, high + 1.0 + width
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (
            (middle, high) if (measure.score_tail(theta, middle) or 0.0) > top else (low, middle)
        )
    if abs((measure.score_tail(theta, high) or 0.0) / top - 1.0) > 1e-6:
        raise ValueError(
            "keep: many tokens share the score at which topk ends, so ties would decide; give"
            " another query or law"
        )
    lines = measure.pieces(theta, high)
    assert lines is not None
    return lines, high
