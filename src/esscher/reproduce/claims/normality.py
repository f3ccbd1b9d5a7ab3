"""The law of attention's error at one query: normal in the limit, its variance bounded, its size
chi-squared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats

from esscher.attention.head import Head
from esscher.convergence.delta import delta_covariance
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.sphere import Sphere
from esscher.reproduce.claim import Claim, Decision, Picture, Rows, Scale, Series, Tables
from esscher.reproduce.decide import LEVEL, all_of, below, inside, mean_interval, share_of
from esscher.reproduce.evidence import EvidenceSpec
from esscher.runs import RunSpec
from esscher.theory.delta_bound import delta_bound, delta_bound_numbers

__all__ = ["CLAIMS"]

Floats = npt.NDArray[np.float64]
DIM = 2
EYE = torch.eye(DIM, dtype=torch.float64)
HEAD = Head(EYE, EYE)
QUERY = torch.tensor([[0.7, 0.0]], dtype=torch.float64)
LAWS: dict[str, Measure] = {
    "gaussian": Gaussian(EYE),
    "sphere": Sphere(DIM, 2.0**0.5),
    "mixture": Mixture([0.8, 0.2], [Gaussian(0.5 * EYE), Gaussian(EYE, [1.0, 1.0])]),
}
DISTANCE = 0.05  # of distribution functions: no event "at most t" has a chance that differs by more
# chance of a region, and the share of prompts that it may cover
NOMINAL, COVERED = 0.95, (0.93, 0.97)


def draws(scale: Scale, seed: int) -> dict[str, RunSpec]:
    n, repeats = (
        ((30, 300, 3000), 20_000) if scale == "quick" else ((30, 300, 3000, 30_000), 20_000)
    )
    parts = tuple({"law": law, "n": size, "repeats": repeats} for law in LAWS for size in n)
    return {"draws": EvidenceSpec(claim="t-28-normality", parts=parts, seed=seed)}


def measure(law: str, n: int, repeats: int, rng: np.random.Generator) -> Rows:
    """One row a prompt of n tokens: the squared error, one coordinate of it in units of its
    deviation, and its size.

    ``size`` = n (Gamma_n - Gamma)^T C^-1 (Gamma_n - Gamma), C the delta method's covariance;
    ``own_size`` has for C/n the plug-in covariance of the prompt, sum_j p_j^2 (y_j - Gamma_n)(y_j -
    Gamma_n)^T. ``bound``: that proved on the mean square.
    """
    known = LAWS[law]
    limit, C = known.tilted_mean(QUERY)[0].numpy(), delta_covariance(HEAD, known, QUERY)[0].numpy()
    bound = float(delta_bound([n], **delta_bound_numbers(HEAD, known, QUERY[0]))[0])
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    rows: Rows = []
    while len(rows) < repeats:
        count = min(max(1, 1_000_000 // n), repeats - len(rows))
        y = known.sample(count * n, generator).double().reshape(count, n, DIM).numpy()
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
        names = tuple(columns)
        setting = {"law": law, "n": n, "bound": bound}
        rows += [
            {**setting, **dict(zip(names, row, strict=True))}
            for row in np.column_stack(list(columns.values())).tolist()
        ]
    return rows


def distance(values: Floats, law: Any) -> tuple[float, float, float]:
    """Kolmogorov's distance of a sample to a law, with the interval of Dvoretzky, Kiefer, Wolfowitz
    and Massart.
    """
    found = float(stats.kstest(values, law.cdf).statistic)
    half = float(np.sqrt(np.log(2 / (1 - LEVEL)) / (2 * len(values))))
    return found, max(found - half, 0.0), found + half


def by_law(tables: Tables) -> list[tuple[str, list[tuple[float, pd.DataFrame]]]]:
    rows = tables["draws"]["evidence"]
    return [
        (str(law), [(float(n), part) for n, part in own.groupby("n", sort=True)])
        for law, own in rows.groupby("law")
    ]


def decide_normality(tables: Tables) -> Decision:
    series, ends, told = [], [], []
    for law, sizes in by_law(tables):
        found = [distance(part["coordinate"].to_numpy(float), stats.norm()) for _, part in sizes]
        series.append(Series.of(law, [n for n, _ in sizes], found))
        ends.append(found[-1])
        told.append(f"{law} {found[0][0]:.3f} to {found[-1][0]:.3f}")
    x = [n for n, _ in sizes]
    reason = f"distances from n = {x[0]:.0f} to {x[-1]:.0f}: {', '.join(told)}"
    picture = Picture(
        "tokens n",
        "distance to the normal law",
        (*series, Series("rule", x, [DISTANCE] * len(x), line=True)),
        "xy",
    )
    return Decision(
        all_of(below(*end[1:], DISTANCE) for end in ends),
        "largest distance",
        *max(ends),
        reason,
        picture,
    )


def decide_variance(tables: Tables) -> Decision:
    series, gaps, told = [], [], []
    for law, sizes in by_law(tables):
        n = np.array([size for size, _ in sizes])
        found = np.array([mean_interval(part["squared"]) for _, part in sizes])
        bound = np.array([part["bound"].iloc[0] for _, part in sizes])
        series.append(Series.of(law, n, n[:, None] * found))
        series.append(Series(f"{law}, bound", n, n * bound, line=True))
        gaps += [
            (float(value), float(low), float(high)) for value, low, high in found / bound[:, None]
        ]
        told.append(f"{law} {gaps[-1][0]:.2f}")
    worst = max(gaps)
    reason = (
        f"mean squares are {min(gaps)[0]:.2g} to {worst[0]:.2g} of the bound; {', '.join(told)} at"
        " the largest n"
    )
    picture = Picture("tokens n", "n times the mean square error", tuple(series), log="xy")
    return Decision(
        all_of(below(*gap[1:], 1.0) for gap in gaps),
        "largest mean square / bound",
        *worst,
        reason,
        picture,
    )


def decide_chi_squared(tables: Tables) -> Decision:
    chi = stats.chi2(DIM)
    series, parts, ends, told = [], [], [], []
    for law, sizes in by_law(tables):
        covered = [
            share_of(int((part["own_size"] <= chi.ppf(NOMINAL)).sum()), len(part))
            for _, part in sizes
        ]
        apart = distance(sizes[-1][1]["size"].to_numpy(float), chi)
        series.append(Series.of(law, [n for n, _ in sizes], covered))
        ends.append(covered[-1])
        parts += [inside(*covered[-1][1:], *COVERED), below(*apart[1:], DISTANCE)]
        told.append(f"{law} {covered[0][0]:.3f} to {covered[-1][0]:.3f} (distance {apart[0]:.3f})")
    x = [n for n, _ in sizes]
    reason = (
        f"regions of {NOMINAL:.0%} cover, from n = {x[0]:.0f} to {x[-1]:.0f}: {', '.join(told)}"
    )
    picture = Picture(
        "tokens n",
        "share covered",
        (*series, Series("nominal", x, [NOMINAL] * len(x), line=True)),
        "x",
    )
    worst = max(ends, key=lambda end: abs(end[0] - NOMINAL))
    return Decision(all_of(parts), "coverage furthest from 95 %", *worst, reason, picture)


def made_draws(freedom: float, bound: float, seed: int) -> Tables:
    """Errors that follow Student's law with these degrees of freedom, of variance 1 in each of two
    coordinates.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for n in (100, 10_000):
        error = rng.standard_normal((8000, DIM)) * np.sqrt(
            freedom / rng.chisquare(freedom, (8000, 1))
        )
        size = (error**2).sum(axis=1)
        columns = {"squared": size / n, "coordinate": error[:, 0], "size": size, "own_size": size}
        rows.append(pd.DataFrame(columns).assign(law="made", n=n, bound=bound / n))
    return {"draws": {"evidence": pd.concat(rows, ignore_index=True)}}


