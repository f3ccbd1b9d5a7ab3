"""probe: every head of a model measured on text, as a run."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.compute as compute_arrow

from esscher.convergence.curve import ErrorCurve
from esscher.models.corpus import CorpusSpec
from esscher.models.huggingface.loading import wrap_model
from esscher.models.huggingface.maps import LinearMaps, linear_maps
from esscher.models.huggingface.parity import parity
from esscher.models.probe.cache import budget_table
from esscher.models.probe.context import Indices, TokenSource, forget_source, keep_object, source_of
from esscher.models.probe.layer import LayerState, add_head, begin, layer_from_rows, layer_rows, merge_layers
from esscher.models.probe.moments import moment_curves, moment_ladder
from esscher.models.probe.own_context import sequence_state
from esscher.models.probe.passes import PooledLayer, fits, forget_tokens, hold, stream
from esscher.models.probe.spec import KEYS, ProbeSpec, own_ladder
from esscher.models.probe.statistics.statistic import Failure
from esscher.models.probe.tables import Tables, columns, failed_row, layer_tables
from esscher.models.probe.tokens import LayerInfo
from esscher.runs import Job, Run, Shard, Unit, execute

__all__ = ["PROBE", "about", "probe"]

STATE = 2.0e9  # bytes of states that a unit may hold
CELLS = 300  # cells of a score grid, for that estimate
HEADS = 4  # heads of a unit of work, where the tokens of all layers are held


def probe(
    model: Any = None,
    texts: Any = None,
    *,
    tokenizer: Any = None,
    out: Any = None,
    workers: int = 1,
    dask: str | None = None,
    progress: Any = None,
    **settings: Any,
) -> Run:
    """Measure every head of a model on text; the run has tables heads, curves, scores, tails, layers, budget and about.

    ``model``: a hub name, a folder, a transformers model (with its ``tokenizer``), or None for the packaged model.
    ``texts``: a document or a list of them, or paths (``pathlib.Path``) of files and folders; None for the packaged prose.
    ``out``: the run's folder; one in the system's temporary folder when left out. The other settings are the fields of
    :class:`ProbeSpec` and of its corpus: ``max_tokens=100_000``, ``layers=(0, 1)``, ``queries=64``, ``dataset="name"`` ...
    """
    for forget in (forget_source, forget_tokens, _maps.cache_clear):
        forget()
    folder = Path(tempfile.mkdtemp(prefix="esscher-")) if out is None else Path(out)
    if model is not None and not isinstance(model, str | Path):
        model = keep_object(wrap_model(model, tokenizer))
        if workers > 1 or dask is not None:
            raise ValueError("workers: a model given as an object stays in this process; save it in a folder and give that")
    # `special` is a field of both: here it says, as the flag does, that special tokens are part of the pool
    fields_of_text = CorpusSpec.model_fields.keys() - ProbeSpec.model_fields.keys()
    own = {name: settings.pop(name) for name in list(settings) if name in fields_of_text}
    corpus = {"max_tokens": KEYS, **own, **_texts(texts, folder)}
    if model is not None and Path(model).is_dir():
        model = Path(model).absolute()  # whoever resumes the run may stand elsewhere
    fields = {"model": "packaged" if model is None else str(model), "corpus": corpus, **settings}
    spec = ProbeSpec.read(fields)
    return execute(spec, folder, workers=workers, dask=dask, progress=progress)


def _texts(texts: Any, folder: Path) -> dict[str, Any]:
    """Fields of the corpus; documents are written into the run's folder, so that every process can read them."""
    if texts is None:
        return {}
    given = [texts] if isinstance(texts, str | Path) else list(texts)
    paths = [text for text in given if isinstance(text, Path)]
    if given and len(paths) == len(given):
        return {"text": [str(path.expanduser().absolute()) for path in paths]}
    if not given or not all(isinstance(text, str) for text in given):
        kinds = ", ".join(sorted({type(text).__name__ for text in given})) or "nothing"
        raise ValueError(f"texts: expected strings (documents) or pathlib.Path (files), got {kinds}")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join(str(text) for text in given).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    path = folder / f".texts-{digest}.parquet"  # hidden: a run begins in an empty folder; other texts are another spec
    pd.DataFrame({"text": given}).to_parquet(path)
    return {"text": [str(path.absolute())], "field": "text"}


# ---- the job ---------------------------------------------------------------------------------------------------------


