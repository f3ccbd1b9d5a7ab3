"""The shape of a head's scores against the Gaussian of equal variance: a verdict, histograms and
survivals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from esscher.attention.head import coupling_of, horizon_of_covariances
from esscher.errors import grid as deposit
from esscher.errors.budget import tokens_needed
from esscher.errors.curve import HORIZONS
from esscher.errors.grid import Deposit
from esscher.probe.curves import Errors, errors_of, fitted, needed_column, or_nan
from esscher.probe.session import Mode, ProbeContext
from esscher.probe.spec import ProbeSpec, drawn_ladder, fit_range
from esscher.probe.statistics.base import (
    HEAD,
    LAYER,
    Block,
    Failure,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
    stacked,
)
from esscher.probe.statistics.errors import Replacement, pool_place
from esscher.probe.tokens import largest_variance
from esscher.runs.columns import Column
from esscher.tails import scores as tails
from esscher.tails.regimes import LABELS, HeadEvidence, classify, slow_until
from esscher.tails.scores import TopScores, score_histogram, tail_length
from esscher.theory import bohbot, sharp

STANDARD = Column("z", "float", "z", "Score in standard deviations above the query's mean.")


class ScoreShape(Statistic):
    name = "score_shape"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = (
            "Whether the scores are as light-tailed as theory assumes: sub-Gaussian, heavier or"
            " lighter."
        )
        return (Column("score_verdict", "word", "scores", help_text),)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        density = Column(
            "density", "float", "density", "Density of the standardised scores of all queries."
        )
        survival = Column(
            "survival", "float", "survival", "Share of the scores above z standard deviations."
        )
        gaussian = Column(
            "gaussian", "float", "Gaussian", "The same for a Gaussian of equal variance."
        )
        return {
            "scores": (STANDARD, density, gaussian, LAYER, HEAD),
            "tails": (STANDARD, survival, gaussian, LAYER, HEAD),
        }

    def finish(self, state: None, found: Found) -> Findings:
        masses = found.states["replacement"].masses
        grid = masses.grid
        shape = score_histogram(masses.cells, masses.first, grid.spacing, points=grid.points)
        middle = 0.5 * (shape.edges[1:] + shape.edges[:-1])
        scores = pd.DataFrame(
            {"z": middle, "density": shape.density, "gaussian": shape.gaussian_density}
        )
        tails = pd.DataFrame(
            {"z": shape.at, "survival": shape.survival, "gaussian": shape.gaussian_survival}
        )
        return Findings({"score_verdict": shape.verdict}, {"scores": scores, "tails": tails}, shape)


# ---- How light the tails of the tokens are that enter the layer.


class TokenShape(Statistic):
    name = "token_shape"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = (
            "Whether the tokens are as light-tailed as theory assumes: sub-Gaussian, heavier or"
            " lighter."
        )
        return (Column("token_verdict", "word", "tokens' tails", help_text),)

    def finish(self, state: None, found: Found) -> Findings:
        hidden = found.layer.hidden
        return Findings({"token_verdict": "unknown" if hidden is None else hidden.verdict})


# ---- Pareto k-hat of the softmax weights of some of the queries: how heavy the tail of their
# largest weights is.


class Tail(Statistic):
    """The state is the largest scores of the kept queries."""

    name = "tail"
    state = TopScores

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            Column(
                "khat",
                "float",
                "k-hat",
                "Shape of the weights' tail: below 0.5 averages behave, above 0.7 a few keys"
                " decide.",
                scale="linear",
                first=13,
                ends=("khat_low", "khat_high"),
            ),
            Column("khat_low", "float", "k-hat, low", "Lower end of the interval of k-hat."),
            Column("khat_high", "float", "k-hat, high", "Upper end of the interval of k-hat."),
            Column("khat_label", "word", "tail", "The usual verdict on k-hat."),
        )

    def init(self, start: Start) -> TopScores:
        return tails.init(len(start.kept), tail_length(start.keys) + 1, device=start.center.device)

    def update(self, state: TopScores, block: Block) -> TopScores:
        return tails.update(state, block.kept_scores)

    def merge(self, a: TopScores, b: TopScores) -> TopScores:
        return tails.merge(a, b)

    def stack(self, states: Sequence[TopScores], order: Order) -> TopScores:
        top = tails.stack([state for state in states if len(state.count)] or states[:1])
        return TopScores(top.keep, top.count[order.kept], top.scores[order.kept])

    def finish(self, state: TopScores, found: Found) -> Findings:
        tail = tails.finish(state)
        low, high = tail.interval
        return Findings(
            {"khat": tail.median, "khat_low": low, "khat_high": high, "khat_label": tail.label},
            value=tail,
        )


# ---- The weight that queries put on the first and the special tokens of their own window.


@dataclass(frozen=True)
class SinkMass:
    """Of each query, (m,); it does not depend on the pool."""

    mass: Tensor


class Sinks(Statistic):
    name = "sinks"
    state = SinkMass

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = "Share of the attention that goes to first and special tokens."
        return (
            Column(
                "sink_mass",
                "float",
                "sink mass",
                help_text,
                scale="linear",
                first=14,
                short="sinks",
            ),
        )

    def init(self, start: Start) -> SinkMass:
        return SinkMass(start.sink_mass)

    def merge(self, a: SinkMass, b: SinkMass) -> SinkMass:
        return a

    def single(self, state: SinkMass) -> tuple[str, ...]:
        return (".mass",)

    def finish(self, state: SinkMass, found: Found) -> Findings:
        return Findings({"sink_mass": float(state.mass.double().mean())})


# ---- Which regime a head is in, from its row.


class Regime(Statistic):
    name = "regime"
    reads = (
        "identity",
        "theory",
        "replacement",
        "endless",
        "softmax",
        "tail",
        "sinks",
        "score_shape",
        "token_shape",
    )

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            Column(
                "regime",
                "word",
                "regime",
                "diffuse, selective, frozen or sink-dominated.",
                scale="words",
                first=15,
                words=LABELS,
            ),
            Column(
                "regime_reason", "word", "why", "The rule that gave the regime, with its numbers."
            ),
            Column(
                "signatures",
                "word",
                "signatures",
                "Signs of failure by name: exploded constants, hardmax regime, distribution"
                " mismatch.",
            ),
        )

    def finish(self, state: None, found: Found) -> Findings:
        row, curve, tail = found.row, found.values["replacement"], found.values["tail"]
        plain = math.sqrt(float(found.layer.v.cov[row["kv_head"]].trace()))
        n = float(curve.n[pool_place(curve, row["n_keys"])])
        regime = classify(
            HeadEvidence(
                n=row["n_keys"],
                s=row["score_sd"],
                effective_tokens=row["effective_tokens"],
                share_frozen=row["share_frozen"],
                sink_mass=row["sink_mass"],
                khat=row["khat"],
                khat_threshold=tail.threshold,
                exponent=row["beta_fit"],
                exponent_low=row["beta_low"],
                exponent_high=row["beta_high"],
                slow_until=math.nan if curve.slope is None else slow_until(curve.n, curve.slope),
                relative_rms=row["relative_at_n"],
                constant_ratio=row["rms_at_n"] * math.sqrt(n) / plain if plain > 0 else math.nan,
                coupling=row["coupling"],
                tokens=row["token_verdict"],
                scores=row["score_verdict"],
            )
        )
        reason = " ".join([regime.reason, *regime.signatures.values()])
        return Findings(
            {
                "regime": regime.label,
                "regime_reason": reason,
                "signatures": ", ".join(regime.signatures),
            }
        )

    def failed(self, failure: Failure) -> dict[str, Any]:
        return {"regime": "unknown"}


# ---- Reach, horizons and coupling of a head's tokens, and the exponents that theory gives for
# them.

REACH = Column(
    "reach",
    "float",
    "reach",
    "Largest variance of the tokens in any direction, the norm of their covariance.",
)


class Theory(Statistic):
    """From the moments of the layer's tokens.

    Where q and k are affine functions of what enters the layer, tokens are that: A = scale W_k^T
    W_q. Elsewhere (rotary positions, norms) the token is the pair (q, k) itself and A = scale times
    the map from its one half to the other, so that reach is the norm of their joint covariance and
    H = scale ||Sigma_k||^{1/2}. The two-sided horizon is the same in both.
    """

    name = "theory"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            Column(
                "token_space",
                "word",
                "token space",
                "Where tokens live: hidden states, or pairs of a query and a key after rotation.",
            ),
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

    def finish(self, state: None, found: Found) -> Findings:
        layer, head = found.layer, found.head
        own = layer.info.kv_head(head)
        key_cov, query_cov, scale, maps = (
            layer.k.cov[own],
            layer.q.cov[head],
            layer.info.scale,
            layer.maps,
        )
        horizon2 = horizon_of_covariances(key_cov, query_cov, scale)
        if maps is not None and maps.affine and layer.hidden is not None and maps.wq is not None:
            width = maps.wq.shape[0] // layer.info.heads
            wq = maps.wq[head * width : (head + 1) * width].double().to(key_cov.device)
            space, reach = "hidden", largest_variance(layer.hidden.cov)
            horizon = horizon_of_covariances(key_cov, wq @ wq.T, scale)
        else:
            space, reach = "query-key", largest_variance(layer.moments.pair_cov(head, own))
            horizon = horizon_of_covariances(key_cov, torch.eye(len(key_cov)).to(key_cov), scale)
        coupling = coupling_of(math.sqrt(reach), horizon)
        row = {
            "token_space": space,
            "reach": reach,
            "horizon": horizon,
            "horizon2": horizon2,
            "coupling": coupling,
        }
        row |= {
            "beta_paper": bohbot.moment_exponent(coupling),
            "beta_paper_experimental": bohbot.moment_exponent_experimental(coupling),
        }
        return Findings(
            row
            | {
                "beta_sharp": sharp.l2_exponent_typical(horizon2),
                "beta_sharp_rms": sharp.l2_exponent_rms(horizon2),
            }
        )


# ---- Horizon ablation: a head whose scores are multiplied with alpha, and its exponent against
# alpha^2 beside what theory says.

ERROR = 0.1  # relative, that tokens are counted for
SAMPLING = "replacement"


@dataclass(frozen=True)
class Scaled:
    """Deposits of the kept queries by scale, and the scales that are refused, with the reason."""

    asked: Tensor  # (m,) bool: which of all queries these are
    parts: dict[str, Deposit]
    refused: dict[str, str]


@dataclass(frozen=True)
class ScaledErrors:
    """The errors that are left of them."""

    asked: Tensor
    parts: dict[str, Errors]
    refused: dict[str, str]


class Scales(Statistic):
    """No column of a head: rows of the table ``scales``. Nothing is kept unless a probe asks for
    scales.
    """

    name = "scales"
    reads = ("identity", "theory")
    state = Scaled
    settled = ScaledErrors

    def __init__(self, scales: tuple[float, ...] = ()) -> None:
        self.scales = scales

    def asked(self, spec: ProbeSpec) -> Scales:
        return Scales(spec.scales)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"scales": _columns(spec)} if spec.scales else {}

    def init(self, start: Start) -> Scaled:
        asked = torch.zeros(start.queries, dtype=torch.bool)
        asked[start.kept] = True
        grid = deposit.choose_grid(start.dtype, SAMPLING)
        return Scaled(
            asked,
            {
                str(scale): deposit.init(len(start.kept), grid, start.center)
                for scale in self.scales
            },
            {},
        )

    def update(self, state: Scaled, block: Block) -> Scaled:
        if not len(block.kept):
            return state
        parts, refused = dict(state.parts), dict(state.refused)
        for name, known in state.parts.items():
            scores = float(name) * block.kept_scores
            extent = deposit.reach(known, scores)
            if extent.cells > deposit.MAX_CELLS or not extent.largest < deposit.FAR:
                del parts[name]
                refused[name] = _too_wide(
                    name, extent.cells * known.grid.spacing, known.grid.spacing
                )
            else:
                parts[name] = deposit.update(known, scores, block.values, extent=extent, owned=True)
        return replace(state, parts=parts, refused=refused)

    def merge(self, a: Scaled, b: Scaled) -> Scaled:
        both = [name for name in a.parts if name in b.parts]
        parts = {name: deposit.merge(a.parts[name], b.parts[name]) for name in both}
        return replace(a, parts=parts, refused=a.refused | b.refused)

    def settle(self, state: Scaled, met: Met) -> ScaledErrors:
        ladder = drawn_ladder(met.spec, met.keys)
        parts = {}
        for name, known in state.parts.items():
            if len(known.keys):
                parts[name] = errors_of(
                    known, ladder, SAMPLING, met.keys, met.notes.setdefault(name, {})
                )
            else:
                parts[name] = Errors.none(len(known.center), len(ladder))
        return ScaledErrors(state.asked, parts, state.refused)

    def stack(self, states: Sequence[ScaledErrors], order: Order) -> ScaledErrors:
        """A scale that is refused in one window is refused."""
        refused = {name: reason for state in states for name, reason in state.refused.items()}
        names = [str(scale) for scale in self.scales if str(scale) not in refused]
        parts = {
            name: stacked([state.parts[name] for state in states], order.kept) for name in names
        }
        return ScaledErrors(
            torch.cat([state.asked for state in states])[order.queries], parts, refused
        )

    def finish(self, state: ScaledErrors, found: Found) -> Findings:
        if not self.scales:
            return Findings()
        return Findings(
            tables={
                "scales": pd.DataFrame([self._row(state, found, scale) for scale in self.scales])
            }
        )

    def _row(self, state: ScaledErrors, found: Found, scale: float) -> dict[str, Any]:
        reason = state.refused.get(str(scale), "")
        row = {"scale": scale, "status": "refused" if reason else "ok", "reason": reason} | _theory(
            found, scale
        )
        if reason:
            return row | dict.fromkeys(
                ("beta_fit", "beta_low", "beta_high", "relative_at_n", needed_column(ERROR)),
                math.nan,
            )
        curve = state.parts[str(scale)].curve(drawn_ladder(found.spec, found.keys), SAMPLING)
        row |= fitted(curve, fit_range(found.spec, found.keys), found.windows[state.asked.numpy()])
        return row | {
            "relative_at_n": float(curve.relative[pool_place(curve, found.row["n_keys"])]),
            needed_column(ERROR): or_nan(tokens_needed, curve, ERROR),
        }


def check_scales(context: ProbeContext) -> None:
    """Refuse scales where the states of many layers would be held at once."""
    if context.spec.scales and context.mode not in (Mode.HELD, Mode.OWN):
        raise ValueError(
            f"scale: every scale has grids of its own, one head at a time, and {context.keys}"
            " tokens of all layers do not fit into memory; lower --max-tokens, give --layers, or"
            " use --pool sequence"
        )


def _theory(found: Found, scale: float) -> dict[str, float]:
    """Horizons grow as the scale, the coupling as its square."""
    coupling, horizon2 = scale * scale * found.row["coupling"], scale * found.row["horizon2"]
    return {
        "coupling": coupling,
        "horizon2": horizon2,
        "beta_paper": bohbot.moment_exponent(coupling),
        "beta_paper_experimental": bohbot.moment_exponent_experimental(coupling),
        "beta_sharp": sharp.l2_exponent_typical(horizon2),
        "beta_sharp_rms": sharp.l2_exponent_rms(horizon2),
    }


def _too_wide(name: str, span: float, spacing: float) -> str:
    most = deposit.MAX_CELLS * spacing
    return (
        f"scores times {float(name):g} span {span:.0f} nats for one query, more than the {most:.0f}"
        " of a grid"
    )


# ---- columns
# ------------------------------------------------------------------------------------------

MOMENTS = (
    "Of the mean and covariance of the outputs, scores times α: not of the L2 error, whose exponent"
    " is measured here."
)
L2 = "Scores times α. The rate of [B] is of the outputs' mean and covariance, not of this L2 error."


def _columns(spec: ProbeSpec) -> tuple[Column, ...]:
    known = {
        column.key: column for one in (Replacement(), Theory()) for column in one.columns(spec)
    }
    return (
        LAYER,
        HEAD,
        Column("scale", "float", "scale α", "What the scores are multiplied with.", "log"),
        Column(
            "status",
            "word",
            "status",
            "ok, or refused where the scores are too wide at this scale.",
        ),
        Column("reason", "word", "reason", "Why a scale was refused."),
        replace(known["beta_fit"], help=f"{known['beta_fit'].help} {L2}"),
        Column(
            "beta_low",
            "float",
            "exponent, low",
            "Lower end of its 95 % interval over windows of text.",
        ),
        Column(
            "beta_high",
            "float",
            "exponent, high",
            "Upper end of its 95 % interval over windows of text.",
        ),
        *(known[key] for key in ("coupling", "horizon2")),
        *(replace(known[key], help=MOMENTS) for key in ("beta_paper", "beta_paper_experimental")),
        *(known[key] for key in ("beta_sharp", "beta_sharp_rms", "relative_at_n")),
        replace(known[needed_column(ERROR)], ends=None),
    )
