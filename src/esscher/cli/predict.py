"""``esscher predict``: exact errors and every prediction for a law and a head, at any n."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from esscher.cli import options
from esscher.cli.options import given, option, switch
from esscher.cli.output import close, log, number, print_json, show
from esscher.errors.montecarlo.spec import Count, Dtype, HeadSpec, Ladder, Law, read_ladder
from esscher.runs.spec import Plain, RunSpec, Seed

if TYPE_CHECKING:
    from esscher.attention.head import Head
    from esscher.errors.curve import ErrorCurve
    from esscher.measures.base import Measure
    from esscher.theory.prediction import Prediction

LAWS = ("gaussian", "sphere", "ball", "cube", "rademacher", "laplace")
LAW, HEAD = "Law of tokens", "Head"
SHORT = ("says", "of")  # columns of the short table alone


class PredictSpec(Plain):
    """Everything ``esscher predict`` needs; a YAML file has these fields."""

    law: Law
    head: HeadSpec = HeadSpec()
    n: Ladder = Field(
        default_factory=lambda: read_ladder("10:1e12:12"),
        description="numbers of tokens: 1e3:1e12, 1e3:1e12:40 or 100,1000",
    )
    queries: Count = Field(
        default=256, description="queries drawn where their law cannot be integrated"
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(
        default=0.1, description="relative error to find the tokens needed for"
    )
    seed: Seed = 0
    dtype: Dtype = "float64"


def predict(
    spec: Annotated[
        Path | None,
        options.path_argument("YAML file with law, head, n ...; flags override it.", "FILE"),
    ] = None,
    gaussian: Annotated[bool, switch("--gaussian", "Gaussian tokens.", LAW)] = False,
    sphere: Annotated[bool, switch("--sphere", "Tokens uniform on a sphere.", LAW)] = False,
    ball: Annotated[bool, switch("--ball", "Tokens uniform in a ball.", LAW)] = False,
    cube: Annotated[bool, switch("--cube", "Tokens uniform in a cube.", LAW)] = False,
    rademacher: Annotated[
        bool, switch("--rademacher", "Tokens with coordinates +-scale.", LAW)
    ] = False,
    laplace: Annotated[bool, switch("--laplace", "Tokens with Laplace coordinates.", LAW)] = False,
    dim: Annotated[int | None, switch("--dim", "Dimension of a token.", LAW)] = None,
    size: Annotated[
        float | None,
        switch("--size", "Variance, radius, half width or scale, whichever the law has.", LAW),
    ] = None,
    horizon: Annotated[float | None, option(HeadSpec, "horizon", HEAD)] = None,
    scale: Annotated[float | None, option(HeadSpec, "scale", HEAD)] = None,
    random_head: Annotated[
        bool, switch("--random-head", "Random W_q, W_k, W_v instead of A = V = I.", HEAD)
    ] = False,
    n: Annotated[str | None, option(PredictSpec, "n", default="10:1e12:12")] = None,
    queries: Annotated[int | None, option(PredictSpec, "queries")] = None,
    epsilon: Annotated[float | None, option(PredictSpec, "epsilon")] = None,
    seed: Annotated[int | None, option(PredictSpec, "seed")] = None,
    device: Annotated[str, option(RunSpec, "device")] = "cpu",
    dtype: Annotated[str | None, option(PredictSpec, "dtype")] = None,
    figure: Annotated[
        Path | None,
        options.path_option("--figure", "Figure file to write (.svg, .pdf, .png; default: none)."),
    ] = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Compute the exact error of attention on a law of tokens, at any n, with every bound that
    applies.

    Example: esscher predict --gaussian --dim 50 --horizon 1.5 --n 1e3:1e12
    """
    flags = given(locals())
    import torch

    from esscher.errors.exact import exact_curve
    from esscher.report.figures import check_format, prediction_charts, save_charts
    from esscher.runs.spec import read_mapping
    from esscher.theory.prediction import predictions

    fields = _fields({} if spec is None else read_mapping(spec), flags)
    if figure is not None:
        check_format(figure)
    options.check_device(device)
    checked = PredictSpec.model_validate(fields)
    measure = checked.law.build(getattr(torch, checked.dtype), device)
    head, ladder = checked.head.build(measure), list(checked.n)
    curve = exact_curve(head, measure, measure, ladder, seed=checked.seed, draws=checked.queries)
    predicted = predictions(head, measure)
    derived = _derived(head, measure, curve, checked.epsilon)
    if figure is not None:
        save_charts(prediction_charts(curve, predicted), figure)
        log(f"figure: {figure}")
    if as_json:
        return print_json(_record(checked, curve, predicted, derived))
    following = f"esscher predict{_as_typed(flags)} --figure error.svg" * (figure is None)
    _show(curve, predicted, derived, everything, following)


def _as_typed(flags: Mapping[str, Any]) -> str:
    """The flags that were given as a command has them, with a space before each."""
    words = [str(flags["spec"])] if "spec" in flags else []
    for name, value in flags.items():
        if name not in ("spec", "everything", "as_json") and (name, value) != ("device", "cpu"):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return "".join(f" {shlex.quote(word)}" for word in words)


