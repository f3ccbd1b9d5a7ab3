"""From the final state of a layer to its rows: curves, rates, tokens needed, tails and regime of every head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.head import horizon_of_covariances
from esscher.convergence.budget import asymptotic_from, tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit
from esscher.convergence.rate.fit import fit_rate
from esscher.convergence.rate.points import pool_window
from esscher.diagnostics import moments as token_moments
from esscher.diagnostics import tails
from esscher.diagnostics.regimes import HeadEvidence, classify, share_frozen
from esscher.diagnostics.scores import ScoreShape, first_centres, score_histogram, softmax_statistics
from esscher.diagnostics.tails import TailFit
from esscher.models.huggingface.maps import LinearMaps
from esscher.models.probe.head import HeadState
from esscher.models.probe.layer import LayerInfo, LayerState
from esscher.models.probe.spec import ProbeSpec, drawn_ladder, kept_ladder
from esscher.theory.bohbot import moment_exponent, moment_exponent_experimental
from esscher.theory.sharp import freezing_tokens, l2_exponent_rms, l2_exponent_typical

__all__ = ["COLUMNS", "Tables", "failed_row", "layer_tables"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

METRICS = {"replacement": "l2", "bernoulli": "l2_kept"}  # in curves.parquet

# The columns of heads.parquet, in order; `tokens_needed_*` come once for each epsilon.
COLUMNS = [
    *("layer", "head", "kv_head", "status", "reason", "n_keys", "n_keys_least", "n_keys_most", "n_queries"),
    *("n_kept_queries", "token_space", "reach", "horizon", "horizon2", "coupling"),
    *("beta_paper", "beta_paper_experimental", "beta_sharp", "beta_sharp_rms", "beta_fit", "beta_low", "beta_high"),
    *("local_slope_at_n", "rms_at_n", "relative_at_n", "q95_at_n", "asymptotic_from", "delta_constant", "limit_rms"),
    *("effective_tokens", "entropy", "score_sd", "share_frozen", "freezing_tokens", "khat", "khat_low", "khat_high"),
    *("khat_label", "sink_mass", "score_verdict", "token_verdict", "regime", "regime_reason", "signatures", "accuracy"),
]
WORDS = {
    "status",
    "reason",
    "token_space",
    "khat_label",
    "score_verdict",
    "token_verdict",
    "regime",
    "regime_reason",
    "signatures",
}


@dataclass
class Tables:
    """Rows by table, as they are found."""

    heads: list[dict[str, Any]] = field(default_factory=list)
    curves: list[pd.DataFrame] = field(default_factory=list)
    scores: list[pd.DataFrame] = field(default_factory=list)
    tails: list[pd.DataFrame] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)

    def finished(self) -> dict[str, Any]:
        found: dict[str, Any] = {"heads": pd.DataFrame(self.heads)}
        if self.layers:
            found["layers"] = pd.DataFrame(self.layers)
        for name in ("curves", "scores", "tails"):
            if getattr(self, name):
                found[name] = pd.concat(getattr(self, name), ignore_index=True)
        return found


def layer_tables(
    spec: ProbeSpec,
    state: LayerState,
    maps: LinearMaps | None,
    clusters: Indices,
    heads: Iterable[tuple[int, HeadState | str]] | None = None,
) -> Tables:
    """Every table's rows of one layer. ``clusters`` (m,): the window of each query; ``heads`` come instead of the state's."""
    layer = _Layer(spec, state, maps, clusters)
    tables = Tables(layers=[layer.row()])
    for head, known in state.heads.items() if heads is None else heads:
        try:
            if isinstance(known, str):
                raise ValueError(known)
            layer.measure(head, known, tables)
        except ValueError as reason:
            tables.heads.append(failed_row(spec, state.info, head, str(reason), state.keys, len(clusters)))
    return tables


def failed_row(spec: ProbeSpec, info: LayerInfo, head: int, reason: str, keys: int, queries: int) -> dict[str, Any]:
    """The row of a head that could not be measured."""
    row = {name: "" if name in WORDS else math.nan for name in columns(spec)}
    kv_head = info.kv_head(head)
    numbers = {"layer": info.layer, "head": head, "kv_head": kv_head, "n_queries": queries, "n_kept_queries": 0}
    numbers |= dict.fromkeys(("n_keys", "n_keys_least", "n_keys_most"), keys)
    return row | numbers | {"status": "failed", "reason": reason, "regime": "unknown"}


def columns(spec: ProbeSpec) -> list[str]:
    place = COLUMNS.index("asymptotic_from")
    return [*COLUMNS[:place], *(needed_column(epsilon) for epsilon in spec.epsilons), *COLUMNS[place:]]


def needed_column(epsilon: float) -> str:
    """tokens_needed_10pct for 0.1; 2.5 % is written 2_5pct."""
    return f"tokens_needed_{100 * epsilon:g}pct".replace(".", "_")


class _Layer:
    """One layer's final moments, and what its heads share."""

    def __init__(self, spec: ProbeSpec, state: LayerState, maps: LinearMaps | None, clusters: Indices) -> None:
        self.spec, self.state, self.info, self.maps, self.clusters = spec, state, state.info, maps, clusters
        self.q, self.k, self.v = (token_moments.finish(x) for x in (state.moments.q, state.moments.k, state.moments.v))
        self.hidden = None if state.moments.hidden is None else token_moments.finish(state.moments.hidden)
        self.interpolation: dict[str, float] = {}  # error of the score grids, measured on the layer's first head

    def row(self) -> dict[str, Any]:
        """What is known of the tokens that enter the layer."""
        hidden, kurtosis = self.hidden, math.nan
        if hidden is not None and hidden.kurtosis is not None and not bool(hidden.kurtosis.isnan().all()):
            kurtosis = float(hidden.kurtosis.nan_to_num(-math.inf).max())
        largest = math.nan if hidden is None or hidden.largest_z is None else float(hidden.largest_z)
        return {
            "layer": self.info.layer,
            "tokens": self.q.count,
            "reach": math.nan if hidden is None else _norm(hidden.cov),
            "kurtosis_max": kurtosis,
            "largest_z": largest,
            "gaussian_z": math.nan if hidden is None else hidden.gaussian_z,
            "verdict": "unknown" if hidden is None else hidden.verdict,
            "reason": "" if hidden is None else hidden.reason,
        }

    def measure(self, head: int, known: HeadState, tables: Tables) -> None:
        """Append the rows of one head to every table."""
        drawn = self._curve(known.drawn, drawn_ladder(self.spec, known.keys), "replacement")
        kept = self._curve(known.kept, kept_ladder(self.spec, known.kept.mean_keys), "bernoulli")
        mass, first, grid = known.drawn.cells[-2], first_centres(known.drawn), known.drawn.grid
        softmax = softmax_statistics(mass, first, grid.spacing, grid.points)
        shape = score_histogram(mass, first, grid.spacing, points=grid.points)
        tail = tails.finish(known.top)
        row = self._identity(head, known) | self._theory(head)
        row |= self._rates(drawn, known.keys)
        row |= {
            "effective_tokens": float(1 / np.mean(1 / softmax.effective_tokens)),
            "entropy": float(softmax.entropy.mean()),
            "score_sd": float(np.median(softmax.sd)),
            "share_frozen": share_frozen(softmax.sd, known.drawn.keys.double()),
            "freezing_tokens": freezing_tokens(float(np.median(softmax.sd))),
            "sink_mass": float(self.state.sink_mass[head].double().mean()),
            "score_verdict": shape.verdict,
            "token_verdict": "unknown" if self.hidden is None else self.hidden.verdict,
            **_tail_row(tail),
        }
        row |= self._regime(head, row, drawn, tail)
        tables.heads.append({name: row[name] for name in columns(self.spec)})
        tables.curves += [curve_rows(self.info.layer, head, curve) for curve in (drawn, kept)]
        place = {"layer": self.info.layer, "head": head}
        tables.scores.append(_histogram_rows(shape).assign(**place))
        tables.tails.append(_survival_rows(shape).assign(**place))

    def _curve(self, state: Deposit, n: Indices, sampling: str) -> ErrorCurve:
        """The exact error of n keys drawn with replacement, or of keys kept with probability n / (their mean number)."""
        errors = deposit.finish(state, n, sampling, interpolation=self.interpolation.get(sampling))
        self.interpolation.setdefault(sampling, errors.interpolation)
        curve = ErrorCurve.from_queries(
            n, errors.queries(), errors.dmse_dlogn, kind="exact", accuracy=errors.accuracy, origin=f"exact, {sampling}"
        )
        return replace(curve, metric=METRICS[sampling])

    def _identity(self, head: int, known: HeadState) -> dict[str, Any]:
        return {
            "layer": self.info.layer,
            "head": head,
            "kv_head": self.info.kv_head(head),
            "status": "ok",
            "reason": self.info.note,
            "n_keys": known.keys,
            "n_keys_least": int(known.drawn.keys.min()),
            "n_keys_most": int(known.drawn.keys.max()),
            "n_queries": len(self.clusters),
            "n_kept_queries": len(known.rows),
        }

    def _theory(self, head: int) -> dict[str, Any]:
        """Reach, horizons, coupling and the exponents that follow from them.

        Where q and k are affine functions of what enters the layer, tokens are that: A = scale W_k^T W_q. Elsewhere (rotary
        positions, norms) the token is the pair (q, k) itself and A = scale times the map from its one half to the other, so
        that reach is the norm of their joint covariance and H = scale ||Sigma_k||^{1/2}. The two-sided horizon is the same in
        both.
        """
        own = self.info.kv_head(head)
        key_cov, query_cov, scale = self.k.cov[own], self.q.cov[head], self.info.scale
        horizon2 = horizon_of_covariances(key_cov, query_cov, scale)
        if self.maps is not None and self.maps.affine and self.hidden is not None and self.maps.wq is not None:
            width = self.maps.wq.shape[0] // self.info.heads
            wq = self.maps.wq[head * width : (head + 1) * width].double().to(key_cov.device)
            space, reach, horizon = "hidden", _norm(self.hidden.cov), horizon_of_covariances(key_cov, wq @ wq.T, scale)
        else:
            space = "query-key"
            reach, horizon = _norm(self.state.moments.pair_cov(head, own)), scale * math.sqrt(_norm(key_cov))
        coupling = reach * horizon**2
        return {
            "token_space": space,
            "reach": reach,
            "horizon": horizon,
            "horizon2": horizon2,
            "coupling": coupling,
            "beta_paper": moment_exponent(coupling),
            "beta_paper_experimental": moment_exponent_experimental(coupling),
            "beta_sharp": l2_exponent_typical(horizon2),
            "beta_sharp_rms": l2_exponent_rms(horizon2),
        }

    def _rates(self, curve: ErrorCurve, keys: int) -> dict[str, Any]:
        """Fitted exponent with its interval over queries, the error at the pool's size, tokens needed."""
        assert curve.queries is not None
        clustered = replace(curve, queries=replace(curve.queries, clusters=self.clusters))
        fit = fit_rate(clustered, window=pool_window(curve.n, keys), raise_on_failure=False)
        last = int(np.flatnonzero(curve.n <= keys)[-1])
        return {
            "beta_fit": fit.exponent,
            "beta_low": fit.interval[0],
            "beta_high": fit.interval[1],
            "local_slope_at_n": math.nan if curve.slope is None else float(curve.slope[last]),
            "rms_at_n": float(curve.rms[last]),
            "relative_at_n": float(curve.relative[last]),
            "q95_at_n": math.nan if curve.q95 is None else float(curve.q95[last]),
            **{needed_column(epsilon): _or_nan(tokens_needed, curve, epsilon) for epsilon in self.spec.epsilons},
            "asymptotic_from": _or_nan(asymptotic_from, curve, 0.1),
            "delta_constant": math.nan if curve.delta is None else math.sqrt(curve.delta),
            "limit_rms": curve.scale,
            "accuracy": curve.accuracy,
        }

    def _regime(self, head: int, row: dict[str, Any], curve: ErrorCurve, tail: TailFit) -> dict[str, str]:
        plain = math.sqrt(float(self.v.cov[self.info.kv_head(head)].trace()))
        n = float(curve.n[np.flatnonzero(curve.n <= self.state.keys)[-1]])
        found = classify(
            HeadEvidence(
                n=row["n_keys"],
                s=row["score_sd"],
                effective_tokens=row["effective_tokens"],
                share_frozen=row["share_frozen"],
                entropy=row["entropy"],
                sink_mass=row["sink_mass"],
                khat=row["khat"],
                khat_threshold=tail.threshold,
                exponent=row["beta_fit"],
                exponent_low=row["beta_low"],
                exponent_high=row["beta_high"],
                relative_rms=row["relative_at_n"],
                constant_ratio=row["rms_at_n"] * math.sqrt(n) / plain if plain > 0 else math.nan,
                coupling=row["coupling"],
                tokens=row["token_verdict"],
                scores=row["score_verdict"],
            )
        )
        reason = " ".join([found.reason, *found.signatures.values()])
        return {"regime": found.label, "regime_reason": reason, "signatures": ", ".join(found.signatures)}


