"""Which regime a head is in, from its row."""

from __future__ import annotations

import math
from typing import Any

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.replacement import pool_place
from esscher.models.probe.statistics.statistic import Failure, Findings, Found, Statistic
from esscher.runs.columns import Column
from esscher.tails.regimes import LABELS, HeadEvidence, classify, slow_until

__all__ = ["Regime"]


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
                entropy=row["entropy"],
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
