"""A downstream run: a text, a needle, or some heads of a text are its units; tables are made of all
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from esscher.compress.choose import Cell, budget_hashes, budgets_of
from esscher.compress.metrics import READINGS, Outcome
from esscher.compress.predicted import (
    ALL,
    fixed_rows,
    head_rows,
    layer_rows,
    random_rule,
    together_rows,
)
from esscher.compress.session import DownstreamContext, context_of
from esscher.compress.spec import DownstreamSpec
from esscher.compress.tables import FULL, columns, finished
from esscher.compress.text import EveryText, Needle, Text, plant
from esscher.hf.capture import parity
from esscher.runs import Job, Shard, Unit
from esscher.runs.progress import advance

BLOCK = 5  # layers of a unit that compresses one head, or drops in one layer, at a time


def units(spec: DownstreamSpec) -> list[Unit]:
    """A text each; a needle each; of what goes through the model once for each head or layer, some
    layers of a text each.
    """
    source = context_of(spec, starts=True)
    spec = source.spec
    found: list[Unit] = [{"text": text} for text in range(len(source.texts))]
    found += [{"needle": number} for number in range(spec.needles)]
    blocks = [
        list(source.layers[start : start + BLOCK]) for start in range(0, len(source.layers), BLOCK)
    ]
    for text in range(len(source.texts)):
        if spec.sensitivity:
            found += [{"text": text, "sensitivity": block} for block in blocks]
        if spec.together:
            found += [{"text": text, "fixed": rule} for rule in spec.compared]
        if spec.together and spec.when == "cache" and random_rule(spec.compared):
            found += [{"text": text, "together": block} for block in blocks]
        if spec.depth:
            found += [{"text": text, "depth": block} for block in [[ALL], *blocks]]
    return found


def concrete(spec: DownstreamSpec) -> DownstreamSpec:
    """With the way keys are kept that suits the model."""
    return context_of(spec).spec


def hashes(spec: DownstreamSpec) -> dict[str, str]:
    source = context_of(spec)
    return {"model": source.loaded.sha256, "corpus": source.windows.sha256, **budget_hashes(source)}


def compute(spec: DownstreamSpec, unit: Unit) -> Mapping[str, Any]:
    source = context_of(spec)
    if source.spec.when == "every":
        every = EveryText(source, int(source.texts[unit["text"]]))
        return _fixed(every, unit) if "fixed" in unit else _every(every, unit["text"])
    if "needle" in unit:
        return {"draws": _needle(source, unit["needle"])}
    text = Text(
        source, source.ids(int(source.texts[unit["text"]])), source.prefill, budgets_of(source)
    )
    if "fixed" in unit:
        return _fixed(text, unit)
    if "together" in unit:
        rows = together_rows(text, unit["together"], source.spec.unit_seed(unit))
        return {"together": [{"text": unit["text"]} | row for row in rows]}
    if "sensitivity" in unit or "depth" in unit:
        cell = next(text.plan.cells(), None)
        if cell is None:
            raise ValueError(
                f"sizes: no size leaves {source.spec.compared[0]} a key to choose; give larger"
                " sizes"
            )
        named = {"text": unit["text"], "rule": cell.rule, "size": cell.size}
        if "depth" in unit:
            return {"propagation": [named | row for row in layer_rows(text, cell, unit["depth"])]}
        rows = head_rows(text, cell, unit["sensitivity"], source.spec.unit_seed(unit))
        return {"sensitivity": [named | row for row in rows]}
    return _cache(text, unit["text"])


def _fixed(text: Text | EveryText, unit: Unit) -> Mapping[str, Any]:
    rows = [{"text": unit["text"]} | row for row in fixed_rows(text, unit["fixed"])]
    return {"fixed": rows} if rows else {}


def _cache(text: Text, number: int) -> Mapping[str, Any]:
    place = {"text": number, "horizon": text.horizons.median}
    rows, layers = list(_full(text.full, place)), []
    cells = list(text.plan.cells())
    for i, cell in enumerate(cells):
        choice, kept, errors = text.run(cell)
        named = place | vars(cell)
        share = {"kept": text.plan.kept(choice), "keys": text.plan.keys}
        rows += list(_read(text.full, kept, named | share))
        layers += [named | {"kept": share["kept"]} | vars(one) for one in errors]
        advance((i + 1) / len(cells))
    return {"draws": rows, "layers": layers} if layers else {"draws": rows}


def _every(text: EveryText, number: int) -> Mapping[str, Any]:
    place = {"text": number, "horizon": text.horizons.median}
    rows, cells = list(_full(text.full, place)), list(text.cells())
    for i, cell in enumerate(cells):
        keys, kept = text.run(cell)
        named = place | vars(cell) | {"kept": keys, "keys": text.keys}
        rows += list(_read(text.full, kept, named))
        advance((i + 1) / len(cells))
    return {"draws": rows}


def _needle(source: DownstreamContext, number: int) -> list[dict[str, Any]]:
    """A needle is a text of its own; of it only what it is for is read."""
    needle: Needle = plant(source, number)
    text = Text(source, needle.ids, needle.tokens, budgets_of(source))
    place = {"text": number, "horizon": text.horizons.median}
    known = {"needle": needle.found(text.full)}
    rows = list(_full(Outcome("language", text.full.rows, None, known), place, ("needle",)))
    for cell in text.plan.cells():
        choice, kept, _ = text.run(cell)
        known = {"needle": needle.found(kept), "q95": kept.known["q95"]}
        share = {"kept": text.plan.kept(choice), "keys": text.plan.keys}
        named = place | vars(cell) | share
        rows += list(
            _read(text.full, Outcome("language", kept.rows, None, known), named, ("needle",))
        )
    return rows


def _full(
    full: Outcome, place: dict[str, Any], names: tuple[str, ...] = ("loss",)
) -> Iterator[dict[str, Any]]:
    """What the full model is read by itself."""
    yield from _read(
        full,
        full,
        place | vars(Cell(FULL, FULL, 1.0, 0)) | {"kept": float("nan"), "keys": 0.0},
        names,
    )


def _read(
    full: Outcome, kept: Outcome, named: dict[str, Any], names: tuple[str, ...] | None = None
) -> Iterator[dict[str, Any]]:
    for reading in READINGS:
        if full.task in reading.tasks and (names is None or reading.name in names):
            value = reading.value(full, kept)
            if value is not None:
                yield named | {"reading": reading.name, "value": value}


def consolidate(spec: DownstreamSpec, shards: Sequence[Shard]) -> Mapping[str, Any]:
    frames: dict[str, list[pd.DataFrame]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            frames.setdefault(name, []).append(table.to_pandas())
    raw = {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    source = context_of(spec)
    return {**finished(source.spec, raw), "about": _about(source)}


def _about(source: DownstreamContext) -> pd.DataFrame:
    loaded, windows, corpus = source.loaded, source.windows, source.spec.corpus
    same = parity(loaded.model)
    row = {
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "weights": loaded.weights,
        "task": source.task,
        "layers": loaded.layers,
        "heads": loaded.heads,
        "kv_heads": loaded.kv_heads,
        "parity": same.max_difference,
        "text": ", ".join(corpus.text) or corpus.dataset or f"packaged {corpus.packaged}",
        "corpus_sha256": windows.sha256,
        "texts": len(source.texts),
        "window": source.prefill,
        "decode": source.decode,
        "when": source.spec.when,
    }
    return pd.DataFrame([row])


DOWNSTREAM = Job(
    "downstream", DownstreamSpec, units, compute, consolidate, hashes, columns, concrete
)
