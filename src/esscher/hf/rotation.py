"""How a query turns when its token stands later: the rotation of rotary positions, found from the
model's own queries.

A model whose positions are relative gives the same tokens the same hidden states wherever they
stand, and the same queries up to a rotation of each layer: q(p + n) = q(p) R(n), R(a + b) = R(a)
R(b). The tokens of one short text go through the model at several positions at once, and R of each
layer is the orthogonal matrix nearest to their queries (Procrustes), whatever the layout, scaling
or base of the rotation. What is left over says whether the model works so at all.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esscher.hf.call import AttentionCall
from esscher.hf.capture import accepted, capture
from esscher.hf.loading import positions

TOKENS = 16  # of the text, at least
LEFT_OVER = 1e-3  # of the queries, at most; more in half precision


def rotations(model: Any, step: int, count: int) -> dict[int, Float[Tensor, "count width width"]]:
    """By layer R(0), R(step), R(2 step), ... for ``count`` steps; empty where queries of this model
    are not turned by positions (learned positions, biases of distance), or there is no room.
    """
    weights = next(model.parameters())
    config = model.config.get_text_config()
    heads, width = getattr(config, "num_attention_heads", 1), getattr(config, "head_dim", None)
    wide = width or config.hidden_size // heads
    tokens, most = max(TOKENS, -(-4 * wide // heads)), positions(model)
    doublings = max(0, count - 1).bit_length()
    shifts = step * torch.tensor([0, *(1 << j for j in range(doublings))], device=weights.device)
    places = torch.arange(tokens, device=weights.device) + shifts[:, None]
    if (most is not None and int(places.max()) >= most) or not accepted(model, position_ids=places):
        return {}
    words = model.get_input_embeddings().num_embeddings
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (1, tokens), generator=drawn).to(weights.device)
    seen: dict[int, Tensor] = {}
    biased = []

    def see(call: AttentionCall) -> None:
        seen[call.layer] = call.query.double()
        biased.append(call.bias is not None)

    with torch.no_grad(), capture(model, see):
        model(
            input_ids=ids.expand(len(shifts), -1),
            position_ids=places,
            **accepted(model, use_cache=False, logits_to_keep=1),
        )
    allowed = max(LEFT_OVER, 8 * torch.finfo(weights.dtype).eps)
    found = {}
    for layer, query in seen.items():
        first, *others = query.transpose(1, 3).flatten(2).mT  # (shifts, tokens * heads, width)
        power = torch.eye(first.shape[1], dtype=first.dtype, device=first.device)[None]
        for other in others:
            left, _, right = torch.linalg.svd(first.T @ other)
            turn = left @ right
            if float((first @ turn - other).norm()) > allowed * float(other.norm()):
                return {}
            power = torch.cat([power, power @ turn])
        found[layer] = power[:count]
    return {} if any(biased) else found


def moved(
    query: Float[Tensor, "heads m width"],
    steps: Int[Tensor, " m"],
    turns: Float[Tensor, "count width width"],
) -> Float[Tensor, "heads m width"]:
    """The queries where each stands a number of steps later; ``turns``: those of its layer."""
    found = torch.empty_like(query)
    for count in torch.unique(steps).tolist():
        own = steps == count
        found[:, own] = query[:, own] @ turns[count].to(query)
    return found
