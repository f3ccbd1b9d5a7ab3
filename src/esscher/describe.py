"""What a model's attention looks like and what a probe of it costs, from its configuration: no
weights are read.
"""

from __future__ import annotations

import math
import time
import timeit
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from torch import nn

from esscher.corpus.windows import Windows
from esscher.hf.capture import example_inputs, forward, refusal
from esscher.hf.checkpoint import read_config, resolve
from esscher.hf.gguf import skeleton
from esscher.hf.gradients import DRAWS
from esscher.hf.loading import DTYPES, Loaded, encoder_of, outline_model, positions, task_of
from esscher.probe.job import check_asked
from esscher.probe.session import Session, session_on, window_length
from esscher.probe.spec import KEYS, ProbeSpec
from esscher.probe.statistics.frontier import PLACES

DEFAULT = ProbeSpec()
BLOCK = 1 << 28  # bytes of one block of windows and of scores, roughly
LIBRARIES = 4e8  # bytes of a process that has loaded nothing yet
PARTS = 4  # of a large corpus that are laid out to count its work; the others are like them
SIDE, PRODUCTS = 768, 20  # of the matrix products that are timed

# Operations that take as long as the statistics, measured on MiniLM and SmolLM2: good to a factor
# of about 2.
OF_HEAD = 1e10  # tables of a head
OF_KEY = 2.5e6  # a key of a head
OF_PAIR = 8e3  # a query and a key
OF_WINDOW = 2.5e9  # a head in a window that is the pool
OF_RULE = 7e6  # a key of a head under one keep rule


@dataclass(frozen=True)
class Cost:
    """Processor time and memory of a probe: floating-point operations of its stages, at the speed
    of matrix products on this machine.
    """

    seconds: float
    bytes: int
    tokens: int  # of text
    keys: int  # that a query meets
    queries: int
    units: int  # of work, which workers share
    operations: dict[str, float]
    speed: float  # operations a second

    def facts(self) -> dict[str, str]:
        """Processor time and memory of the probe, and the speed that they come from."""
        pool = f"{self.queries} queries on {self.tokens:,} tokens in windows of {self.keys:,}"
        if self.keys == self.tokens:
            pool = f"{self.keys:,} keys, {self.queries} queries"
        forward = self.operations["forward"] / self.speed
        return {
            "a probe costs": (
                f"about {_time(self.seconds)} of processor time and {self.bytes / 1e9:.2g} GB"
                f" ({pool}; forward passes: {_time(forward)})"
            ),
            "measured here": f"{self.speed / 1e9:.3g} GFLOP/s, measured here",
        }


@dataclass(frozen=True)
class ModelDescription:
    """A model's attention by its configuration."""

    name: str
    family: str
    architecture: str
    supported: bool
    reason: str | None
    parameters: int
    layers: int | None
    heads: int | None
    kv_heads: int | None
    width: int | None
    hidden_size: int | None
    max_positions: int | None
    causal: bool | None
    cost: Cost | None

    @property
    def heads_in_all(self) -> int | None:
        return None if self.layers is None or self.heads is None else self.layers * self.heads

    def facts(self) -> dict[str, str]:
        """What is known, by label."""
        found: dict[str, Any] = {
            "family": f"{self.family} ({self.architecture})",
            "supported": "yes" if self.supported else f"no: {self.reason}",
            "parameters": self.parameters,
            "layers": self.layers,
            "heads per layer": self.heads,
            "key-value heads per layer": self.kv_heads,
            "heads in all": self.heads_in_all,
            "head width": self.width,
            "hidden size": self.hidden_size,
            "longest sequence": self.max_positions or "no limit given",
            "mask": {None: "", True: "causal", False: "every token sees every token"}[self.causal],
            **({} if self.cost is None else self.cost.facts()),
        }
        return {
            name: f"{value:,}" if isinstance(value, int) else str(value)
            for name, value in found.items()
            if value
        }

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
            for name, value in self.facts().items()
        )
        return f"<b>{escape(self.name)}</b><table>{rows}</table>"


def describe(
    model: Any = None, *, revision: str | None = None, cost: bool = True, asked: ProbeSpec = DEFAULT
) -> ModelDescription:
    """A model's layers, heads and positions, whether it is supported, and what a probe of it costs:
    what ``esscher describe`` prints.

    ``model``: as :func:`esscher.probe` takes it by name. It is built without memory for its weights
    and runs on shapes only; of an encoder-decoder the encoder alone. ``asked``: the probe whose
    cost is estimated.
    """
    source = resolve(model)
    config = read_config(source, revision)
    with_head = asked.pool != "corpus"
    loaded = outline_model(model, revision=revision, with_head=with_head, weights=False)
    built = encoder_of(skeleton(config, source.shown)) if loaded is None else loaded.model
    reason = None if loaded else refusal(built) or _refused(built)
    names = ("layers", "heads", "kv_heads", "width", "hidden_size", "causal")
    return ModelDescription(
        name=source.shown,
        family=str(config.model_type),
        architecture=type(built).__name__,
        supported=reason is None,
        reason=reason,
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        **{name: getattr(loaded, name, None) for name in names},
        max_positions=positions(built) if loaded is None else loaded.max_positions,
        cost=estimate_cost(loaded, asked) if loaded and cost else None,
    )


