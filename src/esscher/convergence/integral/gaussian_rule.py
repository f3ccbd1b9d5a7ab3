"""The quadrature behind ``gaussian_error``: two nested trapezoid rules in logarithmic variables,
compiled.

With e = exp(s g), g standard normal, t = exp(tau), u = tau + s g and m_k(u) = exp(k u - e^u), put

    phi(tau) = E exp(-t e),     M(tau) = E m_2(u),     N(tau) = E (g - s)^2 m_2(u).

From 1/S^2 = int_0^inf t exp(-t S) dt with S = sum_j exp(s g_j), and t E[e (g - s) exp(-t e)] = -s M
(Stein's lemma),

    f2 = n int M phi^(n-1) dtau
    f1 = n int N phi^(n-1) dtau + n (n-1) s^2 int M^2 phi^(n-2) dtau.

Every term is positive, so nothing cancels. The functions m_k are analytic for |Im u| < pi/2, hence
a trapezoid rule of step h errs by about exp(-pi^2 / h): 7e-18 at ``STEP``.
"""

from __future__ import annotations

from math import ceil, erfc, exp, expm1, floor, log, log1p, pi, sqrt

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["COLUMNS", "integrate_pairs"]

Floats = npt.NDArray[np.float64]

# Without the interpreter's lock the caller can run parts in plain threads: unlike numba's own
# (parallel=True) they survive a fork and calls from several threads at once. Sums may be reordered:
# that is what vector units need.
compiled = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})

COLUMNS = 6  # f1, f2, df1/ds, df2/ds, df1/dlog n, df2/dlog n

STEP = 0.25  # of the lattice that carries both u and tau
# from this s on the expectation over g is a sum over lattice nodes u, below it a sum over nodes g
WIDE = 0.5
# range of g that carries weight; a large n looks far to the right
REACH_LEFT, REACH_RIGHT = 10.0, 14.0
NEGLIGIBLE = 39.0  # exp(-39) = 1e-17
TINY = 1e-17  # the share of the sum so far at which the march over tau ends

U_FIRST, U_LAST = -1120, 20  # u from -280 to 5, in steps
NODES_U = np.arange(U_FIRST, U_LAST + 1) * STEP
M1 = STEP * np.exp(NODES_U - np.exp(NODES_U))  # m_1 and m_2 with the rule's weight
M2 = STEP * np.exp(2 * NODES_U - np.exp(NODES_U))
M1_BELOW = np.cumsum(M1) - M1  # sum of M1 over the nodes before each one

STEP_G = 0.5  # error exp(-2 pi^2 / STEP_G^2) from the normal density
NODES_G = np.arange(-REACH_LEFT, 12.0 + STEP_G, STEP_G)
WEIGHTS_G = STEP_G * np.exp(-0.5 * NODES_G**2) / np.sqrt(2 * np.pi)


@compiled
def moments_narrow(tau: float, s: float, row: Floats) -> None:
    """M, N, log phi and their slopes in s at one tau, for s < ``WIDE``.

    With A_k = E m_k(u), Stein's lemma gives N = A_2 + s^2 P, P = A_2 - 3 A_3 + A_4 >= -5/4 A_2, and
    the heat equation dE h(tau + s g)/ds = s E h''(tau + s g) with m_k'' = k^2 m_k - (2k+1) m_(k+1)
    + m_(k+2) gives slopes that keep their digits as s goes to 0.
    """
    missing = present = a1 = a2 = a3 = a4 = a5 = a6 = 0.0
    for k in range(NODES_G.size):
        y = exp(tau + s * NODES_G[k])
        lost = -expm1(-y)
        kept = exp(-y) if lost > 0.5 else 1.0 - lost
        missing += WEIGHTS_G[k] * lost
        present += WEIGHTS_G[k] * kept
        m1 = WEIGHTS_G[k] * kept * y
        m2 = m1 * y
        m3 = m2 * y
        a1, a2, a3, a4, a5, a6 = (
            a1 + m1,
            a2 + m2,
            a3 + m3,
            a4 + m3 * y,
            a5 + m3 * y * y,
            a6 + m3 * y * y * y,
        )
    phi_s = -s * (a1 - a2)
    p = a2 - 3 * a3 + a4
    m_2nd = 4 * a2 - 5 * a3 + a4
    p_2nd = 4 * a2 - 32 * a3 + 38 * a4 - 12 * a5 + a6
    row[0] = a2
    row[1] = a2 + s * s * p
    row[2] = log1p(-missing) if missing < 0.5 else log(present)
    row[3] = s * m_2nd
    row[4] = s * (m_2nd + 2 * p + s * s * p_2nd)
    row[5] = phi_s / present


@compiled
def fill_kernel(s: float, kernel: Floats) -> int:
    """What M, N and phi weigh m_k(u) by, over the offsets u - tau = x s; returns the column of x =
    0.

    With w the normal density and Q its survival function the rows are w/s, (x-s)^2 w/s, Q(x),
    Q(-x), then d/ds of w/s, of (x-s)^2 w/s and of Q(x), all at fixed u and tau: dx/ds = -x/s.
    """
    left, right = ceil(REACH_LEFT * s / STEP), ceil(REACH_RIGHT * s / STEP)
    for j in range(-left, right + 1):
        x = j * STEP / s
        w = exp(-0.5 * x * x) / (sqrt(2 * pi) * s)
        tail = 0.5 * erfc(abs(x) / sqrt(2.0))
        gap = x - s
        c = j + left
        kernel[0, c] = w
        kernel[1, c] = gap * gap * w
        kernel[2, c] = tail if x > 0 else 1.0 - tail
        kernel[3, c] = tail if x <= 0 else 1.0 - tail
        kernel[4, c] = (x * x - 1.0) / s * w
        kernel[5, c] = gap * (gap * (x * x - 1.0) - 2.0 * (x + s)) / s * w
        kernel[6, c] = x * w
    return left


