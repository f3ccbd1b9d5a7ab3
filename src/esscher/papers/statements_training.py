"""Sections 4 and 5 and Appendices E and F of [S]: risks, flows and their ends, on tasks of one or
two dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.icl.concentration import prompt_errors, risk_gaps, token_laws
from esscher.icl.exact import risk, risk_gradient
from esscher.icl.flow import (
    final_parameters,
    flow_bound,
    flow_limit,
    flow_times,
    gradient_flow,
    start_block,
)
from esscher.icl.layer import UV, Block, Parameters, default_weights
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_counts, as_positive
from esscher.measures.gaussian import Gaussian
from esscher.papers.statements_attention import Finding, Statement
from esscher.theory.boursier import averaged, gradients, proposition_31_exponent
from esscher.theory.prediction import setting_of
from esscher.theory.training import (
    alpha_limit_mended,
    alpha_limit_printed,
    decay,
    decay_begins,
    lemma_e2_mended,
    lemma_e2_printed,
    lemma_f1_asymptote,
    lemma_f1_mended,
    lemma_f1_printed,
    pl_constant_mended,
    pl_constant_printed,
    sigma_mended,
    sigma_printed,
    task_mean,
)
from esscher.theory.training import lemma_e4 as lemma_e4_bound

Floats = npt.NDArray[np.float64]

CELLS = 12


@dataclass(frozen=True, eq=False)
class BallGaps:
    """g1 of Corollary E.3 and g2 of Corollary E.5 at each prompt length, for a ball of radius 2
    ``rho``; infinite where the bounds say nothing.
    """

    n: npt.NDArray[np.int64]
    rho: float
    risk: Floats
    gradient: Floats


def ball_gaps(task: LinearTask, rho: Any, lengths: Any, tasks: int = 8, seed: int = 0) -> BallGaps:
    """[S] Corollaries E.3 and E.5: the largest gap of risks, and of their gradients, over the ball
    |(U, V)| <= 2 rho, with Lemmas E.2 and E.4 mended and the sharpened (16) in them.

    The bounds grow with ||U|| and ||V|| and depend on U, V through nothing else, so the supremum
    over the ball is one over the ways u^2 + v^2 = (2 rho)^2 to share its radius. On a cell of such
    ways it is at most the bound at the largest u and the largest v of the cell: a maximum over
    cells is proved, not searched. Averages over tasks are over drawn ones.
    """
    n, radius = as_counts(lengths, "lengths"), 2.0 * as_positive(rho, "rho")
    laws = token_laws(task, tasks, seed)
    # E ||Gamma_w||^2
    fourth = float(np.mean([float(torch.linalg.matrix_norm(law, ord=2)) ** 2 for law in laws]))
    asked = float(torch.trace(task.query_sigma))
    label = math.sqrt(float(torch.sum(task.query_sigma * task.task_cov)) + task.noise)
    angles = np.linspace(0.0, 0.5 * math.pi, CELLS + 1)
    risk, by_gradient = np.zeros(n.size), np.zeros(n.size)
    for low, high in pairwise(angles):
        u, v = radius * math.sin(high), radius * math.cos(low)
        output, slope = _errors(task, laws, u, v, n)
        limit, gradient2 = (
            u * v * math.sqrt(fourth * asked),
            math.hypot(u, v) * math.sqrt(fourth * asked),
        )
        risk = np.maximum(risk, lemma_e2_mended(output, label, limit))
        by_gradient = np.maximum(
            by_gradient, lemma_e4_bound(output, slope, label, limit, gradient2)
        )
    return BallGaps(n, radius / 2.0, risk, by_gradient)


def flow_radius(task: LinearTask, start: Parameters, until: float = 1e3) -> float:
    """rho: the largest norm of (U, V) along the flow on an infinite prompt from ``start``, as
    Theorem 4.3 of [S] has it.
    """
    flow = gradient_flow(task, start, math.inf, times=flow_times(until, 40))
    return float(np.linalg.norm(flow.states, axis=1).max())


@dataclass(frozen=True, eq=False)
class AssumptionCheck:
    """Assumption 4.2 of [S] at one start: what it asks for, in numbers.

    ``query``: ||Sigma_q||, at most 1 in (i). ``sigma12``: E sigma_mu^12, finite in (ii).
    ``exponent``: c_2 of Proposition 3.1 in the ball. ``rate``: E[ln(n)^4 / n^(c_2 / sigma_mu^2)],
    which (ii) wants to vanish; ``falls_from``: the ln n after which it falls, from Laplace's
    method.
    """

    rho: float
    query: float
    sigma12: float
    exponent: float
    n: npt.NDArray[np.int64]
    rate: Floats
    falls_from: float

    @property
    def met(self) -> tuple[tuple[str, bool], ...]:
        """(iii) holds for Gaussian tokens with the moments of Lemma F.1."""
        return (
            ("(i) x_q is 1 sub-Gaussian: ||Sigma|| <= 1", self.query <= 1.0 + 1e-12),
            ("(ii) E sigma_mu^12 is finite", math.isfinite(self.sigma12)),
            (
                "(ii) E[ln(n)^4 / n^(c / sigma_mu^2)] falls at the lengths given",
                bool(self.rate[-1] < self.rate[0]),
            ),
            ("(iii) tilted moments are bounded: Gaussian tokens", True),
        )


def check_assumption(
    task: LinearTask, start: Parameters, lengths: Any = (10, 10**3, 10**6, 10**9, 10**12)
) -> AssumptionCheck:
    """Assumption 4.2 of [S] for a task and a start, rho being that of its flow.

    sigma_mu^2 = max(1, ||Sigma|| (1 + ||W|| zeta) + tau^2), zeta ~ chi^2(d): exact for Sigma and W
    that are multiples of I, a bound otherwise. The rate of (ii) vanishes as n grows, for every c;
    where its fall begins is another matter, and is told.
    """
    n, rho = as_counts(lengths, "lengths"), flow_radius(task, start)
    sizes = [
        float(torch.linalg.matrix_norm(matrix, ord=2)) for matrix in (task.sigma, task.task_cov)
    ]
    exponent = 2.0 * proposition_31_exponent(1.0, 2.0 * rho)

    def sigma2(zeta: float) -> float:
        return max(1.0, sizes[0] * sigma_mended(sizes[1] * zeta) + task.noise)

    return AssumptionCheck(
        rho=rho,
        query=float(torch.linalg.matrix_norm(task.query_sigma, ord=2)),
        sigma12=task_mean(lambda zeta: sigma2(zeta) ** 6, task.dim),
        exponent=exponent,
        n=n,
        rate=decay(np.log(n.astype(np.float64)), task.dim, exponent, 4, sigma2),
        falls_from=decay_begins(task.dim, exponent / (sizes[0] * sizes[1])),
    )


def _errors(
    task: LinearTask, laws: list[Tensor], u: float, v: float, n: npt.NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Root mean squares over tasks of the bounds on the output and on the gradient in (U, V), at
    norms u and v.
    """
    wide = torch.eye(task.dim + 1, task.dim, dtype=torch.float64)
    squares = []
    for law in laws:
        top = torch.linalg.eigh(law)[1][:, -1:]
        setting = setting_of(Head(u * wide, v * top.T), Gaussian(law), Gaussian(task.query_sigma))
        known = {each.name: each for each in [*averaged(setting), *gradients(setting)]}
        output, by_u, by_v = (
            known[name].rms(n) ** 2 for name in ("s-16-sharpened", "s-gradient-u", "s-gradient-v")
        )
        squares.append((output, by_u + by_v))
    output, slope = np.sqrt(np.mean(squares, axis=0))
    return output, slope


