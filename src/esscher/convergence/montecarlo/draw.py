"""The tokens and queries of a Monte Carlo experiment: the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.attention.prefixes import PrefixOutputs, attend_prefixes
from esscher.attention.pushforward import Pushforward
from esscher.convergence.montecarlo.seeds import generator_for
from esscher.inputs import as_count, as_counts
from esscher.measures.base import Measure

__all__ = ["Draw", "Plan", "finite_pool_factor"]


@dataclass(frozen=True)
class Draw:
    """Tokens of one repeat, for every n of ``ladder``: the first n are the prompt. ``key`` names
    it: "nested" or n.
    """

    plan: Plan
    key: str | int
    repeat: int
    ladder: tuple[int, ...]

    def generator(self, purpose: str) -> torch.Generator:
        return generator_for(self.plan.experiment, self.plan.seed, self.key, self.repeat, purpose)

    @cached_property
    def tokens(self) -> Tensor:
        measure, n = self.plan.measure, self.ladder[-1]
        if self.plan.sampling == "without_replacement":
            pool = measure.as_pool()
            assert pool is not None
            chosen = torch.randperm(pool.size, generator=self.generator("tokens"))[:n]
            rows = pool.tokens[chosen.to(pool.device)]
        else:
            rows = measure.sample(n, self.generator("tokens"))
        return rows.to(dtype=self.plan.dtype, device=self.plan.device)

    @cached_property
    def queries(self) -> Tensor:
        """Rows of nu: those given, or fresh ones from the law."""
        rows = self.plan.queries
        if isinstance(rows, int):
            rows = self.plan.measure.sample(rows, self.generator("queries"))
        return rows.to(dtype=torch.float64, device=self.plan.device)

    @cached_property
    def moments(self) -> list[PrefixOutputs]:
        """Mean and covariance of self-attention's outputs at each n, all from one pass over the
        largest prompt.
        """
        head, tokens = self.plan.head, self.tokens
        return attend_prefixes(
            head.queries(tokens), head.keys(tokens), head.values(tokens), self.ladder, 1.0
        )

    def target(self, name: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """A limit at the queries, on the device of the law; computed once where the queries are
        always the same.
        """
        known = self.plan.known
        if isinstance(self.plan.queries, int):
            return compute(self.queries.to(self.plan.measure.device))
        if name not in known:
            known[name] = compute(self.queries.to(self.plan.measure.device))
        return known[name]


@dataclass(frozen=True)
class Plan:
    """A checked Monte Carlo experiment; made by
    :func:`esscher.convergence.montecarlo.plan.plan`.
    """

    head: Head
    measure: Measure
    n: tuple[int, ...]
    metrics: tuple[str, ...]
    seed: int
    sampling: str
    query_inside: bool
    queries: Tensor | int  # rows, or the number of fresh ones a repeat
    radius: float  # of the ball of queries; nan where no metric asks for one
    experiment: str
    dtype: torch.dtype
    device: torch.device
    # limits at given queries
    known: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def draws(self, repeat: int) -> Iterator[Draw]:
        """One draw for all n where prompts are nested, one for each n where they are
        independent.
        """
        if self.sampling == "independent":
            for n in self.n:
                yield Draw(self, n, repeat, (n,))
        else:
            yield Draw(self, "nested", repeat, self.n)

    @cached_property
    def pushforward(self) -> Pushforward:
        return limit(self.head, self.measure).pushforward()

    def describe_sampling(self) -> str:
        law = type(self.measure).__name__
        nested = "nested prefixes, so that errors at different n are correlated"
        if self.sampling == "nested":
            return f"i.i.d. tokens of {law}, {nested}"
        if self.sampling == "independent":
            return f"i.i.d. tokens of {law}, drawn afresh for every n"
        pool = self.measure.as_pool()
        assert pool is not None
        size = pool.size
        if self.sampling == "replacement":
            return f"tokens drawn with replacement from a pool of {size}, {nested}"
        factors = ", ".join(f"{factor:.3g}" for factor in finite_pool_factor(self.n, size))
        return (
            f"tokens drawn without replacement from a pool of {size}, {nested}; the errors carry"
            f" the factor sqrt(1 - n/N) = {factors} for n = {', '.join(map(str, self.n))}"
        )


def finite_pool_factor(n: Any, N: Any) -> npt.NDArray[np.float64]:
    """sqrt(1 - n/N): what drawing n of N tokens without replacement does to the error of drawing
    them with replacement.

    The root of the finite population correction, to leading order; divide an error by it before
    comparing slopes.
    """
    counts, size = as_counts(n, "n"), as_count(N, "N")
    if counts.max() > size:
        raise ValueError(f"n: expected at most the {size} tokens of the pool, got {counts.max()}")
    return np.asarray(np.sqrt(1.0 - counts / size))
