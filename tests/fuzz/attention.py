"""Attention on given keys: softmax, prefixes, linear and hardmax, against plain
sums in long double.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fuzz import attention_reference as plain
from tests.fuzz.draw import HALVES, Draw
from tests.fuzz.outcome import Finding

__all__ = ["COVERS", "any_inputs", "one"]

COVERS = ("attend", "attend_hardmax", "attend_linear", "attend_prefixes")
WIDTHS = (1, 2, 3, 5, 8, 16, 17, 32, 64, 128, 1024)
WIDTH_ODDS = (0.1, 0.12, 0.12, 0.12, 0.12, 0.12, 0.05, 0.1, 0.1, 0.04, 0.01)


def any_inputs(
    draw: Draw, dtype: torch.dtype, *, same: bool = False, most: int = 60, odds: float = 0.1
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """q, k, v in some form, and their numbers; ``same``: a query for each key."""
    width, d_v = int(draw.pick(WIDTHS, p=WIDTH_ODDS)), int(draw.pick(WIDTHS[:-1], p=None))
    n = draw.whole(1, most)
    if draw.chance(0.02):
        n = draw.whole(300, 1000)
    m = n if same else draw.whole(1, 12)
    tables = [
        draw.rows(m, width, draw.size(odds=odds)),
        draw.rows(n, width, draw.size(odds=odds)),
        draw.rows(n, d_v, draw.size(odds=odds)),
    ]
    if draw.chance(0.1):
        tables[1] *= 10 ** draw.rng.uniform(0, 3)  # peaked
    pairs = [draw.given(table, dtype) for table in tables]
    return {name: given for name, (given, _) in zip("qkv", pairs, strict=True)}, [
        exact for _, exact in pairs
    ]


def tolerance(dtype: torch.dtype, found: plain.Softmax) -> np.ndarray:
    """Scores are rounded in the working precision (float32 for halves), outputs in their own."""
    work = torch.finfo(torch.float32 if dtype in HALVES else dtype).eps
    doubt = min(1.0, 8 * work * (1 + found.size))
    least = torch.finfo(dtype).tiny
    return np.asarray(
        doubt * found.gap
        + (4 * work * len(found.weights.T) ** 0.5 + torch.finfo(dtype).eps) * found.value
        + least
    )


def one(draw: Draw) -> None:
    kind = draw.pick(["attend", "prefixes", "linear", "hardmax"], p=[0.5, 0.15, 0.18, 0.17])
    {
        "attend": _attend,
        "prefixes": _prefixes,
        "linear": _linear,
        "hardmax": _hardmax,
    }[kind](draw)


def any_scale(draw: Draw, width: int) -> tuple[float | None, float]:
    scale = None if draw.chance(0.4) else draw.size(width**-0.5)
    return scale, width**-0.5 if scale is None else scale


def _attend(draw: Draw) -> None:
    dtype = draw.dtype()
    if draw.chance(0.2):
        return _batched(draw, dtype)
    given, (q, k, v) = any_inputs(draw, dtype)
    scale, factor = any_scale(draw, q.shape[1])
    if draw.chance(0.2):
        return _kept(draw, given | {"scale": scale}, (q, k, v, factor), dtype)
    mask = None
    if draw.chance(0.3):
        mask = draw.rng.random((len(q), len(k))) < draw.pick([0.1, 0.5, 0.9])
        mask[np.arange(len(q)), draw.rng.integers(0, len(k), len(q))] = True
        if draw.chance(0.2):
            mask = np.broadcast_to(mask[:1], mask.shape)
    found = plain.softmax(q, k, v, factor, mask)
    _note_range(draw, found.size, dtype)
    form = (
        mask
        if mask is None
        else draw.pick([torch.from_numpy(mask.copy()), mask.tolist(), mask.copy()])
    )
    kinds = {"q": "array", "k": "array", "v": "array"} | (
        {"scale": "positive"} if scale is not None else {}
    )
    arguments = draw.spoil(given | {"scale": scale, "mask": form}, kinds)
    got = draw.public("attend", **arguments)
    _in_hull(draw, got, found, dtype)


def _kept(draw: Draw, given: dict[str, Any], exact: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Rules of which the places alone say the mask."""
    q, k, v, factor = exact
    positions = draw.rng.integers(0, len(k), len(q))
    size, stride = draw.whole(1, len(k)), draw.whole(1, 2 * len(k))
    ago = positions[:, None] - np.arange(len(k))
    keep, mask = draw.pick(
        [
            (f"window:{stride}", ago <= stride),
            (f"recent:{size}", ago < size),
            (f"sinks:{size}", (ago >= 0) & (np.arange(len(k)) < size)),
            (f"strided:{stride}", ago % stride == 0),
            (
                f"strided:{stride}+sinks:1+recent:{size}",
                (ago % stride == 0) | (ago < size) | (np.arange(len(k)) == 0),
            ),
        ]
    )
    found = plain.softmax(q, k, v, factor, mask & (ago >= 0))
    _note_range(draw, found.size, dtype)
    arguments = draw.spoil(
        given | {"keep": keep, "positions": positions}, {"q": "array", "k": "array", "v": "array"}
    )
    _in_hull(draw, draw.public("attend", **arguments), found, dtype)


def _note_range(draw: Draw, size: float, dtype: torch.dtype) -> None:
    """Scores near or beyond the working precision's range: refusing is fair."""
    if size > torch.finfo(torch.float32 if dtype in HALVES else dtype).max / 1e3:
        draw.extreme = "scores beyond the range"


def _in_hull(draw: Draw, got: Any, found: plain.Softmax, dtype: torch.dtype) -> None:
    if isinstance(got, torch.Tensor) and got.dtype != dtype and not draw.junk:
        raise Finding("wrong", f"dtype {got.dtype}, expected {dtype}")
    draw.agree("output", got, found.out, tolerance(dtype, found))