LINE = LinearTask([[0.3]], [[1.0]], 0.0)  # W = I and no noise, as in (11)
PLANE = LinearTask([[0.8, 0.3], [0.3, 0.5]], np.eye(2), 0.0)


def remark_41() -> Finding:
    shifted = PLANE.with_queries(np.diag([2.0, 0.5]))
    start = start_block(PLANE)
    end = final_parameters(PLANE, start, 50, "linear")
    slope = risk_gradient(shifted, end, 50, "linear")[1]
    assert isinstance(slope, Block)
    own, other = (2 * risk(task, end, 50, "linear").value for task in (PLANE, shifted))
    words = (
        f"d = 2, L = 50, linear: mean squared error {own:.3g} on its queries, {other:.3g} on"
        " others; the end stays"
    )
    return Finding(words, float(slope.U11.abs().max()) < 1e-12 and own != other)


def assumption_42() -> Finding:
    task = LinearTask.isotropic(5, np.eye(5), 0.0)
    found = check_assumption(task, start_block(task), [10, 10**12])
    words = (
        f"d = 5, Sigma = I: rho = {found.rho:.3g}, c = {found.exponent:.1e}, E sigma^12 ="
        f" {found.sigma12:.2g}; the rate of (ii) is {found.rate[1]:.1e} at 10^12 tokens and begins"
        f" to fall at 10^{found.falls_from / math.log(10):.0f}"
    )
    return Finding(words, [met for _, met in found.met] == [True, True, False, True])