SETTING = (
    "One query whose scores deviate by about 0.7; tokens N(0, I), uniform on a circle, and a"
    " mixture of two Gaussians."
)
SOURCE = "a summary of [B] that names results without formulas"

CLAIMS = (
    Claim(
        id="t-28-normality",
        number=28,
        source=f"asymptotic normality: {SOURCE}",
        statement=(
            "sqrt(n) (Gamma_n - Gamma) is normal as n grows, with the covariance of the delta"
            " method."
        ),
        hypothesis=SETTING,
        rule=(
            "Supported if at the largest n Kolmogorov's distance of one coordinate to the normal"
            f" law is below {DISTANCE} for every law, with its 99.9 % interval."
        ),
        refuted_by="A distance above it at thousands of tokens, most of them effective.",
        runs=draws,
        decide=decide_normality,
        holds=partial(made_draws, 1e6, 3.0),
        fails=partial(made_draws, 1.0, 3.0),
        measure=measure,
    ),
    Claim(
        id="t-29-variance",
        number=29,
        source=(
            f"bounds on the variance of attention: {SOURCE}; the bound is derived here"
            " (delta-bound)"
        ),
        statement=(
            "At every n the mean square error at one query lies below a computable bound of order"
            " 1/n."
        ),
        hypothesis=SETTING,
        rule=(
            "Supported if at every n and law the 99.9 % interval of the simulated mean square lies"
            " below the bound."
        ),
        refuted_by="A mean square above its bound.",
        runs=draws,
        decide=decide_variance,
        holds=partial(made_draws, 1e6, 3.0),
        fails=partial(made_draws, 1e6, 1.0),
    ),
    Claim(
        id="t-30-chi-squared",
        number=30,
        source=f"chi-squared concentration: {SOURCE}",
        statement=(
            "The squared error in units of its covariance is chi-squared with d degrees of freedom"
            " as n grows: regions made from one prompt's own covariance hold the limit with the"
            " chance they state."
        ),
        hypothesis=SETTING,
        rule=(
            "Supported if at the largest n regions of 95 % cover the limit in a share between"
            f" {COVERED[0]} and {COVERED[1]} of the prompts and the distance to the chi-squared law"
            f" is below {DISTANCE}, for every law, with 99.9 % intervals."
        ),
        refuted_by="A coverage outside, or a larger distance.",
        runs=draws,
        decide=decide_chi_squared,
        holds=partial(made_draws, 1e6, 3.0),
        fails=partial(made_draws, 1.0, 3.0),
    ),
)
