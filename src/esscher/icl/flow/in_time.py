"""The flows of softmax and linear attention in time, from one start: risks, parameters, and how far
apart they are.

Lemma E.1 of [S] bounds the distance of either flow to that on infinitely many tokens, which is one
flow for both, so the sum of the two bounds is one on the distance between them.
"""

from __future__ import annotations

import math
from typing import Any

from esscher.icl.columns import COVARIANCE, LENGTH, MODEL, MSE
from esscher.icl.flow.gronwall import flow_bound
from esscher.icl.flow.trajectory import flow_times, gradient_flow
from esscher.icl.layer import KINDS, Block
from esscher.icl.tasks import LinearTask
from esscher.runs.columns import Column

__all__ = ["APART", "TRAJECTORY", "in_time"]

TIME = Column("time", "float", "time", "Time of the gradient flow.", "log")
TRAJECTORY = (
    *(COVARIANCE, LENGTH, MODEL, TIME, MSE),
    Column(
        "gradient",
        "float",
        "norm of the gradient",
        "Euclidean norm of the gradient of the risk in U11 and v.",
        "log",
    ),
    Column("v", "float", "v", "Value of the block form.", "linear"),
    Column("U11", "list", "U11", "Score matrix of the block form, row by row."),
)
APART = (
    *(COVARIANCE, LENGTH, TIME),
    Column(
        "distance",
        "float",
        "softmax to linear",
        "Distance between the parameters of softmax and linear attention.",
        "log",
    ),
    Column(
        "softmax_limit",
        "float",
        "softmax to the limit",
        "Distance of softmax attention to the flow without end.",
        "log",
    ),
    Column(
        "linear_limit",
        "float",
        "linear to the limit",
        "Distance of linear attention to the flow without end.",
        "log",
    ),
    Column(
        "bound",
        "float",
        "Lemma E.1",
        "Bound of Lemma E.1 on the distance: g2 t exp(beta t) of both, added.",
        "log",
    ),
    Column(
        "sharper",
        "float",
        "sharper bound",
        "The same with the most negative curvature instead of beta.",
        "log",
    ),
)


def in_time(
    task: LinearTask, start: Block, length: int, until: float, points: int, query_inside: bool
) -> dict[str, Any]:
    """Rows of ``trajectory``, a time and a model each, and of ``apart``, a time each."""
    times = flow_times(until, points)
    flows = {
        kind: gradient_flow(task, start, length, kind, times, None, query_inside) for kind in KINDS
    }
    endless = gradient_flow(task, start, math.inf, times=times)
    bounds = {kind: flow_bound(task, flow, endless) for kind, flow in flows.items()}
    rows = []
    for kind, flow in [*flows.items(), ("limit", endless)]:
        for i, time in enumerate(times):
            at = flow.at(i)
            assert isinstance(at, Block)
            row = {
                "model": kind,
                "time": float(time),
                "mse": 2 * float(flow.risks[i]),
                "gradient": float(flow.gradients[i]),
            }
            rows.append(row | {"v": float(at.v), "U11": at.U11.flatten().tolist()})
    soft, linear = (bounds[kind] for kind in KINDS)
    columns = {
        "time": times,
        "distance": flows["softmax"].distance(flows["linear"]),
        "softmax_limit": soft.distance,
        "linear_limit": linear.distance,
        "bound": soft.bound + linear.bound,
        "sharper": soft.sharper + linear.sharper,
    }
    apart = [
        {name: float(column[i]) for name, column in columns.items()} for i in range(times.size)
    ]
    return {"trajectory": rows, "apart": apart}
