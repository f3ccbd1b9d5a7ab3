"""q, k, v of every softmax self-attention layer, taken while the model runs.

transformers lets an attention function and a mask function be registered under a name. Ours hands
queries, keys and values to a sink, after fused projections, norms and rotary positions, and then
computes the attention the model asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from esscher.hf.call import (
    AttentionCall,
    Mask,
    MaskTensor,
    causal_mask,
    given_mask,
    model_mask,
    split_mask,
)
from esscher.hf.package import quiet, transformers

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


# ---- q, k, v of every softmax self-attention layer, taken while the model runs.

# transformers treats names that contain "sdpa" or "flash" in its own way.
NAME = "esscher_capture"
CROSS = re.compile(r"cross|encdec|encoder_attn", re.IGNORECASE)


Sink = Callable[[AttentionCall], Any]


class StopForward(Exception):
    """Raised by a sink that has what it wants: the forward pass ends there, and ``capture`` and
    ``forward`` swallow it.
    """


@dataclass
class CaptureReport:
    """What was captured so far: calls seen, forward passes begun, layer names, layers a pass should
    have.
    """

    expected: int | None
    calls: int = 0
    forwards: int = 0
    cross: int = 0  # cross-attention calls: computed, never given to the sink
    names: dict[int, str] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Different self-attention layers seen."""
        return len(self.names)


class _Session:
    """One model under capture: where its modules are, what its sink wants, what it was before."""

    def __init__(
        self, model: Any, sink: Sink, layers: Iterable[int] | None, hidden: bool, detach: bool
    ) -> None:
        self.model, self.sink, self.hidden, self.detach = model, sink, hidden, detach
        self.report = CaptureReport(expected_layers(model))
        self.layers = _wanted(layers, self.report.expected)
        self.last: int | None = None
        self.next_layer = 0
        self.entered: dict[int, Tensor] = {}
        # another input for the attention modules
        self.replace: Callable[[Tensor], Tensor] | None = None
        # another mask and bias for an attention call
        self.change: Callable[[AttentionCall], AttentionCall] | None = None
        # another output (batch, heads, tokens, width) of it
        self.after: Callable[[AttentionCall, Tensor], Tensor] | None = None
        self.names = {id(module): name for name, module in model.named_modules()}
        self.before = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self.was_eager = {
            id(config): implementation == "eager" for config, implementation in self.before
        }
        self.hooks: list[Any] = []

    def install(self) -> None:
        self.hooks.append(self.model.register_forward_pre_hook(self._begin))
        self.hooks.append(self.model.register_forward_hook(self._end))
        if self.hidden:
            for module in self.model.modules():
                if "attention" in type(module).__name__.lower():
                    self.hooks.append(
                        module.register_forward_pre_hook(self._enter, with_kwargs=True)
                    )
        for module in self.names:
            _SESSIONS[module] = self
        with quiet():
            self.model.set_attn_implementation(NAME)

    def remove(self) -> None:
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation
        for hook in self.hooks:
            hook.remove()
        for module in self.names:
            if _SESSIONS.get(module) is self:
                del _SESSIONS[module]
        self.entered.clear()

    def _begin(self, module: Any, args: Any) -> None:
        self.next_layer = 0
        self.report.forwards += 1

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

    def shown(self, call: AttentionCall) -> AttentionCall:
        """What the sink is given of a call."""
        if not self.detach:
            return call
        parts: dict[str, Any] = {
            name: None if (x := getattr(call, name)) is None else x.detach()
            for name in ("query", "key", "value", "bias", "sinks")
        }
        return replace(call, **parts)

    def hidden_of(self, module: Any) -> Tensor | None:
        """What entered this module; the inputs of modules around it are forgotten with it."""
        hidden = self.entered.get(id(module))
        self.entered.clear()
        return hidden

    def see(self, captured: AttentionCall) -> None:
        """Count a call and give it to the sink if its layer is wanted."""
        layer = captured.layer
        self.next_layer += 1
        self.report.calls += 1
        self.report.names.setdefault(layer, captured.name)
        if self.layers is None or layer in self.layers:
            self.sink(captured)
        if self.last is not None and layer >= self.last:
            raise StopForward


