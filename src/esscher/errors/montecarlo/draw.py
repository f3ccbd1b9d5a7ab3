"""The tokens and queries of a Monte Carlo experiment: the same in every process."""

from __future__ import annotations

import hashlib
import json
import math
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
from esscher.attention.pushforward import Pushforward
from esscher.attention.streaming import PrefixOutputs, attend_prefixes
from esscher.inputs import as_count, as_counts
from esscher.measures.base import Measure


def generator_for(experiment: str, seed: int, *key: str | int) -> torch.Generator:
    """A generator for one draw, seeded with the first 8 bytes of sha256 of (experiment, seed,
    *key).

    Keys in use: ("nested" or n, repeat, purpose). Distinct keys give unrelated streams; 1 and "1"
    are distinct. It lives on the CPU, so that the numbers are those of every device.
    """
    text = json.dumps([experiment, seed, *key], ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


# ---- The tokens and queries of a Monte Carlo experiment: the same in every process.


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
    :func:`esscher.errors.montecarlo.converge.plan`.
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


# ---- Ladders of n as people write them.

POINTS_PER_DECADE = 4
MOST_POINTS = 10_000  # of a ladder


def parse_ladder(text: Any, name: str = "n") -> npt.NDArray[np.int64]:
    """Whole numbers from "1e3:1e12" (4 a decade), "1e3:1e12:40", "100,1000", a number or a list;
    increasing, each once.

    ``name`` is what a mistake is said of.
    """
    if not isinstance(text, str):
        ladder = as_counts(text, name)
    elif ":" in text:
        parts = text.split(":")
        if len(parts) not in (2, 3):
            raise ValueError(f"{name}: expected first:last or first:last:points, got {text!r}")
        first, last = as_counts([_number(part, name) for part in parts[:2]], name)
        points = (
            max(2, round(POINTS_PER_DECADE * math.log10(last / first)) + 1) if first < last else 1
        )
        if len(parts) == 3:
            points = int(as_counts([_number(parts[2], name)], f"{name} (points)")[0])
        if points > MOST_POINTS:
            raise ValueError(f"{name}: expected at most {MOST_POINTS} points, got {points}")
        ladder = np.unique(np.geomspace(float(first), float(last), points).round().astype(np.int64))
        if first > last:
            raise ValueError(f"{name}: expected first below last, got {text!r}")
    else:
        ladder = as_counts([_number(part, name) for part in text.split(",")], name)
    if ladder.size > MOST_POINTS:
        raise ValueError(f"{name}: expected at most {MOST_POINTS} points, got {ladder.size}")
    if (np.diff(ladder) <= 0).any():
        raise ValueError(f"{name}: expected increasing numbers, got {ladder.tolist()}")
    return ladder


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as cause:
        raise ValueError(
            f"{name}: expected numbers such as 100,1000 or 1e3:1e12, got {text!r}"
        ) from cause
