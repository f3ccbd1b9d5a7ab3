"""Our rules for a cache against the presses of kvpress, at equal cache, on the same windows of the
same model: KL and loss.

kvpress has dependencies of its own (transformers below 5.3), so it is no dependency here: where it
cannot be imported this says so and measures nothing. Beside this environment: ``pip install
--no-deps --target LIB kvpress cachetools fire termcolor`` and ``PYTHONPATH=LIB python
benchmarks/presses.py TEXT [WINDOWS] [PREFILL] [DECODE]``. On transformers 5 a hook gives presses
the ``cache_position`` that they read; what a press only marks as dropped (AdaKV) is masked by an
intervention.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from esscher.compress.choose import Choice
from esscher.compress.metrics import Outcome, metrics
from esscher.compress.session import Source, source_of
from esscher.compress.spec import CompressSpec
from esscher.compress.text import Cell, Text
from esscher.hf.interventions import intervene
from esscher.intervals import mean_interval

SHARES = (0.05, 0.1, 0.2)
OURS = {"fisher": ("cut",), "kvzip": ("cut",), "kvzip_plus": ("cut",), "snapkv": ("uniform",)}


def presses(ratio: float) -> dict[str, Any]:
    """By name, with the settings that their authors give them."""
    import kvpress

    return {
        "AdaKV + SnapKV": kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "SnapKV": kvpress.SnapKVPress(ratio),
        "ExpectedAttention": kvpress.ExpectedAttentionPress(ratio),
        "StreamingLLM": kvpress.StreamingLLMPress(ratio),
        "Knorm": kvpress.KnormPress(ratio),
        "Random": kvpress.RandomPress(ratio, seed=0),
    }


@contextlib.contextmanager
def cache_positions(model: Any) -> Iterator[None]:
    """What attention modules are called with, and where in the sequence, as presses expect it."""
    seen: dict[str, int] = {"from": 0}

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tokens = kwargs["hidden_states"].shape[1]
        return args, {**kwargs, "cache_position": torch.arange(seen["from"], seen["from"] + tokens)}

    hooks = [
        layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def pressed(model: Any, press: Any, ids: torch.Tensor, tokens: int) -> tuple[Outcome, float]:
    """The continuation after a prefill that a press compressed, and the keys left of a key-value
    head.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad(), cache_positions(model), press(model):
        model(input_ids=ids[:, :tokens], past_key_values=cache, use_cache=True)
    kept = []
    for layer, held in zip(model.model.layers, cache.layers, strict=True):
        own = torch.ones(held.keys.shape[1:3], dtype=torch.bool)  # (kv_heads, keys left)
        marked = getattr(layer.self_attn, "masked_key_indices", None)
        if marked is not None:
            own[marked[1], marked[2]] = False
            layer.self_attn.masked_key_indices = None
        kept.append(own)
    choice, places = Choice(dict(enumerate(kept))), torch.arange(tokens, ids.shape[1])[None]
    with torch.no_grad(), intervene(model, lambda captured: choice.left(captured, None)):
        logits = model(
            input_ids=ids[:, tokens:], past_key_values=cache, position_ids=places, use_cache=True
        ).logits[0]
    left = np.mean([int(layer.sum()) / len(layer) for layer in kept])
    return Outcome("language", logits, ids[0, tokens + 1 :]), float(left)


def compare(source: Source) -> dict[tuple[str, float], list[tuple[float, float, float]]]:
    """By name and share, for each window: KL, loss added to the full model's, keys kept."""
    kl, loss = metrics()["kl"], metrics()["loss"]
    found: dict[tuple[str, float], list[tuple[float, float, float]]] = {}
    for window in source.texts.tolist():
        ids = source.ids(window)
        text = Text(source, ids, source.prefill)

        def add(
            name: str, share: float, kept: Outcome, keys: float, full: Outcome = text.full
        ) -> None:
            added = float(loss.value(full, kept) or 0.0) - float(loss.value(full, full) or 0.0)
            found.setdefault((name, share), []).append(
                (float(kl.value(full, kept) or 0.0), added, keys)
            )

        for share in SHARES:
            for rule, splits in OURS.items():
                for split in splits:
                    choice, kept, _ = text.run(Cell(rule, split, share, 0))
                    add(f"{rule}, {split}", share, kept, text.kept(choice))
            for name, press in presses(1 - share).items():
                add(name, share, *pressed(source.loaded.model, press, ids, source.prefill))
            print(f"window {window}, share {share:g} done", file=sys.stderr, flush=True)
    return found


def main(arguments: list[str] | None = None) -> list[str]:
    try:
        import kvpress  # noqa: F401
    except ImportError as cause:
        return [f"presses: kvpress cannot be imported ({cause}); nothing is compared  ok"]
    given = arguments or []
    texts, window, decode = (
        int(number) for number in (*given[1:], *("2", "1024", "128")[len(given[1:]) :])
    )
    corpus = {"text": given[:1]} if given else {}
    spec = CompressSpec.read(
        {
            "model": "smollm2",
            "corpus": corpus,
            "texts": texts,
            "window": window,
            "decode": decode,
            "rules": list(OURS),
        }
        | {"splits": ["uniform", "cut"], "keep": list(SHARES)}
    )
    lines = []
    for (name, share), values in sorted(
        compare(source_of(spec)).items(), key=lambda item: (item[0][1], item[1])
    ):
        columns = np.array(values).T
        told = [
            f"{mean:.3f} [{low:.3f}, {high:.3f}]"
            for mean, low, high in (
                mean_interval(columns[0], least=0.0),  # a divergence is never negative
                mean_interval(columns[1]),
            )
        ]
        lines.append(
            f"{share:5.0%}  {name:<44} KL {told[0]}  loss added {told[1]}  keys"
            f" {columns[2].mean():.1f}  ok"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(main(sys.argv[1:])))
