"""[S] on one attention layer: its limit, how outputs and gradients near it and linear attention,
the query in the prompt.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from esscher.convergence.montecarlo.spec import ExperimentSpec
from esscher.icl.concentration.spec import ConcentrationSpec
from esscher.intervals import t_quantile
from esscher.reproduce.claim import Claim, Decision, Picture, Rows, Scale, Series, Tables
from esscher.reproduce.decide import LEVEL, above, all_of, below, fitted, inside, mean_interval
from esscher.reproduce.evidence import EvidenceSpec
from esscher.reproduce.made import made_errors
from esscher.runs import RunSpec

__all__ = ["CLAIMS"]

COVARIANCES = ("isotropic", "kms:0.5")


# ---- 17: the limit is linear
# ----------------------------------------------------------------------------------------------

SLOPE, SPREAD = 0.03, 0.1  # how far from 1 the ratios may be, with their intervals


def long_prompts(scale: Scale, seed: int) -> dict[str, RunSpec]:
    tokens, repeats = (10_000, 60) if scale == "quick" else (100_000, 200)
    cases = ({"mean": 0.0, "rank": 4}, {"mean": 1.0, "rank": 4}, {"mean": 1.0, "rank": 2})
    parts = tuple({**case, "dim": 4, "tokens": tokens, "repeats": repeats} for case in cases)
    return {"long": EvidenceSpec(claim="s-17-limit", parts=parts, seed=seed)}


def measure_limit(
    mean: float, rank: int, dim: int, tokens: int, repeats: int, rng: np.random.Generator
) -> Rows:
    """Attention on many Gaussian tokens beside V(m + Gamma K^T Q z), with random matrices; Gamma
    has the rank given.

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
        rows.append(
            {
                "mean": mean,
                "rank": rank,
                "repeat": repeat,
                "slope": slope,
                "spread": (away**2).sum(1).mean() / variance,
            }
        )
    return rows


def decide_limit(tables: Tables) -> Decision:
    found = tables["long"]["evidence"]
    rows = []
    for (mean, rank), own in found.groupby(["mean", "rank"], sort=True):
        rows.append(
            (
                f"mean {mean:g}, rank {rank:g}",
                mean_interval(own["slope"]),
                mean_interval(own["spread"]),
            )
        )
    verdict = all_of(
        verdict
        for _, slope, spread in rows
        for verdict in (
            inside(*slope[1:], 1 - SLOPE, 1 + SLOPE),
            inside(*spread[1:], 1 - SPREAD, 1 + SPREAD),
        )
    )
    _, worst, _ = max(rows, key=lambda row: abs(row[1][0] - 1))
    told = "; ".join(
        f"{name}: slope {slope[0]:.4f}, variance {spread[0]:.3f}" for name, slope, spread in rows
    )
    place = list(range(len(rows)))
    series = (
        Series.of("slope", place, (slope for _, slope, _ in rows)),
        Series.of("variance of the outputs", place, (spread for _, _, spread in rows)),
    )
    picture = Picture(
        "case", "measured / Lemma 2.1", (*series, Series("1", place, [1.0] * len(rows), line=True))
    )
    return Decision(
        verdict, "slope furthest from 1", *worst, f"ratios to the formula: {told}", picture
    )


