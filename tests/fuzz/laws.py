"""Laws of tokens: transforms, tilted moments, extremes and samples, against many digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.law_reference import (
    GaussianSpec,
    MixtureSpec,
    PoolSpec,
    ProductSpec,
    RadialSpec,
    Spec,
)
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "any_dim", "any_law", "any_theta", "one", "rounding"]

COVERS = (
    "Ball",
    "Cube",
    "Gaussian",
    "Laplace",
    "Mixture",
    "Pool",
    "Rademacher",
    "Sphere",
    "Student",
)
DIMS = (
    (1, 0.2),
    (2, 0.2),
    (3, 0.2),
    (5, 0.15),
    (8, 0.1),
    (24, 0.08),
    (64, 0.05),
    (256, 0.01),
    (1024, 0.01),
)
KINDS = ("gaussian", "sphere", "ball", "cube", "rademacher", "laplace", "pool", "mixture")
TINY = 1e-306  # below this float64 itself loses digits


def any_dim(draw: Draw) -> int:
    dims, odds = zip(*DIMS, strict=True)
    return int(draw.pick(dims, p=odds))


def any_law(
    draw: Draw, dim: int | None = None, *, depth: int = 2, odds: float = 0.12, junk: float = 0.0
) -> tuple[Any, Spec]:
    """A random law of the package and its second self."""
    dim = any_dim(draw) if dim is None else dim
    kind = draw.pick(KINDS if depth and dim <= 64 else KINDS[:-1])
    if kind == "gaussian":
        return _gaussian(draw, dim, odds, junk)
    if kind == "pool":
        return _pool(draw, dim, odds, junk)
    if kind == "mixture":
        return _mixture(draw, dim, depth, odds, junk)
    size = draw.size(odds=odds)
    name = {
        "sphere": "radius",
        "ball": "radius",
        "cube": "half_width",
        "rademacher": "scale",
        "laplace": "scale",
    }[kind]
    given = draw.spoil({"dim": dim, name: size}, {"dim": "count", name: "positive"}, junk)
    law = draw.public(kind.capitalize(), **given)
    if kind in ("sphere", "ball"):
        return law, RadialSpec(dim, size, dim / 2 + (kind == "ball"))
    return law, ProductSpec(dim, size, kind)


def _gaussian(draw: Draw, dim: int, odds: float, junk: float) -> tuple[Any, Spec]:
    dtype = draw.dtype()
    cov, exact = draw.given(draw.covariance(dim, draw.size(odds=odds)), dtype)
    exact = (exact + exact.T) / 2
    mean, exact_mean = (None, np.zeros(dim))
    if draw.chance(0.5):
        mean, exact_mean = draw.given(draw.rows(1, dim, draw.size(odds=odds))[0])
    given = draw.spoil(
        {"cov": cov, "mean": mean},
        {"cov": "rows", "mean": "array"} if mean is not None else {"cov": "rows"},
        junk,
    )
    if dtype not in (torch.float64,) and np.linalg.matrix_rank(exact) < dim:
        # may have a small negative eigenvalue
        draw.extreme = draw.extreme or "singular after rounding"
    return draw.public("Gaussian", **given), GaussianSpec(exact, exact_mean)


def _pool(draw: Draw, dim: int, odds: float, junk: float) -> tuple[Any, Spec]:
    size = draw.whole(1, 40)
    tokens, exact = draw.given(draw.rows(size, dim, draw.size(odds=odds)), draw.dtype())
    given = draw.spoil({"tokens": tokens}, {"tokens": "array"}, junk)
    return draw.public("Pool", **given), PoolSpec(exact, np.ones(size))


def _mixture(draw: Draw, dim: int, depth: int, odds: float, junk: float) -> tuple[Any, Spec]:
    pairs = [any_law(draw, dim, depth=depth - 1, odds=odds / 2) for _ in range(draw.whole(1, 4))]
    table = draw.rng.exponential(size=len(pairs)) * (draw.rng.random(len(pairs)) > 0.1)
    table[-1] += 0.01
    weights, exact = draw.given(table)
    given = draw.spoil(
        {"weights": weights, "components": [law for law, _ in pairs]},
        {"weights": "array", "components": "curve"},
        junk,
    )
    return draw.public("Mixture", **given), MixtureSpec(exact, tuple(spec for _, spec in pairs))


def any_theta(draw: Draw, spec: Spec, rows: int) -> np.ndarray:
    """Tilts of a size that suits the law; inside the strip of a Laplace law, mostly."""
    reach = 1.0
    for scale in _laplace_scales(spec):
        reach = min(reach, 0.9 / scale)
    if reach < 1.0 and draw.chance(0.9):
        return draw.rng.uniform(-reach, reach, (rows, spec.dim))
    return draw.rows(rows, spec.dim, draw.size(1.0 / np.sqrt(spec.dim)))


def _laplace_scales(spec: Spec) -> list[float]:
    if isinstance(spec, MixtureSpec):
        return [scale for part in spec.parts for scale in _laplace_scales(part)]
    return [spec.scale] if isinstance(spec, ProductSpec) and spec.kind == "laplace" else []


def rounding(dim: int) -> float:
    """Relative rounding of a float64 sum over dim terms, with room."""
    return 2e-13 + 4e-16 * dim


def one(draw: Draw) -> None:
    if draw.chance(0.04):
        return _student(draw)
    law, spec = any_law(draw, junk=0.06)
    dtype = draw.dtype()
    rows = draw.whole(1, 3) if spec.dim <= 64 else 1
    theta, exact = draw.given(any_theta(draw, spec, rows), dtype)
    if not all(spec.inside(row) for row in exact):
        draw.extreme = "outside the strip"
    kind = draw.pick(
        ["log_laplace", "tilted_mean", "tilted_cov", "moments", "sample", "extreme"],
        p=[0.25, 0.25, 0.2, 0.15, 0.1, 0.05],
    )
    if kind == "moments":
        return _moments(draw, law, spec)
    if kind == "sample":
        return _sample(draw, law, spec)
    if kind == "extreme":
        return _extreme(draw, law, spec, theta, exact)
    eps, biggest = torch.finfo(dtype).eps, torch.finfo(dtype).max
    wanted = allowed = None
    if draw.extreme != "outside the strip":
        found = [spec.tilted(row) for row in exact]
        name = {"log_laplace": "log", "tilted_mean": "mean", "tilted_cov": "cov"}[kind]
        wanted = np.array([getattr(t, name) for t in found])
        allowed = rounding(spec.dim) * np.array([getattr(t, name + "_size") for t in found])
        if (np.abs(wanted) > biggest * 0.99).any():
            draw.extreme = f"result beyond {dtype}"
        allowed = allowed + eps * np.abs(wanted) + _least(dtype)
    given = draw.spoil({"theta": theta}, {"theta": draw.pick(["rows", "array"])}, 0.05)
    got = draw.method(law, kind, **given)
    if draw.junk:
        return
    if wanted is None:
        raise Finding(
            "wrong", f"{kind}: {numbers(got).flat[0]:.4g} where the transform is infinite"
        )
    draw.agree(kind, got, wanted, allowed)


def _least(dtype: torch.dtype) -> float:
    """Numbers this small are rounded to a grid, or to 0."""
    return max(TINY, torch.finfo(dtype).tiny * torch.finfo(dtype).eps)


def _moments(draw: Draw, law: Any, spec: Spec) -> None:
    zero = spec.tilted(np.zeros(spec.dim))
    eps, biggest = torch.finfo(law.dtype).eps, torch.finfo(law.dtype).max
    if max(np.abs(zero.mean).max(), np.abs(zero.cov).max()) > biggest * 0.99:
        draw.extreme = f"moments beyond {law.dtype}"
    slack = eps + rounding(spec.dim)
    draw.agree(
        "mean",
        draw.method(law, "mean"),
        zero.mean,
        rounding(spec.dim) * zero.mean_size + eps * np.abs(zero.mean) + _least(law.dtype),
    )
    draw.agree(
        "cov",
        draw.method(law, "cov"),
        zero.cov,
        rounding(spec.dim) * zero.cov_size + eps * np.abs(zero.cov) + _least(law.dtype),
    )
    scale = float(np.abs(zero.cov).max()) or 1.0
    reach = np.linalg.norm((zero.cov / scale).astype(float), 2) * scale
    draw.agree(
        "reach",
        draw.method(law, "reach"),
        np.float64(reach),
        spec.dim * slack * reach + rounding(spec.dim) * zero.cov_size.sum() + _least(law.dtype),
    )


def _sample(draw: Draw, law: Any, spec: Spec) -> None:
    """Mean of 400 tokens within 6 standard errors in one direction: a false alarm in 5e8 calls of
    Gaussian tails.
    """
    direction = draw.rng.standard_normal(spec.dim)
    zero = spec.tilted(np.zeros(spec.dim))
    biggest = torch.finfo(law.dtype).max
    if np.abs(zero.mean).max() + 40 * np.sqrt(np.diagonal(zero.cov).max()) > biggest / 100:
        draw.extreme = f"tokens beyond {law.dtype}"
    n = 400 if spec.dim <= 64 else 50
    tokens = draw.method(law, "sample", n, torch.Generator().manual_seed(draw.whole(1, 10**6)))
    values = numbers(tokens)
    if values.shape != (n, spec.dim) or not np.isfinite(values).all():
        raise Finding(
            "silent" if values.shape == (n, spec.dim) else "wrong",
            f"sample: shape {values.shape} or not finite",
        )
    spread = np.sqrt(np.maximum(direction @ zero.cov @ direction, 0) / n)
    wanted = np.longdouble(direction @ zero.mean)
    eps = torch.finfo(law.dtype).eps
    slack = (eps + rounding(spec.dim)) * (np.abs(direction) @ np.abs(values).max(axis=0)) + np.abs(
        direction
    ).sum() * _least(law.dtype)
    draw.agree(
        "mean of a sample",
        np.longdouble(values.astype(np.longdouble).mean(axis=0) @ direction),
        wanted,
        8 * spread + slack + rounding(spec.dim) * np.abs(direction) @ zero.mean_size,
    )


def _extreme(draw: Draw, law: Any, spec: Spec, theta: Any, exact: np.ndarray) -> None:
    """The support's point furthest along theta."""
    if isinstance(spec, MixtureSpec | GaussianSpec) or (
        isinstance(spec, ProductSpec) and spec.kind == "laplace"
    ):
        draw.extreme = draw.extreme or "no extreme point, or a tie"
    if not exact.any(axis=1).all() or draw.extreme:
        draw.extreme = draw.extreme or "no direction"
    got = numbers(draw.method(law, "extreme", theta))
    if not np.isfinite(got).all():
        raise Finding("silent", "extreme: not finite")
    if isinstance(spec, RadialSpec | ProductSpec | PoolSpec) and not draw.extreme:
        eps = (
            torch.finfo(theta.dtype).eps
            if isinstance(theta, torch.Tensor)
            else float(np.finfo(getattr(theta, "dtype", float)).eps)
        )
        height = (got * exact).sum(-1)
        top = np.array([_height(spec, row) for row in exact])
        size = np.array([np.abs(row) @ _corner(spec) for row in exact])
        draw.agree("height of the extreme point", height, top, (2 * eps + 1e-13) * size * 2)
    else:
        draw.checks += 1


