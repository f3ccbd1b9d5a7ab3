"""[S] on one attention layer: its limit on infinitely many tokens, how outputs and gradients
approach it and linear attention, the query inside the prompt.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from esscher.errors.montecarlo.spec import ExperimentSpec
from esscher.icl.specs import ConcentrationSpec
from esscher.intervals import Interval, t_quantile
from esscher.papers.claim import Claim, Decision, EvidenceSpec, Rows, Scale, Tables
from esscher.papers.pictures import Picture, line, points
from esscher.papers.rules import (
    LEVEL,
    above,
    all_of,
    below,
    exactly,
    exponent,
    grid,
    inside,
    made_errors,
    mean_interval,
)
from esscher.runs import RunSpec

COVARIANCES = ("isotropic", "kms:0.5")


# ---- 17: the limit is linear

SLOPE, SPREAD = 0.03, 0.1  # how far from 1 the ratios may be, with their intervals


def long_prompts(scale: Scale, seed: int) -> dict[str, RunSpec]:
    tokens, repeats = (10_000, 60) if scale == "quick" else (100_000, 200)
    cases = ({"mean": 0.0, "rank": 4}, {"mean": 1.0, "rank": 4}, {"mean": 1.0, "rank": 2})
    parts = tuple({**case, "dim": 4, "tokens": tokens, "repeats": repeats} for case in cases)
    return {"long": EvidenceSpec(claim="s-17-limit", parts=parts, seed=seed)}


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


def decide_limit(tables: Tables) -> Decision:
    slopes, spreads, told = [], [], []
    for (mean, rank), own in tables["long"]["evidence"].groupby(["mean", "rank"], sort=True):
        slope, spread = mean_interval(own["slope"]), mean_interval(own["spread"])
        slopes.append(slope)
        spreads.append(spread)
        told.append(
            f"mean {mean:g}, rank {rank:g}: slope {slope.value:.4f}, variance {spread.value:.3f}"
        )
    parts = [inside(slope, 1 - SLOPE, 1 + SLOPE) for slope in slopes]
    parts += [inside(spread, 1 - SPREAD, 1 + SPREAD) for spread in spreads]
    x = range(len(slopes))
    series = [points("slope", x, slopes), points("variance of the outputs", x, spreads)]
    return Decision(
        all_of(parts),
        "slope furthest from 1",
        max(slopes, key=lambda slope: abs(slope.value - 1)),
        f"ratios to the formula: {'; '.join(told)}",
        Picture("case", "measured / Lemma 2.1", [*series, line("1", x, 1.0)]),
    )


def made_limit(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(mean=0.0, rank=4, repeat=range(40))
    rows = rows.assign(slope=rng.normal(slope, 0.02, 40), spread=rng.normal(1, 0.05, 40))
    return {"long": {"evidence": rows}}


# ---- 18 to 20: outputs and gradients at the weights that training begins with

FALL = 0.1  # share of the first difference that may be left at the last length


def concentration(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """The experiment of Figures 1 and 5 of [S], dimension 5."""
    quick = scale == "quick"
    full = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
    spec = ConcentrationSpec(
        covariances=COVARIANCES,
        lengths=(10, 100, 1000, 10_000) if quick else full,
        prompts=128 if quick else 512,
        seed=seed,
    )
    return {"concentration": spec}


def rms_by_length(errors: pd.DataFrame) -> dict[float, Interval]:
    """Root mean squares of stored squared errors, by n."""
    return {
        float(n): Interval(*np.sqrt(np.maximum(mean_interval(squared), 0.0)).tolist())
        for n, squared in errors.groupby("n", sort=True)["squared"]
    }


def decide_bounded(bounds: dict[str, str], tables: Tables) -> Decision:
    """Compares errors to the limit with the proved bound of each metric at every length, and
    exponents with the proved ones.
    """
    errors, proved = tables["concentration"]["errors"], tables["concentration"]["bounds"]
    parts, gaps, rates, series = [], [], [], []
    for metric, name in bounds.items():
        for covariance in COVARIANCES:
            place = f"covariance == '{covariance}' and metric == '{metric}'"
            own = errors.query(f"{place} and against == 'limit'")
            bound = proved.query(f"{place} and name == '{name}'").sort_values("n")
            found, ceiling = rms_by_length(own), bound["rms"].to_numpy()
            promised = float(bound["exponent"].iloc[0])
            fit = exponent(own.assign(point=0), metric)
            rates.append((fit.value, promised))
            ratios = np.array([*found.values()]) / ceiling[:, None]
            gaps += [Interval(*map(float, ratio)) for ratio in ratios]
            parts.append(above(fit, promised))
            series.append(points(f"{metric}, {covariance}", [*found], found.values()))
            series.append(line(f"{name}, {covariance}", [*found], ceiling))
    worst = max(gaps)
    slowest, promised = min(rates)
    reason = (
        f"at every L errors are below the bound, by a factor of {1 / worst.value:.3g} or more; the"
        f" smallest exponent measured is {slowest:.3f} where {promised:.2g} is proved"
        if worst.high < 1
        else f"an error is {worst.value:.3g} times its bound"
    )
    return Decision(
        all_of([*parts, *(below(gap, 1.0) for gap in gaps)]),
        "largest error / bound",
        worst,
        reason,
        Picture("prompt length L", "root mean square error", series, log="xy"),
    )


def decide_nears_linear(tables: Tables) -> Decision:
    errors, exact = tables["concentration"]["errors"], tables["concentration"]["exact"]
    series, falls, parts = [], [], []
    for covariance in COVARIANCES:
        place = f"covariance == '{covariance}' and against == 'linear'"
        drawn = rms_by_length(errors.query(f"{place} and metric == 'output'"))
        known = [exactly(error) for error in exact.query(place).sort_values("n")["error"]]
        n = [*drawn]
        for what, found in (("output", [*drawn.values()]), ("risk gradient", known)):
            first, last = found[0], found[-1]
            fall = Interval(last.value / first.value, last.low / first.high, last.high / first.low)
            rises = any(after.low > before.high for before, after in itertools.pairwise(found))
            falls.append(fall)
            parts.append("refuted" if rises else below(fall, FALL))
            series.append(points(f"{what}, {covariance}", n, found))
    reason = (
        f"from L = {n[0]:.0f} to {n[-1]:.0f} the differences fall to between {min(falls).value:.2g}"
        f" and {max(falls).value:.2g} of themselves"
    )
    return Decision(
        all_of(parts),
        "last difference / first, the largest",
        max(falls),
        reason,
        Picture("prompt length L", "softmax minus linear attention, rms", series, log="xy"),
    )


def made_concentration(power: float, bound: float, seed: int) -> Tables:
    """Differences that fall with this exponent, and flat bounds."""
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


# ---- 26: the query in its own prompt

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
    half = float(t_quantile(repeats - 1, LEVEL) * error)
    return Interval(value, value - half, value + half)


def decide_conventions(tables: Tables) -> Decision:
    gaps, series, told = [], [], []
    for point in sorted(tables["inside"]["errors"]["point"].unique()):
        both = {
            name: tables[name]["errors"].query(f"point == {point}")
            for name in ("inside", "outside")
        }
        gaps.append(exponent_gap(*both.values()))
        told.append(
            " and ".join(f"{exponent(own, 'l2', int(point)).value:.3f}" for own in both.values())
        )
        for name, own in both.items():
            found = rms_by_length(own)
            series.append(points(f"{name}, point {point}", [*found], found.values()))
    return Decision(
        all_of(inside(gap, -SAME, SAME) for gap in gaps),
        "exponent inside minus outside",
        max(gaps, key=lambda gap: abs(gap.value)),
        f"exponents inside and outside, by horizon: {'; '.join(told)}",
        Picture("tokens n", "root mean square error", series, log="xy"),
    )


def made_conventions(power: float, seed: int) -> Tables:
    outer, inner = ({(point, "l2"): value for point in range(2)} for value in (0.5, power))
    return {
        "outside": {"errors": made_errors(outer, seed, repeats=200)},
        "inside": {"errors": made_errors(inner, seed + 1, repeats=200)},
    }


GRADIENTS = {"gradient_V": "s-gradient-v", "gradient_U": "s-gradient-u"}
WEIGHTS = """In-context linear regression in dimension 5 with tokens of both covariances of [S],
weights as PyTorch draws them."""
BOUNDED = """Supported if at every L and both covariances the 99.9 % interval of the mean square
lies below the bound with the constants of the proof, and the fitted exponents lie above the proved
ones."""

CLAIMS = (
    Claim(
        id="s-17-limit",
        source="[S] Lemma 2.1",
        statement="""On infinitely many tokens N(m, Gamma) softmax attention is z -> V(m + Gamma K^T
        Q z); outputs of queries from the same law are Gaussian with covariance (V Gamma K^T Q)
        Gamma (V Gamma K^T Q)^T.""",
        hypothesis="""Gaussian tokens of any mean and covariance, singular ones too; here dimension
        4, random matrices.""",
        rule=f"""Supported if on long prompts the slope against the formula is within {SLOPE} of 1
        and the variance of the outputs within {SPREAD:g} of the lemma's, with their 99.9 %
        intervals, in every case.""",
        refuted_by="A slope or a variance whose interval lies outside.",
        seen="""Seed 1 was undecided with fewer queries; their number was raised, the rule did not
        change.""",
        runs=long_prompts,
        decide=decide_limit,
        holds=partial(made_limit, 1.0),
        fails=partial(made_limit, 1.1),
        measure=measure_limit,
    ),
    Claim(
        id="s-18-outputs",
        source="[S] Proposition 3.1, equation (16)",
        statement="""The mean square L2 distance of outputs on L tokens to their limit is at most c1
        sigma^6 ln(L) L^(-c2/sigma^2).""",
        hypothesis=f"""{WEIGHTS} Bounds are averaged over tasks, and mended where the printed proof
        has a slip.""",
        rule=BOUNDED,
        refuted_by="An error above its bound at some L >= 2, or an exponent below the proved one.",
        runs=concentration,
        decide=partial(decide_bounded, {"output": "s-16-mended"}),
        holds=partial(made_concentration, 0.5, 100.0),
        fails=partial(made_concentration, 0.1, 0.2),
    ),
    Claim(
        id="s-19-gradients",
        source="[S] Proposition 3.4",
        statement="""So do the gradients of the output in V and in U, with sigma^12 ln(L)^2 in front
        for U.""",
        hypothesis=WEIGHTS,
        rule=BOUNDED,
        refuted_by="An error above its bound at some L >= 2, or an exponent below the proved one.",
        runs=concentration,
        decide=partial(decide_bounded, GRADIENTS),
        holds=partial(made_concentration, 0.5, 100.0),
        fails=partial(made_concentration, 0.1, 0.2),
    ),
    Claim(
        id="s-20-near-linear",
        source="[S] Figures 1 and 5",
        statement="""At the first weights of training, outputs and risk gradients of softmax and of
        linear attention near each other as L grows.""",
        hypothesis=f"""{WEIGHTS} Outputs on the same prompts; gradients of the risk without
        sampling.""",
        rule=f"""Supported if every difference is at the largest L less than {FALL:g} of that at L =
        10, and rises nowhere between, beyond 99.9 % intervals.""",
        refuted_by="A difference that rises with L, or one that stays above a tenth.",
        runs=concentration,
        decide=decide_nears_linear,
        holds=partial(made_concentration, 0.5, 100.0),
        fails=partial(made_concentration, 0.05, 100.0),
    ),
    Claim(
        id="s-26-query-inside",
        source="[S] Remark 3.2",
        statement="""Outputs converge at the same rate whether the query is a token of the prompt or
        not.""",
        hypothesis="""Identity heads, tokens and queries N(0, I) in dimension 2, error in L2 over
        queries.""",
        rule=f"""Supported if the two exponents on the same draws differ by less than {SAME}, with
        99.9 % intervals, at every horizon.""",
        refuted_by="Exponents that differ by more.",
        seen="""The first version was undecided: the rule was made a paired one and the horizons
        were lowered after that.""",
        runs=both_conventions,
        decide=decide_conventions,
        holds=partial(made_conventions, 0.5),
        fails=partial(made_conventions, 0.35),
    ),
)