def made_limit(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = [
        {
            "mean": 0.0,
            "rank": 4,
            "repeat": i,
            "slope": slope + 0.02 * rng.standard_normal(),
            "spread": rng.normal(1, 0.05),
        }
        for i in range(40)
    ]
    return {"long": {"evidence": pd.DataFrame(rows)}}


# ---- 18 to 20: outputs and gradients at the weights that training begins with
# ---------------------------------------------


def concentration(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """The experiment of Figures 1 and 5 of [S], dimension 5."""
    quick = scale == "quick"
    lengths = (
        (10, 100, 1000, 10_000)
        if quick
        else (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
    )
    spec = ConcentrationSpec(
        covariances=COVARIANCES, lengths=lengths, prompts=128 if quick else 512, seed=seed
    )
    return {"concentration": spec}


def mean_squares(errors: pd.DataFrame, against: str, metric: str, covariance: str) -> pd.DataFrame:
    """Mean square differences by n, with intervals: columns n, value, low, high."""
    own = errors[
        (errors["against"] == against)
        & (errors["metric"] == metric)
        & (errors["covariance"] == covariance)
    ]
    rows = [(n, *mean_interval(part["squared"])) for n, part in own.groupby("n", sort=True)]
    return pd.DataFrame(rows, columns=["n", "value", "low", "high"])


def decide_bounded(bounds: dict[str, str], tables: Tables) -> Decision:
    """Errors to the limit against the proved bound of each metric, at every length; exponents
    against the proved ones.
    """
    errors, proved = tables["concentration"]["errors"], tables["concentration"]["bounds"]
    parts, gaps, rates = [], [], []
    series: list[Series] = []
    for metric, name in bounds.items():
        for covariance in COVARIANCES:
            own = proved[
                (proved["metric"] == metric)
                & (proved["name"] == name)
                & (proved["covariance"] == covariance)
            ]
            own = own.sort_values("n")
            found, ceiling = (
                mean_squares(errors, "limit", metric, covariance),
                own["rms"].to_numpy(),
            )
            value, low, high = (
                np.sqrt(np.maximum(found[end], 0.0)).to_numpy() for end in ("value", "low", "high")
            )
            gaps += list(zip(value / ceiling, low / ceiling, high / ceiling, strict=True))
            chosen = errors[
                (errors["covariance"] == covariance) & (errors["against"] == "limit")
            ].assign(point=0)
            fit = fitted(chosen, metric)
            rates.append((fit.exponent, float(own["exponent"].iloc[0])))
            parts += [below(lower, upper, 1.0) for _, lower, upper in gaps[-len(found) :]]
            parts.append(above(*fit.interval, float(own["exponent"].iloc[0])))
            series += [
                Series(f"{metric}, {covariance}", found["n"].to_numpy(float), value, low, high),
                Series(f"{name}, {covariance}", found["n"].to_numpy(float), ceiling, line=True),
            ]
    worst = float(max(gaps)[0]), float(max(gaps)[1]), float(max(gaps)[2])
    slowest, promised = min(rates)
    reason = (
        f"at every L errors are below the bound, by a factor of {1 / worst[0]:.3g} or more; the"
        f" smallest exponent measured is {slowest:.3f} where {promised:.2g} is proved"
        if worst[2] < 1
        else f"an error is {worst[0]:.3g} times its bound"
    )
    picture = Picture("prompt length L", "root mean square error", tuple(series), log="xy")
    return Decision(all_of(parts), "largest error / bound", *worst, reason, picture)


# what Figures 1 and 5 show, and the tables that have it
FIGURE = {"output": "errors", "risk_gradient": "exact"}
FALL = 0.1


def decide_nears_linear(tables: Tables) -> Decision:
    errors, exact = tables["concentration"]["errors"], tables["concentration"]["exact"]
    series, falls, parts = [], [], []
    for covariance in COVARIANCES:
        drawn = mean_squares(errors, "linear", "output", covariance)
        known = exact[
            (exact["covariance"] == covariance) & (exact["against"] == "linear")
        ].sort_values("n")
        values = [
            np.sqrt(np.maximum(drawn[end], 0.0)).to_numpy() for end in ("value", "low", "high")
        ]
        for what, (value, low, high) in (
            ("output", values),
            ("risk gradient", [known["error"].to_numpy()] * 3),
        ):
            rises = bool((low[1:] > high[:-1]).any())
            falls.append((value[-1] / value[0], low[-1] / high[0], high[-1] / low[0]))
            parts.append("refuted" if rises else below(*falls[-1][1:], FALL))
            series.append(
                Series(f"{what}, {covariance}", drawn["n"].to_numpy(float), value, low, high)
            )
    value, low, high = map(float, max(falls))
    n = drawn["n"].to_numpy()
    reason = (
        f"from L = {n[0]} to {n[-1]} the differences fall to between {min(falls)[0]:.2g} and"
        f" {value:.2g} of themselves"
    )
    picture = Picture(
        "prompt length L", "softmax minus linear attention, rms", tuple(series), log="xy"
    )
    return Decision(
        all_of(parts), "last difference / first, the largest", value, low, high, reason, picture
    )


def made_concentration(exponent: float, bound: float, seed: int) -> Tables:
    """Differences that fall with this exponent, and flat bounds."""
    rng = np.random.default_rng(seed)
    lengths = (10, 100, 1000, 10_000)
    keys = [(covariance, n) for covariance in COVARIANCES for n in lengths]
    size = {n: float(n) ** -exponent for n in lengths}
    metrics = ("output", "gradient_U", "gradient_V")
    errors = [
        {"covariance": covariance, "n": n, "against": against, "metric": metric, "repeat": repeat}
        | {"squared": size[n] ** 2 * rng.chisquare(40) / 40}
        for covariance, n in keys
        for against in ("linear", "limit")
        for metric in metrics
        for repeat in range(32)
    ]
    exact = [
        {"covariance": covariance, "n": n, "against": "linear", "error": size[n]}
        for covariance, n in keys
    ]
    names = (
        ("output", "s-16-mended"),
        ("gradient_U", "s-gradient-u"),
        ("gradient_V", "s-gradient-v"),
    )
    bounds = [
        {
            "metric": metric,
            "name": name,
            "n": n,
            "rms": bound,
            "exponent": 0.01,
            "covariance": covariance,
        }
        for metric, name in names
        for covariance, n in keys
    ]
    tables = {"errors": errors, "exact": exact, "bounds": bounds}
    return {"concentration": {name: pd.DataFrame(rows) for name, rows in tables.items()}}


# ---- 26: the query in its own prompt
# --------------------------------------------------------------------------------------

SAME = 0.05  # exponents closer than this are one rate


def both_conventions(scale: Scale, seed: int) -> dict[str, RunSpec]:
    quick = scale == "quick"
    common: dict[str, Any] = {
        "law": {"law": "gaussian", "dim": 2},
        "sweep": {"over": "horizon", "values": (0.3, 0.5) if quick else (0.3, 0.5, 0.7, 1.0)},
        "n": "200:12800:4" if quick else "200:51200:5",
        "repeats": 300 if quick else 2000,
        "metrics": ("l2",),
        "seed": seed,
    }
    return {
        "outside": ExperimentSpec(title="Query outside the prompt", **common),
        "inside": ExperimentSpec(title="Query inside the prompt", query_inside=True, **common),
    }


def exponent_gap(inner: pd.DataFrame, outer: pd.DataFrame) -> tuple[float, float, float]:
    """Exponent of the first error minus that of the second, on the same draws, with a jackknife
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
    half = float(t_quantile(repeats - 1, LEVEL) * error)
    return value, value - half, value + half


def decide_conventions(tables: Tables) -> Decision:
    inner, outer = (tables[name]["errors"] for name in ("inside", "outside"))
    gaps, series, told = [], [], []
    for point in sorted(inner["point"].unique()):
        own = [table[table["point"] == point] for table in (inner, outer)]
        gaps.append(exponent_gap(*own))
        told.append(" and ".join(f"{fitted(part, 'l2', int(point)).exponent:.3f}" for part in own))
        for name, part in zip(("inside", "outside"), own, strict=True):
            found = [
                (n, *mean_interval(group["squared"])) for n, group in part.groupby("n", sort=True)
            ]
            n, *values = np.array(found, dtype=np.float64).T
            series.append(
                Series.of(f"{name}, point {point}", n, np.sqrt(np.maximum(values, 0.0)).T)
            )
    verdict = all_of(inside(low, high, -SAME, SAME) for _, low, high in gaps)
    worst = max(gaps, key=lambda gap: abs(gap[0]))
    reason = f"exponents inside and outside, by horizon: {'; '.join(told)}"
    picture = Picture("tokens n", "root mean square error", tuple(series), log="xy")
    return Decision(verdict, "exponent inside minus outside", *worst, reason, picture)


def made_conventions(exponent: float, seed: int) -> Tables:
    outer, inner = ({(point, "l2"): value for point in range(2)} for value in (0.5, exponent))
    errors = (made_errors(outer, seed, repeats=200), made_errors(inner, seed + 1, repeats=200))
    return {
        name: {"errors": table} for name, table in zip(("outside", "inside"), errors, strict=True)
    }


WEIGHTS = (
    "In-context linear regression in dimension 5 with tokens of both covariances of [S], weights as"
    " PyTorch draws them."
)
BOUNDED = (
    "Supported if at every L and both covariances the 99.9 % interval of the mean square lies below"
    " the bound with the constants of the proof, and the fitted exponents lie above the proved"
    " ones."
)

CLAIMS = (
    Claim(
        id="s-17-limit",
        number=17,
        seen=(
            "Seed 1 was undecided with fewer queries; their number was raised, the rule did not"
            " change."
        ),
        source="[S] Lemma 2.1",
        statement=(
            "On infinitely many tokens N(m, Gamma) softmax attention is z -> V(m + Gamma K^T Q z);"
            " outputs of queries from the same law are Gaussian with covariance (V Gamma K^T Q)"
            " Gamma (V Gamma K^T Q)^T."
        ),
        hypothesis=(
            "Gaussian tokens of any mean and covariance, singular ones too; here dimension 4,"
            " random matrices."
        ),
        rule=(
            f"Supported if on long prompts the slope against the formula is within {SLOPE} of 1 and"
            f" the variance of the outputs within {SPREAD:g} of the lemma's, with their 99.9 %"
            " intervals, in every case."
        ),
        refuted_by="A slope or a variance whose interval lies outside.",
        runs=long_prompts,
        decide=decide_limit,
        holds=partial(made_limit, 1.0),
        fails=partial(made_limit, 1.1),
        measure=measure_limit,
    ),
    Claim(
        id="s-18-outputs",
        number=18,
        source="[S] Proposition 3.1, equation (16)",
        statement=(
            "The mean square L2 distance of outputs on L tokens to their limit is at most "
            "c1 sigma^6 ln(L) L^(-c2/sigma^2)."
        ),
        hypothesis=WEIGHTS
        + " Bounds are averaged over tasks, and mended where the printed proof has a slip.",
        rule=BOUNDED,
        refuted_by="An error above its bound at some L >= 2, or an exponent below the proved one.",
        runs=concentration,
        decide=partial(decide_bounded, {"output": "s-16-mended"}),
        holds=partial(made_concentration, 0.5, 100.0),
        fails=partial(made_concentration, 0.1, 0.2),
    ),
    Claim(
        id="s-19-gradients",
        number=19,
        source="[S] Proposition 3.4",
        statement=(
            "So do the gradients of the output in V and in U, with sigma^12 ln(L)^2 in front for U."
        ),
        hypothesis=WEIGHTS,
        rule=BOUNDED,
        refuted_by="An error above its bound at some L >= 2, or an exponent below the proved one.",
        runs=concentration,
        decide=partial(
            decide_bounded, {"gradient_V": "s-gradient-v", "gradient_U": "s-gradient-u"}
        ),
        holds=partial(made_concentration, 0.5, 100.0),
        fails=partial(made_concentration, 0.1, 0.2),
    ),
    Claim(
        id="s-20-near-linear",
        number=20,
        source="[S] Figures 1 and 5",
        statement=(
            "At the first weights of training, outputs and risk gradients of softmax and of linear"
            " attention near each other as L grows."
        ),
        hypothesis=WEIGHTS
        + " Outputs on the same prompts; gradients of the risk without sampling.",
        rule=(
            f"Supported if every difference is at the largest L less than {FALL:g} of that at L ="
            " 10, and rises nowhere between, beyond 99.9 % intervals."
        ),
        refuted_by="A difference that rises with L, or one that stays above a tenth.",
        runs=concentration,
        decide=decide_nears_linear,
        holds=partial(made_concentration, 0.5, 100.0),
        fails=partial(made_concentration, 0.05, 100.0),
    ),
    Claim(
        id="s-26-query-inside",
        number=26,
        seen=(
            "The first version was undecided: the rule was made a paired one and the horizons were"
            " lowered after that."
        ),
        source="[S] Remark 3.2",
        statement=(
            "Outputs converge at the same rate whether the query is a token of the prompt or not."
        ),
        hypothesis=(
            "Identity heads, tokens and queries N(0, I) in dimension 2, error in L2 over queries."
        ),
        rule=(
            f"Supported if the two exponents on the same draws differ by less than {SAME}, with"
            " 99.9 % intervals, at every horizon."
        ),
        refuted_by="Exponents that differ by more.",
        runs=both_conventions,
        decide=decide_conventions,
        holds=partial(made_conventions, 0.5),
        fails=partial(made_conventions, 0.35),
    ),
)
