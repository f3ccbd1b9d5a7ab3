"""``esscher predict``: exact errors and every prediction for a law and a head, at any n."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from esscher.cli.options import All, given, option
from esscher.cli.output import (
    ROWS,
    Json,
    check_device,
    log_files,
    number,
    path_argument,
    path_option,
    print_json,
    say,
    show,
)
from esscher.errors.montecarlo.spec import Count, Dtype, HeadSpec, Ladder, Law, read_ladder
from esscher.runs.spec import Plain, RunSpec, Seed

if TYPE_CHECKING:
    from esscher.attention.head import Head
    from esscher.errors.curve import ErrorCurve
    from esscher.measures.base import Measure
    from esscher.theory.prediction import Prediction

LAWS = ("gaussian", "sphere", "ball", "cube", "rademacher", "laplace")
LAW, HEAD = "Law of tokens", "Head"


class PredictSpec(Plain):
    """Everything ``esscher predict`` needs; a YAML file has these fields."""

    law: Law
    head: HeadSpec = HeadSpec()
    n: Ladder = Field(
        default_factory=lambda: read_ladder("10:1e12:12"),
        description="token numbers: 1e3:1e12, 1e3:1e12:40 or 100,1000",
    )
    queries: Count = Field(
        default=256, description="queries drawn where their law cannot be integrated"
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(
        default=0.1, description="relative error to find the tokens needed for"
    )
    seed: Seed = 0
    dtype: Dtype = "float64"


def _law_flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel=LAW)


def predict(
    spec: Annotated[
        Path | None, path_argument("YAML file with law, head, n ...; flags override it.", "FILE")
    ] = None,
    gaussian: Annotated[bool, _law_flag("--gaussian", "Gaussian tokens.")] = False,
    sphere: Annotated[bool, _law_flag("--sphere", "Tokens uniform on a sphere.")] = False,
    ball: Annotated[bool, _law_flag("--ball", "Tokens uniform in a ball.")] = False,
    cube: Annotated[bool, _law_flag("--cube", "Tokens uniform in a cube.")] = False,
    rademacher: Annotated[
        bool, _law_flag("--rademacher", "Tokens with coordinates +-scale.")
    ] = False,
    laplace: Annotated[bool, _law_flag("--laplace", "Tokens with Laplace coordinates.")] = False,
    dim: Annotated[int | None, _law_flag("--dim", "Dimension of a token.")] = None,
    size: Annotated[
        float | None,
        _law_flag("--size", "Variance, radius, half width or scale of the law, whichever it has."),
    ] = None,
    horizon: Annotated[float | None, option(HeadSpec, "horizon", HEAD)] = None,
    scale: Annotated[float | None, option(HeadSpec, "scale", HEAD)] = None,
    random_head: Annotated[
        bool,
        typer.Option(
            "--random-head", help="Random W_q, W_k, W_v instead of A = V = I.", rich_help_panel=HEAD
        ),
    ] = False,
    n: Annotated[str | None, option(PredictSpec, "n", default="10:1e12:12")] = None,
    queries: Annotated[int | None, option(PredictSpec, "queries")] = None,
    epsilon: Annotated[float | None, option(PredictSpec, "epsilon")] = None,
    seed: Annotated[int | None, option(PredictSpec, "seed")] = None,
    device: Annotated[str, option(RunSpec, "device")] = "cpu",
    dtype: Annotated[str | None, option(PredictSpec, "dtype")] = None,
    figure: Annotated[
        Path | None,
        path_option("--figure", "Figure file to write (.svg, .pdf, .png); none when left out."),
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Compute the exact error of attention on a law of tokens, at any n, with every bound that
    applies.

    Example: esscher predict --gaussian --dim 50 --horizon 1.5 --n 1e3:1e12
    """
    flags = given(locals())
    import torch

    from esscher.errors.exact import exact_curve
    from esscher.report.figures import save_predictions
    from esscher.report.style import check_format
    from esscher.runs.spec import read_mapping
    from esscher.theory.prediction import predictions

    found = {} if spec is None else read_mapping(spec)
    fields = {**found, "law": _law(found, flags), "head": _head(found, flags)}
    if figure is not None:
        check_format(figure)
    check_device(device)
    checked = PredictSpec.model_validate(fields | given(flags, PredictSpec))
    measure = checked.law.build(getattr(torch, checked.dtype), device)
    head, ladder = checked.head.build(measure), list(checked.n)
    curve = exact_curve(head, measure, measure, ladder, seed=checked.seed, draws=checked.queries)
    predicted = predictions(head, measure)
    needed = _needed_tokens(curve, checked.epsilon) | _freezing(head, measure, ladder)
    if figure is not None:
        save_predictions(curve, predicted, figure)
    if as_json:
        print_json(_record(checked, curve, predicted, needed))
    else:
        _show(checked, curve, predicted, needed, everything)
    log_files("figure", [figure])