def _fields(found: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the spec, flags before the file."""
    from esscher.measures.fields import LawFields, all_laws

    law, head = found.get("law", {}), found.get("head", {})
    if not (isinstance(law, dict) and isinstance(head, dict)):
        return dict(found)  # the spec refuses it
    chosen = [name for name in LAWS if name in flags]
    if len(chosen) > 1 or not (law or chosen):
        got = f"got --{' --'.join(chosen)}" if chosen else "or a YAML file"
        raise ValueError(f"law: expected one of --{', --'.join(LAWS)} with --dim, {got}")
    law = law | {name: flags[name] for name in ("dim",) if name in flags}
    if chosen and "dim" not in law:
        raise ValueError(f"--dim: give the dimension of a token, e.g. --{chosen[0]} --dim 50")
    if chosen:
        law["law"] = chosen[0]
    if "size" in flags:
        law[all_laws().get(str(law.get("law")), LawFields).size] = flags["size"]
    head = head | {name: flags[name] for name in ("horizon", "scale") if name in flags}
    if "random_head" in flags:
        head |= {"kind": "random", "seed": flags.get("seed", 0)}
    return {**found, "law": law, "head": head, **given(flags, PredictSpec)}


def _derived(head: Head, measure: Measure, curve: ErrorCurve, epsilon: float) -> dict[str, Any]:
    """Tokens needed, and the critical scale at each n of a query of root mean square norm where
    the head stretches most; None with the reason where there is none.
    """
    from esscher.errors.budget import tokens_needed
    from esscher.theory.prediction import Setting
    from esscher.theory.sharp import critical_scale

    finders: dict[str, Callable[[], Any]] = {
        "tokens_needed": lambda: tokens_needed(curve, epsilon),
        "critical_scale": lambda: critical_scale(
            head, measure, Setting(head, measure).query, curve.n.tolist()
        ),
    }
    found: dict[str, Any] = {"epsilon": epsilon}
    for name, find in finders.items():
        try:
            found[name] = find()
        except ValueError as reason:
            found |= {name: None, f"{name}_reason": str(reason)}
    return found


def _record(
    spec: PredictSpec, curve: ErrorCurve, found: list[Prediction], derived: dict[str, Any]
) -> dict[str, Any]:
    """The result as JSON has it."""
    predicted = []
    for p in found:
        value = None if p.value is None else p.value(curve.n)
        vacuous = None if value is None else [abs(x) == float("inf") for x in value]
        told = {"applies": p.applies, "unmet": p.unmet, "value": value, "vacuous": vacuous}
        predicted.append(vars(p) | told)
    own = {name: x for name, x in vars(curve).items() if name not in ("queries", "samples")}
    own |= {"relative": curve.relative, **derived, "predictions": predicted}
    return {"spec": spec.model_dump(), **own}


def _show(
    curve: ErrorCurve,
    found: list[Prediction],
    derived: dict[str, Any],
    everything: bool,
    following: str,
) -> None:
    """What the numbers say, and what theory says at the largest n: bounds below the limit's size
    first, then exponents, those of the same error before others.
    """

    def place(p: Prediction) -> tuple[float, float]:
        if p.value is None:
            return 1, "l2" not in p.quantity
        bound = float(p.rms(curve.n[-1:])[0])
        return 0 if bound < curve.scale else 2, bound

    found = sorted(found, key=place)
    held = [p for p in found if p.applies]
    sources = (("drawn queries", curve.query_stderr), ("drawn pool", curve.pool_stderr))
    doubts = "".join(
        f", +- {number(doubt[-1], '.2g')} from the {source}"
        for source, doubt in sources
        if doubt is not None and doubt[-1] > 0
    )
    slope = float("nan") if curve.slope is None else curve.slope[-1]
    falls = "" if slope != slope else f" and falls like n^{slope:.3f}"
    share = number(curve.relative[-1], ".2%")
    needed, scale = derived["tokens_needed"], derived["critical_scale"]
    few = bool(scale is not None and scale[-1] <= 1)
    reason = derived.get("tokens_needed_reason", "").removeprefix("epsilon: ")
    enough = f"A relative error of {derived['epsilon']:g} needs {needed:,} tokens" if needed else ""
    said = [
        f"At n = {number(float(curve.n[-1]))} the error is {number(curve.rms[-1])} ({share} of the"
        f" limit){doubts}{falls}{'; there a few keys have most of the weight' * few}."
        f" {enough or reason[:1].upper() + reason[1:]}."
    ]
    proved = sum(p.status.startswith("proved") for p in held)
    said.append(
        f"{len(held)} of {len(found)} statements of theory apply ({proved} proved); at this n they"
        " say:"
    )
    rows = []
    for p in found if everything else held:
        value = None if p.value is None else float(p.rms(curve.n[-1:])[0])
        row = {
            "name": p.name,
            "status": p.status,
            "value": "vacuous" if value == float("inf") else number(value),
            "exponent": number(p.exponent),
            "quantity": p.quantity,
            "source": p.source,
        }
        row |= {"applies": "yes" if p.applies else "no: " + "; ".join(p.unmet)}
        rate = "-" if p.exponent is None else f"n^-{row['exponent']}"
        row |= {"says": rate if value is None else row["value"]}
        rows.append(row | {"of": p.quantity.rpartition(" error at ")[2]})
    if everything:
        known = curve.to_frame().drop(columns=["metric", "kind"])
        more = {"slope": curve.slope, "critical_scale": scale}
        known = known.assign(**{name: value for name, value in more.items() if value is not None})
        show(f"{curve.origin}; relative accuracy {curve.accuracy:.0e}", known)
        show("statements", [{key: row[key] for key in row if key not in SHORT} for row in rows])
    close(said, rows, ("name", "status", *SHORT), following, everything=everything)
