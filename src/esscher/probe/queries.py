"""Queries taken out of the windows they stand in, with all that they attend to there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esscher.hf.call import AttentionCall, at_least_single
from esscher.hf.gradients import DRAWS, drawn_gradients, gradient_size
from esscher.hf.interventions import prefill
from esscher.hf.loading import task_of
from esscher.probe.session import Indices, ProbeContext
from esscher.probe.tokens import LayerInfo


@dataclass(frozen=True)
class WindowQueries:
    """The m queries (H, m, k) of a window, and its T keys and values (H_kv, T, .) as they see them.

    ``scores`` (H, m, T): capped and biased as the model does it, -inf where a query does not see a
    key. ``sinks`` (H,): a logit that stands in the softmax without a key (gpt_oss).
    """

    rows: Indices  # numbers of the queries
    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor  # (1 or H, m, T)
    bias: Tensor | None  # (1 or H, m, T)
    scores: Tensor
    sink_mass: (
        Tensor  # (H, m): their weight on the first and the special tokens, and the sink logit
    )
    sinks: Tensor | None

    def seen_by(self, head: int) -> Tensor:
        """Which keys (m, T) the queries of a head see; most masks are one for all heads."""
        return self.seen[head if len(self.seen) > 1 else 0]

    def bias_of(self, head: int) -> Tensor | None:
        return None if self.bias is None else self.bias[head if len(self.bias) > 1 else 0]

    @classmethod
    def of(
        cls,
        source: ProbeContext,
        captured: AttentionCall,
        place: int,
        window: int,
        positions: Indices | None = None,
    ) -> WindowQueries:
        """``place``: of the window in the captured batch; ``positions``: other queries than those
        of the probe, numbered from 0.
        """
        if positions is None:
            rows = source.places.inside(window)
            positions = source.places.positions[rows]
        else:
            rows = np.arange(len(positions))
        at = torch.from_numpy(positions).to(captured.query.device)
        own = captured.take(at, place)
        scores, weights = own.scores()[0], own.weights()[0]
        resting = torch.from_numpy(source.sinks(window)).to(at.device)
        mass = (weights * resting).sum(-1)
        sinks = bias = None
        if own.sinks is not None:
            sinks, mass = at_least_single(own.sinks), mass + (1 - weights.sum(-1)).clamp_min(0)
        if own.bias is not None:
            bias = at_least_single(own.bias[0])
        q, k, v = (at_least_single(x[0]) for x in (own.query, own.key, own.value))
        return cls(rows, q, k, v, captured.visible(at)[place], bias, scores, mass, sinks)


@dataclass(frozen=True)
class LayerQueries:
    """Queries (H, m, k) of a layer, and the weight (H, m) they put on sink tokens in their
    window.
    """

    info: LayerInfo
    q: Tensor
    sink_mass: Tensor


class QueryCollector:
    """Takes the queries of each layer out of the windows they stand in, whichever batches these
    come in.
    """

    def __init__(self, source: ProbeContext) -> None:
        self.source = source
        self.found: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self.info: dict[int, LayerInfo] = {}

    def __call__(self, captured: AttentionCall, batch: Indices) -> None:
        self.info.setdefault(captured.layer, LayerInfo.of(captured))
        for place, window in enumerate(batch.tolist()):
            if len(self.source.places.inside(window)):
                own = WindowQueries.of(self.source, captured, place, window)
                self.found.setdefault(captured.layer, {})[window] = own.q, own.sink_mass

    def result(self, layer: int) -> LayerQueries:
        windows = self.found[layer]
        parts = [windows[window] for window in sorted(windows)]  # the order of source.places
        q, mass = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
        return LayerQueries(self.info[layer], q, mass)


def capture_queries(source: ProbeContext, layers: Sequence[int]) -> dict[int, LayerQueries]:
    """The queries of some layers, by forward passes over their windows."""
    collector = QueryCollector(source)
    source.run(np.unique(source.places.windows), layers, collector)
    return {layer: collector.result(layer) for layer in layers}


# ---- How much next tokens feel each head at the end of a window: what the errors of its heads
# count in a split of keys.

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
