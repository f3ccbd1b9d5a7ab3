"""What a downstream run works on: the model with its head, its texts, W_O of every layer; made once
and remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.compress.spec import DECODE, ENCODED, PREFILL, DownstreamSpec
from esscher.corpus.documents import check_text
from esscher.corpus.windows import Windows, make_windows
from esscher.hf.loading import Loaded, Task, load_model, outline_model, task_of
from esscher.hf.maps import head_projections
from esscher.keep import Context, parse
from esscher.probe.session import Stamp, alike, stamp, tokenizer_of


@dataclass(frozen=True, eq=False)
class DownstreamContext:
    """``texts``: numbers of the windows; a window has ``prefill`` tokens, and of a language model
    ``decode`` more.
    """

    spec: DownstreamSpec
    loaded: Loaded
    task: Task
    windows: Windows
    texts: npt.NDArray[np.int64]
    prefill: int
    decode: int
    outputs: dict[int, Tensor]  # W_O of each layer, (heads, width, d)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that drop keys."""
        return (
            self.spec.layers if self.spec.layers is not None else tuple(range(self.loaded.layers))
        )

    @property
    def held(self) -> float:
        """Keys that the cache of a key-value head holds after the prefill, on average: a sliding
        window, or all.
        """
        shapes = self.loaded.shapes
        keys = [min(shape.window or self.prefill, self.prefill) for shape in shapes]
        return float(np.average(keys, weights=[shape.kv_heads for shape in shapes]))

    def drops(self, layer: int) -> Tensor | None:
        """Query heads (H,) of a layer that drop keys; None where all do."""
        heads = self.loaded.shapes[layer].heads
        if layer not in self.layers:
            return torch.zeros(heads, dtype=torch.bool)
        if self.spec.heads is None:
            return None
        return torch.isin(torch.arange(heads), torch.tensor(self.spec.heads))

    def ids(self, window: int) -> Tensor:
        """(1, T), padding left out."""
        row = self.windows.ids[window][~self.windows.padding[window]]
        return torch.from_numpy(row.astype(np.int64))[None].to(self.loaded.device)


_lock = threading.Lock()
# and for which spec; a model fills the memory
_latest: tuple[DownstreamContext, Stamp, str] | None = None


def context_of(spec: DownstreamSpec, *, starts: bool = False) -> DownstreamContext:
    """The context of a spec: the one this process has, or a new one in its place. Its own spec
    leaves nothing open.

    ``starts``: a run starts here, and files may have changed since under the same names.
    """
    global _latest
    with _lock:
        same = _latest is not None and spec.hash in (_latest[0].spec.hash, _latest[2])
        if not same or (starts and _latest is not None and _latest[1] != stamp(spec)):
            _latest = None  # not two of them in memory
            before = stamp(spec)
            _latest = _make(spec), before, spec.hash
        assert _latest is not None
        return _latest[0]


def _make(spec: DownstreamSpec) -> DownstreamContext:
    """Text, layers, rules and budgets are checked by the configuration, before weights are read."""
    from esscher.compress.choose import budgets_of  # which knows this module

    check_text(spec.corpus)
    outline = _read(spec, outline_model)
    planned = None if outline is None else _planned(spec, outline)
    if planned is not None:
        budgets_of(planned)
    loaded = _read(spec, load_model)
    assert loaded is not None
    if planned is None or outline is None or not alike(outline, loaded):
        planned = _planned(spec, loaded)
    return replace(planned, loaded=loaded, outputs=_outputs(loaded))


def _read(spec: DownstreamSpec, read: Callable[..., Loaded | None]) -> Loaded | None:
    return read(
        spec.model, revision=spec.revision, dtype=spec.dtype, device=spec.device, with_head=True
    )


