"""[S] on training: where gradient flow ends, errors after training, the distance of softmax and
linear attention along it, and which of them fails to train.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats

from esscher.icl.comparison import ABOVE
from esscher.icl.exact import risk
from esscher.icl.flow import alpha_limit, final_parameters, flow_times, gradient_flow, start_block
from esscher.icl.layer import Block
from esscher.icl.specs import FlowSpec, StabilitySpec, TrainSpec
from esscher.icl.stability import ALL, verdict
from esscher.icl.tasks import LinearTask
from esscher.intervals import Interval
from esscher.papers.claim import Claim, Decision, EvidenceSpec, Rows, Scale, Tables
from esscher.papers.pictures import Picture, line, points
from esscher.papers.rules import LEVEL, above, all_of, below, exactly, grid, mean_interval, share_of
from esscher.runs import RunSpec

Floats = npt.NDArray[np.float64]


# ---- 23 to 25: where gradient flow ends

CLOSE = 1e-3  # relative distance at which a flow has ended where it should
ENDS = 0.01  # share of the risk of the answer 0 that the longest prompts may leave


def flows(
    claim: str,
    ranks: tuple[tuple[int, int], ...],
    lengths: tuple[int | None, ...],
    scale: Scale,
    seed: int,
) -> dict[str, RunSpec]:
    """Flows to their end for each (dimension, rank) and length, None for infinite prompts, on which
    softmax and linear attention are alike; for claim 23 also the risk on finite prompts.
    """
    quick = scale == "quick"
    common = {"what": "ends", "kind": "linear", "cases": 4 if quick else 40}
    parts: Rows = [
        {**common, "dim": dim, "rank": rank, "length": length}
        for dim, rank in ranks
        for length in lengths
    ]
    if claim == "s-23-bayes":
        long = {"what": "risks", "lengths": [100, 1000, 10_000, 100_000]}
        parts.append({**long, "dim": 3, "rank": 3, "cases": 2 if quick else 10})
    return {"flows": EvidenceSpec(claim=claim, parts=tuple(parts), seed=seed)}


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
        T = tr((Sigma_L^+)^2),
        p = |P(U11(0))|_F^2,
        P(M) = M - Pi M Pi,
        Pi the projection on the range of Sigma,

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
    dim: int, rank: int, length: int | None, kind: str, cases: int, rng: np.random.Generator
) -> Rows:
    """The distance of the end of the flow to the printed limit, and the risk left, for random tasks
    and starts.
    """
    L = math.inf if length is None else float(length)
    rows = []
    for case in range(cases):
        task, start, alpha = random_start(dim, rank, rng)
        flow = gradient_flow(task, start, L, kind, flow_times(1e5, 30))
        assert isinstance(flow.end, Block)
        U, v = printed_limit(task, start, L)
        end, first = flow.end.U11.numpy(), start.U11.numpy()
        away = math.sqrt(float(np.sum((end - U) ** 2)) + (float(flow.end.v) - v) ** 2)
        moved = math.sqrt(float(np.sum((end - first) ** 2)) + float(flow.end.v - start.v) ** 2)
        size = math.sqrt(float(np.sum(U**2)) + v * v)
        setting = {"dim": dim, "rank": rank, "length": L, "case": case, "alpha": alpha}
        found = {"distance": away / size, "moved": moved / size, "risk": flow.final_risk}
        rows.append({"what": "ends", **setting, **found})
    return rows


def measure_risks(
    dim: int, rank: int, lengths: list[int], cases: int, rng: np.random.Generator
) -> Rows:
    """The risk of softmax attention where its flow ends, by prompt length; ``zero`` is the risk of
    a layer that answers 0.
    """
    rows = []
    for case in range(cases):
        task, start, _ = random_start(dim, rank, rng)
        place = {"what": "risks", "dim": dim, "rank": rank, "case": case}
        zero = 0.5 * float(torch.trace(task.sigma))
        for length in lengths:
            left = float(risk(task, final_parameters(task, start, length), length))
            rows.append({**place, "length": float(length), "risk": left, "zero": zero})
    return rows


def measure_flows(what: str, rng: np.random.Generator, **settings: Any) -> Rows:
    return (measure_ends if what == "ends" else measure_risks)(**settings, rng=rng)


def decide_ends(tables: Tables) -> Decision:
    rows = tables["flows"]["evidence"]
    own = rows[rows["what"] == "ends"]
    distance, moved = own["distance"].to_numpy(float), own["moved"].to_numpy(float)
    reached = int((distance < CLOSE).sum())
    reason = (
        f"{reached} of {len(own)} flows end within {CLOSE:g} of the printed limit, the furthest at"
        f" {distance.max():.2g}, having moved by {moved.min():.2g} to {moved.max():.2g}"
    )
    x = range(len(own))
    series = [
        points("distance to the printed limit", x, np.maximum(distance, 1e-16)),
        points("way from the start", x, moved),
        line("close", x, CLOSE),
    ]
    return Decision(
        "supported" if reached == len(own) else "refuted",
        "largest relative distance",
        Interval(distance.max(), distance.min(), distance.max()),
        reason,
        Picture("flow", "relative distance", series, log="y"),
    )


def decide_bayes(tables: Tables) -> Decision:
    """Checks the limits of Remark 5.3, and that the risk left on L tokens goes to that of
    Bayes, 0.
    """
    at_infinity = decide_ends(tables)
    rows = tables["flows"]["evidence"]
    own = rows[rows["what"] == "risks"].assign(share=lambda table: table["risk"] / table["zero"])
    by_case = own.pivot_table(index=["dim", "case"], columns="length", values="share")
    shares, lengths = by_case.to_numpy(float), by_case.columns.to_numpy(float)
    falls = bool((np.diff(shares, axis=1) < 0).all())
    left = Interval(shares[:, -1].max(), shares[:, -1].min(), shares[:, -1].max())
    reason = (
        f"{at_infinity.reason}; on {lengths[-1]:.0f} tokens the risk left is {left.value:.2g} of"
        f" that of the answer 0 or less, {'falling' if falls else 'not falling'} with L"
    )
    series = [points(f"task {place}", lengths, row) for place, row in enumerate(shares)]
    axes = "prompt length L", "risk where the flow ends / risk of the answer 0"
    return Decision(
        all_of((at_infinity.verdict, below(left, ENDS) if falls else "refuted")),
        "risk left on the longest prompts",
        left,
        reason,
        Picture(*axes, series, log="xy"),
    )


def made_ends(distance: float, seed: int) -> Tables:
    """Flows that end about this far from the limit."""
    rng = np.random.default_rng(seed)
    ends = grid(what="ends", case=range(8))
    ends["distance"], ends["moved"] = distance * rng.uniform(0.5, 1, 8), rng.uniform(0.3, 1, 8)
    return {"flows": {"evidence": ends}}


def made_risks(power: float, seed: int) -> Tables:
    """Flows that end at the limit, and risks that fall like L^-power."""
    ends = made_ends(1e-6, seed)["flows"]["evidence"]
    risks = grid(what="risks", dim=3, case=(0, 1), length=(1e2, 1e3, 1e4, 1e5), zero=1.5)
    risks["risk"] = np.random.default_rng(seed).uniform(1, 2, 8) * risks["length"] ** -power
    return {"flows": {"evidence": pd.concat([ends, risks], ignore_index=True)}}


# ---- 21: errors after training

COVARIANCES = ("isotropic", "kms:0.5")
TRAINED = (10, 100, 1000)
MODELS = ("softmax", "linear")
NOISE = 0.1
NEAR = 0.01  # of the noise: how near both models have to come on the longest prompts
KEY = ["covariance", "length", "seed"]


def training(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Pairs trained from the same weights on the same prompts, at four times the paper's rate, for
    a fifth of its time (full: all of it); and the end of gradient flow, computed without a prompt.
    """
    quick = scale == "quick"
    long = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
    short: dict[str, Any] = {"seeds": 2, "steps": 25_000, "records": 20, "final_evaluation": 40_000}
    sizes = short if quick else {"seeds": 3, "steps": 125_000}
    flow = FlowSpec(covariances=COVARIANCES, lengths=(*TRAINED, *long), noise=NOISE, seed=seed)
    trained = TrainSpec(covariances=COVARIANCES, lengths=TRAINED, rate=4e-3, seed=seed, **sizes)
    return {"flow": flow, "training": trained}


