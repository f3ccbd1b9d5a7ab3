"""The affine maps from what enters an attention layer to its queries, keys and values, read off by
differentiation.

Fused projections, transposed weights, biases and scales differ from family to family; the Jacobian
of q, k, v does not care.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esscher.attention import Head
from esscher.hf.call import AttentionCall
from esscher.hf.capture import example_inputs, open_session, without_cache

TOLERANCE = 1e-5
JACOBIAN_NUMBERS = 1 << 26  # held at once


@dataclass(frozen=True)
class LinearMaps:
    """q = wq h + bq, k = wk h + bk, v = wv h + bv for the hidden state h (d) of a token, heads
    stacked: wq (heads width, d).

    A map is None where q, k or v is no affine function of h alone, and ``reason`` says why.
    ``scale`` is the softmax scale.
    """

    layer: int
    name: str
    heads: int
    kv_heads: int
    scale: float
    wq: Tensor | None
    bq: Tensor | None
    wk: Tensor | None
    bk: Tensor | None
    wv: Tensor | None
    bv: Tensor | None
    reason: str | None

    @property
    def affine(self) -> bool:
        """Are q, k and v all affine, whatever the position?"""
        return self.reason is None

    def head(self, index: int) -> Head:
        """Head ``index`` with the key head it shares: A = scale W_k^T W_q, tilt bias scale W_k^T
        b_q, V = W_v.
        """
        if self.wq is None or self.wk is None or self.wv is None:
            raise ValueError(f"layer {self.layer} ({self.name}): no linear maps, {self.reason}")
        assert self.bq is not None
        assert self.bk is not None
        assert self.bv is not None
        if not 0 <= index < self.heads:
            raise ValueError(
                f"head: layer {self.layer} has heads 0 to {self.heads - 1}, got {index}"
            )
        shared = index // (self.heads // self.kv_heads)
        wq, bq = _rows(self.wq, index, self.heads), _rows(self.bq, index, self.heads)
        wk, bk = _rows(self.wk, shared, self.kv_heads), _rows(self.bk, shared, self.kv_heads)
        wv, bv = _rows(self.wv, shared, self.kv_heads), _rows(self.bv, shared, self.kv_heads)
        # Head divides by sqrt(k); not every model does
        factor = self.scale * math.sqrt(wk.shape[0])
        return Head.from_weights(factor * wq, wk, wv, factor * bq, bk, bv)


def _rows(stacked: Tensor, index: int, parts: int) -> Tensor:
    width = stacked.shape[0] // parts
    return stacked[index * width : (index + 1) * width]


def linear_maps(model: Any, *, layers: Iterable[int] | None = None) -> list[LinearMaps]:
    """The maps of every self-attention layer, or of those asked for.

    Each attention module is fed tokens 0, a, a, b in one sequence and 0, b, b, a in another. q at 0
    is the bias; equal q at the two a's means that the position does not matter; equal Jacobians at
    a and b mean that the map is affine. Rotary positions fail the first, norms of queries and keys
    the second.
    """
    found: list[LinearMaps] = []
    inputs = {
        key: value.expand(2, *value.shape[1:]).contiguous()
        for key, value in example_inputs(model).items()
    }
    state = torch.Generator().manual_seed(1)

    def replace(hidden: Tensor) -> Tensor:
        size = float(hidden.detach().double().square().mean().sqrt()) or 1.0
        a, b = (size * torch.randn(2, hidden.shape[-1], generator=state)).to(hidden)
        other = hidden.detach().clone()
        other[:, 0] = 0
        other[0, 1], other[0, 2], other[0, 3] = a, a, b
        other[1, 1], other[1, 2], other[1, 3] = b, b, a
        return other.requires_grad_(True)

    def sink(captured: AttentionCall) -> None:
        found.append(_maps(captured))

    with (
        open_session(model, sink, layers=layers, hidden=True, detach=False) as session,
        torch.enable_grad(),
    ):
        session.replace = replace
        model(**inputs, **without_cache(model))
    return found


def _maps(captured: AttentionCall) -> LinearMaps:
    tensors = {"q": captured.query, "k": captured.key, "v": captured.value}
    maps = {letter: _affine(tensor, captured.hidden) for letter, tensor in tensors.items()}
    reasons = [f"{letter} {why}" for letter, (_, _, why) in maps.items() if why is not None]
    weights = {f"w{letter}": weight for letter, (weight, _, _) in maps.items()}
    biases = {f"b{letter}": bias for letter, (_, bias, _) in maps.items()}
    return LinearMaps(
        layer=captured.layer,
        name=captured.name,
        heads=captured.heads,
        kv_heads=captured.kv_heads,
        scale=captured.scale,
        **weights,
        **biases,
        reason="; ".join(reasons) or None,
    )


def _affine(out: Tensor, hidden: Tensor | None) -> tuple[Tensor | None, Tensor | None, str | None]:
    """(weight, bias, None) of an affine map, or (None, None, why it is none)."""
    if hidden is None or hidden.shape[1] != out.shape[2]:
        return None, None, "comes from something else than the hidden states that enter the module"
    rows = out.detach().transpose(1, 2).flatten(2)
    weight, leak = _jacobian(out, hidden, 0, 1)
    reasons = []
    if not _close(rows[0, 1], rows[0, 2]):
        reasons.append("changes with the position (rotary positions)")
    if leak:
        reasons.append("depends on other tokens")
    if not _close(weight, _jacobian(out, hidden, 1, 1)[0]):
        reasons.append("is not affine (a norm of queries or keys)")
    bias = rows[0, 0]
    if not reasons and not _close(rows[0, 3], hidden[0, 3].detach() @ weight.T + bias):
        reasons.append("is not affine")
    return (None, None, " and ".join(reasons)) if reasons else (weight, bias.clone(), None)


def _close(left: Tensor, right: Tensor) -> bool:
    return float((left - right).abs().max()) <= TOLERANCE * float(
        torch.maximum(left.abs().max(), right.abs().max())
    )


def _jacobian(
    out: Float[Tensor, "batch heads tokens width"],
    hidden: Float[Tensor, "batch tokens d"],
    batch: int,
    token: int,
) -> tuple[Float[Tensor, "rows d"], bool]:
    """d out[batch, :, token] / d hidden[batch, token], and whether any other token matters."""
    flat = out[batch, :, token].flatten()
    units = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
    step = max(1, JACOBIAN_NUMBERS // hidden.numel())
    parts, leak = [], False
    for start in range(0, len(flat), step):
        (gradient,) = torch.autograd.grad(
            flat,
            hidden,
            grad_outputs=units[start : start + step],
            is_grads_batched=True,
            retain_graph=True,
        )
        parts.append(gradient[:, batch, token].clone())
        gradient[:, batch, token] = 0
        leak = leak or bool(gradient.any())
    return torch.cat(parts), leak


# ---- The map from the outputs of a layer's heads to what it adds to the residual stream, W_O,
# found while the model runs.


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
