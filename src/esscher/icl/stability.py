"""Flows of (O, V, K, Q) from the first weights of training: which of them get stuck, and how far
the two models part.

SGD with rate eta on the loss (f - y)^2, twice the risk, moves by 2 eta in time a step: the paper's
500 000 steps of 1e-3 are t = 1000.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from esscher.icl.comparison import ABOVE, STUCK
from esscher.icl.exact import risk
from esscher.icl.flow import Flow, gradient_flow
from esscher.icl.layer import KINDS, OVKQ, default_weights
from esscher.icl.quadrature import product_rule
from esscher.icl.tasks import LinearTask
from esscher.intervals import share_interval

RTOL, ATOL = 1e-4, 1e-6  # of the solver; ten times finer changes an error at t = 1000 by 1e-5
# of tasks and queries: two are exact for the fourth degree; more change the excess by 1e-4
SHELLS = (2, 4)
ROTATIONS = 2  # of the cubature that gives the error where a flow ends
ALL = "all"


def pair_flows(task: LinearTask, length: Any, seed: int, times: Any) -> dict[str, Flow]:
    """The flows of both models from the first weights that ``train`` draws with this seed."""
    start = default_weights(task.dim, torch.Generator().manual_seed(seed))
    rule = product_rule(task.dim, 1, 0, SHELLS)
    return {
        kind: gradient_flow(
            task, start, length, kind, times, rule, tolerance=0.0, rtol=RTOL, atol=ATOL
        )
        for kind in KINDS
    }


class Apart(NamedTuple):
    """Squared distances: of the weights, the least over the scale l of one of them, and of the
    products r (x) U.
    """

    plain: float
    modulo: float
    product: float


def apart(one: OVKQ, two: OVKQ) -> Apart:
    """The distances of two models with weights of the same shapes.

    Linear attention is the same for (o, V, K, Q) and (l o, l V, K/l, Q/l) with any l > 0, o the
    last row of O: score times value does not change. So is softmax attention on infinitely many
    tokens, and nearly so on many: the flat valley v U11 = Sigma^{-1} of [S] is this orbit.

    modulo = min over l > 0 of |(o, V) - l (o', V')|^2 + |(K, Q) - (K', Q')/l|^2, at a root of a
    polynomial of degree 4. product = |r (x) U - r' (x) U'|_F^2, r = V^T o, U = K^T Q without its
    last column, which never acts.
    """
    a, b = (np.append(each.O[-1], each.V) for each in (one, two))
    k, m = (np.append(each.K, each.Q) for each in (one, two))

    def squared(scale: float) -> float:
        return float(np.sum((a - scale * b) ** 2) + np.sum((k - m / scale) ** 2))

    roots = np.roots(np.array([b @ b, -(a @ b), 0.0, k @ m, -(m @ m)]))
    scales = [
        float(root.real) for root in roots if abs(root.imag) < 1e-9 * abs(root) and root.real > 0
    ]
    (r, U), (r2, U2) = ((each.uv().V[-1], each.uv().U[:, :-1]) for each in (one, two))
    product = (r @ r) * (U * U).sum() + (r2 @ r2) * (U2 * U2).sum()
    product -= 2.0 * (r @ r2) * (U * U2).sum()
    return Apart(squared(1.0), min(map(squared, [1.0, *scales])), max(float(product), 0.0))


def summary(
    task: LinearTask, length: Any, kind: str, flow: Flow, trained: int, end: float
) -> dict[str, Any]:
    """Mean squared error at the time numbered ``trained``, and when the flow arrives.

    ``end`` is the error at the end of the block form's flow: within 5 % of it a flow has arrived.
    """
    found = risk(task, flow.at(trained), length, kind, product_rule(task.dim, ROTATIONS))
    above = np.flatnonzero(2.0 * flow.risks > (1 + ABOVE) * end)
    arrival = int(above[-1]) + 1 if above.size else 0
    return {
        "status": "ok" if 2 * found.value <= (1 + ABOVE) * end else STUCK,
        "mse": 2 * found.value,
        "end": end,
        "arrival": float(flow.times[arrival]) if arrival < flow.times.size else math.nan,
    }


def verdict(flows: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, then one for all, from a table with covariance, length, seed, model,
    status and arrival: is training linear attention less stable?

    [S], appendix A.2: "training softmax attention architectures appears to be more stable". A start
    is *stuck* for a model when its error after the paper's training time is more than 5 % above
    where the block form ends (``comparison.ABOVE``). Both models have the same starts, so only
    starts stuck for one model and not for the other tell them apart. In each setting: McNemar's
    exact test, a sign test of those starts. Over all settings, which share their starts: the sign
    test of, for each start, the settings stuck for linear minus those stuck for softmax attention.
    Two-sided, level 5 %; this last p-value decides.

    ``only_linear`` and ``only_softmax`` count starts stuck for one model alone; in the last row,
    starts stuck in more settings for one model than for the other. ``p`` is corrected by Holm's
    method in the rows of settings.
    """
    told = flows.assign(stuck=flows["status"] != "ok", never=flows["arrival"].isna())
    wide = told.pivot_table(
        index=["covariance", "length", "seed"],
        columns="model",
        values=["stuck", "never"],
        sort=False,
        aggfunc="sum",
    ).astype(int)
    stuck, never = wide["stuck"], wide["never"]
    rows = []
    for (covariance, length), part in stuck.groupby(level=[0, 1], sort=False):
        row = _compared(part) | {f"{k}_never": never.loc[part.index, k].mean() for k in KINDS}
        rows.append({"covariance": covariance, "length": int(length)} | row)
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p"] = p
    pooled = {"covariance": ALL, "length": 0} | _compared(stuck.groupby(level="seed").sum())
    for kind in KINDS:  # the settings share their starts: no interval
        share = {kind: stuck[kind].mean(), f"{kind}_low": math.nan, f"{kind}_high": math.nan}
        pooled |= share | {f"{kind}_never": never[kind].mean()}
    return pd.DataFrame([*rows, pooled])


def _compared(counts: pd.DataFrame) -> dict[str, Any]:
    """Counts of stuck settings of each start for both models, compared."""
    difference = counts["linear"] - counts["softmax"]
    linear, softmax = int((difference > 0).sum()), int((difference < 0).sum())
    row: dict[str, Any] = {"starts": len(counts)}
    for kind in KINDS:
        share = share_interval(int((counts[kind] > 0).sum()), len(counts))
        row |= dict(zip((kind, f"{kind}_low", f"{kind}_high"), share, strict=True))
    p = float(binomtest(linear, linear + softmax).pvalue) if linear + softmax else 1.0
    return row | {"only_softmax": softmax, "only_linear": linear, "p": p}


def holm(values: list[float]) -> list[float]:
    """Holm's corrected p-values, in the order given."""
    order, count = np.argsort(values, kind="stable"), len(values)
    raised = np.minimum(1.0, np.asarray(values)[order] * (count - np.arange(count)))
    corrected = np.empty(count)
    corrected[order] = np.maximum.accumulate(raised)
    return [float(value) for value in corrected]
