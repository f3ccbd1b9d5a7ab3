"""Largest norms and coordinates: any split in any order equals one pass over everything, verdicts
on known tokens.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from esscher.tails import extremes
from esscher.tails.extremes import Extremes

N, D = 3001, 11


def tokens(law: str, n: int = N, d: int = D, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, d, dtype=torch.float64, generator=generator)
    if law == "low rank":
        return (
            normal[:, :3] @ torch.randn(3, d, dtype=torch.float64, generator=generator)
            + 0.1 * normal
        )
    if law == "uniform":
        return torch.rand(n, d, dtype=torch.float64, generator=generator)
    if law == "student":  # one chi for each token: norms and coordinates both
        return (
            normal
            / torch.randn(n, 4, dtype=torch.float64, generator=generator)
            .square()
            .mean(1, keepdim=True)
            .sqrt()
        )
    assert law == "normal"
    return normal


def stream(rows: Tensor, cuts: list[int]) -> Extremes:
    start = extremes.init(rows.shape[1], dtype=rows.dtype)
    return functools.reduce(extremes.update, torch.tensor_split(rows, cuts), start)


def ordered(values: Tensor) -> Tensor:
    """Each list in rising order: states keep them in any."""
    return values.sort(dim=2).values


def test_splits_and_orders_agree() -> None:
    rows = 7.0 + tokens("student")
    whole = stream(rows, [])
    parts = [stream(part, []) for part in torch.tensor_split(rows, [3, 700, 701, 2000])]
    merged = functools.reduce(extremes.merge, (parts[i] for i in (4, 0, 3, 1, 2)))
    for other in (merged, stream(rows.flip(0), [17, 1999])):
        assert other.count == whole.count
        torch.testing.assert_close(other.mean, whole.mean, rtol=1e-13, atol=0)
        torch.testing.assert_close(other.square, whole.square, rtol=1e-11, atol=0)
        assert torch.equal(other.norms, whole.norms)
        assert torch.equal(ordered(other.values), ordered(whole.values))
        assert torch.equal(ordered(other.owners), ordered(whole.owners))
        for name in ("norms", "coordinates"):
            found, expected = (
                getattr(extremes.finish(other), name),
                getattr(extremes.finish(whole), name),
            )
            assert found.verdict == expected.verdict
            assert found.exceedances == expected.exceedances
            for number in ("threshold", "shape", "sigma", "ratio"):
                assert getattr(found, number) == pytest.approx(getattr(expected, number), rel=1e-9)


def test_no_value_beyond_the_threshold_is_missing() -> None:
    """One coordinate with more large values than a list holds: the threshold goes up, and all above
    it are counted.
    """
    rows = tokens("normal", 5000)
    rows[:, 4] = tokens("student", 5000, seed=5)[:, 4] ** 3
    found = extremes.finish(stream(rows, [100, 2500])).coordinates
    z = ((rows - rows.mean(0)) / rows.std(0, correction=0)).abs().numpy()
    assert found.exceedances == int((z > found.threshold).sum())
    assert found.groups == int((z > found.threshold).any(1).sum())
    norms = rows.norm(dim=1).numpy()
    of_norms = extremes.finish(stream(rows, [7])).norms
    assert of_norms.exceedances == 500
    standard = (np.sort(norms)[-501] - norms.mean()) / norms.std()
    assert of_norms.threshold == pytest.approx(standard, rel=1e-9)


@pytest.mark.parametrize(
    ("law", "verdicts"),
    [
        ("normal", {"sub-Gaussian", "undecided"}),
        ("low rank", {"sub-Gaussian", "undecided"}),
        ("uniform", {"sub-Gaussian"}),
        ("student", {"Pareto"}),
    ],
)
def test_known_tokens(law: str, verdicts: set[str]) -> None:
    tails = extremes.finish(stream(tokens(law, 16384, 48), [4096, 8192, 12288]))
    assert tails.norms.verdict in verdicts, tails.norms.reason
    assert tails.coordinates.verdict in verdicts, tails.coordinates.reason
    if law == "normal":
        assert tails.norms.sigma == pytest.approx(1.0, abs=0.1)
        assert tails.coordinates.sigma == pytest.approx(1.0, abs=0.05)


def test_dependent_coordinates_give_no_false_alarm() -> None:
    """Gaussian tokens along one direction, 48 coordinates, 60 samples: a large token is large in
    all of them. None is called

    heavier than Gaussian; with values taken as independent 4 are.
    """
    found = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        along, direction = (
            torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in ((2048, 1), (1, 48))
        )
        noise = torch.randn(2048, 48, dtype=torch.float64, generator=generator)
        found.append(
            extremes.finish(stream(along @ direction + 0.1 * noise, [])).coordinates.verdict
        )
    assert not {"Pareto", "between"} & set(found)


def test_constant_coordinates_and_few_tokens_have_no_tail() -> None:
    rows = tokens("normal")
    rows[:, 2] = 1 / 3
    assert extremes.finish(stream(rows, [])).coordinates.verdict != "unknown"
    few = extremes.finish(stream(rows[:50], []))
    assert few.norms.verdict == "unknown"
    assert math.isnan(few.norms.shape)
    same = extremes.finish(stream(torch.ones(500, 3, dtype=torch.float64), []))
    assert (same.norms.verdict, same.coordinates.verdict) == ("unknown", "unknown")


def test_repeated_tokens_are_one_witness() -> None:
    rows = tokens("student", 500).repeat(8, 1)
    found = extremes.finish(stream(rows, [1000]))
    assert found.norms.groups <= found.norms.exceedances / 8 + 1


def test_refusals() -> None:
    with pytest.raises(ValueError, match="seen no row"):
        extremes.finish(extremes.init(3))
    with pytest.raises(ValueError, match="length 3"):
        extremes.update(extremes.init(3), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="finite"):
        extremes.update(extremes.init(1), [[math.nan]])
    assert extremes.update(extremes.init(3), torch.zeros(0, 3)).count == 0
