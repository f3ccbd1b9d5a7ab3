"""Tasks to be learned in context: a law of prompts (x_1, y_1), ..., (x_L, y_L) with a query x_q and
its label y_q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.inputs import as_count, as_tensor
from esscher.measures import Measure
from esscher.measures.matrices import check_covariance


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of prompts of one length: B prompts of L labelled covariates, a query each, and the
    query's label.

    Labels are numbers, or vectors along a last axis of k numbers [S, section 4].
    """

    x: Float[Tensor, "B L d"]
    y: Float[Tensor, "B L *k"]
    query: Float[Tensor, "B d"]
    target: Float[Tensor, B * k]

    @property
    def tokens(self) -> Float[Tensor, "B L e"]:
        """z = (x, y), d + k numbers a token."""
        return torch.cat([self.x, self.y.reshape(*self.x.shape[:2], -1)], dim=-1)

    @property
    def query_token(self) -> Float[Tensor, "B e"]:
        """(x_q, 0): the query with its label masked."""
        return torch.cat(
            [self.query, torch.zeros_like(self.target.reshape(self.query.shape[0], -1))], dim=-1
        )

    @property
    def length(self) -> int:
        return int(self.y.shape[1])


@runtime_checkable
class Task(Protocol):
    """What every task has: the dimension of x, the variance of the label noise, and prompts to
    draw.
    """

    @property
    def dim(self) -> int: ...

    @property
    def noise(self) -> float: ...

    def sample(
        self, batch: Any, length: Any, generator: torch.Generator | None = None
    ) -> Prompts: ...


