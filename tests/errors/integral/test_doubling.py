"""Compiled sums at doubling nodes, against enumeration and against the float64 integral key
by key.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import esscher.keep as keep
from esscher.errors.curve import QueryErrors
from esscher.errors.doubling import Behind, Keys, doubling_errors, in_tensors, inclusion_error
from esscher.errors.keep_curve import KeepErrors
from esscher.keep.context import Context


def context(sharpness: float, keys: int = 1024) -> Context:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(size, 24, generator=generator) for size in (8, keys, keys))
    return Context.of(sharpness * q, k, v + 20)


def compare(seen: Context, p: torch.Tensor, w: torch.Tensor | None, rms: float = 1e-4) -> None:
    """Errors at doubling nodes against the float64 integral: the root mean square error to ``rms``
    and the stated accuracy, the bias to 1e-4 of it.
    """
    known = doubled(seen, p, w)
    exact = inclusion_error(seen.scores, seen.v, p, w)
    assert known.accuracy < 1e-4
    size = np.sqrt(exact.mse)
    np.testing.assert_allclose(np.sqrt(known.mse), size, rtol=min(rms, known.accuracy))
    np.testing.assert_allclose(known.sum_p2, exact.sum_p2, rtol=1e-4)
    assert known.bias is not None
    assert exact.bias is not None
    assert (np.linalg.norm(known.bias - exact.bias, axis=2) < 1e-4 * size).all()


def doubled(seen: Context, p: torch.Tensor, w: torch.Tensor | None = None) -> QueryErrors:
    keys = Keys.of(seen.scores, seen.near, seen.drift, seen.distance, single=True)
    return doubling_errors(keys, p, w)


def of_subsets(seen: Context, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean squared error, bias and E sum p^2 over all subsets of the keys: (m,), (m, d), (m,)."""
    keys = p.shape[1]
    kept = torch.tensor(list(itertools.product([False, True], repeat=keys)))
    chance = torch.where(kept, p[:, None], 1 - p[:, None]).prod(2)  # (m, 2^keys)
    weights = torch.where(kept, seen.scores[:, None], -torch.inf).softmax(2).nan_to_num(0.0)
    error = (weights @ seen.v.double() - (seen.attention @ seen.v.double())[:, None]) * kept.any(1)[
        :, None
    ]
    squares = (chance * error.square().sum(2)).sum(1)
    return squares, (chance[:, :, None] * error).sum(1), (chance * weights.square().sum(2)).sum(1)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_all_subsets_of_few_keys(sharpness: float) -> None:
    """The phase of the nodes against the sums of weights differs from query to query: the stated
    accuracy holds for all.
    """
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(size, 5, generator=generator) for size in (40, 9, 9))
    seen = Context.of(sharpness * q, k, v)
    p = torch.rand(40, 9, generator=generator, dtype=torch.float64)
    p[:, 0], p[:20, 1] = 1, 0
    p[10:, 0] = 0.7
    found = doubled(seen, p)
    mse, bias, sum_p2 = (x.numpy() for x in of_subsets(seen, p))
    np.testing.assert_allclose(np.sqrt(found.mse[:, 0]), np.sqrt(mse), rtol=found.accuracy)
    np.testing.assert_allclose(found.sum_p2[:, 0], sum_p2, rtol=2 * found.accuracy)
    assert found.bias is not None
    assert (np.linalg.norm(found.bias[:, 0] - bias, axis=1) < 5e-5 * np.sqrt(mse)).all()


@pytest.mark.parametrize("sharpness", [0.5, 2.0])
@pytest.mark.parametrize(
    "text", ["neyman", "neyman:shared", "random", "random:reweight", "sinks:4+topk:20+random"]
)
@pytest.mark.parametrize("n", [40, 160, 640])
def test_any_rule(text: str, n: int, sharpness: float) -> None:
    seen = context(sharpness)
    kept = keep.parse(text).include(seen, n)
    compare(seen, kept.probability, kept.weight)


