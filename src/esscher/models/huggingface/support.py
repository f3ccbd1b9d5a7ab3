"""How many softmax self-attention layers a model has by its configuration, and which models can be
captured.
"""

from __future__ import annotations

from typing import Any

from esscher.models.huggingface.package import transformers

__all__ = ["TESTED", "WORKS", "escaped", "expected_layers", "refusal"]

# Families this is tested on; others that use the attention interface work as well.
TESTED = (
    *("albert", "bert", "distilbert", "electra", "modernbert", "roberta"),
    *(
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "llama",
        "mistral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
    ),
    *("bart", "t5", "dinov2", "vit"),
)
WORKS = ", ".join(TESTED)
# What a layer that is no softmax attention is called in config.layer_types or layers_block_type.
OTHER_LAYERS = ("linear", "mamba", "conv", "recurrent", "rwkv", "ssm", "mlp", "moe")


def refusal(model: Any) -> str | None:
    """Why the attention of this model cannot be captured, or None.

    Models written before the attention interface keep their own code whatever implementation is
    asked for; transformers finds them by reading their source.
    """
    base = transformers().PreTrainedModel
    if not isinstance(model, base):
        return f"expected a transformers model, got {type(model).__name__}"
    for module in model.modules():
        if isinstance(module, base) and not module._can_set_attn_implementation():
            return (
                f"{type(module).__name__} computes attention in its own code, not through the"
                " attention interface of transformers, so nothing would be captured; what works:"
                f" {WORKS}"
            )
    return None


def escaped(model: Any, captured: int) -> str | None:
    """Why a forward pass of which so many layers were captured is not the whole model's, or
    None.
    """
    expected = expected_layers(model)
    if expected is None or captured == expected:
        return None
    return (
        f"{type(model).__name__} has {expected} attention layers by its configuration, {captured}"
        f" were captured; the others compute attention in their own code; what works: {WORKS}"
    )


def expected_layers(model: Any) -> int | None:
    """Softmax self-attention layers in one forward pass by the configuration; None where it does
    not say.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        encoder = _first(config, "encoder_layers", "num_layers", "num_hidden_layers")
        if not hasattr(model, "decoder") and not hasattr(getattr(model, "model", None), "decoder"):
            return encoder
        decoder = _first(
            config, "decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers"
        )
        return None if encoder is None or decoder is None else encoder + decoder
    own = _softmax_layers(config)
    if own is not None:
        return own
    towers = [
        _softmax_layers(getattr(config, name))
        for name in config.sub_configs
        if getattr(config, name) is not None
    ]
    found = [layers for layers in towers if layers is not None]
    return sum(found) if found else None


def _softmax_layers(config: Any) -> int | None:
    kinds = _first_of(config, "layer_types", "layers_block_type")
    if kinds is not None:
        return sum(not any(word in str(kind) for word in OTHER_LAYERS) for kind in kinds)
    return _first(config, "num_hidden_layers", "n_layers", "n_layer", "num_layers")


def _first(config: Any, *names: str) -> int | None:
    found = _first_of(config, *names)
    return int(found) if isinstance(found, int) else None


def _first_of(config: Any, *names: str) -> Any:
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )
