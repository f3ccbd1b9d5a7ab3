"""Keys dropped in one layer, and in all: what reaches the last word, measured and to first
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from esscher.models.downstream.cache import Cell
from esscher.models.downstream.first_order import pushed
from esscher.models.downstream.readings.divergence import Divergence
from esscher.models.downstream.readings.error import Error
from esscher.models.downstream.text import Text
from esscher.models.huggingface.capture import AttentionCall

__all__ = ["ALL", "layer_rows"]

ALL = -1  # in place of a layer: keys are dropped in all of them


def layer_rows(text: Text, cell: Cell, layers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A row for each layer that alone drops keys, and one for all layers at once: change of the
    logits, measured and pushed forward from the errors that the layers' heads make at the full
    model's inputs; and the divergence.
    """
    choice, error, divergence = text.plan.choose(cell), Error(), Divergence()
    made = {call.layer: text.head_errors(choice, call) for call in text.calls}
    size = text.full.rows.double()
    size = size - size.mean(-1, keepdim=True)
    for layer in layers:
        some = made if layer == ALL else {layer: made[layer]}
        result, _ = text.decode(_only(text, choice, layer))
        kept = text.outcome(result)
        tangent: Tensor = pushed(text, some).double()
        tangent = tangent - tangent.mean(-1, keepdim=True)
        yield {
            "layer": layer,
            "error": error.value(text.full, kept),
            "first_order": float(tangent.square().sum() / size.square().sum()) ** 0.5,
            "kl": divergence.value(text.full, kept),
        }


def _only(text: Text, choice: Any, layer: int) -> Any:
    def decide(captured: AttentionCall) -> Any:
        return text.left(choice, captured) if layer in (ALL, captured.layer) else None

    return decide
