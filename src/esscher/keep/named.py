"""Rules known by a name of their own, each a union of parts."""

from __future__ import annotations

from esscher.keep.chosen import Global
from esscher.keep.random import Random
from esscher.keep.recent import Recent
from esscher.keep.rule import Union
from esscher.keep.sinks import Sinks
from esscher.keep.window import Window

__all__ = ["BigBird", "Longformer", "StreamingLLM"]


def StreamingLLM(sinks: int = 4, recent: int | None = None) -> Union:
    """The first keys and the last (Xiao et al. 2023)."""
    return Sinks(sinks) | Recent(recent)


def Longformer(window: int, at: tuple[int, ...] = (0,)) -> Union:
    """A window and keys at given positions (Beltagy et al. 2020)."""
    return Window(window) | Global(at)


def BigBird(window: int, share: float | None = None, at: tuple[int, ...] = (0,)) -> Union:
    """A window, keys at given positions, and others at random (Zaheer et al. 2020)."""
    return Window(window) | Global(at) | Random(share)
