"""``esscher fit``: the rates of a stored run, or those over another range of token numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import All
from esscher.cli.output import ROWS, Json, path_argument, print_json, say, show

if TYPE_CHECKING:
    from esscher.errors.curve import ErrorCurve
    from esscher.runs import Run

RATE = ("value", "head", "metric", "exponent", "low", "high", "status")
EXPONENTS = {"l2": "beta_fit", "mean": "beta_mean", "cov": "beta_cov"}  # of a probe, by metric


def fit(
    run: Annotated[Path, path_argument("Run directory of esscher converge or esscher probe.")],
    window: Annotated[
        str | None,
        typer.Option(
            help="Smallest and largest n, 100:10000; the rates that the run stored when left out."
        ),
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Show the exponents of a run, error ~ constant * n^-exponent, or fit its curves again.

    Without --window these are the run's own exponents and intervals: of a probe's l2 error 90 % for
    an endless text, of all others 95 % over repeats.

    Example: esscher fit runs/mine --window 100:10000
    """
    from esscher.runs import load_run

    stored = load_run(run)
    job = stored.manifest.job
    if job not in ("converge", "probe"):
        raise ValueError(f"{run}: expected a run of esscher converge or probe, got one of {job}")
    if window is not None:
        rows = [*_fitted(_curves(stored), _limits(window))]
    elif job == "converge":
        rates = stored.table("rates")
        rows = rates[[key for key in (*RATE, "reason") if key in rates]].to_dict("records")
    else:
        rows = [*_of_probe(stored)]
    if as_json:
        return print_json(rows)
    if not rows:
        raise ValueError(f"{run}: no curves to fit in this run")
    found = sorted(row["exponent"] for row in rows if row["exponent"] == row["exponent"])
    states = Counter(row["status"] for row in rows).most_common()
    told = ", ".join(f"{count} {status}" for status, count in states)
    say(f"{len(found)} of {len(rows)} curves have a rate (status: {told})")
    if found:
        middle = found[len(found) // 2]
        say(f"error ~ n^-b, b from {found[0]:.3g} to {found[-1]:.3g}, median {middle:.3g}")
    if everything:
        return show(str(run), rows)
    show(str(run), [{key: row[key] for key in RATE if key in row} for row in rows], None, ROWS)


def _of_probe(stored: Run) -> Iterator[dict[str, Any]]:
    """The exponents that a probe stored, of heads and of layers with their heads side by side."""
    heads = stored.table("heads").to_dict("records")
    layers = stored.table("layers").to_dict("records") if "layers" in stored.tables else []
    for row in (*heads, *layers):
        name = f"{row['layer']}.{row['head']}" if "head" in row else f"{row['layer']}, all"
        for metric, key in EXPONENTS.items():
            if key in row:
                ends = key.removesuffix("_fit")
                rate = {
                    "exponent": row[key],
                    "low": row[f"{ends}_low"],
                    "high": row[f"{ends}_high"],
                }
                status = "ok" if row[key] == row[key] else "none"
                yield {"head": name, "metric": metric, **rate, "status": status}


def _curves(stored: Run) -> Iterator[tuple[dict[str, Any], ErrorCurve]]:
    """The curves of a run, each with its name; those of a sweep from their repeats."""
    if stored.manifest.job == "converge":
        from esscher.errors.montecarlo.job import curves_of
        from esscher.errors.montecarlo.spec import ExperimentSpec

        spec, errors = ExperimentSpec.read(stored.spec), stored.table("errors")
        for point in sorted(set(errors["point"])):
            for curve in curves_of(spec, point, errors[errors["point"] == point]).values():
                yield {"value": spec.points[point]}, curve
        return
    from esscher.probe.curves import stored_curves
    from esscher.probe.moments import WHOLE_LAYER

    for metric in EXPONENTS:
        for (layer, head), curve in stored_curves(stored.table("curves"), metric).items():
            yield {"head": f"{layer}, all" if head == WHOLE_LAYER else f"{layer}.{head}"}, curve


def _fitted(
    curves: Iterator[tuple[dict[str, Any], ErrorCurve]], window: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    from esscher.errors.rate import fit_rate

    for name, curve in curves:
        found = fit_rate(curve, window=window, raise_on_failure=False)
        yield {
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


def _limits(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError as cause:
        raise ValueError(
            f"--window: expected two numbers such as 100:10000, got {text!r}"
        ) from cause
    return low, high
