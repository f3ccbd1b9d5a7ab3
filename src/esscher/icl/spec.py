"""Fields that the runs of the lab share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from esscher.convergence.montecarlo.spec import read_ladder

__all__ = [
    "Alpha",
    "Covariances",
    "Dim",
    "Lengths",
    "Noise",
    "OrderedLengths",
    "QueryInside",
    "TaskCov",
]

LENGTHS = Field(description="prompt lengths: 10,100,1000 or 10:1e4:7")
NAMED = ("scaled", "identity")


def read_task_cov(value: Any) -> Any:
    """W as a name or a matrix; a file, with a row of numbers a line, is read, so that a spec does
    not depend on it.
    """
    if not isinstance(value, str) or value in NAMED:
        return value
    try:
        lines = Path(value).read_text("utf-8").splitlines()
        rows = tuple(
            tuple(float(part) for part in line.replace(",", " ").split())
            for line in lines
            if line.strip()
        )
    except (OSError, ValueError) as cause:
        expected = f"expected {', '.join(NAMED)} or a file with a row of numbers a line"
        raise ValueError(f"task_cov: {expected}, got {value!r}: {cause}") from cause
    return rows


Covariances = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="of x: isotropic, kms:RHO or diag:A,B,...; several separated by spaces",
    ),
]
Lengths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), LENGTHS]
OrderedLengths = Annotated[
    tuple[int, ...], BeforeValidator(lambda value: read_ladder(value, "lengths")), LENGTHS
]
Dim = Annotated[int, Field(ge=1, le=4096, description="dimension of the covariates")]
Noise = Annotated[float, Field(ge=0, description="variance of the label noise")]
TaskCov = Annotated[
    str | tuple[tuple[float, ...], ...],
    BeforeValidator(read_task_cov),
    Field(
        description="of the tasks w: scaled (I/d), identity, or a file with a row of numbers a line"
    ),
]
QueryInside = Annotated[bool, Field(description="put the query's own token into its prompt")]
Alpha = Annotated[
    Annotated[float, Field(gt=0)] | None,
    Field(description="size of the first weights; by default half of Theorem 5.2's limit"),
]
