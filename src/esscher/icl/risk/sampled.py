"""Risks and gradients on drawn prompts, for every task: simulations with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from esscher.icl.layer import Parameters, predict, tensors
from esscher.icl.risk.value import SIMULATION, Risk
from esscher.icl.tasks import Task
from esscher.inputs import as_count

__all__ = ["half_square", "huber", "sampled_gradient", "sampled_risk"]

Loss = Callable[[Tensor, Tensor], Tensor]

CHUNK = 4_000_000  # numbers in the tokens of one batch of prompts


def sampled_risk(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    prompts: Any = 20_000,
    generator: torch.Generator | None = None,
    query_inside: bool = False,
    loss: Loss | None = None,
) -> Risk:
    """The risk on drawn prompts, with its standard error: for every task, and with the query inside
    the prompt.

    ``loss`` maps predictions and labels to a loss each, half the squared error unless given; [S],
    section 4, takes any that is 1-smooth in the prediction with no slope at (0, 0), as ``huber``
    is.
    """
    loss, losses = loss or half_square, []
    with torch.no_grad():
        for size in _batches(task, prompts, length):
            batch = task.sample(size, length, generator)
            losses.append(loss(predict(params, batch, kind, query_inside), batch.target))
    each = torch.cat(losses).double()
    return Risk(float(each.mean()), float(each.std() / math.sqrt(each.numel())), SIMULATION)


def half_square(predicted: Tensor, label: Tensor) -> Tensor:
    """|prediction - label|^2 / 2, a number a prompt."""
    return 0.5 * ((predicted - label) ** 2).reshape(len(label), -1).sum(dim=-1)


def huber(predicted: Tensor, label: Tensor) -> Tensor:
    """Half the square up to a distance of 1, its tangent beyond: 1-smooth, and its gradient is at
    most 1.
    """
    size = (predicted - label).reshape(len(label), -1).norm(dim=-1)
    return torch.where(size <= 1.0, 0.5 * size**2, size - 0.5)


def sampled_gradient(
    task: Task,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    prompts: Any = 20_000,
    generator: torch.Generator | None = None,
    groups: int = 50,
) -> tuple[Parameters, Parameters]:
    """Mean gradient of the loss over drawn prompts and its standard error, entry by entry, from
    ``groups`` groups.
    """
    size = max(1, as_count(prompts, "prompts") // groups)
    leaves = [tensor.detach().requires_grad_(True) for tensor in tensors(params)]
    rows: list[list[Tensor]] = []
    for _ in range(groups):
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for part in _batches(task, size, length):
            batch = task.sample(part, length, generator)
            loss = (
                half_square(predict(type(params)(*leaves), batch, kind), batch.target).sum() / size
            )
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
