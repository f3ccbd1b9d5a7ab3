"""Error curves as a probe stored them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from esscher.convergence.curve import ErrorCurve

__all__ = ["stored_curves"]


def stored_curves(curves: pd.DataFrame, metric: str) -> dict[tuple[int, int], ErrorCurve]:
    """The curves of one metric from the table ``curves`` of a probe, by (layer, head); empty where it was not measured."""
    found = {}
    for (layer, head), rows in curves[curves["metric"] == metric].groupby(["layer", "head"], sort=True):
        rows = rows.sort_values("n")
        rms, relative = rows["rms"].to_numpy(), rows["relative"].to_numpy()
        slope = rows["local_slope"].to_numpy()
        found[int(layer), int(head)] = ErrorCurve(
            n=rows["n"].to_numpy().astype(np.int64),
            rms=rms,
            kind=str(rows["kind"].iloc[0]),
            metric=metric,
            scale=float(rms[0] / relative[0]) if relative[0] > 0 else math.nan,
            stderr=rows["stderr"].to_numpy(),
            q95=rows["q95"].to_numpy(),
            slope=slope if np.isfinite(slope).all() else None,
        )
    return found
