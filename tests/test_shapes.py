"""Annotated shapes are checked while testing, and cost nothing outside."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import esscher as es


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(3, dtype=torch.float64),  # an axis is missing
        torch.zeros(2, 5, 3, dtype=torch.float64),  # one too many
        torch.zeros(5, 3, dtype=torch.float32),  # not float64
    ],
)
def test_a_wrong_shape_is_caught_here(rows: torch.Tensor) -> None:
    with pytest.raises(TypeCheckError):
        es.Gaussian(torch.eye(3, dtype=torch.float64))._tilted_mean(rows)


def test_the_right_shape_passes() -> None:
    rows = torch.zeros(5, 3, dtype=torch.float64)
    assert es.Gaussian(torch.eye(3, dtype=torch.float64))._tilted_mean(rows).shape == (5, 3)


def test_nothing_is_checked_outside_the_tests() -> None:
    program = (
        "import sys, esscher; sys.exit('beartype' in sys.modules or hasattr(esscher.limit,"
        " '__wrapped__'))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert hasattr(es.limit, "__wrapped__")


def test_numba_compiles_what_is_checked() -> None:
    @jaxtyped(typechecker=beartype)
    def double(x: float) -> float:
        return 2 * x

    assert numba.njit(double)(3.0) == 6.0
    assert numba.njit(nogil=True)(double)(3.0) == 6.0