def _corner(spec: Spec) -> np.ndarray:
    """Largest size of each coordinate."""
    if isinstance(spec, PoolSpec):
        return np.abs(spec.tokens).max(axis=0)
    return np.full(spec.dim, spec.radius if isinstance(spec, RadialSpec) else spec.scale)


def _height(spec: Spec, theta: np.ndarray) -> float:
    if isinstance(spec, PoolSpec):
        return float((spec.tokens[spec.weights > 0] @ theta).max())
    if isinstance(spec, RadialSpec):
        return float(spec.radius * np.linalg.norm(theta))
    return float(spec.scale * np.abs(theta).sum())


def _student(draw: Draw) -> None:
    dim, df, scale = (
        any_dim(draw),
        float(draw.pick([0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 30.0])),
        draw.size(),
    )
    given = draw.spoil(
        {"dim": dim, "df": df, "scale": scale},
        {"dim": "count", "df": "positive", "scale": "positive"},
        0.1,
    )
    law = draw.public("Student", **given)
    if draw.chance(0.5):
        tokens = numbers(draw.method(law, "sample", 20, torch.Generator().manual_seed(3)))
        if not np.isfinite(tokens).all():
            raise Finding("silent", "sample: a token is not finite")
        draw.checks += 1
        return
    draw.extreme = draw.extreme or (None if df > 2 else "no covariance")
    square = np.longdouble(scale) ** 2 * df / (df - 2) if df > 2 else 0
    if square > 1e308:
        draw.extreme = "covariance beyond float64"
    got = draw.method(law, "cov")
    draw.agree("cov", got, square * np.eye(dim, dtype=np.longdouble), 1e-14 * square + TINY)
