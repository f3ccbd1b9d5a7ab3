"""Rules of the claims on in-context learning, [S]: the limit of one attention layer on infinitely
many tokens, how outputs and gradients approach it and linear attention, the query inside the
prompt; where gradient flow ends, errors after training, the distance of softmax and linear
attention along it, and which of them fails to train.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats

from esscher.icl.exact import risk
from esscher.icl.flow import (
    alpha_limit,
    final_parameters,
    flow_limit,
    flow_times,
    gradient_flow,
    start_block,
)
from esscher.icl.layer import Block, flatten
from esscher.icl.stability import ABOVE, ALL, verdict
from esscher.icl.tasks import LinearTask
from esscher.intervals import Interval, t_quantile
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.rules import above, below, decided, exponent, inside, need, points

Floats = npt.NDArray[np.float64]
COVARIANCES = ("isotropic", "kms:0.5")


# ---- 17: the limit is linear


def measure_limit(
    mean: float, rank: int, dim: int, tokens: int, repeats: int, rng: np.random.Generator
) -> Rows:
    """Attention on many Gaussian tokens against V(m + Gamma K^T Q z), random matrices: the factor
    that fits the formula best, and the variance of the outputs over that of Lemma 2.1.
    """
    queries = 400
    root = rng.standard_normal((dim, rank)) / np.sqrt(rank)
    gamma, m = root @ root.T, mean * rng.standard_normal(dim)
    K, Q, V = rng.standard_normal((3, dim, dim))
    U = K.T @ Q
    # a score deviates by about 0.7
    U *= 0.7 / np.linalg.norm(root.T @ U @ np.column_stack([root, m]))
    linear = V @ gamma @ U
    variance = float(np.trace(linear @ gamma @ linear.T))
    rows = []
    for repeat in range(repeats):
        y = m + rng.standard_normal((tokens, rank)) @ root.T
        z = m + rng.standard_normal((queries, rank)) @ root.T
        scores = z @ (y @ U).T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out = weights @ (y @ V.T) / weights.sum(axis=1, keepdims=True)
        formula = V @ m + z @ linear.T
        away = out - (V @ m + linear @ m)
        slope = float((out * formula).sum() / (formula * formula).sum())
        found = {"slope": slope, "spread": (away**2).sum(1).mean() / variance}
        rows.append({"mean": mean, "rank": rank, "repeat": repeat, **found})
    return rows


@claim("s-17-limit", measure_limit)
def linear_limit(tables: Tables, slope: float, spread: float) -> Decision:
    groups = tables["long"]["evidence"].groupby(["mean", "rank"], sort=True)
    slopes, spreads = (
        {f"mean {m:g}, rank {rank:g}": rules.mean_interval(own[name]) for (m, rank), own in groups}
        for name in ("slope", "spread")
    )
    return decided(
        need("slope against the formula", slopes, inside, 1 - slope, 1 + slope),
        need("variance over the lemma's", spreads, inside, 1 - spread, 1 + spread),
        x=f"case: {'; '.join(slopes)}",
    )


# ---- 18 to 20: outputs and gradients at the weights that training begins with


def rms_by_length(errors: pd.DataFrame) -> dict[float, Interval]:
    """Root mean squares of stored squared errors, by n."""
    return {
        float(n): rules.each(rules.mean_interval(squared), lambda end: max(end, 0.0) ** 0.5)
        for n, squared in errors.groupby("n", sort=True)["squared"]
    }


def bounded(tables: Tables, bounds: dict[str, str]) -> Decision:
    """Errors to the limit against the proved bound of each metric at every length, and exponents
    against the proved ones.
    """
    errors, proved = tables["concentration"]["errors"], tables["concentration"]["bounds"]
    ratios, rates = {}, {}
    for (metric, name), covariance in itertools.product(bounds.items(), COVARIANCES):
        place = f"covariance == '{covariance}' and metric == '{metric}'"
        own = errors.query(f"{place} and against == 'limit'")
        bound = proved.query(f"{place} and name == '{name}'").sort_values("n")
        found, ceiling = rms_by_length(own), bound["rms"].to_numpy()
        fit, promised = exponent(own.assign(point=0), metric), float(bound["exponent"].iloc[0])
        where = f"{metric}, {covariance}"
        rates[where] = Interval(*(end - promised for end in fit))
        for (n, error), height in zip(found.items(), ceiling, strict=True):
            ratios[where, n] = Interval(*(end / height for end in error))
    return decided(
        need("error / bound", ratios, below, 1.0),
        need("exponent less the proved one", rates, above, 0.0),
        x="prompt length L",
        log="xy",
    )


claim("s-18-outputs")(bounded)
claim("s-19-gradients")(bounded)


@claim("s-20-near-linear")
def nears_linear(tables: Tables, fall: float) -> Decision:
    errors, exact = tables["concentration"]["errors"], tables["concentration"]["exact"]
    falls, rises = {}, {}
    for covariance in COVARIANCES:
        place = f"covariance == '{covariance}' and against == 'linear'"
        drawn = rms_by_length(errors.query(f"{place} and metric == 'output'"))
        known = [rules.exactly(error) for error in exact.query(place).sort_values("n")["error"]]
        for what, found in (("output", [*drawn.values()]), ("risk gradient", known)):
            first, last, where = found[0], found[-1], f"{what}, {covariance}"
            falls[where] = Interval(
                last.value / first.value, last.low / first.high, last.high / first.low
            )
            steps = (after.low - before.high for before, after in itertools.pairwise(found))
            rises[where] = max(steps)
    return decided(
        need("last difference / first", falls, below, fall),
        need("rise from one length to the next beyond the intervals", rises, below, 0.0),
        x=f"difference: {'; '.join(falls)}",
    )


# ---- 26: the query in its own prompt


def exponent_gap(inner: pd.DataFrame, outer: pd.DataFrame) -> Interval:
    """The exponent of the first error minus that of the second, on the same draws, with a jackknife
    interval over repeats.
    """
    tables = [
        own.pivot(index="repeat", columns="n", values="squared").sort_index(axis=1)
        for own in (inner, outer)
    ]
    log_n = np.log(tables[0].columns.to_numpy(dtype=np.float64))
    squares = [table.to_numpy(dtype=np.float64) for table in tables]
    direction = (log_n - log_n.mean()) / ((log_n - log_n.mean()) ** 2).sum()

    def gap(sums: list[Any]) -> Any:
        return -0.5 * (np.log(sums[0]) - np.log(sums[1])) @ direction

    value = float(gap([square.sum(axis=0) for square in squares]))
    left_out = gap([square.sum(axis=0) - square for square in squares])
    repeats = len(left_out)
    error = np.sqrt((repeats - 1) / repeats * ((left_out - left_out.mean()) ** 2).sum())
    half = float(t_quantile(repeats - 1, rules.LEVEL) * error)
    return Interval(value, value - half, value + half)


@claim("s-26-query-inside")
def query_inside(tables: Tables, same: float) -> Decision:
    gaps, told = {}, []
    for point in sorted(tables["inside"]["errors"]["point"].unique()):
        both = [tables[name]["errors"].query(f"point == {point}") for name in ("inside", "outside")]
        gaps[f"point {point}"] = exponent_gap(*both)
        told.append(" and ".join(f"{exponent(own, 'l2', int(point)).value:.3f}" for own in both))
    return decided(
        need("exponent inside minus outside", gaps, inside, -same, same),
        note=f"exponents inside and outside, by horizon: {'; '.join(told)}",
    )


# ---- 23 to 25: where gradient flow ends


def random_start(dim: int, rank: int, rng: np.random.Generator) -> tuple[LinearTask, Block]:
    """A task as (11) of [S], w ~ N(0, I) without noise, covariance of a given rank; a start of
    Assumption 5.1.
    """
    axes = np.linalg.qr(rng.standard_normal((dim, dim)))[0][:, :rank]
    sigma = (axes * rng.uniform(0.5, 2.0, rank)) @ axes.T
    task = LinearTask(sigma, np.eye(dim), 0.0)
    alpha = float(rng.uniform(0.2, 0.8)) * alpha_limit(task)
    return task, start_block(task, alpha, rng.standard_normal((dim, dim)))


def measure_ends(
    dim: int, rank: int, length: int | None, kind: str, cases: int, rng: np.random.Generator
) -> Rows:
    """The distance of the end of the flow to the printed limit (``flow_limit``; W = I, no noise)
    for random tasks and starts; ``length`` None for infinite prompts, on which softmax and linear
    are alike.
    """
    L = math.inf if length is None else float(length)
    rows = []
    for case in range(cases):
        task, start = random_start(dim, rank, rng)
        flow = gradient_flow(task, start, L, kind, flow_times(1e5, 30))
        limit = flatten(flow_limit(task, start, L))
        size = np.linalg.norm(limit)
        distance = np.linalg.norm(flow.states[-1] - limit) / size
        moved = np.linalg.norm(flow.states[-1] - flatten(start)) / size
        setting = {"dim": dim, "rank": rank, "length": L, "case": case}
        rows.append({"what": "ends", **setting, "distance": distance, "moved": moved})
    return rows


def measure_risks(
    dim: int, rank: int, lengths: list[int], cases: int, rng: np.random.Generator
) -> Rows:
    """The risk of softmax attention where its flow ends, by prompt length; ``zero`` is the risk of
    a layer that answers 0.
    """
    rows = []
    for case in range(cases):
        task, start = random_start(dim, rank, rng)
        place = {"what": "risks", "dim": dim, "rank": rank, "case": case}
        zero = 0.5 * float(torch.trace(task.sigma))
        for length in lengths:
            left = float(risk(task, final_parameters(task, start, length), length))
            rows.append({**place, "length": float(length), "risk": left, "zero": zero})
    return rows


def measure_flows(what: str, rng: np.random.Generator, **settings: Any) -> Rows:
    return (measure_ends if what == "ends" else measure_risks)(**settings, rng=rng)


def end_part(rows: pd.DataFrame, close: float) -> rules.Part:
    """Every flow ends where the printed limit is."""
    distances = {f"flow {i} of {len(rows)}": x for i, x in enumerate(rows["distance"], 1)}
    return need("relative distance to the printed limit", distances, below, close)


def flows_end(tables: Tables, close: float) -> Decision:
    own = tables["flows"]["evidence"]
    moved = own["moved"].to_numpy(float)
    note = f"they moved by {moved.min():.2g} to {moved.max():.2g}"
    return decided(end_part(own, close), x="flow", note=note)


claim("s-24-finite-linear", measure_flows)(flows_end)
claim("s-25-singular", measure_flows)(flows_end)


@claim("s-23-bayes", measure_flows)
def bayes(tables: Tables, close: float, ends: float) -> Decision:
    """The limits of Remark 5.3, and the risk left on L tokens, which goes to that of Bayes, 0."""
    rows = tables["flows"]["evidence"]
    own = rows[rows["what"] == "risks"].assign(share=lambda table: table["risk"] / table["zero"])
    by_case = own.pivot_table(index=["dim", "case"], columns="length", values="share")
    shares, lengths = by_case.to_numpy(float), by_case.columns.to_numpy(float)
    left = {f"task {place}": share for place, share in enumerate(shares[:, -1])}
    return decided(
        need(f"risk left on {lengths[-1]:.0f} tokens", left, below, ends),
        need("its largest step with L", np.diff(shares, axis=1).max(), below, 0.0),
        end_part(rows[rows["what"] == "ends"], close),
        x="task",
    )


# ---- 21: errors after training

MODELS = ("softmax", "linear")
NOISE = 0.1
KEY = ["covariance", "length", "seed"]


@claim("s-21-risks")
def risks(tables: Tables, near: float) -> Decision:
    """The order of the models where flows end, and in the trainings that arrive there, which are
    those within 5 % of the end of the flow.
    """
    flow, final = tables["flow"]["final"], tables["training"]["final"]
    ends = flow.pivot_table(index=["covariance", "length"], columns="model", values="mse")
    gap = ends["softmax"] - ends["linear"]
    over_bayes = ends["linear"] - ends["bayes"]
    steps = gap.groupby("covariance").diff().dropna()
    last = ends[[*MODELS]].groupby("covariance").last()
    final = final.merge(flow, on=["covariance", "length", "model"], suffixes=("", "_flow"))
    final["arrived"] = final["mse"] <= (1 + ABOVE) * final["mse_flow"]
    pairs = final.pivot(index=KEY, columns="model", values=["mse", "stderr", "arrived"])
    fit = pairs[pairs["arrived"].all(axis=1)]
    mse, stderr = fit["mse"].astype(float), fit["stderr"].astype(float)
    half = stats.norm.ppf((1 + rules.LEVEL) / 2) * np.hypot(stderr["softmax"], stderr["linear"])
    value, error = (mse["softmax"] - mse["linear"]) / mse["linear"], half / mse["linear"]
    ratios = {
        f"{covariance}, L = {length}, seed {seed}": Interval(one, one - off, one + off)
        for ((covariance, length, seed), one), off in zip(value.items(), error, strict=True)
    }
    return decided(
        need("softmax above linear after training, share", ratios, above, 0.0),
        need("softmax less linear where flows end, smallest", gap.min(), above, 0.0),
        need("linear less Bayes, smallest", over_bayes.min(), above, 0.0),
        need("largest step of the gap with L", steps.max(), below, 0.0),
        need("error at the largest L", last.to_numpy().max(), below, (1 + near) * NOISE),
        x="training",
        note=f"{len(fit)} of {len(pairs)} trainings reach the end of the flow",
    )


@claim("s-38-anisotropic")
def anisotropic(tables: Tables, more: float) -> Decision:
    ends = tables["flow"]["final"].query("model in @MODELS")
    excess = (ends.set_index(["model", "length", "covariance"])["mse"] - NOISE).unstack()
    ratio = excess["kms:0.5"] / excess["isotropic"]
    return decided(
        need("excess error, anisotropic / isotropic", ratio.to_dict(), above, more),
        x="prompt length L",
        log="x",
        note=f"the ratio lies between {ratio.min():.4f} and {ratio.max():.4f}",
    )


# ---- 22 and 27: the distance of the two models, and which of them fails to train


@claim("s-22-distance")
def weight_distance(tables: Tables) -> Decision:
    """Looks at log ratios of the squared distance after training, from one length to the next, over
    starts with no model stuck. The covariances share their first weights.
    """
    flows, distance = tables["flows"]["flows"], tables["flows"]["distance"]
    arrived = flows.assign(ok=flows["status"] == "ok").groupby(KEY)["ok"].all()
    last = distance.sort_values("time").groupby(KEY)["weights2"].last()
    by_start = np.log(last[arrived.reindex(last.index)]).unstack("length").sort_index(axis=1)
    steps = {}
    for short, long in itertools.pairwise(by_start.columns):
        changes = (by_start[long] - by_start[short]).dropna().groupby(level="seed").mean()
        name = f"L = {short} to {long}, {len(changes)} starts"
        steps[name] = rules.mean_interval(changes) if len(changes) else rules.UNKNOWN
    told = "; ".join(f"{np.exp(step.value):.2g} from {name}" for name, step in steps.items())
    return decided(
        need("log change of the squared distance", steps, below, 0.0),
        x=f"step: {'; '.join(steps)}",
        note=f"factors where neither model is stuck: {told}",
    )


@claim("s-27-stability")
def stability(tables: Tables) -> Decision:
    """Counts for each start which model is stuck in more settings: starts are independent, their
    settings are not.
    """
    table = verdict(tables["flows"]["flows"])
    pooled, settings = table[table["covariance"] == ALL].iloc[0], table[table["covariance"] != ALL]
    linear, softmax = int(pooled["only_linear"]), int(pooled["only_softmax"])
    told = "; ".join(
        f"{row['covariance']}, L = {row['length']}: {row['linear']:.0%} and {row['softmax']:.0%}"
        for row in settings.to_dict("records")
    )
    series = []
    for covariance, own in settings.groupby("covariance", sort=True):
        for model in ("linear", "softmax"):
            shares = own[[model, f"{model}_low", f"{model}_high"]].to_numpy()
            series.append(points(f"{model}, {covariance}", own["length"], shares))
    found = rules.share_of(linear, linear + softmax)
    return decided(
        need("share for linear of the starts that differ", found, above, 0.5),
        picture=Picture("prompt length L", "share of starts that are stuck", series, log="x"),
        note=f"of {pooled['starts']} starts {linear} are stuck in more settings for linear"
        f" attention, {softmax} for softmax; stuck are, of linear and of softmax: {told}",
    )
