"""Tasks to be learned in context: a law of prompts (x_1, y_1), ..., (x_L, y_L) with a query x_q and
its label y_q. Any object with ``dim`` and ``sample(batch, length, generator)`` is a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.inputs import as_count, as_tensor
from esscher.measures.matrices import check_covariance


@dataclass(frozen=True, eq=False)
class Prompts:
    """B prompts of L tokens z = (x, y), each with a query and the query's label. ``w``: the tasks,
    of prompts of a ``LinearTask``.
    """

    tokens: Float[Tensor, "B L e"]
    query: Float[Tensor, "B d"]
    target: Float[Tensor, " B"]
    w: Float[Tensor, "B d"] | None = None

    @property
    def query_token(self) -> Float[Tensor, "B e"]:
        """(x_q, 0): the query with its label masked."""
        return torch.nn.functional.pad(self.query, (0, 1))

    def part(self, first: int, last: int) -> Prompts:
        """The prompts from ``first`` to before ``last``."""
        here = slice(first, last)
        w = None if self.w is None else self.w[here]
        return Prompts(self.tokens[here], self.query[here], self.target[here], w)

    def to(self, device: torch.device) -> Prompts:
        """On a device: prompts are drawn on the CPU, so that all devices have the same."""
        w = None if self.w is None else self.w.to(device)
        return Prompts(self.tokens.to(device), self.query.to(device), self.target.to(device), w)


class LinearTask:
    """In-context linear regression: w ~ N(0, W), x ~ N(0, Sigma), y = <w, x> + N(0, noise).

    ``sigma`` (Sigma) may be singular; ``task_cov`` (W) is I/d unless given; ``noise`` is the
    variance tau^2 of the label noise. The defaults are those of the experiments of [S], appendix
    A.1; its theory, equation (11), has W = I and no noise. ``query_sigma``: covariance of the query
    where it differs from that of the prompt [S, Remark 4.1]. ``root``, ``task_root`` and
    ``query_root``, times their transposes, are Sigma, W and the query's covariance.
    """

    def __init__(
        self, sigma: Any, task_cov: Any = None, noise: Any = 0.1, query_sigma: Any = None
    ) -> None:
        self.sigma, self.root = check_covariance(as_tensor(sigma, "sigma", ndim=2), "sigma")
        self.dim = int(self.sigma.shape[0])
        scaled = torch.eye(self.dim, dtype=torch.float64) / self.dim
        law = scaled if task_cov is None else task_cov
        self.task_cov, self.task_root = _covariance(law, self.dim, "task_cov")
        self.noise = float(noise)
        if not 0 <= self.noise < float("inf"):
            raise ValueError(
                "noise: expected the variance of the label noise, a finite number of at least 0,"
                f" got {self.noise:g}"
            )
        self.query_sigma, self.query_root = self.sigma, self.root
        if query_sigma is not None:
            self.query_sigma, self.query_root = _covariance(query_sigma, self.dim, "query_sigma")

    @classmethod
    def isotropic(cls, dim: Any, task_cov: Any = None, noise: Any = 0.1) -> LinearTask:
        """Sigma = I."""
        return cls(torch.eye(as_count(dim, "dim"), dtype=torch.float64), task_cov, noise)

    @classmethod
    def kms(cls, dim: Any, rho: Any = 0.5, task_cov: Any = None, noise: Any = 0.1) -> LinearTask:
        """Kac-Murdock-Szegoe covariance Sigma_ij = rho^|i-j|, |rho| <= 1 [S, appendix A.2.2]."""
        rho = float(rho)
        if not abs(rho) <= 1:
            raise ValueError(f"rho: expected a correlation from -1 to 1, got {rho:g}")
        index = torch.arange(as_count(dim, "dim"), dtype=torch.float64)
        return cls(rho ** (index[:, None] - index).abs(), task_cov, noise)

    def with_queries(self, query_sigma: Any) -> LinearTask:
        """The same prompts with queries N(0, ``query_sigma``) [S, Remark 4.1]."""
        return LinearTask(self.sigma, self.task_cov, self.noise, query_sigma)

    def sample(self, batch: Any, length: Any, generator: torch.Generator | None = None) -> Prompts:
        """``batch`` prompts of ``length`` tokens, each with its own w; the query's label is noisy
        too. Normal numbers are drawn in float32, which takes a third of the time.
        """
        B, L, d = as_count(batch, "batch"), as_count(length, "length"), self.dim
        first = torch.randn(B, 2 * d + 1, generator=generator).double()
        white = torch.randn(B, L, d + 1, generator=generator).double()
        w, query = first[:, :d] @ self.task_root.mT, first[:, d : 2 * d] @ self.query_root.mT
        target = (w * query).sum(dim=-1) + self.noise**0.5 * first[:, -1]
        # (x, y) = [[R, 0], [w^T R, tau]] g
        to_token = torch.zeros(B, d + 1, d + 1, dtype=torch.float64)
        to_token[:, :d, :d], to_token[:, d, :d] = self.root, w @ self.root
        to_token[:, d, d] = self.noise**0.5
        return Prompts(white @ to_token.mT, query, target, w)

    def token_covariance(self, w: Float[Tensor, "*B d"]) -> Float[Tensor, "*B e e"]:
        """Gamma_w: the covariance of the tokens (x, y) of each task w."""
        eye = torch.eye(self.dim, dtype=torch.float64).expand(*w.shape, -1)
        read = torch.cat([eye, w[..., None, :]], dim=-2)
        cov = read @ self.sigma @ read.mT
        cov[..., -1, -1] += self.noise
        return cov


def as_task(covariance: str, dim: int, noise: float = 0.1, task_cov: str = "scaled") -> LinearTask:
    """The task of a covariance given in words: isotropic, kms:RHO (rho^|i-j|) or diag:A,B,...

    ``task_cov``: "scaled" is W = I/d of the experiments of [S], appendix A.1; "identity" is W = I
    of its theory, equation (11).
    """
    W = torch.eye(dim, dtype=torch.float64) if task_cov == "identity" else None
    name, _, numbers = covariance.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")] if numbers else []
    except ValueError as cause:
        raise ValueError(
            f"covariance: expected numbers after the colon, got {covariance!r}"
        ) from cause
    if name == "isotropic" and not values:
        return LinearTask.isotropic(dim, W, noise)
    if name == "kms" and len(values) <= 1:
        return LinearTask.kms(dim, values[0] if values else 0.5, W, noise)
    if name == "diag" and len(values) == dim:
        return LinearTask(torch.diag(torch.tensor(values, dtype=torch.float64)), W, noise)
    raise ValueError(
        f"covariance: expected isotropic, kms:RHO or diag: with {dim} numbers, got {covariance!r}"
    )


def _covariance(cov: Any, dim: int, name: str) -> tuple[Tensor, Tensor]:
    """A covariance of the size of Sigma, and a root of it."""
    checked, root = check_covariance(as_tensor(cov, name, ndim=2), name)
    if checked.shape[0] != dim:
        shape = tuple(checked.shape)
        raise ValueError(f"{name}: expected a {dim} x {dim} matrix as sigma has, got shape {shape}")
    return checked, root
