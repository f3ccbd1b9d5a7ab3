"""The error against the limit, and how fast it falls."""

from esscher.convergence.budget import asymptotic_from, tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.delta import confidence_region, delta_covariance
from esscher.convergence.exact import exact_curve
from esscher.convergence.fit import fit_rate
from esscher.convergence.montecarlo import converge
from esscher.convergence.pool_error import exact_pool_curve
from esscher.convergence.rate import FitError, RateFit
from esscher.convergence.shares import share_tokens

__all__ = [
    "ErrorCurve",
    "FitError",
    "RateFit",
    "asymptotic_from",
    "confidence_region",
    "converge",
    "delta_covariance",
    "exact_curve",
    "exact_pool_curve",
    "fit_rate",
    "share_tokens",
    "tokens_needed",
]
