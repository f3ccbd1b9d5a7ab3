"""One attention call of a model: its scores, its softmax weights and its output.

With s_j the score of key j for a query, over the keys that the query sees,

    s_j = cap(scale <q, k_j>) + bias_j,     p_j = exp(s_j) / (exp(sink) + sum_i exp(s_i)),

cap(s) = softcap tanh(s / softcap), and the output is sum_j p_j v_j. Head h reads key-value head
h // (heads / kv_heads). The sink logit (gpt_oss) is a parameter of the head: it is in the softmax,
but it is no key, has no value, and is in no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esscher.keep.context import Context

QUIRKS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {}
"""Architectures that pass scale, soft cap, bias or sinks under other names: class name of the
attention module -> function(module, keyword arguments) that returns the arguments under the names
that :func:`call_of` reads (scaling, softcap, position_bias, s_aux, sliding_window, is_causal).
"""


def split_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(allowed, bias) of a mask: of a float mask the very negative entries forbid, the rest adds.

    transformers forbids by the smallest number of the dtype; sums of two reach minus infinity.
    """
    if mask.dtype == torch.bool:
        return mask, None
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    rest = mask.masked_fill(forbidden, 0.0)
    if mask.is_meta:
        return ~forbidden, None
    allowed = ~forbidden if bool(forbidden.any()) else None
    return allowed, rest if bool(rest.any()) else None


def model_mask(**given: Any) -> Tensor | None:
    """The mask of a model's attention, by transformers' own function for fused attention.

    None where the module's ``is_causal`` says it all: causal, or every key is seen.
    """
    from transformers.masking_utils import sdpa_mask

    if torch.device(given["device"]).type == "meta":  # numbers are needed to tell causality
        given |= {"device": torch.device("cpu"), "attention_mask": None}
    return sdpa_mask(**given)


def spelled_mask(**given: Any) -> Tensor | None:
    """The same for models that take no mask to show every key, as eager attention does."""
    return model_mask(**{**given, "allow_is_causal_skip": False})


EXPLICIT_SCORES = 1 << 22  # scores held at once where there is no fused kernel
ROWS = 256  # queries that meet their keys at once where a mask is more than causal
FUSED_WIDTH = 256  # widest keys and values of the fused kernel that shares key heads


