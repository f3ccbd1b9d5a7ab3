"""A smaller KV cache: each key-value head holds the keys that were kept, at their own positions.

Heads may keep different numbers of keys. Each has a buffer of its own, new tokens are written
behind its kept keys, and attention goes head by head over what the head holds: nothing is padded or
copied when a token is decoded. The mask that transformers makes for the full sequence is looked up
at the positions of the kept keys, so that causality, padding and sliding windows hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from esscher.hf.call import AttentionCall, call_of, model_mask

NAME = "esscher_kept"
ROOM = 64  # later tokens that a buffer is grown by, at least


def kept_cache(
    cache: Any,
    kept: Mapping[int, Bool[Tensor, "kv_heads keys"]],
    values: Mapping[int, Float[Tensor, "kv_heads keys width"]] | None = None,
    weight: Mapping[int, Float[Tensor, "kv_heads keys"]] | None = None,
) -> Any:
    """A transformers cache with the kept keys of a prefilled one.

    ``kept``: for each layer the keys that each key-value head keeps; a layer that is left out keeps
    all. ``values``: other values for the keys (refitted ones). ``weight``: how much each key counts
    in the softmax, where that is not 1. The old cache is not changed. Models read the new one with
    the attention implementation ``esscher_kept`` (:func:`use_kept`).
    """
    layers: list[Any] = []
    for number, old in enumerate(cache.layers):
        choice = kept.get(number)
        if choice is None:
            choice = torch.ones(old.keys.shape[1:3], dtype=torch.bool)
        value = old.values if values is None or number not in values else values[number][None]
        factor = None if weight is None else weight.get(number)
        layers.append(KeptLayer(old.keys, value.to(old.values.dtype), choice, factor))
    return Cache(layers=layers)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache holds, and of their weights."""
    held = []
    for layer in cache.layers:
        kept = isinstance(layer, KeptLayer)
        pairs = layer.held() if kept else [(layer.keys, layer.values)]
        held += [x for pair in pairs for x in pair] + (layer.biases if kept else [])
    return sum(x.numel() * x.element_size() for x in held)


def use_kept(model: Any) -> None:
    """Let a model read kept caches; with any other cache it computes what it always did."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, model_mask)
    model.set_attn_implementation(NAME)


class KeptLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """``positions``: for each key-value head, where its kept keys stood in the prompt; ``biases``:
    the logarithms of their weights, empty where all are 1.

    ``buffers``: for each head its keys and values, (batch, room, width): the kept ones, then
    ``later`` tokens that came after the compression, then room for more.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, kept: Tensor, weight: Tensor | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prompt, self.later = kept.shape[1], 0
        self.positions = [row.nonzero()[:, 0] for row in kept.to(keys.device)]
        self.buffers = [
            (keys[:, kv, at], values[:, kv, at]) for kv, at in enumerate(self.positions)
        ]
        self.biases: list[Tensor] = []
        if weight is not None and bool((weight[kept] != 1).any()):
            bias = weight.clamp_min(torch.finfo(torch.float32).tiny).log().to(keys)
            self.biases = [row[at] for row, at in zip(bias, self.positions, strict=True)]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each head, (batch, n, width), without the room behind them."""
        ends = [len(at) + self.later for at in self.positions]
        return [(k[:, :n], v[:, :n]) for (k, v), n in zip(self.buffers, ends, strict=True)]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = key_states.shape[2]
        for kv, at in enumerate(self.positions):
            start = len(at) + self.later
            if start + new > self.buffers[kv][0].shape[1]:
                more = new + max(ROOM, self.later)
                self.buffers[kv] = tuple(  # type: ignore[assignment]
                    torch.nn.functional.pad(x[:, :start], (0, 0, 0, more)) for x in self.buffers[kv]
                )
            for buffer, states in zip(self.buffers[kv], (key_states, value_states), strict=True):
                buffer[:, start : start + new] = states[:, kv].detach()
        self.later += new
        return KeptKeys(self, key_states), value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """(batch, heads, m, width): the output of a call, each head on the keys it holds."""
        hides = call.allowed
        if hides is not None and bool(hides.all()):
            hides = None
        later = torch.arange(self.prompt, self.prompt + self.later, device=self.device)
        outputs = []
        for kv, (keys, values) in enumerate(self.held()):
            own = slice(kv * call.shared, (kv + 1) * call.shared)
            mask, bias = None, None
            if hides is not None or call.bias is not None:
                places = torch.cat([self.positions[kv], later])
                if hides is not None:
                    mask = _of_heads(hides, own)[..., places]
                if call.bias is not None:
                    bias = _of_heads(call.bias, own)[..., places]
            if self.biases:
                added = torch.nn.functional.pad(self.biases[kv], (0, self.later))
                bias = added.expand(1, 1, 1, -1) if bias is None else bias + added
            one = replace(
                call,
                query=call.query[:, own],
                key=keys[:, None],
                value=values[:, None],
                mask=mask,
                causal=False,
                bias=bias,
                sinks=None if call.sinks is None else call.sinks[own],
            )
            outputs.append(one.output())
        return torch.cat(outputs, 1)

    def get_seq_length(self) -> int:
        return self.prompt + self.later

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if query_length == 0:
            raise ValueError(
                f"input_ids: the cache holds {self.get_seq_length()} tokens, and no more were"
                " given; give ids that begin with the prompt and go on"
            )
        return self.get_seq_length() + query_length, 0

    def crop(self, *_: Any) -> None:
        raise ValueError("crop: no token of a kept cache can be removed; make a new one")

    def _of_batch(self, change: Any) -> None:
        self.buffers = [(change(keys), change(values)) for keys, values in self.buffers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._of_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._of_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        raise ValueError("reset: a kept cache belongs to its prompt; make a new one")


def _of_heads(rows: Tensor, own: slice) -> Tensor:
    """Rows (batch, heads or 1, m, keys) of some heads."""
    return rows if rows.shape[1] == 1 else rows[:, own]


class KeptKeys(Tensor):
    """Stands for the keys of a kept layer between its update and its attention call."""

    layer: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, layer: Any, states: Tensor) -> KeptKeys:
        batch, heads, _, width = states.shape
        made: KeptKeys = Tensor._make_wrapper_subclass(
            cls,
            (batch, heads, layer.get_seq_length(), width),
            dtype=states.dtype,
            device=states.device,
        )
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ValueError(
            "past_key_values: a kept cache is read by the attention implementation"
            f" {NAME}, and the model uses another; call esscher.hf.cache.use_kept(model)"
        )


def _attention(
    module: Any, query: Tensor, key: Tensor, *given: Any, **named: Any
) -> tuple[Tensor, None]:
    """Attention of transformers on any cache; of a kept one each head sees the keys it kept."""
    if isinstance(key, KeptKeys) and getattr(module, "layer_idx", 0) == 0:
        _check_positions(named.get("position_ids"), key.shape[2])
    call = call_of(module, query, key, *given, **named)
    out = key.layer.attend(call) if isinstance(key, KeptKeys) else call.output()
    return out.transpose(1, 2).contiguous(), None


def _check_positions(positions: Tensor | None, length: int) -> None:
    """ValueError where the last token does not stand behind the prompt and what came after it."""
    if positions is not None and (last := int(positions.max())) != length - 1:
        raise ValueError(
            f"position_ids: the cache goes on at position {length - 1}, got {last}; give ids"
            " that begin with the prompt and go on behind it, and leave position_ids out"
        )
