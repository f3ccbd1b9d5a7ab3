"""exact_pool_curve: against enumeration, the sum over keys, simulation, closed cases; and what it
refuses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors import pool_curve as pool_error
from esscher.errors.integral import error_from_nodes
from esscher.errors.pool_curve import exact_pool_curve
from esscher.errors.scatter import scatter_tensors
from tests.attention.reference import softmax_attention
from tests.errors.pools import by_sequences, by_subsets


def tokens(
    seed: int, m: int, keys: int, width: int = 4, d_v: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        for rows, columns in ((m, width), (keys, width), (keys, d_v))
    )


@pytest.mark.parametrize("scale", [None, 2.0])
def test_all_sequences(scale: float | None) -> None:
    """Three keys, three draws: 27 sequences."""
    q, k, v = tokens(1, 2, 3)
    curve = exact_pool_curve(q, k, v, [1, 2, 3], scale=scale, details=True)
    scores = (q @ k.T).numpy() * (0.5 if scale is None else scale)
    queries = curve.queries
    assert queries is not None
    assert queries.bias is not None
    for i, j in np.ndindex(2, 3):
        truth = by_sequences(scores[i], v.numpy(), j + 1)
        assert queries.mse[i, j] == pytest.approx(truth.mse, rel=1e-11)
        assert queries.sum_p2[i, j] == pytest.approx(truth.sum_p2, rel=1e-11)
        assert queries.bias[i, j] == pytest.approx(truth.bias, abs=1e-12)
    assert exact_pool_curve(q, k, v, [2]).queries.bias is None  # type: ignore[union-attr]


def test_all_subsets() -> None:
    """Every subset of eight keys; the empty one counts as no error."""
    q, k, v = tokens(2, 2, 8)
    curve = exact_pool_curve(q, k, v, np.arange(1, 9), "bernoulli", details=True)
    queries = curve.queries
    assert queries is not None
    assert queries.bias is not None
    for i, count in np.ndindex(2, 8):
        truth = by_subsets((q @ k.T).numpy()[i] / 2, v.numpy(), (count + 1) / 8)
        assert queries.mse[i, count] == pytest.approx(truth.mse, rel=1e-11, abs=1e-25)
        assert queries.sum_p2[i, count] == pytest.approx(truth.sum_p2, rel=1e-11)
        assert queries.bias[i, count] == pytest.approx(truth.bias, abs=1e-11)
    assert curve.rms[-1] == 0


def test_slope_of_kept_keys() -> None:
    """Against differences of the enumeration in log f; at n = N the error is 0 and has no slope."""
    q, k, v = tokens(3, 1, 7)
    curve = exact_pool_curve(q, k, v, [1, 3, 6, 7], "bernoulli")
    h = 1e-3
    scores = (q @ k.T).numpy()[0] / 2
    assert curve.slope is not None
    for slope, count in zip(curve.slope, (1, 3, 6), strict=False):
        shares = [count / 7 * math.exp(step * h) for step in (-2, -1, 1, 2)]
        logs = [0.5 * math.log(by_subsets(scores, v.numpy(), f).mse) for f in shares]
        assert slope == pytest.approx(
            (logs[0] - 8 * logs[1] + 8 * logs[2] - logs[3]) / (12 * h), rel=1e-8
        )
    assert math.isnan(curve.slope[3])


def test_fields_of_the_curve() -> None:
    q, k, v = tokens(4, 5, 40)
    n = np.array([1, 10, 1000, 10**9])
    curve = exact_pool_curve(q, k, v, n)
    queries = curve.queries
    assert queries is not None
    np.testing.assert_array_equal(curve.n, n)
    np.testing.assert_allclose(curve.rms**2, queries.mse.mean(0), rtol=1e-14)
    np.testing.assert_allclose(queries.limit, softmax_attention(q, k, v), atol=1e-13)
    assert curve.scale == pytest.approx(math.sqrt((queries.limit**2).sum(1).mean()))
    assert curve.q95 is not None
    np.testing.assert_allclose(
        curve.q95, np.quantile(np.sqrt(queries.mse), 0.95, axis=0), rtol=0.02
    )
    assert curve.effective_tokens is not None
    np.testing.assert_allclose(curve.effective_tokens, 1 / queries.sum_p2.mean(0), rtol=1e-14)
    assert (curve.kind, curve.metric) == ("exact", "l2")
    assert "40 keys drawn with replacement" in curve.origin
    assert 0 < curve.accuracy < 1e-11
    assert not curve.stderr.any()
    # delta method
    assert curve.delta == pytest.approx(1e9 * curve.rms[3] ** 2, rel=1e-6)
    assert curve.slope is not None
    assert curve.slope[3] == pytest.approx(-0.5, abs=1e-6)
    # one draw
    error = v[None] - softmax_attention(q, k, v)[:, None]
    np.testing.assert_allclose(queries.mse[:, 0], error.square().sum(2).mean(1), rtol=1e-13)


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_grid_against_keys(sampling: str, dtype: torch.dtype, tolerance: float) -> None:
    """Enough pairs for the grid, against the sum over keys in float64; the stated accuracy
    holds.
    """
    q, k, v = tokens(5, 26 if sampling == "replacement" else 6, 701, 8, 5)
    q = 3 * q
    n = np.array([1, 3, 30, 200, 700])
    truth = error_from_nodes((q @ k.T) / 8**0.5, None, v, None, n, sampling=sampling)
    curve = exact_pool_curve(*(x.to(dtype) for x in (q, k, v)), n, sampling, details=True)
    assert curve.queries is not None
    np.testing.assert_allclose(curve.queries.mse, truth.mse, rtol=tolerance)
    error = np.abs(curve.rms / np.sqrt(truth.mse.mean(0)) - 1).max()
    assert error <= curve.accuracy <= tolerance
    np.testing.assert_allclose(curve.queries.limit, truth.limit, atol=tolerance)


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
def test_blocks_change_nothing(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of keys and the path of other devices: one result to 1e-12. Halves of the queries:
    other nodes, so 1e-9.
    """
    q, k, v = tokens(6, 9, 2003)
    n = [1, 40, 2000]
    curve = exact_pool_curve(q, k, v, n, sampling, details=True)
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(pool_error, "BLOCK", 257)
        made.append((exact_pool_curve(q, k, v, n, sampling, details=True), 1e-12))
    with monkeypatch.context() as patch:
        patch.setattr(deposit, "scatter", scatter_tensors)
        made.append((exact_pool_curve(q, k, v, n, sampling, details=True), 1e-12))
    with monkeypatch.context() as patch:
        patch.setattr(pool_error, "MEMORY", 2000)
        made.append((exact_pool_curve(q, k, v, n, sampling, details=True), 1e-9))
    assert curve.queries is not None
    for other, tolerance in made:
        assert other.queries is not None
        np.testing.assert_allclose(other.queries.mse, curve.queries.mse, rtol=tolerance)
        np.testing.assert_allclose(other.queries.bias, curve.queries.bias, atol=tolerance)  # type: ignore[arg-type]


