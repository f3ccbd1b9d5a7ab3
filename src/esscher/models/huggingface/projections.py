"""The map from the outputs of a layer's heads to what it adds to the residual stream, W_O, found
while the model runs.

The first module that is called with exactly what attention returned is the output projection,
whatever its name and the layout of its weights; its columns are what it makes of unit vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esscher.models.huggingface.capture import AttentionCall, open_session, without_cache
from esscher.models.huggingface.example import example_inputs

__all__ = ["head_projections"]


def head_projections(model: Any) -> dict[int, Float[Tensor, "heads width d"]]:
    """W_O of each self-attention layer, cut into heads: a head's output o (width) adds o @
    W_O[head] to the stream.

    A layer in which nothing is called with the heads' outputs side by side (a gate lies between) is
    left out.
    """
    found: dict[int, Tensor] = {}
    waiting: dict[int, Tensor] = {}

    def after(captured: AttentionCall, out: Tensor) -> Tensor:
        waiting[captured.layer] = out.detach()
        return out

    def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        if not waiting or not isinstance(given, Tensor):
            return
        layer, out = next(reversed(waiting.items()))
        heads, width = out.shape[1], out.shape[3]
        side = out.transpose(1, 2).flatten(2)
        if (
            layer not in found
            and given.numel() == side.numel()
            and torch.equal(given.detach().reshape(side.shape), side)
        ):
            found[layer] = _columns(module, given, heads * width).view(heads, width, -1)

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [
        module.register_forward_pre_hook(called)
        for module in leaves
        if any(True for _ in module.parameters())
    ]
    try:
        with torch.no_grad(), open_session(model, lambda captured: None) as session:
            session.after = after
            model(**example_inputs(model), **without_cache(model))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _columns(module: nn.Module, like: Tensor, width: int) -> Float[Tensor, "inputs d"]:
    """The linear part of an affine module, row i what it makes of the unit vector i."""
    forward = module.forward  # not the call, whose hook asked for this
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    rows: Tensor = (forward(units[None]) - forward(torch.zeros_like(units[None])))[0]
    return rows
