"""The integral over kept keys for float32 inputs: most keys by powers of t, the others one by one,
compiled.

By the time that all that is kept weighs enough for prod_j D_j to be nothing, at t = T, most keys
have t eps_j below 1 still. Of such slow keys log D and its derivatives are series in t whose
coefficients are the cumulants kappa_k of a key that is kept with probability p,

    log D = sum_k kappa_k (-t eps)^k / k!,     kappa_1 = p, kappa_2 = p (1 - p), ...
    g = -d log D / dt,     g eps - g^2 = d^2 log D / dt^2,

which converge for t eps < pi at least. So they are a few sums over keys, of which those with values
are one product of matrices, in place of sums at every node. A sure key is slow at any t: of its
cumulants only the first is not 0. Of the other keys, few where many are kept, the sums of powers
are found octave by octave of eps: at a node the octaves below ``NEAR`` count by their powers, those
above key by key, as t doubles from node to node (esscher.errors.doubling).

A ladder of sizes at which the keys left to chance all have one probability shares these sums:
cumulants are numbers then, and eps changes by a factor.

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
from esscher.errors.scatter import FAST, mix

if TYPE_CHECKING:
    from esscher.errors.doubling import Keys
    from esscher.keep.rule import Scales

DOUBLE = math.log(2.0)
TOL = 2e-6  # what is cut off at either end
ACCURACY = aliasing(DOUBLE) / 2 + TOL
# log t of the first node, measured from 1 / what is kept on average: there the aliasing,
# 2 Re Gamma(2 - iy) exp(iy log tS) with y = 2 pi / log 2, is 0 where nothing else is ever kept
LOWEST = -6.693294777457927
DEEPER = 3  # nodes further down, where that is not low enough
NODES = 64  # of a query at most
ORDER = 5  # powers of t that are summed
FEWER = 2e-6  # of the spread: sums with values of powers that count less are left out
SLOW = 1.0  # t eps at T of a slow key
# t eps up to which powers count at a node: NEAR, and more where P is below exp(-FADED), in
# proportion to -log P, up to SLOW
NEAR, FADED = 0.25, 4.0
OCTAVES = 10  # of keys that are not slow; beyond them keys count by themselves at every node
BEYOND = 2.0  # of T: where a sum goes on so far, its T was too small
LIGHT, LATE = 1e-25, 1e12  # of the largest weight, and of 1 / what is kept: left to float64
LEAST, MOST, MORE = 16.0, 60.0, 12.0  # bounds of -log of what is nothing, and more of it
# Of a query, in units of what is kept on average: that itself, b, T, the first size with a T; of
# sure keys sum eps and sum eps^2; then of the others sum p eps^2 and, of each squared length,
# sum p (1 - p) eps^2 |c|^2, without p where one p is for all.
KEPT, USUAL, END, FROM, SURE, PAIR, CHANCE = range(7)
# Of a size: eps of keys left to chance, and of sure keys, over those of the first size; what of the
# first vector the early and the late form have; then pairs and each squared length over t^2 as t
# goes to 0.
RATIO, UNIT, EARLY, LATER, START = range(5)
# Rows that values are summed with: powers of t eps of slow keys at T, and (p w - b) e.
FIRST, ROWS = ORDER, ORDER + 1
# 1, 2, 1/2, what t eps stops at, and numbers so small that they are nothing, and their products
# denormal, which takes processors a hundred times as long: in the precision of the sums
CONSTANTS = (1.0, 2.0, 0.5, 1000.0, 1e-30)
SAME = 1e-13  # difference of p w that is rounding


def block(keys: Keys, chances: Scales, least: float = LEAST) -> tuple[Tensor, Tensor]:
    """E sum p^2 and mean squared errors, (m, S, 1 + K), and bias, (m, S, d), of some queries; NaN
    where float32 does not tell. More than one size: of keys with one chance for all, which rises.
    ``least``: -log of what is nothing.
    """
    m, lengths, count = keys.squares.shape
    squares, largest = keys.squares.numpy(), keys.largest.numpy()
    factors = np.empty((m, 0)) if chances.weight is None else chances.weight.double().numpy()
    (relative, chance, theta), rows, fast = _space(threading.get_ident(), m, count)
    factor, sizes = chances.factor.contiguous().numpy(), chances.factor.shape[1]
    shares = factor[0] if sizes > 1 else np.empty(0)
    many = np.zeros(m, dtype=np.int64)
    numbers = np.zeros((m, CHANCE + 1 + lengths))
    of_size = np.zeros((m, sizes, START + 1 + lengths))
    slow, used = np.zeros((m, 2 + lengths, ORDER)), np.zeros(ROWS, dtype=np.bool_)
    # fmt: off
    _split(
        keys.weights.numpy(), squares, largest, chances.gain.numpy(), factor, factors, shares,
        chances.reweight, relative, chance, theta, rows.numpy(), fast, many, numbers, of_size, slow,
        used, least,
    )
    # fmt: on
    sums = keys.drift.new_zeros(ROWS, *keys.drift.shape)
    some = slice(0 if used[0] else 1, int(used[:FIRST].nonzero()[0].max(initial=0)) + 1)
    total = rows[some].sum(2, keepdim=True).double()
    moved = (rows[some].flatten(0, 1) @ keys.values).double()
    sums[some] = moved.view(-1, *keys.drift.shape) - total * keys.drift
    if used[FIRST]:  # in float64: where errors are small, what is kept surely cancels
        at = rows[FIRST].any(0).nonzero()[:, 0]
        e = (keys.scores[:, at] - keys.scores.amax(1, keepdim=True)).exp_()
        if sizes > 1:
            e *= chances.gain[:, at] == torch.inf
        else:
            p, w = chances._replace(gain=chances.gain[:, at], weight=None).at(0)
            w = w if chances.weight is None else chances.weight[:, at]
            e *= p * (1.0 if w is None else w) - torch.from_numpy(numbers[:, USUAL, None])
        sums[FIRST] = keys.around(e / torch.from_numpy(numbers[:, KEPT, None]), at)
    found, bias = (
        np.full((m, sizes, 1 + lengths), math.nan),
        np.zeros((m, sizes, keys.near.shape[1])),
    )
    roots, heads = keys.padded_roots
    # fmt: off
    _march(
        squares, largest, relative, chance, shares, fast, many, numbers, of_size, slow,
        keys.values.numpy(), keys.drift.numpy(), sums.numpy(), roots, heads, found, bias,
    )
    # fmt: on
    again = np.flatnonzero(np.isinf(found).any((1, 2)))
    found[np.isinf(found)] = math.nan
    if least < MOST and len(again):
        rest = torch.from_numpy(again)
        more = block(keys.take(rest), chances.take(rest), least + MORE)
        lost = np.isnan(found[again]).any(2, keepdims=True)
        for old, new in zip((found, bias), more, strict=True):
            old[again] = np.where(lost, new.numpy(), old[again])
    return torch.from_numpy(found), torch.from_numpy(bias)


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
    gain: Any,
    factor: Any,
    w: Any,
    shares: Any,
    reweight: bool,
    relative: Any,
    chance: Any,
    theta: Any,
    rows: Any,
    fast: Any,
    many: Any,
    numbers: Any,
    of_size: Any,
    slow: Any,
    used: Any,
    least: float,
) -> None:
    """Of each query: eps over what is kept on average and p, (m, N); which keys are fast; T; the
    ``rows`` (ROWS, m, N) that values are summed with, those of slow keys in units of T,
    and which of them are ``used``; the series of log D, pairs and spreads; and what changes from
    size to size.
    """
    sizes, lengths = of_size.shape[1], squares.shape[1]
    one_for_all = shares.size > 0
    for i in range(len(weights)):
        weight, own, last = w[i], numbers[i], sizes
        lost = _chances(gain[i], factor[i, 0], chance[i])
        mean, usual = _mean(weights[i], chance[i], weight, reweight)
        own[KEPT], own[USUAL], own[FROM] = mean, usual, last
        if lost or not mean > LIGHT:
            continue
        _measure(
            weights[i], chance[i], weight, reweight, 1 / mean, usual, relative[i], rows[FIRST, i]
        )
        own[CHANCE] = _dot(chance[i], relative[i], relative[i])
        for k in range(lengths):
            own[CHANCE + 1 + k] = _spread(relative[i], chance[i], squares[i, k])
        if one_for_all:
            own[SURE], own[PAIR] = _sure(relative[i], chance[i], rows[FIRST, i])
            own[CHANCE] = (own[CHANCE] - own[PAIR]) / shares[0]
            for k in range(lengths):
                own[CHANCE + 1 + k] /= shares[0] * (1 - shares[0])
        for s in range(sizes):
            share = shares[s] if one_for_all else -1.0
            size, both = of_size[i, s], 1.0
            size[RATIO], size[UNIT], size[EARLY], size[LATER] = 1.0, 1.0, 1.0, 0.0
            size[START] = own[CHANCE]
            if one_for_all:
                both = share if reweight else share / shares[0]
                grown = 1.0 if reweight else both
                size[UNIT] = 1 / (grown * (1 - own[SURE]) + own[SURE])
                size[RATIO] = size[UNIT] * (shares[0] / share if reweight else 1.0)
                size[LATER] = size[UNIT]
                size[EARLY] = size[UNIT] * (1 - (1.0 if reweight else share))
                both = share * (1 - share)
                size[START] = share * size[RATIO] ** 2 * own[CHANCE] + size[UNIT] ** 2 * own[PAIR]
            nothing = 0.0
            for k in range(lengths):
                start = both * size[RATIO] ** 2 * own[CHANCE + 1 + k]
                size[START + 1 + k] = start
                ratio = largest[i, k] / (start + TINY) if start > 0 else 1.0
                nothing = max(nothing, math.log(2 * max(ratio, 1.0) / TOL))
            if last < sizes:
                continue
            nothing = min(max(nothing, least), MOST)
            end = nothing
            while end < LATE:
                reached = _exponent(relative[i], chance[i], end, size[RATIO], size[UNIT], share)
                if reached >= nothing:
                    own[FROM] = last = s
                    break
                end *= max(1.1, min(nothing / reached, 4.0))
            own[END] = end * size[RATIO]
        if last == sizes:
            continue
        edge = SLOW / own[END]
        # fmt: off
        _powers(
            relative[i], chance[i], edge, own[END], one_for_all, theta[i], rows[0, i], rows[1, i],
            rows[2, i], rows[3, i], rows[4, i],
        )
        # fmt: on
        for j in range(len(relative[i])):
            if relative[i, j] > edge and 0 < chance[i, j] < 1:
                fast[i, many[i]] = j
                many[i] += 1
        used[FIRST] |= _size(rows[FIRST, i]) > 0
        used[0] |= many[i] > 0
        for k in range(ORDER):
            slow[i, 0, k] = _sum(rows[k, i])
            slow[i, 1, k] = product_of(rows[k, i], theta[i])
            for length in range(lengths if k else 0):
                slow[i, 2 + length, k] = product_of(rows[k, i], squares[i, length])
        for k in range(1, ORDER):
            counts = k * (k + 1) * abs(slow[i, 2, k]) / own[END] ** (k - 1)
            used[k] |= counts > FEWER * slow[i, 2, 1]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _chances(gain: Any, factor: float, p: Any) -> int:
    """p, and of how many keys float32 does not tell it from 1."""
    one, zero, most, edge, lost = np.float32(1.0), np.float32(0.0), np.inf, 1.0 - 1e-7, 0
    for j in range(p.size):
        q = gain[j] * factor  # 0 times infinity is never kept
        part = np.float32(min(q, edge)) if q > 0 else zero
        sure = q >= 1 or gain[j] == most
        p[j] = one if sure else part
        lost += 1 if q > edge and not sure else 0
    return lost


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _mean(weight: Any, p: Any, w: Any, reweight: bool) -> tuple[float, float]:
    """What is kept on average; p w of the first key that is left to chance."""
    mean, usual = 0.0, 1.0
    if reweight:
        for j in range(p.size):
            mean += weight[j] * (p[j] > 0)
        return mean, usual
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
    weight: Any,
    p: Any,
    w: Any,
    reweight: bool,
    unit: float,
    usual: float,
    relative: Any,
    row: Any,
) -> None:
    """eps and, unless it is rounding, (p w - usual) e in float32."""
    most, zero, scale = np.float32(1e30), np.float32(0.0), np.float32(unit)
    if reweight:
        for j in range(p.size):
            own = weight[j] * scale
            relative[j] = min(own / p[j], most) if p[j] > zero else zero
            row[j] = zero if p[j] > zero else -own
    elif w.size:
        for j in range(p.size):
            own = weight[j] * unit
            relative[j] = min(own * w[j], 1e30)
            apart = p[j] * w[j] - usual
            row[j] = apart * own if abs(apart) > SAME else 0.0
    else:
        for j in range(p.size):
            own = weight[j] * unit
            relative[j] = own
            row[j] = (p[j] - usual) * own


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _spread(relative: Any, p: Any, square: Any) -> float:
    one = np.float32(1.0)
    total = one - one
    for j in range(p.size):
        total += p[j] * (one - p[j]) * relative[j] * relative[j] * square[j]
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _sure(relative: Any, p: Any, row: Any) -> tuple[float, float]:
    """Sums of eps and eps^2 over sure keys, and their eps alone."""
    zero = relative[0] - relative[0]
    total, squares = zero, zero
    for j in range(p.size):
        row[j] = relative[j] if p[j] == 1 else zero
        total += row[j]
        squares += row[j] * row[j]
    return np.float64(total), np.float64(squares)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _exponent(relative: Any, p: Any, t: float, ratio: float, unit: float, share: float) -> float:
    """Less than -log prod D: with u = p (1 - x), -log D >= u + u^2 / 2, and 1 / x >= 1 + y + y^2 /
    2, y = t eps.
    """
    one, half, top, zero = np.float32(1.0), np.float32(0.5), np.float32(1e6), np.float32(0.0)
    time, surely, given = np.float32(t * ratio), np.float32(t * unit), np.float32(share)
    total = zero
    for j in range(p.size):
        q = given if share > 0 and p[j] > zero else p[j]
        y = relative[j] * time
        more = min(y, top)
        more += half * more * more
        u = q * more / (one + more)
        total += relative[j] * surely if p[j] == one else u + half * u * u
    return np.float64(total)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _powers(
    relative: Any,
    p: Any,
    last: float,
    end: float,
    one_for_all: bool,
    theta: Any,
    row: Any,
    second: Any,
    third: Any,
    fourth: Any,
    fifth: Any,
) -> None:
    """t eps of slow keys at T, 0 of others, and its powers times the cumulants; without these, and
    of keys left to chance alone, where ``one_for_all``.
    """
    one, two, six, twelve = np.float32(1.0), np.float32(2.0), np.float32(6.0), np.float32(12.0)
    edge, time, zero = np.float32(last), np.float32(end), np.float32(0.0)
    if one_for_all:
        for j in range(p.size):
            own = relative[j] * time if relative[j] <= edge and zero < p[j] < one else zero
            theta[j] = row[j] = own
            second[j] = own * own
            third[j] = own * own * own
            fourth[j] = second[j] * second[j]
            fifth[j] = second[j] * third[j]
    else:
        for j in range(p.size):
            own = relative[j] * time if relative[j] <= edge or p[j] == one else zero
            square, both = own * own, p[j] * (one - p[j])
            odd = both * (one - two * p[j])
            theta[j], row[j] = own, p[j] * own
            second[j] = both * square
            third[j] = odd * square * own
            fourth[j] = both * (one - six * both) * square * square
            fifth[j] = odd * (one - twelve * both) * square * square * own


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
    squares: Any,
    largest: Any,
    relative: Any,
    chance: Any,
    shares: Any,
    fast: Any,
    many: Any,
    numbers: Any,
    of_size: Any,
    slow: Any,
    values: Any,
    drift: Any,
    sums: Any,
    roots: Any,
    heads: Any,
    found: Any,
    bias: Any,
) -> None:
    """Pairs and squared errors and bias of each query and size; infinite where T was too small."""
    sizes, lengths, width = of_size.shape[1], squares.shape[1], values.shape[1]
    constants = np.array(CONSTANTS, dtype=np.float32)
    moved, factors, kappa = np.empty(width, dtype=np.float32), np.empty(ORDER), np.ones(ORDER)
    vector, lowest, first = np.empty(width), np.empty(width), np.empty(width)
    above, size_of = np.empty(1 + lengths), np.empty(1 + lengths)
    moments = np.empty((OCTAVES + 1, ORDER, width))
    series = np.empty((OCTAVES + 1, 2 + lengths, ORDER))
    for i in range(len(many)):
        of, count, index = numbers[i], many[i], fast[i, : many[i]]
        if not of[KEPT] > LIGHT or of[FROM] >= sizes:
            continue
        edges = _octaves(relative[i], of[END], index)
        p, eps = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
        square = np.empty((lengths, count), dtype=np.float32)
        for f in range(count):
            p[f], eps[f] = chance[i, index[f]], relative[i, index[f]]
            for k in range(lengths):
                square[k, f] = squares[i, k, index[f]]
        moments[0], series[0] = sums[:ORDER, i], slow[i]
        # fmt: off
        _collect(
            eps, p, square, of[END], shares.size > 0, index, edges, values, drift[i], moments,
            series,
        )
        # fmt: on
        term, grown, share = np.empty_like(p), np.empty_like(p), np.empty_like(p)
        spreading, alive = np.empty_like(p), np.empty_like(p)
        left, lost = np.empty_like(p), np.empty_like(p)
        for s in range(np.int64(of[FROM]), sizes):
            size, own, moved_by, low = of_size[i, s], found[i, s], bias[i, s], LOWEST
            if shares.size:
                q = shares[s]
                p[:] = q
                both, odd = q * (1 - q), q * (1 - q) * (1 - 2 * q)
                kappa[0], kappa[1], kappa[2] = q, both, odd
                kappa[3], kappa[4] = both * (1 - 6 * both), odd * (1 - 12 * both)
            for c in range(width):
                first[c] = size[EARLY] * sums[FIRST, i, c]
            _add_lengths(first, roots, heads[i], size[START + 1 :])
            node = 0
            while node == 0:
                t, begin, fading = math.exp(low), count, 0.0
                above[:], own[:], moved_by[:] = math.inf, 0.0, 0.0
                while True:
                    y, power = t * size[RATIO] / of[END], 1.0
                    near = min(NEAR * max(1.0, fading / FADED), SLOW)
                    octave = min(max(math.floor(math.log2(near / y)), 0), OCTAVES)
                    before, begin = begin, min(begin, edges[octave])
                    for f in range(begin, before):
                        grown[f] = min(t * size[RATIO] * eps[f], 1000.0)
                        left[f], lost[f] = math.exp(-grown[f]), math.expm1(-grown[f])
                    for k in range(ORDER):  # (-1)^k / k! y^(k + 1) kappa_(k + 1)
                        power *= y / max(k, 1) * (-1.0 if k else 1.0)
                        factors[k] = power * kappa[k]
                    product, pair, total, is_late = (
                        1.0,
                        (t * size[UNIT]) ** 2 * of[PAIR],
                        0.0,
                        False,
                    )
                    moved[:] = 0
                    if begin < count:
                        # fmt: off
                        product, more, late, early, _ = sums_at_node(
                            p[begin:], grown[begin:], lost[begin:], left[begin:], share[begin:],
                            spreading[begin:], alive[begin:], constants,
                        )
                        is_late = late < -early
                        pair, total = pair + more, late if is_late else early
                        store(
                            share[begin:], p[begin:], lost[begin:], left[begin:], is_late,
                            constants, term[begin:],
                        )
                        # fmt: on
                        _mix(term[begin:], values, index[begin:], moved)
                    log = -t * size[UNIT] * of[SURE]
                    for k in range(ORDER):
                        log -= factors[k] / (k + 1) * series[octave, 0, k]
                        pair += factors[k] * y * series[octave, 1, k]
                    product *= math.exp(min(log, 0.0))
                    fading, weight = -2 * math.log(max(product, TINY)), DOUBLE * product
                    base = t * size[LATER if is_late else EARLY]
                    for c in range(width):
                        vector[c] = base * sums[FIRST, i, c] + moved[c] - total * drift[i, c]
                    for k in range(0 if is_late else 1, ORDER):
                        _add(factors[k], moments[octave, k], vector)
                    _add(weight, vector, moved_by)
                    if node == 0:
                        lowest[:] = product * vector
                    size_of[0], size_of[1:] = pair, 0.0
                    _add_lengths(vector, roots, heads[i], size_of[1:])
                    done = True
                    for k in range(1 + lengths):
                        if k:
                            if begin < count:
                                size_of[k] += product_of(spreading[begin:], square[k - 1, begin:])
                            for j in range(1, ORDER):  # (-1)^(j - 1) / (j - 1)! y^(j + 1)
                                size_of[k] -= factors[j] * j * series[octave, 1 + k, j]
                        own[k] += weight * size_of[k]
                        done = done and above[k] <= TOL * own[k] + TINY
                        above[k] = 2 * product * (largest[i, k - 1] if k else 1.0)
                    node += 1
                    if done or y > BEYOND or node == NODES:
                        break
                    t *= 2
                    if begin < count:
                        double(grown[begin:], lost[begin:], left[begin:], constants)
                if not done:
                    own[:] = math.inf
                    break
                # Below the first node, at t, the bias has t (B - t G) left. Over these nodes the
                # sum of t is that t, and of t^2 a third of its square; the first node says what
                # B - t G is.
                for c in range(width):
                    moved_by[c] += DOUBLE / 3 * (2 * math.exp(low) * first[c] + lowest[c])
                for k in range(1 + lengths):
                    if math.exp(2 * low) * size[START + k] > 2 * TOL * own[k] + TINY:
                        node = 0
                low -= DEEPER * DOUBLE


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _add(factor: float, vector: Any, total: Any) -> None:
    for c in range(total.size):
        total[c] += factor * vector[c]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def _add_lengths(vector: Any, roots: Any, head: int, lengths: Any) -> None:
    """Add the squared length of a vector and, where errors have a metric, of L'vector."""
    lengths[0] += product_of(vector, vector)
    if lengths.size > 1:
        for row in roots[head]:
            lengths[1] += product_of(row, vector) ** 2


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _octaves(relative: Any, end: float, index: Any) -> Any:
    """Sort keys by octaves of t eps at T, from 1 on; the first key above each edge 1, 2, 4, ..., of
    the last all that are left.
    """
    octave, order = np.empty(index.size, dtype=np.int64), index.copy()
    first = np.zeros(OCTAVES + 2, dtype=np.int64)
    for f in range(index.size):
        above = math.frexp(relative[index[f]] * end)[1] - 1
        octave[f] = min(max(above, 0), OCTAVES)
        first[octave[f] + 1] += 1
    for k in range(OCTAVES + 1):
        first[k + 1] += first[k]
    place = first.copy()
    for f in range(index.size):
        index[place[octave[f]]] = order[f]
        place[octave[f]] += 1
    return first


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _collect(
    eps: Any,
    p: Any,
    square: Any,
    end: float,
    one_for_all: bool,
    index: Any,
    first: Any,
    values: Any,
    drift: Any,
    moments: Any,
    series: Any,
) -> None:
    """Add the keys of each octave to the sums of powers of those below."""
    lengths, most = len(square), first[OCTAVES]
    theta, rows = np.empty(most, dtype=np.float32), np.empty((ORDER, most), dtype=np.float32)
    # fmt: off
    _powers(
        eps[:most], p[:most], math.inf, end, one_for_all, theta, rows[0], rows[1], rows[2], rows[3],
        rows[4],
    )
    # fmt: on
    moved = np.empty((ORDER, values.shape[1]), dtype=np.float32)
    for octave in range(OCTAVES):
        begin, stop = first[octave], first[octave + 1]
        moments[octave + 1], series[octave + 1] = moments[octave], series[octave]
        if begin == stop:
            continue
        moved[:] = 0
        mix(rows[1:, begin:stop], index[begin:stop], values, moved[1:])
        _mix(rows[0, begin:stop], values, index[begin:stop], moved[0])
        for k in range(ORDER):
            own = rows[k, begin:stop]
            total = _sum(own)
            series[octave + 1, 0, k] += total
            series[octave + 1, 1, k] += product_of(own, theta[begin:stop])
            for length in range(lengths if k else 0):
                part = product_of(own, square[length, begin:stop])
                series[octave + 1, 2 + length, k] += part
            for c in range(values.shape[1]):
                moments[octave + 1, k, c] += moved[k, c] - total * drift[c]


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
