"""What ``esscher predict`` computes and shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from esscher.cli.output import Shown, as_dtype, number, say, show_table
from esscher.cli.prediction_spec import PredictSpec
from esscher.errors.budget import asymptotic_from, tokens_needed
from esscher.errors.curve import ErrorCurve
from esscher.errors.exact import exact_curve
from esscher.theory.prediction import Prediction, predictions


def evaluate(spec: PredictSpec, device: str = "cpu") -> tuple[ErrorCurve, list[Prediction]]:
    """The exact curve and all predictions of a spec."""
    measure = spec.law.build(as_dtype(spec.dtype), device)
    head = spec.head.build(measure)
    curve = exact_curve(head, measure, measure, list(spec.n), seed=spec.seed, draws=spec.queries)
    return curve, predictions(head, measure)


def needed_tokens(curve: ErrorCurve, epsilon: float) -> dict[str, Any]:
    """Tokens needed and the start of the asymptotic regime, or the sentence that says why there is
    none.
    """
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


def record(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]
) -> dict[str, Any]:
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
        "pool_stderr": curve.pool_stderr,
        "relative": curve.relative,
        "q95": curve.q95,
        "slope": curve.slope,
        "slope_stderr": curve.slope_stderr,
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


def show(
    spec: PredictSpec,
    curve: ErrorCurve,
    found: list[Prediction],
    needed: dict[str, Any],
    look: Mapping[str, Any] | None = None,
) -> None:
    """The result as people read it: in words, the curve, what theory says."""
    for sentence in _summary(spec, curve, found, needed):
        say(sentence)
    print()
    show_table(f"{curve.origin}; relative accuracy {curve.accuracy:.0e}", _curve_columns(curve))
    print()
    last = curve.n[-1:]
    show_table(
        f"predictions (value at n = {int(last[0]):,}; bounds on the square are shown as their root;"
        " vacuous: beyond 1e308)",
        [
            Shown("name", tuple(p.name for p in found), words=True, key="name"),
            Shown(
                "status",
                tuple(p.status for p in found),
                words=True,
                wraps=True,
                narrowest=12,
                key="status",
            ),
            Shown(
                "quantity",
                tuple(p.quantity for p in found),
                words=True,
                gives_way=3,
                key="quantity",
            ),
            Shown("source", tuple(p.source for p in found), words=True, gives_way=4, key="source"),
            Shown(
                "exponent", tuple(number(p.exponent) for p in found), gives_way=1, key="exponent"
            ),
            Shown("value", tuple(_value(p, last) for p in found), key="value"),
            Shown(
                "applies",
                tuple(_applies(p) for p in found),
                words=True,
                wraps=True,
                narrowest=20,
                key="applies",
            ),
        ],
        look,
    )


def _summary(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]
) -> Iterator[str]:
    """What the numbers say."""
    n, rms = int(curve.n[-1]), curve.rms[-1]
    doubts = [
        f"+- {number(doubt[-1], '.2g')} from the {source}"
        for source, doubt in (
            ("drawn queries", curve.query_stderr),
            ("drawn pool", curve.pool_stderr),
        )
        if doubt is not None and doubt[-1] > 0
    ]
    falls = (
        ""
        if curve.slope is None or np.isnan(curve.slope[-1])
        else f", falling like n^{curve.slope[-1]:.3f} there"
    )
    of_limit = number(curve.relative[-1], ".2%")
    yield (
        f"error {number(rms)} at n = {n:,} ({of_limit} of the"
        f" limit){', '.join(['', *doubts])}{falls}"
    )
    if needed["tokens_needed"] is None:
        yield f"tokens needed: {needed['tokens_needed_reason']}"
    else:
        yield f"tokens needed for a relative error of {spec.epsilon:g}: {needed['tokens_needed']}"
    if needed["asymptotic_from"] is None:
        yield f"delta method: {needed['asymptotic_from_reason']}"
    else:
        yield f"delta method: within 10 % from n = {needed['asymptotic_from']}"
    held = sum(p.applies for p in found)
    proved = sum(p.applies and p.status.startswith("proved") for p in found)
    yield (
        f"theory: {held} of {len(found)} statements apply, {proved} of them proved; the last column"
        " says what the others need"
    )


def _curve_columns(curve: ErrorCurve) -> list[Shown]:
    """The curve, an n a row; standard errors where there are any."""

    def column(name: str, values: Any, form: str, gives_way: int = 0) -> Shown:
        known = np.full(curve.n.size, np.nan) if values is None else values
        return Shown(name, tuple(number(value, form) for value in known), gives_way=gives_way)

    columns = [
        column("n", curve.n, ".6g"),
        column("rms", curve.rms, ".5g"),
        column("relative", curve.relative, ".4g"),
    ]
    if curve.query_stderr.any():
        columns.append(column("+- queries", curve.query_stderr, ".2g"))
    if curve.pool_stderr is not None:
        columns.append(column("+- pool", curve.pool_stderr, ".2g"))
    columns.append(column("slope", curve.slope, "+.3f"))
    if curve.slope_stderr is not None:
        columns.append(column("+- slope", curve.slope_stderr, ".2g", 3))
    return [
        *columns,
        column("q95", curve.q95, ".5g", 2),
        column("effective tokens", curve.effective_tokens, ".4g", 1),
    ]


def _applies(prediction: Prediction) -> str:
    return "yes" if prediction.applies else "no: " + "; ".join(prediction.unmet)


def _value(prediction: Prediction, n: Any) -> str:
    """What a prediction says at n; a bound beyond float64, or a statement that says nothing at this
    n, is vacuous.
    """
    if prediction.value is None:
        return number(None)
    value = float(prediction.rms(n)[0])
    return "vacuous" if np.isinf(value) else number(value)
