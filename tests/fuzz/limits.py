"""Limits of softmax, linear and hardmax attention on laws, and their push-forwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.heads import Maps, any_head
from tests.fuzz.law_reference import (
    GaussianSpec,
    MixtureSpec,
    PoolSpec,
    ProductSpec,
    RadialSpec,
    Spec,
)
from tests.fuzz.laws import any_dim, any_law, rounding
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one", "queries_for"]

COVERS = ("limit", "linear_limit", "hardmax_limit")
LONG = np.longdouble


def queries_for(
    draw: Draw, maps: Maps, spec: Spec, rows: int, dtype: torch.dtype
) -> tuple[Any, np.ndarray]:
    """Queries of a plausible size; outside a law's strip the call is marked as one that may be
    refused.
    """
    x, exact = draw.given(draw.rows(rows, maps.dim_query, draw.size(odds=0.06)), dtype)
    theta, size = maps.tilt(exact)
    if not all(spec.inside(row) for row in theta):
        draw.extreme = "outside the strip"
    if max(size.max(), maps.sizes.max(), np.abs(maps.V).max()) > (
        1e30 if dtype == torch.float32 else 1e290
    ):
        draw.extreme = "tilts of extreme size"
    return x, exact


def one(draw: Draw) -> None:
    dim = min(any_dim(draw), 64)
    law, spec = any_law(draw, dim, odds=0.08)
    usual = 1.0 / np.sqrt(
        max(1e-3, float(min(np.abs(np.diagonal(spec.tilted(np.zeros(dim)).cov)).max(), 1e6)))
    )
    head, maps = any_head(draw, dim, size=min(usual, 1.0) if draw.chance(0.8) else 1.0)
    kind = draw.pick(
        ["limit", "linear_limit", "hardmax_limit", "pushforward"], p=[0.55, 0.23, 0.12, 0.1]
    )
    if kind == "pushforward":
        return _pushforward(draw, head, maps, law, spec)
    dtype = draw.pick([torch.float64, torch.float32])
    x, exact = queries_for(draw, maps, spec, draw.whole(1, 4), dtype)
    if kind == "hardmax_limit":
        return _hardmax(draw, head, law, spec, x)
    zero = spec.tilted(np.zeros(dim))
    wanted, allowed = (
        _linear(maps, zero, exact, dtype, law, head)
        if kind == "linear_limit"
        else _softmax(draw, maps, spec, exact, dtype, head)
    )
    if wanted is not None and not np.abs(wanted).max() < torch.finfo(dtype).max / 1e3:
        draw.extreme = "result beyond the range"
    if (
        kind == "linear_limit"
        and max(np.abs(zero.cov).max(), (zero.mean**2).max())
        > float(torch.finfo(law.dtype).max) / 1e3
    ):
        draw.extreme = "moments beyond the range"
    given = draw.spoil({"head": head, "measure": law}, {"head": "head", "measure": "measure"}, 0.04)
    limit = draw.public(kind, **given)
    got = draw.method(limit, "__call__", **draw.spoil({"queries": x}, {"queries": "rows"}, 0.05))
    if draw.junk:
        return
    if wanted is None:
        raise Finding("wrong", f"{kind}: {numbers(got).flat[0]:.4g} where there is no limit")
    draw.agree(kind, got, wanted, allowed)


def _softmax(
    draw: Draw, maps: Maps, spec: Spec, x: np.ndarray, dtype: torch.dtype, head: Any
) -> tuple[Any, Any]:
    """V (tilted mean) + v0; the rounding of theta in the working precision moves the mean by the
    covariance.
    """
    theta, size = maps.tilt(x)
    if not all(spec.inside(row) for row in theta):
        return None, None
    eps = max(torch.finfo(dtype).eps, maps.eps)
    found = [spec.tilted(row) for row in theta]
    mean, doubt = (
        np.array([t.mean for t in found]),
        rounding(spec.dim) * np.array([t.mean_size for t in found]),
    )
    moved = (
        np.array([np.abs(t.cov) @ s for t, s in zip(found, size, strict=True)])
        * eps
        * (4 + maps.dim_query)
    )
    # far from the linear range the covariance says little: never further than the law's own size
    V = np.abs(maps.V)
    wanted = mean @ maps.V.T + maps.v0
    allowed = (doubt + moved * 4 + eps * np.abs(mean)) @ V.T + eps * (4 + maps.dim) * (
        np.abs(mean) @ V.T + np.abs(maps.v0)
    )
    if eps * size.max() > 1e-3 / (
        1 + float(min(max(np.abs(t.cov).max() for t in found), 1e300)) ** 0.5
    ):
        draw.extreme = draw.extreme or "tilt known too roughly"
        allowed = allowed + _span(spec, theta) @ V.T
    return wanted, allowed + (1e-36 if dtype == torch.float32 else 1e-300)


def _span(spec: Spec, theta: np.ndarray) -> np.ndarray:
    """The size of tokens, where the tilt's rounding decides between them."""
    if isinstance(spec, PoolSpec):
        return np.broadcast_to(2 * np.abs(spec.tokens).max(axis=0), theta.shape)
    if isinstance(spec, RadialSpec):
        return np.full(theta.shape, 2 * spec.radius)
    if isinstance(spec, ProductSpec) and spec.kind != "laplace":
        return np.full(theta.shape, 2 * spec.scale)
    if isinstance(spec, MixtureSpec):
        return 2 * np.max(
            [
                np.abs(np.array([part.tilted(row).mean for row in theta])) + _span(part, theta)
                for part in spec.parts
            ],
            axis=0,
        )
    return np.zeros(theta.shape)


