"""kvpress with a budget for every key-value head from ``esscher budget --kvpress``, against
the same press without one.

    esscher probe smollm2 --pool sequence --rules expected --out runs/mine
    esscher budget runs/mine --rule expected --kvpress expected.npy
    python examples/kvpress_budget.py expected.npy book.txt [RATIO] [PREFILL] [DECODE]

kvpress is no dependency of esscher: where it cannot be imported, this says so and ends. Tokens are
decoded one at a time, as a reader of the model gets them; printed is the Kullback-Leibler
divergence of the next token from the model on all keys.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esscher.hf import load_model


def with_positions(model: Any) -> list[Any]:
    """Presses read ``cache_position``, which transformers 5 does not pass on any more; hooks that
    add it.
    """

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        first = kwargs["past_key_values"].get_seq_length(module.layer_idx)
        return args, {
            **kwargs,
            "cache_position": torch.arange(first, first + kwargs["hidden_states"].shape[1]),
        }

    return [
        layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
        for layer in model.model.layers
    ]


def continued(model: Any, press: Any, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    """Log probabilities (D, words) of the next token along a given continuation, after a prefill
    under a press or without.
    """
    from transformers import DynamicCache

    cache, rows = DynamicCache(), []
    with torch.no_grad():
        if press is None:
            model(input_ids=ids[:, :prefill], past_key_values=cache, use_cache=True)
        else:
            with press(model):
                model(input_ids=ids[:, :prefill], past_key_values=cache, use_cache=True)
        for place in range(prefill, ids.shape[1]):
            at = torch.tensor([[place]])
            out = model(
                input_ids=ids[:, place : place + 1],
                past_key_values=cache,
                position_ids=at,
                use_cache=True,
            )
            rows.append(out.logits[0, -1].log_softmax(-1))
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return torch.stack(rows)


def main(arguments: list[str]) -> None:
    try:
        from kvpress import ExpectedAttentionPress, LUKVPress
    except ImportError as cause:
        print(f"kvpress cannot be imported ({cause}); nothing to show")
        return
    budget, text = arguments[:2]
    ratio = float(arguments[2]) if len(arguments) > 2 else 0.8
    prefill, decode = (
        int(number) for number in (*arguments[3:], *("512", "32")[len(arguments[3:]) :])
    )
    loaded = load_model("smollm2", with_head=True)
    ids = loaded.tokenizer(
        Path(text).read_text("utf-8")[: 12 * (prefill + decode)], return_tensors="pt"
    )["input_ids"]
    ids = ids[:, : prefill + decode]
    by_head = LUKVPress(press=ExpectedAttentionPress(), compression_ratio=ratio, sink=4, window=32)
    by_head._budget_curves = np.load(budget)
    hooks = with_positions(loaded.model)
    full = continued(loaded.model, None, ids, prefill)
    for name, press in {
        "the same for all heads": ExpectedAttentionPress(ratio),
        "esscher's budget": by_head,
    }.items():
        kept = continued(loaded.model, press, ids, prefill)
        print(
            f"{name:<24} drops {ratio:.0%}: KL"
            f" {float((full.exp() * (full - kept)).sum(-1).mean()):.3f}"
        )
    for hook in hooks:
        hook.remove()


if __name__ == "__main__":
    main(sys.argv[1:])
