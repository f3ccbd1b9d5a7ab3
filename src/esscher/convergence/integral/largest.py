"""The largest softmax weight among n keys drawn independently, in expectation.

Sort the values that a score can take, s_1 < ... < s_L, with probabilities w_l. That no key drawn
exceeds s_l, together with exp(-tS), has the expectation B_l(t)^n, B_l(t) = sum_{i <= l} w_i exp(-t
e_i). So that, ties or not,

    E max_j p_j = int E[e_max exp(-tS)] dt = int sum_l e_l (B_l^n - B_(l-1)^n) dt

where a key drawn twice is two keys that share the largest weight. In tau = log t the trapezoid rule
of step H is wrong by a relative 2 sum_k |Gamma(1 + 2 pi i k / H)| at most, which is below
``aliasing`` of integral.formulas.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

from esscher.convergence.integral.formulas import HIGHEST, Floats, step_for

__all__ = ["largest_weights"]

QUERIES = 8  # of one task
HIDDEN = 40.0  # from t e = 40 on, exp(-te) is nothing
NOTHING = 1e-13
WIDE = 600.0  # exp(-600) is a number still, and exp(604)


def largest_weights(score: Tensor, weight: Tensor, n: Tensor, sum_p2: Floats, tol: float) -> Floats:
    """E max_j p_j, (m, len n), relative error about ``tol``.

    ``score`` (m, L): at most 0, rising along each row; ``weight`` (m, L): of sum 1, 0 for places
    that no key takes. ``sum_p2`` (m, len n): E sum p^2, below which the largest weight never is; it
    says where the integral may begin.
    """
    scores, weights = (x.double().cpu().contiguous().numpy() for x in (score, weight))
    counts, out = n.double().cpu().numpy(), np.zeros_like(sum_p2)
    step = step_for(tol)

    def task(i: int) -> None:
        part = slice(i, i + QUERIES)
        _integrate(scores[part], weights[part], counts, sum_p2[part], step, tol, out[part])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(task, range(0, len(scores), QUERIES)))
    return np.where(counts == 1, 1.0, np.minimum(out, 1.0))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _integrate(
    score: Floats, weight: Floats, n: Floats, floor: Floats, step: float, tol: float, out: Floats
) -> None:
    """Nodes upward from where t E e_max is nothing beside the result to where E exp(-tS) is."""
    begin, log_below = np.empty(n.size), np.empty(score.shape[1])
    for i in range(score.shape[0]):
        taken = np.flatnonzero(weight[i] > 0.0)[::-1]  # from the largest score down
        own, share = score[i][taken], weight[i][taken]
        e, narrow = np.exp(own), own[-1] > -WIDE
        mean = (e * share).sum()
        for k in range(n.size):  # E e_max <= min(1, n E e)
            begin[k] = math.log(tol * floor[i, k] / min(1.0, n[k] * mean))
        tau = step * math.floor(begin.min() / step)
        busy = True
        while busy and tau < 4.0 - own[-1]:
            grown = math.exp(tau) * e if narrow else np.exp(np.minimum(tau + own, HIGHEST))  # t e
            log_all = _transforms(grown, share, log_below)
            busy = False
            for k in range(n.size):
                whole = math.exp(n[k] * log_all)
                if tau >= begin[k] and whole > tol * out[i, k]:
                    out[i, k] += step * _largest(grown, log_below, n[k], whole)
                busy = busy or tau < begin[k] or whole > tol * out[i, k]
            tau += step


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _transforms(grown: Floats, share: Floats, log_below: Floats) -> float:
    """log B_L; and log B_(l-1) for each l, the largest score first. ``grown``: t e; 1 - B is a sum
    without cancellation.
    """
    gap = 0.0
    for j in range(grown.size):
        lost = -math.expm1(-grown[j]) if grown[j] < HIDDEN else 1.0
        gap += share[j] * lost
        log_below[j] = share[j] * (1.0 - lost)
    log_all = math.log1p(-min(gap, 1.0))
    for j in range(grown.size):
        if log_below[j] > 0.0:
            gap += log_below[j]
            log_below[j] = math.log1p(-gap) if gap < 1.0 else -math.inf
        else:
            log_below[j] = log_all if j == 0 else log_below[j - 1]
    log_below[grown.size - 1] = -math.inf
    return log_all


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _largest(grown: Floats, log_below: Floats, n: float, whole: float) -> float:
    """sum_l t e_l (B_l^n - B_(l-1)^n) from the top down; ``whole``: B_L^n."""
    total, above, last = 0.0, whole, math.nan
    for j in range(grown.size):
        if log_below[j] == last:
            continue
        last = log_below[j]
        below = math.exp(n * last)
        total += grown[j] * (above - below)
        above = below
        if above <= NOTHING * whole:
            break
    return total
