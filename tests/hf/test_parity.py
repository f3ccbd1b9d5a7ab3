"""Capturing changes no output, and says so with a number."""

from __future__ import annotations

import importlib

import pytest
import torch

from esscher.hf.capture import expected_layers, forward, parity
from esscher.hf.loading import load_model
from tests.models.tiny import FAMILIES, REFUSED, build, inputs_of, model_of


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_outputs_are_equal_and_layers_are_counted(name: str, padded: bool) -> None:
    family, model = model_of(name)
    found = parity(model, inputs_of(family, padded=padded))
    print(f"{name}: {found}")
    assert found <= 1e-6
    seen: list[int] = []
    forward(model, inputs_of(family), lambda call: seen.append(call.layer))
    assert len(seen) == expected_layers(model) == family.layers


def test_the_packaged_model_is_at_parity_on_text() -> None:
    loaded = load_model()
    texts = ["Attention is a weighted mean.", "How many tokens does attention need? " * 9]
    found = parity(loaded.model, dict(loaded.tokenizer(texts, padding=True, return_tensors="pt")))
    print(f"packaged model: {found}")
    assert found <= 1e-6


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
    assert parity(model, inputs_of(family)) > 0.01


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
