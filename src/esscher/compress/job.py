"""A compression run: a prompt, a needle, or some layers of a prompt are its units."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from esscher.compress.choose import Choice
from esscher.compress.heads import head_rows, random_cell, together_rows
from esscher.compress.metrics import NEEDLES, Outcome, metrics
from esscher.compress.per_query import PerQueryText
from esscher.compress.prompt import Prompt
from esscher.compress.session import Source, source_of
from esscher.compress.spec import CompressSpec
from esscher.compress.tables import FULL, columns, finished
from esscher.compress.text import Cell, Text, plant
from esscher.corpus.windows import token_texts
from esscher.hf.capture import parity
from esscher.runs import Job, Shard, Unit
from esscher.runs.progress import advance

FIRST = 4  # tokens at the beginning of a prompt
KINDS = ("first tokens", "punctuation", "numbers", "capitalised", "other")
BLOCK = 5  # layers of a unit that goes through the model once for each head


def units(source: Source) -> list[Unit]:
    spec = source.spec
    texts, layers = range(len(source.texts)), source.layers
    found: list[Unit] = [{"text": text} for text in texts]
    found += [
        {"needle": i, "kind": kind} for kind in spec.needle_kinds for i in range(spec.needles)
    ]
    blocks = [list(layers[start : start + BLOCK]) for start in range(0, len(layers), BLOCK)]
    for name in ("sensitivity", "together"):
        if getattr(spec, name):
            found += [{"text": text, name: block} for text in texts for block in blocks]
    return found


def hashes(source: Source) -> dict[str, str]:
    return {"model": source.loaded.sha256, "corpus": source.windows.sha256}


def compute(source: Source, unit: Unit) -> Mapping[str, Any]:
    if "needle" in unit:
        return {"draws": _needle(source, unit["needle"], unit["kind"])}
    window = int(source.texts[unit["text"]])
    if source.spec.when == "every":
        return _every(PerQueryText(source, window), unit["text"])
    if not {"together", "sensitivity"} & unit.keys():
        return _decoded(source, window, unit["text"])
    text = Text(source, source.ids(window), source.prefill)
    named = {"text": unit["text"]}
    if "together" in unit:
        cell = random_cell(text)
        if cell is None:
            raise ValueError("together: it is of random keys; add --rules random")
        rows = together_rows(text, cell, unit["together"])
        return {"together": [named | row for row in rows]}
    cell = next(text.cells())
    named |= {"rule": cell.rule, "keep": cell.keep}
    rows = head_rows(text, cell, unit["sensitivity"], source.spec.unit_seed(unit))
    return {"sensitivity": [named | row for row in rows]}


def _decoded(source: Source, window: int, number: int) -> Mapping[str, Any]:
    """The rows of a prompt; with ``again`` those of every prompt that grew by so many tokens."""
    step = source.spec.again or source.decode
    tables: dict[str, list[dict[str, Any]]] = {}
    for start in range(source.prefill, source.prefill + source.decode, step):
        text = Text(source, source.ids(window)[:, : start + step], start)
        for name, rows in _cache(text, number).items():
            if name != "tokens" or start == source.prefill:
                tables.setdefault(name, []).extend(rows)
    return tables


def _cache(text: Text, number: int) -> Mapping[str, Any]:
    place = {"text": number, "horizon": text.horizons.median}
    rows, layers, cells = list(_full(text.full, place)), [], list(text.cells())
    kinds: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    words = token_texts(text.source.loaded.tokenizer, text.ids[0, : text.tokens].tolist())
    for i, cell in enumerate(cells):
        choice, outcome, errors = text.run(cell)
        named = place | vars(cell) | {"kept": text.kept(choice), "keys": text.keys}
        rows += _measured(text.full, outcome, named)
        layers += [named | row for row in errors]
        kinds += [
            {"text": number, **vars(cell), **row} for row in kind_rows(text.prompt, choice, words)
        ]
        if number == 0 and (cell.rule, cell.split, cell.draw) == (cells[0].rule, cells[0].split, 0):
            tokens += [{**vars(cell), **row} for row in token_rows(choice, words)]
        advance((i + 1) / len(cells))
    tables = {"draws": rows, "layers": layers, "kinds": kinds, "tokens": tokens}
    return {name: table for name, table in tables.items() if table}


def _every(text: PerQueryText, number: int) -> Mapping[str, Any]:
    place = {"text": number, "horizon": text.horizons.median}
    rows, cells = list(_full(text.full, place)), list(text.cells())
    for i, cell in enumerate(cells):
        kept, outcome = text.run(cell)
        named = place | vars(cell) | {"kept": kept, "keys": text.keys}
        rows += _measured(text.full, outcome, named)
        advance((i + 1) / len(cells))
    return {"draws": rows}


def _needle(source: Source, number: int, kind: str) -> list[dict[str, Any]]:
    """A needle has a prompt of its own, of which only this is read."""
    metric = NEEDLES[kind]
    needle = plant(source, number, kind)
    text = Text(source, needle.ids, needle.tokens)
    place = {"text": number, "horizon": text.horizons.median}

    def judged(outcome: Outcome) -> Outcome:
        return Outcome("language", outcome.rows, None, {metric: needle.found(outcome)})

    full = judged(text.full)
    rows = list(_full(full, place, (metric,)))
    for cell in text.cells():
        choice, outcome, _ = text.run(cell)
        named = place | vars(cell) | {"kept": text.kept(choice), "keys": text.keys}
        rows += _measured(full, judged(outcome), named, (metric,))
    return rows


def _full(
    full: Outcome, place: dict[str, Any], names: tuple[str, ...] = ("loss",)
) -> Iterator[dict[str, Any]]:
    """What the full model is measured by itself."""
    named = place | vars(Cell(FULL, FULL, 1.0, 0)) | {"kept": float("nan"), "keys": 0.0}
    return _measured(full, full, named, names)


def _measured(
    full: Outcome, kept: Outcome, named: dict[str, Any], names: tuple[str, ...] | None = None
) -> Iterator[dict[str, Any]]:
    for name, metric in metrics().items():
        if full.task in metric.tasks and (names is None or name in names):
            value = metric.value(full, kept)
            if value is not None:
                yield named | {"metric": name, "value": value}


def consolidate(source: Source, shards: Sequence[Shard]) -> Mapping[str, Any]:
    frames: dict[str, list[pd.DataFrame]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            frames.setdefault(name, []).append(table.to_pandas())
    raw = {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    return {**finished(raw, *_bytes(source)), "about": _about(source)}


def _bytes(source: Source) -> tuple[float, float]:
    """Bytes of the keys and values of a full cache, and of a weight for each key; 0 where nothing
    is cached.
    """
    if source.spec.when != "cache":
        return 0.0, 0.0
    size = next(source.loaded.model.parameters()).element_size()
    pairs = weights = 0.0
    for shape in source.loaded.shapes:
        keys = min(shape.window or source.prefill, source.prefill) * shape.kv_heads
        pairs += keys * (shape.width + shape.value_width) * size
        weights += keys * size
    return pairs, weights


def _about(source: Source) -> pd.DataFrame:
    loaded, windows, corpus = source.loaded, source.windows, source.spec.corpus
    row = {
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "task": source.task,
        "layers": loaded.layers,
        "heads": loaded.heads,
        "kv_heads": loaded.kv_heads,
        "parity": parity(loaded.model),
        "text": ", ".join(corpus.text) or corpus.dataset or f"packaged {corpus.packaged}",
        "corpus_sha256": windows.sha256,
        "texts": len(source.texts),
        "window": source.prefill,
        "decode": source.decode,
        "when": source.spec.when,
    }
    return pd.DataFrame([row])


# ---- What was kept: the tokens of a prompt, how many heads keep each, and what kinds they are.


def kind_of(piece: str, position: int) -> str:
    """One of KINDS: by position, then by the characters of a token, spaces left out."""
    text = piece.strip()
    if position < FIRST:
        return KINDS[0]
    if all(unicodedata.category(c)[0] in "PSZC" for c in text):
        return KINDS[1]
    if text[0].isnumeric():
        return KINDS[2]
    return KINDS[3] if text[0].isupper() else KINDS[4]


def kind_rows(prompt: Prompt, choice: Choice, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each kind its share of the kept keys and of all keys that the cache holds, over all
    layers and key-value heads.
    """
    held = torch.stack([prompt.held_by(place) for place in prompt.contexts]).sum(0).double()
    kept = torch.stack([rows.sum(0) for rows in choice.kept.values()]).sum(0).double()
    kinds = [kind_of(piece, position) for position, piece in enumerate(texts)]
    for kind in KINDS:
        own = torch.tensor([name == kind for name in kinds], device=held.device)
        shares = (float(rows[own].sum() / rows.sum()) for rows in (kept, held))
        yield {"kind": kind, **dict(zip(("kept_share", "held_share"), shares, strict=True))}


def token_rows(choice: Choice, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each token of the prompt, how many key-value heads of each layer keep it."""
    layers = sorted(choice.kept)
    counts: Tensor = torch.stack([choice.kept[layer].sum(0) for layer in layers], 1)
    heads = [len(choice.kept[layer]) for layer in layers]
    for position, (piece, row) in enumerate(zip(texts, counts.tolist(), strict=True)):
        yield {"position": position, "token": piece, "heads": row, "heads_all": heads}


COMPRESS = Job("compress", CompressSpec, units, compute, consolidate, hashes, columns, source_of)
