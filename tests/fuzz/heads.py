"""Heads: maps, biases, horizons and couplings, against long double and plain singular values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.fuzz.draw import Draw
from tests.fuzz.outcome import Finding

__all__ = ["COVERS", "Maps", "any_head", "one"]

COVERS = ("Head", "Head.from_weights", "horizon_of_covariances")
LONG = np.longdouble


@dataclass(frozen=True)
class Projections:
    """The query's own key and value, and sizes of the numbers that scores and values are sums
    of.
    """

    own_keys: np.ndarray
    own_values: np.ndarray
    score_sizes: np.ndarray  # (m, n + 1), the query itself last
    token_value_sizes: np.ndarray
    own_value_sizes: np.ndarray

    @property
    def largest(self) -> float:
        return float(min(max(self.score_sizes.max(), self.token_value_sizes.max()), 1e308))

    def value_sizes(self, inside: bool, i: int) -> np.ndarray:
        return (
            np.vstack([self.token_value_sizes, self.own_value_sizes[i : i + 1]])
            if inside
            else self.token_value_sizes
        )


@dataclass(frozen=True)
class Maps:
    """A head as its numbers: score <y, A x + a0>, value V y + v0."""

    A: np.ndarray
    V: np.ndarray
    a0: np.ndarray
    v0: np.ndarray
    sizes: np.ndarray  # |W_k|^T |W_q|: what A is a sum of
    bias_sizes: np.ndarray
    # to which A is known: weights of float32 are divided by sqrt(k) in float32
    eps: float = 2.3e-16

    @property
    def dim(self) -> int:
        return self.V.shape[1]

    @property
    def dim_query(self) -> int:
        return self.A.shape[1]

    def tilt(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = x.astype(LONG)
        return rows @ self.A.T + self.a0, np.abs(rows) @ self.sizes.T + self.bias_sizes

    def values(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = y.astype(LONG)
        return rows @ self.V.T + self.v0, np.abs(rows) @ np.abs(self.V).T + np.abs(self.v0)

    def projected(
        self, x: np.ndarray, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Projections]:
        """Tilts as queries, tokens as keys, values, and the sizes behind them."""
        theta, theta_size = self.tilt(x)
        values, value_sizes = self.values(y)
        own = self.dim == self.dim_query
        own_values, own_sizes = (
            self.values(x)
            if own
            else (np.zeros((len(x), len(self.V))), np.zeros((len(x), len(self.V))))
        )
        scores = theta_size @ np.abs(y).astype(LONG).T
        self_scores = (theta_size * np.abs(x)).sum(1) if own else np.zeros(len(x))
        doubts = Projections(
            x if own else np.zeros((len(x), self.dim)),
            own_values,
            np.column_stack([scores, self_scores]),
            value_sizes,
            own_sizes,
        )
        return theta, y.astype(LONG), values, doubts


def any_head(
    draw: Draw,
    dim: int | None = None,
    dim_query: int | None = None,
    *,
    dim_out: int | None = None,
    size: float = 1.0,
    odds: float = 0.08,
    junk: float = 0.0,
) -> tuple[Any, Maps]:
    """A head, from A and V or from weights, and its numbers."""
    dim = draw.whole(1, 24) if dim is None else dim
    dim_query = (dim if draw.chance(0.8) else draw.whole(1, 12)) if dim_query is None else dim_query
    dim_out = draw.whole(1, 8) if dim_out is None else dim_out
    dtype = torch.float64 if draw.chance(0.8) else torch.float32
    if draw.chance(0.6):
        A, exact_A = draw.given(
            draw.rows(dim, dim_query, draw.size(size / np.sqrt(max(dim, dim_query)), odds)), dtype
        )
        V, exact_V = draw.given(draw.rows(dim_out, dim, draw.size(1 / np.sqrt(dim), odds)), dtype)
        a0, exact_a0 = (
            draw.given(draw.rows(1, dim, size * 0.3)[0], dtype)
            if draw.chance(0.3)
            else (None, np.zeros(dim))
        )
        v0, exact_v0 = (
            draw.given(draw.rows(1, dim_out)[0], dtype)
            if draw.chance(0.3)
            else (None, np.zeros(dim_out))
        )
        kinds = (
            {"A": "array", "V": "rows"}
            | ({} if a0 is None else {"tilt_bias": "array"})
            | ({} if v0 is None else {"value_bias": "array"})
        )
        given = draw.spoil({"A": A, "V": V, "tilt_bias": a0, "value_bias": v0}, kinds, junk)
        maps = Maps(
            exact_A.astype(LONG),
            exact_V.astype(LONG),
            exact_a0.astype(LONG),
            exact_v0.astype(LONG),
            np.abs(exact_A),
            np.abs(exact_a0),
        )
        return draw.public("Head", **given), maps
    k = draw.whole(1, 8)
    tables = {
        "wq": draw.rows(k, dim_query, draw.size(size / np.sqrt(dim_query), odds)),
        "wk": draw.rows(k, dim, draw.size(1.0, odds)),
        "wv": draw.rows(dim_out, dim, draw.size(1 / np.sqrt(dim), odds)),
        "bq": draw.rows(1, k, size * 0.3)[0],
        "bk": draw.rows(1, k)[0],
        "bv": draw.rows(1, dim_out)[0],
    }
    left_out = {name for name in ("bq", "bk", "bv") if draw.chance(0.6)}
    pairs = {
        name: draw.given(table, dtype) for name, table in tables.items() if name not in left_out
    }
    kinds = {"wq": "array", "wk": "array", "wv": "rows"} | {
        name: "array" for name in pairs if name.startswith("b")
    }
    given = draw.spoil({name: form for name, (form, _) in pairs.items()}, kinds, junk)
    wq, wk, wv = (pairs[name][1].astype(LONG) for name in ("wq", "wk", "wv"))
    root, eps = np.sqrt(LONG(k)), torch.finfo(dtype).eps
    bq = pairs["bq"][1].astype(LONG) / root if "bq" in pairs else np.zeros(k, LONG)
    bv = pairs["bv"][1].astype(LONG) if "bv" in pairs else np.zeros(dim_out, LONG)
    maps = Maps(
        wk.T @ wq / root,
        wv,
        wk.T @ bq,
        bv,
        np.abs(wk).T @ np.abs(wq) / root,
        np.abs(wk).T @ np.abs(bq),
        eps,
    )
    return draw.public("Head.from_weights", **given), maps


def one(draw: Draw) -> None:
    if draw.chance(0.2):
        return _horizon_of_covariances(draw)
    head, maps = any_head(draw, junk=0.1)
    if max(float(maps.sizes.max()), float(np.abs(maps.V).max())) > 1e30:
        draw.extreme = "maps of extreme size"
    kind = draw.pick(["tilt", "values", "A", "horizon", "coupling", "scaled"])
    dtype = draw.pick([torch.float64, torch.float32])
    eps = _eps(head, dtype)
    if kind in ("tilt", "scaled"):
        x, exact = draw.given(draw.rows(draw.whole(1, 5), maps.dim_query, draw.size()), dtype)
        alpha = draw.size() if kind == "scaled" else 1.0
        if kind == "scaled":
            given = draw.spoil({"alpha": alpha}, {"alpha": "positive"}, 0.1)
            head = draw.method(head, "scaled", **given)
        wanted, size = maps.tilt(exact)
        _range(draw, LONG(alpha) * max(size.max(), maps.sizes.max()), dtype)
        got = draw.method(head, "tilt", **draw.spoil({"x": x}, {"x": "rows"}, 0.1))
        return _agree(
            draw, kind, got, alpha * wanted, eps * (4 + maps.dim_query) * LONG(alpha) * size, dtype
        )
    if kind == "values":
        y, exact = draw.given(draw.rows(draw.whole(1, 5), maps.dim, draw.size()), dtype)
        wanted, size = maps.values(exact)
        _range(draw, size.max(), dtype)
        got = draw.method(head, "values", **draw.spoil({"tokens": y}, {"tokens": "rows"}, 0.1))
        return _agree(draw, kind, got, wanted, eps * (4 + maps.dim) * size, dtype)
    if kind == "A":
        _range(draw, maps.sizes.max(), dtype)
        return _agree(draw, "A", draw.method(head, "A"), maps.A, 16 * eps * maps.sizes, dtype)
    return _horizon(draw, head, maps, kind, eps)


def _eps(head: Any, dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).eps, torch.finfo(head.query_map.dtype).eps)


def _range(draw: Draw, size: Any, dtype: torch.dtype) -> None:
    if (
        size > torch.finfo(torch.float32).max / 1e3
        if dtype == torch.float32
        else size > LONG(1e300)
    ):
        draw.extreme = "result beyond the range"
    if size < (1e-30 if dtype == torch.float32 else 1e-290):
        draw.extreme = draw.extreme or "below the range"


def _agree(
    draw: Draw, what: str, got: Any, wanted: np.ndarray, allowed: np.ndarray, dtype: torch.dtype
) -> None:
    draw.agree(
        what, got, wanted, allowed + (1e-36 if dtype == torch.float32 or draw.extreme else 1e-300)
    )


def _horizon(draw: Draw, head: Any, maps: Maps, kind: str, eps: float) -> None:
    from tests.fuzz.laws import any_law  # laws and heads draw each other

    law, spec = any_law(draw, maps.dim, depth=1, odds=0.05)
    zero = spec.tilted(np.zeros(maps.dim))
    cov = (zero.cov + zero.cov.T) / 2
    scale = np.abs(cov).max() or LONG(1)
    values, vectors = np.linalg.eigh((cov / scale).astype(float))
    root = (vectors * np.sqrt(values.clip(min=0))) * np.sqrt(scale)
    unit = np.abs(maps.A).max() or LONG(1)
    sided = draw.pick([1, 2]) if maps.dim == maps.dim_query else 1
    product = (root.T / np.sqrt(scale)) @ (maps.A / unit)
    if sided == 2 and kind == "horizon":
        product = product @ (root / np.sqrt(scale))
        wanted = np.linalg.norm(product.astype(float), 2) * unit * scale
        size = np.abs(maps.sizes).max() * scale
    else:
        wanted = np.linalg.norm(product.astype(float), 2) * unit * np.sqrt(scale)
        size = np.abs(maps.sizes).max() * np.sqrt(scale)
    law_eps = torch.finfo(law.dtype).eps
    # a covariance that is only rounding, as of equal tokens
    off = 1e-12 * maps.dim * zero.cov_size.max()
    floor = (
        4
        * np.abs(maps.sizes).max()
        * maps.dim
        * (off if sided == 2 and kind == "horizon" else np.sqrt(off))
    )
    # singular laws: the root of a rounded eigenvalue is the root of the rounding
    slack = (
        maps.dim
        * (np.sqrt(max(law_eps, 1e-15)) if law_eps > 1e-10 or np.min(values) < 1e-9 else 1e-10)
        + 16 * eps
    )
    if max(wanted, size, scale) > 1e100 or min(wanted, scale, unit) < 1e-100 or law_eps > 1e-4:
        draw.extreme = draw.extreme or "extreme covariance"
    if kind == "coupling":
        reach = np.linalg.norm((cov / scale).astype(float), 2) * scale
        draw.agree(
            "coupling",
            draw.method(head, "coupling", law),
            reach * wanted**2,
            4 * slack * (size**2 * maps.dim**2 * scale) * maps.dim
            + floor**2 * (reach + off)
            + 1e-300,
        )
        return
    given = draw.spoil(
        {"measure": law, "sided": sided}, {"measure": "measure", "sided": "choice"}, 0.1
    )
    if draw.junk and given["sided"] in (1, 2, None) and given["measure"] is law:
        raise Finding("wrong", "junk that is none")
    got = draw.method(head, "horizon", **given)
    draw.agree("horizon", got, wanted, 4 * slack * size * maps.dim + floor + 1e-300)


def _horizon_of_covariances(draw: Draw) -> None:
    k = draw.whole(1, 16)
    dtype = torch.float64 if draw.chance(0.8) else torch.float32
    forms, exacts, scales = [], [], []
    for _ in range(2):
        form, exact = draw.given(draw.covariance(k, draw.size()), dtype)
        exact = (exact.astype(LONG) + exact.T) / 2
        forms.append(form)
        scales.append(np.abs(exact).max() or LONG(1))
        values, vectors = np.linalg.eigh((exact / scales[-1]).astype(float))
        exacts.append(vectors * np.sqrt(values.clip(min=0)))
    scale = draw.size()
    size = LONG(scale) * np.sqrt(scales[0]) * np.sqrt(scales[1])
    wanted = np.linalg.norm(exacts[0].T @ exacts[1], 2) * size
    if dtype == torch.float32 or not 1e-200 < size < 1e200:
        draw.extreme = draw.extreme or "extreme covariance"
    arguments = {"key_cov": forms[0], "query_cov": forms[1], "scale": scale}
    got = draw.public(
        "horizon_of_covariances",
        **draw.spoil(arguments, {"key_cov": "rows", "query_cov": "rows", "scale": "positive"}),
    )
    slack = k * np.sqrt(max(torch.finfo(dtype).eps, 1e-15))
    draw.agree("horizon", got, wanted, 4 * slack * size + 1e-300)