def theorem_43() -> Finding:
    start = start_block(LINE)
    ends = [risk(LINE, final_parameters(LINE, start, n), n).value for n in (100, 10_000)]
    words = (
        f"d = 1, W = 1, no noise, risk at the end of the flow: {ends[0]:.2g} at 100 tokens,"
        f" {ends[1]:.2g} at 10^4; limit 0"
    )
    return Finding(words, ends[1] < 0.05 * ends[0])


def assumption_51() -> Finding:
    """Gradients of the linear risk, in closed form, at a start of the block form."""
    start = start_block(PLANE).uv()
    slope = risk_gradient(PLANE, start, 20, "linear")[1]
    assert isinstance(slope, UV)
    off = max(
        float(slope.U[:, -1].abs().max()),
        float(slope.U[-1].abs().max()),
        float(slope.V[-1, :-1].abs().max()),
    )
    return Finding(
        f"d = 2, L = 20: the gradient outside the blocks is {off:.0e} at most", off < 1e-14
    )


def theorem_52() -> Finding:
    """Sigma = 0.01 I, d = 5: risk at half of each limit over that of no weights."""
    norm, told = 0.01, []
    for limit in (alpha_limit_printed(5, norm), alpha_limit_mended(5, norm)):
        told.append((0.25 * limit**2 * norm / math.sqrt(5.0) - 1.0) ** 2)
    words = (
        f"Sigma = 0.01 I, d = 5, alpha half of the limit: risk {told[0]:.3g} times that of no"
        f" weights, mended {told[1]:.3g}"
    )
    return Finding(words, told[0] > 1.0 > told[1])


def remark_53() -> Finding:
    flow = gradient_flow(PLANE, start_block(PLANE), times=flow_times(1e3, 10))
    end, inverse = flow.end, torch.linalg.inv(PLANE.sigma)
    assert isinstance(end, Block)
    size = float(torch.trace(inverse @ inverse)) ** 0.25
    off = max(float((end.U11 - inverse / size).abs().max()), abs(float(end.v) - size))
    return Finding(f"d = 2: the flow ends within {1e-6:.0e} of the formula", off < 1e-6)


def lemma_e1() -> Finding:
    start, times = start_block(LINE), flow_times(8.0, 8)
    found = flow_bound(
        LINE, gradient_flow(LINE, start, 1000, times=times), gradient_flow(LINE, start, times=times)
    )
    # all are 0 at the start
    distance, sharper, bound = (
        values[1:] for values in (found.distance, found.sharper, found.bound)
    )
    words = (
        f"d = 1, L = 1000, t = 8: distance {distance[-1]:.2g}, bound {bound[-1]:.2g}, sharper"
        f" {sharper[-1]:.2g}"
    )
    return Finding(words, bool((distance <= sharper).all() and (sharper <= bound).all()))


def lemma_e2() -> Finding:
    """Labels 0, tokens +-1, U = 0, V = 1, one token: R_1 = 1/2, R = 0."""
    printed, mended = (
        float(lemma_e2_printed(1.0, 1.0, 0.0, 0.0)),
        float(lemma_e2_mended(1.0, 0.0, 0.0)),
    )
    return Finding(
        f"labels 0, tokens +-1, one token: the risks differ by 0.5; printed {printed:g}, mended"
        f" {mended:g}",
        printed < 0.5 <= mended,
    )


