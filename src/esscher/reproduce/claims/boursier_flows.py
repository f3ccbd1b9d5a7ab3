"""[S] on gradient flow: where it ends on infinite prompts, on L tokens with linear attention, with
a singular covariance.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from esscher.icl.flow.end import final_parameters
from esscher.icl.flow.limit import alpha_limit, start_block
from esscher.icl.flow.trajectory import flow_times, gradient_flow
from esscher.icl.layer import Block
from esscher.icl.risk.exact import risk
from esscher.icl.tasks import LinearTask
from esscher.reproduce.claim import Claim, Decision, Picture, Rows, Scale, Series, Tables, Verdict
from esscher.reproduce.decide import all_of, below
from esscher.reproduce.evidence import EvidenceSpec
from esscher.runs import RunSpec

__all__ = ["CLAIMS"]

Floats = npt.NDArray[np.float64]
Parts = tuple[dict[str, Any], ...]
CLOSE = 1e-3  # relative distance at which a flow has ended where it should
# of the risk of a layer that answers 0: the excess that the longest prompts must leave behind
ENDS = 0.01


def random_start(dim: int, rank: int, rng: np.random.Generator) -> tuple[LinearTask, Block, float]:
    """A task as (11) of [S], w ~ N(0, I) without noise, covariance of a given rank; a start of
    Assumption 5.1; its alpha.
    """
    axes = np.linalg.qr(rng.standard_normal((dim, dim)))[0][:, :rank]
    sigma = (axes * rng.uniform(0.5, 2.0, rank)) @ axes.T
    task = LinearTask(sigma, np.eye(dim), 0.0)
    alpha = float(rng.uniform(0.2, 0.8)) * alpha_limit(task)
    return task, start_block(task, alpha, rng.standard_normal((dim, dim))), alpha


def printed_limit(task: LinearTask, start: Block, length: float) -> tuple[Floats, float]:
    """U11 and v as Remark 5.3, appendix F.2 (finite L) and F.3 (singular Sigma) of [S] print them.

        U11 = gamma Sigma_L^+ + P(U11(0)),   v = 1/gamma,   gamma^2 = (sqrt(p^2 + 4 T) - p) / (2 T),
        T = tr((Sigma_L^+)^2),   p = |P(U11(0))|_F^2,   P(M) = M - Pi M Pi,   Pi the projection on
        the range of Sigma,

    Sigma_L = (1 + 1/L) Sigma + (tr(Sigma)/L) I; with Sigma invertible gamma = T^(-1/4).
    """
    sigma, first = task.sigma.numpy(), start.U11.numpy()
    projection = sigma @ np.linalg.pinv(sigma, rcond=1e-10)
    smoothed = (1 + 1 / length) * sigma + np.trace(sigma) / length * projection
    inverse = np.linalg.pinv(smoothed, rcond=1e-10)
    kept = first - projection @ first @ projection
    T, p = float(np.sum(inverse**2)), float(np.sum(kept**2))
    gamma = math.sqrt((math.sqrt(p * p + 4 * T) - p) / (2 * T))
    return gamma * inverse + kept, 1 / gamma


def measure_ends(
    dim: int, rank: int, length: float | None, kind: str, cases: int, rng: np.random.Generator
) -> Rows:
    """Solve the flow to its end for random tasks and starts: the distance to the printed limit, and
    the risk left.

    No length stands for infinitely many tokens.
    """
    L = math.inf if length is None else length
    rows = []
    for case in range(cases):
        task, start, alpha = random_start(dim, rank, rng)
        flow = gradient_flow(task, start, L, kind, flow_times(1e5, 30))
        assert isinstance(flow.end, Block)
        U, v = printed_limit(task, start, L)
        away = math.sqrt(
            float(np.sum((flow.end.U11.numpy() - U) ** 2)) + (float(flow.end.v) - v) ** 2
        )
        size = math.sqrt(float(np.sum(U**2)) + v * v)
        setting = {"dim": dim, "rank": rank, "length": L, "case": case, "alpha": alpha}
        moved = math.sqrt(
            float(torch.sum((flow.end.U11 - start.U11) ** 2)) + float(flow.end.v - start.v) ** 2
        )
        rows.append(
            {**setting, "distance": away / size, "moved": moved / size, "risk": flow.final_risk}
        )
    return rows


def measure_risks(
    dim: int, rank: int, lengths: list[int], cases: int, rng: np.random.Generator
) -> Rows:
    """The risk of softmax attention where its flow ends, by prompt length; ``zero`` is that of a
    layer that answers 0.
    """
    rows = []
    for case in range(cases):
        task, start, _ = random_start(dim, rank, rng)
        zero = 0.5 * float(torch.trace(task.sigma))
        for length in lengths:
            end = final_parameters(task, start, length)
            left = float(risk(task, end, length))
            rows.append(
                {
                    "dim": dim,
                    "rank": rank,
                    "case": case,
                    "length": float(length),
                    "risk": left,
                    "zero": zero,
                }
            )
    return rows


def measure(what: str, rng: np.random.Generator, **settings: Any) -> Rows:
    measured = measure_ends if what == "ends" else measure_risks
    return [{"what": what, **row} for row in measured(**settings, rng=rng)]


# ---- the runs
# ------------------------------------------------------------------------------------------


def ends(
    scale: Scale, ranks: tuple[tuple[int, int], ...], lengths: tuple[int | None, ...] = (None,)
) -> Parts:
    """Parts of evidence, for every (dimension, rank) and length; attention on infinite prompts is
    softmax and linear alike.
    """
    cases = 4 if scale == "quick" else 40
    return tuple(
        {
            "what": "ends",
            "dim": dim,
            "rank": rank,
            "length": length,
            "kind": "linear",
            "cases": cases,
        }
        for dim, rank in ranks
        for length in lengths
    )


def infinite(scale: Scale, seed: int) -> dict[str, RunSpec]:
    quick = scale == "quick"
    risks = {
        "what": "risks",
        "dim": 3,
        "rank": 3,
        "cases": 2 if quick else 10,
        "lengths": [100, 1000, 10_000, 100_000],
    }
    parts = (*ends(scale, ((2, 2), (5, 5))), risks)
    return {"flows": EvidenceSpec(claim="s-23-bayes", parts=parts, seed=seed)}


def finite(scale: Scale, seed: int) -> dict[str, RunSpec]:
    parts = ends(scale, ((2, 2), (5, 5)), (5, 50, 1000))
    return {"flows": EvidenceSpec(claim="s-24-finite-linear", parts=parts, seed=seed)}


def singular(scale: Scale, seed: int) -> dict[str, RunSpec]:
    parts = ends(scale, ((3, 1), (4, 2), (5, 4)))
    return {"flows": EvidenceSpec(claim="s-25-singular", parts=parts, seed=seed)}


# ---- the rules
# ------------------------------------------------------------------------------------------


def decide_ends(tables: Tables) -> Decision:
    rows = tables["flows"]["evidence"]
    own = rows[rows["what"] == "ends"].reset_index(drop=True)
    distance = own["distance"].to_numpy(float)
    reached = int((distance < CLOSE).sum())
    verdict: Verdict = "supported" if reached == len(own) else "refuted"
    worst = float(distance.max())
    reason = (
        f"{reached} of {len(own)} flows end within {CLOSE:g} of the printed limit, the furthest at"
        f" {worst:.2g}, having moved by {own['moved'].min():.2g} to {own['moved'].max():.2g}"
    )
    place = own.index.to_numpy(float)
    series = (
        Series("distance to the printed limit", place, np.maximum(distance, 1e-16)),
        Series("way from the start", place, own["moved"].to_numpy(float)),
        Series("close", place, [CLOSE] * len(own), line=True),
    )
    picture = Picture("flow", "relative distance", series, log="y")
    return Decision(
        verdict, "largest relative distance", worst, float(distance.min()), worst, reason, picture
    )


def decide_bayes(tables: Tables) -> Decision:
    """The limits of Remark 5.3, and the risk left on L tokens, which has to go to that of
    Bayes, 0.
    """
    at_infinity = decide_ends(tables)
    rows = tables["flows"]["evidence"]
    own = rows[rows["what"] == "risks"].assign(share=lambda table: table["risk"] / table["zero"])
    by_case = own.pivot_table(index=["dim", "case"], columns="length", values="share").sort_index(
        axis=1
    )
    shares = by_case.to_numpy(float)
    falls = bool((np.diff(shares, axis=1) < 0).all())
    last = shares[:, -1]
    left = below(float(last.min()), float(last.max()), ENDS) if falls else "refuted"
    lengths = by_case.columns.to_numpy(float)
    reason = (
        f"{at_infinity.reason}; on {lengths[-1]:.0f} tokens the risk left is {last.max():.2g} of"
        f" that of the answer 0 or less, {'falling' if falls else 'not falling'} with L"
    )
    series = tuple(Series(f"task {place}", lengths, row) for place, row in enumerate(shares))
    picture = Picture(
        "prompt length L", "risk where the flow ends / risk of the answer 0", series, log="xy"
    )
    verdict, low, high = all_of((at_infinity.verdict, left)), float(last.min()), float(last.max())
    return Decision(verdict, "risk left on the longest prompts", high, low, high, reason, picture)


def made_ends(distance: float, seed: int) -> Tables:
    """Flows that end about this far from the limit."""
    rng = np.random.default_rng(seed)
    rows = [
        {"what": "ends", "distance": distance * rng.uniform(0.5, 1), "moved": rng.uniform(0.3, 1)}
        for _ in range(8)
    ]
    return {"flows": {"evidence": pd.DataFrame(rows)}}


def made_flows(distance: float, power: float, seed: int) -> Tables:
    """And risks that fall like L^-power."""
    rng = np.random.default_rng(seed)
    risks = [
        {
            "what": "risks",
            "dim": 3,
            "case": case,
            "length": float(L),
            "risk": rng.uniform(1, 2) * L**-power,
            "zero": 1.5,
        }
        for case in range(2)
        for L in (100, 1000, 10_000, 100_000)
    ]
    ends = made_ends(distance, seed)["flows"]["evidence"]
    return {"flows": {"evidence": pd.concat([ends, pd.DataFrame(risks)], ignore_index=True)}}


TASK = (
    "Tasks w ~ N(0, I) without noise, random covariances, starts of Assumption 5.1 with alpha below"
    " its limit."
)
RULE = (
    f"Supported if every flow ends within a relative distance of {CLOSE:g} of the printed"
    " parameters."
)

CLAIMS = (
    Claim(
        id="s-23-bayes",
        number=23,
        source="[S] Theorem 5.2 and Remark 5.3",
        statement=(
            "On infinite prompts gradient flow ends at U11 = tr(Sigma^-2)^(-1/4) Sigma^-1, v ="
            " tr(Sigma^-2)^(1/4), whose risk is the Bayes risk 0; on L tokens softmax attention"
            " ends within any eps of it once L is large."
        ),
        hypothesis=TASK + " Sigma invertible.",
        rule=RULE
        + f" And the risk where the flow on L tokens ends falls with L, to less than {ENDS:g} of"
        " that of the answer 0.",
        refuted_by="A flow that ends elsewhere, or a risk that does not fall towards 0.",
        runs=infinite,
        decide=decide_bayes,
        holds=partial(made_flows, 1e-6, 1.0),
        fails=partial(made_flows, 1e-6, 0.1),
        measure=measure,
    ),
    Claim(
        id="s-24-finite-linear",
        number=24,
        source="[S] appendix F.2 after Zhang et al. (2024), Theorem 4.1",
        statement=(
            "With linear attention on L tokens gradient flow ends at U11 = tr(S^-2)^(-1/4) S^-1, v"
            " = tr(S^-2)^(1/4), S = (1 + 1/L) Sigma + (tr(Sigma)/L) I."
        ),
        hypothesis=TASK + " Sigma invertible; L = 5, 50, 1000.",
        rule=RULE,
        refuted_by="A flow that ends elsewhere.",
        runs=finite,
        decide=decide_ends,
        holds=partial(made_ends, 1e-6),
        fails=partial(made_ends, 0.2),
        measure=measure,
    ),
    Claim(
        id="s-25-singular",
        number=25,
        source="[S] appendix F.3",
        statement=(
            "With a singular Sigma the flow on infinite prompts ends at U11 = gamma Sigma^+ + alpha"
            " P(Theta Theta^T), v = 1/gamma: what lies off the range of Sigma never moves."
        ),
        hypothesis=TASK + " Sigma of rank 1 of 3, 2 of 4, 4 of 5.",
        rule=RULE,
        refuted_by="A flow that ends elsewhere.",
        runs=singular,
        decide=decide_ends,
        holds=partial(made_ends, 1e-6),
        fails=partial(made_ends, 0.2),
        measure=measure,
    ),
)