def score(
    q: Float[Tensor, "*#batch m k"],
    k: Float[Tensor, "*#batch n k"],
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
) -> Float[Tensor, "... m n"]:
    """cap(scale <q, k>) + bias, and -inf for keys that are not seen; in float32 at least."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)


def softmax(
    scores: Float[Tensor, "*batch heads m n"], sinks: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "*batch heads m n"]:
    """Weights of the keys beside the sink logit of each head; 0 where a query sees nothing."""
    keys = scores.shape[-1]
    if sinks is not None:
        logits = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    blind = scores.amax(dim=-1, keepdim=True) == -torch.inf
    if not bool(blind.any()):
        return torch.softmax(scores, -1)[..., :keys]
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., :keys]


@dataclass(frozen=True)
class AttentionCall:
    """What one attention call of a model is given.

    ``layer`` counts the self-attention layers in order of execution, ``name`` is the module's
    dotted name. ``query`` is (batch, heads, tokens, width); ``key`` and ``value`` are (batch,
    kv_heads, tokens, width). ``mask`` (batch or 1, heads or 1, queries or 1, keys) says which keys
    a query sees; without one it sees all, or, if ``causal``, key j where j <= i. ``bias`` holds
    finite additive scores (T5), ``sinks`` one logit per head (gpt_oss), ``window`` the sliding
    window of the layer's configuration, ``hidden`` (batch, tokens, d) what entered the attention
    module, if it was asked for.
    """

    layer: int
    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    hidden: Tensor | None = None
    window: int | None = None
    causal: bool = False

    @property
    def heads(self) -> int:
        return int(self.query.shape[1])

    @property
    def kv_heads(self) -> int:
        return int(self.key.shape[1])

    @property
    def shared(self) -> int:
        """Heads that read one key-value head."""
        return self.heads // self.kv_heads

    @property
    def allowed(self) -> Bool[Tensor, "batch heads tokens keys"] | None:
        """The mask spelled out; None where every key is seen."""
        if self.mask is None and not self.causal:
            return None
        return self.visible(torch.arange(self.query.shape[2], device=self.query.device))

    def visible(self, at: Int[Tensor, " m"]) -> Bool[Tensor, "batch heads m keys"]:
        """Keys that the queries at these positions may see; heads is 1 where they do not differ."""
        keys = self.key.shape[2]
        if self.mask is not None:
            seen = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, at]
        elif self.causal:
            seen = (torch.arange(keys, device=at.device) <= at[:, None])[None, None]
        else:
            seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.device)
        return seen.expand(len(self.query), -1, len(at), keys)

    def bias_at(self, at: Int[Tensor, " m"]) -> Float[Tensor, "batch heads m keys"] | None:
        """Bias of the queries at these positions; heads is 1 where they do not differ."""
        if self.bias is None:
            return None
        rows = self.bias if self.bias.shape[2] == 1 else self.bias[:, :, at]
        return rows.expand(len(self.query), -1, len(at), self.key.shape[2])

    def take(self, at: Int[Tensor, " m"], place: int | None = None) -> AttentionCall:
        """The same call for the queries at some positions, or of one sequence ``place`` alone."""
        some = slice(None) if place is None else slice(place, place + 1)
        bias = self.bias_at(at)
        limited = self.mask is not None or self.causal
        return replace(
            self,
            query=self.query[some, :, at],
            key=self.key[some],
            value=self.value[some],
            mask=self.visible(at)[some] if limited else None,
            causal=False,
            bias=None if bias is None else bias[some],
            hidden=None,
        )

    def scores(
        self, at: Int[Tensor, " m"] | None = None, heads: slice = slice(None)
    ) -> Float[Tensor, "batch heads m keys"]:
        """Scores of all queries or of those at some positions; -inf for keys that are not seen."""
        if at is not None:
            return self.take(at).scores(heads=heads)
        of = torch.arange(self.heads, device=self.key.device)[heads] // self.shared
        q, k = (at_least_single(x) for x in (self.query[:, heads], self.key[:, of]))
        bias, seen = (
            None if x is None else x if x.shape[1] == 1 else x[:, heads]
            for x in (self.bias, self.allowed)
        )
        return score(q, k, self.scale, self.softcap, bias, seen)

    def weights(
        self, at: Int[Tensor, " m"] | None = None, heads: slice = slice(None)
    ) -> Float[Tensor, "batch heads m keys"]:
        """Softmax weights of the keys; beside a sink logit they sum to less than 1."""
        sinks = None if self.sinks is None else self.sinks[heads]
        return softmax(self.scores(at, heads), sinks)

    def output(self, at: Int[Tensor, " m"] | None = None) -> Float[Tensor, "batch heads m width"]:
        """sum_j p_j v_j of all queries or of those at some positions; 0 where a query sees nothing.

        Without a mask, or with a causal one, this is one fused call. Else queries go in blocks,
        which meet the keys from the first to the last that one of them sees: a sliding window costs
        tokens x window, and no mask or score of all pairs is held.
        """
        if at is not None:
            return self.take(at).output()
        query, key, value = self.query, self.key, self.value
        if query.is_meta:
            return query.new_empty(*query.shape[:3], value.shape[-1])
        explicit = self.softcap is not None or self.sinks is not None
        alike = key.shape[-1] == value.shape[-1]
        plain = not explicit and self.bias is None and self.mask is None
        if plain and alike and key.shape[-1] <= FUSED_WIDTH:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=self.causal,
                scale=self.scale,
                enable_gqa=self.shared > 1,
            )
        key, value = self._for_heads(key), self._for_heads(value)
        most = max(1, EXPLICIT_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
        step = most if explicit or not alike else ROWS
        blocks = []
        for start in range(0, query.shape[2], step):
            at = torch.arange(start, min(start + step, query.shape[2]), device=query.device)
            q, bias, seen, reach = query[:, :, at], self.bias_at(at), None, slice(0, key.shape[2])
            if self.mask is not None or self.causal:
                seen = self.visible(at)
                some = seen.flatten(0, -2).any(0).nonzero()[:, 0]
                first, last = some[[0, -1]].tolist() if len(some) else (0, 0)
                reach = slice(first, last + 1)
                seen = seen[..., reach]
            bias = None if bias is None else bias[..., reach]
            k, v = key[:, :, reach], value[:, :, reach]
            if explicit:
                scores = score(q, k, self.scale, self.softcap, bias, seen)
                blocks.append(softmax(scores, self.sinks).to(v.dtype) @ v)
                continue
            if bias is not None:  # mask and bias as one added tensor
                bias = bias.to(q.dtype)
                seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
            blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale))
        return torch.cat(blocks, dim=2)

    def context(
        self, kv_head: int, rows: Int[Tensor, " m"], keys: int | None = None, place: int = 0
    ) -> Context:
        """What a keep rule sees of one key-value head: queries of all heads that share it, below
        each other, and the first ``keys`` keys.

        ``rows``: queries of the call, rising; its last query stands at its last key. ``place``: of
        the sequence in the batch.
        """
        return self._context(kv_head, rows, place, *self._limits(rows, keys, place))

    def contexts(self, rows: Int[Tensor, " m"], *, behind: bool = False) -> Iterator[Context]:
        """The context of each key-value head in turn, of the first sequence; ``behind``: all
        queries stand behind the last key.
        """
        limits = self._limits(rows, None, 0, behind=behind)
        return (self._context(kv, rows, 0, *limits) for kv in range(self.kv_heads))

    def _limits(
        self, rows: Tensor, keys: int | None, place: int, *, behind: bool = False
    ) -> tuple[Tensor, Bool[Tensor, "heads m keys"] | None, int]:
        """Where the queries stand, a mask where they do not simply see all earlier keys, and the
        number of keys.
        """
        total = self.key.shape[2]
        keys = total if keys is None else keys
        positions = (rows + total - self.query.shape[2]).clamp(max=keys - 1)
        if behind:
            positions = torch.full_like(rows, keys - 1)
        seen = self.visible(rows)[place, ..., :keys]
        earlier = torch.arange(keys, device=rows.device) <= positions[:, None]
        return positions, None if bool((seen == earlier).all()) else seen, keys

    def _context(
        self, kv_head: int, rows: Tensor, place: int, positions: Tensor, seen: Any, keys: int
    ) -> Context:
        own = slice(kv_head * self.shared, (kv_head + 1) * self.shared)
        parts = self.query[place, own, rows], self.key[place, kv_head], self.value[place, kv_head]
        q, k, v = (at_least_single(x) for x in parts)
        if seen is not None:
            seen = (seen if len(seen) == 1 else seen[own]).expand(self.shared, -1, -1)
        logits = None
        if self.softcap is not None or self.bias is not None:
            scores = self.take(rows, place).scores(heads=own)[0, :, :, :keys]
            logits = scores.masked_fill(scores == -torch.inf, 0.0).flatten(0, 1)
        sinks = None if self.sinks is None else at_least_single(self.sinks[own])
        return Context(
            q.flatten(0, 1),
            k[:keys],
            v[:keys],
            self.scale,
            positions.repeat(self.shared),
            None if seen is None else seen.flatten(0, 1),
            logits,
            heads=torch.arange(self.shared, device=rows.device).repeat_interleave(len(rows)),
            sink=None if sinks is None else sinks.repeat_interleave(len(rows)),
        )

    def _for_heads(self, x: Tensor) -> Tensor:
        """Keys or values as each head reads them."""
        if x.shape[1] == 1:
            return x.expand(-1, self.shared, -1, -1)  # not copied
        return x if self.shared == 1 else x.repeat_interleave(self.shared, dim=1)


def at_least_single(x: Tensor) -> Tensor:
    """In float32, or in float64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def call_of(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *_: Any,
    no_mask_is_causal: bool = True,
    **named: Any,
) -> AttentionCall:
    """The call described by the arguments of an attention function of transformers.

    Dropout is ignored: models are in eval mode. ``no_mask_is_causal``: a causal module that is
    given no mask means a causal one; eager attention takes it to see every key.
    """
    if (quirk := QUIRKS.get(type(module).__name__)) is not None:
        named = quirk(module, named)
    queries, keys = query.shape[2], key.shape[2]
    mask, bias, causal = None, named.get("position_bias"), False
    if attention_mask is not None:
        mask, added = split_mask(attention_mask)
        bias = added if bias is None else bias if added is None else bias + added
    elif no_mask_is_causal and queries > 1:
        asked = named.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    if causal and queries != keys:
        positions = torch.arange(keys, device=query.device)
        mask, causal = (positions <= positions[:queries, None])[None, None], False
    scale = named.get("scaling")
    return AttentionCall(
        layer=0,
        name="",
        query=query,
        key=key,
        value=value,
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        mask=mask,
        causal=causal,
        bias=bias,
        softcap=named.get("softcap"),
        sinks=named.get("s_aux"),
        window=named.get("sliding_window"),
    )
