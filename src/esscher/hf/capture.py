"""q, k, v of every softmax self-attention layer, captured while the model runs.

transformers lets an attention function and a mask function be registered under a name. Ours hands
queries, keys and values to a sink, after fused projections, norms and rotary positions, and then
computes the attention the model asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from esscher.hf.call import AttentionCall, call_of, model_mask, spelled_mask
from esscher.hf.checkpoint import quiet, transformers

# Families this is tested on; others that use the attention interface work as well. One whose
# attention has arguments of its own gets an entry in hf/call.py QUIRKS.
WORKS = (
    "albert, bert, distilbert, electra, modernbert, roberta, gemma2, gemma3_text, gpt2, gpt_neox,"
    " gpt_oss, llama, mistral, olmo2, opt, phi, phi3, qwen2, qwen3, bart, t5, dinov2, vit"
)
# What a layer that is no softmax attention is called in config.layer_types or layers_block_type.
OTHER_LAYERS = ("linear", "mamba", "conv", "recurrent", "rwkv", "ssm", "mlp", "moe")
# transformers treats names that contain "sdpa" or "flash" in its own way.
NAME = "esscher_capture"
SPELLED = "esscher_capture_spelled"  # for models that were eager

Sink = Callable[[AttentionCall], Any]


def refusal(model: Any) -> str | None:
    """Why the attention of this model cannot be captured, or None.

    Models written before the attention interface keep their own code whatever implementation is
    asked for; transformers finds them by reading their source.
    """
    base = transformers().PreTrainedModel
    if not isinstance(model, base):
        return f"expected a transformers model, got {type(model).__name__}"
    if model.config.is_encoder_decoder and hasattr(model.base_model, "decoder"):
        return f"{type(model).__name__} is an encoder-decoder; give model.get_encoder()"
    for module in model.modules():
        if isinstance(module, base) and not module._can_set_attn_implementation():
            return (
                f"{type(module).__name__} computes attention in its own code, not through the"
                " attention interface of transformers, so nothing would be captured; what works:"
                f" {WORKS}"
            )
    return None


def escaped(model: Any, captured: int) -> str | None:
    """Why a forward pass that captured so many layers missed some, or None."""
    expected = expected_layers(model)
    if expected is None or captured == expected:
        return None
    return (
        f"{type(model).__name__} has {expected} attention layers by its configuration, {captured}"
        f" were captured; the others compute attention in their own code; what works: {WORKS}"
    )


def expected_layers(model: Any) -> int | None:
    """Softmax self-attention layers by the configuration; None where it does not say."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):  # of a pair the encoder is captured
        return _number(config, "encoder_layers", "num_layers", "num_hidden_layers")
    towers = [getattr(config, name, None) for name in config.sub_configs]
    own, *others = [_softmax_layers(each) for each in (config, *towers)]
    found = [layers for layers in others if layers is not None]
    return own if own is not None else sum(found) or None


