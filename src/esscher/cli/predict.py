"""``esscher predict``: exact errors and every prediction for a law and a head, at any n."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from pydantic import Field, field_validator

from esscher.cli.output import (
    Device,
    Dtype,
    Json,
    Seed,
    as_dtype,
    check_device,
    log,
    number,
    path_argument,
    path_option,
    print_json,
    print_table,
)
from esscher.convergence.budget import asymptotic_from, tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.exact import exact_curve
from esscher.convergence.montecarlo.spec import HeadSpec, LawSpec, Plain, parse_ladder
from esscher.convergence.montecarlo.spec import Seed as SeedNumber
from esscher.report.figures import check_format, save_predictions
from esscher.runs.files import check_output
from esscher.runs.spec import read_mapping
from esscher.theory.catalogue import predictions
from esscher.theory.prediction import Prediction

__all__ = ["PredictSpec", "predict"]

LAWS = ("gaussian", "sphere", "ball", "cube", "rademacher", "laplace")


class PredictSpec(Plain):
    """Everything ``esscher predict`` needs; a YAML file has these fields."""

    law: LawSpec
    head: HeadSpec = HeadSpec()
    n: tuple[int, ...] = Field(default_factory=lambda: tuple(parse_ladder("10:1e12:12").tolist()))
    queries: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    epsilon: Annotated[float, Field(gt=0)] = 0.1
    seed: SeedNumber = 0
    dtype: Literal["float32", "float64"] = "float64"

    @field_validator("n", mode="before")
    @classmethod
    def _ladder(cls, value: Any) -> tuple[int, ...]:
        return tuple(parse_ladder(value).tolist())


def predict(
    spec: Annotated[Path | None, path_argument("YAML file with law, head, n ...; flags override it.", "FILE")] = None,
    gaussian: Annotated[bool, typer.Option("--gaussian", help="Gaussian tokens.")] = False,
    sphere: Annotated[bool, typer.Option("--sphere", help="Tokens uniform on a sphere.")] = False,
    ball: Annotated[bool, typer.Option("--ball", help="Tokens uniform in a ball.")] = False,
    cube: Annotated[bool, typer.Option("--cube", help="Tokens uniform in a cube.")] = False,
    rademacher: Annotated[bool, typer.Option("--rademacher", help="Tokens with coordinates +-scale.")] = False,
    laplace: Annotated[bool, typer.Option("--laplace", help="Tokens with Laplace coordinates.")] = False,
    dim: Annotated[int | None, typer.Option(help="Dimension of a token.")] = None,
    size: Annotated[
        float | None, typer.Option(help="Variance, radius, half width or scale of the law, whichever it has.")
    ] = None,
    horizon: Annotated[float | None, typer.Option(help="Two-sided horizon the head is scaled to.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on the head's scores, instead of --horizon.")] = None,
    random_head: Annotated[bool, typer.Option("--random-head", help="Random W_q, W_k, W_v instead of A = V = I.")] = False,
    n: Annotated[str | None, typer.Option(help="Token numbers: 1e3:1e12, 1e3:1e12:40 or 100,1000.")] = None,
    queries: Annotated[int | None, typer.Option(help="Queries drawn where their law cannot be integrated.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Relative error to find the tokens needed for.")] = None,
    figure: Annotated[
        Path | None, path_option("--figure", "Figure file (.svg, .pdf, .png); predict.svg when left out, none with --json.")
    ] = None,
    no_figure: Annotated[bool, typer.Option("--no-figure", help="Write no figure.")] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float64",
    as_json: Json = False,
) -> None:
    """Exact error, local slope and every bound and rate that applies, for a law of tokens and a head, at any n.

    Example: esscher predict --gaussian --dim 50 --horizon 1.5 --n 1e3:1e12
    """
    flags = {
        "gaussian": gaussian,
        "sphere": sphere,
        "ball": ball,
        "cube": cube,
        "rademacher": rademacher,
        "laplace": laplace,
    }
    chosen = [name for name in LAWS if flags[name]]
    settings = read_mapping(spec) if spec is not None else {}
    _merge_flags(settings, chosen, dim, size, horizon, scale, random_head, seed)
    for name, value in {"n": n, "queries": queries, "epsilon": epsilon}.items():
        if value is not None:
            settings[name] = value
    settings |= {"seed": seed, "dtype": dtype}
    as_dtype(dtype)
    if figure is None and not as_json:
        figure = Path("predict.svg")
    if no_figure:
        figure = None
    if figure is not None:
        check_format(figure)
        check_output(figure)
    check_device(device)
    checked = PredictSpec.model_validate(settings)
    curve, found = evaluate(checked, device)
    needed = _needed(curve, checked.epsilon)
    if as_json:
        print_json(_record(checked, curve, found, needed))
    else:
        _show(checked, curve, found, needed)
    if figure is not None:
        save_predictions(curve, found, figure)
        log(f"figure: {figure}")


def evaluate(spec: PredictSpec, device: str = "cpu") -> tuple[ErrorCurve, list[Prediction]]:
    """The exact curve and all predictions of a spec."""
    measure = spec.law.build(as_dtype(spec.dtype), device)
    head = spec.head.build(measure)
    curve = exact_curve(head, measure, measure, list(spec.n), seed=spec.seed, draws=spec.queries)
    return curve, predictions(head, measure)


def _merge_flags(
    settings: dict[str, Any],
    chosen: list[str],
    dim: int | None,
    size: float | None,
    horizon: float | None,
    scale: float | None,
    random_head: bool,
    seed: int,
) -> None:
    """Write the flags into the settings of a YAML file (or into empty ones)."""
    if len(chosen) > 1:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)}, got --{' --'.join(chosen)}")
    for part in ("law", "head"):
        if not isinstance(settings.get(part, {}), dict):
            raise ValueError(f"{part}: expected a mapping of fields, got {type(settings[part]).__name__}")
    law = dict(settings.get("law", {}))
    if chosen:
        law["law"] = chosen[0]
    if not law:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)} with --dim, or a YAML file")
    if dim is not None:
        law["dim"] = dim
    if size is not None:
        names = {"gaussian": "variance", "sphere": "radius", "ball": "radius", "cube": "half_width"}
        law[names.get(str(law.get("law")), "scale")] = size
    settings["law"] = law
    head = dict(settings.get("head", {}))
    head |= {key: value for key, value in {"horizon": horizon, "scale": scale}.items() if value is not None}
    if random_head:
        head |= {"kind": "random", "seed": seed}
    settings["head"] = head


def _needed(curve: ErrorCurve, epsilon: float) -> dict[str, Any]:
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


def _record(spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]) -> dict[str, Any]:
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


def _show(spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]) -> None:
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
