"""error_from_nodes and its integrals against enumeration, closed forms, differences and
simulation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import gammaincc

from esscher.errors import integral as functionals
from esscher.errors.integral import (
    KeySource,
    aliasing,
    bernoulli_errors,
    error_from_nodes,
    replacement_errors,
    step_for,
)
from tests.errors.pools import by_sequences, by_subsets, softmax


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_all_sequences(spread: float, weighted: bool) -> None:
    """Three keys far from the origin: the common offset must cost no digits."""
    random = np.random.default_rng(1)
    scores, values = spread * random.normal(size=(2, 3)) + 40, random.normal(size=(3, 2)) + 1000
    weights = np.array([0.5, 0.2, 0.3]) if weighted else None
    n = [1, 2, 3, 5]
    log_weights = None if weights is None else np.log(weights) + 7  # normalised inside
    result = error_from_nodes(scores, log_weights, values, None, n, details=True)
    assert result.bias is not None
    for i, j in np.ndindex(2, 4):
        truth = by_sequences(scores[i], values, n[j], weights)
        assert result.mse[i, j] == pytest.approx(truth.mse, rel=1e-11)
        assert result.sum_p2[i, j] == pytest.approx(truth.sum_p2, rel=1e-11)
        assert result.bias[i, j] == pytest.approx(truth.bias, abs=1e-11)


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
def test_a_common_offset_costs_no_digits(sampling: str) -> None:
    """Values in units of 2^-20, moved by 2^30 without rounding: the same errors."""
    random = np.random.default_rng(16)
    scores, values = (
        random.normal(size=(2, 20)),
        np.round(random.normal(size=(20, 3)) * 2**20) / 2**20,
    )
    here, there = (
        error_from_nodes(scores, None, values + offset, None, [1, 5, 19], sampling=sampling)
        for offset in (0, 2.0**30)
    )
    np.testing.assert_allclose(there.mse, here.mse, rtol=1e-12)


@pytest.mark.parametrize("keys", [1, 2, 7, 10])
def test_all_subsets(keys: int) -> None:
    random = np.random.default_rng(2)
    scores, values = 2 * random.normal(size=keys), random.normal(size=(keys, 3)) - 50
    n = list(range(1, keys + 1))
    result = error_from_nodes(
        scores[None], None, values, None, n, sampling="bernoulli", details=True
    )
    assert result.bias is not None
    for j, count in enumerate(n):
        truth = by_subsets(scores, values, count / keys)
        assert result.mse[0, j] == pytest.approx(truth.mse, rel=1e-11, abs=1e-25)
        assert result.sum_p2[0, j] == pytest.approx(truth.sum_p2, rel=1e-11)
        assert result.bias[0, j] == pytest.approx(truth.bias, abs=1e-11)
    assert result.mse[0, -1] == 0


def test_extra_variance_is_that_of_split_keys() -> None:
    """A key with value v and extra variance b is two keys of half its weight at v - sqrt b and v +
    sqrt b.
    """
    random = np.random.default_rng(3)
    scores, values, b = random.normal(size=(2, 5)), random.normal(size=(5, 1)), random.random(5)
    log_weights = np.log(random.random((2, 5)))
    n = [1, 2, 10, 1000]
    whole = error_from_nodes(scores, log_weights, values, b, n)
    halves = np.concatenate([values - np.sqrt(b)[:, None], values + np.sqrt(b)[:, None]])
    split = error_from_nodes(np.tile(scores, 2), np.tile(log_weights, 2), halves, None, n)
    np.testing.assert_allclose(whole.mse, split.mse, rtol=1e-12)
    np.testing.assert_allclose(whole.delta, split.delta, rtol=1e-12)
    each = error_from_nodes(scores, log_weights, np.stack([values, values]), np.stack([b, b]), n)
    np.testing.assert_allclose(whole.mse, each.mse, rtol=1e-14)


@pytest.mark.parametrize("spread", [0.0, 1e-12])
def test_equal_scores_average(spread: float) -> None:
    """MSE = variance / n and E sum p^2 = 1/n, up to the largest n there is."""
    random = np.random.default_rng(4)
    scores, values = spread * random.random((1, 30)), random.normal(size=(30, 4))
    n = np.array([1, 2, 17, 10**6, 10**12, 2**53])
    result = error_from_nodes(scores, None, values, None, n, details=True)
    np.testing.assert_allclose(result.mse[0] * n, values.var(0).sum(), rtol=1e-11)
    np.testing.assert_allclose(result.sum_p2[0] * n, 1, rtol=1e-11)
    np.testing.assert_allclose(result.dmse_dlogn[0, 1:], -result.mse[0, 1:], rtol=1e-10)
    np.testing.assert_allclose(result.delta, values.var(0).sum(), rtol=1e-11)
    assert np.abs(result.bias).max() < 1e-11


@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_far_apart_keys_are_hardmax(gap: float) -> None:
    """With scores far apart the largest key drawn takes all: P(rank r) = ((N-r)^n - (N-r-1)^n) /
    N^n, r from 0.
    """
    keys, n = 7, np.array([1, 2, 3, 20])
    values = np.random.default_rng(5).normal(size=(keys, 2))
    result = error_from_nodes(-gap * np.arange(keys)[None], None, values, None, n, details=True)
    rank = np.arange(keys)[:, None]
    chance = ((keys - rank) / keys) ** n - ((keys - rank - 1) / keys) ** n
    square = ((values - values[0]) ** 2).sum(1)
    np.testing.assert_allclose(result.mse[0], square @ chance, rtol=1e-11)
    np.testing.assert_allclose(result.bias[0], chance.T @ (values - values[0]), atol=1e-12)


def test_one_key_has_no_error() -> None:
    result = error_from_nodes([[3.0]], None, [[1.0, 2.0]], None, [1, 5, 10**9], details=True)
    assert np.abs(result.mse).max() == 0
    assert np.abs(result.bias).max() == 0
    np.testing.assert_allclose(result.sum_p2[0] * [1, 5, 10**9], 1, rtol=1e-12)


def test_repeated_keys_are_a_weight() -> None:
    random = np.random.default_rng(6)
    scores, values, times = (
        random.normal(size=(1, 4)),
        random.normal(size=(4, 2)),
        np.array([1, 3, 2, 5]),
    )
    n = [1, 4, 100]
    repeated = error_from_nodes(
        np.repeat(scores, times, axis=1), None, np.repeat(values, times, axis=0), None, n
    )
    weighted = error_from_nodes(scores, np.log(times), values, None, n)
    np.testing.assert_allclose(repeated.mse, weighted.mse, rtol=1e-12)


def test_a_key_of_weight_zero_is_absent() -> None:
    random = np.random.default_rng(7)
    scores, values = random.normal(size=(1, 5)), random.normal(size=(5, 2))
    scores[0, 2] = 900.0
    log_weights = np.array([0.0, 0.0, -np.inf, 0.0, 0.0])
    rest = [0, 1, 3, 4]
    absent = error_from_nodes(scores, log_weights, values, None, [1, 9, 1000])
    without = error_from_nodes(scores[:, rest], None, values[rest], None, [1, 9, 1000])
    np.testing.assert_allclose(absent.mse, without.mse, rtol=1e-12)
    np.testing.assert_allclose(absent.limit, without.limit, rtol=1e-12)


@pytest.mark.parametrize(
    ("n", "s", "f1", "f2"),
    [(100, 1, 0.0465884, 0.0255385), (1000, 4, 1.39157, 0.273831), (10**12, 4, 8.72e-5, 6.50e-6)],
)
def test_gaussian_scores(n: int, s: float, f1: float, f2: float) -> None:
    """Known values for standard normal scores times s; the bias is -s f2 (Stein)."""
    g = np.linspace(-14, 14, 1601)
    result = error_from_nodes(s * g[None], -g * g / 2, g[:, None], None, [n], details=True)
    assert result.mse[0, 0] == pytest.approx(f1, rel=1e-3 if n > 1000 else 1e-5)
    assert result.sum_p2[0, 0] == pytest.approx(f2, rel=1e-3 if n > 1000 else 1e-5)
    assert result.bias is not None
    assert result.bias[0, 0, 0] == pytest.approx(-s * result.sum_p2[0, 0], rel=1e-9)


@pytest.mark.parametrize("n", [1e6, 1e10, 2.0**53])
def test_bias_keeps_its_digits(n: float) -> None:
    """n E[Gamma_n - Gamma] -> -E[e^2 c] / (E e)^2, whose terms cancel to one part in n in the
    integral.
    """
    random = np.random.default_rng(8)
    scores, values = random.normal(size=10), random.normal(size=(10, 2))
    p = softmax(scores)
    bias = error_from_nodes(scores[None], None, values, None, [n], details=True).bias
    assert bias is not None
    expected = -10 * (p**2) @ (values - p @ values)
    assert n * bias[0, 0] == pytest.approx(expected, rel=10 / n + 1e-9)


@pytest.mark.parametrize("n", [1.5, 2.0, 30.0, 1e4])
def test_slope_of_draws_against_differences(n: float) -> None:
    random = np.random.default_rng(9)
    source = KeySource.build(
        *_tensors(2 * random.normal(size=(2, 40)), random.normal(size=(40, 3)))
    )
    h = 1e-4
    around = torch.tensor([n * math.exp(k * h) for k in (-2, -1, 0, 1, 2)], dtype=torch.float64)
    result = replacement_errors(source, around, step=0.25, tol=1e-14)
    mse = result.mse
    difference = (mse[:, 0] - 8 * mse[:, 1] + 8 * mse[:, 3] - mse[:, 4]) / (12 * h)
    np.testing.assert_allclose(result.dmse_dlogn[:, 2], difference, rtol=1e-8)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_slope_of_kept_keys_against_the_polynomial(n: int) -> None:
    """The mean squared error of all subsets, differenced in log f."""
    random = np.random.default_rng(10)
    scores, values = random.normal(size=7), random.normal(size=(7, 2))
    source = KeySource.build(*_tensors(scores[None], values))
    result = bernoulli_errors(source, n, 7, torch.tensor([7.0]), step=0.28, tol=1e-13)
    h = 1e-4
    around = [by_subsets(scores, values, n / 7 * math.exp(k * h)).mse for k in (-2, -1, 1, 2)]
    difference = (around[0] - 8 * around[1] + 8 * around[2] - around[3]) / (12 * h)
    assert result.dmse_dlogn[0, 0] == pytest.approx(difference, rel=1e-9)


def test_aliasing_is_reached_and_never_exceeded() -> None:
    """Equal scores are the worst case: over the phases of the lattice the error just reaches its
    bound.
    """
    values = np.random.default_rng(11).normal(size=(5, 2))
    source = KeySource.build(*_tensors(np.zeros((1, 5)), values))
    n = torch.logspace(6, 7, 60, dtype=torch.float64)
    for step in (0.5, 0.7):
        mse = replacement_errors(source, n, step=step, tol=1e-13).mse[0]
        error = np.abs(mse * n.numpy() / values.var(0).sum() - 1)
        assert 0.9 * aliasing(step) < error.max() < aliasing(step) * (1 + 1e-6) + 1e-12


def test_step_keeps_to_its_tolerance() -> None:
    for tol in (1e-4, 1e-6, 1e-12):
        assert aliasing(step_for(tol)) <= tol < aliasing(step_for(tol) + 0.0101)


@pytest.mark.parametrize("tol", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
def test_what_is_cut_off_is_within_tol(tol: float, sampling: str) -> None:
    random = np.random.default_rng(12)
    source = KeySource.build(
        *_tensors(4 * random.normal(size=(3, 60)), random.normal(size=(60, 2)))
    )
    for n in (2, 20, 59):

        def run(limit: float, n: int = n) -> Any:
            if sampling == "bernoulli":
                return bernoulli_errors(
                    source, n, 60, torch.full((3,), 60.0), step=0.25, tol=limit
                ).mse
            return replacement_errors(
                source, torch.tensor([float(n)]).double(), step=0.25, tol=limit
            ).mse

        cut = 1 - run(tol) / run(1e-14)
        assert cut.max() <= 2 * tol
        assert cut.min() >= -1e-13


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
def test_sorted_keys_give_the_same(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of wide ranges, forced on a range that the plain one can do too."""
    random = np.random.default_rng(13)
    scores, values = 60 * random.random((2, 50)), random.normal(size=(50, 3))
    scores[1, :4] += 180  # a gap longer than any kernel
    n = [1, 2, 10, 49]
    plain = error_from_nodes(scores, None, values, None, n, sampling=sampling, details=True)
    monkeypatch.setattr(functionals, "WIDE", 1.0)
    wide = error_from_nodes(scores, None, values, None, n, sampling=sampling, details=True)
    np.testing.assert_allclose(wide.mse, plain.mse, rtol=1e-11)
    np.testing.assert_allclose(wide.sum_p2, plain.sum_p2, rtol=1e-11)
    np.testing.assert_allclose(wide.dmse_dlogn, plain.dmse_dlogn, rtol=1e-9)
    np.testing.assert_allclose(wide.bias, plain.bias, atol=1e-11)


