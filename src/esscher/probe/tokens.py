"""The tokens of one layer: its attention, blocks of its queries, keys and values, their moments,
and what these say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.hf.call import AttentionCall
from esscher.hf.maps import LinearMaps
from esscher.runs.columns import Column
from esscher.tails import extremes
from esscher.tails import moments as token_moments
from esscher.tails.extremes import TAILS, Extremes, TailComparison, TokenTails
from esscher.tails.moments import TokenMoments, TokenSummary


@dataclass(frozen=True)
class SplitExtremes:
    """Streaming state of the tokens seen so far."""

    text: Extremes
    sinks: Extremes  # first tokens of windows and special ones

    @classmethod
    def of(cls, hidden: Tensor, sinks: Tensor) -> SplitExtremes:
        """``hidden`` (B, d); ``sinks`` (B,)."""
        start = extremes.init(hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
        if not bool(sinks.any()):
            return cls(extremes.update(start, hidden), start)
        return cls(extremes.update(start, hidden[~sinks]), extremes.update(start, hidden[sinks]))

    def merge(self, other: SplitExtremes) -> SplitExtremes:
        return SplitExtremes(
            extremes.merge(self.text, other.text), extremes.merge(self.sinks, other.sinks)
        )

    def finish(self) -> SplitTails:
        whole = extremes.finish(extremes.merge(self.text, self.sinks))
        apart = bool(self.sinks.count and self.text.count)
        return SplitTails(whole, extremes.finish(self.text) if apart else whole, self.sinks.count)


@dataclass(frozen=True)
class SplitTails:
    """Which law the tails follow; ``text``: without first and special tokens."""

    whole: TokenTails
    text: TokenTails
    sinks: int  # how many those are


KINDS = {"norm": "norms", "coordinate": "coordinates"}
MEANINGS = (
    "the tail of a Gaussian fits better than any Pareto law",
    "heavier than a Gaussian, yet with no power seen: like an exponential",
    "a Pareto law fits better, with a shape above 0",
    "neither fits better beyond the error of the comparison",
    "too few tokens, or too much alike",
)


def _words(kind: str, plural: str) -> tuple[Column, ...]:
    whole = (
        f"Law of the largest token {plural}, a Gaussian's tail against Pareto's, both fitted and"
        " compared."
    )
    text = f"Law of the largest {plural} without first tokens of windows and special tokens."
    return (
        Column(f"{kind}_tail", "word", f"tail of {plural}", whole, words=TAILS, meanings=MEANINGS),
        Column(
            f"{kind}_tail_text",
            "word",
            f"{plural} without sinks",
            text,
            words=TAILS,
            meanings=MEANINGS,
        ),
    )


def _numbers(kind: str, plural: str) -> tuple[Column, ...]:
    shape, ratio = f"{kind}_shape", f"{kind}_ratio"
    interval = "95 % interval, tokens taken as independent."
    return (
        Column(
            shape,
            "float",
            f"Pareto shape of {plural}",
            f"Shape xi of the generalised Pareto law of the largest {plural}; above 0 is a power"
            " tail, of exponent 1/xi.",
            ends=(f"{shape}_low", f"{shape}_high"),
        ),
        Column(f"{shape}_low", "float", f"shape of {plural}, low", f"Lower end of its {interval}"),
        Column(
            f"{shape}_high", "float", f"shape of {plural}, high", f"Upper end of its {interval}"
        ),
        Column(
            f"{kind}_sigma",
            "float",
            f"Gaussian scale of {plural}",
            f"Scale of the Gaussian whose tail fits the largest {plural} best, in standard"
            " deviations; 1 for a Gaussian law.",
        ),
        Column(
            ratio,
            "float",
            f"likelihood ratio of {plural}",
            "Log-likelihood of the Pareto law less that of the Gaussian tail, per value of the"
            " tail; above 0 for Pareto.",
            ends=(f"{ratio}_low", f"{ratio}_high"),
        ),
        Column(f"{ratio}_low", "float", f"ratio of {plural}, low", f"Lower end of its {interval}"),
        Column(
            f"{ratio}_high", "float", f"ratio of {plural}, high", f"Upper end of its {interval}"
        ),
    )


TAIL_COLUMNS = (
    *(column for kind, plural in KINDS.items() for column in _words(kind, plural)),
    *(column for kind, plural in KINDS.items() for column in _numbers(kind, plural)),
    Column(
        "tail_reason",
        "word",
        "tails in words",
        "The numbers behind the laws of the tails, and what differs from the verdict.",
    ),
)


def tail_row(tails: SplitTails | None, verdict: str) -> dict[str, Any]:
    """The columns of a layer; ``verdict``: that by kurtosis, which is named where it says
    otherwise.
    """
    if tails is None:
        words = {
            column.key: "unknown" if column.words else ""
            for column in TAIL_COLUMNS
            if column.kind == "word"
        }
        return {column.key: float("nan") for column in TAIL_COLUMNS} | words
    row: dict[str, Any] = {}
    told = []
    for kind, plural in KINDS.items():
        whole, text = getattr(tails.whole, plural), getattr(tails.text, plural)
        row |= _values(kind, whole) | {f"{kind}_tail_text": text.verdict}
        told.append(f"{plural.capitalize()}: {whole.reason}.")
        if text.verdict != whole.verdict:
            told.append(f"Without the {tails.sinks} first and special tokens, {text.reason}.")
    heavy = {tails.whole.norms.verdict, tails.whole.coordinates.verdict} & {"Pareto", "between"}
    if verdict == "heavier" and not heavy:
        told.append(
            "By kurtosis the verdict is heavier: it counts single coordinates and values, this one"
            " the tail of all."
        )
    if verdict in ("sub-Gaussian", "lighter") and heavy:
        told.append(
            f"By kurtosis the verdict is {verdict}: it weighs the middle of each coordinate, this"
            " one the largest values."
        )
    row["tail_reason"] = " ".join(told)
    return {column.key: row[column.key] for column in TAIL_COLUMNS}


def _values(kind: str, found: TailComparison) -> dict[str, Any]:
    (shape_low, shape_high), (ratio_low, ratio_high) = found.shape_interval, found.ratio_interval
    return {
        f"{kind}_tail": found.verdict,
        f"{kind}_shape": found.shape,
        f"{kind}_shape_low": shape_low,
        f"{kind}_shape_high": shape_high,
        f"{kind}_sigma": found.sigma,
        f"{kind}_ratio": found.ratio,
        f"{kind}_ratio_low": ratio_low,
        f"{kind}_ratio_high": ratio_high,
    }


# ---- The tokens of one layer: its attention, blocks of its queries, keys and values, their
# moments, and what these say.


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
