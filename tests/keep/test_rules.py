"""What every keep rule promises, over one table; and each rule's own choice of keys."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch

import esscher.keep as keep
from esscher import exact_pool_curve
from tests.keep.table import OPEN, RULES

KEYS = 9
PLACES = (None, [8, 8, 5, 3, 7])


def context(places: list[int] | None = None, seed: int = 0, sharp: float = 3.0) -> keep.Context:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (5, KEYS, KEYS)
    )
    return keep.Context.of(sharp * q, k, v[:, :3], positions=places)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("text", "is_open"), RULES)
def test_probabilities_and_weights(text: str, is_open: bool, places: list[int] | None) -> None:
    seen = context(places)
    kept = keep.parse(text).include(seen, 5 if is_open else None)
    p = kept.probability
    assert p.shape == (5, KEYS)
    assert bool(((p >= 0) & (p <= 1)).all())
    assert not bool(p[~seen.visible].any()), "no query keeps a key that it does not see"
    if kept.weight is not None:
        chance = (p > 0) & (p < 1)
        torch.testing.assert_close(kept.weight[chance] * p[chance], torch.ones_like(p[chance]))
        assert bool((kept.weight[p == 1] == 1).all()), "a sure key counts once"


@pytest.mark.parametrize("text", OPEN)
@pytest.mark.parametrize("n", [3, 5, KEYS])
def test_n_keys_are_kept_in_all(text: str, n: int) -> None:
    kept = keep.parse(text).include(context(), n)
    if text.startswith(("topk+random", "vattention")):  # chance comes on top of the n
        assert float(kept.sure.sum(1).double().mean()) == n
    # their patterns alone keep up to 3 or 4
    elif not text.startswith(("bigbird", "window")) or n >= 5:
        assert float(kept.size.mean()) == pytest.approx(n, abs=1e-9)
    if n == KEYS:
        assert bool((kept.probability == 1).all()) or "neyman" in text  # to rounding


@pytest.mark.parametrize("text", ["random:0.1", "random:0.1:reweight", "topk:2+random:0.1"])
def test_a_share_keeps_all_its_digits(text: str) -> None:
    """0.1 of float32 is 1.5e-8 off."""
    p = keep.parse(text).include(context()).probability
    assert bool((p[p < 1] == 0.1).all())


@pytest.mark.parametrize(("text", "is_open"), RULES)
def test_text_there_and_back(text: str, is_open: bool) -> None:
    rule = keep.parse(text)
    assert keep.parse(str(rule)) == rule
    assert (rule.free is not None) == is_open


def test_python_and_text_write_the_same() -> None:
    rule = keep.Sinks(4) | keep.Recent(256) | keep.Random(0.1, reweight=True)
    assert str(rule) == "sinks:4+recent:256+random:0.1:reweight"
    assert keep.parse("sinks:4+recent:256+random:0.1:reweight") == rule


def test_each_rule_chooses_its_keys() -> None:
    seen = context([8, 8, 5, 3, 7])

    def kept(text: str, n: int | None = None) -> list[list[int]]:
        return [row.nonzero()[:, 0].tolist() for row in keep.parse(text).include(seen, n).sure]

    assert kept("sinks:2") == [[0, 1]] * 5
    assert kept("recent:2") == [[7, 8], [7, 8], [4, 5], [2, 3], [6, 7]]
    assert kept("window:1") == [[7, 8], [7, 8], [4, 5], [2, 3], [6, 7]]
    assert kept("strided:3") == [[2, 5, 8], [2, 5, 8], [2, 5], [0, 3], [1, 4, 7]]
    assert kept("global:0,7") == [[0, 7], [0, 7], [0], [0], [0, 7]]
    scores = seen.scores.numpy()
    assert kept("topk:2") == [sorted(np.argsort(-row)[:2].tolist()) for row in scores]
    mean = seen.attention.mean(0).numpy()
    heavy = set(np.argsort(-mean)[:3].tolist())
    assert set(kept("heavy:3")[0]) == heavy
    last = seen.attention[:2].mean(0).numpy()  # the queries at the last place
    assert set(kept("heavy:2:last=1")[0]) == set(np.argsort(-last)[:2].tolist())
    norm = seen.k.norm(dim=1).numpy()
    assert set(kept("keynorm:3")[0]) == set(np.argsort(norm)[:3].tolist())
    assert kept("sinks:1+recent", 3) == [[0, 7, 8], [0, 7, 8], [0, 4, 5], [0, 2, 3], [0, 6, 7]]


def test_expected_attention_is_the_gaussian_laplace_transform() -> None:
    """Against drawn queries: the mean of exp(score) over 10^6 queries of the fitted law; 5 standard
    errors, 3e-6 for 9 keys.
    """
    seen = context(sharp=0.8)
    q = seen.q * seen.scale
    cov = torch.cov(q.T, correction=0) + 0 * torch.eye(4)
    generator = torch.Generator().manual_seed(3)
    root = torch.linalg.cholesky(cov + 1e-14 * torch.eye(4))
    drawn = q.mean(0) + torch.randn(10**6, 4, generator=generator, dtype=torch.float64) @ root.T
    growth = torch.exp(drawn @ seen.k.T)
    simulated, stderr = growth.mean(0), growth.std(0) / 1000
    order = keep.ExpectedAttention().order(seen)
    size = seen.v.norm(dim=1)
    factor = torch.exp(order) / size
    ratio = simulated / factor
    assert bool(
        (
            (ratio / ratio.mean() - 1).abs()
            < 5 * stderr / simulated + 5 * (stderr / simulated).mean()
        ).all()
    )


@pytest.mark.parametrize("text", ["heavy:3", "heavy:3:last=2", "neyman:3:shared", "expected:3"])
def test_heads_below_each_other_decide_together(text: str) -> None:
    """Two query heads of one key-value head, their queries at the same places: one set of keys,
    from the sums over both.
    """
    places = [4, 6, 8]
    generator = torch.Generator().manual_seed(6)
    k, v = (torch.randn(KEYS, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    heads = [3 * torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    both = keep.Context.of(torch.cat(heads), k, v, positions=places * 2)
    each = [keep.Context.of(q, k, v, positions=places) for q in heads]
    p = keep.parse(text).include(both).probability
    torch.testing.assert_close(p[:3], p[3:], rtol=0, atol=0)
    alone = [keep.parse(text).include(one).probability for one in each]
    if text.startswith("heavy"):
        some = slice(1, 3) if "last" in text else slice(None)
        mean = sum(one.attention[some].sum(0) for one in each)
        assert set(p[2].nonzero()[:, 0].tolist()) == set(mean.topk(3).indices.tolist())
    if text.startswith("neyman"):
        # see the heavy key below
        lost = [torch.where(one.attention > 0.5, 1 - one.attention, 1.0) for one in each]
        gains = [
            one.attention * one.distance / scale for one, scale in zip(each, lost, strict=True)
        ]
        gain = sum(one.square().sum(0) for one in gains).sqrt()
        factor = p[2] / gain
        below = p[2] < 1
        torch.testing.assert_close(factor[below], factor[below].mean().expand(int(below.sum())))
        assert bool((p[2, ~below] <= factor[below].mean() * gain[~below]).all())
        assert float(p[2].sum()) == pytest.approx(3)
    assert not all(torch.equal(p[:3], one) for one in alone), "neither head decides for both"


@pytest.mark.parametrize("text", ["neyman", "neyman:shared"])
def test_neyman_does_not_lose_the_key_that_has_all_the_weight(text: str) -> None:
    """Its |c| is 0 in any arithmetic, and to first order nothing hangs on it."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (1, 9, 9))
    k[3] = 400 * q[0]
    seen = keep.Context.of(q, k, v)
    assert float(seen.attention[0, 3]) == 1
    assert float(seen.distance[0, 3]) == 0
    assert float(keep.parse(text).include(seen, 3).probability[0, 3]) == 1
    only = keep.Context.of(q, k, v, positions=[0])
    assert torch.isfinite(keep.parse(text).include(only, 1).probability).all()


