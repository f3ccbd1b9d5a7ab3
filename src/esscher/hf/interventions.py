"""Keep rules applied for real: a model runs with attention on the keys that are kept, layer by
layer and head by head.

The same attention interface as capture. What is kept is decided when a layer's attention is called
(every query under a rule, its inputs made by layers that kept few keys themselves), or beforehand,
from a prefill on all keys: a cache. Whether it acted is checked, not believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esscher.hf.call import AttentionCall
from esscher.hf.capture import Sink, accepted, capture, escaped, expected_layers
from esscher.hf.checkpoint import transformers
from esscher.keep.rule import Rule

Decide = Callable[[AttentionCall], "Kept | None"]


@dataclass(frozen=True)
class Kept:
    """The keys that the queries of an attention call keep, of those that its own mask shows; axes
    of length 1 stand for all.

    ``weight``: factor of a kept key in the softmax, where it is not 1. ``values``: other values of
    the first keys.
    """

    allowed: Bool[Tensor, "batch heads m keys"]
    weight: Float[Tensor, "batch heads m keys"] | None = None
    values: Float[Tensor, "batch kv_heads some width"] | None = None


@contextlib.contextmanager
def intervene(
    model: Any,
    decide: Decide,
    *,
    sink: Sink | None = None,
    hidden: bool = False,
    attend: Callable[[AttentionCall], Tensor] | None = None,
) -> Iterator[None]:
    """Inside, every self-attention layer of the model attends to the keys that ``decide(captured)``
    keeps; None keeps all.

    ``sink`` and ``hidden`` are those of capture; ``attend(call)`` computes the output of an
    attention call on the keys that are kept, in place of ``call.output()``. A model whose attention
    does not go through the interface is refused, and so is one of which some layers do not. A query
    to which nothing would be left keeps the nearest key that it sees: attention on nothing is
    undefined, but for heads with a sink logit, which give 0.
    """

    def change(captured: AttentionCall) -> AttentionCall:
        kept = decide(captured)
        return captured if kept is None else with_kept(captured, kept)

    with capture(model, sink, hidden=hidden) as capturing:
        capturing.attend, capturing.change = attend, change
        yield
        reason = escaped(model, capturing.next_layer) if capturing.calls else None
    if reason is not None:
        raise ValueError(f"interventions: {reason}")


def check_acted(dropped: bool, full: Tensor, kept: Tensor) -> None:
    """Raise where keys were dropped and the output is still the full model's to the last bit."""
    if dropped and torch.equal(full, kept):
        raise ValueError(
            "interventions: keys were dropped and the output did not change in one bit; the model"
            " does not use what its attention returns"
        )


def with_kept(captured: AttentionCall, kept: Kept) -> AttentionCall:
    """The call on the kept keys."""
    queries, keys = captured.query.shape[2], captured.key.shape[2]
    seen = captured.visible(torch.arange(queries, device=captured.query.device))
    left = seen & kept.allowed
    blind = seen.any(-1) & ~left.any(-1)
    if captured.sinks is None and bool(blind.any()):
        left = left | (_nearest(seen) & blind[..., None])
    weighted = kept.weight is not None and bool((kept.weight != 1).any())
    dropped = bool((seen & ~left).any())
    if kept.values is not None:
        rest = captured.value[:, :, kept.values.shape[2] :]
        captured = replace(captured, value=torch.cat([kept.values.to(rest.dtype), rest], 2))
    if not dropped and not weighted:
        return captured
    bias = captured.bias
    if weighted:
        assert kept.weight is not None
        added = (
            kept.weight.clamp_min(torch.finfo(torch.float32).tiny).log().to(captured.query.dtype)
        )
        bias = (added if bias is None else bias + added).expand(-1, -1, queries, keys)
    if dropped:
        captured = replace(captured, mask=left, causal=False)
    return replace(captured, bias=bias)


def _nearest(seen: Bool[Tensor, "batch heads m keys"]) -> Bool[Tensor, "batch heads m keys"]:
    """The key at each query's own place, or the nearest that it sees."""
    queries, keys = seen.shape[-2:]
    place = torch.arange(queries, device=seen.device) + keys - queries
    far = (torch.arange(keys, device=seen.device) - place[:, None]).abs().expand(seen.shape)
    nearest = far.masked_fill(~seen, keys).argmin(-1, keepdim=True)
    return torch.zeros_like(seen).scatter(-1, nearest, True)


