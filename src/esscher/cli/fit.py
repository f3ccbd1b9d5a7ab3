"""``esscher fit``: fit the rates of a stored run again, with another window or level."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.output import Json, Look, Shown, number, path_argument, print_json, say, show_table

if TYPE_CHECKING:
    from esscher.errors.curve import ErrorCurve
    from esscher.errors.rate import RateFit
    from esscher.runs import Run

LEVEL = 0.95  # of intervals that are computed here


@dataclass(frozen=True)
class _Stored:
    """A curve of a run, the part of it that the run fits, and (exponent, low, high) where it stored
    a fit on more evidence.
    """

    name: dict[str, Any]
    curve: ErrorCurve
    fitted: ErrorCurve
    own: tuple[float, float, float] | None = None
    meaning: str = ""  # of that interval

    def fit(self, window: tuple[float, float] | None, level: float | None) -> RateFit:
        """The run's own fit, unless another window or a level is asked for."""
        from esscher.errors.rate import fit_rate

        given = LEVEL if level is None else level
        if window is not None:
            return fit_rate(self.curve, window=window, level=given, raise_on_failure=False)
        found = fit_rate(self.fitted, level=given, raise_on_failure=False)
        if self.own is None or level is not None:
            return found
        return found.with_exponent(
            *self.own, f"exponent and interval as the run found them, {self.meaning}"
        )


def fit(
    run: Annotated[Path, path_argument("Run directory of esscher converge or esscher probe.")],
    look: Look,
    window: Annotated[
        str | None,
        typer.Option(
            help="Smallest and largest n, 100:10000; those that the run fits when left out."
        ),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(
            help="Level of intervals that are computed anew; the run's own intervals when left out."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit error ~ constant * n^-exponent to every curve of a run, with interval, straightness and
    the preferred law.

    Without --window and --level these are the run's own exponents and intervals: of a probe's l2
    error 90 % for an endless text, of all others 95 % over repeats.

    Example: esscher fit runs/mine --window 100:10000
    """
    from esscher.runs import load_run

    stored = load_run(run)
    curves_of_job = {"converge": _of_converge, "probe": _of_probe}
    if stored.manifest.job not in curves_of_job:
        raise ValueError(
            f"{run}: expected a run of esscher converge or probe, got one of {stored.manifest.job}"
        )
    limits = None if window is None else _limits(window)
    rows: list[dict[str, Any]] = []
    for known in curves_of_job[stored.manifest.job](stored):
        found = known.fit(limits, level)
        rows.append(
            {
                **known.name,
                "metric": known.curve.metric,
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
    say(_in_words(rows))
    show_table(
        str(run),
        [_column(name, [row[name] for row in rows]) for name in rows[0] if name != "reason"],
        look,
    )


# Columns that give way where there is no room
LEAST = {
    "preferred_law": 7,
    "straightness_p": 6,
    "n_min": 4,
    "n_max": 5,
    "constant": 3,
    "low": 1,
    "high": 2,
}


def _column(name: str, values: Sequence[Any]) -> Shown:
    cells = tuple(value if isinstance(value, str) else number(value) for value in values)
    words = all(isinstance(value, str) for value in values)
    return Shown(name, cells, words, LEAST.get(name, 0), key=name, values=tuple(values))


def _in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many curves have a rate, and which."""
    found = sorted(row["exponent"] for row in rows if row["exponent"] == row["exponent"])
    if not found:
        return f"none of {len(rows)} curves has a rate"
    states = Counter(row["status"] for row in rows)
    told = ", ".join(f"{number} {status}" for status, number in states.most_common())
    range_of = f"b from {found[0]:.3g} to {found[-1]:.3g}, median {found[len(found) // 2]:.3g}"
    return (
        f"{len(found)} of {len(rows)} curves have a rate (status: {told}): error ~ n^-b, {range_of}"
    )


def _of_converge(stored: Run) -> Iterator[_Stored]:
    """Curves of a sweep, from its repeats."""
    from esscher.errors.montecarlo.job import curves_of
    from esscher.errors.montecarlo.spec import ExperimentSpec

    spec, errors = ExperimentSpec.read(stored.spec), stored.table("errors")
    for point in sorted(set(errors["point"])):
        for curve in curves_of(spec, point, errors[errors["point"] == point]).values():
            yield _Stored({"value": spec.points[point]}, curve, curve)


def _of_probe(stored: Run) -> Iterator[_Stored]:
    """Curves of a model's heads; the run fits that of draws with replacement at the n of its
    setting ``fit``.
    """
    from esscher.probe.curves import stored_curves
    from esscher.probe.moments import WHOLE_LAYER
    from esscher.probe.spec import ProbeSpec, fit_points, fit_range

    spec = ProbeSpec.read(stored.spec)
    curves = stored.table("curves")
    rows = {(row["layer"], row["head"]): row for row in stored.table("heads").to_dict("records")}
    if "layers" in stored.tables:
        rows |= {
            (row["layer"], WHOLE_LAYER): row for row in stored.table("layers").to_dict("records")
        }
    repeats = "95 % over repeats"
    for metric, beta, meaning in (
        ("l2", "fit", "90 % for an endless text"),
        ("mean", "mean", repeats),
        ("cov", "cov", repeats),
    ):
        for (layer, head), curve in stored_curves(curves, metric).items():
            name = {"head": f"{layer}.{head}" if head != WHOLE_LAYER else f"{layer}, all"}
            row, fitted = rows.get((layer, head), {}), curve
            if metric == "l2":
                points = fit_points(fit_range(spec, int(row["n_keys"])))
                own = curves[(curves["layer"] == layer) & (curves["head"] == head)]
                fitted = stored_curves(own[own["n"].isin(points)], metric)[layer, head]
            yield _Stored(name, curve, fitted, _own(row, beta), meaning)


def _own(row: Mapping[Any, Any], beta: str) -> tuple[float, float, float] | None:
    """The exponent that a row stores, with its interval: beta_fit, beta_low, beta_high; beta_mean,
    ...; an end may be open.
    """
    ends = "beta" if beta == "fit" else f"beta_{beta}"
    found = tuple(
        float(row.get(key, math.nan)) for key in (f"beta_{beta}", f"{ends}_low", f"{ends}_high")
    )
    return None if math.isnan(found[0]) else (found[0], found[1], found[2])


def _limits(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError as cause:
        raise ValueError(
            f"--window: expected two numbers such as 100:10000, got {text!r}"
        ) from cause
    return low, high
