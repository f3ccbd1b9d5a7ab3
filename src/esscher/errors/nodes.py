"""The functionals summed key by key: the reference path, and the engine for laws reduced to nodes
along the tilt.

A law of keys seen from a query is a list of scores s_j with weights w_j, values v_j and variances
b_j (the variance the value still has once the key's score is known). ``error_from_nodes``
integrates its exact error in float64 by summing (nodes in tau) x (keys); see
esscher.errors.formulas for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors.bernoulli import bernoulli_errors
from esscher.errors.curve import check_sampling
from esscher.errors.formulas import Family, Moments, NodeErrors, Source, Sums, Vectors
from esscher.errors.replacement import replacement_errors
from esscher.inputs import as_counts, as_tensor

STEP, TOL = 0.28, 1e-13  # aliasing(0.28) is 3e-13
ELEMENTS = 2**17  # of one temporary array: a megabyte
WIDE = 300.0  # a span from which keys are sorted and only those near tau are summed
REACH = 120.0  # below -tau - REACH a key is worth exp(-REACH): nothing, even times 2**53 tokens
SHUT = 6.0  # exp(-exp(6)) = 1e-175: above -tau + SHUT every kernel has its final value


@dataclass(frozen=True)
class KeySource:
    """Keys of m queries: ``score`` (m, N), at most 0; mass w, spread w (|c|^2 + b), both (m, N);
    value w c, (m, d, N).
    """

    score: Tensor
    mass: Tensor
    spread: Tensor
    value: Tensor
    moments: Moments
    span: float
    chunk: int = 16

    @classmethod
    def build(cls, scores: Tensor, log_weights: Tensor, values: Tensor, extra: Tensor) -> KeySource:
        """From scores, log-weights and extra variances (m, N) and values (m, N, d), in float64;
        weights sum to 1.
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
        value = mass[:, None, :] * c
        return cls(
            score=score,
            mass=mass,
            spread=mass * square,
            value=value,
            moments=Moments(
                limit=shift[:, 0] + drift[:, :, 0],
                mean=value.sum(2),
                variance=(mass * square).sum(1),
                log_first=log_tilt,
                log_pair=torch.logsumexp(log_weights + 2 * score, 1),
                log_spread=torch.logsumexp(log_weights + 2 * score + square.log(), 1),
            ),
            span=float(-score.min()),
        )

    def contract(self, tau: Tensor, family: Family) -> Sums:
        """Sum over keys, a few nodes at a time so that temporaries stay small."""
        rows = max(1, ELEMENTS // self.score.numel())
        parts = [self._contract(part, family) for part in torch.split(tau, rows)]
        out = {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]}
        vectors = {
            name: Vectors(out.pop(name).transpose(0, 1), 1.0)
            for name, x in list(out.items())
            if x.ndim == 3
        }
        return Sums(out, vectors)

    def _contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        """Numbers (m, nodes) and vectors (m, d, nodes)."""
        out = {}
        for name, (channel, kernel) in family(
            tau[:, None] + self.score[:, None, :], tau[:, None]
        ).items():
            if channel == "value":
                out[name] = self.value @ kernel.transpose(1, 2)
            else:
                weights = self.mass if channel == "mass" else self.spread
                out[name] = (kernel @ weights[:, :, None])[:, :, 0]
        return out


class _WideSource:
    """One query whose scores span hundreds of nats: for each tau, only the keys whose kernel is not
    constant.

    Gaps longer than REACH (and the spread of the log-weights) are shortened to that: keys further
    apart never compete.
    """

    def __init__(self, keys: KeySource) -> None:
        assert keys.score.shape[0] == 1
        score, order = keys.score[0].sort(descending=True)
        weights = keys.mass[0][keys.mass[0] > 0]
        self.reach = REACH + float(torch.log(weights.max() / weights.min()))
        gaps = (score[:-1] - score[1:]).clamp(max=self.reach)
        self.score = torch.cat([score[:1], score[0] - gaps.cumsum(0)])
        self.channels = keys.mass[0, order], keys.spread[0, order], keys.value[0][:, order]
        self.over = [torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in self.channels]
        self.under = [
            torch.nn.functional.pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in self.channels
        ]
        self.moments = keys.moments
        self.span = float(-self.score[-1])
        self.chunk = 256

    def contract(self, tau: Tensor, family: Family) -> Sums:
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
        score = torch.nn.functional.pad(self.score[first:last], (1, 0), value=1e9)
        score = torch.nn.functional.pad(score, (0, 1), value=-1e9)[None]
        return KeySource(score, mass, spread, value, self.moments, self.span).contract(tau, family)


