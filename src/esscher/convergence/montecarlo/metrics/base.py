"""The contract of a metric: which error of a head on n tokens a Monte Carlo experiment measures,
and against what.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.measures.base import Measure

__all__ = ["Discrepancy", "Exponents", "Metric", "as_floats"]

Floats = npt.NDArray[np.float64]
PROBES = 64  # tokens of the law at which a limit must exist before any work is done


@dataclass(frozen=True)
class Discrepancy:
    """Squared error at each n of a draw, the squared size of what it is compared with, where a
    largest error is attained.
    """

    squared: Floats  # (len ladder,)
    limit_squared: float
    points: Floats | None = None  # (len ladder, d_query)


@dataclass(frozen=True)
class Exponents:
    """What theory says of the rate of a metric, nan where it says nothing; the names are columns of
    ``rates``.
    """

    bohbot: float = math.nan
    bohbot_experimental: float = math.nan
    sharp: float = math.nan


class Metric(ABC):
    """One error of a head on n tokens. A new one is a file: a subclass, and ``register`` of its one
    object.

    ``asked_by`` says who the queries are: the "tokens" of the prompt themselves (self-attention),
    the "queries" x ~ nu (rows given, or fresh ones of the law), or a "ball" |x| <= R.
    ``description`` is one line for lists and manuals.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    asked_by: ClassVar[Literal["tokens", "queries", "ball"]]
    brings: ClassVar[tuple[str, ...]] = ()  # metrics that come with it at no cost
    # compares with the limit of softmax attention, which must exist
    of_softmax: ClassVar[bool] = True
    in_float64: ClassVar[bool] = False  # whatever the dtype of the experiment

    @abstractmethod
    def target(self, plan: Plan, x: Tensor) -> Tensor:
        """What n tokens are compared with: a limit at the rows x, or one for the whole law,
        whatever x.
        """

    @abstractmethod
    def error(self, draw: Draw) -> Discrepancy:
        """The squared difference between the head on the first n tokens of the draw and the target,
        at each n.
        """

    def at_queries(self, draw: Draw) -> Tensor:
        """The target at the queries of a draw; computed once where these are always the same."""
        return draw.target(self.name, lambda x: self.target(draw.plan, x))

    def check(self, plan: Plan) -> None:
        """Raise ValueError where the experiment is not one for this metric; by default every one
        is.
        """
        return

    def probes(self, plan: Plan) -> Tensor:
        """Queries at which the limit has to exist."""
        if self.asked_by == "ball":
            eye = torch.eye(plan.head.dim_query, dtype=torch.float64, device=plan.measure.device)
            return plan.radius * torch.cat([eye, -eye])
        if self.asked_by == "queries" and isinstance(plan.queries, Tensor):
            return plan.queries.double().to(plan.measure.device)
        return plan.measure.sample(PROBES, torch.Generator().manual_seed(0)).double()

    def target_error(self, plan: Plan) -> tuple[float, str]:
        """Own error of the target, and how it was found."""
        return 0.0, "exact"

    def describe_queries(self, plan: Plan) -> str:
        if self.asked_by == "tokens":
            return "queries are the tokens"
        inside = ", each in its own prompt" if plan.query_inside else ""
        if self.asked_by == "ball":
            return f"queries |x| <= {plan.radius:.4g}{inside}, by gradient ascent"
        rows = plan.queries
        if isinstance(rows, int):
            return f"{rows} fresh queries of the law a repeat{inside}"
        return f"{rows.shape[0]} given queries{inside}"

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        """Of this metric for this head and law."""
        return Exponents()

    @property
    def has_exact(self) -> bool:
        """Whether it may have a curve without sampling."""
        return type(self).exact is not Metric.exact

    def exact(self, head: Head, measure: Measure, n: list[int], seed: int) -> ErrorCurve | None:
        """The same curve without sampling tokens, for queries of the law outside their prompts;
        None where none is known.
        """
        return None


def as_floats(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().double().cpu().numpy())
