"""Rules of the literature (SnapKV, H2O, StreamingLLM, ...), each made of the parts in
``ranked.py``, ``position.py`` and ``chance.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from esscher.keep.chance import AdaptiveRest, Random
from esscher.keep.context import Context
from esscher.keep.position import Global, Recent, Sinks, Window
from esscher.keep.ranked import Heavy, Impact, TopK
from esscher.keep.rule import Part, Union, refused


def StreamingLLM(sinks: int = 4, recent: int | None = None) -> Union:
    """The first keys and the last (Xiao et al. 2023)."""
    return Sinks(sinks) | Recent(recent)


def Longformer(window: int | None = None, at: tuple[int, ...] = (0,)) -> Union:
    """A window and keys at given positions (Beltagy et al. 2020); without a width, as many of the
    nearest keys as n leaves.
    """
    return (Recent() if window is None else Window(window)) | Global(at)


def BigBird(window: int, share: float | None = None, at: tuple[int, ...] = (0,)) -> Union:
    """A window, keys at given positions, and others at random (Zaheer et al. 2020)."""
    return Window(window) | Global(at) | Random(share)


def H2O(size: int | None = None) -> Heavy:
    """Keys of largest weight over all observed queries (Zhang et al. 2023)."""
    return Heavy(size)


def SnapKV(size: int | None = None, last: int = 64, pool: int = 5) -> Heavy:
    """Keys of largest weight over the last queries, averaged over neighbours (Li et al. 2024)."""
    return Heavy(size, last, pool)


def TOVA(size: int | None = None) -> Heavy:
    """Keys of largest weight at the last query (Oren et al. 2024)."""
    return Heavy(size, last=1)


def RestKV(size: int | None = None, last: int = 32, pool: int = 5) -> Impact:
    """Keys whose loss changes the output most at the last queries (ReST-KV, 2026)."""
    return Impact(size, last, pool)


def VAttention(
    epsilon: float = 0.1,
    delta: float = 0.1,
    sinks: int = 4,
    recent: int = 64,
    topk: int | None = None,
    base: float = 0.02,
) -> Union:
    """The first keys, the last, those of largest score, and of the rest what (epsilon, delta) ask
    for (Desai et al. 2025).
    """
    return Sinks(sinks) | Recent(recent) | TopK(topk) | AdaptiveRest(epsilon, delta, base)


RULES = (BigBird, H2O, Longformer, RestKV, SnapKV, StreamingLLM, TOVA, VAttention)


# ---- LowRank: attention through r mixtures of all keys (Linformer); no keep rule, but an error
# against a size like theirs.


@dataclass(frozen=True)
class LowRank(Part):
    """``rank`` Gaussian mixtures of the weights and of the values, mean over all of them."""

    name: ClassVar[str] = "lowrank"
    alone: ClassVar[bool] = True
    per_query = True  # a mixture is made of all keys: none is dropped
    rank: int | None = None

    def check_numbers(self, context: Context) -> None:
        raise refused(
            "lowrank: it mixes all keys and keeps none; expected a rule here, lowrank is for"
            " exact_pool_curve and for probes of encoders"
        )
