"""converge: the whole sweep of a scale against the plain protocol, fresh tokens and one explicit
softmax per n and repeat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from ratio import ratio_line

import esscher as es

DIM = 50
VARIANCE = 0.1
HORIZON = 0.5
SIZES = np.geomspace(1000, 8690, 8).round().astype(int).tolist()
REPEATS = 2  # timed, of each; more of ours alone would not change the ratio
SLOPE_REPEATS = 32  # for the spread of the slope, by either sampling
SLOPE_ERROR = 0.02
# nested prefixes correlate the errors: a slope took 1.2 to 3.5 times the repeats of fresh tokens
SLOPE_BAR = 1 / 2
METRICS = ("mean", "cov")


def main() -> list[str]:
    law, head = _setting()
    plain_seconds, ours_seconds = _in_turn(
        lambda r: _plain(head, law, r), lambda r: _ours(head, law, "nested", r)
    )
    ratio = ours_seconds / plain_seconds
    lines = [
        ratio_line(
            f"converge / explicit softmax per n ({ours_seconds:.2f} s a repeat)", ratio, 1 / 8
        )
    ]
    nested = _ours(head, law, "nested", SLOPE_REPEATS)
    # the law of the plain protocol's errors, found faster
    fresh = _ours(head, law, "independent", SLOPE_REPEATS)
    for name in METRICS:
        # repeats go as the square of the slope's standard error for one repeat
        ours_repeats, plain_repeats = (_repeats_needed(curves[name]) for curves in (nested, fresh))
        ours_time, plain_time = ours_repeats * ours_seconds, plain_repeats * plain_seconds
        title = (
            f"  {name}: slope to 0.02, {ours_time:.0f} s ({ours_repeats}) / {plain_time:.0f} s"
            f" ({plain_repeats})"
        )
        lines.append(ratio_line(title, ours_time / plain_time, SLOPE_BAR))
    return lines


def _setting() -> tuple[es.Gaussian, es.Head]:
    """Tokens N(0, 0.1 I), weights N(0, 1/d) scaled to the horizon."""
    law = es.Gaussian(VARIANCE * torch.eye(DIM))
    head = es.Head.from_weights(*_weights())
    return law, head.scaled(HORIZON / head.horizon(law))


def _weights() -> torch.Tensor:
    return torch.randn(3, DIM, DIM, generator=torch.Generator().manual_seed(0)) / math.sqrt(DIM)


def _ours(head: es.Head, law: es.Gaussian, sampling: str, repeats: int) -> dict[str, es.ErrorCurve]:
    return es.converge(head, law, SIZES, repeats, METRICS, sampling=sampling)


def _plain(head: es.Head, law: es.Gaussian, repeats: int) -> list[tuple[float, float]]:
    """Mean and covariance errors of self-attention as one would write them down, in float32."""
    push = es.limit(head, law).pushforward()
    mean, cov = push.mean.float(), push.cov.float()
    wq, wk, wv = _weights()
    # the head's horizon
    wq = wq * (float(head.query_map.norm()) / float(wq.norm() / math.sqrt(DIM)))
    errors = []
    for n in SIZES:
        for _ in range(repeats):
            x = math.sqrt(VARIANCE) * torch.randn(n, DIM)
            scores = (x @ wq.T) @ (x @ wk.T).T / math.sqrt(DIM)
            outputs = scores.softmax(dim=-1) @ (x @ wv.T)
            errors.append(
                (float((outputs.mean(0) - mean).norm()), float((torch.cov(outputs.T) - cov).norm()))
            )
    return errors


def _in_turn(*works: Callable[[int], object], rounds: int = 3) -> list[float]:
    """Best seconds a repeat of each, in turn."""
    best = [math.inf] * len(works)
    for work in works[1:]:
        work(REPEATS)  # warm
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work(REPEATS)
            best[i] = min(best[i], (time.perf_counter() - start) / REPEATS)
    return best


def _repeats_needed(curve: es.ErrorCurve) -> int:
    assert curve.samples is not None
    return math.ceil(curve.samples.shape[0] * (es.fit_rate(curve).stderr / SLOPE_ERROR) ** 2)


if __name__ == "__main__":
    print("\n".join(main()))
