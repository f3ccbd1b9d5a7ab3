"""Affine maps read off by differentiation, against the weights of the models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import esscher as es
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from esscher.hf.loading import load_model
from esscher.hf.maps import LinearMaps, linear_maps
from tests.models.tiny import FAMILIES, inputs_of, model_of


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_maps_give_back_queries_keys_and_values_on_other_inputs(name: str) -> None:
    family, model = model_of(name)
    maps = linear_maps(model)
    assert [found.layer for found in maps] == list(range(family.layers))
    assert all(list(found.maps) == list("qkv" if family.affine else "v") for found in maps)
    seen: list[AttentionCall] = []
    forward(model, inputs_of(family), seen.append, hidden=True)
    for found, captured in zip(maps, seen, strict=True):
        tensors = {"q": captured.query, "k": captured.key, "v": captured.value}
        for letter, (weight, bias) in found.maps.items():
            assert captured.hidden is not None
            rebuilt = captured.hidden @ weight.T + bias
            torch.testing.assert_close(
                rebuilt, tensors[letter].transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5
            )


def test_bert_maps_are_its_weights() -> None:
    _, model = model_of("bert")
    for found in linear_maps(model):
        module = model.get_submodule(found.name)
        for letter, part in (("q", module.query), ("k", module.key), ("v", module.value)):
            weight, bias = found.maps[letter]
            assert torch.equal(weight, part.weight)
            assert torch.equal(bias, part.bias)
            assert float(part.bias.detach().abs().max()) > 0.1


def test_gpt2_maps_are_parts_of_its_fused_transposed_weight() -> None:
    _, model = model_of("gpt2")
    for found in linear_maps(model):
        fused = model.get_submodule(found.name).c_attn
        for i, letter in enumerate("qkv"):
            columns = slice(32 * i, 32 * (i + 1))
            weight, bias = found.maps[letter]
            torch.testing.assert_close(weight, fused.weight[:, columns].T, rtol=0, atol=0)
            torch.testing.assert_close(bias, fused.bias[columns], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "modernbert"])
def test_the_reason_is_given_where_there_is_no_map(name: str) -> None:
    _, model = model_of(name)
    first, *_ = linear_maps(model, layers=[0])
    with pytest.raises(ValueError, match=r"no linear maps: q and k are not affine.*rotary"):
        first.head(0)


def test_the_model_is_as_before() -> None:
    _, model = model_of("gpt2")
    before = [parameter.requires_grad for parameter in model.parameters()]
    linear_maps(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def brute_force(module: Any, index: int, heads: int, root: torch.Tensor) -> tuple[float, float]:
    """Both horizons from full d x d matrices: A = W_k^T W_q / sqrt(k), symmetric root of Sigma,
    largest singular value.
    """
    width = module.query.weight.shape[0] // heads
    rows = slice(index * width, (index + 1) * width)
    A = (
        module.key.weight[rows].detach().double().T
        @ module.query.weight[rows].detach().double()
        / math.sqrt(width)
    )
    return float(torch.linalg.svdvals(root @ A)[0]), float(torch.linalg.svdvals(root @ A @ root)[0])


def check_horizons(
    model: Any, inputs: dict[str, torch.Tensor], layers: list[int], heads: list[int]
) -> None:
    seen: list[AttentionCall] = []
    forward(model, inputs, seen.append, hidden=True, layers=layers)
    for found, captured in zip(linear_maps(model, layers=layers), seen, strict=True):
        assert captured.hidden is not None
        cov = torch.cov(captured.hidden.flatten(0, 1).double().T)
        values, vectors = torch.linalg.eigh(cov)
        root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
        law = es.Gaussian(cov)
        for index in heads:
            head = found.head(index)
            one, two = brute_force(model.get_submodule(found.name), index, found.heads, root)
            assert head.horizon(law, sided=1) == pytest.approx(one, rel=1e-6)
            assert head.horizon(law, sided=2) == pytest.approx(two, rel=1e-6)
            assert head.coupling(law) == pytest.approx(float(values[-1]) * one**2, rel=1e-6)


def test_horizons_of_tiny_heads_equal_brute_force() -> None:
    _, model = model_of("bert")
    inputs = {
        "input_ids": torch.randint(3, 61, (8, 60), generator=torch.Generator().manual_seed(1))
    }
    check_horizons(model, inputs, [0, 1], [0, 1, 2, 3])


def test_horizons_and_coupling_of_real_heads_equal_brute_force() -> None:
    loaded = load_model()
    text = (
        "The horizon of a head is the largest singular value of its scores under the covariance of"
        " its tokens. " * 40
    )
    inputs = loaded.tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
    check_horizons(loaded.model, dict(inputs), [0, 5], [0, 4, 11])


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_heads_from_maps_score_as_the_model_does_and_biases_matter(name: str) -> None:
    """Scores of a head, up to one number per query, and its values; T5 does not divide by sqrt(k),
    gpt2 does.
    """
    family, model = model_of(name)
    seen: list[AttentionCall] = []
    forward(model, inputs_of(family), seen.append, hidden=True)
    for found, captured in zip(linear_maps(model), seen, strict=True):
        assert captured.hidden is not None
        tokens = captured.hidden[0]
        head = found.head(3)
        scores = captured.scale * captured.query[0, 3] @ captured.key[0, 3].T
        ours = head.queries(tokens) @ head.keys(tokens).T
        torch.testing.assert_close(_centred(ours), _centred(scores), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.values(tokens), captured.value[0, 3], rtol=1e-4, atol=1e-5)
        if name != "t5":  # T5 has no biases
            without = (head.queries(tokens) - head.query_bias) @ head.keys(tokens).T
            assert float((_centred(without) - _centred(scores)).abs().max()) > 0.1


def _centred(scores: torch.Tensor) -> torch.Tensor:
    """Softmax sees scores up to a constant for each query: the key bias drops out."""
    return scores - scores.mean(dim=-1, keepdim=True)


def test_key_heads_are_shared_in_order() -> None:
    generator = torch.Generator().manual_seed(2)
    wq, wk, wv = (torch.randn(rows, 5, generator=generator) for rows in (12, 6, 4))
    weights = {"q": wq, "k": wk, "v": wv}
    maps = LinearMaps(
        0, "a", 4, 2, 0.5, {letter: (w, torch.zeros(len(w))) for letter, w in weights.items()}
    )
    torch.testing.assert_close(maps.head(2).A, 0.5 * wk[3:].T @ wq[6:9])
    torch.testing.assert_close(maps.head(1).V, wv[:2])
    with pytest.raises(ValueError, match="heads 0 to 3, got 4"):
        maps.head(4)
