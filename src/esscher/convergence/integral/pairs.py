"""Errors of two heads on one random set of keys: they lose the same keys, so that their errors are
correlated.

Key j is kept with probability p_j, for both heads or for neither, and then counts w_j. Head 1 has
eps_j = w_j exp(score_j) and c_j = v_j - limit, head 2 has phi_j and d_j. From 1/(S T) = int int
exp(-s S - t T) ds dt,

  E <e_1, e_2> = int int prod_j D_j ( <sum_j g_j eps_j c_j, sum_j g_j phi_j d_j>
                                      + sum_j (g_j - g_j^2) eps_j phi_j <c_j, d_j> ) ds dt,
  D_j = 1 - p_j + p_j exp(-s eps_j - t phi_j),   g_j = p_j exp(-s eps_j - t phi_j) / D_j,

e the errors of the outputs; where no key is kept there is no output, and no error is counted. With
both heads the same this is the mean squared error of integral.inclusion. First order, at equal
probabilities or reweighted: sum_j (1/p_j - 1) pi_j rho_j <c_j, d_j>, pi and rho the softmax
weights.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["first_order_pair", "pair_error"]

STEP = 0.4  # of log s and log t: the trapezoid rule converges geometrically
SMALL, LARGE = 1e-9, 45.0  # where s S begins and where exp(-s S) ends


def pair_error(
    scores: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    centred: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]],
    probability: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] | None = None,
    *,
    step: float = STEP,
) -> float:
    """E <e_1, e_2> of one query of each head; ``centred``: values minus the limit, in one space."""
    p = probability.double()
    seen = p > 0
    p = p[seen]
    w = torch.ones_like(p) if weight is None else weight.double()[seen]
    eps, phi = (w * torch.exp(one.double()[seen] - one.double()[seen].max()) for one in scores)
    c, d = (values.double()[seen] for values in centred)
    inner = (c * d).sum(1)
    total = 0.0
    across = _nodes(phi, p, step)
    for s in _nodes(eps, p, step).tolist():
        decay = p * torch.exp(-s * eps - across[:, None] * phi)  # (nodes, n)
        denominator = 1 - p + decay
        g = decay / denominator
        first, second = (g * eps) @ c, (g * phi) @ d
        inside = (first * second).sum(1) + (g * (1 - g) * (eps * phi)) @ inner
        product = torch.log(denominator).sum(1).exp()
        total += s * float((across * product * inside).sum())
    return step * step * total


def _nodes(eps: Tensor, p: Tensor, step: float) -> Tensor:
    """From well below 1 / E S to where exp(-s S) is gone, whichever keys are kept: with sure keys
    that is sooner.
    """
    sure = float(eps[p == 1].sum())
    end = LARGE / (sure if sure > 0 else float(eps.min()))
    first = math.log(SMALL / float((p * eps).sum()))
    return torch.exp(
        torch.arange(first, math.log(end) + step, step, dtype=torch.float64, device=eps.device)
    )


def first_order_pair(
    attention: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    centred: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]],
    probability: Float[Tensor, " n"],
) -> float:
    """sum_j (1/p_j - 1) pi_j rho_j <c_j, d_j>; where chances differ, of reweighted keys."""
    p = probability.double().clamp_min(torch.finfo(torch.float64).tiny)
    pi, rho = (weights.double() for weights in attention)
    c, d = (values.double() for values in centred)
    return float(((1 / p - 1) * pi * rho * (c * d).sum(1)).sum())
