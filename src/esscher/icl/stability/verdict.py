"""Is training linear attention less stable? A test written down before the flows, those of three
seeds apart, were run.

[S], appendix A.2: "training softmax attention architectures appears to be more stable". A start is
*stuck* for a model when its error after the paper's training time is more than 5 % above where the
block form ends (``comparison.ABOVE``). Both models have the same starts, so only starts stuck for
one model and not for the other tell them apart.

In each setting (covariance and prompt length): McNemar's exact test, a sign test of those starts.
Over all settings, which share their starts: the sign test of, for each start, the settings stuck
for linear minus those stuck for softmax attention; starts are independent. Two-sided, level 5 %;
this last p-value decides. Those of the settings are multiplied by Holm's factors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import binomtest, rankdata

from esscher.icl.layer import KINDS
from esscher.intervals import share_interval

__all__ = ["ALL", "holm", "verdict"]

ALL = "all"


def verdict(flows: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, then one for all, from a table with covariance, length, seed, model,
    status, arrival and lead.

    ``only_linear`` and ``only_softmax`` count starts stuck for one model alone; in the last row,
    starts stuck in more settings for one model than for the other. ``p`` is corrected by Holm's
    method in the rows of settings. ``*_lead`` tells how well the column lead predicts who is stuck:
    the chance that a start which is stuck has less of it than one which is not.
    """
    stuck, never = (
        _by_start(flows, column) for column in (flows["status"] != "ok", flows["arrival"].isna())
    )
    rows = [
        _row(str(name), int(length), part)
        for (name, length), part in stuck.groupby(level=[0, 1], sort=False)
    ]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p"] = p
    by_start = stuck.groupby(level="seed").sum()
    pooled = _row(ALL, 0, by_start)
    for kind in KINDS:
        pooled |= _shares(kind, int(stuck[kind].sum()), len(stuck), interval=False)
    missing = never.groupby(level=[0, 1], sort=False).mean()
    for kind in KINDS:
        for row, value in zip([*rows, pooled], [*missing[kind], never[kind].mean()], strict=True):
            row[f"{kind}_never"] = float(value)
        parts = [
            part
            for _, part in flows[flows["model"] == kind].groupby(
                ["covariance", "length"], sort=False
            )
        ]
        for row, part in zip(rows, parts, strict=True):
            row[f"{kind}_lead"] = _precedes(
                part["lead"].to_numpy(), (part["status"] != "ok").to_numpy()
            )
        pooled[f"{kind}_lead"] = np.nan
    return pd.DataFrame([*rows, pooled])


def _precedes(values: npt.NDArray[np.float64], those: npt.NDArray[np.bool_]) -> float:
    """The chance that a value of ``those`` is below one of the others, ties counted half (Mann and
    Whitney's U, normed).
    """
    some, others = int(those.sum()), int((~those).sum())
    if not some or not others:
        return float("nan")
    return float((rankdata(values)[~those].sum() - others * (others + 1) / 2) / (some * others))


def _by_start(flows: pd.DataFrame, what: Any) -> pd.DataFrame:
    """A row for each setting and start, a column for each model: 1 where ``what`` holds."""
    keys = ["covariance", "length", "seed"]
    table = flows.assign(what=what.astype(int)).pivot_table(
        index=keys, columns="model", values="what", sort=False
    )
    return table[list(KINDS)].astype(int)


def _row(covariance: str, length: int, counts: pd.DataFrame) -> dict[str, Any]:
    """Counts of each start for both models, compared."""
    difference = (counts["linear"] - counts["softmax"]).to_numpy()
    linear, softmax = int((difference > 0).sum()), int((difference < 0).sum())
    p = float(binomtest(linear, linear + softmax).pvalue) if linear + softmax else 1.0
    row: dict[str, Any] = {"covariance": covariance, "length": length, "starts": len(counts)}
    for kind in KINDS:
        row |= _shares(kind, int((counts[kind] > 0).sum()), len(counts))
    return row | {"only_softmax": softmax, "only_linear": linear, "p": p}


def _shares(kind: str, count: int, of: int, interval: bool = True) -> dict[str, float]:
    """Of all settings together no interval is given: their starts are the same."""
    value, low, high = share_interval(count, of)
    return {
        kind: value,
        f"{kind}_low": low if interval else np.nan,
        f"{kind}_high": high if interval else np.nan,
    }


def holm(values: list[float]) -> npt.NDArray[np.float64]:
    """Holm's corrected p-values, in the order given."""
    order, corrected, largest = np.argsort(values, kind="stable"), np.empty(len(values)), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected
