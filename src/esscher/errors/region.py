"""confidence_region: where attention's limit lies, from one sample of keys; asymptotic, or proved
at every n.

Symbols: p_j softmax weights of n independent keys, Gamma_n = sum p_j v_j, C_n = sum_j p_j^2 (v_j -
Gamma_n)(v_j - Gamma_n)^T, n_eff = 1 / sum p_j^2, delta = 1 - level. All regions rest on one
identity: with e_j = exp(score_j),

    Gamma_n - Gamma = sum_j e_j (v_j - Gamma) / sum_j e_j,     E e (v - Gamma) = 0,

a mean of independent centred vectors over a denominator that is seen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.stats
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.attention.softmax import attention_inputs
from esscher.errors.exact import exact_curve
from esscher.errors.formulas import Exponentials, interval_probability
from esscher.inputs import as_count, as_positive, as_seed, as_tensor, finite_result, generator_for
from esscher.keep import AdaptiveRest, Chance, Context, Rule, Union, parse
from esscher.measures.base import Measure
from esscher.measures.matrices import spectral_norm

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 1 << 21  # scores held at once
ROUNDING = 1e-14  # of the values' size: lengths below it are none
SLACK = 1e-9  # by which rounding may lift a score or a value above its bound

Kind = Literal["normal", "bernstein", "markov"]
ORIGINS: dict[str, tuple[str, str]] = {
    "normal": (
        "asymptotic",
        "central limit theorem, plug-in covariance: the chance is right as effective tokens grow",
    ),
    "bernstein": (
        "proved",
        "empirical Bernstein inequality for independent keys with the stated bounds, every n",
    ),
    "markov": ("proved", "Markov's inequality on the stated mean square error, every n"),
}


@dataclass(frozen=True)
class Bounds:
    """What is known before a key is drawn: no score is above ``score``, no value further than
    ``radius`` from ``center``.

    ``score``: one number, or one for each query; scale included. They belong to the law, not to the
    sample: the largest score that was seen is no bound on those to come.
    """

    score: Any
    radius: Any
    center: Any

    @classmethod
    def of(cls, head: Head, measure: Measure, queries: Any) -> Bounds:
        """Those of a bounded law. With support |y - E y| <= R: <theta, E y> + R |theta|, ||V|| R, V
        E y; of a pool, its own.
        """
        check_pair(head, measure)
        x = as_tensor(queries, "queries", ndim=2, last=head.dim_query).double()
        pool = measure.as_pool()
        if pool is not None:
            tokens = (
                pool.tokens.double()
                if pool.weights is None
                else pool.tokens[pool.weights > 0].double()
            )
            values, center = head.values(tokens), head.values(pool.mean.double())
            highest = [
                (block @ head.keys(tokens).T).amax(1)
                for block in torch.split(head.queries(x), max(1, BLOCK // len(tokens)))
            ]
            return cls(torch.cat(highest), float((values - center).norm(dim=1).max()), center)
        reach = measure.support_radius()
        if reach is None:
            raise ValueError(
                f"measure: {type(measure).__name__} has no bounded support; give confidence_region"
                " a KnownError"
            )
        theta, mean = head.tilt(x), measure.mean.double()
        return cls(
            theta @ mean + reach * theta.norm(dim=1),
            spectral_norm(head.V.double()) * reach,
            head.values(mean),
        )


@dataclass(frozen=True)
class KnownError:
    """``mse``: E|Gamma_n - Gamma|^2 of each query at this n, or a number above it; one number
    stands for all queries.
    """

    mse: Any

    @classmethod
    def of(cls, head: Head, measure: Measure, queries: Any, n: Any) -> KnownError:
        """From the exact curve of the law, with what its quadrature leaves uncertain added."""
        curve = exact_curve(head, measure, queries, [n])
        if curve.kind != "exact" or curve.queries is None:
            raise ValueError(
                f"measure: the error of {type(measure).__name__} is not known exactly; use a law"
                " with an exact curve"
            )
        return cls(torch.from_numpy(curve.queries.mse[:, 0]) * (1.0 + 2.0 * curve.accuracy) ** 2)


@dataclass(frozen=True)
class ConfidenceRegion:
    """Ellipsoids { g : (g - center)^T shape^-1 (g - center) <= 1 }, one a query, each of which
    holds its limit with chance ``level``. ``kind`` is "normal", "bernstein" or "markov", ``status``
    "proved" or "asymptotic"; ``origin`` says by what.
    """

    center: Float64[Tensor, "m d_v"]
    shape: Float64[Tensor, "m d_v d_v"]
    level: float
    kind: Kind
    cov: Float64[Tensor, "m d_v d_v"]  # C_n
    # n_eff; an asymptotic region can be trusted when it is large
    effective_tokens: Float64[Tensor, " m"]

    @property
    def status(self) -> str:
        return ORIGINS[self.kind][0]

    @property
    def origin(self) -> str:
        return ORIGINS[self.kind][1]

    @property
    def radius(self) -> Float64[Tensor, " m"]:
        """Half the longest axis: the region lies in the ball of this radius round the centre, and
        is it unless "normal".
        """
        longest: Tensor = torch.linalg.eigvalsh(self.shape)[:, -1].clamp_min(0.0).sqrt()
        return longest

    @property
    def half_widths(self) -> Float64[Tensor, "m d_v"]:
        """Half-widths of the box around each region: simultaneous intervals for all output
        coordinates.
        """
        return self.shape.diagonal(dim1=-2, dim2=-1).sqrt()

    def contains(self, points: Any) -> Bool[Tensor, " m"]:
        """Whether each query's point lies in its region.

        A region may be flat (values that do not vary in some direction, one key with all the
        weight): off its plane, by more than rounding, nothing lies in it.
        """
        given = as_tensor(points, "points", ndim=2, last=self.center.shape[1]).double()
        if given.shape != self.center.shape:
            raise ValueError(
                f"points: expected one for each of {len(self.center)} queries, got {len(given)}"
            )
        distance, on_plane = quadratic(
            self.shape, given - self.center, (given.abs() + self.center.abs()).amax(1)
        )
        inside: Tensor = (distance <= 1.0) & on_plane
        return inside


def quadratic(shape: Tensor, apart: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """apart^T shape^+ apart of each row, and whether apart lies in the span of shape up to rounding
    of numbers of a size.
    """
    sizes, axes = torch.linalg.eigh(shape)
    along = (axes.mT @ apart[:, :, None])[:, :, 0].square()
    rounding = (ROUNDING * size[:, None]).square()
    flat = sizes <= torch.maximum(ROUNDING * sizes[:, -1:], rounding)
    on_plane = ~(flat & (along > rounding)).any(1)
    return torch.where(flat, 0.0, along / torch.where(flat, 1.0, sizes)).sum(1), on_plane


def confidence_region(
    q: Any, k: Any, v: Any, level: Any = 0.95, scale: Any = None, known: Any = None
) -> ConfidenceRegion:
    """A region for the limit Gamma(x) of each query, from attention on one sample of n independent
    keys.

    ``known`` None ("normal", asymptotic): the ellipsoid (g - Gamma_n)^T C_n^-1 (g - Gamma_n) <=
    chi^2_{d_v}(level), since n C_n -> C = E[e^2 c c^T] / (E e)^2 (delta method). A query that looks
    at a few keys is not covered, and ``effective_tokens`` says so.

    ``known`` :class:`Bounds` b, r ("bernstein", proved for every n and every law that keeps the
    bounds): the ball of radius

        (A sqrt(tr C_n) + (8/3) A^2 r w) / (1 - A / sqrt(n_eff)),
        A = sqrt(2 log(4/delta)),
        w = exp(b) / sum_j exp(score_j),

    and never above 2 r; 2 r where n_eff <= A^2. Proof: z_j = e_j (v_j - Gamma) has mean 0, |z_j| <=
    L = 2 r exp(b). With sigma^2 = E|z|^2 and l = log(4/delta), |mean z| <= sigma sqrt(2 l/n) + 2 L
    l/(3 n) but for a chance delta/2 (Bernstein in Hilbert space: Pinelis 1994, Theorem 3.2). X =
    |z|^2 >= 0 has E X^2 <= L^2 sigma^2, so but for a chance delta/2 sigma^2 - mean X <= L sigma
    sqrt(2 l/n) (exp(-x) <= 1 - x + x^2/2), hence sigma <= sqrt(mean X) + L sqrt(2 l/n). Minkowski:
    sqrt(mean e^2 |v - Gamma|^2) <= sqrt(mean e^2 |v - Gamma_n|^2) + |Gamma_n - Gamma| sqrt(mean
    e^2). Put together, divided by mean e and solved for |Gamma_n - Gamma|, this is the radius; 2 r,
    since both lie in the ball of the values.

    ``known`` :class:`KnownError` ("markov", proved): the ball of radius sqrt(mse / delta). Each
    query has its own chance: for m queries at once use level 1 - (1 - level)/m. Source: derived
    here.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
    return region_of(see(q, k, v, scale), level, known)