def _softmax_layers(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is not None:
        return sum(not any(word in str(kind) for word in OTHER_LAYERS) for kind in kinds)
    return _number(config, "num_hidden_layers", "n_layers", "n_layer", "num_layers")


def _number(config: Any, *names: str) -> int | None:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


class StopForward(Exception):
    """Raised by a sink to end the forward pass; ``capture`` and ``forward`` swallow it."""


class Capturing:
    """One model under capture: ``calls`` seen, ``expected`` layers of a pass by the configuration.

    Hooks: ``replace`` substitutes the input of attention modules; ``change`` the mask, bias and
    values of a call; ``attend`` computes its output (batch, heads, tokens, width). The pass ends
    after the layer ``last``.
    """

    replace: Callable[[Tensor], Tensor] | None = None
    change: Callable[[AttentionCall], AttentionCall] | None = None
    attend: Callable[[AttentionCall], Tensor] | None = None
    last: int | None = None

    def __init__(self, model: Any, sink: Sink | None, layers: Any, hidden: bool, detach: bool):
        self.model, self.sink, self.detach = model, sink, detach
        self.expected, self.calls = expected_layers(model), 0
        self.layers = None if layers is None else frozenset(int(layer) for layer in layers)
        last = math.inf if self.expected is None else self.expected - 1
        if self.layers is not None and not all(0 <= layer <= last for layer in self.layers or [-1]):
            raise ValueError(
                f"layers: the model has self-attention layers 0 to {last}, got"
                f" {sorted(self.layers)}"
            )
        self.next_layer = 0  # layers seen in this pass, or in the last one
        self.entered: dict[int, Tensor] = {}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.before = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self.eager = {id(config) for config, was in self.before if was == "eager"}
        self.hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end),
        ]
        for module in model.modules() if hidden else ():
            if "attention" in type(module).__name__.lower():
                self.hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))

    def install(self) -> None:
        """Let the model call :func:`_attention`."""
        package = transformers()
        for name, mask in ((NAME, model_mask), (SPELLED, spelled_mask)):
            package.AttentionInterface.register(name, _attention)
            package.AttentionMaskInterface.register(name, mask)
        _CAPTURING.update(dict.fromkeys(self.names, self))
        with quiet():
            self.model.set_attn_implementation(SPELLED if self.eager else NAME)

    def remove(self) -> None:
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation
        for hook in self.hooks:
            hook.remove()
        for module in self.names:
            _CAPTURING.pop(module, None)

    def _begin(self, module: Any, args: Any) -> None:
        self.next_layer = 0

    def _end(self, module: Any, args: Any, output: Any) -> None:
        if self.next_layer == 0:
            raise ValueError(
                f"{type(self.model).__name__}: a forward pass went by without one softmax"
                f" self-attention call, so there is nothing to measure; what works: {WORKS}"
            )

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remember what enters an attention module until its attention is called."""
        named = "hidden_states" in kwargs
        tensor = kwargs["hidden_states"] if named else (args[0] if args else None)
        if not isinstance(tensor, Tensor):
            return None
        if self.replace is None:
            self.entered[id(module)] = tensor.detach() if self.detach else tensor
            return None
        tensor = self.entered[id(module)] = self.replace(tensor)
        return (
            (args, {**kwargs, "hidden_states": tensor}) if named else ((tensor, *args[1:]), kwargs)
        )

    def output(self, module: Any, call: AttentionCall) -> Tensor:
        """The output of an attention call, shown to the sink and changed as asked."""
        # the inputs of modules around this one are forgotten with its own
        hidden = self.entered.get(id(module))
        self.entered.clear()
        shown = call = replace(call, hidden=hidden)
        if self.detach:
            names = ("query", "key", "value", "bias", "sinks")
            tensors: dict[str, Any] = {name: getattr(call, name) for name in names}
            tensors = {name: x if x is None else x.detach() for name, x in tensors.items()}
            shown = replace(call, **tensors)
        self.next_layer += 1
        self.calls += 1
        if self.sink is not None and (self.layers is None or call.layer in self.layers):
            self.sink(shown)
        if self.last is not None and call.layer >= self.last:
            raise StopForward
        if self.change is not None:
            changed = self.change(shown)
            call = replace(
                call,
                mask=changed.mask,
                causal=changed.causal,
                bias=changed.bias,
                value=call.value if changed.value is shown.value else changed.value,
            )
        return call.output() if self.attend is None else self.attend(call)


_CAPTURING: dict[int, Capturing] = {}


@contextlib.contextmanager
def capture(
    model: Any,
    sink: Sink | None = None,
    *,
    layers: Iterable[int] | None = None,
    hidden: bool = False,
    detach: bool = True,
) -> Iterator[Capturing]:
    """Inside, every forward pass of the model calls ``sink(captured)`` for each self-attention
    layer, in order.

    The model computes what it always does. ``layers`` limits the calls, ``hidden=True`` adds what
    entered the attention module, ``detach=False`` leaves gradients in what is captured. Nothing is
    kept here once the sink returns. On exit, also after an exception, the model is as it was. A
    sink may raise StopForward to leave the block.
    """
    reason = refusal(model)
    if reason is None and model.training:
        reason = f"{type(model).__name__} is in training mode; call model.eval() first"
    if reason is None and any(id(module) in _CAPTURING for module in model.modules()):
        reason = f"{type(model).__name__} is being captured already; leave that block first"
    if reason is not None:
        raise ValueError(f"capture: {reason}")
    capturing = Capturing(model, sink, layers, hidden, detach)
    try:
        capturing.install()
        with contextlib.suppress(StopForward):
            yield capturing
    finally:
        capturing.remove()


def forward(
    model: Any,
    inputs: Mapping[str, Any],
    sink: Sink,
    *,
    layers: Iterable[int] | None = None,
    hidden: bool = False,
) -> Any:
    """One forward pass under capture, without gradients; what the model returned, or None when it
    was ended early.

    The pass ends right after the sink has seen the largest of ``layers``: that layer's attention
    and everything behind it are not computed.
    """
    with torch.no_grad(), capture(model, sink, layers=layers, hidden=hidden) as capturing:
        capturing.last = max(capturing.layers) if capturing.layers else None
        return model(**inputs, **accepted(model, use_cache=False))
    return None


def accepted(model: Any, **given: Any) -> dict[str, Any]:
    """Those of the arguments that the model's forward pass takes."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in known}


