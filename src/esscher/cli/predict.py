"""``esscher predict``: exact errors and every prediction for a law and a head, at any n."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from esscher.cli.options import All, Markdown, Sort, Top, given, option
from esscher.cli.output import (
    Json,
    brief,
    check_device,
    log,
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
    from esscher.errors.curve import ErrorCurve
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
    top: Top = None,
    sort: Sort = None,
    markdown: Markdown = False,
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
    from esscher.runs.store import check_output
    from esscher.theory.prediction import predictions

    found = {} if spec is None else read_mapping(spec)
    fields = {**found, "law": _law(found, flags), "head": _head(found, flags)}
    if figure is not None:
        check_format(figure)
        check_output(figure)
    check_device(device)
    checked = PredictSpec.model_validate(fields | given(flags, PredictSpec))
    measure = checked.law.build(getattr(torch, checked.dtype), device)
    head, ladder = checked.head.build(measure), list(checked.n)
    curve = exact_curve(head, measure, measure, ladder, seed=checked.seed, draws=checked.queries)
    predicted = predictions(head, measure)
    needed = _needed_tokens(curve, checked.epsilon)
    if as_json:
        print_json(_record(checked, curve, predicted, needed))
    else:
        for sentence in _summary(checked, curve, predicted, needed):
            say(sentence)
        rows = _predictions(curve, predicted)
        title = (
            f"predictions at n = {int(curve.n[-1]):,} (bounds on the square as their root; vacuous:"
            " beyond 1e308)"
        )
        if everything:
            show(f"{curve.origin}; relative accuracy {curve.accuracy:.0e}", _curve_rows(curve))
            show(title, rows, None, flags)
        else:
            show(title, [row for row in rows if row["applies"] == "yes"], None, brief(flags))
            say("--all prints the curve and every statement, with what those that fail need")
    if figure is not None:
        save_predictions(curve, predicted, figure)
        log(f"figure: {figure}")


def _law(found: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the law, flags before the file."""
    law = _mapping(found, "law")
    chosen = [name for name in LAWS if name in flags]
    if len(chosen) > 1:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)}, got --{' --'.join(chosen)}")
    if chosen:
        law["law"] = chosen[0]
    if not law:
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)} with --dim, or a YAML file")
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
    return (
        head | {"kind": "random", "seed": flags.get("seed", 0)} if "random_head" in flags else head
    )


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
        "tokens_needed": partial(tokens_needed, curve, epsilon),
        "asymptotic_from": partial(asymptotic_from, curve),
    }
    found: dict[str, Any] = {"epsilon": epsilon}
    for name, find in finders.items():
        try:
            found[name] = find()
        except ValueError as reason:
            found |= {name: None, f"{name}_reason": str(reason)}
    return found


def _record(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]
) -> dict[str, Any]:
    """The result as JSON has it."""
    of_curve = "origin kind accuracy scale n rms query_stderr pool_stderr relative q95 slope"
    of_prediction = "name source formula status quantity applies unmet exponent units"
    values = [None if p.value is None else p.value(curve.n) for p in found]
    return {
        "spec": spec.model_dump(),
        **{name: getattr(curve, name) for name in of_curve.split()},
        "slope_stderr": curve.slope_stderr,
        "effective_tokens": curve.effective_tokens,
        **needed,
        "predictions": [
            {
                **{name: getattr(p, name) for name in of_prediction.split()},
                "value": value,
                "vacuous": None if value is None else [abs(x) == float("inf") for x in value],
            }
            for p, value in zip(found, values, strict=True)
        ],
    }


def _summary(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], needed: dict[str, Any]
) -> Iterator[str]:
    """What the numbers say."""
    doubts = [
        f", +- {number(doubt[-1], '.2g')} from the {source}"
        for source, doubt in (
            ("drawn queries", curve.query_stderr),
            ("drawn pool", curve.pool_stderr),
        )
        if doubt is not None and doubt[-1] > 0
    ]
    slope = None if curve.slope is None else curve.slope[-1]
    falls = "" if slope is None or slope != slope else f", falling like n^{slope:.3f} there"
    yield (
        f"error {number(curve.rms[-1])} at n = {int(curve.n[-1]):,}"
        f" ({number(curve.relative[-1], '.2%')} of the limit){''.join(doubts)}{falls}"
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
    held = [p for p in found if p.applies]
    proved = sum(p.status.startswith("proved") for p in held)
    yield f"theory: {len(held)} of {len(found)} statements apply, {proved} of them proved"


def _predictions(curve: ErrorCurve, found: list[Prediction]) -> list[dict[str, Any]]:
    """A row for each prediction, with its value at the largest n."""
    rows = []
    for p in found:
        value = None if p.value is None else float(p.rms(curve.n[-1:])[0])
        rows.append(
            {
                "name": p.name,
                "status": p.status,
                "value": "vacuous" if value == float("inf") else number(value),
                "exponent": number(p.exponent),
                "applies": "yes" if p.applies else "no: " + "; ".join(p.unmet),
                "quantity": p.quantity,
                "source": p.source,
            }
        )
    return rows


def _curve_rows(curve: ErrorCurve) -> list[dict[str, Any]]:
    """A row for each n; standard errors where there are any."""
    columns = {
        "n": curve.n,
        "rms": curve.rms,
        "relative": curve.relative,
        "slope": curve.slope,
        "+- queries": curve.query_stderr if curve.query_stderr.any() else None,
        "+- pool": curve.pool_stderr,
        "+- slope": curve.slope_stderr,
        "effective tokens": curve.effective_tokens,
        "q95": curve.q95,
    }
    known = {name: values.tolist() for name, values in columns.items() if values is not None}
    return [dict(zip(known, row, strict=True)) for row in zip(*known.values(), strict=True)]
