"""Results derived here: exponents from the random energy model (heuristic), a proved bound at one
query whose leading term is the delta method's, a proved constant for the uniform error, and what
the error of n kept keys tends to.

Exponents, Gaussian tokens and queries. At one query of score deviation s = c sqrt(2 ln n) the error
of the softmax over n Gaussian scores is n^{-b}:

    root mean square   b = 1/2 - c^2 for c < 1/sqrt(3),   (1 - c^2)^2 / (8 c^2) up to c = 1
    typical            b = 1/2 - c^2 for c < 1/2,         (1 - c)^2 up to c = 1

They differ because the mean square is carried by rare draws in which one token beats the rest.
Queries with s >= c sqrt(2 ln n) have chance n^{-c^2/h^2}, h the two-sided horizon; the exponents
below are the minima over c of the sum.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from esscher.attention.head import Head
from esscher.inputs import as_counts, as_tensor
from esscher.measures.base import Measure
from esscher.measures.matrices import product, spectral_norm
from esscher.measures.rotational import Rotational
from esscher.theory.prediction import Conditions, Floats, Prediction, Setting, state

RMS = "min(1/2, (√(1+4/h²)−1)/4)"  # the exponents as pictures write them
TYPICAL = "min(1/2, 1/(1+2h²))"
SHARES = np.concatenate([np.linspace(0.05, 0.9, 35), 1.0 - np.geomspace(0.09, 1e-4, 40)])
CHANCE = 0.01  # of a larger error than a statement with a chance says
LEVELS = 64  # of nets: the next one would change no digit


# ---- exponents of the random energy model


def l2_exponent_typical(horizon2: float) -> float:
    """min(1/2, 1/(1 + 2 h^2)): the L2(nu) norm of Gamma_n - Gamma in a typical draw of tokens."""
    return min(0.5, 1.0 / (1.0 + 2.0 * horizon2 * horizon2))


def l2_exponent_rms(horizon2: float) -> float:
    """min(1/2, (sqrt(1 + 4/h^2) - 1)/4): root of the mean square L2(nu) norm, which is what an
    exact curve holds: half of min over c of (1 - c^2)^2/(4 c^2) + c^2/h^2.
    """
    return min(0.5, _saddle(4.0, horizon2))


def moment_exponent_typical(horizon2: float) -> float:
    """min(1/2, 1/(1 + h^2)): typical error of the mean and covariance of the outputs."""
    return min(0.5, 1.0 / (1.0 + horizon2 * horizon2))


def moment_exponent_rms(horizon2: float) -> float:
    """min(1/2, (sqrt(1 + 8/h^2) - 1)/4): root mean square error of the mean and covariance of the
    outputs; as above with the chance of the query squared, being averaged before it is squared.
    """
    return min(0.5, _saddle(8.0, horizon2))


def gaussian_centred(measure: Measure) -> bool:
    """Whether these exponents hold for tokens of this law that are their own queries."""
    return measure.is_gaussian and not bool(measure.mean.any())


def freezing_tokens(score_deviation: float) -> float:
    """n* = exp(s^2/2): below it the softmax of n Gaussian scores of deviation s rests on few."""
    exponent = 0.5 * score_deviation * score_deviation
    return math.exp(exponent) if exponent < 709.0 else math.inf


def critical_scale(head: Head, measure: Measure, query: Any, n: Any) -> Floats:
    """Lambda_n = sup over t > 0 of log N_n(t) / t at one query, N_n(t) = n P(score > m - t) with
    N_n(0) = 1: the factor on the scores at which softmax over n Gaussian tokens freezes.

    log P(score > .) is concave, so that it is the hazard rate at m: n phi(z) / s with P(g > z) =
    1/n, about sqrt(2 log n) / s. ``esscher.tails.scores.critical_scale`` of a row of scores, for
    their expected numbers; the median over rows of n random scores is about 1.25 times this.
    """
    if not measure.is_gaussian:
        raise ValueError(f"measure: expected Gaussian tokens, got {type(measure).__name__}")
    theta = head.tilt(as_tensor(query, "query", ndim=1).double())
    s = math.sqrt(max(float(theta @ measure.cov.double() @ theta), 0.0))
    counts = as_counts(n, "n").astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):  # infinite where all scores are alike
        scale = counts * stats.norm.pdf(stats.norm.isf(1.0 / counts)) / np.float64(s)
    return np.where(counts > 1, scale, 0.0)


def _saddle(constant: float, horizon2: float) -> float:
    if horizon2 <= 0.0:
        return math.inf
    ratio = constant / horizon2 / horizon2
    return 0.25 * ratio / (math.sqrt(1.0 + ratio) + 1.0)  # (sqrt(1 + r) - 1)/4 without cancellation


def exponents(setting: Setting) -> list[Prediction]:
    """Exponents of the random energy model and the freezing threshold; heuristic."""
    h, s = setting.horizon2, setting.score_deviation
    gaussian: Conditions = (
        ("tokens are Gaussian", setting.measure.is_gaussian),
        (
            "queries are Gaussian and centred",
            setting.queries.is_gaussian and setting.queries_centred,
        ),
    )
    rows = [
        ("sharp-l2", l2_exponent_typical(h)),
        ("sharp-l2-rms", l2_exponent_rms(h)),
        ("sharp-moments", moment_exponent_typical(h)),
        ("sharp-moments-rms", moment_exponent_rms(h)),
    ]
    frozen = {"score_deviation": s, "n_star": freezing_tokens(s)}
    return [
        *(state(name, gaussian, exponent, numbers={"horizon2": h}) for name, exponent in rows),
        state("freezing", gaussian[:1], numbers=frozen),
    ]


# ---- one query: the delta method with a bound


def delta_bound(n: Any, ratio: float, delta: float, fourth: float, centre: float) -> Floats:
    """E|Gamma_n(x) - Gamma(x)|^2 at most

        min over 0 < a < 1 of  delta / (a^2 n) + 2 sqrt(n fourth P) + 2 centre^2 P,
        P = exp(-(1-a)^2 n / (2 ratio)),

    and at most 2 sqrt(n fourth) + 2 centre^2. Here e = exp<theta, y>, c = V y - Gamma(x), ``ratio``
    = E e^2 / (E e)^2, ``delta`` = E e^2 |c|^2 / (E e)^2 (delta/n is the delta method's value, which
    the bound tends to), ``fourth`` = E|V (y - E y)|^4, ``centre`` = |Gamma(x) - V E y|. Source:
    derived here; proof: "Bounds" in the documentation.
    """
    counts = as_counts(n, "n").astype(np.float64)[:, None]
    square = centre * centre
    with np.errstate(over="ignore", under="ignore"):  # infinite where a number is beyond float64
        chance = np.exp(-((1.0 - SHARES) ** 2) * counts / (2.0 * ratio))
        rare = 2.0 * np.sqrt(counts * chance) * math.sqrt(fourth) + 2.0 * square * chance
        split = (delta / (SHARES**2 * counts) + rare).min(axis=1)
        most = 2.0 * np.sqrt(counts[:, 0]) * math.sqrt(fourth) + 2.0 * square
    return np.asarray(np.nan_to_num(np.fmin(split, most), nan=np.inf, posinf=np.inf), np.float64)


def delta_bound_numbers(head: Head, measure: Measure, query: Any) -> dict[str, float]:
    """ratio, delta, fourth and centre of ``delta_bound`` for one query."""
    theta = head.tilt(as_tensor(query, "query", ndim=1).double())
    V = head.V.double()
    fourth = measure.norm_moment(4, V)
    if fourth is None:
        raise ValueError(f"measure: the fourth moment of {type(measure).__name__} is not known")
    log_ratio, matrix = _delta_matrix(head, measure, theta)
    spread = float(matrix.trace())
    ratio = math.exp(log_ratio) if log_ratio < 700.0 else math.inf
    centre = float((V @ (measure.tilted_mean(theta) - measure.mean.double())).norm())
    return {
        "ratio": ratio,
        "delta": ratio * spread if spread > 0.0 else 0.0,
        "fourth": fourth,
        "centre": centre,
    }


def _delta_matrix(head: Head, measure: Measure, theta: Tensor) -> tuple[float, Tensor]:
    """log ratio, and the delta method's matrix over the ratio: with K the log-Laplace transform and
    theta the tilt, K(2 theta) - 2 K(theta), and V Hess K(2 theta) V^T + s s^T, s = V (grad K(2
    theta) - grad K(theta)).
    """
    from esscher.attention.limit import second_tilt  # exponents alone need no laws

    V = head.V.double()
    log_growth, shift, cov = second_tilt(head, measure, theta)
    return float(log_growth), product(product(V, cov), V.T) + torch.outer(shift, shift)


def chi_squared_radius(spectrum: Any, delta: float) -> float:
    """r^2 with P(|X|^2 > r^2) <= delta for X ~ N(0, C), ``spectrum`` the eigenvalues of C:

        tr C + 2 sqrt(tr C^2 t) + 2 ||C|| t,   t = log(1 / delta).

    Source: Laurent and Massart, Annals of Statistics 28 (2000), Lemma 1. sqrt(n) (Gamma_n - Gamma)
    -> N(0, C): as n grows n |Gamma_n - Gamma|^2 exceeds r^2 with a chance of at most delta.
    """
    values, t = np.asarray(spectrum, np.float64), math.log(1.0 / delta)
    largest = float(values.max())
    if largest in (0.0, math.inf):
        return largest
    values = values / largest  # squares of large ones are beyond the floating range
    size = float(np.linalg.norm(values))
    return largest * (float(values.sum()) + 2.0 * size * math.sqrt(t) + 2.0 * t)


def delta(setting: Setting) -> list[Prediction]:
    """The bound at ``setting.query``, the limit it proves (the rate of keys taken as they come),
    and the chi-squared concentration around it.
    """
    head, measure, query = setting.head, setting.measure, setting.query
    numbers: dict[str, float] = {}
    reach: dict[str, float] = {}
    try:  # the transform may be infinite at twice the tilt, or a moment not known
        log_ratio, matrix = _delta_matrix(head, measure, head.tilt(query).double())
        if log_ratio < 700.0:
            values = torch.linalg.eigvalsh(matrix).clamp_min(0.0) * math.exp(log_ratio)
            radius = chi_squared_radius(values.cpu().numpy(), CHANCE)
            reach = {"constant": radius, "delta": CHANCE}
        numbers = delta_bound_numbers(head, measure, query)
    except ValueError:
        pass
    conditions = (("E exp<2 theta, y> is finite and E|V (y - E y)|^4 is known", bool(numbers)),)
    known = bool(numbers)
    constant = {"constant": numbers.get("delta", 0.0)}
    finite = (("E exp<2 theta, y> is finite", bool(reach)),)
    return [
        state("delta-bound", conditions, 0.5, lambda n: delta_bound(n, **numbers), numbers, known),
        state("keep-random", conditions, 0.5, numbers=constant, known=known),
        state("delta-chi-squared", finite, 0.5, numbers=reach),
    ]


# ---- the largest error over a ball of queries: the method of [B] Theorem 3.4, with constants


def dudley_sum(dim: int) -> float:
    """S = sum over j >= 1 of 2^{1-j} sqrt(2 log(2 N_j)), N_j = (1 + 2^{j+1})^dim: a net of mesh
    2^{-j} in the unit ball. A process of norms whose increments over a distance t have E cosh(l
    |Z_x - Z_y|) <= exp(l^2 t^2 / 2) has E sup |Z_x - Z_0| <= S over the unit ball.
    """
    level = np.arange(1, LEVELS + 1, dtype=np.float64)
    logs = dim * np.log1p(2.0 ** (level + 1.0)) + math.log(2.0)
    return float((2.0 ** (1.0 - level) * np.sqrt(2.0 * logs)).sum())


def chaining_constant(
    score: float, log_peak: float, value: float, spread: float, dim: int
) -> float:
    """C with E sup over |x| <= r of |Gamma_n(x) - Gamma(x)| at most C / sqrt(n) for every n:

        C = (sqrt(C_N) + sqrt(2 v C_D))^2,   C_N = 2 spread + 8 v M B S,   C_D = 4 M B S.

    Tokens lie within R of their mean, v = ||V|| R (``value``), B = ||A|| r R (``score``), spread^2
    = tr V Sigma V^T, S = ``dudley_sum`` of the rank of A (``dim``), and M bounds w = exp(<theta, y
    - E y> - K(theta)), K of the centred law (``log_peak`` = log M, at most B). Source: derived
    here, by the method of [B] Theorem 3.4; proof: "Bounds" in the documentation.
    """
    with np.errstate(over="ignore"):
        chain = float(np.exp(log_peak)) * score * dudley_sum(dim)
    numerator, denominator = 2.0 * spread + 8.0 * value * chain, 4.0 * chain
    return (math.sqrt(numerator) + math.sqrt(2.0 * value * denominator)) ** 2


def gaussian_uniform_constant(
    horizon: float, rank: float, along: float, spread: float, limit: float
) -> float:
    """The same C for Gaussian tokens, whatever their support:

        C = min over s, a, q of (C_R + g C_D) / a + sqrt((q - 1) v) k^(1/2 + 1/q) + g k^(1/2),
        C_D^2 = exp(h^2 / s^2) (1 - 2 s^2)^(-rank/2),   k = C_D^2 / (1 - a)^2,
        C_R^2 = C_D^2 (``along`` / (1 - 2 s^2) + v - ``along``),

    0 < s^2 < 1/2, 0 < a < 1, q >= 4. h = ||Sigma^(1/2) A|| r (``horizon``), v = tr V Sigma V^T
    (``spread``), of which ``along`` is in the range of Sigma^(1/2) A, g = ||V Sigma A|| r
    (``limit``). log C is h^2 (1 + o(1)), as in [B]. Source: derived here; proof: "Bounds".
    """
    if spread <= 0.0:
        return 0.0
    gap = np.geomspace(1e-6, 0.999, 80)[:, None, None]  # 1 - 2 s^2
    a, q = SHARES[None, :, None], np.geomspace(4.0, 1e4, 40)[None, None, :]
    with np.errstate(all="ignore"):  # infinite where a number is beyond float64
        log_d = np.float64(horizon) ** 2 / (1.0 - gap) - 0.25 * rank * np.log(gap)
        log_k = log_d - np.log1p(-a)  # half of log k
        first = log_d + np.log(np.sqrt(along / gap + spread - along) + limit) - np.log(a)
        second = 0.5 * (np.log(q - 1.0) + math.log(spread)) + (1.0 + 2.0 / q) * log_k
        third = np.log(np.float64(limit)) + log_k
        least = np.logaddexp(np.logaddexp(first, third), second).min()
        return float(np.nan_to_num(np.exp(least), nan=np.inf, posinf=np.inf))


def uniform(setting: Setting) -> list[Prediction]:
    """The uniform bounds over |x| <= ``setting.radius``, for heads without tilt bias: of bounded
    laws, and of Gaussian tokens.
    """
    head, measure, reach = setting.head, setting.measure, setting.measure.support_radius()
    constant, most = math.inf, math.inf
    if reach is not None and setting.no_bias:
        V, tilt = head.V.double(), setting.a_norm * setting.radius
        spread = math.sqrt(float((V @ measure.cov.double() * V).sum()))
        rank = max(1, int(torch.linalg.matrix_rank(head.A.double())))
        score = log_peak = tilt * reach
        if isinstance(measure, Rotational):
            # reach t - K(t) grows in t: K' is a mean of scores over t, none of them above reach
            theta = torch.zeros(measure.dim, dtype=torch.float64)
            theta[0] = tilt
            log_peak -= float(measure.log_laplace(theta))
        constant = chaining_constant(score, log_peak, setting.v_norm * reach, spread, rank)
        most = 2.0 * setting.v_norm * reach
    bounded = (
        ("tokens have bounded support", reach is not None),
        ("the head has no tilt bias", setting.no_bias),
    )
    numbers = {"radius": setting.radius, "support": reach or 0.0, "constant": constant}

    def value(n: Any) -> Floats:
        return np.minimum(constant / np.sqrt(as_counts(n, "n")), most)

    bound = state("uniform-chaining", bounded, 0.5, value, numbers, math.isfinite(constant))
    return [bound, _gaussian_uniform(setting)]


def _gaussian_uniform(setting: Setting) -> Prediction:
    head, measure = setting.head, setting.measure
    numbers: dict[str, float] = {}
    if measure.is_gaussian and setting.no_bias:
        A, V, root = head.A.double(), head.V.double(), measure.root
        left, size, _ = torch.linalg.svd(root.T @ A, full_matrices=False)
        rank = max(1, int((size > 1e-12 * size[0]).sum()))
        values, r = V @ root, setting.radius
        numbers = {
            "horizon": r * float(size[0]),
            "rank": float(rank),
            "along": float((values @ left[:, :rank]).square().sum()),
            "spread": float(values.square().sum()),
            "limit": r * spectral_norm(values @ root.T @ A),
        }
    constant = gaussian_uniform_constant(**numbers) if numbers else math.inf
    conditions = (
        ("tokens are Gaussian", measure.is_gaussian),
        ("the head has no tilt bias", setting.no_bias),
    )

    def value(n: Any) -> Floats:
        return np.asarray(constant / np.sqrt(as_counts(n, "n")))

    numbers["constant"] = constant
    return state("uniform-gaussian", conditions, 0.5, value, numbers, math.isfinite(constant))


# ---- Neyman's keys at one query


def gaussian_mean_norm(values: Any) -> float:
    """E|c| for c ~ N(0, C) with eigenvalues ``values`` of C.

    E sqrt(Q) = int_0^inf (1 - E exp(-tQ)) t^{-3/2} dt / (2 sqrt(pi)), E exp(-tQ) = prod (1 + 2 t
    lambda)^{-1/2}, by a trapezoid rule in log t, which errs by exp(-39).
    """
    spectrum = np.asarray(values, np.float64)
    largest = float(spectrum.max(initial=0.0))
    if largest <= 0.0:
        return 0.0
    y = np.arange(-90.0, 90.0, 0.5)
    grown = 2.0 * np.exp(y)[:, None] * (spectrum / largest)
    lost = -np.expm1(-0.5 * np.log1p(grown).sum(axis=1))
    integral = 0.5 * float((lost * np.exp(-0.5 * y)).sum())
    return math.sqrt(largest) * integral / (2.0 * math.sqrt(math.pi))


def kept_keys(setting: Setting) -> list[Prediction]:
    """What the error of n keys kept by Neyman's rule tends to at ``setting.query``: c_1 .. c_n are
    drawn from the tilted law by their sizes, c = V y - Gamma, and n MSE -> (E_t|c|)^2. For Gaussian
    tokens c is N(0, V Sigma V^T) under every tilt. Proof: "Bounds" in the documentation.
    """
    theta = setting.head.tilt(setting.query).double()
    V, measure = setting.head.V.double(), setting.measure
    numbers: dict[str, float] = {}
    moments: bool | None = False
    try:
        measure.log_laplace(1.001 * theta)
        spread = product(product(V, measure.tilted_cov(theta)), V.T)
        numbers = {"most": float(spread.trace())}
        if measure.is_gaussian:
            values = torch.linalg.eigvalsh(spread).clamp_min(0.0)
            numbers["constant"] = gaussian_mean_norm(values.cpu().numpy()) ** 2
        moments = True if setting.sigma is not None or bool(theta.any()) else None
    except ValueError:  # no limit at this query, or none beyond it
        pass
    conditions = (
        ("the tilted law has moments of every order", moments),
        ("no token's value is the limit", None if measure.as_pool() is not None else True),
    )
    return [state("keep-neyman", conditions, 0.5, numbers=numbers)]
