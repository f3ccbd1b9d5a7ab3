"""``esscher fit``: fit the rates of a stored run again, with another window or level."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import All
from esscher.cli.output import ROWS, Json, path_argument, print_json, say, show

if TYPE_CHECKING:
    from esscher.errors.curve import ErrorCurve
    from esscher.runs import Run

SHOWN = ("value", "head", "metric", "exponent", "low", "high", "status")

# A stored curve: its name, the curve, the part that the run itself fits, and the (exponent, low,
# high) that the run found, with what that interval means
Stored = tuple[dict[str, Any], "ErrorCurve", "ErrorCurve", tuple[float, float, float] | None, str]


def fit(
    run: Annotated[Path, path_argument("Run directory of esscher converge or esscher probe.")],
    window: Annotated[
        str | None,
        typer.Option(
            help="Smallest and largest n, 100:10000; those that the run fits when left out."
        ),
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Fit error ~ constant * n^-exponent again to every curve of a run.

    Without --window these are the run's own exponents and intervals: of a probe's l2 error 90 % for
    an endless text, of all others 95 % over repeats.

    Example: esscher fit runs/mine --window 100:10000
    """
    from esscher.errors.rate import fit_rate
    from esscher.runs import load_run

    stored = load_run(run)
    readers = {"converge": _of_converge, "probe": _of_probe}
    if stored.manifest.job not in readers:
        raise ValueError(
            f"{run}: expected a run of esscher converge or probe, got one of {stored.manifest.job}"
        )
    limits = None if window is None else _limits(window)
    rows: list[dict[str, Any]] = []
    for name, curve, fitted, own, meaning in readers[stored.manifest.job](stored):
        if limits is not None:
            found = fit_rate(curve, window=limits, raise_on_failure=False)
        else:
            found = fit_rate(fitted, raise_on_failure=False)
            if own is not None:
                told = f"exponent and interval as the run found them, {meaning}"
                found = found.with_exponent(*own, told)
        rows.append(
            {
                **name,
                "metric": curve.metric,
                "exponent": found.exponent,
                "low": found.interval[0],
                "high": found.interval[1],
                "status": found.status.code,
                "constant": found.constant,
                "n_min": found.window.n_min,
                "n_max": found.window.n_max,
                "straightness_p": found.p_value,
                "reason": found.status.text,
            }
        )
    if as_json:
        return print_json(rows)
    if not rows:
        raise ValueError(f"{run}: no curves to fit in this run")
    say(_in_words(rows))
    if everything:
        return show(str(run), rows)
    show(str(run), [{key: row[key] for key in SHOWN if key in row} for row in rows], None, ROWS)


def _in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many curves have a rate, and which."""
    found = sorted(row["exponent"] for row in rows if row["exponent"] == row["exponent"])
    if not found:
        return f"none of {len(rows)} curves has a rate"
    states = Counter(row["status"] for row in rows).most_common()
    told = ", ".join(f"{count} {status}" for status, count in states)
    return (
        f"{len(found)} of {len(rows)} curves have a rate (status: {told}): error ~ n^-b, b from"
        f" {found[0]:.3g} to {found[-1]:.3g}, median {found[len(found) // 2]:.3g}"
    )


def _of_converge(stored: Run) -> Iterator[Stored]:
    """Curves of a sweep, from its repeats."""
    from esscher.errors.montecarlo.job import curves_of
    from esscher.errors.montecarlo.spec import ExperimentSpec

    spec, errors = ExperimentSpec.read(stored.spec), stored.table("errors")
    for point in sorted(set(errors["point"])):
        for curve in curves_of(spec, point, errors[errors["point"] == point]).values():
            yield {"value": spec.points[point]}, curve, curve, None, ""


def _of_probe(stored: Run) -> Iterator[Stored]:
    """Curves of a model's heads; the run fits that of draws with replacement at the n of its
    setting ``fit``.
    """
    from esscher.probe.curves import stored_curves
    from esscher.probe.moments import WHOLE_LAYER
    from esscher.probe.spec import ProbeSpec, fit_points, fit_range

    spec, curves = ProbeSpec.read(stored.spec), stored.table("curves")
    rows = {(row["layer"], row["head"]): row for row in stored.table("heads").to_dict("records")}
    if "layers" in stored.tables:
        layers = stored.table("layers").to_dict("records")
        rows |= {(row["layer"], WHOLE_LAYER): row for row in layers}
    repeats = "95 % over repeats"
    for metric, ends, meaning in (
        ("l2", ("beta_fit", "beta_low", "beta_high"), "90 % for an endless text"),
        ("mean", ("beta_mean", "beta_mean_low", "beta_mean_high"), repeats),
        ("cov", ("beta_cov", "beta_cov_low", "beta_cov_high"), repeats),
    ):
        for (layer, head), curve in stored_curves(curves, metric).items():
            name = {"head": f"{layer}.{head}" if head != WHOLE_LAYER else f"{layer}, all"}
            row, fitted = rows.get((layer, head), {}), curve
            if metric == "l2":
                points = fit_points(fit_range(spec, int(row["n_keys"])))
                own = curves[(curves["layer"] == layer) & (curves["head"] == head)]
                fitted = stored_curves(own[own["n"].isin(points)], metric)[layer, head]
            exponent, low, high = (float(row.get(key, math.nan)) for key in ends)
            found = None if math.isnan(exponent) else (exponent, low, high)
            yield name, curve, fitted, found, meaning


def _limits(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError as cause:
        raise ValueError(
            f"--window: expected two numbers such as 100:10000, got {text!r}"
        ) from cause
    return low, high
