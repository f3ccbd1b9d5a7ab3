"""The Monte Carlo protocol of the outputs' moments against a plain loop with the same draws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import esscher as es
from esscher.inputs import generator_for
from esscher.probe import moments
from esscher.probe.moments import WHOLE_LAYER, moment_curves, moment_ladder, moment_row
from esscher.probe.session import Session
from esscher.probe.statistic import LayerInfo
from tests.models.probe_runs import (
    captured_layers,
    few_texts,
    pooled_tensors,
    rows_of,
    source,
    tiny_model,
)

HEADS, KV_HEADS, KEYS, WIDTH, VALUE = 4, 2, 97, 5, 3
COUNTS = np.array([4, 11, 29, 64])
REPEATS, SEED = 6, 13


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(KV_HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    v = torch.randn(KV_HEADS, KEYS, VALUE, generator=generator, dtype=torch.float64) + 0.5
    return q, k, v


def by_hand(
    heads: tuple[int, ...], cap: float = math.inf, factor: float = 1.0
) -> dict[tuple[int, str], np.ndarray]:
    """Squared errors (repeats, len n): draw n tokens, softmax among them, mean and covariance of
    the n outputs.
    """
    q, k, v = (x.numpy() for x in tensors())
    scale = 0.7

    def outputs(chosen: np.ndarray, head: int) -> np.ndarray:
        own = head // 2
        scores = scale * q[head, chosen] @ k[own, chosen].T
        scores = scores if math.isinf(cap) else cap * np.tanh(scores / cap)
        scores = factor * scores
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
            drawn = torch.randint(
                KEYS, (64,), generator=generator_for("moments/3", SEED, "nested", repeat, "tokens")
            ).numpy()
            for i, n in enumerate(COUNTS):
                here = moments(drawn[:n], which)
                squares[0, repeat, i] = np.sum((here[0] - mean) ** 2)
                squares[1, repeat, i] = np.sum((here[1] - cov) ** 2)
        found[name, "mean"], found[name, "cov"] = squares
    return found


@pytest.mark.parametrize(("heads", "factor"), [((0, 1, 2, 3), 1.0), ((1, 2), 3.0)])
def test_curves_equal_a_plain_loop(heads: tuple[int, ...], factor: float) -> None:
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, tensors(), heads, COUNTS, REPEATS, SEED, factor)
    truth = by_hand(heads, factor=factor)
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
    curves = moment_curves(info, tensors(), (0, 1, 2, 3), COUNTS, REPEATS, SEED)
    total = {
        metric: sum(curves[head, metric].samples for head in range(HEADS))
        for metric in ("mean", "cov")
    }
    np.testing.assert_allclose(curves[WHOLE_LAYER, "mean"].samples, total["mean"], rtol=1e-9)
    assert (curves[WHOLE_LAYER, "cov"].samples > total["cov"]).all()
    row = moment_row(curves, WHOLE_LAYER)
    assert set(row) == {
        f"beta_{metric}{end}" for metric in ("mean", "cov") for end in ("", "_low", "_high")
    }
    assert row["beta_mean_low"] < row["beta_mean"] < row["beta_mean_high"]


def test_relative_errors_are_of_the_outputs_own_size() -> None:
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, tensors(), (2,), COUNTS, REPEATS, SEED)
    q, k, v = tensors()
    rows = (0.7 * q[2] @ k[1].T).softmax(-1) @ v[1]
    cov = torch.cov(rows.T, correction=0)
    assert curves[2, "mean"].scale == pytest.approx(
        float(rows.square().sum(1).mean().sqrt()), rel=1e-9
    )
    assert curves[2, "cov"].scale == pytest.approx(float(cov.norm()), rel=1e-9)


def test_one_repeat_has_no_standard_error_and_no_complaint() -> None:
    info = LayerInfo(3, HEADS, KV_HEADS, 0.7, None, "")
    curves = moment_curves(info, tensors(), (0,), COUNTS, 1, SEED)
    assert np.isnan(curves[0, "mean"].stderr).all()
    moment_row(curves, 0)


def test_capped_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain loop whose scores are capped in the same way; blocks of queries change
    nothing.
    """
    monkeypatch.setattr(moments, "SCORES", 211)
    curves = moment_curves(
        *(LayerInfo(3, HEADS, KV_HEADS, 0.7, 1.3, ""), tensors(), (0, 1, 2, 3), COUNTS),
        *(REPEATS, SEED, 2.0),
    )
    for key, squares in by_hand((0, 1, 2, 3), cap=1.3, factor=2.0).items():
        np.testing.assert_allclose(curves[key].samples, squares, rtol=1e-8)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (16384, [64, 128, 256, 512, 1024, 2048]),
        (2048, [64, 128, 256]),
        (10**6, [64, 128, 256, 512, 1024, 2048]),
    ],
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


def test_a_probe_has_the_moments_of_its_heads_and_of_the_layer(tmp_path: Path) -> None:
    model, words = tiny_model("llama")
    settings = {
        "max_tokens": 300,
        "window": 64,
        "queries": 6,
        "kept_queries": 2,
        "n": "16,64,256",
        "pool": "corpus",
    }
    run = es.probe(
        model,
        few_texts(),
        tokenizer=words,
        out=tmp_path,
        layers=(1,),
        moments=3,
        moments_n="8,20,50",
        **settings,
    )
    heads, layers = run.table("heads"), run.table("layers")
    names = {f"beta_{metric}{end}" for metric in ("mean", "cov") for end in ("", "_low", "_high")}
    assert names <= set(heads.columns)
    assert names <= set(layers.columns)
    curves = run.table("curves")
    moments = curves[curves["metric"].isin(["mean", "cov"])]
    assert set(moments["head"]) == {WHOLE_LAYER, 0, 1, 2, 3}
    assert set(moments["kind"]) == {"montecarlo"}
    assert (moments["stderr"] > 0).all()
    # the first n tokens of the first draws, from tensors captured window by window
    found = source(run)
    _, k, v = (x.double() for x in pooled_tensors(found, 1))
    seen = all_queries(found)
    info = LayerInfo(1, 4, 2, 8**-0.5, None, "")
    truth = moment_curves(info, (seen, k, v), (0, 1, 2, 3), np.array([8, 20, 50]), 3, 0)
    for (head, metric), curve in truth.items():
        np.testing.assert_allclose(rows_of(run, 1, head, metric)["rms"], curve.rms, rtol=1e-4)


def all_queries(found: Session) -> torch.Tensor:
    """Queries of all pooled tokens (H, N, k)."""
    seen = captured_layers(found)[1]
    return torch.cat(
        [c.query[0][:, torch.from_numpy(found.pooled[w])] for w, c in enumerate(seen)], dim=1
    ).double()
