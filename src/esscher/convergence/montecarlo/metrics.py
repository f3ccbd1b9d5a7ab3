"""Which error: squared differences between a head on n tokens and its limit, for every n of a draw.

Letters: m queries x, n tokens y of dimension d; theta = A x + a0; m_n, Cov_n the mean and covariance of the tokens under the
softmax weights of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.hardmax import attend_hardmax
from esscher.attention.limit import hardmax_limit, limit
from esscher.attention.prefixes import attend_prefixes
from esscher.attention.streaming import AttentionState, attention_state, init, merge
from esscher.convergence.montecarlo.plan import Draw, on_the_line
from esscher.convergence.montecarlo.uniform import uniform_error

__all__ = ["Discrepancy", "discrepancies", "softmax_scatter"]

Floats = npt.NDArray[np.float64]
KEY_BLOCK = 4096  # keys whose weights are held at once


@dataclass(frozen=True)
class Discrepancy:
    """Squared error at each n of a draw, the squared size of the limit, and for the uniform error where it is attained."""

    squared: Floats  # (len ladder,)
    limit_squared: float
    points: Floats | None = None  # (len ladder, d_query)


def discrepancies(draw: Draw) -> dict[str, Discrepancy]:
    """Every metric of the plan on one draw; "cov" brings "cov_op" (operator norm) with it."""
    asked = draw.plan.metrics
    found: dict[str, Discrepancy] = {}
    if "mean" in asked or "cov" in asked:
        moments = _moments(draw)
        found |= {name: value for name, value in moments.items() if name.removesuffix("_op") in asked}
    for name, metric in OTHERS.items():
        if name in asked:
            found[name] = metric(draw)
    return found


def _moments(draw: Draw) -> dict[str, Discrepancy]:
    """Mean (L2) and covariance (Frobenius, operator) of self-attention's outputs against the push-forward [B].

    The covariance is that of the empirical measure, divided by n. All n come from one pass over the largest prefix.
    """
    head, push = draw.plan.head, draw.plan.pushforward
    tokens = draw.tokens
    prefixes = attend_prefixes(head.queries(tokens), head.keys(tokens), head.values(tokens), draw.ladder, 1.0)
    mean, cov = push.mean.to(tokens.device), push.cov.to(tokens.device)
    means = torch.stack([prefix.mean - mean for prefix in prefixes])
    covs = torch.stack([prefix.cov - cov for prefix in prefixes])
    size = float(mean.square().sum() + cov.trace())  # of an output, since the mean itself may be 0
    return {
        "mean": Discrepancy(_numpy(means.square().sum(1)), size),
        "cov": Discrepancy(_numpy(covs.square().sum((1, 2))), float(cov.square().sum())),
        "cov_op": Discrepancy(_numpy(_operator_norms(covs) ** 2), float(_operator_norms(cov[None])) ** 2),
    }


def _operator_norms(matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
    norms: Tensor = torch.linalg.eigvalsh(matrices).abs().amax(dim=1)
    return norms


def _l2(draw: Draw) -> Discrepancy:
    """Mean over queries x ~ nu of |Gamma_n(x) - Gamma(x)|^2 [S, Proposition 3.1]."""
    head = draw.plan.head
    return _against(draw, head.values, draw.target("l2", limit(head, draw.plan.measure)))


def _grad_v(draw: Draw) -> Discrepancy:
    """The gradient in V, row by row: every row has the tilted mean m(theta) as its gradient, so the error is |m_n - m|.

    [S, Proposition 3.4], gradients as in [S, C.7]; the gradient in all of V is larger by the factor sqrt(d_out).
    """
    head, measure = draw.plan.head, draw.plan.measure
    return _against(draw, lambda rows: rows, draw.target("grad_v", lambda x: measure.tilted_mean(head.tilt(x))))


def _against(draw: Draw, values: Callable[[Tensor], Tensor], target: Tensor) -> Discrepancy:
    """Mean over queries of |sum_j p_j values(y_j) - target|^2; segments between the n are merged, each key seen once."""
    head, tokens = draw.plan.head, draw.tokens
    x, target = draw.queries.to(tokens), target.double().to(tokens.device)
    q, k, v = head.queries(x), head.keys(tokens), values(tokens)
    state = init(q, v.shape[1])
    own = AttentionState((q.double() * head.keys(x).double()).sum(1), values(x).double()) if draw.plan.query_inside else None
    squared = []
    for start, stop in _segments(draw.ladder):
        state = merge(state, attention_state(q, k[start:stop], v[start:stop], 1.0))
        out = state.out if own is None else merge(state, own).out
        squared.append((out - target).square().sum(1).mean())
    return Discrepancy(_numpy(torch.stack(squared)), float(target.square().sum(1).mean()))


def _segments(ladder: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip((0, *ladder[:-1]), ladder, strict=True)


def _grad_u(draw: Draw) -> Discrepancy:
    """The gradient in U = A is the tensor V Cov(theta) (x) x, so the error is ||V (Cov_n - Cov)||_F |x| [S, Prop. 3.4]."""
    plan = draw.plan
    device = plan.measure.device
    x, tokens = draw.queries.to(device), draw.tokens.double().to(device)
    theta, V = plan.head.tilt(x), plan.head.V.to(x)
    target = draw.target("grad_u", lambda x: V @ plan.measure.tilted_cov(plan.head.tilt(x)))
    centre = plan.measure.mean.double()  # a common shift changes no covariance and no softmax; it saves digits
    inside = x - centre if plan.query_inside else None
    weight = x.square().sum(1)
    squared = [
        (weight * (scatter - target).square().sum((1, 2))).mean()
        for scatter in softmax_scatter(theta, tokens - centre, V, draw.ladder, inside)
    ]
    return Discrepancy(_numpy(torch.stack(squared)), float((weight * target.square().sum((1, 2))).mean()))


def softmax_scatter(
    theta: Float64[Tensor, "m d"],
    tokens: Float64[Tensor, "n d"],
    V: Float64[Tensor, "d_out d"],
    ladder: tuple[int, ...],
    inside: Float64[Tensor, "m d"] | None = None,
) -> Iterator[Float64[Tensor, "m d_out d"]]:
    """V Cov_n(theta) for every n of the ladder; ``inside`` adds one own token to each query's prompt."""
    mean_and_second = init(theta, tokens.shape[1] * (1 + V.shape[0]))
    for start, stop in _segments(ladder):
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
    """Softmax means of y and of (V y) y^T over some keys. Query by query: the products of all keys are never held."""
    scores = theta @ block.T
    lse = torch.logsumexp(scores, dim=1)
    weights = torch.exp(scores - lse[:, None])
    values = (block @ V.T).T
    second = torch.stack([(values * row) @ block for row in weights])
    return AttentionState(lse, torch.cat([weights @ block, second.flatten(1)], dim=1))


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] * right[:, None, :]