def units(spec: ProbeSpec) -> list[Unit]:
    """A few heads of a layer each where all tokens can be held; a layer each where the corpus is one part; else some layers
    over one part, whose states are merged at the end.
    """
    source = source_of(spec)
    own_ladder(spec, source.keys if spec.pool == "corpus" else source.windows.length)  # n beyond the pool: refused here
    if spec.moments:
        _check_moments(source)
    if _in_parts(source):
        return [{"layers": block, "part": part} for block in _layer_blocks(source) for part in range(len(source.parts))]
    if spec.pool == "corpus" and fits(source) and not spec.moments:
        return [{"layers": [layer], "part": 0, "heads": heads} for layer in source.layers for heads in _groups(source, layer)]
    return [{"layers": [layer], "part": 0} for layer in source.layers]


def _in_parts(source: TokenSource) -> bool:
    """Whether units leave states of parts of the corpus, which are merged at the end, and not finished tables."""
    return source.spec.pool == "corpus" and len(source.parts) > 1


def _check_moments(source: TokenSource) -> None:
    """Refuse moments where a unit would not have the queries and keys of a whole layer."""
    spec = source.spec
    if spec.pool == "sequence":
        raise ValueError("moments: they are of tokens of the whole corpus; use --pool corpus, or leave --moments out")
    moment_ladder(spec.moments_n, source.keys)
    if not fits(source):
        raise ValueError(
            "moments: queries and keys come from one pool of the whole corpus, and the tokens do not fit into memory; "
            "give --layers"
        )
    if _in_parts(source):
        raise ValueError(f"moments: the pool of {source.keys} tokens is larger than part = {spec.part}; lower --max-tokens")


def _groups(source: TokenSource, layer: int) -> list[list[int]]:
    """The heads of a layer, a few at a time."""
    heads = source.heads(layer)
    return [list(heads[start : start + HEADS]) for start in range(0, len(heads), HEADS)]


def _layer_blocks(source: TokenSource) -> list[list[int]]:
    """Layers whose states fit into memory together; each block is one more forward pass over the corpus."""
    queries = len(source.places) + 3 * source.spec.kept_queries  # kept keys have grids twice as fine, and wider
    sizes = [
        len(source.heads(layer)) * queries * (source.loaded.shapes[layer].value_width + 2) * CELLS * 8
        for layer in source.layers
    ]
    blocks: list[list[int]] = [[]]
    held = 0
    for layer, size in zip(source.layers, sizes, strict=True):
        if blocks[-1] and held + size > STATE:
            blocks.append([])
            held = 0
        blocks[-1].append(layer)
        held += size
    return blocks


def hashes(spec: ProbeSpec) -> dict[str, str]:
    source = source_of(spec)
    return {"model": source.loaded.sha256, "corpus": source.windows.sha256}


def compute(spec: ProbeSpec, unit: Unit) -> Mapping[str, Any]:
    """The finished tables of one layer or some of its heads, or the states of some layers over one part."""
    source = source_of(spec)
    if spec.pool == "sequence":
        state, used = sequence_state(source, unit["layers"][0])
        return _finish(source, state, source.places.windows[used]).finished()
    if _in_parts(source):
        states = stream(source, unit["layers"], source.parts[unit["part"]])
        stored: list[dict[str, Any]] = []
        while states:
            stored += layer_rows(states.pop(0))  # gone from memory once it is bytes
        return {"states": {name: [row[name] for row in stored] for name in stored[0]}}
    if not fits(source):
        (state,) = stream(source, unit["layers"], source.parts[0])
        return _finish(source, state, source.places.windows).finished()
    return _held(source, unit).finished()


def _held(source: TokenSource, unit: Unit) -> Tables:
    """Heads of a layer whose tokens are in memory, one at a time: a state is small, but there are many heads."""
    spec, (layer,) = source.spec, unit["layers"]
    pooled = hold(spec)[layer]
    queries, rows = pooled.queries, pooled.rows
    empty = replace(begin(source, queries, rows), moments=pooled.moments, keys=rows.k.shape[1])
    wanted = unit.get("heads", source.heads(layer))
    heads = ((head, add_head(empty.heads[head], queries, head, rows)) for head in wanted)
    sampled = _sampled(source, pooled) if spec.moments else None
    tables = layer_tables(spec, empty, _maps(spec)[layer], source.places.windows, heads, sampled)
    if wanted[0] != source.heads(layer)[0]:
        tables.layers.clear()  # the layer's row comes with its first heads
    return tables


def _finish(source: TokenSource, state: LayerState, clusters: Indices) -> Tables:
    return layer_tables(source.spec, state, _maps(source.spec)[state.info.layer], clusters)