def test_given_probabilities_and_weights() -> None:
    """Some of them 0 and 1; weights 1/p, 1, or others."""
    seen, generator = context(1.0), torch.Generator().manual_seed(2)
    p, w = (torch.rand(8, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    p[:, :100], p[:, 100:130] = 0, 1
    for weight in (None, torch.where(p > 0, 1 / p, 1.0), w + 0.5):
        compare(seen, p, weight)


def test_a_query_that_a_few_keys_decide() -> None:
    kept = keep.parse("random").include(seen := context(3.0), 5)
    compare(seen, kept.probability, kept.weight)


def test_where_nothing_but_the_average_is_kept_the_nodes_have_no_aliasing() -> None:
    kept = keep.parse("random").include(seen := context(0.1, 8192), 4096)
    compare(seen, kept.probability, None, rms=2.5e-6)  # the bound is 4.5e-5


def test_weights_far_apart() -> None:
    """Of a query the largest key is dropped with probability 1/2, and the others are exp(-90) of
    it: the mean over both cases.
    """
    generator = torch.Generator().manual_seed(5)
    k, v = torch.zeros(5000, 3), torch.randn(5000, 3, generator=generator)
    k[0, 0] = 1.0
    seen = Context.of(torch.tensor([[90.0, 0, 0], [1.0, 0, 0]]), k, v, scale=1.0)
    p = torch.full((2, 5000), 0.5, dtype=torch.float64)
    p[:, 1] = 0.4
    compare(seen, p, None)
    without = p.clone()
    without[:, 0] = 0
    mse = inclusion_error(seen.scores, seen.v, p).mse[0, 0]
    assert mse == pytest.approx(inclusion_error(seen.scores, seen.v, without).mse[0, 0] / 2)


@pytest.mark.parametrize("text", ["neyman", "neyman:shared", "random:0.1:reweight"])
def test_all_queries_are_answered_in_the_end(text: str) -> None:
    """Within the accuracy that float32 has."""
    seen, rule = context(3.0, 4096), keep.parse(text)
    for n in (20, 400) if rule.free else (None,):
        kept = rule.include(seen, n)
        exact = inclusion_error(seen.scores, seen.v, kept.probability, kept.weight)
        curve = KeepErrors(seen).curve(rule, n, details=True)
        assert curve.queries is not None
        assert curve.queries.bias is not None
        np.testing.assert_allclose(curve.queries.mse, exact.mse, rtol=2e-4)
        size = 1e-4 * float(np.sqrt(exact.mse.min()))
        np.testing.assert_allclose(curve.queries.bias, exact.bias, atol=size)


@pytest.mark.parametrize("sharpness", [0.5, 3.0])
@pytest.mark.parametrize("text", ["random", "topk:20+random:reweight", "sinks:4+recent:9+random"])
def test_sizes_of_one_probability_are_found_together(text: str, sharpness: float) -> None:
    """Each as by itself; also the fewest, which leave nothing to chance, all keys, and numbers that
    the kept keys alone do not reach. Errors in nats are half of those of values L'v.
    """
    seen, rule = context(sharpness), keep.parse(text)
    root = torch.randn(24, 24, generator=torch.Generator().manual_seed(8)).double()
    felt = replace(seen, metric=(root @ root.T)[None], heads=torch.zeros(8, dtype=torch.int64))
    n = [rule.least(seen), 30, 50, 100, 200, 512, 1000, 1024]
    curve = KeepErrors(felt).curve(rule, n, details=True, nats=True)
    found = curve.queries
    assert found is not None
    assert found.bias is not None
    assert found.nats is not None
    for j, count in enumerate(n):
        kept = rule.include(seen, count)
        exact, behind = (
            inclusion_error(seen.scores, v, kept.probability, kept.weight)
            for v in (seen.v, seen.v.double() @ root)
        )
        np.testing.assert_allclose(found.mse[:, j], exact.mse[:, 0], rtol=2e-4, atol=1e-14)
        np.testing.assert_allclose(found.nats[:, j], behind.mse[:, 0] / 2, rtol=2e-4, atol=1e-13)
        np.testing.assert_allclose(found.sum_p2[:, j], exact.sum_p2[:, 0], rtol=2e-4)
        assert exact.bias is not None
        size = 1e-4 * float(np.sqrt(exact.mse.max())) + 1e-13
        np.testing.assert_allclose(found.bias[:, j], exact.bias[:, 0], atol=size)
        assert curve.kept is not None
        assert curve.kept[j] == pytest.approx(float(kept.size.mean()))


@pytest.mark.parametrize("text", ["neyman", "topk:900+random:reweight", "topk:900+random"])
def test_small_errors_keep_their_digits_in_float32(text: str) -> None:
    """A few keys of small weight are dropped: mean squared errors are 1e-9 to 1e-18 of the
    largest |c|^2.
    """
    seen = context(3.0)
    kept = keep.parse(text).include(seen, 1000)
    compare(seen, kept.probability, kept.weight)
    exact = inclusion_error(seen.scores, seen.v, kept.probability, kept.weight).mse[:, 0]
    relative = exact / seen.distance.square().amax(1).numpy()
    assert relative.max() < 1e-9
    assert 1e-20 < relative.min() < 1e-13


@pytest.mark.parametrize("text", ["random", "neyman", "sinks:4+topk:20+random"])
def test_errors_in_nats_come_from_the_same_sums(text: str) -> None:
    """1/2 E e'F e is half the squared error of values L'v, F = L L': two heads, each with its own
    metric, one of rank 2.
    """
    seen, generator = context(1.0), torch.Generator().manual_seed(6)
    kept = keep.parse(text).include(seen, 160)
    roots = {h: torch.randn(24, r, generator=generator).double() for h, r in ((0, 24), (1, 2))}
    heads = torch.tensor([0, 1] * 4)
    alone = {h: Context.of(seen.q, seen.k, seen.v.double() @ root) for h, root in roots.items()}
    distance = torch.stack([alone[h].distance[i] for i, h in enumerate(heads.tolist())])
    seen_by = seen.scores, seen.near, seen.drift, seen.distance
    for single, rtol in ((True, 1e-4), (False, 1e-11)):
        keys = Keys.of(*seen_by, single=single, behind=Behind(distance, heads, roots))
        found = doubling_errors(keys, kept.probability, kept.weight)
        assert found.nats is not None
        for i, h in enumerate(heads.tolist()):
            exact = inclusion_error(seen.scores, alone[h].v, kept.probability, kept.weight).mse[i]
            np.testing.assert_allclose(found.nats[i], exact / 2, rtol=rtol)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 40.0])