def error_from_nodes(
    scores: Any,
    log_weights: Any,
    values: Any,
    extra: Any,
    n: Any,
    *,
    sampling: str = "replacement",
    details: bool = False,
) -> NodeErrors:
    """Exact error of softmax attention on n keys drawn from weighted nodes, in float64, relative
    error about 1e-12.

    ``scores``: (m, N), row i seen by query i. ``log_weights``: (N,) or (m, N), normalised here;
    None: equal weights. ``values``: (N, d) or (m, N, d). ``extra``: variance of the value given the
    node, summed over its d coordinates, (N,) or (m, N); None for 0. ``n``: token numbers up to
    2**53. ``sampling="bernoulli"`` keeps each of the N nodes with probability n / N instead (equal
    weights, no extra, n at most N; no kept key counts as no error).

    Memory is flat in m; time is m x N x (about 100 nodes, and 3.6 more per nat of score range). A
    query whose scores span more than 300 nats sums only the keys near each node: its time grows
    with N plus the range, not their product.
    """
    score, log_weight, value, spare = _nodes(scores, log_weights, values, extra)
    counts = as_counts(n, "n")
    keys = score.shape[1]
    check_sampling(sampling, counts, keys)
    if sampling == "bernoulli" and not (log_weights is None and extra is None):
        raise ValueError(
            "sampling='bernoulli': expected equal weights and no extra variance; pass None for both"
        )
    parts = [
        _integrate(near, counts, keys, keys, sampling, details)
        for _, near in sources(score, log_weight, value, spare)
    ]
    return concatenate(parts)


def error_of_share(score: Tensor, value: Tensor, n: Any, of: int, sampling: str) -> NodeErrors:
    """The error of queries over keys of their own, scores (m, N) and values (N, d): "bernoulli"
    keeps each with n / of.
    """
    keys, score = score.shape[1], score.double()
    equal, none = torch.full_like(score, -math.log(keys)), torch.zeros_like(score)
    near = sources(score, equal, value.double(), none)
    return concatenate([_integrate(source, n, keys, of, sampling, False) for _, source in near])


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
) -> NodeErrors:
    """The error of one query, against ``limit`` (d,), of n tokens of which each is kept with a
    chance of its own.

    A token that is not kept has e = 0, so the formulas for n draws hold with sums over the kept
    ones alone. ``score``: log of what a kept token counts, (N,); ``log_mass``: log of weight times
    chance; ``value``, ``extra`` as in ``error_from_nodes``. Around the limit g' of what is kept,
    E|Gamma - g|^2 = E|Gamma - g'|^2 + 2 <bias', g' - g> + |g' - g|^2 P(one is kept).
    """
    near = KeySource.build(score[None], log_mass[None], value[None], extra[None])
    kept = float(near.mass.sum())
    near = replace(
        near, moments=replace(near.moments, missing=near.mass.new_tensor([[max(0.0, 1.0 - kept)]]))
    )
    found = _integrate(
        _WideSource(near) if near.span > WIDE else near,
        [tokens],
        tokens,
        tokens,
        "replacement",
        True,
    )
    assert found.bias is not None
    gap = (near.moments.limit[0] - limit).cpu().numpy()
    some = -math.expm1(tokens * math.log1p(-kept)) if kept < 1.0 else 1.0
    mse = found.mse[0, 0] + 2.0 * found.bias[0, 0] @ gap + gap @ gap * some
    return replace(
        found,
        mse=np.array([[max(mse, 0.0)]]),
        bias=found.bias + gap * some,
        limit=limit.cpu().numpy()[None],
    )


