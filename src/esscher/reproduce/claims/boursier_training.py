"""[S] on training: errors after it, the distance of the two models along it, and which of them fails to train."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

from esscher.icl.comparison import ABOVE
from esscher.icl.flow.spec import FlowSpec
from esscher.icl.training.spec import TrainSpec
from esscher.reproduce.claim import Claim, Decision, Picture, Scale, Series, Tables, Verdict
from esscher.reproduce.decide import LEVEL, above, all_of, below, mean_interval, share_of
from esscher.runs import RunSpec

__all__ = ["CLAIMS"]

COVARIANCES = ("isotropic", "kms:0.5")
TRAINED = (10, 100, 1000)
NOISE = 0.1
NEAR = 0.01  # of the noise: how near both models have to come on the longest prompts
RARE = 0.05  # a difference of failures below this share of the starts is none
KEY = ["covariance", "length", "seed"]


def training(scale: Scale, seed: int) -> TrainSpec:
    """Pairs trained from the same weights on the same prompts; quick: a fifth of the paper's time, at four times its rate."""
    quick = {"seeds": 2, "steps": 25_000, "rate": 4e-3, "records": 20, "final_evaluation": 40_000}
    chosen = quick if scale == "quick" else {"seeds": 10}
    return TrainSpec(covariances=COVARIANCES, lengths=TRAINED, seed=seed, **chosen)


