"""A head's limit is what the model itself computes: attention outputs taken from its own modules,
before their last projection.

On that side there is no code of ours: plain hooks on the model as transformers made it, in the
implementation it chose.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from esscher.runs import Run
from tests.models.probe_runs import few_texts, own_state, source, tiny_model
from tests.models.real_models import encoder, language_model, window
from tests.models.tiny import inputs_of, model_of

# Where a family's attention output can be had: what leaves a module, or what enters one (its last
# projection).
LEAVES = {"bert": "attention.self"}
ENTERS = {
    "gpt2": "attn.c_proj",
    "t5": "SelfAttention.o",
    "bart": "self_attn.out_proj",
    "opt": "self_attn.out_proj",
    "modernbert": "attn.Wo",
}
TINY = ("bert", "gpt2", "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "t5")


def own_outputs(
    model: Any, inputs: dict[str, torch.Tensor], family: str, heads: int
) -> list[torch.Tensor]:
    """(batch, heads, tokens, width) of every layer of the model, in order, by hooks."""
    found: list[torch.Tensor] = []

    def leaves(module: Any, args: Any, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    def enters(module: Any, args: Any) -> None:
        found.append(args[0])

    inside = LEAVES.get(family)
    suffix = inside or ENTERS.get(family, "self_attn.o_proj")
    modules = [module for name, module in model.named_modules() if name.endswith(suffix)]
    hooks = [
        module.register_forward_hook(leaves) if inside else module.register_forward_pre_hook(enters)
        for module in modules
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [out.flatten(2).unflatten(2, (heads, -1)).transpose(1, 2).double() for out in found]


def limit(captured: AttentionCall, at: torch.Tensor) -> torch.Tensor:
    """Attention of single queries over all they see, in float64 from what was captured: (batch,
    heads, m, width).
    """
    groups = captured.heads // captured.kv_heads
    key, value = (
        x.double().repeat_interleave(groups, dim=1) for x in (captured.key, captured.value)
    )
    scores = captured.scale * captured.query[:, :, at].double() @ key.mT
    if captured.softcap is not None:
        scores = captured.softcap * torch.tanh(scores / captured.softcap)
    bias = captured.bias_at(at)
    scores = (scores if bias is None else scores + bias).masked_fill(
        ~captured.visible(at), -torch.inf
    )
    total = scores.logsumexp(-1, keepdim=True)
    if captured.sinks is not None:
        total = torch.logaddexp(total, captured.sinks.double()[None, :, None, None])
    return torch.exp(scores - total) @ value


def caught(model: Any, inputs: dict[str, torch.Tensor]) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    forward(model, inputs, found.append)
    return found


def real(outputs: torch.Tensor, inputs: dict[str, torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Those of queries that are not padding."""
    return outputs.transpose(1, 2)[inputs["attention_mask"][:, at].bool()]


def difference(model: Any, inputs: dict[str, torch.Tensor], family: str, at: torch.Tensor) -> float:
    """The largest of all layers, heads and coordinates, relative to the layer's largest output
    where that is above 1.
    """
    calls = caught(model, inputs)
    own = own_outputs(model, inputs, family, calls[0].heads)
    assert len(own) == len(calls)
    worst = 0.0
    for captured, theirs in zip(calls, own, strict=True):
        apart = real(limit(captured, at) - theirs[:, :, at], inputs, at).abs().max()
        worst = max(worst, float(apart / theirs.abs().max().clamp_min(1.0)))
    return worst


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_the_limit_is_the_models_own_output(name: str, padded: bool) -> None:
    family, model = model_of(name)
    found = difference(
        model, inputs_of(family, padded=padded), name, torch.tensor([12, 0, 6, 4, 9])
    )
    print(f"{name}: {found:.1e}")
    assert found <= 1e-5


