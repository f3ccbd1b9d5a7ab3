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
from esscher.hf.capture import accepted, example_inputs, open_session

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
        if not self.affine:
            raise ValueError(f"layer {self.layer} ({self.name}): no linear maps, {self.reason}")
        if not 0 <= index < self.heads:
            raise ValueError(
                f"head: layer {self.layer} has heads 0 to {self.heads - 1}, got {index}"
            )

        def own(stacked: Tensor | None, heads: int) -> Tensor:
            assert stacked is not None
            return stacked.chunk(heads)[index * heads // self.heads]

        wq, bq = own(self.wq, self.heads), own(self.bq, self.heads)
        wk, bk, wv, bv = (own(x, self.kv_heads) for x in (self.wk, self.bk, self.wv, self.bv))
        # Head divides by sqrt(k); not every model does
        factor = self.scale * math.sqrt(wk.shape[0])
        return Head.from_weights(factor * wq, wk, wv, factor * bq, bk, bv)


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

    def sink(call: AttentionCall) -> None:
        maps: dict[str, Any] = {}
        reasons = []
        for letter, tensor in (("q", call.query), ("k", call.key), ("v", call.value)):
            maps[f"w{letter}"], maps[f"b{letter}"], why = _affine(tensor, call.hidden)
            reasons += [f"{letter} {why}"] if why is not None else []
        reason = "; ".join(reasons) or None
        shape = call.layer, call.name, call.heads, call.kv_heads, call.scale
        found.append(LinearMaps(*shape, reason=reason, **maps))

    options: dict[str, Any] = {"layers": layers, "hidden": True, "detach": False}
    with open_session(model, sink, **options) as session, torch.enable_grad():
        session.replace = replace
        model(**inputs, **accepted(model, use_cache=False))
    return found


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
    largest = torch.maximum(left.abs().max(), right.abs().max())
    return float((left - right).abs().max()) <= TOLERANCE * float(largest)


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


def head_projections(model: Any) -> dict[int, Float[Tensor, "heads width d"]]:
    """W_O of each self-attention layer by head: a head's output o (width) adds o @ W_O[head] to the
    residual stream.

    A layer in which no module is called with the heads' outputs side by side (a gate lies between)
    is left out.
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
        with torch.no_grad(), open_session(model) as session:
            session.after = after
            model(**example_inputs(model), **accepted(model, use_cache=False))
    finally:
        for hook in hooks:
            hook.remove()
    return found
