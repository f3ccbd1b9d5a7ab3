"""The integral over kept keys whose probabilities all differ, key by key: compiled, at doubling
nodes.

The formulas are those of esscher.errors.integral, with the trapezoid rule in log t of step
log 2 / 3 as three sequences of nodes. In one sequence t doubles from node to node, so that few
exponentials are computed: with l = exp(-t eps) - 1,

    exp(-2 t eps) - 1 = l (l + 2),

which keeps the relative precision of l, as the square of exp(-t eps) does its own once that is
small. What lies above a node 2t is bounded by 2 P(t) times a sum of |c|^2 that the node t knows
already. The aliasing is 1e-16 of the mean squared error. Sums of values are one product of
matrices, and errors in nats come from the same sums. On a device other than the CPU the integral is
summed there, in tensor operations.

For float32 inputs on the CPU one sequence, with an aliasing of 9e-5 at most, is enough, and most
keys need no nodes: esscher.errors.cumulants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors import cumulants
from esscher.errors.cumulants import (
    CONSTANTS,
    DEEPER,
    DOUBLE,
    double,
    product_of,
    store,
    sums_at_node,
)
from esscher.errors.curve import QueryErrors, merged, side_by_side
from esscher.errors.integral import HIGHEST, LEAST, TINY, aliasing, as_numpy, march
from esscher.errors.scatter import in_threads
from esscher.keep.rule import Scales

SEQUENCES = 3
TOL = 1e-13  # what is cut off at either end
LOWEST = -15.0  # log t of the first node, measured from 1 / what is kept on average
NODES = 72  # of a sequence at once
GONE = -600.0  # log(t eps) that does not count even after so many doublings
RUNS = 32  # sequences of one task
PAIRS = 2**17  # queries x keys of one task in float32
LARGE = 700.0  # exp(700) is a number still
# Of a query. Of sure keys: log sum eps, log of their unit, eps^2 in that unit, 1, each squared
# length; then the largest of each length among all keys.
TOTAL, UNIT, PAIR, COUNT, SPREAD = range(5)
# Of a sequence: log t of its next node and of its lowest, whether nothing lies above the next node;
# then, of the pairs and of each squared length, what is surely found, and a bound on what lies
# above.
NEXT, LOW, CLOSED, FOUND = range(4)
# Of a node: t, t in the unit of sure keys, P, whether the vector is in its late form, summed terms;
# then pairs and each spread.
SUMMED = 5


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
    found = doubling_errors(Keys.of(scores, near, drift, distance), probability, weight)
    return replace(found, limit=found.limit + as_numpy(values[len(values) // 2].double()))


class Behind(NamedTuple):
    """Errors as the Fisher metric F of a head measures them: |L'e|^2 = e'F e, F = L L'."""

    distance: Tensor  # (m, N): |L'c|
    heads: Tensor  # (m,)
    roots: dict[int, Tensor]  # L (d, r) of each head