_SESSIONS: dict[int, _Session] = {}


@contextlib.contextmanager
def capture(
    model: Any, sink: Sink, *, layers: Iterable[int] | None = None, hidden: bool = False
) -> Iterator[CaptureReport]:
    """Inside, every forward pass of the model calls ``sink(captured)`` for each self-attention
    layer, in order.

    The model computes what it always does. ``layers`` limits the calls, ``hidden=True`` adds what
    entered the attention module. Nothing is kept here once the sink returns. On exit, also after an
    exception, the model is as it was. A sink may raise StopForward to leave the block.
    """
    with (
        open_session(model, sink, layers=layers, hidden=hidden) as session,
        contextlib.suppress(StopForward),
    ):
        yield session.report


def forward(
    model: Any,
    inputs: Mapping[str, Any],
    sink: Sink,
    *,
    layers: Iterable[int] | None = None,
    last_layer: int | None = None,
    hidden: bool = False,
) -> Any:
    """One forward pass under capture, without gradients; what the model returned, or None when it
    was ended early.

    The pass ends right after the sink has seen ``last_layer`` (the largest of ``layers`` when only
    these are given): that layer's attention and everything behind it are not computed.
    """
    with open_session(model, sink, layers=layers, hidden=hidden) as session:
        session.last = (
            last_layer
            if last_layer is not None
            else (max(session.layers) if session.layers else None)
        )
        with torch.no_grad(), contextlib.suppress(StopForward):
            return model(**inputs, **without_cache(model))
    return None


def without_cache(model: Any) -> dict[str, bool]:
    """Keys and values are not to be kept for a next call, where the model has such a switch."""
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )


@contextlib.contextmanager
def open_session(
    model: Any,
    sink: Sink,
    *,
    layers: Iterable[int] | None = None,
    hidden: bool = False,
    detach: bool = True,
) -> Iterator[_Session]:
    """Put a model under capture and back; ``detach=False`` leaves gradients in what is captured."""
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"capture: {reason}")
    if model.training:
        raise ValueError(
            f"capture: {type(model).__name__} is in training mode; call model.eval() first"
        )
    if any(id(module) in _SESSIONS for module in model.modules()):
        raise ValueError(
            f"capture: {type(model).__name__} is being captured already; leave that block first"
        )
    _register()
    session = _Session(model, sink, layers, hidden, detach)
    try:
        session.install()
        yield session
    finally:
        session.remove()


