"""Small probes that the tests share: the packaged model on real prose, and tiny random models with
tiny tokenizers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from esscher.hf.loading import Loaded, wrap_model
from esscher.probe import job
from esscher.probe.job import open_probe
from esscher.probe.measure import LayerState, join
from esscher.probe.pools import window_layers
from esscher.probe.session import OBJECT, Session
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics import statistics_of
from esscher.runs import Run, load_run
from tests.models.tiny import FAMILIES, build
from tests.models.tokenizers_for_tests import prose, tokenizer
from tests.real_head import WINDOW, model_folder

KEYS, QUERIES, KEPT = 2048, 24, 8
LAYERS, HEADS = (0, 2, 5), (1, 7)
SETTINGS: dict[str, Any] = {
    "max_tokens": KEYS,
    "window": WINDOW + 2,  # a special token on either side
    "queries": QUERIES,
    "kept_queries": KEPT,
    "layers": LAYERS,
    "heads": HEADS,
}

SMALL: dict[str, Any] = {
    "max_tokens": 300,
    "window": 64,
    "queries": 6,
    "kept_queries": 2,
    "layers": (1,),
    "heads": (1, 2),
    "n": "16,64,256",
}

CONTRACT = [
    *("layer", "head", "kv_head", "status", "reason", "n_keys", "n_queries", "reach"),
    *(
        "horizon",
        "horizon2",
        "coupling",
        "beta_paper",
        "beta_sharp",
        "beta_fit",
        "beta_low",
        "beta_high",
    ),
    *("rms_at_n", "tokens_needed_10pct", "effective_tokens", "khat", "sink_mass", "regime"),
]


_given: dict[str, Loaded] = {}  # models that were given to es.probe as objects, the latest ones


def _remembered(model: Any, tokenizer: Any = None) -> Loaded:
    loaded = wrap_model(model, tokenizer)
    _given[f"{OBJECT}{loaded.sha256[:16]}"] = loaded
    for name in list(_given)[:-8]:
        del _given[name]
    return loaded


job.wrap_model = _remembered  # type: ignore[assignment]


def whole_prose() -> str:
    """The text of tests/real_head.py."""
    return "\n".join(prose())


def source(run: Run) -> Session:
    """The session of a run once more."""
    spec = ProbeSpec.read(dict(run.manifest.spec))
    return open_probe(spec, _given.get(spec.model))


def own_state(found: Session, layer: int) -> LayerState:
    """A layer over all windows, each query in its own context."""
    states: list[LayerState] = []
    for window in found.query_windows.tolist():
        window_layers(found, window, states.append)
    parts = [state for state in states if state.info.layer == layer]
    statistics = statistics_of(found.spec)
    return functools.reduce(lambda one, other: join(one, other, statistics), parts)


def rows_of(run: Run, layer: int, head: int, metric: str = "l2") -> pd.DataFrame:
    curves = run.table("curves")
    chosen = curves[
        (curves["layer"] == layer) & (curves["head"] == head) & (curves["metric"] == metric)
    ]
    return chosen.sort_values("n")


def head_row(run: Run, layer: int, head: int) -> dict[str, Any]:
    heads = run.table("heads")
    (row,) = heads[(heads["layer"] == layer) & (heads["head"] == head)].to_dict("records")
    return row


def same_bytes(
    one: Path,
    other: Path,
    names: tuple[str, ...] = ("heads", "curves", "tails", "layers"),
) -> bool:
    """Whether two runs have the same tables; the stored hash of the spec is part of a file."""
    tables = {path: load_run(path) for path in (one, other)}
    assert set(tables[one].tables) == set(tables[other].tables)
    return all(
        (one / f"{name}.parquet").read_bytes() == (other / f"{name}.parquet").read_bytes()
        for name in names
    )


# ---- the packaged model, without esscher
# -----------------------------------------------------------------------------


@functools.cache
def real_model(attention: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(
        model_folder(), dtype=torch.float32, use_safetensors=True, attn_implementation=attention
    )
    return model.eval()


@functools.cache
def real_ids(tokens: int = KEYS) -> torch.Tensor:
    """Windows of the prose with their special tokens, (W, WINDOW + 2)."""
    own = tokenizer("bert")
    ids = own(whole_prose(), add_special_tokens=False, verbose=False, return_tensors="pt")[
        "input_ids"
    ][0][:tokens]
    windows = ids.reshape(-1, WINDOW)
    start, end = (
        torch.full((len(windows), 1), number) for number in (own.cls_token_id, own.sep_token_id)
    )
    return torch.cat([start, windows, end], dim=1)


@functools.cache
def real_hidden(layer: int, tokens: int = KEYS) -> torch.Tensor:
    """What enters a layer, special tokens left out, (tokens, 384) in float64."""
    with torch.no_grad():
        states = real_model()(input_ids=real_ids(tokens), output_hidden_states=True).hidden_states
    return states[layer][:, 1:-1].reshape(tokens, -1).double()


# ---- tiny models
# ------------------------------------------------------------------------------------------


def tiny_model(name: str, kind: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A random model of a family that knows the tokens of a tiny tokenizer; and the tokenizer."""
    family = next(family for family in FAMILIES if family.name == name)
    words = tokenizer(kind)
    return (
        build(family.config, {**family.options, "vocab_size": len(words), **options}, family.model),
        words,
    )


def save_tiny(folder: Path, name: str = "bert", kind: str = "llama", **options: Any) -> Path:
    """The same as a folder that any process can load."""
    model, words = tiny_model(name, kind, **options)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def few_texts() -> list[str]:
    return list(prose()[20:40])


def captured_layers(found: Session, windows: Any = None) -> dict[int, list[AttentionCall]]:
    """Every capture of each layer over windows (all when not given), one window at a time."""
    seen: dict[int, list[AttentionCall]] = {}
    for window in range(len(found.windows)) if windows is None else windows:
        forward(
            found.loaded.model,
            found.inputs(np.array([window])),
            lambda captured: seen.setdefault(captured.layer, []).append(captured),
            hidden=True,
        )
    return seen


def pooled_tensors(found: Session, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (H, m, k), keys and values (H_kv, N, .) of a layer's corpus pool, gathered window by
    window.
    """
    seen = captured_layers(found)[layer]
    keys, values = [], []
    for window, captured in enumerate(seen):
        pooled = torch.from_numpy(found.pooled[window])
        keys.append(captured.key[0][:, pooled])
        values.append(captured.value[0][:, pooled])
    places = zip(found.queries.windows.tolist(), found.queries.positions.tolist(), strict=True)
    queries = [seen[window].query[0][:, position] for window, position in places]
    return torch.stack(queries, dim=1), torch.cat(keys, dim=1), torch.cat(values, dim=1)
