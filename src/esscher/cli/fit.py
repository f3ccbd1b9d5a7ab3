"""``esscher fit``: fit the rates of a stored run again, with another window or level."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.output import Json, number, path_argument, print_json, print_table

if TYPE_CHECKING:
    from esscher.convergence.curve import ErrorCurve
    from esscher.runs import Run

__all__ = ["fit"]


def fit(
    run: Annotated[Path, path_argument("Run directory of esscher converge or esscher probe.")],
    window: Annotated[
        str | None, typer.Option(help="Smallest and largest n, 100:10000; every usable point when left out.")
    ] = None,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    as_json: Json = False,
) -> None:
    """Fit error ~ constant * n^-exponent to every curve of a run, with interval, straightness and the preferred law.

    Example: esscher fit runs/mine --window 100:10000
    """
    from esscher.convergence.rate.fit import fit_rate
    from esscher.runs import load_run

    stored = load_run(run)
    curves_of_job = {"converge": _of_converge, "probe": _of_probe}
    if stored.manifest.job not in curves_of_job:
        raise ValueError(f"{run}: expected a run of esscher converge or probe, got one of {stored.manifest.job}")
    limits = "auto" if window is None else _limits(window)
    rows: list[dict[str, Any]] = []
    for name, curve in curves_of_job[stored.manifest.job](stored):
        found = fit_rate(curve, window=limits, level=level, raise_on_failure=False)
        rows.append(
            {
                **name,
                "metric": curve.metric,
                "exponent": found.exponent,
                "low": found.interval[0],
                "high": found.interval[1],
                "constant": found.constant,
                "n_min": found.window.n_min,
                "n_max": found.window.n_max,
                "straightness_p": found.p_value,
                "preferred_law": "" if found.power_vs_log is None else found.power_vs_log.preferred,
                "status": found.status.code,
                "reason": found.status.text,
            }
        )
    if as_json:
        print_json(rows)
        return
    if not rows:
        raise ValueError(f"{run}: no curves to fit in this run")
    columns = [name for name in rows[0] if name != "reason"]
    cells = [
        [value if isinstance(value, str) else number(value) for name, value in row.items() if name in columns] for row in rows
    ]
    print_table(str(run), columns, cells, left=2)


def _of_converge(stored: Run) -> Iterator[tuple[dict[str, Any], ErrorCurve]]:
    """Curves of a sweep, from its repeats."""
    from esscher.convergence.montecarlo.job import ExperimentSpec, curves_of

    spec, errors = ExperimentSpec.read(stored.spec), stored.table("errors")
    for point in sorted(set(errors["point"])):
        for curve in curves_of(spec, point, errors[errors["point"] == point]).values():
            yield {"value": spec.points[point]}, curve


def _of_probe(stored: Run) -> Iterator[tuple[dict[str, Any], ErrorCurve]]:
    """Curves of a model's heads; of draws with replacement only up to the size of the pool."""
    from esscher.models.probe.curves import stored_curves

    curves = stored.table("curves")
    keys = stored.table("heads").set_index(["layer", "head"])["n_keys"].to_dict()
    inside = curves["n"] <= [keys.get(place, math.inf) for place in zip(curves["layer"], curves["head"], strict=True)]
    for metric in ("l2", "mean", "cov"):
        for (layer, head), curve in stored_curves(curves[inside], metric).items():
            yield {"head": f"{layer}.{head}" if head >= 0 else f"{layer}, all"}, curve


def _limits(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError as cause:
        raise ValueError(f"--window: expected two numbers such as 100:10000, got {text!r}") from cause
    return low, high
