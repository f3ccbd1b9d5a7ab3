"""Learning rates of the steps, and the steps at which training is recorded."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from esscher.icl.training.spec import Schedule

__all__ = ["learning_rates", "record_steps"]

Floats = npt.NDArray[np.float64]


def learning_rates(rate: float, steps: int, schedule: str = "constant", warmup: int = 0) -> Floats:
    """The rate of every step."""
    if schedule not in get_args(Schedule):
        raise ValueError(
            f"schedule: expected one of {', '.join(get_args(Schedule))}, got {schedule!r}"
        )
    if not 0 <= warmup < steps:
        raise ValueError(
            f"warmup: expected a number of steps from 0 to below {steps}, got {warmup}"
        )
    index = np.arange(steps, dtype=np.float64)
    rates = np.full(steps, rate)
    rates[:warmup] *= (index[:warmup] + 1) / (warmup + 1)
    share = (index[warmup:] - warmup) / (steps - warmup)
    if schedule == "linear":
        rates[warmup:] *= 1 - share
    elif schedule == "cosine":
        rates[warmup:] *= 0.5 * (1 + np.cos(np.pi * share))
    return rates


def record_steps(steps: int, records: int) -> list[int]:
    """0, the last step, and about ``records`` between: half evenly spaced, half in geometric
    progression.
    """
    even = np.linspace(0, steps, max(2, records // 2 + 1))
    geometric = np.geomspace(1, steps, max(2, records // 2))
    return [int(step) for step in np.unique(np.concatenate([even, geometric]).round())]
