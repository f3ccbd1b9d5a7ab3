"""Gradients of log p(next tokens) at the outputs of the heads, and the Fisher metric of each head.

A text is continued once, with all heads' outputs tapped. Next tokens y are drawn from the model's
own probabilities. With g the gradient of sum_p log p(y_p) at the output of a head at one position,
and e a small error of that output, the divergence of the next tokens grows by 1/2 E (g . e)^2. So

    F = E g g'     (width x width, mean over positions and draws)

prices an error of the head in nats: 1/2 E e' F e per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esscher.hf.call import AttentionCall, at_least_single
from esscher.hf.capture import Sink
from esscher.hf.interventions import Prefilled

DRAWS = 8  # of next tokens
SECOND_ORDER = 0.2  # nats: above, a loss predicted to second order is too small

Gradients = dict[int, Float[Tensor, "heads m width"]]  # by layer


def drawn_gradients(
    held: Prefilled,
    ids: Int[Tensor, "1 m"],
    draws: int,
    generator: torch.Generator,
    *,
    extend: bool = False,
    sink: Sink | None = None,
) -> list[Gradients]:
    """For each draw of the next tokens the gradient of their summed log probability at the heads'
    outputs.

    ``ids``: the continuation of the prefilled text. ``extend``: leave it in the cache. ``sink``
    sees every attention call, as in capture.
    """
    with torch.enable_grad():
        result, taps = _tapped(held, ids, extend=extend, sink=sink)
        if getattr(result, "logits", None) is None:
            raise ValueError(
                f"{type(held.model).__name__} has no language head, so that no loss in nats is"
                " defined; load it with its head (AutoModelForCausalLM)"
            )
        chances = torch.softmax(at_least_single(result.logits.detach()[0]), -1)
        below = chances.double().cumsum(-1)
        found = []
        for i in range(draws):
            u = torch.rand(len(below), 1, generator=generator, dtype=torch.float64).to(below.device)
            drawn = torch.searchsorted(below, u * below[:, -1:]).clamp_max(below.shape[1] - 1)
            slope = (-chances).scatter_add(1, drawn, torch.ones_like(chances[:, :1]))
            gradients = torch.autograd.grad(
                result.logits,
                list(taps.values()),
                slope[None].to(result.logits.dtype),
                retain_graph=i + 1 < draws,
            )
            found.append(
                {layer: gradient[0] for layer, gradient in zip(taps, gradients, strict=True)}
            )
    return found


def _tapped(held: Prefilled, ids: Tensor, **watch: Any) -> tuple[Any, dict[int, Tensor]]:
    """The model's result, and by layer the zero added to its heads' outputs."""
    taps: dict[int, Tensor] = {}

    def tapped(call: AttentionCall) -> Tensor:
        out = call.output()
        taps[call.layer] = torch.zeros_like(out, requires_grad=True)
        return out + taps[call.layer]

    return held.decode(ids, lambda call: None, attend=tapped, **watch), taps


def output_slopes(
    held: Prefilled,
    ids: Int[Tensor, "1 m"],
    outputs: Mapping[int, Float[Tensor, "heads width d"]],
    sink: Sink,
) -> dict[int, Float[Tensor, " m"]]:
    """By layer the length of the gradient of sum |h|^2 at the attention output of each token, h
    the output of the last layer (KVgrad).

    ``outputs``: W_O of each layer. A gradient is taken at the heads' outputs, in front of W_O; the
    one behind it is the shortest that W_O takes to it.
    """
    count = getattr(held.model.config, "num_hidden_layers", None)
    stacks = (m for m in held.model.modules() if isinstance(m, torch.nn.ModuleList))
    stack = next((m for m in stacks if len(m) == count), None)
    if stack is None:
        raise ValueError(
            f"{type(held.model).__name__} has no list of {count} layers, whose last output kvgrad"
            " reads; use another rule, such as kvzip_plus"
        )
    last: list[Tensor] = []

    def see(module: Any, args: Any, output: Any) -> None:
        last.append(output if isinstance(output, Tensor) else output[0])

    hook = stack[-1].register_forward_hook(see)
    try:
        with torch.enable_grad():
            _, taps = _tapped(held, ids, sink=sink)
            size = last[-1].float().square().sum()
            gradients = torch.autograd.grad(size, list(taps.values()))
    finally:
        hook.remove()
    found = {}
    for layer, gradient in zip(taps, gradients, strict=True):
        rows = at_least_single(gradient[0]).transpose(0, 1).flatten(1)  # (m, heads * width)
        into = outputs[layer].flatten(0, 1).to(rows)
        found[layer] = torch.linalg.lstsq(into, rows.T).solution.norm(dim=0)
    return found


@dataclass(frozen=True)
class FisherMetric:
    """The metric F of every head, by layer (heads, width, width).

    ``stderr``: by layer and head the standard error of trace F over the draws, relative to it; NaN
    for one draw.
    """

    of_layer: dict[int, Float[Tensor, "heads width width"]]
    stderr: dict[int, Float[Tensor, " heads"]]

    def nats(self, layer: int, error: Float[Tensor, "heads m width"]) -> Float[Tensor, "heads m"]:
        """1/2 e' F e: what an error of each head's output costs, in nats per token."""
        error = at_least_single(error)
        metric = self.of_layer[layer].to(error)
        return (error @ metric * error).sum(-1) / 2


def fisher_metric(draws: Sequence[Gradients]) -> FisherMetric:
    """The metric from several draws of gradients over the same positions."""
    found, stderr = {}, {}
    positions = next(iter(draws[0].values())).shape[1]
    for layer in draws[0]:
        own = [at_least_single(draw[layer]) for draw in draws]
        found[layer] = sum((g.mT @ g for g in own), torch.zeros(())) / (positions * len(draws))
        traces = torch.stack([g.square().sum((1, 2)) for g in own])
        spread = traces.std(0) if len(own) > 1 else torch.full_like(traces[0], torch.nan)
        tiny = torch.finfo(traces.dtype).tiny
        stderr[layer] = spread / len(own) ** 0.5 / traces.mean(0).clamp_min(tiny)
    return FisherMetric(found, stderr)
