"""Prediction: one statement of theory about the error at n tokens, with its source, its hypotheses
and its status. Setting: the numbers of one head and its laws. predictions: all statements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml

from esscher.attention.head import Head, check_pair, coupling_of
from esscher.inputs import as_counts, as_positive
from esscher.measures.base import Measure, power
from esscher.measures.matrices import largest_singular, product, spectral_norm

Floats = npt.NDArray[np.float64]
Conditions = tuple[tuple[str, bool | None], ...]
SMALLEST = 1e-100  # a point mass is sub-Gaussian for every sigma; the formulas divide by sigma
POWER: dict[str, float] = {"rms": 1.0, "mean absolute": 1.0, "squared": 0.5, "fourth power": 0.25}


@dataclass(frozen=True, repr=False)
class Prediction:
    """What one statement says of one head and one measure.

    ``status`` is "proved" (a bound: the exact error lies below ``value`` wherever ``applies``),
    "proved (asymptotic)" (of large n, constant or remainder not known here), "heuristic" (derived,
    not proved) or "experimental" (a curve that experiments were compared with). ``value`` maps
    token numbers to float64 in ``units`` ("squared": the bound is on the squared error), infinite
    where the statement says nothing at that n; None for a pure exponent. ``exponent`` is b where
    the root mean square error falls like n^-b. ``numbers``: what the formula was evaluated with.
    """

    name: str
    source: str
    formula: str
    status: str
    quantity: str
    conditions: Conditions = ()
    exponent: float | None = None
    value: Callable[[Any], Floats] | None = None
    units: str = "none"  # of the value: a key of POWER
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        applies = "applies" if self.applies else f"does not apply: {'; '.join(self.unmet)}"
        return f"Prediction({self.name}, {self.status}: {self.formula}; {applies})"

    @property
    def applies(self) -> bool:
        """All hypotheses hold. One that could not be checked (None) counts as not met."""
        return not self.unmet

    @property
    def unmet(self) -> tuple[str, ...]:
        """The hypotheses that fail or could not be checked."""
        return tuple(text for text, met in self.conditions if met is not True)

    def rms(self, n: Any) -> Floats:
        """``value`` as an error: its square or fourth root where it is a power of the error."""
        if self.value is None:
            raise ValueError(
                f"{self.name}: this prediction has an exponent and no value; read .exponent and"
                " .formula"
            )
        return np.asarray(self.value(as_counts(n, "n")) ** POWER[self.units], dtype=np.float64)


@functools.cache
def _words() -> dict[str, dict[str, Any]]:
    text = resources.files("esscher.theory").joinpath("statements.yaml").read_text("utf-8")
    return dict(yaml.safe_load(text))


def state(
    name: str,
    conditions: Conditions,
    exponent: float | None = None,
    value: Callable[[Any], Floats] | None = None,
    numbers: Mapping[str, float] | None = None,
    known: bool = True,
) -> Prediction:
    """The prediction of this name, its words from ``statements.yaml``; a bare one where the numbers
    it is made of are not ``known``.
    """
    words = dict(_words()[name])
    if not known:
        exponent, value, numbers = None, None, None
    if value is None:
        words["units"] = "none"
    else:  # a bound beyond float64 is infinite: numpy need not warn
        value = np.errstate(all="ignore")(value)
    return Prediction(
        name, **words, conditions=conditions, exponent=exponent, value=value, numbers=numbers or {}
    )


class Setting:
    """The numbers of one head, one law of tokens and one law of queries (by default the tokens')
    that statements are made of. Symbols as in ``boursier``; None where the law does not have the
    number. The statements at one query hold for all queries |x| <= ``radius``, by default the root
    mean square norm of a query.
    """

    def __init__(
        self, head: Head, measure: Measure, queries_law: Measure | None = None, radius: Any = None
    ) -> None:
        check_pair(head, measure)
        queries = measure if queries_law is None else queries_law
        if queries.dim != head.dim_query:
            raise ValueError(
                f"queries_law: expected a measure of dimension {head.dim_query}, the head's"
                f" queries, got {queries.dim}; pass queries_law when queries and tokens differ"
            )
        self.head, self.measure, self.queries = head, measure, queries
        self.own_queries = queries is measure  # self-attention
        mean = queries.mean.double()
        size = math.sqrt(float(queries.cov.double().trace() + mean @ mean))
        self.queries_centred = float(mean.norm()) <= 1e-9 * size
        self.radius = size if radius is None else as_positive(radius, "radius")

        A, V = head.A.detach().double(), head.V.detach().double()
        bias = torch.zeros(head.dim, dtype=torch.float64)
        if head.tilt_bias is not None:
            bias = head.tilt_bias.detach().double()
        self.no_bias = not bool(bias.any())
        self.a_norm, direction = largest_singular(A)
        self.v_norm = spectral_norm(V)
        if float((A @ direction) @ bias) < 0:
            direction = -direction
        self.query = self.radius * direction  # of that norm, where A stretches most
        self.tilt = self.a_norm * self.radius + float(bias.norm())  # largest |theta(x)|

        sigma, tau = measure.sigma, queries.sigma  # sub-Gaussian parameters of the centred laws
        self.sigma = None if sigma is None else max(sigma, SMALLEST)
        self.u_norm = None if tau is None else tau * self.a_norm
        self.fourth = measure.norm_moment(4, V)  # E|V (y - E y)|^4
        self.token_fourth, self.token_eighth = measure.norm_moment(4), measure.norm_moment(8)
        horizon, coupling = proved_coupling(head, measure)
        self.horizon: float | None = horizon
        self.coupling: float | None = coupling
        scores = product(product(measure.root.T, A), queries.root)
        self.horizon2 = spectral_norm(scores)  # ||Sigma^{1/2} A Sigma_q^{1/2}||_2
        # root mean square over queries of s(x) = sqrt(theta^T Sigma theta)
        offset = float((measure.root.T @ (A @ mean + bias)).norm())
        self.score_deviation = math.hypot(float(scores.norm()), offset)


def proved_coupling(head: Head, measure: Measure) -> tuple[float | None, float | None]:
    """||S^{1/2} A||_2 and ||S||_2 ||S^{1/2} A||_2^2 for the sub-Gaussian matrix S of the law, of
    which the theorems of [B] are proved; None without one.
    """
    root = measure.subgaussian_root
    if root is None:
        return None, None
    horizon = spectral_norm(product(root.T, head.A.double()))
    return horizon, coupling_of(spectral_norm(root), horizon)


def tilted_moment(setting: Setting, p: int, q: int) -> float | None:
    """Upper bound on E_x[ |x|^q E_{tilted by A x} |y - E y|^p ], the left side of [S] Assumption
    3.3 (sigma^{2p} M_{p,q} there); None where unknown.

    Tokens within R of their mean: R^p E|x|^q. Gaussian tokens, as in [S] Lemma F.1: 2^{p-1}
    ( (||Sigma|| ||A||)^p E|x|^{p+q} + E|y - E y|^p E|x|^q ).
    """
    measure, queries = setting.measure, setting.queries
    own = 1.0 if q == 0 else queries.norm_moment(q)
    if own is None or not setting.queries_centred:
        return None
    radius = measure.support_radius()
    if radius is not None:
        return power(radius, p) * own
    centred, far = measure.norm_moment(p), queries.norm_moment(p + q)
    if not measure.is_gaussian or centred is None or far is None:
        return None
    return 2.0 ** (p - 1) * (power(measure.reach * setting.a_norm, p) * far + centred * own)


@torch.no_grad()
def predictions(
    head: Head, measure: Measure, *, queries_law: Measure | None = None, radius: Any = None
) -> list[Prediction]:
    """Every statement of theory about this head on tokens of this law; ``.applies`` says whether
    its hypotheses hold, ``.unmet`` which fail.

    ``queries_law``: law of the queries, by default that of the tokens (self-attention). ``radius``:
    the statements at one query hold for all queries |x| <= radius, by default the root mean square
    norm of a query.
    """
    from esscher.theory import bohbot, boursier, sharp  # they import this file

    setting = Setting(head, measure, queries_law, radius)
    theories = (
        sharp.exponents,
        bohbot.moments,
        sharp.uniform,
        bohbot.hardmax,
        boursier.one_query,
        sharp.delta,
        boursier.averaged,
        boursier.gradients,
        sharp.kept_keys,
    )
    return [prediction for theory in theories for prediction in theory(setting)]
