"""interval_probability against laws whose distribution functions are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from esscher.errors.formulas import interval_probability

LOW = torch.tensor([-3.0, 0.0, 5.0, 28.0, 60.0], dtype=torch.float64)
HIGH = torch.tensor([20.0, 28.0, 31.0, 30.0, 61.0], dtype=torch.float64)


def test_gamma_sums() -> None:
    found = interval_probability(
        lambda z: ((1 + z) ** -30)[:, None].expand(-1, 5), LOW, HIGH, 2**12
    )
    law = stats.gamma(30)
    assert found is not None
    np.testing.assert_allclose(found.numpy(), law.cdf(HIGH) - law.cdf(LOW), atol=1e-9)


def test_sums_with_far_values() -> None:
    """A tenth of the terms leave the interval by themselves: what lies beyond the period does not
    come back.
    """

    def transform(z: torch.Tensor) -> torch.Tensor:
        one = 0.9 / (1 + z) + 0.1 * torch.exp(-1000 * z) / (1 + z)
        return (one**12)[:, None].expand(-1, 5)

    law = stats.gamma(12)
    found = interval_probability(transform, LOW, HIGH, 2**12)
    assert found is not None
    np.testing.assert_allclose(found.numpy(), 0.9**12 * (law.cdf(HIGH) - law.cdf(LOW)), atol=1e-9)


@pytest.mark.parametrize("terms", [1, 3])
def test_sums_with_atoms_have_no_answer(terms: int) -> None:
    values = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    found = interval_probability(
        lambda z: (torch.exp(-z[:, None] * values).mean(1) ** terms)[:, None],
        LOW.new_tensor([0.5]),
        LOW.new_tensor([3.0]),
        2**12,
    )
    assert found is None
