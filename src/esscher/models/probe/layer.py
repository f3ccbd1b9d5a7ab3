"""What is known of one layer while its tokens stream by: moments of its tokens, and a state for each head.

A layer's queries are captured first, from the few windows they stand in; then every block of keys and values updates the
states. Parts of a corpus have states of their own, which merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from esscher.diagnostics import moments as token_moments
from esscher.diagnostics.moments import TokenMoments
from esscher.diagnostics.tails import tail_length
from esscher.models.huggingface.capture import Captured
from esscher.models.probe import head as head_state
from esscher.models.probe.context import Indices, TokenSource
from esscher.models.probe.head import HeadState

__all__ = ["LayerInfo", "LayerMoments", "LayerQueries", "LayerState", "Rows", "capture_queries", "merge_layers", "scores_of"]

KEY_BLOCK = 8192


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
    def of(cls, captured: Captured) -> LayerInfo:
        left_out = []
        if captured.bias is not None:
            left_out.append("position bias of the scores")
        if captured.sinks is not None:
            left_out.append("sink logit")
        note = f"left out of the pool: {', '.join(left_out)}" if left_out else ""
        return cls(captured.layer, captured.heads, captured.kv_heads, captured.scale, captured.softcap, note)

    def kv_head(self, head: int) -> int:
        """The key-value head that a head reads."""
        return head // (self.heads // self.kv_heads)


def scores_of(info: LayerInfo, q: Tensor, k: Tensor) -> Tensor:
    """Scores of queries (..., m, k) for keys (..., B, k), capped where the model caps them."""
    scores = (q * info.scale) @ k.transpose(-1, -2)
    return scores if info.softcap is None else info.softcap * torch.tanh(scores / info.softcap)


@dataclass(frozen=True)
class Rows:
    """Pooled tokens of a block: q (H, B, k), k and v (H_kv, B, .), hidden (B, d) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, captured: Captured, pooled: Tensor) -> Rows:
        """``pooled`` (batch, tokens): which tokens to take."""
        wide = torch.float64 if captured.query.dtype == torch.float64 else torch.float32
        q, k, v = (x.to(wide).transpose(0, 1)[:, pooled] for x in (captured.query, captured.key, captured.value))
        return cls(q, k, v, None if captured.hidden is None else captured.hidden.to(wide)[pooled])


@dataclass(frozen=True)
class LayerMoments:
    """Streaming moments of what entered the layer and of its queries, keys and values.

    ``cross`` is sum (q - E q)(k - E k)^T over the tokens, q and k of the same one: with the scatters of q and k that of the
    pair (q, k). States merge as scatters do (esscher.diagnostics.moments).
    """

    hidden: TokenMoments | None
    q: TokenMoments
    k: TokenMoments
    v: TokenMoments
    cross: Tensor  # (H, k, k) float64: k is that of the key-value head which the head reads

    @classmethod
    def of(cls, rows: Rows) -> LayerMoments:
        hidden = None
        if rows.hidden is not None:
            start = token_moments.init(rows.hidden.shape[-1], device=rows.hidden.device)
            hidden = token_moments.update(start, rows.hidden)
        q, k, v = (
            token_moments.update(token_moments.init(x.shape[-1], (x.shape[0],), higher=False, device=x.device), x)
            for x in (rows.q, rows.k, rows.v)
        )
        apart = rows.k.double() - k.mean[:, None]  # its sum is 0, so that queries need not be centred
        cross = _of_each_head(apart, len(rows.q)).transpose(1, 2) @ rows.q.double()
        return cls(hidden, q, k, v, cross.transpose(1, 2))

    def merge(self, other: LayerMoments) -> LayerMoments:
        both = self.hidden is not None and other.hidden is not None
        hidden = token_moments.merge(self.hidden, other.hidden) if both else None  # type: ignore[arg-type]
        q, k, v = (token_moments.merge(a, b) for a, b in ((self.q, other.q), (self.k, other.k), (self.v, other.v)))
        return LayerMoments(hidden, q, k, v, self.cross + other.cross + self._apart(other))

    def _apart(self, other: LayerMoments) -> Tensor:
        """What the distance of two states' means adds to the cross scatter: n_a n_b / n D_q D_k^T."""
        a, b = self.q.count, other.q.count
        q, k = other.q.mean - self.q.mean, _of_each_head(other.k.mean - self.k.mean, len(self.q.mean))
        return a * b / max(a + b, 1) * q[:, :, None] * k[:, None, :]

    def pair_cov(self, head: int, kv_head: int) -> Tensor:
        """Covariance (2k, 2k) of a head's token (q, k)."""
        cross = self.cross[head]
        above = torch.cat([self.q.scatter[head], cross], dim=1)
        return torch.cat([above, torch.cat([cross.T, self.k.scatter[kv_head]], dim=1)]) / self.q.count


