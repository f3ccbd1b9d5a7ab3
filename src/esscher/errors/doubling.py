"""The integral over kept keys whose probabilities all differ, key by key: compiled, at doubling
nodes.

The formulas are those of esscher.errors.integral, with the trapezoid rule in log t of step
log 2 / k as k sequences of nodes. In one sequence t doubles from node to node, so that few
exponentials are computed: with l = exp(-t eps) - 1,

    exp(-2 t eps) - 1 = l (l + 2),

which keeps the relative precision of l, as the square of exp(-t eps) does its own once that is
small. What lies above a node 2t is bounded by 2 P(t) times a sum of |c|^2 that the node t knows
already. With k = 1 the aliasing is 9e-5 of the mean squared error at most, and sums of values are
one product of matrices in float32; with k = 3 it is 1e-16, in float64.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from esscher.errors.curve import QueryErrors
from esscher.errors.integral import HIGHEST, TINY, aliasing

DOUBLE = math.log(2.0)
# Of float32 and of float64: sequences, what is cut off at either end, log t of the first node
# measured from 1 / what is kept on average. At the first of these the aliasing, 2 Re Gamma(2 - iy)
# exp(iy log tS) with y = 2 pi / log 2, is 0 where nothing else than the average is ever kept.
SINGLE, EXACT = (1, 2e-6, -6.693294777457927), (3, 1e-13, -15.0)
DEEPER = 3  # nodes further down, where that is not low enough
NODES = 72  # of a sequence at once
RUNS = 8  # sequences of one task
GONE = -600.0  # log(t eps) that does not count even after NODES doublings
LARGE = 700.0  # exp(700) is a number still
# smaller numbers are nothing, and their products denormal, which takes processors a hundred times
# as long
SLOW = 1e-30
# Of a query. Of sure keys: log sum eps, log of their unit, eps^2 in that unit, |c|^2, 1; and the
# largest |c|^2.
TOTAL, UNIT, PAIR, SPREAD, COUNT, LARGEST = range(6)
# Of a sequence: log t of its next node and of its lowest, what of the mean squared error and of
# the pairs is surely found, bounds on what lies above the next node, and whether that is nothing.
NEXT, LOW, FOUND, PAIRS, REST, REST_PAIRS, CLOSED = range(7)
# Of a node: t, t in the unit of sure keys, P, whether the vector is in its late form, summed terms,
# spread, pairs.
COLUMNS = 7
# sums in any order; infinity and NaN stay what they are
FAST = {"reassoc", "contract", "arcp", "nsz"}


def inclusion_error(
    scores: Tensor, values: Tensor, probability: Tensor, weight: Tensor | None = None
) -> QueryErrors:
    """The error of kept keys to about 1e-13: ``scores``, ``probability``, ``weight`` (m, N),
    ``values`` (N, d); arrays have one n.

    A key that a query does not see has the score -inf and probability 0. A query that keeps no key
    counts as no error.
    """
    # a common offset costs no digits
    near = values.double() - values[len(values) // 2].double()
    drift = torch.softmax(scores.double(), 1) @ near
    distance = torch.cdist(drift, near, compute_mode="donot_use_mm_for_euclid_dist")
    found = doubling_errors(scores, near, drift, distance, probability, weight)
    return replace(found, limit=found.limit + values[len(values) // 2].double().cpu().numpy())


def doubling_errors(
    scores: Tensor,
    near: Tensor,
    drift: Tensor,
    distance: Tensor,
    p: Tensor,
    w: Tensor | None = None,
    *,
    single: bool = False,
) -> QueryErrors:
    """Errors at one n; ``single``: to a relative 5e-5 of the rms error, and faster.

    Scores, |c|, p and w (m, N); values (N, d) and limits (m, d) from one origin; computed on the
    CPU, in float64.
    """
    count, tol, lowest = SINGLE if single else EXACT
    step = DOUBLE / count
    scores, near, drift, distance, p = (
        x.double().cpu() for x in (scores, near, drift, distance, p)
    )
    some, surely, square = p > 0, p == 1, distance.square()
    log_eps = scores if w is None else scores + torch.where(some, w.double().cpu(), 1.0).log()
    log_eps = torch.where(some, log_eps, -torch.inf)
    log_eps = log_eps - _finite(log_eps.amax(1, keepdim=True))
    eps = log_eps.exp()
    log_sure = torch.where(surely, log_eps, -torch.inf)
    unit = _finite(log_sure.amax(1))
    sure_eps = (log_sure - unit[:, None]).exp()
    first, sure = (e @ near - e.sum(1, keepdim=True) * drift for e in (p * eps, sure_eps))  # B, M
    # what the mean squared error and the pairs are over t^2 as t goes to 0
    spread_start = first.square().sum(1) + ((1 - p) * p * eps.square() * square).sum(1)
    second = torch.stack([spread_start, (p * eps.square()).sum(1)], dim=1)
    columns = (
        log_sure.logsumexp(1),
        unit,
        sure_eps.square().sum(1),
        torch.where(surely, square, 0.0).sum(1),
        surely.sum(1).double(),
        torch.where(some, square, 0.0).amax(1),
    )
    of_query = torch.stack(columns, dim=1).numpy()
    start = lowest - (p * eps).sum(1).clamp_min(TINY).log()
    chances = torch.where(surely, 0.0, p).numpy()
    logs, squares = torch.where(surely, -torch.inf, log_eps).numpy(), square.contiguous().numpy()
    kind = torch.float64 if not single else torch.float32
    values = near.to(kind)

    def task(begin: int) -> tuple[Tensor, Tensor]:
        """mse and E sum p^2, (m, 2), and bias, (m, d), of some queries."""
        queries = range(begin, min(begin + max(1, RUNS // count), len(p)))
        runs = [query for query in queries for _ in range(count)]
        state = np.zeros((len(runs), 7))
        state[:, NEXT] = start[runs].numpy() + step * np.tile(np.arange(count), len(queries))
        state[:, LOW], state[:, REST:CLOSED] = state[:, NEXT], math.inf
        terms = torch.empty(len(runs) * NODES, p.shape[1], dtype=kind)
        nodes = np.empty((len(runs) * NODES, COLUMNS))
        grown, lost, left, share = np.empty((4, p.shape[1]))
        numbers = torch.zeros(len(queries), 2, dtype=torch.float64)
        bias, rest = (
            torch.zeros(size, near.shape[1]).double() for size in (len(queries), len(runs))
        )
        todo = dict.fromkeys(range(len(runs)), NODES)  # how many nodes each sequence goes on for
        while todo:
            owner, begins = list[int](), dict[int, int]()
            for run, limit in todo.items():
                at = begins[run] = len(owner)
                query = runs[run]
                # each array alone: only then the compiler makes vector operations of inner sums
                nodes_added = _upward(
                    chances[query],
                    logs[query],
                    squares[query],
                    grown,
                    lost,
                    left,
                    share,
                    of_query[query],
                    state[run],
                    step,
                    tol,
                    terms.numpy()[at : at + limit],
                    nodes[at : at + limit],
                )
                owner += [run] * nodes_added
            rows = torch.tensor([runs[run] for run in owner])
            t, in_unit, chance, late, summed, spread, pairs = torch.from_numpy(
                nodes[: len(owner)]
            ).unbind(1)
            base = torch.where(
                late[:, None] > 0, in_unit[:, None] * sure[rows], t[:, None] * first[rows]
            )
            moved = (terms[: len(owner)] @ values).double()
            vector = base + moved - summed[:, None] * drift[rows]
            numbers_of = torch.stack([vector.square().sum(1) + spread, pairs], dim=1)
            numbers.index_add_(0, rows - begin, step * chance[:, None] * numbers_of)
            bias.index_add_(0, rows - begin, step * chance[:, None] * vector)
            todo = {}
            for run, at in begins.items():
                low, query = state[run, LOW], runs[run]
                below = math.exp(min(2 * low, LARGE)) * second[query]
                if nodes[at, 0] == math.exp(min(low, LARGE)):
                    # Below the first node, at t, the bias has t (B - t G) left. Over these nodes
                    # the sum of t is that t, and of t^2 a third of its square; the first node says
                    # what B - t G is.
                    ends = 2 * t[at] * first[query] + chance[at] * vector[at]
                    rest[run] = step * ends / 3
                if not state[run, CLOSED]:
                    todo[run] = NODES
                elif bool((below > 2 * tol * numbers[query - begin] / count + TINY).any()):
                    state[run, NEXT] = state[run, LOW] = low - DEEPER * DOUBLE
                    todo[run] = DEEPER
        bias.index_add_(0, torch.tensor(runs) - begin, rest)
        return numbers, bias

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(task, range(0, len(p), max(1, RUNS // count))))
    numbers, bias = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    return QueryErrors(
        mse=numbers[:, :1],
        sum_p2=numbers[:, 1:],
        limit=drift.numpy(),
        delta=np.full(len(p), np.nan),
        bias=bias[:, None],
        accuracy=aliasing(step) / 2 + tol,
    )


def _finite(x: Tensor) -> Tensor:
    return torch.where(x > -torch.inf, x, 0.0)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _upward(
    p: Any,
    logs: Any,
    squares: Any,
    grown: Any,
    lost: Any,
    left: Any,
    share: Any,
    query: Any,
    state: Any,
    step: float,
    tol: float,
    terms: Any,
    nodes: Any,
) -> int:
    """How many nodes were added, up to the length of ``nodes``: fewer where nothing is left above
    them.
    """
    log_t = state[NEXT]
    for j in range(p.size):
        u = log_t + logs[j]
        grown[j] = math.exp(min(u, HIGHEST)) if u > GONE else 0.0
        lost[j], left[j] = math.expm1(-grown[j]), math.exp(-grown[j])
    closed = state[CLOSED] > 0.0
    for node in range(len(nodes)):
        product, spread, pair, sum_late, sum_early, above, above_pair = _sums(
            p, squares, grown, lost, left, share
        )
        chance = math.exp(-math.exp(min(log_t + query[TOTAL], LARGE))) * product
        in_unit = math.exp(min(log_t + query[UNIT], HIGHEST))
        pair += in_unit * in_unit * query[PAIR]
        # of the two forms of the vector the one that is rounded less
        is_late = sum_late < -sum_early
        _store(share, p, lost, left, is_late, terms[node])
        _double(grown, lost, left)
        nodes[node, 0], nodes[node, 1] = math.exp(min(log_t, LARGE)), in_unit
        nodes[node, 2], nodes[node, 3] = chance, 1.0 if is_late else 0.0
        nodes[node, 4] = sum_late if is_late else sum_early
        nodes[node, 5], nodes[node, 6] = spread, pair
        state[FOUND] += step * chance * spread
        state[PAIRS] += step * chance * pair
        log_t += DOUBLE
        if closed:  # nodes below the first one
            continue
        state[NEXT] = log_t
        if (
            state[REST] <= tol * state[FOUND] + TINY
            and state[REST_PAIRS] <= tol * state[PAIRS] + TINY
        ):
            state[CLOSED] = 1.0
            return node + 1
        # an output is a mean of kept values, so that its error is at most the largest |c|, or the
        # root of their summed squares
        state[REST] = 2 * chance * min(query[LARGEST], query[SPREAD] + above)
        state[REST_PAIRS] = 2 * chance * min(1.0, query[COUNT] + above_pair)
    return len(nodes)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _sums(
    p: Any, squares: Any, grown: Any, lost: Any, left: Any, share: Any
) -> tuple[float, float, float, float, float, float, float]:
    """Over the keys at one node: product of D, spread, pairs, sums of the terms that both forms of
    the vector have.

    The last two: sums of p x / D times |c|^2 and 1. ``grown``: t eps; ``lost``: x - 1; ``left``: x;
    ``share``: gets p t eps / D.
    """
    product = 1.0
    spread = pair = sum_late = sum_early = above = above_pair = 0.0
    for j in range(p.size):
        stay = 1.0 - p[j]
        d = stay + p[j] * left[j]
        some = p[j] / d
        alive = some * left[j]  # p x / D
        weight = alive * grown[j]
        product *= d
        share[j] = some * grown[j]
        sum_late += weight
        sum_early += share[j] * stay * lost[j]
        pair += weight * grown[j]
        spread += weight * grown[j] * stay / d * squares[j]
        above += alive * squares[j]
        above_pair += alive
    return product, spread, pair, sum_late, sum_early, above, above_pair


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _store(share: Any, p: Any, lost: Any, left: Any, is_late: bool, row: Any) -> None:
    """The terms of one form of the vector."""
    if is_late:
        for j in range(row.size):
            term = share[j] * left[j]
            row[j] = term if term > SLOW else 0.0
    else:
        for j in range(row.size):
            row[j] = share[j] * (1.0 - p[j]) * lost[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _double(grown: Any, lost: Any, left: Any) -> None:
    """t eps, x - 1 and x at the next node."""
    for j in range(lost.size):
        more = lost[j] * (lost[j] + 2.0)
        square = left[j] * left[j] if left[j] > SLOW else 0.0
        left[j] = square if lost[j] < -0.5 else 1.0 + more
        lost[j] = more
        grown[j] = min(2.0 * grown[j], 1000.0)
