"""exact_pool_curve and confidence_region, against listing all draws and
brute-force quadrature.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.stats
import torch

from tests.fuzz import attention_reference as plain
from tests.fuzz.attention import any_inputs, any_scale
from tests.fuzz.draw import Draw
from tests.fuzz.error_reference import (
    Atoms,
    Errors,
    by_listing,
    by_listing_kept,
    by_quadrature,
    by_quadrature_kept,
)
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one"]

COVERS = (
    "ErrorCurve",
    "confidence_region",
    "exact_pool_curve",
)
MOST_ATOMS = 400  # of the brute force; larger pools are made of repeated keys
LONG = np.longdouble


def one(draw: Draw) -> None:
    draw.pick([_region, _curve], p=[0.25, 0.75])(draw)


def _curve(draw: Draw) -> None:
    dtype = draw.dtype()
    given, (q, k, v) = any_inputs(draw, dtype, most=60, odds=0.06)
    q, given["q"] = q[:3], _first(given["q"], 3)
    sampling = draw.pick(["replacement", "bernoulli"], p=[0.65, 0.35])
    if (draw.chance(0.15) and dtype != torch.float64 and len(k) <= MOST_ATOMS) or (
        draw.chance(0.12) and len(k) <= MOST_ATOMS
    ):
        # so many copies of every key that the score grid is used
        times = 2**14 // (len(k) * len(q)) + 1
        given = {
            "q": q_of(given["q"], dtype),
            "k": _repeat(k, times, dtype),
            "v": _repeat(v, times, dtype),
        }
    else:
        times = 1
    keys = len(k) * times
    n = draw.counts(keys if sampling == "bernoulli" else 2**53)
    scale, factor = any_scale(draw, q.shape[1])
    size = max(plain.softmax(q, k, v, factor).size, 1e-300)
    wide = LONG(factor) * (np.abs(q).astype(LONG) @ np.abs(k).astype(LONG).T).max()
    if wide > 400 or len(k) > MOST_ATOMS or not 1e-100 < np.abs(v).max() < 1e100:
        draw.extreme = "scores or values of extreme size"
    kinds = {
        "q": "array",
        "k": "array",
        "v": "array",
        "n": "counts",
        "sampling": "choice",
    }
    arguments = given | {
        "n": n,
        "sampling": sampling,
        "scale": scale,
        "details": draw.chance(0.5),
    }
    arguments = draw.spoil(arguments, kinds | ({"scale": "positive"} if scale is not None else {}))
    curve = draw.public("exact_pool_curve", **arguments)
    if draw.junk:
        return
    _finite(curve, sampling, keys)
    if wide > 300 or (len(k) > MOST_ATOMS and times == 1 and len(k) * len(q) > 2000):
        draw.checks += 1  # finite, and too much for the brute force
        return
    single = torch.float64 if dtype == torch.float64 else torch.float32
    if any(not isinstance(given[name], torch.Tensor | np.ndarray) for name in "qkv"):
        single = torch.float64
    rounding = (
        torch.finfo(single).eps * (4 + 4 * size)
        if times > 1 or single != torch.float64
        else 4e-16 * (4 + 4 * size)
    )
    squares = []
    for i in range(len(q)):
        atoms = _atoms(q[i], k, v, factor, np.ones(len(k)))
        found = _reference(draw, atoms, n, sampling, times)
        _compare(draw, curve, i, found, v, rounding, sampling)
        squares.append(np.maximum(found.mse, 0))
    root = np.sqrt(np.mean(squares, axis=0))
    offset = 8 * float(np.abs(v).max()) * rounding
    draw.agree(
        "rms",
        curve.rms,
        root,
        (2 * float(curve.accuracy) + 8 * min(rounding, 1.0) + 1e-9) * root + offset + 1e-150,
    )


def q_of(form: Any, dtype: torch.dtype) -> torch.Tensor:
    return (
        form.detach().to(dtype)
        if isinstance(form, torch.Tensor)
        else torch.as_tensor(np.array(form)).to(dtype)
    )


def _first(form: Any, rows: int) -> Any:
    return form[:rows]


def _repeat(table: np.ndarray, times: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.tile(table, (times, 1))).to(dtype)


def _atoms(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, weights: np.ndarray) -> Atoms:
    used = weights > 0
    scores = LONG(scale) * (k[used].astype(LONG) @ q.astype(LONG))
    return Atoms(
        scores,
        np.log(weights[used].astype(LONG)),
        v[used].astype(LONG),
        np.zeros(int(used.sum()), LONG),
    )


def _reference(draw: Draw, atoms: Atoms, n: list[int], sampling: str, times: int) -> Errors:
    size = len(atoms.scores)
    if times == 1 and sampling == "bernoulli" and size <= 8:
        return _joined([by_listing_kept(atoms, count) for count in n])
    if sampling == "bernoulli":
        return by_quadrature_kept(atoms, n, times)
    if max(n) <= 12 and size ** max(n) <= 1500:
        return _joined([by_listing(atoms, count) for count in n])
    return by_quadrature(atoms, n)


def _joined(parts: list[Errors]) -> Errors:
    return Errors(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("mse", "bias", "sum_p2")
        )
    )


def _finite(curve: Any, sampling: str, keys: int) -> None:
    """NaN and inf have one place: the slope where the error is exactly 0, and what is relative to a
    limit of size 0.
    """
    for name in ("rms", "q95", "effective_tokens", "stderr", "delta", "accuracy", "scale"):
        value = numbers(getattr(curve, name))
        if not np.isfinite(value).all():
            raise Finding("silent", f"{name}: {value[~np.isfinite(value)].flat[0]}")
    slope = numbers(curve.slope)
    if not np.isfinite(slope[curve.rms > 0]).all():
        raise Finding("silent", f"slope: {slope} where rms is {curve.rms}")
    for name in ("mse", "sum_p2", "limit", "delta", "bias"):
        value = getattr(curve.queries, name)
        if value is not None and not np.isfinite(value).all():
            raise Finding("silent", f"queries.{name}: not finite")


def _compare(
    draw: Draw, curve: Any, i: int, found: Errors, v: np.ndarray, rounding: float, sampling: str
) -> None:
    """Within the accuracy that the curve states of its rms, the root of the mean over queries; the
    values' own rounding beside their offset counts too.
    """
    root = np.sqrt(np.maximum(found.mse, 0))
    offset = float(np.abs(v).max()) * rounding  # a value is only known to this
    doubt = 2 * float(curve.accuracy) + 8 * min(rounding, 1.0) + 1e-9
    share = np.sqrt(found.sum_p2.astype(float)) if sampling == "replacement" else 1.0
    slack = doubt * np.maximum(root, curve.rms) + 8 * offset * share + 1e-150
    draw.agree("rms of a query", np.sqrt(curve.queries.mse[i]), root, slack)
    draw.agree(
        "effective tokens of a query",
        curve.queries.sum_p2[i],
        found.sum_p2,
        2 * doubt * found.sum_p2,
    )
    if curve.queries.bias is not None:
        allowed = (2 * doubt + 1e-8) * np.maximum(root, curve.rms)[:, None] + 8 * offset + 1e-150
        draw.agree("bias", curve.queries.bias[i], found.bias, allowed)


def _region(draw: Draw) -> None:
    dtype = draw.dtype()
    given, (q, k, v) = any_inputs(draw, dtype, odds=0.06)
    scale, factor = any_scale(draw, q.shape[1])
    level = float(draw.rng.uniform(0.01, 0.999))
    if len(k) <= v.shape[1]:
        draw.extreme = "fewer keys than coordinates"
    found = plain.softmax(q, k, v, factor)
    if found.size > 1e300 or np.abs(v).max() > 1e150:
        draw.extreme = "beyond the range"
    kinds = {"q": "array", "k": "array", "v": "array", "level": "positive"} | (
        {"scale": "positive"} if scale is not None else {}
    )
    arguments = draw.spoil(given | {"level": level, "scale": scale}, kinds)
    got = draw.public("confidence_region", **arguments)
    if draw.junk:
        return
    doubt = min(1.0, 1e-14 * (1 + found.size))
    draw.agree("center", got.center, found.out, doubt * found.gap + 1e-13 * found.value + 1e-300)
    cov = np.array(
        [
            ((p[:, None] * (v - c)) ** 1).T @ (p[:, None] * (v - c))
            for p, c in zip(found.weights, found.out, strict=True)
        ]
    )
    off = found.value * 1e-14  # the rounding of a centre
    far = found.gap + off
    slack = (
        (8 * doubt + 1e-12) * far[:, :, None] * far[:, None, :]
        + far[:, :, None] * off[:, None, :]
        + off[:, :, None] * far[:, None, :]
    )
    draw.agree("cov", got.cov, cov, slack + 1e-300)
    share = (found.weights**2).sum(axis=1)
    draw.agree(
        "effective tokens", got.effective_tokens, 1 / share, (8 * doubt * len(k) + 1e-12) / share
    )
    bound = np.float64(scipy.stats.chi2.ppf(level, v.shape[1]))
    draw.agree("shape", got.shape, bound * cov, bound * slack + 1e-300)
