"""Prediction: one statement of theory about the error at n tokens, with its source, its hypotheses
and its status. Setting: the numbers of one head, one law of tokens and one law of queries that
predictions are made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head, check_pair, coupling_of
from esscher.inputs import as_counts, as_positive
from esscher.measures.base import Measure
from esscher.measures.matrices import largest_singular, product, spectral_norm
from esscher.measures.moments import power

Floats = npt.NDArray[np.float64]
Conditions = tuple[tuple[str, bool | None], ...]

Status = Literal[
    "proved",
    "exact",
    "proved (asymptotic)",
    "heuristic",
    "experimental",
    "printed (not proved as printed)",
]
Units = Literal["rms", "mean absolute", "squared", "fourth power", "none"]

SMALLEST = 1e-100  # a point mass is sub-Gaussian for every sigma; the formulas divide by sigma
POWER: dict[str, float] = {"rms": 1.0, "mean absolute": 1.0, "squared": 0.5, "fourth power": 0.25}


@dataclass(frozen=True, repr=False)
class Prediction:
    """What one statement says of one head and one measure.

    ``status`` is one of

    - "proved": a bound with a complete proof, so the exact error lies below ``value`` wherever
      ``applies``;
    - "exact": an equality at every n;
    - "proved (asymptotic)": a proved statement about large n whose constant or remainder is not
      known here;
    - "heuristic": derived, not proved;
    - "experimental": a curve that experiments were compared with;
    - "printed (not proved as printed)": kept as its source prints it; its proof has a gap or the
      statement fails in a corner.

    ``value`` maps token numbers to float64 in ``units`` ("squared": the bound is on the squared
    error); it is infinite where the statement says nothing at that n, and None for a pure exponent.
    ``exponent`` is b where the root mean square error falls like n^-b. ``numbers`` holds what the
    formula was evaluated with. Without a value there are no units.
    """

    name: str
    statement: str
    source: str
    formula: str
    status: Status
    quantity: str
    conditions: Conditions = ()
    exponent: float | None = None
    value: Callable[[Any], Floats] | None = None
    units: Units = "none"
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.status in get_args(Status)
        assert self.units in get_args(Units)
        if self.value is None:
            object.__setattr__(self, "units", "none")
        else:
            assert self.units != "none"
            object.__setattr__(self, "value", _quietly(self.value))

    def __repr__(self) -> str:
        applies = "applies" if self.applies else f"does not apply: {'; '.join(self.unmet)}"
        return f"Prediction({self.name}, {self.status}: {self.formula}; {applies})"

    @property
    def applies(self) -> bool:
        """All hypotheses hold. One that could not be checked (None) counts as not met."""
        return all(met is True for _, met in self.conditions)

    @property
    def unmet(self) -> tuple[str, ...]:
        """The hypotheses that fail or could not be checked."""
        return tuple(text for text, met in self.conditions if met is not True)

    def rms(self, n: Any) -> Floats:
        """``value`` turned into an error: its square or fourth root where it is a power of the
        error.
        """
        if self.value is None:
            raise ValueError(
                f"{self.name}: this prediction has an exponent and no value; read .exponent and"
                " .formula"
            )
        return np.asarray(self.value(as_counts(n, "n")) ** POWER[self.units], dtype=np.float64)


def _quietly(value: Callable[[Any], Floats]) -> Callable[[Any], Floats]:
    """The same numbers without numpy's warnings: a bound beyond float64 is infinite, and 0 times
    infinity says nothing.
    """

    @functools.wraps(value)
    def quiet(n: Any) -> Floats:
        with np.errstate(all="ignore"):
            return value(n)

    return quiet


@dataclass(frozen=True)
class Setting:
    """Symbols as in ``boursier``; None where the law does not have the number."""

    head: Head
    measure: Measure
    queries: Measure
    own_queries: bool  # queries have the law of the tokens (self-attention)
    radius: float  # bound on |x| for the statements at one query
    query: Tensor  # a query of that norm, along the direction A stretches most
    tilt: float  # largest |theta(x)| over |x| <= radius
    sigma: float | None
    tau: float | None  # sub-Gaussian parameter of the centred query law
    a_norm: float
    v_norm: float
    fourth: float | None  # E|V (y - E y)|^4
    token_fourth: float | None
    token_eighth: float | None
    queries_centred: bool
    # ||S^{1/2} A||_2, S the sub-Gaussian matrix of the tokens that gives the least
    horizon: float | None
    coupling: float | None  # ||S||_2 ||S^{1/2} A||_2^2, likewise
    horizon2: float  # ||Sigma^{1/2} A Sigma_q^{1/2}||_2
    score_deviation: float  # root mean square over queries of s(x) = sqrt(theta^T Sigma theta)

    @property
    def u_norm(self) -> float | None:
        return None if self.tau is None else self.tau * self.a_norm


def setting_of(
    head: Head, measure: Measure, queries_law: Measure | None = None, radius: Any = None
) -> Setting:
    """``queries_law`` defaults to the law of the tokens, ``radius`` to the root mean square norm of
    a query.
    """
    check_pair(head, measure)
    queries = measure if queries_law is None else queries_law
    if queries.dim != head.dim_query:
        raise ValueError(
            f"queries_law: expected a measure of dimension {head.dim_query}, the head's queries,"
            f" got {queries.dim}; pass queries_law when queries and tokens differ"
        )
    mean, cov_q = queries.mean.double(), queries.cov.double()
    root_mean_square = math.sqrt(float(cov_q.trace() + mean @ mean))
    R = root_mean_square if radius is None else as_positive(radius, "radius")
    A, V = head.A.detach().double(), head.V.detach().double()
    bias = torch.zeros(head.dim, dtype=torch.float64)
    if head.tilt_bias is not None:
        bias = head.tilt_bias.detach().double()
    a_norm, direction = largest_singular(A)
    direction = direction * (-1.0 if float((A @ direction) @ bias) < 0 else 1.0)
    horizon, coupling = proved_coupling(head, measure)
    scores = product(product(measure.root.T, A), queries.root)
    offset = measure.root.T @ (A @ mean + bias)
    return Setting(
        head=head,
        measure=measure,
        queries=queries,
        own_queries=queries is measure,
        radius=R,
        query=R * direction,
        tilt=a_norm * R + float(bias.norm()),
        sigma=None if measure.sigma is None else max(measure.sigma, SMALLEST),
        tau=queries.sigma,
        a_norm=a_norm,
        v_norm=spectral_norm(V),
        fourth=measure.value_fourth_moment(V),
        token_fourth=measure.norm_moment(4),
        token_eighth=measure.norm_moment(8),
        queries_centred=float(mean.norm()) <= 1e-9 * root_mean_square,
        horizon=horizon,
        coupling=coupling,
        horizon2=spectral_norm(scores),
        score_deviation=math.hypot(float(scores.norm()), float(offset.norm())),
    )


def proved_coupling(head: Head, measure: Measure) -> tuple[float, float] | tuple[None, None]:
    """The least ||S^{1/2} A||_2 and ||S||_2 ||S^{1/2} A||_2^2 over the sub-Gaussian matrices S of
    the law; None without one.

    The theorems of [B] hold for these: with the covariance in place of S, as in ``Head.coupling``,
    they are proved for Gaussian tokens only.
    """
    roots = measure.subgaussian_roots
    if not roots:
        return None, None
    A = head.A.double()
    horizons = [spectral_norm(product(root.T, A)) for root in roots]
    sizes = [spectral_norm(root) for root in roots]
    return min(horizons), min(map(coupling_of, sizes, horizons))


def tilted_moment(setting: Setting, p: int, q: int) -> float | None:
    """Upper bound on E_x[ |x|^q E_{tilted by A x} |y - E y|^p ], the left side of [S] Assumption
    3.3; None where unknown.

    With (a, b) of ``Measure.tilted_moment``: (a ||A||)^p E|x|^{p+q} + b E|x|^q. The paper's M_{p,q}
    is this over sigma^{2p}.
    """
    known = setting.measure.tilted_moment(p)
    own = 1.0 if q == 0 else setting.queries.norm_moment(q)
    if known is None or own is None or not setting.queries_centred:
        return None
    slope, constant = known
    if slope == 0.0:
        return constant * own
    far = setting.queries.norm_moment(p + q)
    return None if far is None else power(slope * setting.a_norm, p) * far + constant * own
