"""Head: the two linear maps of one attention head, and the numbers that decide how fast it
converges.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.inputs import as_kind, as_tensor, finite_result
from esscher.measures.base import Measure
from esscher.measures.matrices import as_size, check_covariance, in_range, product, spectral_norm


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Head:
    """Attention head: key y scores <y, theta(x)> for query x with tilt theta(x) = A x + a0, and has
    value V y + v0.

    ``A`` (d x d_query) and ``V`` (d_out x d) act on column vectors; queries and tokens are rows
    everywhere. ``tilt_bias`` is a0, ``value_bias`` v0. [B]: A = W_k^T W_q / sqrt(k); [S]: U = K^T
    Q. With a ``key_map`` (k x d) nothing of size d x d is formed: the score is <key_map y,
    query_map x + query_bias>, and ``A`` (k x d_query) and ``tilt_bias`` are given in key space.
    """

    query_map: Float[Tensor, "k d_query"]
    V: Float[Tensor, "d_out d"]
    query_bias: Float[Tensor, " k"] | None
    value_bias: Float[Tensor, " d_out"] | None
    key_map: Float[Tensor, "k d"] | None  # None: the identity, k = d

    def __init__(
        self, A: Any, V: Any, tilt_bias: Any = None, value_bias: Any = None, *, key_map: Any = None
    ) -> None:
        query_map = _matrix(A, "A")
        inner = query_map.shape[0]
        key_map = None if key_map is None else _matrix(key_map, "key_map")
        if key_map is not None and key_map.shape[0] != inner:
            raise ValueError(f"key_map: expected {inner} rows as in A, got {key_map.shape[0]}")
        if tilt_bias is not None:
            tilt_bias = as_tensor(tilt_bias, "tilt_bias", ndim=1, last=inner)
        V = _matrix(V, "V", last=inner if key_map is None else key_map.shape[1])
        if value_bias is not None:
            value_bias = as_tensor(value_bias, "value_bias", ndim=1, last=V.shape[0])
        vars(self).update(
            query_map=query_map, V=V, query_bias=tilt_bias, value_bias=value_bias, key_map=key_map
        )

    @classmethod
    def from_weights(
        cls, wq: Any, wk: Any, wv: Any, bq: Any = None, bk: Any = None, bv: Any = None
    ) -> Head:
        """From the projections of a trained head, each (out x in) as in ``torch.nn.Linear``: A =
        W_k^T W_q / sqrt(k), tilt bias W_k^T b_q / sqrt(k). A key bias cancels in the softmax.
        """
        wq, wk, wv = _matrix(wq, "wq"), _matrix(wk, "wk"), _matrix(wv, "wv")
        k = wk.shape[0]
        dtype = torch.promote_types(wq.dtype, wk.dtype)
        wq, wk = wq.to(dtype), wk.to(dtype)
        if bq is not None:
            bq = as_tensor(bq, "bq", ndim=1, last=k) / math.sqrt(k)
        if bk is not None:
            as_tensor(bk, "bk", ndim=1, last=k)
        return cls(wq / math.sqrt(k), wv, bq, bv, key_map=wk)

    @property
    def A(self) -> Float[Tensor, "d d_query"]:
        if self.key_map is None:
            return self.query_map
        return finite_result(
            self.key_map.T @ self.query_map, "head.A", "scale the weights down or use float64"
        )

    @property
    def tilt_bias(self) -> Float[Tensor, " d"] | None:
        if self.query_bias is None or self.key_map is None:
            return self.query_bias
        return self.query_bias @ self.key_map

    @property
    def dim(self) -> int:
        """Dimension of a token."""
        return int(self.V.shape[1])

    @property
    def dim_query(self) -> int:
        return int(self.query_map.shape[1])

    @property
    def dim_out(self) -> int:
        return int(self.V.shape[0])

    def tilt(self, x: Any) -> Float[Tensor, "*batch d"]:
        """theta(x) = A x + a0, row by row."""
        queries = self.queries(x)
        return queries if self.key_map is None else _map("tilt", queries, self.key_map.T)

    def queries(self, x: Any) -> Float[Tensor, "*batch k"]:
        """Queries in key space, 1/sqrt(k) included: the score of key y is <keys(y), queries(x)>."""
        rows = as_tensor(x, "x", last=self.dim_query)
        return _map("queries", rows, self.query_map, self.query_bias)

    def keys(self, tokens: Any) -> Float[Tensor, "*batch k"]:
        rows = as_tensor(tokens, "tokens", last=self.dim)
        return rows if self.key_map is None else _map("keys", rows, self.key_map)

    def values(self, tokens: Any) -> Float[Tensor, "*batch d_out"]:
        rows = as_tensor(tokens, "tokens", last=self.dim)
        return _map("values", rows, self.V, self.value_bias)

    def scaled(self, alpha: Any) -> Head:
        """The same head with its scores multiplied by alpha > 0 (inverse temperature)."""
        alpha = as_size(alpha, "alpha")

        def times(part: Tensor) -> Tensor:
            return finite_result(alpha * part, "head.scaled", "scale less or use float64")

        bias = None if self.query_bias is None else times(self.query_bias)
        return Head(times(self.query_map), self.V, bias, self.value_bias, key_map=self.key_map)

    def horizon(self, measure: Measure, sided: int = 2) -> float:
        """Attention horizon: ||Sigma^{1/2} A||_2 (sided=1, [B]) or ||Sigma^{1/2} A Sigma^{1/2}||_2
        (sided=2).
        """
        check_pair(self, measure)
        if sided not in (1, 2):
            raise ValueError(f"sided: expected 1 or 2, got {sided!r}")
        if sided == 2 and self.dim_query != self.dim:
            raise ValueError(
                f"sided=2: expected queries and tokens of one dimension, got {self.dim_query} and"
                f" {self.dim}; use sided=1"
            )
        root = measure.root
        left = [root.T] if self.key_map is None else [root.T, self.key_map.T]
        return _product_norm(left, [self.query_map, root] if sided == 2 else [self.query_map])

    def coupling(self, measure: Measure) -> float:
        """Attention-reach coupling Psi = ||Sigma||_2 H^2 with the one-sided horizon H [B]."""
        horizon = self.horizon(measure, sided=1)
        coupling = coupling_of(math.sqrt(measure.reach), horizon)
        if math.isinf(coupling):
            raise ValueError("coupling: beyond 1.8e308; scale the head or the tokens down")
        return coupling

    def __repr__(self) -> str:
        inner = self.query_map.shape[0]
        return (
            f"Head(dim={self.dim}, dim_query={self.dim_query}, dim_out={self.dim_out},"
            f" rank<={inner})"
        )


def _matrix(value: Any, name: str, last: int | None = None) -> Tensor:
    matrix = in_range(as_tensor(value, name, ndim=2, last=last), f"head.{name}")
    if matrix.numel() == 0:
        raise ValueError(f"head.{name}: expected a non-empty matrix, got {tuple(matrix.shape)}")
    return matrix


def _map(name: str, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """matrix y + bias for each row y, summed in float32 or better and answered in the dtype of the
    rows.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    out = rows.to(dtype) @ matrix.T.to(rows.device, dtype)
    out = out if bias is None else out + bias.to(out)
    return finite_result(
        out.to(rows.dtype), f"head.{name}", "scale the head or its input down, or use float64"
    )


