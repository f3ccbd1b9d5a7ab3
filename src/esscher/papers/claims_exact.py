"""The error at finite n: exact integrals, the exponents of the random energy model, and the law of
the error at one query (normal in the limit, its variance bounded, its size chi-squared).
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats

from esscher.attention.head import Head
from esscher.errors.delta import delta_covariance
from esscher.errors.exact import exact_curve
from esscher.intervals import Interval
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.pool import Pool
from esscher.measures.product import Rademacher
from esscher.measures.rotational import Sphere
from esscher.papers.claim import Claim, Decision, EvidenceSpec, Rows, Scale, Tables
from esscher.papers.pictures import Picture, line, points
from esscher.papers.rules import (
    LEVEL,
    all_of,
    below,
    exactly,
    grid,
    inside,
    mean_interval,
    share_of,
)
from esscher.runs import RunSpec
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
DISTANCE = 0.05  # of distribution functions: no event "at most t" has a chance that differs by more
NOMINAL, COVERED = 0.95, (0.93, 0.97)  # chance of a region, share of prompts that it may cover


def draws(scale: Scale, seed: int) -> dict[str, RunSpec]:
    sizes = (30, 300, 3000) if scale == "quick" else (30, 300, 3000, 30_000)
    parts = tuple({"law": law, "n": n, "repeats": 20_000} for law in LAWS for n in sizes)
    return {"draws": EvidenceSpec(claim="t-28-normality", parts=parts, seed=seed)}


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


def distance(values: pd.Series[float], law: Any) -> Interval:
    """Kolmogorov's distance of a sample to a law, with the interval of Dvoretzky, Kiefer, Wolfowitz
    and Massart.
    """
    found = float(stats.kstest(values.to_numpy(float), law.cdf).statistic)
    half = float(np.sqrt(np.log(2 / (1 - LEVEL)) / (2 * len(values))))
    return Interval(found, max(found - half, 0.0), found + half)


def by_law(tables: Tables) -> dict[str, dict[float, pd.DataFrame]]:
    """The draws of each law by n."""
    return {
        str(law): {float(n): part for n, part in own.groupby("n", sort=True)}
        for law, own in tables["draws"]["evidence"].groupby("law")
    }


def decide_normality(tables: Tables) -> Decision:
    series, ends, told = [], [], []
    for law, sizes in by_law(tables).items():
        x = [*sizes]
        found = [distance(part["coordinate"], stats.norm()) for part in sizes.values()]
        series.append(points(law, x, found))
        ends.append(found[-1])
        told.append(f"{law} {found[0].value:.3f} to {found[-1].value:.3f}")
    series.append(line("rule", x, DISTANCE))
    return Decision(
        all_of(below(end, DISTANCE) for end in ends),
        "largest distance",
        max(ends),
        f"distances from n = {x[0]:.0f} to {x[-1]:.0f}: {', '.join(told)}",
        Picture("tokens n", "distance to the normal law", series, log="xy"),
    )


def decide_variance(tables: Tables) -> Decision:
    series, gaps, told = [], [], []
    for law, sizes in by_law(tables).items():
        n = np.array([*sizes])
        found = np.array([mean_interval(part["squared"]) for part in sizes.values()])
        bound = np.array([part["bound"].iloc[0] for part in sizes.values()])
        series += [points(law, n, n[:, None] * found), line(f"{law}, bound", n, n * bound)]
        gaps += [Interval(*map(float, row)) for row in found / bound[:, None]]
        told.append(f"{law} {gaps[-1].value:.2f}")
    worst = max(gaps)
    reason = (
        f"mean squares are {min(gaps).value:.2g} to {worst.value:.2g} of the bound;"
        f" {', '.join(told)} at the largest n"
    )
    return Decision(
        all_of(below(gap, 1.0) for gap in gaps),
        "largest mean square / bound",
        worst,
        reason,
        Picture("tokens n", "n times the mean square error", series, log="xy"),
    )


def decide_chi_squared(tables: Tables) -> Decision:
    chi = stats.chi2(2)
    series, parts, ends, told = [], [], [], []
    for law, sizes in by_law(tables).items():
        x = [*sizes]
        inner = [part["own_size"] <= chi.ppf(NOMINAL) for part in sizes.values()]
        covered = [share_of(hits.sum(), len(hits)) for hits in inner]
        first, last = covered[0], covered[-1]
        apart = distance(sizes[x[-1]]["size"], chi)
        series.append(points(law, x, covered))
        ends.append(last)
        parts += [inside(last, *COVERED), below(apart, DISTANCE)]
        told.append(f"{law} {first.value:.3f} to {last.value:.3f} (distance {apart.value:.3f})")
    series.append(line("nominal", x, NOMINAL))
    return Decision(
        all_of(parts),
        "coverage furthest from 95 %",
        max(ends, key=lambda end: abs(end.value - NOMINAL)),
        f"regions of {NOMINAL:.0%} cover, from n = {x[0]:.0f} to {x[-1]:.0f}: {', '.join(told)}",
        Picture("tokens n", "share covered", series, log="x"),
    )


def made_draws(freedom: float, bound: float, seed: int) -> Tables:
    """Errors that follow Student's law with these degrees of freedom, of variance 1 in each of two
    coordinates.
    """
    rng = np.random.default_rng(seed)
    rows = grid(law="made", n=(100, 10_000), prompt=range(8000)).drop(columns="prompt")
    scale = np.sqrt(freedom / rng.chisquare(freedom, (len(rows), 1)))
    error = rng.standard_normal((len(rows), 2)) * scale
    size = (error**2).sum(axis=1)
    rows = rows.assign(bound=bound / rows["n"], squared=size / rows["n"], size=size, own_size=size)
    return {"draws": {"evidence": rows.assign(coordinate=error[:, 0])}}


# ---- 31: the exact error

RATIO = 0.05  # how far from 1 a simulated mean square over the exact one may be, with its interval
ROUNDING = 1e-8  # and an enumerated one
GROUPS = 40
DIM = 3
ENUMERATED = "every draw of a pool"


def sizes(scale: Scale, seed: int) -> dict[str, RunSpec]:
    repeats = 160_000 if scale == "quick" else 1_000_000
    laws = ("gaussian", "mixture", "sphere", "rademacher", "pool")
    parts: Rows = [
        {"law": law, "n": n, "repeats": repeats} for law in laws for n in (1, 4, 30, 200)
    ]
    parts.append({"law": ENUMERATED, "n": 6})
    return {"sizes": EvidenceSpec(claim="o-31-exact", parts=tuple(parts), seed=seed)}


def random_law(name: str, rng: np.random.Generator) -> Measure:
    def gaussian() -> Gaussian:
        root = rng.standard_normal((DIM, DIM)) / np.sqrt(DIM)
        return Gaussian(root @ root.T, rng.standard_normal(DIM))

    match name:
        case "gaussian":
            return gaussian()
        case "mixture":
            return Mixture([0.3, 0.7], [gaussian(), gaussian()])
        case "sphere":
            return Sphere(DIM, float(rng.uniform(1, 3)))
        case "rademacher":
            return Rademacher(DIM)
        case _:
            return Pool(rng.standard_normal((12 if name == "pool" else 5, DIM)))


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


def decide_exact(tables: Tables) -> Decision:
    rows = tables["sizes"]["evidence"]
    rows = rows.assign(ratio=rows["squared"] / rows["exact"])
    every = rows["law"] == ENUMERATED
    away = exactly((rows["ratio"][every] - 1).abs().max())
    series, drawn = [], []
    for law, own in rows[~every].groupby("law", sort=True):
        by_n = own.groupby("n", sort=True)["ratio"]
        found = [mean_interval(ratios) for _, ratios in by_n]
        series.append(points(str(law), [n for n, _ in by_n], found))
        drawn += found
    worst = max(drawn, key=lambda found: abs(found.value - 1))
    reason = (
        f"{len(drawn)} simulated mean squares are {worst.value:.4f} of the exact at worst; "
        f"enumerated ones differ by {away.value:.1g} of themselves"
    )
    series.append(line("1", sorted(set(rows["n"])), 1.0))
    parts = [inside(found, 1 - RATIO, 1 + RATIO) for found in drawn]
    return Decision(
        all_of([below(away, ROUNDING), *parts]),
        "ratio furthest from 1",
        worst,
        reason,
        Picture("tokens n", "simulated / exact mean square", series, log="x"),
    )


def made_sizes(factor: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    drawn = grid(law="made", n=(1, 30), group=range(GROUPS), exact=1.0)
    drawn["squared"] = factor * rng.normal(1, 0.03, len(drawn))
    every = grid(law=ENUMERATED, n=3, group=0, exact=1.0).assign(squared=factor * (1 + 1e-12))
    return {"sizes": {"evidence": pd.concat([drawn, every], ignore_index=True)}}


# ---- 32: sharp exponents

GAP = 0.05  # between a local slope and the exponent that it should approach


def slopes(scale: Scale, seed: int) -> dict[str, RunSpec]:
    quick = (0.3, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0, 3.0)
    horizons = quick if scale == "quick" else np.arange(0.1, 4.05, 0.1).round(1)
    parts = tuple({"dim": dim, "horizon": float(horizon)} for dim in (1, 4) for horizon in horizons)
    return {"slopes": EvidenceSpec(claim="o-32-sharp", parts=parts, seed=seed)}


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


def decide_sharp(tables: Tables) -> Decision:
    """Compares slopes over the last decade with the exponent; those between 10^3 and 10^4 say what
    is seen in practice.
    """
    evidence = tables["slopes"]["evidence"]
    rows = []
    for (dim, horizon), own in evidence.groupby(["dim", "horizon"], sort=True):
        own = own.sort_values("n")
        local = -np.diff(np.log(own["rms"])) / np.diff(np.log(own["n"]))
        usual = local[list(own["n"]).index(1e3)]
        rows.append((int(dim), horizon, local[-1], usual, l2_exponent_rms(float(horizon))))
    found = pd.DataFrame(rows, columns=["dim", "horizon", "last", "usual", "sharp"])
    gaps, usual = ((found[name] - found["sharp"]).abs() for name in ("last", "usual"))
    far = found["horizon"][usual > GAP]
    where = f"horizons {far.min():g} to {far.max():g}" if len(far) else "no horizon"
    reason = (
        f"over the last decade, to n = {evidence['n'].max():.0e}, slopes are within"
        f" {gaps.max():.3f} of the exponent; from 10^3 to 10^4 tokens they are more than {GAP} away"
        f" at {where}, by up to {usual.max():.2f}"
    )
    series = []
    for dim, own in found.groupby("dim"):
        series.append(points(f"d = {dim}, last decade", own["horizon"], own["last"]))
        series.append(points(f"d = {dim}, 10^3 to 10^4", own["horizon"], own["usual"]))
    series.append(line("sharp (heuristic)", own["horizon"], own["sharp"]))
    return Decision(
        all_of(below(exactly(gap), GAP) for gap in gaps),
        "largest gap to the exponent",
        Interval(gaps.max(), gaps.min(), gaps.max()),
        reason,
        Picture("two-sided horizon h", "local exponent of the exact error", series),
    )


def made_slopes(shift: float, seed: int) -> Tables:
    """Errors whose slopes are this far, about, from the exponents."""
    rng = np.random.default_rng(seed)
    rows = grid(dim=1, horizon=(0.5, 1.0, 2.0), n=[10.0**power for power in range(2, 16)])
    sharp = {h: l2_exponent_rms(h) + shift * rng.uniform(0.8, 1) for h in (0.5, 1.0, 2.0)}
    return {"slopes": {"evidence": rows.assign(rms=rows["n"] ** -rows["horizon"].map(sharp))}}


SETTING = """One query whose scores deviate by about 0.7; tokens N(0, I), uniform on a circle, and a
mixture of two Gaussians."""
SOURCE = "a summary of [B] that names results without formulas"

CLAIMS = (
    Claim(
        id="t-28-normality",
        source=f"asymptotic normality: {SOURCE}",
        statement="""sqrt(n) (Gamma_n - Gamma) is normal as n grows, with the covariance of the
        delta method.""",
        hypothesis=SETTING,
        rule=f"""Supported if at the largest n Kolmogorov's distance of one coordinate to the normal
        law is below {DISTANCE} for every law, with its 99.9 % interval.""",
        refuted_by="A distance above it at thousands of tokens, most of them effective.",
        runs=draws,
        decide=decide_normality,
        holds=partial(made_draws, 1000000.0, 3.0),
        fails=partial(made_draws, 1.0, 3.0),
        measure=measure_draws,
    ),
    Claim(
        id="t-29-variance",
        source=f"""bounds on the variance of attention: {SOURCE}; the bound is derived here
        (delta-bound)""",
        statement="""At every n the mean square error at one query lies below a computable bound of
        order 1/n.""",
        hypothesis=SETTING,
        rule="""Supported if at every n and law the 99.9 % interval of the simulated mean square
        lies below the bound.""",
        refuted_by="A mean square above its bound.",
        runs=draws,
        decide=decide_variance,
        holds=partial(made_draws, 1000000.0, 3.0),
        fails=partial(made_draws, 1000000.0, 1.0),
    ),
    Claim(
        id="t-30-chi-squared",
        source=f"chi-squared concentration: {SOURCE}",
        statement="""The squared error in units of its covariance is chi-squared with d degrees of
        freedom as n grows: regions made from one prompt's own covariance hold the limit with the
        chance they state.""",
        hypothesis=SETTING,
        rule=f"""Supported if at the largest n regions of 95 % cover the limit in a share between
        {COVERED[0]} and {COVERED[1]} of the prompts and the distance to the chi-squared law is
        below {DISTANCE}, for every law, with 99.9 % intervals.""",
        refuted_by="A coverage outside, or a larger distance.",
        runs=draws,
        decide=decide_chi_squared,
        holds=partial(made_draws, 1000000.0, 3.0),
        fails=partial(made_draws, 1.0, 3.0),
    ),
    Claim(
        id="o-31-exact",
        source="derived here (theory, exact error at finite n)",
        statement="""One-dimensional integrals give the mean square error of attention on n tokens
        exactly, at every n.""",
        hypothesis="""Independent tokens of the law, random heads and queries in dimension 3; five
        laws, n = 1, 4, 30, 200; and every draw of up to 6 tokens from a pool of 5.""",
        rule=f"""Supported if simulated mean squares lie within {RATIO:.0%} of the exact ones with
        their 99.9 % intervals, and enumerated ones within {ROUNDING:g}.""",
        refuted_by="""A simulated mean square whose interval lies outside, or an enumerated one that
        differs.""",
        seen="""A run at this seed was undecided; draws were made four times as many, the rule did
        not change.""",
        runs=sizes,
        decide=decide_exact,
        holds=partial(made_sizes, 1.0),
        fails=partial(made_sizes, 1.2),
        measure=measure_error,
    ),
    Claim(
        id="o-32-sharp",
        source="derived here (random energy model; heuristic)",
        statement="""Averaged over Gaussian queries the root mean square error falls like n^-b, b =
        min(1/2, (sqrt(1 + 4/h^2) - 1)/4), as n grows; at the n of practice it need not.""",
        hypothesis="""Gaussian tokens and queries, isotropic heads of horizon h, dimensions 1 and 4;
        exact errors, nothing is drawn.""",
        rule=f"""Supported if from 10^14 to 10^15 tokens the slope of the exact error is within
        {GAP} of b at every horizon.""",
        refuted_by="A slope further from b at 10^15 tokens.",
        seen="The bar of 0.05 was chosen after the exact slopes had been looked at.",
        runs=slopes,
        decide=decide_sharp,
        holds=partial(made_slopes, 0.01),
        fails=partial(made_slopes, 0.1),
        measure=measure_slopes,
    ),
)
