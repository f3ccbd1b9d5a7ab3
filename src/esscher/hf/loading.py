"""Models by name, folder or file, safely: safetensors and GGUF only, no code of the checkpoint, the
encoder of a pair.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esscher.hf.call import AttentionCall, Mask
from esscher.hf.capture import escaped, example_inputs, forward, refusal
from esscher.hf.checkpoint import (
    Source,
    check_folder,
    read_config,
    resolve,
    sha256_of,
    stored_as,
    weight_files,
)
from esscher.hf.gguf import gguf_tokenizer, gguf_weights, skeleton
from esscher.hf.package import quiet, transformers, why

Task = Literal["language", "classifier", "encoder"]


def auto_class(config: Any) -> str:
    """The class of transformers that reads a checkpoint with the head it was made with."""
    return _reader(next(iter(getattr(config, "architectures", None) or ()), ""))


def task_of(model: Any) -> Task:
    """What this model is for, by its class."""
    return TASKS.get(_reader(type(model).__name__), "encoder")


TASKS: dict[str, Task] = {
    "AutoModelForCausalLM": "language",
    "AutoModelForSequenceClassification": "classifier",
}


def _reader(made: str) -> str:
    """What reads a class of models; of a class without a head the plain reader."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    if made in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "AutoModelForCausalLM"
    labels = made in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    return "AutoModelForSequenceClassification" if labels else "AutoModel"


# ---- Models by name, folder or file, safely: safetensors and GGUF only, no code of the
# checkpoint, the encoder of a pair.

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Parts behind the last layer that a checkpoint may lack without any effect on attention.
BEHIND = ("pooler", "lm_head", "classifier", "qa_outputs")


@dataclass(frozen=True)
class LayerShape:
    """Heads of one self-attention layer as they were seen."""

    name: str
    heads: int
    kv_heads: int
    width: int
    value_width: int
    causal: bool = False  # no query sees a later key
    # keys that a query of a sliding layer sees, itself included, or that it sees on either side
    window: int | None = None


@dataclass(frozen=True)
class Loaded:
    """A model ready for capture, and what a forward pass showed of it.

    ``heads``, ``kv_heads`` and ``width`` are those of layer 0; ``shapes`` has every layer.
    ``max_positions`` is None where there is no limit. ``sha256`` is the hash of the weights,
    ``weights`` what they were before they were read.
    """

    model: Any
    tokenizer: Any | None
    name: str
    revision: str | None
    max_positions: int | None
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden_size: int
    causal: bool
    is_encoder_decoder: bool
    sha256: str
    shapes: tuple[LayerShape, ...]
    weights: str
    tokenizer_error: str | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device


def load_model(
    name: Any = None,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    with_head: bool = False,
) -> Loaded:
    """A packaged model by its name (minilm, smollm2), or one of a folder, a GGUF file or the
    Hugging Face hub, in eval mode.

    None or "packaged" is minilm. Only safetensors and GGUF files are read, the latter dequantised;
    code of the checkpoint is never run, weights that are not finite are refused. Of an
    encoder-decoder the encoder is kept. ``with_head``: with what stands behind the last layer of a
    language model or a classifier, which attention does not see.
    """
    source, place, config = _source(name, revision, dtype, device)
    files = weight_files(source, revision)
    digest = sha256_of(files)
    if source.packaged is not None:
        source.packaged.check(digest)
    model = _weights(
        source, config, revision, DTYPES[dtype], _auto(source, config) if with_head else "AutoModel"
    )
    paired = bool(getattr(config, "is_encoder_decoder", False))
    if paired:
        model = model.get_encoder()
    tokenizer, reason = _tokenizer(source, revision)
    found = _Found(source.shown, revision, paired, digest, stored_as(files, dtype), reason)
    return _look(model.eval().to(place), tokenizer, found)


def outline_model(
    name: Any = None,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    with_head: bool = False,
) -> Loaded | None:
    """What :func:`load_model` would return, without weights: shapes, positions and tokenizer, from
    the configuration.

    None where the model does not run on shapes alone. A mistake that needs no weights to be seen
    raises the ValueError that load_model raises.
    """
    source, _, config = _source(name, revision, dtype, device)
    return outline_of(source, config, revision, with_head)


def outline_of(source: Source, config: Any, revision: str | None, with_head: bool) -> Loaded | None:
    """The same from a configuration that was read."""
    paired = bool(getattr(config, "is_encoder_decoder", False))
    auto = _auto(source, config) if with_head else "AutoModel"
    model = skeleton(config, source.shown, auto)
    if paired:
        model = model.get_encoder()
    tokenizer, reason = _tokenizer(source, revision)
    found = _Found(source.shown, revision, paired, "", "", reason)
    for masked in (False, True):  # without a mask some models look for packed sequences
        try:
            return _look(model, tokenizer, found, masked=masked)
        except Exception:  # a step that needs numbers; who loads the model says what is wrong
            continue
    return None


def _source(
    name: Any, revision: str | None, dtype: str, device: str
) -> tuple[Source, torch.device, Any]:
    """Where a model is, the device it goes to, and its configuration."""
    source = resolve(name)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    place = _device(device)
    config = read_config(source, revision)
    if Path(source.where).is_dir():
        check_folder(Path(source.where))
    return source, place, config


def wrap_model(model: Any, tokenizer: Any = None, *, name: str | None = None) -> Loaded:
    """A model object the caller already has; its weights are hashed and checked, it is not moved or
    changed.
    """
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    paired = bool(getattr(model.config, "is_encoder_decoder", False)) and hasattr(
        model, "get_encoder"
    )
    if paired:
        model = model.get_encoder()
    if model.training:
        raise ValueError(
            f"model: {type(model).__name__} is in training mode; call model.eval() first"
        )
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    shown = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    weights = f"a model object, {str(next(model.parameters()).dtype).removeprefix('torch.')}"
    return _look(model, tokenizer, _Found(shown, None, paired, digest.hexdigest(), weights, None))