def corollaries() -> tuple[float, float, float, float]:
    """Gaps of risk and gradient over the ball of rho = 0.2 at 10^6 tokens, and the exact ones at
    one point of it.
    """
    found, point = (
        ball_gaps(LINE, 0.2, [10**6], tasks=3),
        UV([[0.2, 0.1], [0.1, 0.1]], [[0.0, 0.0], [0.1, 0.2]]),
    )
    gap = abs(risk(LINE, point, 10**6).value - risk(LINE, point, math.inf).value)
    own, limit = (risk_gradient(LINE, point, n)[1] for n in (10**6, math.inf))
    assert isinstance(own, UV)
    assert isinstance(limit, UV)
    apart = math.sqrt(float(((own.U - limit.U) ** 2).sum() + ((own.V - limit.V) ** 2).sum()))
    return float(found.risk[0]), gap, float(found.gradient[0]), apart


def corollary_e3() -> Finding:
    bound, gap, _, _ = corollaries()
    return Finding(
        f"d = 1, rho = 0.2, 10^6 tokens: g1 = {bound:.2g}, exact gap at a point of the ball"
        f" {gap:.1e}",
        gap < bound,
    )


def corollary_e5() -> Finding:
    _, _, bound, apart = corollaries()
    return Finding(
        f"d = 1, rho = 0.2, 10^6 tokens: g2 = {bound:.1g}, exact gap at a point of the ball"
        f" {apart:.1e}",
        apart < bound,
    )


def lemma_e4() -> Finding:
    task, weights = (
        LinearTask.kms(2, 0.4, noise=0.2),
        default_weights(2, torch.Generator().manual_seed(3)),
    )
    squared = prompt_errors(task, weights, 100, 1000, seed=1)[:, 1]
    error2, error4 = float(squared[:, 0].mean() ** 0.5), float((squared[:, 0] ** 2).mean() ** 0.25)
    row = risk_gaps(
        task,
        weights.uv(),
        100,
        error2,
        error4,
        float((squared[:, 1] + squared[:, 2]).mean() ** 0.5),
    )[1]
    words = (
        f"first weights of training, d = 2, 100 tokens: gradients differ by {row['measured']:.2g},"
        f" bound {row['mended']:.2g}"
    )
    return Finding(words, row["measured"] < row["mended"])


def lemma_f1() -> Finding:
    """Sigma = I, w = (1, 0): the norm of Gamma_w; then (ii) at c = 1/3, d = 5."""
    gram = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    norm = float(np.linalg.norm(gram @ gram.T, ord=2))
    n = [10**8]
    exact, own = (
        float(decay(math.log(n[0]), 5, 1 / 3, sigma=sigma_printed)[0]),
        float(decay(math.log(n[0]), 5, 1 / 3)[0]),
    )
    printed, mended, laplace = (
        float(f(n, 5, 1 / 3)[0]) for f in (lemma_f1_printed, lemma_f1_mended, lemma_f1_asymptote)
    )
    words = (
        f"w = (1, 0): sigma^2 = {norm:g}, printed {sigma_printed(1.0):g}; E n^(-c/sigma^2), d = 5,"
        f" c = 1/3, n = 10^8: {exact:.3f} below {printed:.3f} for the printed sigma (Laplace's"
        f" method {laplace:.3f}), {own:.3f} below {mended:.3f} for the mended one"
    )
    return Finding(words, norm > 1.0 and exact <= printed and own <= mended)


def appendix_f3() -> Finding:
    """d = 1, Sigma = 0.1, alpha = 1: |grad R|^2 / R at the start."""
    task = LinearTask([[0.1]], [[1.0]], 0.0)
    start = Block([[1.0]], 1.0)
    value, slope = risk_gradient(task, start, math.inf)
    assert isinstance(slope, Block)
    ratio = (float(slope.U11) ** 2 + float(slope.v) ** 2) / value
    printed, mended = pl_constant_printed(1.0, [0.1]), pl_constant_mended(1.0, [0.1], 0.01)
    flat = LinearTask([[1.0, 0.0], [0.0, 0.0]], np.eye(2), 0.0)
    tilted = start_block(flat, 0.4, [[1.0, 0.5], [0.5, 1.0]])
    end = flow_limit(flat, tilted)
    still = float((end.U11 - tilted.U11)[1].abs().max())
    words = (
        f"d = 1, Sigma = 0.1, alpha = 1: |grad R|^2 / R = {ratio:.2g} at the start, printed"
        f" {printed:.2g}, mended {mended:.2g}; singular Sigma: what it does not see of U11 stays"
    )
    return Finding(words, printed > ratio >= mended and still < 1e-15)


