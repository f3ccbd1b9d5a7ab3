"""Fields that the runs of the lab share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from esscher.convergence.montecarlo.spec import read_ladder

__all__ = ["Covariances", "Dim", "Lengths", "Noise", "OrderedLengths"]

LENGTHS = Field(description="prompt lengths: 10,100,1000 or 10:1e4:7")

Covariances = Annotated[
    tuple[str, ...],
    Field(min_length=1, description="of x: isotropic, kms:RHO or diag:A,B,...; several separated by spaces"),
]
Lengths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), LENGTHS]
OrderedLengths = Annotated[tuple[int, ...], BeforeValidator(lambda value: read_ladder(value, "lengths")), LENGTHS]
Dim = Annotated[int, Field(ge=1, le=4096, description="dimension of the covariates")]
Noise = Annotated[float, Field(ge=0, description="variance of the label noise")]
