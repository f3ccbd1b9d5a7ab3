"""[S] on one attention layer: its limit on infinitely many tokens, how outputs and gradients
approach it and linear attention, the query inside the prompt.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from esscher.intervals import Interval, t_quantile
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.rules import above, below, decided, exponent, grid, inside, line, need, points

COVARIANCES = ("isotropic", "kms:0.5")


# ---- 17: the limit is linear


def measure_limit(
    mean: float, rank: int, dim: int, tokens: int, repeats: int, rng: np.random.Generator
) -> Rows:
    """Attention on many Gaussian tokens compared with V(m + Gamma K^T Q z), for random matrices and
    Gamma of the given rank.

    ``slope``: the factor by which the formula has to be multiplied to fit the outputs best.
    ``spread``: the variance of the outputs of queries from the law of the tokens over that of Lemma
    2.1.
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


def made_limit(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(mean=0.0, rank=4, repeat=range(40))
    rows = rows.assign(slope=rng.normal(slope, 0.02, 40), spread=rng.normal(1, 0.05, 40))
    return {"long": {"evidence": rows}}


@claim("s-17-limit", made_limit, 1.0, 1.1, measure_limit)
def linear_limit(tables: Tables, slope: float, spread: float) -> Decision:
    groups = tables["long"]["evidence"].groupby(["mean", "rank"], sort=True)
    slopes, spreads = (
        {f"mean {m:g}, rank {rank:g}": rules.mean_interval(own[name]) for (m, rank), own in groups}
        for name in ("slope", "spread")
    )
    x = range(len(slopes))
    series = [
        points("slope", x, slopes.values()),
        points("variance of the outputs", x, spreads.values()),
        line("1", x, 1.0),
    ]
    return decided(
        need("slope against the formula", slopes, inside, 1 - slope, 1 + slope),
        need("variance over the lemma's", spreads, inside, 1 - spread, 1 + spread),
        picture=Picture(f"case: {'; '.join(slopes)}", "measured / Lemma 2.1", series),
    )


# ---- 18 to 20: outputs and gradients at the weights that training begins with


def rms_by_length(errors: pd.DataFrame) -> dict[float, Interval]:
    """Root mean squares of stored squared errors, by n."""
    return {
        float(n): rules.each(rules.mean_interval(squared), lambda end: max(end, 0.0) ** 0.5)
        for n, squared in errors.groupby("n", sort=True)["squared"]
    }


def made_concentration(case: tuple[float, float], seed: int) -> Tables:
    """Differences that fall with an exponent, and flat bounds."""
    power, bound = case
    rng = np.random.default_rng(seed)
    names = {"output": "s-16-mended", "gradient_U": "s-gradient-u", "gradient_V": "s-gradient-v"}
    places = {"covariance": COVARIANCES, "n": (10, 100, 1000, 10_000)}
    errors = grid(**places, against=("linear", "limit"), metric=names, repeat=range(32))
    spread = rng.chisquare(40, len(errors)) / 40
    errors["squared"] = errors["n"] ** (-2.0 * power) * spread
    exact = grid(**places, against="linear")
    exact["error"] = exact["n"] ** -power
    bounds = grid(**places, metric=names, rms=bound, exponent=0.01)
    bounds["name"] = bounds["metric"].map(names)
    return {"concentration": {"errors": errors, "exact": exact, "bounds": bounds}}


def bounded(tables: Tables, bounds: dict[str, str]) -> Decision:
    """Errors to the limit against the proved bound of each metric at every length, and exponents
    against the proved ones.
    """
    errors, proved = tables["concentration"]["errors"], tables["concentration"]["bounds"]
    ratios, rates, series = {}, {}, []
    for (metric, name), covariance in itertools.product(bounds.items(), COVARIANCES):
        place = f"covariance == '{covariance}' and metric == '{metric}'"
        own = errors.query(f"{place} and against == 'limit'")
        bound = proved.query(f"{place} and name == '{name}'").sort_values("n")
        found, ceiling = rms_by_length(own), bound["rms"].to_numpy()
        fit, promised = exponent(own.assign(point=0), metric), float(bound["exponent"].iloc[0])
        where = f"{metric}, {covariance}"
        rates[where] = Interval(*(end - promised for end in fit))
        for (n, error), height in zip(found.items(), ceiling, strict=True):
            ratios[f"{where}, L = {n:.0f}"] = Interval(*(end / height for end in error))
        series += [points(where, [*found], found.values())]
        series += [line(f"{name}, {covariance}", [*found], ceiling)]
    return decided(
        need("error / bound", ratios, below, 1.0),
        need("exponent less the proved one", rates, above, 0.0),
        picture=Picture("prompt length L", "root mean square error", series, log="xy"),
    )


claim("s-18-outputs", made_concentration, (0.5, 100.0), (0.1, 0.2))(bounded)
claim("s-19-gradients", made_concentration, (0.5, 100.0), (0.1, 0.2))(bounded)


@claim("s-20-near-linear", made_concentration, (0.5, 100.0), (0.05, 100.0))
def nears_linear(tables: Tables, fall: float) -> Decision:
    errors, exact = tables["concentration"]["errors"], tables["concentration"]["exact"]
    series, falls, rises = [], {}, {}
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
            series.append(points(where, [*drawn], found))
    y = "softmax minus linear attention, rms"
    return decided(
        need("last difference / first", falls, below, fall),
        need("rise from one length to the next beyond the intervals", rises, below, 0.0),
        picture=Picture("prompt length L", y, series, log="xy"),
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


def made_conventions(power: float, seed: int) -> Tables:
    outer, inner = ({(point, "l2"): value for point in range(2)} for value in (0.5, power))
    return {
        "outside": {"errors": rules.made_errors(outer, seed, repeats=200)},
        "inside": {"errors": rules.made_errors(inner, seed + 1, repeats=200)},
    }


@claim("s-26-query-inside", made_conventions, 0.5, 0.35)
def query_inside(tables: Tables, same: float) -> Decision:
    gaps, series, told = {}, [], []
    for point in sorted(tables["inside"]["errors"]["point"].unique()):
        both = [tables[name]["errors"].query(f"point == {point}") for name in ("inside", "outside")]
        gaps[f"point {point}"] = exponent_gap(*both)
        told.append(" and ".join(f"{exponent(own, 'l2', int(point)).value:.3f}" for own in both))
        for name, own in zip(("inside", "outside"), both, strict=True):
            found = rms_by_length(own)
            series.append(points(f"{name}, point {point}", [*found], found.values()))
    return decided(
        need("exponent inside minus outside", gaps, inside, -same, same),
        picture=Picture("tokens n", "root mean square error", series, log="xy"),
        note=f"exponents inside and outside, by horizon: {'; '.join(told)}",
    )
