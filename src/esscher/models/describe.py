"""What a model's attention looks like and what a probe of it costs, from its configuration: no
weights are read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esscher.models.huggingface.capture import AttentionCall, forward
from esscher.models.huggingface.checkpoint import (
    Source,
    read_config,
    resolve,
    stored_as,
    weight_files,
)
from esscher.models.huggingface.example import example_inputs
from esscher.models.huggingface.gguf_model import skeleton
from esscher.models.huggingface.loading import positions
from esscher.models.huggingface.support import expected_layers, refusal
from esscher.models.probe.spec import KEYS, OWN_WINDOW, ProbeSpec

__all__ = ["Cost", "ModelDescription", "describe_model", "estimate_cost"]

DEFAULT = ProbeSpec()
PASSES = 70  # fused attention passes over the same pairs that a probe costs (benchmarks/probe.py)
HELD = 1 << 28  # bytes of one block of windows and of scores, roughly
LIBRARIES = 4e8  # bytes of a process that has loaded nothing yet


@dataclass(frozen=True)
class Cost:
    """Time and memory of a probe: of ``tokens`` of text, ``keys`` of which a query meets.
    ``matmul`` (floating-point operations a second) and ``fused`` (query-key pairs a second) were
    measured on this machine just before.
    """

    seconds: float
    forward_seconds: float
    bytes: int
    tokens: int
    keys: int
    queries: int
    matmul: float
    fused: float
    threads: int


@dataclass(frozen=True)
class ModelDescription:
    """A model's attention by its configuration. ``windows`` lists the sliding windows of its
    layers, None is no window; ``weights`` says what its files hold, where they are here.
    """

    name: str
    family: str
    architecture: str
    weights: str | None
    supported: bool
    reason: str | None
    parameters: int
    layers: int | None
    heads: int | None
    kv_heads: int | None
    width: int | None
    hidden_size: int | None
    max_positions: int | None
    positions: str
    causal: bool | None
    windows: tuple[int | None, ...]
    softcap: float | None
    sinks: bool
    encoder_of_pair: bool
    cost: Cost | None


def describe_model(
    name: Any = None, *, revision: str | None = None, cost: bool = True, asked: ProbeSpec = DEFAULT
) -> ModelDescription:
    """Build the model without memory for its weights, let it run on shapes only, and report what
    its attention is given.
    """
    source = resolve(name)
    config = read_config(source, revision)
    paired = bool(getattr(config, "is_encoder_decoder", False))
    model = skeleton(config, source.shown)
    if paired:
        model = model.get_encoder()
    reason = refusal(model)
    seen: list[AttentionCall] = []
    if reason is None:
        reason = _run(model, seen)
    heads = _heads(seen)
    layers = expected_layers(model) if reason is None else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wanted = cost and reason is None and layers is not None and bool(seen)
    return ModelDescription(
        name=source.shown,
        family=str(config.model_type),
        architecture=type(model).__name__,
        weights=_weights(source),
        supported=reason is None,
        reason=reason,
        parameters=parameters,
        layers=layers,
        max_positions=positions(model),
        positions=_position_kind(model, seen),
        windows=_windows(model, seen, layers),
        encoder_of_pair=paired,
        cost=(
            estimate_cost(
                model, seen[0], int(layers or 0), heads["causal"], source.file is not None, asked
            )
            if wanted
            else None
        ),
        **heads,
    )


def _weights(source: Source) -> str | None:
    files = weight_files(source, None) if Path(source.where).exists() else []
    return stored_as(files) if files else None


def _run(model: Any, seen: list[AttentionCall]) -> str | None:
    """Run the model on shapes, keeping what its layers were given; the reason if nothing came."""
    inputs = example_inputs(model)
    mask = {"attention_mask": torch.ones_like(inputs["input_ids"])} if "input_ids" in inputs else {}
    for more in ({}, mask):
        seen.clear()
        try:
            forward(model, {**inputs, **more}, seen.append, hidden=True)
        except ValueError as cause:
            return str(cause)
        except (RuntimeError, NotImplementedError):
            # a step that needs numbers; without a mask some models look for packed sequences,
            # experts are chosen by value
            if not seen:
                continue
        return None
    return (
        None
        if seen
        else (
            f"{type(model).__name__}: its attention was not reached without weights; esscher probe"
            " will tell"
        )
    )


def _heads(seen: Sequence[AttentionCall]) -> dict[str, Any]:
    if not seen:
        names = ("heads", "kv_heads", "width", "hidden_size", "causal", "softcap")
        return {**dict.fromkeys(names), "sinks": False}
    first = seen[0]
    return {
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        "width": int(first.query.shape[-1]),
        "hidden_size": None if first.hidden is None else int(first.hidden.shape[-1]),
        "causal": all(captured.allowed is not None for captured in seen),
        "softcap": first.softcap,
        "sinks": first.sinks is not None,
    }


def _windows(
    model: Any, seen: Sequence[AttentionCall], layers: int | None
) -> tuple[int | None, ...]:
    """As seen; where the run ended early, by the configuration's list of layer kinds."""
    if layers is None or len(seen) >= layers:
        return tuple(captured.window for captured in seen)
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:
        return (seen[0].window,) * layers if seen else ()
    return tuple(
        getattr(model.config, "sliding_window", None) if "sliding" in kind else None
        for kind in kinds
    )


