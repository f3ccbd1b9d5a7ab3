"""Stored runs made up for the pages: tables as a probe writes them, for any number of layers and
heads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from esscher.errors.montecarlo import spec as _converge  # noqa: F401  registers its job
from esscher.probe.budget import budget_table
from esscher.probe.spec import ProbeSpec
from esscher.runs import JOBS, Run, RunSpec, find_job, load_run
from esscher.runs.columns import Declared, declare
from esscher.runs.run import Failure, Manifest, Start
from esscher.runs.store import Store
from esscher.runs.tables import as_tables

__all__ = [
    "ProbeLike",
    "atlas_run",
    "atlas_tables",
    "declared",
    "rules_run",
    "rules_tables",
    "sparse_run",
    "store_run",
]

KEYS = 16384


class ProbeLike(RunSpec):
    """A spec with the fields of a probe that the page reads."""

    job: Literal["probe"] = "probe"
    model: str = "example/six-layers"
    corpus: dict[str, Any] = Field(default={"text": ["prose.txt"], "max_tokens": KEYS})
    queries: int = 256
    epsilons: tuple[float, ...] = (0.05, 0.1, 0.2)


class OwnContexts(ProbeLike):
    """The same of a probe that compared keep rules."""

    pool: Literal["sequence"] = "sequence"


def store_run(
    path: Path,
    spec: RunSpec,
    tables: dict[str, Any],
    *,
    status: str = "complete",
    units: int = 1,
    failures: tuple[Failure, ...] = (),
) -> Run:
    """Write final tables and a manifest as the end of a run does."""
    store = Store(path)
    store.create()
    versions = {"python": "3.11.7", "esscher": "0.1.0", "torch": "2.13.0"}
    start = Start(
        started="2026-01-02T03:04:05+00:00",
        executor="this process",
        machine={},
        versions=versions,
        commit="c0ffee",
    )
    manifest = Manifest.begin(spec, [{"unit": i} for i in range(units)], {}, start)
    arrow = declare(as_tables(tables), declared(spec))
    changes: dict[str, Any] = {
        "status": status,
        "failures": failures,
        "ended": "2026-01-02T03:05:05+00:00",
        "tables": {name: table.num_rows for name, table in arrow.items()},
        "checksums": {
            name: store.write_table(name, table, manifest.header) for name, table in arrow.items()
        },
    }
    manifest.model_copy(update=changes).write(store)
    return load_run(path)


def declared(spec: RunSpec) -> Declared:
    """What the job of that name says its columns are."""
    given = (
        ProbeSpec(epsilons=getattr(spec, "epsilons", (0.1,)), pool=getattr(spec, "pool", "corpus"))
        if spec.job == "probe"
        else spec
    )
    return find_job(spec.job).columns(given) if spec.job in JOBS else {}


def atlas_run(
    path: Path,
    layers: int = 6,
    heads: int = 12,
    *,
    failed: float = 0.0,
    seed: int = 0,
    **fields: Any,
) -> Run:
    """A stored probe of a made-up model."""
    return store_run(
        path, ProbeLike(**fields), atlas_tables(layers, heads, failed=failed, seed=seed)
    )


def rules_run(path: Path, layers: int = 4, heads: int = 6) -> Run:
    """A stored probe of a made-up model that compared keep rules."""
    return store_run(path, OwnContexts(), rules_tables(layers, heads))


def sparse_run(path: Path) -> Run:
    """Two heads with hardly a number: few and quick figures."""
    rows = [
        {"layer": 0, "head": head, "status": "ok", "reason": "", "tokens_needed_10pct": 10.0 + head}
        for head in (0, 1)
    ]
    return store_run(path, ProbeLike(), {"heads": rows})


def atlas_tables(layers: int, heads: int, *, failed: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Tables of layers x heads, a share of the heads failed; numbers follow the sharp rates, so
    pictures look real.
    """
    generator = np.random.default_rng(seed)
    rows, curves, tails = [], [], []
    for layer in range(layers):
        for head in range(heads):
            if generator.random() < failed:
                rows.append(
                    {
                        "layer": layer,
                        "head": head,
                        "kv_head": head,
                        "status": "failed",
                        "reason": "NaN in the keys",
                    }
                )
                continue
            row = _head(layer, head, layers, generator)
            rows.append(row)
            curves += _curves(row, generator, moments=layer == 0)
            tails.append(_tails(row))
        if curves:
            curves.append(
                {
                    **curves[-1],
                    "head": -1,
                    "layer": layer,
                    "metric": "mean",
                    "kind": "montecarlo",
                    "stderr": 0.01,
                }
            )
    frame = pd.DataFrame(rows)
    found: dict[str, Any] = {"heads": frame}
    if curves:
        found |= {
            "curves": _joined(curves),
            "tails": _joined(tails),
            "budget": _budget(frame),
        }
    return found