def region_of(seen: Seen, level: Any, known: Any = None) -> ConfidenceRegion:
    """A region from what was seen of a sample: several of them need one look."""
    kind, level = _kind(known), as_positive(level, "level")
    if level >= 1.0:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    n, d = seen.values.shape
    if known is None and n <= d:
        raise ValueError(f"k, v: expected more keys than output coordinates, got {n} keys for {d}")
    if known is None:
        shape = float(scipy.stats.chi2.ppf(level, d)) * seen.cov
    else:
        radius = (
            _bernstein(seen, known, level)
            if isinstance(known, Bounds)
            else _markov(known, level, len(seen.center))
        )
        shape = radius.to(seen.cov).square()[:, None, None] * torch.eye(
            d, dtype=torch.float64, device=seen.cov.device
        )
    shape = finite_result(shape, "v: its region", "scale v down")
    return ConfidenceRegion(seen.center, shape, level, kind, seen.cov, 1.0 / seen.sum_p2)


def _kind(known: Any) -> Kind:
    kinds: dict[type, Kind] = {type(None): "normal", Bounds: "bernstein", KnownError: "markov"}
    if type(known) not in kinds:
        raise ValueError(f"known: expected None, Bounds or KnownError, got {type(known).__name__}")
    return kinds[type(known)]


