"""RateFit: what a fit of error ~ constant * n^-exponent found, how sure it is, and what it could
not say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.convergence.curve import Floats

__all__ = ["Curvature", "FitError", "LawComparison", "RateFit", "Status", "Window"]


@dataclass(frozen=True)
class Status:
    """A short code, and a text with the cause and the remedy.

    Fitted: "ok", "exact", "curved", "few_repeats", "heavy_tail", "no_stderr". Not fitted
    (``failed``): "too_few_points", "rounding", "noisy", "invalid", "repeated_n".
    """

    code: str
    text: str
    failed: bool = False


@dataclass(frozen=True)
class Window:
    """The points fitted: their smallest and largest n, their number, and the rule that chose
    them.
    """

    n_min: int
    n_max: int
    points: int
    rule: str


@dataclass(frozen=True)
class Curvature:
    """c in log rms = a + b log n + c (log n)^2; away from 0, one power law is not enough."""

    coefficient: float
    stderr: float  # 0 where exact
    p_value: float  # of c = 0; NaN where there is no sampling error to compare with


@dataclass(frozen=True)
class LawComparison:
    """n^-exponent against (log n)^-gamma on the same points; both laws have two parameters, so AIC
    compares likelihoods.
    """

    gamma: float
    constant: float  # error ~ constant * (log n)^-gamma
    log_likelihood_difference: float  # power law minus logarithmic law
    weight_power: float  # AIC weights: they sum to 1
    weight_logarithmic: float
    preferred: str  # "power", "logarithmic" or "undecided"
    text: str


@dataclass(frozen=True, repr=False)
class RateFit:
    """error ~ ``constant`` * n^-``exponent``.

    ``interval``: for the exponent, at ``level``; of an exact curve the range of its local slopes
    instead, whatever the level. ``local_slopes``: d log rms / d log n at each n (near -exponent),
    analytic where the curve has them, else differences. ``residuals``: log rms minus the line.
    ``chi2``: residuals^T covariance^-1 residuals, near its ``dof`` when the points are straight,
    and ``p_value`` the chance of a larger one; NaN where there is no sampling error to compare
    with.
    """

    exponent: float
    constant: float
    interval: tuple[float, float]
    level: float
    window: Window
    status: Status
    stderr: float
    n: npt.NDArray[np.int64]
    residuals: Floats
    local_slopes: Floats
    curvature: Curvature
    power_vs_log: LawComparison | None  # None with fewer than three points at n >= 2
    chi2: float
    dof: int
    p_value: float

    def predict(self, n: Any) -> Floats:
        """The fitted error at n."""
        return np.asarray(self.constant * np.asarray(n, dtype=np.float64) ** -self.exponent)

    def with_exponent(self, exponent: float, low: float, high: float, source: str) -> RateFit:
        """The same points under an exponent and interval from elsewhere; the line keeps its height
        in the middle of log n.
        """
        middle = np.exp(np.log(self.n.astype(np.float64)).mean()) if self.n.size else np.nan
        constant = float(self.predict(middle) * middle**exponent)
        status = replace(self.status, text=source)
        return replace(
            self, exponent=exponent, constant=constant, interval=(low, high), status=status
        )

    def __repr__(self) -> str:
        return f"RateFit({self})"

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"error ~ {self.constant:.4g} n^{-self.exponent:.4g}, interval [{low:.4g}, {high:.4g}],"
            f" {self.window.points} points from n = {self.window.n_min} to {self.window.n_max};"
            f" {self.status.code}: {self.status.text}"
        )


class FitError(ValueError):
    """No rate can be given; ``fit`` has what there is of it, and its status the cause and the
    remedy.
    """

    def __init__(self, fit: RateFit) -> None:
        super().__init__(f"curve: {fit.status.text}")
        self.fit = fit
