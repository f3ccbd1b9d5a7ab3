"""exact_pool_curve: the exact error of attention on n tokens of a finite pool of keys and values,
for every n at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.curve import ErrorCurve, QueryErrors, check_sampling, concatenate, merged
from esscher.errors.integral import error_from_nodes
from esscher.errors.keep_curve import KeepErrors, low_rank_curve
from esscher.inputs import as_attention, as_counts
from esscher.keep import Context, LowRank, parse

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# up to here (times the n of "bernoulli") the sum key by key is as fast as the grid
FEW_PAIRS = 2**14
QUERY_BLOCK = 512
BLOCK = 8192  # keys deposited at once
# of a query's mean squared error to rounding on its grid: beyond it the query goes key by key
LOST = 1e-6
# distances between values whose squares, over any n, are floating-point numbers
SMALLEST, LARGEST = 1e-130, 1e150
MEMORY = 2**24  # cells x channels x queries open at once: 128 megabytes


def exact_pool_curve(
    q: Any,
    k: Any,
    v: Any,
    n: Any = None,
    sampling: str = "replacement",
    scale: Any = None,
    *,
    keep: Any = None,
    positions: Any = None,
    chosen_by: Any = None,
    details: bool = False,
) -> ErrorCurve:
    """Exact E||Gamma_n - Gamma||^2 over a pool of N keys; Gamma is attention on the whole pool. No
    Monte Carlo.

    ``q`` (m, k), ``k`` (N, k), ``v`` (N, d_v); scores are scale <q, k>, ``scale`` None =
    1/sqrt(width of q); ``n``: numbers of tokens. ``.rms`` is the root of the mean over queries;
    per-query values are in ``.queries``, with each query's bias when ``details``.

    ``sampling="replacement"``: n keys drawn independently, each alike. ``sampling="bernoulli"``:
    each key is kept independently with probability n / N, n from 1 to N, and the error is 0 at n =
    N. Attention on no key is not defined: that event, of probability (1 - n/N)^N, counts as no
    error.

    Formulas: esscher.errors.integral. Few pairs are summed key by key in float64, to about 1e-12;
    so are queries too wide for a grid, or that rounding would spoil there. Otherwise keys are
    deposited once on each query's score grid (esscher.errors.grid): float64 inputs to about 1e-9,
    float32 inputs to about 1e-5, in memory that does not depend on N. ``.accuracy`` estimates the
    relative error of ``.rms``, the rounding of scores in float32 included.

    ``keep``: a rule that chooses the keys instead of ``sampling`` (esscher.keep, or its text). Keys
    come in the order of their positions; queries stand at the last one, or at ``positions`` (m,),
    and see no later key. ``n`` is then how many keys are kept in all, for the part of the rule
    without a number; None where every number is given. ``.kept``: how many were, on average over
    the queries. ``lowrank`` mixes keys instead; its ``n`` are ranks.

    A rule that chooses one set of keys by what queries attend to (heavy, impact, expected,
    neyman:shared) chooses by ``q``, the queries that its error is then the mean over: an oracle,
    since a cache is cut before the queries that it serves are known. ``chosen_by`` (c, k): other
    queries, such as earlier ones, that choose in their place; they see all keys.
    """
    if keep is not None:
        if sampling != "replacement":
            raise ValueError("keep: a rule says by itself which keys are kept; leave sampling out")
        context, rule = Context.of(q, k, v, scale, positions), parse(keep)
        if chosen_by is not None:
            context = replace(context, choosers=Context.of(chosen_by, k, v, scale))
        if isinstance(rule, LowRank):
            return low_rank_curve(context, rule, n)
        return KeepErrors(context).curve(rule, n, details=details)
    for name, given in (("positions", positions), ("chosen_by", chosen_by)):
        if given is not None:
            raise ValueError(f"{name}: matters to a keep rule; give keep too, or leave {name} out")
    if n is None:
        raise ValueError(
            "n: expected numbers of tokens, got None; only a keep rule with all its numbers goes"
            " without"
        )
    pool = _Pool.check(q, k, v, scale, sampling)
    counts = as_counts(n, "n")
    check_sampling(sampling, counts, pool.keys)
    errors = pool.errors(counts, details)
    how = " drawn with replacement"
    if sampling == "bernoulli":
        how = f", each kept with probability n/{pool.keys}, no kept key counts as no error"
    return ErrorCurve.from_queries(
        counts,
        errors if details else replace(errors, bias=None),
        kind="exact",
        origin=f"exact error over a pool of {pool.keys} keys{how}",
    )


@dataclass(frozen=True)
class _Pool:
    """Checked inputs, all of one floating type."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    sampling: str
    # (d_v,) float64: one of the values, so that equal ones are exactly 0 apart from it
    center: Tensor

    @property
    def keys(self) -> int:
        return self.k.shape[0]

    @classmethod
    def check(cls, q: Any, k: Any, v: Any, scale: Any, sampling: str) -> _Pool:
        query, key, value, factor = as_attention(q, k, v, scale)
        double = torch.float64 in (query.dtype, key.dtype, value.dtype)
        dtype = torch.float64 if double else torch.float32  # half precision too
        value = value.to(dtype)
        mean = value.mean(0, dtype=torch.float64)
        center = value[(value - mean.to(dtype)).square().sum(1).argmin()].double()
        apart = (value.amax(0).double() - center, center - value.amin(0).double())
        size = float(torch.maximum(*apart).max())
        if not (SMALLEST < size < LARGEST or size == 0):
            raise ValueError(
                f"v: values {size:g} apart have no squares in floating point; divide them by one"
                " number, and multiply rms by it"
            )
        return cls(query.to(dtype), key.to(dtype), value, factor, sampling, center)

    def errors(self, n: Counts, details: bool) -> QueryErrors:
        """Of all queries: on score grids; key by key where there are few pairs, and of queries that
        are too wide for a grid, or that rounding would spoil there.
        """
        pairs = len(self.q) * self.keys * (len(n) if self.sampling == "bernoulli" else 1)
        grid = deposit.choose_grid(self.q.dtype, self.sampling)
        span, keyed = self._spans(grid)
        if pairs <= FEW_PAIRS or bool(keyed.all()):
            return self._by_keys(self.q, n, details)
        widest = float(torch.where(keyed, 0.0, span).max()) / grid.spacing + 64
        rows = int(MEMORY / widest / (self.v.shape[1] + 2))
        parts = []
        for own in torch.split((~keyed).nonzero()[:, 0], max(1, min(QUERY_BLOCK, rows))):
            state = deposit.init(len(own), grid, self.center)
            for part, scores in self._blocks(own):
                state = deposit.update(state, scores, self.v[part], owned=True)
            lost = deposit.lost(state) > LOST
            keyed[own[lost]] = True
            if not bool(lost.all()):
                kept = deposit.take(state, (~lost).nonzero()[:, 0])
                parts.append(deposit.finish(kept, n, self.sampling, details=details))
        if not parts:
            return self._by_keys(self.q, n, details)
        # a score, which the softmax exponentiates, is rounded by eps (1 + |scale q| |k|) at most
        longest = self.q[~keyed].double().norm(dim=1).max() * self.k.double().norm(dim=1).max()
        rounding = torch.finfo(self.q.dtype).eps * (1 + self.scale * float(longest))
        found = concatenate(parts)
        found = replace(found, accuracy=found.accuracy + rounding)
        if not bool(keyed.any()):
            return found
        return merged(keyed.cpu().numpy(), self._by_keys(self.q[keyed], n, details), found)

    def _by_keys(self, q: Tensor, n: Counts, details: bool) -> QueryErrors:
        """Key by key, in float64, a few queries at a time."""
        parts = []
        for rows in torch.split(q, max(1, 2**22 // self.keys)):
            scores = rows.double() @ self.k.double().T * self.scale
            if not bool(torch.isfinite(scores).all()):
                raise ValueError(
                    "q, k, scale: scores are beyond the floating range; make scale smaller"
                )
            part = error_from_nodes(
                scores, None, self.v, None, n, sampling=self.sampling, details=details
            )
            parts.append(part)
        return concatenate(parts)

    def _spans(self, grid: deposit.Grid) -> tuple[Tensor, Tensor]:
        """The range of each query's scores, (m,), and which queries are too wide for the grid."""
        rows = torch.arange(len(self.q), device=self.q.device)
        ends = [torch.stack([scores.amax(1), -scores.amin(1)]) for _, scores in self._blocks(rows)]
        high, low = torch.stack(ends).amax(0).double()  # NaN where a score is
        near = (high + low <= (deposit.MAX_CELLS - 64) * grid.spacing) & (
            torch.maximum(high, low) < deposit.FAR
        )
        return high + low, ~near

    def _blocks(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of keys with the scores (m, BLOCK) of some queries."""
        if len(self.q) * self.keys <= MEMORY // 4 and self.keys <= BLOCK:
            yield slice(None), self._scores if len(rows) == len(self.q) else self._scores[rows]
            return
        q = self.q[rows] * self.scale
        for start in range(0, self.keys, BLOCK):
            part = slice(start, start + BLOCK)
            yield part, q @ self.k[part].T

    @cached_property
    def _scores(self) -> Tensor:
        """Of all queries and keys, where these are few."""
        return (self.q * self.scale) @ self.k.T


# ---- A pool drawn from a law stands for it: how far that may be from the law's own error.

PARTS = 8  # of a drawn pool


def pool_stderr(tokens: Tensor, rms: Callable[[Tensor], Floats]) -> Floats | None:
    """The standard error of ``rms(tokens)``, from its parts: independent pools, each a ``PARTS``-th
    as large.

    The error of a pool of N tokens is of order N^(-1/2), so parts spread sqrt(PARTS) times as much
    as whole pools do. None for a pool too small to have parts.
    """
    if len(tokens) < 2 * PARTS:
        return None
    parts = np.stack([rms(part) for part in tokens.chunk(PARTS)])
    return np.asarray(parts.std(axis=0, ddof=1) / math.sqrt(len(parts)))
