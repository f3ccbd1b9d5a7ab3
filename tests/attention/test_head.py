"""Heads: what weights and biases become, horizons, couplings."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import esscher as es
from esscher.attention.head import coupling_of
from esscher.theory.prediction import proved_coupling
from tests.attention.reference import attend_tokens, softmax_attention


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def covariance(d: int, seed: int) -> torch.Tensor:
    factor = randn(d, d, seed=seed)
    return factor @ factor.T / d


def test_weights_with_biases_reproduce_the_layer_and_the_key_bias_has_no_effect() -> None:
    d, k, e, n, m = 11, 3, 5, 29, 7
    wq, wk, wv = randn(k, d, seed=0), randn(k, d, seed=1), randn(e, d, seed=2)
    bq, bk, bv = randn(k, seed=3), randn(k, seed=4), randn(e, seed=5)
    tokens, x = randn(n, d, seed=6), randn(m, d, seed=7)
    layer = softmax_attention(x @ wq.T + bq, tokens @ wk.T + bk, tokens @ wv.T + bv)
    head = es.Head.from_weights(wq, wk, wv, bq, bk, bv)
    torch.testing.assert_close(attend_tokens(head, x, tokens), layer, rtol=1e-12, atol=1e-12)
    without = es.Head.from_weights(wq, wk, wv, bq, None, bv)
    torch.testing.assert_close(attend_tokens(without, x, tokens), layer, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.A, wk.T @ wq / math.sqrt(k))
    torch.testing.assert_close(head.tilt_bias, wk.T @ bq / math.sqrt(k))
    torch.testing.assert_close(head.tilt(x), x @ head.A.T + head.tilt_bias)
    dense = es.Head(head.A, head.V, head.tilt_bias, head.value_bias)
    torch.testing.assert_close(attend_tokens(dense, x, tokens), layer, rtol=1e-12, atol=1e-12)
    ignored = es.Head.from_weights(wq, wk, wv, None, None, bv)
    assert float((attend_tokens(ignored, x, tokens) - layer).abs().max()) > 1e-2


@pytest.mark.parametrize("singular", [False, True])
def test_horizon_equals_brute_force_and_the_key_space_route(singular: bool) -> None:
    d, k = 37, 5
    wq, wk, wv = randn(k, d, seed=0), randn(k, d, seed=1), randn(k, d, seed=2)
    cov = covariance(d, 3)
    if singular:
        cov = cov[:, :9] @ cov[:9, :]
    measure, head = es.Gaussian(cov), es.Head.from_weights(wq, wk, wv)
    values, vectors = torch.linalg.eigh(measure.cov)
    root = vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
    two = float(torch.linalg.svdvals(root @ head.A @ root)[0])
    one = float(torch.linalg.svdvals(root @ head.A)[0])
    for same in (head, es.Head(head.A, head.V)):
        assert same.horizon(measure) == pytest.approx(two, rel=1e-10)
        assert same.horizon(measure, sided=1) == pytest.approx(one, rel=1e-10)
        assert same.coupling(measure) == pytest.approx(float(values[-1]) * one**2, rel=1e-10)
        assert same.scaled(3.0).horizon(measure) == pytest.approx(3 * two, rel=1e-10)
    scale = 1 / math.sqrt(k)
    assert es.horizon_of_covariances(wk @ cov @ wk.T, wq @ cov @ wq.T, scale) == pytest.approx(
        two, rel=1e-10
    )
    assert es.horizon_of_covariances(wk @ cov @ wk.T, wq @ wq.T, scale) == pytest.approx(
        one, rel=1e-10
    )


def test_isotropic_tokens_have_coupling_equal_to_the_squared_horizon() -> None:
    head, measure = (
        es.Head(randn(6, 6, seed=0), torch.eye(6).double()),
        es.Gaussian(0.3 * torch.eye(6).double()),
    )
    assert head.coupling(measure) == pytest.approx(head.horizon(measure) ** 2, rel=1e-12)


def test_scaled_multiplies_scores_and_leaves_values() -> None:
    head = es.Head(randn(4, 4, seed=0), randn(2, 4, seed=1), randn(4, seed=2), randn(2, seed=3))
    x = randn(3, 4, seed=4)
    torch.testing.assert_close(head.scaled(2.5).tilt(x), 2.5 * head.tilt(x))
    torch.testing.assert_close(head.scaled(2.5).values(x), head.values(x))


def test_a_head_keeps_its_factors_and_does_not_change() -> None:
    """Given in key space, from weights or scaled: one constructor, and A is the product only where
    it is asked for.
    """
    wq, wk, wv, bq = randn(2, 5, seed=0), randn(2, 4, seed=1), randn(3, 4, seed=2), randn(2, seed=3)
    head = es.Head(wq / math.sqrt(2), wv, bq / math.sqrt(2), key_map=wk)
    same, x = es.Head.from_weights(wq, wk, wv, bq), randn(6, 5, seed=4)
    for each in (head, same):
        assert each.query_map.shape == (2, 5)
        torch.testing.assert_close(each.A, wk.T @ wq / math.sqrt(2))
        torch.testing.assert_close(each.tilt(x), es.Head(each.A, wv, each.tilt_bias).tilt(x))
        torch.testing.assert_close(each.scaled(3.0).tilt(x), 3.0 * head.tilt(x))
        with pytest.raises(AttributeError):
            each.V = wv  # type: ignore[misc]
    torch.testing.assert_close(pickle.loads(pickle.dumps(head)).tilt(x), head.tilt(x))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: es.Head(torch.eye(3), torch.eye(3)).scaled(1e39), "head.scaled"),
        (
            lambda: es.Head(torch.eye(3), torch.eye(3), key_map=torch.zeros(2, 3)),
            "key_map: expected 3 rows",
        ),
        (lambda: es.Head(torch.eye(3), torch.eye(4)), "V: expected rows of length 3"),
        (lambda: es.Head(torch.eye(3)[0], torch.eye(3)), "A: expected 2 axes"),
        (lambda: es.Head(torch.eye(3, dtype=torch.int32), torch.eye(3)), "floating"),
        (lambda: es.Head(torch.full((3, 3), torch.nan), torch.eye(3)), "finite"),
        (lambda: es.Head(torch.eye(3), torch.eye(3), torch.zeros(2)), "tilt_bias"),
        (lambda: es.Head(torch.eye(3), torch.eye(3), None, torch.zeros(2)), "value_bias"),
        (lambda: es.Head(torch.zeros(3, 0), torch.eye(3)), "non-empty"),
        (
            lambda: es.Head.from_weights(torch.zeros(0, 3), torch.zeros(0, 3), torch.eye(3)),
            "non-empty",
        ),
        (
            lambda: es.Head.from_weights(torch.zeros(2, 3), torch.zeros(4, 3), torch.eye(3)),
            "key_map: expected 2 rows",
        ),
        (
            lambda: es.Head.from_weights(torch.zeros(2, 3), torch.zeros(2, 3), torch.eye(4)),
            "V: expected",
        ),
        (lambda: es.Head.from_weights(*3 * [torch.eye(3)], bq=torch.zeros(2)), "bq"),
        (lambda: es.Head.from_weights(*3 * [torch.eye(3)], bk=torch.zeros(2)), "bk"),
        (
            lambda: es.Head(torch.eye(3), torch.eye(3)).horizon(es.Sphere(4)),
            "dimension 3, the measure has 4",
        ),
        (lambda: es.limit(es.Head(torch.eye(3), torch.eye(3)), es.Sphere(4)), "dimension 3"),
        (lambda: es.Head(torch.eye(3), torch.eye(3)).horizon(es.Sphere(3), sided=3), "sided"),
        (lambda: es.Head(torch.zeros(3, 2), torch.eye(3)).horizon(es.Sphere(3)), "use sided=1"),
        (lambda: es.Head(torch.eye(3), torch.eye(3)).scaled(0.0), "alpha"),
        (lambda: es.horizon_of_covariances(torch.eye(3), torch.eye(2)), "one shape"),
        (lambda: es.Head(torch.eye(3), torch.eye(3)).tilt(torch.zeros(2, 4)), "rows of length 3"),
    ],
)
def test_bad_heads_are_refused(make: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()  # type: ignore[operator]


def test_coupling_is_reach_times_the_squared_horizon_wherever_it_is_taken() -> None:
    """Head, theory and the key space of a probe: one formula; its parts may be beyond the range
    that Psi itself is in.
    """
    cov = torch.diag(torch.tensor([4.0, 0.25, 1.0])).double()
    head, law = (
        es.Head(torch.diag(torch.tensor([0.5, 3.0, 0.1])).double(), torch.eye(3).double()),
        es.Gaussian(cov),
    )
    psi = 4.0 * max(2.0 * 0.5, 0.5 * 3.0, 1.0 * 0.1) ** 2
    assert head.coupling(law) == pytest.approx(psi, rel=1e-14)
    assert proved_coupling(head, law)[1] == pytest.approx(psi, rel=1e-14)
    assert coupling_of(1e200, 1e-190) == pytest.approx(1e20, rel=1e-14)
    keys = es.horizon_of_covariances(cov, torch.eye(3).double(), 0.3)
    assert keys == pytest.approx(0.3 * 2.0, rel=1e-14)
