"""Confidence regions for the limit: what they are made of, and whether they hold it as often as
they say.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

import esscher as es


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_confidence_regions_cover() -> None:
    """95 % regions from 1000 tokens, 1000 repeats x 3 queries of effective size above 200: coverage
    within 0.93 .. 0.965.

    The plug-in is asymptotic, so the band is about 3 binomial errors below and 2 above; seed fixed.
    """
    law = es.Gaussian(0.4 * torch.eye(3).double())
    head = es.Head(0.8 * torch.eye(3).double(), randn(2, 3))
    x = torch.tensor([[0.5, 0.0, 0.0], [0.3, -0.4, 0.2], [0.0, 1.0, 0.5]]).double()
    limit = es.limit(head, law)(x)
    generator = torch.Generator().manual_seed(0)
    hits = []
    for _ in range(1000):
        tokens = law.sample(1000, generator)
        region = es.confidence_region(
            head.queries(x), head.keys(tokens), head.values(tokens), scale=1.0
        )
        hits.append(region.contains(limit).double())
    coverage = torch.stack(hits).mean(0)
    assert bool((coverage > 0.93).all())
    assert bool((coverage < 0.965).all())


def test_region_is_the_plug_in_covariance_and_shrinks() -> None:
    q, k, v = randn(3, 4), randn(500, 4, seed=1), randn(500, 2, seed=2)
    region = es.confidence_region(q, k, v)
    p = (q @ k.T / 2).softmax(-1)
    for i in range(3):
        apart = v - p[i] @ v
        torch.testing.assert_close(
            region.cov[i],
            (p[i] ** 2)[:, None, None].mul(apart[:, :, None] * apart[:, None, :]).sum(0),
        )
    torch.testing.assert_close(region.effective_tokens, 1 / (p**2).sum(-1))
    assert bool(region.contains(region.center).all())
    assert not bool(region.contains(region.center + 3 * region.radius[:, None]).any())
    assert bool((es.confidence_region(q, k, v, level=0.5).radius < region.radius).all())


def test_flat_regions() -> None:
    """Values that do not vary along one axis, equal values, one key with all the weight: the centre
    is in, others not.
    """
    q, k, v = randn(3, 4), randn(50, 4, seed=1), randn(50, 3, seed=2)
    line = v.clone()
    line[:, 2] = 5.0
    ahead = k.clone()
    ahead[7] = 1e4 * q[0]
    for keys, values in ((k, line), (k, torch.full_like(v, 1e4)), (ahead, v)):
        region = es.confidence_region(q[:1], keys, values)
        assert bool(region.contains(region.center).all())
        assert (
            not bool(
                region.contains(region.center + torch.tensor([[0.0, 0.0, 1e-3]]).double()).any()
            )
            or values is v
        )
        assert not bool(region.contains(region.center + 1e3).any())
        assert bool(torch.isfinite(region.shape).all())
    with pytest.raises(ValueError, match="one for each of 1 queries"):
        region.contains(randn(2, 3))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"level": 1.0}, "level"),
        ({"level": "high"}, "level"),
        ({"level": float("nan")}, "level"),
        ({"k": randn(2, 4), "v": randn(2, 3)}, "more keys"),
        ({"scale": -1.0}, "scale"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], word: str) -> None:
    given = {"q": randn(3, 4), "k": randn(50, 4), "v": randn(50, 3)}
    with pytest.raises(ValueError, match=word):
        es.confidence_region(**(given | change))  # type: ignore[arg-type]


def test_scores_beyond_the_range_are_refused() -> None:
    big = torch.full((4, 2), 1e200, dtype=torch.float64)
    with pytest.raises(ValueError, match="q: expected numbers of sizes"):
        es.confidence_region(
            big, big * torch.tensor([1.0, -1.0]).double(), torch.ones(4, 1).double(), scale=1e10
        )
    with pytest.raises(ValueError, match="q: expected numbers of sizes"):
        es.confidence_region(big, big, torch.ones(4, 1).double())


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("n", [12, 40, 120])
@pytest.mark.parametrize(("chance", "score"), [(0.5, 0.0), (0.1, 1.0), (0.02, 2.0), (0.3, -3.0)])
def test_the_proved_region_covers_a_law_of_two_tokens(
    chance: float, score: float, n: int, level: float
) -> None:
    """Score 0 and value -1, or ``score`` and +1 with a chance: how many of n are the second is
    binomial, so the coverage of a region is a finite sum, without sampling. The bounds are the
    law's own: max(0, score), radius 1.
    """
    counts = np.arange(n + 1)
    odds = chance * math.exp(score) / (1 - chance)
    limit = torch.tensor([[(odds - 1) / (odds + 1)]]).double()
    held = []
    for count in counts:
        k = torch.cat([torch.zeros(n - count), torch.full((int(count),), score)])[:, None].double()
        v = torch.cat([-torch.ones(n - count), torch.ones(int(count))])[:, None].double()
        region = es.confidence_region(
            [[1.0]], k.numpy(), v.numpy(), level, 1.0, es.Bounds(max(0.0, score), 1.0, [0.0])
        )
        held.append(bool(region.contains(limit)))
    assert (np.array(held) * scipy.stats.binom.pmf(counts, n, chance)).sum() >= level


def test_the_proved_region_is_no_longer_vacuous_and_tends_to_a_multiple_of_the_plug_in() -> None:
    """Sphere: from a few hundred tokens on the ball is smaller than the values', and sqrt(n) radius
    -> A sqrt(tr C).
    """
    law, x = es.Sphere(3), torch.tensor([[1.0, 0.5, 0.0]]).double()
    head = es.Head(torch.eye(3).double(), torch.eye(3).double())
    A = math.sqrt(2 * math.log(80))
    trace = float(es.delta_covariance(head, law, x).diagonal(dim1=1, dim2=2).sum())
    found = {}
    for n in (5, 300, 300_000):
        tokens = law.sample(n, torch.Generator().manual_seed(1))
        bounds = es.Bounds.of(head, law, x)
        found[n] = float(
            es.confidence_region(head.queries(x), tokens, tokens, 0.95, 1.0, bounds).radius
        )
    assert found[5] == pytest.approx(2.0)
    assert found[300] < 1.0
    assert math.sqrt(300_000) * found[300_000] == pytest.approx(A * math.sqrt(trace), rel=0.06)


def test_the_radius_is_the_formula() -> None:
    q, k, v = randn(2, 3), randn(400, 3, seed=1), randn(400, 2, seed=2)
    bounds = es.Bounds([5.0, 4.5], 6.0, [0.1, -0.2])
    region = es.confidence_region(q, k, v, 0.9, 0.5, bounds)
    assert (region.kind, region.status, region.level) == ("bernstein", "proved", 0.9)
    for i, b in enumerate((5.0, 4.5)):
        e = np.exp(0.5 * (k @ q[i]).numpy())
        apart = v.numpy() - (e @ v.numpy()) / e.sum()
        a = math.sqrt(2 * math.log(4 / 0.1) / 400)
        spread, square = math.sqrt((e**2 * (apart**2).sum(1)).mean()), math.sqrt((e**2).mean())
        expected = (a * spread + 4 / 3 * a * a * 12.0 * math.exp(b)) / (e.mean() - a * square)
        assert float(region.radius[i]) == pytest.approx(min(expected, 12.0), rel=1e-12)
        on_edge = region.center + float(region.radius[i]) * torch.tensor([[0.6, 0.8]]).double()
        assert bool(region.contains(region.center + 0.999 * (on_edge - region.center))[i])
        assert not bool(region.contains(region.center + 1.001 * (on_edge - region.center))[i])
    tight = es.confidence_region(q, k, v, 0.9, 0.5, es.Bounds(3.5, 6.0, [0.0, 0.0]))
    assert bool((tight.radius < region.radius).all())


@pytest.mark.parametrize(
    "law", [es.Sphere(3, 2.0), es.Ball(3), es.Cube(3, 0.5), es.Rademacher(3), es.Pool(randn(40, 3))]
)
def test_bounds_of_a_law_hold_its_tokens(law: es.Measure) -> None:
    head = es.Head(randn(3, 3), randn(2, 3, seed=1), randn(3, seed=2), randn(2, seed=3))
    x, tokens = randn(5, 3, seed=4), law.sample(5000, torch.Generator().manual_seed(5)).double()
    bounds = es.Bounds.of(head, law, x)
    scores = head.queries(x) @ head.keys(tokens).T
    assert bool((scores.amax(1) <= bounds.score + 1e-9).all())
    assert float((head.values(tokens) - bounds.center).norm(dim=1).max()) <= bounds.radius + 1e-9
    if law.as_pool() is not None or isinstance(law, es.Sphere):
        # no looser than it must be
        assert bool((scores.amax(1) >= bounds.score - 0.02 * bounds.score.abs()).all())


def test_kinds_say_what_they_are() -> None:
    q, k, v = randn(1, 2), randn(30, 2, seed=1), randn(30, 2, seed=2)
    normal = es.confidence_region(q, k, v)
    assert (normal.kind, normal.status) == ("normal", "asymptotic")
    assert isinstance(normal, es.ConfidenceRegion)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (es.Bounds(0.0, 9.0, [0.0, 0.0]), "known.score: a score of"),
        (es.Bounds(9.0, 0.5, [0.0, 0.0]), "known.radius: a value lies"),
        (es.Bounds([1.0, 2.0, 3.0], 9.0, [0.0, 0.0]), "known.score: expected one number"),
        (es.Bounds(9.0, -1.0, [0.0, 0.0]), "known.radius: a value lies"),
        (es.Bounds(9.0, 9.0, [0.0]), "known.center"),
        ("bounded", "known: expected esscher's Bounds, got str"),
    ],
)
def test_what_is_known_must_hold(known: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        es.confidence_region(randn(2, 2), randn(30, 2, seed=1), randn(30, 2, seed=2), known=known)  # type: ignore[arg-type]


def test_an_unbounded_law_has_no_bounds() -> None:
    head = es.Head([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match="no bounded support"):
        es.Bounds.of(head, es.Gaussian([[1.0]]), [[1.0]])