def both(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """With the end of gradient flow, which is computed without a prompt."""
    lengths = (*TRAINED, 10_000, 100_000) if scale == "quick" else (*TRAINED, 10_000, 100_000, 1_000_000)
    flow = FlowSpec(covariances=COVARIANCES, lengths=lengths, noise=NOISE, seed=seed)
    return {"flow": flow, "training": training(scale, seed)}


def trained(tables: Tables) -> pd.DataFrame:
    """A row for each start and length: errors of both models, and whether each is stuck: 5 % above the flow, or diverged."""
    final, flow = tables["training"]["final"], tables["flow"]["final"]
    ends = flow.pivot_table(index=["covariance", "length"], columns="model", values="mse")
    rows = final.pivot_table(index=KEY, columns="model", values=["mse", "stderr"], dropna=False)
    found = pd.DataFrame(index=rows.index)
    places = pd.MultiIndex.from_frame(rows.index.to_frame()[["covariance", "length"]])
    for model in ("softmax", "linear"):
        found[model], found[f"{model}_stderr"] = rows["mse"][model], rows["stderr"][model]
        found[f"{model}_stuck"] = ~(rows["mse"][model].to_numpy() <= (1 + ABOVE) * ends[model].loc[places].to_numpy())
    return found.reset_index()


# ---- 21: errors after training ----------------------------------------------------------------------------------------------


def decide_errors(tables: Tables) -> Decision:
    flow = tables["flow"]["final"]
    series: list[Series] = []
    parts: list[Verdict] = []
    for covariance, own in flow.groupby("covariance", sort=True):
        ends = own.pivot_table(index="length", columns="model", values="mse").sort_index()
        for model in ("softmax", "linear", "bayes"):
            series.append(
                Series(f"{model}, {covariance}", ends.index.to_numpy(float), ends[model].to_numpy() - NOISE, line=True)
            )
        gap = (ends["softmax"] - ends["linear"]).to_numpy()
        ordered = bool((gap > 0).all() and (ends["linear"] > ends["bayes"]).all() and (np.diff(gap) < 0).all())
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
        series.append(Series(f"{model}, trained", fit["length"].to_numpy(float), fit[model].to_numpy() - NOISE))
    value, low, high = map(float, min(ratios)) if ratios else [float("nan")] * 3
    verdict: Verdict = all_of(parts) if ratios else all_of((*parts, "undecided"))
    last = flow[flow["length"] == flow["length"].max()]
    reason = (
        f"where flows end, and in the {len(fit)} of {len(runs)} trainings that reach it, linear attention errs less than "
        f"softmax at "
        f"every L; at L = {last['length'].iloc[0]} the errors are {last[last['model'] != 'bayes']['mse'].max() - NOISE:.2g} "
        f"above the noise"
        if verdict == "supported"
        else f"{len(fit)} of {len(runs)} trainings reach the end of the flow; not every order or limit is as claimed"
    )
    picture = Picture("prompt length L", "mean squared error above the noise", tuple(series), log="xy")
    return Decision(verdict, "softmax above linear, share, the smallest", value, low, high, reason, picture)


# ---- 22: the distance of the two models -------------------------------------------------------------------------------------


def decide_distance(tables: Tables) -> Decision:
    """Log ratios of the squared distance at the end, from one length to the next, over starts at which no model is stuck."""
    runs = trained(tables).assign(stuck=lambda table: table["softmax_stuck"] | table["linear_stuck"])
    distance = tables["training"]["distance"].sort_values("step").groupby(KEY)["distance2"].last().reset_index()
    table = distance.merge(runs[[*KEY, "stuck"]], on=KEY)
    table = table.assign(log=np.log(table["distance2"].where(~table["stuck"])))
    by_start = table.pivot_table(index=["covariance", "seed"], columns="length", values="log", dropna=False).sort_index(axis=1)
    lengths = list(by_start.columns)
    steps = []
    for short, long in itertools.pairwise(lengths):
        changes = (by_start[long] - by_start[short]).dropna()
        value, low, high = mean_interval(changes) if len(changes) else (float("nan"), -np.inf, np.inf)
        steps.append((short, long, len(changes), value, low, high))
    verdict = all_of(below(low, high, 0.0) for *_, low, high in steps)
    worst = max(steps, key=lambda step: -np.inf if np.isnan(step[3]) else step[3])
    told = "; ".join(
        f"from L = {a} to {b} by a factor {np.exp(value):.2g} ({count} starts)" for a, b, count, value, *_ in steps
    )
    reason = f"the squared distance at the end of training changes {told}, where neither model is stuck"
    series = [
        Series(f"{covariance}, start {seed}", [float(n) for n in lengths], np.exp(row.to_numpy(float)))
        for (covariance, seed), row in by_start.iterrows()
        if row.notna().any()
    ]
    picture = Picture("prompt length L", "squared distance of the parameters", tuple(series), log="xy")
    return Decision(verdict, "log change of the squared distance, the largest", *worst[3:], reason, picture)


# ---- 27: which model fails to train -----------------------------------------------------------------------------------------


def decide_stability(tables: Tables) -> Decision:
    """Starts at which one model alone is stuck. Starts share no prompts; a start counts for the model stuck at more lengths."""
    runs = trained(tables).assign(more=lambda table: table["linear_stuck"].astype(int) - table["softmax_stuck"].astype(int))
    starts = runs.groupby(["covariance", "seed"])["more"].sum()
    linear, softmax = (share_of(int((sign * starts > 0).sum()), len(starts)) for sign in (1, -1))
    value = linear[0] - softmax[0]  # the two shares err against each other at most as much as apart
    low = value - float(np.hypot(linear[0] - linear[1], softmax[2] - softmax[0]))
    high = value + float(np.hypot(linear[2] - linear[0], softmax[0] - softmax[1]))
    verdict: Verdict = "supported" if low > 0 else "refuted" if high < RARE else "undecided"
    counts = {model: int(runs[f"{model}_stuck"].sum()) for model in ("softmax", "linear")}
    reason = (
        f"of {len(runs)} trainings of each model {counts['linear']} of linear and {counts['softmax']} of softmax attention "
        f"are stuck; "
        f"of {len(starts)} starts {int((starts > 0).sum())} are worse for linear, {int((starts < 0).sum())} for softmax "
        f"attention"
    )
    shares = runs.groupby("length")[["linear_stuck", "softmax_stuck"]].mean()
    series = [Series(model, shares.index.to_numpy(float), shares[f"{model}_stuck"].to_numpy(float)) for model in counts]
    picture = Picture("prompt length L", "share of trainings that are stuck", tuple(series), log="x")
    return Decision(verdict, "starts worse for linear minus for softmax, share", value, low, high, reason, picture)


# ---- made-up trainings ------------------------------------------------------------------------------------------------------


def made_training(errors: tuple[float, float], falls: float, stuck: str, seed: int) -> Tables:
    """Errors above the noise of (softmax, linear) at L = 10, falling like 1/L; squared distances like L^-falls; a model that is
    stuck at most starts."""
    rng = np.random.default_rng(seed)
    above_noise = dict(zip(("softmax", "linear"), errors, strict=True)) | {"bayes": 0.01}
    flow, final, distance = [], [], []
    for covariance in COVARIANCES:
        for length in (*TRAINED, 100_000):
            ends = {model: NOISE + 10 * size / length for model, size in above_noise.items()}
            flow += [{"covariance": covariance, "length": length, "model": model, "mse": mse} for model, mse in ends.items()]
            for start in range(20 if length in TRAINED else 0):
                place = {"covariance": covariance, "length": length, "seed": start}
                for model in ("softmax", "linear"):
                    lost = 2.0 if model == stuck and start < 18 else 1.0
                    final.append({**place, "model": model, "mse": lost * ends[model], "stderr": 1e-5})
                distance.append({**place, "step": 100, "distance2": length**-falls * rng.uniform(0.8, 1.2)})
    return {
        "flow": {"final": pd.DataFrame(flow)},
        "training": {"final": pd.DataFrame(final), "distance": pd.DataFrame(distance)},
    }


SETTING = "In-context linear regression of [S], appendix A: dimension 5, noise 0.1, both covariances, SGD on (O, V, K, Q)."

CLAIMS = (
    Claim(
        id="s-21-risks",
        number=21,
        source="[S] Figures 2 and 6",
        statement="After training, linear attention errs less than softmax attention at every prompt length, the gap closes "
        "as L "
        "grows, and both near the noise.",
        hypothesis=SETTING + " Also where gradient flow ends, in the block form of Assumption 5.1.",
        rule="Supported if at the end of the flow the order softmax, linear, Bayes holds at every L, the gap falls with L "
        "and both are "
        f"within {NEAR:.0%} of the noise at the largest, and if every training that ends within 5 % of the flow has the "
        f"order of the "
        "two models, beyond 99.9 % intervals.",
        refuted_by="A length at which softmax attention errs less, a gap that grows, or an error that stays above the noise.",
        runs=both,
        decide=decide_errors,
        holds=partial(made_training, (0.6, 0.4), 1.0, ""),
        fails=partial(made_training, (0.4, 0.6), 1.0, ""),
    ),
    Claim(
        id="s-22-distance",
        number=22,
        source="[S] Figures 3 and 7",
        statement="The distance between the trained parameters of softmax and linear attention decreases as L increases.",
        hypothesis=SETTING + " Both models from the same weights on the same prompts; distance at the end of training.",
        rule="Supported if from each length to the next, 10, 100, 1000, the squared distance falls in mean over starts, in "
        "logarithms, "
        "beyond its 99.9 % interval; refuted if between two lengths it rises so. Starts at which a model is stuck are left "
        "out.",
        refuted_by="A rise from one length to a longer one.",
        runs=both,
        decide=decide_distance,
        holds=partial(made_training, (0.6, 0.4), 1.0, ""),
        fails=partial(made_training, (0.6, 0.4), -0.5, ""),
    ),
    Claim(
        id="s-27-stability",
        number=27,
        source="[S] appendix A.2",
        statement="Training softmax attention is more stable: linear attention fails to train from some first weights.",
        hypothesis=SETTING + " A model is stuck if it ends more than 5 % above the end of gradient flow.",
        rule="Supported if more starts are worse for linear than for softmax attention, beyond the 99.9 % interval of the "
        "difference of "
        f"shares; refuted if that difference is below {RARE:g}.",
        refuted_by="As many failures of softmax attention.",
        runs=both,
        decide=decide_stability,
        holds=partial(made_training, (0.6, 0.4), 1.0, "linear"),
        fails=partial(made_training, (0.6, 0.4), 1.0, "softmax"),
    ),
)
