"""coverage: against brute force, vAttention's scheme against its own steps, and known cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import esscher as es

KEYS = 150


def tensors(keys: int = KEYS, sharp: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Values with a mean of their own, so that a relative error means something."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (3, keys, keys)
    )
    return sharp * q, k, v + 1


RULES = [
    "random:0.5:reweight",
    "topk:8+random:0.4:reweight",
    "neyman:80",
    "random:0.7",
    "magicpig:2:6",
]


@pytest.mark.parametrize("rule", RULES)
def test_independent_keys_against_drawn_subsets(rule: str) -> None:
    """100,000 subsets, 3 queries at their own places: 4.5 standard errors, 7e-6 each and 2e-4 for
    all 30 numbers.
    """
    q, k, v = tensors()
    positions = [KEYS - 1, 130, 120]
    found = es.coverage(q, k, v, rule, 0.15, positions=positions, repeats=4000, seed=3)
    context = es.keep.Context.of(q, k, v, positions=positions)
    kept = es.keep.parse(rule).include(context)
    weight = torch.ones_like(kept.probability) if kept.weight is None else kept.weight
    generator = torch.Generator().manual_seed(11)
    missed, beyond = np.zeros(3), np.zeros(3)
    for _ in range(20):
        chosen = (
            torch.rand(5000, 3, KEYS, generator=generator, dtype=torch.float64) < kept.probability
        )
        mass = chosen * weight * context.attention
        total = mass.sum(2)
        missed += ((total - 1).abs() > 0.15).double().mean(0).numpy() / 20
        off = (mass @ v / total[:, :, None] - context.limit).norm(dim=2)
        beyond += (~(off <= 0.15 * context.limit.norm(dim=1))).double().mean(0).numpy() / 20
    stderr = np.sqrt(np.maximum(missed * (1 - missed), 1e-5) / 100_000)
    assert (
        np.abs(found.denominator - missed) < 4.5 * np.hypot(found.denominator_stderr, stderr)
    ).all()
    assert (np.abs(found.output - beyond) < 4.5 * np.hypot(found.output_stderr, stderr)).all()
    np.testing.assert_allclose(found.kept, kept.size.numpy())


def scheme(
    e: np.ndarray, held: float, epsilon: float, base: float, repeats: int
) -> tuple[float, float]:
    """vAttention's own steps, drawn: how often |Z/D - 1| > epsilon at delta = .1, and the mean
    budget.
    """
    random = np.random.default_rng(5)
    n, whole = len(e), held + e.sum()
    size = max(2, int(base * n))
    missed, spent = 0, 0
    for _ in range(repeats):
        first = e[random.integers(0, n, size)]
        wanted = (
            1.2815515655446004 * first.std(ddof=1) * n / (epsilon * (held + n * first.mean()))
        ) ** 2
        budget = int(np.clip(wanted, size, n))
        missed += abs((held + n * e[random.integers(0, n, budget)].mean()) / whole - 1) > epsilon
        spent += budget
    return missed / repeats, spent / repeats


@pytest.mark.parametrize("topk", [0, 20])
def test_vattention_against_its_own_steps(topk: int) -> None:
    """5000 runs of the whole scheme, 3 queries: 4.5 standard errors of the difference, 7e-6
    each.
    """
    q, k, v = tensors(500, sharp=1.4)
    rule = es.keep.AdaptiveRest(0.2, 0.1, 0.05)
    found = es.coverage(q, k, v, es.keep.TopK(topk) | rule if topk else rule, repeats=2000)
    assert found.epsilon == 0.2
    for i, row in enumerate(es.keep.Context.of(q, k, v).attention.numpy()):
        e = np.sort(row)[: len(row) - topk]
        missed, spent = scheme(e, float(row.sum() - e.sum()), 0.2, 0.05, 5000)
        stderr = np.hypot(found.denominator_stderr[i], np.sqrt(missed * (1 - missed) / 5000))
        assert abs(found.denominator[i] - missed) < 4.5 * stderr
        assert found.kept[i] == pytest.approx(topk + spent, rel=0.05)


def test_with_sigma_known_the_guarantee_is_one_sided() -> None:
    """Scores of deviation 1/2 make a nearly normal sum: each side is missed with probability delta,
    both with twice that.
    """
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(4096, 1, generator=generator, dtype=torch.float64)
    found = es.coverage(
        [[0.5]], k, torch.ones_like(k), es.keep.AdaptiveRest(0.02, 0.05, base=0), scale=1.0
    )
    assert abs(found.denominator - 0.1) < 4 * found.denominator_stderr
    assert found.output == pytest.approx(0, abs=0), "equal values have no error"
    assert found.output_stderr > 0


def test_sure_keys_leave_nothing_to_chance() -> None:
    q, k, v = tensors()
    context = es.keep.Context.of(q, k, v)
    kept = es.keep.TopK(20).include(context).sure
    held = torch.where(kept, context.attention, 0.0).sum(1)
    found = es.coverage(q, k, v, "topk:20", float(1 - held.mean()))
    np.testing.assert_array_equal(found.denominator, (held < held.mean()).double().numpy())
    assert (es.coverage(q, k, v, f"recent:{KEYS}", 0.01).denominator == 0).all()
    assert (es.coverage(q, k, v, f"recent:{KEYS}+adaptive:0.01").output == 0).all()


def test_no_kept_key_is_beyond() -> None:
    """Ten keys, each kept with probability .05: nothing is left with .95^10 = .599; 4.5 standard
    errors, 7e-6.
    """
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    found = es.coverage([[1.0, 0.0]], k, 100 + k, "random:0.05", 0.5)
    assert abs(found.output - 0.95**10) < 4.5 * found.output_stderr
    assert 0.5 < found.denominator <= 1


@pytest.mark.parametrize("rule", ["random:0.4:reweight", "topk:3+random:0.3:reweight", "neyman:6"])
def test_few_keys_against_the_sum_over_subsets(rule: str) -> None:
    """Within 4.5 standard errors, 7e-6 each."""
    q, k, v = tensors(12)
    found = es.coverage(q, k, v, rule, 0.2, repeats=20_000)
    context = es.keep.Context.of(q, k, v)
    kept = es.keep.parse(rule).include(context)
    weight = torch.ones_like(kept.probability) if kept.weight is None else kept.weight
    missed = torch.zeros(3, dtype=torch.float64)
    for bits in itertools.product([False, True], repeat=12):
        chosen = torch.tensor(bits)
        chance = torch.where(chosen, kept.probability, 1 - kept.probability).prod(1)
        total = (chosen * weight * context.attention).sum(1)
        missed += chance * ((total - 1).abs() > 0.2)
    assert (np.abs(found.denominator - missed.numpy()) < 4.5 * found.denominator_stderr).all()


def test_a_rest_of_no_weight_misses_nothing() -> None:
    """The rest weighs 1e-13 of the sink."""
    k = torch.cat([torch.tensor([[40.0]]), torch.linspace(0, 1, 200)[:, None]]).double()
    found = es.coverage([[1.0]], k, k, "sinks:1+adaptive:0.1:base=0.02", scale=1.0)
    assert found.denominator == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": "random:0.3"}, "random:0.3 has none of its own; give the relative error"),
        ({"keep": "random:0.3", "epsilon": 0.0}, "epsilon: expected"),
        ({"keep": "random:0.3", "epsilon": float("nan")}, "epsilon: expected"),
        ({"keep": "topk", "epsilon": 0.1}, "topk has no number of its own; got none"),
        ({"keep": "adaptive+random:0.1:reweight"}, "expected no other part that keeps by chance"),
        ({"keep": "adaptive", "repeats": 1}, "repeats: expected at least 2"),
        ({"keep": "adaptive", "seed": 0.5}, "seed: expected a whole number, got 0.5"),
        ({"keep": "adaptive", "positions": [1, 2]}, "expected 3 whole numbers"),
    ],
)
def test_refusals(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        es.coverage(*tensors(), **given)  # type: ignore[arg-type]


def test_as_a_table() -> None:
    frame = es.coverage(*tensors(), "adaptive:0.3", repeats=50).to_frame()
    assert len(frame) == 3
    assert frame["epsilon"].unique() == [0.3]
