"""Where training ends: trained models beside the end of the gradient flow, which first weights get
stuck, and how far the two models part.

SGD with rate eta on the loss (f - y)^2, twice the risk, moves by 2 eta in time a step: the paper's
500 000 steps of 1e-3 are t = 1000.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from esscher.icl.exact import risk
from esscher.icl.flow import Flow, final_parameters, gradient_flow, start_block
from esscher.icl.layer import KINDS, OVKQ, UV, default_weights
from esscher.icl.quadrature import product_rule
from esscher.icl.tasks import LinearTask, as_task
from esscher.intervals import mean_interval, share_interval

KEY = ["covariance", "length", "seed", "model"]
SETTING = ["covariance", "length", "model"]
ABOVE = 0.05  # share above the end of the flow from which on a model has not arrived
LATE = 0.25  # of the records, at the end: whether the error still falls there
FALLING = 0.01  # share by which it falls there
STUCK, UNDERTRAINED = "stuck", "undertrained"
RTOL, ATOL = 1e-4, 1e-6  # of the solver; ten times finer changes an error at t = 1000 by 1e-5
# of tasks and queries: two are exact for the fourth degree; more change the excess by 1e-4
SHELLS = (2, 4)
ROTATIONS = 2  # of the cubature that gives the error where a flow ends
ALL = "all"


# ---- Trained models beside the flow


def judged(final: pd.DataFrame, curve: pd.DataFrame, flow: pd.DataFrame) -> pd.DataFrame:
    """The table ``final`` of a training run with the status of models that did not arrive, and what
    to do.

    A model whose error is more than ``ABOVE`` over the end of its flow, and more than two standard
    errors, is "undertrained" where its error still falls at the end of training, by more than its
    noise and 1 % over the last quarter, or has not come half of the way from where it began; else
    it is "stuck", in another valley.
    """
    ends = flow.set_index(SETTING)["mse"].to_dict()
    paths = dict(iter(curve.sort_values("step", kind="stable").groupby(KEY, sort=False)))
    rows = []
    for row in final.to_dict("records"):
        end = ends.get(tuple(row[name] for name in SETTING), math.inf)
        if row["status"] == "ok" and row["mse"] - 2 * row["stderr"] > (1 + ABOVE) * end:
            path = paths[tuple(row[name] for name in KEY)]
            first = path["mse"].iloc[0]
            on_its_way = _still_falls(path) or first - row["mse"] < 0.5 * (first - end)
            row["status"] = UNDERTRAINED if on_its_way else STUCK
            remedy = "train for more steps" if on_its_way else "take another seed"
            row["advice"] = (
                f"{row['model']} attention ended {row['mse'] / end - 1:.0%} above the end of its"
                f" flow; {remedy}"
            )
        rows.append(row)
    return pd.DataFrame(rows, columns=final.columns)


def _still_falls(path: pd.DataFrame) -> bool:
    """Of the last quarter of the records, the later half against the earlier one."""
    late = path.tail(max(2, math.ceil(LATE * len(path))))
    early, end = late.head(len(late) // 2), late.tail(len(late) // 2)
    before, after = early["mse"].mean(), end["mse"].mean()
    noise = math.hypot(*(np.sqrt((part["stderr"] ** 2).sum()) / len(part) for part in (early, end)))
    return bool(before - after > max(2 * noise, FALLING * before))


def trained_risks(
    final: pd.DataFrame, path: pd.DataFrame, dim: int, noise: float, task_cov: Any = None
) -> pd.DataFrame:
    """Exact mean squared error of every trained model, from the tables ``final`` and
    ``path`` of a training run.

    Columns covariance, length, seed, model, status, sampled and its stderr (from ``final``), exact
    and its error.
    """
    last = path.loc[path.groupby(KEY)["step"].idxmax(), [*KEY, "values"]]
    table = final[[*KEY, "status", "mse", "stderr"]].rename(columns={"mse": "sampled"})
    rows = []
    for row in table.merge(last, on=KEY, how="left").to_dict("records"):
        joined, exact, error = np.asarray(row.pop("values")), math.nan, math.nan
        if row["status"] != "diverged":
            task = as_task(row["covariance"], dim, noise, task_cov)
            found = risk(task, path_uv(joined, dim), int(row["length"]), row["model"])
            exact, error = 2 * found.value, 2 * found.error
        rows.append(row | {"exact": exact, "error": error})
    return pd.DataFrame(rows)


def path_uv(joined: Any, dim: int) -> UV:
    """(U, V) from [U without its last column, last row of V], as a run's table ``path`` holds
    it.
    """
    table = torch.from_numpy(np.array(joined, np.float64)).reshape(dim + 1, dim + 1)
    U, V = torch.zeros_like(table), torch.zeros_like(table)
    U[:, :dim], V[-1] = table[:, :dim], table[:, dim]
    return UV(U, V)


@lru_cache(maxsize=256)
def flow_end(
    covariance: str, dim: int, noise: float, length: int, kind: str, task_cov: Any = "scaled"
) -> float:
    """Mean squared error where the flow of the block form ends."""
    task = as_task(covariance, dim, noise, task_cov)
    end = final_parameters(task, start_block(task), length, kind)
    return 2 * float(risk(task, end, length, kind))


def flow_ends(
    trained: pd.DataFrame, dim: int, noise: float, task_cov: Any = "scaled"
) -> pd.DataFrame:
    """The ends of the flow for every covariance and length of a table: columns covariance, length,
    model, mse.
    """
    law = task_cov if isinstance(task_cov, str) else tuple(map(tuple, task_cov))
    rows = [
        {"covariance": name, "length": length, "model": kind}
        | {"mse": flow_end(name, dim, noise, length, kind, law)}
        for name, length in dict.fromkeys(
            zip(trained["covariance"], trained["length"], strict=True)
        )
        for kind in KINDS
    ]
    return pd.DataFrame(rows)


def compare_with_flow(
    trained: pd.DataFrame, flow: pd.DataFrame, level: float = 0.95
) -> pd.DataFrame:
    """Mean over seeds of the exact error of trained models, its interval, and the flow's
    prediction.

    Seeds that ended more than the share ``ABOVE`` above the flow are counted in the columns
    ``stuck``, in another valley, and ``undertrained``, still on their way (where ``judged`` said
    so), and left out of the mean ([S], appendix A.2, took other seeds for these). The others hover
    above the end of the flow by an amount that falls with the rate; ``excess`` is (mean - flow) /
    flow.
    """
    known = trained[trained["exact"].notna()].merge(
        flow.rename(columns={"mse": "flow"}), on=SETTING
    )
    rows = []
    for key, part in known.groupby(SETTING, sort=False):
        predicted = float(part["flow"].iloc[0])
        there = part[part["exact"] <= (1 + ABOVE) * predicted]
        count = len(there)
        late = list(part.drop(there.index).get("status", ())).count(UNDERTRAINED)
        mean, low, high = (
            mean_interval(there["exact"].to_numpy(), level, least=0.0) if count else [math.nan] * 3
        )
        row: dict[str, Any] = {
            "seeds": count,
            "stuck": len(part) - count - late,
            "undertrained": late,
        }
        row |= {"trained": mean, "low": low, "high": high}
        row |= {"flow": predicted, "excess": mean / predicted - 1}
        row["sampled"] = float(there["sampled"].mean())
        row["stderr"] = float(np.sqrt((there["stderr"] ** 2).sum()) / max(count, 1))
        rows.append(dict(zip(SETTING, key, strict=True)) | row)
    return pd.DataFrame(rows)


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
    where the block form ends (``ABOVE``). Both models have the same starts, so only
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
