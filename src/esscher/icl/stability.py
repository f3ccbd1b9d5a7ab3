"""Where training ends: trained models beside the end of the gradient flow, which first weights get
stuck, and how far the two models part.

SGD with rate eta on the loss (f - y)^2, twice the risk, moves by 2 eta in time a step: the paper's
500 000 steps of 1e-3 are t = 1000.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from esscher.icl.exact import risk
from esscher.icl.flow import Flow, final_parameters, gradient_flow, start_block
from esscher.icl.layer import KINDS, OVKQ, default_weights
from esscher.icl.quadrature import product_rule
from esscher.icl.tasks import LinearTask
from esscher.intervals import Interval, share_interval

ABOVE = 0.05  # share above the end of the flow from which on a model has not arrived
FALLING = 0.01  # share by which the error of a model still falls at the end of its training
RTOL, ATOL = 1e-4, 1e-6  # of the solver; ten times finer changes an error at t = 1000 by 1e-5
# of tasks and queries: two are exact for the fourth degree; more change the excess by 1e-4
SHELLS = (2, 4)
ALL = "all"


# ---- Trained models beside the flow


def judged(task: LinearTask, final: pd.DataFrame, curve: pd.DataFrame) -> pd.DataFrame:
    """The table ``final`` of one training with the status of models that did not arrive, and what
    to do.

    A model whose error is more than ``ABOVE`` over the end of its flow, and more than two standard
    errors, is "undertrained" where its error still falls at the end of training, by more than its
    noise and 1 % over the last quarter, or has not come half of the way from where it began; else
    it is "stuck", in another valley.
    """
    rows = final.to_dict("records")
    for row in rows:
        end = flow_end(task, row["length"], row["model"])
        if row["status"] == "ok" and row["mse"] - 2 * row["stderr"] > (1 + ABOVE) * end:
            path = curve[curve["model"] == row["model"]]
            first = path["mse"].iloc[0]
            on_its_way = _still_falls(path) or first - row["mse"] < 0.5 * (first - end)
            row["status"] = "undertrained" if on_its_way else "stuck"
            remedy = "train for more steps" if on_its_way else "take another seed"
            row["advice"] = (
                f"{row['model']} attention ended {row['mse'] / end - 1:.0%} above the end of its"
                f" flow; {remedy}"
            )
    return pd.DataFrame(rows, columns=final.columns)


def _still_falls(path: pd.DataFrame) -> bool:
    """Of the last quarter of the records, the later half against the earlier one."""
    half = max(1, math.ceil(len(path) / 4) // 2)
    early, end = path.iloc[-2 * half : -half], path.tail(half)
    before, after = early["mse"].mean(), end["mse"].mean()
    noise = math.hypot(*(np.sqrt((part["stderr"] ** 2).sum()) / len(part) for part in (early, end)))
    return bool(before - after > max(2 * noise, FALLING * before))


def flow_end(task: LinearTask, length: int, kind: str) -> float:
    """Mean squared error where the flow of the block form ends."""
    end = final_parameters(task, start_block(task), length, kind)
    return 2 * float(risk(task, end, length, kind))


# ---- Flows from the first weights of training


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


def apart(one: OVKQ, two: OVKQ) -> tuple[float, float]:
    """Squared distances of two models: of the weights (o, V, K, Q), o the last row of O, and of the
    products r (x) U that they compute with, r = V^T o, U = K^T Q without its last column.

    Linear attention is the same for (o, V, K, Q) and (l o, l V, K/l, Q/l) with any l > 0. So is
    softmax attention on infinitely many tokens, and nearly so on many: the flat valley v U11 =
    Sigma^{-1} of [S] is this orbit, along which the products do not change.
    """
    pairs = ((one.O[-1], two.O[-1]), (one.V, two.V), (one.K, two.K), (one.Q, two.Q))
    plain = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    (r, U), (r2, U2) = ((each.uv().V[-1], each.uv().U[:, :-1]) for each in (one, two))
    product = (r @ r) * (U * U).sum() + (r2 @ r2) * (U2 * U2).sum()
    product -= 2.0 * (r @ r2) * (U * U2).sum()
    return plain, max(float(product), 0.0)


def backtracking(distance: pd.DataFrame) -> pd.DataFrame:
    """How erratic the distance of the two models is along their flows ([S] A.2.2): the share of the
    variation of log |difference|^2 that is undone, 1 - |log d_end / d_first| / sum |steps of log
    d|, median over starts; 0 where it is monotone.
    """
    rows = []
    apart = distance[distance["weights2"] > 0]
    for place, flow in apart.groupby(["covariance", "length", "seed"], sort=False):
        steps = np.diff(np.log(flow["weights2"].to_numpy()))
        rows.append([*place[:2], 1.0 - abs(steps.sum()) / np.abs(steps).sum()])
    found = pd.DataFrame(rows, columns=["covariance", "length", "undone"])
    return found.groupby(["covariance", "length"], sort=False, as_index=False).median()


def verdict(flows: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, then one for all: is training linear attention less stable, as [S],
    appendix A.2, finds? From a table with covariance, length, seed, model and status.

    Both models have the same starts, so only starts stuck for one model and not for the other tell
    them apart: ``only_linear`` and ``only_softmax`` count them; in the last row, starts stuck in
    more settings for one model than for the other. ``p``: the exact two-sided sign test.
    """
    stuck = flows.assign(stuck=flows["status"] != "ok").pivot_table(
        index=["covariance", "length", "seed"], columns="model", values="stuck", sort=False
    )
    settings = [*stuck.groupby(level=[0, 1], sort=False)]
    rows = []
    for (covariance, length), part in [*settings, ((ALL, 0), stuck.groupby(level="seed").mean())]:
        more = part["linear"] - part["softmax"]
        linear, softmax = int((more > 0).sum()), int((more < 0).sum())
        row: dict[str, Any] = {"covariance": covariance, "length": int(length), "starts": len(part)}
        row |= {"only_softmax": softmax, "only_linear": linear}
        for kind in KINDS:
            share = Interval(float(part[kind].mean()), math.nan, math.nan)
            if covariance != ALL:  # the settings share their starts: no interval for all of them
                share = share_interval(float(part[kind].sum()), len(part))
            row |= dict(zip((kind, f"{kind}_low", f"{kind}_high"), share, strict=True))
        p = binomtest(linear, linear + softmax).pvalue if linear + softmax else 1.0
        rows.append(row | {"p": float(p)})
    return pd.DataFrame(rows)
