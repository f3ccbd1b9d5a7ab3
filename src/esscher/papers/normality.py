"""How normal the error of attention on n tokens is, and how often confidence regions hold the
limit: ``esscher converge normality``, on laws and on heads of a model.

At each n and query, with C_n the plug-in covariance of ``confidence_region`` and u the direction
from V E y to Gamma, along which the tilt moves the output: the studentised error t = <u, Gamma_n -
Gamma> / sqrt(u^T C_n u), normal in the limit, and T = (Gamma_n - Gamma)^T C_n^+ (Gamma_n - Gamma),
chi-squared with d_v degrees of freedom in the limit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.errors.curve import CURVE
from esscher.errors.exact import exact_curve
from esscher.errors.region import Bounds, KnownError, quadratic, region_of, see
from esscher.inputs import generator_for
from esscher.measures.base import Measure
from esscher.measures.pool import Pool
from esscher.papers.specs import LawCase, NormalitySpec
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column

REPEATS_PER_UNIT = 20  # seeds do not depend on it
REGIONS = {
    "normal": "asymptotic region, of the central limit theorem",
    "bernstein": "proved region, from bounds on scores and values",
    "markov": "proved region, from the known mean square error",
}


@dataclass(frozen=True)
class Trial:
    """A head, a law, some queries and a ladder of n, for which tokens are drawn again and again."""

    head: Head
    measure: Measure
    queries: Tensor  # (m, d_query)
    n: tuple[int, ...]
    level: float
    seed: int = 0
    name: str = ""

    def known(self) -> dict[str, list[Bounds | KnownError | None]]:
        """What each kind of region knows at each n. Kinds that know nothing of this law are left
        out.
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
    """A row for each repeat, n and query: t, T, and for each kind of region its radius and whether
    it held the limit.

    Tokens of a repeat are nested, one draw for all n; they depend on (name, seed, repeat) alone.
    """
    head, x = trial.head, trial.queries.double()
    target = limit(head, trial.measure)(x)
    along = target - head.values(trial.measure.mean.double())
    lengths = along.norm(dim=1, keepdim=True)
    first = torch.eye(head.dim_out, dtype=torch.float64, device=target.device)[0]
    along = torch.where(lengths > 0, along / lengths.clamp_min(1e-300), first)
    known, q = trial.known(), head.queries(x)
    parts: dict[str, list[Any]] = {}
    for repeat in repeats:
        generator = generator_for(trial.name, trial.seed, "nested", repeat, "tokens")
        tokens = trial.measure.sample(trial.n[-1], generator).double()
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
    names = ["repeat", "n", "query"]
    places = pd.MultiIndex.from_product([repeats, trial.n, range(len(x))], names=names)
    found = {name: np.concatenate(part) for name, part in parts.items()}
    return pd.DataFrame(found, index=places).reset_index()


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
        effective = 1.0 / (1.0 / part["effective_tokens"]).mean()
        row: dict[str, Any] = {"n": int(n), "rms": rms, "effective_tokens": effective}
        for kind in REGIONS:
            row |= {kind: math.nan, f"{kind}_stderr": math.nan, f"{kind}_size": math.nan}
            if kind in part and part[kind].notna().any():
                row[kind] = share = float(part[kind].mean())
                near = (share * repeats + 1.0) / (repeats + 2.0)
                row[f"{kind}_stderr"] = math.sqrt(near * (1.0 - near) / repeats)
                if rms > 0.0:
                    row[f"{kind}_size"] = float(part[f"{kind}_radius"].mean()) / rms
        shapes = [shape_of(t.to_numpy()) for _, t in part.groupby("query")["student"]]
        names = ("kolmogorov", "skewness", "kurtosis")
        row |= dict(zip(names, np.mean(shapes, axis=0).tolist(), strict=True))
        row |= {
            "kolmogorov_noise": math.sqrt(math.pi / 2.0) * math.log(2.0) / math.sqrt(repeats),
            "chi2_mean": float(part["chi2"].mean()) / dim,
            "chi2_median": float(part["chi2"].median() / scipy.stats.chi2.median(dim)),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def shape_of(t: Any) -> tuple[float, float, float]:
    """Kolmogorov distance to the normal law, skewness, excess kurtosis; nan if all numbers are
    equal.
    """
    spread = t.std()
    if not spread > 0.0:
        return math.nan, math.nan, math.nan
    away = (t - t.mean()) / spread
    distance = float(scipy.stats.kstest(t, "norm").statistic)
    return distance, float((away**3).mean()), float((away**4).mean()) - 3.0


def normality_table(
    head: Head,
    measure: Measure,
    queries: Any,
    n: Any,
    repeats: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """The ``coverage_table`` of so many draws, made in this process."""
    trial = Trial(head, measure, torch.as_tensor(queries), tuple(n), level, seed)
    return coverage_table(draw_regions(trial, range(repeats)))


# ---- as a run


def units(spec: NormalitySpec) -> Iterator[Unit]:
    for case in spec.cases:
        for first in range(0, spec.repeats, REPEATS_PER_UNIT):
            count = min(REPEATS_PER_UNIT, spec.repeats - first)
            yield {"case": case.name, "first": first, "count": count}


@functools.lru_cache(maxsize=2)
def trial_of(spec: NormalitySpec, name: str) -> Trial:
    """The trial of a case. Queries are fresh tokens of a law, or a head's own queries in the
    text.
    """
    from esscher.probe.checks import context_of  # laws need no model
    from esscher.probe.job import hold

    case, seeded = next(case for case in spec.cases if case.name == name), f"normality/{name}"
    if isinstance(case, LawCase):
        measure = case.law.build(torch.float64, spec.device)
        head = case.head.build(measure)
        generator = generator_for(seeded, spec.seed, "queries")
        queries = measure.sample(spec.queries, generator).double()
        return Trial(head, measure, queries, spec.n, spec.level, spec.seed, seeded)
    pooled = context_of(spec.probe).once(hold)[case.layer]
    info = pooled.queries.info
    if case.head >= info.heads or info.softcap is not None:
        raise ValueError(
            f"heads: layer {case.layer} has {info.heads} heads; expected one of them, with uncapped"
            " scores"
        )
    shared = info.kv_head(case.head)
    k, v = pooled.rows.k[shared].double(), pooled.rows.v[shared].double()
    head, pool = head_of_pool(k, v, info.scale)
    queries = pooled.queries.q[case.head].double()
    return Trial(head, pool, queries, spec.n, spec.level, spec.seed, seeded)


def head_of_pool(k: Tensor, v: Tensor, scale: float) -> tuple[Head, Pool]:
    """A head and a pool whose limit is attention on all keys: a token is a key and its value side
    by side, A picks the key, V the value.
    """
    width, out = k.shape[1], v.shape[1]
    eye = torch.eye(width + out, dtype=torch.float64, device=k.device)
    return Head(scale * eye[:, :width], eye[width:]), Pool(torch.cat([k, v], dim=1))


def hashes(spec: NormalitySpec) -> dict[str, str]:
    if not spec.heads:
        return {}
    from esscher.probe.checks import context_of

    context = context_of(spec.probe, starts=True)
    return {"model": context.loaded.sha256, "corpus": context.windows.sha256}


def compute(spec: NormalitySpec, unit: Unit) -> dict[str, Any]:
    repeats = range(unit["first"], unit["first"] + unit["count"])
    return {"draws": draw_regions(trial_of(spec, unit["case"]), repeats).assign(case=unit["case"])}


def consolidate(spec: NormalitySpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """Tables coverage (a row for each case and n) and draws (every repeat)."""
    draws = pd.concat([shard.tables["draws"].to_pandas() for shard in shards], ignore_index=True)
    tables = []
    for case, part in draws.groupby("case", sort=False):
        table = coverage_table(part)
        table.insert(0, "case", case)
        tables.append(table)
    return {"coverage": pd.concat(tables, ignore_index=True), "draws": draws}


def columns(spec: Any) -> dict[str, list[Column]]:
    """What the columns of both tables are."""

    def number(key: str, label: str, help: str, short: str = "") -> Column:
        return Column(key, "float", label, help, short=short)

    curve = {column.key: column for column in CURVE}
    weights = "One over the sum of squared softmax weights of a draw."
    shared = [
        Column("case", "word", "case", "The law or the head whose tokens are drawn."),
        curve["n"],
        number("effective_tokens", "effective tokens", weights),
    ]
    distance = "Kolmogorov distance of the studentised error to normal."
    normal = "of the studentised error; 0 for a normal one."
    noise = "What that distance is on average for as many normal draws."
    mean = "Mean of the squared studentised error over its degrees of freedom."
    median = "Its median over that of chi-squared; 1 in the limit."
    coverage = [
        curve["rms"],
        number("kolmogorov", "distance to normal", distance, "distance"),
        number("kolmogorov_noise", "its noise", noise, "noise"),
        number("skewness", "skewness", f"Skewness {normal}"),
        number("kurtosis", "excess kurtosis", f"Excess kurtosis {normal}"),
        number("chi2_mean", "chi-squared, mean", mean, "χ²"),
        number("chi2_median", "chi-squared, median", median, "χ² median"),
    ]
    along = "Error along the tilt over its plug-in standard deviation."
    freedom = "Output coordinates, the degrees of freedom of the squared error."
    draws = [
        Column("repeat", "int", "repeat", "Number of the draw of tokens."),
        Column("query", "int", "query", "Number of the query."),
        number("student", "studentised error", along),
        number("chi2", "squared error", "Squared error in units of the plug-in covariance."),
        number("dim", "dimension", freedom),
        number("squared", "squared error", "Squared error of one query in one draw."),
    ]
    for kind, words in REGIONS.items():
        share = f"Share of draws whose {words}, holds the limit."
        binomial = f"Binomial, of the share of the {words}."
        size = f"Mean radius of the {words}, over the rms error."
        coverage += [
            number(kind, kind, share),
            number(f"{kind}_stderr", f"{kind}: standard error", binomial, "±"),
            number(f"{kind}_size", f"{kind}: radius", size, f"{kind} size"),
        ]
        held = f"1 where the {words}, held the limit in this draw."
        radius = f"Radius of the {words}, in this draw."
        draws += [number(kind, kind, held), number(f"{kind}_radius", f"{kind}: radius", radius)]
    return {"coverage": [*shared, *coverage], "draws": [*shared, *draws]}


NORMALITY = Job(
    "normality", NormalitySpec, units, compute, consolidate, hashes=hashes, columns=columns
)
