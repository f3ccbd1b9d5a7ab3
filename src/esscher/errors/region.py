"""confidence_region: where attention's limit lies, from one sample of keys; asymptotic, or proved
at every n.

Symbols: p_j softmax weights of n independent keys, Gamma_n = sum p_j v_j, C_n = sum_j p_j^2 (v_j -
Gamma_n)(v_j - Gamma_n)^T, n_eff = 1 / sum p_j^2, delta = 1 - level. All regions rest on one
identity: with e_j = exp(score_j),

    Gamma_n - Gamma = sum_j e_j (v_j - Gamma) / sum_j e_j,     E e (v - Gamma) = 0,

a mean of independent centred vectors over a denominator that is sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import scipy.stats
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.attention.state import attention_inputs
from esscher.inputs import as_kind, as_positive, as_tensor, finite_result
from esscher.measures.base import Measure
from esscher.measures.matrices import spectral_norm

BLOCK = 1 << 21  # scores held at once
ROUNDING = 1e-14  # of the values' size: lengths below it are none
SLACK = 1e-9  # by which rounding may lift a score or a value above its bound


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
            tokens = pool.tokens.double()
            values, center = head.values(tokens), head.values(pool.mean.double())
            highest = [
                (block @ head.keys(tokens).T).amax(1)
                for block in torch.split(head.queries(x), max(1, BLOCK // len(tokens)))
            ]
            return cls(torch.cat(highest), float((values - center).norm(dim=1).max()), center)
        reach = measure.support_radius()
        if reach is None:
            raise ValueError(
                f"measure: {type(measure).__name__} has no bounded support, so no bounds on scores"
                " and values"
            )
        theta, mean = head.tilt(x), measure.mean.double()
        return cls(
            theta @ mean + reach * theta.norm(dim=1),
            spectral_norm(head.V.double()) * reach,
            head.values(mean),
        )


@dataclass(frozen=True)
class ConfidenceRegion:
    """Ellipsoids { g : (g - center)^T shape^-1 (g - center) <= 1 }, one a query, each of which
    holds its limit with chance ``level``. ``kind`` "normal": by the central limit theorem with the
    plug-in covariance; "bernstein": by an empirical Bernstein inequality, at every n.
    """

    center: Float64[Tensor, "m d_v"]
    shape: Float64[Tensor, "m d_v d_v"]
    level: float
    kind: str
    cov: Float64[Tensor, "m d_v d_v"]  # C_n
    # n_eff; an asymptotic region can be trusted when it is large
    effective_tokens: Float64[Tensor, " m"]

    @property
    def status(self) -> str:
        return "asymptotic" if self.kind == "normal" else "proved"

    @property
    def radius(self) -> Float64[Tensor, " m"]:
        """Half the longest axis: the region lies in the ball of this radius round the centre, and
        is it unless "normal".
        """
        longest: Tensor = torch.linalg.eigvalsh(self.shape)[:, -1].clamp_min(0.0).sqrt()
        return longest

    @torch.no_grad()
    def contains(self, points: Any) -> Bool[Tensor, " m"]:
        """Whether each query's point lies in its region, or in its plane where that is flat."""
        given = as_tensor(points, "points", ndim=2, last=self.center.shape[1]).double()
        if given.shape != self.center.shape:
            raise ValueError(
                f"points: expected one for each of {len(self.center)} queries, got {len(given)}"
            )
        apart = (given - self.center)[:, :, None]
        rounding = ROUNDING * (given.abs() + self.center.abs()).amax(1)
        ends = {"atol": rounding.square(), "rtol": torch.full_like(rounding, ROUNDING)}
        inverse = torch.linalg.pinv(self.shape, hermitian=True, **ends)
        distance = (apart.mT @ inverse @ apart)[:, 0, 0]
        off_plane = (apart - self.shape @ (inverse @ apart)).norm(dim=1)[:, 0]
        inside: Tensor = (distance <= 1.0) & (off_plane <= 10 * rounding)
        return inside


@torch.no_grad()
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

    and never above 2 r; 2 r where n_eff <= A^2. Proof: "Confidence regions" in the documentation.

    Each query has its own chance: for m queries at once use level 1 - (1 - level)/m. Source:
    derived here.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
    level = as_positive(level, "level")
    if level >= 1.0:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    v, (n, d) = v.double(), v.shape
    parts: list[tuple[Tensor, ...]] = []
    for rows in torch.split(q, max(1, BLOCK // n)):
        scores = scale * (rows.double() @ k.double().T)
        scores = finite_result(
            scores, "q, k: their scores", "lower the scale or the size of q and k"
        )
        p = scores.softmax(-1)
        means = p @ v
        weighted = (p[i, :, None] * (v - means[i]) for i in range(len(rows)))
        covs = torch.stack([one.T @ one for one in weighted])
        parts.append((means, covs, 1.0 / (p * p).sum(-1), scores.logsumexp(-1), scores.amax(-1)))
    center, cov, effective, log_sum, highest = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    finite_result(cov, "v: its covariance", "scale v down")
    if known is None:
        if n <= d:
            raise ValueError(
                f"k, v: expected more keys than output coordinates, got {n} keys for {d}"
            )
        kind, shape = "normal", float(scipy.stats.chi2.ppf(level, d)) * cov
    else:
        bound, reach = _checked(as_kind(known, Bounds, "known"), highest, v)
        A = math.sqrt(2.0 * math.log(4.0 / (1.0 - level)))
        spread = cov.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        left = (1.0 - A / effective.sqrt()).clamp_min(0.0)
        radius = (A * spread + 8.0 / 3.0 * A * A * reach * torch.exp(bound - log_sum)) / left
        radius = radius.nan_to_num(nan=torch.inf).clamp_max(2.0 * reach)
        eye = torch.eye(d, dtype=torch.float64, device=v.device)
        kind, shape = "bernstein", radius.square()[:, None, None] * eye
    shape = finite_result(shape, "v: its region", "scale v down")
    return ConfidenceRegion(center, shape, level, kind, cov, effective)


def _checked(known: Bounds, highest: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """The bounds on each query's scores (m,) and on the distance of values; ValueError where the
    sample breaks them by more than rounding.
    """
    bound = as_tensor(known.score, "known.score").to(highest).reshape(-1)
    if bound.numel() not in (1, len(highest)):
        raise ValueError(
            f"known.score: expected one number, or one for each of {len(highest)} queries, got"
            f" {bound.numel()}"
        )
    bound = bound.expand(len(highest))
    if bool((highest > bound + SLACK * (1.0 + bound.abs())).any()):
        worst = int((highest - bound).argmax())
        raise ValueError(
            f"known.score: a score of {float(highest[worst]):.6g} is above the bound"
            f" {float(bound[worst]):.6g} of query {worst}; give a bound on every score of the law"
        )
    reach = float(as_tensor(known.radius, "known.radius", ndim=0))
    center = as_tensor(known.center, "known.center", ndim=1, last=v.shape[1]).to(v)
    furthest = float((v - center).norm(dim=1).max())
    if furthest > reach + SLACK * (reach + float(center.norm())):
        raise ValueError(
            f"known.radius: a value lies {furthest:.6g} from the centre, the bound is {reach:.6g}; "
            "give a bound on every value of the law"
        )
    return torch.maximum(bound, highest), max(reach, furthest)
