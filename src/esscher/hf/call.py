"""One attention call of a model: its scores, its softmax weights and its output.

With s_j the score of key j for a query, over the keys that the query sees,

    s_j = cap(scale <q, k_j>) + bias_j,     p_j = exp(s_j) / (exp(sink) + sum_i exp(s_i)),

cap(s) = softcap tanh(s / softcap), and the output is sum_j p_j v_j. Head h reads key-value head
h // (heads / kv_heads). The sink logit (gpt_oss) is a parameter of the head: it is in the softmax,
but it is no key, has no value, and is in no cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from esscher.keep.context import Context


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask that is computed where it is asked for: ``tell(at, keys)`` is (batch or 1, heads or 1,
    m, keys) and says which keys of a slice the queries ``at`` see. ``causal``: it says j <= i.
    """

    queries: int
    keys: int
    device: torch.device
    tell: Callable[[Tensor, slice], Tensor] = field(repr=False)
    causal: bool = False
    _reach: dict[tuple[int, int], slice] = field(default_factory=dict, init=False, repr=False)

    def rows(self, at: Int[Tensor, " m"]) -> Bool[Tensor, "batch heads m keys"]:
        """The keys that the queries at these places see."""
        return self.tell(at, slice(0, self.keys))

    def whole(self) -> Bool[Tensor, "batch heads queries keys"]:
        """The mask spelled out."""
        return self.rows(torch.arange(self.queries, device=self.device))

    @functools.cached_property
    def hides(self) -> Bool[Tensor, "batch heads queries keys"] | None:
        """The mask spelled out and held, for all layers that share it; None if it hides nothing."""
        whole = self.whole()
        return None if bool(whole.all()) else whole

    def block(self, start: int, stop: int) -> tuple[slice, Tensor]:
        """The keys from the first to the last that any of these queries sees, and which of them
        each one does. Found once: the layers of a model share their masks.
        """
        at = torch.arange(start, stop, device=self.device)
        if (start, stop) not in self._reach:
            rows, reach = self.rows(at), slice(0, self.keys)
            if not rows.is_meta:
                seen = rows.flatten(0, -2).any(0).nonzero()[:, 0].tolist() or [0]
                reach = slice(seen[0], seen[-1] + 1)
            self._reach[start, stop] = reach
        reach = self._reach[start, stop]
        return reach, self.tell(at, reach)


def causal_mask(queries: int, keys: int, device: torch.device) -> Mask:
    """Key j is seen by query i when j <= i."""

    def tell(at: Tensor, some: slice) -> Tensor:
        return (torch.arange(some.start, some.stop, device=device) <= at[:, None])[None, None]

    return Mask(queries, keys, device, tell, causal=queries == keys)


