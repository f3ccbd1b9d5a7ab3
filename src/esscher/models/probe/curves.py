"""Error curves of a probe: from deposits to a curve, from a curve to rows of the table ``curves``, and back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from esscher.convergence.curve import ErrorCurve
from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit
from esscher.convergence.pool_curve import exact_pool_curve
from esscher.models.probe.wide import Held

__all__ = ["METRICS", "curve_rows", "exact_curve_of", "stored_curves"]

METRICS = {"replacement": "l2", "bernoulli": "l2_kept"}  # of the errors of outputs, by sampling


def exact_curve_of(state: Deposit | Held, n: npt.NDArray[np.int64], sampling: str, notes: dict[str, Any]) -> ErrorCurve:
    """The exact error of n keys drawn with replacement, or of keys kept with probability n / (their mean number).

    The error of the score grids is measured on the first head of a layer, and noted for the others.
    """
    if isinstance(state, Held):
        curve = exact_pool_curve(state.q, state.k, state.v, n, sampling, state.scale)
        return replace(curve, metric=METRICS[sampling])
    errors = deposit.finish(state, n, sampling, interpolation=notes.get("interpolation"))
    notes.setdefault("interpolation", errors.interpolation)
    curve = ErrorCurve.from_queries(
        n, errors.queries(), errors.dmse_dlogn, kind="exact", accuracy=errors.accuracy, origin=f"exact, {sampling}"
    )
    return replace(curve, metric=METRICS[sampling])


def curve_rows(curve: ErrorCurve) -> pd.DataFrame:
    """The rows of a curve, but for layer and head."""
    frame = curve.to_frame()
    empty = np.full(curve.n.size, np.nan)
    frame["local_slope"] = empty if curve.slope is None else curve.slope
    frame["effective_tokens"] = empty if curve.effective_tokens is None else curve.effective_tokens
    frame["sampling"] = "bernoulli" if curve.metric == METRICS["bernoulli"] else "replacement"
    return frame


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
