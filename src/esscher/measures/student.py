"""Student tokens: heavy tails, for which attention has no limit."""

from __future__ import annotations

from typing import Any, Literal

import scipy.special
import torch
from jaxtyping import Float64
from pydantic import PositiveFloat
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures.base import Measure, noise_device
from esscher.measures.fields import Dim, LawFields

__all__ = ["Student", "StudentFields"]


class StudentFields(LawFields):
    """Heavy tails: no limit exists, and the run says so."""

    law: Literal["student"]
    dim: Dim
    df: PositiveFloat
    scale: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Student:
        return Student(self.dim, self.df, self.scale, dtype=dtype, device=device)


class Student(Measure):
    """Multivariate Student tokens y = scale z sqrt(df / chi^2_df), z ~ N(0, I), with df degrees of
    freedom.

    E exp<theta, y> is infinite for every theta except 0, so no tilted law exists and softmax
    attention does not converge: its weight goes to the largest token, whose score grows like
    n^(1/df), and so do the outputs. Samples can be drawn; the transform and its derivatives exist
    at theta = 0 alone, the mean there for df > 1 and the covariance scale^2 df / (df - 2) I for df
    > 2.
    """

    def __init__(
        self,
        dim: Any,
        df: Any,
        scale: Any = 1.0,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(dim, dtype, device)
        self.df = as_positive(df, "df")
        self.scale = as_positive(scale, "scale")

    def _check_domain(self, rows: Float64[Tensor, "m d"]) -> None:
        worst = float(rows.detach().abs().max()) if rows.numel() else 0.0
        if worst > 0.0:
            raise ValueError(
                f"theta: a Student law (df = {self.df:g}) has a transform only at theta = 0, got"
                f" entries up to {worst:g}; it is infinite elsewhere, so attention has no limit"
            )

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return rows.new_zeros(rows.shape[0])

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        if self.df <= 1.0:
            raise ValueError(f"mean: a Student law has one for df > 1, got df = {self.df:g}")
        return torch.zeros_like(rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        if self.df <= 2.0:
            raise ValueError(
                f"cov: a Student law has a finite one for df > 2, got df = {self.df:g}"
            )
        eye = torch.eye(self.dim, dtype=torch.float64, device=rows.device)
        return (self.scale * (self.scale * (self.df / (self.df - 2.0))) * eye).expand(
            rows.shape[0], -1, -1
        )

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        noise = torch.randn(n, self.dim, dtype=torch.float64, device=device, generator=generator)
        chance = torch.rand(n, 1, dtype=torch.float64, device=device, generator=generator)
        # clamp: chance = 0 comes once in 2^53 draws and would give an infinite token
        quantile = scipy.special.gammaincinv(
            0.5 * self.df, chance.clamp_min(2.0**-54).cpu().numpy()
        )
        chi2 = 2.0 * torch.from_numpy(quantile).clamp_min(1e-300).to(device)
        return self.scale * noise * torch.sqrt(self.df / chi2)
