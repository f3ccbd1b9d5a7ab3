"""A model quirk from outside the package, in one file: an attention module that says its soft cap
in a word of its own is captured wrongly, and rightly with one entry in ``QUIRKS``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention

from esscher.hf.call import QUIRKS
from esscher.hf.capture import parity
from tests.models.tiny import FAMILIES, build, inputs_of

CAP = 0.05


class CappedAttention(LlamaAttention):
    """Llama's attention, which tells the attention function ``score_limit``."""

    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named, score_limit=CAP)


def capped(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """The model's own attention: scores are capped, then masked."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = CAP * torch.tanh(q @ k.mT * named["scaling"] / CAP)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None


def test_an_attention_module_with_a_word_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionInterface.register("capped", capped)
    AttentionMaskInterface.register("capped", sdpa_mask)
    family = next(family for family in FAMILIES if family.name == "llama")
    model = build(family.config, family.options)
    for module in model.modules():
        if isinstance(module, LlamaAttention):
            module.__class__ = CappedAttention
    model.set_attn_implementation("capped")
    assert parity(model, inputs_of(family)) > 1e-3  # the cap is not known yet

    def quirk(module: Any, named: dict[str, Any]) -> dict[str, Any]:
        return {**named, "softcap": named["score_limit"]}

    monkeypatch.setitem(QUIRKS, "CappedAttention", quirk)
    assert parity(model, inputs_of(family)) <= 1e-6