def check_pair(head: Any, measure: Any) -> None:
    """Raise when these are not a head and a law of tokens that fits it."""
    dim = as_kind(head, Head, "head").dim
    if as_kind(measure, Measure, "measure").dim != dim:
        raise ValueError(
            f"head and measure: the head takes tokens of dimension {dim}, the measure has"
            f" {measure.dim}"
        )


def _product_norm(left: list[Tensor], right: list[Tensor]) -> float:
    """||left right||_2, each a product itself."""
    a, b = (
        functools.reduce(product, (x.detach().double() for x in side)) for side in (left, right)
    )
    return spectral_norm(product(a, b))


def coupling_of(root_reach: float, horizon: float) -> float:
    """Psi = ||Sigma||_2 H^2 = (||Sigma^{1/2}||_2 H)^2 [B]."""
    size = root_reach * horizon
    return size * size


def horizon_of_covariances(key_cov: Any, query_cov: Any, scale: Any = 1.0) -> float:
    """Two-sided horizon in key space: scale * ||Sigma_k^{1/2} Sigma_q^{1/2}||_2, Sigma_k, Sigma_q
    the k x k covariances of keys W_k y and queries W_q x, scale that of the softmax, 1/sqrt(k).

    Equal to ||Sigma^{1/2} A Sigma^{1/2}||_2 when keys and queries come from tokens of covariance
    Sigma; with W_q W_q^T for the query covariance it is the one-sided horizon.
    """
    key_root, query_root = (
        check_covariance(in_range(as_tensor(cov, name, ndim=2), name), name)[1]
        for cov, name in ((key_cov, "key_cov"), (query_cov, "query_cov"))
    )
    if key_root.shape != query_root.shape:
        raise ValueError(
            f"key_cov, query_cov: expected one shape, got {tuple(key_root.shape)} and"
            f" {tuple(query_root.shape)}"
        )
    return as_size(scale, "scale") * _product_norm([key_root.T], [query_root])
