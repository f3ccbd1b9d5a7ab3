"""What a model's attention looks like and what a probe of it costs, from its configuration: no
weights are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from esscher.corpus.windows import Windows
from esscher.hf.call import AttentionCall
from esscher.hf.capture import example_inputs, expected_layers, forward, refusal
from esscher.hf.checkpoint import (
    Source,
    read_config,
    resolve,
    stored_as,
    weight_files,
)
from esscher.hf.gguf import skeleton
from esscher.hf.gradients import DRAWS
from esscher.hf.loading import Loaded, outline_of, positions, task_of, wrap_model
from esscher.hf.package import quiet, transformers
from esscher.probe.job import check_asked, unit_tables
from esscher.probe.measure import LayerState, layer_tables
from esscher.probe.pools import PLACES, window_layers
from esscher.probe.session import Session, session_on, window_length
from esscher.probe.spec import KEYS, ProbeSpec

DEFAULT = ProbeSpec()
BLOCK = 1 << 28  # bytes of one block of windows and of scores, roughly
LIBRARIES = 4e8  # bytes of a process that has loaded nothing yet
PARTS = 4  # of a large corpus that are laid out to count its work; the others are like them
TRIED = (2048, 8192)  # keys of the two small pools that are timed


@dataclass(frozen=True)
class Work:
    """How often each stage of a probe is done.

    ``forward`` and ``backward``: tokens that go through the model, and tokens that gradients come
    back from. ``pieces``: for each head the windows, or the keys, that are measured; ``compared``:
    those of the windows in which keep rules are compared; ``heads``: heads that tables are made of.
    """

    forward: int
    backward: int
    pieces: int
    compared: int
    heads: int


@dataclass(frozen=True)
class Speed:
    """Seconds of processor time, measured on this machine just before: of a token forward and a
    token backward (from ``matmul``, floating-point operations a second), of a piece of one head, of
    one with keep rules, and of the tables of a head.
    """

    forward: float
    backward: float
    piece: float
    compared: float
    tables: float
    matmul: float


@dataclass(frozen=True)
class Cost:
    """Processor time and memory of a probe of ``tokens`` of text, ``keys`` of which a query meets:
    the stages of ``work`` at their ``speed``.
    """

    seconds: float
    forward_seconds: float
    bytes: int
    tokens: int
    keys: int
    queries: int
    work: Work
    speed: Speed
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
        cost=(_cost(source, config, revision, asked) if wanted else None),
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


def _cost(source: Source, config: Any, revision: str | None, asked: ProbeSpec) -> Cost | None:
    loaded = outline_of(source, config, revision, with_head=asked.pool != "corpus")
    return None if loaded is None else estimate_cost(loaded, asked, source.file is not None)


def estimate_cost(loaded: Loaded, asked: ProbeSpec = DEFAULT, packed: bool = False) -> Cost:
    """Every stage of the probe that is ``asked`` for (text without a number of tokens counts as
    KEYS), counted, times its speed on this machine.

    Memory is weights in float32 and what a process holds beside them: keys and values of a window,
    or of the corpus where they fit, or the states of some layers while a corpus that does not fit
    streams by part by part; or the weights twice, while those of a GGUF file (``packed``) are read.
    """
    tokens = asked.corpus.max_tokens or KEYS
    length = window_length(asked, loaded)
    laid_out = min(tokens, PARTS * asked.part)
    session = session_on(asked, loaded, _blank(max(1, laid_out // length), min(length, laid_out)))
    check_asked(session)
    work, speed = count_work(session, tokens), _speed(session)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    forward = work.forward * speed.forward
    measured = work.pieces * speed.piece + work.compared * speed.compared
    return Cost(
        seconds=forward + work.backward * speed.backward + measured + work.heads * speed.tables,
        forward_seconds=forward,
        bytes=int(
            LIBRARIES
            + max(4 * parameters + _held(session) + BLOCK, 8 * parameters if packed else 0)
        ),
        tokens=tokens,
        keys=session.windows.length if session.own else tokens,
        queries=len(session.queries),
        work=work,
        speed=speed,
        threads=torch.get_num_threads(),
    )


def count_work(session: Session, tokens: int) -> Work:
    """The stages of a probe of so many tokens; the session may be of fewer, where it has several
    parts.

    A corpus goes through the model once for each block of layers, and windows of queries once more
    where it has several parts. Where rules are compared a language model gives gradients of drawn
    next tokens at the last places of a window, after a prefill of the others.
    """
    length, layers = session.windows.length, session.layers
    heads = sum(len(session.heads(layer)) for layer in layers)
    asking = len(session.query_windows)
    depth = (max(layers) + 1) / session.loaded.layers  # a pass ends after the last of them
    if not session.own:
        again = asking * length if len(session.parts) > 1 else 0
        forward = depth * len(session.blocks) * (tokens + again)
        return Work(round(forward), 0, heads * tokens, 0, heads)
    rules = len(session.rule_windows)
    felt = rules if task_of(session.loaded.model) == "language" else 0
    return Work(
        round(depth * asking * length) + felt * length,
        felt * min(PLACES, length // 4) * DRAWS,
        heads * (asking - rules),
        heads * rules,
        heads,
    )


def _held(session: Session) -> float:
    """Bytes of keys and values that a process holds at once: of a window, or of a part of the
    corpus.
    """
    shapes = {layer: session.loaded.shapes[layer] for layer in session.layers}
    each = {i: 4 * one.kv_heads * (one.width + one.value_width) for i, one in shapes.items()}
    if session.own:
        return float(max(each.values()) * session.windows.length)
    tokens = max(int(session.pooled[part].sum()) for part in session.parts)
    return float(max(sum(each[layer] for layer in block) for block in session.blocks) * tokens)


def _blank(windows: int, length: int) -> Windows:
    """Windows full of a text of random tokens."""
    shape = (windows, length)
    ids = np.random.default_rng(0).integers(1, 500, shape, dtype=np.int32)
    text, none = np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool)
    return Windows(ids, text, none, none, 1, "", "")


def _speed(session: Session) -> Speed:
    """Time each stage on a random model of one layer and two heads, of this model's widths."""
    matmul, heads, length = _matmul_speed(), 2, session.windows.length
    per_token, small = _operations(session) / matmul, _small_model(session)
    if session.own:
        share = len(session.queries) // len(session.query_windows)
        counts = {"queries": 2 * share, "kept_queries": share}
        trial = _trial(session, small, counts, _blank(2, length))
        first, states = next(iter(trial.rule_windows), 0), list[LayerState]()
        windows = (1 - first, 1 - first, first)  # the first call of all is slow
        _, piece, ruled = (_timed(window_layers, trial, i, states.append) for i in windows)
        tables = _timed(layer_tables, trial, states[-1])
        parts = (piece / heads, ruled / heads, tables / heads)
        return Speed(per_token, 2 * per_token, *parts, matmul)
    found = []
    for keys in (TRIED[0], *TRIED):
        trial = _trial(session, small, {}, _blank(max(1, keys // length), length))
        unit = {"layers": [0], "part": 0, "heads": [0, 1]}
        found.append((trial.keys, _timed(unit_tables, trial, unit)))
    (few, short), (many, long) = found[1:]
    piece = max(long - short, 0.0) / (many - few)
    tables = max(short - piece * few, 0.0)
    return Speed(per_token, 2 * per_token, piece / heads, 0.0, tables / heads, matmul)


def _timed(work: Callable[..., object], *arguments: Any) -> float:
    """Processor time of a call."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def _trial(session: Session, small: Loaded, counts: dict[str, Any], windows: Windows) -> Session:
    """The same settings on the small model."""
    # places, and numbers of keys that a small pool may not have
    settings = dict.fromkeys(("layers", "heads", "n", "moments_n", "planted"))
    spec = ProbeSpec.read({**session.spec.as_dict(), **settings, **counts})
    return session_on(spec, small, windows)


def _small_model(session: Session) -> Loaded:
    shape = session.loaded.shapes[session.layers[0]]
    config = transformers().LlamaConfig(
        hidden_size=session.loaded.hidden_size,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=shape.width,
        num_hidden_layers=1,
        intermediate_size=16,
        vocab_size=512,
        max_position_embeddings=session.windows.length,
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return wrap_model(transformers().LlamaForCausalLM(config).eval(), name="a small model")


def _operations(session: Session) -> float:
    """Floating-point operations of one token forward: two for each weight, and four for each key,
    head and coordinate.
    """
    weights = sum(
        parameter.numel()
        for module in session.loaded.model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1
    )
    attention = sum(
        shape.heads * (shape.width + shape.value_width) * session.windows.length
        for shape in session.loaded.shapes
    )
    return 2.0 * float(weights + attention)


def _matmul_speed(seconds: float = 0.2) -> float:
    """Floating-point operations a second of float32 matrix products."""
    size = 768
    left, right = torch.ones(size, size), torch.ones(size, size)
    left @ right
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds or calls == 0:
        left @ right
        calls += 1
    return 2.0 * size**3 * calls / spent
