"""Softmax attention on n Gaussian tokens and one known key: the integrals of ``gaussian_rule`` with
one factor more.

The known key has score b and so the share p_0 = exp(b) / (exp(b) + sum_j exp(s g_j)). With y =
exp(tau + b) and M, N, phi of ``gaussian_rule``,

    f1 = E (sum_j p_j (g_j - s))^2
    = int (n N phi^(n-1) + n (n-1) s^2 M^2 phi^(n-2)) exp(-y) dtau
    f2 = E sum_j p_j^2                  = n int M phi^(n-1) exp(-y) dtau
    q1 = E p_0,  q2 = E p_0^2           = int (y, y^2) exp(-y) phi^n dtau
    c  = -E p_0 sum_j p_j (g_j - s) / s = n int y exp(-y) M phi^(n-1) dtau

and E sum_j p_j (g_j - s) = -s f2 (Stein's lemma): a sure key of weight exp(b) puts exp(-t exp(b))
under the integral. Every integrand is positive and analytic for |Im tau| < pi/2.
"""

from __future__ import annotations

from math import ceil, exp, log, sqrt

import numpy as np
import numpy.typing as npt

from esscher.convergence.integral.gaussian_rule import (
    REACH_LEFT,
    REACH_RIGHT,
    STEP,
    WIDE,
    compiled,
    fill_kernel,
    fill_moments,
    peak,
)

__all__ = ["COLUMNS_SURE", "integrate_sure", "share_range"]

Floats = npt.NDArray[np.float64]

COLUMNS_SURE = 5  # f1, f2, q1, q2, c
APART = 32.0  # exp(-32) = 1e-14
TINY = 1e-17  # the share of the sum so far at which the march over tau ends


@compiled
def share_range(n: float, s: float) -> tuple[float, float]:
    """Scores below which a known key has no share, and above which it has all of it, both to about
    exp(-``APART``).

    log sum_j exp(s g_j) is about -``peak``; but for that chance at most s sqrt(2 (log n + APART)),
    at least -s sqrt(2 APART).
    """
    usual = -peak(n, s)
    return min(usual, -s * sqrt(2 * APART)) - APART, max(
        usual, s * sqrt(2 * (log(n) + APART))
    ) + APART


@compiled
def fill_row(i: int, n: float, s: float, kernel: Floats, centre: int, row: Floats) -> None:
    """What exp(-y) multiplies at tau = i ``STEP``: the integrand of f1, that of f2, and phi^n."""
    fill_moments(i, s, kernel, centre, row)
    m, v, log_phi = row[0], row[1], row[2]
    one = n * exp((n - 1) * log_phi)
    pairs = n * (n - 1) * s * s * exp((n - 2) * log_phi) * m * m if n > 1 else 0.0
    row[0], row[1], row[2] = one * v + pairs, one * m, exp(n * log_phi)


@compiled
def add_sure(y: float, row: Floats, total: Floats) -> bool:
    """Add the integrands at one tau to ``total``; true while one of them still matters."""
    cut = exp(-y)
    along, across, share = cut * row[0], cut * row[1], cut * y * row[2]
    total[0] += along
    total[1] += across
    total[2] += share
    total[3] += y * share
    total[4] += y * across
    less = along <= TINY * total[0] and across <= TINY * total[1] and share <= TINY * total[2]
    return not (less and y * share <= TINY * total[3] and y * across <= TINY * total[4])


@compiled
def integrate_sure(n: float, s: float, scores: Floats, out: Floats) -> None:
    """f1, f2, q1, q2, c for known keys of some ``scores``, into the rows of ``out``; they share M,
    N and phi.

    Scores outside ``share_range`` are taken at its ends.
    """
    kernel = np.empty((7, ceil((REACH_LEFT + REACH_RIGHT) * s / STEP) + 3))
    lowest, highest = -ceil((REACH_RIGHT * s + 160) / STEP), ceil((REACH_LEFT * s + 60) / STEP)
    rows = np.empty((highest - lowest + 1, 6))
    known = np.zeros(rows.shape[0], dtype=np.bool_)
    centre = fill_kernel(s, kernel) if s >= WIDE else 0
    low, high = share_range(n, s)
    for key in range(scores.size):
        score, total = min(max(scores[key], low), high), out[key]
        total[:] = 0.0
        begin = round(min(peak(n, s), -score) / STEP)
        for direction in (-1, 1):
            i, matters = begin + min(direction, 0), True
            while matters:
                assert lowest <= i <= highest
                row = rows[i - lowest]
                if not known[i - lowest]:
                    known[i - lowest] = True
                    fill_row(i, n, s, kernel, centre, row)
                matters = add_sure(exp(i * STEP + score), row, total)
                i += direction
        total *= STEP
