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

from esscher.models.huggingface.call import AttentionCall
from esscher.models.huggingface.masks import (
    Mask,
    MaskTensor,
    causal_mask,
    given_mask,
    model_mask,
    split_mask,
)
from esscher.models.huggingface.package import quiet, transformers
from esscher.models.huggingface.support import WORKS, expected_layers, refusal

__all__ = ["AttentionCall", "CaptureReport", "StopForward", "capture", "forward"]

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
