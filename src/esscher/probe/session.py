"""What a probe works on, made once: the model, the text in windows, the queries, units of work."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.corpus.documents import check_text
from esscher.corpus.windows import Windows, make_windows
from esscher.errors.more_text import PIECES
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from esscher.hf.loading import Loaded, load_model, outline_model
from esscher.hf.maps import head_projections, linear_maps
from esscher.probe.spec import OWN_WINDOW, WINDOW, ProbeSpec
from esscher.runs import Run, Unit

_T = TypeVar("_T")

Indices = npt.NDArray[np.int64]
WindowSink = Callable[[AttentionCall, Indices], None]

QUERY_WINDOWS = 256  # windows the queries come from: each process runs these through the model
SEQUENCE_WINDOWS = 32  # the same where a window is the pool
QUARTERS = 4  # depths of a window at which its own queries stand
FEWEST = 16  # keys that a query's own context must have
OBSERVE = 64  # last queries of the prompt, by which rules choose keys
DECODE = 128  # tokens after the prompt, at whose queries errors are measured
HEADS = 4  # heads of a unit of work, where the corpus is one part
# begins the name, in a spec, of a model given as an object: no other process can load it
OBJECT = "object:"
MEMORY = 1.5e9  # bytes of captured keys and values that a process may hold


@dataclass(frozen=True, eq=False)
class Queries:
    """The m queries in the order of windows: window, position, depth (number of its group of
    positions), and piece of the pool.
    """

    windows: Indices
    positions: Indices
    depths: Indices
    pieces: Indices

    def __len__(self) -> int:
        return len(self.windows)

    def take(self, rows: Indices) -> Queries:
        return Queries(*(x[rows] for x in vars(self).values()))

    def inside(self, window: int) -> Indices:
        """Numbers of the queries of a window."""
        return np.flatnonzero(self.windows == window)


@dataclass(frozen=True, eq=False)
class RuleQueries:
    """Positions of a window whose queries keep rules are compared for: some choose keys, others are
    judged.

    Of a causal model the keys before ``cut`` are the cache: queries just before it choose, later
    ones are judged, and keys from there on are all kept. None: every key is in the cache.
    """

    choosing: Indices
    judged: Indices
    cut: int | None


@dataclass(frozen=True, eq=False)
class Session:
    """Everything that a unit of work needs; made by :func:`open_session`."""

    spec: ProbeSpec
    loaded: Loaded
    windows: Windows
    pooled: npt.NDArray[np.bool_]  # (W, T): tokens that are part of a pool
    pieces: npt.NDArray[np.int8]  # (W, T): which of PIECES equal pieces of the pool a token is in
    queries: Queries
    parts: tuple[Indices, ...]  # windows of each part of the corpus
    _made: dict[Any, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def own(self) -> bool:
        """Whether each query meets the keys of its own window; else those of the corpus."""
        return self.spec.pool == "sequence"

    @property
    def layers(self) -> tuple[int, ...]:
        every = tuple(range(self.loaded.layers))
        return every if self.spec.layers is None else self.spec.layers

    def heads(self, layer: int) -> tuple[int, ...]:
        every = tuple(range(self.loaded.shapes[layer].heads))
        return every if self.spec.heads is None else self.spec.heads

    @functools.cached_property
    def grams(self) -> dict[int, Tensor | None]:
        """W_q W_q^T (heads, k, k) of each layer whose queries and keys are affine in its input."""
        found: dict[int, Tensor | None] = {}
        for maps in linear_maps(self.loaded.model, layers=self.layers):
            found[maps.layer] = None
            if len(maps.maps) == 3:
                wq = torch.stack(maps.maps["q"][0].double().chunk(maps.heads))
                found[maps.layer] = (wq @ wq.mT).cpu()
        return found

    @functools.cached_property
    def projections(self) -> dict[int, Tensor]:
        """W_O of each layer where one was found, (heads, width, d)."""
        return head_projections(self.loaded.model)

    def once(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """``make(self, *arguments)``, made once: the last result of each function is kept as long
        as the session is.
        """
        with self._lock:
            known = self._made.get(make)
            if known is None or known[0] != arguments:
                self._made.pop(make, None)  # not two of them in memory
                known = self._made[make] = (arguments, make(self, *arguments))
        found: _T = known[1]
        return found

    @property
    def keys(self) -> int:
        """Size of the corpus pool."""
        return int(self.pooled.sum())

    @functools.cached_property
    def query_windows(self) -> Indices:
        """Windows that have queries."""
        return np.unique(self.queries.windows)

    @functools.cached_property
    def blocks(self) -> list[list[int]]:
        """Layers whose keys and values of one part fit into memory together; each block is a
        forward pass over the part.
        """
        return self.layer_blocks(max(int(self.pooled[part].sum()) for part in self.parts))

    def layer_blocks(self, tokens: int, *, with_queries: bool = False) -> list[list[int]]:
        """Layers whose keys and values of so many tokens fit into memory together."""
        found: list[list[int]] = []
        held = 0.0
        for layer in self.layers:
            shape = self.loaded.shapes[layer]
            numbers = shape.kv_heads * (shape.width + shape.value_width)
            size = 4.0 * tokens * (numbers + with_queries * shape.heads * shape.width)
            if not found or held + size > MEMORY:
                found.append([])
                held = 0.0
            found[-1].append(layer)
            held += size
        return found

    @functools.cached_property
    def units(self) -> list[Unit]:
        """Pieces of work: a window each where it is the pool of its own queries; else some layers
        over a part of the corpus, or a few heads of a layer where the corpus is one part.
        """
        if self.own:
            return [{"window": window} for window in self.query_windows.tolist()]
        if len(self.parts) > 1:
            parts = range(len(self.parts))
            return [{"layers": block, "part": part} for block in self.blocks for part in parts]
        return [
            {"layers": [layer], "part": 0, "heads": list(heads[start : start + HEADS])}
            for layer in self.layers
            for heads in [self.heads(layer)]
            for start in range(0, len(heads), HEADS)
        ]

    def seen_keys(self, layer: int) -> Indices:
        """(m,): how many keys each query should see in its own context; a mask may differ."""
        shape = self.loaded.shapes[layer]
        real = (~self.windows.padding).sum(axis=1)[self.queries.windows]
        seen = self.queries.positions + 1 if shape.causal else real
        if shape.window is None:
            return seen.astype(np.int64)
        most = shape.window if shape.causal else 2 * shape.window + 1
        return np.minimum(seen, most).astype(np.int64)

    def most_keys(self, layer: int) -> int:
        """Most keys that a query sees."""
        return int(self.seen_keys(layer).max()) if self.own else self.keys

    def mean_keys(self, layer: int) -> int:
        """Keys that a query sees: the mean over those that see enough."""
        if not self.own:
            return self.keys
        seen = self.seen_keys(layer)
        enough = seen[seen >= FEWEST]
        return round(float((enough if enough.size else seen).mean()))

    def kept_queries(self, layer: int) -> Indices:
        """Numbers of the queries that costly statistics are of, evenly spread."""
        able = np.arange(len(self.queries))
        if self.own:
            able = np.flatnonzero(self.seen_keys(layer) >= FEWEST)
        return able[spread(len(able), self.spec.kept_queries)] if able.size else able

    @functools.cached_property
    def rule_windows(self) -> set[int]:
        """Windows in which keep rules are compared: evenly spread, as many as hold the kept
        queries. None where no rules are.
        """
        if not self.spec.compared:
            return set()
        windows = self.query_windows
        share = min(1.0, self.spec.kept_queries / len(self.queries))
        return set(windows[spread(len(windows), int(np.ceil(share * len(windows))))].tolist())

    def rule_queries(self, window: int) -> RuleQueries:
        """Which queries of a window choose the keys of rules that decide for all, and which are
        judged: as many as the probe has at the last depth.

        Causal models: the judged queries are spread over the last DECODE places of the text (at
        most a quarter of it); the OBSERVE places before them choose (at most half of the rest).
        Encoders: the probe's own queries are judged (at most half of the text); other places,
        drawn at random, choose.
        """
        rows = self.queries.inside(window)
        depths = self.queries.depths[rows]
        last = self.queries.positions[rows[depths == depths.max()]]
        text = np.flatnonzero(self.windows.text[window] & self.pooled[window])
        if self.loaded.causal:
            text = text[text <= last.max()]
            later = min(DECODE, max(1, len(text) // 4))
            before, after = text[:-later], text[-later:]
            judged = after[_last_ones(len(after), len(last))]
            return RuleQueries(before[-min(OBSERVE, len(before) // 2) :], judged, int(after[0]))
        judged = last[_last_ones(len(last), len(text) // 2)]
        others = np.setdiff1d(text, judged)
        generator = np.random.default_rng([self.spec.seed, window])
        drawn = generator.choice(others, min(OBSERVE, len(text) // 2), replace=False)
        return RuleQueries(np.sort(drawn), judged, None)

    def run(self, windows: Indices, layers: Sequence[int], sink: WindowSink) -> None:
        """Forward passes over these windows; the sink sees each layer of each batch, with the
        batch's window numbers.
        """
        size = max(1, self.spec.batch // self.windows.length)
        for batch in np.split(windows, range(size, len(windows), size)):

            def give(captured: AttentionCall, batch: Indices = batch) -> None:
                sink(captured, batch)

            inputs = self.inputs(batch)
            forward(self.loaded.model, inputs, give, layers=list(layers), hidden=True)

    def inputs(self, batch: Indices) -> dict[str, Tensor]:
        ids, real = self.windows.ids[batch].astype(np.int64), ~self.windows.padding[batch]
        found = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        return {name: torch.from_numpy(x).to(self.loaded.device) for name, x in found.items()}


def spread(size: int, count: int) -> Indices:
    """At most ``count`` of the numbers below ``size``, evenly spread from the first to the last."""
    return torch.linspace(0, size - 1, min(count, size)).round().long().numpy()


def _last_ones(size: int, count: int) -> Indices:
    """At most ``count`` of the numbers below ``size``, evenly spread, the last among them."""
    few = min(size, count)
    return (np.arange(1, few + 1) * size) // max(few, 1) - 1


# ---- opening one


def open_session(
    spec: ProbeSpec,
    loaded: Loaded | None = None,
    check: Callable[[Session], None] = lambda session: None,
) -> Session:
    """Read the text and the model (unless it is given) of a spec. Every mistake in them is a
    ValueError of one line.

    ``check`` sees the session before the weights are read, which may take minutes: text, layers,
    windows and rules need the configuration alone.
    """
    if loaded is None:
        check_text(spec.corpus)
        outline, planned = _model(spec, outline_model), None
        if outline is not None:  # the model runs without its weights
            planned = _read(spec, outline)
            check(planned)
        loaded = _model(spec, load_model)
        assert loaded is not None
        if planned is not None and alike(planned.loaded, loaded):
            return replace(planned, loaded=loaded)  # the text is not read again
    found = _read(spec, loaded)
    check(found)
    return found


def alike(outline: Loaded, loaded: Loaded) -> bool:
    """Whether a model looks as it did without its weights."""
    return (outline.shapes, outline.max_positions) == (loaded.shapes, loaded.max_positions)


def _model(spec: ProbeSpec, read: Callable[..., Loaded | None]) -> Loaded | None:
    if spec.model.startswith(OBJECT):
        raise ValueError(
            f"model: {spec.model} was given as a Python object, which this process does not have"
            " now; call esscher.probe with that model and the same out, or save the model in a"
            " folder and probe that"
        )
    own = spec.pool != "corpus"  # gradients of next tokens need the head of the model
    return read(
        spec.model, revision=spec.revision, dtype=spec.dtype, device=spec.device, with_head=own
    )


def _read(spec: ProbeSpec, loaded: Loaded) -> Session:
    windows = make_windows(spec.corpus, tokenizer_of(loaded), window_length(spec, loaded))
    return session_on(spec, loaded, windows)


def session_on(spec: ProbeSpec, loaded: Loaded, windows: Windows) -> Session:
    """The session of a spec on windows that are there already."""
    spec = concrete(spec, loaded)
    layers = spec.layers if spec.layers is not None else range(loaded.layers)
    if max(layers) >= loaded.layers:
        raise ValueError(
            f"layers: {loaded.name} has layers 0 to {loaded.layers - 1}, got {max(layers)}"
        )
    fewest = min(loaded.shapes[layer].heads for layer in layers)
    if spec.heads is not None and max(spec.heads) >= fewest:
        raise ValueError(f"heads: {loaded.name} has heads 0 to {fewest - 1}, got {max(spec.heads)}")
    own = spec.pool == "sequence"
    pooled = windows.text | windows.special if own else windows.text
    place = np.cumsum(pooled, dtype=np.int64).reshape(pooled.shape) - pooled
    pieces = (place * PIECES // max(int(pooled.sum()), 1)).astype(np.int8)
    counts = np.cumsum(pooled.sum(axis=1))
    last = max(int(np.ceil(counts[-1] / spec.part)) - 1, 0)
    part = np.minimum((counts - 1) // spec.part, last)
    parts = tuple(np.flatnonzero(part == number) for number in np.unique(part))
    queries = _queries(spec, windows, pooled, loaded.causal, pieces)
    return Session(spec, loaded, windows, pooled, pieces, queries, parts)


def concrete(spec: ProbeSpec, loaded: Loaded) -> ProbeSpec:
    """The spec with the pool that suits the model: a query's own context for causal ones, the
    corpus for encoders.
    """
    if spec.pool != "auto":
        return spec
    return ProbeSpec.read({**spec.as_dict(), "pool": "sequence" if loaded.causal else "corpus"})


def tokenizer_of(loaded: Loaded) -> Any:
    """The tokenizer of a model; ValueError where it has none."""
    if loaded.tokenizer is None:
        reason = f": {loaded.tokenizer_error}" if loaded.tokenizer_error else ""
        raise ValueError(
            f"{loaded.name}: no tokenizer, so no text can be given to it{reason}; pass tokenizer="
        )
    return loaded.tokenizer


def window_length(spec: ProbeSpec, loaded: Loaded) -> int:
    """Tokens of a window: those asked for, or the usual number as far as the model takes it."""
    most = loaded.max_positions
    if spec.window is None:
        usual = OWN_WINDOW if concrete(spec, loaded).pool == "sequence" else WINDOW
        return usual if most is None else min(usual, most)
    if most is not None and spec.window > most:
        raise ValueError(
            f"window: {loaded.name} takes at most {most} positions, got {spec.window}; use --window"
            f" {most}"
        )
    return spec.window


def _queries(
    spec: ProbeSpec,
    windows: Windows,
    pooled: npt.NDArray[np.bool_],
    causal: bool,
    pieces: npt.NDArray[np.int8],
) -> Queries:
    """Queries spread evenly over a few windows, at random places in each.

    In windows of a causal model, or with ``positions``, queries are the tokens up to and at each of
    these positions (default: each quarter of the window).
    """
    generator = np.random.default_rng(spec.seed)
    own = spec.pool == "sequence"
    if spec.positions is not None and not own:
        raise ValueError(
            "positions: they are of queries in their own context; use --pool sequence, or leave"
            " --positions out"
        )
    sizes = pooled.sum(axis=1)
    longest = int(sizes.max())
    most, least = (SEQUENCE_WINDOWS, longest) if own else (QUERY_WINDOWS, max(1, longest // 2))
    full = np.flatnonzero(sizes >= least)
    few = min(most, len(full), spec.queries)
    chosen = full[np.unique(np.linspace(0, len(full) - 1, few).round().astype(np.int64))]
    shares = [len(part) for part in np.array_split(np.arange(spec.queries), len(chosen))]
    ends = _depths(spec, windows, longest) if own and (causal or spec.positions) else None
    found: list[tuple[Indices, Indices, Indices]] = []
    for window, share in zip(chosen, shares, strict=True):
        text = np.flatnonzero(windows.text[window] & pooled[window])
        if ends is None:
            picked = np.sort(generator.choice(text, min(share, len(text)), replace=False))
            depths = np.zeros(len(picked), dtype=np.int64)
        else:
            picked, depths = _before(text, ends, share)
        found.append((np.full(len(picked), window), picked, depths))
    where, at, depth = (np.concatenate(column) for column in zip(*found, strict=True))
    return Queries(where, at, depth, pieces[where, at].astype(np.int64))


def _depths(spec: ProbeSpec, windows: Windows, longest: int) -> Indices:
    """The last positions of the queries of each depth, rising."""
    if spec.positions is None:
        quarters = range(1, QUARTERS + 1)
        return np.unique([max(0, round(longest * part / QUARTERS) - 1) for part in quarters])
    if spec.positions[-1] >= longest:
        has = f"a window has {windows.length} tokens"
        if longest != windows.length:
            has = f"the text fills {longest} tokens"
        raise ValueError(
            f"positions: {has}, expected places from 0 to {longest - 1}, got {spec.positions[-1]}"
        )
    return np.array(spec.positions, dtype=np.int64)


def _before(text: Indices, ends: Indices, share: int) -> tuple[Indices, Indices]:
    """Nearly as many places of text for each depth: the last ones up to it, none twice; and the
    depth of each.
    """
    taken: dict[int, int] = {}
    parts = np.array_split(np.arange(share), len(ends))
    for depth, part in zip(reversed(range(len(ends))), parts, strict=True):
        free = [place for place in text[text <= ends[depth]].tolist() if place not in taken]
        taken |= dict.fromkeys(free[max(0, len(free) - len(part)) :], depth)
    places = sorted(taken)
    depths = np.array([taken[place] for place in places], dtype=np.int64)
    return np.array(places, dtype=np.int64), depths


def measured_part(run: Run) -> str:
    """The heads that have numbers, of those of the model: 27 of 270 heads, 3 of 30 layers."""
    heads, about = run.table("heads"), run.table("about").iloc[0]
    measured = heads[heads["status"] == "ok"]
    layers, found = measured["layer"].nunique(), len(measured)
    every = int(about["layers"]) * int(about["heads"])
    if found == every:
        return f"all {found} heads of the model"
    return f"{found} of {every} heads, {layers} of {int(about['layers'])} layers"