STATEMENTS = (
    Statement(
        "Remark 4.1",
        "queries of another law than the prompt's add a bias",
        "(no formula)",
        "exact risks under a shift; the end of the linear flow does not depend on the queries",
        "holds",
        remark_41,
    ),
    Statement(
        "Assumption 4.2",
        "sub-Gaussian tokens, light-tailed sigma_mu, moments",
        "E[ln(L)^4 / L^(c/sigma_mu^2)] -> 0",
        "true of Gaussian tasks as L grows, not at any L of practice; its use needs E sigma^24",
        "assumption, met in part",
        assumption_42,
    ),
    Statement(
        "Theorem 4.3",
        "the flow on long prompts ends at most epsilon above the flow on infinite ones",
        "lim R_L <= lim R_inf + epsilon for L >= L(epsilon)",
        "as printed; L(epsilon) is computed",
        "holds",
        theorem_43,
    ),
    Statement(
        "Assumption 5.1",
        "the start has a block form, which training keeps",
        "Theta Sigma != 0",
        "Theta^T Sigma != 0 is what the proof needs",
        "assumption, met",
        assumption_51,
    ),
    Statement(
        "Theorem 5.2",
        "the softmax flow on long prompts reaches the Bayes risk",
        "0 < alpha < sqrt(2) / (d^(1/4) |Sigma|)",
        "sqrt(2) / (d^(1/4) |Sigma|^(1/2)): the printed range is not dimensionless, and too wide"
        " for |Sigma| < 1",
        "holds, mended",
        theorem_52,
    ),
    Statement(
        "Remark 5.3",
        "where the flow on infinite prompts ends",
        "U = tr(Sigma^-2)^(-1/4) Sigma^-1, v = tr(Sigma^-2)^(1/4)",
        "as printed; also with noise, any W and any L for linear attention",
        "holds",
        remark_53,
    ),
    Statement(
        "Lemma E.1",
        "flows on L and on infinitely many tokens stay close for a time",
        "g2(L) t exp(beta t)",
        "the same proof gives g2 (exp(mt) - 1)/m, m the most negative curvature; beta is that of"
        " the infinite risk",
        "holds",
        lemma_e1,
    ),
    Statement(
        "Lemma E.2",
        "the risks on L and infinitely many tokens differ by the errors of the output",
        "2 |y|_4 e2 (e4 + |T|_4)",
        "e2 (|y|_2 + |T|_2 + e2), norms over tasks, tokens and queries",
        "false as printed, mended",
        lemma_e2,
    ),
    Statement(
        "Corollary E.3",
        "the same, uniformly over the ball of radius 2 rho",
        "g1(L) -> 0",
        "as a number, over cells of the ball",
        "holds",
        corollary_e3,
    ),
    Statement(
        "Lemma E.4",
        "the gradients of the risks differ by the errors of output and gradients",
        "with E_mu[X] in (28)",
        "with (E_mu X^2)^(1/2), which is larger; sigma^4 for sigma^2 in the Gaussian norms",
        "holds, mended",
        lemma_e4,
    ),
    Statement(
        "Corollary E.5",
        "the same, uniformly over the ball",
        "g2(L) -> 0",
        "as a number, over cells of the ball",
        "holds",
        corollary_e5,
    ),
    Statement(
        "Lemma F.1",
        "in-context linear regression meets Assumption 4.2",
        "sigma_mu^2 = max(|Sigma|, |w|^2)",
        "|Sigma| (1 + |w|^2); (ii) has a closed form with a Bessel function",
        "holds, mended",
        lemma_f1,
    ),
    Statement(
        "Appendix F.3",
        "singular Sigma: PL inequality and the end of the flow",
        "mu = alpha^2 / (sqrt(d) |Sigma| tr(Sigma^+2) tr(Sigma^+))",
        "mu = alpha^2 t (2 - alpha^2 |Sigma|) / (|Sigma^2|_F tr(Sigma^+2) tr(Sigma^+)), t ="
        " tr(Sigma Theta Theta^T Sigma)",
        "false as printed, mended",
        appendix_f3,
    ),
)
