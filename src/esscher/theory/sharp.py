"""Results derived here: exponents from the random energy model (heuristic), a proved bound at one
query whose leading term is the delta method's, a proved constant for the uniform error, and what
the error of n kept keys tends to under keep rules.

Exponents, Gaussian tokens and queries. At one query of score deviation s = c sqrt(2 ln n) the error
of the softmax over n Gaussian scores is n^{-b}:

    root mean square   b = 1/2 - c^2 for c < 1/sqrt(3),   (1 - c^2)^2 / (8 c^2) up to c = 1
    typical            b = 1/2 - c^2 for c < 1/2,         (1 - c)^2 up to c = 1

They differ because the mean square is carried by rare draws in which one token beats the rest.
Queries with s >= c sqrt(2 ln n) have chance n^{-c^2/h^2}, h the two-sided horizon; the exponents
below are the minima over c of the sum.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.inputs import as_counts, as_tensor
from esscher.measures.base import Measure
from esscher.measures.line import panels
from esscher.measures.matrices import is_diagonal, product
from esscher.theory.prediction import Conditions, Floats, Prediction, Setting

RMS = "min(1/2, (√(1+4/h²)−1)/4)"  # the exponents as pictures write them
TYPICAL = "min(1/2, 1/(1+2h²))"
SHARES = np.concatenate([np.linspace(0.05, 0.9, 35), 1.0 - np.geomspace(0.09, 1e-4, 40)])
LEVELS = 64  # of nets: the next one would change no digit
# of a context, at which the predictions for the largest scores speak; half of it for those with a
# rest
SHARE = 1 / 16
# score deviations beyond which exp(s^2) leaves the floating range whatever it multiplies
STEEP = 1e3


# ---- exponents of the random energy model


def l2_exponent_typical(horizon2: float) -> float:
    """min(1/2, 1/(1 + 2 h^2)): the L2(nu) norm of Gamma_n - Gamma in a typical draw of the tokens,
    and in mean.
    """
    return min(0.5, 1.0 / (1.0 + 2.0 * horizon2 * horizon2))


def l2_exponent_rms(horizon2: float) -> float:
    """min(1/2, (sqrt(1 + 4/h^2) - 1)/4): root of the mean square L2(nu) norm, which is what an
    exact curve holds.

    min over c of (1 - c^2)^2/(4 c^2) + c^2/h^2 is (sqrt(1 + 4/h^2) - 1)/2, at c^2 = h/sqrt(h^2 +
    4); 1/2 takes over at h^2 = 1/2.
    """
    return min(0.5, _saddle(4.0, horizon2))


def moment_exponent_typical(horizon2: float) -> float:
    """min(1/2, 1/(1 + h^2)): typical and mean absolute error of the mean and covariance of the
    outputs.
    """
    return min(0.5, 1.0 / (1.0 + horizon2 * horizon2))


def moment_exponent_rms(horizon2: float) -> float:
    """min(1/2, (sqrt(1 + 8/h^2) - 1)/4): root mean square error of the mean and covariance of the
    outputs.

    As for ``l2_exponent_rms`` with the chance of the query squared, since the error is averaged
    before it is squared.
    """
    return min(0.5, _saddle(8.0, horizon2))


def gaussian_centred(measure: Measure) -> bool:
    """Whether these exponents hold for tokens of this law that are their own queries: the law is
    Gaussian and centred.
    """
    return measure.is_gaussian and not bool(measure.mean.any())


def freezing_tokens(score_deviation: float) -> float:
    """n* = exp(s^2/2): below it the softmax of n Gaussian scores of standard deviation s rests on
    its few largest.
    """
    exponent = 0.5 * score_deviation * score_deviation
    return math.exp(exponent) if exponent < 709.0 else math.inf


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
        ("sharp-l2", "typical l2", "1/(1 + 2 h^2)", l2_exponent_typical(h)),
        ("sharp-l2-rms", "l2 mean square", "(sqrt(1 + 4/h^2) - 1)/4", l2_exponent_rms(h)),
        ("sharp-moments", "typical mean and cov", "1/(1 + h^2)", moment_exponent_typical(h)),
        ("sharp-moments-rms", "mean and cov", "(sqrt(1 + 8/h^2) - 1)/4", moment_exponent_rms(h)),
    ]
    exponents = [
        Prediction(
            name=name,
            source="random energy model, derived here",
            formula=f"beta = min(1/2, {formula}), h = ||Sigma^(1/2) A Sigma_q^(1/2)||_2",
            status="heuristic",
            quantity=quantity,
            conditions=gaussian,
            exponent=exponent,
            numbers={"horizon2": h},
        )
        for name, quantity, formula, exponent in rows
    ]
    freezing = Prediction(
        name="freezing",
        source="random energy model",
        formula="n* = exp(s^2/2), s the root mean square score deviation over queries",
        status="heuristic",
        quantity="freezing threshold",
        conditions=gaussian[:1],
        numbers={"score_deviation": s, "n_star": freezing_tokens(s)},
    )
    return [*exponents, freezing]


# ---- one query: the delta method with a bound


def delta_bound(n: Any, ratio: float, delta: float, fourth: float, centre: float) -> Floats:
    """E|Gamma_n(x) - Gamma(x)|^2 at most

        min over 0 < a < 1 of  delta / (a^2 n) + 2 sqrt(n fourth P) + 2 centre^2 P,
        P = exp(-(1-a)^2 n / (2 ratio)),

    and at most 2 sqrt(n fourth) + 2 centre^2. Here e = exp<theta, y>, c = V y - Gamma(x), and
    ``ratio`` = E e^2 / (E e)^2, ``delta`` = E e^2 |c|^2 / (E e)^2 (so delta/n is the delta method's
    value), ``fourth`` = E|V (y - E y)|^4, ``centre`` = |Gamma(x) - V E y|.

    As n grows a -> 1 and the bound tends to the delta method's value. Source: derived here; proof:
    "Bounds" in the documentation.
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
    """ratio, delta, fourth and centre of ``delta_bound`` for one query.

    With K the log-Laplace transform and theta the tilt, ratio = exp(K(2 theta) - 2 K(theta)) and
    delta = ratio (tr V Hess K(2 theta) V^T + |V (grad K(2 theta) - grad K(theta))|^2).
    """
    theta = head.tilt(as_tensor(query, "query", ndim=1).double())
    V = head.V.double()
    fourth = measure.value_fourth_moment(V)
    if fourth is None:
        raise ValueError(f"measure: the fourth moment of {type(measure).__name__} is not known")
    from esscher.attention.limit import second_tilt  # exponents alone need no laws

    twice = second_tilt(head, measure, theta)
    log_ratio = float(twice.log_growth)
    spread = float((product(V, twice.cov) * V).sum() + twice.shift @ twice.shift)
    ratio = math.exp(log_ratio) if log_ratio < 700.0 else math.inf
    centre = float((V @ (measure.tilted_mean(theta) - measure.mean.double())).norm())
    return {
        "ratio": ratio,
        "delta": ratio * spread if spread > 0.0 else 0.0,
        "fourth": fourth,
        "centre": centre,
    }


