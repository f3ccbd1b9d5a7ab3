"""Flows beside trained models from the same first weights at the same time: does the flow tell who
gets stuck?
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from esscher.icl.comparison import ABOVE, STUCK
from esscher.icl.stability.spec import StabilitySpec

__all__ = ["beside_training", "spec_beside"]

KEYS = ["covariance", "length", "seed"]


def spec_beside(trained: dict[str, Any]) -> StabilitySpec:
    """The flows from the first weights of a training run (its spec), until the time its steps
    take.
    """
    if trained["optimizer"] != "sgd" or trained["schedule"] != "constant" or trained["heads"] > 1:
        raise ValueError(
            "--train: expected one head trained by SGD at a constant rate, since that is what the"
            " flow follows"
        )
    time = 2.0 * trained["rate"] * trained["steps"]
    same = {name: trained[name] for name in ("covariances", "dim", "noise", "seed")}
    return StabilitySpec(
        **same,
        lengths=tuple(sorted(trained["lengths"])),
        starts=trained["seeds"],
        training=time,
        until=time,
    )


def beside_training(
    flows: pd.DataFrame, distance: pd.DataFrame, exact: pd.DataFrame, apart: pd.DataFrame
) -> pd.DataFrame:
    """A row for each trained model: its exact error and status, those of the flow, and the squared
    distance of its pair.

    ``flows`` and ``distance`` are tables of a stability run, ``exact`` is ``trained_risks`` and
    ``apart`` the table distance of the training run. A trained model is stuck by the same rule as a
    flow.
    """
    flowed = distance.loc[distance.groupby(KEYS)["time"].idxmax(), [*KEYS, "weights2"]].rename(
        columns={"weights2": "flow2"}
    )
    drawn = apart.loc[apart.groupby(KEYS)["step"].idxmax(), [*KEYS, "distance2"]].rename(
        columns={"distance2": "trained2"}
    )
    own = flows[[*KEYS, "model", "mse", "end", "status"]].rename(
        columns={"mse": "flow", "status": "flow_status"}
    )
    table = (
        exact[[*KEYS, "model", "exact"]]
        .rename(columns={"exact": "trained"})
        .merge(own, on=[*KEYS, "model"])
    )
    table["trained_status"] = [
        "ok" if value <= (1 + ABOVE) * end else STUCK
        for value, end in zip(table["trained"], table["end"], strict=True)
    ]
    return table.merge(drawn, on=KEYS).merge(flowed, on=KEYS)
