"""Queries taken out of the windows they stand in, with all that they attend to there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.models.huggingface.capture import Captured
from esscher.models.probe.context import Indices, ProbeContext
from esscher.models.probe.tokens import LayerInfo, scores_of

__all__ = ["LayerQueries", "QueryCollector", "WindowQueries", "capture_queries"]


@dataclass(frozen=True)
class WindowQueries:
    """The m queries (H, m, k) of a window, and its T keys and values (H_kv, T, .) as they see them.

    ``scores`` (H, m, T): capped and biased as the model does it, -inf where a query does not see a
    key. A logit that stands in the softmax without a key (gpt_oss) comes first among the keys, with
    a value of 0.
    """

    rows: Indices  # numbers of the queries
    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor  # (1 or H, m, T)
    bias: Tensor | None  # (1 or H, m, T)
    scores: Tensor
    sink_mass: Tensor  # (H, m): their weight on the first and the special tokens
    first: int  # the position of the first key: -1 where it is such a logit

    def seen_by(self, head: int) -> Tensor:
        """Which keys (m, T) the queries of a head see; most masks are one for all heads."""
        return self.seen[head if len(self.seen) > 1 else 0]

    def bias_of(self, head: int) -> Tensor | None:
        return None if self.bias is None else self.bias[head if len(self.bias) > 1 else 0]

    @classmethod
    def of(
        cls, source: ProbeContext, captured: Captured, place: int, window: int, info: LayerInfo
    ) -> WindowQueries:
        """``place``: of the window in the captured batch."""
        rows = source.places.inside(window)
        at = torch.from_numpy(source.places.positions[rows]).to(captured.query.device)
        wide = torch.float64 if captured.query.dtype == torch.float64 else torch.float32
        q = captured.query[place][:, at].to(wide)
        k, v = captured.key[place].to(wide), captured.value[place].to(wide)
        seen = captured.visible(at)[place]
        bias = captured.bias_at(at)
        bias = None if bias is None else bias[place].to(wide)
        resting = torch.from_numpy(source.sinks(window)).to(q.device)
        if captured.sinks is not None:
            logit = captured.sinks.to(wide)[:, None, None].expand(-1, len(at), 1)
            zero = (
                logit.new_zeros(info.heads, len(at), k.shape[1])
                if bias is None
                else bias.expand(info.heads, -1, -1)
            )
            bias = torch.cat([logit, zero], dim=2)
            k, v = pad(k, (0, 0, 1, 0)), pad(v, (0, 0, 1, 0))
            seen, resting = pad(seen, (1, 0), value=True), pad(resting, (1, 0), value=True)
        scores = scores_of(info, q, k.repeat_interleave(info.heads // info.kv_heads, dim=0))
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~seen, -torch.inf)
        mass = scores.masked_fill(~resting, -torch.inf).logsumexp(-1) - scores.logsumexp(-1)
        return cls(
            rows, q, k, v, seen, bias, scores, mass.exp(), 0 if captured.sinks is None else -1
        )


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

    def __call__(self, captured: Captured, batch: Indices) -> None:
        info = self.info.setdefault(captured.layer, LayerInfo.of(captured))
        for place, window in enumerate(batch.tolist()):
            if len(self.source.places.inside(window)):
                own = WindowQueries.of(self.source, captured, place, window, info)
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