def delta(setting: Setting) -> list[Prediction]:
    """The bound at ``setting.query``, and the limit it proves: the rate of keys taken as they
    come.
    """
    try:
        numbers = delta_bound_numbers(setting.head, setting.measure, setting.query)
    except ValueError:  # the transform is infinite at twice the tilt, or a moment is not known
        numbers = {}
    conditions = (("E exp<2 theta, y> is finite and E|V (y - E y)|^4 is known", bool(numbers)),)
    bound = Prediction(
        name="delta-bound",
        source="derived here",
        formula=(
            "min over a of delta/(a^2 n) + 2 sqrt(n E|V y|^4 P) + 2 |Gamma - V E y|^2 P, "
            "P = exp(-(1-a)^2 n (E e)^2 / (2 E e^2))"
        ),
        status="proved",
        quantity="mean square error at one query",
        conditions=conditions,
        exponent=0.5,
        value=(lambda n: delta_bound(n, **numbers)) if numbers else None,
        units="squared",
        numbers=numbers,
    )
    limit = Prediction(
        name="keep-random",
        source="derived here",
        formula=(
            "n MSE -> E[e^2 |c|^2]/(E e)^2; Gaussian tokens: exp(s^2) (tr V Sigma V^T + |V Sigma"
            " theta|^2)"
        ),
        status="proved (asymptotic)",
        quantity="kept keys at one query: random",
        conditions=conditions,
        exponent=0.5,
        numbers={"constant": numbers["delta"]} if numbers else {},
    )
    return [bound, limit]


