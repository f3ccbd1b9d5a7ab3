"""W_O as it is found while a model runs, against the weights where a family keeps them."""

from __future__ import annotations

import pytest
import torch

from esscher.hf.maps import head_projections
from tests.models.tiny import FAMILIES, model_of


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_layer_has_its_output_projection(name: str) -> None:
    family, model = model_of(name)
    found = head_projections(model)
    shape = (family.heads, family.width, 32)
    assert {layer: tuple(own.shape) for layer, own in found.items()} == dict.fromkeys(
        range(family.layers), shape
    )


def test_it_is_the_weight_that_the_family_has() -> None:
    llama = model_of("llama")[1]
    weight = llama.model.layers[1].self_attn.o_proj.weight.detach()
    assert torch.allclose(head_projections(llama)[1].flatten(0, 1), weight.T, atol=1e-6)
    gpt2 = model_of("gpt2")[1]  # stores it the other way round
    assert torch.allclose(
        head_projections(gpt2)[0].flatten(0, 1),
        gpt2.transformer.h[0].attn.c_proj.weight.detach(),
        atol=1e-5,
    )
    bert = model_of("bert")[1]  # in a module beside the one that attends
    dense = bert.encoder.layer[1].attention.output.dense.weight.detach()
    assert torch.allclose(head_projections(bert)[1].flatten(0, 1), dense.T, atol=1e-5)
