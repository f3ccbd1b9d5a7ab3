"""How much next tokens feel each head at the end of a window: what the errors of its heads count in
a split of keys.
"""

from __future__ import annotations

import numpy as np
import torch

from esscher.models.huggingface.gradients import DRAWS, drawn_gradients, gradient_size
from esscher.models.huggingface.interventions import prefill
from esscher.models.huggingface.task import task_of
from esscher.models.probe.context import ProbeContext

__all__ = ["window_gradients"]

PLACES = 64  # at the end of a window, a quarter of it at most: where heads are tapped
QUARTER = 4


def window_gradients(probe: ProbeContext, window: int) -> dict[int, list[float]]:
    """Root mean square gradient of log p of drawn next tokens at the output of every head, by
    layer.

    The window is prefilled but for its last places, which are tapped, all heads at once: memory is
    that of a few tokens. Empty for a model that has no next token, or no cache of keys to continue
    from.
    """
    model = probe.loaded.model
    if task_of(model) != "language":
        return {}
    real = probe.windows.ids[window][~probe.windows.padding[window]].astype(np.int64)
    ids = torch.from_numpy(real)[None].to(probe.loaded.device)
    places = min(PLACES, ids.shape[1] // QUARTER)
    try:
        held = prefill(model, ids[:, :-places])
    except ValueError:  # heads then count alike, and a budget says so
        return {}
    generator = torch.Generator().manual_seed(probe.spec.unit_seed({"window": window}))
    drawn = drawn_gradients(held, ids[:, -places:], DRAWS, generator)
    return {layer: gradient_size([one[layer] for one in drawn]).tolist() for layer in probe.layers}
