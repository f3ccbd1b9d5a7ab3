"""Theory, tails, sinks, regime and horizon ablation of a head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import pad

from esscher.attention.head import coupling_of, horizon_of_covariances
from esscher.errors import grid as deposit
from esscher.errors.budget import tokens_needed
from esscher.errors.curve import HORIZONS
from esscher.probe.all_keys import add_keys
from esscher.probe.curves import (
    curve_of,
    error_numbers,
    fitted,
    needed_column,
    or_nan,
    pool_place,
)
from esscher.probe.session import FEWEST, Session
from esscher.probe.spec import ProbeSpec, drawn_ladder, fit_range
from esscher.probe.statistic import HEAD, LAYER, Head, HeadEnd, HeadView, Numbers, Result, Statistic
from esscher.probe.statistics.errors import Draws
from esscher.probe.tokens import REACH, largest_variance
from esscher.probe.window import WindowQueries
from esscher.runs.columns import Column
from esscher.tails import scores as tails
from esscher.tails.regimes import LABELS, HeadEvidence, classify, slow_until
from esscher.tails.scores import TopScores, khat_threshold, tail_length
from esscher.theory import bohbot, sharp


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
        layer, head, scale = end.layer, end.head, end.info.scale
        key_cov, query_cov = layer.k.cov[end.kv_head], layer.q.cov[head]
        if layer.gram is not None and layer.hidden is not None:
            space, reach = "hidden", largest_variance(layer.hidden.cov)
            outer = layer.gram[head].to(key_cov)
        else:
            space = "query-key"
            reach = largest_variance(layer.moments.pair_cov(head, end.kv_head))
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


class Tail(Statistic):
    """Pareto k-hat of the weights of the kept queries; the state is their largest scores."""

    name = "tail"
    state = (TopScores,)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return TAIL

    def init(self, head: HeadView) -> TopScores:
        keep = tail_length(head.most_keys) + 1
        return tails.init(len(head.kept), keep, device=head.values.device)

    def update(self, state: TopScores, head: HeadView) -> TopScores:
        return tails.update(state, head.kept_scores)

    def merge(self, a: TopScores, b: TopScores) -> TopScores:
        return tails.merge(a, b)

    def reduce(self, state: TopScores, head: Head) -> Numbers:
        missing = state.keep - state.scores.shape[1]
        return {"top": pad(state.scores, (0, missing), value=-math.inf), "count": state.count}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        top = found["top"]
        seen = torch.isfinite(top).any(0)
        tail = tails.finish(TopScores(top.shape[1], found["count"], top[:, seen]))
        low, high = tail.interval
        row = {"khat": tail.median, "khat_low": low, "khat_high": high, "khat_label": tail.label}
        return Result(row, {})


class Sinks(Statistic):
    """The weight that queries put on the first and the special tokens of their own window, and on
    a sink logit.
    """

    name = "sinks"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        what = "Share of the attention that goes to first and special tokens."
        return (Column("sink_mass", "float", "sink mass", what, "linear", first=14, short="sinks"),)

    def in_window(self, window: WindowQueries) -> Numbers:
        resting = torch.from_numpy(window.session.windows.special[window.window].copy())
        resting[0] = True
        mass = (window.weights * resting.to(window.weights.device)).sum(-1)
        if window.sinks is not None:
            mass = mass + (1 - window.weights.sum(-1)).clamp_min(0)
        return {"mass": mass, "seen": window.seen.sum(-1).expand(window.heads, -1)}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        used = found["mass"]
        if end.spec.pool == "sequence":
            used = used[found["seen"] >= FEWEST]
        return Result({"sink_mass": float(used.double().mean())}, {})


class Regime(Statistic):
    """Which regime a head is in, from its row."""

    name = "regime"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return REGIME

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        row, hidden = end.row, end.layer.hidden
        draws, seen = (
            end.found[Draws.name],
            round(float(end.found["tail"]["count"].double().mean())),
        )
        curve = curve_of(draws, drawn_ladder(end.spec, end.n_keys), Draws.sampling)
        plain = math.sqrt(float(end.layer.v.cov[end.kv_head].trace()))
        n = float(curve.n[pool_place(curve, row["n_keys"])])
        verdict = "unknown" if hidden is None else hidden.verdict
        regime = classify(
            HeadEvidence(
                n=row["n_keys"],
                s=row["score_sd"],
                effective_tokens=row["effective_tokens"],
                share_frozen=row["share_frozen"],
                sink_mass=row["sink_mass"],
                khat=row["khat"],
                khat_threshold=khat_threshold(seen),
                exponent=row["beta_fit"],
                exponent_low=row["beta_low"],
                exponent_high=row["beta_high"],
                slow_until=math.nan if curve.slope is None else slow_until(curve.n, curve.slope),
                relative_rms=row["relative_at_n"],
                constant_ratio=row["rms_at_n"] * math.sqrt(n) / plain if plain > 0 else math.nan,
                coupling=row["coupling"],
                tokens=verdict,
                scores=row["score_verdict"],
            )
        )
        found_row = {
            "token_verdict": verdict,
            "regime": regime.label,
            "regime_reason": " ".join([regime.reason, *regime.signatures.values()]),
            "signatures": ", ".join(regime.signatures),
        }
        return Result(found_row, {})


# ---- Horizon ablation: scores multiplied with alpha, and the exponent against alpha^2.

ERROR = 0.1  # relative, that tokens are counted for


@dataclass(frozen=True)
class Scaled:
    """Deposits of the kept queries by scale, or all keys where scores are too wide for a grid."""

    parts: dict[str, Any]


class Scales(Statistic):
    """Rows of the table ``scales``, where a probe asks for scales."""

    name = "scales"
    state = (Scaled,)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"scales": scale_columns(spec)} if spec.scales else {}

    def init(self, head: HeadView) -> Scaled:
        grid = deposit.choose_grid(head.queries.dtype, Draws.sampling)
        empty = {str(x): deposit.init(len(head.kept), grid, head.center) for x in head.spec.scales}
        return Scaled(empty)

    def update(self, state: Scaled, head: HeadView) -> Scaled:
        if not len(head.kept):
            return state
        parts = {}
        for name, known in state.parts.items():
            pool = head.kept_keys
            pool = None if pool is None else replace(pool, factor=float(name))
            parts[name] = add_keys(known, float(name) * head.kept_scores, head.values, pool)
        return Scaled(parts)

    def merge(self, a: Scaled, b: Scaled) -> Scaled:
        return Scaled({name: deposit.merge(a.parts[name], b.parts[name]) for name in a.parts})

    def reduce(self, state: Scaled, head: Head) -> Numbers:
        ladder, found = drawn_ladder(head.spec, head.n_keys), dict[str, torch.Tensor]()
        for name, known in state.parts.items():
            if len(known.keys):
                notes = head.notes.setdefault(f"scale {name}", {})
                numbers = error_numbers(known, ladder, Draws.sampling, head.n_keys, notes)
                found |= {f"{name} {key}": x for key, x in numbers.items()}
        return found

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        rows = []
        for scale in end.spec.scales:
            start = f"{scale} "
            own = {key.removeprefix(start): x for key, x in found.items() if key.startswith(start)}
            curve = curve_of(own, drawn_ladder(end.spec, end.n_keys), Draws.sampling)
            fit = fitted(curve, fit_range(end.spec, end.n_keys), end.queries.windows[end.kept])
            place = pool_place(curve, end.row["n_keys"])
            theory = _exponents(scale**2 * end.row["coupling"], scale * end.row["horizon2"])
            rows.append(
                {"scale": scale, "status": "ok", "reason": "", **fit, **theory}
                | {
                    "relative_at_n": float(curve.relative[place]),
                    needed_column(ERROR): or_nan(tokens_needed, curve, ERROR),
                }
            )
        return Result({}, {"scales": pd.DataFrame(rows)} if rows else {})


def check_scales(session: Session) -> None:
    """Refuse scales where the states of several parts would be stored."""
    if session.spec.scales and not session.own and len(session.parts) > 1:
        raise ValueError(
            f"scale: every scale has grids of its own, and the corpus of {session.keys} tokens"
            " comes in parts; lower --max-tokens, raise --part, or use --pool sequence"
        )


# ---- columns

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
TAIL = (
    Column(
        "khat",
        "float",
        "k-hat",
        "Shape of the weights' tail: below 0.5 averages behave, above 0.7 a few keys decide.",
        scale="linear",
        first=13,
        ends=("khat_low", "khat_high"),
    ),
    Column("khat_low", "float", "k-hat, low", "Lower end of the interval of k-hat."),
    Column("khat_high", "float", "k-hat, high", "Upper end of the interval of k-hat."),
    Column("khat_label", "word", "tail", "The usual verdict on k-hat."),
)
REGIME = (
    Column(
        "token_verdict", "word", "tokens' tails", "Tokens are sub-Gaussian, heavier or lighter."
    ),
    Column(
        "regime",
        "word",
        "regime",
        "diffuse, selective, frozen or sink-dominated.",
        scale="words",
        first=15,
        words=LABELS,
    ),
    Column("regime_reason", "word", "why", "The rule that gave the regime, with its numbers."),
    Column(
        "signatures",
        "word",
        "signatures",
        "Signs of failure by name: exploded constants, hardmax regime, distribution mismatch.",
    ),
)
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
        Column("status", "word", "status", "ok, or why there is no exponent."),
        Column("reason", "word", "reason", "Why there is no exponent."),
        replace(known["beta_fit"], help=f"{known['beta_fit'].help} {L2}"),
        Column("beta_low", "float", "exponent, low", f"Lower {ends}"),
        Column("beta_high", "float", "exponent, high", f"Upper {ends}"),
        *(known[key] for key in ("coupling", "horizon2")),
        *(replace(known[key], help=MOMENTS) for key in ("beta_paper", "beta_paper_experimental")),
        *(known[key] for key in ("beta_sharp", "beta_sharp_rms", "relative_at_n")),
        replace(known[needed_column(ERROR)], ends=None),
    )
