"""The largest error of a head over a ball of queries, by gradient ascent from many starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.attention.state import attention_state
from esscher.inputs import as_positive, as_tensor
from esscher.measures.base import Measure

__all__ = ["UniformError", "error_and_gradient", "uniform_error"]

RANDOM_STARTS = 8  # on the sphere, and half as many inside
SINGULAR_STARTS = 3  # right singular directions of A, with both signs
TOKEN_STARTS = 4  # directions that favour the tokens of largest reach, with both signs
SCOUT_STEPS = 8  # with every start
FINISHERS = 4  # the best starts go on
FINISH_STEPS = 60
# of the radius: at a smooth maximum the height is then known to about the square of this
SHORTEST = 1e-5
BLOCK = 1 << 21  # scores held at once


@dataclass(frozen=True)
class UniformError:
    """sup over |x| <= R of |Gamma_n(x) - Gamma(x)|, as found, and the query where it is
    attained.
    """

    error: float
    point: Float64[Tensor, " d_query"]


def uniform_error(
    head: Head,
    measure: Measure,
    tokens: Any,
    radius: Any,
    generator: torch.Generator | None = None,
    *,
    query_inside: bool = False,
) -> UniformError:
    """The largest error of ``head`` on the given tokens over the queries |x| <= ``radius``; a lower
    bound that is attained.

    Projected gradient ascent of |Gamma_n(x) - Gamma(x)|^2 on the ball, with each start's own step
    length. Starts: random points on the sphere and inside, singular directions of A, and the
    directions in which the tokens of largest |A^T y| win the softmax. The quantity is that of the
    uniform bound of [B] (error C(R)/sqrt(n)). In float64; memory flat in n.
    """
    R = as_positive(radius, "radius")
    y = as_tensor(tokens, "tokens", ndim=2, last=head.dim).double().to(measure.device)
    x = _starts(head, y, R, generator)
    x, height = _ascend(head, measure, y, x, R, SCOUT_STEPS, query_inside)
    best = height.topk(min(FINISHERS, height.numel())).indices
    x, height = _ascend(head, measure, y, x[best], R, FINISH_STEPS, query_inside)
    top = int(height.argmax())
    return UniformError(float((2.0 * height[top]).sqrt()), x[top].clone())


def _starts(
    head: Head, y: Tensor, R: float, generator: torch.Generator | None
) -> Float64[Tensor, "starts d_query"]:
    d = head.dim_query
    device = torch.device("cpu") if generator is None else generator.device
    noise = torch.randn(
        RANDOM_STARTS + RANDOM_STARTS // 2,
        d,
        dtype=torch.float64,
        device=device,
        generator=generator,
    ).to(y)
    random = _unit(noise)
    inside = torch.rand(
        RANDOM_STARTS // 2, 1, dtype=torch.float64, device=device, generator=generator
    ).to(y)
    random[RANDOM_STARTS:] *= inside
    A = head.A.to(y)
    singular = torch.linalg.svd(A, full_matrices=False).Vh[:SINGULAR_STARTS]
    pulls = (y - y.mean(dim=0)) @ A
    strongest = pulls.norm(dim=1).topk(min(TOKEN_STARTS, y.shape[0])).indices
    tokens = _unit(pulls[strongest])
    return R * torch.cat([random, singular, -singular, tokens, -tokens])


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, eps=1e-300)


def _ascend(
    head: Head, measure: Measure, y: Tensor, x: Tensor, R: float, steps: int, query_inside: bool
) -> tuple[Tensor, Tensor]:
    """Points after some steps of projected ascent, and |error|^2 / 2 there. A step that does not
    climb is shortened.
    """
    height, slope = error_and_gradient(head, measure, y, x, query_inside=query_inside)
    length = torch.full_like(height, 0.3 * R)
    for _ in range(steps):
        trial = x + length[:, None] * _feasible_direction(x, slope, R)
        trial = trial * (R / trial.norm(dim=1, keepdim=True).clamp_min(R))
        new_height, new_slope = error_and_gradient(
            head, measure, y, trial, query_inside=query_inside
        )
        climbs = new_height > height
        x, slope = (
            torch.where(climbs[:, None], trial, x),
            torch.where(climbs[:, None], new_slope, slope),
        )
        height = torch.where(climbs, new_height, height)
        length = torch.where(climbs, 1.5 * length, 0.4 * length).clamp_max(R)
        if float(length.max()) < SHORTEST * R:
            break
    return x, height


def _feasible_direction(x: Tensor, slope: Tensor, R: float) -> Tensor:
    """The gradient's direction; at the edge without its outward part, which the projection would
    undo.
    """
    outward = (slope * x).sum(dim=1, keepdim=True) / R**2
    at_edge = (x.norm(dim=1, keepdim=True) >= R * (1.0 - 1e-12)) & (outward > 0)
    return _unit(torch.where(at_edge, slope - outward * x, slope))


def error_and_gradient(
    head: Head, measure: Measure, y: Tensor, x: Tensor, *, query_inside: bool = False
) -> tuple[Float64[Tensor, " m"], Float64[Tensor, "m d_query"]]:
    """h = |Gamma_n(x) - Gamma(x)|^2 / 2 for each row x, and its gradient in x.

    With error e and w = V^T e:  grad h = A^T (Cov_n(theta) - Cov(theta)) w, the covariances of the
    tokens under softmax weights and under the tilted law. With the query in its own prompt, of
    weight p:  grad h = A^T ((1-p) Cov_n - Cov) w + p w + p (1-p) <V x + v0 - Gamma_n, e> (A^T (x -
    m_n) + theta), m_n the softmax mean of the tokens.
    """
    theta, V, A = head.tilt(x), head.V.to(x), head.A.to(x)
    state = attention_state(theta, y, y, 1.0)
    mean, weight = state.out, torch.zeros_like(state.lse)
    finite = head.values(mean)
    own = finite
    if query_inside:
        weight = torch.sigmoid((theta * x).sum(dim=1) - state.lse)
        own = head.values(x)
    error = torch.lerp(finite, own, weight[:, None]) - limit(head, measure)(x)
    w = error @ V
    spread = (1.0 - weight)[:, None] * _covariance_times(theta, y, state.lse, mean, w)
    spread = spread - torch.einsum("mij,mj->mi", measure.tilted_cov(theta), w)
    slope = spread @ A
    if query_inside:
        turn = (weight * (1.0 - weight) * ((own - finite) * error).sum(dim=1))[:, None]
        slope = slope + weight[:, None] * w + turn * ((x - mean) @ A + theta)
    return 0.5 * (error * error).sum(dim=1), slope


def _covariance_times(theta: Tensor, y: Tensor, lse: Tensor, mean: Tensor, w: Tensor) -> Tensor:
    """Cov_n(theta) w = sum_j p_j (y_j - m_n) <y_j - m_n, w>, block by block."""
    total = torch.zeros_like(mean)
    step = max(1, BLOCK // theta.shape[0])
    height = (mean * w).sum(dim=1, keepdim=True)
    for start in range(0, y.shape[0], step):
        block = y[start : start + step]
        share = torch.exp(theta @ block.T - lse[:, None]) * (w @ block.T - height)
        total += share @ block - share.sum(dim=1, keepdim=True) * mean
    return total
