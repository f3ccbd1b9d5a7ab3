"""A check of every numbered statement of [S], in the order of the paper.

The page beside this file has each statement as printed and as mended, with a verdict and what is
found; ``python docs/theory/statements.py`` writes the numbers, which are in bold there.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad, solve_ivp
from scipy.special import gammaln, kve
from scipy.stats import binom, chi2

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.errors.exact import exact_curve
from esscher.icl.concentration import METRICS, bounds, prompt_errors, token_laws
from esscher.icl.exact import acting, risk, risk_gradient
from esscher.icl.flow import (
    Flow,
    final_parameters,
    flow_limit,
    flow_times,
    gradient_flow,
    start_block,
    start_limit,
)
from esscher.icl.layer import UV, Block, default_weights, flatten, tensors, unflatten
from esscher.icl.quadrature import product_rule
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_counts, as_positive
from esscher.measures.gaussian import Gaussian
from esscher.measures.product import Rademacher
from esscher.theory import boursier
from esscher.theory.prediction import Setting, predictions, tilted_moment

Floats = npt.NDArray[np.float64]
Found = tuple[Any, str]
"""Whether a case agrees with the verdict, and the numbers found, with spaces between."""

CHECKS: dict[str, Callable[[], Found]] = {}
"""For each statement a case that would show its verdict wrong."""


def check(*numbers: str) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """The function below checks the statements of these numbers."""

    def add(function: Callable[[], Found]) -> Callable[[], Found]:
        CHECKS.update(dict.fromkeys(numbers, function))
        return function

    return add


def fill(page: str) -> str:
    """The page with the numbers found; an exception where they contradict a verdict."""
    first, *sections = page.split("\n## ")
    for i, section in enumerate(sections):
        number = section.split(":")[0]
        agrees, found = CHECKS[number]()
        before, _, line = section.partition("- Found: ")
        words = re.split(r"\*\*.*?\*\*", line)
        if not agrees or len(words) != len(found.split()) + 1:
            raise RuntimeError(f"{number}: expected what the page says, found {found}")
        bold = [f"**{value}**" for value in found.split()] + [""]
        line = "".join(word + value for word, value in zip(words, bold, strict=True))
        sections[i] = f"{before}- Found: {line}"
    return "\n## ".join([first, *sections])


# ---- Sections 2 and 3: limits and errors


@check("Lemma 2.1")
def lemma_21() -> Found:
    """A quadrature of 40 x 40 nodes for both integrals."""
    cov, mean = [[1.0, 0.4], [0.4, 0.7]], [0.5, -1.0]
    head = Head([[0.3, 0.1], [-0.2, 0.4]], [[1.0, 2.0], [0.0, -1.0]])
    x = torch.tensor([[0.7, -0.3]], dtype=torch.float64)
    node, weight = hermegauss(40)
    g = np.stack(np.meshgrid(node, node, indexing="ij"), axis=-1).reshape(-1, 2)
    tokens = g @ np.linalg.cholesky(np.array(cov)).T + np.array(mean)
    scores = np.outer(weight, weight).ravel() * np.exp(tokens @ head.tilt(x)[0].numpy())
    plain = head.V.numpy() @ (scores @ tokens / scores.sum())
    apart = float(np.abs(plain - limit(head, Gaussian(cov, mean))(x)[0].numpy()).max())
    return apart < 1e-9, ""


@check("Proposition 3.1")
def proposition_31() -> Found:
    law, head, n = Gaussian(np.eye(2)), Head(0.3 * np.eye(2), np.eye(2)), [2, 10**6]
    known = {each.name: each for each in predictions(head, law)}
    error = exact_curve(head, law, law, n).rms
    mended, sharpened = (known[name].rms(n) for name in ("s-16-mended", "s-16-sharpened"))
    exponent = known["s-prop31"].exponent or 0.0
    numbers = f"{error[1]:.2g} {mended[1]:.2g} {sharpened[1]:.2g} {exponent:.2g}"
    return (error < sharpened).all() and (error < mended).all(), numbers


@check("Remark 3.2")
def remark_32() -> Found:
    """Tokens +-1 at the query 1, with and without its own token."""
    short, long = (
        n * n * (coin_moment(2, n, TILT, inside=1) - coin_moment(2, n, TILT))
        for n in (10**2, 10**4)
    )
    return abs(short / long - 1.0) < 0.05, f"{short:.3g} {long:.3g}"


@check("Assumption 3.3")
def assumption_33() -> Found:
    """d = 1, Gaussian, U = 0.5: E|x|^4 E_tilted y^4 = E x^4 (3 + 6 u^2 x^2 + u^4 x^4)."""
    setting = Setting(Head([[0.5]], [[1.0]]), Gaussian([[1.0]]), Gaussian([[1.0]]))
    exact, bound = 3 * 3 + 6 * 0.25 * 15 + 0.0625 * 105, tilted_moment(setting, 4, 4)
    assert bound is not None
    return exact <= bound, f"{exact:.4g} {bound:.4g}"


def first_errors(tokens: int) -> tuple[LinearTask, Any, Floats]:
    """A task, first weights of training, and squared errors to the limit on 1000 prompts, by
    metric.
    """
    task = LinearTask.kms(2, 0.4, noise=0.2)
    weights = default_weights(2, torch.Generator().manual_seed(3))
    return task, weights, prompt_errors(task, weights, tokens, 1000, seed=1)[:, 1]


@check("Proposition 3.4")
def proposition_34() -> Found:
    task, weights, squared = first_errors(1000)
    rms = dict(zip(METRICS, np.sqrt(squared.mean(axis=0)), strict=True))
    height = bounds(task, weights, [1000]).groupby("metric")["rms"].first()
    names = [f"gradient_{letter}" for letter in "UVKQ"]
    numbers = " ".join(f"{rms[name]:.1g} {height[name]:.0e}" for name in names)
    return all(rms[name] < height[name] for name in names), numbers


# ---- Sections 4 and 5: flows of in-context regression, on tasks of one or two dimensions

LINE = LinearTask([[0.3]], [[1.0]], 0.0)  # W = I and no noise, as in (11)
PLANE = LinearTask([[0.8, 0.3], [0.3, 0.5]], np.eye(2), 0.0)


@check("Remark 4.1")
def remark_41() -> Found:
    shifted = PLANE.with_queries(np.diag([2.0, 0.5]))
    end = final_parameters(PLANE, start_block(PLANE), 50, "linear")
    slope = tensors(risk_gradient(shifted, end, 50, "linear")[1])[0]  # in U11
    own, other = (2 * risk(task, end, 50, "linear").value for task in (PLANE, shifted))
    return float(slope.abs().max()) < 1e-12 and own != other, f"{own:.3g} {other:.3g}"


@check("Assumption 4.2")
def assumption_42() -> Found:
    """(i) ||Sigma_q|| <= 1, (ii) E sigma_mu^12 is finite and E[ln(n)^4 / n^(c/sigma_mu^2)] has to
    vanish, c that of Proposition 3.1 in the ball of radius 2 rho, rho the norm of (U, V) where the
    flow on an infinite prompt ends; (iii) holds for Gaussian tokens with the moments of Lemma F.1.
    """
    task = LinearTask.isotropic(5, np.eye(5), 0.0)
    rho = float(np.linalg.norm(flatten(flow_limit(task, start_block(task)))))
    c = 2.0 * boursier.proposition_31_exponent(1.0, 2.0 * rho)
    sigma12 = task_mean(lambda zeta: task_sigma(zeta) ** 6, 5)
    rate = decay(np.log([10.0, 1e12]), 5, c, 4)
    begins = decay_begins(5, c) / math.log(10)
    numbers = f"{rho:.3g} {c:.1e} {sigma12:.2g} {rate[1]:.1e} 10^{begins:.0f}"
    return math.isfinite(sigma12) and rate[1] >= rate[0], numbers


@check("Theorem 4.3")
def theorem_43() -> Found:
    start = start_block(LINE)
    short, long = (risk(LINE, final_parameters(LINE, start, n), n).value for n in (100, 10_000))
    few, many = (coin_flow_risk(n) for n in (10, 1000))
    return long < 0.05 * short and many < 0.05 * few, f"{short:.2g} {long:.2g} {few:.2g} {many:.2g}"


def coin_flow_risk(n: int, time: float = 1e4) -> float:
    """Risk after gradient flow on (u, v) from (0.5, 0.5), covariates +-1, y = w x, E w^2 = 1: half
    the mean of (1 - v m)^2, m the softmax average at x = 1 over n covariates, dm/du = 1 - m^2.
    """

    def loss(parameters: Floats) -> tuple[float, Floats]:
        u, v = parameters
        errors, chances = coin_errors(n, u)
        m = errors + math.tanh(u)
        gap = 1.0 - v * m
        slope = [-chances @ (gap * v * (1.0 - m * m)), -chances @ (gap * m)]
        return float(chances @ gap**2) / 2, np.array(slope)

    flow = solve_ivp(lambda _, x: -loss(x)[1], (0.0, time), [0.5, 0.5], method="LSODA", rtol=1e-8)
    return loss(flow.y[:, -1])[0]


@check("Assumption 5.1")
def assumption_51() -> Found:
    """Gradients of the linear risk, in closed form, at a start of the block form."""
    U, V = tensors(risk_gradient(PLANE, start_block(PLANE).uv(), 20, "linear")[1])
    off = max(float(block.abs().max()) for block in (U[:, -1], U[-1], V[-1, :-1]))
    return off < 1e-14, ""


@check("Theorem 5.2")
def theorem_52() -> Found:
    """Sigma = 0.01 I, d = 5: risk at half of each limit over that of no weights."""
    limits = start_limit(5, 0.01, printed=True), start_limit(5, 0.01)
    printed, mended = ((0.25 * top**2 * 0.01 / math.sqrt(5.0) - 1.0) ** 2 for top in limits)
    return printed > 1.0 > mended, f"{printed:.3g} {mended:.3g}"


@check("Remark 5.3")
def remark_53() -> Found:
    U, v = tensors(gradient_flow(PLANE, start_block(PLANE), times=flow_times(1e3, 10)).end)
    inverse = torch.linalg.inv(PLANE.sigma)
    size = float(torch.trace(inverse @ inverse)) ** 0.25
    return max(float((U - inverse / size).abs().max()), abs(float(v) - size)) < 1e-6, ""


# ---- Appendices B and C: errors at one query, and averages over queries

TILT = 0.7
LENGTHS = (1, 5, 50, 400)
NODE, WEIGHT = hermegauss(60)


def coin_errors(n: int, tilt: float, value: float = 1.0, inside: int = 0) -> tuple[Floats, Floats]:
    """Errors of the softmax average of ``value`` y over n tokens y = +-1 at a tilt, and the chance
    of each; sigma = d = 1. ``inside``: tokens 1 beside them.
    """
    up = (np.arange(n + 1) + inside) * math.exp(tilt)
    down = (n - np.arange(n + 1)) * math.exp(-tilt)
    errors = value * ((up - down) / (up + down) - math.tanh(tilt))
    return errors, np.asarray(binom.pmf(np.arange(n + 1), n, 0.5))


def coin_moment(power: int, n: int, tilt: float, value: float = 1.0, inside: int = 0) -> float:
    errors, chances = coin_errors(n, tilt, value, inside)
    return float(chances @ errors**power)


def largest_share(bound: Callable[..., Floats]) -> float:
    """The largest chance over delta of an error above a bound, over lengths and delta."""
    shares = []
    for n in LENGTHS:
        errors, chances = coin_errors(n, TILT)
        for delta in (1e-4, 0.01, 0.2):
            beyond = errors**2 >= float(bound(n, delta, 1.0, TILT, 1.0)[0])
            shares.append(float(chances[beyond].sum()) / delta)
    return max(shares)


def printed_and_mended(bound: Callable[..., Floats], *numbers: Any) -> tuple[float, float]:
    return float(bound(*numbers, printed=True)[0]), float(bound(*numbers)[0])


@check("Appendix B.2")
def appendix_b2() -> Found:
    """V E[z z^T] U z against V m + V Gamma U z, d = 1, U = V = z = Gamma = 1, mean 0 and 2."""
    softmax, linear = [mean + 1.0 for mean in (0, 2)], [1.0 + mean * mean for mean in (0, 2)]
    numbers = f"{softmax[0]:g} {linear[0]:g} {softmax[1]:g} {linear[1]:g}"
    return softmax[0] == linear[0] and softmax[1] != linear[1], numbers


@check("Lemma C.1")
def lemma_c1() -> Found:
    share = largest_share(boursier.lemma_c1) / 4
    low, needed = printed_and_mended(boursier.lemma_c1_threshold, 50, 2.0, 0.3)
    return share <= 1.0 and low < needed, f"{share:.2g} {low:.2g} {needed:.2g}"


@check("Lemma C.2")
def lemma_c2() -> Found:
    """Q = +-3 with chance delta = 0.05 each, else 0, one draw: Chebyshev's inequality with
    equality.
    """
    printed, sharp = printed_and_mended(boursier.lemma_c2, 1, 0.05, 2 * 0.05 * 9.0)
    return abs(sharp - 3.0) < 1e-12 and printed > sharp, f"{printed:.3g} {sharp:.3g}"


@check("Equation (14)")
def equation_14() -> Found:
    """Tokens +-1, the law of S_n and of the error by enumeration: chances of being outside over
    what is allowed, and (15) against tanh.
    """
    outside, above = [0.0], [0.0]
    for n in LENGTHS:
        up = np.arange(n + 1) * math.exp(TILT) + (n - np.arange(n + 1)) * math.exp(-TILT)
        ratio, (errors, chances) = up / (n * math.cosh(TILT)), coin_errors(n, TILT)
        for delta in (0.01, 0.2):
            low = boursier.denominator_below(n, delta, 1.0, TILT)[0]
            high = boursier.denominator_above(n, delta, 1.0, TILT)[0]
            outside.append(float(chances[(ratio < low) | (ratio > high)].sum()) / (2 * delta))
            most = boursier.equation_14(n, delta, 1.0, TILT, 1.0, math.tanh(TILT))[0]
            above.append(float(chances[abs(errors) > most].sum()) / (4 * delta))
    size, limit = boursier.equation_15(1.0, TILT, 1.0), math.tanh(TILT)
    fine = max(outside) <= 1.0 and max(above) <= 1.0 and limit <= size
    return fine, f"{max(outside):.2g} {max(above):.2g} {limit:.2g} {size:.2g}"


@check("Corollary C.3")
def corollary_c3() -> Found:
    share = largest_share(boursier.corollary_c3)
    low, needed = printed_and_mended(boursier.corollary_c3_threshold, 15, 1.0, 0.0)
    return share <= 1.0 and low < needed, f"{share:.2g} {low:.2g} {needed:.2g}"


@check("Lemma C.4")
def lemma_c4() -> Found:
    """Tokens +-1, no tilt, f(y) = 1000 y, n = 1; then the mended bounds on every length."""
    square = coin_moment(2, 1, 0.0, 1000.0)
    printed, mended = printed_and_mended(boursier.lemma_c4, 1, 1, 1.0, 0.0, 1e12, 1000.0)
    fine = printed < square <= mended
    for n in LENGTHS:
        own = coin_moment(2, n, TILT)
        fine &= own <= float(boursier.lemma_c4(n, 1, 1.0, TILT, 1.0, 1.0)[0])
        fine &= own <= float(boursier.lemma_c4_sharpened(n, 1.0, TILT, 1.0)[0])
    return fine, f"{square:.3g} {printed:.3g} {mended:.3g}"


@check("Assumption C.5", "Assumption C.8")
def assumption_c5() -> Found:
    """f(y) = (v^T y) y is of degree 2: sup |f| / |y|^2 = |v|."""
    y, v = np.random.default_rng(0).standard_normal((1000, 3)), np.array([1.0, -2.0, 0.5])
    ratio = float((np.linalg.norm((y @ v)[:, None] * y, axis=1) / (y**2).sum(axis=1)).max())
    size = float(np.linalg.norm(v))
    return ratio <= size, f"{ratio:.3g} {size:.3g}"


COIN = boursier.Numbers(  # tokens +-1, 1 sub-Gaussian, f(y) = y, queries N(0, 1), U = 0.2
    d=1,
    d_query=1,
    sigma=1.0,
    u_norm=0.2,
    fourth=1.0,
    c_f=1.0,
    limit4=3 * 0.2**4,
    limit8=105 * 0.2**8,
    token_fourth=1.0,
)


def averaged(power: int, n: int) -> float:
    """Mean power of the error over tokens +-1 and queries N(0, 1), U = 0.2."""
    means = [coin_moment(power, n, 0.2 * float(z)) for z in NODE]
    return float(WEIGHT @ np.array(means) / WEIGHT.sum())


@check("Lemma C.6")
def lemma_c6() -> Found:
    own, bound = averaged(2, 50), float(boursier.equation_16(50, COIN)[0])
    wide, narrow = 1 / 32, 0.01**2 / 32  # (E y^4)^(1/2) / 32
    return own <= bound, f"{own:.2g} {bound:.2g} {wide:.2g} {narrow:.2g}"


@check("Lemma C.7")
def lemma_c7() -> Found:
    own = [coin_moment(4, n, TILT) for n in LENGTHS]
    bound = [float(boursier.lemma_c7(n, 1, 1.0, TILT, 1.0, 1.0, 1.0)[0]) for n in LENGTHS]
    pairs = [*zip(own, bound, strict=True)]
    return all(a <= b for a, b in pairs), " ".join(f"{a:.1g} {b:.1g}" for a, b in pairs)


@check("Lemma C.9")
def lemma_c9() -> Found:
    own, bound = averaged(4, 50), float(boursier.equation_18(50, COIN)[0])
    return own <= bound, f"{own:.2g} {bound:.2g}"


@check("Equation (20)")
def equation_20() -> Found:
    """Gaussian tokens, |theta| = 3, f(y) = y: left (E e y)^4 / (E e)^4 = theta^4, right E[e y^4] /
    (E e)^4.
    """
    left, mended = 3.0**4, 3 + 6 * 3.0**2 + 3.0**4
    printed = mended * math.exp(-1.5 * 3.0**2)
    return printed < left <= mended, f"{left:g} {printed:.2g} {mended:g}"


# ---- Appendix D: sub-Gaussian tokens


@check("Lemma D.1")
def lemma_d1() -> Found:
    """Tokens +-1: the limit is tanh(u z), and z ~ N(0, 1)."""
    norm = float((WEIGHT @ np.tanh(0.8 * NODE) ** 4 / WEIGHT.sum()) ** 0.25)
    bound = boursier.lemma_d1(1, 1.0, 1.0, 0.8)
    known = limit(Head([[0.8]], [[1.0]]), Rademacher(1))(torch.ones(1, 1, dtype=torch.float64))
    fine = norm <= bound and abs(float(known) - math.tanh(0.8)) < 1e-12
    return fine, f"{norm:.3g} {bound:.3g}"


@check("Lemma D.2")
def lemma_d2() -> Found:
    t = np.array([8.0, 14.0, 20.0])
    tail, bound = chi2.sf(t**2, 5), np.minimum(boursier.lemma_d2_tail(t, 5), 1.0)
    return (tail <= bound).all(), f"{tail[1]:.1g} {bound[1]:.1g}"


# ---- Appendix E: risks and flows on L tokens against infinitely many


def flow_bounds(
    task: LinearTask, length: int, finite: Flow, infinite: Flow, stations: int = 5
) -> tuple[Floats, Floats, float, float]:
    """Lemma E.1 at the times of the flows: g2 t exp(beta t) as in (26) of [S], and g2 (exp(m t) -
    1) / m, which is what the same proof gives from <theta - theta', grad - grad'> alone; beta, m.

    g2: largest |grad R_L - grad R_infinity| along the flow on L tokens. beta: largest norm of the
    Hessian of R_infinity on the segments between the two flows, at ``stations`` points each; m: the
    most negative curvature there. The paper has suprema over a ball of radius 2 rho, its proof
    needs them only there.
    """

    def gradient(state: Floats, n: float = math.inf) -> Floats:
        return flatten(risk_gradient(task, unflatten(state, finite.start), n)[1])

    gap, values, step = 0.0, [], 1e-5 * np.eye(finite.states.shape[1])
    for row, other in zip(finite.states, infinite.states, strict=True):
        away = gradient(row, length) - gradient(row)
        gap = max(gap, float(np.linalg.norm(away)))
        for here in np.linspace(row, other, stations):
            bent = np.array([gradient(here + e) - gradient(here - e) for e in step]) / 2e-5
            values.append(np.linalg.eigvalsh(0.5 * (bent + bent.T)))
    t, beta, m = finite.times, float(np.abs(values).max()), max(0.0, -float(np.min(values)))
    sharper = gap * (np.expm1(m * t) / m if m else t)
    return gap * t * np.exp(beta * t), sharper, beta, m


@check("Lemma E.1")
def lemma_e1() -> Found:
    start, times = start_block(LINE), flow_times(8.0, 8)
    own, infinite = (gradient_flow(LINE, start, n, times=times) for n in (1000, math.inf))
    bound, sharper, *_ = flow_bounds(LINE, 1000, own, infinite)
    distance = np.linalg.norm(own.states - infinite.states, axis=1)
    fine = (distance[1:] <= sharper[1:]).all() and (sharper <= bound).all()  # 0 at first
    return fine, f"{distance[-1]:.2g} {bound[-1]:.2g} {sharper[-1]:.2g}"


@check("Lemma E.2")
def lemma_e2() -> Found:
    """Labels 0, tokens +-1, U = 0, V = 1, one token: R_1 = 1/2, R = 0."""
    printed = float(boursier.lemma_e2_printed(1.0, 1.0, 0.0, 0.0))
    mended = float(boursier.lemma_e2_mended(1.0, 0.0, 0.0))
    return printed < 0.5 <= mended, f"{printed:g} {mended:g}"


def ball_gaps(
    task: LinearTask, rho: Any, lengths: Any, tasks: int = 8, seed: int = 0, cells: int = 12
) -> tuple[Floats, Floats]:
    """[S] Corollaries E.3 and E.5: g1 and g2 at each length, the largest gap of risks, and of their
    gradients, over the ball |(U, V)| <= 2 rho, with Lemmas E.2 and E.4 mended and the sharpened
    (16) in them; infinite where the bounds say nothing.

    The bounds grow with ||U|| and ||V|| and depend on U, V through nothing else, so the supremum
    over the ball is one over the ways u^2 + v^2 = (2 rho)^2 to share its radius. On a cell of such
    ways it is at most the bound at the largest u and the largest v of the cell: a maximum over
    cells is proved, not searched. Averages over tasks are over drawn ones.
    """
    n, radius = as_counts(lengths, "lengths"), 2.0 * as_positive(rho, "rho")
    laws = token_laws(task, tasks, seed)
    wide = torch.eye(task.dim + 1, task.dim, dtype=torch.float64)
    # E ||Gamma_w||^2
    fourth = float(np.mean([float(torch.linalg.matrix_norm(law, ord=2)) ** 2 for law in laws]))
    size = math.sqrt(fourth * float(torch.trace(task.query_sigma)))
    label = math.sqrt(float(torch.sum(task.query_sigma * task.task_cov)) + task.noise)
    gaps = []
    for low, high in pairwise(np.linspace(0.0, 0.5 * math.pi, cells + 1)):
        u, v = radius * math.sin(high), radius * math.cos(low)
        squares = []  # over tasks: bounds on the output, and on its gradient in (U, V)
        for law in laws:
            top = torch.linalg.eigh(law)[1][:, -1:]
            head, query = Head(u * wide, v * top.T), Gaussian(task.query_sigma)
            setting = Setting(head, Gaussian(law), query)
            known = [*boursier.averaged(setting), *boursier.gradients(setting)]
            by_name = {each.name: each for each in known}
            of_output, by_u, by_v = (
                by_name[name].rms(n) ** 2
                for name in ("s-16-sharpened", "s-gradient-u", "s-gradient-v")
            )
            squares.append((of_output, by_u + by_v))
        output, slope = np.sqrt(np.mean(squares, axis=0))
        by_gradient = boursier.lemma_e4(output, slope, label, u * v * size, math.hypot(u, v) * size)
        gaps.append((boursier.lemma_e2_mended(output, label, u * v * size), by_gradient))
    risks, gradients = np.max(gaps, axis=0)
    return risks, gradients


POINT = UV([[0.2, 0.1], [0.1, 0.1]], [[0.0, 0.0], [0.1, 0.2]])  # of the ball of rho = 0.2


@check("Corollary E.3")
def corollary_e3() -> Found:
    bound = float(ball_gaps(LINE, 0.2, [10**6], tasks=3)[0][0])
    gap = abs(risk(LINE, POINT, 10**6).value - risk(LINE, POINT, math.inf).value)
    return gap < bound, f"{bound:.2g} {gap:.1e}"


def limit_norms(task: LinearTask, uv: UV, rotations: int = 32) -> tuple[float, float, float]:
    """(E T^2)^{1/2} of the limit T = kappa, (E|grad T|^2)^{1/2} in (U, V), and (E y^2)^{1/2}.

    With Gamma_w the tokens' covariance, T = r^T Gamma_w U z_q, grad_r T = Gamma_w U z_q and
    grad_U T = Gamma_w r z_q^T. A cubature over (w, x_q), exact for these moments.
    """
    joined, rule = torch.from_numpy(acting(uv)), product_rule(task.dim, rotations)
    w, x = rule.tasks.points @ task.task_root.mT, rule.queries.points @ task.query_root.mT
    gamma = task.token_covariance(w)
    value = gamma @ joined[:, -1]  # Gamma_w r, a row for each task
    tilt = x @ joined[:, :-1].mT
    moved = torch.einsum("rtij,rqj->rtqi", gamma, tilt)
    sizes = (value**2).sum(dim=-1)[:, :, None] * (x**2).sum(dim=-1)[:, None, :]
    square, slope = (
        float((part @ rule.queries.weights @ rule.tasks.weights).mean())
        for part in ((value @ tilt.mT) ** 2, (moved**2).sum(dim=-1) + sizes)
    )
    label = float(torch.sum(task.query_sigma * task.task_cov)) + task.noise
    return square**0.5, slope**0.5, label**0.5


@check("Lemma E.4")
def lemma_e4(tokens: int = 100) -> Found:
    """Gradients of the risk in (U, V) on n and on infinitely many tokens; (28) of the proof with
    root mean squares over tasks.
    """
    task, weights, squared = first_errors(tokens)
    uv = weights.uv()
    error, slope = squared[:, 0].mean() ** 0.5, (squared[:, 1] + squared[:, 2]).mean() ** 0.5
    own, infinite = (flatten(risk_gradient(task, uv, n)[1]) for n in (tokens, math.inf))
    gap, (limit2, gradient2, label) = float(np.linalg.norm(own - infinite)), limit_norms(task, uv)
    bound = float(boursier.lemma_e4(error, slope, label, limit2, gradient2))
    return gap < bound, f"{gap:.1g} {bound:.2g}"


@check("Corollary E.5")
def corollary_e5() -> Found:
    bound = float(ball_gaps(LINE, 0.2, [10**6], tasks=3)[1][0])
    own, infinite = (flatten(risk_gradient(LINE, POINT, n)[1]) for n in (10**6, math.inf))
    gap = float(np.linalg.norm(own - infinite))
    return gap < bound, f"{bound:.1g} {gap:.1e}"


# ---- Appendix F: in-context linear regression
#
# d: dimension of the covariates, w ~ N(0, I_d), zeta = |w|^2 ~ chi^2(d). c: exponent of a bound
# n^(-c / sigma_mu^2), as in Proposition 3.1. alpha: as in esscher.icl.flow.


def task_sigma(zeta: float, *, printed: bool = False) -> float:
    """sigma_mu^2 = 1 + |w|^2, zeta = |w|^2: Gamma_w = (I, w)^T Sigma (I, w) has the norm ||Sigma||
    (1 + |w|^2) for Sigma = ||Sigma|| I.

    Printed: max(1, |w|^2), too small. Source: [S] Lemma F.1, for ||Sigma|| <= 1.
    """
    return max(1.0, zeta) if printed else 1.0 + zeta


def task_mean(f: Callable[[float], float], d: int, far: float = 0.0) -> float:
    """E f(|w|^2) over tasks w ~ N(0, I_d), by quadrature; ``far``: where f has most of its weight,
    if beyond d.
    """
    ends = sorted({0.0, 1.0, d + 10.0, d + 10.0 + 2.0 * far})
    pieces = [*pairwise(ends), (ends[-1], np.inf)]
    size = math.lgamma(0.5 * d) + 0.5 * d * math.log(2.0)

    def weighted(z: float) -> float:
        return math.exp((0.5 * d - 1.0) * math.log(z) - 0.5 * z - size) * f(z)

    return math.fsum(
        quad(weighted, *piece, limit=200, epsabs=0.0, epsrel=1e-9)[0] for piece in pieces
    )


def decay(
    log_n: Any, d: int, c: float, power: int = 0, sigma: Callable[[float], float] = task_sigma
) -> Floats:
    """E[ln(n)^power / n^(c / sigma_mu^2)] over tasks w ~ N(0, I_d), sigma_mu^2 a function of |w|^2,
    at some ln n.

    Assumption 4.2 (ii) of [S] has power 4 and wants it to vanish as n grows.
    """

    def one(x: float) -> float:
        return x**power * task_mean(
            lambda z: math.exp(-c * x / sigma(z)), d, math.sqrt(2.0 * c * x)
        )

    return np.array([one(float(x)) for x in np.atleast_1d(np.asarray(log_n, np.float64))])


def decay_begins(d: int, c: float, power: int = 4) -> float:
    """The ln n from which on ``decay`` falls, 2 (power + (d-1)/4)^2 / c: the maximum of ln(n)^power
    times the asymptote of Lemma F.1 (ii). For c = 1/3, d = 5 and power 4 it is 150, that is n =
    10^65. Derived here.
    """
    return 2.0 * (power + 0.25 * (d - 1)) ** 2 / c


def lemma_f1(n: Any, d: int, c: float, *, printed: bool = False) -> Floats:
    """Bound on E n^(-c / sigma_mu^2) for sigma_mu^2 = 1 + |w|^2: e^{1/2} times the integral of the
    printed one.

    With x = 1 + zeta the density has (x-1)^{d/2-1} e^{-(x-1)/2} <= e^{1/2} x^{d/2-1} e^{-x/2} for d
    >= 2; one dimension has smaller tasks than two. Derived here. Printed, for max(1, |w|^2):

        n^-c + lambda^{d/2} / (2^{d/2} Gamma(d/2)) int_0^inf u^{d/2-1} exp(-lambda (1/u + u/2))
            du,    lambda^2 = c ln n
        = n^-c + 2 (lambda / sqrt 2)^{d/2} K_{d/2}(sqrt 2 lambda) / Gamma(d/2)

    The proof of [S] Lemma F.1 (ii) goes on by Laplace's method (``lemma_f1_asymptote``); the Bessel
    function needs no limit.
    """
    counts = as_counts(n, "n").astype(np.float64)
    rate = c * np.log(counts)
    if printed:
        return np.asarray(counts**-c + _bessel(rate, d), np.float64)
    return math.exp(0.5) * _bessel(rate, max(d, 2))


def _bessel(rate: Floats, d: int) -> Floats:
    """2 (lambda / sqrt 2)^{d/2} K_{d/2}(sqrt 2 lambda) / Gamma(d/2), lambda^2 = ``rate``; 1
    at 0.
    """
    at = np.sqrt(2.0 * rate)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_size = math.log(2.0) + 0.5 * d * np.log(0.5 * at) - gammaln(0.5 * d) - at
        return np.where(rate > 0, np.exp(log_size) * kve(0.5 * d, at), 1.0)


def lemma_f1_asymptote(n: Any, d: int, c: float) -> Floats:
    """What the integral of ``lemma_f1`` is equivalent to for large n, with n^-c left out.
    Source: [S] Lemma F.1 (ii).

    lambda^{(d-1)/2} sqrt(2 pi / Phi''(u_0)) u_0^{d/2-1} exp(-sqrt 2 lambda) / (2^{d/2} Gamma(d/2)),
    Phi(u) = 1/u + u/2, u_0 = sqrt 2, Phi''(u_0) = 1/sqrt 2.
    """
    root = np.sqrt(c * np.log(as_counts(n, "n").astype(np.float64)))
    size = math.sqrt(2.0 * math.pi * math.sqrt(2.0)) * math.sqrt(2.0) ** (0.5 * d - 1.0)
    fall = np.exp(-math.sqrt(2.0) * root - gammaln(0.5 * d))
    return np.asarray(root ** (0.5 * (d - 1.0)) * size * fall / 2.0 ** (0.5 * d), np.float64)


def pl_constant(
    alpha: float, eigenvalues: Any, turned: float = 0.0, *, printed: bool = False
) -> float:
    """mu with |grad R|^2 >= mu (R - min R) along the flow on an infinite prompt, W = I, from the
    start of Assumption 5.1.

        mu = alpha^2 t (2 - alpha^2 ||Sigma||) / (|Sigma^2|_F tr(Sigma^+2) tr(Sigma^+)),
        t = ``turned`` = tr(Sigma G Sigma)

    Proof. |grad R|^2 >= |v Sigma B Sigma|_F^2 >= v^2 |B Sigma^{1/2}|_F^2 / (tr(Sigma^+2)
    tr(Sigma^+)), B = v Sigma U - I, and R - min R = |B Sigma^{1/2}|_F^2 / 2. Below, v^2 |Sigma^2|_F
    >= v tr(Sigma U Sigma) >= R(0) - R(t) >= R(0) - R(start) >= alpha^2 t (2 - alpha^2 ||Sigma||) /
    2, with |U|_F = v. Derived here.

    Printed, [S] F.3: alpha^2 / (sqrt(d) ||Sigma|| tr(Sigma^+2) tr(Sigma^+)), d the number of
    eigenvalues. False: in units of x it is x^2 where |grad R|^2 / R is x^4. For d = 1, Sigma = s <
    1/4 it fails at the start.
    """
    values = np.asarray(eigenvalues, np.float64)
    d, values = values.size, values[values > 0]
    norm, traces = float(values.max()), float((values**-2).sum() * (values**-1).sum())
    if printed:
        return alpha**2 / (math.sqrt(d) * norm * traces)
    gain = max(alpha**2 * turned * (2.0 - alpha**2 * norm), 0.0)
    return gain / (math.sqrt(float((values**4).sum())) * traces)


@check("Lemma F.1")
def check_lemma_f1() -> Found:
    """Sigma = I, w = (1, 0): the norm of Gamma_w; then (ii) at c = 1/3, d = 5, n = 10^8."""
    gram = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    norm = float(np.linalg.norm(gram @ gram.T, ord=2))
    small = functools.partial(task_sigma, printed=True)
    exact, own = (
        float(decay(math.log(1e8), 5, 1 / 3, sigma=sigma)[0]) for sigma in (small, task_sigma)
    )
    printed, mended = printed_and_mended(lemma_f1, [10**8], 5, 1 / 3)
    laplace = float(lemma_f1_asymptote([10**8], 5, 1 / 3)[0])
    numbers = f"{norm:g} {small(1.0):g} {exact:.3f} {printed:.3f} {laplace:.3f}"
    fine = norm > 1.0 and exact <= printed and own <= mended
    return fine, f"{numbers} {own:.3f} {mended:.3f}"


@check("Appendix F.2")
def appendix_f2() -> Found:
    """Gamma-hat of 10^4 tokens (x, w x), x standard normal, w = 1, by its first entry, whose limit
    is E x^2 = 1.
    """
    x = np.random.default_rng(0).standard_normal(10_000)
    mended = float(x @ x) / len(x)
    printed = mended / len(x)
    return printed < 1e-3 and abs(mended - 1) < 0.05, f"{printed:.2g} {mended:.2g}"


@check("Appendix F.3")
def appendix_f3() -> Found:
    """d = 1, Sigma = 0.1, alpha = 1: |grad R|^2 / R at the start."""
    value, slope = risk_gradient(LinearTask([[0.1]], [[1.0]], 0.0), Block([[1.0]], 1.0), math.inf)
    ratio = sum(float(part) ** 2 for part in tensors(slope)) / value
    printed = pl_constant(1.0, [0.1], printed=True)
    mended = pl_constant(1.0, [0.1], 0.01)
    flat = LinearTask([[1.0, 0.0], [0.0, 0.0]], np.eye(2), 0.0)
    tilted = start_block(flat, 0.4, [[1.0, 0.5], [0.5, 1.0]])
    still = float((flow_limit(flat, tilted).U11 - tilted.U11)[1].abs().max())
    fine = printed > ratio >= mended and still < 1e-15
    return fine, f"{ratio:.2g} {printed:.2g} {mended:.2g}"


if __name__ == "__main__":
    page = Path(__file__).with_suffix(".md")
    page.write_text(fill(page.read_text("utf-8")), "utf-8")