# what a rule's error is of that of random keys, for heads of each kind, and how fast it falls with
# the share kept
RULES = {
    "random": {"streams": (1.0, 0.5), "retrieves": (1.2, 0.45), "averages": (0.2, 0.5)},
    "sinks:4+recent": {"streams": (0.02, 0.6), "retrieves": (0.7, 0.5), "averages": (0.3, 0.4)},
    "heavy": {"streams": (0.02, 0.9), "retrieves": (0.03, 0.9), "averages": (0.1, 0.5)},
    "topk": {"streams": (0.015, 1.0), "retrieves": (0.01, 1.0), "averages": (0.05, 0.5)},
    "neyman": {"streams": (0.012, 1.0), "retrieves": (0.008, 1.0), "averages": (0.04, 0.5)},
}
SHARES = np.array([0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.4, 0.6])


def rules_tables(layers: int, heads: int, seed: int = 1) -> dict[str, Any]:
    """Tables of a probe that compared keep rules: its frontier, the kinds of its heads, and the
    totals of every rule.
    """
    found = atlas_tables(layers, heads, seed=seed)
    generator, frame = np.random.default_rng(seed), found["heads"]
    kinds = [
        ("streams", "retrieves", "averages")[k]
        for k in generator.choice(3, len(frame), p=[0.6, 0.25, 0.15])
    ]
    parts = []
    for row, kind in zip(frame.to_dict("records"), kinds, strict=True):
        for rule, own in RULES.items():
            factor, power = own[kind]
            error = (
                factor
                * generator.lognormal(0, 0.2)
                * SHARES**-power
                * np.sqrt(1 - SHARES)
                * 0.2**power
            )
            place = {
                "layer": row["layer"],
                "head": row["head"],
                "kv_head": row["kv_head"],
                "rule": rule,
            }
            parts.append(
                {
                    **place,
                    "share": SHARES,
                    "kept": 400 * SHARES,
                    "keys": 400.0,
                    "rms": 2 * error,
                    "relative": error,
                }
            )
            parts[-1] |= {"q95": 4 * error, "accuracy": 1e-9}
    table = pd.DataFrame(_joined(parts))
    needs = {"kind": kinds, "kind_reason": [f"{kind}, as the numbers say" for kind in kinds]}
    curves = {
        rule: np.array([part["relative"] for part in parts if part["rule"] == rule])
        for rule in ("heavy", "neyman")
    }
    for percent in (5, 10, 20):
        heavy, floor = (
            [
                math.exp(np.interp(-math.log(percent / 100), -np.log(row), np.log(400 * SHARES)))
                for row in curves[rule]
            ]
            for rule in ("heavy", "neyman")
        )
        needs |= {
            f"{which}_rule_{percent}pct": ["heavy"] * len(frame) for which in ("best", "cache")
        }
        needs |= {
            f"best_kept_{percent}pct": heavy,
            f"cache_kept_{percent}pct": heavy,
            f"floor_kept_{percent}pct": floor,
        }
    asked = [(epsilon, None) for epsilon in (0.05, 0.1, 0.2)]
    return {
        **found,
        "heads": frame.assign(**needs),
        "frontier": table,
        "budget": budget_table(table, asked),
    }


Columns = dict[str, Any]


def _joined(parts: list[Columns]) -> Columns:
    """Columns of equal names one after the other, single values repeated; much faster than joining
    frames.
    """
    sizes = [max(np.size(value) for value in part.values()) for part in parts]
    spread = [
        {name: np.broadcast_to(value, size) for name, value in part.items()}
        for part, size in zip(parts, sizes, strict=True)
    ]
    return {name: np.concatenate([part[name] for part in spread]) for name in parts[0]}


