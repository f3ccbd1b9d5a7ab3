"""[B] on the uniform error over a ball of queries, and on what tokens of bounded support change."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from esscher.convergence.integral.gaussian import gaussian_error
from esscher.convergence.montecarlo.spec import ExperimentSpec
from esscher.reproduce.claim import Claim, Decision, Picture, Rows, Scale, Series, Tables
from esscher.reproduce.decide import above, all_of, below, fitted, inside, mean_interval
from esscher.reproduce.evidence import EvidenceSpec
from esscher.reproduce.made import made_errors
from esscher.runs import RunSpec

__all__ = ["CLAIMS"]

Floats = npt.NDArray[np.float64]

# ---- 4: Gaussian tokens
# ------------------------------------------------------------------------------------------

HORIZON, DIM = 0.7, 2
HALF = (0.35, 0.65)  # exponents that are 1/2 at the n of the run
# the largest error over the ball may be this many times the root mean square error at one query on
# its edge
FEW = 3.0


def balls(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Radii at which 500 tokens are far more than the exp(2 s^2) that a query on the edge needs, s
    = 0.7 R its deviation.
    """
    quick = scale == "quick"
    return {
        "balls": ExperimentSpec(
            title="Uniform error on a ball",
            law={"law": "gaussian", "dim": DIM},  # type: ignore[arg-type]
            head={"kind": "identity", "horizon": HORIZON},  # type: ignore[arg-type]
            sweep={"over": "radius", "values": (0.5, 1.5) if quick else (0.5, 1.0, 1.5, 2.0)},  # type: ignore[arg-type]
            n="500,2000,8000" if quick else "1000,4000,16000",  # type: ignore[arg-type]
            repeats=80 if quick else 200,
            metrics=("uniform",),
            seed=seed,
        ),
        "edge": EvidenceSpec(claim="b-4-uniform", parts=({"largest": 6.0},), seed=seed),
    }


def measure_edge(largest: float, rng: np.random.Generator) -> Rows:
    """Exact root mean square errors at a query of length R, for n so large that sqrt(n) times it
    has settled; none is drawn.
    """
    rows = []
    for radius in np.arange(0.5, largest + 0.1, 0.5):
        s, n = HORIZON * radius, 10**15
        f1, f2 = gaussian_error(n, s)
        rows.append({"radius": float(radius), "n": float(n), "rms": math.sqrt(f1 + (DIM - 1) * f2)})
    return rows


def decide_uniform(tables: Tables) -> Decision:
    """Exponents of the measured uniform error; its constant against that of one query; how that
    grows with R.
    """
    errors, edge = tables["balls"]["errors"], tables["edge"]["evidence"].sort_values("radius")
    constant = dict(zip(edge["radius"], np.sqrt(edge["n"]) * edge["rms"], strict=True))
    radii, found, parts, told = [], [], [], []
    at = dict(tables["balls"]["rates"][["point", "value"]].itertuples(index=False))
    for point, own in errors.groupby("point", sort=True):
        radius = at[point]
        fit = fitted(errors, "uniform", int(point))
        largest = own[own["n"] == own["n"].max()]
        values = np.sqrt(np.maximum(mean_interval(largest["squared"]), 0.0) * float(own["n"].max()))
        parts += [inside(*fit.interval, *HALF), below(values[1], values[2], FEW * constant[radius])]
        told.append(f"{fit.exponent:.3f} at R = {radius:g}")
        radii.append(float(radius))
        found.append((float(values[0]), float(values[1]), float(values[2])))
    square, logs = edge["radius"].to_numpy(float) ** 2, np.log(list(constant.values()))
    half = len(square) // 2
    early, late = (
        (logs[b] - logs[a]) / (square[b] - square[a])
        for a, b in ((0, half), (half, len(square) - 1))
    )
    # of a power of R the logarithm would flatten, like 1/R^2
    parts.append(above(late / early, late / early, 0.5))
    reason = (
        f"exponents {', '.join(told)}; ln C(R) of one query on the edge grows by {late:.3f} a unit"
        f" of R^2, to R = {edge['radius'].max():g}, about H^2/2 = {HORIZON**2 / 2:.3f}, half of"
        " what exp(R^2 H^2) allows"
    )
    x = edge["radius"].to_numpy(float)
    series = (
        Series.of("sqrt(n) times the uniform error", radii, found),
        Series("one query on the edge, exact", x, list(constant.values()), line=True),
    )
    picture = Picture("radius R", "constant C(R)", series, log="y")
    return Decision(
        all_of(parts),
        "growth of ln C(R) per R^2, late / early",
        late / early,
        late / early,
        late / early,
        reason,
        picture,
    )


