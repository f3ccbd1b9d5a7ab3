"""Small random inputs a model accepts: enough to see what its attention looks like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["example_inputs"]


def example_inputs(model: Any, tokens: int = 4, *, seed: int = 0) -> dict[str, Tensor]:
    """One sequence of random token ids, or one random image or sound, on the model's device."""
    name = model.main_input_name
    config = model.config
    state = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    dtype = next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )
    if name == "input_ids":
        text = config.get_text_config()
        taken = {
            value for value in (text.pad_token_id, text.eos_token_id) if isinstance(value, int)
        }
        ids = torch.randint(0, text.vocab_size, (1, tokens + 8), generator=state)[0].tolist()
        kept = [value for value in ids if value not in taken][:tokens] or [0] * tokens
        return {name: torch.tensor([kept], device=device)}
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return {
            name: torch.randn(1, config.num_channels, height, width, generator=state).to(
                device, dtype
            )
        }
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * int(getattr(config, "max_source_positions", 50))
        return {
            name: torch.randn(1, config.num_mel_bins, frames, generator=state).to(device, dtype)
        }
    raise ValueError(
        f"{type(model).__name__}: no example can be made of its input {name}; give inputs"
    )
