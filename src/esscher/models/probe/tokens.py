"""The tokens of one layer: its attention, blocks of its queries, keys and values, their moments,
and what these say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.models.huggingface.capture import AttentionCall
from esscher.models.huggingface.maps import LinearMaps
from esscher.models.probe.token_tails import SplitExtremes, SplitTails
from esscher.tails import moments as token_moments
from esscher.tails.moments import TokenMoments, TokenSummary

__all__ = ["LayerInfo", "LayerMoments", "LayerSummary", "Rows", "largest_variance"]


@dataclass(frozen=True)
class LayerInfo:
    """What a layer's attention is, besides its tokens."""

    layer: int
    heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    note: str  # what the pool leaves out of this attention; empty where nothing is

    @classmethod
    def of(cls, captured: AttentionCall, *, own: bool = False) -> LayerInfo:
        """``own``: queries meet the keys of their own context, where biases and sinks are known."""
        left_out = []
        if captured.bias is not None and not own:
            left_out.append("position bias of the scores")
        if captured.sinks is not None and not own:
            left_out.append("sink logit")
        note = f"left out of the pool: {', '.join(left_out)}" if left_out else ""
        if captured.sinks is not None and own:
            note = "a sink logit is in the softmax: keep rules never drop it, draws may take it"
        return cls(
            captured.layer,
            captured.heads,
            captured.kv_heads,
            captured.scale,
            captured.softcap,
            note,
        )

    def kv_head(self, head: int) -> int:
        """The key-value head that a head reads."""
        return head // (self.heads // self.kv_heads)


@dataclass(frozen=True)
class Rows:
    """Pooled tokens of a block: q (H, B, k), k and v (H_kv, B, .), positions in their windows (B,),
    hidden (B, d) or None.

    ``special`` (B,): the special tokens among them; ``pieces`` (B,): the piece of the pool each is
    of; None: not known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    hidden: Tensor | None
    special: Tensor | None = None
    pieces: Tensor | None = None

    @classmethod
    def of(
        cls,
        captured: AttentionCall,
        pooled: Tensor,
        special: Tensor | None = None,
        pieces: Tensor | None = None,
    ) -> Rows:
        """``pooled`` (batch, tokens): which tokens to take; ``special`` and ``pieces``, alike: what
        is known of them.
        """
        wide = torch.float64 if captured.query.dtype == torch.float64 else torch.float32
        q, k, v = (
            x.to(wide).transpose(0, 1)[:, pooled]
            for x in (captured.query, captured.key, captured.value)
        )
        hidden = None if captured.hidden is None else captured.hidden.to(wide)[pooled]
        known = (None if each is None else each[pooled] for each in (special, pieces))
        return cls(q, k, v, pooled.nonzero()[:, 1], hidden, *known)

    @property
    def sinks(self) -> Tensor:
        """(B,): first tokens of their windows, and special ones."""
        first = self.positions == 0
        return first if self.special is None else first | self.special.to(first.device)

    def none(self) -> Rows:
        """No token of the same kind."""
        hidden = None if self.hidden is None else self.hidden[:0]
        return Rows(self.q[:, :0], self.k[:, :0], self.v[:, :0], self.positions[:0], hidden)


@dataclass(frozen=True)
class LayerMoments:
    """Streaming moments of what entered the layer and of its queries, keys and values.

    ``cross`` is sum (q - E q)(k - E k)^T over the tokens, q and k of the same one: with the
    scatters of q and k that of the pair (q, k). States merge as scatters do
    (esscher.tails.moments).
    """

    hidden: TokenMoments | None
    q: TokenMoments
    k: TokenMoments
    v: TokenMoments
    cross: Tensor  # (H, k, k) float64: k is that of the key-value head which the head reads
    extremes: SplitExtremes | None = None  # of what entered the layer

    @classmethod
    def of(cls, rows: Rows) -> LayerMoments:
        hidden = extremes = None
        if rows.hidden is not None:
            start = token_moments.init(rows.hidden.shape[-1], device=rows.hidden.device)
            hidden, extremes = (
                token_moments.update(start, rows.hidden),
                SplitExtremes.of(rows.hidden, rows.sinks),
            )
        q, k, v = (
            token_moments.update(
                token_moments.init(x.shape[-1], (x.shape[0],), higher=False, device=x.device), x
            )
            for x in (rows.q, rows.k, rows.v)
        )
        # its sum is 0, so that queries need not be centred
        apart = rows.k.double() - k.mean[:, None]
        cross = _of_each_head(apart, len(rows.q)).transpose(1, 2) @ rows.q.double()
        return cls(hidden, q, k, v, cross.transpose(1, 2), extremes)

    def merge(self, other: LayerMoments) -> LayerMoments:
        both = self.hidden is not None and other.hidden is not None
        hidden = token_moments.merge(self.hidden, other.hidden) if both else None  # type: ignore[arg-type]
        q, k, v = (
            token_moments.merge(a, b)
            for a, b in ((self.q, other.q), (self.k, other.k), (self.v, other.v))
        )
        both = self.extremes is not None and other.extremes is not None
        extremes = self.extremes.merge(other.extremes) if both else None  # type: ignore[union-attr, arg-type]
        return LayerMoments(
            hidden, q, k, v, self.cross + other.cross + self._apart(other), extremes
        )

    def _apart(self, other: LayerMoments) -> Tensor:
        """What the distance of two states' means adds to the cross scatter: n_a n_b / n D_q
        D_k^T.
        """
        a, b = self.q.count, other.q.count
        q, k = (
            other.q.mean - self.q.mean,
            _of_each_head(other.k.mean - self.k.mean, len(self.q.mean)),
        )
        return a * b / max(a + b, 1) * q[:, :, None] * k[:, None, :]

    def pair_cov(self, head: int, kv_head: int) -> Tensor:
        """Covariance (2k, 2k) of a head's token (q, k)."""
        cross = self.cross[head]
        above = torch.cat([self.q.scatter[head], cross], dim=1)
        return (
            torch.cat([above, torch.cat([cross.T, self.k.scatter[kv_head]], dim=1)]) / self.q.count
        )


def _of_each_head(x: Tensor, heads: int) -> Tensor:
    """Rows of key-value heads (H_kv, ...) as each of the heads (H, ...) reads them."""
    return x.repeat_interleave(heads // len(x), dim=0)


@dataclass(frozen=True)
class LayerSummary:
    """What is known of a layer in the end; ``sampled``: errors of its outputs' moments, by head and
    metric, if asked for.
    """

    info: LayerInfo
    moments: LayerMoments
    q: TokenSummary
    k: TokenSummary
    v: TokenSummary
    hidden: TokenSummary | None
    tails: SplitTails | None
    maps: LinearMaps | None
    sampled: Mapping[tuple[int, str], Any]

    @classmethod
    def of(
        cls,
        info: LayerInfo,
        moments: LayerMoments,
        maps: LinearMaps | None,
        sampled: Mapping[tuple[int, str], Any],
    ) -> LayerSummary:
        q, k, v = (token_moments.finish(part) for part in (moments.q, moments.k, moments.v))
        hidden = None if moments.hidden is None else token_moments.finish(moments.hidden)
        tails = None if moments.extremes is None else moments.extremes.finish()
        return cls(info, moments, q, k, v, hidden, tails, maps, sampled)


def largest_variance(cov: Tensor) -> float:
    """In any direction: the norm of a covariance."""
    return float(torch.linalg.eigvalsh(cov)[-1])
