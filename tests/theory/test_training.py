"""[S] Lemma C.2, Lemma F.1 (ii), the range of alpha and the PL constant, against enumeration,
quadrature and flows.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import binom

from docs.theory.statements import (
    decay,
    decay_begins,
    lemma_f1,
    lemma_f1_asymptote,
    pl_constant,
    task_mean,
    task_sigma,
)
from esscher.icl import LinearTask, flow_times, gradient_flow, start_block
from esscher.icl.flow import start_limit
from esscher.theory.boursier import lemma_c2


@pytest.mark.parametrize("p", [0.5, 0.1, 1e-3])
@pytest.mark.parametrize("delta", [0.4, 0.05, 0.001])
def test_lemma_c2_by_enumeration(p: float, delta: float) -> None:
    """Q = 1 with chance p, else 0: the sum is binomial and u = E Q^2 = p. The sharpened form is
    Chebyshev's.
    """
    for n in (1, 7, 300):
        away = np.abs(np.arange(n + 1) - n * p)
        chance = binom.pmf(np.arange(n + 1), n, p)
        printed, sharpened = lemma_c2(n, delta, p, printed=True)[0], lemma_c2(n, delta, p)[0]
        for bound in (printed, sharpened):
            assert chance[away > bound].sum() <= 2 * delta
        assert sharpened == pytest.approx(printed / math.sqrt(6))


def test_lemma_c2_sharpened_is_attained() -> None:
    """Q = +-a with chance q each, else 0, n = 1, 2 q = 2 delta, u = 2 q a^2: |Q| reaches sqrt(u /
    (2 delta)) = a.
    """
    delta, a = 0.05, 3.0
    assert lemma_c2(1, delta, 2 * delta * a * a)[0] == pytest.approx(a)


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("c", [1 / 3, 2.0])
def test_lemma_f1_bounds_the_mean_over_tasks(d: int, c: float) -> None:
    n = np.array([2, 10, 10**4, 10**8, 10**15])
    small = functools.partial(task_sigma, printed=True)
    exact = decay(np.log(n), d, c, sigma=small)
    assert (exact <= lemma_f1(n, d, c, printed=True) * (1 + 1e-9)).all()
    assert (decay(np.log(n), d, c) <= lemma_f1(n, d, c) * (1 + 1e-9)).all()
    root = math.sqrt(c * math.log(10**8))
    plain = quad(lambda u: u ** (d / 2 - 1) * math.exp(-root * (1 / u + u / 2)), 0, np.inf)[0]
    printed = 10 ** (-8 * c) + root ** (d / 2) / (2 ** (d / 2) * math.gamma(d / 2)) * plain
    assert lemma_f1(10**8, d, c, printed=True)[0] == pytest.approx(printed, rel=1e-6)


def test_laplaces_method_is_reached_slowly() -> None:
    """The ratio to the asymptote goes to 1 like 1 + const / sqrt(ln n): 1.76 at n = 10^15 for d =
    5, c = 1/3.
    """
    n = np.array([10**3, 10**9, 10**15])
    integral = lemma_f1(n, 5, 1 / 3, printed=True) - n ** (-1 / 3)
    ratio = integral / lemma_f1_asymptote(n, 5, 1 / 3)
    assert (np.diff(ratio) < 0).all()
    assert ratio[-1] == pytest.approx(1.755, abs=0.01)


def test_means_over_tasks() -> None:
    """Moments of chi^2(d), and where ln(n)^4 E n^(-c / sigma^2) has its maximum."""
    assert task_mean(lambda z: z**6, 3) == pytest.approx(3 * 5 * 7 * 9 * 11 * 13)
    assert task_mean(lambda z: 1.0, 1) == pytest.approx(1)
    begins = decay_begins(5, 1 / 3)
    assert begins == pytest.approx(150)
    below, there, above = decay([0.5 * begins, begins, 2 * begins], 5, 1 / 3, 4)
    assert max(below, above) < there


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_range_of_alpha(scale: float) -> None:
    """Below the mended limit the start has less risk than no weights; the printed limit fails that
    for small Sigma.
    """
    task = LinearTask(scale * LinearTask.kms(4).sigma, torch.eye(4), 0.0)
    norm = float(torch.linalg.matrix_norm(task.sigma, ord=2))
    nothing = 0.5 * float(torch.trace(task.sigma))

    def start_risk(alpha: float) -> float:
        B = alpha**2 * task.sigma / 2 - torch.eye(4)  # Theta = I: U11 = alpha I / 2
        return 0.5 * float(torch.trace(B @ task.sigma @ B.T))

    assert start_risk(0.999 * start_limit(4, norm)) < nothing
    assert (start_risk(0.999 * start_limit(4, norm, printed=True)) < nothing) == (scale >= 1.0)


def smallest_ratio(task: LinearTask, alpha: float) -> float:
    flow = gradient_flow(task, start_block(task, alpha), times=flow_times(50.0, 20))
    there = flow.risks > 1e-12
    return float((flow.gradients[there] ** 2 / flow.risks[there]).min())


@pytest.mark.parametrize("values", [(1.0,), (0.1,), (2.0, 0.5), (0.3, 0.2, 0.0)])
def test_pl_constant_along_flows(values: tuple[float, ...]) -> None:
    """|grad R|^2 >= mu R on the way of the flow, W = I and no noise, Sigma singular too; Theta = I,
    so G = I / sqrt d.
    """
    d, alpha = len(values), 0.5
    task = LinearTask(torch.diag(torch.tensor(values, dtype=torch.float64)), torch.eye(d), 0.0)
    mended = pl_constant(alpha, values, sum(v * v for v in values) / math.sqrt(d))
    assert 0 < mended <= smallest_ratio(task, alpha) * (1 + 1e-6)


def test_printed_pl_constant_fails_for_small_covariances() -> None:
    """d = 1, Sigma = 0.1, alpha = 1: |grad R|^2 / R = 4 alpha^2 Sigma^3 = .004 at the start,
    printed alpha^2 Sigma^2 = .01.
    """
    task = LinearTask([[0.1]], [[1.0]], 0.0)
    assert pl_constant(1.0, [0.1], printed=True) == pytest.approx(0.01)
    assert smallest_ratio(task, 1.0) <= 0.004 * (1 + 1e-6) < pl_constant(1.0, [0.1], printed=True)
    assert pl_constant(1.0, [0.1], 0.01) == pytest.approx(0.0019)
