"""Risks and gradients on drawn prompts, for every task: simulations with their standard errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from esscher.icl.layer import Parameters, predict, tensors
from esscher.icl.risk.value import SIMULATION, Risk
from esscher.icl.tasks import Task
from esscher.inputs import as_count

__all__ = ["sampled_gradient", "sampled_risk"]

CHUNK = 4_000_000  # numbers in the tokens of one batch of prompts


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
