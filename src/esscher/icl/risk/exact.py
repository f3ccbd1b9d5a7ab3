"""Population risks of in-context prediction without sampling: closed forms, quadrature,
cubature.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.icl.layer import KINDS, UV, Block, Parameters, as_uv, tensors
from esscher.icl.risk.linear import (
    active,
    block_linear_gradient,
    limit_risk,
    linear_risk,
    linear_variance,
)
from esscher.icl.risk.query_inside import inside_excess, inside_shrinkage, linear_inside
from esscher.icl.risk.softmax_block import block_excess, block_excess_gradient, block_shrinkage
from esscher.icl.risk.softmax_general import Rule, general_excess, general_shrinkage, product_rule
from esscher.icl.risk.value import CLOSED, CUBATURE, QUADRATURE, Risk, RiskParts, as_length
from esscher.icl.tasks import LinearTask, Task

__all__ = ["decompose", "risk", "risk_gradient", "risk_tensor"]

NUMERICAL = 1e-9  # error of the quadratures, relative to what finitely many tokens add to the risk
RADIAL = 1e-4  # the same for the shells of a cubature


def risk(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> Risk:
    """R_L = 1/2 E (prediction - label)^2 on prompts of ``length`` tokens (``math.inf`` allowed),
    without sampling prompts.

    Linear attention and infinite prompts: closed form. Softmax in the block form of [S], Assumption
    5.1: quadrature, to about nine digits of R_L - R_infinity. Softmax in general: a cubature over
    (w, x_q), ``product_rule(dim, rotations)`` unless given. ``query_inside`` adds the query's own
    token to the prompt [S, Remark 3.2]: a closed form for linear attention, a cubature for softmax,
    in the block form over x_q alone.
    """
    task, length, uv = _check(task, params, length, kind)
    with torch.no_grad():
        limit = float(limit_risk(uv, task))
        if math.isinf(length) or kind == "linear":
            return Risk(float(_closed(uv, task, length, query_inside)), 0.0, CLOSED)
        if query_inside:
            return _over_rotations(
                limit, inside_excess(uv, task, int(length), rule or _inside_rule(uv))
            )
        block = _as_block(uv)
        if block is not None:
            excess = float(block_excess(block, task, int(length)))
            return Risk(limit + excess, NUMERICAL * abs(excess), QUADRATURE)
        estimates = general_excess(uv, task, int(length), rule or product_rule(task.dim))
        return _over_rotations(limit, estimates)


def risk_tensor(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> Float64[Tensor, ""]:
    """``risk`` as a tensor, differentiable once in the tensors of ``params``."""
    task, length, uv = _check(task, params, length, kind)
    if math.isinf(length) or kind == "linear":
        return _closed(uv, task, length, query_inside)
    if query_inside:
        return (
            limit_risk(uv, task)
            + inside_excess(uv, task, int(length), rule or _inside_rule(uv)).mean()
        )
    if isinstance(params, Block):
        return limit_risk(uv, task) + block_excess(params, task, int(length))
    return (
        limit_risk(uv, task)
        + general_excess(uv, task, int(length), rule or product_rule(task.dim)).mean()
    )


def risk_gradient(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> tuple[float, Parameters]:
    """The risk and its gradient, in the parametrisation given: a gradient in (O, V, K, Q) for
    ``OVKQ``, and so on.
    """
    if isinstance(params, Block) and not query_inside:
        return _block_gradient(task, params, length, kind)
    leaves = [tensor.detach().double().requires_grad_(True) for tensor in tensors(params)]
    with torch.enable_grad():
        value = risk_tensor(task, type(params)(*leaves), length, kind, rule, query_inside)
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


def decompose(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    rule: Rule | None = None,
    query_inside: bool = False,
) -> RiskParts:
    """The risk on ``length`` tokens in four parts; their sum is ``risk``."""
    task, length, uv = _check(task, params, length, kind)
    with torch.no_grad():
        noise = 0.5 * task.noise
        approximation = float(limit_risk(uv, task)) - noise
        if math.isinf(length):
            return RiskParts(noise, approximation, 0.0, 0.0)
        if kind == "linear" and query_inside:
            square, variance = linear_inside(uv, task, int(length))
            return RiskParts(noise, approximation, float(square) - approximation, float(variance))
        if kind == "linear":
            return RiskParts(noise, approximation, 0.0, float(linear_variance(uv, task)) / length)
        rule, block = (
            rule or (_inside_rule(uv) if query_inside else product_rule(task.dim)),
            _as_block(uv),
        )
        if query_inside:
            bias = float(inside_shrinkage(uv, task, int(length), rule).mean())
        elif block is not None:
            bias = block_shrinkage(block, task, int(length))
        else:
            bias = float(general_shrinkage(uv, task, int(length), rule).mean())
        total = float(risk(task, params, length, kind, rule, query_inside))
    return RiskParts(noise, approximation, bias, total - noise - approximation - bias)


def _check(
    task: Task, params: Parameters, length: Any, kind: str
) -> tuple[LinearTask, float | int, UV]:
    uv = as_uv(params)
    return *_check_task(task, uv.dim, length, kind), uv


def _check_task(task: Task, dim: int, length: Any, kind: str) -> tuple[LinearTask, float | int]:
    if not isinstance(task, LinearTask):
        raise ValueError(
            f"task: expected a LinearTask, got {type(task).__name__}; use sampled_risk for other"
            " tasks"
        )
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if dim != task.dim:
        raise ValueError(f"params and task: the layer takes d = {dim}, the task has d = {task.dim}")
    return task, as_length(length)


def _as_block(uv: UV) -> Block | None:
    """The block form, if (U, V) has it in the entries that act."""
    A1, a, r1, v = active(uv)
    return None if bool(a.any()) or bool(r1.any()) else Block(A1, v)


def _closed(
    uv: UV, task: LinearTask, length: float | int, query_inside: bool
) -> Float64[Tensor, ""]:
    """Of linear attention, or of an infinite prompt, in which the query's own token has no
    share.
    """
    if not query_inside or math.isinf(length):
        return linear_risk(uv, task, length)
    square, variance = linear_inside(uv, task, int(length))
    return square + variance + 0.5 * task.noise


def _inside_rule(uv: UV) -> Rule:
    """In the block form tasks are averaged exactly, and queries are cheap."""
    return product_rule(uv.dim, 8 if _as_block(uv) is None else 64)


def _over_rotations(limit: float, estimates: Tensor) -> Risk:
    mean, count = float(estimates.mean()), estimates.numel()
    spread = float(estimates.std()) / math.sqrt(count) if count > 1 else 0.0
    return Risk(limit + mean, math.hypot(spread, RADIAL * mean), CUBATURE)