def test_wide_queries_go_apart_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of nine queries span 2000 nats; each row is still that of its own query."""
    q, k, v = tokens(7, 9, 2000)
    q[2] *= 400
    q[5] *= 500
    n = [1, 5, 3000]
    monkeypatch.setattr(pool_error, "BLOCK", 900)
    curve = exact_pool_curve(q, k, v, n, details=True)
    truth = error_from_nodes(q @ k.T / 2, None, v, None, n, details=True)
    assert curve.queries is not None
    np.testing.assert_allclose(curve.queries.mse, truth.mse, rtol=1e-8)
    np.testing.assert_allclose(curve.queries.bias, truth.bias, atol=1e-8)  # type: ignore[arg-type]
    np.testing.assert_allclose(curve.queries.limit, truth.limit, atol=1e-9)
    monkeypatch.setattr(deposit, "MAX_CELLS", 65)  # now every query is too wide
    np.testing.assert_allclose(
        exact_pool_curve(q[:2], k, v, n).rms ** 2, truth.mse[:2].mean(0), rtol=1e-11
    )


@pytest.mark.parametrize("keys", [1, 6, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_keys_average(keys: int, dtype: torch.dtype) -> None:
    """Variance / n drawn; with the same key everywhere the softmax is a mean."""
    q, k, v = (x.to(dtype) for x in tokens(8, 5, keys))
    n = np.array([1, 2, 50, 10**7])
    curve = exact_pool_curve(q, k[:1].expand(keys, -1), v, n)
    variance = float(v.double().var(0, correction=0).sum())
    np.testing.assert_allclose(
        curve.rms**2, variance / n, rtol=1e-4 if dtype == torch.float32 else 1e-8, atol=1e-25
    )
    if keys == 1:
        assert not curve.rms.any()
        assert exact_pool_curve(q, k, v, [1], "bernoulli").rms[0] == 0


@pytest.mark.parametrize("keys", [5, 4000])
def test_one_key_takes_all(keys: int) -> None:
    """Score range 1e4: the error is |v - v_top|^2 unless the top key is drawn, and the others are
    one key repeated.
    """
    q, k = np.ones((6, 1)), np.zeros((keys, 1))
    k[3] = 1e4
    v = np.zeros((keys, 2))
    v[3] = [3.0, 4.0]
    n = np.array([1, 2, 10, 100])
    curve = exact_pool_curve(q, k, v, n)
    np.testing.assert_allclose(curve.rms, 5 * (1 - 1 / keys) ** (n / 2), rtol=1e-8)


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
def test_simulation(sampling: str) -> None:
    """20000 repeats for one query. Two tests at three standard errors: a false alarm in about 190
    seeds.
    """
    q, k, v = tokens(10, 1, 60)
    n, repeats = 15, 20000
    generator = torch.Generator().manual_seed(11)
    scores = (2 * q @ k.T / 2)[0]
    if sampling == "replacement":
        rows = torch.randint(60, (repeats, n), generator=generator)
        outputs = (torch.softmax(scores[rows], 1)[:, None, :] @ v[rows])[:, 0]
    else:
        kept = torch.rand(repeats, 60, generator=generator) < n / 60
        outputs = torch.softmax(torch.where(kept, scores, -math.inf), 1) @ v
    error = (outputs - torch.softmax(scores, 0) @ v).square().sum(1)
    curve = exact_pool_curve(2 * q, k, v, [n], sampling)
    assert abs(float(error.mean()) - curve.rms[0] ** 2) < 3 * float(error.std()) / repeats**0.5


def test_symmetries() -> None:
    """Keys in another order, a rotation and a shift of the values, a shift of all scores."""
    q, k, v = tokens(12, 4, 30)
    n = [1, 4, 200]
    rms = exact_pool_curve(q, k, v, n).rms
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(
        torch.randn(3, 3, generator=torch.Generator().manual_seed(2)).double()
    )[0]
    for other in [(k[order], v[order]), (k, v @ rotation + 100), (k + 3, v)]:
        np.testing.assert_allclose(exact_pool_curve(q, *other, n).rms, rms, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tokens(13, 9, 2000))
    half = exact_pool_curve(q, k, v, [1, 10, 100])
    single = exact_pool_curve(q.float(), k.float(), v.float(), [1, 10, 100])
    np.testing.assert_array_equal(half.rms, single.rms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_common_offset_costs_no_digits_on_the_grid(dtype: torch.dtype) -> None:
    """Values in units of 2^-8 moved by 2^10, exact in both types; gradients are not followed."""
    q, k, v = tokens(15, 9, 2000)
    v = (v * 256).round() / 256
    moved = [x.to(dtype).requires_grad_() for x in (q, k, v + 1024)]
    here, there = (
        exact_pool_curve(q.to(dtype), k.to(dtype), v.to(dtype), [1, 9, 900]),
        exact_pool_curve(*moved, [1, 9, 900]),
    )
    np.testing.assert_allclose(there.rms, here.rms, rtol=1e-12 if dtype == torch.float64 else 1e-6)


def test_arrays_and_lists_are_taken() -> None:
    q, k, v = tokens(14, 2, 6)
    rms = exact_pool_curve(q, k, v, torch.tensor([1, 3])).rms
    np.testing.assert_array_equal(
        exact_pool_curve(q.numpy(), k.tolist(), v.numpy(), [1, 3.0]).rms, rms
    )
    np.testing.assert_array_equal(exact_pool_curve(q, k, v, 3).rms, rms[1:])


LARGE: dict[str, Any] = {"q": np.ones((9, 3)), "k": np.ones((4000, 3)), "v": np.ones((4000, 2))}
GOOD: dict[str, Any] = {
    "q": np.ones((2, 3)),
    "k": np.ones((5, 3)),
    "v": np.ones((5, 2)),
    "n": [1, 2],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": [0]}, "whole numbers"),
        ({"n": [2.5]}, "whole numbers"),
        ({"n": []}, "flat list"),
        ({"n": "ten"}, "whole numbers"),
        ({"n": [6], "sampling": "bernoulli"}, "at most 5"),
        ({"n": [4001], "sampling": "bernoulli", **LARGE}, "at most 4000"),
        ({"sampling": "bernouli"}, "sampling"),
        ({"scale": 0.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"q": np.full((2, 3), np.nan)}, "NaN"),
        ({"k": np.full((5, 3), np.inf)}, "infinite"),
        ({"q": np.ones(3)}, "2 axes"),
        ({"k": np.ones((5, 4))}, "q, k: expected rows of one width .*\\(5, 4\\)"),
        ({"v": np.ones((4, 2))}, "k, v: expected one value for each key"),
        ({"k": np.ones((0, 3)), "v": np.ones((0, 2))}, "at least one"),
        ({"q": np.ones((0, 3))}, "at least one"),
        ({"v": np.ones((5, 0))}, "at least one"),
        ({"q": torch.ones(2, 3, dtype=torch.int64)}, "floating-point"),
        ({"v": np.ones((5, 2), dtype=np.int32)}, "floating-point"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_pool_curve(**(GOOD | change))
