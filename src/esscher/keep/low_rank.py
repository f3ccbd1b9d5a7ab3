"""LowRank: attention through r mixtures of all keys (Linformer); no keep rule, but an error against
a size like theirs.

With P the softmax weights (queries x keys) and E of shape (r, N):

    random       P E'E V,     E with independent N(0, 1/r) entries: E'E is the identity on
        average (Linformer, Theorem 1)
    svd          P_r V,       P_r the matrix of rank r nearest to P, whose low rank is
        Linformer's argument
    projected    softmax(scale q (E K)') E V: keys and values projected by one such E, as
        Linformer runs, but untrained
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from esscher.keep.context import Context
from esscher.keep.registry import refused
from esscher.keep.rule import Part
from esscher.keep.sizes import as_size

__all__ = ["LowRank"]


@dataclass(frozen=True)
class LowRank(Part):
    """``rank`` mixtures, at random, or with ``svd`` those of the nearest matrix, or with
    ``projected`` below the softmax.
    """

    name: ClassVar[str] = "lowrank"
    alone: ClassVar[bool] = True
    rank: int | None = None
    svd: bool = False
    projected: bool = False

    def __post_init__(self) -> None:
        as_size(self.rank, "lowrank")
        if self.svd and self.projected:
            raise refused("lowrank: expected svd or projected, got both")

    @property
    def is_open(self) -> bool:
        return self.rank is None

    def check_numbers(self, context: Context) -> None:
        raise refused(
            "lowrank: it mixes all keys and keeps none; expected a rule here, lowrank is for"
            " exact_pool_curve"
        )