def made_uniform(exponent: float, power: bool, seed: int) -> Tables:
    """Uniform errors with this exponent, and constants that grow like exp(R^2/4) or like a power of
    R.
    """
    radius = np.arange(0.5, 6.1, 0.5)
    constant = (1 + radius) ** 2 if power else np.exp(radius**2 / 4)
    edge = pd.DataFrame({"radius": radius, "n": 1e15, "rms": constant / math.sqrt(1e15)})
    errors = made_errors({(point, "uniform"): exponent for point in range(3)}, seed)
    rates = pd.DataFrame({"point": [0, 1, 2], "value": [0.5, 1.0, 1.5]})
    return {"balls": {"errors": errors, "rates": rates}, "edge": {"evidence": edge}}


# ---- 5: tokens of bounded support
# ------------------------------------------------------------------------------------------

EXPONENTIAL, POLYNOMIAL = 0.5, 3.0


def supports(scale: Scale, seed: int) -> dict[str, RunSpec]:
    squares = (1, 2, 3, 4, 5) if scale == "quick" else (1, 2, 3, 4, 5, 6)
    return {
        "supports": EvidenceSpec(
            claim="b-5-support", parts=tuple({"square": square} for square in squares), seed=seed
        )
    }


def measure_support(square: float, rng: np.random.Generator) -> Rows:
    """Tokens at -r and r on the line, r^2 = ``square``, the chance p of r from e^-14 to 1/2: exact
    errors, over the number k of tokens at r among n, which is binomial.

    A = V = 1: at the query x the error is that of r tanh(r x + ln(k/(n-k))/2) against r tanh(r x +
    ln(p/(1-p))/2). The uniform error takes the worst |x| <= r; the moment is the mean output of the
    tokens themselves. Rows: root mean squares.
    """
    r = math.sqrt(square)
    x = np.linspace(-r, r, 41)
    rows = []
    for log_p in np.linspace(-14.0, math.log(0.5), 28):
        p = math.exp(log_p)
        target = r * np.tanh(r * x + 0.5 * math.log(p / (1 - p)))
        # with 100 tokens at r the rate 1/2 is there
        for n in np.unique(np.geomspace(4, 100 / p, 16).astype(int)):
            k = likely_counts(int(n), p)
            chance = stats.binom.pmf(k, n, p)
            with np.errstate(divide="ignore"):
                log_odds = 0.5 * (np.log(k) - np.log(n - k))
            out = r * np.tanh(r * x + log_odds[:, None])
            worst = np.abs(out - target).max(axis=1)
            own = (k * out[:, -1] + (n - k) * out[:, 0]) / n - (
                p * target[-1] + (1 - p) * target[0]
            )
            errors = {"uniform": chance @ worst**2, "mean": chance @ own**2}
            rows += [
                {"square": float(square), "p": p, "n": float(n), "what": what, "rms": math.sqrt(e)}
                for what, e in errors.items()
            ]
    return rows


def likely_counts(n: int, p: float) -> Floats:
    """Counts k, but for some at the ends whose chance is below 1e-12 together."""
    low, high = stats.binom.ppf([1e-13, 1 - 1e-13], n, p)
    return np.arange(max(low, 0), min(high, n) + 1)