def _of_each_head(x: Tensor, heads: int) -> Tensor:
    """Rows of key-value heads (H_kv, ...) as each of the heads (H, ...) reads them."""
    return x.repeat_interleave(heads // len(x), dim=0)


@dataclass(frozen=True)
class Context:
    """A window as the pool of its own queries: their numbers, keys and values (H_kv, T, .), allowed (m, T)."""

    rows: Indices
    k: Tensor
    v: Tensor
    allowed: Tensor


@dataclass(frozen=True)
class LayerQueries:
    """Queries (H, m, k) of a layer, the weight (H, m) they put on sink tokens in their window, their contexts if asked."""

    info: LayerInfo
    q: Tensor
    sink_mass: Tensor
    contexts: tuple[Context, ...] = ()


@dataclass(frozen=True)
class LayerState:
    """Moments and heads of a layer over the keys seen so far; a head that could not go on has the reason instead."""

    info: LayerInfo
    moments: LayerMoments
    heads: dict[int, HeadState | str]
    sink_mass: Tensor  # (H, m)
    keys: int = field(default=0)


# ---- queries ---------------------------------------------------------------------------------------------------------


class QueryCollector:
    """Takes the queries of each layer out of the windows they stand in, whichever batches these come in."""

    def __init__(self, source: TokenSource, contexts: bool) -> None:
        self.source, self.contexts = source, contexts
        self.found: dict[int, dict[int, tuple[Tensor, Tensor, Context | None]]] = {}
        self.info: dict[int, LayerInfo] = {}

    def __call__(self, captured: Captured, batch: Indices) -> None:
        self.info.setdefault(captured.layer, LayerInfo.of(captured))
        for place, window in enumerate(batch.tolist()):
            rows = self.source.places.inside(window)
            if len(rows):
                self.found.setdefault(captured.layer, {})[window] = self._window(captured, place, window, rows)

    def _window(self, captured: Captured, place: int, window: int, rows: Indices) -> tuple[Tensor, Tensor, Context | None]:
        info = self.info[captured.layer]
        at = torch.from_numpy(self.source.places.positions[rows]).to(captured.query.device)
        wide = torch.float64 if captured.query.dtype == torch.float64 else torch.float32
        q = captured.query[place][:, at].to(wide)  # (H, m, k)
        k, v = captured.key[place].to(wide), captured.value[place].to(wide)
        visible = self._visible(captured, place, window, at)  # (1 or H, m, T)
        scores = scores_of(info, q, k.repeat_interleave(info.heads // info.kv_heads, dim=0))
        if captured.bias is not None:
            scores = scores + captured.bias.to(wide).expand(*captured.query.shape[:3], -1)[place][:, at]
        scores = scores.masked_fill(~visible, -torch.inf)
        resting = torch.from_numpy(self.source.sinks(window)).to(q.device)
        mass = scores.masked_fill(~resting, -torch.inf).logsumexp(-1)
        total = scores.logsumexp(-1)
        if captured.sinks is not None:
            logit = captured.sinks.to(wide)[:, None]
            mass, total = torch.logaddexp(mass, logit), torch.logaddexp(total, logit)
        context = None
        if self.contexts:
            pooled = torch.from_numpy(self.source.pooled[window]).to(q.device)
            context = Context(rows, k, v, visible[0] & pooled)
        return q, (mass - total).exp(), context

    def _visible(self, captured: Captured, place: int, window: int, at: Tensor) -> Tensor:
        if captured.allowed is not None:
            return captured.allowed[place][:, at]
        real = torch.from_numpy(~self.source.windows.padding[window]).to(at.device)
        return real.expand(1, len(at), -1)

    def result(self, layer: int) -> LayerQueries:
        windows = self.found[layer]
        parts = [windows[window] for window in sorted(windows)]  # the order of source.places
        contexts = tuple(context for _, _, context in parts if context is not None)
        return LayerQueries(
            self.info[layer], torch.cat([q for q, _, _ in parts], 1), torch.cat([m for _, m, _ in parts], 1), contexts
        )


def capture_queries(source: TokenSource, layers: Sequence[int], *, contexts: bool = False) -> dict[int, LayerQueries]:
    """The queries of some layers, by forward passes over their windows."""
    collector = QueryCollector(source, contexts)
    source.run(np.unique(source.places.windows), layers, collector)
    return {layer: collector.result(layer) for layer in layers}


# ---- keys ------------------------------------------------------------------------------------------------------------


def begin(source: TokenSource, queries: LayerQueries, rows: Rows) -> LayerState:
    """The state of a layer before its first block of rows; the block says where the values lie."""
    tail = tail_length(source.keys) + 1
    heads: dict[int, HeadState | str] = {}
    for head in source.heads(queries.info.layer):
        center = rows.v[queries.info.kv_head(head)].double().mean(0)
        heads[head] = head_state.init(queries.q.shape[1], source.spec.kept_queries, tail, center, rows.q.dtype)
    return LayerState(queries.info, LayerMoments.of(_none_of(rows)), heads, queries.sink_mass)


def _none_of(rows: Rows) -> Rows:
    hidden = None if rows.hidden is None else rows.hidden[:0]
    return Rows(rows.q[:, :0], rows.k[:, :0], rows.v[:, :0], hidden)


def add_moments(state: LayerState, rows: Rows) -> LayerState:
    return replace(state, moments=state.moments.merge(LayerMoments.of(rows)))


def add_keys(state: LayerState, queries: LayerQueries, k: Tensor, v: Tensor) -> LayerState:
    """The state after keys and values (H_kv, B, .) have met the queries of every head."""
    heads = {head: add_head(known, queries, head, k, v) for head, known in state.heads.items()}
    return replace(state, heads=heads, keys=state.keys + k.shape[1])


def add_head(known: HeadState | str, queries: LayerQueries, head: int, k: Tensor, v: Tensor) -> HeadState | str:
    """One head's state after keys and values (H_kv, B, .), or the reason why it has none."""
    own = queries.info.kv_head(head)
    try:
        for start in range(0, k.shape[1], KEY_BLOCK):
            block = slice(start, start + KEY_BLOCK)
            if not isinstance(known, str):
                known = head_state.update(known, scores_of(queries.info, queries.q[head], k[own, block]), v[own, block])
    except ValueError as reason:
        return str(reason)
    return known


def merge_layers(a: LayerState, b: LayerState) -> LayerState:
    """The state over the union of two disjoint sets of keys."""
    heads: dict[int, HeadState | str] = {}
    for head, known in a.heads.items():
        other = b.heads[head]
        heads[head] = known if isinstance(known, str) else other if isinstance(other, str) else head_state.merge(known, other)
    return replace(a, moments=a.moments.merge(b.moments), heads=heads, keys=a.keys + b.keys)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def layer_rows(state: LayerState) -> list[dict[str, Any]]:
    """The state as rows of a table: one for the layer's moments (head -1) and one for each head."""
    info = state.info
    tensors = {"sink_mass": state.sink_mass.float(), "keys": torch.tensor([state.keys]), "cross": state.moments.cross}
    for name in ("hidden", "q", "k", "v"):
        moments: TokenMoments | None = getattr(state.moments, name)
        if moments is None:
            continue
        tensors |= {
            f"{name}.count": torch.tensor([moments.count]),
            f"{name}.mean": moments.mean,
            f"{name}.scatter": moments.scatter,
        }
        if moments.higher is not None:
            for part in ("third", "fourth", "low", "high"):
                tensors[f"{name}.{part}"] = getattr(moments.higher, part)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    plain = {"layer": info.layer, "heads": info.heads, "kv_heads": info.kv_heads, "scale": info.scale, "note": info.note}
    plain["softcap"] = float("nan") if info.softcap is None else info.softcap
    rows = [{**plain, "head": -1, "reason": "", "state": data}]
    for head, known in state.heads.items():
        failed = isinstance(known, str)
        rows.append(
            {**plain, "head": head, "reason": known if failed else "", "state": b"" if failed else head_state.to_bytes(known)}  # type: ignore[arg-type]
        )
    return rows


def layer_from_rows(rows: list[dict[str, Any]]) -> LayerState:
    """The state of one layer from its rows."""
    (first,) = (row for row in rows if row["head"] == -1)
    tensors = load(first["state"])
    softcap = None if np.isnan(first["softcap"]) else float(first["softcap"])
    info = LayerInfo(first["layer"], first["heads"], first["kv_heads"], first["scale"], softcap, first["note"])
    hidden = _moments("hidden", tensors) if "hidden.count" in tensors else None
    q, k, v = (_moments(name, tensors) for name in ("q", "k", "v"))
    moments = LayerMoments(hidden, q, k, v, tensors["cross"])
    heads = {row["head"]: row["reason"] or head_state.from_bytes(row["state"]) for row in rows if row["head"] >= 0}
    return LayerState(info, moments, heads, tensors["sink_mass"], int(tensors["keys"]))


def _moments(name: str, tensors: dict[str, Tensor]) -> TokenMoments:
    higher = None
    if f"{name}.third" in tensors:
        higher = token_moments.Higher(*(tensors[f"{name}.{part}"] for part in ("third", "fourth", "low", "high")))
    return TokenMoments(int(tensors[f"{name}.count"]), tensors[f"{name}.mean"], tensors[f"{name}.scatter"], higher)
