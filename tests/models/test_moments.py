"""The Monte Carlo protocol of the outputs' moments against a plain loop with the same draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esscher.convergence.seeds import generator_for
from esscher.models.layer_state import LayerInfo
from esscher.models.moments import WHOLE_LAYER, moment_curves, moment_ladder, moment_row

HEADS, KV_HEADS, KEYS, WIDTH, VALUE = 4, 2, 97, 5, 3
COUNTS = np.array([4, 11, 29, 64])
REPEATS, SEED = 6, 13


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(KV_HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    v = torch.randn(KV_HEADS, KEYS, VALUE, generator=generator, dtype=torch.float64) + 0.5
    return q, k, v


def by_hand(heads: tuple[int, ...]) -> dict[tuple[int, str], np.ndarray]:
    """Squared errors (repeats, len n): draw n tokens, softmax among them, mean and covariance of the n outputs."""
    q, k, v = (x.numpy() for x in tensors())
    scale = 0.7

    def outputs(chosen: np.ndarray, head: int) -> np.ndarray:
        own = head // 2
        scores = scale * q[head, chosen] @ k[own, chosen].T
        p = np.exp(scores - scores.max(1, keepdims=True))
        return (p / p.sum(1, keepdims=True)) @ v[own, chosen]

    def moments(chosen: np.ndarray, which: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.concatenate([outputs(chosen, head) for head in which], axis=1)
        return rows.mean(0), np.cov(rows.T, bias=True)

    groups = {**{head: (head,) for head in heads}, WHOLE_LAYER: heads}
    found: dict[tuple[int, str], np.ndarray] = {}
    for name, which in groups.items():
        mean, cov = moments(np.arange(KEYS), which)
        squares = np.empty((2, REPEATS, len(COUNTS)))
        for repeat in range(REPEATS):
            drawn = torch.randint(KEYS, (64,), generator=generator_for("moments/3", SEED, "nested", repeat, "tokens")).numpy()
            for i, n in enumerate(COUNTS):
                here = moments(drawn[:n], which)
                squares[0, repeat, i] = np.sum((here[0] - mean) ** 2)
                squares[1, repeat, i] = np.sum((here[1] - cov) ** 2)
        found[name, "mean"], found[name, "cov"] = squares
    return found


@pytest.mark.parametrize("heads", [(0, 1, 2, 3), (1, 2)])
def test_curves_equal_a_plain_loop(heads: tuple[int, ...]) -> None:
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, *tensors(), heads, COUNTS, REPEATS, SEED)
    truth = by_hand(heads)
    assert curves.keys() == truth.keys()
    for key, squares in truth.items():
        curve = curves[key]
        np.testing.assert_allclose(curve.samples, squares, rtol=1e-8)
        np.testing.assert_allclose(curve.rms, np.sqrt(squares.mean(0)), rtol=1e-8)
        error = squares.std(0, ddof=1) / math.sqrt(REPEATS) / (2 * np.sqrt(squares.mean(0)))
        np.testing.assert_allclose(curve.stderr, error, rtol=1e-8)
        assert curve.kind == "montecarlo"
        assert curve.metric == key[1]


def test_the_layer_is_its_heads_side_by_side() -> None:
    """Squared errors of means add up over heads; those of covariances have cross terms on top."""
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, *tensors(), (0, 1, 2, 3), COUNTS, REPEATS, SEED)
    total = {metric: sum(curves[head, metric].samples for head in range(HEADS)) for metric in ("mean", "cov")}
    np.testing.assert_allclose(curves[WHOLE_LAYER, "mean"].samples, total["mean"], rtol=1e-9)
    assert (curves[WHOLE_LAYER, "cov"].samples > total["cov"]).all()
    row = moment_row(curves, WHOLE_LAYER)
    assert set(row) == {f"beta_{metric}{end}" for metric in ("mean", "cov") for end in ("", "_low", "_high")}
    assert row["beta_mean_low"] < row["beta_mean"] < row["beta_mean_high"]


def test_relative_errors_are_of_the_outputs_own_size() -> None:
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, *tensors(), (2,), COUNTS, REPEATS, SEED)
    q, k, v = tensors()
    rows = (0.7 * q[2] @ k[1].T).softmax(-1) @ v[1]
    cov = torch.cov(rows.T, correction=0)
    assert curves[2, "mean"].scale == pytest.approx(float(rows.square().sum(1).mean().sqrt()), rel=1e-9)
    assert curves[2, "cov"].scale == pytest.approx(float(cov.norm()), rel=1e-9)


def test_one_repeat_has_no_standard_error_and_no_complaint() -> None:
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, *tensors(), (0,), COUNTS, 1, SEED)
    assert np.isnan(curves[0, "mean"].stderr).all()
    moment_row(curves, 0)


def test_capped_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="without --moments"):
        moment_curves(LayerInfo(3, HEADS, KV_HEADS, 0.7, 5.0, ""), *tensors(), (0,), COUNTS, REPEATS, SEED)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(16384, [64, 128, 256, 512, 1024, 2048]), (2048, [64, 128, 256]), (10**6, [64, 128, 256, 512, 1024, 2048])],
)
def test_ladder_ends_at_an_eighth_of_the_pool(keys: int, expected: list[int]) -> None:
    assert moment_ladder(None, keys).tolist() == expected


def test_ladder_of_small_pools_and_given_ones() -> None:
    small = moment_ladder(None, 300)
    assert small[0] == 4
    assert small[-1] == 37
    assert len(small) >= 3
    assert moment_ladder((5, 7), 10).tolist() == [5, 7]
    with pytest.raises(ValueError, match="the pool has 10 keys, got n = 11"):
        moment_ladder((5, 11), 10)
