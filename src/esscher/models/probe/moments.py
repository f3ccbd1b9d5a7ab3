"""Mean and covariance of self-attention's outputs on n tokens of a pool, by Monte Carlo: the protocol of [B].

n tokens are drawn with replacement from all pooled tokens of the corpus; they are queries and keys. The mean (L2) and the
covariance (Frobenius) of the n outputs are compared with those of attention on the whole pool, for each head and for the
layer's heads side by side. One draw of the largest n serves every n: its prefixes are the smaller draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.prefixes import attend_prefixes
from esscher.attention.streaming import attend
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.convergence.rate.fit import fit_rate
from esscher.models.probe.tokens import LayerInfo

__all__ = ["WHOLE_LAYER", "moment_curves", "moment_ladder", "moment_row"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WHOLE_LAYER = -1  # the "head" of a layer's heads side by side
LARGEST = 2048  # n unless told otherwise: pairs grow as its square
SMALLEST = 64


@dataclass(frozen=True)
class _Limit:
    """Mean (d,) and covariance (d, d) of the outputs on the whole pool."""

    mean: Tensor
    cov: Tensor


def moment_ladder(given: tuple[int, ...] | None, keys: int) -> Indices:
    """Numbers of tokens: those given, or octaves from 64 up to 2048 and an eighth of the pool."""
    if given is not None:
        if max(given) > keys:
            raise ValueError(f"moments_n: the pool has {keys} keys, got n = {max(given)}; give more text or smaller n")
        return np.array(given, dtype=np.int64)
    largest = min(LARGEST, max(keys // 8, 4))
    ladder = SMALLEST * 2 ** np.arange(0, 8)
    ladder = ladder[ladder <= largest]
    return ladder if ladder.size >= 3 else np.unique(np.geomspace(4, largest, 6).round().astype(np.int64))


def moment_curves(
    info: LayerInfo, tensors: tuple[Tensor, Tensor, Tensor], heads: tuple[int, ...], n: Indices, repeats: int, seed: int
) -> dict[tuple[int, str], ErrorCurve]:
    """Curves by (head, "mean" or "cov"); head WHOLE_LAYER is the layer. Tensors q (H, N, k), k and v (H_kv, N, .)."""
    q, k, v = tensors
    if info.softcap is not None:
        raise ValueError("moments: capped scores have no fused attention; probe this model without --moments")
    outputs = torch.cat([attend(q[h], k[info.kv_head(h)], v[info.kv_head(h)], info.scale).double() for h in heads], dim=1)
    limit = _limit(outputs)
    width = v.shape[-1]
    squared: dict[tuple[int, str], list[list[float]]] = {}
    for repeat in range(repeats):
        generator = generator_for(f"moments/{info.layer}", seed, "nested", repeat, "tokens")
        chosen = torch.randint(k.shape[1], (int(n[-1]),), generator=generator).to(k.device)
        parts = [
            attend_prefixes(q[h, chosen], k[own, chosen], v[own, chosen], n, info.scale, outputs=True)
            for h, own in ((h, info.kv_head(h)) for h in heads)
        ]
        errors: dict[tuple[int, str], list[float]] = {}
        for i in range(len(n)):
            outs = [part[i].outputs for part in parts]
            here = _limit(torch.cat([out for out in outs if out is not None], dim=1))
            for place, head in enumerate((*heads, WHOLE_LAYER)):
                columns = slice(None) if head == WHOLE_LAYER else slice(place * width, (place + 1) * width)
                mean = (here.mean - limit.mean)[columns]
                cov = (here.cov - limit.cov)[columns, columns]
                errors.setdefault((head, "mean"), []).append(float(mean.square().sum()))
                errors.setdefault((head, "cov"), []).append(float(cov.square().sum()))
        for key, values in errors.items():
            squared.setdefault(key, []).append(values)
    return {key: _curve(key, n, np.array(values), limit, heads, width, k.shape[1]) for key, values in squared.items()}


def _limit(outputs: Tensor) -> _Limit:
    mean = outputs.mean(0)
    centred = outputs - mean
    return _Limit(mean, centred.T @ centred / len(outputs))


def _curve(
    key: tuple[int, str], n: Indices, samples: Floats, limit: _Limit, heads: tuple[int, ...], width: int, keys: int
) -> ErrorCurve:
    head, metric = key
    place = None if head == WHOLE_LAYER else heads.index(head)
    columns = slice(None) if place is None else slice(place * width, (place + 1) * width)
    cov = limit.cov[columns, columns]
    # The mean itself may be 0, so its error is compared with the size of an output.
    size = float(limit.mean[columns].square().sum() + cov.trace()) if metric == "mean" else float(cov.square().sum())
    origin = f"Monte Carlo, {len(samples)} repeats; tokens drawn with replacement from a pool of {keys}, nested prefixes"
    return ErrorCurve.from_repeats(n, samples, metric=metric, scale=math.sqrt(size), origin=origin)


def moment_row(curves: Mapping[tuple[int, str], ErrorCurve], head: int) -> dict[str, Any]:
    """Fitted exponents of a head's moments with their intervals: beta_mean, beta_mean_low, ..., beta_cov_high."""
    row: dict[str, Any] = {}
    for metric in ("mean", "cov"):
        fit = fit_rate(curves[head, metric], raise_on_failure=False)
        row |= {f"beta_{metric}": fit.exponent, f"beta_{metric}_low": fit.interval[0], f"beta_{metric}_high": fit.interval[1]}
    return row
