"""Exact errors of random keys, with the exponents that theory gives beside the measured ones, and
the regime of a head.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.head import coupling_of, horizon_of_covariances
from esscher.errors import grid as deposit
from esscher.errors.curve import CURVE, HORIZONS
from esscher.errors.grid import Deposit
from esscher.probe.curves import (
    EFFECTIVE_TOKENS,
    METRIC,
    AllKeys,
    add_keys,
    curve_of,
    curve_rows,
    error_numbers,
    fitted,
    headline,
    headline_numbers,
    needed_column,
    no_keys,
    percent,
)
from esscher.probe.spec import COMPARED, FIT, ProbeSpec, drawn_ladder, fit_range
from esscher.probe.statistic import (
    ACCURACY,
    HEAD,
    LAYER,
    REACH,
    Head,
    HeadEnd,
    HeadView,
    Numbers,
    Result,
    Statistic,
    largest_variance,
)
from esscher.runs.columns import Column, with_ends
from esscher.tails.regimes import REGIMES, HeadEvidence, classify
from esscher.tails.scores import (
    GAUSSIAN_SURVIVAL,
    SURVIVAL_AT,
    khat_threshold,
    score_statistics,
    tail_verdict,
)
from esscher.theory import bohbot, sharp

WHICH = replace(
    CURVE[0],
    words=(METRIC, "mean", "cov"),
    meanings=(
        "exact, keys drawn with replacement",
        "mean of the output",
        "covariance of the output",
    ),
)
CURVES = (
    LAYER,
    HEAD,
    WHICH,
    *CURVE[1:],
    Column("local_slope", "float", "local slope", "Slope of log error against log n at this n."),
    EFFECTIVE_TOKENS,
)
TAILS = (
    Column("z", "float", "z", "Score in standard deviations above the query's mean."),
    Column("survival", "float", "survival", "Share of the scores above z standard deviations."),
    Column("gaussian", "float", "Gaussian", "The same for a Gaussian of equal variance."),
    LAYER,
    HEAD,
)


class Draws(Statistic):
    """Keys drawn with replacement: the exact error at every n. Also the softmax weights and the
    shape of the scores on all keys, and whether the limit is the model's own output.

    The state is deposits of all queries on score grids, or all keys where scores are too wide.
    """

    name = "draws"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        ends = {number.key: (number.low, number.high) for number in headline_numbers(spec)}
        needed = (_needed(spec, eps, first) for first, eps in enumerate(spec.epsilons, start=3))
        found = (_exponent(spec), *AT_POOL, *_compared(spec), *needed, *FINAL, *SOFTMAX, ACCURACY)
        if spec.pool == "sequence":
            found = (*found, DIFFERENCE)
        return tuple(replace(column, ends=ends.get(column.key)) for column in found)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES, "tails": TAILS}

    def init(self, head: HeadView) -> Deposit:
        return no_keys(head, len(head.queries))

    def update(self, state: Deposit | AllKeys, head: HeadView) -> Deposit | AllKeys:
        return add_keys(state, head, lambda view: (view.scores, view.values))

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def reduce(self, state: Deposit | AllKeys, head: Head) -> Numbers:
        found = error_numbers(state, drawn_ladder(head.spec, head.n_keys))
        numbers = state.statistics() if isinstance(state, AllKeys) else score_statistics(state)
        return found | {name: torch.from_numpy(values) for name, values in numbers.items()}

    def measure(self, head: HeadView) -> Numbers:
        found = super().measure(head)
        return found if head.outputs is None else {**found, "outputs": head.outputs}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        curve = curve_of(found, drawn_ladder(end.spec, end.n_keys))
        place = int(np.flatnonzero(curve.n <= end.row["n_keys"])[-1])  # the pool, or the most below
        spread = float(np.median(found["sd"].numpy()))
        seen = found["survival"][~found["survival"].isnan().any(1)].numpy()
        above = seen.mean(axis=0) if len(seen) else np.full(len(SURVIVAL_AT), math.nan)
        frozen_from = 2 * found["keys"].double().log()
        row = headline(curve, end.spec, end.n_keys) | {
            "rms_at_n": float(curve.rms[place]),
            "relative_at_n": float(curve.relative[place]),
            "delta_constant": math.nan if curve.delta is None else math.sqrt(curve.delta),
            "limit_rms": curve.scale,
            "effective_tokens": float(1 / (1 / found["effective"]).mean()),
            "score_sd": spread,
            "share_frozen": float((found["sd"].square() > frozen_from).double().mean()),
            "freezing_tokens": sharp.freezing_tokens(spread),
            "score_verdict": tail_verdict(above, float(np.median(found["keys"]))),
            "accuracy": curve.accuracy,
        }
        if end.spec.pool == "sequence":
            outputs = found["outputs"].double()
            apart, size = (found["limit"] - outputs).abs().max(), outputs.abs().max()
            row["output_difference"] = float(apart / size if size > 0 else apart)
        tails = {"z": SURVIVAL_AT, "survival": above, "gaussian": GAUSSIAN_SURVIVAL}
        return Result(row, {"curves": curve_rows(curve), "tails": pd.DataFrame(tails)})


class Theory(Statistic):
    """Reach, horizons and coupling of a head's tokens, and the exponents that theory gives.

    Where q and k are affine functions of what enters the layer, tokens are that: A = scale W_k^T
    W_q. Elsewhere (rotary positions, norms) the token is the pair (q, k) itself and A = scale times
    the map from its one half to the other, so that reach is the norm of their joint covariance and
    H = scale ||Sigma_k||^{1/2}. The two-sided horizon is the same in both.
    """

    name = "theory"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return THEORY

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        moments, gram = end.moments, end.gram
        head, scale = end.head, end.info.scale
        pair = moments.pair.cov[head]
        width = len(pair) // 2
        query_cov, key_cov = pair[:width, :width], pair[width:, width:]
        if gram is not None and moments.hidden is not None:
            space, reach = "hidden", largest_variance(moments.hidden.cov)
            outer = gram[head].to(key_cov)
        else:
            space, reach = "query-key", largest_variance(pair)
            outer = torch.eye(len(key_cov)).to(key_cov)
        horizon = horizon_of_covariances(key_cov, outer, scale)
        horizon2 = horizon_of_covariances(key_cov, query_cov, scale)
        row = {"token_space": space, "reach": reach, "horizon": horizon}
        return Result(row | _exponents(coupling_of(math.sqrt(reach), horizon), horizon2), {})


def _exponents(coupling: float, horizon2: float) -> dict[str, float]:
    return {
        "horizon2": horizon2,
        "coupling": coupling,
        "beta_paper": bohbot.moment_exponent(coupling),
        "beta_paper_experimental": bohbot.moment_exponent_experimental(coupling),
        "beta_sharp": sharp.l2_exponent_typical(horizon2),
        "beta_sharp_rms": sharp.l2_exponent_rms(horizon2),
    }


class Regime(Statistic):
    """Which regime a head is in, from its row."""

    name = "regime"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return REGIME

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        row, tails = end.row, end.tails
        seen = round(float(end.found["tail"]["count"].double().mean()))
        verdict = "unknown" if tails is None else tails.verdict
        names = [part.name for part in fields(HeadEvidence) if part.name in row]
        regime, reason, signatures = classify(
            HeadEvidence(
                **{name: row[name] for name in names},
                token_verdict=verdict,
                khat_threshold=khat_threshold(seen),
            )
        )
        found_row = {
            "token_verdict": verdict,
            "regime": regime,
            "regime_reason": " ".join([reason, *signatures.values()]),
            "signatures": ", ".join(signatures),
        }
        return Result(found_row, {})


# ---- Horizon ablation: scores multiplied with alpha, and the exponent against alpha^2.


Scaled = dict[str, Any]
"""Deposits of the kept queries by scale, or all keys where scores are too wide for a grid."""


class Scales(Statistic):
    """Rows of the table ``scales``, where a probe asks for scales."""

    name = "scales"

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"scales": scale_columns(spec)} if spec.scales else {}

    def init(self, head: HeadView) -> Scaled:
        empty = no_keys(head, len(head.kept))
        return {str(scale): empty for scale in head.spec.scales}

    def update(self, state: Scaled, head: HeadView) -> Scaled:
        if not len(head.kept):
            return state
        parts = {}
        for name, known in state.items():

            def scaled(view: HeadView, scale: float = float(name)) -> tuple[Tensor, Tensor]:
                return scale * view.kept_scores, view.values

            parts[name] = add_keys(known, head, scaled)
        return parts

    def merge(self, a: Scaled, b: Scaled) -> Scaled:
        return {name: deposit.merge(a[name], b[name]) for name in a}

    def reduce(self, state: Scaled, head: Head) -> Numbers:
        ladder, found = drawn_ladder(head.spec, head.n_keys), dict[str, torch.Tensor]()
        for name, known in state.items():
            if len(known.keys):
                numbers = error_numbers(known, ladder)
                found |= {f"{name} {key}": x for key, x in numbers.items()}
        return found

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        rows = []
        for scale in end.spec.scales:
            start = f"{scale} "
            own = {key.removeprefix(start): x for key, x in found.items() if key.startswith(start)}
            curve = curve_of(own, drawn_ladder(end.spec, end.n_keys))
            fit = fitted(curve, fit_range(end.spec, end.n_keys), end.queries.windows[end.kept])
            theory = _exponents(scale**2 * end.row["coupling"], scale * end.row["horizon2"])
            sampled = MOMENT_EXPONENTS if end.spec.moments else ()  # filled in at the end
            unknown = {column.key: math.nan for column in sampled}
            rows.append({"scale": scale, **fit, **theory, **unknown})
        return Result({}, {"scales": pd.DataFrame(rows)} if rows else {})


# ---- columns


def _needed(spec: ProbeSpec, epsilon: float, first: int) -> Column:
    """In own contexts these are draws, often more than there are keys."""
    error, own = percent(epsilon), spec.pool == "sequence"
    what = "tokens, drawn with replacement from the pool,"
    if own:
        what = "draws with replacement from the keys a query sees, however few,"
    kind = "draws" if own else "tokens"
    return Column(
        needed_column(epsilon),
        "float",
        f"{kind} for {error} %",
        f"Fewest {what} whose relative error is at most {error} %.",
        scale="log",
        first=first,
        short=f"{kind} {error} %",
    )


def _exponent(spec: ProbeSpec) -> Column:
    low, high = spec.fit or FIT
    where = f"from {low:,} to {high:,} drawn keys"
    if spec.fit is None and spec.pool == "sequence":
        where = "from 16 drawn keys to an eighth of those that a query sees"
    return Column(
        "beta_fit",
        "float",
        "measured exponent",
        f"Exponent of the exact error {where}: 0.5 is the square-root law, less is slower.",
        scale="linear",
        first=6,
        metric=METRIC,
        short="exponent",
    )


def _compared(spec: ProbeSpec) -> tuple[Column, ...]:
    drawn = f"{COMPARED:,} keys drawn with replacement"
    relative = f"Error of {drawn} divided by the size of the limit; it compares between pools."
    effective = f"Effective tokens of {drawn}."
    return (
        Column(
            f"relative_{COMPARED}", "float", f"relative error, {COMPARED:,} keys", relative, "log"
        ),
        Column(
            f"effective_{COMPARED}",
            "float",
            f"effective tokens, {COMPARED:,} keys",
            effective,
            "log",
        ),
    )


AT_POOL = (
    Column("rms_at_n", "float", "rms error", "Error of as many drawn keys as the pool has.", "log"),
    Column("relative_at_n", "float", "relative error", "The same over the limit's size.", "log"),
)
FINAL = (
    Column(
        "delta_constant",
        "float",
        "delta constant",
        "The error is about this over the square root of n once n is large (delta method).",
    ),
    Column("limit_rms", "float", "size of the limit", "Root mean square output on all keys."),
)
SOFTMAX = (
    EFFECTIVE_TOKENS,
    Column("score_sd", "float", "score spread", "Median standard deviation s of a query's scores."),
    Column(
        "share_frozen",
        "float",
        "frozen queries",
        "Share of queries whose scores spread so widely (s² > 2 log n) that a few keys take all.",
    ),
    Column(
        "freezing_tokens",
        "float",
        "freezing point",
        "Below about this many tokens the softmax of a typical query rests on its few largest"
        " scores.",
    ),
    Column("score_verdict", "word", "scores", "Scores are sub-Gaussian, heavier or lighter."),
)
DIFFERENCE = Column(
    "output_difference",
    "float",
    "difference from the model",
    "Largest difference between the limit and the model's own output for the same query, relative"
    " to the largest coordinate of these outputs.",
)
THEORY = (
    Column("token_space", "word", "token space", "Tokens are hidden states, or pairs (q, k)."),
    REACH,
    *HORIZONS,
    Column(
        "beta_paper",
        "float",
        "exponent proved if Gaussian",
        "Exponent proved for moments of Gaussian tokens of this covariance.",
        short="[B] proved",
        of="coupling",
        status="proved if Gaussian",
        formula=f"{bohbot.PROVED}, moments",
    ),
    Column(
        "beta_paper_experimental",
        "float",
        "experimental exponent",
        "Exponent from an experiment that a summary of the paper suggests; not proved.",
        short="[B] experimental",
        of="coupling",
        status="experimental",
        formula=f"{bohbot.EXPERIMENTAL}, moments",
    ),
    Column(
        "beta_sharp",
        "float",
        "sharp exponent, typical",
        "Heuristic exponent of the error in a typical draw of the tokens.",
        short="sharp",
        of="horizon2",
        status="heuristic",
        formula=f"{sharp.TYPICAL}, typical",
    ),
    Column(
        "beta_sharp_rms",
        "float",
        "sharp exponent, rms",
        "Heuristic exponent of the root mean square error.",
        short="sharp, rms",
        of="horizon2",
        status="heuristic",
        formula=f"{sharp.RMS}, rms",
    ),
)
REGIME = (
    Column(
        "token_verdict", "word", "tokens' tails", "Tokens are sub-Gaussian, heavier or undecided."
    ),
    Column(
        "regime",
        "word",
        "regime",
        "diffuse, selective, frozen or sink-dominated.",
        scale="words",
        first=15,
        words=tuple(REGIMES),
        meanings=tuple(REGIMES.values()),
    ),
    Column("regime_reason", "word", "why", "The rule that gave the regime, with its numbers."),
    Column(
        "signatures",
        "word",
        "signatures",
        "Signs of failure by name: exploded constants, hardmax regime, distribution mismatch.",
    ),
)


def _moment_exponent(metric: str, name: str) -> tuple[Column, ...]:
    key, label = f"beta_{metric}", f"exponent of the {name}"
    what = f"Exponent fitted to the sampled error of the outputs' {name}."
    return with_ends(Column(key, "float", label, what, short=name, metric=metric))


# of heads and layers, sampled
MOMENT_EXPONENTS = (*_moment_exponent("mean", "mean"), *_moment_exponent("cov", "covariance"))
MOMENTS = (
    "Of the mean and covariance of the outputs, scores times α: not of the L2 error, whose exponent"
    " is measured here."
)
L2 = "Scores times α. The rate of [B] is of the outputs' mean and covariance, not of this L2 error."


def scale_columns(spec: ProbeSpec) -> tuple[Column, ...]:
    """Those of a head, with what a scale makes of them."""
    known = {column.key: column for one in (Draws(), Theory()) for column in one.columns(spec)}
    ends = "end of its 95 % interval over windows of text."
    return (
        LAYER,
        HEAD,
        Column("scale", "float", "scale α", "What the scores are multiplied with.", "log"),
        replace(known["beta_fit"], help=f"{known['beta_fit'].help} {L2}"),
        Column("beta_low", "float", "exponent, low", f"Lower {ends}"),
        Column("beta_high", "float", "exponent, high", f"Upper {ends}"),
        *(known[key] for key in ("coupling", "horizon2")),
        *(replace(known[key], help=MOMENTS) for key in ("beta_paper", "beta_paper_experimental")),
        *(known[key] for key in ("beta_sharp", "beta_sharp_rms")),
        *(MOMENT_EXPONENTS if spec.moments else ()),
    )
