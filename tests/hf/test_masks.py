"""Masks told row by row: the same numbers as masks spelled out, and nothing of all pairs of
tokens.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from esscher.hf.call import AttentionCall, Mask, MaskTensor, causal_mask, given_mask, model_mask
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
        if any(isinstance(one, MaskTensor) for one in args):
            return NotImplemented
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
    inputs = inputs_of(family, padded=padded)
    found = parity(
        model, {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    )
    print(f"{name}: {found}")
    assert found.relative <= (1e-6 if family.traits & {"softcap", "sinks"} else 1e-13)


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "mistral", "modernbert", "gemma2", "gemma3_text", "gpt_oss"]
)
@pytest.mark.parametrize("padded", [False, True])
def test_no_mask_and_no_scores_of_all_pairs_are_made(name: str, padded: bool) -> None:
    """In 1024 tokens of 32 numbers nothing has even half as many entries as there are pairs, where
    attention is fused.
    """
    model, inputs = long_model(name)
    if padded:
        inputs["attention_mask"][:, -37:] = 0
    at, seen = torch.tensor([3, LONG - 40]), []

    def sink(captured: AttentionCall) -> None:
        seen.append(captured.visible(at).sum(-1)[0, 0].tolist())

    explicit = name in ("gemma2", "gpt_oss")
    with Sizes() as sizes:
        forward(model, inputs, sink)
    assert len(seen) == model.config.num_hidden_layers
    assert sizes.largest < (
        masked.EXPLICIT_SCORES + masked.EXPLICIT_SCORES // 64 if explicit else LONG * LONG // 2
    )


def test_a_sliding_layer_costs_tokens_times_window() -> None:
    window = 16
    model, inputs = long_model("mistral", sliding_window=window)
    with Sizes() as sizes:
        forward(model, inputs, lambda captured: None)
    assert sizes.pairs <= model.config.num_hidden_layers * LONG * (window + masked.ROWS)


FUNCTIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    "causal": (masking_utils.causal_mask_function, False),
    "sliding": (masking_utils.sliding_window_causal_mask_function(3), False),
    "both sides": (masking_utils.sliding_window_bidirectional_mask_function(2), False),
    "chunked": (masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])), False),
    "packed": (
        masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 6, [0] * 11])),
        False,
    ),
    "by values": (lambda b, h, q, k: torch.where(q % 2 == 0, k < 3, k > q - 4), True),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_and_blocks_are_those_of_the_mask_spelled_out(name: str, padded: bool) -> None:
    """Against transformers' own mask, also where queries begin behind keys that came before (a
    cache).
    """
    function, vmap = FUNCTIONS[name]
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[1, :2] = not padded
    for queries, first in ((11, 0), (4, 7)):
        given = {
            "batch_size": 2,
            "q_length": queries,
            "kv_length": 11,
            "q_offset": first,
            "kv_offset": 0,
            "use_vmap": vmap,
        }
        given |= {
            "mask_function": function,
            "attention_mask": padding,
            "local_size": 3,
            "device": torch.device("cpu"),
        }
        expected = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
        found = model_mask(**given)
        assert isinstance(found, MaskTensor)
        assert found.shape == expected.shape
        assert torch.equal(found.mask.whole(), expected)
        at = torch.tensor([3, 0, 2])
        assert torch.equal(found.mask.rows(at), expected[:, :, at])
        for start, stop in ((0, 2), (1, 4)):
            for _ in range(2):  # found, and found again
                reach, rows = found.mask.block(start, stop)
                assert torch.equal(rows, expected[:, :, start:stop, reach])
                assert expected[:, :, start:stop].sum() == rows.sum()  # nothing seen lies outside
                assert rows[..., 0].any()
                assert rows[..., -1].any()


def test_a_mask_is_called_causal_where_it_is_that_and_nothing_else() -> None:
    def mask(function: Any, padding: torch.Tensor | None = None, **more: Any) -> Mask:
        given = {
            "batch_size": 1,
            "q_length": 9,
            "kv_length": 9,
            "q_offset": 0,
            "kv_offset": 0,
            "mask_function": function,
        }
        found = model_mask(
            **given | {"attention_mask": padding, "device": torch.device("cpu")} | more
        )
        assert isinstance(found, MaskTensor)
        return found.mask

    causal, sliding = (
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function,
    )
    ones = torch.ones(1, 9, dtype=torch.bool)
    assert mask(causal).causal
    assert mask(causal, ones).causal
    assert mask(sliding(12), ones, local_size=12).causal
    assert not mask(sliding(5), ones, local_size=5).causal
    assert not mask(causal, ones.index_fill(1, torch.tensor([2]), 0)).causal
    # the model adds something of its own
    assert not mask(causal, ones, allow_is_causal_skip=False).causal
    # the kernel would count from the first key
    assert not mask(causal, ones, q_length=4, q_offset=5).causal
    assert (
        model_mask(
            batch_size=1,
            q_length=9,
            kv_length=9,
            mask_function=masking_utils.bidirectional_mask_function,
            attention_mask=ones,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=True,
        )
        is None
    )


def test_models_that_calculate_with_a_mask_get_its_numbers() -> None:
    mask = causal_mask(5, 5, torch.device("cpu"))
    lazy, whole = MaskTensor(mask, 2), mask.whole().expand(2, 1, 5, 5)
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.device) == (
        whole.shape,
        torch.bool,
        4,
        whole.device,
    )
    for use in (
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m[:, :, -2:, :3],
        lambda m: ~m,
        lambda m: m & m.mT,
        lambda m: (1.0 - m.float()) * -9.0,
        lambda m: torch.cat([m, m], dim=-1),
        lambda m: m.expand(-1, 3, -1, -1),
        lambda m: torch.zeros(2, 1, 5, 5).masked_fill(m, 1.0),
        lambda m: torch.nn.functional.scaled_dot_product_attention(
            *[torch.eye(5).expand(2, 3, 5, 5)] * 3, attn_mask=m
        ),
    ):
        assert torch.equal(use(lazy), use(whole))
        assert type(use(lazy)) is torch.Tensor


def test_heads_may_have_masks_of_their_own() -> None:
    allowed = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    mask = given_mask(allowed, 5, 7)
    assert torch.equal(mask.rows(torch.tensor([4, 1])), allowed[:, :, [4, 1]])
    assert given_mask(allowed[:, :, :1], 5, 7).whole().shape == (1, 3, 5, 7)
    reach, rows = given_mask(torch.zeros(1, 1, 5, 7, dtype=torch.bool), 5, 7).block(0, 5)
    assert (reach, rows.shape) == (slice(0, 1), (1, 1, 5, 1))


def test_older_arguments_give_a_mask_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases that say by cache_position where queries stand: their own function makes the mask,
    never skipped.
    """
    made = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **given: asked.append(given) or made)
    assert model_mask(batch_size=1, cache_position=3) is made
    assert asked == [{"batch_size": 1, "cache_position": 3, "allow_is_causal_skip": False}]
