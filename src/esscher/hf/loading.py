"""Models by name, folder or file, safely: safetensors and GGUF only, no code of the checkpoint, the
encoder of a pair.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from esscher.hf.call import AttentionCall
from esscher.hf.capture import escaped, example_inputs, forward, refusal
from esscher.hf.checkpoint import (
    NO_PICKLE,
    Source,
    check_folder,
    read_config,
    reading,
    resolve,
    sha256_of,
    transformers,
    weight_files,
)
from esscher.hf.gguf import add_special_tokens, divide_frequencies, skeleton

Task = Literal["language", "classifier", "encoder"]
TASKS: dict[str, Task] = {
    "AutoModelForCausalLM": "language",
    "AutoModelForSequenceClassification": "classifier",
}
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
    ``max_positions`` is None where there is no limit. ``sha256`` is the hash of the weights.
    """

    model: Any
    tokenizer: Any | None
    name: str
    max_positions: int | None
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden_size: int
    causal: bool
    sha256: str
    shapes: tuple[LayerShape, ...]
    tokenizer_error: str | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device


def task_of(model: Any) -> Task:
    """What this model is for, by its class."""
    return TASKS.get(_auto_class(type(model).__name__), "encoder")


def _auto_class(made: str) -> str:
    """The class of transformers that reads models of a class; AutoModel for one without a head."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    if made in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "AutoModelForCausalLM"
    labels = made in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    return "AutoModelForSequenceClassification" if labels else "AutoModel"


def _reader(source: Source, config: Any, with_head: bool) -> str:
    """The class of transformers that reads a checkpoint."""
    if with_head and source.file is not None:  # GGUF holds language models and does not say so
        return "AutoModelForCausalLM"
    made = getattr(config, "architectures", None) if with_head else None
    return _auto_class(made[0] if made else "")


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
    known = source.packaged
    if known is not None and digest != known.sha256:
        raise ValueError(
            f"{known.name}: {known.file} has sha256 {digest}, expected {known.sha256}; install it"
            f" again: {known.install}"
        )
    model = _weights(source, config, revision, DTYPES[dtype], _reader(source, config, with_head))
    model = encoder_of(model).eval().to(place)
    tokenizer, reason = _tokenizer(source, revision)
    return _look(
        model,
        tokenizer,
        name=source.shown,
        sha256=digest,
        tokenizer_error=reason,
    )


def outline_model(
    name: Any = None,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    with_head: bool = False,
    weights: bool = True,
) -> Loaded | None:
    """What :func:`load_model` would return, without weights: shapes, positions and tokenizer, from
    the configuration.

    None where the model does not run on shapes alone. A mistake that needs no weights to be seen
    raises the ValueError that load_model raises, also that there are none unless ``weights`` is
    False.
    """
    source, _, config = _source(name, revision, dtype, device, weights=weights)
    model = encoder_of(skeleton(config, source.shown, _reader(source, config, with_head)))
    model.set_experts_implementation("batched_mm")  # others choose experts by their numbers
    tokenizer, reason = _tokenizer(source, revision)
    known = {"name": source.shown, "tokenizer_error": reason}
    for masked in (False, True):  # without a mask some models look for packed sequences
        try:
            return _look(model, tokenizer, masked=masked, sha256="", **known)
        except Exception:  # a step that needs numbers; loading the model says what is wrong
            continue
    return None


def wrap_model(model: Any, tokenizer: Any = None, *, name: str | None = None) -> Loaded:
    """A model object the caller already has; its weights are hashed and checked, it is not moved or
    changed.
    """
    model = encoder_of(model)
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    shown = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    return _look(model, tokenizer, name=shown, sha256=digest.hexdigest())


def encoder_of(model: Any) -> Any:
    """The encoder of an encoder-decoder; any other model itself."""
    paired = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if paired and hasattr(model, "get_encoder") else model


def _source(
    name: Any, revision: str | None, dtype: str, device: str, *, weights: bool = True
) -> tuple[Source, torch.device, Any]:
    """Where a model is, the device it goes to, and its configuration."""
    source = resolve(name)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as cause:
        raise ValueError(
            f"device: {device!r} cannot be used here: {str(cause).splitlines()[0]}"
        ) from cause
    config = read_config(source, revision)
    if source.folder is not None and weights:
        check_folder(source.folder, "*.safetensors", NO_PICKLE)
    return source, place, config


def _weights(
    source: Source, config: Any, revision: str | None, dtype: torch.dtype, auto: str
) -> Any:
    """The model with the weights of its files; one with missing tensors is refused."""
    no_pickle = {} if source.file is not None else {"use_safetensors": True}
    with reading(source.where, revision) as options:
        options |= {"config": config, "dtype": dtype, "output_loading_info": True, **no_pickle}
        model, info = getattr(transformers(), auto).from_pretrained(**options)
    if source.file is not None:
        divide_frequencies(source.file, model)
    behind = BEHIND if auto == "AutoModel" else BEHIND[:1]
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in behind))
    if missing:
        raise ValueError(
            f"{source.where}: the checkpoint lacks {len(missing)} tensors of"
            f" {type(model).__name__}, the first is {missing[0]}; they would be random"
        )
    return model


def _tokenizer(source: Source, revision: str | None) -> tuple[Any | None, str | None]:
    """The tokenizer, or why there is none: a model of images has none, and that is no mistake."""
    try:
        with reading(source.where, revision) as options:
            package = transformers()
            is_file = source.file is not None
            kind = package.PreTrainedTokenizerFast if is_file else package.AutoTokenizer
            tokenizer = kind.from_pretrained(**options)
            words = len(tokenizer.get_vocab()) - len(set(tokenizer.all_special_tokens))
        if source.file is not None:
            add_special_tokens(source.file, tokenizer)
    except Exception as cause:
        return None, " ".join(str(cause).split())[:240]
    if words <= 0:  # without files the library makes a tokenizer that knows special tokens only
        return None, "the model comes without the files of a tokenizer"
    return tokenizer, None


def _look(model: Any, tokenizer: Any, *, masked: bool = False, **known: Any) -> Loaded:
    """Check the weights and run four tokens through, to see shapes and causality."""
    name = known["name"]
    _check_finite(model, name)
    shapes: list[LayerShape] = []

    def see(call: AttentionCall) -> None:
        widths = int(call.query.shape[-1]), int(call.value.shape[-1])
        # whether the first query does not see the second key
        causal = call.causal or (call.mask is not None and not bool(call.mask[0, 0, 0, 1]))
        heads = call.heads, call.kv_heads
        shapes.append(LayerShape(call.name, *heads, *widths, causal, call.window))

    try:
        inputs = example_inputs(model)
        if masked:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        forward(model, inputs, see)
    except ValueError as cause:
        raise ValueError(f"{name}: {cause}") from cause
    reason = escaped(model, len(shapes))
    if reason is not None:
        raise ValueError(f"{name}: {reason}")
    first, text = shapes[0], model.config.get_text_config()
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        max_positions=positions(model, tokenizer),
        layers=len(shapes),
        heads=first.heads,
        kv_heads=first.kv_heads,
        width=first.width,
        hidden_size=int(getattr(text, "hidden_size", first.heads * first.width)),
        causal=any(shape.causal for shape in shapes),
        shapes=tuple(shapes),
        **known,
    )


def _check_finite(model: Any, name: str) -> None:
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
            continue
        low, high = torch.aminmax(tensor.detach())
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{name}: weight {key} holds {bad} NaN or infinite of {tensor.numel()} numbers; get"
                " the checkpoint again"
            )


def positions(model: Any, tokenizer: Any = None) -> int | None:
    """Longest sequence the model takes, or None; by its configuration and its tokenizer."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_source_positions")
    found = [getattr(config, name, None) for name in names]
    for key, module in model.named_modules():
        embeds = key.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if embeds and module.padding_idx is not None:  # roberta counts from the one after padding
            found.append(module.num_embeddings - module.padding_idx - 1)
    longest = getattr(tokenizer, "model_max_length", None)
    if isinstance(longest, int) and longest < 10**7:
        found.append(longest)
    return min((value for value in found if isinstance(value, int) and value > 0), default=None)