def _attention(module: Any, *given: Any, **named: Any) -> tuple[Tensor, None]:
    """The attention of a model under capture."""
    capturing = _CAPTURING.get(id(module))
    if capturing is None:
        raise ValueError(
            f"capture: {type(module).__name__} is not part of a model under capture; was the model"
            " changed?"
        )
    eager = id(getattr(module, "config", None)) in capturing.eager
    call = call_of(module, *given, **named, no_mask_is_causal=not eager)
    call = replace(call, layer=capturing.next_layer, name=capturing.names[id(module)])
    return capturing.output(module, call).transpose(1, 2).contiguous(), None


def _configs(model: Any) -> list[Any]:
    """Every configuration object in the model, nested ones too, each once."""
    found: dict[int, Any] = {}
    queue = [module.config for module in model.modules() if hasattr(module, "config")]
    while queue:
        config = queue.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            queue += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


# ---- Parity: the same output with and without capture, and every layer captured


def example_inputs(model: Any, tokens: int = 4, *, seed: int = 0) -> dict[str, Tensor]:
    """One sequence of random token ids, or one random image, on the model's device."""
    name, config = model.main_input_name, model.config
    state = torch.Generator().manual_seed(seed)
    weights = next(weight for weight in model.parameters() if weight.is_floating_point())
    if name == "input_ids":
        text = config.get_text_config()
        ids = torch.randint(0, text.vocab_size, (1, tokens + 8), generator=state)[0].tolist()
        taken = (text.pad_token_id, text.eos_token_id)
        kept = [value for value in ids if value not in taken][:tokens] or [0] * tokens
        return {name: torch.tensor([kept], device=weights.device)}
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        image = torch.randn(1, config.num_channels, height, width, generator=state)
        return {name: image.to(weights)}
    raise ValueError(
        f"{type(model).__name__}: no example can be made of its input {name}; give inputs"
    )


def parity(model: Any, inputs: Mapping[str, Any] | None = None) -> float:
    """Largest difference of the logits (or hidden states) of a model with and without capture, on
    tokens that are not padding.

    A model of which not every layer is captured is refused with the reason. Without inputs a few
    random tokens are used.
    """
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"parity: {reason}")
    inputs = example_inputs(model, 16) if inputs is None else inputs
    seen: list[int] = []
    ours = _output(forward(model, inputs, lambda captured: seen.append(captured.layer)))
    with torch.no_grad():
        theirs = _output(model(**inputs, **accepted(model, use_cache=False)))
    reason = escaped(model, len(seen))
    if reason is not None:
        raise ValueError(f"parity: {reason}")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == ours.shape[:2]:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    return float((ours.double() - theirs.double()).abs().max())


def _output(result: Any) -> Tensor:
    """Logits where there are some, else the last hidden states."""
    found: Tensor = next(
        (result[key] for key in ("logits", "last_hidden_state") if key in result), result[0]
    )
    return found
