"""Moments of outputs where the tokens do not fit into memory: a unit of work streams the corpus by
for some layers.

First the windows of the sampled queries go through the model. Then all of them do, once: sampled
queries meet every key, every query meets the control's keys (esscher.probe.moments),
and the tokens of the draws, whose numbers are known from the seed, are kept. Layers share a unit
while the tokens of their draws fit; draws of one layer that do not take more passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.state import finish, init, merge
from esscher.hf.call import AttentionCall
from esscher.probe.curves import curve_rows
from esscher.probe.moments import (
    WHOLE_LAYER,
    Errors,
    Limit,
    QuerySample,
    Tensors,
    block_state,
    drawn_tokens,
    estimate,
    moment_ladder,
    moment_row,
    of_heads,
    sample_queries,
)
from esscher.probe.session import Indices, ProbeContext
from esscher.probe.statistics.base import HEAD, LAYER
from esscher.probe.statistics.errors import CURVES
from esscher.probe.tokens import LayerInfo, Rows
from esscher.runs import Unit
from esscher.runs.columns import Column
from esscher.tails import moments as token_moments

DRAWN = 3.0e9  # bytes of drawn tokens that a unit may hold

LIMITS = (
    LAYER,
    HEAD,
    Column("metric", "word", "moment", "Moment of the outputs: mean or cov."),
    Column(
        "queries",
        "int",
        "sampled queries",
        "Queries whose attention on all keys the limit is estimated from.",
    ),
    Column("windows", "int", "sampled windows", "Windows of text that these queries stand in."),
    Column(
        "stderr",
        "float",
        "error of the limit",
        "Standard error of the limit; its square is taken off the squared errors.",
    ),
    Column(
        "share",
        "float",
        "share of the error",
        "Standard error of the limit over the error at the largest n.",
    ),
)


def moment_units(context: ProbeContext) -> list[Unit]:
    """Layers whose drawn tokens fit into memory together; each unit is a pass over the corpus."""
    blocks: list[list[int]] = [[]]
    held = 0.0
    for layer in context.layers:
        size = _bytes(context, layer)
        if blocks[-1] and held + size > DRAWN:
            blocks.append([])
            held = 0.0
        blocks[-1].append(layer)
        held += size
    return [{"layers": block, "moments": True} for block in blocks]


def _bytes(context: ProbeContext, layer: int) -> float:
    """Of the tokens that all repeats draw in a layer."""
    spec, shape = context.spec, context.loaded.shapes[layer]
    tokens = min(spec.moments * int(_ladder(context)[-1]), context.keys)
    numbers = shape.heads * shape.width + shape.kv_heads * (shape.width + shape.value_width)
    return tokens * numbers * (8.0 if spec.dtype == "float64" else 4.0)


def stream_moments(context: ProbeContext, unit: Unit) -> dict[str, pd.DataFrame]:
    """Curves, exponents and the limit's own error of some layers, as tables."""
    spec, layers = context.spec, unit["layers"]
    limits, errors = _asked(context, layers), dict[int, Errors]()
    passes = math.ceil(max(_bytes(context, layer) for layer in layers) / DRAWN)
    for repeats in np.array_split(np.arange(spec.moments), min(passes, spec.moments)):
        draws = _draw(context, layers, repeats.tolist(), {} if errors else limits)
        for layer in layers:
            if layer not in errors:
                errors[layer] = Errors(
                    limits[layer].finish(), context.heads(layer), _ladder(context)
                )
            info, (tokens, chosen) = limits[layer].info, draws.pop(layer)
            for numbers in chosen:
                errors[layer].add(info, of_heads(info, tokens.of(numbers), context.heads(layer)))
    found: dict[str, list[pd.DataFrame]] = {}
    for layer in layers:
        for name, frame in _tables(layer, errors.pop(layer), limits.pop(layer).sample).items():
            found.setdefault(name, []).append(frame)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in found.items()}


class _Tokens:
    """Tokens of a layer by their numbers among the pooled ones, taken out of the blocks they come
    in.
    """

    def __init__(self, numbers: Indices) -> None:
        self.numbers = numbers  # increasing
        self.held: tuple[Tensor, ...] = ()

    def add(self, rows: Rows, numbers: Indices) -> None:
        """``numbers``: of the rows, increasing."""
        low, high = np.searchsorted(self.numbers, [numbers[0], numbers[-1] + 1])
        found = torch.from_numpy(np.searchsorted(numbers, self.numbers[low:high])).to(rows.k.device)
        if not self.held:
            sizes = ((x.shape[0], len(self.numbers), x.shape[2]) for x in (rows.q, rows.k, rows.v))
            self.held = tuple(
                torch.empty(size, dtype=rows.k.dtype, device=rows.k.device) for size in sizes
            )
        for held, x in zip(self.held, (rows.q, rows.k, rows.v), strict=True):
            held[:, low:high] = x[:, found]

    def of(self, numbers: Indices) -> Tensors:
        at = torch.from_numpy(np.searchsorted(self.numbers, numbers)).to(self.held[0].device)
        q, k, v = (held[:, at] for held in self.held)
        return q, k, v


