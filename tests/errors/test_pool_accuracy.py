"""The accuracy that exact_pool_curve states on score grids holds: random pools, and those that once
broke it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch

from esscher.errors import pool_curve as pool_error
from esscher.errors.curve import ErrorCurve
from esscher.errors.integral import error_from_nodes
from esscher.errors.pool_curve import exact_pool_curve

MOST = 2**53
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def on_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_error, "FEW_PAIRS", -1)


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    n: list[int]
    sampling: str = "replacement"

    def curve(self) -> ErrorCurve:
        return exact_pool_curve(self.q, self.k, self.v, self.n, self.sampling, scale=1.0)

    def truth(self) -> np.ndarray:
        """Key by key in float64, which 60 digits confirm below."""
        scores = self.q.double() @ self.k.double().T
        errors = error_from_nodes(
            scores, None, self.v.double(), None, self.n, sampling=self.sampling
        )
        return np.asarray(np.sqrt(errors.mse.mean(0)))


def random_case(seed: int) -> Case:
    """Any type, 1 to 60 keys, some repeated, spans of 0 to 60 nats, values offset, tiny or
    equal.
    """
    pick = np.random.default_rng(seed)
    keys, queries, width, d_v = (
        int(pick.choice(sizes)) for sizes in ([1, 2, 3, 5, 17, 60], [1, 3], [1, 4], [1, 3])
    )
    dtype = DTYPES[seed % 4]
    q, k, v = (pick.normal(size=shape) for shape in ((queries, width), (keys, width), (keys, d_v)))
    q *= pick.choice([0, 0.1, 1, 4, 10])
    v = pick.choice([1, 1, 1e-3, 1e-10, 1e3]) * v + pick.choice([0, 0, 1, 1e4])
    if pick.random() < 0.2:
        v[:] = v[0]
    if pick.random() < 0.2:
        k = k[pick.integers(0, keys, keys)]
    if pick.random() < 0.2:
        k[0] += 3 * np.sign(q[0])
    tensors = [torch.tensor(x).to(dtype) for x in (q, k, v)]
    if pick.random() < 0.4:
        return Case(*tensors, sorted({1, keys, int(pick.integers(1, keys + 1))}), "bernoulli")
    return Case(*tensors, sorted({1, 2, int(2 ** pick.uniform(1, 53)), 9 * 10**15, MOST}))


def test_random_pools_keep_to_their_stated_accuracy() -> None:
    for seed in range(100):
        case = random_case(seed)
        curve, truth = case.curve(), case.truth()
        assert np.isfinite(curve.rms).all(), seed
        assert curve.delta is not None
        assert np.isfinite(curve.delta), seed
        assert curve.q95 is not None
        assert np.isfinite(curve.q95).all(), seed
        assert np.isfinite(curve.relative).all() or curve.scale == 0, seed
        assert (np.abs(curve.rms - truth) <= curve.accuracy * truth).all(), (
            seed,
            curve.rms,
            truth,
            curve.accuracy,
        )
        assert curve.accuracy < 1e-2, seed


def digits(case: Case) -> list[float]:
    """The root mean square error of one query by the formulas of
    esscher.errors.integral, in 60 digits.
    """
    with mpmath.workdps(60):
        return [float(mpmath.sqrt(_mean_square(case, n))) for n in case.n]


def _mean_square(case: Case, n: int) -> mpmath.mpf:
    number = mpmath.mpf
    keys, d_v = case.v.shape
    w = [number(1) / keys] * keys  # to 60 digits: phi^n tells
    scores = [
        mpmath.fsum(
            number(float(a)) * number(float(b)) for a, b in zip(case.q[0], row, strict=True)
        )
        for row in case.k
    ]
    e = [mpmath.exp(s - max(scores)) for s in scores]
    v = [[number(float(x)) for x in row] for row in case.v]
    total = mpmath.fdot(w, e)
    c = [
        [
            v[i][j] - mpmath.fsum(w[l] * e[l] * v[l][j] for l in range(keys)) / total
            for j in range(d_v)
        ]
        for i in range(keys)
    ]
    square = [mpmath.fdot(row, row) for row in c]
    if n == 1:
        return mpmath.fdot(w, square)
    step, mean = number("0.2"), number(0)
    for node in range(
        int((-mpmath.log(n) - 60) / step), int((max(scores) - min(scores) + 6) / step)
    ):
        t = mpmath.exp(node * step)
        x = [mpmath.exp(-t * y) for y in e]
        phi = mpmath.fdot(w, x)
        own = mpmath.fsum(w[i] * e[i] ** 2 * square[i] * x[i] for i in range(keys))
        cross = mpmath.fsum(
            mpmath.fsum(w[i] * e[i] * c[i][j] * x[i] for i in range(keys)) ** 2 for j in range(d_v)
        )
        mean += step * t * t * (n * own * phi ** (n - 1) + n * (n - 1) * cross * phi ** (n - 2))
    return mean


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


CASES = {
    "one key with all the weight": Case(
        column(1.0), column(0, -19.5, -46, -73), column(1.3, -0.2, 0.7, 2), [1, 10**5, 10**9, MOST]
    ),
    "a rare key that takes all": Case(
        column(1.0),
        column(30, *[2.0] * 11),
        column(-1.0, *np.linspace(1, 2, 11)),
        [1, 10**3, 10**6, MOST],
    ),
    "tiny values far from 0": Case(
        column(1.0),
        column(0, 0.4, 1, -3),
        1e4 + 1e-10 * column(3.0, -7, 12, 40),
        [1, 100, 9 * 10**15],
    ),
    "two equal keys on top": Case(
        column(2.0), column(5, 5, -20), column(0.5, 0.5 + 1e-9, 4), [1, 1000, MOST]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_against_sixty_digits(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    case = Case(case.q.to(dtype), case.k.to(dtype), case.v.to(dtype), case.n)
    curve, truth = case.curve(), np.array(digits(case))
    assert (np.abs(curve.rms - truth) <= curve.accuracy * truth).all(), (
        curve.rms / truth - 1,
        curve.accuracy,
    )
    np.testing.assert_allclose(case.truth(), truth, rtol=1e-11)


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [-1, 2**14])
def test_equal_values_have_no_error(
    sampling: str, dtype: torch.dtype, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the offset and the scores: exactly 0, and so is the relative error, on
    grids and key by key.
    """
    monkeypatch.setattr(pool_error, "FEW_PAIRS", pairs)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, 3, generator=generator, dtype=torch.float64) for rows in (4, 50))
    for size in (12345.678, 1e-3, 0.0):
        curve = exact_pool_curve(
            q.to(dtype),
            k.to(dtype),
            torch.full((50, 2), size, dtype=dtype),
            [1, 7, 50],
            sampling,
        )
        assert not curve.rms.any()
        assert not curve.relative.any()
        assert curve.delta == 0
        assert np.isfinite(curve.accuracy)


