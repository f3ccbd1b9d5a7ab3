"""One table of rules for the tests that hold for all of them: the text, and whether it leaves a
number open; and a rule from outside, of given probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from esscher import keep

__all__ = ["FIXED", "OPEN", "RULES", "Given"]


@dataclass(frozen=True, eq=False)
class Given(keep.Chance):
    """Each key, of each query where there are rows, with its own probability."""

    name: ClassVar[str] = "given"
    given: torch.Tensor
    reweight: bool = True

    def probability(
        self, context: keep.Context, rest: torch.Tensor, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        return rest * self.given

    def text(self) -> str:
        return self.name


OPEN = (
    "random",
    "random:reweight",
    "sinks",
    "recent",
    "topk",
    "strided",
    "global:0+strided",
    "longformer",
    "heavy",
    "heavy:last=2",
    "heavy:pool=3",
    "criticalkv",
    "impact",
    "impact:last=2:pool=2",
    "keynorm",
    "expected",
    "neyman",
    "neyman:shared",
    "sinks:1+recent",
    "sinks:1+recent:1+random",
    "sinks:1+recent:1+random:reweight",
    "topk:2+random:reweight",
    "topk+random:0.3:reweight",
    "window:1+neyman",
    "streamingllm:1",
    "bigbird:1",
    "recent:2+heavy",
    "fisher",
    "kvzip",
    "kvzip_plus",
    "kvgrad",
    "h2o",
    "snapkv",
    "tova",
    "restkv",
    "vattention:0.7:delta=0.2:sinks=1:recent=1",
)
FIXED = (
    "random:0.3",
    "random:0.3:reweight",
    "random:1",
    "sinks:2",
    "recent:3",
    "window:2",
    "strided:3",
    "global:0,3",
    "topk:2",
    "heavy:3",
    "impact:3",
    "keynorm:2",
    "expected:2",
    "neyman:3",
    "neyman:3:shared",
    "magicpig:2:5",
    "streamingllm:1:2",
    "longformer:1",
    "longformer:1:at=0,2",
    "bigbird:1:0.2",
    "sinks:1+recent:1+random:0.2+random:0.3",
    "sinks:1+recent:1+adaptive:0.9:delta=0.3",
    "vattention:0.9:0.4:sinks=1:recent=1:topk=2:base=0.3",
)
RULES = (*((text, True) for text in OPEN), *((text, False) for text in FIXED))