def _linear(
    maps: Maps, zero: Any, x: np.ndarray, dtype: torch.dtype, law: Any, head: Any
) -> tuple[Any, Any]:
    theta, size = maps.tilt(x)
    eps = max(torch.finfo(dtype).eps, torch.finfo(law.dtype).eps, 1e-13, maps.eps)
    second = zero.cov + np.outer(zero.mean, zero.mean)
    sizes = (
        np.abs(zero.cov)
        + np.outer(np.abs(zero.mean), np.abs(zero.mean))
        + (zero.cov_size + np.outer(zero.mean_size, np.abs(zero.mean))) * 2
    )
    table = maps.V @ second + np.outer(maps.v0, zero.mean)
    table_size = np.abs(maps.V) @ sizes + np.outer(np.abs(maps.v0), np.abs(zero.mean))
    return theta @ table.T, 8 * eps * (4 + maps.dim + maps.dim_query) * (size @ table_size.T) + (
        1e-36 if dtype == torch.float32 else 1e-300
    )


def _hardmax(draw: Draw, head: Any, law: Any, spec: Spec, x: Any) -> None:
    """Finite where it is given; laws.py checks the points themselves."""
    draw.extreme = draw.extreme or "unbounded, or a tie"
    got = numbers(draw.method(draw.public("hardmax_limit", head, law), "__call__", x))
    if not np.isfinite(got).all():
        raise Finding("silent", "hardmax limit: not finite")
    draw.checks += 1