def test_what_the_families_are_for_is_there() -> None:
    """Shared key heads, windows beside whole contexts, a soft cap, sink logits, a position bias:
    each once at least.
    """
    seen = {
        name: caught(model, inputs_of(family))
        for name in TINY
        for family, model in [model_of(name)]
    }
    assert all(
        seen[name][0].kv_heads < seen[name][0].heads
        for name in ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss")
    )
    for name in ("gemma2", "gemma3_text", "gpt_oss"):
        assert {captured.window is None for captured in seen[name]} == {True, False}
    assert all(captured.softcap is not None for captured in seen["gemma2"])
    assert all(captured.sinks is not None for captured in seen["gpt_oss"])
    assert all(captured.bias is not None for captured in seen["t5"])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gpt2", "mask"),
        ("gemma3_text", "mask"),
        ("gemma2", "softcap"),
        ("gpt_oss", "sinks"),
        ("t5", "bias"),
    ],
)
def test_nothing_may_be_left_out(name: str, part: str) -> None:
    """Without one part of its attention no layer's limit is the model's output: the comparison sees
    each of them.
    """
    family, model = model_of(name)
    inputs, at = inputs_of(family), torch.tensor([4, 9])
    gone = {"mask": None, "causal": False} if part == "mask" else {part: None}
    for captured, theirs in zip(
        caught(model, inputs), own_outputs(model, inputs, name, family.heads), strict=True
    ):
        difference = float((limit(replace(captured, **gone), at) - theirs[:, :, at]).abs().max())
        assert difference > 1e-3


def test_the_limit_is_the_real_encoders_own_output() -> None:
    model, tokenizer = encoder()
    inputs = window(tokenizer, 256)
    found = difference(model, inputs, "bert", torch.arange(0, 256, 17))
    print(f"MiniLM, 72 heads: {found:.1e}")
    assert found <= 1e-5


@pytest.mark.slow
def test_the_limit_is_the_real_language_models_own_output() -> None:
    model, tokenizer = language_model()
    inputs = window(tokenizer, 512)
    found = difference(model, inputs, "llama", torch.arange(0, 512, 33))
    print(f"SmolLM2, 270 heads: {found:.1e}")
    assert found <= 1e-5


# ---- the probe's own numbers
# -----------------------------------------------------------------------------------------


def probe_difference(run: Run, model: Any, family: str) -> float:
    """Between the limits in the states of a run and the model's own outputs for the same queries,
    as in ``difference``.
    """
    found = source(run)
    windows = np.unique(found.queries.windows)
    own = own_outputs(model, found.inputs(windows), family, found.loaded.heads)
    place = torch.from_numpy(np.searchsorted(windows, found.queries.windows))
    at = torch.from_numpy(found.queries.positions)
    worst, compared = 0.0, 0
    for layer in found.layers:
        for head, known in own_state(found, layer).heads.items():
            assert not isinstance(known, str), known
            theirs = own[layer][place[known.queries], head, at[known.queries]]
            apart = (known.found["draws"]["limit"] - theirs).abs().max()
            worst = max(worst, float(apart / own[layer].abs().max().clamp_min(1.0)))
            compared += len(known.queries)
    assert compared > 0
    return worst


@pytest.mark.parametrize("name", TINY)
def test_the_probes_limit_is_the_models_own_output(name: str, tmp_path: Path) -> None:
    """Heads of the first and of the last key head, in every layer; a window of 24 tokens beside
    whole contexts of 64.
    """
    options = {"sliding_window": 24} if name in ("gemma2", "gemma3_text", "gpt_oss") else {}
    model, words = tiny_model(name, **options)
    settings = {
        "max_tokens": 100,
        "window": 64,
        "queries": 4,
        "kept_queries": 1,
        "rules": ("none",),
        "n": "16",
        "heads": (0, 3),
    }
    run = es.probe(model, few_texts(), tokenizer=words, out=tmp_path, pool="sequence", **settings)
    assert set(run.table("heads")["status"]) == {"ok"}
    found, said = (
        probe_difference(run, model, name),
        float(run.table("about")["output_difference"].iloc[0]),
    )
    print(f"{name}: {found:.1e}, the run says {said:.1e}")
    assert found <= 1e-5
    assert said <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model_of_its_own"), [("bert", encoder), ("llama", language_model)]
)
def test_the_probes_limits_are_the_real_models_own_outputs(
    name: str, model_of_its_own: Any, tmp_path: Path
) -> None:
    """All 72 heads of MiniLM, all 270 of SmolLM2."""
    model, words = model_of_its_own()
    settings = {
        "max_tokens": 512,
        "window": 256,
        "queries": 8,
        "kept_queries": 1,
        "rules": ("none",),
        "n": "16",
    }
    run = es.probe(model, few_texts(), tokenizer=words, out=tmp_path, pool="sequence", **settings)
    assert set(run.table("heads")["status"]) == {"ok"}
    found, said = (
        probe_difference(run, model, name),
        float(run.table("about")["output_difference"].iloc[0]),
    )
    print(f"{len(run.table('heads'))} heads: {found:.1e}, the run says {said:.1e}")
    assert found <= 1e-5
    assert said <= 1e-5
