"""How often confidence regions hold the limit, by drawing tokens from a law or from a head's pool
of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.errors.region import Bounds, region_of, sample_statistics
from esscher.inputs import generator_for
from esscher.measures.base import Measure
from esscher.measures.pool import Pool


@torch.no_grad()
def coverage(
    head: Head,
    measure: Measure,
    queries: Any,
    n: Sequence[int],
    repeats: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """A row for each n: rms error, effective tokens (one over the mean sum of squared weights), and
    of each kind of ``confidence_region`` the share of draws that hold the limit.

    Shares are means over the queries; ``*_stderr`` is binomial, the queries of a repeat counted as
    one draw, and not 0 where every draw was covered. ``*_size`` is the mean radius over the rms
    error. The proved kind, bernstein, needs a law of bounded support. Tokens of a repeat are
    nested: one draw for all n.
    """
    x = torch.as_tensor(queries).double()
    known: dict[str, Bounds | None] = {"normal": None}
    if measure.as_pool() is not None or measure.support_radius() is not None:
        known["bernstein"] = Bounds.of(head, measure, x)
    target, q = limit(head, measure)(x), head.queries(x)
    draws = []
    for repeat in range(repeats):
        tokens = measure.sample(n[-1], generator_for("", seed, "nested", repeat, "tokens")).double()
        keys, values = head.keys(tokens), head.values(tokens)
        for size in n:
            sample = sample_statistics(q, keys[:size], values[:size], 1.0)
            squared = (sample.center - target).square().sum(1)
            row = {"n": size, "squared": float(squared.mean()), "p2": float(sample.sum_p2.mean())}
            for kind, bounds in known.items():
                region = region_of(sample, level, bounds)
                row[kind] = float(region.contains(target).double().mean())
                row[f"{kind}_radius"] = float(region.radius.mean())
            draws.append(row)
    means = pd.DataFrame(draws).groupby("n").mean()
    found = pd.DataFrame({"rms": means["squared"] ** 0.5, "effective_tokens": 1.0 / means["p2"]})
    for kind in known:
        near = (means[kind] * repeats + 1.0) / (repeats + 2.0)
        found[kind] = means[kind]
        found[f"{kind}_stderr"] = (near * (1.0 - near)) ** 0.5 / math.sqrt(repeats)
        found[f"{kind}_size"] = means[f"{kind}_radius"] / found["rms"]
    return found.reset_index()


def head_of_pool(k: Tensor, v: Tensor, scale: float) -> tuple[Head, Pool]:
    """A head and a pool whose limit is attention on all keys: a token is a key and its value side
    by side, A picks the key, V the value.
    """
    width, out = k.shape[1], v.shape[1]
    eye = torch.eye(width + out, dtype=torch.float64, device=k.device)
    return Head(scale * eye[:, :width], eye[width:]), Pool(torch.cat([k, v], dim=1).double())