@dataclass(frozen=True, eq=False, init=False)
class LinearTask:
    """In-context linear regression: w ~ N(0, W), x ~ N(0, Sigma), y = <w, x> + N(0, noise), query
    and label alike.

    ``sigma`` (Sigma) may be singular; ``task_cov`` (W) is I/d unless given; ``noise`` is the
    variance tau^2 of the label noise. The defaults are those of the experiments of [S], appendix
    A.1; its theory, equation (11), has W = I and no noise. ``query_sigma``: covariance of the query
    where it differs from that of the prompt [S, Remark 4.1].
    """

    sigma: Float64[Tensor, "d d"]
    task_cov: Float64[Tensor, "d d"]
    noise: float
    root: Float64[Tensor, "d d"] = field(repr=False)  # times its transpose: Sigma
    task_root: Float64[Tensor, "d d"] = field(repr=False)  # times its transpose: W
    # Sigma unless the query's law is another one
    query_sigma: Float64[Tensor, "d d"] = field(repr=False)
    query_root: Float64[Tensor, "d d"] = field(repr=False)

    def __init__(
        self, sigma: Any, task_cov: Any = None, noise: Any = 0.1, query_sigma: Any = None
    ) -> None:
        sigma, root = check_covariance(as_tensor(sigma, "sigma", ndim=2), "sigma")
        dim = sigma.shape[0]
        task_cov, task_root = _task_law(task_cov, dim)
        query_root = root
        if query_sigma is None:
            query_sigma = sigma
        else:
            query_sigma, query_root = _covariance(query_sigma, dim, "query_sigma")
        _set(self, sigma=sigma, task_cov=task_cov, noise=_variance(noise))
        _set(self, root=root, task_root=task_root)
        _set(self, query_sigma=query_sigma, query_root=query_root)

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
        """The same prompts with queries N(0, ``query_sigma``): a shift of the distribution [S,
        Remark 4.1].
        """
        return LinearTask(self.sigma, self.task_cov, self.noise, query_sigma)

    @property
    def shifted(self) -> bool:
        """Whether the query's law is not that of the prompt."""
        return not torch.equal(self.query_sigma, self.sigma)

    @property
    def dim(self) -> int:
        return int(self.sigma.shape[0])

    def sample(
        self,
        batch: Any,
        length: Any,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Prompts:
        """``batch`` prompts of ``length`` tokens, each with its own w; labels of the query are
        noisy too.
        """
        B, L = as_count(batch, "batch"), as_count(length, "length")
        w = _normal((B, self.dim), generator, dtype) @ self.task_root.to(dtype).T
        white = _normal((B, L + 1, self.dim), generator, dtype)
        x = white @ self.root.to(dtype).T
        if self.shifted:
            x[:, -1] = white[:, -1] @ self.query_root.to(dtype).T
        return _label(torch.einsum("bld,bd->bl", x, w), x, self.noise, generator)


@dataclass(frozen=True, eq=False, init=False)
class CovariateTask:
    """Linear regression on covariates of any law: w ~ N(0, W), x ~ ``covariates``, y = <w, x> +
    N(0, noise).

    For covariates that are not Gaussian the infinite-prompt limits of softmax and linear attention
    differ, since the tilted mean is no longer linear in the tilt.
    """

    covariates: Measure
    task_cov: Float64[Tensor, "d d"]
    noise: float
    task_root: Float64[Tensor, "d d"] = field(repr=False)

    def __init__(self, covariates: Measure, task_cov: Any = None, noise: Any = 0.1) -> None:
        task_cov, task_root = _task_law(task_cov, covariates.dim)
        _set(self, covariates=covariates, noise=_variance(noise))
        _set(self, task_cov=task_cov, task_root=task_root)

    @property
    def dim(self) -> int:
        return self.covariates.dim

    def sample(self, batch: Any, length: Any, generator: torch.Generator | None = None) -> Prompts:
        B, L = as_count(batch, "batch"), as_count(length, "length")
        w = _normal((B, self.dim), generator, torch.float64) @ self.task_root.T
        x = self.covariates.sample(B * (L + 1), generator).double().reshape(B, L + 1, self.dim)
        return _label(torch.einsum("bld,bd->bl", x, w), x, self.noise, generator)


@dataclass(frozen=True, eq=False)
class VectorTask:
    """Linear regression with ``labels`` labels a token: y = (<w_1, x>, ..., <w_k, x>) + noise, each
    w_i drawn on its own.

    ``one`` has the laws of x, of a w_i and of the noise. [S], section 4, has labels in R^k; a layer
    predicts the last k coordinates of its output.
    """

    one: LinearTask
    labels: int

    @property
    def dim(self) -> int:
        return self.one.dim

    @property
    def noise(self) -> float:
        return self.one.noise

    def sample(self, batch: Any, length: Any, generator: torch.Generator | None = None) -> Prompts:
        B, L, k = (
            as_count(batch, "batch"),
            as_count(length, "length"),
            as_count(self.labels, "labels"),
        )
        w = _normal((B, k, self.dim), generator, torch.float64) @ self.one.task_root.T
        white = _normal((B, L + 1, self.dim), generator, torch.float64)
        x = torch.cat(
            [white[:, :-1] @ self.one.root.T, white[:, -1:] @ self.one.query_root.T], dim=1
        )
        return _label(torch.einsum("bld,bkd->blk", x, w), x, self.noise, generator)


LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "quadratic": lambda t: (t * t - 1.0) / 2.0**0.5,
    "relu": lambda t: t.clamp_min(0.0) * 2.0**0.5,
    "sign": torch.sign,
    "sine": torch.sin,
    "cosine": torch.cos,
}


@dataclass(frozen=True, eq=False, init=False)
class SingleIndexTask:
    """Nonlinear regression: w ~ N(0, W), x ~ N(0, Sigma), y = link(<w, x>) + N(0, noise).

    ``link``: one of ``LINKS`` or a function of a tensor. Given w the tokens are not Gaussian, so no
    closed form applies.
    """

    sigma: Float64[Tensor, "d d"]
    link: str | Callable[[Tensor], Tensor]
    task_cov: Float64[Tensor, "d d"]
    noise: float
    # the same task with the identity for a link and no noise
    linear: LinearTask = field(repr=False)

    def __init__(
        self, sigma: Any, link: Any = "quadratic", task_cov: Any = None, noise: Any = 0.1
    ) -> None:
        if not callable(link) and link not in LINKS:
            raise ValueError(
                f"link: expected one of {', '.join(LINKS)} or a function, got {link!r}"
            )
        linear = LinearTask(sigma, task_cov, 0.0)
        _set(self, sigma=linear.sigma, link=link, task_cov=linear.task_cov)
        _set(self, noise=_variance(noise), linear=linear)

    @property
    def dim(self) -> int:
        return self.linear.dim

    def sample(self, batch: Any, length: Any, generator: torch.Generator | None = None) -> Prompts:
        link = LINKS[self.link] if isinstance(self.link, str) else self.link
        plain = self.linear.sample(batch, length, generator)
        x = torch.cat([plain.x, plain.query[:, None]], dim=1)
        index = torch.cat([plain.y, plain.target[:, None]], dim=1)
        return _label(link(index), x, self.noise, generator)


