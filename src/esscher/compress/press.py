"""Our rules as a press of kvpress: ``with EsscherPress(0.9)(model): model.model(input_ids=...)``.

kvpress compresses the cache of each layer in a hook behind its attention. Our rules read the whole
prompt first (gradients, replay), so the press does that when the model is entered, and the hooks
look up what was chosen. It needs no kvpress; where that is installed, EsscherPress is one of its
presses, and its pipeline and benchmarks take it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esscher.compress.api import Found, choose_keys
from esscher.compress.prompt import Settings
from esscher.compress.spec import REFIT, VALUES, parted

try:
    from kvpress import ScorerPress as _Base
except ImportError:
    _Base = object


class EsscherPress(_Base):  # type: ignore[misc]
    """``compression_ratio``: share of the cache that is removed. ``rule``, ``split``, ``sinks``,
    ``recent``, ``observe``, ``replay``: as in :func:`esscher.compress`. ``tokenizer``: for the
    instruction of a replay. The attention of kvpress knows no weights of keys.

    Where all heads of a layer keep the same number of keys (``split="uniform"`` or ``"pages"``),
    its cache gets smaller. Else dropped keys are named in ``module.masked_key_indices``, as AdaKV
    and KVzip do, and the attention functions that kvpress patches hide them.
    """

    _reading = False  # the prompt goes through the model for its scores, not for its cache

    def __init__(
        self,
        compression_ratio: float = 0.9,
        rule: str = "fisher+values",
        split: str | None = None,
        *,
        tokenizer: Any = None,
        sinks: int = 4,
        recent: int = 16,
        observe: int = 64,
        replay: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not 0 <= compression_ratio < 1:
            raise ValueError(
                f"compression_ratio: expected a share from 0 up to 1, got {compression_ratio}"
            )
        if parted(rule)[1] == REFIT:
            raise ValueError(
                f"rule: {rule} gives keys weights, which kvpress does not know; use"
                f" {parted(rule)[0]}{VALUES}"
            )
        self.compression_ratio, self.rule, self.split = compression_ratio, rule, split
        self.tokenizer = tokenizer
        self.settings = Settings(observe, sinks, recent, replay, seed=seed)
        self.found: Found | None = None  # of the prompt that was read last

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Inside, a prompt that goes through the model leaves a compressed cache."""

        def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            cache = kwargs.get("past_key_values")
            if self._reading or cache is None or cache.get_seq_length() > 0:
                return
            self._reading, self.found = True, None
            try:
                with torch.inference_mode(False):
                    self.found = choose_keys(
                        model,
                        ids.clone(),
                        1 - self.compression_ratio,
                        None,
                        self.rule,
                        self.split,
                        self.tokenizer,
                        self.settings,
                    )
            finally:
                self._reading = False

        layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
        attention = [module for module in layers if "attention" in type(module).__name__.lower()]
        hooks = [model.base_model.register_forward_pre_hook(read, with_kwargs=True)]
        hooks += [m.register_forward_hook(self.forward_hook, with_kwargs=True) for m in attention]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def forward_hook(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Compress the cache of a layer behind its attention, once for a prompt."""
        cache = kwargs.get("past_key_values")
        if self._reading or cache is None:
            return output
        layer, hidden = cache.layers[module.layer_idx], kwargs["hidden_states"]
        if layer.keys.shape[2] == hidden.shape[1]:
            given = hidden, layer.keys, layer.values, output[1], kwargs
            layer.keys, layer.values = self.compress(module, *given)
        return output

    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """(batch, kv_heads, keys): the score of every key, -inf where the cache drops it anyway."""
        found = self._of_prompt(keys)
        scores = found.prompt.scores(found.rule)[module.layer_idx]
        return scores[None].to(keys.device)

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, kv_heads, n, width) that stay in the cache of a layer."""
        choice = self._of_prompt(keys).choice
        kept = choice.kept[module.layer_idx].to(keys.device)
        if choice.values:
            values = choice.values[module.layer_idx][None].to(values)
        counts = kept.sum(1)
        if bool((counts == counts[0]).all()):
            at = kept.nonzero()[:, 1].view(1, len(kept), -1, 1)
            own = [x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in (keys, values)]
            return own[0], own[1]
        if _Base is object:
            raise ValueError(
                "split: heads keep different numbers of keys, and a cache with room for all of"
                " them needs kvpress to hide the rest; install kvpress, or use split='uniform'"
            )
        heads, places = (~kept).nonzero(as_tuple=True)
        module.masked_key_indices = torch.zeros_like(heads), heads, places
        return keys, values

    def _of_prompt(self, keys: Tensor) -> Found:
        if self.found is None or keys.shape[0] != 1 or keys.shape[2] != self.found.prompt.keys:
            raise ValueError(
                f"press: expected the cache of the one prompt that was read, got {keys.shape[0]} of"
                f" {keys.shape[2]} keys; use the press as in: with press(model): model(...)"
            )
        return self.found
