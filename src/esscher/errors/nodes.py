"""Exact errors summed key by key, in float64: the reference path, and the engine for laws reduced
to nodes along the tilt.

A law of keys seen from a query is a list of scores s_j with weights w_j, values v_j and variances
b_j (the variance the value still has once the key's score is known). Formulas:
esscher.errors.integral.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from esscher.attention.head import Head
from esscher.errors.curve import QueryErrors, check_sampling, concatenate, side_by_side
from esscher.errors.integral import (
    Family,
    Source,
    bernoulli_errors,
    replacement_errors,
)
from esscher.inputs import as_counts
from esscher.measures.line import Line

STEP, TOL = 0.28, 1e-13  # aliasing(0.28) is 3e-13
ELEMENTS = 2**17  # of one temporary array: a megabyte
WIDE = 300.0  # a span from which keys are sorted and only those near tau are summed
REACH = 120.0  # below -tau - REACH a key is worth exp(-REACH): nothing, even times 2**53 tokens
SHUT = 6.0  # exp(-exp(6)) = 1e-175: above -tau + SHUT every kernel has its final value


class KeySource(Source):
    """Keys of m queries: ``score`` (m, N), at most 0; mass w, spread w (|c|^2 + b), both (m, N);
    value w c, (m, d, N).
    """

    chunk = 16

    def __init__(self, score: Tensor, mass: Tensor, spread: Tensor, value: Tensor) -> None:
        self.score, self.mass, self.spread, self.value = score, mass, spread, value
        self.span = -float(torch.where(score > -torch.inf, score, 0.0).min())

    @classmethod
    def build(cls, scores: Tensor, log_weights: Tensor, values: Tensor, extra: Tensor) -> KeySource:
        """From scores, log-weights and extra variances (m, N) and values (m, N, d), in float64;
        weights sum to 1, or to 1 - ``missing``.
        """
        inside = log_weights > -math.inf
        anchor = scores.masked_fill(~inside, -math.inf).amax(1, keepdim=True)
        # a key of weight 0 is put on the anchor, where it costs no range
        score = torch.where(inside, scores - anchor, 0.0)
        # centred twice: first on the value of the heaviest key, so that neither a common offset nor
        # a limit that is nearly this value costs digits, and values that are all equal leave
        # exactly nothing
        heaviest = (log_weights + score).argmax(1)
        shift = values[torch.arange(len(values), device=values.device), heaviest][:, None]
        near = values - shift
        log_tilt = torch.logsumexp(log_weights + score, 1)
        p = torch.exp(log_weights + score - log_tilt[:, None])
        drift = (p[:, None, :] @ near).transpose(1, 2)  # limit - shift, (m, d, 1)
        c = near.transpose(1, 2) - drift
        square = c.square().sum(1) + extra
        mass = log_weights.exp()
        found = cls(score, mass, mass * square, mass[:, None, :] * c)
        found.limit = shift[:, 0] + drift[:, :, 0]
        found.mean, found.variance = found.value.sum(2), found.spread.sum(1)
        found.log_first, found.largest = log_tilt, torch.where(inside, square, 0.0).amax(1)
        found.log_pair = torch.logsumexp(log_weights + 2 * score, 1)
        found.log_spread = torch.logsumexp(log_weights + 2 * score + square.log(), 1)
        return found

    def contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        """Sum over keys, a few nodes at a time so that temporaries stay small."""
        rows = max(1, ELEMENTS // self.score.numel())
        parts = [self._contract(part, family) for part in torch.split(tau, rows)]
        return {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]}

    def _contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        out = {}
        u = tau[:, None] + self.score[:, None, :]  # (m, nodes, N)
        for name, (channel, kernel) in family(u, tau[:, None]).items():
            if channel == "value":
                out[name] = (self.value @ kernel.transpose(1, 2)).transpose(0, 1)
            else:
                weights = self.mass if channel == "mass" else self.spread
                out[name] = (kernel @ weights[:, :, None])[:, :, 0]
        return out


class _WideSource(Source):
    """One query whose scores span hundreds of nats: for each tau, only the keys whose kernel is not
    constant.

    Gaps longer than REACH (and the spread of the log-weights) are shortened to that: keys further
    apart never compete.
    """

    chunk = 256

    def __init__(self, keys: KeySource) -> None:
        score, order = keys.score[0].sort(descending=True)
        weights = keys.mass[0][keys.mass[0] > 0]
        self.reach = REACH + float(torch.log(weights.max() / weights.min()))
        gaps = (score[:-1] - score[1:]).clamp(max=self.reach)
        self.score = torch.cat([score[:1], score[0] - gaps.cumsum(0)])
        self.channels = keys.mass[0, order], keys.spread[0, order], keys.value[0][:, order]
        self.over = [pad(x.cumsum(-1), (1, 0)) for x in self.channels]
        self.under = [pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in self.channels]
        self.limit, self.mean, self.variance = keys.limit, keys.mean, keys.variance
        self.log_first, self.log_pair = keys.log_first, keys.log_pair
        self.log_spread, self.largest, self.missing = keys.log_spread, keys.largest, keys.missing
        self.span = float(-self.score[-1])

    def contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        bounds = torch.stack([tau.min() - SHUT, tau.max() + self.reach])  # in -score, which ascends
        first, last = torch.searchsorted(-self.score, bounds.to(self.score)).tolist()
        # kernels are constant above the band and below it: a key at either infinity carries the
        # sums of all those
        mass, spread, value = (
            torch.cat(
                [over[..., first : first + 1], x[..., first:last], under[..., last : last + 1]], -1
            )[None]
            for over, x, under in zip(self.over, self.channels, self.under, strict=True)
        )
        score = pad(pad(self.score[first:last], (1, 0), value=1e9), (0, 1), value=-1e9)[None]
        return KeySource(score, mass, spread, value).contract(tau, family)


def error_from_nodes(
    scores: Any,
    log_weights: Any,
    values: Any,
    extra: Any,
    n: Any,
    *,
    sampling: str = "replacement",
    of: int | None = None,
    details: bool = False,
) -> QueryErrors:
    """Exact error of softmax attention on n keys drawn from weighted nodes, in float64, relative
    error about 1e-12.

    ``scores``: (m, N), row i seen by query i. ``log_weights``: (N,) or (m, N), normalised here;
    None: equal weights. ``values``: (N, d) or (m, N, d). ``extra``: variance of the value given the
    node, summed over its d coordinates, (N,) or (m, N); None for 0. ``n``: token numbers up to
    2**53. ``sampling="bernoulli"`` keeps each of the N nodes with probability n / ``of``, by
    default n / N, instead (equal weights, no extra, n at most that; no kept key counts as no
    error).

    Memory is flat in m; time is m x N x (about 100 nodes, and 3.6 more per nat of score range). A
    query whose scores span more than 300 nats sums only the keys near each node: its time grows
    with N plus the range, not their product.
    """
    score = torch.as_tensor(scores, dtype=torch.float64)
    m, keys = score.shape
    value, weight, spare = (
        torch.as_tensor(x, dtype=torch.float64, device=score.device)
        for x in (
            values,
            np.zeros(keys) if log_weights is None else log_weights,
            np.zeros(keys) if extra is None else extra,
        )
    )
    counts = as_counts(n, "n")
    if of is None:
        check_sampling(sampling, counts, keys)
    log_weight = torch.log_softmax(weight.expand(m, keys), 1)
    parts = []
    for _, source in sources(score, log_weight, value, spare.expand(m, keys)):
        if sampling == "replacement":
            drawn = torch.as_tensor(counts, dtype=torch.float64, device=score.device)
            found = replacement_errors(source, drawn, step=STEP, tol=TOL, details=details)
        else:
            own = source.limit.new_full((len(source.limit),), keys)
            columns = (
                bernoulli_errors(source, count, of or keys, own, step=STEP, tol=TOL)
                for count in counts.tolist()
            )
            found = side_by_side(list(columns))
        parts.append(found)
    return concatenate(parts)


def line_nodes(head: Head, lines: Sequence[Line]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, log-weights, values and extra variances of a law's nodes along one tilt."""
    return (
        torch.cat([line.scores for line in lines]),
        torch.cat([line.log_weights for line in lines]),
        head.values(torch.cat([line.means for line in lines])),
        torch.cat([line.extra(head.V.double()) for line in lines]),
    )


