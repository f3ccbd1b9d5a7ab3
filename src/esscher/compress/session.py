"""What a compression run works on: the model with its head, its prompts, W_O of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.compress.choose import UNIFORM, cache_rule, default_split, splits_of
from esscher.compress.spec import DECODE, ENCODED, PREFILL, CompressSpec
from esscher.corpus.documents import check_text
from esscher.corpus.windows import Windows, make_windows
from esscher.hf.loading import Loaded, Task, load_model, outline_model, task_of
from esscher.hf.maps import head_projections
from esscher.keep import Context, parse
from esscher.keep.rule import Rule
from esscher.probe.session import alike, tokenizer_of


@dataclass(frozen=True, eq=False)
class Source:
    """``texts``: numbers of the windows; a window has ``prefill`` tokens, and for a language model
    ``decode`` more. ``rules``: by the text that asked for them.
    """

    spec: CompressSpec
    loaded: Loaded
    task: Task
    windows: Windows
    texts: npt.NDArray[np.int64]
    prefill: int
    decode: int
    rules: dict[str, Rule]
    outputs: dict[int, Tensor]  # W_O of each layer, (heads, width, d)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that drop keys."""
        asked = self.spec.layers
        return asked if asked is not None else tuple(range(self.loaded.layers))

    def ids(self, window: int) -> Tensor:
        """(1, T), padding left out."""
        row = self.windows.ids[window][~self.windows.padding[window]]
        return torch.from_numpy(row.astype(np.int64))[None].to(self.loaded.device)

    def splits(self, rule: Rule) -> tuple[str, ...]:
        """Splits that a rule is measured with."""
        if self.spec.splits is None:
            return (default_split(rule),)
        can = splits_of(rule)
        return tuple(split for split in self.spec.splits if can or split == UNIFORM) or (UNIFORM,)


def source_of(spec: CompressSpec, tell: Callable[[Source], None] = lambda source: None) -> Source:
    """The model and the prompts of a spec: text, layers and rules are checked by the
    configuration, before weights are read. ``tell`` is called in between.
    """
    check_text(spec.corpus)
    outline = _read(spec, outline_model)
    planned = None if outline is None else _planned(spec, outline)
    if planned is not None:
        tell(planned)
    loaded = _read(spec, load_model)
    assert loaded is not None
    if planned is None or outline is None or not alike(outline, loaded):
        planned = _planned(spec, loaded)
        tell(planned)
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)  # gradients are taken at activations alone
    return replace(planned, loaded=loaded, outputs=head_projections(loaded.model))


def _read(spec: CompressSpec, read: Callable[..., Loaded | None]) -> Loaded | None:
    return read(
        spec.model, revision=spec.revision, dtype=spec.dtype, device=spec.device, with_head=True
    )


def _planned(spec: CompressSpec, loaded: Loaded) -> Source:
    task = task_of(loaded.model)
    when = spec.when if spec.when != "auto" else "cache" if task == "language" else "every"
    if when == "cache" and task != "language":
        raise ValueError(
            f"when: {loaded.name} is no language model and has no KV cache to compress; use"
            " --when every, where each query keeps a few keys"
        )
    spec = CompressSpec.read({**spec.as_dict(), "when": when})
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
    rules = _rules(spec, prefill if when == "cache" else prefill + decode)
    windows = make_windows(spec.corpus, tokenizer_of(loaded), prefill + decode)
    full = np.flatnonzero(~windows.padding.any(axis=1))
    if len(full) < spec.texts:
        raise ValueError(
            f"texts: the text fills {len(full)} windows of {prefill + decode} tokens, expected"
            f" {spec.texts}; give more text, fewer --texts or a smaller --window"
        )
    texts = full[np.linspace(0, len(full) - 1, spec.texts).round().astype(np.int64)]
    return Source(spec, loaded, task, windows, texts, prefill, decode, rules, {})


def _rules(spec: CompressSpec, keys: int) -> dict[str, Rule]:
    """The rules by their texts, if they fit so many keys and some size leaves each a choice."""
    one = torch.ones(keys, 1, dtype=torch.float64)
    context = Context(one[:1], one, one, 1.0, torch.tensor([keys - 1]))
    cache = spec.when == "cache"
    found = {}
    for text in spec.compared:
        rule = cache_rule(text, spec.sinks, spec.recent) if cache else parse(text)
        if cache and any(part.per_query for part in rule.parts):
            raise ValueError(
                f"rules: {text} chooses keys for each query, and a cache is chosen once; use --when"
                " every"
            )
        rule.check(context, keys if rule.free else None)
        least, most = rule.least(context), round(max((*spec.shares, 0.0)) * keys)
        if spec.shares and most <= least and most < keys:
            raise ValueError(
                f"keep: {text} always keeps {least} of {keys} keys, and the largest share asked for"
                f" is {most}; use a larger --keep or a longer --window"
            )
        found[text] = rule
    return found


def _check(spec: CompressSpec, loaded: Loaded) -> None:
    if spec.keep is not None and spec.kl is not None:
        raise ValueError("keep, kl: give a size or a loss, not both")
    if spec.layers is not None and max(spec.layers) >= loaded.layers:
        raise ValueError(
            f"layers: {loaded.name} has layers 0 to {loaded.layers - 1}, got {max(spec.layers)}"
        )
    if spec.when != "cache":
        asked = ("splits", "needles", "sensitivity", "together", "kl", "check", "again")
        given = [name for name in asked if getattr(spec, name)]
        if given:
            raise ValueError(
                f"{given[0]}: it is of a KV cache that a language model decodes from; leave it out"
            )