def decide_errors(tables: Tables) -> Decision:
    """Checks the order of the models where flows end, and in the trainings that arrive there, which
    are those within 5 % of the end of the flow.
    """
    flow, final = tables["flow"]["final"], tables["training"]["final"]
    series = []
    parts: list[Any] = []
    for covariance, own in flow.groupby("covariance", sort=True):
        ends = own.pivot_table(index="length", columns="model", values="mse").sort_index()
        for model in (*MODELS, "bayes"):
            series.append(line(f"{model}, {covariance}", ends.index, ends[model] - NOISE))
        gap = (ends["softmax"] - ends["linear"]).to_numpy()
        ordered = (gap > 0).all() and (ends["linear"] > ends["bayes"]).all()
        near = (ends[[*MODELS]].iloc[-1] < (1 + NEAR) * NOISE).all()
        closes = (np.diff(gap) < 0).all()
        parts.append("supported" if ordered and closes and near else "refuted")
    final = final.merge(flow, on=["covariance", "length", "model"], suffixes=("", "_flow"))
    final["arrived"] = final["mse"] <= (1 + ABOVE) * final["mse_flow"]
    pairs = final.pivot(index=KEY, columns="model", values=["mse", "stderr", "arrived"])
    fit = pairs[pairs["arrived"].all(axis=1)]
    mse, stderr = fit["mse"].astype(float), fit["stderr"].astype(float)
    half = stats.norm.ppf((1 + LEVEL) / 2) * np.hypot(stderr["softmax"], stderr["linear"])
    gaps = mse["softmax"] - mse["linear"]
    ratios = [
        Interval(value / base, (value - error) / base, (value + error) / base)
        for value, error, base in zip(gaps, half, mse["linear"], strict=True)
    ]
    parts += [above(ratio, 0.0) for ratio in ratios] or ["undecided"]
    for model in MODELS:
        x = fit.index.get_level_values("length")
        series.append(points(f"{model}, trained", x, mse[model] - NOISE))
    last = flow[flow["length"] == flow["length"].max()]
    above_noise = last[last["model"] != "bayes"]["mse"].max() - NOISE
    decided = all_of(parts)
    reason = (
        f"where flows end, and in the {len(fit)} of {len(pairs)} trainings that reach it, linear"
        f" attention errs less than softmax at every L; at L = {last['length'].iloc[0]} the errors"
        f" are {above_noise:.2g} above the noise"
        if decided == "supported"
        else f"{len(fit)} of {len(pairs)} trainings reach the end of the flow; not every order or"
        " limit is as claimed"
    )
    return Decision(
        decided,
        "softmax above linear, share, the smallest",
        min(ratios, default=exactly(math.nan)),
        reason,
        Picture("prompt length L", "mean squared error above the noise", series, log="xy"),
    )


