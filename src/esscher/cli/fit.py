"""``esscher fit``: fit the rates of a stored run again, with another window or level."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from esscher.cli.output import Json, print_json, print_table
from esscher.convergence.experiment import ExperimentSpec, curves_of
from esscher.convergence.fit import fit_rate
from esscher.runs import load_run

__all__ = ["fit"]


def fit(
    run: Annotated[Path, typer.Argument(help="Run directory of esscher converge.")],
    window: Annotated[
        str | None, typer.Option(help="Smallest and largest n, 100:10000; every usable point when left out.")
    ] = None,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    as_json: Json = False,
) -> None:
    """Fit error ~ constant * n^-exponent to every curve of a run, with interval, straightness and the preferred law."""
    stored = load_run(run)
    if stored.manifest.job != "converge":
        raise ValueError(f"{run}: expected a run of esscher converge, got one of {stored.manifest.job}")
    spec = ExperimentSpec.read(stored.spec)
    errors = stored.table("errors")
    limits = "auto" if window is None else _limits(window)
    rows: list[dict[str, Any]] = []
    for point in sorted(set(errors["point"])):
        for metric, curve in curves_of(spec, point, errors[errors["point"] == point]).items():
            found = fit_rate(curve, window=limits, level=level, raise_on_failure=False)
            rows.append(
                {
                    "value": spec.points[point],
                    "metric": metric,
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
    columns = [name for name in rows[0] if name != "reason"]
    cells = [
        [value if isinstance(value, str) else f"{value:.4g}" for name, value in row.items() if name in columns] for row in rows
    ]
    print_table(str(run), columns, cells, left=2)


def _limits(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError as cause:
        raise ValueError(f"--window: expected two numbers such as 100:10000, got {text!r}") from cause
    return low, high
