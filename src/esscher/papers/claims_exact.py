"""The error at finite n: exact integrals, the exponents of the random energy model, and the law of
the error at one query (normal in the limit, its variance bounded, its size chi-squared).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats

from esscher.attention.head import Head
from esscher.errors.exact import delta_covariance, exact_curve
from esscher.intervals import Interval
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.pool import Pool
from esscher.measures.product import Rademacher
from esscher.measures.rotational import Sphere
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.rules import below, decided, grid, inside, line, need, points
from esscher.theory.sharp import delta_bound, delta_bound_numbers, l2_exponent_rms

Floats = npt.NDArray[np.float64]


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
    its deviation, and the size of the error.

    ``size`` = n (Gamma_n - Gamma)^T C^-1 (Gamma_n - Gamma), C the delta method's covariance;
    ``own_size`` has for C/n the plug-in covariance of the prompt, sum_j p_j^2 (y_j - Gamma_n)(y_j -
    Gamma_n)^T. ``bound``: the proved bound on the mean square.
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


def made_draws(case: tuple[float, float], seed: int) -> Tables:
    """Errors that follow Student's law with some degrees of freedom, of variance 1 in each of two
    coordinates; and n times a bound.
    """
    freedom, bound = case
    rng = np.random.default_rng(seed)
    rows = grid(law="made", n=(100, 10_000), prompt=range(8000)).drop(columns="prompt")
    scale = np.sqrt(freedom / rng.chisquare(freedom, (len(rows), 1)))
    error = rng.standard_normal((len(rows), 2)) * scale
    size = (error**2).sum(axis=1)
    rows = rows.assign(bound=bound / rows["n"], squared=size / rows["n"], size=size, own_size=size)
    return {"draws": {"evidence": rows.assign(coordinate=error[:, 0])}}


@claim("t-28-normality", made_draws, (1e6, 3.0), (1.0, 3.0), measure_draws)
def normality(tables: Tables, distance: float) -> Decision:
    found = by_law(tables, lambda part: kolmogorov(part["coordinate"], stats.norm()))
    series = [*rules.series_of(found), line("rule", sorted({n for _, n in found}), distance)]
    return decided(
        need("distance at the largest n", at_last(found), below, distance),
        picture=Picture("tokens n", "distance to the normal law", series, log="xy"),
    )


@claim("t-29-variance", made_draws, (1e6, 3.0), (1e6, 1.0))
def variance(tables: Tables) -> Decision:
    found = by_law(
        tables, lambda part: rules.mean_interval(part["squared"] / part["bound"].iloc[0])
    )
    return decided(
        need("mean square / bound", found, below, 1.0),
        picture=Picture("tokens n", "mean square error / bound", rules.series_of(found), log="x"),
    )


@claim("t-30-chi-squared", made_draws, (1e6, 3.0), (1.0, 3.0))
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


# ---- 31: the exact error

GROUPS = 40
DIM = 3
ENUMERATED = "every draw of a pool"


def random_law(name: str, rng: np.random.Generator) -> Measure:
    def gaussian() -> Gaussian:
        root = rng.standard_normal((DIM, DIM)) / np.sqrt(DIM)
        return Gaussian(root @ root.T, rng.standard_normal(DIM))

    laws: dict[str, Callable[[], Measure]] = {
        "gaussian": gaussian,
        "mixture": lambda: Mixture([0.3, 0.7], [gaussian(), gaussian()]),
        "sphere": lambda: Sphere(DIM, float(rng.uniform(1, 3))),
        "rademacher": lambda: Rademacher(DIM),
        "pool": lambda: Pool(rng.standard_normal((12, DIM))),
        ENUMERATED: lambda: Pool(rng.standard_normal((5, DIM))),
    }
    return laws[name]()


def measure_error(law: str, n: int, rng: np.random.Generator, repeats: int = 0) -> Rows:
    """Mean squares of groups of simulated prompts beside the exact error, for a random head and a
    query whose scores deviate by about 1. Without repeats: the means over every draw of up to n
    tokens from a pool of 5.
    """
    A, V = rng.standard_normal((2, DIM, DIM)) / np.sqrt(DIM)
    head, query = Head(A, V), rng.standard_normal(DIM)
    known = random_law(law, rng)
    limit = head.values(known.tilted_mean(head.tilt(torch.from_numpy(query[None]))))[0].numpy()
    lengths = [n] if repeats else [*range(1, n + 1)]
    exact = exact_curve(head, known, query[None], lengths).rms ** 2
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    rows = []
    for length, value in zip(lengths, exact, strict=True):
        for group in range(GROUPS if repeats else 1):
            if isinstance(known, Pool) and not repeats:
                place = itertools.product(range(len(known.tokens)), repeat=length)
                y = known.tokens.double().numpy()[np.array([*place])]
            else:
                drawn = known.sample(repeats // GROUPS * n, generator)
                y = drawn.double().numpy().reshape(-1, n, DIM)
            squared = float(squared_errors(head, query, y, limit).mean())
            means = {"squared": squared, "exact": float(value)}
            rows.append({"law": law, "n": length, "group": group, **means})
    return rows


def squared_errors(head: Head, query: Floats, y: Floats, limit: Floats) -> Floats:
    """|Gamma_n - Gamma|^2 for each prompt y, by the definition of attention."""
    scores = y @ (head.A.double().numpy() @ query)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    out = np.einsum("rn,rnd->rd", p, y) / p.sum(axis=1, keepdims=True)
    return np.asarray(((out @ head.V.double().numpy().T - limit) ** 2).sum(axis=1), np.float64)


def made_sizes(factor: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    drawn = grid(law="made", n=(1, 30), group=range(GROUPS), exact=1.0)
    drawn["squared"] = factor * rng.normal(1, 0.03, len(drawn))
    every = grid(law=ENUMERATED, n=3, group=0, exact=1.0).assign(squared=factor * (1 + 1e-12))
    return {"sizes": {"evidence": pd.concat([drawn, every], ignore_index=True)}}


@claim("o-31-exact", made_sizes, 1.0, 1.2, measure_error)
def exact_error(tables: Tables, ratio: float, rounding: float) -> Decision:
    rows = tables["sizes"]["evidence"]
    rows = rows.assign(ratio=rows["squared"] / rows["exact"])
    every = rows["law"] == ENUMERATED
    away = float((rows["ratio"][every] - 1).abs().max())
    groups = rows[~every].groupby(["law", "n"], sort=True)["ratio"]
    found = {(law, float(n)): rules.mean_interval(own) for (law, n), own in groups}
    series = [*rules.series_of(found), line("1", sorted(set(rows["n"])), 1.0)]
    return decided(
        need("simulated / exact mean square", found, inside, 1 - ratio, 1 + ratio),
        need("relative distance of enumerated ones", away, below, rounding),
        picture=Picture("tokens n", "simulated / exact mean square", series, log="x"),
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


def made_slopes(shift: float, seed: int) -> Tables:
    """Errors whose slopes are this far, about, from the exponents."""
    rng = np.random.default_rng(seed)
    rows = grid(dim=1, horizon=(0.5, 1.0, 2.0), n=[10.0**power for power in range(2, 16)])
    sharp = {h: l2_exponent_rms(h) + shift * rng.uniform(0.8, 1) for h in (0.5, 1.0, 2.0)}
    return {"slopes": {"evidence": rows.assign(rms=rows["n"] ** -rows["horizon"].map(sharp))}}


@claim("o-32-sharp", made_slopes, 0.01, 0.1, measure_slopes)
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
    gaps, usual = ((found[name] - found["sharp"]).abs() for name in ("last", "usual"))
    far = found["horizon"][usual > gap]
    where = f"horizons {far.min():g} to {far.max():g}" if len(far) else "no horizon"
    series = []
    for dim, own in found.groupby("dim"):
        series.append(points(f"d = {dim}, last decade", own["horizon"], own["last"]))
        series.append(points(f"d = {dim}, 10^3 to 10^4", own["horizon"], own["usual"]))
    series.append(line("sharp (heuristic)", own["horizon"], own["sharp"]))
    verdict = below(rules.exactly(gaps.max()), gap)
    return decided(
        rules.Part("largest gap to the exponent", rules.largest(gaps), f"below {gap:g}", verdict),
        picture=Picture("two-sided horizon h", "local exponent of the exact error", series),
        note=f"from 10^3 to 10^4 tokens slopes are more than {gap} away at {where}, by up to"
        f" {usual.max():.2f}",
    )
