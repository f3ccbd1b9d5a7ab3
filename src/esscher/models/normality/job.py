"""Normality and coverage as a run: a unit is some repeats of one case, a law or a head of a
model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from esscher.attention.head import Head
from esscher.convergence.columns import CURVE
from esscher.convergence.montecarlo.head import build_head
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.convergence.normality import REGIONS, Trial, coverage_table, draw_regions
from esscher.measures import Pool
from esscher.models.normality.spec import LawCase, NormalitySpec
from esscher.models.probe.memory import context_of
from esscher.models.probe.passes import hold
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column

__all__ = ["NORMALITY"]

REPEATS_PER_UNIT = 20  # seeds do not depend on it


def units(spec: NormalitySpec) -> Iterator[Unit]:
    for case in spec.cases:
        for first in range(0, spec.repeats, REPEATS_PER_UNIT):
            yield {
                "case": case.name,
                "first": first,
                "count": min(REPEATS_PER_UNIT, spec.repeats - first),
            }


@functools.lru_cache(maxsize=2)
def trial_of(spec: NormalitySpec, name: str) -> Trial:
    """What is drawn in a case. Queries are fresh tokens of a law; of a head, its own queries in the
    text.
    """
    case = next(case for case in spec.cases if case.name == name)
    if isinstance(case, LawCase):
        measure = case.law.build(torch.float64, spec.device)
        head = build_head(case.head, measure)
        queries = measure.sample(
            spec.queries, generator_for(f"normality/{name}", spec.seed, "queries")
        ).double()
        return Trial(head, measure, queries, spec.n, spec.level, spec.seed, f"normality/{name}")
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
    return Trial(
        head,
        pool,
        pooled.queries.q[case.head].double(),
        spec.n,
        spec.level,
        spec.seed,
        f"normality/{name}",
    )


def head_of_pool(k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[Head, Pool]:
    """A token is a key and its value side by side: A picks the key, V the value. Then Gamma is
    attention on the whole pool.
    """
    width, out = k.shape[1], v.shape[1]
    eye = torch.eye(width + out, dtype=torch.float64, device=k.device)
    return Head(scale * eye[:, :width], eye[width:]), Pool(torch.cat([k, v], dim=1))


def hashes(spec: NormalitySpec) -> dict[str, str]:
    if not spec.heads:
        return {}
    context = context_of(spec.probe, starts=True)
    return {"model": context.loaded.sha256, "corpus": context.windows.sha256}


def compute(spec: NormalitySpec, unit: Unit) -> dict[str, Any]:
    found = draw_regions(
        trial_of(spec, unit["case"]), range(unit["first"], unit["first"] + unit["count"])
    )
    return {"draws": found.assign(case=unit["case"])}


def consolidate(spec: NormalitySpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """coverage (a row for each case and n) and draws (every repeat)."""
    draws = pd.concat([shard.tables["draws"].to_pandas() for shard in shards], ignore_index=True)
    tables = [
        coverage_table(part).assign(case=case) for case, part in draws.groupby("case", sort=False)
    ]
    table = pd.concat(tables, ignore_index=True)
    return {
        "coverage": table[["case", *(name for name in table if name != "case")]],
        "draws": draws,
    }


WORDS = {
    "normal": "asymptotic region, of the central limit theorem",
    "bernstein": "proved region, from bounds on scores and values",
    "markov": "proved region, from the known mean square error",
}
KEPT = {column.key: column for column in CURVE}
CASE = Column("case", "word", "case", "The law or the head whose tokens are drawn.")
N = KEPT["n"]
EFFECTIVE = Column(
    "effective_tokens",
    "float",
    "effective tokens",
    "One over the sum of squared softmax weights of a draw.",
)
COVERAGE = (
    CASE,
    *(N, KEPT["rms"], EFFECTIVE),
    *(
        Column(kind, "float", kind, f"Share of draws whose {WORDS[kind]}, holds the limit.")
        for kind in REGIONS
    ),
    *(
        Column(
            f"{kind}_stderr",
            "float",
            f"{kind}: standard error",
            f"Binomial, of the share of the {WORDS[kind]}.",
            short="±",
        )
        for kind in REGIONS
    ),
    *(
        Column(
            f"{kind}_size",
            "float",
            f"{kind}: radius",
            f"Mean radius of the {WORDS[kind]}, over the rms error.",
            short=f"{kind} size",
        )
        for kind in REGIONS
    ),
    Column(
        "kolmogorov",
        "float",
        "distance to normal",
        "Kolmogorov distance of the studentised error to normal.",
        short="distance",
    ),
    Column(
        "kolmogorov_noise",
        "float",
        "its noise",
        "What that distance is on average for as many normal draws.",
        short="noise",
    ),
    Column(
        "skewness", "float", "skewness", "Skewness of the studentised error; 0 for a normal one."
    ),
    Column(
        "kurtosis",
        "float",
        "excess kurtosis",
        "Excess kurtosis of the studentised error; 0 for a normal one.",
    ),
    Column(
        "chi2_mean",
        "float",
        "chi-squared, mean",
        "Mean of the squared studentised error over its degrees of freedom.",
        short="χ²",
    ),
    Column(
        "chi2_median",
        "float",
        "chi-squared, median",
        "Its median over that of chi-squared; 1 in the limit.",
        short="χ² median",
    ),
)
DRAWS = (
    *(CASE, N, EFFECTIVE),
    Column("repeat", "int", "repeat", "Number of the draw of tokens."),
    Column("query", "int", "query", "Number of the query."),
    Column(
        "student",
        "float",
        "studentised error",
        "Error along the tilt over its plug-in standard deviation.",
    ),
    Column("chi2", "float", "squared error", "Squared error in units of the plug-in covariance."),
    Column(
        "dim",
        "float",
        "dimension",
        "Output coordinates, the degrees of freedom of the squared error.",
    ),
    Column("squared", "float", "squared error", "Squared error of one query in one draw."),
    *(
        Column(kind, "float", kind, f"1 where the {WORDS[kind]}, held the limit in this draw.")
        for kind in REGIONS
    ),
    *(
        Column(
            f"{kind}_radius",
            "float",
            f"{kind}: radius",
            f"Radius of the {WORDS[kind]}, in this draw.",
        )
        for kind in REGIONS
    ),
)
NORMALITY = Job(
    "normality",
    NormalitySpec,
    units,
    compute,
    consolidate,
    hashes=hashes,
    columns=lambda _: {"coverage": COVERAGE, "draws": DRAWS},
)
