"""The error of attention through r mixtures of all keys (keep.LowRank), for a ladder of r.

With p the softmax weights of a query, S and U the singular values and vectors of all queries'
weights P = U diag(S) W':

    random       E |p E'E V - p V|^2 = (|p|^2 |V|^2 + |p V|^2) / r         (Frobenius norm of V;
        Wishart moments)
    svd          |sum_{i > r} U_i S_i (W_i' V)|^2
    projected    simulated
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.convergence.curve import ErrorCurve, QueryErrors
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.inputs import as_counts
from esscher.keep import Context, LowRank
from esscher.keep.registry import refused

__all__ = ["low_rank_curve"]

REPEATS = 200
ROUNDING = 1e-12


def low_rank_curve(context: Context, rule: LowRank, n: Any = None) -> ErrorCurve:
    """``n``: ranks, where the rule has none of its own. Every query must see every key, for a
    mixture has no place.
    """
    ranks = _ranks(context, rule, n)
    if not bool(context.visible.all()):
        raise ValueError(
            "lowrank: mixtures of keys have no positions; expected queries that see every key,"
            " leave positions out"
        )
    if rule.projected:
        return _projected(context, ranks, str(rule))
    mse = _nearest(context, ranks) if rule.svd else _random(context, ranks)
    unknown = np.full(len(context.q), np.nan)
    queries = QueryErrors(
        mse=mse, sum_p2=np.full_like(mse, np.nan), limit=context.limit.cpu().numpy(), delta=unknown
    )
    how = (
        "the nearest weights of rank n"
        if rule.svd
        else "n random mixtures, mean over all Gaussian ones"
    )
    origin = f"exact error of {rule}: {how}, of {context.keys} keys"
    curve = ErrorCurve.from_queries(
        ranks,
        queries,
        None,
        kind="exact",
        origin=origin,
        accuracy=ROUNDING,
        kept=ranks.astype(np.float64),
    )
    return replace(curve, effective_tokens=None)


def _ranks(context: Context, rule: LowRank, n: Any) -> npt.NDArray[np.int64]:
    if (n is None) == (rule.rank is None):
        wanted = (
            "no n: its rank is given" if n is not None else "n, the ranks: it has none of its own"
        )
        raise ValueError(f"n: {rule} expects {wanted}")
    ranks = as_counts(rule.rank if n is None else n, "n")
    most = min(context.scores.shape) if rule.svd else context.keys
    if ranks.max() > most:
        what = (
            "the smaller of the numbers of queries and keys" if rule.svd else "the number of keys"
        )
        raise refused(f"lowrank: expected ranks of at most {most}, {what}, got {ranks.max()}")
    return ranks


def _random(context: Context, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    spread = context.attention.square().sum(
        1
    ) * context.v.double().square().sum() + context.limit.square().sum(1)
    return spread.cpu().numpy()[:, None] / ranks


def _nearest(context: Context, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    left, size, right = torch.linalg.svd(context.attention, full_matrices=False)
    mixed = right @ context.v.double()
    lost = [((left[:, r:] * size[r:]) @ mixed[r:]).square().sum(1) for r in ranks.tolist()]
    return torch.stack(lost, dim=1).cpu().numpy()


def _projected(context: Context, ranks: npt.NDArray[np.int64], name: str) -> ErrorCurve:
    q, both = context.q.double() * context.scale, torch.cat([context.k, context.v], dim=1).double()
    width = context.k.shape[1]
    samples = np.empty((REPEATS, len(ranks)))
    for j, rank in enumerate(ranks.tolist()):
        generator = generator_for("low rank", 0, rank)
        for i in range(REPEATS):
            matrix = torch.randn(rank, context.keys, generator=generator, dtype=torch.float64).to(
                both.device
            )
            mixed: Tensor = matrix @ both / rank**0.5
            error = torch.softmax(q @ mixed[:, :width].T, 1) @ mixed[:, width:] - context.limit
            samples[i, j] = float(error.square().sum(1).mean())
    curve = ErrorCurve.from_repeats(
        ranks,
        samples,
        scale=float(context.limit.square().sum(1).mean().sqrt()),
        origin=(
            f"simulated error of {name}: {REPEATS} Gaussian projections of {context.keys} keys and"
            " values to n"
        ),
    )
    return replace(curve, kept=ranks.astype(np.float64))
