"""k-hat against the published procedure, against maximum likelihood, and its interval's coverage;
the streaming state.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from esscher.tails import scores as khat


def pareto_khat(log_weights: Any, total: int) -> khat.TailFit:
    """k-hat of each row's ``total`` weights from the logarithms of its largest, (m, K) or (K,)."""
    rows = torch.as_tensor(np.atleast_2d(log_weights), dtype=torch.float64)
    return khat.finish(khat.TopScores(rows.shape[1], torch.full((len(rows),), total), rows))


def logs(kind: str, total: int, scale: float) -> np.ndarray:
    """Logarithms of weights at the quantiles of a law: no random numbers, so that other programs
    can be given the same.
    """
    u = (np.arange(1, total + 1) - 0.5) / total
    return scale * (
        scipy.special.ndtri(u)
        if kind == "normal"
        else -np.log1p(-u)
        if kind == "exponential"
        else u
    )


# k-hat of arviz-stats 0.8.0 for the same weights: the second result of psislw, which takes minus
# their logarithms.
PUBLISHED = [
    ("normal", 16384, 0.3, 0.011871481999022614),
    ("normal", 16384, 3.0, 0.9311513541076952),
    ("normal", 16384, 15.0, 5.072030677266219),
    ("exponential", 1000, 0.7, 0.6699004120429909),
    ("exponential", 4000, 2.0, 1.8928950804447096),
    ("uniform", 200, 1.0, -0.5874261679940429),
]


@pytest.mark.parametrize(("kind", "total", "scale", "published"), PUBLISHED)
def test_equals_the_published_procedure(
    kind: str, total: int, scale: float, published: float
) -> None:
    assert pareto_khat(logs(kind, total, scale), total).median == pytest.approx(
        published, abs=1e-12
    )


def exceedances(k: float, rows: int, tail: int, seed: int) -> np.ndarray:
    """Logarithms of 1 and of ``tail`` weights that exceed it by generalised Pareto amounts, (rows,
    tail + 1).
    """
    x = scipy.stats.genpareto.rvs(k, size=(rows, tail), random_state=seed)
    return np.log1p(np.concatenate([np.zeros((rows, 1)), x], axis=1))


@pytest.mark.parametrize("k", [0.2, 0.7, 1.3])
def test_close_to_maximum_likelihood(k: float) -> None:
    """Without the prior the two differ by far less than the estimate's own deviation, (1 +
    k)/sqrt(M).
    """
    rows = exceedances(k, 5, 384, 7)
    fit = pareto_khat(rows, 16384)
    shape = (fit.low + fit.high) / 2
    for own, row in zip(shape, rows, strict=True):
        likelihood, _, _ = scipy.stats.genpareto.fit(np.expm1(row[1:]), floc=0)
        assert abs(own - likelihood) < 0.2 * (1 + k) / math.sqrt(384)