def decide_support(tables: Tables) -> Decision:
    """C(r): the largest sqrt(n) times the error over laws of this support and n; its growth in r^2
    and in ln r.
    """
    rows = tables["supports"]["evidence"].assign(
        scaled=lambda table: np.sqrt(table["n"]) * table["rms"]
    )
    largest = rows.groupby(["what", "square"], sort=True)["scaled"].max()
    constants = {what: largest[what] for what in ("uniform", "mean")}
    square = constants["uniform"].index.to_numpy(float)
    logs = {what: np.log(values.to_numpy(float)) for what, values in constants.items()}
    half = len(square) // 2
    exponential = float((logs["uniform"][-1] - logs["uniform"][half]) / (square[-1] - square[half]))
    power = float(
        (logs["mean"][-1] - logs["mean"][half]) / (0.5 * np.log(square[-1] / square[half]))
    )
    parts = (above(exponential, exponential, EXPONENTIAL), below(power, power, POLYNOMIAL))
    reason = (
        "over two-point laws the largest sqrt(n) times the uniform error grows like"
        f" exp({exponential:.2f} r^2), that of the mean output like r^{power:.2f}; the law that is"
        " worst for r depends on r: for one law the first grows like a power too"
    )
    series = tuple(
        Series(f"{what}, worst law", np.sqrt(square), values.to_numpy(float))
        for what, values in constants.items()
    )
    picture = Picture("radius r of the support", "largest sqrt(n) times error", series, log="y")
    return Decision(
        all_of(parts),
        "growth of ln C per r^2, uniform",
        exponential,
        exponential,
        exponential,
        reason,
        picture,
    )


def made_support(growth: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = []
    for square in range(1, 6):
        sizes = {"uniform": math.exp(growth * square), "mean": math.sqrt(square)}
        rows += [
            {
                "square": float(square),
                "n": n,
                "what": what,
                "rms": size * rng.uniform(0.99, 1) / math.sqrt(n),
            }
            for what, size in sizes.items()
            for n in (10.0, 1e3, 1e5)
        ]
    return {"supports": {"evidence": pd.DataFrame(rows)}}


CLAIMS = (
    Claim(
        id="b-4-uniform",
        number=4,
        seen=(
            "Exponents of a smaller sweep, before the range 0.35 to 0.65 and the radii were chosen."
        ),
        source="[B] Theorem 3.4 and section 4.1",
        statement=(
            "Uniformly over queries |x| <= R attention errs by C(R)/sqrt(n), and C(R) grows"
            " exponentially, like exp(R^2 H^2)."
        ),
        hypothesis=(
            "Tokens N(0, I) in dimension 2, identity head of horizon 0.7; radii at which the tokens"
            " of the run are enough for the rate 1/2: at R = 2.5 and beyond it is not reached below"
            " 10,000 tokens."
        ),
        rule=(
            f"Supported if the exponents lie between {HALF[0]} and {HALF[1]}, the uniform error is"
            f" below {FEW:g} times the exact one of a query on the edge, with 99.9 % intervals, and"
            " ln C(R) of such a query, to R = 6, grows in R^2 late at more than half its early"
            " speed."
        ),
        refuted_by=(
            "Another exponent, a larger uniform error, or a C(R) that grows like a power of R."
        ),
        runs=balls,
        decide=decide_uniform,
        holds=partial(made_uniform, 0.5, False),
        fails=partial(made_uniform, 0.3, True),
        measure=measure_edge,
    ),
    Claim(
        id="b-5-support",
        number=5,
        source="[B] abstract and section 4",
        statement=(
            "For tokens of bounded support the constant of the uniform error grows exponentially"
            " with the size of the support, that of the moments of the output like a power of it."
        ),
        hypothesis=(
            "The worst of the laws of two points -r and r on the line, unequal chances, A = V = 1,"
            " queries |x| <= r; exact sums."
        ),
        rule=(
            f"Supported if ln C of the uniform error grows by more than {EXPONENTIAL:g} a unit of"
            " r^2 over the upper half of the radii and C of the mean output more slowly than"
            f" r^{POLYNOMIAL:g}, C being the largest sqrt(n) times error."
        ),
        refuted_by=(
            "A uniform constant that flattens, or a mean output whose constant grows faster."
        ),
        runs=supports,
        decide=decide_support,
        holds=partial(made_support, 1.0),
        fails=partial(made_support, 0.1),
        measure=measure_support,
    ),
)