def _pushforward(draw: Draw, head: Any, maps: Maps, law: Any, spec: Spec) -> None:
    """Mean and covariance of the outputs when queries are tokens, within the error it states."""
    kind = draw.pick(["limit", "linear_limit"])
    if maps.dim != maps.dim_query:
        draw.extreme = "queries of another dimension"
    zero = spec.tilted(np.zeros(maps.dim))
    big = max(
        float(maps.sizes.max()),
        float(np.abs(maps.V).max()),
        float(np.abs(zero.cov).max()),
        float(np.abs(zero.mean).max()),
    )
    if big > 1e30 or not isinstance(spec, GaussianSpec | PoolSpec | RadialSpec):
        draw.extreme = draw.extreme or "sampled, or of extreme size"
        if big > 1e30 or kind == "limit":
            return _finite_pushforward(draw, kind, head, law, spec, big)
    got = draw.method(draw.public(kind, head, law), "pushforward")
    tokens, weights = _queries(draw, spec)
    exact_moments = tokens is None
    if kind == "linear_limit" or isinstance(spec, GaussianSpec):
        table = maps.V @ (
            zero.cov + (np.outer(zero.mean, zero.mean) if kind == "linear_limit" else 0)
        )
        table = table + np.outer(maps.v0, zero.mean) if kind == "linear_limit" else table
        matrix = table @ maps.A
        offset = table @ maps.a0 + (0 if kind == "linear_limit" else maps.V @ zero.mean + maps.v0)
        mean, cov = matrix @ zero.mean + offset, matrix @ zero.cov @ matrix.T
        root = np.sqrt(np.abs(np.diagonal(zero.cov)).sum()) + np.abs(zero.mean).sum()
        size = (np.abs(table).sum() + np.abs(maps.V).sum() * root**2) * maps.sizes.max() * maps.dim
        eps = max(torch.finfo(law.dtype).eps, 1e-12, maps.eps)
        draw.agree(
            "mean",
            got.mean,
            mean,
            64 * eps * (size * root + np.abs(offset).max() + size) * maps.dim + 1e-300,
        )
        draw.agree("cov", got.cov, cov, 64 * eps * (size * root) ** 2 * maps.dim**2 + 1e-300)
        return
    assert not exact_moments
    theta, _ = maps.tilt(tokens)
    values = np.array([spec.tilted(row).mean for row in theta]) @ maps.V.T + maps.v0
    mean = weights @ values
    cov = (weights[:, None] * (values - mean)).T @ (values - mean)
    spread = float(np.abs(values).max())
    if isinstance(spec, PoolSpec):
        _, size = maps.tilt(tokens)
        doubt = (1e-12 + 16 * maps.eps) * (1 + float((size @ np.abs(spec.tokens).T).max()))
        slack = (
            min(doubt, 2.0) * (np.abs(maps.V) @ np.abs(spec.tokens).max(axis=0)).max()
            + 1e-12 * spread
        )
        draw.agree("mean", got.mean, mean, 4 * slack + 1e-300)
        draw.agree("cov", got.cov, cov, 8 * slack * spread + 1e-300)
        return
    # 256 independent queries of our own: 8 standard errors, and what the push-forward states of
    # itself
    se = values.std(axis=0).astype(float) / np.sqrt(len(values))
    draw.agree(
        "mean",
        got.mean,
        mean,
        8 * se + 8 * got.mean_error + (1e-9 + 64 * maps.eps) * spread + 1e-300,
    )
    products = (values - mean)[:, :, None] * (values - mean)[:, None, :]
    se = products.std(axis=0).astype(float) / np.sqrt(len(values))
    draw.agree(
        "cov",
        got.cov,
        cov,
        8 * se + 8 * got.cov_error + 1e-3 * se.max() + (1e-9 + 64 * maps.eps) * spread**2 + 1e-300,
    )


def _finite_pushforward(draw: Draw, kind: str, head: Any, law: Any, spec: Spec, big: float) -> None:
    got = draw.method(draw.public(kind, head, law), "pushforward")
    if not all(
        np.isfinite(numbers(part)).all()
        for part in (got.mean, got.cov, got.mean_error, got.cov_error)
    ):
        raise Finding("silent", "push-forward: not finite")
    draw.checks += 1


def _queries(draw: Draw, spec: Spec) -> tuple[Any, Any]:
    """The pool's own tokens, or tokens of a sphere or a ball from numpy."""
    if isinstance(spec, PoolSpec):
        return spec.tokens, spec.weights / spec.weights.sum()
    if isinstance(spec, RadialSpec):
        count = 256
        rows = draw.rng.standard_normal((count, spec.dim))
        rows *= spec.radius / np.linalg.norm(rows, axis=1, keepdims=True)
        if spec.order > spec.dim / 2:
            rows *= draw.rng.random((count, 1)) ** (1 / spec.dim)
        return rows, np.full(count, 1 / count)
    return None, None