def given_mask(allowed: Bool[Tensor, "batch heads m n"], queries: int, keys: int) -> Mask:
    """A mask spelled out by the model; axes of length 1 stand for all."""
    spelled = allowed.expand(-1, -1, queries, keys)
    return Mask(queries, keys, allowed.device, lambda at, some: spelled[:, :, at, some])


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(allowed, bias) of a mask: of a float mask the very negative entries forbid, the rest adds.

    transformers forbids by the smallest number of the dtype; sums of two reach minus infinity.
    """
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    rest = mask.masked_fill(forbidden, 0.0)
    if mask.device.type == "meta":
        return ~forbidden, None
    allowed = ~forbidden if bool(forbidden.any()) else None
    return allowed, rest if bool(rest.any()) else None


def model_mask(**given: Any) -> Tensor | None:
    """The mask of a model's attention, with the arguments of transformers' own mask functions.

    None means that every key is seen; whether a mask is causal is never left to be guessed.
    """
    from transformers.masking_utils import sdpa_mask

    if "q_length" not in given:  # the first releases of transformers 5
        return sdpa_mask(**{**given, "allow_is_causal_skip": False})
    padding = given.get("attention_mask")
    no_numbers = padding is not None and padding.is_meta
    causal = given.get("allow_is_causal_skip", True) and not no_numbers
    # a mask function that costs nothing shows whether a mask would be made at all
    free = {"mask_function": _anything, "use_vmap": False, "allow_is_causal_skip": causal}
    skipped = sdpa_mask(**{**given, **free}) is None
    if skipped and not causal:
        return None
    queries, keys = given["q_length"], given["kv_length"]
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "q_offset": 0}
    asked = {**given, **whole, "attention_mask": None if no_numbers else padding}

    def tell(at: Tensor, some: slice) -> Tensor:
        def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return given["mask_function"](batch, head, at[query] + given["q_offset"], key)

        place = {"kv_length": some.stop - some.start, "kv_offset": given["kv_offset"] + some.start}
        some_rows = {"q_length": len(at), "mask_function": seen, "device": at.device}
        rows = sdpa_mask(**{**asked, **place, **some_rows})
        assert rows is not None
        return rows

    device = torch.device(given.get("device", "cpu"))
    mask = Mask(queries, keys, device, tell, causal=skipped and queries == keys)
    return MaskTensor(mask, given["batch_size"])


def _anything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)


class MaskTensor(Tensor):
    """A mask as models pass it on: a boolean tensor (batch, 1, queries, keys) without memory.

    Any operation on it, besides asking for shape, dtype and device, is done on the whole mask.
    """

    mask: Mask
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    def __new__(cls, mask: Mask, batch: int) -> MaskTensor:
        shape = (batch, 1, mask.queries, mask.keys)
        made: MaskTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=mask.device
        )
        made.mask = mask
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(
            cls, lambda lazy: lazy.mask.whole().expand(lazy.shape), (args, kwargs or {})
        )
        return function(*args, **kwargs)


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
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def softmax(
    scores: Float[Tensor, "*batch heads m n"], sinks: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "*batch heads m n"]:
    """Weights of the keys beside the sink logit of each head; 0 where a query sees nothing."""
    keys = scores.shape[-1]
    if sinks is not None:
        logits = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    blind = scores.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., :keys]


@dataclass(frozen=True)
class AttentionCall:
    """What one attention call of a model is given.

    ``layer`` counts the self-attention layers in order of execution, ``name`` is the module's
    dotted name. ``query`` is (batch, heads, tokens, width); ``key`` and ``value`` are (batch,
    kv_heads, tokens, width). ``mask`` has causality, windows and padding in it; None: every key is
    seen. ``bias`` holds finite additive scores (T5), ``sinks`` one logit per head (gpt_oss),
    ``window`` the sliding window of the layer's configuration, ``hidden`` (batch, tokens, d) what
    entered the attention module, if it was asked for.
    """

    layer: int
    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Mask | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    hidden: Tensor | None = None
    window: int | None = None

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
        """The mask spelled out, for short sequences."""
        return None if self.mask is None else self.mask.whole().expand(len(self.query), -1, -1, -1)

    def visible(self, at: Int[Tensor, " m"]) -> Bool[Tensor, "batch heads m keys"]:
        """Keys that the queries at these positions may see; heads is 1 where they do not differ."""
        if self.mask is not None:
            return self.mask.rows(at).expand(len(self.query), -1, -1, -1)
        every = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.device)
        return every.expand(len(self.query), 1, len(at), self.key.shape[2])

    def bias_at(self, at: Int[Tensor, " m"]) -> Float[Tensor, "batch heads m keys"] | None:
        """Bias of the queries at these positions; heads is 1 where they do not differ."""
        if self.bias is None:
            return None
        rows = self.bias if self.bias.shape[2] == 1 else self.bias[:, :, at]
        return rows.expand(len(self.query), -1, len(at), self.key.shape[2])

    def take(self, at: Int[Tensor, " m"], place: int | None = None) -> AttentionCall:
        """The same call for the queries at some positions, or of one sequence ``place`` alone."""
        some = slice(None) if place is None else slice(place, place + 1)
        mask, bias = None, self.bias_at(at)
        if self.mask is not None:
            mask = given_mask(self.visible(at)[some], len(at), self.key.shape[2])
        return replace(
            self,
            query=self.query[some, :, at],
            key=self.key[some],
            value=self.value[some],
            mask=mask,
            bias=None if bias is None else bias[some],
            hidden=None,
        )

    def scores(
        self, at: Int[Tensor, " m"] | None = None, heads: slice = slice(None)
    ) -> Float[Tensor, "batch heads m keys"]:
        """Scores of all queries or of those at some positions; -inf for keys that are not seen."""
        if at is not None:
            return self.take(at).scores(heads=heads)
        q, k = (at_least_single(x) for x in (self.query[:, heads], self._for_heads(self.key)))
        bias, seen = (
            None if x is None else x.expand(-1, self.heads, -1, -1)[:, heads]
            for x in (self.bias, self.allowed)
        )
        return score(q, k[:, heads], self.scale, self.softcap, bias, seen)

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
        query, key, value, mask = self.query, self.key, self.value, self.mask
        explicit = self.softcap is not None or self.sinks is not None
        alike = key.shape[-1] == value.shape[-1]
        plain = not explicit and self.bias is None and (mask is None or mask.causal)
        if plain and alike and key.shape[-1] <= FUSED_WIDTH:
            causal = mask is not None and query.shape[2] > 1
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=self.scale, enable_gqa=self.shared > 1
            )
        key, value = self._for_heads(key), self._for_heads(value)
        most = max(1, EXPLICIT_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
        step = most if explicit or not alike else ROWS
        blocks = []
        for start in range(0, query.shape[2], step):
            at = torch.arange(start, min(start + step, query.shape[2]), device=query.device)
            reach, seen = slice(0, key.shape[2]), None
            if mask is not None:
                reach, seen = mask.block(start, start + len(at))
            bias = self.bias_at(at)
            bias = None if bias is None else bias[..., reach]
            q, k, v = query[:, :, start : start + step], key[:, :, reach], value[:, :, reach]
            if explicit:
                scores = score(q, k, self.scale, self.softcap, bias, seen)
                blocks.append(softmax(scores, self.sinks).to(v.dtype) @ v)
                continue
            if bias is not None:  # mask and bias as one added tensor
                bias = bias.to(q.dtype)
                seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
            blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def context(
        self, kv_head: int, rows: Int[Tensor, " m"], keys: int | None = None, place: int = 0
    ) -> Context:
        """What a keep rule sees of one key-value head: queries of all heads that share it, below
        each other, and the first ``keys`` keys.

        ``rows``: queries of the call, rising; its last query stands at its last key. ``place``: of
        the sequence in the batch.
        """
        total = self.key.shape[2]
        keys = total if keys is None else keys
        own, some = (
            slice(kv_head * self.shared, (kv_head + 1) * self.shared),
            self.take(rows, place),
        )
        parts = some.query[0, own], some.key[0, kv_head], some.value[0, kv_head]
        q, k, v = (at_least_single(x) for x in parts)
        positions = (rows + total - self.query.shape[2]).clamp(max=keys - 1)
        seen = self.visible(rows)[place].expand(self.heads, -1, -1)[own, :, :keys]
        earlier = torch.arange(keys, device=rows.device) <= positions[:, None]
        causal = bool((seen == earlier).all())
        logits = None
        if self.softcap is not None or self.bias is not None:
            logits = some.scores(heads=own)[0, :, :, :keys].masked_fill(~seen, 0.0).flatten(0, 1)
        sinks = None if self.sinks is None else at_least_single(self.sinks[own])
        return Context(
            q.flatten(0, 1),
            k[:keys],
            v[:keys],
            self.scale,
            positions.repeat(self.shared),
            None if causal else seen.flatten(0, 1),
            logits,
            heads=torch.arange(self.shared, device=rows.device).repeat_interleave(len(rows)),
            sink=None if sinks is None else sinks.repeat_interleave(len(rows)),
        )

    def _for_heads(self, x: Tensor) -> Tensor:
        """Keys or values as each head reads them."""
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
    _dropout: float = 0.0,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    no_mask_is_causal: bool = True,
    **_: Any,
) -> AttentionCall:
    """The call described by the arguments of an attention function of transformers.

    Dropout is ignored: models are in eval mode. ``no_mask_is_causal``: a causal module that is
    given no mask means a causal one; eager attention takes it to see every key.
    """
    queries, keys = query.shape[2], key.shape[2]
    mask, bias = None, None
    if isinstance(attention_mask, MaskTensor):
        mask = attention_mask.mask
    elif attention_mask is not None:
        allowed, bias = split_mask(attention_mask)
        mask = None if allowed is None else given_mask(allowed, queries, keys)
    elif no_mask_is_causal and queries > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = causal_mask(queries, keys, query.device) if causal else None
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    return AttentionCall(
        layer=0,
        name="",
        query=query,
        key=key,
        value=value,
        scale=1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        mask=mask,
        bias=bias,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
    )
