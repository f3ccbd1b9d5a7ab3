"""What gradient flow has learned in the end, against the length of the prompts: Theorem 5.2 of [S]
in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize

from esscher.icl.flow.coordinates import Coordinates
from esscher.icl.flow.limit import flow_limit, start_block
from esscher.icl.flow.trajectory import flow_times, gradient_flow
from esscher.icl.layer import Block
from esscher.icl.risk.bayes import bayes_risk
from esscher.icl.risk.exact import risk, risk_gradient
from esscher.icl.risk.softmax_general import product_rule
from esscher.icl.risk.value import Risk, as_length
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_positive

__all__ = ["FinalRisks", "final_parameters", "final_risks", "prompt_length_for"]

Floats = npt.NDArray[np.float64]

HANDOVER = 30.0  # time at which the flow is taken to have chosen its valley
LONGEST = 10**12
ROUNDING = 1e-11  # relative error of a risk


@dataclass(frozen=True, eq=False)
class FinalRisks:
    """Risk at the end of the flow for each prompt length, for softmax and linear attention, with
    the Bayes risk on L tokens.

    ``noise_level`` is tau^2 / 2, where all of them go. One row of ``softmax_parameters`` and
    ``linear_parameters`` a length.
    """

    lengths: npt.NDArray[np.int64]
    softmax: Floats
    linear: Floats
    bayes: Floats
    bayes_error: Floats
    noise_level: float
    softmax_parameters: tuple[Block, ...]
    linear_parameters: tuple[Block, ...]


def final_parameters(
    task: LinearTask,
    start: Block,
    length: Any = math.inf,
    kind: str = "softmax",
    query_inside: bool = False,
) -> Block:
    """The limit of the gradient flow from ``start`` in the block form.

    Closed form for linear attention and infinite prompts. Softmax attention on L tokens: the flow
    itself until t = 30, then a quasi-Newton descent down the valley it has reached, to a gradient
    of 1e-9. The valley is flat: along it v U11 is nearly constant, and the flow alone would need a
    time that grows with L.
    """
    length = as_length(length)
    if kind == "linear" or math.isinf(length):
        return flow_limit(task, start, length, query_inside)
    rule = product_rule(task.dim, 8) if query_inside else None
    flow = gradient_flow(
        task, start, length, kind, flow_times(HANDOVER, 8), rule, query_inside, rtol=1e-6, atol=1e-8
    )
    if flow.converged:
        end = flow.end
    else:
        form = Coordinates.of(task, start)

        def objective(state: Floats) -> tuple[float, Floats]:
            value, gradient = risk_gradient(
                task, form.unpack(state), length, kind, rule, query_inside
            )
            return value, form.pull(gradient)

        found = minimize(
            objective,
            form.pull(flow.end),
            jac=True,
            method="BFGS",
            options={"gtol": 1e-9, "maxiter": 500},
        )
        end = form.unpack(found.x)
    assert isinstance(end, Block)
    return end


def final_risks(
    task: LinearTask,
    lengths: Any = (10, 100, 1_000, 10_000, 100_000, 1_000_000),
    start: Block | None = None,
    draws: int = 4000,
    generator: torch.Generator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FinalRisks:
    """Final risks of softmax and linear attention for each length: Figures 2 and 6 of [S] without
    training.

    ``progress(done, total)`` is called after every length.
    """
    start = start_block(task) if start is None else start
    counts = [int(as_length(length)) for length in np.atleast_1d(np.asarray(lengths)).tolist()]
    rows: list[tuple[Block, Block, Risk]] = []
    for done, length in enumerate(counts, 1):
        soft, lin = (final_parameters(task, start, length, kind) for kind in ("softmax", "linear"))
        rows.append((soft, lin, bayes_risk(task, length, draws, generator)))
        if progress is not None:
            progress(done, len(counts))
    pairs = list(zip(counts, rows, strict=True))
    return FinalRisks(
        np.asarray(counts, dtype=np.int64),
        np.array([float(risk(task, soft, length)) for length, (soft, _, _) in pairs]),
        np.array([float(risk(task, lin, length, "linear")) for length, (_, lin, _) in pairs]),
        np.array([bayes.value for _, _, bayes in rows]),
        np.array([bayes.error for _, _, bayes in rows]),
        0.5 * task.noise,
        tuple(soft for soft, _, _ in rows),
        tuple(lin for _, lin, _ in rows),
    )


def prompt_length_for(
    task: LinearTask,
    eps: Any,
    kind: str = "softmax",
    start: Block | None = None,
    query_inside: bool = False,
) -> int:
    """L(eps) of Theorem 5.2: the shortest prompts on which the flow ends within ``eps`` of the best
    risk, tau^2 / 2.

    The final risk is taken to fall with L: the answer reaches the goal, and one token fewer does
    not. Between a length that does not and one that does, the next is where a power law through
    both meets the goal.
    """
    goal = as_positive(eps, "eps")
    start = start_block(task) if start is None else start

    def excess(length: int) -> float:
        """Logarithm of the risk above the best over eps: at most 0 where the goal is reached, to
        rounding.
        """
        end = final_parameters(task, start, length, kind, query_inside)
        found = float(risk(task, end, length, kind, query_inside=query_inside)) - 0.5 * task.noise
        return math.log(max(found, 1e-300) / goal) - ROUNDING

    low, high = 0, 1
    above, below = math.inf, excess(1)
    while below > 0:
        if high >= LONGEST:
            raise ValueError(
                f"eps: expected an excess risk that {LONGEST:g} tokens reach, got {goal:g}"
            )
        low, above, high = high, below, 10 * high
        below = excess(high)
    beside = 0  # tokens beside the power law's length, wider each time that it misses
    while high - low > 1:
        share = above / (above - below) if math.isfinite(above) else 0.5
        middle = round(max(low, 1) ** (1 - share) * high**share)
        middle = min(max(middle + beside, low + 1), high - 1)
        found = excess(middle)
        if found <= 0:
            high, below, beside = middle, found, min(-1, 4 * beside)
        else:
            low, above, beside = middle, found, max(1, 4 * beside)
    return high
