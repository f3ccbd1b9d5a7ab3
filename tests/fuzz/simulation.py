"""converge: Monte Carlo errors on small pools, against the expectation over all draws."""

from __future__ import annotations

import numpy as np

from tests.fuzz.draw import Draw
from tests.fuzz.error_reference import by_quadrature
from tests.fuzz.heads import any_head
from tests.fuzz.law_reference import PoolSpec
from tests.fuzz.laws import any_law
from tests.fuzz.line_reference import atoms_along
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one"]

COVERS = ("converge",)
REPEATS = 120


def one(draw: Draw) -> None:
    """l2 at given queries: 7 standard errors and a twentieth, for tails that 120 repeats do not
    show.
    """
    dim = draw.whole(1, 4)
    law, spec = any_law(draw, dim, odds=0.02, depth=1)
    head, maps = any_head(draw, dim, dim, dim_out=2, size=0.5, odds=0.02)
    x, exact = draw.given(draw.rng.standard_normal((2, dim)))
    theta, size = maps.tilt(exact)
    zero = spec.tilted(np.zeros(dim))
    inside = all(spec.inside(row) for row in theta)
    if (
        not inside
        or size.max() > 1e3
        or not 1e-3 < np.trace(zero.cov) < 1e3
        or np.abs(zero.mean).max() > 1e3
    ):
        draw.extreme = "extreme size, or no limit"
    if (
        np.abs(maps.V).max() > 1e6
        or np.abs(maps.V).max() < 1e-6
        or (inside and spec.tilted(theta[0]).cov.max() > 1e3 * np.trace(zero.cov))
    ):
        draw.extreme = draw.extreme or "extreme size"
    n = sorted({draw.whole(1, 60) for _ in range(2)})
    metrics = draw.pick([("l2",), ("mean", "cov", "l2"), ("uniform",)], p=[0.6, 0.3, 0.1])
    if metrics != ("l2",):
        draw.extreme = draw.extreme or "other metrics need other limits"
    kinds = {
        "head": "head",
        "measure": "measure",
        "n": "counts",
        "repeats": "count",
        "metrics": "choice",
        "queries": "array",
    }
    given = draw.spoil(
        {
            "head": head,
            "measure": law,
            "n": n,
            "repeats": REPEATS if metrics == ("l2",) else 3,
            "metrics": metrics,
            "queries": x,
        },
        kinds,
        0.15,
    )
    curves = draw.public("converge", **given, seed=draw.whole(1, 10**6))
    if draw.junk:
        return
    for name, curve in curves.items():
        if not (np.isfinite(numbers(curve.rms)).all() and np.isfinite(curve.scale)):
            raise Finding("silent", f"{name}: {curve.rms}, scale {curve.scale}")
    draw.checks += 1
    curve = curves.get("l2")
    if draw.extreme or curve is None or not isinstance(spec, PoolSpec) or not curve.n.size:
        return
    found = np.mean(
        [
            by_quadrature(atoms_along(spec, row, maps.V, maps.v0), curve.n.tolist()).mse
            for row in theta
        ],
        axis=0,
    )
    se = curve.samples.std(axis=0, ddof=1) / np.sqrt(len(curve.samples))
    draw.agree("mean square error", curve.samples.mean(axis=0), found, 7 * se + 0.05 * found)
