"""Queries of one window, with all that they attend to there; gradients at its end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from esscher.hf.call import AttentionCall, at_least_single, softmax
from esscher.hf.gradients import DRAWS, drawn_gradients, gradient_size
from esscher.hf.interventions import prefill
from esscher.hf.loading import task_of
from esscher.probe.session import Indices, Session

PLACES = 64  # last places of a window, a quarter of it at most, where gradients are taken
QUARTER = 4


@dataclass(frozen=True, eq=False)
class WindowQueries:
    """The queries at some positions of a window, in one layer.

    ``scores`` (H, m, T) are capped and biased as the model does it, -inf where a query does not see
    a key. ``place``: of the window in the captured batch.
    """

    session: Session
    captured: AttentionCall
    place: int
    window: int
    positions: Indices

    def at(self, positions: Indices) -> WindowQueries:
        """Other queries of the same window."""
        return WindowQueries(self.session, self.captured, self.place, self.window, positions)

    @cached_property
    def index(self) -> Tensor:
        return torch.from_numpy(self.positions).to(self.captured.query.device)

    @cached_property
    def call(self) -> AttentionCall:
        return self.captured.take(self.index, self.place)

    @cached_property
    def q(self) -> Tensor:
        """(H, m, k)."""
        return at_least_single(self.call.query[0])

    @cached_property
    def k(self) -> Tensor:
        """(H_kv, T, k)."""
        return at_least_single(self.call.key[0])

    @cached_property
    def v(self) -> Tensor:
        return at_least_single(self.call.value[0])

    @cached_property
    def scores(self) -> Tensor:
        return self.call.scores()[0]

    @cached_property
    def weights(self) -> Tensor:
        """(H, m, T); beside a sink logit they sum to less than 1."""
        return softmax(self.scores, self.sinks)

    @cached_property
    def sinks(self) -> Tensor | None:
        """(H,): a logit that stands in the softmax without a key (gpt_oss)."""
        return None if self.call.sinks is None else at_least_single(self.call.sinks)

    @cached_property
    def seen(self) -> Tensor:
        """(1 or H, m, T)."""
        return self.captured.visible(self.index)[self.place]

    def seen_by(self, head: int) -> Tensor:
        """Which keys (m, T) the queries of a head see."""
        return self.seen[head if len(self.seen) > 1 else 0]

    def bias_of(self, head: int) -> Tensor | None:
        if self.call.bias is None:
            return None
        bias = at_least_single(self.call.bias[0])
        return bias[head if len(bias) > 1 else 0]

    @property
    def heads(self) -> int:
        return self.captured.heads


def own_queries(
    session: Session, captured: AttentionCall, place: int, window: int
) -> WindowQueries:
    """Those of the probe."""
    positions = session.queries.positions[session.queries.inside(window)]
    return WindowQueries(session, captured, place, window, positions)


def window_gradients(session: Session, window: int) -> dict[int, list[float]]:
    """Root mean square gradient of log p of drawn next tokens at the output of every head, by
    layer.

    The window is prefilled but for its last places, where all heads are tapped at once: memory is
    that of a few tokens. Empty for a model without next tokens, or without a cache.
    """
    model = session.loaded.model
    if task_of(model) != "language":
        return {}
    real = session.windows.ids[window][~session.windows.padding[window]].astype(np.int64)
    ids = torch.from_numpy(real)[None].to(session.loaded.device)
    places = min(PLACES, ids.shape[1] // QUARTER)
    try:
        held = prefill(model, ids[:, :-places])
    except ValueError:  # heads then count alike, and a budget says so
        return {}
    generator = torch.Generator().manual_seed(session.spec.unit_seed({"window": window}))
    drawn = drawn_gradients(held, ids[:, -places:], DRAWS, generator)
    return {
        layer: gradient_size([one[layer] for one in drawn]).tolist() for layer in session.layers
    }