def _refused(model: Any) -> str:
    """Why a model, which has no weights, shows no attention."""
    try:
        forward(model, example_inputs(model), lambda call: None)
    except (RuntimeError, NotImplementedError):
        pass  # a step that needs numbers
    except ValueError as cause:
        return str(cause)
    return f"{type(model).__name__}: not reached without weights; esscher probe will tell"


def estimate_cost(loaded: Loaded, asked: ProbeSpec = DEFAULT) -> Cost:
    """Every stage of the probe that is ``asked`` for, counted, over the speed of this machine; text
    without a number of tokens counts as KEYS.

    Memory is the weights, the keys and values that are held at once in float32, and a block.
    """
    tokens = asked.corpus.max_tokens or KEYS
    length = window_length(asked, loaded)
    laid_out = min(tokens, PARTS * asked.part)
    shape = (max(1, laid_out // length), min(length, laid_out))
    text, none = np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool)
    windows = Windows(np.zeros(shape, dtype=np.int32), text, none, none, 1, "")
    session = session_on(asked, loaded, windows)
    check_asked(session)
    operations, square = count_operations(session, tokens), torch.ones(SIDE, SIDE)
    square @ square  # the first product is slow
    spent = timeit.timeit(lambda: square @ square, timer=time.process_time, number=PRODUCTS)
    speed = 2.0 * SIDE**3 * PRODUCTS / spent
    units = len(session.units)
    if tokens > laid_out:
        units = len(session.blocks) * math.ceil(tokens / asked.part)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    weights = torch.finfo(DTYPES[asked.dtype]).bits // 8 * parameters
    return Cost(
        seconds=sum(operations.values()) / speed,
        bytes=int(LIBRARIES + weights + _held(session) + BLOCK),
        tokens=tokens,
        keys=session.windows.length if session.own else tokens,
        queries=len(session.queries),
        units=units,
        operations=operations,
        speed=speed,
    )


def count_operations(session: Session, tokens: int) -> dict[str, float]:
    """Floating-point operations by stage of a probe of so many tokens; the session may have a part.

    A corpus goes through the model once for each block of layers, windows of queries once more.
    Where rules are compared, a language model also gives gradients at its last positions.
    """
    length, layers = session.windows.length, session.layers
    heads = sum(len(session.heads(layer)) for layer in layers)
    asking = len(session.query_windows)
    weights = sum(
        parameter.numel()
        for module in session.loaded.model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1
    )
    shapes = session.loaded.shapes
    attention = length * sum(shape.heads * (shape.width + shape.value_width) for shape in shapes)
    token = 2.0 * (weights + attention)  # of one token forward
    depth = (max(layers) + 1) / session.loaded.layers  # a pass ends after the last of them
    found = {"gradients": 0.0, "rules": 0.0, "tables": OF_HEAD * heads}
    if not session.own:
        found["forward"] = token * depth * len(session.blocks) * (tokens + asking * length)
        found["heads"] = heads * tokens * (OF_KEY + OF_PAIR * len(session.queries))
        return found
    rules = len(session.rule_windows)
    felt = rules if task_of(session.loaded.model) == "language" else 0
    found["forward"] = token * (depth * asking + felt) * length
    found["gradients"] = 2 * token * felt * min(PLACES, length // 4) * DRAWS
    own = asking * (OF_WINDOW + OF_KEY * length) + OF_PAIR * length * len(session.queries)
    found["heads"] = heads * own
    found["rules"] = OF_RULE * heads * rules * length * len(session.spec.compared)
    return found


def _held(session: Session) -> float:
    """Bytes of keys and values that a process holds at once: of a window, or of a part of the
    corpus.
    """
    blocks, tokens = session.blocks, max(int(session.pooled[part].sum()) for part in session.parts)
    if session.own:
        blocks, tokens = [[layer] for layer in session.layers], session.windows.length
    shapes = session.loaded.shapes
    each = [4.0 * shape.kv_heads * (shape.width + shape.value_width) for shape in shapes]
    return tokens * max(sum(each[layer] for layer in block) for block in blocks)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