def made_training(errors: tuple[float, float], seed: int) -> Tables:
    """Errors above the noise of (softmax, linear) at L = 10, falling like 1/L; trainings arrive but
    for their noise.
    """
    rng = np.random.default_rng(seed)
    size = {**dict(zip(MODELS, errors, strict=True)), "bayes": 0.01}
    flow = grid(covariance=COVARIANCES, length=(*TRAINED, 100_000), model=size)
    flow["mse"] = NOISE + 10 * flow["model"].map(size) / flow["length"]
    final = grid(covariance=COVARIANCES, length=TRAINED, seed=range(20), model=MODELS, stderr=1e-5)
    exact = NOISE + 10 * final["model"].map(size) / final["length"]
    final["mse"] = exact + rng.normal(0, 1e-5, len(final))
    return {"flow": {"final": flow}, "training": {"final": final}}


# ---- 22 and 27: the distance of the two models, and which of them fails to train


def flowed(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Gradient flow of (O, V, K, Q) to the time of the paper's training, from starts that had not
    been seen.
    """
    spec = StabilitySpec(
        covariances=COVARIANCES,
        lengths=TRAINED,
        starts=24 if scale == "quick" else 200,
        block=2,
        until=1000.0,
        times=20,
        noise=NOISE,
        seed=1000 * (seed + 1),
    )
    return {"flows": spec}


def decide_distance(tables: Tables) -> Decision:
    """Looks at log ratios of the squared distance after training, from one length to the next, over
    starts with no model stuck. The covariances share their first weights.
    """
    flows, distance = tables["flows"]["flows"], tables["flows"]["distance"]
    arrived = flows.assign(ok=flows["status"] == "ok").groupby(KEY)["ok"].all()
    last = distance.sort_values("time").groupby(KEY)["weights2"].last()
    by_start = np.log(last[arrived.reindex(last.index)]).unstack("length").sort_index(axis=1)
    steps, told = [], []
    for short, long in itertools.pairwise(by_start.columns):
        changes = (by_start[long] - by_start[short]).dropna().groupby(level="seed").mean()
        unknown = Interval(math.nan, -math.inf, math.inf)
        steps.append(mean_interval(changes) if len(changes) else unknown)
        factor = np.exp(steps[-1].value)
        told.append(f"from L = {short} to {long} by a factor {factor:.2g} ({len(changes)} starts)")
    reason = (
        f"the squared distance of the weights after training changes {'; '.join(told)}, where"
        " neither model is stuck at either length"
    )
    series = []
    for covariance, own in by_start.groupby(level="covariance", sort=True):
        found = np.exp([mean_interval(own[length].dropna()) for length in own])
        series.append(points(f"{covariance}, geometric mean", [*own], found))
    return Decision(
        all_of(below(step, 0.0) for step in steps),
        "log change of the squared distance, the largest",
        max(steps, key=lambda step: -math.inf if math.isnan(step.value) else step.value),
        reason,
        Picture("prompt length L", "squared distance of the weights", series, log="xy"),
    )


def decide_stability(tables: Tables) -> Decision:
    """Counts for each start which model is stuck in more settings: starts are independent, their
    settings are not.
    """
    table = verdict(tables["flows"]["flows"])
    pooled, settings = table[table["covariance"] == ALL].iloc[0], table[table["covariance"] != ALL]
    linear, softmax = int(pooled["only_linear"]), int(pooled["only_softmax"])
    found = share_of(linear, linear + softmax)
    told = "; ".join(
        f"{row['covariance']}, L = {row['length']}: {row['linear']:.0%} and {row['softmax']:.0%}"
        for row in settings.to_dict("records")
    )
    reason = (
        f"of {pooled['starts']} starts {linear} are stuck in more settings for linear attention,"
        f" {softmax} for softmax, {pooled['starts'] - linear - softmax} in as many. Stuck are, of"
        f" linear and of softmax attention: {told}"
    )
    series = []
    for covariance, own in settings.groupby("covariance", sort=True):
        for model in ("linear", "softmax"):
            shares = own[[model, f"{model}_low", f"{model}_high"]].to_numpy()
            series.append(points(f"{model}, {covariance}", own["length"], shares))
    return Decision(
        above(found, 0.5),
        "share for linear of the starts that differ",
        found,
        reason,
        Picture("prompt length L", "share of starts that are stuck", series, log="x"),
    )


def made_flows(falls: float, stuck: str, seed: int) -> Tables:
    """Squared distances like L^-falls, and a model that is stuck at a third of the starts."""
    rng = np.random.default_rng(seed)
    places = {"covariance": COVARIANCES, "length": TRAINED, "seed": range(60)}
    flows = grid(**places, model=MODELS)
    lost = (flows["model"] == stuck) & (flows["seed"] % 3 == 0)
    flows["status"], flows["arrival"] = np.where(lost, "stuck", "ok"), np.where(lost, np.nan, 100.0)
    flows["lead"] = rng.standard_normal(len(flows))
    distance = grid(**places, time=(10.0, 1000.0))
    size = distance["length"] ** -falls * rng.uniform(0.8, 1.2, len(distance))
    distance["weights2"] = np.where(distance["time"] == 10.0, 0.1, 1.0) * size
    return {"flows": {"flows": flows, "distance": distance}}


TASK = """Tasks w ~ N(0, I) without noise, random covariances, starts of Assumption 5.1 with alpha
below its limit."""
RULE = f"""Supported if every flow ends within a relative distance of {CLOSE:g} of the printed
parameters."""
SETTING = (
    "In-context linear regression of [S], appendix A: dimension 5, noise 0.1, both covariances"
)
FLOWED = f"""{SETTING}; the gradient flow of (O, V, K, Q) on the exact risk from the first weights
that PyTorch draws, both models from the same, to the time of the paper's training, which its
500,000 steps of SGD follow (In-context learning: who gets stuck). A model is stuck if it ends more
than 5 % above the end of the block form's flow."""
LOOKED = """Flows from starts 0 to 99 and trainings from 6 had been looked at; the rule was then
written for flows in place of trainings. The starts of this claim are others."""

CLAIMS = (
    Claim(
        id="s-21-risks",
        source="[S] Figures 2 and 6",
        statement="""After training, linear attention errs less than softmax attention at every
        prompt length, the gap closes as L grows, and both near the noise.""",
        hypothesis=f"""{SETTING}; SGD on (O, V, K, Q) at four times the paper's rate, for a fifth of
        its time (full: all of it). Also where gradient flow ends, in the block form of Assumption
        5.1.""",
        rule=f"""Supported if at the end of the flow the order softmax, linear, Bayes holds at every
        L, the gap falls with L and both are within {NEAR:.0%} of the noise at the largest, and if
        every training that ends within 5 % of the flow has the order of the two models, beyond 99.9
        % intervals.""",
        refuted_by="""A length at which softmax attention errs less, a gap that grows, or an error
        that stays above the noise.""",
        runs=training,
        decide=decide_errors,
        holds=partial(made_training, (0.6, 0.4)),
        fails=partial(made_training, (0.4, 0.6)),
    ),
    Claim(
        id="s-22-distance",
        source="[S] Figures 3 and 7",
        statement="""The distance between the trained parameters of softmax and linear attention
        decreases as L increases.""",
        hypothesis=FLOWED,
        rule="""Supported if from each length to the next, 10, 100, 1000, the squared distance of
        the weights falls in mean over starts, in logarithms, beyond its 99.9 % interval; refuted if
        between two lengths it rises so. Starts at which a model is stuck are left out.""",
        refuted_by="A rise from one length to a longer one.",
        seen=LOOKED,
        runs=flowed,
        decide=decide_distance,
        holds=partial(made_flows, 1.0, ""),
        fails=partial(made_flows, -0.5, ""),
    ),
    Claim(
        id="s-23-bayes",
        source="[S] Theorem 5.2 and Remark 5.3",
        statement="""On infinite prompts gradient flow ends at U11 = tr(Sigma^-2)^(-1/4) Sigma^-1, v
        = tr(Sigma^-2)^(1/4), whose risk is the Bayes risk 0; on L tokens softmax attention ends
        within any eps of it once L is large.""",
        hypothesis=f"{TASK} Sigma invertible.",
        rule=f"""{RULE} And the risk where the flow on L tokens ends falls with L, to less than
        {ENDS:g} of that of the answer 0.""",
        refuted_by="A flow that ends elsewhere, or a risk that does not fall towards 0.",
        runs=partial(flows, "s-23-bayes", ((2, 2), (5, 5)), (None,)),
        decide=decide_bayes,
        holds=partial(made_risks, 1.0),
        fails=partial(made_risks, 0.1),
        measure=measure_flows,
    ),
    Claim(
        id="s-24-finite-linear",
        source="[S] appendix F.2 after Zhang et al. (2024), Theorem 4.1",
        statement="""With linear attention on L tokens gradient flow ends at U11 = tr(S^-2)^(-1/4)
        S^-1, v = tr(S^-2)^(1/4), S = (1 + 1/L) Sigma + (tr(Sigma)/L) I.""",
        hypothesis=f"{TASK} Sigma invertible; L = 5, 50, 1000.",
        rule=RULE,
        refuted_by="A flow that ends elsewhere.",
        runs=partial(flows, "s-24-finite-linear", ((2, 2), (5, 5)), (5, 50, 1000)),
        decide=decide_ends,
        holds=partial(made_ends, 1e-6),
        fails=partial(made_ends, 0.2),
        measure=measure_flows,
    ),
    Claim(
        id="s-25-singular",
        source="[S] appendix F.3",
        statement="""With a singular Sigma the flow on infinite prompts ends at U11 = gamma Sigma^+
        + alpha P(Theta Theta^T), v = 1/gamma: what lies off the range of Sigma never moves.""",
        hypothesis=f"{TASK} Sigma of rank 1 of 3, 2 of 4, 4 of 5.",
        rule=RULE,
        refuted_by="A flow that ends elsewhere.",
        runs=partial(flows, "s-25-singular", ((3, 1), (4, 2), (5, 4)), (None,)),
        decide=decide_ends,
        holds=partial(made_ends, 1e-6),
        fails=partial(made_ends, 0.2),
        measure=measure_flows,
    ),
    Claim(
        id="s-27-stability",
        source="[S] appendix A.2",
        statement="""Training softmax attention is more stable: linear attention fails to train from
        more first weights.""",
        hypothesis=FLOWED,
        rule="""Of the starts at which one model is stuck in more of the six settings than the
        other, the share at which it is linear attention: supported if its 99.9 % interval lies
        above a half, refuted if it lies below.""",
        refuted_by="Most of these starts stuck for softmax attention.",
        seen=LOOKED,
        runs=flowed,
        decide=decide_stability,
        holds=partial(made_flows, 1.0, "linear"),
        fails=partial(made_flows, 1.0, "softmax"),
    ),
)
