"""[S] on training: errors after it, the distance of the two models along it, and which of them
fails to train.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from esscher.icl.comparison import ABOVE
from esscher.icl.flow.spec import FlowSpec
from esscher.icl.stability.spec import StabilitySpec
from esscher.icl.stability.verdict import ALL, verdict
from esscher.icl.training.spec import TrainSpec
from esscher.reproduce.claim import Claim, Decision, Picture, Scale, Series, Tables, Verdict
from esscher.reproduce.decide import LEVEL, above, all_of, below, mean_interval, share_of
from esscher.runs import RunSpec

__all__ = ["CLAIMS"]

COVARIANCES = ("isotropic", "kms:0.5")
TRAINED = (10, 100, 1000)
NOISE = 0.1
NEAR = 0.01  # of the noise: how near both models have to come on the longest prompts
KEY = ["covariance", "length", "seed"]


def training(scale: Scale, seed: int) -> TrainSpec:
    """Pairs trained from the same weights on the same prompts, at four times the paper's rate: a
    fifth of its time, or all.
    """
    quick: dict[str, Any] = {"seeds": 2, "steps": 25_000, "records": 20, "final_evaluation": 40_000}
    chosen = quick if scale == "quick" else {"seeds": 3, "steps": 125_000}
    return TrainSpec(covariances=COVARIANCES, lengths=TRAINED, rate=4e-3, seed=seed, **chosen)


def both(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """With the end of gradient flow, which is computed without a prompt."""
    lengths = (
        (*TRAINED, 10_000, 100_000) if scale == "quick" else (*TRAINED, 10_000, 100_000, 1_000_000)
    )
    flow = FlowSpec(covariances=COVARIANCES, lengths=lengths, noise=NOISE, seed=seed)
    return {"flow": flow, "training": training(scale, seed)}


def trained(tables: Tables) -> pd.DataFrame:
    """A row for each start and length: errors of both models, and whether each is stuck: 5 % above
    the flow, or diverged.
    """
    final, flow = tables["training"]["final"], tables["flow"]["final"]
    ends = flow.pivot_table(index=["covariance", "length"], columns="model", values="mse")
    rows = final.pivot_table(index=KEY, columns="model", values=["mse", "stderr"], dropna=False)
    found = pd.DataFrame(index=rows.index)
    places = pd.MultiIndex.from_frame(rows.index.to_frame()[["covariance", "length"]])
    for model in ("softmax", "linear"):
        found[model], found[f"{model}_stderr"] = rows["mse"][model], rows["stderr"][model]
        found[f"{model}_stuck"] = ~(
            rows["mse"][model].to_numpy() <= (1 + ABOVE) * ends[model].loc[places].to_numpy()
        )
    return found.reset_index()


# ---- 21: errors after training
# ------------------------------------------------------------------------------------------


def decide_errors(tables: Tables) -> Decision:
    flow = tables["flow"]["final"]
    series: list[Series] = []
    parts: list[Verdict] = []
    for covariance, own in flow.groupby("covariance", sort=True):
        ends = own.pivot_table(index="length", columns="model", values="mse").sort_index()
        for model in ("softmax", "linear", "bayes"):
            series.append(
                Series(
                    f"{model}, {covariance}",
                    ends.index.to_numpy(float),
                    ends[model].to_numpy() - NOISE,
                    line=True,
                )
            )
        gap = (ends["softmax"] - ends["linear"]).to_numpy()
        ordered = bool(
            (gap > 0).all() and (ends["linear"] > ends["bayes"]).all() and (np.diff(gap) < 0).all()
        )
        near = bool((ends[["softmax", "linear"]].iloc[-1] < (1 + NEAR) * NOISE).all())
        parts.append("supported" if ordered and near else "refuted")
    runs = trained(tables)
    fit = runs[~(runs["softmax_stuck"] | runs["linear_stuck"])]
    half = stats.norm.ppf((1 + LEVEL) / 2) * np.hypot(fit["softmax_stderr"], fit["linear_stderr"])
    gap, ratios = fit["softmax"] - fit["linear"], []
    for value, error, base in zip(gap, half, fit["linear"], strict=True):
        parts.append(above(value - error, value + error, 0.0))
        ratios.append((value / base, (value - error) / base, (value + error) / base))
    for model in ("softmax", "linear"):
        series.append(
            Series(
                f"{model}, trained", fit["length"].to_numpy(float), fit[model].to_numpy() - NOISE
            )
        )
    value, low, high = map(float, min(ratios)) if ratios else [float("nan")] * 3
    verdict: Verdict = all_of(parts) if ratios else all_of((*parts, "undecided"))
    last = flow[flow["length"] == flow["length"].max()]
    reason = (
        f"where flows end, and in the {len(fit)} of {len(runs)} trainings that reach it, linear"
        f" attention errs less than softmax at every L; at L = {last['length'].iloc[0]} the errors"
        f" are {last[last['model'] != 'bayes']['mse'].max() - NOISE:.2g} above the noise"
        if verdict == "supported"
        else (
            f"{len(fit)} of {len(runs)} trainings reach the end of the flow; not every order or"
            " limit is as claimed"
        )
    )
    picture = Picture(
        "prompt length L", "mean squared error above the noise", tuple(series), log="xy"
    )
    return Decision(
        verdict, "softmax above linear, share, the smallest", value, low, high, reason, picture
    )


# ---- 22: the distance of the two models
# -------------------------------------------------------------------------------------


def flowed(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Gradient flow of (O, V, K, Q) to the time of the paper's training, from starts that had not
    been seen.
    """
    starts = 24 if scale == "quick" else 200
    spec = StabilitySpec(
        covariances=COVARIANCES,
        lengths=TRAINED,
        starts=starts,
        block=2,
        until=1000.0,
        times=20,
        noise=NOISE,
        seed=1000 * (seed + 1),
    )
    return {"flows": spec}


