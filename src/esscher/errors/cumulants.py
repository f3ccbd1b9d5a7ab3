"""The integral over kept keys for float32 inputs: most keys by powers of t, the others one by one,
compiled.

By the time that all that is kept weighs enough for prod_j D_j to be nothing, at t = T, most keys
have t eps_j below 1 still. Of such slow keys log D and its derivatives are series in t whose
coefficients are the cumulants kappa_k of a key that is kept with probability p,

    log D = sum_k kappa_k (-t eps)^k / k!,     kappa_1 = p, kappa_2 = p (1 - p), ...
    g = -d log D / dt,     g eps - g^2 = d^2 log D / dt^2,

which converge for t eps < pi at least. So they are a few sums over keys, of which those with values
are one product of matrices, in place of sums at every node. A sure key is slow at any t: of its
cumulants only the first is not 0. The other keys, few where many are kept, are summed at nodes that
double (esscher.errors.doubling).

As sum_j e_j c_j = 0, sum_j p_j eps_j c_j is the same as sum_j (p_j w_j - b) e_j c_j for any b: with
the b of most keys nothing is left to cancel in float32.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from esscher.errors.integral import TINY, aliasing

if TYPE_CHECKING:
    from esscher.errors.doubling import Keys

DOUBLE = math.log(2.0)
TOL = 2e-6  # what is cut off at either end
ACCURACY = aliasing(DOUBLE) / 2 + TOL
# log t of the first node, measured from 1 / what is kept on average: there the aliasing,
# 2 Re Gamma(2 - iy) exp(iy log tS) with y = 2 pi / log 2, is 0 where nothing else is ever kept
LOWEST = -6.693294777457927
DEEPER = 3  # nodes further down, where that is not low enough
NODES = 64  # of a query at most
ORDER = 4  # powers of t that are summed
FEWER = 2e-6  # of the spread: sums with values of powers that count less are left out
SLOW = 1.0  # t eps at T of a slow key
BEYOND = 2.0  # of T: where a sum goes on so far, its T was too small
LIGHT, LATE = 1e-25, 1e12  # of the largest weight, and of 1 / what is kept: left to float64
LEAST, MOST, MORE = 16.0, 60.0, 12.0  # bounds of -log of what is nothing, and more of it
# What is said of a query: what is kept on average, b, T in units of 1 / what is kept; then what
# pairs and each squared length are over t^2 as t goes to 0.
KEPT, USUAL, END, START = range(4)
# Rows that values are summed with: p eps of slow keys, their powers, and (p w - b) e.
BASE, POWER, FIRST, ROWS = 0, 1, 1 + ORDER, 2 + ORDER
# Of a node: t, prod D, then pairs and each spread.
SUMMED = 2
# 1, 2, 1/2, what t eps stops at, and numbers so small that they are nothing, and their products
# denormal, which takes processors a hundred times as long: in the precision of the sums
CONSTANTS = (1.0, 2.0, 0.5, 1000.0, 1e-30)
SAME = 1e-13  # difference of p w that is rounding
# sums in any order; infinity and NaN stay what they are
FAST = {"reassoc", "contract", "arcp", "nsz"}


def block(keys: Keys, p: Tensor, w: Tensor | None, least: float = LEAST) -> tuple[Tensor, Tensor]:
    """E sum p^2 and mean squared errors, (m, 1 + K), and bias, (m, d), of some queries; NaN where
    float32 does not tell. ``least``: -log of what is nothing.
    """
    m, lengths, count = keys.squares.shape
    squares, largest = keys.squares.numpy(), keys.largest.numpy()
    weights, factors = keys.weights.numpy(), np.empty((m, 0)) if w is None else w.numpy()
    (relative, chance, theta), rows, fast = _space(threading.get_ident(), m, count)
    many = np.zeros(m, dtype=np.int64)
    numbers, slow = np.zeros((m, START + 1 + lengths)), np.zeros((m, 1 + lengths + 1, ORDER + 1))
    used = np.zeros(ROWS, dtype=np.bool_)
    # fmt: off
    _split(
        weights, squares, largest, p.numpy(), factors, relative, chance, theta, rows.numpy(), fast,
        many, numbers, slow, used, least,
    )
    # fmt: on
    sums = keys.drift.new_zeros(ROWS, *keys.drift.shape)
    some = slice(0 if used[BASE] else 1, int(used[:FIRST].nonzero()[0].max(initial=0)) + 1)
    total = rows[some].sum(2, keepdim=True).double()
    moved = (rows[some].flatten(0, 1) @ keys.values).double()
    sums[some] = moved.view(-1, *keys.drift.shape) - total * keys.drift
    first, every = sums[FIRST], torch.arange(m)
    if used[FIRST]:  # in float64: where errors are small, what is kept surely cancels
        at = rows[FIRST].any(0).nonzero()[:, 0]
        e = (keys.scores[:, at] - keys.scores.amax(1, keepdim=True)).exp_()
        e *= p[:, at] * (1.0 if w is None else w[:, at]) - torch.from_numpy(numbers[:, USUAL, None])
        first += keys.around(e / torch.from_numpy(numbers[:, KEPT, None]), at)
    start = torch.from_numpy(numbers[:, START:])
    start[:, 1:] += keys.lengths(first, every)
    found, bias = torch.full_like(start, math.nan), torch.zeros_like(keys.drift)
    low = np.full(m, LOWEST)
    todo = np.flatnonzero((numbers[:, KEPT] > LIGHT) & (numbers[:, END] < LATE))
    while len(todo):
        nodes = np.empty((len(todo) * NODES, SUMMED + 1 + lengths))
        vectors, ends = np.empty((len(nodes), first.shape[1])), np.zeros_like(todo)
        # fmt: off
        _march(
            todo, low, squares, largest, relative, chance, fast, many, numbers, slow,
            keys.values.numpy(), keys.drift.numpy(), sums.numpy(), nodes, vectors, ends,
        )
        # fmt: on
        every_node = slice(int(ends.sum()))
        table, vector = torch.from_numpy(nodes[every_node]), torch.from_numpy(vectors[every_node])
        own = torch.from_numpy(np.repeat(todo, ends))
        t, product = table[:, :SUMMED, None].unbind(1)
        terms = table[:, SUMMED:]
        terms[:, 1:] += keys.lengths(vector, own)
        found[todo], bias[todo] = 0.0, 0.0
        found.index_add_(0, own, DOUBLE * product * terms)
        bias.index_add_(0, own, DOUBLE * product * vector)
        # Below the first node, at t, the bias has t (B - t G) left. Over these nodes the sum of t
        # is that t, and of t^2 a third of its square; the first node says what B - t G is.
        low_end = torch.from_numpy(np.cumsum(ends) - ends)
        half = 2 * t[low_end] * first[todo] + product[low_end] * vector[low_end]
        bias[todo] += DOUBLE / 3 * half
        below = torch.from_numpy(np.exp(2 * low[todo]))[:, None] * start[todo]
        found[numbers[:, KEPT] == 0] = math.nan
        missed = (below > 2 * TOL * found[todo] + TINY).any(1).numpy()
        todo = todo[missed]
        low[todo] -= DEEPER * DOUBLE
    again = torch.from_numpy(np.flatnonzero(numbers[:, KEPT] == 0))
    if least < MOST and len(again):
        factor = None if w is None else w[again]
        more = block(keys.take(again), p[again], factor, least + MORE)
        found[again], bias[again] = more
    return found, bias


@lru_cache(maxsize=4)
def _space(_thread: int, m: int, count: int) -> tuple[Any, Tensor, Any]:
    """Room of one thread for numbers of each key: fresh memory is slow."""
    each = np.empty((3, m, count), dtype=np.float32)
    return each, torch.empty(ROWS, m, count), np.empty((m, count), dtype=np.int32)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _split(
    weights: Any,
    squares: Any,
    largest: Any,
    p: Any,
    w: Any,
    relative: Any,
    chance: Any,
    theta: Any,
    rows: Any,
    fast: Any,
    many: Any,
    numbers: Any,
    slow: Any,
    used: Any,
    least: float,
) -> None:
    """Of each query: eps over what is kept on average and p, (m, N); which keys are fast; T; the
    ``rows`` (ROWS, m, N) that values are summed with, those of slow keys in units of T,
    and which of them are ``used``; and the series of log D, pairs and spreads.
    """
    for i in range(len(weights)):
        factor = w[i] if w.size else w[0]
        mean, usual = _mean(weights[i], p[i], factor)
        numbers[i, KEPT], numbers[i, USUAL] = mean, usual
        if not mean > LIGHT:
            numbers[i, KEPT] = math.nan
            continue
        _measure(weights[i], p[i], factor, 1 / mean, usual, relative[i], chance[i], rows[FIRST, i])
        numbers[i, START] = _dot(chance[i], relative[i], relative[i])
        nothing = 0.0
        for k in range(squares.shape[1]):
            start = _spread(relative[i], chance[i], squares[i, k])
            numbers[i, START + 1 + k] = start
            ratio = largest[i, k] / (start + TINY) if start > 0 else 1.0
            nothing = max(nothing, math.log(2 * max(ratio, 1.0) / TOL))
        nothing = min(max(nothing, least), MOST)
        end = nothing
        while end < LATE:
            reached = _exponent(relative[i], chance[i], end)
            if reached >= nothing:
                break
            end *= max(1.1, min(nothing / reached, 4.0))
        numbers[i, END] = end
        last = SLOW / end
        # fmt: off
        _powers(
            relative[i], chance[i], last, end, theta[i], rows[POWER, i], rows[POWER + 1, i],
            rows[POWER + 2, i], rows[POWER + 3, i],
        )
        # fmt: on
        _late(theta[i], chance[i], 1 / end, rows[BASE, i])
        for j in range(len(relative[i])):
            if relative[i, j] > last and 0 < chance[i, j] < 1:
                fast[i, many[i]] = j
                many[i] += 1
        used[FIRST] |= _size(rows[FIRST, i]) > 0
        used[BASE] |= many[i] > 0
        for k in range(ORDER):
            slow[i, 0, k + 1] = _sum(rows[POWER + k, i])
            slow[i, 1, k + 1] = product_of(rows[POWER + k, i], theta[i])
            for length in range(squares.shape[1]):
                slow[i, 2 + length, k] = product_of(rows[POWER + k, i], squares[i, length])
        for k in range(ORDER):
            counts = (k + 1) * (k + 2) * abs(slow[i, 2, k]) / end**k
            used[POWER + k] |= counts > FEWER * slow[i, 2, 0]
        slow[i, 0, 0] = product_of(chance[i], theta[i])
        slow[i, 1, 0] = _dot(chance[i], theta[i], theta[i])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _mean(weight: Any, p: Any, w: Any) -> tuple[float, float]:
    """What is kept on average; p w of the first key that is left to chance."""
    mean, usual = 0.0, 1.0
    if w.size:
        for j in range(p.size):
            mean += p[j] * w[j] * weight[j]
    else:
        for j in range(p.size):
            mean += p[j] * weight[j]
    for j in range(p.size):
        if 0 < p[j] < 1:
            usual = p[j] * (w[j] if w.size else 1.0)
            break
    return mean, usual


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _measure(
    weight: Any, p: Any, w: Any, unit: float, usual: float, relative: Any, chance: Any, row: Any
) -> None:
    """eps, p and, unless it is rounding, (p w - usual) e in float32."""
    if w.size:
        for j in range(p.size):
            own = weight[j] * unit
            relative[j], chance[j] = min(own * w[j], 1e30), p[j]
            apart = p[j] * w[j] - usual
            row[j] = apart * own if abs(apart) > SAME else 0.0
    else:
        for j in range(p.size):
            own = weight[j] * unit
            relative[j], chance[j] = own, p[j]
            row[j] = (p[j] - usual) * own


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _spread(relative: Any, p: Any, square: Any) -> float:
    one = np.float32(1.0)
    total = one - one
    for j in range(p.size):
        total += p[j] * (one - p[j]) * relative[j] * relative[j] * square[j]
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _exponent(relative: Any, p: Any, t: float) -> float:
    """Less than -log prod D: with u = p (1 - x), -log D >= u + u^2 / 2, and 1 / x >= 1 + y + y^2 /
    2, y = t eps.
    """
    one, half, top, time = np.float32(1.0), np.float32(0.5), np.float32(1e6), np.float32(t)
    total = one - one
    for j in range(p.size):
        y = relative[j] * time
        more = min(y, top)
        more += half * more * more
        u = p[j] * more / (one + more)
        total += y if p[j] == one else u + half * u * u
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _powers(
    relative: Any,
    p: Any,
    last: float,
    end: float,
    theta: Any,
    second: Any,
    third: Any,
    fourth: Any,
    fifth: Any,
) -> None:
    """t eps of slow keys at T, 0 of others, and its powers times the cumulants."""
    one, two, six, twelve = np.float32(1.0), np.float32(2.0), np.float32(6.0), np.float32(12.0)
    edge, time = np.float32(last), np.float32(end)
    for j in range(p.size):
        own = relative[j] * time if relative[j] <= edge or p[j] == one else one - one
        square, both = own * own, p[j] * (one - p[j])
        odd = both * (one - two * p[j])
        theta[j] = own
        second[j] = both * square
        third[j] = odd * square * own
        fourth[j] = both * (one - six * both) * square * square
        fifth[j] = odd * (one - twelve * both) * square * square * own


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _late(theta: Any, p: Any, unit: float, row: Any) -> None:
    """p eps of slow keys."""
    factor = np.float32(unit)
    for j in range(p.size):
        row[j] = factor * p[j] * theta[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _sum(a: Any) -> float:
    total = a[0]
    for j in range(1, a.size):
        total += a[j]
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _size(a: Any) -> float:
    total = abs(a[0])
    for j in range(1, a.size):
        total += abs(a[j])
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def product_of(a: Any, b: Any) -> float:
    total = a[0] * b[0]
    for j in range(1, a.size):
        total += a[j] * b[j]
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _dot(a: Any, b: Any, c: Any) -> float:
    total = a[0] * b[0] * c[0]
    for j in range(1, a.size):
        total += a[j] * b[j] * c[j]
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _march(
    todo: Any,
    low: Any,
    squares: Any,
    largest: Any,
    relative: Any,
    chance: Any,
    fast: Any,
    many: Any,
    numbers: Any,
    slow: Any,
    values: Any,
    drift: Any,
    sums: Any,
    nodes: Any,
    vectors: Any,
    ends: Any,
) -> None:
    """The nodes of each query to do: t, prod D, pairs and spreads, and the vector."""
    lengths, width = squares.shape[1], values.shape[1]
    constants = np.array(CONSTANTS, dtype=np.float32)
    above, state = np.empty(1 + lengths), np.empty(1 + lengths)
    moved, factors = np.empty(width, dtype=np.float32), np.empty(ORDER + 1)
    row = 0
    for at in range(len(todo)):
        i, count = todo[at], many[todo[at]]
        p, eps = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
        square = np.empty((lengths, count), dtype=np.float32)
        for f in range(count):
            p[f], eps[f] = chance[i, fast[i, f]], relative[i, fast[i, f]]
            for k in range(lengths):
                square[k, f] = squares[i, k, fast[i, f]]
        term = np.empty(count, dtype=np.float32)
        t = math.exp(low[i])
        grown, share, spreading, alive = eps * np.float32(t), p * p, p * p, p * p
        left, lost = np.exp(-grown), np.expm1(-grown)
        above[:], state[:] = math.inf, 0.0
        for node in range(NODES):
            y, power = t / numbers[i, END], 1.0
            for k in range(ORDER + 1):  # (-1)^k / k! y^(k + 1)
                power *= y / max(k, 1) * (-1.0 if k else 1.0)
                factors[k] = power
            product, pair, sum_late, sum_early = 1.0, 0.0, 0.0, 0.0
            if count:
                product, pair, sum_late, sum_early, _ = sums_at_node(
                    p, grown, lost, left, share, spreading, alive, constants
                )
            log = 0.0
            for k in range(ORDER + 1):
                log -= factors[k] / (k + 1) * slow[i, 0, k]
                pair += factors[k] * y * slow[i, 1, k]
            product *= math.exp(min(log, 0.0))
            is_late = sum_late < -sum_early
            own, total = vectors[row], 0.0
            moved[:] = 0
            if count:
                store(share, p, lost, left, is_late, constants, term)
                _mix(term, values, fast[i], moved)
                total = sum_late if is_late else sum_early
            for c in range(width):
                own[c] = t * sums[BASE if is_late else FIRST, i, c]
                own[c] += moved[c] - total * drift[i, c]
                for k in range(1, ORDER + 1):
                    own[c] += factors[k] * sums[POWER + k - 1, i, c]
            nodes[row, 0], nodes[row, 1] = t, product
            done = True
            for k in range(1 + lengths):
                found, most = pair, 1.0
                if k:
                    found, most = 0.0, largest[i, k - 1]
                    if count:
                        found = product_of(spreading, square[k - 1])
                    for j in range(ORDER):
                        found += factors[j] * y * slow[i, 1 + k, j]
                nodes[row, SUMMED + k] = found
                state[k] += DOUBLE * product * found
                done = done and above[k] <= TOL * state[k] + TINY
                above[k] = 2 * product * most
            row += 1
            ends[at] = node + 1
            if done:
                break
            if t > BEYOND * numbers[i, END] or node == NODES - 1:
                numbers[i, KEPT] = 0.0  # not known
                break
            t *= 2
            if count:
                double(grown, lost, left, constants)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _mix(term: Any, values: Any, index: Any, moved: Any) -> None:
    """moved = sum_f term_f values[index_f], four at once."""
    moved[:] = 0
    whole = term.size // 4 * 4
    for f in range(0, whole, 4):
        i, j, k, n = index[f], index[f + 1], index[f + 2], index[f + 3]
        a, b, d, e = term[f], term[f + 1], term[f + 2], term[f + 3]
        for c in range(moved.size):
            moved[c] += a * values[i, c] + b * values[j, c] + d * values[k, c] + e * values[n, c]
    for f in range(whole, term.size):
        for c in range(moved.size):
            moved[c] += term[f] * values[index[f], c]


# ---- Sums over keys at one node, in either precision.


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def sums_at_node(
    p: Any, grown: Any, lost: Any, left: Any, share: Any, spreading: Any, alive: Any, constants: Any
) -> tuple[float, float, float, float, float]:
    """Over the keys at one node: product of D, pairs, sums of the terms that both forms of the
    vector have, sum of p x / D.

    ``share`` gets p t eps / D, ``spreading`` what |c|^2 counts in the spread, ``alive`` p x / D.
    """
    one, product = constants[0], 1.0
    pair = sum_late = sum_early = above = one - one
    for j in range(p.size):
        stay = one - p[j]
        inverse = one / (stay + p[j] * left[j])
        alive[j] = p[j] * left[j] * inverse
        share[j] = p[j] * grown[j] * inverse
        weight = alive[j] * grown[j]
        spreading[j] = weight * grown[j] * stay * inverse
        product *= 1.0 + np.float64(p[j] * lost[j])  # float32 would lose digits in a long product
        sum_late += weight
        sum_early += share[j] * stay * lost[j]
        pair += weight * grown[j]
        above += alive[j]
    return product, pair, sum_late, sum_early, above


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def store(
    share: Any, p: Any, lost: Any, left: Any, is_late: bool, constants: Any, row: Any
) -> None:
    """The terms of one form of the vector."""
    one, small = constants[0], constants[4]
    if is_late:
        for j in range(row.size):
            term = share[j] * left[j]
            row[j] = term if term > small else one - one
    else:
        for j in range(row.size):
            row[j] = share[j] * (one - p[j]) * lost[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def double(grown: Any, lost: Any, left: Any, constants: Any) -> None:
    """t eps, x - 1 and x at the next node."""
    one, two, half, most, small = constants
    for j in range(lost.size):
        more = lost[j] * (lost[j] + two)
        square = left[j] * left[j] if left[j] > small else one - one
        left[j] = square if lost[j] < -half else one + more
        lost[j] = more
        grown[j] = min(two * grown[j], most)