@pytest.mark.parametrize("text", ["neyman", "random", "sinks:4+topk:20+random:reweight"])
def test_sums_in_tensors_are_those_of_the_compiled_loop(text: str, sharpness: float) -> None:
    """As on a device that is not the CPU; errors in nats and bias too, and a query that keeps
    nothing.
    """
    seen, generator = context(sharpness), torch.Generator().manual_seed(7)
    roots = {h: torch.randn(24, r, generator=generator).double() for h, r in ((0, 24), (1, 2))}
    heads, distance = torch.tensor([0, 1] * 4), torch.empty_like(seen.scores)
    for h, root in roots.items():
        distance[heads == h] = Context.of(seen.q, seen.k, seen.v.double() @ root).distance[
            heads == h
        ]
    behind = Behind(distance, heads, roots)
    keys = Keys.of(seen.scores, seen.near, seen.drift, seen.distance, behind=behind)
    kept = keep.parse(text).include(seen, 160)
    p = kept.probability.clone()
    p[3] = 0
    known = doubling_errors(keys, p, kept.weight)
    numbers, bias = in_tensors(keys, p, None if kept.weight is None else kept.weight.double())
    assert known.nats is not None
    assert known.bias is not None
    np.testing.assert_allclose(numbers[:, 0], known.sum_p2[:, 0], rtol=1e-11)
    np.testing.assert_allclose(numbers[:, 1] * keys.units[0] ** 2, known.mse[:, 0], rtol=1e-11)
    nats = numbers[:, 2] * keys.units[1] ** 2 / 2
    np.testing.assert_allclose(nats, known.nats[:, 0], rtol=1e-11)
    size = float(np.sqrt(known.mse.max()))
    np.testing.assert_allclose(bias * keys.units[0], known.bias[:, 0], atol=1e-9 * size)


def test_values_whose_squares_float32_does_not_have() -> None:
    seen = context(1.0)
    large = Context.of(seen.q, seen.k, seen.v * 2.0**80)
    kept = keep.parse("random").include(seen, 160)
    plain, found = (doubled(x, kept.probability).mse for x in (seen, large))
    np.testing.assert_allclose(found / 2.0**160, plain, rtol=1e-6)
