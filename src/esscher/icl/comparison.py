"""Trained models beside the end of the gradient flow: what SGD reached against what theory says it
should.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.icl.exact import risk
from esscher.icl.flow import final_parameters, start_block
from esscher.icl.layer import KINDS, UV
from esscher.icl.tasks import as_task
from esscher.intervals import mean_interval

KEY = ["covariance", "length", "seed", "model"]
SETTING = ["covariance", "length", "model"]
ABOVE = 0.05  # share above the end of the flow from which on a model has not arrived
LATE = 0.25  # of the records, at the end: whether the error still falls there
FALLING = 0.01  # share by which it falls there
STUCK, UNDERTRAINED = "stuck", "undertrained"


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