def _head(layer: int, head: int, layers: int, generator: np.random.Generator) -> dict[str, Any]:
    h = float(np.exp(generator.normal(0.2 + 0.5 * layer / layers, 0.6)))
    reach, s = float(np.exp(generator.normal(0.0, 0.2))), 1.2 * h
    coupling, horizon = h**2 * float(np.exp(generator.normal(0.0, 0.15))), h / math.sqrt(reach)
    sharp, beta = (
        min(0.5, (math.sqrt(1 + 4 / h**2) - 1) / 4),
        min(0.5, 1 / (1 + 1.4 * h**2)) * float(generator.uniform(0.95, 1.0)),
    )
    limit = float(generator.uniform(0.5, 2.0))
    delta = limit * math.exp(min(s, 4.0) ** 2 / 2)
    needed = {f"tokens_needed_{p}pct": _needed(beta, p / 100, s) for p in (5, 10, 20)}
    effective = max(1.0, KEYS * math.exp(-min(s**2, 9.6)))
    frozen = float(s**2 > 2 * math.log(KEYS))
    sink = float(generator.beta(1, 8))
    regime = (
        "sink-dominated"
        if sink > 0.4
        else "frozen"
        if frozen
        else "diffuse"
        if effective > 0.1 * KEYS
        else "selective"
    )
    return {
        "layer": layer,
        "head": head,
        "kv_head": head // 2,
        "status": "ok",
        "reason": "",
        "n_keys": KEYS,
        "n_queries": 256,
        "reach": reach,
        "horizon": horizon,
        "horizon2": h,
        "coupling": coupling,
        "beta_paper": 1 / (2 * (1 + 32 * coupling)),
        "beta_paper_experimental": 1 / (2 * (1 + coupling)),
        "beta_sharp": min(0.5, 1 / (1 + 2 * h**2)),
        "beta_sharp_rms": sharp,
        "beta_fit": beta,
        "beta_low": beta - 0.02,
        "beta_high": beta + 0.02,
        "rms_at_n": limit * math.exp(s / 2) * KEYS**-beta,
        "relative_at_n": math.exp(s / 2) * KEYS**-beta,
        **needed,
        "effective_tokens": effective,
        "khat": 0.25 * s,
        "khat_low": 0.25 * s - 0.1,
        "khat_high": 0.25 * s + 0.1,
        "khat_label": "good" if s < 2 else "bad",
        "sink_mass": sink,
        "share_frozen": frozen,
        "score_sd": s,
        "delta_constant": delta,
        "freezing_tokens": math.exp(s**2 / 2),
        "limit_rms": limit,
        "token_space": "hidden",
        "regime": regime,
        "regime_reason": f"About {effective:.3g} of {KEYS} tokens are effective, and s is {s:.2f}.",
        "signatures": "exploded constants" if s > 3 else "",
        "score_verdict": "sub-Gaussian",
    }


def _needed(beta: float, epsilon: float, s: float) -> float:
    needed = math.ceil((math.exp(s / 2) / epsilon) ** (1 / beta)) if beta > 0.05 else math.inf
    return float(needed) if needed < 1024 * KEYS else math.nan


def _curves(row: dict[str, Any], generator: np.random.Generator, *, moments: bool) -> list[Columns]:
    n = np.unique((16 * 2.0 ** np.arange(0, 20.5, 0.5)).astype(int))
    made = [_curve(row, "l2", "exact", n, 1.0)]
    if moments:
        few = np.array([64, 256, 1024, 4096])
        for metric in ("mean", "cov"):
            factor = generator.lognormal(-1.0, 0.1, few.size)
            made.append(_curve(row, metric, "montecarlo", few, factor))
    return made


def _curve(row: dict[str, Any], metric: str, kind: str, n: Any, factor: Any) -> Columns:
    rms = row["limit_rms"] * math.exp(row["score_sd"] / 2) * n ** -row["beta_fit"] * factor
    slope = (
        np.gradient(np.log(np.maximum(rms, 1e-12)), np.log(n))
        if kind == "exact"
        else np.full(n.size, np.nan)
    )
    return {
        "layer": row["layer"],
        "head": row["head"],
        "metric": metric,
        "kind": kind,
        "n": n,
        "rms": rms,
        "relative": rms / row["limit_rms"],
        "stderr": 0.06 * rms if kind == "montecarlo" else 0.0,
        "q95": 2.2 * rms if kind == "exact" else np.nan,
        "local_slope": slope,
    }


def _tails(row: dict[str, Any]) -> Columns:
    z = np.linspace(0, 6, 41)
    gaussian = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z])
    survival = gaussian ** (0.8 + 0.05 * row["score_sd"])
    return {
        "layer": row["layer"],
        "head": row["head"],
        "z": z,
        "survival": survival,
        "gaussian": gaussian,
    }


def _budget(heads: pd.DataFrame) -> pd.DataFrame:
    rows = []
    total = KEYS * len(heads)
    for percent, base in ((5, 0.05), (10, 0.2), (20, 0.45)):
        for split, factor in (
            ("every head at the error", 0.9),
            ("uniform", 0.5),
            ("best split", 1.2),
        ):
            saved = base * factor
            rows.append(
                {
                    "epsilon": percent / 100,
                    "rule": "random",
                    "split": split,
                    "keys": total * (1 - saved),
                    "ratio": 1 - saved,
                    "saved": saved,
                    "error": percent / 100,
                }
            )
    return pd.DataFrame(rows)
