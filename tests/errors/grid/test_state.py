"""Splines, deposits and the streaming state: exact where they claim to be, and as accurate as they
say elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors import scatter
from esscher.errors.grid import Deposit, Grid, choose_grid, finish, init, merge, update
from esscher.errors.integral import error_from_nodes
from esscher.errors.scatter import (
    coarsen,
    exponential_gain,
    interpolation_error,
    scatter_compiled,
    scatter_tensors,
    spline_coefficients,
    weight_table,
)

POINTS = [4, 8]
DRAWN = np.array([1, 2, 7, 100, 3000, 10**6, 10**10])
KEPT = np.array([1, 2, 30, 200, 380, 399, 400])


def exact_spline(points: int, x: Fraction) -> Fraction:
    """beta(x) = sum_k (-1)^k C(points, k) (x - k)_+^(points-1) / (points-1)!, in whole numbers."""
    powers = (
        Fraction((-1) ** k * math.comb(points, k)) * (x - k) ** (points - 1)
        for k in range(points + 1)
        if k < x
    )
    return sum(powers, Fraction(0)) / math.factorial(points - 1)


@pytest.mark.parametrize("points", POINTS)
def test_weights_are_the_b_spline(points: int) -> None:
    for r in (Fraction(0), Fraction(5, 16), Fraction(1, 2), Fraction(1023, 1024)):
        weights = weight_table(points) @ float(r) ** np.arange(points)
        expected = [float(exact_spline(points, r + points - 1 - tap)) for tap in range(points)]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-15)
        assert weights.sum() == pytest.approx(1, abs=1e-14)


def represent(points: int, spacing: float, kernel: Any, u: np.ndarray) -> np.ndarray:
    """The kernel at u through its B-spline coefficients."""
    cell = np.floor(u / spacing).astype(int)
    first, last = int(cell.min()) - points + 1, int(cell.max())
    centres = (torch.arange(first, last + 1, dtype=torch.float64) + points / 2) * spacing
    found = spline_coefficients(
        lambda x: {"one": ("mass", torch.from_numpy(kernel(x.numpy()))[None])},
        centres,
        points,
        spacing,
    )
    coefficients = found["one"][1].numpy()[:, 0]
    weights = ((u / spacing - cell)[:, None] ** np.arange(points)) @ weight_table(points).T
    places = cell[:, None] - (points - 1) + np.arange(points) - first
    return (weights * coefficients[places]).sum(1)


@pytest.mark.parametrize("points", POINTS)
def test_polynomials_are_represented_exactly(points: int) -> None:
    u = np.linspace(-1, 1, 41)
    for degree in range(points):
        np.testing.assert_allclose(
            represent(points, 1 / 8, lambda x, k=degree: x**k, u), u**degree, atol=1e-11
        )


@pytest.mark.parametrize(("points", "ratio"), [(4, 16), (8, 256)])
def test_order_of_interpolation(points: int, ratio: int) -> None:
    """Halving the spacing divides the error by 2^points, and the estimate of its size is right
    within a factor of 4.
    """

    def kernel(x: np.ndarray) -> np.ndarray:
        return np.exp(2 * x - np.exp(x))

    u = np.linspace(-3, 3, 600)
    coarse, fine = (
        np.abs(represent(points, h, kernel, u) - kernel(u)).max() for h in (1 / 4, 1 / 8)
    )
    assert 0.5 * ratio < coarse / fine < 5 * ratio
    assert fine < 30 * interpolation_error(points, 1 / 8, np.pi / 2)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_exponentials_have_exact_coefficients(points: int, rate: float) -> None:
    centres = torch.arange(-40, 1, dtype=torch.float64) / 8
    found = spline_coefficients(
        lambda x: {"one": ("mass", torch.exp(rate * x)[None])}, centres, points, 1 / 8
    )
    exact = torch.exp(rate * centres) / exponential_gain(points, rate / 8)
    torch.testing.assert_close(found["one"][1][:, 0], exact, rtol=1e-12, atol=1e-16)


def keys(
    seed: int, queries: int, count: int, width: int, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Scores (queries, count) and values (count, width)."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(queries, count, generator=generator, dtype=torch.float64)
    return scores, torch.randn(count, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("queries", "count", "channels"), [(1, 1, 1), (3, 517, 13), (37, 1031, 5)])
def test_compiled_and_tensor_scatter_agree(
    points: int, dtype: torch.dtype, queries: int, count: int, channels: int
) -> None:
    scores, rows = keys(1, queries, count, channels, 2.0)
    scores = scores.to(dtype)
    first = (scores.amin(1).double() * 8).floor().long() - (points - 1) - torch.arange(queries) % 3
    length = int((scores.amax(1).double() * 8).floor().long().sub(first).max()) + 1
    compiled, tensors = (
        torch.ones(channels, queries, length, dtype=torch.float64) for _ in range(2)
    )
    scatter_compiled(scores, rows, first, compiled, 1 / 8, points)
    scatter_tensors(scores, rows, first, tensors, 1 / 8, points)
    torch.testing.assert_close(compiled, tensors, rtol=0, atol=1e-12)
    # B-splines keep the sum and the first moment of what they spread
    compiled -= 1
    torch.testing.assert_close(
        compiled.sum(2), rows.sum(0)[:, None].expand(-1, queries), rtol=0, atol=1e-11
    )
    centres = (first[:, None] + torch.arange(length) + points / 2) / 8
    torch.testing.assert_close(
        (compiled * centres).sum(2), (scores.double() @ rows).T, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
@pytest.mark.parametrize("work", [scatter_compiled, scatter_tensors])
def test_keys_that_a_query_does_not_see_leave_no_trace(
    sampling: str, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query beside a state of its own over the keys it sees; the last sees nothing of the
    first block.
    """
    monkeypatch.setattr(deposit, "scatter", work)
    scores, values = keys(7, 5, 700, 3, 3.0)
    seen = torch.rand(5, 700, generator=torch.Generator().manual_seed(8)) < 0.6
    seen[4, :350] = False
    grid = choose_grid(torch.float64, sampling)
    together = init(5, grid, values[0])
    for part in (slice(0, 350), slice(350, None)):
        together = update(
            together, scores[:, part].masked_fill(~seen[:, part], -torch.inf), values[part]
        )
    for i in range(5):
        alone = update(init(1, grid, values[0]), scores[i : i + 1, seen[i]], values[seen[i]])
        own = deposit.take(together, torch.tensor([i])).source
        assert int(together.keys[i]) == int(seen[i].sum())
        torch.testing.assert_close(own.limit, alone.source.limit, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(own.delta, alone.source.delta, rtol=1e-11, atol=0)


def test_the_device_chooses_the_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(scatter, "scatter_compiled", lambda *_: called.append("compiled"))
    monkeypatch.setattr(scatter, "scatter_tensors", lambda *_: called.append("tensors"))
    for device in ("cpu", "meta"):
        some = torch.zeros(1, 1, device=device)
        scatter.scatter(
            some,
            some,
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1, 1, 9, device=device),
            0.125,
            4,
        )
    assert called == ["compiled", "tensors"]