def test_groups_of_queries_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(14)
    scores, values = (
        random.normal(size=(7, 20)) * np.arange(1, 8)[:, None],
        random.normal(size=(7, 20, 2)),
    )
    scores[3] *= 1000  # one query takes the wide path, between the others
    together = error_from_nodes(scores, None, values, None, [1, 5, 50], details=True)
    monkeypatch.setattr(functionals, "ELEMENTS", 16 * 20 * 2)
    apart = [
        error_from_nodes(scores[i : i + 1], None, values[i], None, [1, 5, 50], details=True)
        for i in range(7)
    ]
    np.testing.assert_allclose(
        together.mse, np.concatenate([part.mse for part in apart]), rtol=1e-12
    )
    np.testing.assert_allclose(
        together.limit, np.concatenate([part.limit for part in apart]), rtol=1e-12
    )
    np.testing.assert_allclose(
        together.bias, np.concatenate([part.bias for part in apart]), atol=1e-13
    )


def test_simulation() -> None:
    """40000 draws of 12 of 30 keys. Three standard errors on three numbers: a false alarm in about
    120 seeds.
    """
    random = np.random.default_rng(15)
    scores, values = 1.5 * random.normal(size=30), random.normal(size=(30, 2))
    rows = random.integers(30, size=(40000, 12))
    p = np.exp(scores[rows])
    p /= p.sum(1, keepdims=True)
    error = (p[:, :, None] * values[rows]).sum(1) - softmax(scores) @ values
    exact = error_from_nodes(scores[None], None, values, None, [12], details=True)
    assert exact.bias is not None
    for sample, expected in [
        ((error**2).sum(1), exact.mse[0, 0]),
        ((p**2).sum(1), exact.sum_p2[0, 0]),
        (error[:, 0], exact.bias[0, 0, 0]),
    ]:
        assert abs(sample.mean() - expected) < 3 * sample.std() / 200


def test_gamma_tail_is_what_the_upper_bound_uses() -> None:
    """int over t > T of t e^2 exp(-te) dt = (1 + Te) exp(-Te) <= 2 exp(-Te/2), which bounds what is
    cut off above.
    """
    x = np.array([0.1, 1.0, 7.0])
    np.testing.assert_allclose((1 + x) * np.exp(-x), gammaincc(2, x), rtol=1e-13)
    x = np.linspace(0, 50, 1001)
    assert (gammaincc(2, x) <= 2 * np.exp(-x / 2)).all()


def _tensors(scores: np.ndarray, values: np.ndarray) -> tuple[torch.Tensor, ...]:
    """What KeySource.build takes, with equal weights."""
    score = torch.as_tensor(scores, dtype=torch.float64)
    value = torch.as_tensor(values, dtype=torch.float64).expand(score.shape[0], -1, -1)
    return score, torch.full_like(score, -math.log(score.shape[1])), value, torch.zeros_like(score)
