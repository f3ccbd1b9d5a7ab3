"""How much the next tokens of a language model feel its heads: gradients of log probabilities at
the heads' outputs.

A text is prefilled on all keys, and its continuation goes through the model once, all heads tapped.
Tokens y are drawn from the model's own probabilities p at every place of the continuation: of a
small error e of heads' outputs E_y (g . e)^2 = sum over places of Var_p(J e), twice the divergence
that it costs, g the gradient of sum log p(y), J the Jacobian of the logits (Fisher's information,
from both sides).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esscher.hf.call import AttentionCall
from esscher.hf.interventions import Prefilled

DRAWS = 8  # of next tokens


def drawn_gradients(
    held: Prefilled, ids: Int[Tensor, "1 m"], draws: int, generator: torch.Generator
) -> list[dict[int, Float[Tensor, "heads m width"]]]:
    """For each draw of the next tokens the gradient of their summed log probability at the heads'
    outputs, by layer.

    ``ids``: the continuation of what is held.
    """
    taps: dict[int, Tensor] = {}

    def tap(captured: AttentionCall, out: Tensor) -> Tensor:
        taps[captured.layer] = torch.zeros_like(out, requires_grad=True)
        return out + taps[captured.layer]

    with torch.enable_grad():
        result, _ = held.decode(ids, lambda captured: None, after=tap)
        logp = torch.log_softmax(result.logits[0].double(), -1)
        found = []
        for i in range(draws):
            drawn = torch.multinomial(logp.detach().exp().cpu(), 1, generator=generator).to(
                logp.device
            )
            gradients = torch.autograd.grad(
                logp.gather(1, drawn).sum(), list(taps.values()), retain_graph=i + 1 < draws
            )
            found.append(
                {layer: gradient[0] for layer, gradient in zip(taps, gradients, strict=True)}
            )
    return found


def gradient_size(gradients: Sequence[Float[Tensor, "heads m width"]]) -> Float[Tensor, " heads"]:
    """Root mean square over draws, places and coordinates."""
    return torch.stack(list(gradients)).double().square().mean((0, 2, 3)).sqrt()