def _uniform(draw: Draw) -> Discrepancy:
    """sup over |x| <= R of |Gamma_n(x) - Gamma(x)|, squared [B]; the size of the limit is that where it is attained."""
    plan, tokens = draw.plan, draw.tokens
    worst = [
        uniform_error(
            plan.head, plan.measure, tokens[:n], plan.radius, draw.generator(f"starts {n}"), query_inside=plan.query_inside
        )
        for n in draw.ladder
    ]
    points = torch.stack([at.point for at in worst])
    size = float(limit(plan.head, plan.measure)(points).square().sum(1).mean())
    return Discrepancy(np.array([at.error for at in worst]) ** 2, size, _numpy(points))


def _hardmax(draw: Draw) -> Discrepancy:
    """Hardmax. Centred Gaussian tokens on the line: |mean output of self-attention|^2, whose limit is 0 [B, Prop. 5.1].

    Bounded laws: mean over queries x ~ nu of the squared error against the support's furthest point along the tilt.
    """
    plan = draw.plan
    if on_the_line(plan):
        return _hardmax_on_the_line(draw)
    x, tokens = draw.queries.to(plan.measure.device), draw.tokens.double().to(plan.measure.device)
    target = draw.target("hardmax", hardmax_limit(plan.head, plan.measure))
    q, k, v = plan.head.queries(x), plan.head.keys(tokens), plan.head.values(tokens)
    squared = [(attend_hardmax(q, k[:n], v[:n]) - target).square().sum(1).mean() for n in draw.ladder]
    return Discrepancy(_numpy(torch.stack(squared)), float(target.square().sum(1).mean()))


def _hardmax_on_the_line(draw: Draw) -> Discrepancy:
    """A query of positive tilt takes the largest token, one of negative tilt the smallest: O(n), any number of tokens."""
    head = draw.plan.head
    y = _numpy(draw.tokens)[:, 0]
    at = np.array(draw.ladder) - 1
    upward = np.cumsum(y * float(head.A) > 0)[at] / (at + 1.0)
    mean = upward * np.maximum.accumulate(y)[at] + (1.0 - upward) * np.minimum.accumulate(y)[at]
    size = float(head.V.double().square().sum())
    return Discrepancy(size * mean**2, size * float(draw.plan.measure.cov))


def _numpy(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().double().cpu().numpy())


OTHERS: dict[str, Callable[[Draw], Discrepancy]] = {
    "l2": _l2,
    "uniform": _uniform,
    "grad_v": _grad_v,
    "grad_u": _grad_u,
    "hardmax": _hardmax,
}
