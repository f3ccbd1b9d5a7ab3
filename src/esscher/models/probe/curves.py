"""Error curves of a probe: from deposits to the errors of queries, to a curve, to rows of the table
``curves``, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.convergence.curve import ErrorCurve, QueryErrors
from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit
from esscher.convergence.integral.formulas import NodeErrors
from esscher.models.probe.wide import Held

__all__ = ["METRICS", "Errors", "curve_rows", "errors_of", "stored_curves"]

Counts = npt.NDArray[np.int64]

METRICS = {"replacement": "l2", "bernoulli": "l2_kept"}  # of the errors of outputs, by sampling


@dataclass(frozen=True)
class Errors:
    """The exact errors of m queries at every n of a ladder: all that is left of their keys."""

    mse: Tensor  # (m, len n)
    sum_p2: Tensor  # (m, len n)
    dmse_dlogn: Tensor  # (m, len n)
    limit: Tensor  # (m, d_v)
    delta: Tensor  # (m,)
    accuracy: Tensor  # (m,)
    keys: Tensor  # (m,): that each query saw

    @classmethod
    def of(cls, found: NodeErrors, keys: Tensor) -> Errors:
        names = ("mse", "sum_p2", "dmse_dlogn", "limit", "delta")
        numbers = {
            name: torch.from_numpy(np.array(getattr(found, name), dtype=np.float64))
            for name in names
        }
        return cls(
            **numbers,
            accuracy=torch.full((len(keys),), found.accuracy, dtype=torch.float64),
            keys=keys.cpu(),
        )

    @classmethod
    def none(cls, width: int, ladder: int) -> Errors:
        """Of no query."""
        shapes = {
            "mse": (0, ladder),
            "sum_p2": (0, ladder),
            "dmse_dlogn": (0, ladder),
            "limit": (0, width),
        }
        numbers = {
            part.name: torch.zeros(shapes.get(part.name, (0,)), dtype=torch.float64)
            for part in fields(cls)
        }
        return cls(**{**numbers, "keys": torch.zeros(0, dtype=torch.int64)})

    @property
    def mean_keys(self) -> int:
        """The number of keys that a query saw, on average, to the nearest whole number."""
        return round(float(self.keys.double().mean()))

    def curve(self, n: Counts, sampling: str) -> ErrorCurve:
        """Over all queries alike."""
        mse, sum_p2, slope, limit, delta = (
            x.numpy() for x in (self.mse, self.sum_p2, self.dmse_dlogn, self.limit, self.delta)
        )
        queries = QueryErrors(mse=mse, sum_p2=sum_p2, limit=limit, delta=delta)
        accuracy, origin = float(self.accuracy.max()), f"exact, {sampling}"
        curve = ErrorCurve.from_queries(
            n, queries, slope, kind="exact", accuracy=accuracy, origin=origin
        )
        return replace(curve, metric=METRICS[sampling])


def errors_of(
    state: Deposit | Held, n: Counts, sampling: str, of: int, notes: dict[str, Any]
) -> Errors:
    """The exact error of n keys drawn with replacement, or of keys kept with probability n / of.

    The error of the score grids is measured on the first head of a layer, and noted for the others.
    """
    if isinstance(state, Held):
        return Errors.of(state.errors(n, sampling, of), state.keys)
    found = deposit.finish(state, n, sampling, of=of, interpolation=notes.get("interpolation"))
    notes.setdefault("interpolation", found.interpolation)
    return Errors.of(found, state.keys)


def curve_rows(curve: ErrorCurve) -> pd.DataFrame:
    """The rows of a curve, but for layer and head."""
    frame = curve.to_frame()
    empty = np.full(curve.n.size, np.nan)
    frame["local_slope"] = empty if curve.slope is None else curve.slope
    frame["effective_tokens"] = empty if curve.effective_tokens is None else curve.effective_tokens
    frame["sampling"] = "bernoulli" if curve.metric == METRICS["bernoulli"] else "replacement"
    return frame


def stored_curves(curves: pd.DataFrame, metric: str) -> dict[tuple[int, int], ErrorCurve]:
    """The curves of one metric from the table ``curves`` of a probe, by (layer, head); empty where
    it was not measured.
    """
    found = {}
    for (layer, head), rows in curves[curves["metric"] == metric].groupby(
        ["layer", "head"], sort=True
    ):
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