@pytest.mark.parametrize("points", POINTS)
def test_coarser_deposits_are_exact(points: int) -> None:
    scores, values = keys(2, 3, 40, 2, 2.0)
    fine = update(init(3, Grid(1 / 16, points, 1e-6), torch.zeros(2)), scores, values)
    coarse = update(init(3, Grid(1 / 8, points, 1e-6), torch.zeros(2)), scores, values)
    made = coarsen(fine.cells, points)
    # both end where 2 * end(1/8) = end(1/16) rounded up; compare from the top of what both hold
    shift = (coarse.end - fine.end // 2).tolist()
    for i, extra in enumerate(shift):
        ours, theirs = made[:, i], coarse.cells[:, i]
        top = theirs[:, : theirs.shape[1] - extra] if extra else theirs
        size = min(ours.shape[1], top.shape[1])
        torch.testing.assert_close(ours[:, -size:], top[:, -size:], rtol=0, atol=1e-13)
        assert float(theirs[:, theirs.shape[1] - extra :].abs().sum()) == 0


def state_of(scores: Tensor, values: Tensor, grid: Grid, center: Tensor) -> Deposit:
    return update(init(scores.shape[0], grid, center), scores, values)


def same(a: Deposit, b: Deposit) -> None:
    for sampling, n in (
        ("replacement", DRAWN),
        ("bernoulli", np.array([1, 5, int(a.keys[0]) - 1, int(a.keys[0])])),
    ):
        x, y = finish(a, n, sampling, details=True), finish(b, n, sampling, details=True)
        np.testing.assert_allclose(x.mse, y.mse, rtol=1e-12, atol=1e-25)
        np.testing.assert_allclose(x.sum_p2, y.sum_p2, rtol=1e-12)
        np.testing.assert_allclose(x.limit, y.limit, rtol=0, atol=1e-12)
        assert x.bias is not None
        assert y.bias is not None
        np.testing.assert_allclose(x.bias, y.bias, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 60), min_size=0, max_size=4), st.integers(0, 2**31), st.booleans())