# ---- the largest error over a ball of queries: the method of [B] Theorem 3.4, with constants


def dudley_sum(dim: int) -> float:
    """S = sum over j >= 1 of 2^{1-j} sqrt(2 log(2 N_j)), N_j = (1 + 2^{j+1})^dim: a net of mesh
    2^{-j} in the unit ball.

    A process of norms whose increments over a distance t have E cosh(l |Z_x - Z_y|) <= exp(l^2 t^2
    / 2) has E sup |Z_x - Z_0| <= S over the unit ball.
    """
    level = np.arange(1, LEVELS + 1, dtype=np.float64)
    logs = dim * np.log1p(2.0 ** (level + 1.0)) + math.log(2.0)
    return float((2.0 ** (1.0 - level) * np.sqrt(2.0 * logs)).sum())


def chaining_constant(
    score: float, log_peak: float, value: float, spread: float, dim: int
) -> float:
    """C with E sup over |x| <= r of |Gamma_n(x) - Gamma(x)| at most C / sqrt(n) for every n:

        C = (sqrt(C_N) + sqrt(2 v C_D))^2,   C_N = 2 spread + 8 v M B S,   C_D = 4 M B S.

    Tokens lie within R of their mean, v = ||V|| R (``value``), B = ||A|| r R (``score``) bounds the
    scores about their mean, spread^2 = tr V Sigma V^T, S = ``dudley_sum`` of the rank of A
    (``dim``), and M bounds w = exp(<theta, y - E y> - K(theta)), K of the centred law (``log_peak``
    = log M). As K >= 0 by Jensen, M <= exp(B), whatever the law: exponential in r R.

    Source: derived here, by the method of [B] Theorem 3.4; proof: "Bounds" in the documentation.
    """
    with np.errstate(over="ignore"):
        chain = float(np.exp(log_peak)) * score * dudley_sum(dim)
    numerator, denominator = 2.0 * spread + 8.0 * value * chain, 4.0 * chain
    return (math.sqrt(numerator) + math.sqrt(2.0 * value * denominator)) ** 2


def uniform_constant(setting: Setting, any_law: bool = False) -> float:
    """``chaining_constant`` of a head and a bounded law over |x| <= ``setting.radius``.

    ``any_law``: of every law of this support. NaN where the law is not bounded or the head has a
    tilt bias.
    """
    measure, reach = setting.measure, setting.measure.support_radius()
    if reach is None or not setting.no_bias:
        return math.nan
    V, tilt = setting.head.V.double(), setting.a_norm * setting.radius
    spread = math.sqrt(float((V @ measure.cov.double() * V).sum()))
    rank = max(1, int(torch.linalg.matrix_rank(setting.head.A.double())))
    score = log_peak = tilt * reach
    if not any_law and measure.as_rotational() is not None:
        # reach t - K(t) grows in t, since K' is a mean of scores over t, none of them above reach
        theta = torch.zeros(measure.dim, dtype=torch.float64)
        theta[0] = tilt
        log_peak -= float(measure.log_laplace(theta))
    return chaining_constant(score, log_peak, setting.v_norm * reach, spread, rank)


def uniform(setting: Setting) -> list[Prediction]:
    """The uniform bound over |x| <= ``setting.radius``, for bounded laws."""
    reach, constant = setting.measure.support_radius(), uniform_constant(setting)
    most, numbers = math.inf, {}
    if reach is not None and math.isfinite(constant):
        most = 2.0 * setting.v_norm * reach
        numbers = {"radius": setting.radius, "support": reach, "constant": constant}
    bound = Prediction(
        name="uniform-chaining",
        source="derived here, by the method of [B] Theorem 3.4",
        formula=(
            "C = (sqrt(C_N) + sqrt(2 v C_D))^2, C_N = 2 sqrt(tr V Sigma V^T) + 8 v M B S, C_D ="
            " 4 M B S, S the sum of Dudley's chain, M at most exp(B), B = ||A|| R r, r the"
            " radius of the support"
        ),
        status="proved",
        quantity="uniform",
        conditions=(
            ("tokens have bounded support", reach is not None),
            ("the head has no tilt bias", setting.no_bias),
        ),
        exponent=0.5,
        value=(lambda n: np.minimum(constant / np.sqrt(as_counts(n, "n")), most))
        if numbers
        else None,
        units="mean absolute",
        numbers=numbers,
    )
    return [bound]


