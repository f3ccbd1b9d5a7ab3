"""Laws of tokens a second time, in many digits or plain long double: transform, tilted mean, tilted
covariance, extreme point.

Nothing here is taken from the package. Each answer comes with the size of the numbers it is made
of: a float64 computation may err by a small multiple of 1e-16 of that size and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mpmath as mp
import numpy as np

__all__ = [
    "GaussianSpec",
    "MixtureSpec",
    "PoolSpec",
    "ProductSpec",
    "RadialSpec",
    "Spec",
    "Tilted",
    "radial",
]

Array = np.ndarray
LONG = np.longdouble


@dataclass(frozen=True)
class Tilted:
    """At one theta: value and size of K, of the mean (d,) and of the covariance (d, d)."""

    log: Any
    log_size: Any
    mean: Array
    mean_size: Array
    cov: Array
    cov_size: Array


class Spec:
    """A law as its parameters alone."""

    dim: int

    def tilted(self, theta: Array) -> Tilted:
        raise NotImplementedError

    def inside(self, theta: Array) -> bool:
        """Whether the transform is finite at theta."""
        return True


@dataclass(frozen=True)
class GaussianSpec(Spec):
    cov: Array
    mean: Array

    @property
    def dim(self) -> int:  # type: ignore[override]
        return len(self.mean)

    def tilted(self, theta: Array) -> Tilted:
        t, cov, mean = theta.astype(LONG), self.cov.astype(LONG), self.mean.astype(LONG)
        push, push_size = cov @ t, np.abs(cov) @ np.abs(t)
        return Tilted(
            t @ mean + t @ push / 2,
            np.abs(t) @ np.abs(mean) + np.abs(t) @ push_size / 2,
            mean + push,
            np.abs(mean) + push_size,
            cov,
            np.abs(cov),
        )


def radial(order: float, r: Any) -> tuple[Any, Any, Any]:
    """K(r) = log(Gamma(v) (2/r)^(v-1) I_{v-1}(r)), B(r)/r and B'(r) with B = I_v / I_{v-1}, in many
    digits.
    """
    r = mp.mpf(r)
    if r < mp.mpf("1e-12"):
        return r**2 / (4 * order), mp.mpf(1) / (2 * order), mp.mpf(1) / (2 * order)
    digits = 40 + (2 * int(mp.log10(r)) if r > 1 else 0)
    with mp.workdps(digits):
        v = mp.mpf(order)
        if order == 0.5:
            return _log_cosh(r), mp.tanh(r) / r, mp.sech(r) ** 2
        if order == 1.5:
            return _log_sinhc(r), (mp.coth(r) - 1 / r) / r, 1 / r**2 - mp.csch(r) ** 2
        below = mp.besseli(v - 1, r)
        ratio = mp.besseli(v, r) / below
        log = mp.loggamma(v) + (v - 1) * mp.log(2 / r) + mp.log(below)
        return log, ratio / r, 1 - ratio**2 - (2 * v - 1) * ratio / r


def _log_cosh(r: Any) -> Any:
    return r + mp.log1p(mp.expm1(-2 * r) / 2)


def _log_sinhc(r: Any) -> Any:
    return mp.log(mp.sinh(r) / r) if r < 100 else r + mp.log1p(-mp.exp(-2 * r)) - mp.log(2 * r)


@dataclass(frozen=True)
class RadialSpec(Spec):
    """Uniform on the sphere (order d/2) or in the ball (d/2 + 1) of a radius."""

    dim: int
    radius: float
    order: float

    def tilted(self, theta: Array) -> Tilted:
        t = [_digits(x) for x in theta]
        length = mp.sqrt(sum(x * x for x in t))
        log, ratio, curvature = radial(self.order, self.radius * length)
        square = mp.mpf(self.radius) ** 2
        mean = _long([square * ratio * x for x in t])
        u = _long([x / length for x in t]) if length > 0 else np.zeros(self.dim, LONG)
        line, eye = np.outer(u, u), np.eye(self.dim, dtype=LONG)
        across, along = _long([square * ratio])[0], _long([square * curvature])[0]
        cov = across * (eye - line) + along * line if length > 0 else across * eye
        # the curvature has 12 digits
        size = across * (eye + np.abs(line)) + 5 * along * np.abs(line)
        return Tilted(_long([log])[0], _long([log])[0], mean, np.abs(mean), cov, size)


@dataclass(frozen=True)
class ProductSpec(Spec):
    """Independent coordinates: "rademacher", "cube" or "laplace" of a scale."""

    dim: int
    scale: float
    kind: str

    def inside(self, theta: Array) -> bool:
        return self.kind != "laplace" or bool(
            (np.abs(theta.astype(LONG)) * LONG(self.scale) < 1).all()
        )

    def tilted(self, theta: Array) -> Tilted:
        rows = [self._coordinate(_digits(x)) for x in theta]
        log, mean, cov, size = (_long([row[i] for row in rows]) for i in range(4))
        return Tilted(
            log.sum(),
            (log * size).sum(),
            mean,
            np.abs(mean) * size,
            np.diag(cov),
            np.diag(cov * size),
        )

    def _coordinate(self, x: Any) -> tuple[Any, Any, Any, Any]:
        scale = mp.mpf(self.scale)
        r = scale * abs(x)
        if self.kind == "laplace":
            with mp.workdps(60):
                left = 1 - r * r
                log = -mp.log1p(-r * r) if r > mp.mpf("1e-20") else r * r
                return log, 2 * scale**2 * x / left, 2 * scale**2 * (1 + r * r) / left**2, 1 / left
        log, ratio, curvature = radial(0.5 if self.kind == "rademacher" else 1.5, r)
        # 1 - tanh^2 falls like exp(-2r): the rounding of r itself is r times as large in it
        size = 5 + (r if self.kind == "rademacher" and r < 800 else 0)
        return log, scale**2 * ratio * x, scale**2 * curvature, size


@dataclass(frozen=True)
class PoolSpec(Spec):
    tokens: Array
    weights: Array

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.tokens.shape[1]

    def tilted(self, theta: Array) -> Tilted:
        used = self.weights > 0
        y, w = self.tokens[used].astype(LONG), self.weights[used].astype(LONG)
        t = theta.astype(LONG)
        scores = y @ t + np.log(w / w.sum())
        size = 1 + (np.abs(y) @ np.abs(t)).max() + np.log(LONG(len(w)))
        top = scores.max()
        p = np.exp(scores - top)
        log = top + np.log(p.sum())
        p = p / p.sum()
        mean = p @ y
        apart = y - mean
        spread = np.abs(y).max(axis=0)
        cov = (p[:, None] * apart).T @ apart
        gap = np.sqrt(np.diagonal(cov))
        cov_size = (
            size * np.outer(gap, gap)
            + np.outer(spread, gap)
            + np.outer(gap, spread)
            + LONG(1e-16) * np.outer(spread, spread)
        )
        # a key whose weight underflows beside the largest may still be far away
        furthest = np.abs(apart).max(axis=0)
        cov_size = cov_size + size * LONG(1e-16) * np.outer(furthest, furthest) * 1e3
        return Tilted(
            log,
            size,
            mean,
            size * np.abs(y - y[np.argmax(scores)]).max(axis=0) + spread,
            cov,
            cov_size,
        )


@dataclass(frozen=True)
class MixtureSpec(Spec):
    weights: Array
    parts: tuple[Spec, ...]

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.parts[0].dim

    def inside(self, theta: Array) -> bool:
        return all(part.inside(theta) for part in self.parts)

    def tilted(self, theta: Array) -> Tilted:
        total = self.weights.sum()
        pairs = [
            (w / total, part.tilted(theta))
            for w, part in zip(self.weights, self.parts, strict=True)
            if w > 0
        ]
        logs = np.array([np.log(LONG(w)) + t.log for w, t in pairs])
        doubt = 1 + max(np.abs(t.log_size) for _, t in pairs)
        top = logs.max()
        p = np.exp(logs - top)
        log = top + np.log(p.sum())
        p = p / p.sum()
        means = np.array([t.mean for _, t in pairs])
        mean = p @ means
        apart = means - mean
        cov = np.einsum("k,ki,kj->ij", p, apart, apart) + np.einsum(
            "k,kij->ij", p, np.array([t.cov for _, t in pairs])
        )
        # a weight's relative error is the absolute error of its logarithm; what it moves is the
        # distance between the parts
        slack = np.minimum(1, p * doubt)
        far = np.abs(apart)
        mean_size = np.einsum("k,ki->i", p, np.array([t.mean_size for _, t in pairs])) + slack @ far
        cov_size = np.einsum("k,kij->ij", p, np.array([t.cov_size for _, t in pairs]))
        cov_size = cov_size + np.einsum("k,ki,kj->ij", slack, far, far)
        cov_size = cov_size + np.einsum(
            "k,kij->ij", slack, np.array([np.abs(t.cov) for _, t in pairs])
        )
        cov_size = cov_size + 2 * np.einsum(
            "k,ki,kj->ij", p, np.array([t.mean_size for _, t in pairs]), far
        )
        cov_size = cov_size + np.swapaxes(cov_size, 0, 1)
        return Tilted(log, doubt, mean, mean_size, cov, cov_size)


def _digits(x: Any) -> Any:
    """A long double as it is, also beyond the range of float64."""
    return mp.mpf(np.format_float_scientific(LONG(x), unique=True))


def _long(values: list[Any]) -> Array:
    """Many digits to long double, whose range is wider than float64's; what is beyond even that
    becomes its edge.
    """
    return np.array([_one_long(mp.mpf(value)) for value in values])


def _one_long(value: Any) -> Any:
    size = abs(value)
    if size < mp.mpf("1e-4900"):
        return LONG(0)
    return (
        LONG(mp.nstr(value, 25))
        if size < mp.mpf("1e4900")
        else LONG("1e4900") * (1 if value > 0 else -1)
    )
