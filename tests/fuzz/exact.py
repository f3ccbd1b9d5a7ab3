"""exact_curve and delta_covariance on laws, against brute-force quadrature over many atoms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.error_reference import by_quadrature
from tests.fuzz.heads import Maps, any_head
from tests.fuzz.law_reference import Spec
from tests.fuzz.laws import any_dim, any_law, rounding
from tests.fuzz.limits import queries_for
from tests.fuzz.line_reference import atoms_along, has_atoms
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one"]

COVERS = ("ErrorCurve", "delta_covariance", "exact_curve")
STEEP = 6.0  # standard deviation of the score up to which the brute force resolves the law


def one(draw: Draw) -> None:
    law, spec = any_law(draw, min(any_dim(draw), 24), odds=0.04)
    zero = spec.tilted(np.zeros(spec.dim))
    size = float(min(np.sqrt(np.trace(zero.cov)), 1e300)) or 1.0
    usual = min(1.0, 1.0 / size) if size < 1e3 else 1e-3
    head, maps = any_head(draw, spec.dim, dim_out=draw.whole(1, 4), size=usual, odds=0.03)
    x, exact = queries_for(draw, maps, spec, draw.whole(1, 3), torch.float64)
    if not 1e-60 < size < 1e60 or maps.sizes.max() > 1e60 or np.abs(maps.V).max() > 1e60:
        draw.extreme = draw.extreme or "extreme size"
    if draw.chance(0.3):
        return _delta(draw, head, maps, law, spec, x, exact)
    if draw.chance(0.1):
        return _kept(draw, head, maps, law, x)
    _curve(draw, head, maps, law, spec, x, exact)


def _kept(draw: Draw, head: Any, maps: Maps, law: Any, x: Any) -> None:
    """Every rule keeps all of a context at n = N, and then has the error of N tokens; Neyman's keys
    have a finite one.
    """
    tokens, rule = (
        draw.whole(1, 500),
        draw.pick(["random", "random:reweight", "topk", "topk:1+random:reweight", "neyman"]),
    )
    context = None if rule == "neyman" else tokens
    draw.extreme = draw.extreme or "a law without scores to cut, or ties"
    plain = draw.public("exact_curve", head, law, x, [tokens], pool_size=300)
    kept = draw.public(
        "exact_curve", head, law, x, [tokens], keep=rule, context=context, pool_size=300
    )
    drawn = kept.kind == "montecarlo"  # contexts are drawn: a mean with its standard error
    names = ["rms", "accuracy", "scale", "kept"] + ["effective_tokens"] * (not drawn)
    for name in names:
        if not np.isfinite(numbers(getattr(kept, name))).all():
            raise Finding("silent", f"{name}: {getattr(kept, name)}")
    if rule == "neyman":
        draw.checks += 1
        return
    far = float(np.abs(maps.V).max()) * float(law.cov.detach().double().diagonal().max()) ** 0.5
    rounding = 1e-12 * (far + float(np.abs(plain.queries.limit).max()))
    slack = (4 * kept.accuracy + 1e-7 + 64 * torch.finfo(law.dtype).eps) * plain.rms + rounding
    if drawn:  # 64 contexts may miss the rare ones that carry the error: too small, never too large
        over = np.maximum(kept.rms - plain.rms, 0.0)
        draw.agree("rms above that of all tokens", over, 0.0 * over, slack + 8 * kept.stderr)
        return
    draw.agree("rms of all keys kept", kept.rms, plain.rms, slack + 1e-150)


def _deviation(maps: Maps, spec: Spec, x: np.ndarray) -> float:
    """Largest standard deviation of the score, of the law as it is and of the tilted one."""
    theta, _ = maps.tilt(x)
    zero = spec.tilted(np.zeros(spec.dim))
    return max(
        float(np.sqrt(np.abs(row) @ np.abs(zero.cov) @ np.abs(row) + (row @ zero.mean) ** 2 * 0))
        for row in theta
    )


def _curve(
    draw: Draw, head: Any, maps: Maps, law: Any, spec: Spec, x: Any, exact: np.ndarray
) -> None:
    n = draw.counts(length=3)
    deviation = _deviation(maps, spec, exact) if draw.extreme is None else np.inf
    if deviation > 30:
        draw.extreme = draw.extreme or "steep scores"
    kinds = {"head": "head", "measure": "measure", "queries": "rows", "n": "counts"}
    given = draw.spoil({"head": head, "measure": law, "queries": x, "n": n}, kinds)
    options = {"details": True, "pool_size": 300} if draw.chance(0.3) else {"pool_size": 300}
    curve = draw.public("exact_curve", **given, **options)
    if draw.junk:
        return
    finite_curve(curve)
    theta, _ = maps.tilt(exact)
    if not has_atoms(spec):
        if curve.kind != "pool":
            raise Finding("wrong", f"kind {curve.kind!r} for a law that has no exact curve")
        draw.checks += 1
        return
    if deviation > STEEP:
        draw.checks += 1
        return
    eps = max(torch.finfo(law.dtype).eps, 64 * maps.eps)
    for i, row in enumerate(theta):
        atoms = atoms_along(spec, row, maps.V, maps.v0)
        if float(atoms.scores.max() - atoms.scores.min()) > 400:
            draw.checks += 1
            continue
        found = by_quadrature(atoms, n)
        root = np.sqrt(np.maximum(found.mse, 0))
        value = float(np.abs(atoms.values).max()) * (4e-16 + eps * 0.5) * 16
        slack = (2 * curve.accuracy + 2e-8 + 64 * eps) * root + value
        draw.agree("rms of a query", np.sqrt(curve.queries.mse[i]), root, slack + 1e-150)
        draw.agree(
            "effective tokens",
            curve.queries.sum_p2[i],
            found.sum_p2,
            (4 * curve.accuracy + 4e-8 + 64 * eps) * found.sum_p2,
        )


def finite_curve(curve: Any) -> None:
    """Infinite or NaN by rule: the slope where the error is 0, delta where the law has no transform
    at twice the tilt.
    """
    for name in ("rms", "q95", "effective_tokens", "stderr", "accuracy", "scale"):
        if not np.isfinite(numbers(getattr(curve, name))).all():
            raise Finding("silent", f"{name}: {getattr(curve, name)}")
    if np.isnan(numbers(curve.delta)).any():
        raise Finding("silent", "delta: nan")
    if not np.isfinite(numbers(curve.slope)[curve.rms > 0]).all():
        raise Finding("silent", f"slope: {curve.slope} where rms is {curve.rms}")


def _delta(
    draw: Draw, head: Any, maps: Maps, law: Any, spec: Spec, x: Any, exact: np.ndarray
) -> None:
    """exp(K(2 theta) - 2 K(theta)) V [Cov_{2 theta} + h h^T] V^T; infinite on the diagonal, as
    documented, where the law has no transform at 2 theta.
    """
    theta, size = maps.tilt(exact)
    inside = all(spec.inside(row) for row in theta)
    twice = inside and all(spec.inside(2 * row) for row in theta)
    wanted, allowed = [], []
    for row, doubt in zip(theta if twice else [], size, strict=False):
        once, double = spec.tilted(row), spec.tilted(2 * row)
        rise = double.log - 2 * once.log
        if rise > 600:
            return _huge_delta(draw, head, law, x)
        shift = maps.V @ (double.mean - once.mean)
        spread = maps.V @ double.cov @ maps.V.T
        table = np.exp(rise) * (spread + np.outer(shift, shift))
        V = np.abs(maps.V)
        moved = 16 * (double.log_size + once.log_size + 1) * rounding(spec.dim)
        off = V @ (double.mean_size + once.mean_size) * rounding(spec.dim)
        slack = (
            V @ double.cov_size @ V.T * rounding(spec.dim)
            + 2 * np.outer(np.abs(shift), off)
            + 2 * np.outer(off, np.abs(shift))
            + np.outer(off, off)
        )
        tilt_off = (
            16
            * maps.eps
            * (4 + maps.dim)
            * float(
                doubt
                @ (
                    np.abs(double.mean)
                    + np.abs(once.mean)
                    + np.sqrt(np.abs(np.diagonal(double.cov)))
                )
            )
        )
        tilt_off += rounding(spec.dim)
        total = np.abs(V @ np.abs(double.cov) @ V.T) + np.outer(np.abs(shift), np.abs(shift))
        far = V @ (np.abs(double.mean) + np.abs(once.mean))
        allowed.append(
            np.exp(rise) * ((moved + tilt_off) * (total + np.outer(far, far)) + slack * 4) + 1e-300
        )
        wanted.append(table)
    if wanted and np.abs(wanted).max() > 1e300:
        draw.extreme = "beyond the range"
    kinds = {"head": "head", "measure": "measure", "queries": "rows"}
    got = draw.public(
        "delta_covariance", **draw.spoil({"head": head, "measure": law, "queries": x}, kinds)
    )
    if draw.junk:
        return
    if not inside:
        raise Finding("wrong", "delta_covariance where there is no limit")
    if not twice:
        if not np.isposinf(numbers(got).diagonal(axis1=1, axis2=2)).any():
            raise Finding("wrong", "delta_covariance: finite where the variance is infinite")
        draw.checks += 1
        return
    draw.agree("delta", got, np.array(wanted), np.array(allowed))


def _huge_delta(draw: Draw, head: Any, law: Any, x: Any) -> None:
    """Infinite by rule: "an entry beyond the floating range is infinite too". Never NaN."""
    draw.extreme = "beyond the range"
    got = numbers(draw.public("delta_covariance", head, law, x))
    if np.isnan(got).any() or (got.diagonal(axis1=1, axis2=2) < 0).any():
        raise Finding("silent", f"delta_covariance: {got.flat[0]}")
    draw.checks += 1
