"""Every rule on the twelve heads of a layer of the packaged model, real prose: exact against
simulation, and known cases.

Each comparison with a simulation allows 4 standard errors, a false alarm of 6e-5; there are 12
heads x 17 rules with sizes, 204 of them, 1.3 % in all, and the seeds are fixed.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import esscher as es
from tests.real_head import real_head

HEADS = range(12)
LAYER, KEYS = 2, 384
PLACES = [383, 382, 350, 300, 256, 200]
REPEATS = 300
BY_CHANCE = (
    *(
        (text, n)
        for text in ("random", "random:reweight", "neyman", "neyman:shared")
        for n in (24, 160)
    ),
    *(
        (text, n)
        for text in ("sinks:4+recent:16+random", "topk:8+random:reweight", "bigbird:8")
        for n in (32, 128)
    ),
    ("topk:4+random:0.3:reweight", None),
)
SURE = (
    *(
        (text, n)
        for text in ("sinks", "recent", "topk", "heavy", "heavy:last=2", "keynorm", "expected")
        for n in (16, 128)
    ),
    *(
        (text, None)
        for text in (
            "window:20",
            "strided:7",
            "global:0,100",
            "streamingllm:4:60",
            "longformer:16:at=0,50",
        )
    ),
)


@functools.cache
def context(head: int) -> es.keep.Context:
    q, k, v = (x.double() for x in real_head(LAYER, head, KEYS))
    return es.keep.Context.of(q[PLACES], k, v, positions=PLACES)


def curve(head: int, text: str, n: int | None) -> es.ErrorCurve:
    seen = context(head)
    found = es.exact_pool_curve(
        seen.q, seen.k, seen.v, n, keep=text, positions=PLACES, details=True
    )
    assert found.queries is not None
    return found


@pytest.mark.parametrize(("text", "n"), BY_CHANCE)
def test_exact_is_simulated(text: str, n: int | None) -> None:
    for head in HEADS:
        seen = context(head)
        kept = es.keep.parse(text).include(seen, n)
        weight = torch.ones_like(kept.probability) if kept.weight is None else kept.weight
        generator = torch.Generator().manual_seed(1000 + head)
        chosen = (
            torch.rand(REPEATS, *kept.probability.shape, generator=generator, dtype=torch.float64)
            < kept.probability
        )
        logits = (seen.scores + weight.log()).masked_fill(~chosen, -torch.inf)
        some = chosen.any(2)
        share = torch.softmax(torch.where(some[:, :, None], logits, 0.0), 2)
        error = torch.where(some[:, :, None], share @ seen.v - seen.limit, 0.0)
        drawn = error.square().sum(2).mean(1)
        stderr = float(drawn.std()) / REPEATS**0.5
        assert abs(float(drawn.mean()) - curve(head, text, n).rms[0] ** 2) < 4 * stderr, head


@pytest.mark.parametrize(("text", "n"), SURE)
def test_sure_keys_are_plain_softmax(text: str, n: int | None) -> None:
    for head in HEADS:
        seen = context(head)
        kept = es.keep.parse(text).include(seen, n).sure
        found = curve(head, text, n).queries
        for i, row in enumerate(kept):
            there = row.nonzero()[:, 0]
            out = torch.softmax(seen.q[i] @ seen.k[there].T / 32**0.5, 0) @ seen.v[there]
            np.testing.assert_allclose(found.bias[i, 0], out - seen.limit[i], atol=1e-11)
            np.testing.assert_allclose(
                found.mse[i, 0], float((out - seen.limit[i]).square().sum()), rtol=1e-9, atol=1e-20
            )


def test_random_keys_are_the_bernoulli_sampling() -> None:
    for head in HEADS:
        seen = context(head)
        n = [4, 300]
        known = es.exact_pool_curve(seen.q[:3], seen.k, seen.v, n, "bernoulli")
        found = es.exact_pool_curve(seen.q[:3], seen.k, seen.v, n, keep="random")
        np.testing.assert_allclose(found.queries.mse, known.queries.mse, rtol=1e-12)