def _planned(spec: DownstreamSpec, loaded: Loaded) -> DownstreamContext:
    task = task_of(loaded.model)
    when = spec.when if spec.when != "auto" else "cache" if task == "language" else "every"
    if when == "cache" and task != "language":
        raise ValueError(
            f"when: {loaded.name} is no language model, so that no cache is decoded from; use"
            " --when every"
        )
    spec = DownstreamSpec.read({**spec.as_dict(), "when": when})
    _check(spec, loaded)
    decode = spec.decode if task == "language" else 0
    prefill = spec.window or (PREFILL if task == "language" else ENCODED)
    most = loaded.max_positions
    if most is not None and prefill + decode > most:
        if spec.window is not None or spec.decode != DECODE:
            raise ValueError(
                f"window: {loaded.name} takes at most {most} positions, got {prefill} and {decode}"
                " more; use a smaller --window"
            )
        prefill = most - decode if most > 2 * decode else most // 2
        decode = min(decode, most - prefill)
    _check_rules(spec, prefill if when == "cache" else prefill + decode)
    windows = make_windows(spec.corpus, tokenizer_of(loaded), prefill + decode)
    full = np.flatnonzero(~windows.padding.any(axis=1))
    if len(full) < spec.texts:
        raise ValueError(
            f"texts: the corpus fills {len(full)} windows of {prefill + decode} tokens, expected"
            f" {spec.texts}; give more text, fewer --texts or a smaller --window"
        )
    texts = full[np.linspace(0, len(full) - 1, spec.texts).round().astype(np.int64)]
    return DownstreamContext(spec, loaded, task, windows, texts, prefill, decode, {})


def _check_rules(spec: DownstreamSpec, keys: int) -> None:
    """Refuse rules whose numbers do not fit so many keys, and sizes that leave a rule nothing to
    choose.
    """
    one = torch.ones(keys, 1, dtype=torch.float64)
    context = Context(one[:1], one, one, 1.0, torch.tensor([keys - 1]))
    least = {}
    for text in spec.compared:
        rule = parse(text)
        rule.check(context, keys)
        least[text] = rule.least(context)
    most = round(spec.share(spec.sizes[-1], float(keys)) * keys)
    bare = [text for text in spec.compared if most <= least[text]]
    if bare and (spec.rules is not None or len(bare) == len(least)):
        raise ValueError(
            f"sizes: {bare[0]} keeps {least[bare[0]]} keys of {keys} surely, and no size leaves it"
            f" more, {most} at most; give larger --sizes or a larger --window"
        )


def _check(spec: DownstreamSpec, loaded: Loaded) -> None:
    if spec.layers is not None and max(spec.layers) >= loaded.layers:
        raise ValueError(
            f"layers: {loaded.name} has layers 0 to {loaded.layers - 1}, got {max(spec.layers)}"
        )
    fewest = min(shape.heads for shape in loaded.shapes)
    if spec.heads is not None and max(spec.heads) >= fewest:
        raise ValueError(f"heads: {loaded.name} has heads 0 to {fewest - 1}, got {max(spec.heads)}")
    if spec.when != "cache":
        asked = {
            "splits": spec.splits != ("uniform",),
            "needles": spec.needles,
            "sensitivity": spec.sensitivity,
        }
        asked |= {"depth": spec.depth}
        given = [name for name, wanted in asked.items() if wanted]
        if given:
            raise ValueError(
                f"{given[0]}: it is of a cache that a language model decodes from; leave it out"
            )
    if ("budget" in spec.splits) != (spec.budget is not None):
        raise ValueError(
            "budget: the split budget and a probe's run go together; give --splits budget and"
            " --budget RUN"
        )


def _outputs(loaded: Loaded) -> dict[int, Tensor]:
    """W_O of each layer; one where it is not found has the identity of each head."""
    found = head_projections(loaded.model)
    for layer, shape in enumerate(loaded.shapes):
        if layer not in found:
            found[layer] = torch.eye(shape.value_width).repeat(shape.heads, 1, 1)
    return found
