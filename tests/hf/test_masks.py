"""Masks: those of transformers, and none where attention is causal or sees every key."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from esscher.hf.call import AttentionCall, model_mask, spelled_mask
from esscher.hf.capture import forward, parity
from tests.models.tiny import FAMILIES, VOCABULARY, build, inputs_of, model_of

masked = importlib.import_module("esscher.hf.call")
LONG = 1024


class Sizes(TorchDispatchMode):
    """The largest tensor that is made, and the pairs of queries and keys that fused attention is
    given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.pairs = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.largest = max(
                    self.largest, one.untyped_storage().nbytes() // one.element_size()
                )
        if "scaled_dot_product" in str(function):
            self.pairs += args[0].shape[2] * args[1].shape[2]
        return out


def long_model(name: str, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    family = next(family for family in FAMILIES if family.name == name)
    options = {**family.options, **more}
    places = next(key for key in ("max_position_embeddings", "n_positions") if key in options)
    model = build(family.config, {**options, places: LONG})
    ids = torch.randint(3, VOCABULARY, (1, LONG), generator=torch.Generator().manual_seed(5))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_blocks_of_rows_change_no_output(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four queries at a time, fused or explicit, whatever mask, bias, cap and sinks the family has;
    in double precision.

    Where scores are capped or there are sinks, the softmax of transformers is float32 whatever the
    model.
    """
    family, model = model_of(name)
    # its experts know no float64
    dtype = torch.float32 if "sinks" in family.traits else torch.float64
    model = copy.deepcopy(model).to(dtype)
    monkeypatch.setattr(masked, "ROWS", 4)
    monkeypatch.setattr(masked, "EXPLICIT_SCORES", 4 * 2 * family.heads * family.tokens)
    given = inputs_of(family, padded=padded)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in given.items()}
    with torch.no_grad():
        largest = float(model(**inputs)[0].abs().max())
    found = parity(model, inputs) / largest
    print(f"{name}: {found}")
    assert found <= (1e-6 if family.traits & {"softcap", "sinks"} else 1e-13)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_no_mask_and_no_scores_of_all_pairs_are_made(name: str) -> None:
    """In 1024 tokens of 32 numbers nothing has even half as many entries as there are pairs, where
    no token is padding and no layer slides.
    """
    model, inputs = long_model(name)
    at, seen = torch.tensor([3, LONG - 40]), []

    def sink(captured: AttentionCall) -> None:
        seen.append(captured.visible(at).sum(-1)[0, 0].tolist())

    with Sizes() as sizes:
        forward(model, inputs, sink)
    assert len(seen) == model.config.num_hidden_layers
    assert sizes.largest < LONG * LONG // 2


def test_a_sliding_layer_costs_tokens_times_window() -> None:
    window = 16
    model, inputs = long_model("mistral", sliding_window=window)
    with Sizes() as sizes:
        forward(model, inputs, lambda captured: None)
    assert sizes.pairs <= model.config.num_hidden_layers * LONG * (window + masked.ROWS)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.causal_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(3),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "packed": masking_utils.packed_sequence_mask_function(
        torch.tensor([[0] * 5 + [1] * 6, [0] * 11])
    ),
}


def given(function: Any, padding: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    sizes = {"batch_size": 2, "q_length": 11, "kv_length": 11, "q_offset": 0, "kv_offset": 0}
    made = {"mask_function": function, "attention_mask": padding, "device": torch.device("cpu")}
    return {**sizes, **made, **more}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_are_those_of_transformers(name: str, padded: bool) -> None:
    """Also where queries begin behind keys that came before (a cache)."""
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[1, :2] = not padded
    for queries, first in ((11, 0), (4, 7)):
        asked = given(
            FUNCTIONS[name], padding, q_length=queries, q_offset=first, allow_is_causal_skip=False
        )
        assert torch.equal(model_mask(**asked), masking_utils.sdpa_mask(**asked))


def test_a_mask_is_left_out_where_it_is_causal_and_nothing_else() -> None:
    causal, sliding = (
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function,
    )
    ones = torch.ones(2, 11, dtype=torch.bool)
    assert model_mask(**given(causal)) is None
    assert model_mask(**given(causal, ones)) is None
    assert model_mask(**given(sliding(12), ones, local_size=12)) is None
    assert spelled_mask(**given(causal, ones)) is not None
    assert model_mask(**given(sliding(5), ones, local_size=5)) is not None
    assert model_mask(**given(causal, ones.index_fill(1, torch.tensor([2]), 0))) is not None
    assert model_mask(**given(causal, ones, q_length=4, q_offset=7)) is not None


def test_heads_may_have_masks_of_their_own() -> None:
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(1, 3, 5, 7, generator=generator) < 0.5
    q, k = torch.zeros(1, 3, 5, 4), torch.zeros(1, 3, 7, 4)
    call = AttentionCall(0, "", q, k, k, 1.0, allowed)
    assert torch.equal(call.visible(torch.tensor([4, 1])), allowed[:, :, [4, 1]])
    one_row = AttentionCall(0, "", q, k, k, 1.0, allowed[:, :, :1])
    assert one_row.allowed is not None
    assert one_row.allowed.shape == (1, 3, 5, 7)
    blind = AttentionCall(0, "", q, k, k + 1, 1.0, torch.zeros(1, 1, 5, 7, dtype=torch.bool))
    assert not bool(blind.output().nan_to_num().any())
