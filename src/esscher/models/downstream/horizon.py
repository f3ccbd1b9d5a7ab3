"""The horizon of a text: known of the full model, before any key is dropped."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esscher.attention import horizon_of_covariances
from esscher.models.huggingface.capture import AttentionCall

__all__ = ["Horizons"]


class Horizons:
    """A sink: the two-sided horizon of every head on one text, scale ||Sigma_k^{1/2}
    Sigma_q^{1/2}||.
    """

    def __init__(self) -> None:
        self.found: list[float] = []

    def see(self, captured: AttentionCall) -> None:
        shared = captured.heads // captured.kv_heads
        keys = [_covariance(head) for head in captured.key[0]]
        for i, head in enumerate(captured.query[0]):
            self.found.append(
                horizon_of_covariances(keys[i // shared], _covariance(head), captured.scale)
            )

    @property
    def median(self) -> float:
        """Over all heads."""
        return float(np.median(self.found))


def _covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.double().T, correction=0)