def _register() -> None:
    package = transformers()
    package.AttentionInterface.register(NAME, _attention)
    package.AttentionMaskInterface.register(NAME, model_mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stands in for a model's attention: show the sink what came, then compute it. Dropout is off,
    as in eval mode.
    """
    session = _SESSIONS.get(id(module))
    if session is None:
        raise ValueError(
            f"capture: {type(module).__name__} is not part of a model under capture; was the model"
            " changed?"
        )
    mask, bias = _mask_and_bias(attention_mask, query, key)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    was_eager = session.was_eager.get(id(getattr(module, "config", None)), False)
    if attention_mask is None and causal and query.shape[2] > 1 and not was_eager:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    name = session.names[id(module)]
    cross = _is_cross(module, name)
    call = AttentionCall(
        layer=session.next_layer,
        name=name,
        query=query,
        key=key,
        value=value,
        scale=1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        mask=mask,
        bias=bias,
        softcap=softcap,
        sinks=s_aux,
        hidden=session.hidden_of(module),
        window=sliding_window,
    )
    captured = session.shown(call)
    if cross:
        session.report.cross += 1
    else:
        session.see(captured)
    if not cross and session.change is not None:
        changed = session.change(captured)
        call = replace(call, mask=changed.mask, bias=changed.bias)
    out = call.output()
    if not cross and session.after is not None:
        out = session.after(captured, out)
    return out.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    attention_mask: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Mask | None, Tensor | None]:
    """Who is seen, and what is added to scores."""
    if isinstance(attention_mask, MaskTensor):
        return attention_mask.mask, None
    allowed, bias = split_mask(attention_mask)
    return None if allowed is None else given_mask(allowed, query.shape[2], key.shape[2]), bias


def _is_cross(module: Any, name: str) -> bool:
    """Queries of one sequence over keys of another; self-attention of a decoder lies under names
    without these words.
    """
    if getattr(module, "is_cross_attention", False):
        return True
    own = ".".join(name.split(".")[-2:]) + type(module).__name__
    return CROSS.search(own) is not None


def _configs(model: Any) -> list[Any]:
    """Every configuration object in the model, nested ones too, each once."""
    found: dict[int, Any] = {}
    queue = [module.config for module in model.modules() if hasattr(module, "config")]
    while queue:
        config = queue.pop()
        if (
            config is None
            or id(config) in found
            or not hasattr(config, "_attn_implementation_internal")
        ):
            continue
        found[id(config)] = config
        queue += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _wanted(layers: Iterable[int] | None, expected: int | None) -> frozenset[int] | None:
    if layers is None:
        return None
    wanted = frozenset(int(layer) for layer in layers)
    last = math.inf if expected is None else expected - 1
    bad = sorted(layer for layer in wanted if layer < 0 or layer > last)
    if bad or not wanted:
        what = f"{bad[0]}" if bad else "none at all"
        raise ValueError(f"layers: the model has self-attention layers 0 to {last}, got {what}")
    return wanted


# ---- Small random inputs a model accepts: enough to see what its attention looks like.


def example_inputs(model: Any, tokens: int = 4, *, seed: int = 0) -> dict[str, Tensor]:
    """One sequence of random token ids, or one random image or sound, on the model's device."""
    name = model.main_input_name
    config = model.config
    state = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    dtype = next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )
    if name == "input_ids":
        text = config.get_text_config()
        taken = {
            value for value in (text.pad_token_id, text.eos_token_id) if isinstance(value, int)
        }
        ids = torch.randint(0, text.vocab_size, (1, tokens + 8), generator=state)[0].tolist()
        kept = [value for value in ids if value not in taken][:tokens] or [0] * tokens
        return {name: torch.tensor([kept], device=device)}
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return {
            name: torch.randn(1, config.num_channels, height, width, generator=state).to(
                device, dtype
            )
        }
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * int(getattr(config, "max_source_positions", 50))
        return {
            name: torch.randn(1, config.num_mel_bins, frames, generator=state).to(device, dtype)
        }
    raise ValueError(
        f"{type(model).__name__}: no example can be made of its input {name}; give inputs"
    )


# ---- Proof that capturing changes nothing: the same output with and without, and a capture for
# every layer.

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Parity:
    """Largest difference of the outputs, also relative to the largest output, and layers captured
    of those expected.
    """

    max_difference: float
    relative: float
    captured: int
    expected: int | None

    @property
    def holds(self) -> bool:
        """Equal to 1e-6, absolute or relative to the largest output."""
        return min(self.max_difference, self.relative) <= TOLERANCE

    def __str__(self) -> str:
        layers = "?" if self.expected is None else self.expected
        return (
            f"parity {self.max_difference:.1e} (relative {self.relative:.1e}), {self.captured} of"
            f" {layers} layers captured"
        )


def parity(model: Any, inputs: Mapping[str, Any] | None = None) -> Parity:
    """Run the model with and without capture and compare logits (or hidden states) on tokens that
    are not padding.

    A model of which nothing, or not every layer, is captured is refused with the reason. Without
    inputs a few random tokens are used.
    """
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"parity: {reason}")
    inputs = example_inputs(model, 16) if inputs is None else inputs
    seen: list[int] = []

    def count(captured: AttentionCall) -> None:
        seen.append(captured.layer)

    ours = _output(forward(model, inputs, count))
    with torch.no_grad():
        theirs = _output(model(**inputs, **without_cache(model)))
    reason = escaped(model, len(seen))
    if reason is not None:
        raise ValueError(f"parity: {reason}")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == ours.shape[:2]:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    difference = float((ours.double() - theirs.double()).abs().max())
    return Parity(
        difference,
        difference / max(float(theirs.double().abs().max()), 1e-300),
        len(seen),
        expected_layers(model),
    )


def _output(result: Any) -> Tensor:
    """Logits where there are some, else the last hidden states."""
    found: Tensor = next(
        (result[key] for key in ("logits", "last_hidden_state") if key in result), result[0]
    )
    return found
