"""exact_pool_curve with rules whose number is open, on scores up to 1000 nats apart, against every
kept set by itself in the logarithms.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one"]

COVERS = ("exact_pool_curve",)
Array = np.ndarray


def one(draw: Draw) -> None:
    rng, keys = draw.rng, draw.whole(2, 9)
    dtype = draw.pick([torch.float64, torch.float32])
    height = rng.uniform(-1.0, 1.0, keys) * draw.pick([1.0, 60.0, 200.0, 500.0])
    height = np.round(height * 8) / 8  # float32 holds them
    side = draw.pick([1, -1])
    v = torch.from_numpy(rng.standard_normal((keys, 2))).to(dtype)
    times = draw.pick([1, 4096 // keys + 1], p=[0.7, 0.3])  # rows: few pairs, and many
    q = torch.full((times, 1), float(side), dtype=dtype)
    k = torch.from_numpy(height)[:, None].to(dtype)
    sinks = draw.whole(1, keys) - 1
    last = draw.pick(["recent", "topk", "random", "random:reweight"])
    rule = f"sinks:{sinks}+{last}" if sinks else last
    n = sorted({draw.whole(max(1, sinks), keys) for _ in range(3)})
    curve = draw.public("exact_pool_curve", q, k, v, n, scale=1.0, keep=rule, details=True)
    score, values = side * height, v.double().numpy()
    slack = 1e-9 if dtype == torch.float64 else 3e-4
    for i, count in enumerate(n):
        p = _probability(score, sinks, last, count)
        weight = 1 / np.where(p > 0, p, 1.0) if "reweight" in last else np.ones(keys)
        mse, sum_p2 = _every_set(score, values, p, weight)
        found = numbers(curve.queries.mse[:, i])
        if not np.isfinite(found).all():
            raise Finding("silent", f"mse: {found[0]}")
        # outputs of size 1 are subtracted here, and lose what is below 1e-15
        allowed = 2 * slack * mse + 1e-14 * np.sqrt(mse) + 1e-28
        draw.agree("mse", found, np.full(times, mse), allowed)
        draw.agree(
            "sum p^2", curve.queries.sum_p2[:, i], np.full(times, sum_p2), 2 * slack * sum_p2
        )


def _probability(score: Array, sinks: int, last: str, count: int) -> Array:
    """Of each key to be kept: the first ``sinks``, then the latest, the highest or any others."""
    p = np.zeros(len(score))
    p[:sinks] = 1.0
    rest, free = np.arange(sinks, len(score)), count - sinks
    if last == "recent":
        p[rest[::-1][:free]] = 1.0
    elif last == "topk":  # of equal ones the later first
        p[sorted(rest, key=lambda j: (score[j], j), reverse=True)[:free]] = 1.0
    elif len(rest):
        p[rest] = free / len(rest)
    return p


def _every_set(score: Array, v: Array, p: Array, weight: Array) -> tuple[float, float]:
    """E|Gamma_keep - Gamma|^2 and E sum p^2 over all sets; no key kept counts as neither."""
    limit = _softmax(score) @ v
    sure, free = np.flatnonzero(p == 1.0), np.flatnonzero((p > 0.0) & (p < 1.0))
    mse = sum_p2 = 0.0
    for taken in itertools.product([False, True], repeat=len(free)):
        chosen = np.array(taken, dtype=bool)
        kept = np.concatenate([sure, free[chosen]])
        if not len(kept):
            continue
        own = _softmax(score[kept] + np.log(weight[kept]))
        chance = float(np.prod(np.where(chosen, p[free], 1.0 - p[free])))
        mse += chance * float(((own @ v[kept] - limit) ** 2).sum())
        sum_p2 += chance * float((own**2).sum())
    return mse, sum_p2


def _softmax(score: Array) -> Array:
    e = np.exp(score - score.max())
    return np.asarray(e / e.sum())
