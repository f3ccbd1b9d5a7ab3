"""What a benchmark reports: a ratio of two times measured side by side, against a bar. Seconds do
not travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["best_time", "best_times", "ratio_line"]


def best_time(work: Callable[[], object], repeats: int = 5) -> float:
    """Shortest of some runs, in seconds, after one that is not counted (it compiles and fills
    caches).
    """
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def best_times(*works: Callable[[], object], repeats: int = 7) -> list[float]:
    """Shortest time of each of several works, run in turn so that a noisy moment hits all of them
    alike.
    """
    for work in works:
        work()
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def ratio_line(name: str, measured: float, bar: float) -> str:
    """One line of ``make bench``: name, measured ratio, bar, and ok when the ratio is at most the
    bar.
    """
    return f"{name:<56} {measured:10.3f} {bar:10.3f}  {'ok' if measured <= bar else 'over'}"
