"""gaussian_error and the catalogue of predictions: proved bounds lie above
brute-force errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.error_reference import Atoms, by_quadrature
from tests.fuzz.heads import any_head
from tests.fuzz.laws import any_dim, any_law
from tests.fuzz.line_reference import atoms_along, has_atoms
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one"]

COVERS = ("Prediction", "gaussian_error", "predictions")
LONG = np.longdouble
# Proved bounds on the mean square error at every query of norm at most the radius.
AT_ONE_QUERY = ("s-c4-mended", "s-c4-sharpened")


def one(draw: Draw) -> None:
    kind = draw.pick(["gaussian", "predictions"], p=[0.5, 0.5])
    {"gaussian": _gaussian, "predictions": _predictions}[kind](draw)


def _gaussian(draw: Draw) -> None:
    counts = draw.counts()
    table = np.abs(draw.rng.standard_normal(draw.whole(1, 3))) * draw.pick(
        [0.3, 1.0, 3.0, 30.0], p=[0.3, 0.4, 0.25, 0.05]
    )
    if draw.chance(0.1):
        table[0] = 0.0
    s, exact = draw.given(table, draw.dtype())
    if exact.max() > 100:
        draw.extreme = "steeper than 100"
    n: Any = np.array(counts, dtype=float)[:, None] if draw.chance(0.5) else counts[0]
    given = draw.spoil({"n": n, "s": s}, {"n": "any counts", "s": "values"})
    f1, f2 = draw.public("gaussian_error", **given)
    if draw.junk:
        return
    rows = counts if np.ndim(n) else counts[:1]
    shape = (len(rows), len(exact)) if np.ndim(n) else (len(exact),)
    for name, value in (("f1", f1), ("f2", f2)):
        if numbers(value).shape != shape or not np.isfinite(numbers(value)).all():
            raise Finding("silent", f"{name}: {numbers(value)}")
    draw.checks += 1
    for j, deviation in enumerate(exact):
        if deviation > 8:
            continue
        g = np.arange(-13.0, 2 * deviation + 13.0, min(0.15, 0.2 / max(deviation, 0.1)))
        values = g[:, None].astype(LONG)
        atoms = Atoms(
            (deviation * g).astype(LONG),
            (-0.5 * g * g).astype(LONG),
            values,
            np.zeros(len(g), LONG),
        )
        found = by_quadrature(atoms, rows)
        draw.agree("f1", numbers(f1)[..., j].reshape(-1), found.mse, 1e-8 * found.mse)
        draw.agree("f2", numbers(f2)[..., j].reshape(-1), found.sum_p2, 1e-8 * found.sum_p2)


def _predictions(draw: Draw) -> None:
    dim = min(any_dim(draw), 64) if draw.chance(0.97) else 1024
    law, spec = any_law(draw, dim, odds=0.05)
    zero = spec.tilted(np.zeros(dim))
    size = float(min(np.sqrt(np.trace(zero.cov) + zero.mean @ zero.mean), 1e300)) or 1.0
    head, maps = any_head(
        draw,
        dim,
        dim,
        dim_out=draw.whole(1, 3),
        size=min(1.0, 1 / size) ** 2 if size < 1e3 else 1e-6,
        odds=0.04,
    )
    radius = draw.size() if draw.chance(0.5) else None
    if (
        not 1e-60 < size < 1e60
        or not 1e-60 < max(maps.sizes.max(), 1e-59) < 1e60
        or np.abs(maps.V).max() > 1e60
        or law.dtype != torch.float64
    ):
        draw.extreme = draw.extreme or "extreme size"
    with np.errstate(all="ignore"):
        steep = (radius or size) * np.linalg.norm(maps.A.astype(float), 2)
        deviation = steep * np.sqrt(np.linalg.norm(zero.cov.astype(float), 2))
    if not deviation < 26:  # exp(s^2), by which scores of deviation s count, leaves float64
        draw.extreme = draw.extreme or "steeper than float64 holds"
    if radius is None and not (zero.cov.any() or zero.mean.any()):
        draw.extreme = draw.extreme or "tokens at 0: no radius"
    kinds = {"head": "head", "measure": "measure"} | (
        {"radius": "positive"} if radius is not None else {}
    )
    found = draw.public(
        "predictions", **draw.spoil({"head": head, "measure": law, "radius": radius}, kinds)
    )
    if draw.junk:
        return
    draw.called.add(type(found[0]).__name__)
    n = np.array(draw.counts(length=3))
    values = {}
    for prediction in found:
        _stated(prediction, draw.extreme is not None)
        if prediction.value is None:
            continue
        value = numbers(draw.method(prediction, "value", n))
        # infinite by rule: "it is infinite where the statement says nothing at that n"
        if np.isnan(value).any() or (value < 0).any():
            raise Finding("silent", f"{prediction.name}: {value} at n = {n}")
        if prediction.applies:
            values[prediction.name] = value
    draw.checks += 1
    if draw.extreme or not has_atoms(spec) or dim > 64:
        return
    _bounds_hold(draw, maps, spec, found, values, n)


def _stated(prediction: Any, extreme: bool) -> None:
    """Exponents are finite numbers. Infinite by rule: a threshold n* beyond float64, and, where
    sizes are extreme, a moment beyond float64: its bound then says nothing.
    """
    if prediction.exponent is not None and not np.isfinite(prediction.exponent):
        raise Finding("silent", f"{prediction.name}: exponent {prediction.exponent}")
    for name, value in prediction.numbers.items():
        if np.isnan(value) or (np.isinf(value) and name != "n_star" and not extreme):
            raise Finding("silent", f"{prediction.name}: {name} = {value}")


def _bounds_hold(
    draw: Draw, maps: Any, spec: Any, found: list[Any], values: dict[str, np.ndarray], n: np.ndarray
) -> None:
    radius = next(p.numbers["radius"] for p in found if p.name == "b-uniform")
    direction = np.linalg.svd(maps.A.astype(float))[2][0]
    theta, _ = maps.tilt(radius * direction[None])
    if not spec.inside(theta[0]):
        return
    zero = spec.tilted(np.zeros(spec.dim))
    if float(np.abs(theta[0]) @ np.abs(zero.cov) @ np.abs(theta[0])) > 25:
        return
    atoms = atoms_along(spec, theta[0], maps.V, maps.v0)
    if float(atoms.scores.max() - atoms.scores.min()) > 300:
        return
    exact = by_quadrature(atoms, n.tolist()).mse
    noise = (1e-14 * float(np.abs(atoms.values).max())) ** 2
    names = AT_ONE_QUERY if maps.a0.any() else (*AT_ONE_QUERY, "delta-bound")
    for name in names:
        if name in values and not (values[name] >= exact * (1 - 1e-6) - noise).all():
            raise Finding(
                "wrong",
                f"{name}: {values[name]} below the exact error {exact.astype(float)} at n = {n}",
            )