def test_the_queries_that_make_the_mean_tell_the_accuracy() -> None:
    """One query of 400 has nearly all of the error, and the grid's error is measured there."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(rows, 2, generator=generator) for rows in (400, 40, 40))
    q *= 1e-3
    q[123] = 12 * k[7]
    case = Case(q, k, v, [10**4, 10**6])
    curve, truth = case.curve(), case.truth()
    assert (np.abs(curve.rms - truth) <= curve.accuracy * truth).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_and_values_beyond_the_floating_range(dtype: torch.dtype) -> None:
    """Scores beyond float32 go key by key in float64; beyond float64, and values without squares,
    are refused.
    """
    q, k, v = (torch.ones(rows, 2, dtype=dtype) for rows in (2, 3, 3))
    k[1], v[1] = -1, 3
    curve = exact_pool_curve(1e20 * q, k, v, [1, 2, 100], scale=1e25)
    truth = exact_pool_curve(q, k, v, [1, 2, 100], scale=1e4)
    np.testing.assert_allclose(curve.rms, truth.rms, rtol=1e-10)
    with pytest.raises(ValueError, match="beyond the floating range"):
        exact_pool_curve(1e20 * q, k, v, [1], scale=1e300)
    with pytest.raises(ValueError, match="no squares in floating point"):
        exact_pool_curve(q.double(), k.double(), v.double() * 1e200, [1])
    with pytest.raises(ValueError, match="no squares in floating point"):
        exact_pool_curve(q.double(), k.double(), v.double() * 1e-200, [1])
