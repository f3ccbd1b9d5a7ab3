"""Queries that stand later: rotations found from a model's queries, against the queries that the
model itself makes at the later positions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esscher.hf.call import AttentionCall
from esscher.hf.capture import capture
from esscher.hf.rotation import moved, rotations
from tests.models.tiny import VOCABULARY, model_of

STEP, PIECES, TOKENS = 5, 7, 31
ROTARY = ("llama", "qwen3", "gemma3_text", "gpt_oss", "gpt_neox", "phi", "olmo2")
OTHERS = ("gpt2", "opt")  # learned positions


def queries(model: Any, positions: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of random tokens, by layer (heads, tokens, width)."""
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (1, len(positions)), generator=drawn)
    found: dict[int, torch.Tensor] = {}

    def see(call: AttentionCall) -> None:
        found[call.layer] = call.query[0]

    with torch.no_grad(), capture(model, see):
        model(input_ids=ids, position_ids=positions[None], use_cache=False)
    return found


@pytest.mark.parametrize("family", ROTARY)
def test_a_moved_query_is_the_models_own_at_the_later_position(family: str) -> None:
    """Queries are moved by different numbers of steps; the model runs once for each number."""
    model = model_of(family)[1]
    turns = rotations(model, STEP, PIECES + 1)
    here = torch.arange(TOKENS)
    before = queries(model, here)
    assert turns.keys() == before.keys()
    steps = (TOKENS - here) // STEP
    apart = {layer: moved(query, steps, turns[layer]) for layer, query in before.items()}
    for count in range(PIECES):
        own = steps == count
        later = queries(model, here + count * STEP)
        for layer, query in apart.items():
            torch.testing.assert_close(query[:, own], later[layer][:, own], rtol=2e-4, atol=2e-5)
            alike = torch.allclose(query[:, own], before[layer][:, own], rtol=1e-2, atol=1e-3)
            assert alike == (count == 0)


@pytest.mark.parametrize("family", OTHERS)
def test_queries_of_learned_positions_are_not_moved(family: str) -> None:
    assert rotations(model_of(family)[1], STEP, PIECES) == {}


def test_no_room_behind_the_prompt() -> None:
    model = model_of("llama")[1]
    most = model.config.max_position_embeddings
    assert rotations(model, most, 2) == {}
