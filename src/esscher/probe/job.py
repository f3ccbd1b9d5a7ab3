"""``es.probe``, and the run behind it: units of work, what each computes, and the final tables."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from esscher.corpus.windows import token_texts
from esscher.hf.capture import parity
from esscher.hf.checkpoint import written
from esscher.hf.loading import Loaded, wrap_model
from esscher.probe.budget import LOSS, Asked, budget_table, kept_tokens, nats_table
from esscher.probe.measure import (
    LayerState,
    columns,
    failed_row,
    join,
    layer_tables,
    pack,
    unpack,
)
from esscher.probe.moments import check_moments, moment_units, unit_moments, with_moments
from esscher.probe.pools import corpus_heads, corpus_layer, window_layers
from esscher.probe.session import FEWEST, OBJECT, Session, open_session
from esscher.probe.spec import ProbeSpec, read_settings
from esscher.probe.statistics import check_registered, statistics_of
from esscher.runs import Job, Run, Shard, Unit, execute, watched
from esscher.runs.progress import advance
from esscher.runs.run import refuse_foreign


def check_asked(session: Session) -> None:
    """Refuse what this text and this model cannot give, before weights are read."""
    spec, most = session.spec, max(session.most_keys(layer) for layer in session.layers)
    if session.own and most < FEWEST:
        raise ValueError(
            f"text: no query sees {FEWEST} keys, {most} at most, so nothing can be measured; give"
            " a longer text, or longer windows (--window)"
        )
    if spec.n is not None and max(spec.n) > most:
        raise ValueError(
            f"n: the pool has {most} keys, got n = {max(spec.n)}; give more text (--max-tokens) or"
            " smaller n"
        )
    columns(spec)  # a name that two statistics have
    if spec.moments:
        check_moments(session)
    in_parts = not session.own and len(session.parts) > 1
    for statistic in statistics_of(spec):
        statistic.check(session)
        if in_parts and not statistic.streams and statistic.columns(spec):
            raise ValueError(
                f"statistics: {statistic.name} reads all keys at once, and the corpus comes in"
                f" {len(session.parts)} parts; raise --part, or let it stream (init, update, merge)"
            )


def open_probe(
    spec: ProbeSpec,
    loaded: Loaded | None = None,
    tell: Callable[[Session], None] = lambda session: None,
) -> Session:
    """The session of a spec whose statistics are registered, with everything it asks for checked.

    ``loaded``: the model, where it is given as an object. ``tell`` is called once everything is
    checked, before the weights are read.
    """

    def check(session: Session) -> None:
        check_asked(session)
        tell(session)

    check_registered(spec)
    return open_session(spec, loaded, check)


# ---- units


def units(session: Session) -> list[Unit]:
    """Those of the session; moments have units of their own."""
    return session.units + (moment_units(session) if session.spec.moments else [])


def hashes(session: Session) -> dict[str, str]:
    return {"model": session.loaded.sha256, "corpus": session.windows.sha256}


def compute(session: Session, unit: Unit) -> Mapping[str, Any]:
    """Tables of some heads where the corpus is one part; else states, which are joined at the
    end. The first unit also compares the captured model with the plain one.
    """
    if "moments" in unit:
        return unit_moments(session, unit)
    found: dict[str, Any] = {}
    if unit == session.units[0]:
        found["parity"] = [{"parity": parity(session.loaded.model)}]
    if "heads" in unit:
        (layer,) = unit["layers"]
        state, measure = corpus_heads(session, layer, 0)
        found |= layer_tables(session, state, unit["heads"], measure)
        needed = found["heads"]["tokens_needed_10pct"].median()
        advance(1.0, {"layer": layer, "heads": len(unit["heads"]), "tokens for 10 %": needed})
        if unit["heads"][0] != session.heads(layer)[0]:
            del found["layers"]  # the layer's row comes with its first heads
        return found
    rows: list[dict[str, Any]] = []  # bytes are small

    def take(state: LayerState) -> None:
        rows.append({"layer": state.info.layer, "state": pack(state)})

    if session.own:
        window_layers(session, unit["window"], take)
    else:
        for layer in unit["layers"]:
            take(corpus_layer(session, layer, unit["part"]))
    return found | {"states": rows}


# ---- the final tables


def consolidate(session: Session, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """Parts and windows joined, heads in order, those that failed named, budgets, what was run."""
    spec = session.spec
    # shards are read as they are asked for: one is in memory at a time
    if "heads" in session.units[0]:
        tables = side_by_side(shard for shard in shards if "moments" not in shard.unit)
    else:
        tables = _joined(session, shards)
    same = tables.pop("parity", None)
    tables["heads"] = _with_missing(session, tables.get("heads", pd.DataFrame()))
    if spec.moments:
        sampled = side_by_side(shard for shard in shards if "moments" in shard.unit)
        tables = with_moments(tables, sampled)
    order, frontier = tables.pop("order", None), tables.get("frontier", pd.DataFrame())
    if len(frontier) and np.isfinite(frontier["relative"]).any():
        asked = [Asked(epsilon) for epsilon in spec.epsilons]
        if len(nats := nats_table(frontier)):
            tables["nats"] = nats
            asked.append(Asked(kl=LOSS))
            if order is not None:
                tables["tokens"] = kept_tokens(frontier, order, prompt_of(session))
        tables["budget"] = budget_table(frontier, asked)
    return tables | {"about": about(session, tables["heads"], same)}


def prompt_of(session: Session) -> list[str]:
    """The tokens of the first window in which rules are compared, up to the cut."""
    window = min(session.rule_windows)
    ids = session.windows.ids[window, : session.rule_queries(window).cut].tolist()
    return token_texts(session.loaded.tokenizer, ids)


def side_by_side(shards: Iterable[Shard]) -> dict[str, pd.DataFrame]:
    """Rows of the shards' tables, one shard after the other."""
    frames: dict[str, list[pd.DataFrame]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            frames.setdefault(name, []).append(table.to_pandas())
    return {name: pd.concat(rows, ignore_index=True) for name, rows in frames.items()}


def _joined(session: Session, shards: Sequence[Shard]) -> dict[str, pd.DataFrame]:
    """Tables of the layers whose states, of all parts or windows, are there; one shard is in memory
    at a time.
    """
    statistics = statistics_of(session.spec)
    pieces = len(session.query_windows if session.own else session.parts)
    frames: dict[str, list[pd.DataFrame]] = {}
    states: dict[int, LayerState] = {}
    seen: Counter[int] = Counter()
    for shard in shards:
        if "moments" in shard.unit:
            continue
        if "parity" in shard.tables:
            frames["parity"] = [shard.tables["parity"].to_pandas()]
        for row in shard.tables["states"].to_pylist():
            layer, part = row["layer"], unpack(row["state"], statistics)
            states[layer] = join(states[layer], part, statistics) if layer in states else part
            seen[layer] += 1
            if seen[layer] == pieces:
                for name, frame in layer_tables(session, states.pop(layer)).items():
                    frames.setdefault(name, []).append(frame)
    return {name: pd.concat(rows, ignore_index=True) for name, rows in frames.items()}


def _with_missing(session: Session, heads: pd.DataFrame) -> pd.DataFrame:
    """A row for every head that was asked for: one that has no result says so."""
    known = set(zip(heads["layer"], heads["head"], strict=True)) if len(heads) else set()
    reason = "the piece of work that holds this head failed; the manifest has the reason"
    rows = [
        failed_row(session, layer, head, reason)
        for layer in session.layers
        for head in session.heads(layer)
        if (layer, head) not in known
    ]
    frames = [frame for frame in (heads, pd.DataFrame(rows)) if len(frame)]
    return pd.concat(frames, ignore_index=True).sort_values(["layer", "head"], ignore_index=True)


def about(session: Session, heads: pd.DataFrame, same: pd.DataFrame | None) -> pd.DataFrame:
    """One row: the model and the text as they were measured, the parity of the captured model with
    the plain one, and the largest difference between limits and the model's own outputs.
    """
    loaded, windows, corpus = session.loaded, session.windows, session.spec.corpus
    text = ", ".join(corpus.text) or corpus.dataset or f"packaged {corpus.packaged}"
    apart = heads["output_difference"].max() if "output_difference" in heads else math.nan
    row = {
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "layers": loaded.layers,
        "heads": loaded.heads,
        "kv_heads": loaded.kv_heads,
        "parity": math.nan if same is None else float(same["parity"].iloc[0]),
        "output_difference": float(apart),
        "text": text,
        "documents": windows.documents,
        "tokens": windows.tokens,
        "window": windows.length,
        "windows": len(windows),
        "pool": session.spec.pool,
        "keys": session.keys,
        "queries": len(session.queries),
    }
    return pd.DataFrame([row])


PROBE = Job(
    "probe",
    ProbeSpec,
    units,
    compute,
    consolidate,
    hashes,
    columns,
    open=functools.partial(open_session, check=check_asked),
    check=check_registered,
)


# ---- es.probe

RUNS = Path("runs")
FILE_NAME = re.compile(
    r"[^\s\\]{0,200}(/[^\s\\]{0,200}|\.(txt|md|rst|jsonl?|csv|tsv|parquet|gz|html?|py))"
)


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
    """Measure every head of a model on text, as ``esscher probe`` does; returns its run.

    ``model``: a packaged model ("minilm", which None is too, or "smollm2"), a hub name, a folder, a
    GGUF file, or a transformers model (with its ``tokenizer``). ``texts``: a document or a list of
    them, or files and folders: ``pathlib.Path``, or a string that names one; None for the packaged
    prose. ``out``: the run's folder, ``runs/MODEL-HASH`` when left out; what is finished there is
    not computed again. ``progress``: True or False; by default in a terminal and in a notebook; or
    a function of a :class:`esscher.runs.Progress`. The other settings are the fields of
    :class:`ProbeSpec` and of its corpus, named as the flags are: ``max_tokens=100_000``,
    ``layers=range(2)``, ``epsilon=0.1``, ``dataset="name"`` ... or ``corpus={...}``.
    """
    fields = read_settings(settings)  # a mistake is told before anything is written or read
    loaded = None
    if model is not None and not isinstance(model, str | Path):
        if workers > 1 or dask is not None:
            raise ValueError(
                "workers: a model given as an object stays in this process; save it in a folder and"
                " give that"
            )
        loaded = wrap_model(model, tokenizer)
        model = f"{OBJECT}{loaded.sha256[:16]}"
    else:
        model = written(model)
    if out is not None:
        refuse_foreign(Path(out))
    fields["corpus"] |= _texts(texts, RUNS / ".texts" if out is None else Path(out))
    spec = ProbeSpec.read({"model": model, **fields})
    session = open_probe(spec, loaded)
    folder = run_folder(session) if out is None else Path(out)
    report = watched(progress)
    if report is not None:
        print(f"run: {folder}", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"workers": workers, "dask": dask, "progress": report}
    run = execute(session.spec, folder, **where, opened=session)
    check_measured(run)
    return run


def check_measured(run: Run) -> None:
    """ValueError where no head of a probe was measured, with the reason most of them have."""
    heads = run.table("heads")
    if not (heads["status"] == "ok").any():
        reason = heads["reason"].mode().iloc[0]
        raise ValueError(f"{run.path}: none of {len(heads)} heads could be measured: {reason}")


def run_folder(session: Session) -> Path:
    """Where a run goes unless told: a folder for each model and spec, so that the same probe finds
    its run again.
    """
    return RUNS / f"{short_name(session.loaded.name)}-{session.spec.hash[:8]}"


def short_name(model: str) -> str:
    """A model's name as a file name."""
    last = model.rsplit("/", 1)[-1]
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last)[:60].strip(".") or "model"


def _texts(texts: Any, folder: Path) -> dict[str, Any]:
    """Fields of the corpus; documents are written into a folder, so that every process can read
    them. A string is a file or folder where there is one of its name.
    """
    if texts is None:
        return {}
    given: list[Any] = [texts] if isinstance(texts, str | Path) else list(texts)
    files = [
        isinstance(text, Path) or os.path.exists(os.path.expanduser(str(text))) for text in given
    ]
    if given and all(files):
        return {"text": [str(Path(file).expanduser().absolute()) for file in given]}
    kinds = sorted({type(text).__name__ for text in given})
    if any(files) or kinds != ["str"]:
        raise ValueError(
            "texts: expected strings (documents) or pathlib.Path (files), all of one kind, got"
            f" {', '.join(kinds) or 'nothing'}"
        )
    for text in given:
        if FILE_NAME.fullmatch(text):
            raise ValueError(
                f"texts: {text!r} looks like a file and there is none of this name; give its path,"
                " or a document"
            )
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join(given).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    # hidden: a run begins in an empty folder; other texts are another spec
    path = folder / f".texts-{digest}.parquet"
    pd.DataFrame({"text": given}).to_parquet(path)
    return {"text": [str(path.absolute())], "field": "text"}