def as_task(
    covariance: str,
    dim: int,
    noise: float = 0.1,
    task_cov: Any = None,
    query_covariance: str | None = None,
) -> LinearTask:
    """The task of a covariance given in words: isotropic, kms:RHO (rho^|i-j|) or diag:A,B,...

    ``task_cov``: W, as a matrix or one of ``TASK_LAWS``; I/d unless given. ``query_covariance``: of
    the query, in words, where it differs.
    """
    if isinstance(task_cov, str) and task_cov not in TASK_LAWS:
        raise ValueError(f"task_cov: expected {', '.join(TASK_LAWS)} or a matrix, got {task_cov!r}")
    law = TASK_LAWS[task_cov](dim) if isinstance(task_cov, str) else task_cov
    query = None if query_covariance is None else _in_words(query_covariance, dim)
    return LinearTask(_in_words(covariance, dim), law, noise, query)


TASK_LAWS: dict[str, Callable[[int], Tensor]] = {
    # the experiments of [S], appendix A.1
    "scaled": lambda dim: torch.eye(dim, dtype=torch.float64) / dim,
    "identity": lambda dim: torch.eye(dim, dtype=torch.float64),  # its theory, equation (11)
}


def _in_words(covariance: str, dim: int) -> Tensor:
    """A covariance given in words."""
    name, _, numbers = covariance.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")] if numbers else []
    except ValueError as cause:
        raise ValueError(
            f"covariance: expected numbers after the colon, got {covariance!r}"
        ) from cause
    if name == "isotropic" and not values:
        return LinearTask.isotropic(dim).sigma
    if name == "kms" and len(values) <= 1:
        return LinearTask.kms(dim, values[0] if values else 0.5).sigma
    if name == "diag" and len(values) == dim:
        return torch.diag(torch.tensor(values, dtype=torch.float64))
    raise ValueError(
        f"covariance: expected isotropic, kms:RHO or diag: with {dim} numbers, got {covariance!r}"
    )


def _label(mean: Tensor, x: Tensor, noise: float, generator: torch.Generator | None) -> Prompts:
    """Add noise to the labels; the last token of each prompt becomes its query."""
    y = mean + noise**0.5 * _normal(tuple(mean.shape), generator, mean.dtype) if noise > 0 else mean
    return Prompts(x[:, :-1], y[:, :-1], x[:, -1], y[:, -1])


def _set(task: Any, **fields: Any) -> None:
    """Write the fields of a frozen dataclass once."""
    for name, value in fields.items():
        object.__setattr__(task, name, value)


def _normal(
    shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype
) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=generator)


def _variance(noise: Any) -> float:
    number = float(noise)
    if not (0 <= number < float("inf")):
        raise ValueError(
            "noise: expected the variance of the label noise, a finite number of at least 0, got"
            f" {number:g}"
        )
    return number


def _task_law(task_cov: Any, dim: int) -> tuple[Tensor, Tensor]:
    """W, which is I/d unless given, and a root of it."""
    law = TASK_LAWS["scaled"](dim) if task_cov is None else task_cov
    return _covariance(law, dim, "task_cov")


def _covariance(cov: Any, dim: int, name: str) -> tuple[Tensor, Tensor]:
    """A covariance of the size of Sigma, and a root of it."""
    checked, root = check_covariance(as_tensor(cov, name, ndim=2), name)
    if checked.shape[0] != dim:
        raise ValueError(
            f"{name}: expected a {dim} x {dim} matrix as sigma has, got shape"
            f" {tuple(checked.shape)}"
        )
    return checked, root
