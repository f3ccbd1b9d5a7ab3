"""A smaller KV cache: each key-value head holds the keys that were kept, at their own positions.

Heads may keep different numbers of keys: a layer stores them one behind the other. When the layer
is read, heads are padded to the longest for the time of one attention call, and the padding is
masked. New tokens are appended as in any cache. The attention function registered here looks up
each kept key in the mask that transformers makes for the full sequence, so that causality, padding
and sliding windows hold by construction.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esscher.hf.call import AttentionCall, Mask, MaskTensor, given_mask, model_mask, split_mask
from esscher.hf.package import transformers

NAME = "esscher_kept"
OWNER = "kept_by"  # on a tensor of keys: the layer it came from


def kept_cache(
    cache: Any,
    kept: Mapping[int, Bool[Tensor, "kv_heads keys"]],
    values: Mapping[int, Float[Tensor, "kv_heads keys width"]] | None = None,
) -> Any:
    """A transformers cache with the kept keys of a prefilled one.

    ``kept``: for each layer the keys that each key-value head keeps; a layer that is left out keeps
    all. ``values``: other values for the keys (refitted ones). The old cache is not changed. Models
    read the new one with the attention implementation ``esscher_kept`` (:func:`use_kept`).
    """
    package = transformers()
    layers = []
    for number, old in enumerate(cache.layers):
        choice = kept.get(number)
        if choice is None:
            choice = torch.ones(old.keys.shape[1:3], dtype=torch.bool)
        value = old.values if values is None or number not in values else values[number][None]
        layers.append(_layer_class()(old.keys, value.to(old.values.dtype), choice))
    return package.Cache(layers=layers)


def cache_bytes(cache: Any) -> int:
    """Bytes of the stored keys and values."""
    held = [
        getattr(layer, name, None)
        for layer in cache.layers
        for name in ("keys", "values", "kept_keys", "kept_values")
    ]
    return sum(x.numel() * x.element_size() for x in held if x is not None)


def use_kept(model: Any) -> None:
    """Let a model read kept caches; with any other cache it computes what it always did."""
    package = transformers()
    package.AttentionInterface.register(NAME, _attention)
    package.AttentionMaskInterface.register(NAME, model_mask)
    model.set_attn_implementation(NAME)


def _layer_class() -> type:
    """DynamicLayer with kept keys; made when transformers is there."""
    global _LAYER
    if _LAYER is None:
        _LAYER = _make_layer_class()
    return _LAYER


_LAYER: type | None = None


def _make_layer_class() -> type:
    base: Any = importlib.import_module("transformers.cache_utils").DynamicLayer

    class KeptLayer(base):  # type: ignore[misc]
        """``positions`` (kv_heads, n): where each kept key stood in the prompt, -1 is padding.

        ``kept_keys``, ``kept_values`` (batch, total, width): of all heads, one behind the other;
        ``keys``, ``values``: tokens that came later.
        """

        def __init__(self, keys: Tensor, values: Tensor, kept: Tensor) -> None:
            super().__init__()
            kept = kept.to(keys.device)
            self.prompt, self.later = kept.shape[1], 0
            counts = kept.sum(1)
            most = max(1, int(counts.max()))
            order = kept.int().argsort(dim=1, descending=True, stable=True)[:, :most]
            there = torch.arange(most, device=keys.device) < counts[:, None]
            self.positions = order.masked_fill(~there, -1)
            first = counts.cumsum(0) - counts
            self.rows = (first[:, None] + torch.arange(most, device=keys.device)) * there
            self.kept_keys, self.kept_values = keys[:, kept], values[:, kept]
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
            self.dtype, self.device = keys.dtype, keys.device
            self.is_initialized = True

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            self.later = keys.shape[2]
            keys = torch.cat([self.kept_keys[:, self.rows], keys], 2)
            setattr(keys, OWNER, self)  # read by the attention function
            return keys, torch.cat([self.kept_values[:, self.rows], values], 2)

        def get_seq_length(self) -> int:
            return self.prompt + self.later

        def crop(self, tokens_to_remove: int) -> None:
            if abs(tokens_to_remove) > self.later:
                raise ValueError(
                    f"crop: {self.later} tokens came after the compression, and only these can be"
                    f" removed; got {abs(tokens_to_remove)}"
                )
            super().crop(tokens_to_remove)
            self.later = self.keys.shape[2]

        def _of_batch(self, change: Any) -> None:
            for name in ("kept_keys", "kept_values", "keys", "values"):
                setattr(self, name, change(getattr(self, name)))

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self._of_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            self._of_batch(lambda x: x.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Tensor) -> None:
            self._of_batch(lambda x: x[indices])

        def reset(self) -> None:
            raise ValueError("reset: a kept cache belongs to its prompt; make a new one")

        def columns(self) -> Tensor:
            """(kv_heads, n + later): the place of each key in the full sequence."""
            new = torch.arange(self.prompt, self.prompt + self.later, device=self.positions.device)
            return torch.cat([self.positions, new.expand(len(self.positions), -1)], 1)

    return KeptLayer


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers on any cache; of a kept one each head sees the keys it kept."""
    layer = getattr(key, OWNER, None)
    mask: Mask | None
    if isinstance(attention_mask, MaskTensor):
        mask, bias = attention_mask.mask, None
        allowed = None if layer is None else mask.whole()
    else:
        allowed, bias = split_mask(attention_mask)
        mask = None if allowed is None else given_mask(allowed, query.shape[2], key.shape[2])
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if layer is not None:
        columns = layer.columns()
        per = query.shape[1] // len(columns)
        seen = _gather(allowed, columns, per) if allowed is not None else None
        there = (columns >= 0).repeat_interleave(per, 0)[None, :, None]
        seen = there if seen is None else seen & there
        mask = given_mask(seen, query.shape[2], key.shape[2])
        bias = None if bias is None else _gather(bias, columns, per)
    out = AttentionCall(
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
    ).output()
    return out.transpose(1, 2).contiguous(), None


def _gather(rows: Tensor, columns: Int[Tensor, "kv n"], per: int) -> Tensor:
    """Of a mask or bias (batch, heads or 1, queries, keys) the columns of each head."""
    at = columns.clamp_min(0).repeat_interleave(per, 0)[None, :, None]
    rows = rows.expand(-1, at.shape[1], -1, -1)
    return rows.gather(3, at.expand(len(rows), -1, rows.shape[2], -1))
