"""What ``esscher predict`` computes and shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from esscher.cli.output import as_dtype, number, print_table
from esscher.cli.prediction_spec import PredictSpec
from esscher.convergence.budget import asymptotic_from, tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.exact import exact_curve
from esscher.convergence.montecarlo.head import build_head
from esscher.theory.catalogue import predictions
from esscher.theory.prediction import Prediction

__all__ = ["evaluate", "needed_tokens", "record", "show"]


def evaluate(spec: PredictSpec, device: str = "cpu") -> tuple[ErrorCurve, list[Prediction]]:
    """The exact curve and all predictions of a spec."""
    measure = spec.law.build(as_dtype(spec.dtype), device)
    head = build_head(spec.head, measure)
    curve = exact_curve(head, measure, measure, list(spec.n), seed=spec.seed, draws=spec.queries)
    return curve, predictions(head, measure)


def needed_tokens(curve: ErrorCurve, epsilon: float) -> dict[str, Any]:
    """Tokens needed and the start of the asymptotic regime, or the sentence that says why there is none."""
    out: dict[str, Any] = {"epsilon": epsilon, "tokens_needed": None, "asymptotic_from": None}
    try:
        out["tokens_needed"] = tokens_needed(curve, epsilon)
    except ValueError as reason:
        out["tokens_needed_reason"] = str(reason)
    try:
        out["asymptotic_from"] = asymptotic_from(curve)
    except ValueError as reason:
        out["asymptotic_from_reason"] = str(reason)
    return out


def record(spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "spec": spec.model_dump(),
        "origin": curve.origin,
        "kind": curve.kind,
        "accuracy": curve.accuracy,
        "scale": curve.scale,
        "n": curve.n,
        "rms": curve.rms,
        "query_stderr": curve.query_stderr,
        "relative": curve.relative,
        "q95": curve.q95,
        "slope": curve.slope,
        "effective_tokens": curve.effective_tokens,
        **needed,
        "predictions": [
            {
                "name": p.name,
                "statement": p.statement,
                "source": p.source,
                "formula": p.formula,
                "status": p.status,
                "quantity": p.quantity,
                "applies": p.applies,
                "unmet": p.unmet,
                "exponent": p.exponent,
                "units": p.units,
                "value": None if p.value is None else p.value(curve.n),
                "vacuous": None if p.value is None else np.isinf(p.value(curve.n)).tolist(),
            }
            for p in found
        ],
    }


def show(spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]) -> None:
    """The result as people read it."""
    slope = curve.slope if curve.slope is not None else np.full(curve.n.size, np.nan)
    q95 = curve.q95 if curve.q95 is not None else np.full(curve.n.size, np.nan)
    tokens = curve.effective_tokens if curve.effective_tokens is not None else np.full(curve.n.size, np.nan)
    print_table(
        f"{curve.origin}; relative accuracy {curve.accuracy:.0e}",
        ["n", "rms", "+- queries", "relative", "q95", "slope", "effective tokens"],
        [
            [f"{n:.6g}", number(r, ".5g"), number(u, ".2g"), number(e), number(q, ".5g"), number(s, "+.3f"), number(t)]
            for n, r, u, e, q, s, t in zip(
                curve.n, curve.rms, curve.query_stderr, curve.relative, q95, slope, tokens, strict=True
            )
        ],
        left=0,
    )
    print()
    if needed["tokens_needed"] is None:
        print(f"tokens needed: {needed['tokens_needed_reason']}")
    else:
        print(f"tokens needed for a relative error of {spec.epsilon:g}: {needed['tokens_needed']}")
    if needed["asymptotic_from"] is None:
        print(f"delta method: {needed['asymptotic_from_reason']}")
    else:
        print(f"delta method: within 10 % from n = {needed['asymptotic_from']}")
    print()
    last = curve.n[-1:]
    print_table(
        f"predictions (value at n = {int(last[0])}; bounds on the square are shown as their root; vacuous: beyond 1e308)",
        ["name", "status", "quantity", "source", "exponent", "value", "applies"],
        [
            [
                p.name,
                p.status,
                p.quantity,
                p.source,
                number(p.exponent),
                _value(p, last),
                "yes" if p.applies else "no: " + "; ".join(p.unmet),
            ]
            for p in found
        ],
        left=4,
    )


def _value(prediction: Prediction, n: Any) -> str:
    """What a prediction says at n; a bound beyond float64, or a statement that says nothing at this n, is vacuous."""
    if prediction.value is None:
        return number(None)
    value = float(prediction.rms(n)[0])
    return "vacuous" if np.isinf(value) else number(value)