@compiled
def lowest_u(tau: float, s: float) -> float:
    """Where the integrand m_1(u) Q((u - tau)/s) of 1 - phi is left of everything that matters, or Q
    is 1.

    Right of tau the integrand is a normal density about tau + s^2 cut off at u = 0; left of tau it
    is e^u.
    """
    low = min(tau, 0.0)
    centre = low + s * s
    beyond = max(centre, 0.0)
    edge = centre - sqrt(2 * NEGLIGIBLE * s * s + beyond * beyond)
    if edge < low:
        edge = low + s * s / 2 - beyond * beyond / (2 * s * s) - NEGLIGIBLE
    return max(edge, tau - REACH_LEFT * s)


@compiled
def moments_wide(i: int, s: float, kernel: Floats, centre: int, row: Floats) -> None:
    """M, N, log phi and their slopes in s at tau = i ``STEP``, for s >= ``WIDE``.

    Integration by parts bounds the window on the right: 1 - phi = int m_1(u) Q((u - tau)/s) du, and
    phi with 1 - Q.
    """
    first = max(ceil(lowest_u(i * STEP, s) / STEP), i - centre)
    assert first >= U_FIRST
    last = min(U_LAST, i + ceil(REACH_RIGHT * s / STEP))
    c = centre - i
    m = v = missing = present = m_s = v_s = missing_s = 0.0
    for k in range(first, last + 1):
        m1, m2 = M1[k - U_FIRST], M2[k - U_FIRST]
        m += m2 * kernel[0, k + c]
        v += m2 * kernel[1, k + c]
        missing += m1 * kernel[2, k + c]
        present += m1 * kernel[3, k + c]
        m_s += m2 * kernel[4, k + c]
        v_s += m2 * kernel[5, k + c]
        missing_s += m1 * kernel[6, k + c]
    # there Q is 1, or it does not matter
    missing += M1_BELOW[first - U_FIRST] * kernel[2, first + c]
    row[0], row[1], row[3], row[4] = m, v, m_s, v_s
    if missing < 0.5:
        row[2] = log1p(-missing)
        row[5] = -missing_s / (1.0 - missing)
    else:
        row[2] = log(present)
        row[5] = -missing_s / present


@compiled
def fill_moments(i: int, s: float, kernel: Floats, centre: int, row: Floats) -> None:
    """M, N, log phi, then their slopes in s, at tau = i ``STEP``."""
    if s < WIDE:
        moments_narrow(i * STEP, s, row)
    else:
        moments_wide(i, s, kernel, centre, row)


@compiled
def add_node(n: float, s: float, row: Floats, total: Floats) -> bool:
    """Add the integrands at one tau to ``total``; true while the node still matters to f1 or f2."""
    m, v, log_phi, m_s, v_s, log_phi_s = row
    one = n * exp((n - 1) * log_phi)
    two = n * s * exp((n - 2) * log_phi) * m
    f2 = one * m
    f1_apart, f1_pairs = one * v, (n - 1) * s * two * m
    f1 = f1_apart + f1_pairs
    total[0] += f1
    total[1] += f2
    total[2] += one * (v_s + (n - 1) * v * log_phi_s)
    total[2] += (n - 1) * two * (2 * m + s * (2 * m_s + (n - 2) * m * log_phi_s))
    total[3] += one * (m_s + (n - 1) * m * log_phi_s)
    total[4] += f1_apart * (1 + n * log_phi) + s * two * m * (2 * n - 1 + n * (n - 1) * log_phi)
    total[5] += f2 * (1 + n * log_phi)
    return bool(f1 > TINY * total[0] or f2 > TINY * total[1])


@compiled
def stride(n: float, s: float) -> int:
    """Lattice steps between the nodes tau: beyond freezing phi^n varies on the scale s / sqrt(2 log
    n) > 1.
    """
    return max(1, floor(s / (1 + sqrt(2 * log(n)))))


@compiled
def peak(n: float, s: float) -> float:
    """The tau about which the integrands live: n (1 - phi) is about 1 there."""
    freezing = sqrt(2 * log(n))
    return -log(n) - s * s / 2 if s < freezing else -s * freezing


@compiled
def integrate_pairs(ns: Floats, ss: Floats, out: Floats) -> None:
    """f1, f2 and their slopes for each pair (n, s), into the rows of ``out``; runs of equal s share
    M, N and phi.
    """
    kernel = np.empty((7, ceil((REACH_LEFT + REACH_RIGHT) * ss.max() / STEP) + 3))
    lowest, highest = (
        -ceil((REACH_RIGHT * ss.max() + 120) / STEP),
        ceil((REACH_LEFT * ss.max() + 10) / STEP),
    )
    rows = np.empty((highest - lowest + 1, 6))
    known = np.zeros(rows.shape[0], dtype=np.bool_)
    centre, last_s = 0, -1.0
    for pair in range(ss.size):
        n, s, total = ns[pair], ss[pair], out[pair]
        if s != last_s:
            last_s = s
            known[:] = False
            if s >= WIDE:
                centre = fill_kernel(s, kernel)
        total[:] = 0.0
        hop = stride(n, s)
        begin = hop * round(peak(n, s) / (hop * STEP))
        for direction in (-1, 1):
            i, matters = begin + min(direction, 0) * hop, True
            while matters:
                assert lowest <= i <= highest
                row = rows[i - lowest]
                if not known[i - lowest]:
                    known[i - lowest] = True
                    fill_moments(i, s, kernel, centre, row)
                matters = add_node(n, s, row, total)
                i += direction * hop
        total *= hop * STEP
