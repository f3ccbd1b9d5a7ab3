"""Proof that capturing changes nothing: the same output with and without, and a capture for every
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.models.huggingface.capture import AttentionCall, forward, without_cache
from esscher.models.huggingface.example import example_inputs
from esscher.models.huggingface.support import escaped, expected_layers, refusal

__all__ = ["Parity", "parity"]

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Parity:
    """Largest difference of the outputs, also relative to the largest output, and layers captured
    of those expected.
    """

    max_difference: float
    relative: float
    captured: int
    expected: int | None

    @property
    def holds(self) -> bool:
        """Equal to 1e-6, absolute or relative to the largest output."""
        return min(self.max_difference, self.relative) <= TOLERANCE

    def __str__(self) -> str:
        layers = "?" if self.expected is None else self.expected
        return (
            f"parity {self.max_difference:.1e} (relative {self.relative:.1e}), {self.captured} of"
            f" {layers} layers captured"
        )


def parity(model: Any, inputs: Mapping[str, Any] | None = None) -> Parity:
    """Run the model with and without capture and compare logits (or hidden states) on tokens that
    are not padding.

    A model of which nothing, or not every layer, is captured is refused with the reason. Without
    inputs a few random tokens are used.
    """
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"parity: {reason}")
    inputs = example_inputs(model, 16) if inputs is None else inputs
    seen: list[int] = []

    def count(captured: AttentionCall) -> None:
        seen.append(captured.layer)

    ours = _output(forward(model, inputs, count))
    with torch.no_grad():
        theirs = _output(model(**inputs, **without_cache(model)))
    reason = escaped(model, len(seen))
    if reason is not None:
        raise ValueError(f"parity: {reason}")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == ours.shape[:2]:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    difference = float((ours.double() - theirs.double()).abs().max())
    return Parity(
        difference,
        difference / max(float(theirs.double().abs().max()), 1e-300),
        len(seen),
        expected_layers(model),
    )


def _output(result: Any) -> Tensor:
    """Logits where there are some, else the last hidden states."""
    found: Tensor = next(
        (result[key] for key in ("logits", "last_hidden_state") if key in result), result[0]
    )
    return found