class Keys(NamedTuple):
    """What m queries see, whatever is kept of it. K lengths: that of c, and behind it.

    float32 has few large numbers: lengths are measured in ``units`` of the largest.
    """

    units: list[float]
    scores: Tensor  # (m, N)
    near: Tensor  # (N, d): values from one origin
    values: Tensor  # the same in the precision of the sums
    drift: Tensor  # (m, d): limits from that origin
    squares: Tensor  # (m, K, N): |c|^2, in the precision of the sums
    largest: Tensor  # (m, K)
    weights: Tensor  # (m, N): e over the largest, in float32; without keys in float64
    behind: Behind | None

    @classmethod
    def of(
        cls,
        scores: Tensor,
        near: Tensor,
        drift: Tensor,
        distance: Tensor,
        *,
        single: bool = False,
        behind: Behind | None = None,
    ) -> Keys:
        """Scores and |c| (m, N), values (N, d) and limits (m, d) from one origin; ``single``: sums
        over keys in float32, on the CPU.
        """
        single = single and scores.device.type == "cpu"
        dtype = torch.float32 if single else torch.float64
        lengths = [x.double() for x in (distance, *([] if behind is None else behind[:1]))]
        units = [2.0 ** math.frexp(float(x.max()))[1] for x in lengths]
        squares = torch.stack(
            [(x / unit).square_().to(dtype) for x, unit in zip(lengths, units, strict=True)], 1
        )
        near, drift = (x.double() / units[0] for x in (near, drift))
        if behind is not None:
            roots = {head: x * (units[0] / units[1]) for head, x in behind.roots.items()}
            behind = Behind(lengths[1], behind.heads, roots)
        values, largest, scores = near.to(dtype), squares.amax(2).double(), scores.double()
        weights = torch.empty(len(scores), 0)
        if single:
            weights = (scores - scores.amax(1, keepdim=True)).exp_().float()
        return cls(units, scores, near, values, drift, squares, largest, weights, behind)

    @property
    def single(self) -> bool:
        return self.values.dtype == torch.float32

    def exact(self, rows: Tensor) -> Keys:
        """Of some of the queries, in float64."""
        some = self.take(rows)
        none = some.weights[:, :0]
        return some._replace(values=self.near, squares=some.squares.double(), weights=none)

    def relative(self, found: QueryErrors) -> npt.NDArray[np.float64]:
        """Mean squared errors (m, S) relative to the largest squares, the smallest of K."""
        known = [found.mse] if found.nats is None else [found.mse, 2 * found.nats]
        size = np.maximum(as_numpy(self.largest) * np.square(self.units), TINY)
        least = [x / own[:, None] for x, own in zip(known, size.T, strict=True)]
        return np.asarray(np.min(least, axis=0))

    def take(self, rows: slice | Tensor) -> Keys:
        """Of some of the queries."""
        behind = self.behind
        if behind is not None:
            behind = behind._replace(heads=behind.heads[rows])
        return self._replace(
            scores=self.scores[rows],
            drift=self.drift[rows],
            squares=self.squares[rows],
            largest=self.largest[rows],
            weights=self.weights[rows],
            behind=behind,
        )

    @property
    def padded_roots(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """L' of each head, (heads, d, d), with rows of 0 where it has fewer; and each query's."""
        width, heads = self.near.shape[1], np.zeros(len(self.drift), dtype=np.int64)
        if self.behind is None:
            return np.zeros((1, 0, width)), heads
        roots = np.zeros((1 + max(self.behind.roots), width, width))
        for head, root in self.behind.roots.items():
            roots[head, : root.shape[1]] = root.mT.numpy()
        return roots, self.behind.heads.numpy()

    def lengths(self, x: Tensor, rows: Tensor | slice) -> Tensor:
        """Squared lengths (r, K) of vectors (r, d), each of the query that its row names."""
        found = [x.square().sum(1)]
        if self.behind is not None:
            heads, felt = self.behind.heads[rows], torch.empty_like(found[0])
            for head in set(heads.tolist()):
                own = heads == head
                felt[own] = (x[own] @ self.behind.roots[head]).square().sum(1)
            found.append(felt)
        return torch.stack(found, 1)

    def around(self, weight: Tensor, columns: Tensor | slice) -> Tensor:
        """sum_j weight_j c_j over some keys, (m, d)."""
        return weight @ self.near[columns] - weight.sum(1, keepdim=True) * self.drift


def doubling_errors(keys: Keys, p: Tensor, w: Tensor | None = None) -> QueryErrors:
    """Errors at one n, p and w (m, N)."""
    p = p.double()
    return ladder_errors(keys, Scales(p, torch.ones_like(p[:, :1]), w))


def ladder_errors(keys: Keys, chances: Scales) -> QueryErrors:
    """Errors at every size; of ``single`` keys to a relative 5e-5 of the rms error, and faster. Of
    keys with ``behind`` also the errors in nats.
    """
    single, compiled, units = keys.single, keys.near.device.type == "cpu", keys.units
    queries, sizes = chances.factor.shape
    some = max(1, ELEMENTS // (CHUNK * keys.scores.shape[1]))
    if compiled:
        some = max(1, PAIRS // keys.scores.shape[1]) if single else RUNS // SEQUENCES
    begins, ends = list(range(sizes)), list(range(1, sizes + 1))
    if single and chances.alike and bool((chances.factor[0].diff() > 0).all()):
        # together where keys are left to chance
        first, last = (int((chances.factor[0] < x).sum()) for x in (TINY, 1.0))
        begins = [*range(first + 1), *range(last, sizes)] if last > first else begins
        ends = [*begins[1:], sizes]
    numbers = keys.near.new_empty(queries, sizes, 1 + keys.squares.shape[1])
    bias = keys.near.new_empty(queries, sizes, keys.near.shape[1])

    def task(i: int) -> None:
        begin, at = i // len(begins) * some, i % len(begins)
        rows, span = slice(begin, begin + some), slice(begins[at], ends[at])
        own, given = keys.take(rows), chances.take(rows, span)
        key_by_key = _block if compiled else in_tensors
        found = cumulants.block(own, given) if single else key_by_key(own, *given.at(0))
        for whole, part in zip((numbers, bias), found, strict=True):
            whole[rows, span] = part.view(len(part), span.stop - span.start, -1)

    tasks = range(-(-queries // some) * len(begins))
    for _ in in_threads(task, tasks) if compiled else map(task, tasks):
        pass
    terms, moved = as_numpy(numbers), as_numpy(bias)
    found = QueryErrors(
        mse=terms[:, :, 1] * units[0] ** 2,
        sum_p2=terms[:, :, 0],
        limit=as_numpy(keys.drift) * units[0],
        delta=np.full(queries, np.nan),
        bias=moved * units[0],
        accuracy=cumulants.ACCURACY if single else aliasing(DOUBLE / SEQUENCES) / 2 + TOL,
        nats=None if keys.behind is None else terms[:, :, 2] * units[1] ** 2 / 2,
    )
    return with_exact(found, np.asarray(np.isnan(terms).any(2)), keys.exact, chances)


def with_exact(
    found: QueryErrors,
    left: npt.NDArray[np.bool_],
    exact: Callable[[Tensor], Keys],
    chances: Scales,
) -> QueryErrors:
    """The errors, those in ``left`` (m, S) in float64: of ``exact`` keys of these queries."""
    parts = []
    for s, own in enumerate(left.T) if left.any() else ():
        part, rows = found.at(s), torch.from_numpy(np.flatnonzero(own)).to(chances.gain.device)
        if len(rows):
            some = doubling_errors(exact(rows), *chances.take(rows, slice(s, s + 1)).at(0))
            part = merged(own, some, part.take(np.flatnonzero(~own)))
        parts.append(part)
    return side_by_side(parts) if parts else found


def _block(keys: Keys, p: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """E sum p^2 and mean squared errors, (m, 1 + K), and bias, (m, d), of so few queries that their
    keys stay in the processor's cache.
    """
    squares, drift = keys.squares, keys.drift
    count, step = SEQUENCES, DOUBLE / SEQUENCES
    some, surely = p > 0, p == 1
    log_eps = keys.scores if w is None else keys.scores + torch.where(some, w, 1.0).log_()
    log_eps = torch.where(some, log_eps, -torch.inf)
    log_eps -= _finite(log_eps.amax(1, keepdim=True))
    kept = log_eps.exp().mul_(p)
    pairs = kept.square() / p.clamp_min(TINY)
    first = keys.around(kept, slice(None))  # B
    columns = surely.any(0).nonzero()[:, 0]  # M and the like are sums over few keys
    sure = surely[:, columns]
    log_sure = torch.where(sure, log_eps[:, columns], -torch.inf)
    unit = _finite(log_sure.amax(1)) if len(columns) else torch.zeros_like(p[:, 0])
    sure_eps = (log_sure - unit[:, None]).exp()
    moved_sure = keys.around(sure_eps, columns)  # M
    of_sure = torch.stack(
        [log_sure.logsumexp(1), unit, sure_eps.square().sum(1), sure.sum(1).double()], 1
    )
    sure_squares = (squares[:, :, columns] @ sure[:, :, None].double())[:, :, 0]
    of_query = torch.cat([of_sure, sure_squares, keys.largest], 1).numpy()
    # what the pairs and the mean squared errors are over t^2 as t goes to 0
    spread = squares @ ((1 - p) * pairs)[:, :, None]
    starts = torch.cat(
        [pairs.sum(1, keepdim=True), keys.lengths(first, slice(None)) + spread[:, :, 0]], 1
    )
    chances = torch.where(surely, 0.0, p).numpy()
    logs = torch.where(surely, -torch.inf, log_eps) if len(columns) else log_eps
    squared, constants = squares.numpy(), np.array(CONSTANTS)
    width = starts.shape[1]

    runs = torch.arange(len(p)).repeat_interleave(count)
    start = (LOWEST - kept.sum(1).clamp_min(TINY).log())[runs].numpy()
    state = np.zeros((len(runs), FOUND + 2 * width))
    state[:, NEXT] = state[:, LOW] = start + step * np.tile(np.arange(count), len(p))
    state[:, FOUND + 1 :: 2] = math.inf
    terms = torch.empty(len(runs) * NODES, p.shape[1], dtype=torch.float64)
    nodes = np.empty((len(runs) * NODES, SUMMED + width))
    share, spreading, alive = torch.empty(3, p.shape[1], dtype=torch.float64).numpy()
    numbers = torch.zeros(len(p), width, dtype=torch.float64)
    bias, rest = torch.zeros_like(drift), torch.zeros_like(drift[runs])
    # sequences, and how many nodes each goes on for
    todo, limits = np.arange(len(runs)), np.full(len(runs), NODES)
    while len(todo):
        own, bottom = runs[todo], torch.from_numpy(state[todo, NEXT] == state[todo, LOW])
        u = logs[own] + torch.from_numpy(state[todo, NEXT])[:, None]
        grown = torch.where(u > GONE, u.clamp_(max=HIGHEST).exp_(), 0.0)
        more, lost, left = (x.numpy() for x in (grown, torch.expm1(-grown), torch.exp(-grown)))
        ends = [0]
        for i, (run, query) in enumerate(zip(todo.tolist(), own.tolist(), strict=True)):
            at, end = ends[-1], ends[-1] + int(limits[i])
            # each array alone: only then the compiler makes vector operations of inner sums
            added = _upward(
                chances[query],
                squared[query],
                more[i],
                lost[i],
                left[i],
                share,
                spreading,
                alive,
                constants,
                of_query[query],
                state[run],
                step,
                TOL,
                terms.numpy()[at:end],
                nodes[at:end],
            )
            ends.append(at + added)
        lengths = torch.from_numpy(np.diff(ends))
        table = torch.from_numpy(nodes[: ends[-1]])
        rows = own.repeat_interleave(lengths)
        t, in_unit, chance, late, summed = table[:, :SUMMED].unbind(1)
        base = torch.where(
            late[:, None] > 0, in_unit[:, None] * moved_sure[rows], t[:, None] * first[rows]
        )
        vector = base + (terms[: ends[-1]] @ keys.values) - summed[:, None] * drift[rows]
        found = table[:, SUMMED:].clone()
        found[:, 1:] += keys.lengths(vector, rows)
        numbers.index_add_(0, rows, step * chance[:, None] * found)
        bias.index_add_(0, rows, step * chance[:, None] * vector)
        # Below the first node, at t, the bias has t (B - t G) left. Over these nodes the sum of t
        # is that t, and of t^2 a third of its square; the first node says what B - t G is.
        ats, of = torch.tensor(ends[:-1])[bottom], own[bottom]
        twice = 2 * t[ats, None] * first[of] + chance[ats, None] * vector[ats]
        rest[torch.from_numpy(todo)[bottom]] = step * twice / 3
        low = state[todo, LOW]
        below = torch.from_numpy(np.exp(np.minimum(2 * low, LARGE)))[:, None] * starts[runs[todo]]
        missed = (below > 2 * TOL * numbers[runs[todo]] / count + TINY).any(1).numpy()
        closed = state[todo, CLOSED] > 0
        deeper = todo[closed & missed]
        state[deeper, LOW] -= DEEPER * DOUBLE
        state[deeper, NEXT] = state[deeper, LOW]
        limits = np.where(closed, DEEPER, NODES)[~closed | missed]
        todo = todo[~closed | missed]
    bias.index_add_(0, runs, rest)
    return numbers, bias


def _finite(x: Tensor) -> Tensor:
    return torch.where(x > -torch.inf, x, 0.0)


# ---- On any device, in tensor operations.

CHUNK, ELEMENTS = 16, 2**24  # nodes at once, and numbers of one temporary


def in_tensors(keys: Keys, p: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """What ``_block`` computes, on the device of the keys."""
    sums = _Sums(keys, p, w)
    mean, step = sums.kept.sum(1).clamp_min(TINY).log(), DOUBLE / SEQUENCES
    start = float((0.5 * math.log(2 * TOL) - mean).min())
    lowest = -float(mean.max()) - 18
    march(sums, start, lowest, step, TOL, span=sums.span, chunk=CHUNK)
    return sums.finish()


class _Sums:
    """Running sums over nodes, for m queries and a probability of each key."""

    def __init__(self, keys: Keys, p: Tensor, w: Tensor | None) -> None:
        some = p > 0
        logs = keys.scores if w is None else keys.scores + torch.where(some, w, 1.0).log()
        logs = torch.where(some, logs, -torch.inf)
        self.logs = logs - _finite(logs.amax(1, keepdim=True))
        self.keys, self.p, self.span = keys, p, -float(_finite(self.logs).min())
        self.kept = self.logs.exp() * p
        self.first = keys.around(self.kept, slice(None))
        pairs = self.kept.square() / p.clamp_min(TINY)
        spread = (keys.squares @ ((1 - p) * pairs)[:, :, None])[:, :, 0]
        lengths = keys.lengths(self.first, slice(None))
        self.start = torch.cat([pairs.sum(1, keepdim=True), lengths + spread], 1)
        self.numbers, self.bias = torch.zeros_like(self.start), torch.zeros_like(keys.drift)
        self.most = torch.nn.functional.pad(keys.largest, (1, 0), value=1.0)
        self.lowest, self.last = math.inf, (self.first, self.first)

    def add(self, tau: Tensor) -> None:
        keys, p, stay = self.keys, self.p[:, None], (1 - self.p)[:, None]
        grown = (self.logs[:, None] + tau[:, None]).clamp(max=HIGHEST).exp()
        left, lost = torch.exp(-grown), torch.expm1(-grown)
        inverse = 1 / (stay + p * left)
        log = torch.where(p * lost > -0.5, torch.log1p(p * lost), -inverse.log())
        chance = log.sum(2).clamp_min(LEAST).exp()  # (m, nodes)
        step = DOUBLE / SEQUENCES
        self.chance = chance[:, -1 - SEQUENCES]
        share = p * grown * inverse
        late, early = share * left, share * stay * lost
        spread = late * grown * stay * inverse
        # of the two forms of the vector the one that is rounded less
        is_late = ((late * (stay > 0)).sum(2) < -early.sum(2))[:, :, None]
        terms = torch.where(is_late, late, early)
        t = tau.clamp(max=LARGE).exp()
        base = torch.where(is_late, 0.0, t[:, None] * self.first[:, None])
        vector = base + terms @ keys.near - terms.sum(2, keepdim=True) * keys.drift[:, None]
        every = torch.arange(len(p), device=p.device).repeat_interleave(len(tau))
        length = keys.lengths(vector.flatten(0, 1), every).view(len(p), len(tau), -1)
        found = torch.cat([(late * grown).sum(2)[:, :, None], length + spread @ keys.squares.mT], 2)
        self.numbers += step * (chance[:, None] @ found)[:, 0]
        self.bias += step * (chance[:, None] @ vector)[:, 0]
        if float(tau[0]) < self.lowest:
            self.lowest = float(tau[0])
            self.last = t[0] * self.first, chance[:, :1] * vector[:, 0]

    def found(self) -> Tensor:
        return self.numbers

    def above(self, tau: float) -> Tensor:
        return 2 * self.chance[:, None] * self.most

    def below(self, tau: float) -> Tensor:
        return math.exp(2 * tau) * self.start / 2

    def finish(self) -> tuple[Tensor, Tensor]:
        """With the bias below the lowest node, t (B - t G): sums of t and of t^2 are geometric."""
        step, (line, vector) = DOUBLE / SEQUENCES, self.last
        rest = line / math.expm1(step) + (vector - line) / math.expm1(2 * step)
        return self.numbers, self.bias + step * rest


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _upward(
    p: Any,
    squares: Any,
    grown: Any,
    lost: Any,
    left: Any,
    share: Any,
    spreading: Any,
    alive: Any,
    constants: Any,
    query: Any,
    state: Any,
    step: float,
    tol: float,
    terms: Any,
    nodes: Any,
) -> int:
    """How many nodes were added, up to the length of ``nodes``: fewer where nothing is left above
    them. ``grown``, ``lost``, ``left``: t eps, x - 1 and x at the first.
    """
    log_t, closed, lengths = state[NEXT], state[CLOSED] > 0.0, len(squares)
    for node in range(len(nodes)):
        product, pair, sum_late, sum_early, above_pair = sums_at_node(
            p, grown, lost, left, share, spreading, alive, constants
        )
        chance = math.exp(-math.exp(min(log_t + query[TOTAL], LARGE))) * product
        in_unit = math.exp(min(log_t + query[UNIT], HIGHEST))
        # of the two forms of the vector the one that is rounded less
        is_late = sum_late < -sum_early
        store(share, p, lost, left, is_late, constants, terms[node])
        nodes[node, 0], nodes[node, 1] = math.exp(min(log_t, LARGE)), in_unit
        nodes[node, 2], nodes[node, 3] = chance, 1.0 if is_late else 0.0
        nodes[node, 4] = sum_late if is_late else sum_early
        done = True
        for k in range(lengths + 1):
            # An output is a mean of kept values, so that its error is at most the largest |c|, or
            # the root of their summed squares.
            if k == 0:
                term, above = pair + in_unit * in_unit * query[PAIR], query[COUNT] + above_pair
                most = 1.0
            else:
                term = product_of(spreading, squares[k - 1])
                above = query[SPREAD + k - 1] + product_of(alive, squares[k - 1])
                most = query[SPREAD + lengths + k - 1]
            at = FOUND + 2 * k
            nodes[node, SUMMED + k] = term
            state[at] += step * chance * term
            done = done and state[at + 1] <= tol * state[at] + TINY
            state[at + 1] = 2 * chance * min(most, above)
        log_t += DOUBLE
        if not closed:  # else nodes below the first one
            state[NEXT] = log_t
            if done:
                state[CLOSED] = 1.0
                return node + 1
        double(grown, lost, left, constants)
    return len(nodes)
