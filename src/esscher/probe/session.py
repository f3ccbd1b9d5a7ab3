"""What a probe works on: the model, the windows of text, which tokens ask, and how tokens meet
queries, decided once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
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
from esscher.hf.maps import LinearMaps, head_projections, linear_maps
from esscher.probe.spec import OWN_WINDOW, WINDOW, ProbeSpec
from esscher.runs import Run

_T = TypeVar("_T")

Indices = npt.NDArray[np.int64]
WindowSink = Callable[[AttentionCall, Indices], None]

QUERY_WINDOWS = 256  # windows the queries come from: each process runs these through the model
SEQUENCE_WINDOWS = 32  # the same where a window is the pool
QUARTERS = 4  # depths of a window at which its own queries stand
# begins the name, in a spec, of a model given as an object: no other process can load it
OBJECT = "object:"
MEMORY = 1.5e9  # bytes of captured queries, keys and values that a process may hold


class Mode(Enum):
    """How the tokens of a probe meet its queries."""

    HELD = (
        "tokens of all layers are held, from one pass over the corpus; a unit of work is some heads"
    )
    LAYERS = "the corpus streams by once for each layer; a unit is a layer"
    PARTS = (
        "the corpus streams by part by part; a unit leaves states of some layers, and states of"
        " parts merge"
    )
    OWN = (
        "each query meets the keys of its own window; a unit is a window, and goes through the"
        " model once"
    )


@dataclass(frozen=True, eq=False)
class Places:
    """Where the m queries stand: window and position of each, in the order of windows, and which
    depth that is.
    """

    windows: Indices
    positions: Indices
    depths: Indices
    pieces: Indices  # of the pool

    def __len__(self) -> int:
        return len(self.windows)

    def take(self, rows: Indices) -> Places:
        """Those of some queries."""
        return Places(
            self.windows[rows], self.positions[rows], self.depths[rows], self.pieces[rows]
        )

    def inside(self, window: int) -> Indices:
        """Numbers of the queries of a window."""
        return np.flatnonzero(self.windows == window)


@dataclass(frozen=True, eq=False)
class Asked:
    """Positions of a window whose queries keep rules are compared for: some choose keys, others are
    judged.

    Of a causal model the keys before ``cut`` are the cache: queries just before it choose, later
    ones are judged, and keys from there on are all kept. None: every key is in the cache.
    """

    choosing: Indices
    judged: Indices
    cut: int | None

    @property
    def positions(self) -> Indices:
        """Those that choose, and then those that are judged."""
        return np.concatenate([self.choosing, self.judged])


@dataclass(frozen=True, eq=False)
class ProbeContext:
    """Everything a unit of work needs besides its number; made by :func:`make_context`."""

    spec: ProbeSpec
    loaded: Loaded
    windows: Windows
    pooled: npt.NDArray[np.bool_]  # (W, T): tokens that are part of a pool
    # (W, T): which of PIECES equal pieces of the pool, as the text goes, a pooled token is of
    pieces: npt.NDArray[np.int8]
    places: Places
    parts: tuple[Indices, ...]  # windows of each part of the corpus
    mode: Mode
    _made: dict[Any, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def layers(self) -> tuple[int, ...]:
        return (
            self.spec.layers if self.spec.layers is not None else tuple(range(self.loaded.layers))
        )

    def heads(self, layer: int) -> tuple[int, ...]:
        return (
            self.spec.heads
            if self.spec.heads is not None
            else tuple(range(self.loaded.shapes[layer].heads))
        )

    @functools.cached_property
    def maps(self) -> dict[int, LinearMaps]:
        """The linear maps of the layers to be measured."""
        return {maps.layer: maps for maps in linear_maps(self.loaded.model, layers=self.layers)}

    @functools.cached_property
    def outputs(self) -> dict[int, Tensor]:
        """W_O of each layer where one was found, (heads, width, d)."""
        return head_projections(self.loaded.model)

    def once(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """``make(self, *arguments)``, made once: the last result of each function is kept as long
        as the context is.
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

    def foreseen(self, layer: int) -> Indices:
        """(m,): how many keys each query will see in its own context; a mask may still show another
        number.
        """
        shape = self.loaded.shapes[layer]
        real = (~self.windows.padding).sum(axis=1)[self.places.windows]
        seen = self.places.positions + 1 if shape.causal else real
        most = (
            np.inf
            if shape.window is None
            else shape.window
            if shape.causal
            else 2 * shape.window + 1
        )
        return np.minimum(seen, most).astype(np.int64)

    def deepest(self, window: int) -> Indices:
        """Numbers of the queries of a window that stand at its last depth."""
        rows = self.places.inside(window)
        depths = self.places.depths[rows]
        last: Indices = rows[depths == depths.max()]
        return last

    def asked(self, window: int) -> Asked:
        """Which queries of a window choose the keys of rules that decide for all, and which are
        judged: as many as the probe has at the last depth.

        Of a causal model the judged are spread evenly over the last ``spec.decode`` places of text,
        a quarter of them at most, and the ``spec.observe`` places before these choose, half of what
        is there at most: neither the cache nor its choice depends on how many are judged. Of an
        encoder those of the probe are judged, half of the text at most, and others, drawn, choose.
        """
        spec, last = self.spec, self.places.positions[self.deepest(window)]
        text = np.flatnonzero(self.windows.text[window] & self.pooled[window])
        if self.loaded.causal:
            text = text[text <= last.max()]
            later = min(spec.decode, max(1, len(text) // 4))
            before, after = text[:-later], text[-later:]
            judged = after[_spread(len(after), len(last))]
            return Asked(before[-min(spec.observe, len(before) // 2) :], judged, int(after[0]))
        judged = last[_spread(len(last), len(text) // 2)]
        others = np.setdiff1d(text, judged)
        generator = np.random.default_rng([spec.seed, window])
        drawn = generator.choice(others, min(spec.observe, len(text) // 2), replace=False)
        return Asked(np.sort(drawn), judged, None)

    @property
    def cache_keys(self) -> int:
        """Keys of the largest cache that keep rules choose from."""
        windows = np.unique(self.places.windows).tolist()
        cuts = {window: self.asked(window).cut for window in windows}
        return max(int(self.pooled[window, :cut].sum()) for window, cut in cuts.items())

    def run(self, windows: Indices, layers: Sequence[int], sink: WindowSink) -> None:
        """Forward passes over these windows; the sink sees each layer of each batch, with the
        batch's window numbers.
        """
        size = max(1, self.spec.batch // self.windows.length)
        for start in range(0, len(windows), size):
            batch = windows[start : start + size]
            forward(
                self.loaded.model,
                self.inputs(batch),
                functools.partial(_give, sink, batch),
                layers=list(layers),
                hidden=True,
            )

    def inputs(self, batch: Indices) -> dict[str, Tensor]:
        device = self.loaded.device
        return {
            "input_ids": torch.from_numpy(self.windows.ids[batch].astype(np.int64)).to(device),
            "attention_mask": (
                torch.from_numpy((~self.windows.padding[batch]).astype(np.int64)).to(device)
            ),
        }

    def sinks(self, window: int) -> npt.NDArray[np.bool_]:
        """(T,): the first token and the special ones, where attention is known to rest when it has
        nothing to say.
        """
        mask: npt.NDArray[np.bool_] = self.windows.special[window].copy()
        mask[0] = True
        return mask


def _spread(size: int, count: int) -> Indices:
    """At most ``count`` of the numbers below ``size``, evenly spread, the last among them."""
    few = min(size, count)
    return (np.arange(1, few + 1) * size) // max(few, 1) - 1


def _give(sink: WindowSink, batch: Indices, captured: AttentionCall) -> None:
    sink(captured, batch)


def make_context(
    spec: ProbeSpec,
    loaded: Loaded | None = None,
    check: Callable[[ProbeContext], None] = lambda _: None,
) -> ProbeContext:
    """Read the text and the model (unless it is given) of a spec. Every mistake in them is a
    ValueError of one line.

    ``check`` refuses what a context cannot give. It sees the context before the weights are read,
    which may take minutes: text, layers, windows and rules need the configuration alone.
    """
    if loaded is not None:
        found = _planned(spec, loaded)
        check(found)
        return found
    planned = plan_context(spec, check)
    loaded = _model(spec, load_model)
    assert loaded is not None
    if planned is not None and alike(planned.loaded, loaded):
        return replace(planned, loaded=loaded)  # the text is not read again
    found = _planned(spec, loaded)
    check(found)
    return found


def plan_context(
    spec: ProbeSpec, check: Callable[[ProbeContext], None] = lambda _: None
) -> ProbeContext | None:
    """The context with a model that has no weights; None where a model does not run without."""
    check_text(spec.corpus)
    outline = _model(spec, outline_model)
    if outline is None:
        return None
    planned = _planned(spec, outline)
    check(planned)
    return planned


def alike(outline: Loaded, loaded: Loaded) -> bool:
    """Whether a model looks as it did without its weights."""
    return (outline.shapes, outline.max_positions) == (loaded.shapes, loaded.max_positions)


def _planned(spec: ProbeSpec, loaded: Loaded) -> ProbeContext:
    spec = _concrete(spec, loaded)
    _check_heads(spec, loaded)
    length = window_length(spec, loaded)
    return context_on(spec, loaded, make_windows(spec.corpus, tokenizer_of(loaded), length))


def context_on(spec: ProbeSpec, loaded: Loaded, windows: Windows) -> ProbeContext:
    """The context of a spec on windows that are there already."""
    spec = _concrete(spec, loaded)
    _check_heads(spec, loaded)
    pooled = (
        windows.text | windows.special if spec.special or spec.pool == "sequence" else windows.text
    )
    pieces = _pieces(pooled)
    places, parts = _places(spec, windows, pooled, loaded.causal, pieces), _parts(spec, pooled)
    return ProbeContext(
        spec,
        loaded,
        windows,
        pooled,
        pieces,
        places,
        parts,
        _mode(spec, loaded, parts, int(pooled.sum())),
    )


def _concrete(spec: ProbeSpec, loaded: Loaded) -> ProbeSpec:
    """The same with the pool that suits the model: a query's own context for causal ones, the
    corpus for encoders.
    """
    if spec.pool != "auto":
        return spec
    return ProbeSpec.read({**spec.as_dict(), "pool": "sequence" if loaded.causal else "corpus"})


def _model(spec: ProbeSpec, read: Callable[..., Loaded | None]) -> Loaded | None:
    if spec.model.startswith(OBJECT):
        raise ValueError(
            f"model: {spec.model} was given as a Python object, which this process does not have"
            " now; call esscher.probe with that model and the same out, or save the model in a"
            " folder and probe that"
        )
    own = spec.pool != "corpus"  # of a query's own context it is asked what next tokens feel
    return read(
        spec.model, revision=spec.revision, dtype=spec.dtype, device=spec.device, with_head=own
    )


def _pieces(pooled: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    place: Indices = np.cumsum(pooled, dtype=np.int64).reshape(pooled.shape) - pooled
    pieces: npt.NDArray[np.int8] = (place * PIECES // max(int(pooled.sum()), 1)).astype(np.int8)
    return pieces


def _parts(spec: ProbeSpec, pooled: npt.NDArray[np.bool_]) -> tuple[Indices, ...]:
    """A part holds about ``spec.part`` pooled tokens."""
    counts = np.cumsum(pooled.sum(axis=1))
    part = np.minimum((counts - 1) // spec.part, max(int(np.ceil(counts[-1] / spec.part)) - 1, 0))
    return tuple(np.flatnonzero(part == number) for number in np.unique(part))


def _mode(spec: ProbeSpec, loaded: Loaded, parts: Sequence[Indices], keys: int) -> Mode:
    if spec.pool == "sequence":
        return Mode.OWN
    if len(parts) > 1:
        return Mode.PARTS
    shapes = [
        loaded.shapes[layer]
        for layer in (range(loaded.layers) if spec.layers is None else spec.layers)
    ]
    numbers = sum(shape.kv_heads * (shape.width + shape.value_width) for shape in shapes)
    if spec.moments:
        numbers += sum(shape.heads * shape.width for shape in shapes)
    return Mode.HELD if 4 * numbers * keys <= MEMORY else Mode.LAYERS


def tokenizer_of(loaded: Loaded) -> object:
    """The tokenizer of a model; ValueError where it has none."""
    if loaded.tokenizer is None:
        reason = f": {loaded.tokenizer_error}" if loaded.tokenizer_error else ""
        raise ValueError(
            f"{loaded.name}: no tokenizer, so no text can be given to it{reason}; pass tokenizer="
        )
    return loaded.tokenizer


def window_length(spec: ProbeSpec, loaded: Loaded) -> int:
    """Tokens of a window: those asked for, or the usual number as far as the model takes it."""
    spec = _concrete(spec, loaded)
    most = loaded.max_positions
    if spec.window is None:
        usual = OWN_WINDOW if spec.pool == "sequence" else WINDOW
        return usual if most is None else min(usual, most)
    if most is not None and spec.window > most:
        raise ValueError(
            f"window: {loaded.name} takes at most {most} positions, got {spec.window}; use --window"
            f" {most}"
        )
    return spec.window


def _check_heads(spec: ProbeSpec, loaded: Loaded) -> None:
    if spec.layers is not None and max(spec.layers) >= loaded.layers:
        raise ValueError(
            f"layers: {loaded.name} has layers 0 to {loaded.layers - 1}, got {max(spec.layers)}"
        )
    layers = spec.layers if spec.layers is not None else range(loaded.layers)
    fewest = min(loaded.shapes[layer].heads for layer in layers)
    if spec.heads is not None and max(spec.heads) >= fewest:
        raise ValueError(f"heads: {loaded.name} has heads 0 to {fewest - 1}, got {max(spec.heads)}")


def _places(
    spec: ProbeSpec,
    windows: Windows,
    pooled: npt.NDArray[np.bool_],
    causal: bool,
    pieces: npt.NDArray[np.int8],
) -> Places:
    """Queries spread evenly over a few windows, at random places in each.

    Where a causal model's window is the pool, or where positions are given, they stand at these
    depths of it, by default at each quarter: the tokens before and at each.
    """
    generator = np.random.default_rng(spec.seed)
    own = spec.pool == "sequence"
    if spec.positions is not None and not own:
        raise ValueError(
            "positions: they are of queries in their own context; use --pool sequence, or leave"
            " --positions out"
        )
    sizes = pooled.sum(axis=1)
    most, least = (
        (SEQUENCE_WINDOWS, int(sizes.max()))
        if own
        else (QUERY_WINDOWS, max(1, int(sizes.max()) // 2))
    )
    full = np.flatnonzero(sizes >= least)
    chosen = full[
        np.unique(
            np.linspace(0, len(full) - 1, min(most, len(full), spec.queries))
            .round()
            .astype(np.int64)
        )
    ]
    shares = [len(part) for part in np.array_split(np.arange(spec.queries), len(chosen))]
    ends = (
        _depths(spec, windows, int(sizes.max()))
        if own and (causal or spec.positions is not None)
        else None
    )
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
    return Places(where, at, depth, pieces[where, at].astype(np.int64))


def _depths(spec: ProbeSpec, windows: Windows, longest: int) -> Indices:
    """The last positions of the queries of each depth, rising."""
    if spec.positions is None:
        return np.unique(
            [max(0, round(longest * quarter / QUARTERS) - 1) for quarter in range(1, QUARTERS + 1)]
        )
    if spec.positions[-1] >= longest:
        has = (
            f"a window has {windows.length} tokens"
            if longest == windows.length
            else f"the text fills {longest} tokens"
        )
        raise ValueError(
            f"positions: {has}, expected places from 0 to {longest - 1}, got {spec.positions[-1]}"
        )
    return np.array(spec.positions, dtype=np.int64)


def _before(text: Indices, ends: Indices, share: int) -> tuple[Indices, Indices]:
    """About as many places of text at each depth, the last ones up to it, each once; and which
    depth they are of.
    """
    taken: dict[int, int] = {}
    for depth, part in zip(
        reversed(range(len(ends))), np.array_split(np.arange(share), len(ends)), strict=True
    ):
        free = [place for place in text[text <= ends[depth]].tolist() if place not in taken]
        taken |= dict.fromkeys(free[max(0, len(free) - len(part)) :], depth)
    places = sorted(taken)
    return np.array(places, dtype=np.int64), np.array(
        [taken[place] for place in places], dtype=np.int64
    )


# ---- Which part of a model a probe measured: its totals hold for that part, and not for the
# model.


def measured_part(run: Run) -> str:
    """The heads that have numbers, of those that the model has: 27 of 270 heads, 3 of 30 layers."""
    heads, about = run.table("heads"), run.table("about").iloc[0]
    measured = heads[heads["status"] == "ok"]
    layers, found = measured["layer"].nunique(), len(measured)
    if "heads" not in about:  # of each layer; a run of an older version
        return f"{found} heads, {layers} of {int(about['layers'])} layers"
    if found == int(about["layers"]) * int(about["heads"]):
        return f"all {found} heads of the model"
    return (
        f"{found} of {int(about['layers']) * int(about['heads'])} heads, {layers} of"
        f" {int(about['layers'])} layers"
    )
