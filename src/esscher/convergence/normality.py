"""How normal the error of attention on n tokens is, and how often confidence regions hold the
limit, by drawing tokens.

At each n and query, with C_n the plug-in covariance of ``confidence_region`` and u the direction
from V E y to Gamma, along which the tilt moves the output: the studentised error t = <u, Gamma_n -
Gamma> / sqrt(u^T C_n u), normal in the limit, and T = (Gamma_n - Gamma)^T C_n^+ (Gamma_n - Gamma),
chi-squared with d_v degrees of freedom in the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.stats
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.convergence.exact import exact_curve
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.convergence.region import Bounds, KnownError, quadratic, region_of, see
from esscher.measures.base import Measure

__all__ = ["REGIONS", "Trial", "coverage_table", "draw_regions", "normality_table"]

Floats = npt.NDArray[np.float64]
REGIONS = ("normal", "bernstein", "markov")


@dataclass(frozen=True)
class Trial:
    """A head, a law, some queries and a ladder of n: what is drawn again and again."""

    head: Head
    measure: Measure
    queries: Tensor  # (m, d_query)
    n: tuple[int, ...]
    level: float
    seed: int = 0
    name: str = ""

    def known(self) -> dict[str, list[Bounds | KnownError | None]]:
        """For each kind of region what it knows at each n; a kind that has no such knowledge of
        this law is left out.
        """
        found: dict[str, list[Bounds | KnownError | None]] = {"normal": [None] * len(self.n)}
        if self.measure.as_pool() is not None or self.measure.support_radius() is not None:
            found["bernstein"] = [Bounds.of(self.head, self.measure, self.queries)] * len(self.n)
        curve = exact_curve(self.head, self.measure, self.queries, list(self.n))
        if curve.kind == "exact" and curve.queries is not None:
            mse = torch.from_numpy(curve.queries.mse) * (1.0 + 2.0 * curve.accuracy) ** 2
            found["markov"] = [KnownError(mse[:, i]) for i in range(len(self.n))]
        return found


@torch.no_grad()
def draw_regions(trial: Trial, repeats: range) -> pd.DataFrame:
    """A row for each repeat, n and query: t, T, and of each kind of region whether it held the
    limit, and its radius.

    Tokens of a repeat are nested, one draw for all n; they depend on (name, seed, repeat) alone.
    """
    head, x = trial.head, trial.queries.double()
    target = limit(head, trial.measure)(x)
    along = target - head.values(trial.measure.mean.double())
    lengths = along.norm(dim=1, keepdim=True)
    first = torch.eye(head.dim_out, dtype=torch.float64, device=target.device)[0]
    along = torch.where(lengths > 0, along / lengths.clamp_min(1e-300), first)
    known, q = trial.known(), head.queries(x)
    parts: dict[str, list[Floats]] = {}
    for repeat in repeats:
        tokens = trial.measure.sample(
            trial.n[-1], generator_for(trial.name, trial.seed, "nested", repeat, "tokens")
        ).double()
        keys, values = head.keys(tokens), head.values(tokens)
        for i, n in enumerate(trial.n):
            seen = see(q, keys[:n], values[:n], 1.0)
            error = seen.center - target
            spread = torch.einsum("md,mde,me->m", along, seen.cov, along).sqrt()
            size = seen.center.abs().amax(1) + target.abs().amax(1)
            columns = {
                "student": (error * along).sum(1) / spread,
                "chi2": quadratic(seen.cov, error, size)[0],
                "dim": torch.full_like(spread, head.dim_out),
                "squared": error.square().sum(1),
                "effective_tokens": 1.0 / seen.sum_p2,
            }
            for kind, of_n in known.items():
                region = region_of(seen, trial.level, of_n[i])
                columns |= {kind: region.contains(target).double(), f"{kind}_radius": region.radius}
            for name, column in columns.items():
                parts.setdefault(name, []).append(column.numpy(force=True))
    places = pd.MultiIndex.from_product(
        [repeats, trial.n, range(len(x))], names=["repeat", "n", "query"]
    )
    return pd.DataFrame(
        {name: np.concatenate(part) for name, part in parts.items()}, index=places
    ).reset_index()


def coverage_table(draws: pd.DataFrame) -> pd.DataFrame:
    """A row for each n from the rows of ``draw_regions``.

    Shares and moments are means over the queries. ``*_stderr`` is binomial, the queries of a repeat
    counted as one draw, and not 0 where every draw was covered; ``*_size`` the mean radius over the
    root mean square error. ``kolmogorov``: largest distance between the distribution of t and the
    normal one; ``kolmogorov_noise`` what it is on average for normal t.
    """
    rows = []
    for n, part in draws.groupby("n", sort=True):
        repeats, dim = part["repeat"].nunique(), float(part["dim"].iloc[0])
        rms = math.sqrt(part["squared"].mean())
        row: dict[str, Any] = {
            "n": int(n),
            "rms": rms,
            "effective_tokens": 1.0 / (1.0 / part["effective_tokens"]).mean(),
        }
        for kind in REGIONS:
            missing = kind not in part or part[kind].isna().all()
            share = math.nan if missing else float(part[kind].mean())
            near = (share * repeats + 1.0) / (repeats + 2.0)
            row |= {
                kind: share,
                f"{kind}_stderr": math.sqrt(near * (1.0 - near) / repeats)
                if not missing
                else math.nan,
            }
            row[f"{kind}_size"] = (
                math.nan if missing or rms == 0.0 else float(part[f"{kind}_radius"].mean()) / rms
            )
        shapes = np.mean(
            [_shape(group["student"].to_numpy()) for _, group in part.groupby("query")], axis=0
        )
        row |= dict(zip(("kolmogorov", "skewness", "kurtosis"), shapes.tolist(), strict=True))
        row |= {
            "kolmogorov_noise": math.sqrt(math.pi / 2.0) * math.log(2.0) / math.sqrt(repeats),
            "chi2_mean": float(part["chi2"].mean()) / dim,
            "chi2_median": float(part["chi2"].median() / scipy.stats.chi2.median(dim)),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _shape(t: Floats) -> tuple[float, float, float]:
    """Kolmogorov distance to the normal law, skewness, excess kurtosis; nan of numbers that are all
    alike.
    """
    spread = t.std()
    if not spread > 0.0:
        return math.nan, math.nan, math.nan
    away = (t - t.mean()) / spread
    return (
        float(scipy.stats.kstest(t, "norm").statistic),
        float((away**3).mean()),
        float((away**4).mean()) - 3.0,
    )


def normality_table(
    head: Head,
    measure: Measure,
    queries: Any,
    n: Any,
    repeats: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """``coverage_table`` of so many draws, in this process."""
    trial = Trial(head, measure, torch.as_tensor(queries), tuple(n), level, seed)
    return coverage_table(draw_regions(trial, range(repeats)))