def _batched(draw: Draw, dtype: torch.dtype) -> None:
    batch = tuple(draw.whole(1, 3) for _ in range(draw.whole(1, 2)))
    width, d_v, n, m = draw.whole(1, 20), draw.whole(1, 20), draw.whole(1, 20), draw.whole(1, 5)
    pairs = [
        draw.given(draw.rng.standard_normal((*batch, a, b)) * draw.size(odds=0.05), dtype)
        for a, b in ((m, width), (n, width), (n, d_v))
    ]
    scale, factor = any_scale(draw, width)
    mask = draw.rng.random((*batch, m, n)) < 0.6
    mask[..., 0] = True
    with_mask = draw.chance(0.4)
    flat = [exact.reshape(-1, *exact.shape[-2:]) for _, exact in pairs]
    masks = mask.reshape(-1, m, n) if with_mask else [None] * len(flat[0])
    found = [plain.softmax(*rows, factor, seen) for *rows, seen in zip(*flat, masks, strict=True)]
    _note_range(draw, max(part.size for part in found), dtype)
    arguments: dict[str, Any] = {name: given for name, (given, _) in zip("qkv", pairs, strict=True)}
    arguments = draw.spoil(arguments, {"q": "array", "k": "array", "v": "array"})
    linear = draw.chance(0.3) and not with_mask
    if linear:
        got = draw.public("attend_linear", **arguments, scale=scale)
        both = [plain.linear(*rows, factor) for rows in zip(*flat, strict=True)]
        wanted, size = (
            np.array([pair[i] for pair in both]).reshape(*batch, m, d_v) for i in (0, 1)
        )
        _check_linear(draw, got, wanted, size, dtype)
        return
    got = draw.public(
        "attend", **arguments, scale=scale, mask=torch.from_numpy(mask) if with_mask else None
    )
    wanted = np.array([part.out for part in found]).reshape(*batch, m, d_v)
    allowed = np.array([tolerance(dtype, part) for part in found]).reshape(*batch, m, d_v)
    draw.agree("output", got, wanted, allowed)


def _check_linear(
    draw: Draw, got: Any, wanted: np.ndarray, size: np.ndarray, dtype: torch.dtype
) -> None:
    least = max(1e-300, torch.finfo(dtype).tiny)
    draw.agree(
        "linear output", got, wanted, 1e-13 * size + torch.finfo(dtype).eps * np.abs(wanted) + least
    )


def _linear(draw: Draw) -> None:
    dtype = draw.dtype()
    given, (q, k, v) = any_inputs(draw, dtype)
    scale, factor = any_scale(draw, q.shape[1])
    wanted, size = plain.linear(q, k, v, factor)
    if size.max() > torch.finfo(dtype).max / 1e3:
        draw.extreme = f"result beyond {dtype}"
    kinds = {"q": "array", "k": "array", "v": "array"} | (
        {"scale": "positive"} if scale is not None else {}
    )
    arguments = draw.spoil(given | {"scale": scale}, kinds)
    got = draw.public("attend_linear", **arguments)
    _check_linear(draw, got, wanted, size, dtype)


def _prefixes(draw: Draw) -> None:
    dtype = draw.dtype()
    given, (q, k, v) = any_inputs(draw, dtype, same=True, most=40)
    scale, factor = any_scale(draw, q.shape[1])
    sizes = sorted({draw.whole(1, len(k)) for _ in range(draw.whole(1, 4))})
    found = [plain.softmax(q[:n], k[:n], v[:n], factor) for n in sizes]
    _note_range(draw, max(part.size for part in found), dtype)
    if np.abs(v).max() > 1e150:
        draw.extreme = "covariance beyond the range"
    kinds = {"q": "array", "k": "array", "v": "array", "sizes": "counts"}
    arguments = draw.spoil(given | {"sizes": sizes, "scale": scale}, kinds)
    got = draw.public("attend_prefixes", **arguments)
    if draw.junk:
        return
    for (own_mean, own_cov), wanted in zip(got, found, strict=True):
        allowed = tolerance(dtype, wanted)
        mean = wanted.out.mean(axis=0)
        draw.agree("mean", own_mean, mean, allowed.max(axis=0))
        apart = wanted.out - mean
        off = allowed.max(axis=0)
        spread = np.abs(apart).max(axis=0) + off
        cov = apart.T @ apart / len(apart)
        draw.agree(
            "cov", own_cov, cov, 2 * (np.outer(spread, off) + np.outer(off, spread)) + 1e-300
        )


def _hardmax(draw: Draw) -> None:
    dtype = draw.dtype()
    given, (q, k, v) = any_inputs(draw, dtype)
    wanted, near, exactly = plain.hardmax(q, k, v)
    if (np.abs(q).astype(plain.LONG) @ np.abs(k).T.astype(plain.LONG)).max() > 1e300:
        draw.extreme = "scores beyond the range"
    arguments = draw.spoil(given, {"q": "array", "k": "array", "v": "array"})
    got = draw.public("attend_hardmax", **arguments)
    if draw.junk:
        return
    eps = torch.finfo(dtype).eps + 1e-14
    # keys within rounding of the highest may count or not: then the answer lies between their
    # values
    low = np.array([v[seen].min(axis=0) for seen in near])
    high = np.array([v[seen].max(axis=0) for seen in near])
    clear = (near == exactly).all(axis=1)
    middle = np.where(clear[:, None], wanted, (low + high) / 2)
    room = np.where(clear[:, None], 0, (high - low) / 2)
    draw.agree(
        "hardmax output", got, middle, room + eps * np.abs(v).max(axis=0) + torch.finfo(dtype).tiny
    )
