"""[B] on laws of tokens: rates below 1/2 at high coupling, the proved bound, the fall with the
scale of the scores, the uniform error over a ball, tokens of bounded support, hardmax.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from esscher.errors.gaussian import gaussian_error
from esscher.intervals import Interval
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.claims_heads import fall_with_scale, made_heads
from esscher.papers.rules import above, below, decided, exponent, grid, inside, line, need, points
from esscher.theory.bohbot import hardmax_mean_abs_asymptotic

MOMENTS = ("mean", "cov")


def fitted_rates(tables: Any) -> Rows:
    """The points of a sweep in the order of the coupling, each with its fitted exponent."""
    rows = tables["rates"].to_dict("records")
    for row in rows:
        row["fit"] = exponent(tables["errors"], row["metric"], row["point"])
    return sorted(rows, key=lambda row: row["coupling"])


# ---- 1 and 2: the sweep of [B]


def sweep_picture(rows: Rows) -> Picture:
    series = []
    for metric in MOMENTS:
        own = [row for row in rows if row["metric"] == metric]
        x = [row["coupling"] for row in own]
        series.append(points(f"{metric}, measured", x, [row["fit"] for row in own]))
    series.append(line("1/(2(1 + 32 Psi)), proved", x, [row["bohbot"] for row in own]))
    series.append(line("1/2", x, 0.5))
    return Picture("coupling Psi", "exponent", series, log="x")


def made_sweep(exponents: tuple[float, float], seed: int) -> Tables:
    """Two points, at low and at high coupling, whose errors fall with these exponents."""
    rows = grid(point=(0, 1), metric=MOMENTS)
    rows["coupling"] = rows["point"].map({0: 0.001, 1: 10.0})
    rows["bohbot"] = rows["point"].map({0: 0.49, 1: 0.3})
    chosen = {(point, metric): exponents[point] for point in (0, 1) for metric in MOMENTS}
    return {"sweep": {"rates": rows, "errors": rules.made_errors(chosen, seed)}}


@claim("b-1-sub-parametric", made_sweep, (0.5, 0.3), (0.5, 0.55))
def sub_parametric(tables: Tables) -> Decision:
    rows = fitted_rates(tables["sweep"])
    fits = {row["metric"]: row["fit"] for row in rows if row["point"] == rows[-1]["point"]}
    what = f"exponent at coupling {rows[-1]['coupling']:.3g}"
    return decided(need(what, fits, below, 0.5), picture=sweep_picture(rows))


@claim("b-2-proved-rate", made_sweep, (0.5, 0.4), (0.5, 0.1))
def proved_rate(tables: Tables, slack: float) -> Decision:
    rows = fitted_rates(tables["sweep"])
    gaps = {
        f"{row['metric']} at coupling {row['coupling']:.3g}": Interval(
            *(end - row["bohbot"] for end in row["fit"])
        )
        for row in rows
    }
    broken = sum(gap.high < 0 for gap in gaps.values())
    note = f"{broken} of {len(gaps)} measured exponents lie below the proved one"
    part = need("distance above the bound", gaps, above, -slack)
    return decided(part, picture=sweep_picture(rows), note=note)


# ---- 3: scores multiplied by alpha


def made_ablation(exponents: tuple[float, ...], seed: int) -> Tables:
    """Errors of one law, and 72 heads whose exponents fall as much."""
    rng = np.random.default_rng(seed)
    chosen = {(point, "mean"): power for point, power in enumerate(exponents)}
    rows = grid(point=range(len(exponents)), metric="mean")
    scales = [
        made_heads(72).assign(scale=point, beta_fit=rng.normal(power, 0.01, 72))
        for point, power in enumerate(exponents)
    ]
    rates = rows.assign(coupling=10.0 ** rows["point"])
    own = {"rates": rates, "errors": rules.made_errors(chosen, seed)}
    return {"ablation": own, "heads": {"scales": pd.concat(scales)}}


@claim("b-3-falls-with-scale", made_ablation, (0.5, 0.4, 0.2), (0.5, 0.5, 0.5))
def falls_with_scale(tables: Tables, fall: float) -> Decision:
    """Between the smallest and the largest alpha, nowhere a rise; the experimental formula of [B]
    is drawn beside it.
    """
    rows = fitted_rates(tables["ablation"])
    fits, x = [row["fit"] for row in rows], np.array([row["coupling"] for row in rows])
    value = fits[0].value - fits[-1].value
    half = math.hypot(*(end.high - end.low for end in (fits[0], fits[-1]))) / 2
    rises = max(after.low - before.high for before, after in itertools.pairwise(fits))
    paper = 1 / (2 * (1 + x))
    distance = np.mean(np.abs([fit.value for fit in fits] - paper))
    series = [
        points("mean, measured", x, fits),
        line("1/(2(1 + Psi)), experimental of [B]", x, paper),
    ]
    return decided(
        need("fall of the exponent", Interval(value, value - half, value + half), above, 0.1),
        need("rise between two alphas beyond the intervals", rises, below, 0.0),
        need("fall over heads of MiniLM", fall_with_scale(tables["heads"]["scales"]), above, fall),
        picture=Picture("coupling Psi = alpha^2", "exponent", series, log="x"),
        note=f"mean distance to 1/(2(1 + Psi)) is {distance:.3f}",
    )


# ---- 4: Gaussian tokens, uniformly over a ball of queries

HORIZON, DIM = 0.7, 2


def measure_edge(largest: float, rng: np.random.Generator) -> Rows:
    """Exact root mean square errors at queries of length R, for n so large that sqrt(n) times them
    no longer changes; nothing is drawn.
    """
    rows, n = [], 10**15
    for radius in np.arange(0.5, largest + 0.1, 0.5):
        f1, f2 = gaussian_error(n, HORIZON * radius)
        rows.append({"radius": float(radius), "n": float(n), "rms": math.sqrt(f1 + (DIM - 1) * f2)})
    return rows


def made_uniform(case: tuple[float, bool], seed: int) -> Tables:
    """Uniform errors with an exponent, and constants like exp(R^2/4) or like a power of R."""
    power, polynomial = case
    radius = np.arange(0.5, 6.1, 0.5)
    constant = (1 + radius) ** 2 if polynomial else np.exp(radius**2 / 4)
    edge = pd.DataFrame({"radius": radius, "n": 1e15, "rms": constant / math.sqrt(1e15)})
    errors = rules.made_errors({(point, "uniform"): power for point in range(3)}, seed)
    rates = pd.DataFrame({"point": [0, 1, 2], "value": [0.5, 1.0, 1.5]})
    return {"balls": {"errors": errors, "rates": rates}, "edge": {"evidence": edge}}


@claim("b-4-uniform", made_uniform, (0.5, False), (0.3, True), measure_edge)
def uniform(tables: Tables, half: list[float], few: float) -> Decision:
    """Exponents of the uniform error, its constant over that of one query, and how the latter grows
    with R: if it were a power of R, late growth would be small against early.
    """
    errors, edge = tables["balls"]["errors"], tables["edge"]["evidence"].sort_values("radius")
    x, constant = edge["radius"].to_numpy(float), (np.sqrt(edge["n"]) * edge["rms"]).to_numpy(float)
    fits, found, ratios = {}, {}, {}
    for point, radius in tables["balls"]["rates"][["point", "value"]].itertuples(index=False):
        own = errors[(errors["point"] == point) & (errors["n"] == errors["n"].max())]
        square = rules.mean_interval(own["squared"])
        size = rules.each(square, lambda end: math.sqrt(max(end, 0.0) * errors["n"].max()))
        exact, name = float(constant[x == radius][0]), f"R = {radius:g}"
        fits[name], found[radius] = exponent(errors, "uniform", int(point)), size
        ratios[name] = Interval(*(end / exact for end in size))
    middle = len(x) // 2
    early, late = (
        math.log(constant[b] / constant[a]) / (x[b] ** 2 - x[a] ** 2)
        for a, b in ((0, middle), (middle, -1))
    )
    series = [
        points("sqrt(n) times the uniform error", [*found], found.values()),
        line("one query on the edge, exact", x, constant),
    ]
    return decided(
        need("growth of ln C(R) per R^2, late / early", late / early, above, 0.5),
        need("exponent", fits, inside, *half),
        need("uniform error / error of a query on the edge", ratios, below, few),
        picture=Picture("radius R", "constant C(R)", series, log="y"),
        note=f"ln C(R) of a query on the edge grows by {late:.3f} a unit of R^2, to R = {x.max():g}"
        f"; H^2/2 = {HORIZON**2 / 2:.3f}, half of what exp(R^2 H^2) allows",
    )


# ---- 5: tokens of bounded support


def measure_support(square: int, rng: np.random.Generator) -> Rows:
    """Root mean square errors for tokens at -r and r on the line, r^2 = ``square``, the chance p of
    r from e^-14 to 1/2. They are exact sums over the binomial number k of tokens at r among n.

    A = V = 1: at the query x the error is that of r tanh(r x + ln(k/(n-k))/2) against r tanh(r x +
    ln(p/(1-p))/2). The uniform error takes the worst |x| <= r; the moment is the mean output of the
    tokens themselves.
    """
    r = math.sqrt(square)
    x = np.linspace(-r, r, 41)
    rows = []
    for log_p in np.linspace(-14.0, math.log(0.5), 28):
        p = math.exp(log_p)
        target = r * np.tanh(r * x + 0.5 * math.log(p / (1 - p)))
        # with 100 tokens at r the rate 1/2 is there
        for n in np.unique(np.geomspace(4, 100 / p, 16).astype(int)):
            # counts outside have a chance below 1e-12 together
            low, high = stats.binom.ppf([1e-13, 1 - 1e-13], n, p)
            k = np.arange(max(low, 0), min(high, n) + 1)
            chance = stats.binom.pmf(k, n, p)
            with np.errstate(divide="ignore"):
                log_odds = 0.5 * (np.log(k) - np.log(n - k))
            out = r * np.tanh(r * x + log_odds[:, None])
            worst = np.abs(out - target).max(axis=1)
            mean = (k * out[:, -1] + (n - k) * out[:, 0]) / n
            away = mean - (p * target[-1] + (1 - p) * target[0])
            for what, error in (("uniform", worst), ("mean", away)):
                place = {"square": float(square), "p": p, "n": float(n), "what": what}
                rows.append({**place, "rms": math.sqrt(chance @ error**2)})
    return rows


def made_support(growth: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(square=range(1, 6), what=("uniform", "mean"), n=(10.0, 1e3, 1e5))
    uniform, mean = np.exp(growth * rows["square"]), np.sqrt(rows["square"])
    size = np.where(rows["what"] == "uniform", uniform, mean) * rng.uniform(0.99, 1, len(rows))
    return {"supports": {"evidence": rows.assign(rms=size / np.sqrt(rows["n"]))}}


@claim("b-5-support", made_support, 1.0, 0.1, measure_support)
def support(tables: Tables, exponential: float, polynomial: float) -> Decision:
    """C(r) is the largest sqrt(n) times the error over laws of this support and n; the rule looks
    at its growth in r^2 and in ln r.
    """
    rows = tables["supports"]["evidence"]
    scaled = np.sqrt(rows["n"]) * rows["rms"]
    largest = scaled.groupby([rows["what"], rows["square"]], sort=True).max()
    square = largest["uniform"].index.to_numpy(float)
    half = len(square) // 2
    uniform, mean = (np.log(largest[what].to_numpy(float)) for what in ("uniform", "mean"))
    growth = float((uniform[-1] - uniform[half]) / (square[-1] - square[half]))
    power = float((mean[-1] - mean[half]) / (0.5 * np.log(square[-1] / square[half])))
    series = [
        points(f"{what}, worst law", np.sqrt(square), largest[what]) for what in ("uniform", "mean")
    ]
    return decided(
        need("growth of ln C per r^2, uniform", growth, above, exponential),
        need("growth of ln C per ln r, mean output", power, below, polynomial),
        picture=Picture("radius r of the support", "largest sqrt(n) times error", series, log="y"),
        note="the law that is worst for r depends on r: for one law both grow like a power",
    )


# ---- 6: hardmax


def made_hardmax(power: float, seed: int) -> Tables:
    """Absolute means that follow the asymptote times n^-power."""
    rng = np.random.default_rng(seed)
    rows = grid(n=(100, 316, 1000, 3162, 10000, 31623, 100000), repeat=range(400))
    size = hardmax_mean_abs_asymptotic(rows["n"].to_numpy()) * (rows["n"] / 100) ** -power
    return {"hardmax": {"errors": rows.assign(squared=(size * rng.gamma(4, 0.25, len(rows))) ** 2)}}


@claim("b-6-hardmax", made_hardmax, 0.0, 0.3)
def hardmax(tables: Tables) -> Decision:
    """E|mean| sqrt(ln n) has to be level and near ln 4 / (2 sqrt 2): after a power law it would
    fall by a factor, after a constant rise. Corrections are of order 1/ln n.
    """
    by_n = tables["hardmax"]["errors"].groupby("n", sort=True)["squared"]
    n = np.array([float(size) for size, _ in by_n])
    found = np.array([rules.mean_interval(np.sqrt(squared)) for _, squared in by_n])
    theory = hardmax_mean_abs_asymptotic(n)
    ratios = [Interval(*map(float, row)) for row in found / theory[:, None]]
    last, middle = ratios[-1], ratios[len(n) // 2]
    change = last.value / middle.value
    error = sum((end.high - end.low) / 2 / end.value for end in (last, middle))
    changed = Interval(change, change - error, change + error)
    series = [points("measured", n, found), line("ln 4/(2 sqrt(2 ln n))", n, theory)]
    return decided(
        need("ratio to the asymptote", last, inside, 0.85, 1.15),
        need(f"its change from n = {n[len(n) // 2]:.0f}", changed, inside, 0.7, 1.4),
        picture=Picture("tokens n", "E|mean output|", series, log="x"),
    )