def _law(found: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the law, flags before the file."""
    law = _mapping(found, "law")
    chosen = [name for name in LAWS if name in flags]
    if len(chosen) > 1 or not (law or chosen):
        got = f"got --{' --'.join(chosen)}" if chosen else "or a YAML file"
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)} with --dim, {got}")
    if chosen:
        law["law"] = chosen[0]
    if "dim" in flags:
        law["dim"] = flags["dim"]
    if "size" in flags:
        from esscher.measures.fields import LawFields, all_laws

        law[all_laws().get(str(law.get("law")), LawFields).size] = flags["size"]
    return law


def _head(found: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the head, flags before the file."""
    head = _mapping(found, "head")
    head |= {name: flags[name] for name in ("horizon", "scale") if name in flags}
    if "random_head" in flags:
        head |= {"kind": "random", "seed": flags.get("seed", 0)}
    return head


def _mapping(found: Mapping[str, Any], part: str) -> dict[str, Any]:
    fields = found.get(part, {})
    if not isinstance(fields, dict):
        raise ValueError(f"{part}: expected a mapping of fields, got {type(fields).__name__}")
    return dict(fields)


def _needed_tokens(curve: ErrorCurve, epsilon: float) -> dict[str, Any]:
    """Tokens needed and the start of the asymptotic regime, or the sentence that says why there is
    none.
    """
    from esscher.errors.budget import asymptotic_from, tokens_needed

    finders: dict[str, Callable[[], int]] = {
        "tokens_needed": lambda: tokens_needed(curve, epsilon),
        "asymptotic_from": lambda: asymptotic_from(curve),
    }
    found: dict[str, Any] = {"epsilon": epsilon}
    for name, find in finders.items():
        try:
            found[name] = find()
        except ValueError as reason:
            found |= {name: None, f"{name}_reason": str(reason)}
    return found


def _freezing(head: Head, measure: Measure, n: list[int]) -> dict[str, Any]:
    """The critical scale at each n, of a query of root mean square norm where the head stretches
    most; None where the law's scores have no known tail.
    """
    from esscher.theory.prediction import Setting
    from esscher.theory.sharp import critical_scale

    try:
        found = critical_scale(head, measure, Setting(head, measure).query, n)
    except ValueError:
        return {"critical_scale": None}
    return {"critical_scale": found}


def _record(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]
) -> dict[str, Any]:
    """The result as JSON has it."""
    of_curve = "origin kind accuracy scale n rms query_stderr pool_stderr relative q95 slope"
    of_curve += " effective_tokens"
    of_prediction = "name source formula status quantity applies unmet exponent units"
    predicted = []
    for p in found:
        value = None if p.value is None else p.value(curve.n)
        vacuous = None if value is None else [abs(x) == float("inf") for x in value]
        known = {name: getattr(p, name) for name in of_prediction.split()}
        predicted.append({**known, "value": value, "vacuous": vacuous})
    own = {name: getattr(curve, name) for name in of_curve.split()}
    return {"spec": spec.model_dump(), **own, **needed, "predictions": predicted}


def _show(
    spec: PredictSpec,
    curve: ErrorCurve,
    found: list[Prediction],
    needed: dict[str, Any],
    everything: bool,
) -> None:
    """What the numbers say, then what theory says at the largest n."""
    for sentence in _summary(spec, curve, found, needed):
        say(sentence)
    title = (
        f"predictions at n = {int(curve.n[-1]):,} (bounds on the square as their root; vacuous:"
        " beyond 1e308)"
    )
    rows = []
    for p in found if everything else [p for p in found if p.applies]:
        value = None if p.value is None else float(p.rms(curve.n[-1:])[0])
        row = {
            "name": p.name,
            "status": p.status,
            "value": "vacuous" if value == float("inf") else number(value),
            "exponent": number(p.exponent),
            "quantity": p.quantity,
            "source": p.source,
        }
        if everything:
            row["applies"] = "yes" if p.applies else "no: " + "; ".join(p.unmet)
        rows.append(row)
    if everything:
        known = curve.to_frame().drop(columns=["metric", "kind"])
        if curve.slope is not None:
            known["slope"] = curve.slope
        if needed["critical_scale"] is not None:
            known["critical_scale"] = needed["critical_scale"]
        show(f"{curve.origin}; relative accuracy {curve.accuracy:.0e}", known)
        show(title, rows)
    else:
        show(title, rows, None, ROWS)
        say("--all prints the curve and every statement, with what those that fail need")


def _summary(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]
) -> Iterator[str]:
    sources = (("drawn queries", curve.query_stderr), ("drawn pool", curve.pool_stderr))
    doubts = "".join(
        f", +- {number(doubt[-1], '.2g')} from the {source}"
        for source, doubt in sources
        if doubt is not None and doubt[-1] > 0
    )
    slope = None if curve.slope is None else curve.slope[-1]
    falls = "" if slope is None or slope != slope else f", falling like n^{slope:.3f} there"
    yield (
        f"error {number(curve.rms[-1])} at n = {int(curve.n[-1]):,}"
        f" ({number(curve.relative[-1], '.2%')} of the limit){doubts}{falls}"
    )
    tokens, start = needed["tokens_needed"], needed["asymptotic_from"]
    yield (
        f"tokens needed: {needed['tokens_needed_reason']}"
        if tokens is None
        else f"tokens needed for a relative error of {spec.epsilon:g}: {tokens}"
    )
    yield (
        f"delta method: {needed['asymptotic_from_reason']}"
        if start is None
        else f"delta method: within 10 % from n = {start}"
    )
    if needed["critical_scale"] is not None:
        yield (
            f"freezing: softmax over {int(curve.n[-1]):,} tokens freezes at"
            f" {number(needed['critical_scale'][-1])} times these scores"
        )
    held = [p for p in found if p.applies]
    proved = sum(p.status.startswith("proved") for p in held)
    yield f"theory: {len(held)} of {len(found)} statements apply, {proved} of them proved"