def sources(
    score: Tensor, log_weight: Tensor, value: Tensor, extra: Tensor
) -> Iterator[tuple[slice, Source]]:
    """Some queries at a time, a wide one alone: scores, log-weights, extra (m, N), values (N, d) or
    (m, N, d), in float64.
    """
    spans = (score.amax(1) - score.amin(1)).tolist()
    group = max(1, ELEMENTS // (16 * score.shape[1]))
    i = 0
    while i < len(spans):
        j = i + 1
        while j < min(i + group, len(spans)) and spans[i] <= WIDE and spans[j] <= WIDE:
            j += 1
        own = value[i:j] if value.ndim == 3 else value.expand(j - i, -1, -1)
        near = KeySource.build(score[i:j], log_weight[i:j], own, extra[i:j])
        yield slice(i, j), _WideSource(near) if spans[i] > WIDE else near
        i = j


def error_of_kept(
    score: Tensor, log_mass: Tensor, value: Tensor, extra: Tensor, tokens: int, limit: Tensor
) -> QueryErrors:
    """The error of one query, against ``limit`` (d,), of n tokens of which each is kept with a
    chance of its own.

    A token that is not kept has e = 0, so the formulas for n draws hold with sums over the kept
    ones alone. ``score``: log of what a kept token counts, (N,); ``log_mass``: log of weight times
    chance; ``value``, ``extra`` as in ``error_from_nodes``. Around the limit g' of what is kept,
    E|Gamma - g|^2 = E|Gamma - g'|^2 + 2 <bias', g' - g> + |g' - g|^2 P(one is kept).
    """
    near = KeySource.build(score[None], log_mass[None], value[None], extra[None])
    kept = float(near.mass.sum())
    near.missing = max(0.0, 1.0 - kept)
    source = _WideSource(near) if near.span > WIDE else near
    n = score.new_tensor([tokens], dtype=torch.float64)
    found = replacement_errors(source, n, step=STEP, tol=TOL, details=True)
    assert found.bias is not None
    gap = (near.limit[0] - limit).cpu().numpy()
    some = -math.expm1(tokens * math.log1p(-kept)) if kept < 1.0 else 1.0
    mse = found.mse[0, 0] + 2.0 * found.bias[0, 0] @ gap + gap @ gap * some
    return replace(
        found,
        mse=np.array([[max(mse, 0.0)]]),
        bias=found.bias + gap * some,
        limit=limit.cpu().numpy()[None],
    )


# ---- Errors of two heads on one random set of keys: they lose the same keys, so that their
# errors are correlated.

PAIR_STEP = 0.4  # of log s and log t: the trapezoid rule converges geometrically
SMALL, LARGE = 1e-9, 45.0  # where s S begins and where exp(-s S) ends


def pair_error(
    scores: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    centred: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]],
    probability: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] | None = None,
    *,
    step: float = PAIR_STEP,
) -> float:
    """E <e_1, e_2> of one query of each head; ``centred``: values minus the limit, in one space."""
    p = probability.double()
    seen = p > 0
    p = p[seen]
    w = torch.ones_like(p) if weight is None else weight.double()[seen]
    eps, phi = (w * torch.exp(one.double()[seen] - one.double()[seen].max()) for one in scores)
    c, d = (values.double()[seen] for values in centred)
    inner = (c * d).sum(1)
    total = 0.0
    across = _pair_nodes(phi, p, step)
    for s in _pair_nodes(eps, p, step).tolist():
        decay = p * torch.exp(-s * eps - across[:, None] * phi)  # (nodes, n)
        denominator = 1 - p + decay
        g = decay / denominator
        first, second = (g * eps) @ c, (g * phi) @ d
        inside = (first * second).sum(1) + (g * (1 - g) * (eps * phi)) @ inner
        product = torch.log(denominator).sum(1).exp()
        total += s * float((across * product * inside).sum())
    return step * step * total


def _pair_nodes(eps: Tensor, p: Tensor, step: float) -> Tensor:
    """From well below 1 / E S to where exp(-s S) is gone, whichever keys are kept: with sure keys
    that is sooner.
    """
    sure = float(eps[p == 1].sum())
    end = LARGE / (sure if sure > 0 else float(eps.min()))
    first = math.log(SMALL / float((p * eps).sum()))
    return torch.exp(
        torch.arange(first, math.log(end) + step, step, dtype=torch.float64, device=eps.device)
    )
