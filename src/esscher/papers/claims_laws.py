"""Rules of the claims on laws of tokens. [B]: rates below 1/2 at high coupling, the proved bound,
the fall with the scale of the scores, the uniform error over a ball, tokens of bounded support,
hardmax. Ours and theory: the law of the error at one query (normal in the limit, its variance
bounded, its size chi-squared), the exponents of the random energy model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats

from esscher.attention.head import Head
from esscher.errors.exact import delta_covariance, exact_curve
from esscher.errors.gaussian import gaussian_error
from esscher.intervals import Interval
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.rotational import Sphere
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.claims_heads import fall_with_scale
from esscher.papers.rules import above, below, decided, exponent, inside, line, need, points
from esscher.theory.bohbot import hardmax_mean_abs_asymptotic
from esscher.theory.sharp import delta_bound, delta_bound_numbers, l2_exponent_rms

Floats = npt.NDArray[np.float64]
MOMENTS = ("mean", "cov")


def fitted_rates(tables: Any) -> Rows:
    """The points of a sweep in the order of the coupling, each with its fitted exponent."""
    rows = tables["rates"].to_dict("records")
    for row in rows:
        row["fit"] = exponent(tables["errors"], row["metric"], row["point"])
    return sorted(rows, key=lambda row: row["coupling"])


# ---- 1, 2 and 37: the sweep of [B]


def place(row: Mapping[str, Any]) -> str:
    return f"{row['metric']} at coupling {row['coupling']:.3g}"


def sweep_picture(rows: Rows) -> Picture:
    series = []
    for metric in MOMENTS:
        own = [row for row in rows if row["metric"] == metric]
        x = [row["coupling"] for row in own]
        series.append(points(f"{metric}, measured", x, [row["fit"] for row in own]))
    series.append(line("1/(2(1 + 32 Psi)), proved", x, [row["bohbot"] for row in own]))
    tried = [row["bohbot_experimental"] for row in own]
    series.append(line("1/(2(1 + Psi)), experimental of [B]", x, tried))
    series.append(line("1/2", x, 0.5))
    return Picture("coupling Psi", "exponent", series, log="x")


@claim("b-1-sub-parametric")
def sub_parametric(tables: Tables) -> Decision:
    rows = fitted_rates(tables["sweep"])
    fits = {row["metric"]: row["fit"] for row in rows if row["point"] == rows[-1]["point"]}
    what = f"exponent at coupling {rows[-1]['coupling']:.3g}"
    return decided(need(what, fits, below, 0.5), picture=sweep_picture(rows))


@claim("b-2-proved-rate")
def proved_rate(tables: Tables, least: float) -> Decision:
    rows = fitted_rates(tables["sweep"])
    ratios = {place(row): Interval(*(end / row["bohbot"] for end in row["fit"])) for row in rows}
    tops = {name: ratio.high for name, ratio in ratios.items()}
    return decided(
        need("upper end of the interval / bound", tops, above, 1.0),
        need("exponent / bound", ratios, above, least),
        picture=sweep_picture(rows),
    )


@claim("b-37-equality")
def equality(tables: Tables, near: float) -> Decision:
    rows = fitted_rates(tables["sweep"])
    gaps = {
        place(row): Interval(*(end - row["bohbot_experimental"] for end in row["fit"]))
        for row in rows
    }
    return decided(
        need("exponent less 1/(2(1 + Psi))", gaps, inside, -near, near),
        picture=sweep_picture(rows),
    )


# ---- 3: scores multiplied by alpha


@claim("b-3-falls-with-scale")
def falls_with_scale(tables: Tables, law: float, fall: float) -> Decision:
    """Between the smallest and the largest alpha, nowhere a rise; the experimental formula of [B]
    is drawn beside it.
    """
    rows = fitted_rates(tables["ablation"])
    fits, x = [row["fit"] for row in rows], np.array([row["coupling"] for row in rows])
    rises = max(after.low - before.high for before, after in itertools.pairwise(fits))
    paper = 1 / (2 * (1 + x))
    distance = np.mean(np.abs([fit.value for fit in fits] - paper))
    series = [
        points("mean, measured", x, fits),
        line("1/(2(1 + Psi)), experimental of [B]", x, paper),
    ]
    return decided(
        need("fall of the exponent", rules.difference(fits[0], fits[-1]), above, law),
        need("rise between two alphas beyond the intervals", rises, below, 0.0),
        need("fall over heads of MiniLM", fall_with_scale(tables["heads"]["scales"]), above, fall),
        picture=Picture("coupling Psi = alpha^2", "exponent", series, log="x"),
        note=f"mean distance to 1/(2(1 + Psi)) is {distance:.3f}",
    )


# ---- 4: Gaussian tokens, uniformly over a ball of queries

HORIZON, EDGE_DIM = 0.7, 2


def measure_edge(largest: float, rng: np.random.Generator) -> Rows:
    """Exact root mean square errors at queries of length R, for n so large that sqrt(n) times them
    no longer changes; nothing is drawn.
    """
    rows, n = [], 10**15
    for radius in np.arange(0.5, largest + 0.1, 0.5):
        f1, f2 = gaussian_error(n, HORIZON * radius)
        rows.append(
            {"radius": float(radius), "n": float(n), "rms": math.sqrt(f1 + (EDGE_DIM - 1) * f2)}
        )
    return rows


@claim("b-4-uniform", measure_edge)
def uniform(tables: Tables, half: list[float], few: float, most: float) -> Decision:
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
        need(f"ln C(R) per R^2 H^2, to R = {x.max():g}", late / HORIZON**2, below, most),
        need("growth of ln C(R) per R^2, late / early", late / early, above, 0.5),
        need("exponent", fits, inside, *half),
        need("uniform error / error of a query on the edge", ratios, below, few),
        picture=Picture("radius R", "constant C(R)", series, log="y"),
    )


# ---- 5: tokens of bounded support


def measure_support(square: int, rng: np.random.Generator) -> Rows:
    """Root mean square errors for tokens at -r and r on the line, r^2 = ``square``, the chance p of
    r from e^-14 to 1/2: exact sums over the binomial number k of tokens at r among n. A = V = 1:
    at x the error is that of r tanh(r x + ln(k/(n-k))/2) against r tanh(r x + ln(p/(1-p))/2), and
    the uniform one that of the worst |x| <= r; the moment is the mean output of the tokens.
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