# ---- curves ----------------------------------------------------------------------------------------------------------


def curve_rows(layer: int, head: int, curve: ErrorCurve) -> pd.DataFrame:
    """The tidy rows of curves.parquet."""
    frame = curve.to_frame()
    frame.insert(0, "layer", layer)
    frame.insert(1, "head", head)
    empty = np.full(curve.n.size, np.nan)
    frame["local_slope"] = empty if curve.slope is None else curve.slope
    frame["effective_tokens"] = empty if curve.effective_tokens is None else curve.effective_tokens
    frame["sampling"] = "bernoulli" if curve.metric == METRICS["bernoulli"] else "replacement"
    return frame


def _or_nan(question: Callable[[ErrorCurve, float], int], curve: ErrorCurve, value: float) -> float:
    try:
        return float(question(curve, value))
    except ValueError:  # not reached within the ladder
        return math.nan


# ---- rows ------------------------------------------------------------------------------------------------------------


def _tail_row(tail: TailFit) -> dict[str, Any]:
    low, high = tail.interval
    return {"khat": tail.median, "khat_low": low, "khat_high": high, "khat_label": tail.label}


def _histogram_rows(shape: ScoreShape) -> pd.DataFrame:
    middle = 0.5 * (shape.edges[1:] + shape.edges[:-1])
    return pd.DataFrame({"z": middle, "density": shape.density, "gaussian": shape.gaussian_density})


def _survival_rows(shape: ScoreShape) -> pd.DataFrame:
    return pd.DataFrame({"z": shape.at, "survival": shape.survival, "gaussian": shape.gaussian_survival})


def _norm(cov: Tensor) -> float:
    return float(torch.linalg.eigvalsh(cov)[-1])
