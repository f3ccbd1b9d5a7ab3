"""What theory says of the moments of self-attention's outputs: one answer for mean and
covariance.
"""

from __future__ import annotations

import math

from esscher.attention.head import Head
from esscher.convergence.montecarlo.metrics.base import Exponents
from esscher.measures.base import Measure
from esscher.theory.bohbot import moment_exponent, moment_exponent_experimental
from esscher.theory.prediction import proved_coupling
from esscher.theory.sharp import moment_exponent_rms, speaks_of

__all__ = ["moment_exponents"]


def moment_exponents(head: Head, measure: Measure) -> Exponents:
    """1/(2(1 + 32 Psi)) as proved, 1/(2(1 + Psi)) as conjectured [B], where Psi is known; the sharp
    one for Gaussian tokens.
    """
    _, proved = proved_coupling(head, measure)
    psi = math.nan if proved is None else proved
    return Exponents(
        bohbot=float(moment_exponent(psi)),
        bohbot_experimental=float(moment_exponent_experimental(psi)),
        sharp=float(moment_exponent_rms(head.horizon(measure))) if speaks_of(measure) else math.nan,
    )
