"""Exact errors of kept keys on heads of real models, against dropping keys by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import esscher as es
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from tests.models.real_models import encoder, language_model, window

DRAWS = 2000
SHARES = (0.1, 0.3, 0.7)


def dropped(
    scores: torch.Tensor, v: torch.Tensor, share: float, generator: torch.Generator
) -> tuple[float, float]:
    """Mean squared error when each key is kept with this probability, and its standard error;
    attention on no key is right.
    """
    kept = torch.rand(DRAWS, len(scores), generator=generator) < share
    some = kept.any(1)
    outputs = torch.softmax(scores.masked_fill(~kept[some], -torch.inf), dim=-1) @ v
    errors = torch.zeros(DRAWS, dtype=torch.float64)
    errors[some] = (outputs - torch.softmax(scores, dim=-1) @ v).square().sum(-1)
    return float(errors.mean()), float(errors.std()) / DRAWS**0.5


def deviations(
    model: Any, inputs: dict[str, torch.Tensor], places: list[tuple[int, int]], position: int
) -> list[float]:
    """In standard errors, for one query of each head (layer, head) and each share of its keys."""
    found: list[float] = []
    generator = torch.Generator().manual_seed(15)
    at = torch.tensor([position])

    def sink(captured: AttentionCall) -> None:
        seen = captured.visible(at)[0, 0, 0]
        for head in [head for layer, head in places if layer == captured.layer]:
            own = head // (captured.heads // captured.kv_heads)
            q, k, v = (
                captured.query[0, head, at],
                captured.key[0, own, seen],
                captured.value[0, own, seen],
            )
            n = [round(share * len(k)) for share in SHARES]
            exact = es.exact_pool_curve(q, k, v, n, sampling="bernoulli", scale=captured.scale)
            assert exact.queries is not None
            scores = captured.scale * (k.double() @ q[0].double())
            for kept, ours in zip(n, exact.queries.mse[0].tolist(), strict=True):
                mean, error = dropped(scores, v.double(), kept / len(k), generator)
                found.append((mean - ours) / error)

    forward(model, inputs, sink, layers=sorted({layer for layer, _ in places}))
    assert len(found) == len(places) * len(SHARES)
    print(f"largest of {len(found)} deviations: {max(map(abs, found)):.2f} standard errors")
    return found


def test_errors_of_the_real_encoder_are_those_of_dropping_keys() -> None:
    """36 comparisons to 4 standard errors: a false alarm once in 440 seeds."""
    model, tokenizer = encoder()
    places = [(layer, head) for layer in range(6) for head in (layer, 11 - layer)]
    assert max(map(abs, deviations(model, window(tokenizer, 256), places, 200))) < 4


@pytest.mark.slow
def test_errors_of_the_real_language_model_are_those_of_dropping_keys() -> None:
    """36 comparisons to 4 standard errors: a false alarm once in 440 seeds."""
    model, tokenizer = language_model()
    places = [(layer, (2 * layer + 1) % 9) for layer in (0, 1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29)]
    assert max(map(abs, deviations(model, window(tokenizer, 512), places, 400))) < 4
