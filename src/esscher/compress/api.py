"""``es.compress``: a smaller KV cache of a prompt, to generate from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.compress.choose import (
    SPLITS,
    Choice,
    cache_rule,
    default_split,
    splits_of,
)
from esscher.compress.price import Price, price, smallest_share
from esscher.compress.prompt import Prompt, Settings
from esscher.compress.refit import chosen
from esscher.compress.spec import parted
from esscher.hf.capture import refusal
from esscher.hf.loading import positions
from esscher.hf.maps import head_projections
from esscher.keep.rule import Rule, parse


@dataclass(frozen=True)
class Compression:
    """What was done to a cache. ``keep``: keys kept over keys that the cache held, summed over
    layers and key-value heads. ``bytes``, ``bytes_full``: of keys and values. ``price``: predicted
    loss in nats per token.
    """

    rule: str
    split: str
    keep: float
    keys: int
    keys_full: int
    bytes: int
    bytes_full: int
    price: Price

    def __str__(self) -> str:
        order = "" if self.price.second_order else ", beyond the second order"
        return (
            f"{self.rule} ({self.split}): {self.keep:.1%} of the cache kept,"
            f" {self.bytes / 2**20:.1f} of {self.bytes_full / 2**20:.1f} MiB; predicted loss"
            f" {self.price.kl:.3g} nats per token ({self.price.low:.3g} to"
            f" {self.price.high:.3g}{order}); tokens that come later are all kept"
        )


def compress(
    model: Any,
    inputs: Any,
    keep: float | None = None,
    kl: float | None = None,
    rule: str | Rule = "fisher+refit",
    split: str | None = None,
    *,
    tokenizer: Any = None,
    sinks: int = 4,
    recent: int = 16,
    observe: int = 64,
    replay: float = 1.0,
    seed: int = 0,
) -> Any:
    """A smaller cache of a prompt for ``model.generate(ids, past_key_values=cache)``.

    ``model``: a causal language model of transformers, on any device. ``inputs``: token ids (1, P),
    what a tokenizer returns, or text (give the tokenizer). Give one of ``keep`` (share of the
    cache, 0.1 keeps a tenth of the keys) and ``kl`` (loss in nats per token that may be added; the
    smallest cache with that predicted loss is made). ``rule``: an eviction rule; with "+refit" at
    its end the kept keys get new values and weights, with "+values" values alone. ``split``: how
    heads share the budget.
    ``cache.compression`` says what was done, with the predicted loss.

    ``sinks``, ``recent``: first and last keys that are always kept. ``observe``: last queries that
    rules read. ``replay``: share of the prompt that is replayed; 0 takes less time, and
    the cache answers fewer questions about single facts.

    Continue with ids that begin with the prompt. The model's attention implementation is set to
    ``esscher_kept``, which computes the same as before on other caches.
    """
    _check_model(model)
    ids = _prompt_ids(model, inputs, tokenizer)
    if not 0 <= replay <= 1:
        raise ValueError(f"replay: expected a share of the prompt from 0 to 1, got {replay}")
    settings = Settings(observe, sinks, recent, replay, seed=seed)
    found = choose_keys(model, ids, keep, kl, rule, split, tokenizer, settings)
    held = found.prompt.held
    from esscher.hf.cache import cache_bytes, kept_cache, use_kept  # imports transformers

    cache = kept_cache(held.cache, found.choice.kept, found.choice.values, found.choice.weight)
    full = sum(int(found.prompt.held_by(place).sum()) for place in found.prompt.contexts)
    keys = sum(int(rows.sum()) for rows in found.choice.kept.values())
    cache.compression = Compression(
        found.name,
        found.split,
        keys / full,
        keys,
        full,
        cache_bytes(cache),
        cache_bytes(held.cache),
        found.price,
    )
    use_kept(model)
    return cache


@dataclass(frozen=True)
class Found:
    """The keys chosen for a prompt, and their price."""

    prompt: Prompt
    rule: Rule
    split: str
    choice: Choice
    price: Price
    name: str  # of the rule, as users know it


def choose_keys(
    model: Any,
    ids: Tensor,
    keep: float | None,
    kl: float | None,
    rule: str | Rule,
    split: str | None,
    tokenizer: Any,
    settings: Settings,
) -> Found:
    """Read a prompt, ids (1, P), and choose the keys of its cache; arguments as in
    :func:`compress`.
    """
    if (keep is None) == (kl is None):
        raise ValueError(f"keep, kl: give one of them, got keep={keep} and kl={kl}")
    if keep is not None and not 0 < keep <= 1:
        raise ValueError(f"keep: expected a share of the cache above 0 and up to 1, got {keep}")
    if kl is not None and not 0 < kl < math.inf:
        raise ValueError(f"kl: expected a loss above 0 nats per token, got {kl}")
    made = cache_rule(rule, settings.sinks, settings.recent)
    plain, end = parted(rule) if isinstance(rule, str) else (rule, "")
    split = _check_split(made, split)
    least = settings.sinks + settings.recent
    if ids.shape[1] <= least + 1:
        raise ValueError(
            f"inputs: a prompt of {ids.shape[1]} tokens has no more than the {least} that are"
            " always kept; give a longer prompt, or smaller sinks and recent"
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)  # gradients are taken at activations alone
    try:
        prompt = Prompt(model, ids, [made], head_projections(model), tokenizer, settings)
        if keep is None:
            assert kl is not None
            choice, cost = smallest_share(prompt, made, split, kl, end)
        else:
            generator = torch.Generator().manual_seed(settings.seed)
            choice = chosen(prompt, made, keep, split, generator, end)
            cost = price(prompt, choice)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    return Found(prompt, made, split, choice, cost, f"{parse(plain)}{end}")


def _check_model(model: Any) -> None:
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    language = hasattr(model, "generate") and not model.config.is_encoder_decoder
    if not language or model.get_output_embeddings() is None:
        raise ValueError(
            f"model: {type(model).__name__} is no causal language model, or has no language head:"
            " there is no KV cache to compress, or no loss in nats; load one with"
            " AutoModelForCausalLM"
        )


def _check_split(rule: Rule, split: str | None) -> str:
    if any(part.per_query for part in rule.parts):
        raise ValueError(
            f"rule: {rule} chooses keys for each query, and a cache is chosen once for all later"
            " queries; use a rule such as fisher, kvzip or snapkv"
        )
    if split is None:
        return default_split(rule)
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    if split != "uniform" and not splits_of(rule):
        raise ValueError(f"split: {rule} has no scores to compare heads by; use uniform")
    return split


def _prompt_ids(model: Any, inputs: Any, tokenizer: Any) -> Tensor:
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("inputs: text needs its tokenizer; give tokenizer=, or token ids")
        inputs = tokenizer(inputs, return_tensors="pt")
    ids = inputs["input_ids"] if hasattr(inputs, "keys") else inputs
    ids = torch.as_tensor(ids)
    if ids.ndim == 1:
        ids = ids[None]
    if (
        ids.ndim != 2
        or len(ids) != 1
        or ids.numel() == 0
        or ids.dtype not in (torch.int64, torch.int32)
    ):
        raise ValueError(
            f"inputs: expected the token ids of one prompt, (1, P), got {tuple(ids.shape)}"
            f" {ids.dtype}"
        )
    most, words = positions(model), model.get_input_embeddings().num_embeddings
    if most is not None and ids.shape[1] >= most:
        raise ValueError(
            f"inputs: a prompt of {ids.shape[1]} tokens leaves no room to go on, the model takes"
            f" {most} positions; use a shorter prompt"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= words:
        raise ValueError(f"inputs: expected token ids from 0 to {words - 1}, got {int(ids.max())}")
    return ids.to(next(model.parameters()).device, torch.int64)