def _position_kind(model: Any, seen: Sequence[AttentionCall]) -> str:
    classes = {type(module).__name__.lower() for module in model.modules()}
    if any("rotary" in name for name in classes):
        return "rotary"
    if any(captured.bias is not None for captured in seen):
        return "relative bias"
    names = [
        key.lower() for key, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    names += [key.lower() for key, _ in model.named_parameters(recurse=True) if "position" in key]
    if any("position" in key or key.endswith("wpe") for key in names):
        return "learned"
    return "unknown"


def estimate_cost(
    model: Any,
    captured: AttentionCall,
    layers: int,
    causal: bool,
    packed: bool,
    asked: ProbeSpec = DEFAULT,
) -> Cost:
    """Forward passes over the text at the measured speed of matrix products, and PASSES fused
    attention passes over the pairs.

    Of the probe that is ``asked`` for: its text (all of it counts as KEYS tokens), windows,
    queries, layers and heads. Queries of a causal model meet the keys of their own window, of one
    layer after the other; those of an encoder the keys of the whole text, held for all layers.
    Memory is weights in float32, these keys and values, and one block of scores; or the weights
    twice, while those of a GGUF file (``packed``) are read.
    """
    own = causal if asked.pool == "auto" else asked.pool == "sequence"
    tokens = asked.corpus.max_tokens or KEYS
    window = asked.window or OWN_WINDOW
    keys = min(window, positions(model) or window) if own else tokens
    layers = layers if asked.layers is None else len(asked.layers)
    heads = captured.heads if asked.heads is None else len(asked.heads)
    embeddings = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight.is_meta
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matmul, fused = _matmul_speed(), _fused_speed(int(captured.query.shape[-1]))
    forward_seconds = 2.0 * max(parameters - embeddings, 0) * tokens / matmul
    pairs = layers * heads * asked.queries * keys
    width = int(captured.key.shape[-1] + captured.value.shape[-1])
    pool = 4 * (1 if own else layers) * keys * captured.kv_heads * width
    return Cost(
        seconds=forward_seconds + PASSES * pairs / fused,
        forward_seconds=forward_seconds,
        bytes=int(LIBRARIES + max(4 * parameters + pool + HELD, 8 * parameters if packed else 0)),
        tokens=tokens,
        keys=keys,
        queries=asked.queries,
        matmul=matmul,
        fused=fused,
        threads=torch.get_num_threads(),
    )


def _matmul_speed(seconds: float = 0.2) -> float:
    """Floating-point operations a second of float32 matrix products."""
    size = 768
    left, right = torch.ones(size, size), torch.ones(size, size)
    return 2.0 * size**3 * _calls_per_second(lambda: left @ right, seconds)


def _fused_speed(width: int, seconds: float = 0.2) -> float:
    """Query-key pairs a second of fused attention of this width."""
    query, key = torch.zeros(1, 4, DEFAULT.queries, width), torch.zeros(1, 4, KEYS, width)
    with torch.no_grad():
        return (
            4.0
            * DEFAULT.queries
            * KEYS
            * _calls_per_second(lambda: F.scaled_dot_product_attention(query, key, key), seconds)
        )


def _calls_per_second(call: Any, seconds: float) -> float:
    call()
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or calls == 0:
        call()
        calls += 1
    return calls / spent
