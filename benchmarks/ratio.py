"""What a benchmark reports: a ratio of two times measured side by side, against a bar. Seconds do
not travel.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

__all__ = ["Measured", "best_times", "ratio_line"]


class Measured(float):
    """A number and its relative ``noise``: how far the median of the repeats lies above the best;
    a quotient has that of both.
    """

    noise: float = 0.0

    @classmethod
    def of(cls, value: float, noise: float) -> Measured:
        found = cls(value)
        found.noise = noise
        return found

    def __truediv__(self, other: float) -> Measured:
        noise = math.hypot(self.noise, getattr(other, "noise", 0.0))
        return Measured.of(float(self) / float(other), noise)


def best_times(*works: Callable[[], object], repeats: int = 7) -> list[Measured]:
    """Shortest time of each of several works, run in turn so that a noisy moment hits all of them
    alike, after one run that is not counted (it compiles and fills caches).
    """
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for own, work in zip(times, works, strict=True):
            start = time.perf_counter()
            work()
            own.append(time.perf_counter() - start)
    return [Measured.of(min(own), statistics.median(own) / min(own) - 1) for own in times]


def ratio_line(name: str, measured: float, bar: float) -> str:
    """One line of ``make bench``: name, noise, measured ratio, bar, and ok when the ratio is at
    most the bar, near when it may be within its noise, else over.
    """
    noise = getattr(measured, "noise", 0.0)
    word = "ok" if measured <= bar else "near" if measured <= bar * (1 + noise) else "over"
    return f"{name:<56} {f'±{noise:.0%}' if noise else '':>6} {measured:10.3f} {bar:10.3f}  {word}"
