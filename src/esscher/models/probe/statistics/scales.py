"""Horizon ablation: a head whose scores are multiplied with alpha, and its exponent against alpha^2
beside what theory says.

Multiplying the scores multiplies A, hence both horizons with alpha and the coupling Psi with
alpha^2: the third experiment of [B] on real heads. Of some of the queries, each scale on grids of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from esscher.convergence.budget import tokens_needed
from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit
from esscher.models.probe.context import Mode, ProbeContext
from esscher.models.probe.curves import Errors, errors_of
from esscher.models.probe.headline import fitted, needed_column, or_nan
from esscher.models.probe.spec import ProbeSpec, drawn_ladder, fit_range
from esscher.models.probe.statistics.identity import HEAD, LAYER
from esscher.models.probe.statistics.replacement import Replacement, pool_place
from esscher.models.probe.statistics.statistic import (
    Block,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
    stacked,
)
from esscher.models.probe.statistics.theory import Theory
from esscher.runs.columns import Column
from esscher.theory import bohbot, sharp

__all__ = ["Scales", "check_scales"]

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
