"""From a probe's spec to tokens: the model, the windows of text, which tokens ask, and forward passes over windows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.models.corpus.windows import Windows, make_windows
from esscher.models.huggingface.capture import Captured, forward
from esscher.models.huggingface.loading import Loaded, load_model
from esscher.models.probe.spec import WINDOW, ProbeSpec

__all__ = ["Places", "TokenSource", "forget_source", "keep_object", "source_of"]

Indices = npt.NDArray[np.int64]
WindowSink = Callable[[Captured, Indices], None]

QUERY_WINDOWS = 16  # windows the queries come from: each process runs these through the model
SEQUENCE_WINDOWS = 32  # the same where a window is the pool
OBJECTS: dict[str, Loaded] = {}  # models given as objects, by the name their spec has


@dataclass(frozen=True, eq=False)
class Places:
    """Where the m queries stand: window and position of each, in the order of windows."""

    windows: Indices
    positions: Indices

    def __len__(self) -> int:
        return len(self.windows)

    def inside(self, window: int) -> Indices:
        """Numbers of the queries of a window."""
        return np.flatnonzero(self.windows == window)


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Everything a unit of work needs besides its number."""

    spec: ProbeSpec
    loaded: Loaded
    windows: Windows
    pooled: npt.NDArray[np.bool_]  # (W, T): tokens that are part of a pool
    places: Places

    @property
    def layers(self) -> tuple[int, ...]:
        return self.spec.layers if self.spec.layers is not None else tuple(range(self.loaded.layers))

    def heads(self, layer: int) -> tuple[int, ...]:
        return self.spec.heads if self.spec.heads is not None else tuple(range(self.loaded.shapes[layer].heads))

    @property
    def parts(self) -> list[Indices]:
        """Windows of each part of the corpus; a part holds about ``spec.part`` pooled tokens."""
        counts = np.cumsum(self.pooled.sum(axis=1))
        part = np.minimum((counts - 1) // self.spec.part, max(int(np.ceil(counts[-1] / self.spec.part)) - 1, 0))
        return [np.flatnonzero(part == number) for number in np.unique(part)]

    @property
    def keys(self) -> int:
        """Size of the corpus pool."""
        return int(self.pooled.sum())

    def run(self, windows: Indices, layers: Sequence[int], sink: WindowSink) -> None:
        """Forward passes over these windows; the sink sees each layer of each batch, with the batch's window numbers."""
        size = max(1, self.spec.batch // self.windows.length)
        for start in range(0, len(windows), size):
            batch = windows[start : start + size]
            forward(
                self.loaded.model, self.inputs(batch), functools.partial(_give, sink, batch), layers=list(layers), hidden=True
            )

    def inputs(self, batch: Indices) -> dict[str, Tensor]:
        device = self.loaded.device
        return {
            "input_ids": torch.from_numpy(self.windows.ids[batch].astype(np.int64)).to(device),
            "attention_mask": torch.from_numpy((~self.windows.padding[batch]).astype(np.int64)).to(device),
        }

    def sinks(self, window: int) -> npt.NDArray[np.bool_]:
        """(T,): the first token and the special ones, where attention is known to rest when it has nothing to say."""
        mask: npt.NDArray[np.bool_] = self.windows.special[window].copy()
        mask[0] = True
        return mask


def _give(sink: WindowSink, batch: Indices, captured: Captured) -> None:
    sink(captured, batch)


def keep_object(loaded: Loaded) -> str:
    """Remember a model that has no name a process could load; the name to put in the spec."""
    name = f"object:{loaded.sha256[:16]}"
    OBJECTS[name] = loaded
    return name


@functools.lru_cache(maxsize=1)
def source_of(spec: ProbeSpec) -> TokenSource:
    """Model and text of a spec, loaded once in a process. Every mistake in them is a ValueError of one line."""
    loaded = _model(spec)
    windows = make_windows(spec.corpus, _tokenizer(loaded), _window(spec, loaded))
    _check_heads(spec, loaded)
    pooled = windows.text | windows.special if spec.special else windows.text
    return TokenSource(spec, loaded, windows, pooled, _places(spec, windows, pooled, loaded.causal))


def forget_source() -> None:
    """Files, models and tokenizers may be others the next time, under the same names."""
    source_of.cache_clear()
    _load.cache_clear()


@functools.lru_cache(maxsize=1)
def _load(model: str, revision: str | None, dtype: str, device: str) -> Loaded:
    return load_model(model, revision=revision, dtype=dtype, device=device)


def _model(spec: ProbeSpec) -> Loaded:
    if not spec.model.startswith("object:"):
        return _load(spec.model, spec.revision, spec.dtype, spec.device)
    if spec.model not in OBJECTS:
        raise ValueError(
            f"model: {spec.model} was given as a Python object and is not in this process; call esscher.probe with that model "
            "and the same out, or save the model in a folder and probe that"
        )
    return OBJECTS[spec.model]


def _tokenizer(loaded: Loaded) -> object:
    if loaded.tokenizer is None:
        reason = f": {loaded.tokenizer_error}" if loaded.tokenizer_error else ""
        raise ValueError(f"{loaded.name}: no tokenizer, so no text can be given to it{reason}; pass tokenizer=")
    return loaded.tokenizer


def _window(spec: ProbeSpec, loaded: Loaded) -> int:
    most = loaded.max_positions
    if spec.window is None:
        return WINDOW if most is None else min(WINDOW, most)
    if most is not None and spec.window > most:
        raise ValueError(f"window: {loaded.name} takes at most {most} positions, got {spec.window}; use --window {most}")
    return spec.window


def _check_heads(spec: ProbeSpec, loaded: Loaded) -> None:
    if spec.layers is not None and max(spec.layers) >= loaded.layers:
        raise ValueError(f"layers: {loaded.name} has layers 0 to {loaded.layers - 1}, got {max(spec.layers)}")
    layers = spec.layers if spec.layers is not None else range(loaded.layers)
    fewest = min(loaded.shapes[layer].heads for layer in layers)
    if spec.heads is not None and max(spec.heads) >= fewest:
        raise ValueError(f"heads: {loaded.name} has heads 0 to {fewest - 1}, got {max(spec.heads)}")


def _places(spec: ProbeSpec, windows: Windows, pooled: npt.NDArray[np.bool_], causal: bool) -> Places:
    """Queries spread evenly over a few windows, at random places in each.

    Where a causal model's window is the pool they are the window's last tokens, which see the whole of it.
    """
    generator = np.random.default_rng(spec.seed)
    most = SEQUENCE_WINDOWS if spec.pool == "sequence" else QUERY_WINDOWS
    full = np.flatnonzero(pooled.sum(axis=1) >= max(1, pooled.sum(axis=1).max() // 2))
    chosen = full[np.unique(np.linspace(0, len(full) - 1, min(most, len(full), spec.queries)).round().astype(np.int64))]
    shares = [len(part) for part in np.array_split(np.arange(spec.queries), len(chosen))]
    found: list[tuple[Indices, Indices]] = []
    for window, share in zip(chosen, shares, strict=True):
        text = np.flatnonzero(windows.text[window] & pooled[window])
        share = min(share, len(text))
        picked = text[-share:] if spec.pool == "sequence" and causal else generator.choice(text, share, replace=False)
        found.append((np.full(share, window), np.sort(picked)))
    return Places(*(np.concatenate(column) for column in zip(*found, strict=True)))
