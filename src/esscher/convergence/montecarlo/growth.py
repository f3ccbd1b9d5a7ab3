"""How the constant of a rate grows with the radius of the tokens' support: like a power of it, or
exponentially [B].

With E_n(R) the mean error at n tokens of a law of support radius R, the constant for a rate b is
C(R) = max over n of n^b E_n(R), the least for which E_n <= C / n^b on the ladder. Two forms are
fitted: log C = a + p log R and log C = a + g R.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.montecarlo.converge import assemble, converge_unit, mean_error
from esscher.convergence.montecarlo.draw import Plan
from esscher.convergence.montecarlo.metrics import METRICS
from esscher.convergence.montecarlo.plan import Design, plan
from esscher.intervals import t_quantile
from esscher.measures.base import Measure
from esscher.measures.fields import LawFields
from esscher.theory.sharp import uniform_constant

__all__ = ["constant_rows", "growth_table", "of_support", "support_constants"]

Floats = npt.NDArray[np.float64]
LEVEL = 0.95
FEWEST = 4  # radii, for a line and something left over


def of_support(law: LawFields, radius: float) -> LawFields:
    """The same law, of a ball, a sphere or a cube, with tokens that reach so far from their
    mean.
    """
    size = radius / math.sqrt(getattr(law, "dim", 1)) if law.size == "half_width" else radius
    return law.model_validate(law.model_dump() | {law.size: size})


def constant_rows(made: Plan, curves: Mapping[str, ErrorCurve]) -> Iterator[dict[str, Any]]:
    """For each metric the constants of n^-1/2 and, where [B] proves a smaller exponent, of that
    one.

    The uniform error has beside it our proved constants: of this law, and of every law of this
    support.
    """
    for name, curve in curves.items():
        if curve.n.size == 0:
            continue
        mean, stderr = mean_error(curve)
        proved = METRICS[name].exponents(made.head, made.measure).bohbot
        for rate, exponent in (("1/2", 0.5), ("proved", proved)):
            if not math.isfinite(exponent):
                continue
            grown = curve.n**exponent * mean
            at = int(grown.argmax())
            row = {
                "metric": name,
                "rate": rate,
                "exponent": exponent,
                "constant": float(grown[at]),
                "at": int(curve.n[at]),
            }
            row |= {
                "stderr": float(curve.n[at] ** exponent * stderr[at]),
                "bound": math.nan,
                "bound_any": math.nan,
            }
            if name == "uniform" and not made.query_inside:
                row["bound"] = uniform_constant(made.head, made.measure, made.radius)
                row["bound_any"] = uniform_constant(
                    made.head, made.measure, made.radius, any_law=True
                )
            yield row


def support_constants(
    head: Head,
    laws: Iterable[Measure],
    n: Any,
    repeats: int,
    metrics: Any = ("mean", "cov", "uniform"),
    seed: int = 0,
) -> pd.DataFrame:
    """The table ``constants`` of a sweep over bounded laws, in this process; ``growth_table`` takes
    it.

    Queries |x| <= R, R the radius of the law's support. Numbers are those of a run whose points
    have these laws.
    """
    rows: list[dict[str, Any]] = []
    for point, law in enumerate(laws):
        reach = law.support_radius()
        if reach is None:
            raise ValueError(f"laws: expected laws of bounded support, got {type(law).__name__}")
        made = plan(
            head, law, n, metrics, seed, Design(radius=reach, experiment=f"converge/{point}")
        )
        curves = assemble(made, [converge_unit(made, repeat) for repeat in range(repeats)])
        rows += [{"point": point, "value": reach} | row for row in constant_rows(made, curves)]
    return pd.DataFrame(rows)


def growth_table(constants: pd.DataFrame) -> pd.DataFrame:
    """Both forms for each metric and rate, and for the proved constants of the uniform error; nan
    with fewer than 4 radii.

    ``misfit``: root mean square of what is left of log C. ``power_first``, ``power_last``: p over
    the first and the last half of the radii; a power has one p, an exponential a p that grows with
    R.
    """
    rows = []
    for (metric, rate), part in constants.groupby(["metric", "rate"], sort=False):
        rows.append(
            {"metric": metric, "rate": rate, "of": "measured"}
            | _forms(part, "constant", part["stderr"])
        )
        for column in ("bound", "bound_any"):
            if part[column].notna().all():
                rows.append(
                    {"metric": metric, "rate": rate, "of": column}
                    | _forms(part, column, 0.0 * part["stderr"])
                )
    return pd.DataFrame(rows)


def _forms(part: pd.DataFrame, column: str, stderr: pd.Series) -> dict[str, Any]:
    ordered = part.assign(error=stderr).sort_values("value")
    R, C = ordered["value"].to_numpy(), ordered[column].to_numpy()
    error = ordered["error"].to_numpy() / C
    half = len(R) // 2
    found: dict[str, Any] = {}
    for form, x in (("power", np.log(R)), ("growth", R)):
        slope, low, high, misfit = _line(x, np.log(C), error)
        found |= {form: slope, f"{form}_low": low, f"{form}_high": high, f"{form}_misfit": misfit}
    ends = [
        _line(np.log(R[at]), np.log(C[at]), error[at], 2)[0]
        for at in (slice(None, half + 1), slice(half, None))
    ]
    found |= {"power_first": ends[0], "power_last": ends[1]}
    told = math.isfinite(found["power_misfit"])
    found["form"] = (
        ""
        if not told
        else "power"
        if found["power_misfit"] <= found["growth_misfit"]
        else "exponential"
    )
    return found


def _line(
    x: Floats, y: Floats, error: Floats, fewest: int = FEWEST
) -> tuple[float, float, float, float]:
    """Slope, the ends of its 95 % interval and the root mean square residual of a line through
    points of equal weight.

    The interval has the larger of two standard errors: that of the points' own errors, and that of
    their scatter.
    """
    if len(x) < fewest:
        return math.nan, math.nan, math.nan, math.nan
    away = x - x.mean()
    leverage = away / (away @ away)
    slope = float(leverage @ y)
    left = y - y.mean() - slope * away
    scatter = math.sqrt(float(left @ left) / max(1, len(x) - 2)) * float(np.linalg.norm(leverage))
    stderr = max(float(np.linalg.norm(leverage * error)), scatter)
    wide = stderr * t_quantile(max(1, len(x) - 2), LEVEL)
    return slope, slope - wide, slope + wide, math.sqrt(float(left @ left) / len(x))