@functools.lru_cache(maxsize=1)
def _maps(spec: ProbeSpec) -> dict[int, LinearMaps]:
    """The maps of the layers to be measured, once in a process."""
    source = source_of(spec)
    return {maps.layer: maps for maps in linear_maps(source.loaded.model, layers=source.layers)}


def _sampled(source: TokenSource, pooled: PooledLayer) -> dict[tuple[int, str], ErrorCurve]:
    """Monte Carlo errors of the outputs' moments of a layer."""
    spec, info, rows = source.spec, pooled.queries.info, pooled.rows
    n = moment_ladder(spec.moments_n, rows.k.shape[1])
    return moment_curves(info, rows.q, rows.k, rows.v, source.heads(info.layer), n, spec.moments, spec.seed)


def consolidate(spec: ProbeSpec, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """The final tables: parts of the corpus merged, heads in order, those that failed named, budgets, and what was run."""
    source = source_of(spec)
    parts = _merged(source, shards) if _in_parts(source) else _side_by_side(shards)
    parts["heads"] = _with_missing(source, parts["heads"])
    if "curves" in parts and (parts["curves"].query("metric == 'l2_kept'")["rms"] > 0).any():
        parts["budget"] = budget_table(parts["heads"], parts["curves"], spec.epsilons)
    parts["about"] = about(source)
    return parts


def _side_by_side(shards: Sequence[Shard]) -> dict[str, pd.DataFrame]:
    frames: dict[str, list[pd.DataFrame]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            frames.setdefault(name, []).append(table.to_pandas())
    return {name: pd.concat(rows, ignore_index=True) for name, rows in frames.items()}


def _merged(source: TokenSource, shards: Sequence[Shard]) -> dict[str, pd.DataFrame]:
    """Tables of layers whose parts are all there; one shard is in memory at a time."""
    states: dict[int, LayerState] = {}
    seen: Counter[int] = Counter()
    for shard in shards:
        table = shard.tables["states"]
        for layer in shard.unit["layers"]:
            part = layer_from_rows(source.spec, table.filter(compute_arrow.equal(table["layer"], layer)).to_pylist())
            states[layer] = merge_layers(states[layer], part) if layer in states else part
            seen[layer] += 1
        del table, part
    whole = [layer for layer in sorted(states) if seen[layer] == len(source.parts)]
    finished: dict[str, list[pd.DataFrame]] = {"heads": [], "layers": []}
    for layer in whole:
        for name, frame in _finish(source, states.pop(layer), source.places.windows).finished().items():
            finished.setdefault(name, []).append(frame)
    return {name: pd.concat(frames, ignore_index=True) if frames else pd.DataFrame() for name, frames in finished.items()}


def _with_missing(source: TokenSource, heads: pd.DataFrame) -> pd.DataFrame:
    """A row for every head that was asked for: one that has no result says so."""
    known = set(zip(heads["layer"], heads["head"], strict=True)) if len(heads) else set()
    reason = "the piece of work that holds this head failed; the manifest has the reason"
    rows = []
    for layer in source.layers:
        shape = source.loaded.shapes[layer]
        info = LayerInfo(layer, shape.heads, shape.kv_heads, 1.0, None, "")
        missing = [head for head in source.heads(layer) if (layer, head) not in known]
        rows += [failed_row(source.spec, Failure(info, head, reason, source.keys, len(source.places))) for head in missing]
    if rows:
        heads = pd.concat([heads, pd.DataFrame(rows)], ignore_index=True) if len(heads) else pd.DataFrame(rows)
    return heads.sort_values(["layer", "head"], ignore_index=True)


def about(source: TokenSource) -> pd.DataFrame:
    """One row: the model and the text as they were measured, and the parity of the captured model with the plain one."""
    loaded, windows, same = source.loaded, source.windows, parity(source.loaded.model)
    corpus = source.spec.corpus
    text = ", ".join(corpus.text) or corpus.dataset or f"packaged {corpus.packaged}"
    return pd.DataFrame(
        [
            {
                "model": loaded.name,
                "model_sha256": loaded.sha256,
                "layers": loaded.layers,
                "heads": loaded.heads,
                "kv_heads": loaded.kv_heads,
                "width": loaded.width,
                "causal": loaded.causal,
                "parity": same.max_difference,
                "parity_relative": same.relative,
                "captured_layers": same.captured,
                "text": text,
                "corpus_sha256": windows.sha256,
                "documents": windows.documents,
                "tokens": windows.tokens,
                "window": windows.length,
                "windows": len(windows),
                "pool": source.spec.pool,
                "keys": source.keys,
                "queries": len(source.places),
            }
        ]
    )


PROBE = Job("probe", ProbeSpec, units, compute, consolidate, hashes, columns)
