"""Risks, gradients and responses on drawn prompts: simulations with their standard errors.

``sampled_risk`` and ``sampled_gradient`` draw every token, for every task. ``batches`` and
``respond`` give the outputs of softmax and linear attention on the same prompts and their
derivatives; on long prompts of a ``LinearTask`` only two numbers a token are drawn, exactly in law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from esscher.icl.exact import SIMULATION, Risk, wishart_root
from esscher.icl.layer import Parameters, predict, tensors
from esscher.icl.tasks import LinearTask, Task
from esscher.inputs import as_count

Loss = Callable[[Tensor, Tensor], Tensor]

CHUNK = 4_000_000  # numbers in the tokens of one batch of prompts
AT_ONCE = 2**19  # numbers drawn at once for ``respond``
LONG = 100  # tokens from which on a prompt of a LinearTask is drawn by two numbers a token
COLLINEAR = 1e-6  # added to the correlations of four vectors that are known to float32


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
        for size in _sizes(task, prompts, length):
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
        for part in _sizes(task, size, length):
            batch = task.sample(part, length, generator)
            predicted = predict(type(params)(*leaves), batch, kind)
            loss = half_square(predicted, batch.target).sum() / size
            total = [a + b for a, b in zip(total, torch.autograd.grad(loss, leaves), strict=True)]
        rows.append(total)
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    mean = [column.mean(dim=0) for column in stacked]
    error = [column.std(dim=0) / math.sqrt(groups) for column in stacked]
    return type(params)(*mean), type(params)(*error)


def _sizes(task: Task, prompts: Any, length: Any) -> list[int]:
    """Sizes of batches that fit in memory."""
    total, per_prompt = as_count(prompts, "prompts"), as_count(length, "length") * (task.dim + 1)
    size = max(1, CHUNK // per_prompt)
    return [min(size, total - first) for first in range(0, total, size)]


class Rest(NamedTuple):
    """What ``_long_prompts`` takes from all coordinates but two: ``normal`` (B, 4, e), and
    ``root`` (B, e, e), whose square is Wishart with L - 4 degrees of freedom.
    """

    normal: Tensor
    root: Tensor


@dataclass(frozen=True, eq=False)
class Drawn:
    """B prompts before any weights see them.

    Tokens are z = A g, with g ~ N(0, I) and A = [[R, 0], [w^T R, tau]] (``to_token``) for a
    ``LinearTask``; for other tasks g is the token itself. ``white``: g (B, L, e) of short prompts,
    two of its coordinates (B, 2, L) of long ones, which have a ``rest``.
    """

    query: Float[Tensor, "B d"]
    label: Float[Tensor, " B"]
    white: Float[Tensor, "B _ _"]
    to_token: Float[Tensor, "B e e"] | None = None
    rest: Rest | None = None

    def part(self, first: int, last: int) -> Drawn:
        """The prompts from ``first`` to before ``last``."""
        here = slice(first, last)
        return Drawn(
            self.query[here],
            self.label[here],
            self.white[here],
            None if self.to_token is None else self.to_token[here],
            None if self.rest is None else Rest(self.rest.normal[here], self.rest.root[here]),
        )


class Responses(NamedTuple):
    """Outputs f of softmax and linear attention on the same prompts, (B, 2), heads added; and for
    each head, softmax first, df/dc and df/dtheta, (B, 2H, e), at the value direction c and theta =
    U z_q.
    """

    output: Tensor
    by_value: Tensor
    by_theta: Tensor


def batches(
    task: Task, length: int, batch: int, count: int, generator: torch.Generator, heads: int = 1
) -> Iterator[Iterable[Drawn]]:
    """``count`` batches of ``batch`` prompts, each in parts that fit in memory."""
    long = isinstance(task, LinearTask) and heads == 1 and length >= max(LONG, task.dim + 5)
    fit = max(1, AT_ONCE // (length * (2 if long else task.dim + 1)))
    if fit < batch:
        sizes = [min(fit, batch - first) for first in range(0, batch, fit)]
        for _ in range(count):
            yield (_draw(task, size, length, generator, long) for size in sizes)
        return
    together = fit // batch
    for first in range(0, count, together):
        steps = min(together, count - first)
        drawn = _draw(task, steps * batch, length, generator, long)
        for step in range(steps):
            yield [drawn.part(step * batch, (step + 1) * batch)]


def _draw(task: Task, count: int, length: int, generator: torch.Generator, long: bool) -> Drawn:
    if not isinstance(task, LinearTask):
        prompts = task.sample(count, length, generator)
        return Drawn(prompts.query.double(), prompts.target.double(), prompts.tokens.double())
    d, e = task.dim, task.dim + 1

    def normal(*shape: int) -> Tensor:  # in float32, which takes a third of the time
        return torch.randn(count, *shape, generator=generator)

    first = normal(2 * d + 1).double()
    w, query = first[:, :d] @ task.task_root.mT, first[:, d : 2 * d] @ task.query_root.mT
    label = (w * query).sum(dim=-1) + math.sqrt(task.noise) * first[:, -1]
    to_token = torch.zeros(count, e, e, dtype=torch.float64)
    to_token[:, :d, :d], to_token[:, d, :d] = task.root, w @ task.root
    to_token[:, d, d] = math.sqrt(task.noise)
    if not long:
        return Drawn(query, label, normal(length, e).double(), to_token)
    rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    root = torch.from_numpy(wishart_root(length - 4, e, count, rng))
    return Drawn(query, label, normal(2, length), to_token, Rest(normal(4, e).double(), root))


def respond(
    drawn: Drawn, theta: Float[Tensor, "B heads e"], value: Float[Tensor, "heads e"]
) -> Responses:
    """The outputs on drawn prompts at given weights: the first half of ``heads`` are softmax
    attention's, the other half linear attention's.

        softmax: f = sum_j p_j c^T z_j,  df/dc = sum_j p_j z_j,
                 df/dtheta = sum_j p_j (c^T z_j) z_j - f df/dc
        linear:  f = c^T S theta,  df/dc = S theta,  df/dtheta = S c,  S = (1/L) sum_j z_j z_j^T
    """
    A = drawn.to_token
    score = theta if A is None else theta @ A  # A^T theta, head by head
    read = value.expand_as(theta) if A is None else value @ A
    if drawn.rest is None:
        by_value, by_theta = _short_prompts(drawn.white, score, read)
    else:
        by_value, by_theta = _long_prompts(drawn.white, drawn.rest, score, read)
    output = (read * by_value).sum(dim=-1).reshape(len(theta), 2, -1).sum(dim=-1)
    if A is not None:
        by_value, by_theta = by_value @ A.mT, by_theta @ A.mT
    return Responses(output, by_value, by_theta)


def _short_prompts(g: Tensor, score: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """df/dc and df/dtheta from all tokens g (B, L, e), in the coordinates of g."""
    heads, length = score.shape[1] // 2, g.shape[1]
    scores, values = (torch.cat([score, read], dim=1) @ g.mT).chunk(2, dim=1)
    p = scores[:, :heads].softmax(dim=-1)
    weighted = p * values[:, :heads]
    centred = weighted - weighted.sum(dim=-1, keepdim=True) * p
    parts = [p, scores[:, heads:] / length, centred, values[:, heads:] / length]
    by_value, by_theta = (torch.cat(parts, dim=1) @ g).chunk(2, dim=1)
    return by_value, by_theta


def _long_prompts(pair: Tensor, rest: Rest, score: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one head, in law, from two coordinates (g_1, g_2) of each token.

    g_1 is the coordinate along softmax attention's theta and g_2 that along the rest of its c, so
    that p_j and a_j = c^T z_j are functions of them. The other coordinates, collected in Q, are
    N(0, I) given these two and enter through W^T Q, W = (g_1, g_2, p, p a), and Q^T Q. By Cochran's
    theorem W^T Q = C N with C C^T = W^T W and N Gaussian, and Q^T Q = N^T N + Wishart(L - 4).
    """
    theta, c, length = score[:, 0], read[:, 0], pair.shape[-1]
    size = theta.norm(dim=-1, keepdim=True)
    first = theta / size.clamp_min(1e-300)
    along = (c * first).sum(dim=-1, keepdim=True)
    across = (c - along * first).norm(dim=-1, keepdim=True)
    basis = torch.stack([first, (c - along * first) / across.clamp_min(1e-300)], dim=1)

    def off(x: Tensor) -> Tensor:
        """x without its part in the plane of the first two coordinates."""
        return x - (x @ basis.mT) @ basis

    plane = torch.stack([along, across], dim=-1).to(pair)  # a = along g_1 + across g_2
    p = (size.to(pair) * pair[:, 0]).softmax(dim=-1)[:, None]
    W = torch.cat([pair, p, p * (plane @ pair)], dim=1)
    gram = (W @ W.mT).double()
    norms = gram.diagonal(dim1=1, dim2=2).sqrt().clamp_min(1e-300)
    correlation = gram / (norms[:, :, None] * norms[:, None, :])
    jitter = COLLINEAR * torch.eye(4, dtype=torch.float64)
    C = torch.linalg.cholesky_ex(correlation + jitter)[0] * norms[:, :, None]
    N = off(rest.normal)
    sums = gram[:, :, :2] @ basis + C @ N  # sums over tokens of g times g_1, g_2, p, p a
    x = torch.stack([score[:, 1], read[:, 1]], dim=1)  # S theta and S c of linear attention
    outside = off(x)
    moved = off((x @ basis.mT) @ sums[:, :2] + (outside @ rest.root) @ rest.root.mT)
    linear = ((x @ sums[:, :2].mT) @ basis + moved + (outside @ N.mT) @ N) / length
    output = (c * sums[:, 2]).sum(dim=-1, keepdim=True)
    by_value = torch.stack([sums[:, 2], linear[:, 0]], dim=1)
    by_theta = torch.stack([sums[:, 3] - output * sums[:, 2], linear[:, 1]], dim=1)
    return by_value, by_theta