@claim("b-5-support", measure_support)
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


@claim("b-6-hardmax")
def hardmax(tables: Tables, near: list[float], level: list[float]) -> Decision:
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
        need("ratio to the asymptote", last, inside, *near),
        need(f"its change from n = {n[len(n) // 2]:.0f}", changed, inside, *level),
        picture=Picture("tokens n", "E|mean output|", series, log="x"),
    )


# ---- 28 to 30: the law of the error at one query

EYE = torch.eye(2, dtype=torch.float64)
HEAD = Head(EYE, EYE)
QUERY = torch.tensor([[0.7, 0.0]], dtype=torch.float64)
LAWS: dict[str, Measure] = {
    "gaussian": Gaussian(EYE),
    "sphere": Sphere(2, 2.0**0.5),
    "mixture": Mixture([0.8, 0.2], [Gaussian(0.5 * EYE), Gaussian(EYE, [1.0, 1.0])]),
}


def measure_draws(law: str, n: int, repeats: int, rng: np.random.Generator) -> Rows:
    """A row for each prompt of n tokens: the squared error, one coordinate of the error in units of
    its deviation, ``size`` = n (Gamma_n - Gamma)^T C^-1 (Gamma_n - Gamma), C the delta method's
    covariance, ``own_size`` with the plug-in covariance of the prompt for C/n, and the proved
    ``bound`` on the mean square.
    """
    known = LAWS[law]
    limit, C = known.tilted_mean(QUERY)[0].numpy(), delta_covariance(HEAD, known, QUERY)[0].numpy()
    bound = float(delta_bound([n], **delta_bound_numbers(HEAD, known, QUERY[0]))[0])
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    rows: Rows = []
    while len(rows) < repeats:
        count = min(max(1, 1_000_000 // n), repeats - len(rows))
        y = known.sample(count * n, generator).double().reshape(count, n, 2).numpy()
        p = np.exp(y @ QUERY[0].numpy())
        p /= p.sum(axis=1, keepdims=True)
        out = np.einsum("rn,rnd->rd", p, y)
        weighted = (y - out[:, None]) * p[:, :, None]
        plug_in = weighted.transpose(0, 2, 1) @ weighted
        error = out - limit
        columns = {
            "squared": (error**2).sum(axis=1),
            "coordinate": np.sqrt(n / C[0, 0]) * error[:, 0],
            "size": n * (error * np.linalg.solve(C, error.T).T).sum(axis=1),
            "own_size": (error * np.linalg.solve(plug_in, error[:, :, None])[:, :, 0]).sum(axis=1),
        }
        rows += pd.DataFrame(columns).assign(law=law, n=n, bound=bound).to_dict("records")
    return rows


def kolmogorov(values: pd.Series[float], law: Any) -> Interval:
    """Kolmogorov's distance of a sample to a law, with the interval of Dvoretzky, Kiefer, Wolfowitz
    and Massart.
    """
    found = float(stats.kstest(values.to_numpy(float), law.cdf).statistic)
    half = float(np.sqrt(np.log(2 / (1 - rules.LEVEL)) / (2 * len(values))))
    return Interval(found, max(found - half, 0.0), found + half)


def by_law(tables: Tables, estimate: Callable[[pd.DataFrame], Any]) -> dict[Any, Any]:
    """An estimate from the draws of each law and n."""
    groups = tables["draws"]["evidence"].groupby(["law", "n"], sort=True)
    return {(str(law), float(n)): estimate(part) for (law, n), part in groups}


def at_last(found: dict[Any, Any]) -> dict[str, Interval]:
    """Estimates at the largest n, by law."""
    last = max(n for _, n in found)
    return {law: one for (law, n), one in found.items() if n == last}


@claim("t-28-normality", measure_draws)
def normality(tables: Tables, distance: float) -> Decision:
    found = by_law(tables, lambda part: kolmogorov(part["coordinate"], stats.norm()))
    series = [*rules.series_of(found), line("rule", sorted({n for _, n in found}), distance)]
    return decided(
        need("distance at the largest n", at_last(found), below, distance),
        picture=Picture("tokens n", "distance to the normal law", series, log="xy"),
    )


@claim("t-29-variance")
def variance(tables: Tables) -> Decision:
    found = by_law(tables, lambda own: rules.mean_interval(own["squared"] / own["bound"]))
    return decided(
        need("mean square / bound", found, below, 1.0),
        x="tokens n",
        log="x",
    )


@claim("t-30-chi-squared")
def chi_squared(tables: Tables, covered: list[float], distance: float) -> Decision:
    chi, nominal = stats.chi2(2), 0.95
    covers = by_law(
        tables, lambda own: rules.share_of((own["own_size"] <= chi.ppf(nominal)).sum(), len(own))
    )
    apart = by_law(tables, lambda own: kolmogorov(own["size"], chi))
    series = [*rules.series_of(covers), line("nominal", sorted({n for _, n in covers}), nominal)]
    return decided(
        need("share covered by regions of 95 %", at_last(covers), inside, *covered),
        need("distance to the chi-squared law", at_last(apart), below, distance),
        picture=Picture("tokens n", "share covered", series, log="x"),
    )


# ---- 32: sharp exponents


def measure_slopes(dim: int, horizon: float, rng: np.random.Generator) -> Rows:
    """Exact root mean square errors over Gaussian queries, from 10^2 to 10^15 tokens; nothing is
    drawn.
    """
    eye = torch.eye(dim, dtype=torch.float64)
    n = [10**power for power in range(2, 16)]
    curve = exact_curve(Head(horizon * eye, eye), Gaussian(eye), Gaussian(eye), n)
    return [
        {"dim": dim, "horizon": horizon, "n": float(size), "rms": float(rms)}
        for size, rms in zip(n, curve.rms, strict=True)
    ]


@claim("o-32-sharp", measure_slopes)
def sharp_exponents(tables: Tables, gap: float) -> Decision:
    """Compares slopes over the last decade with the exponent; those between 10^3 and 10^4 say what
    is seen in practice.
    """
    rows = []
    for (dim, horizon), own in tables["slopes"]["evidence"].groupby(["dim", "horizon"], sort=True):
        own = own.sort_values("n")
        local = -np.diff(np.log(own["rms"])) / np.diff(np.log(own["n"]))
        usual = local[list(own["n"]).index(1e3)]
        rows.append((int(dim), horizon, local[-1], usual, l2_exponent_rms(float(horizon))))
    found = pd.DataFrame(rows, columns=["dim", "horizon", "last", "usual", "sharp"])
    ratios, usual = (found[name] / found["sharp"] for name in ("last", "usual"))
    told = []
    for when, ratio in (("over the last decade", ratios), ("from 10^3 to 10^4", usual)):
        far = found["horizon"][(ratio - 1).abs() > gap]
        where = f"horizons {far.min():g} to {far.max():g}" if len(far) else "no horizon"
        told.append(f"{when} {ratio.min():.2f} to {ratio.max():.2f}, too far at {where}")
    places = (f"d = {dim}" for dim in found["dim"])
    last = dict(zip(zip(places, found["horizon"], strict=True), ratios, strict=True))
    return decided(
        need("slope / b over the last decade", last, inside, 1 - gap, 1 + gap),
        x="two-sided horizon h",
        note=f"slope / b: {'; '.join(told)}",
    )
