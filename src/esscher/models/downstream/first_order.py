"""How a small error of heads moves the model's last word: pushed forward (Jacobian-vector products), and pulled back.

Both are of the continuation of a text, the inputs of all layers being the full model's. Of logits z with probabilities p, a
change dz costs KL = 1/2 Var_p(dz) to second order, and E_y[(d log p(y))^2] = Var_p(dz) for y drawn from p: gradients of drawn
tokens are the other side of the same number.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from esscher.models.downstream.text import Text
from esscher.models.huggingface.capture import Captured

make_dual: Any = forward_ad.make_dual
unpack_dual: Any = forward_ad.unpack_dual

__all__ = ["drawn_gradients", "pushed"]


def pushed(text: Text, errors: Mapping[int, Tensor]) -> Tensor:
    """J e, (D, words): the change of the logits, to first order, when heads' outputs move by errors (heads, D, width)."""

    def move(captured: Captured, out: Tensor) -> Tensor:
        error = errors.get(captured.layer)
        if error is None:
            return out
        tangent = error[None].to(out.dtype)
        primal, before = unpack_dual(out)
        moved: Tensor = make_dual(primal, tangent if before is None else tangent + before)
        return moved

    with warnings.catch_warnings(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # fused kernels have no derivatives
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning, module=r"torch\."
        )  # of its own, when it first needs them
        result, _ = text.decode(lambda captured: None, after=move)
        change: Tensor = unpack_dual(result.logits).tangent
        return change[0].clone()


def drawn_gradients(text: Text, draws: int, generator: torch.Generator) -> list[dict[int, Tensor]]:
    """For each draw of the next tokens from the model's own probabilities, the gradient of their summed log probability with
    respect to the heads' outputs: by layer (heads, D, width).
    """
    taps: dict[int, Tensor] = {}

    def tap(captured: Captured, out: Tensor) -> Tensor:
        taps[captured.layer] = torch.zeros_like(out, requires_grad=True)
        return out + taps[captured.layer]

    with torch.enable_grad():
        result, _ = text.held.decode(text.ids[:, text.tokens :], lambda captured: None, after=tap)
        logp = torch.log_softmax(result.logits[0].double(), -1)
        found = []
        for i in range(draws):
            drawn = torch.multinomial(logp.detach().exp().cpu(), 1, generator=generator).to(logp.device)
            gradients = torch.autograd.grad(logp.gather(1, drawn).sum(), list(taps.values()), retain_graph=i + 1 < draws)
            found.append({layer: gradient[0] for layer, gradient in zip(taps, gradients, strict=True)})
    return found