def _weights(
    source: Source, config: Any, revision: str | None, dtype: torch.dtype, auto: str
) -> Any:
    if source.file is not None:
        model, info = gguf_weights(source.file, config, dtype, auto)
    else:
        model, info = _safetensors(source.where, config, revision, dtype, auto)
    behind = BEHIND if auto == "AutoModel" else BEHIND[:1]
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in behind))
    if missing:
        raise ValueError(
            f"{source.where}: the checkpoint lacks {len(missing)} tensors of"
            f" {type(model).__name__}, the first is {missing[0]}; they would be random"
        )
    return model


def _auto(source: Source, config: Any) -> str:
    """The class that makes the model with its head: files of GGUF hold language models, and do not
    say so.
    """
    return "AutoModelForCausalLM" if source.file is not None else auto_class(config)


def _safetensors(
    where: str, config: Any, revision: str | None, dtype: torch.dtype, auto: str
) -> tuple[Any, dict[str, Any]]:
    options = {
        "revision": revision,
        "use_safetensors": True,
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    try:
        with quiet():
            model, info = getattr(transformers(), auto).from_pretrained(
                where, config=config, dtype=dtype, **options
            )
    except Exception as cause:
        raise ValueError(f"{where}: {why(cause)}") from cause
    return model, info


def _tokenizer(source: Source, revision: str | None) -> tuple[Any | None, str | None]:
    """The tokenizer, or why there is none: a model of images has none, and that is no mistake."""
    try:
        with quiet():
            if source.file is not None:
                tokenizer = gguf_tokenizer(source.file)
            else:
                tokenizer = transformers().AutoTokenizer.from_pretrained(
                    source.where, revision=revision, trust_remote_code=False
                )
            words = len(tokenizer.get_vocab()) - len(set(tokenizer.all_special_tokens))
    except Exception as cause:
        return None, " ".join(str(cause).split())[:240]
    if words <= 0:  # without files the library makes a tokenizer that knows special tokens only
        return None, "the model comes without the files of a tokenizer"
    return tokenizer, None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as cause:
        raise ValueError(
            f"device: {name!r} cannot be used here: {str(cause).splitlines()[0]}"
        ) from cause
    return device


@dataclass(frozen=True)
class _Found:
    """What is known of a model without running it; the names are those of :class:`Loaded`."""

    name: str
    revision: str | None
    is_encoder_decoder: bool
    sha256: str
    weights: str
    tokenizer_error: str | None


def _look(model: Any, tokenizer: Any, found: _Found, *, masked: bool = False) -> Loaded:
    """Check the weights and run four tokens through: shapes and causality are seen, not read from a
    configuration. ``masked``: with a mask that hides nothing.
    """
    _check_finite(model, found.name)
    shapes: list[LayerShape] = []
    causal: list[bool] = []

    def see(captured: AttentionCall) -> None:
        width, value_width = int(captured.query.shape[-1]), int(captured.value.shape[-1])
        causal.append(captured.mask is not None and _hides_next(captured.mask))
        heads = captured.heads, captured.kv_heads
        shapes.append(
            LayerShape(captured.name, *heads, width, value_width, causal[-1], captured.window)
        )

    try:
        inputs = example_inputs(model)
        if masked:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        forward(model, inputs, see)
    except ValueError as cause:
        raise ValueError(f"{found.name}: {cause}") from cause
    reason = escaped(model, len(shapes))
    if reason is not None:
        raise ValueError(f"{found.name}: {reason}")
    first = shapes[0]
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        max_positions=positions(model, tokenizer),
        layers=len(shapes),
        heads=first.heads,
        kv_heads=first.kv_heads,
        width=first.width,
        hidden_size=int(
            getattr(model.config.get_text_config(), "hidden_size", first.heads * first.width)
        ),
        causal=any(causal),
        shapes=tuple(shapes),
        **vars(found),
    )


def _hides_next(mask: Mask) -> bool:
    """Whether the first query does not see the second key."""
    place = torch.device("cpu") if mask.device.type == "meta" else mask.device
    return not bool(mask.rows(torch.zeros(1, dtype=torch.int64, device=place))[0, 0, 0, 1])


def _check_finite(model: Any, name: str) -> None:
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for key, tensor in tensors:
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        low, high = torch.aminmax(tensor.detach())
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{name}: weight {key} holds {bad} NaN or infinite of {tensor.numel()} numbers; get"
                " the checkpoint again"
            )


def positions(model: Any, tokenizer: Any = None) -> int | None:
    """Longest sequence the model takes, by its configuration and its tokenizer; None where there is
    no limit.
    """
    config = model.config.get_text_config()
    found = [
        getattr(config, name, None)
        for name in ("max_position_embeddings", "n_positions", "max_source_positions")
    ]
    limits = [value for value in found if isinstance(value, int) and value > 0]
    for key, module in model.named_modules():
        # the roberta family counts positions from the one after padding
        if (
            key.endswith("position_embeddings")
            and isinstance(module, nn.Embedding)
            and module.padding_idx is not None
        ):
            limits.append(module.num_embeddings - module.padding_idx - 1)
    longest = getattr(tokenizer, "model_max_length", None)
    if isinstance(longest, int) and 0 < longest < 10**7:
        limits.append(longest)
    return min(limits) if limits else None