def _integrate(
    source: Source, counts: Any, keys: int, of: int, sampling: str, details: bool
) -> NodeErrors:
    limit = source.moments.limit
    if sampling == "replacement":
        n = torch.as_tensor(counts, dtype=torch.float64, device=limit.device)
        return replacement_errors(source, n, step=STEP, tol=TOL, details=details)
    own = limit.new_full((len(limit),), keys)
    return side_by_side(
        [
            bernoulli_errors(source, int(c), of, own, step=STEP, tol=TOL, details=details)
            for c in counts
        ]
    )


def concatenate(parts: list[NodeErrors]) -> NodeErrors:
    """Results of disjoint groups of queries as one."""
    return _join(parts, 0)


def side_by_side(parts: list[NodeErrors]) -> NodeErrors:
    """Results of the same queries at different n as one."""
    return _join(parts, 1)


def take(errors: NodeErrors, rows: npt.NDArray[np.int64]) -> NodeErrors:
    """The results of these queries, in this order."""
    return NodeErrors(
        mse=errors.mse[rows],
        sum_p2=errors.sum_p2[rows],
        dmse_dlogn=errors.dmse_dlogn[rows],
        limit=errors.limit[rows],
        delta=errors.delta[rows],
        bias=None if errors.bias is None else errors.bias[rows],
        accuracy=errors.accuracy,
    )


def _join(parts: list[NodeErrors], axis: int) -> NodeErrors:
    biases = [part.bias for part in parts if part.bias is not None]
    return NodeErrors(
        mse=np.concatenate([part.mse for part in parts], axis),
        sum_p2=np.concatenate([part.sum_p2 for part in parts], axis),
        dmse_dlogn=np.concatenate([part.dmse_dlogn for part in parts], axis),
        limit=np.concatenate([part.limit for part in parts]) if axis == 0 else parts[0].limit,
        delta=np.concatenate([part.delta for part in parts]) if axis == 0 else parts[0].delta,
        bias=np.concatenate(biases, axis) if biases else None,
        accuracy=max(part.accuracy for part in parts),
    )


def _nodes(
    scores: Any, log_weights: Any, values: Any, extra: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked float64 tensors: scores, normalised log-weights and extra as (m, N), values (N, d) or
    (m, N, d).
    """
    score = as_tensor(scores, "scores", ndim=2).double().detach()
    m, keys = score.shape
    if m == 0 or keys == 0:
        raise ValueError(
            f"scores: expected at least one query and one key, got shape {tuple(score.shape)}"
        )
    value = as_tensor(values, "values").double().detach().to(score.device)
    if (
        value.ndim not in (2, 3)
        or value.shape[-2] != keys
        or (value.ndim == 3 and value.shape[0] != m)
    ):
        raise ValueError(
            f"values: expected shape ({keys}, d) or ({m}, {keys}, d), got {tuple(value.shape)}"
        )
    if log_weights is None:
        log_weight = score.new_full((m, keys), -math.log(keys))
    else:
        raw = (
            log_weights
            if isinstance(log_weights, Tensor)
            else torch.as_tensor(np.array(log_weights, dtype=np.float64))
        )
        raw = raw.to(score.device)
        finite = as_tensor(torch.where(raw == -math.inf, 0.0, raw), "log_weights").double()
        log_weight = torch.where(raw == -math.inf, -math.inf, finite)
        log_weight = _per_query(log_weight, "log_weights", m, keys)
        if not bool((log_weight > -math.inf).any(1).all()):
            raise ValueError(
                "log_weights: expected a positive weight for every query, got only zeros"
            )
        log_weight = torch.log_softmax(log_weight, 1)
    spare = score.new_zeros(m, keys)
    if extra is not None:
        spare = _per_query(as_tensor(extra, "extra"), "extra", m, keys).double().to(score.device)
    if bool((spare < 0).any()):
        raise ValueError(f"extra: expected variances of at least 0, got {float(spare.min())}")
    return score, log_weight, value, spare


def _per_query(x: Tensor, name: str, m: int, keys: int) -> Tensor:
    if x.shape not in ((keys,), (m, keys)):
        raise ValueError(f"{name}: expected shape ({keys},) or ({m}, {keys}), got {tuple(x.shape)}")
    return x.expand(m, keys)
