"""Population risks of in-context prediction: exact where the task allows it, sampled for every task."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.icl.layer import KINDS, UV, Block, Parameters, as_uv, predict
from esscher.icl.risk.linear import active, block_linear_gradient, limit_risk, linear_risk, linear_variance
from esscher.icl.risk.softmax import (
    Rule,
    block_excess,
    block_excess_gradient,
    block_shrinkage,
    general_excess,
    general_shrinkage,
    product_rule,
)
from esscher.icl.tasks import LinearTask, Task
from esscher.inputs import as_count

__all__ = [
    "Risk",
    "RiskParts",
    "as_length",
    "decompose",
    "risk",
    "risk_gradient",
    "risk_tensor",
    "sampled_gradient",
    "sampled_risk",
]

CLOSED, QUADRATURE, CUBATURE, SIMULATION = "closed form", "quadrature", "cubature", "simulation"
NUMERICAL = 1e-9  # error of the quadratures, relative to what finitely many tokens add to the risk
RADIAL = 1e-4  # the same for the shells of a cubature
CHUNK = 4_000_000  # numbers in the tokens of one batch of prompts


@dataclass(frozen=True)
class Risk:
    """A risk, its error, and where it comes from.

    ``error`` is 0 for a closed form, a bound on the numerical error for a quadrature, one standard error for a cubature
    (over its random rotations) and for a simulation.
    """

    value: float
    error: float
    origin: str

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class RiskParts:
    """risk = noise + approximation + bias + variance.

    noise: tau^2 / 2, which nobody avoids. approximation: what the layer misses with infinitely many tokens. bias: the change
    of the squared bias 1/2 E (E[prediction | w, x_q] - <w, x_q>)^2 from there to L tokens, which may be negative. variance:
    1/2 E Var(prediction | w, x_q) on L tokens.
    """

    noise: float
    approximation: float
    bias: float
    variance: float

    @property
    def total(self) -> float:
        return self.noise + self.approximation + self.bias + self.variance


def as_length(length: Any) -> float | int:
    """A prompt length: a whole number of at least 1, or infinity."""
    if isinstance(length, float) and math.isinf(length) and length > 0:
        return math.inf
    return as_count(length, "length")


def risk(task: Task, params: Parameters, length: Any, kind: str = "softmax", rule: Rule | None = None) -> Risk:
    """R_L = 1/2 E (prediction - label)^2 on prompts of ``length`` tokens (``math.inf`` allowed), without sampling prompts.

    Linear attention and infinite prompts: closed form. Softmax in the block form of [S], Assumption 5.1: quadrature, to
    about nine digits of R_L - R_infinity. Softmax in general: a cubature over (w, x_q), ``product_rule(dim, rotations)``
    unless given.
    """
    task, length, uv = _check(task, params, length, kind)
    with torch.no_grad():
        limit = float(limit_risk(uv, task))
        if math.isinf(length) or kind == "linear":
            return Risk(float(linear_risk(uv, task, length)), 0.0, CLOSED)
        block = _as_block(uv)
        if block is not None:
            excess = float(block_excess(block, task, int(length)))
            return Risk(limit + excess, NUMERICAL * abs(excess), QUADRATURE)
        estimates = general_excess(uv, task, int(length), rule or product_rule(task.dim))
        return _over_rotations(limit, estimates)


def risk_tensor(
    task: Task, params: Parameters, length: Any, kind: str = "softmax", rule: Rule | None = None
) -> Float64[Tensor, ""]:
    """``risk`` as a tensor, differentiable once in the tensors of ``params``."""
    task, length, uv = _check(task, params, length, kind)
    if math.isinf(length) or kind == "linear":
        return linear_risk(uv, task, length)
    if isinstance(params, Block):
        return limit_risk(uv, task) + block_excess(params, task, int(length))
    return limit_risk(uv, task) + general_excess(uv, task, int(length), rule or product_rule(task.dim)).mean()


def risk_gradient(
    task: Task, params: Parameters, length: Any, kind: str = "softmax", rule: Rule | None = None
) -> tuple[float, Parameters]:
    """The risk and its gradient, in the parametrisation given: a gradient in (O, V, K, Q) for ``OVKQ``, and so on."""
    if isinstance(params, Block):
        return _block_gradient(task, params, length, kind)
    leaves = [tensor.detach().double().requires_grad_(True) for tensor in tensors(params)]
    with torch.enable_grad():
        value = risk_tensor(task, type(params)(*leaves), length, kind, rule)
        gradient = torch.autograd.grad(value, leaves)
    return float(value.detach()), type(params)(*gradient)


def _block_gradient(task: Task, block: Block, length: Any, kind: str) -> tuple[float, Block]:
    """The same without a graph."""
    task, length = _check_task(task, block.dim, length, kind)
    U, v = block.U11.detach().double().numpy(), float(block.v)
    plain = math.inf if kind == "softmax" else length
    value, grad_U, grad_v = block_linear_gradient(U, v, task, plain)
    if kind == "softmax" and not math.isinf(length):
        excess, excess_U, excess_v = block_excess_gradient(U, v, task, int(length))
        value, grad_U, grad_v = value + excess, grad_U + excess_U, grad_v + excess_v
    return value, Block(torch.from_numpy(grad_U), torch.tensor(grad_v, dtype=torch.float64))


def tensors(params: Parameters) -> list[Tensor]:
    """The tensors of a parametrisation, in the order of its fields."""
    return [getattr(params, field.name) for field in fields(params)]


def decompose(task: Task, params: Parameters, length: Any, kind: str = "softmax", rule: Rule | None = None) -> RiskParts:
    """The risk on ``length`` tokens in four parts; their sum is ``risk``."""
    task, length, uv = _check(task, params, length, kind)
    with torch.no_grad():
        noise = 0.5 * task.noise
        approximation = float(limit_risk(uv, task)) - noise
        if math.isinf(length):
            return RiskParts(noise, approximation, 0.0, 0.0)
        if kind == "linear":
            return RiskParts(noise, approximation, 0.0, float(linear_variance(uv, task)) / length)
        rule, block = rule or product_rule(task.dim), _as_block(uv)
        if block is not None:
            bias = block_shrinkage(block, task, int(length))
        else:
            bias = float(general_shrinkage(uv, task, int(length), rule).mean())
        total = float(risk(task, params, length, kind, rule))
    return RiskParts(noise, approximation, bias, total - noise - approximation - bias)


def sampled_risk(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    prompts: Any = 20_000,
    generator: torch.Generator | None = None,
    query_inside: bool = False,
) -> Risk:
    """The risk on drawn prompts, with its standard error: for every task, and with the query inside the prompt."""
    losses = []
    with torch.no_grad():
        for size in _batches(task, prompts, length):
            batch = task.sample(size, length, generator)
            losses.append(0.5 * (predict(params, batch, kind, query_inside) - batch.target) ** 2)
    loss = torch.cat(losses).double()
    return Risk(float(loss.mean()), float(loss.std() / math.sqrt(loss.numel())), SIMULATION)


def sampled_gradient(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    prompts: Any = 20_000,
    generator: torch.Generator | None = None,
    groups: int = 50,
) -> tuple[Parameters, Parameters]:
    """Mean gradient of the loss over drawn prompts and its standard error, entry by entry, from ``groups`` groups."""
    size = max(1, as_count(prompts, "prompts") // groups)
    leaves = [tensor.detach().requires_grad_(True) for tensor in tensors(params)]
    rows: list[list[Tensor]] = []
    for _ in range(groups):
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for part in _batches(task, size, length):
            batch = task.sample(part, length, generator)
            loss = 0.5 * ((predict(type(params)(*leaves), batch, kind) - batch.target) ** 2).sum() / size
            total = [a + b for a, b in zip(total, torch.autograd.grad(loss, leaves), strict=True)]
        rows.append(total)
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    mean = [column.mean(dim=0) for column in stacked]
    error = [column.std(dim=0) / math.sqrt(groups) for column in stacked]
    return type(params)(*mean), type(params)(*error)


def _batches(task: Task, prompts: Any, length: Any) -> list[int]:
    """Sizes of batches that fit in memory."""
    total, per_prompt = as_count(prompts, "prompts"), as_count(length, "length") * (task.dim + 1)
    size = max(1, CHUNK // per_prompt)
    return [min(size, total - first) for first in range(0, total, size)]


def _check(task: Task, params: Parameters, length: Any, kind: str) -> tuple[LinearTask, float | int, UV]:
    uv = as_uv(params)
    return *_check_task(task, uv.dim, length, kind), uv


def _check_task(task: Task, dim: int, length: Any, kind: str) -> tuple[LinearTask, float | int]:
    if not isinstance(task, LinearTask):
        raise ValueError(f"task: expected a LinearTask, got {type(task).__name__}; use sampled_risk for other tasks")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if dim != task.dim:
        raise ValueError(f"params and task: the layer takes d = {dim}, the task has d = {task.dim}")
    return task, as_length(length)


def _as_block(uv: UV) -> Block | None:
    """The block form, if (U, V) has it in the entries that act."""
    A1, a, r1, v = active(uv)
    return None if bool(a.any()) or bool(r1.any()) else Block(A1, v)


def _over_rotations(limit: float, estimates: Tensor) -> Risk:
    mean, count = float(estimates.mean()), estimates.numel()
    spread = float(estimates.std()) / math.sqrt(count) if count > 1 else 0.0
    return Risk(limit + mean, math.hypot(spread, RADIAL * mean), CUBATURE)