# ---- keep rules at one query: what the error of n kept keys tends to


def gaussian_mean_norm(values: Any) -> float:
    """E|c| for c ~ N(0, C) with eigenvalues ``values`` of C.

    E sqrt(Q) = int_0^inf (1 - E exp(-tQ)) t^{-3/2} dt / (2 sqrt(pi)), E exp(-tQ) = prod (1 + 2 t
    lambda)^{-1/2}; in log t the integrand is analytic in a strip of half-width pi, so that a
    trapezoid rule of step 1/2 errs by exp(-39).
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


def neyman_bound(n: Any, first: float, second: float, third: float) -> Floats:
    """((n-1) (M_2/M_1)^2 + M_3/M_1) / n^2 from M_1 = E|c| and (numbers above) M_2 and M_3, Gaussian
    tokens.
    """
    counts = as_counts(n, "n").astype(np.float64)
    if first <= 0.0:
        return np.zeros_like(counts)
    return ((counts - 1.0) * (second / first) ** 2 + third / first) / counts**2


def topk_bias(share: float, s: float) -> float:
    """phi(r-s) / Q(r-s), Q(r) = share: |Gamma_keep - Gamma| over |w| for the largest scores of
    Gaussian tokens.
    """
    x = float(scipy.stats.norm.isf(share)) - s
    return math.sqrt(2.0 / math.pi) / float(scipy.special.erfcx(x / math.sqrt(2.0)))


def rest_constant(top: float, rest: float, s: float, along: float, across: float) -> float:
    """E[e^2 |c|^2 / p] / (E e)^2 for Gaussian tokens, p = 1 for a share ``top`` of largest scores
    and ``rest`` for the others.

    Given the score s g, |c|^2 is along (g - s)^2 + across on average, and e^2 / (E e)^2 moves g to
    N(2s, 1) and counts it exp(s^2) times: exp(s^2) (along (1 + s^2) + across), and (1/rest - 1)
    times its part below the cut.
    """
    if s > STEEP:
        return math.inf if along + across > 0.0 else 0.0
    z, lengths = (x.numpy() for x in panels(0.0, 160.0))
    g = float(scipy.stats.norm.isf(top)) - 0.25 * z
    with np.errstate(divide="ignore"):  # no values, no error
        square = np.log(0.25 * lengths * (along * (g - s) ** 2 + across) / math.sqrt(2.0 * math.pi))
        whole = s * s + float(np.log(along * (1.0 + s * s) + across))
    below = float(scipy.special.logsumexp(square - 0.5 * g * g + 2.0 * s * g - s * s))
    return _exp(whole) + (1.0 / rest - 1.0) * _exp(below)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700.0 else math.inf


def kept_keys(setting: Setting) -> list[Prediction]:
    """What the error of n kept keys tends to at ``setting.query``; random keys are with ``delta``.

    e = exp<theta, y>, c = V y - Gamma, s the deviation of the score, w = V Sigma theta / s.
    N tokens that are kept with chance p and counted 1/p times have N MSE -> E[e^2 |c|^2 / p] /
    (E e)^2, by the proof of ``delta_bound`` with e/p for e. The largest scores alone, at a fixed
    share, tend to the wrong limit: cut at r, the tilted score N(s, 1) of Gaussian tokens has its
    mean moved by the hazard phi(r-s) / Q(r-s), and the output by w times it. Neyman's rule in a
    context without end draws c_1 .. c_n from the tilted law by their sizes: n MSE -> (E_t|c|)^2.
    For Gaussian tokens c is N(0, V Sigma V^T) under every tilt, so the error is the same number at
    every query and horizon. Proofs: "Bounds" in the documentation.
    """
    theta = setting.head.tilt(setting.query).double()
    V, measure = setting.head.V.double(), setting.measure
    sizes: dict[str, float] = {}  # of Neyman's rule
    top: dict[str, float] = {}  # of the largest scores
    rest: dict[str, float] = {}
    if measure.is_gaussian:
        white, spread = measure.root.T @ theta, product(V, measure.root)
        sizes = _sizes(spread)
        s = float(white.norm())
        along = float((spread @ (white / s)).square().sum()) if s > 0.0 else 0.0
        across = max(0.0, float(spread.square().sum()) - along)
        top = {"share": SHARE, "rms": math.sqrt(along) * topk_bias(SHARE, s)}
        constant = rest_constant(SHARE / 2, SHARE / (2.0 - SHARE), s, along, across)
        rest = {"share": SHARE, "constant": SHARE * constant}
    numbers: dict[str, float] = {}
    moments: bool | None = False
    try:
        measure.log_laplace(1.001 * theta)
        if measure.is_gaussian:
            numbers = {"most": sizes.get("second", math.inf)}
            if sizes:
                numbers["constant"] = sizes["first"] * sizes["first"]
        else:
            numbers = {"most": _trace(V, measure.tilted_cov(theta))}
        moments = True if setting.sigma is not None or bool(theta.any()) else None
    except ValueError:  # no limit at this query, or none beyond it
        pass
    gaussian: Conditions = (("tokens are Gaussian", measure.is_gaussian),)
    asymptotic = functools.partial(
        Prediction, source="derived here", status="proved (asymptotic)", conditions=gaussian
    )
    neyman = asymptotic(
        name="keep-neyman",
        formula=(
            "n MSE -> (E_t|c|)^2 <= tr V Cov_t V^T, t the tilted law; Gaussian tokens: one error"
            " for all queries"
        ),
        quantity="kept keys at one query: Neyman's",
        conditions=(
            ("the tilted law has moments of every order", moments),
            ("no token's value is the limit", None if measure.as_pool() is not None else True),
        ),
        exponent=0.5,
        numbers=numbers,
    )
    bound = asymptotic(
        name="keep-neyman-bound",
        formula="MSE <= ((n-1) (M_2/M_1)^2 + M_3/M_1)/n^2, M_k = E|c|^k for c ~ N(0, V Sigma V^T)",
        status="proved",
        quantity=neyman.quantity,
        exponent=0.5,
        value=(lambda n: neyman_bound(n, **sizes)) if sizes else None,
        units="squared",
        numbers=sizes,
    )
    largest = asymptotic(
        name="keep-topk",
        formula="rms -> |w| phi(r-s)/Q(r-s), Q(r) = share, w = V Sigma theta / s",
        quantity="kept keys at one query: largest scores",
        exponent=0.0,
        numbers=top,
    )
    with_rest = asymptotic(
        name="keep-topk-rest",
        formula="n MSE -> share E[e^2 |c|^2/p]/(E e)^2, p = 1 for the largest scores",
        quantity="kept keys at one query: largest scores and a rest",
        exponent=0.5,
        numbers=rest,
    )
    return [neyman, bound, largest, with_rest]


def _sizes(spread: Tensor) -> dict[str, float]:
    """M_1, and numbers above M_2 and M_3, of N(0, L L^T), L = ``spread``; nothing where they leave
    the floating range.
    """
    if is_diagonal(spread):
        eigenvalues = spread.diagonal().square()
    else:
        narrow = spread if spread.shape[0] < spread.shape[1] else spread.T
        eigenvalues = torch.linalg.eigvalsh(product(narrow, narrow.T)).clamp_min(0.0)
    values = np.asarray(eigenvalues.cpu().numpy(), np.float64)
    second = float(values.sum())
    if not math.isfinite(second):
        return {}
    uneven = 2.0 * float(((values / (second or 1.0)) ** 2).sum())
    third = second * math.sqrt(second) * math.sqrt(1.0 + uneven)  # sqrt(M_2 M_4) >= M_3
    return {"first": gaussian_mean_norm(values), "second": second, "third": third}


def _trace(V: Tensor, cov: Tensor) -> float:
    """tr V C V^T of V over its largest entry, then times its square; infinite beyond float64."""
    size = float(V.abs().max()) or 1.0
    trace = float((product(V / size, cov) * (V / size)).sum())
    return max(0.0, trace) * size * size if math.isfinite(trace) else math.inf
