"""What one attention call of a model is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esscher.models.huggingface.attention import attend_masked
from esscher.models.huggingface.masks import Mask, given_mask

__all__ = ["Captured"]


@dataclass(frozen=True)
class Captured:
    """One attention call: weights are softmax(cap(scale <q, k>) + bias) over the allowed keys and
    the sink logit.

    ``layer`` counts the model's self-attention layers in order of execution, ``name`` is the
    module's dotted name. ``query`` is (batch, heads, tokens, width); ``key`` and ``value`` are
    (batch, kv_heads, tokens, width), not repeated for the heads that share them. ``mask`` says
    which keys a query may see, None is all: causality, windows and padding are in it. ``bias``
    holds finite additive scores (T5), ``sinks`` one logit per head without a value (gpt_oss),
    ``window`` the sliding window as the layer's configuration has it, ``hidden`` (batch, tokens, d)
    what entered the attention module, if it was asked for.
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
    def allowed(self) -> Bool[Tensor, "batch heads tokens keys"] | None:
        """The mask spelled out, for short sequences."""
        return None if self.mask is None else self.mask.whole().expand(len(self.query), -1, -1, -1)

    def visible(self, at: Int[Tensor, " m"]) -> Bool[Tensor, "batch heads m keys"]:
        """Which keys the queries at these positions may see; one head stands for all where they do
        not differ.
        """
        if self.mask is not None:
            return self.mask.rows(at).expand(len(self.query), -1, -1, -1)
        every = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.device)
        return every.expand(len(self.query), 1, len(at), self.key.shape[2])

    def bias_at(self, at: Int[Tensor, " m"]) -> Float[Tensor, "batch heads m keys"] | None:
        """What is added to the scores of the queries at these positions; one head stands for all
        where they do not differ.
        """
        if self.bias is None:
            return None
        rows = self.bias if self.bias.shape[2] == 1 else self.bias[:, :, at]
        return rows.expand(len(self.query), -1, len(at), -1)

    def output(self, at: Int[Tensor, " m"] | None = None) -> Float[Tensor, "batch heads m width"]:
        """Attention recomputed from what was captured, of all queries or of those at some
        positions.
        """
        query, mask, bias = self.query, self.mask, self.bias
        if at is not None:
            query, bias = query[:, :, at], self.bias_at(at)
            mask = (
                None if mask is None else given_mask(self.visible(at), len(at), self.key.shape[2])
            )
        return attend_masked(
            query,
            self.key,
            self.value,
            self.scale,
            mask=mask,
            bias=bias,
            softcap=self.softcap,
            sinks=self.sinks,
        )