# ---- every query under a rule


def rule_for_every_query(
    rule: Rule,
    sizes: Callable[[int, int, int], int | None],
    generator: torch.Generator,
    *,
    outputs: Mapping[int, Float[Tensor, "heads width d"]] | None = None,
) -> Decide:
    """Every query of every call keeps what the rule says; ``sizes(layer, kv_head, keys)``: its n,
    or None to leave all.

    Chance is drawn for each query. ``outputs``: W_O of each layer, for rules that ask what lies
    behind a head.
    """

    def decide(captured: AttentionCall) -> Kept | None:
        batch, heads, queries, _ = captured.query.shape
        keys, per = captured.key.shape[2], heads // captured.kv_heads
        asked = [sizes(captured.layer, kv, keys) for kv in range(captured.kv_heads)]
        if all(n is None for n in asked):
            return None
        rows = torch.arange(queries, device=captured.query.device)
        allowed = torch.ones(batch, heads, queries, keys, dtype=torch.bool, device=rows.device)
        weight = torch.ones(batch, heads, queries, keys, dtype=torch.float64, device=rows.device)
        for place in range(batch):
            for kv, n in enumerate(asked):
                if n is None:
                    continue
                own = slice(kv * per, (kv + 1) * per)
                context = captured.context(kv, rows, place=place)
                if outputs is not None:
                    context = replace(context, output=outputs[captured.layer][own])
                kept = rule.include(context, n if rule.free else None)
                shape = kept.probability.shape
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64).to(rows.device)
                allowed[place, own] = (drawn < kept.probability).view(per, queries, keys)
                if kept.weight is not None:
                    weight[place, own] = kept.weight.view(per, queries, keys)
        return Kept(allowed, weight)

    return decide


# ---- a cache


class Prefilled:
    """A model after a prefill on all keys, to be decoded again and again on what is kept of its
    cache.

    The continuation is given, so that its tokens go through the model at once, under a mask: no
    token waits for another.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, the cache serves several continuations side by side, and is not copied: the
        attention calls hold the new keys and values alone, their masks those of the cache too.
        """
        for layer in self.cache.layers:
            layer.update = lambda key, value, *_, **__: (key, value)
        try:
            yield
        finally:
            for layer in self.cache.layers:
                del layer.update

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The cache is afterwards as it was."""
        before = [(layer.keys, layer.values) for layer in self.cache.layers]
        try:
            yield
        finally:
            for layer, (keys, values) in zip(self.cache.layers, before, strict=True):
                layer.keys, layer.values = keys, values

    def decode(
        self,
        ids: Int[Tensor, "batch m"],
        decide: Decide,
        *,
        extend: bool = False,
        logits: bool = True,
        **watch: Any,
    ) -> Any:
        """What the model returns for these tokens.

        The cache is then as it was, or holds these tokens too (``extend``). Without ``logits``
        those of the last token alone are computed, where the model can. ``watch``: what else
        :func:`intervene` takes.
        """
        with self.restored(), intervene(self.model, decide, **watch):
            result = self.model(
                input_ids=ids,
                past_key_values=self.cache,
                use_cache=True,
                **({} if logits else accepted(self.model, logits_to_keep=1)),
            )
            after = [(layer.keys.detach(), layer.values.detach()) for layer in self.cache.layers]
        if extend:
            for layer, (keys, values) in zip(self.cache.layers, after, strict=True):
                layer.keys, layer.values = keys, values
        return result


def prefill(model: Any, ids: Int[Tensor, "batch tokens"], sink: Sink | None = None) -> Prefilled:
    """Run tokens through a causal model on all keys, and keep its cache; the sink sees every layer,
    as in capture.
    """
    if not accepted(model, past_key_values=None):
        raise ValueError(
            f"interventions: {type(model).__name__} keeps no cache of keys; let every query keep a"
            " few instead"
        )
    cache = transformers().DynamicCache()
    with torch.no_grad(), capture(model, sink):
        model(
            input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            **accepted(model, logits_to_keep=1),
        )
    layers, expected = len(cache.layers), expected_layers(model)
    if cache.get_seq_length() != ids.shape[1] or (expected is not None and layers != expected):
        raise ValueError(
            f"interventions: {type(model).__name__} put {cache.get_seq_length()} keys of {layers}"
            f" layers into its cache, expected {ids.shape[1]} of {expected}; let every query keep a"
            " few instead"
        )
    return Prefilled(model, cache)