@pytest.mark.parametrize("tail", [96, 384])
@pytest.mark.parametrize("k", [0.0, 0.3, 0.7, 1.2])
def test_coverage(k: float, tail: int) -> None:
    """1500 tails: 95 % intervals cover between 92.5 % and 97 %; the deviation of the share is 0.6
    %.
    """
    fit = pareto_khat(exceedances(k, 1500, tail, 1), (tail // 3) ** 2)
    covered = ((fit.low <= k) & (k <= fit.high)).mean()
    assert 0.925 < covered < 0.97


def test_a_known_pareto_law_from_whole_samples() -> None:
    """Pareto weights of shape k are generalised Pareto above any threshold: scores are exponential
    of mean k.
    """
    scores = torch.from_numpy(np.random.default_rng(2).exponential(0.8, size=(400, 4096)))
    fit = khat.finish(khat.update(khat.init(400, khat.tail_length(4096) + 1), scores))
    # 400 queries: deviation 1.8/sqrt(192)/20 = 0.0065, and the prior pulls by 0.015
    assert abs(fit.khat.mean() - 0.8) < 0.03
    assert fit.label == "bad"
    low, high = fit.interval
    assert low < 0.8 < high


def test_the_scale_does_not_matter_and_the_order_neither() -> None:
    rows = exceedances(0.5, 3, 192, 5)
    fit = pareto_khat(rows, 4096)
    shuffled = np.random.default_rng(0).permuted(rows, axis=1)
    np.testing.assert_allclose(pareto_khat(shuffled + 700.0, 4096).khat, fit.khat, rtol=1e-9)
    np.testing.assert_allclose(
        pareto_khat(torch.from_numpy(rows - 5000.0), 4096).khat, fit.khat, rtol=1e-9
    )


def test_gaussian_khat_is_what_gaussian_scores_show() -> None:
    """Mean k-hat of 300 samples, each deviating by about 0.09; quantiles of the law in place of a
    sample shift it a little.
    """
    for s in (0.5, 2.0, 4.0):
        scores = s * torch.randn(
            300, 8192, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
        )
        fit = khat.finish(khat.update(khat.init(300, khat.tail_length(8192) + 1), scores))
        assert abs(fit.khat.mean() - float(khat.gaussian_khat([s], 8192)[0])) < 0.03
    rising = khat.gaussian_khat(np.linspace(0.1, 6, 20), 10**6)
    assert (np.diff(rising) > 0).all()


def test_more_tokens_make_the_same_scores_lighter() -> None:
    assert (
        khat.gaussian_khat([2.0], 10**3)
        > khat.gaussian_khat([2.0], 10**6)
        > khat.gaussian_khat([2.0], 10**9)
    )


def test_thresholds() -> None:
    assert khat.khat_threshold(10**6) == 0.7
    assert khat.khat_threshold(100) == pytest.approx(0.5)
    assert khat.tail_length(16384) == 384
    assert khat.tail_length(100) == 20
    assert [pareto_khat(logs("exponential", 9999, k), 9999).label for k in (0.3, 0.85, 1.4)] == [
        "good",
        "bad",
        "very bad",
    ]


@pytest.mark.parametrize("keep", [1, 13, 60])
def test_streaming_equals_one_pass_in_any_order(keep: int) -> None:
    scores = torch.randn(5, 97, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = khat.update(khat.init(5, keep), scores)
    assert torch.equal(one.scores, scores.sort(1, descending=True).values[:, :keep])
    parts = [
        khat.update(khat.init(5, keep), part) for part in scores.tensor_split([2, 40, 41], dim=1)
    ]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        merged = functools.reduce(khat.merge, (parts[i] for i in order), khat.init(5, keep))
        assert set(merged.count.tolist()) == {97}
        assert torch.equal(merged.scores, one.scores)
    streamed = functools.reduce(
        khat.update, scores.tensor_split([5, 50], dim=1), khat.init(5, keep)
    )
    assert torch.equal(streamed.scores, one.scores)


def test_queries_with_different_numbers_of_keys_have_their_own_tails() -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = [
        3 * torch.randn(rows, keys, generator=generator, dtype=torch.float64)
        for rows, keys in ((2, 16), (1, 97), (3, 700))
    ]
    padded = [torch.nn.functional.pad(x, (0, 700 - x.shape[1]), value=-math.inf) for x in blocks]
    fit = khat.finish(khat.update(khat.init(6, khat.tail_length(700) + 1), torch.cat(padded)))
    alone = [pareto_khat(x, x.shape[1]) for x in blocks]
    for name in ("khat", "low", "high"):
        np.testing.assert_array_equal(
            getattr(fit, name), np.concatenate([getattr(part, name) for part in alone])
        )
    assert np.isnan(fit.khat[:2]).all()  # three weights of sixteen are no tail
    assert np.isfinite(fit.khat[2:]).all()
    # (2 16 + 97 + 3 700) / 6 = 371.5
    assert fit.threshold == khat.khat_threshold(372)


def test_equal_weights_have_no_khat() -> None:
    fit = pareto_khat(np.zeros((2, 400)), 16384)
    assert fit.label == "unknown"
    assert np.isnan(fit.khat).all()
    assert math.isnan(fit.median)
    assert pareto_khat([0.0, 1.0, 2.0], 3).label == "unknown"


def test_repeated_tokens_do_not_break_the_fit() -> None:
    """Each weight eight times over: the copies of the weight below the tail leave it, all others
    stay.
    """
    once = logs("exponential", 500, 0.6)
    many = np.repeat(once, 8)
    fit = pareto_khat(many, many.size)
    assert np.isfinite(fit.khat).all()
    weights = np.exp(many)
    cut = np.sort(weights)[-khat.tail_length(many.size) - 1]
    over = np.sort(weights[weights > cut]) - cut
    shape = (fit.low + fit.high) / 2
    np.testing.assert_allclose(shape, khat._zhang_stephens(over[None] / over[-1]), rtol=1e-9)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="seen no key"):
        khat.finish(khat.init(2, 3))
    with pytest.raises(ValueError, match="expected 2 rows"):
        khat.update(khat.init(2, 3), torch.zeros(3, 4))
