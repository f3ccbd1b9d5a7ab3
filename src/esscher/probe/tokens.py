"""Tokens of one layer: blocks of queries, keys and values, their streaming moments and tails."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.hf.call import AttentionCall, at_least_single
from esscher.runs.columns import Column
from esscher.tails import extremes
from esscher.tails import moments as token_moments
from esscher.tails.extremes import TAILS, Extremes, TokenTails
from esscher.tails.moments import Higher, TokenMoments, TokenSummary


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
        heads, kv_heads = captured.heads, captured.kv_heads
        return cls(captured.layer, heads, kv_heads, captured.scale, captured.softcap, note)

    def kv_head(self, head: int) -> int:
        """The key-value head that a head reads."""
        return head // (self.heads // self.kv_heads)


@dataclass(frozen=True)
class Rows:
    """Pooled tokens of a block: q (H, B, k), k and v (H_kv, B, .), hidden (B, d) or None, positions
    in their windows (B,), which are first or special ones (B,), and the piece of the pool (B,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor | None
    positions: Tensor
    sinks: Tensor
    pieces: Tensor

    @classmethod
    def of(cls, captured: AttentionCall, pooled: Tensor, special: Tensor, pieces: Tensor) -> Rows:
        """``pooled`` (batch, tokens): which tokens to take."""
        q, k, v = (
            at_least_single(x).transpose(0, 1)[:, pooled]
            for x in (captured.query, captured.key, captured.value)
        )
        hidden = None if captured.hidden is None else at_least_single(captured.hidden)[pooled]
        positions = pooled.nonzero()[:, 1]
        sinks = (positions == 0) | special[pooled]
        return cls(q, k, v, hidden, positions, sinks, pieces[pooled])


@dataclass(frozen=True)
class LayerMoments:
    """Streaming moments of what entered the layer and of its queries, keys and values.

    ``cross`` is sum (q - E q)(k - E k)^T over the tokens, q and k of the same one: with the
    scatters of q and k that of the pair (q, k). ``text`` and ``sinks``: extremes of what entered
    the layer, first and special tokens apart.
    """

    hidden: TokenMoments | None
    q: TokenMoments
    k: TokenMoments
    v: TokenMoments
    cross: Tensor  # (H, k, k) float64: k is that of the key-value head which the head reads
    text: Extremes | None
    sinks: Extremes | None

    @classmethod
    def of(cls, rows: Rows) -> LayerMoments:
        hidden = text = sinks = None
        if rows.hidden is not None:
            width, device = rows.hidden.shape[-1], rows.hidden.device
            hidden = token_moments.update(token_moments.init(width, device=device), rows.hidden)
            none = extremes.init(width, dtype=rows.hidden.dtype, device=device)
            text = extremes.update(none, rows.hidden[~rows.sinks])
            sinks = none
            if bool(rows.sinks.any()):
                sinks = extremes.update(none, rows.hidden[rows.sinks])
        q, k, v = (
            token_moments.update(
                token_moments.init(x.shape[-1], (x.shape[0],), higher=False, device=x.device), x
            )
            for x in (rows.q, rows.k, rows.v)
        )
        apart = rows.k.double() - k.mean[:, None]  # its sum is 0: queries need not be centred
        cross = _of_each_head(apart, len(rows.q)).transpose(1, 2) @ rows.q.double()
        return cls(hidden, q, k, v, cross.transpose(1, 2), text, sinks)

    def merge(self, other: LayerMoments) -> LayerMoments:
        """Over the tokens of both; means that lie apart add n_a n_b / n D_q D_k^T to the cross
        scatter.
        """
        q, k, v = (token_moments.merge(getattr(self, name), getattr(other, name)) for name in "qkv")
        a, b = self.q.count, other.q.count
        dq = other.q.mean - self.q.mean
        dk = _of_each_head(other.k.mean - self.k.mean, len(dq))
        cross = self.cross + other.cross + a * b / max(a + b, 1) * dq[:, :, None] * dk[:, None, :]
        if self.hidden is None or other.hidden is None:
            return LayerMoments(None, q, k, v, cross, None, None)
        assert self.text is not None
        assert self.sinks is not None
        assert other.text is not None
        assert other.sinks is not None
        return LayerMoments(
            token_moments.merge(self.hidden, other.hidden),
            *(q, k, v, cross),
            extremes.merge(self.text, other.text),
            extremes.merge(self.sinks, other.sinks),
        )

    def pair_cov(self, head: int, kv_head: int) -> Tensor:
        """Covariance (2k, 2k) of a head's token (q, k)."""
        cross = self.cross[head]
        above = torch.cat([self.q.scatter[head], cross], dim=1)
        below = torch.cat([cross.T, self.k.scatter[kv_head]], dim=1)
        return torch.cat([above, below]) / self.q.count


STORED = (LayerInfo, LayerMoments, TokenMoments, Higher, Extremes)


def _of_each_head(x: Tensor, heads: int) -> Tensor:
    """Rows of key-value heads (H_kv, ...) as each of the heads (H, ...) reads them."""
    return x.repeat_interleave(heads // len(x), dim=0)


@dataclass(frozen=True)
class LayerSummary:
    """What is known of a layer's tokens in the end. ``gram`` (H, k, k): W_q W_q^T of each head
    where q and k are affine in what enters the layer; None elsewhere.
    """

    info: LayerInfo
    moments: LayerMoments
    gram: Tensor | None
    q: TokenSummary
    k: TokenSummary
    v: TokenSummary
    hidden: TokenSummary | None

    @classmethod
    def of(cls, info: LayerInfo, moments: LayerMoments, gram: Tensor | None) -> LayerSummary:
        q, k, v = (token_moments.finish(part) for part in (moments.q, moments.k, moments.v))
        hidden = None if moments.hidden is None else token_moments.finish(moments.hidden)
        return cls(info, moments, gram, q, k, v, hidden)


def largest_variance(cov: Tensor) -> float:
    """In any direction: the norm of a covariance."""
    return float(torch.linalg.eigvalsh(cov)[-1])


# ---- The table ``layers``.

REACH = Column("reach", "float", "reach", "Largest variance of the tokens in any direction.")
KINDS = {"norm": "norms", "coordinate": "coordinates"}
MEANINGS = (
    "the tail of a Gaussian fits better than any Pareto law",
    "heavier than a Gaussian, yet with no power seen: like an exponential",
    "a Pareto law fits better, with a shape above 0",
    "neither fits better beyond the error of the comparison",
    "too few tokens, or too much alike",
)


def _tail_columns(kind: str, plural: str) -> tuple[Column, ...]:
    whole = f"Law of the largest token {plural}: a Gaussian's tail against Pareto's."
    text = f"The same of {plural} without first and special tokens."
    words = {"words": TAILS, "meanings": MEANINGS}
    shape, ends = f"{kind}_shape", (f"{kind}_shape_low", f"{kind}_shape_high")
    what = f"Pareto shape of the largest {plural}; above 0 is a power tail, of exponent 1/shape."
    sigma = f"Gaussian scale that fits the largest {plural} best; 1 for a Gaussian law."
    ratio, limits = f"{kind}_ratio", (f"{kind}_ratio_low", f"{kind}_ratio_high")
    likelier = "Log-likelihood of Pareto's tail less that of a Gaussian's, per value."
    return (
        Column(f"{kind}_tail", "word", f"tail of {plural}", whole, **words),  # type: ignore[arg-type]
        Column(f"{kind}_tail_text", "word", f"{plural} without sinks", text, **words),  # type: ignore[arg-type]
        Column(shape, "float", f"Pareto shape of {plural}", what, ends=ends),
        Column(ends[0], "float", f"shape of {plural}, low", "Lower end of its 95 % interval."),
        Column(ends[1], "float", f"shape of {plural}, high", "Upper end of its 95 % interval."),
        Column(f"{kind}_sigma", "float", f"Gaussian scale of {plural}", sigma),
        Column(ratio, "float", f"likelihood ratio of {plural}", likelier, ends=limits),
        Column(limits[0], "float", f"ratio of {plural}, low", "Lower end of its 95 % interval."),
        Column(limits[1], "float", f"ratio of {plural}, high", "Upper end of its 95 % interval."),
    )


LAYERS = (
    Column("layer", "int", "layer", "Layer of the model, counted from 0.", first=0),
    Column("tokens", "int", "tokens", "Number of tokens that entered the layer."),
    REACH,
    Column("largest_z", "float", "largest deviation", "Largest coordinate, in deviations."),
    Column("gaussian_z", "float", "Gaussian deviation", "The same of as many Gaussian tokens."),
    Column("verdict", "word", "verdict", "Tokens are sub-Gaussian, heavier- or lighter-tailed."),
    Column("reason", "word", "reason", "The numbers behind the verdict."),
    *(column for kind, plural in KINDS.items() for column in _tail_columns(kind, plural)),
    Column("tail_reason", "word", "tails in words", "The numbers behind the laws of the tails."),
)


def layer_row(layer: LayerSummary) -> dict[str, Any]:
    """What is known of the tokens that enter the layer."""
    hidden, moments = layer.hidden, layer.moments
    unknown = {
        column.key: math.nan if column.kind == "float" else "unknown" if column.words else ""
        for column in LAYERS
    }
    row: dict[str, Any] = unknown | {"layer": layer.info.layer, "tokens": layer.q.count}
    if hidden is None or moments.text is None or moments.sinks is None:
        return row | {"verdict": "unknown"}
    row |= {
        "reach": largest_variance(hidden.cov),
        "largest_z": math.nan if hidden.largest_z is None else float(hidden.largest_z),
        "gaussian_z": hidden.gaussian_z,
        "verdict": hidden.verdict,
        "reason": hidden.reason,
    }
    whole = text = extremes.finish(extremes.merge(moments.text, moments.sinks))
    if moments.sinks.count and moments.text.count:
        text = extremes.finish(moments.text)
    return row | _tail_row(whole, text, moments.sinks.count, hidden.verdict)


def _tail_row(whole: TokenTails, text: TokenTails, sinks: int, verdict: str) -> dict[str, Any]:
    """``text``: the tails without the first and special tokens; ``verdict``: that by kurtosis,
    which is named where it says otherwise.
    """
    row: dict[str, Any] = {}
    told = []
    for kind, plural in KINDS.items():
        found, without = getattr(whole, plural), getattr(text, plural)
        (low, high), (ratio_low, ratio_high) = found.shape_interval, found.ratio_interval
        row |= {
            f"{kind}_tail": found.verdict,
            f"{kind}_tail_text": without.verdict,
            f"{kind}_shape": found.shape,
            f"{kind}_shape_low": low,
            f"{kind}_shape_high": high,
            f"{kind}_sigma": found.sigma,
            f"{kind}_ratio": found.ratio,
            f"{kind}_ratio_low": ratio_low,
            f"{kind}_ratio_high": ratio_high,
        }
        told.append(f"{plural.capitalize()}: {found.reason}.")
        if without.verdict != found.verdict:
            told.append(f"Without the {sinks} first and special tokens, {without.reason}.")
    heavy = {whole.norms.verdict, whole.coordinates.verdict} & {"Pareto", "between"}
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
    return row | {"tail_reason": " ".join(told)}