@dataclass(frozen=True)
class Seen:
    """What a sample of n keys says of each query."""

    values: Tensor  # (n, d_v)
    center: Tensor  # Gamma_n
    cov: Tensor  # C_n
    sum_p2: Tensor
    log_sum: Tensor  # log sum_j exp(score_j)
    highest: Tensor  # largest score


def see(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Seen:
    parts: list[tuple[Tensor, ...]] = []
    for rows in torch.split(q, max(1, BLOCK // k.shape[0])):
        scores = scale * (rows.double() @ k.double().T)
        scores = finite_result(
            scores, "q, k: their scores", "lower the scale or the size of q and k"
        )
        p = scores.softmax(-1)
        center = p @ v.double()
        weighted = (p[i, :, None] * (v.double() - center[i]) for i in range(len(rows)))
        cov = torch.stack([one.T @ one for one in weighted])
        parts.append((center, cov, (p * p).sum(-1), scores.logsumexp(-1), scores.amax(-1)))
    seen = Seen(v, *(torch.cat(part) for part in zip(*parts, strict=True)))
    finite_result(seen.cov, "v: its covariance", "scale v down")
    return seen


def _bernstein(seen: Seen, known: Bounds, level: float) -> Tensor:
    v = seen.values
    bound = _each(known.score, "known.score", len(seen.center)).to(seen.highest)
    reach = float(_each(known.radius, "known.radius", 1))
    center = (
        as_tensor(known.center, "known.center", ndim=1, last=v.shape[1])
        .detach()
        .double()
        .to(v.device)
    )
    highest = seen.highest.detach()
    if bool((highest > bound + SLACK * (1.0 + bound.abs())).any()):
        worst = int((highest - bound).argmax())
        raise ValueError(
            f"known.score: a score of {float(highest[worst]):.6g} is above the bound"
            f" {float(bound[worst]):.6g} of query {worst}; give a bound on every score of the law"
        )
    furthest = float((v.detach().double() - center).norm(dim=1).max())
    if furthest > reach + SLACK * (reach + float(center.norm())):
        raise ValueError(
            f"known.radius: a value lies {furthest:.6g} from the centre, the bound is {reach:.6g}; "
            "give a bound on every value of the law"
        )
    A = math.sqrt(2.0 * math.log(4.0 / (1.0 - level)))
    weight = torch.exp(torch.maximum(bound, highest) - seen.log_sum)
    spread = seen.cov.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    left = 1.0 - A * seen.sum_p2.sqrt()
    found = (A * spread + 8.0 / 3.0 * A * A * reach * weight) / torch.where(left > 0.0, left, 1.0)
    return torch.where(left > 0.0, found, torch.inf).clamp_max(2.0 * max(reach, furthest))


def _markov(known: KnownError, level: float, m: int) -> Tensor:
    return (_each(known.mse, "known.mse", m) / (1.0 - level)).sqrt()


def _each(value: Any, name: str, m: int) -> Tensor:
    """Finite numbers, one for each of m queries."""
    given = as_tensor(value, name).detach().double()
    if given.ndim > 1 or given.numel() not in (1, m):
        raise ValueError(
            f"{name}: expected one number, or one for each of {m} queries, got shape"
            f" {tuple(given.shape)}"
        )
    if name != "known.score" and bool((given < 0).any()):
        raise ValueError(f"{name}: expected numbers of at least 0, got {float(given.min()):g}")
    return given.reshape(-1).expand(m)


# ---- coverage: how often attention on kept keys misses its denominator, and its output, by more
# than a share epsilon.

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