def decide_distance(tables: Tables) -> Decision:
    """Log ratios of the squared distance after training, from one length to the next, over starts
    with no model stuck.
    """
    flows, distance = tables["flows"]["flows"], tables["flows"]["distance"]
    arrived = flows.assign(ok=flows["status"] == "ok").groupby(KEY)["ok"].all()
    last = distance.sort_values("time").groupby(KEY)["weights2"].last()
    by_start = np.log(last[arrived.reindex(last.index)]).unstack("length").sort_index(axis=1)
    steps = []
    for short, long in itertools.pairwise(by_start.columns):
        # covariances share first weights
        changes = (by_start[long] - by_start[short]).dropna().groupby(level="seed").mean()
        value, low, high = (
            mean_interval(changes) if len(changes) else (float("nan"), -np.inf, np.inf)
        )
        steps.append((short, long, len(changes), value, low, high))
    verdict = all_of(below(low, high, 0.0) for *_, low, high in steps)
    worst = max(steps, key=lambda step: -np.inf if np.isnan(step[3]) else step[3])
    told = "; ".join(
        f"from L = {a} to {b} by a factor {np.exp(value):.2g} ({count} starts)"
        for a, b, count, value, *_ in steps
    )
    reason = (
        f"the squared distance of the weights after training changes {told}, where neither model is"
        " stuck at either length"
    )
    series = []
    for covariance, own in by_start.groupby(level="covariance", sort=True):
        found = np.exp([mean_interval(own[length].dropna()) for length in own])
        series.append(
            Series.of(
                f"{covariance}, geometric mean",
                [float(length) for length in own],
                map(tuple, found),
            )
        )
    picture = Picture("prompt length L", "squared distance of the weights", tuple(series), log="xy")
    return Decision(
        verdict, "log change of the squared distance, the largest", *worst[3:], reason, picture
    )


# ---- 27: which model fails to train
# -----------------------------------------------------------------------------------------


