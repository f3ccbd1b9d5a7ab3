"""Which points of a curve a rate is fitted to, what is known of their sampling error, and when
there is nothing to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.convergence.curve import ErrorCurve, Floats
from esscher.convergence.rate.regression import Line, fit_line, working_covariance
from esscher.convergence.rate.result import Status, Window
from esscher.inputs import as_kind, as_positive

__all__ = ["Points", "as_window", "select_points"]

ROUNDING = 1e-12  # of the limit's size: errors below it are rounding, not attention
DISAGREEMENT = 1e-3  # relative difference of rms from the samples' that is taken for rounding
INACCURATE = 1 / 3  # relative accuracy of the errors from which on they are rounding altogether
NOISY = 0.5  # standard error over error from which on a point says nothing


@dataclass(frozen=True)
class Points:
    """The points of a fit, by increasing n, and what is known of their sampling error."""

    n: npt.NDArray[np.int64]
    y: Floats  # log rms
    evidence: str  # "exact", "queries", "repeats", "stderr" or "none"
    stderr: Floats  # of y
    z: Floats | None  # squared errors over their mean, (repeats, points)
    # squared errors summed over the queries of each cluster, (clusters, points)
    clusters: Floats | None
    slope: Floats | None  # analytic d log rms / d log n
    accuracy: float

    @property
    def x(self) -> Floats:
        return np.log(self.n.astype(np.float64))

    def only(self, kept: Any) -> Points:
        z = None if self.z is None else self.z[:, kept]
        clusters = None if self.clusters is None else self.clusters[:, kept]
        slope = None if self.slope is None else self.slope[kept]
        part = replace(self, n=self.n[kept], y=self.y[kept], stderr=self.stderr[kept])
        return replace(part, z=z, clusters=clusters, slope=slope)

    def covariance(self) -> Floats:
        """Of y; the identity where nothing is known."""
        if self.z is not None:
            return working_covariance(self.x, self.z)
        return np.diag(self.stderr**2) if self.evidence == "stderr" else np.eye(self.n.size)

    def line(self, degree: int = 1) -> Line:
        """The one line of every rate: y against x, weighted with what is known of its
        covariance.
        """
        return fit_line(self.x, self.y, self.covariance(), degree)

    def local_slopes(self) -> Floats:
        if self.slope is not None and np.isfinite(self.slope).all():
            return self.slope
        return (
            np.asarray(np.gradient(self.y, self.x))
            if self.n.size > 1
            else np.full(self.n.size, np.nan)
        )


def as_window(window: Any) -> tuple[float, float] | None:
    """None for "auto"; otherwise both ends, checked."""
    if isinstance(window, str) and window == "auto":
        return None
    try:
        low, high = (as_positive(end, "window") for end in window)
    except (TypeError, ValueError) as cause:
        raise ValueError(f'window: expected "auto" or (n_min, n_max), got {window!r}') from cause
    if low >= high:
        raise ValueError(f"window: expected n_min < n_max, got {window!r}")
    return low, high


def select_points(
    curve: ErrorCurve, limits: tuple[float, float] | None
) -> tuple[Points, Window, Status | None]:
    """The usable points, the window with the rule that chose it, and what forbids a fit if anything
    does.
    """
    as_kind(curve, ErrorCurve, "curve")
    shape = (0, curve.n.size) if curve.samples is None else curve.samples.shape
    if len(shape) != 2 or shape[1] != curve.n.size:
        raise ValueError(
            f"curve.samples: expected squared errors, (repeats, {curve.n.size}), got shape {shape}"
        )
    low, high = limits or (-math.inf, math.inf)
    order = np.argsort(curve.n, kind="stable")
    order = order[(curve.n[order] >= low) & (curve.n[order] <= high)]
    rule = "all points" if limits is None else f"points with n from {low:g} to {high:g}, as given"
    problem = _nonsense(curve, order)
    usable = order
    if problem is None:
        scale = (
            curve.scale
            if math.isfinite(curve.scale) and curve.scale > 0
            else float(curve.rms[order].max(initial=0.0))
        )
        rounding = curve.rms[order] <= ROUNDING * scale
        noisy = ~rounding & (curve.stderr[order] > NOISY * curve.rms[order])
        usable = order[~rounding & ~noisy]
        for dropped, why in (
            (rounding, "error is at rounding level"),
            (noisy, "standard error exceeds half the error"),
        ):
            if dropped.any():
                rule += (
                    f", without the {int(dropped.sum())} whose {why} (n ="
                    f" {_listed(curve.n[order][dropped])})"
                )
        if usable.size < 3:
            problem = _too_few(usable.size, int(rounding.sum()), int(noisy.sum()))
    ends = (int(curve.n[usable].min()), int(curve.n[usable].max())) if usable.size else (0, 0)
    return _points(curve, usable), Window(*ends, points=int(usable.size), rule=rule), problem


def _too_few(usable: int, rounding: int, noisy: int) -> Status:
    have = (
        f"{usable} usable point{'' if usable == 1 else 's'}, where a rate and the test of it need 3"
    )
    if rounding:
        return Status(
            "rounding",
            f"the error is at rounding level at {rounding} points; {have}: give smaller n",
            True,
        )
    if noisy:
        text = (
            f"the standard error exceeds half the error at {noisy} points; {have}: give more"
            " repeats"
        )
        return Status("noisy", text, True)
    return Status("too_few_points", f"{have}: give a longer ladder of n or a wider window", True)


def _nonsense(curve: ErrorCurve, order: npt.NDArray[np.int64]) -> Status | None:
    """What makes logarithms or weights meaningless."""
    n, rms, stderr = curve.n[order], curve.rms[order], curve.stderr[order]
    if curve.accuracy >= INACCURATE:
        text = (
            f"the errors are only known to {curve.accuracy:.2g} of themselves: compute the curve"
            " more accurately"
        )
        return Status("rounding", text, True)
    bad = ~np.isfinite(rms) | (rms <= 0) | (n < 1)
    if bad.any():
        return Status(
            "invalid",
            f"the error is {rms[bad][0]} at n = {n[bad][0]}, where a rate needs finite errors above"
            " 0: leave that n out with window=(n_min, n_max), or compute the error anew",
            True,
        )
    if np.unique(n).size < n.size:
        return Status(
            "repeated_n", f"n repeats ({_listed(n)}): put all repeats at one n into one point", True
        )
    known = np.isfinite(stderr) & (stderr > 0)
    if known.any() and not known.all():
        text = (
            "stderr is 0, negative or NaN at some points only: give every point its own, or leave"
            " points out by window"
        )
        return Status("invalid", text, True)
    return None if curve.samples is None else _disagreement(curve.samples, order, n, rms)


def _disagreement(
    samples: Floats, order: npt.NDArray[np.int64], n: npt.NDArray[np.int64], rms: Floats
) -> Status | None:
    """Repeats that the errors are not the root mean square of."""
    with np.errstate(invalid="ignore"):
        root = np.sqrt(samples[:, order].mean(axis=0))
        off = ~(np.abs(root - rms) <= DISAGREEMENT * rms)
    if not off.any():
        return None
    text = (
        f"rms is {rms[off][0]:.6g} at n = {n[off][0]} but the root mean square of the samples"
        f" {root[off][0]:.6g}"
    )
    return Status("invalid", text + ": samples must be the squared errors of the repeats", True)


def _points(curve: ErrorCurve, usable: npt.NDArray[np.int64]) -> Points:
    rms, stderr = curve.rms[usable], curve.stderr[usable]
    z = None
    if curve.samples is not None and curve.samples.shape[0] > 1 and usable.size:
        samples = curve.samples[:, usable]
        if (samples.std(axis=0) > 0).all():
            z = samples / samples.mean(axis=0)
    clusters = _clustered(curve, usable)
    if clusters is not None:
        evidence = "queries"
    elif z is not None:
        evidence = "repeats"
    elif usable.size and (stderr > 0).all():
        evidence = "stderr"
    else:
        evidence = "none" if curve.kind == "montecarlo" else "exact"
    slope = None if curve.slope is None else curve.slope[usable]
    # nonsense is refused, with what there is of a fit
    with np.errstate(divide="ignore", invalid="ignore"):
        y, relative = np.log(rms), stderr / rms
    return Points(curve.n[usable], y, evidence, relative, z, clusters, slope, curve.accuracy)


def _clustered(curve: ErrorCurve, usable: npt.NDArray[np.int64]) -> Floats | None:
    """Squared errors summed over the queries of each cluster; None where clusters are not known, or
    all queries are of one.
    """
    if curve.queries is None or curve.queries.clusters is None:
        return None
    groups = np.unique(curve.queries.clusters, return_inverse=True)[1]
    sums = [np.bincount(groups, column) for column in curve.queries.mse[:, usable].T]
    return np.stack(sums, axis=1) if sums and groups.max() > 0 else None


def _listed(n: npt.NDArray[np.int64]) -> str:
    shown = ", ".join(str(int(value)) for value in n[:5])
    return shown + (", ..." if n.size > 5 else "")
