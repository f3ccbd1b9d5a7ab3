"""[B]: exponents for the moments of the outputs and the growth of the uniform bound, as functions of plain numbers."""

from __future__ import annotations

__all__ = ["moment_exponent", "moment_exponent_experimental", "uniform_log_growth"]


def moment_exponent(coupling: float) -> float:
    """beta = 1 / (2 (1 + 32 Psi)): mean and covariance of the outputs err by O(n^-beta). Source: [B] Theorem 4.4.

    Psi = ||Sigma||_2 ||Sigma^{1/2} A||_2^2 is ``Head.coupling``.
    """
    return 0.5 / (1.0 + 32.0 * coupling)


def moment_exponent_experimental(coupling: float) -> float:
    """1 / (2 (1 + Psi)), the curve that the experiments of [B] are compared with; no proof is claimed for it."""
    return 0.5 / (1.0 + coupling)


def uniform_log_growth(horizon: float, radius: float) -> float:
    """R^2 ||Sigma^{1/2} A||_2^2: logarithm of the growth of C(R) in the uniform bound C(R)/sqrt(n) over |x| <= R.

    Source: [B] section 4.1 after Theorem 3.4. The constant in front is not given in the sources used here.
    """
    return (radius * horizon) * (radius * horizon)
