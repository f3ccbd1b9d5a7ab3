"""The integral over kept keys whose probabilities all differ, key by key, to a relative 1e-4:
compiled, at doubling nodes.

The formulas are those of esscher.errors.integral, with the trapezoid rule in log t of step log 2,
whose aliasing is 9e-5 of the mean squared error at most. From one node to the next t doubles, so
that no exponential is computed but the first: with l = exp(-t eps) - 1,

    exp(-2 t eps) - 1 = l (l + 2),

which keeps the relative precision of l, as the square of exp(-t eps) does its own once that is
small. What lies above a node 2t is bounded by 2 P(t) times a sum of |c|^2 that the node t knows
already. Inner sums are float64; those of values are one product of matrices in float32.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors.curve import QueryErrors
from esscher.errors.integral import TINY, aliasing

STEP = math.log(2.0)
TOL = 2e-6  # of what is cut off at either end, and of float32 products
# log t of the first node, measured from 1 / what is kept on average. There the aliasing, 2 Re
# Gamma(2 - iy) exp(iy log tS) with y = 2 pi / log 2, is 0 where nothing else than the average is
# ever kept.
LOWEST = -6.693294777457927
DEEPER = 3  # nodes further down, where that is not low enough
TRIES = 12
NODES = 72  # of a query at most
QUERIES = 8  # of one task
ROUNDING = 1e-15  # of p w: below it p w is 1
# smaller numbers are nothing, and their products denormal, which takes processors a hundred times
# as long
SLOW = 1e-30
# Sums over the keys of a query. Of sure keys: eps, eps^2, |c|^2, 1. Of all: |B|, p eps, p (1-p)
# eps^2 |c|^2, and the largest |c|^2.
TOTAL, PAIR, SPREAD, COUNT, FIRST, KEPT, SECOND, LARGEST = range(8)
# sums in any order; infinity and NaN stay what they are
FAST = {"reassoc", "contract", "arcp", "nsz"}
# numbers of a node: t, P, whether the vector is in its late form, summed terms, spread, pairs
COLUMNS = 6


def doubling_errors(
    weight: Tensor, near: Tensor, drift: Tensor, distance: Tensor, p: Tensor, w: Tensor | None
) -> tuple[QueryErrors, npt.NDArray[np.bool_]]:
    """Errors at one n, and which of them are known, (m,): a query that needs more than NODES nodes
    is not, and its numbers mean nothing.

    float64, on the CPU: softmax weights (m, N), values (N, d) and limits (m, d) from one origin,
    |c| (m, N), p and w (m, N).
    """
    some, surely, square = p > 0, p == 1, distance.square()
    counted = some.double() if w is None else torch.where(some, w, 0.0)
    all_eps = weight * counted
    # As sum pi c = 0, B = sum p eps c is that of (p w - 1) pi c too, which has no digits to lose
    # where the rule reweights.
    lack = p * counted - 1
    apart = torch.stack(
        [
            torch.where(lack.abs() > ROUNDING, lack * weight, 0.0),
            torch.where(surely, all_eps, 0.0),
        ]
    )
    first, sure = apart @ near - apart.sum(2, keepdim=True) * drift
    columns = (
        apart[1].sum(1),
        apart[1].square().sum(1),
        torch.where(surely, square, 0.0).sum(1),
        surely.sum(1).double(),
        first.norm(dim=1),
        (p * all_eps).sum(1),
        ((1 - p) * p * all_eps.square() * square).sum(1),
        torch.where(some, square, 0.0).amax(1),
    )
    sums = torch.stack(columns, dim=1).numpy()
    # of the keys that chance decides, 0 for the others
    chances, eps = (torch.where(surely, 0.0, x).numpy() for x in (p, all_eps))
    far, values = distance.contiguous().numpy(), near.float()

    def task(start: int) -> tuple[Tensor, ...]:
        """mse, bias, E sum p^2, and which are known, of QUERIES queries."""
        part = slice(start, start + QUERIES)
        m, size = chances[part].shape
        terms, nodes = np.empty((m * NODES, size), np.float32), np.empty((m * NODES, COLUMNS))
        room = (np.empty(size), np.empty(size), np.empty(size))
        counts, known, rows = torch.zeros(m, dtype=torch.int64), torch.zeros(m, dtype=torch.bool), 0
        for i in range(m):
            # each array alone: only then the compiler makes vector operations of the inner sums
            keys = chances[start + i], eps[start + i], far[start + i]
            counts[i], known[i] = _march(keys, sums[start + i], room, terms[rows:], nodes[rows:])
            rows += int(counts[i])
        owner = torch.repeat_interleave(torch.arange(m), counts)
        t, chance, late, summed, spread, pairs = torch.from_numpy(nodes[:rows]).unbind(1)
        base = torch.where(late[:, None] > 0, sure[part][owner], first[part][owner])
        moved = (torch.from_numpy(terms[:rows]) @ values).double()
        vector = base + moved - summed[:, None] * drift[part][owner]
        share = STEP * t * chance
        of_rows = torch.stack(
            [share * t * (vector.square().sum(1) + spread), share * t * pairs], dim=1
        )
        numbers = torch.cat([of_rows, share[:, None] * vector], dim=1)
        found = torch.zeros(m, numbers.shape[1], dtype=torch.float64).index_add_(0, owner, numbers)
        begin = counts.cumsum(0) - counts
        # Below the first node, at t, the bias has t (B - t G) left. Over these nodes the sum of t
        # is that t, and of t^2 a third of its square; the first node says what B - t G is.
        lowest = 2 * first[part] + chance[begin, None] * vector[begin]
        bias = found[:, 2:] + STEP * t[begin, None] * lowest / 3
        return found[:, 0], bias, found[:, 1], known

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(task, range(0, len(p), QUERIES)))
    mse, bias, sum_p2, known = (
        torch.cat(column)[:, None].numpy() for column in zip(*parts, strict=True)
    )
    errors = QueryErrors(
        mse=mse,
        sum_p2=sum_p2,
        limit=drift.numpy(),
        delta=np.full(len(p), np.nan),
        bias=bias,
        accuracy=aliasing(STEP) / 2 + TOL,
    )
    return errors, known[:, 0]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _march(keys: Any, sums: Any, room: Any, terms: Any, nodes: Any) -> tuple[int, bool]:
    """How many nodes one query has, and whether nothing is left on either side of them."""
    second, t = sums[FIRST] ** 2 + sums[SECOND], math.exp(LOWEST) / max(sums[KEPT], TINY)
    for _ in range(TRIES):
        count, found, closed = _upward(keys, sums, t, room, terms, nodes)
        if closed and t * t * second <= 2 * TOL * found + TINY:
            return count, True
        t /= 2**DEEPER
    return count, False


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _upward(
    keys: Any, sums: Any, t: float, room: Any, terms: Any, nodes: Any
) -> tuple[int, float, bool]:
    """Nodes from t up: how many, what of the mean squared error is surely found, and whether
    nothing is left above them.
    """
    p, eps, far = keys
    lost, left, share = room
    for j in range(p.size):
        lost[j], left[j] = math.expm1(-t * eps[j]), math.exp(-t * eps[j])
    found, pairs, rest, rest_pairs = 0.0, 0.0, math.inf, math.inf
    for node in range(NODES):
        product, spread, pair, sum_late, sum_early, above, above_pair = _sums(
            p, eps, far, lost, left, share
        )
        chance = math.exp(-t * sums[TOTAL]) * product
        # of the two forms of the vector the one that float32 rounds less
        is_late = sum_late < -sum_early
        _store(share, p, lost, left, is_late, terms[node])
        _double(lost, left)
        nodes[node, 0], nodes[node, 1], nodes[node, 2] = t, chance, 1.0 if is_late else 0.0
        nodes[node, 3] = sum_late if is_late else sum_early
        nodes[node, 4], nodes[node, 5] = spread, pair + sums[PAIR]
        found += STEP * t * t * chance * spread
        pairs += STEP * t * t * chance * (pair + sums[PAIR])
        if rest <= TOL * found + TINY and rest_pairs <= TOL * pairs + TINY:
            return node + 1, found, True
        # an output is a mean of kept values, so that its error is at most the largest |c|, or the
        # root of their summed squares
        rest = 2 * chance * min(sums[LARGEST], sums[SPREAD] + above)
        rest_pairs = 2 * chance * min(1.0, sums[COUNT] + above_pair)
        t *= 2
    return NODES, found, False


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _sums(
    p: Any, eps: Any, far: Any, lost: Any, left: Any, share: Any
) -> tuple[float, float, float, float, float, float, float]:
    """Over the keys at one node: product of D, spread, pairs, sums of the terms that both forms of
    the vector have.

    The last two: sums of p x / D times |c|^2 and 1. ``lost``: x - 1; ``left``: x; ``share``: gets p
    eps / D.
    """
    product = 1.0
    spread = pair = sum_late = sum_early = above = above_pair = 0.0
    for j in range(p.size):
        stay = 1.0 - p[j]
        d = stay + p[j] * left[j]
        some = p[j] / d
        alive = some * left[j]  # p x / D
        weight = alive * eps[j]
        shed = some * stay * eps[j] * lost[j]
        product *= d
        share[j] = some * eps[j]
        sum_late += weight
        sum_early += shed
        square = far[j] * far[j]
        pair += weight * eps[j]
        spread += weight * eps[j] * stay / d * square
        above += alive * square
        above_pair += alive
    return product, spread, pair, sum_late, sum_early, above, above_pair


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _store(share: Any, p: Any, lost: Any, left: Any, is_late: bool, row: Any) -> None:
    """The terms of one form of the vector, as float32."""
    if is_late:
        for j in range(row.size):
            term = share[j] * left[j]
            row[j] = term if term > SLOW else 0.0
    else:
        for j in range(row.size):
            row[j] = share[j] * (1.0 - p[j]) * lost[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _double(lost: Any, left: Any) -> None:
    """x - 1 and x at the next node."""
    for j in range(lost.size):
        more = lost[j] * (lost[j] + 2.0)
        square = left[j] * left[j] if left[j] > SLOW else 0.0
        left[j] = square if lost[j] < -0.5 else 1.0 + more
        lost[j] = more
