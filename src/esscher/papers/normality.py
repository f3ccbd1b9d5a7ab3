"""How normal the error of attention on n tokens is, and how often confidence regions hold the
limit: ``esscher converge normality``, on laws and on heads of a model.

At each n and query, with C_n the plug-in covariance of ``confidence_region`` and u the direction
from V E y to Gamma, along which the tilt moves the output: the studentised error t = <u, Gamma_n -
Gamma> / sqrt(u^T C_n u), normal in the limit, and T = (Gamma_n - Gamma)^T C_n^+ (Gamma_n - Gamma),
chi-squared with d_v degrees of freedom in the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.errors.curve import CURVE
from esscher.errors.montecarlo.spec import Count, HeadSpec, Ladder, Law
from esscher.errors.region import Bounds, quadratic, region_of, sample_statistics
from esscher.inputs import generator_for
from esscher.measures.base import Measure
from esscher.measures.pool import Pool
from esscher.probe.spec import KEYS, ProbeSpec
from esscher.runs import Job, RunSpec, Shard, Unit, register
from esscher.runs.columns import Column
from esscher.runs.spec import Plain

if TYPE_CHECKING:
    from esscher.probe.session import Session

REPEATS_PER_UNIT = 20  # seeds do not depend on it
REGIONS = {
    "normal": "asymptotic region, of the central limit theorem",
    "bernstein": "proved region, from bounds on scores and values",
}


class Case(Plain):
    """What tokens are drawn from."""

    name: str


class LawCase(Case):
    """Tokens of a law, and a head for them."""

    law: Law
    head: HeadSpec = HeadSpec()


class ModelCase(Case):
    """A head of a model: its keys and values, pooled over a text, drawn with replacement; its own
    queries.
    """

    layer: Annotated[int, Field(ge=0)]
    head: Annotated[int, Field(ge=0)]


class NormalitySpec(RunSpec):
    """What ``esscher converge normality`` runs: cases by name, laws and heads of one model."""

    job: Literal["normality"] = "normality"
    title: str = ""
    laws: tuple[LawCase, ...] = ()
    heads: tuple[ModelCase, ...] = ()
    model: str = ProbeSpec.model_fields["model"].default
    tokens: PositiveInt = KEYS  # of text, in the pool of the model's heads
    n: Ladder = Field(description="token numbers: 1e3:3e4:12 or 100,1000")
    repeats: int = Field(default=500, ge=2, le=1_000_000, description="draws of the tokens")
    queries: Count = 3
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    dtype: Literal["float64"] = "float64"

    @model_validator(mode="after")
    def _some_cases(self) -> NormalitySpec:
        names = [case.name for case in (*self.laws, *self.heads)]
        if not names or len(set(names)) < len(names):
            told = ", ".join(names) or "none"
            raise ValueError(f"laws and heads: expected some cases, each name once, got {told}")
        return self

    @property
    def probe(self) -> ProbeSpec:
        """The probe whose pool and queries these are."""
        return ProbeSpec.read(
            {
                "model": self.model,
                "corpus": {"max_tokens": self.tokens},
                "pool": "corpus",
                "queries": self.queries,
                "kept_queries": self.queries,
                "layers": sorted({case.layer for case in self.heads}),
                "seed": self.seed,
                "device": self.device,
                "threads": self.threads,
            }
        )


@torch.no_grad()
def draw_regions(
    head: Head,
    measure: Measure,
    queries: Tensor,
    n: Sequence[int],
    repeats: range,
    level: float = 0.95,
    seed: int = 0,
    name: str = "",
) -> pd.DataFrame:
    """A row for each repeat, n and query: t, T, and for each kind of region its radius and whether
    it held the limit. Kinds that know nothing of this law are left out.

    Tokens of a repeat are nested, one draw for all n; they depend on (name, seed, repeat) alone.
    """
    x = queries.double()
    known: dict[str, Bounds | None] = {"normal": None}
    if measure.as_pool() is not None or measure.support_radius() is not None:
        known["bernstein"] = Bounds.of(head, measure, x)
    target, q = limit(head, measure)(x), head.queries(x)
    along = target - head.values(measure.mean.double())
    lengths = along.norm(dim=1, keepdim=True)
    first = torch.eye(head.dim_out, dtype=torch.float64, device=target.device)[0]
    along = torch.where(lengths > 0, along / lengths.clamp_min(1e-300), first)
    parts: dict[str, list[Any]] = {}
    for repeat in repeats:
        tokens = measure.sample(n[-1], generator_for(name, seed, "nested", repeat, "tokens"))
        keys, values = head.keys(tokens.double()), head.values(tokens.double())
        for size in n:
            sample = sample_statistics(q, keys[:size], values[:size], 1.0)
            error = sample.center - target
            spread = torch.einsum("md,mde,me->m", along, sample.cov, along).sqrt()
            largest = sample.center.abs().amax(1) + target.abs().amax(1)
            columns = {
                "student": (error * along).sum(1) / spread,
                "chi2": quadratic(sample.cov, error, largest)[0],
                "dim": torch.full_like(spread, head.dim_out),
                "squared": error.square().sum(1),
                "effective_tokens": 1.0 / sample.sum_p2,
            }
            for kind, bounds in known.items():
                region = region_of(sample, level, bounds)
                columns |= {kind: region.contains(target).double(), f"{kind}_radius": region.radius}
            for column, found in columns.items():
                parts.setdefault(column, []).append(found.numpy(force=True))
    places = pd.MultiIndex.from_product([repeats, n, range(len(x))], names=["repeat", "n", "query"])
    return pd.DataFrame(
        {column: np.concatenate(found) for column, found in parts.items()}, index=places
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
        effective = 1.0 / (1.0 / part["effective_tokens"]).mean()
        row: dict[str, Any] = {"n": int(n), "rms": rms, "effective_tokens": effective}
        for kind in REGIONS:
            share = float(part[kind].mean()) if kind in part else math.nan
            near = (share * repeats + 1.0) / (repeats + 2.0)
            radius = float(part[f"{kind}_radius"].mean()) if kind in part else math.nan
            row |= {
                kind: share,
                f"{kind}_stderr": math.sqrt(near * (1.0 - near) / repeats),
                f"{kind}_size": radius / rms if rms > 0.0 else math.nan,
            }
        students = [t.to_numpy() for _, t in part.groupby("query")["student"]]
        varied = [t if t.std() > 0.0 else np.full_like(t, np.nan) for t in students]
        distances = [scipy.stats.kstest(t, "norm").statistic for t in varied]
        rows.append(
            row
            | {
                "kolmogorov": float(np.mean(distances)),
                "kolmogorov_noise": math.sqrt(math.pi / 2.0) * math.log(2.0) / math.sqrt(repeats),
                "skewness": float(np.mean([scipy.stats.skew(t) for t in varied])),
                "kurtosis": float(np.mean([scipy.stats.kurtosis(t) for t in varied])),
                "chi2_mean": float(part["chi2"].mean()) / dim,
                "chi2_median": float(part["chi2"].median() / scipy.stats.chi2.median(dim)),
            }
        )
    return pd.DataFrame(rows)


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
    x = torch.as_tensor(queries)
    return coverage_table(draw_regions(head, measure, x, tuple(n), range(repeats), level, seed))


# ---- as a run


@dataclass(frozen=True, eq=False)
class Cases:
    """A spec, and the session of the probe whose heads it names, if any."""

    spec: NormalitySpec
    session: Session | None
    known: dict[str, tuple[Head, Measure, Tensor]] = field(default_factory=dict)


def open_cases(spec: NormalitySpec) -> Cases:
    if not spec.heads:
        return Cases(spec, None)
    from esscher.probe.job import open_probe  # laws need no model

    return Cases(spec, open_probe(spec.probe))


def units(cases: Cases) -> Iterator[Unit]:
    spec = cases.spec
    for case in (*spec.laws, *spec.heads):
        for first in range(0, spec.repeats, REPEATS_PER_UNIT):
            count = min(REPEATS_PER_UNIT, spec.repeats - first)
            yield {"case": case.name, "first": first, "count": count}


def case_of(cases: Cases, name: str) -> tuple[Head, Measure, Tensor]:
    """Head, law and queries of a case: fresh tokens of a law, or a head's own queries in the
    text.
    """
    spec = cases.spec
    for law in spec.laws:
        if law.name == name:
            measure = law.law.build(torch.float64, spec.device)
            generator = generator_for(f"normality/{name}", spec.seed, "queries")
            queries = measure.sample(spec.queries, generator).double()
            return law.head.build(measure), measure, queries
    from esscher.probe.pools import held_layer  # laws need no model

    assert cases.session is not None
    case = next(case for case in spec.heads if case.name == name)
    pooled = held_layer(cases.session, case.layer)
    info = pooled.queries.info
    if case.head >= info.heads or info.softcap is not None:
        raise ValueError(
            f"heads: layer {case.layer} has {info.heads} heads; expected one of them, with uncapped"
            " scores"
        )
    shared = info.kv_head(case.head)
    k, v = pooled.rows.k[shared].double(), pooled.rows.v[shared].double()
    return *head_of_pool(k, v, info.scale), pooled.queries.q[case.head].double()


def head_of_pool(k: Tensor, v: Tensor, scale: float) -> tuple[Head, Pool]:
    """A head and a pool whose limit is attention on all keys: a token is a key and its value side
    by side, A picks the key, V the value.
    """
    width, out = k.shape[1], v.shape[1]
    eye = torch.eye(width + out, dtype=torch.float64, device=k.device)
    return Head(scale * eye[:, :width], eye[width:]), Pool(torch.cat([k, v], dim=1))


def hashes(cases: Cases) -> dict[str, str]:
    if cases.session is None:
        return {}
    return {"model": cases.session.loaded.sha256, "corpus": cases.session.windows.sha256}


def compute(cases: Cases, unit: Unit) -> dict[str, Any]:
    spec = cases.spec
    name, repeats = unit["case"], range(unit["first"], unit["first"] + unit["count"])
    if name not in cases.known:
        cases.known.clear()  # the tokens of one case at a time
        cases.known[name] = case_of(cases, name)
    head, measure, queries = cases.known[name]
    seeded = spec.level, spec.seed, f"normality/{name}"
    return {
        "draws": draw_regions(head, measure, queries, spec.n, repeats, *seeded).assign(case=name)
    }


def consolidate(cases: Cases, shards: Sequence[Shard]) -> dict[str, Any]:
    """Table coverage: a row for each case and n."""
    draws = pd.concat([shard.tables["draws"].to_pandas() for shard in shards], ignore_index=True)
    by_case = {case: coverage_table(part) for case, part in draws.groupby("case", sort=False)}
    return {"coverage": pd.concat(by_case, names=["case", None]).reset_index(level=0)}


def columns(spec: Any) -> dict[str, list[Column]]:
    """What the columns of the table are."""
    curve = {column.key: column for column in CURVE}
    found = [
        Column("case", "word", "case", "The law or the head whose tokens are drawn."),
        curve["n"],
        curve["rms"],
    ]
    told = {
        "effective_tokens": ("effective tokens", "One over the sum of squared softmax weights."),
        "kolmogorov": ("distance", "Kolmogorov distance of the studentised error to normal."),
        "kolmogorov_noise": ("noise", "That distance on average, for as many normal draws."),
        "skewness": ("skewness", "Skewness of the studentised error; 0 for a normal one."),
        "kurtosis": ("excess kurtosis", "Of the studentised error; 0 for a normal one."),
        "chi2_mean": ("χ²", "Mean of the squared studentised error over its degrees of freedom."),
        "chi2_median": ("χ² median", "Its median over that of chi-squared; 1 in the limit."),
    }
    for kind, words in REGIONS.items():
        told |= {
            kind: (kind, f"Share of draws whose {words}, holds the limit."),
            f"{kind}_stderr": ("±", f"Binomial standard error of the share of the {words}."),
            f"{kind}_size": (f"{kind} size", f"Mean radius of the {words}, over the rms error."),
        }
    found += [Column(key, "float", label, help) for key, (label, help) in told.items()]
    return {"coverage": found}


NORMALITY = Job(
    "normality", NormalitySpec, units, compute, consolidate, hashes, columns, open_cases
)
register("normality", "esscher.papers.normality:NORMALITY")