def test_neyman_gains_of_a_heavy_key() -> None:
    """pi |c| / (1 - pi) where pi > 1/2, pi |c| elsewhere."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (1, 9, 9))
    k[3] = 1.5 * q[0]
    seen = keep.Context.of(3 * q, k, v)
    pi = seen.attention[0]
    assert 0.5 < float(pi[3]) < 1
    gain = pi * seen.distance[0]
    gain[3] /= 1 - pi[3]
    p = keep.Neyman(1).include(seen).probability[0]
    inside = p < 1
    ratio = (p / gain)[inside]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert float(p.sum()) == pytest.approx(1)


def test_neyman_is_the_least_first_order_error() -> None:
    """No move of chance from one key to another makes sum (1/p - 1) pi^2 |c|^2 smaller, and the
    chances sum to n.
    """
    seen = context(sharp=1.0)
    gain = (seen.attention * seen.distance).square()
    p = keep.Neyman(4).include(seen).probability
    assert p.sum(1).numpy() == pytest.approx(4)

    def error(p: torch.Tensor) -> torch.Tensor:
        return ((1 / p - 1) * gain).sum(1)

    best = error(p)
    for i in range(KEYS):
        for j in range(KEYS):
            move = torch.zeros_like(p)
            move[:, i] += 1e-4
            move[:, j] -= 1e-4
            there = p + move
            allowed = ((there > 0) & (there <= 1)).all(1)
            assert bool((error(there.clamp(1e-9, 1))[allowed] >= best[allowed] * (1 - 1e-9)).all())


def test_collisions_of_magicpig() -> None:
    """Probabilities against drawn hyperplanes: 4000 sets of tables, error below .008; 5 of them,
    3e-5 over 45 pairs.
    """
    seen = context(sharp=1.0)
    p = keep.MagicPIG(bits=2, tables=4).include(seen).probability
    generator = torch.Generator().manual_seed(1)
    hits = torch.zeros_like(p)
    k = seen.k - seen.k.mean(0)
    for _ in range(4000):
        planes = torch.randn(4, 2, 4, generator=generator, dtype=torch.float64)
        ours, theirs = (
            torch.einsum("tbk,mk->tbm", planes, seen.q) > 0,
            torch.einsum("tbk,nk->tbn", planes, k) > 0,
        )
        same = ours[..., None] == theirs[:, :, None]
        hits += (same.all(1).sum(0) >= 2).double()
    assert float((hits / 4000 - p).abs().max()) < 5 * 0.5 / math.sqrt(4000)


def test_a_share_is_written_with_all_its_digits() -> None:
    rule = keep.Random(0.123456789012345) | keep.Sinks(2)
    assert keep.parse(str(rule)) == rule


def test_the_adaptive_budget() -> None:
    """b = (z sigma n / (epsilon D))^2, key by key: 4 of 9 keys are sure, and the budget stays
    between the base and n.
    """
    seen = context(sharp=1.0)
    rule = keep.VAttention(0.1, 0.2, sinks=1, recent=1, topk=2, base=0.3)
    sure = (keep.Sinks(1) | keep.Recent(1) | keep.TopK(2)).include(seen).sure
    p = rule.include(seen).probability
    budgets = []
    for i in range(5):
        e = [math.exp(x) for x in seen.scores[i].tolist()]
        rest = [x for x, held in zip(e, sure[i].tolist(), strict=True) if not held]
        budget = (0.8416212335729143 * statistics.pstdev(rest) * len(rest) / (0.1 * sum(e))) ** 2
        budgets.append(min(max(math.floor(budget), 2), len(rest)))
        np.testing.assert_allclose(p[i, ~sure[i]].numpy(), budgets[-1] / len(rest), rtol=1e-12)
    assert len(set(budgets)) > 1
    assert str(rule) == "sinks:1+recent:1+topk:2+adaptive:delta=0.2:base=0.3"


BAD = (
    ("adaptive:0", "adaptive: expected a number above 0 and up to 1, got 0"),
    ("adaptive:0.1:delta=0.5", "adaptive, delta: expected a number below 0.5, got 0.5"),
    ("adaptive:0.1:base=2", "adaptive, base: expected a number above 0 and up to 1, got 2"),
    ("adaptive:0.1+random:0.2", "either all reweight or none"),
    ("window:0", "window: expected a whole number of at least 1, got 0"),
    ("recent:10", "recent: expected at most 9, the number of keys, got 10"),
    ("random:1.5", "random: expected a number above 0 and up to 1, got 1.5"),
    ("random:0", "random: expected a number above 0 and up to 1, got 0"),
    ("nearest:3", "keep: no rule 'nearest' in 'nearest:3'; "),
    ("snapvk", "keep: no rule 'snapvk'; did you mean snapkv? "),
    ("kvzp:4", "keep: no rule 'kvzp' in 'kvzp:4'; did you mean kvzip"),
    ("sinks:", "keep: expected a number, got '' in 'sinks:'"),
    ("sinks:4:4", "keep: 'sinks:4:4' is not how sinks is written: sinks:SIZE"),
    ("sinks:2++recent:3", "keep: no rule ''"),
    ("topk+recent", "keep: one part at most may leave its number open, got topk and recent"),
    ("random:0.2+random:0.2:reweight", "either all reweight or none"),
    ("topk:reweight", "keep: 'topk:reweight' is not how topk is written"),
    ("", "keep: expected a rule such as"),
    ("sinks:4:reweight", "keep: 'sinks:4:reweight' is not how sinks is written: sinks:SIZE"),
    ("random:0.5:reweight=3", "is not how random is written: random:SHARE:reweight"),
    ("random:reweight:reweight", "keep: reweight is given twice in 'random:reweight:reweight'"),
    ("heavy:3:last=2:last=5", "keep: last is given twice"),
    ("sinks:size", "keep: 'sinks:size' is not how sinks is written: sinks:SIZE"),
    ("sinks:4:size=3", "is not how sinks is written"),
    ("sinks:1e400", "sinks: expected a whole number of at least 1, got inf"),
    ("random:share=nan", "random: expected a number above 0 and up to 1, got nan"),
    ("recent:-3", "recent: expected a whole number of at least 1, got -3"),
    ("strided:0", "strided: expected a whole number of at least 1, got 0"),
    ("magicpig:2:0", "magicpig, tables: expected a whole number of at least 1, got 0"),
    ("bigbird", "is not how bigbird is written: bigbird:WINDOW:SHARE:AT"),
    ("lowrank:3", "lowrank: it mixes all keys and keeps none"),
    ("lowrank:0", "lowrank: expected a whole number of at least 1, got 0"),
    ("+", "keep: no rule ''"),
)


LIST = "esscher rules lists all rules"


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_rules_are_refused_in_one_line_that_names_the_list(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        keep.parse(text).include(context(), None)
    assert message in str(refused.value)
    assert str(refused.value).endswith(LIST)
    assert "\n" not in str(refused.value)


BAD_IN_PYTHON: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: keep.Window(0), "window: expected a whole number of at least 1, got 0"),
    (lambda: keep.Sinks(True), "sinks: expected a whole number of at least 1, got True"),
    (lambda: keep.TopK(2.0), "topk: expected a whole number of at least 1, got 2.0"),  # type: ignore[arg-type]
    (
        lambda: keep.Recent(10).include(context()),
        "recent: expected at most 9, the number of keys, got 10",
    ),
    (lambda: keep.Random(-0.1), "random: expected a number above 0 and up to 1, got -0.1"),
    (
        lambda: keep.Random(float("nan")),
        "random: expected a number above 0 and up to 1, got nan",
    ),
    (lambda: keep.Global((-1,)), "global: expected positions from 0 on, got (-1,)"),
    (
        lambda: keep.Sinks() | keep.Recent(),
        "keep: one part at most may leave its number open, got sinks and recent",
    ),
    (lambda: keep.Random(0.1) | keep.MagicPIG(), "either all reweight or none"),
    (
        lambda: keep.Sinks(2) | keep.LowRank(3),
        "keep: lowrank:3 mixes all keys and joins no other part",
    ),
    (lambda: keep.LowRank(3).include(context()), "lowrank: it mixes all keys and keeps none"),
    (
        lambda: exact_pool_curve(context().q, context().k, context().v, keep=keep.LowRank(10)),
        "lowrank: expected ranks of at most 9",
    ),
    (
        lambda: keep.VAttention(delta=0.7, topk=3),
        "adaptive, delta: expected a number below 0.5, got 0.7",
    ),
)


@pytest.mark.parametrize(("make", "message"), BAD_IN_PYTHON)
def test_bad_rules_in_python(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        make()
    assert message in str(refused.value)
    assert str(refused.value).endswith(LIST)
    assert "\n" not in str(refused.value)


def test_every_rule_with_a_name_is_in_the_table() -> None:
    """And so is enumerated in tests/errors/integral/test_inclusion.py; lowrank keeps no
    keys.
    """
    written = {piece.split(":")[0] for text, _ in RULES for piece in text.split("+")}
    assert written == set(keep.rules()) - {"lowrank"}


def test_n_where_it_belongs() -> None:
    with pytest.raises(ValueError, match=r"random has no number of its own; got none"):
        keep.Random().include(context())
    with pytest.raises(ValueError, match=r"every number of the rule is given; got 3"):
        keep.Sinks(2).include(context(), 3)
    with pytest.raises(ValueError, match=r"expected 1 to 9 keys, got 10"):
        keep.Random().include(context(), 10)
    with pytest.raises(ValueError, match=r"keeps 4 keys surely; expected at least as many, got 2"):
        (keep.Sinks(4) | keep.Random()).include(context(), 2)


def test_a_mask_and_the_models_own_scores_take_the_place_of_positions_and_products():
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (2, 6, 6))
    mask = torch.tensor([[1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    logits = 3 * torch.tanh(q @ k.T / 3)
    seen = dataclasses.replace(keep.Context.of(q, k, v, positions=[1, 4]), mask=mask, logits=logits)
    assert torch.equal(seen.attention, torch.softmax(logits.masked_fill(~mask, -torch.inf), 1))
    near = keep.Recent(3).include(seen).probability
    # nearest to 1 and to 4, of what is seen
    assert near.tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]]
    second = seen.take(torch.tensor([1]))
    assert torch.equal(second.scores, seen.scores[1:])
    with pytest.raises(ValueError, match="keeps 3 keys surely; expected at least as many, got 2"):
        (keep.Recent(3) | keep.TopK()).include(seen, 2)
    assert (keep.Recent(3) | keep.TopK()).least(seen) == 3
