"""Impact: keys by what their loss would change behind the head, one set for all queries of a
key-value head.

Without key j a query's output moves by -pi_j c_j / (1 - pi_j), c_j = v_j - limit, the residual
stream by W_O of that. Chances of least error for one set of keys go with sqrt(E_q pi_qj^2 |W_O
c_qj|^2) (Neyman); this keeps the keys where it is largest. The score has the unit of the residual
stream, so that scores of other heads and layers may be compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.blocks import blocks
from esscher.keep.context import Context
from esscher.keep.heavy import observed, pooled
from esscher.keep.neyman import gain
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["Impact"]


@dataclass(frozen=True)
class Impact(Ranked):
    """The ``size`` keys of largest impact over the choosing queries at the ``last`` positions, or
    over all of them.

    ``pool``: the mean impact of so many neighbours counts for a key where it is larger than its
    own: what matters comes in phrases, yet a key that matters alone must not be averaged away where
    few are kept.
    """

    name: ClassVar[str] = "impact"
    size: int | None = None
    last: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "impact")
        as_size(self.last, "impact, last")
        as_size(self.pool, "impact, pool")

    @property
    def observes(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        context = context.choosing
        asked = observed(context, self.last)
        total = torch.zeros(context.keys, dtype=torch.float64, device=context.k.device)
        for rows, part in blocks(context):
            total += gain(part, behind_output=True)[asked[rows]].square().sum(0)
        own = (total / asked.sum()).sqrt()
        return torch.maximum(own, pooled(own, self.pool))
