"""grad_u: the gradient in the score matrix.

Letters: m queries x, n tokens y of dimension d; theta = A x + a0; Cov_n the covariance of the
tokens under the softmax weights of a query.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.state import AttentionState, init, merge
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Metric, as_floats
from esscher.convergence.montecarlo.metrics.softmax_mean import segments

__all__ = ["GradU", "softmax_scatter"]

KEY_BLOCK = 4096  # keys whose weights are held at once


class GradU(Metric):
    """The gradient in U = A is the tensor V Cov(theta) (x) x, so the error is ||V (Cov_n - Cov)||_F
    |x| [S, Prop. 3.4].
    """

    name = "grad_u"
    description = "gradient in U = A over queries x ~ nu"
    asked_by = "queries"
    in_float64 = True

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.head.V.to(x) @ plan.measure.tilted_cov(plan.head.tilt(x))

    def error(self, draw: Draw) -> Discrepancy:
        plan = draw.plan
        device = plan.measure.device
        x, tokens = draw.queries.to(device), draw.tokens.double().to(device)
        theta, V, target = plan.head.tilt(x), plan.head.V.to(x), self.at_queries(draw)
        # a common shift changes no covariance and no softmax; it saves digits
        centre = plan.measure.mean.double()
        inside = x - centre if plan.query_inside else None
        weight = x.square().sum(1)
        squared = [
            (weight * (scatter - target).square().sum((1, 2))).mean()
            for scatter in softmax_scatter(theta, tokens - centre, V, draw.ladder, inside)
        ]
        return Discrepancy(
            as_floats(torch.stack(squared)), float((weight * target.square().sum((1, 2))).mean())
        )


def softmax_scatter(
    theta: Float64[Tensor, "m d"],
    tokens: Float64[Tensor, "n d"],
    V: Float64[Tensor, "d_out d"],
    ladder: tuple[int, ...],
    inside: Float64[Tensor, "m d"] | None = None,
) -> Iterator[Float64[Tensor, "m d_out d"]]:
    """V Cov_n(theta) for every n of the ladder; ``inside`` adds one own token to each query's
    prompt.
    """
    mean_and_second = init(theta, tokens.shape[1] * (1 + V.shape[0]))
    for start, stop in segments(ladder):
        for first in range(start, stop, KEY_BLOCK):
            block = tokens[first : min(first + KEY_BLOCK, stop)]
            mean_and_second = merge(mean_and_second, _second_moments(theta, block, V))
        state = mean_and_second
        if inside is not None:
            own = torch.cat([inside, _outer(inside @ V.T, inside).flatten(1)], dim=1)
            state = merge(state, AttentionState((theta * inside).sum(1), own))
        mean, second = state.out[:, : tokens.shape[1]], state.out[:, tokens.shape[1] :]
        yield second.reshape(-1, *V.shape) - _outer(mean @ V.T, mean)


def _second_moments(theta: Tensor, block: Tensor, V: Tensor) -> AttentionState:
    """Softmax means of y and of (V y) y^T over some keys. Query by query: the products of all keys
    are never held.
    """
    scores = theta @ block.T
    lse = torch.logsumexp(scores, dim=1)
    weights = torch.exp(scores - lse[:, None])
    values = (block @ V.T).T
    second = torch.stack([(values * row) @ block for row in weights])
    return AttentionState(lse, torch.cat([weights @ block, second.flatten(1)], dim=1))


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] * right[:, None, :]
