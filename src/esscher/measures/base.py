"""Measure: a law of tokens whose exponential tilts are known; the contract of every law."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.inputs import as_count, as_tensor, finite_result
from esscher.measures.line import Line
from esscher.measures.matrices import check_covariance, in_range, spectral_norm

if TYPE_CHECKING:  # these are laws themselves
    from esscher.measures.pool import Pool

REMEDY = "scale theta or the law down, or use float64"


class Measure(ABC):
    """Law mu of one token y in R^d, seen through its log-Laplace transform.

    K(theta) = log E exp<theta, y>;  tilted mean = grad K(theta);  tilted covariance = Hess
    K(theta): mean and covariance of y under the Esscher transform d mu_theta ~ exp<theta, y> d mu.

    A new law subclasses this, calls ``super().__init__`` and writes the four methods below the last
    line; they see float64 rows and need not check anything. Public methods take ``theta`` of shape
    (..., d), compute in float64 and answer in the dtype of ``theta``; ``mean``, ``cov`` and samples
    have the dtype and device the law was given in or on (``place`` of a constructor). Between the
    lines are facts that a law may know; what is None is not used.
    """

    is_gaussian: ClassVar[bool] = False  # the law is N(mean, cov)
    is_entire: ClassVar[bool] = False  # K is finite everywhere: no tilt need be looked at
    remedy: ClassVar[str] = REMEDY  # what to do where K is infinite

    def __init__(
        self, dim: Any, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> None:
        self.dim = as_count(dim, "dim")
        self.dtype = dtype
        self.device = torch.device(device)

    def log_laplace(self, theta: Any) -> Float[Tensor, "*batch"]:
        """K(theta), one number per row."""
        return self._of_rows(self._log_laplace, theta)

    def tilted_mean(self, theta: Any) -> Float[Tensor, "*batch d"]:
        """grad K(theta): the mean of a token under the tilted law."""
        return self._of_rows(self._tilted_mean, theta)

    def tilted_cov(self, theta: Any) -> Float[Tensor, "*batch d d"]:
        """Hess K(theta): the covariance of a token under the tilted law."""
        return self._of_rows(self._tilted_cov, theta)

    def extreme(self, theta: Any) -> Float[Tensor, "*batch d"]:
        """lim tilted_mean(c theta) as c grows without bound: where hardmax attention ends."""
        return self._of_rows(self._extreme, theta)

    def sample(self, n: Any, generator: torch.Generator | None = None) -> Float[Tensor, "n d"]:
        """n independent tokens as rows. Without a generator torch's own is used."""
        tokens = self._sample(as_count(n, "n"), generator).to(self.device)
        return self._answer("sample", tokens, self.dtype)

    @cached_property
    def mean(self) -> Float[Tensor, " d"]:
        # kept, so never without the gradient that a later caller may want
        with torch.enable_grad():
            return self._answer("mean", self.tilted_mean(self._zero), self.dtype)

    @cached_property
    def cov(self) -> Float[Tensor, "d d"]:
        with torch.enable_grad():
            return self._answer("cov", self.tilted_cov(self._zero), self.dtype)

    @cached_property
    def reach(self) -> float:
        """Spectral reach ||Sigma||_2 [B]."""
        return spectral_norm(self.cov.double())

    @cached_property
    def root(self) -> Float64[Tensor, "d d"]:
        """L with L L^T = Sigma; diagonal where Sigma is."""
        return check_covariance(self.cov, "cov")[1]

    # ---- facts a law may know

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        """The law along one tilt: sets of nodes whose weights sum to one together."""
        pool = self.as_pool()
        return None if pool is None else pool.along(theta)

    def as_pool(self) -> Pool | None:
        """The same law as tokens drawn from a list."""
        return None

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d r"] | None:
        """A proved root L of a matrix S = L L^T with E exp<theta, y - E y> <= exp(theta^T S theta /
        2) for every theta, the sub-Gaussian Sigma of [B].
        """
        return None

    @cached_property
    def sigma(self) -> float | None:
        """A sub-Gaussian parameter: E exp<theta, y - E y> <= exp(sigma^2 |theta|^2 / 2) for every
        theta [S].
        """
        root = self.subgaussian_root
        return None if root is None else spectral_norm(root)

    def support_radius(self) -> float | None:
        """A radius that |y - E y| never exceeds."""
        return None

    def norm_moment(self, order: int, V: Float64[Tensor, "d_out d"] | None = None) -> float | None:
        """E|y - E y|^order, ``order`` even, or a number above it; with V, for order 4 alone, E|V (y
        - E y)|^4.
        """
        return None

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        raise ValueError(
            f"hardmax limit: {type(self).__name__} has unbounded support, so that the largest score"
            " grows without limit, or is a mixture; use Sphere, Ball, Cube, Rademacher or Pool"
        )

    def __repr__(self) -> str:
        """The class with the numbers that the law was made with."""
        sizes = [
            f"{name}={value:g}"
            for name, value in vars(self).items()
            if name != "dim" and not name.startswith("_") and type(value) in (int, float)
        ]
        return f"{type(self).__name__}({', '.join([f'dim={self.dim}', *sizes])})"

    # ---- of use inside

    def _of_rows(self, compute: Callable[[Tensor], Tensor], theta: Any) -> Tensor:
        """``compute`` at the rows of theta in float64, in the shape and the dtype of theta."""
        given = in_range(as_tensor(theta, "theta", last=self.dim), "theta")
        rows = given.reshape(-1, self.dim).to(device=self.device, dtype=torch.float64)
        self._check_domain(rows)
        found = compute(rows)
        answer = self._answer(compute.__name__.removeprefix("_"), found, given.dtype)
        return answer.reshape(given.shape[:-1] + found.shape[1:])

    def _answer(self, name: str, result: Tensor, dtype: torch.dtype) -> Tensor:
        return finite_result(result.to(dtype), f"{type(self).__name__}.{name}", REMEDY)

    def _noise(
        self, draw: Callable[..., Tensor], n: int, width: int, generator: torch.Generator | None
    ) -> Float64[Tensor, "n width"]:
        """``torch.rand`` or ``torch.randn`` as rows, drawn where the generator lives."""
        device = self.device if generator is None else generator.device
        noise = draw(n, width, dtype=torch.float64, device=device, generator=generator)
        return noise.to(self.device)

    @property
    def _zero(self) -> Tensor:
        return torch.zeros(self.dim, dtype=torch.float64, device=self.device)

    def _times_identity(self, factor: float) -> Float64[Tensor, "d d"]:
        return factor * torch.eye(self.dim, dtype=torch.float64, device=self.device)

    def _check_domain(self, rows: Float64[Tensor, "m d"]) -> None:
        """Raise ValueError where the transform is infinite."""
        if self.is_entire:
            return
        bad = ~torch.isfinite(self._log_laplace(rows.detach()))
        if bad.any():
            raise ValueError(
                f"theta: E exp<theta, y> is infinite or beyond float64 at {int(bad.sum())} of"
                f" {len(rows)} tilts: {type(self).__name__} has no limit there; {self.remedy}"
            )

    # ---- a law writes these

    @abstractmethod
    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]: ...

    @abstractmethod
    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]: ...

    @abstractmethod
    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]: ...

    @abstractmethod
    def _sample(self, n: int, generator: torch.Generator | None) -> Float[Tensor, "n d"]: ...


def power(number: float, order: int) -> float:
    """number^order, infinite beyond float64: an upper bound, where Python raises."""
    with np.errstate(over="ignore"):
        return float(np.float64(number) ** order)
