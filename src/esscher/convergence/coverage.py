"""coverage: how often attention on kept keys misses its denominator, and its output, by more than a
share epsilon.

Two designs. A rule's own: key j is kept with p_j, independently, and counts w_j. vAttention's,
where a rule has an AdaptiveRest: a base sample of the rest, drawn with replacement, says how large
b is; then b fresh draws with replacement count n/b each. The denominator's estimate Z is a sum of
independent terms (given b): P(|Z/D - 1| > epsilon) comes from its Laplace transform
(integral.interval), averaged over drawn b. The output is simulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.convergence.integral.interval import Exponentials, interval_probability
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.inputs import as_count, as_positive, as_seed
from esscher.keep import AdaptiveRest, Chance, Context, Rule, Union, parse

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Coverage", "coverage"]

Floats = npt.NDArray[np.float64]
ELEMENTS = 2**21  # numbers in one temporary
NODES, PAIRS = 2**13, 2**26  # of one inversion, and times keys
STRAY = 6.0  # standard errors of its own simulation by which an inverted probability may differ
SUBSETS = 16  # keys left to chance up to which all subsets are summed
DRAWS = 8  # with fewer a sum has atoms too large for an inversion
FEW = 0.5  # of the scores of a rest: with fewer different ones than this share the sum has atoms


@dataclass(frozen=True)
class Coverage:
    """Of each query, (m,): probabilities that a relative error exceeds ``epsilon``, and their
    standard errors.

    ``denominator``: of |Z/D - 1|; its standard error is 0 where it is exact, and that of drawn base
    samples in vAttention's design. ``output``: of |Gamma_keep - Gamma| / |Gamma|, simulated; no
    kept key counts as beyond. ``kept``: keys on average, draws counted as often as they come, a
    base sample not.
    """

    epsilon: float
    denominator: Floats
    denominator_stderr: Floats
    output: Floats
    output_stderr: Floats
    kept: Floats

    def to_frame(self) -> pd.DataFrame:
        """One row a query."""
        import pandas as pd

        return pd.DataFrame({field.name: getattr(self, field.name) for field in fields(self)})


def coverage(
    q: Any,
    k: Any,
    v: Any,
    keep: Any,
    epsilon: Any = None,
    scale: Any = None,
    *,
    positions: Any = None,
    repeats: Any = 1000,
    seed: Any = 0,
) -> Coverage:
    """How often the relative error exceeds ``epsilon``, by default that of the rule's adaptive
    part.

    ``q`` (m, k), ``k`` (N, k), ``v`` (N, d_v), ``keep`` a rule with all its numbers, ``positions``
    as in exact_pool_curve. ``repeats``: base samples, and simulated outputs, of each query.
    """
    context, rule, many = (
        Context.of(q, k, v, scale, positions),
        parse(keep),
        as_count(repeats, "repeats"),
    )
    if many < 2:
        raise ValueError(f"repeats: expected at least 2, for a standard error, got {many}")
    adaptive = next((part for part in rule.parts if isinstance(part, AdaptiveRest)), None)
    if epsilon is None and adaptive is None:
        raise ValueError(
            f"epsilon: {rule} has none of its own; give the relative error to look for"
        )
    bound = as_positive(adaptive.epsilon if epsilon is None and adaptive else epsilon, "epsilon")
    draws = [
        _Draws(many, generator_for("coverage", as_seed(seed), i), context.k.device)
        for i in range(len(context.q))
    ]
    made = _drawn(context, rule, adaptive, draws) if adaptive else _included(context, rule, draws)
    rows = np.array(
        [
            _of_query(design, size, bound)
            for design, size in zip(made, context.limit.norm(dim=1), strict=True)
        ]
    )
    return Coverage(bound, *rows.T)


def _of_query(
    design: _Design, size: Tensor, epsilon: float
) -> tuple[float, float, float, float, float]:
    sums = design.simulate()
    total, vector = sums[:, -1], sums[:, :-1]
    missed, missed_error = _frequency((total - 1).abs() > epsilon)
    beyond, beyond_error = _frequency(
        (vector.norm(dim=1) > epsilon * float(size) * total) | (total == 0)
    )
    exact = design.missed(epsilon)
    if exact is not None and abs(float(exact.mean()) - missed) <= STRAY * missed_error:
        missed = float(exact.mean())
        missed_error = float(exact.std()) / len(exact) ** 0.5 if len(exact) > 1 else 0.0
    return missed, missed_error, beyond, beyond_error, design.kept


def _frequency(hits: Tensor) -> tuple[float, float]:
    """And its standard error, which is not 0 where nothing, or everything, was hit."""
    count, many = int(hits.sum()), len(hits)
    near = (count + 1) / (many + 2)
    return count / many, (near * (1 - near) / many) ** 0.5


@dataclass(frozen=True)
class _Draws:
    """What one query draws; on the CPU, so that the numbers are those of every device."""

    repeats: int
    generator: torch.Generator
    device: torch.device

    def uniform(self, rows: int, columns: int) -> Tensor:
        return torch.rand(rows, columns, generator=self.generator, dtype=torch.float64).to(
            self.device
        )

    def index(self, below: int, many: int) -> Tensor:
        return torch.randint(below, (many,), generator=self.generator).to(self.device)


class _Design(ABC):
    """One query: its sure keys, and the others left to chance. e is divided by the denominator D, c
    is value - limit.
    """

    def __init__(self, e: Tensor, c: Tensor, sure: Tensor, some: Tensor, draws: _Draws) -> None:
        table = torch.cat([e[:, None] * c, e[:, None]], dim=1)
        self.held, self.rest, self.e = table[sure].sum(0), table[some], e[some]
        self.draws, self.nodes = draws, min(NODES, PAIRS // max(1, len(self.e)))
        self.kept = float(sure.sum())

    @abstractmethod
    def simulate(self) -> Tensor:
        """Sums of w e c and of w e over kept keys, (repeats, d + 1)."""

    @abstractmethod
    def inside(self, low: float, high: float) -> Tensor | None:
        """Probability that the rest's sum lies between, (1,), or one for each base sample; None
        where there is none.
        """

    def between(
        self,
        transform: Callable[[Tensor], Tensor],
        low: Tensor,
        high: Tensor,
        reach: Tensor,
        terms: int = DRAWS,
    ) -> Tensor | None:
        """For sums of ``terms`` from 0 to ``reach``: all of them, or none, or as many as their
        transform says.
        """
        if bool((high < 0).all()):
            return torch.zeros_like(high)
        if bool(((low <= 0) & (high >= reach)).all()):
            return torch.ones_like(high)
        if terms < DRAWS or len(torch.unique(self.e)) < FEW * len(self.e):
            return None
        return interval_probability(transform, low, torch.minimum(high, 1.01 * reach), self.nodes)

    def missed(self, epsilon: float) -> Tensor | None:
        """P(|Z/D - 1| > epsilon)."""
        low, high = (1 + sign * epsilon - float(self.held[-1]) for sign in (-1, 1))
        if len(self.e) == 0 or high <= 0:
            return self.e.new_tensor([float(not low <= 0 <= high)])
        inside = self.inside(low, high)
        return None if inside is None else 1 - inside


class _Included(_Design):
    """Each key with its own probability and weight."""

    def __init__(self, p: Tensor, w: Tensor, *rest: Any) -> None:
        super().__init__(*rest)
        self.p, self.w = p, w
        self.kept += float(p.sum())

    def simulate(self) -> Tensor:
        out = self.held.repeat(self.draws.repeats, 1)
        for part in torch.split(out, max(1, ELEMENTS // max(1, len(self.p)))):
            part += (
                (self.draws.uniform(len(part), len(self.p)) < self.p).double() * self.w @ self.rest
            )
        return out

    def inside(self, low: float, high: float) -> Tensor | None:
        eps = self.w * self.e
        if len(eps) <= SUBSETS:
            return _over_subsets(self.p, eps, low, high)

        grown = Exponentials(eps)

        def transform(z: Tensor) -> Tensor:
            first, powers = grown.at(z)
            return torch.addcmul((1 - self.p).to(powers.dtype), powers, self.p * first).prod(
                1, keepdim=True
            )

        return self.between(
            transform, eps.new_tensor([low]), eps.new_tensor([high]), eps.sum()[None]
        )


class _Drawn(_Design):
    """b draws with replacement, each counting n/b; b from base samples."""

    def __init__(self, part: AdaptiveRest, *rest: Any) -> None:
        super().__init__(*rest)
        n = self.held.new_tensor(float(len(self.e)))
        self.budgets = self.held.new_zeros(1)
        if len(self.e) > 0:
            size = int(part.base_size(n))
            base = (
                self.e[self.draws.index(len(self.e), self.draws.repeats * size)].reshape(-1, size)
                if size
                else self.e[None]
            )
            sigma = base.std(1, correction=1 if size > 1 else 0)
            self.budgets = part.budget(sigma, self.held[-1] + n * base.mean(1), n)
            self.kept += float(self.budgets.mean())

    def simulate(self) -> Tensor:
        if len(self.e) == 0:
            return self.held.repeat(self.draws.repeats, 1)
        budgets = self.budgets.long().expand(self.draws.repeats)
        out = []
        for part in torch.split(budgets, max(1, ELEMENTS // int(budgets.max()))):
            index = self.draws.index(len(self.e), int(part.sum()))
            sums = torch.nn.functional.embedding_bag(
                index, self.rest, part.cumsum(0) - part, mode="sum"
            )
            out.append(self.held + sums * (len(self.e) / part)[:, None])
        return torch.cat(out)

    def inside(self, low: float, high: float) -> Tensor | None:
        """In e - min e, so that the sum starts at 0; bounds of a sum of b draws are b/n times those
        of the estimate.
        """
        b: Tensor
        b, place = torch.unique(self.budgets, return_inverse=True)
        least = self.e.min()
        near = self.e - least
        grown = Exponentials(near)

        def transform(z: Tensor) -> Tensor:
            first, powers = grown.at(z)
            return torch.exp((powers @ first / len(near)).log()[:, None] * b)

        lowest, highest = (b * (bound / len(self.e) - least) for bound in (low, high))
        inside = self.between(transform, lowest, highest, b * near.max(), terms=int(b[0]))
        return None if inside is None else inside[place]


def _over_subsets(p: Tensor, eps: Tensor, low: float, high: float) -> Tensor:
    total, chance = p.new_zeros(1), p.new_ones(1)
    for one, much in zip(p, eps, strict=True):
        total, chance = (
            torch.cat([total, total + much]),
            torch.cat([chance * (1 - one), chance * one]),
        )
    return chance[(low <= total) & (total <= high)].sum()[None]


def _included(context: Context, rule: Rule, draws: list[_Draws]) -> Iterator[_Design]:
    kept = rule.include(context)
    weight = torch.ones_like(kept.probability) if kept.weight is None else kept.weight
    for i, (e, c) in enumerate(_rows(context)):
        p = kept.probability[i]
        some = (p > 0) & (p < 1)
        yield _Included(p[some], weight[i, some], e, c, kept.sure[i], some, draws[i])


def _drawn(
    context: Context, rule: Rule, part: AdaptiveRest, draws: list[_Draws]
) -> Iterator[_Design]:
    others = tuple(other for other in rule.parts if other is not part)
    if any(isinstance(other, Chance) for other in others):
        raise ValueError(
            f"keep: {part} draws from all the rest; expected no other part that keeps by chance,"
            f" got {rule}"
        )
    sure = Union(others).include(context).sure
    for i, (e, c) in enumerate(_rows(context)):
        yield _Drawn(part, e, c, sure[i], context.visible[i] & ~sure[i], draws[i])


def _rows(context: Context) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each query e / D, (N,), and c, (N, d)."""
    near = context.v.double() - context.v[0].double()
    for e in context.attention:
        yield e, near - e @ near
