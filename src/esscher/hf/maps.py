"""The affine maps from the input of an attention layer to its queries, keys and values, and from
its heads' outputs to the residual stream.

They are found by differentiation: fused projections, transposed weights, biases and scales differ
from family to family, the Jacobian of q, k, v does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esscher.attention.head import Head
from esscher.hf.call import AttentionCall
from esscher.hf.capture import accepted, capture, example_inputs

TOLERANCE = 1e-5


@dataclass(frozen=True)
class LinearMaps:
    """q = wq h + bq, k = wk h + bk, v = wv h + bv for the hidden state h (d) of a token, heads
    stacked: wq (heads width, d).

    ``maps``: (weight, bias) of "q", "k" and "v", without those that are no affine function of h
    alone: queries and keys under rotary positions or norms. ``scale`` is the softmax scale.
    """

    layer: int
    name: str
    heads: int
    kv_heads: int
    scale: float
    maps: dict[str, tuple[Tensor, Tensor]]

    def head(self, index: int) -> Head:
        """Head ``index`` with the key head it shares: A = scale W_k^T W_q, tilt bias scale W_k^T
        b_q, V = W_v.
        """
        missing = [letter for letter in "qkv" if letter not in self.maps]
        if missing:
            raise ValueError(
                f"layer {self.layer} ({self.name}): no linear maps: {' and '.join(missing)} are not"
                " affine in the hidden state of their own token (rotary positions, norms)"
            )
        if not 0 <= index < self.heads:
            raise ValueError(
                f"head: layer {self.layer} has heads 0 to {self.heads - 1}, got {index}"
            )
        (wq, bq), (wk, bk), (wv, bv) = (
            [x.chunk(heads)[index * heads // self.heads] for x in self.maps[letter]]
            for letter, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        # Head divides by sqrt(k); not every model does
        factor = self.scale * math.sqrt(wk.shape[0])
        return Head.from_weights(factor * wq, wk, wv, factor * bq, bk, bv)


def linear_maps(model: Any, *, layers: Iterable[int] | None = None) -> list[LinearMaps]:
    """The maps of every self-attention layer, or of those asked for.

    Each attention module is fed the tokens 0, a, a, b. q at 0 is the bias, and the Jacobian at the
    first a the weight; the map is affine, whatever the position, if they give q of all four.
    """
    found: list[LinearMaps] = []
    state = torch.Generator().manual_seed(1)

    def replace(hidden: Tensor) -> Tensor:
        size = float(hidden.detach().double().square().mean().sqrt()) or 1.0
        a, b = (size * torch.randn(2, hidden.shape[-1], generator=state)).to(hidden)
        other = hidden.detach().clone()
        other[0, :4] = torch.stack([torch.zeros_like(a), a, a, b])
        return other.requires_grad_(True)

    def sink(call: AttentionCall) -> None:
        maps = {}
        for letter, tensor in (("q", call.query), ("k", call.key), ("v", call.value)):
            # of a module that gets something else there are none
            if call.hidden is not None and call.hidden.shape[1] == tensor.shape[2]:
                rows = tensor[0].transpose(0, 1).flatten(1)
                units = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
                (slope,) = torch.autograd.grad(
                    rows[1], call.hidden, units, retain_graph=True, is_grads_batched=True
                )
                weight, bias, rows = slope[:, 0, 1], rows[0].detach(), rows[:4].detach()
                made = call.hidden[0, :4].detach() @ weight.T + bias
                if float((made - rows).abs().max()) <= TOLERANCE * float(rows.abs().max()):
                    maps[letter] = weight, bias.clone()
        shape = call.layer, call.name, call.heads, call.kv_heads, call.scale
        found.append(LinearMaps(*shape, maps))

    options: dict[str, Any] = {"layers": layers, "hidden": True, "detach": False}
    with capture(model, sink, **options) as capturing, torch.enable_grad():
        capturing.replace = replace
        model(**example_inputs(model), **accepted(model, use_cache=False))
    return found


def head_projections(model: Any) -> dict[int, Float[Tensor, "heads width d"]]:
    """W_O of each self-attention layer by head: a head's output o (width) adds o @ W_O[head] to the
    residual stream.

    A layer in which no module is called with the heads' outputs side by side (a gate lies between)
    is left out.
    """
    found: dict[int, Tensor] = {}
    waiting: dict[int, Tensor] = {}

    def attend(call: AttentionCall) -> Tensor:
        out = waiting[call.layer] = call.output()
        return out

    def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        if not waiting or not isinstance(given, Tensor):
            return
        layer, out = next(reversed(waiting.items()))
        side = out.transpose(1, 2).flatten(2)
        if layer in found or given.numel() != side.numel():
            return
        if torch.equal(given.detach().reshape(side.shape), side):
            # the linear part of an affine module: row i is what it makes of the unit vector i
            units = torch.eye(side.shape[-1], dtype=given.dtype, device=given.device)[None]
            rows = module.forward(units) - module.forward(torch.zeros_like(units))
            found[layer] = rows[0].view(out.shape[1], out.shape[3], -1)

    hooks = [
        module.register_forward_pre_hook(called)
        for module in model.modules()
        if not list(module.children()) and list(module.parameters())
    ]
    try:
        with torch.no_grad(), capture(model) as capturing:
            capturing.attend = attend
            model(**example_inputs(model), **accepted(model, use_cache=False))
    finally:
        for hook in hooks:
            hook.remove()
    return found