def test_any_split_and_order_give_the_same(cuts: list[int], seed: int, apart: bool) -> None:
    """Keys in any order, in any blocks, streamed or merged from the right or from the left."""
    scores, values = keys(3, 2, 60, 3, 4.0)
    grid, center = Grid(1 / 8, 8, 1e-10), torch.zeros(3, dtype=torch.float64)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    bounds = [0, *sorted(cuts), 60]
    blocks = [order[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    whole = state_of(scores, values, grid, center)
    if apart:
        parts = [state_of(scores[:, rows], values[rows], grid, center) for rows in blocks]
        made = parts[-1]
        for part in reversed(parts[:-1]):
            made = merge(part, made)
    else:
        made = init(2, grid, center)
        for rows in blocks:
            made = update(made, scores[:, rows], values[rows])
    assert torch.equal(made.keys, whole.keys)
    assert torch.equal(made.end, whole.end)
    torch.testing.assert_close(made.cells, whole.cells, rtol=0, atol=1e-12)


def test_results_of_split_states_agree() -> None:
    scores, values = keys(4, 5, 300, 3, 3.0)
    grid, center = choose_grid(torch.float64, "bernoulli"), values.mean(0)
    whole = state_of(scores, values, grid, center)
    a, b, c = (state_of(scores[:, i::3], values[i::3], grid, center) for i in range(3))
    same(merge(merge(a, b), c), whole)
    same(merge(a, merge(c, b)), whole)


def test_merging_states_with_other_centres_and_without_keys() -> None:
    scores, values = keys(5, 2, 80, 3)
    values = values + 5
    grid = Grid(1 / 8, 8, 1e-10)
    whole = state_of(scores, values, grid, values.mean(0))
    parts = [state_of(scores[:, i::2], values[i::2], grid, values[7 * i]) for i in range(2)]
    same(merge(*parts), whole)
    nothing = init(2, grid, values.mean(0))
    same(merge(nothing, whole), whole)
    same(merge(whole, nothing), whole)
    assert merge(nothing, nothing).keys.tolist() == [0, 0]


def pool(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """400 keys of five queries: flat, ordinary or sharp scores, the last two with a key that takes
    nearly all.
    """
    spread = {"flat": 1e-12, "ordinary": 2.0, "sharp": 7.0}[kind]
    scores, values = keys(6, 5, 400, 3, spread)
    values[0] += 10
    if kind != "flat":
        scores[0, 0] = scores[0].max() + 8
    return scores.to(dtype), (values + 30).to(dtype)


@pytest.mark.parametrize("sampling", ["replacement", "bernoulli"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["flat", "ordinary", "sharp"])
def test_finish_against_the_sum_over_keys(kind: str, dtype: torch.dtype, sampling: str) -> None:
    scores, values = pool(kind, dtype)
    n = DRAWN if sampling == "replacement" else KEPT
    truth = error_from_nodes(scores, None, values, None, n, sampling=sampling, details=True)
    state = state_of(scores, values, choose_grid(dtype, sampling), values.mean(0))
    result = finish(state, n, sampling, details=True)
    tolerance = 1e-8 if dtype == torch.float64 else 5e-5
    np.testing.assert_allclose(result.mse, truth.mse, rtol=tolerance)
    np.testing.assert_allclose(result.sum_p2, truth.sum_p2, rtol=tolerance)
    np.testing.assert_allclose(result.delta, truth.delta, rtol=tolerance)
    np.testing.assert_allclose(result.limit, truth.limit, atol=tolerance / 10)
    size = np.sqrt(truth.mse.max())
    assert result.bias is not None
    assert truth.bias is not None
    np.testing.assert_allclose(result.bias, truth.bias, atol=tolerance * size)
    slopes = np.isfinite(truth.dmse_dlogn)
    np.testing.assert_allclose(
        result.dmse_dlogn[slopes],
        truth.dmse_dlogn[slopes],
        rtol=50 * tolerance,
        atol=1e-6 * tolerance,
    )
    # the accuracy it states: never too good, and good enough
    wrong = truth.mse.sum(0) > 0
    error = np.abs(np.sqrt(result.mse.sum(0)[wrong] / truth.mse.sum(0)[wrong]) - 1).max()
    assert error <= result.accuracy <= tolerance


@pytest.mark.parametrize(
    "grid", [Grid(1 / 8, 4, 1e-11), Grid(1 / 16, 4, 1e-11), Grid(1 / 8, 8, 1e-11)]
)
def test_stated_accuracy_follows_the_grid(grid: Grid) -> None:
    """With the quadrature out of the way: between the true error and a hundred times it."""
    scores, values = pool("ordinary", torch.float64)
    truth = error_from_nodes(scores, None, values, None, DRAWN)
    result = finish(state_of(scores, values, grid, values.mean(0)), DRAWN)
    error = np.abs(np.sqrt(result.mse.sum(0) / truth.mse.sum(0)) - 1).max()
    assert error <= result.accuracy <= 100 * error


@pytest.mark.parametrize("kept", [250, 390, 399])
def test_a_fraction_near_one_has_sharp_kernels(kept: int) -> None:
    """One key of nearly all weight, and a grid that would be fine enough for a small fraction
    only.
    """
    scores, values = pool("sharp", torch.float64)
    truth = error_from_nodes(scores, None, values, None, [kept], sampling="bernoulli")
    grid = choose_grid(torch.float64, "bernoulli")
    result = finish(state_of(scores, values, grid, values.mean(0)), np.array([kept]), "bernoulli")
    np.testing.assert_allclose(result.mse, truth.mse, rtol=1e-8)


def test_memory_does_not_grow_with_keys() -> None:
    scores, values = keys(9, 2, 4000, 1)
    state = init(2, Grid(1 / 8, 4, 1e-6), torch.zeros(1))
    sizes = []
    for i in range(0, 4000, 500):
        state = update(state, scores[:, i : i + 500].clamp(-2, 2), values[i : i + 500])
        sizes.append(state.cells.numel())
    assert len(set(sizes)) == 1


def test_update_leaves_the_old_state_alone() -> None:
    scores, values = keys(10, 2, 30, 1)
    state = state_of(scores, values, Grid(1 / 8, 4, 1e-6), torch.zeros(1))
    before = state.cells.clone()
    update(state, scores, values)
    assert torch.equal(state.cells, before)


def test_bad_states_are_refused() -> None:
    grid = Grid(1 / 8, 4, 1e-6)
    state = init(2, grid, torch.zeros(1))
    with pytest.raises(ValueError, match="no key"):
        finish(state, DRAWN)
    with pytest.raises(ValueError, match="wider than the grid"):
        update(state, torch.tensor([[0.0, 600.0], [0.0, 1.0]]), torch.zeros(2, 1))
    for other in (init(3, grid, torch.zeros(1)), init(2, Grid(1 / 16, 4, 1e-6), torch.zeros(1))):
        with pytest.raises(ValueError, match="one grid and the same queries"):
            merge(state, other)
    assert deposit.reach(state, torch.tensor([[0.0, 600.0]])).cells > deposit.MAX_CELLS


@pytest.mark.parametrize("size", [1e15, 1e30, float("inf"), float("nan")])
def test_scores_without_cell_numbers_are_refused(size: float) -> None:
    state = deposit.init(2, deposit.choose_grid(torch.float64, "replacement"), torch.zeros(3))
    with pytest.raises(ValueError, match="scores: expected numbers below 1e\\+12 in size"):
        deposit.update(state, torch.full((2, 5), size, dtype=torch.float64), torch.ones(5, 3))


def test_keys_taken_out_again() -> None:
    """What is left is the state over the others."""
    generator = torch.Generator().manual_seed(8)
    scores = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    values = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    grid = deposit.choose_grid(torch.float64, "bernoulli")
    everything = deposit.update(deposit.init(3, grid, torch.zeros(2)), scores, values)
    gone = scores.clone()
    gone[:, 4:] = -torch.inf
    gone[1, 0] = -torch.inf  # one query keeps one of them
    left = scores.masked_fill(gone > -torch.inf, -torch.inf)
    others = deposit.update(deposit.init(3, grid, torch.zeros(2)), left, values)
    found = deposit.without(everything, gone, values)
    assert torch.equal(found.keys, others.keys)
    none = deposit.without(everything, scores, values)  # in the frame of all keys
    expected = deposit.merge(others, none).cells
    torch.testing.assert_close(found.cells, expected, rtol=0, atol=1e-13)


def test_deposits_do_not_wait_for_the_collector_of_cycles() -> None:
    """A probe makes thousands of them, too few objects for a collection and too many bytes to
    keep.
    """
    state = update(
        init(2, choose_grid(torch.float64, "bernoulli"), torch.zeros(3)),
        torch.randn(2, 50),
        torch.randn(50, 3),
    )
    source = state.source
    source.coarser(2)
    gone = weakref.ref(source)
    gc.disable()
    try:
        del source, state
        assert gone() is None
    finally:
        gc.enable()
