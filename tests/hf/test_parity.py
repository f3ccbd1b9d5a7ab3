"""Capturing changes no output, and says so with a number."""

from __future__ import annotations

import importlib

import pytest
import torch

from esscher.hf.capture import Parity, parity
from esscher.hf.loading import load_model
from tests.models.tiny import FAMILIES, REFUSED, build, inputs_of, model_of


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_outputs_are_equal_and_layers_are_counted(name: str, padded: bool) -> None:
    family, model = model_of(name)
    found = parity(model, inputs_of(family, padded=padded))
    print(f"{name}: {found}")
    assert found.max_difference <= 1e-6
    assert found.relative <= 1e-6
    assert found.holds
    assert found.captured == found.expected == family.layers


def test_the_packaged_model_is_at_parity_on_text() -> None:
    loaded = load_model()
    texts = ["Attention is a weighted mean.", "How many tokens does attention need? " * 9]
    found = parity(loaded.model, dict(loaded.tokenizer(texts, padding=True, return_tensors="pt")))
    print(f"packaged model: {found}")
    assert found.max_difference <= 1e-6
    assert (found.captured, found.expected) == (6, 6)


def test_a_lost_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is no formality: without causality gpt2 gives other logits."""
    capturing = importlib.import_module("esscher.hf.capture")
    every = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    monkeypatch.setattr(
        capturing,
        "model_mask",
        lambda **given: every.expand(-1, -1, given["q_length"], given["kv_length"]),
    )
    family, model = model_of("gpt2")
    found = parity(model, inputs_of(family))
    assert found.max_difference > 0.01
    assert not found.holds


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_captured_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"(own code|without one softmax).*what works: albert, bert"
    ):
        parity(build(*REFUSED[name]))


def test_layers_that_escape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = model_of("bert")
    monkeypatch.setattr(
        importlib.import_module("esscher.hf.capture"),
        "expected_layers",
        lambda model: 3,
    )
    with pytest.raises(
        ValueError, match="has 3 attention layers by its configuration, 2 were captured"
    ):
        parity(model)


def test_small_and_large_outputs_hold_to_their_own_size() -> None:
    assert Parity(5e-6, 1e-8, 2, 2).holds
    assert Parity(1e-7, 1e-3, 2, None).holds
    assert not Parity(5e-6, 2e-6, 2, 2).holds