def decide_stability(tables: Tables) -> Decision:
    """Starts are independent, their settings are not: of a start counts which model is stuck in
    more settings.
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
    series = [
        Series.of(
            f"{model}, {covariance}",
            own["length"].to_numpy(float),
            own[[model, f"{model}_low", f"{model}_high"]].itertuples(index=False, name=None),
        )
        for covariance, own in settings.groupby("covariance", sort=True)
        for model in ("linear", "softmax")
    ]
    picture = Picture("prompt length L", "share of starts that are stuck", tuple(series), log="x")
    return Decision(
        above(*found[1:], 0.5),
        "share for linear of the starts that differ",
        *found,
        reason,
        picture,
    )


def made_flows(falls: float, stuck: str, seed: int) -> Tables:
    """Squared distances like L^-falls, and a model that is stuck at a third of the starts."""
    rng = np.random.default_rng(seed)
    flows, distance = [], []
    for covariance in COVARIANCES:
        for length in TRAINED:
            for start in range(60):
                place = {"covariance": covariance, "length": length, "seed": start}
                for model in ("softmax", "linear"):
                    lost = model == stuck and start % 3 == 0
                    told = {
                        "status": "stuck" if lost else "ok",
                        "arrival": np.nan if lost else 100.0,
                        "lead": rng.normal(),
                    }
                    flows.append({**place, "model": model, **told})
                size = length**-falls * rng.uniform(0.8, 1.2)
                ends = ((10.0, 0.1 * size), (1000.0, size))
                distance += [{**place, "time": time, "weights2": value} for time, value in ends]
    return {"flows": {"flows": pd.DataFrame(flows), "distance": pd.DataFrame(distance)}}


# ---- made-up trainings
# ------------------------------------------------------------------------------------------


def made_training(errors: tuple[float, float], seed: int) -> Tables:
    """Errors above the noise of (softmax, linear) at L = 10, falling like 1/L; trainings arrive but
    for their noise.
    """
    rng = np.random.default_rng(seed)
    above_noise = dict(zip(("softmax", "linear"), errors, strict=True)) | {"bayes": 0.01}
    flow, final = [], []
    for covariance in COVARIANCES:
        for length in (*TRAINED, 100_000):
            ends = {model: NOISE + 10 * size / length for model, size in above_noise.items()}
            flow += [
                {"covariance": covariance, "length": length, "model": model, "mse": mse}
                for model, mse in ends.items()
            ]
            for start in range(20 if length in TRAINED else 0):
                place = {"covariance": covariance, "length": length, "seed": start}
                for model in ("softmax", "linear"):
                    mse = ends[model] + 1e-5 * rng.standard_normal()
                    final.append({**place, "model": model, "mse": mse, "stderr": 1e-5})
    return {"flow": {"final": pd.DataFrame(flow)}, "training": {"final": pd.DataFrame(final)}}


SETTING = (
    "In-context linear regression of [S], appendix A: dimension 5, noise 0.1, both covariances"
)
FLOWED = (
    f"{SETTING}; the gradient flow of (O, V, K, Q) on the exact risk from the first weights that"
    " PyTorch draws, both models from the same, to the time of the paper's training, which its"
    " 500,000 steps of SGD follow (In-context learning: who gets stuck). A model is stuck if it"
    " ends more than 5 % above the end of the block form's flow."
)
LOOKED = (
    "Flows from starts 0 to 99 and trainings from 6 had been looked at; the rule was then written"
    " for flows in place of trainings. The starts of this claim are others."
)

CLAIMS = (
    Claim(
        id="s-21-risks",
        number=21,
        source="[S] Figures 2 and 6",
        statement=(
            "After training, linear attention errs less than softmax attention at every prompt"
            " length, the gap closes as L grows, and both near the noise."
        ),
        hypothesis=(
            f"{SETTING}; SGD on (O, V, K, Q) at four times the paper's rate, for a fifth of its"
            " time (full: all of it). Also where gradient flow ends, in the block form of"
            " Assumption 5.1."
        ),
        rule=(
            "Supported if at the end of the flow the order softmax, linear, Bayes holds at every"
            f" L, the gap falls with L and both are within {NEAR:.0%} of the noise at the largest,"
            " and if every training that ends within 5 % of the flow has the order of the two"
            " models, beyond 99.9 % intervals."
        ),
        refuted_by=(
            "A length at which softmax attention errs less, a gap that grows, or an error that"
            " stays above the noise."
        ),
        runs=both,
        decide=decide_errors,
        holds=partial(made_training, (0.6, 0.4)),
        fails=partial(made_training, (0.4, 0.6)),
    ),
    Claim(
        id="s-22-distance",
        number=22,
        seen=LOOKED,
        source="[S] Figures 3 and 7",
        statement=(
            "The distance between the trained parameters of softmax and linear attention decreases"
            " as L increases."
        ),
        hypothesis=FLOWED,
        rule=(
            "Supported if from each length to the next, 10, 100, 1000, the squared distance of the"
            " weights falls in mean over starts, in logarithms, beyond its 99.9 % interval; refuted"
            " if between two lengths it rises so. Starts at which a model is stuck are left out."
        ),
        refuted_by="A rise from one length to a longer one.",
        runs=flowed,
        decide=decide_distance,
        holds=partial(made_flows, 1.0, ""),
        fails=partial(made_flows, -0.5, ""),
    ),
    Claim(
        id="s-27-stability",
        number=27,
        seen=LOOKED,
        source="[S] appendix A.2",
        statement=(
            "Training softmax attention is more stable: linear attention fails to train from more"
            " first weights."
        ),
        hypothesis=FLOWED,
        rule=(
            "Of the starts at which one model is stuck in more of the six settings than the other,"
            " the share at which it is linear attention: supported if its 99.9 % interval lies"
            " above a half, refuted if it lies below."
        ),
        refuted_by="Most of these starts stuck for softmax attention.",
        runs=flowed,
        decide=decide_stability,
        holds=partial(made_flows, 1.0, "linear"),
        fails=partial(made_flows, 1.0, "softmax"),
    ),
)