class _Limit:
    """The limit of a layer while its tokens come by."""

    def __init__(
        self, info: LayerInfo, sample: QuerySample, tokens: _Tokens, heads: tuple[int, ...]
    ) -> None:
        self.info, self.sample, self.heads = info, sample, heads
        self.q = of_heads(info, tokens.of(sample.tokens), heads)[0]
        _, self.k, self.v = of_heads(info, tokens.of(sample.keys), heads)
        self.state = init(self.q, self.v.shape[-1])
        self.every = token_moments.init(
            len(heads) * self.v.shape[-1], higher=False, device=self.q.device
        )

    def add(self, rows: Rows) -> None:
        """Tokens as keys of the sampled queries, and as queries of the control's keys."""
        q, k, v = of_heads(self.info, (rows.q, rows.k, rows.v), self.heads)
        self.state = merge(self.state, block_state(self.info, self.q, k, v))
        self.every = token_moments.update(self.every, self._control(q))

    def finish(self) -> Limit:
        return estimate(
            self.sample,
            torch.cat(list(finish(self.state)), dim=1),
            self._control(self.q),
            self.every,
        )

    def _control(self, q: Tensor) -> Tensor:
        """Outputs (m, D) of queries on the control's keys, heads side by side."""
        return torch.cat(list(block_state(self.info, q, self.k, self.v).out), dim=1)


def _asked(context: ProbeContext, layers: list[int]) -> dict[int, _Limit]:
    """The limits of some layers before any key: their sampled queries and the control's keys, by
    passes over those windows.
    """
    sample = sample_queries(context.pooled, context.spec.moments_queries, context.spec.seed)
    tokens = {layer: _Tokens(np.union1d(sample.tokens, sample.keys)) for layer in layers}
    info: dict[int, LayerInfo] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        info.setdefault(captured.layer, LayerInfo.of(captured))
        tokens[captured.layer].add(*_numbered(context, captured, batch))

    context.run(sample.windows, layers, sink)
    return {
        layer: _Limit(info[layer], sample, tokens.pop(layer), context.heads(layer))
        for layer in layers
    }


def _draw(
    context: ProbeContext, layers: list[int], repeats: list[int], limits: Mapping[int, _Limit]
) -> dict[int, tuple[_Tokens, list[Indices]]]:
    """The tokens that some repeats draw, and their numbers, by one pass over the corpus in which
    ``limits`` see every token.
    """
    largest = int(_ladder(context)[-1])
    chosen = {
        layer: [
            drawn_tokens(layer, context.keys, largest, each, context.spec.seed) for each in repeats
        ]
        for layer in layers
    }
    tokens = {layer: _Tokens(np.unique(np.concatenate(chosen[layer]))) for layer in layers}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        rows, numbers = _numbered(context, captured, batch)
        if len(numbers):
            tokens[captured.layer].add(rows, numbers)
            if captured.layer in limits:
                limits[captured.layer].add(rows)

    context.run(np.concatenate(context.parts), layers, sink)
    return {layer: (tokens[layer], chosen[layer]) for layer in layers}


def _ladder(context: ProbeContext) -> Indices:
    return moment_ladder(context.spec.moments_n, context.keys)


def _numbered(
    context: ProbeContext, captured: AttentionCall, batch: Indices
) -> tuple[Rows, Indices]:
    """The pooled tokens of a batch and their numbers among all pooled ones."""
    pooled = context.pooled[batch]
    counts = context.pooled.sum(axis=1)
    first = np.cumsum(counts) - counts
    numbers = np.concatenate([first[window] + np.arange(counts[window]) for window in batch])
    return Rows.of(captured, torch.from_numpy(pooled).to(captured.query.device)), numbers


def _tables(layer: int, errors: Errors, sample: QuerySample) -> dict[str, pd.DataFrame]:
    """What is found of a layer: curves, exponents, and the limit's own error."""
    curves = errors.curves(
        f"tokens drawn with replacement from a pool of {sample.pool}, nested prefixes"
    )
    place = [{"layer": layer, "head": head} for head in (*errors.heads, WHOLE_LAYER)]
    frames = [
        curve_rows(known.curve).assign(layer=layer, head=head)
        for (head, _), known in curves.items()
    ]
    limits = [
        {
            "layer": layer,
            "head": head,
            "metric": metric,
            "queries": len(sample.tokens),
            "windows": len(sample.windows),
        }
        | {"stderr": known.limit_stderr, "share": known.limit_stderr / float(known.curve.rms[-1])}
        for (head, metric), known in curves.items()
    ]
    return {
        "curves": pd.concat(frames, ignore_index=True)[[column.key for column in CURVES]],
        "moments": pd.DataFrame([row | moment_row(curves, row["head"]) for row in place]),
        "limits": pd.DataFrame(limits),
    }


def with_moments(
    tables: dict[str, pd.DataFrame], sampled: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """The tables of a probe with the exponents, curves and limits that units of moments found; what
    failed stays empty.
    """
    found = dict(tables)
    exponents = [key for key in sampled["moments"] if key not in ("layer", "head")]
    for name, on in (("heads", ["layer", "head"]), ("layers", ["layer"])):
        if name in tables and len(tables[name]):
            rows = sampled["moments"]
            rows = (
                rows if name == "heads" else rows[rows["head"] == WHOLE_LAYER].drop(columns="head")
            )
            frame = tables[name].drop(columns=exponents).merge(rows, how="left", on=on)
            found[name] = frame[list(tables[name].columns)]
    curves = [tables["curves"]] if "curves" in tables else []
    found["curves"] = pd.concat([*curves, sampled["curves"]], ignore_index=True)
    return found | {"limits": sampled["limits"]}
