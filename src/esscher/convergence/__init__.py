"""The error against the limit, and how fast it falls."""

from esscher.convergence.budget import asymptotic_from, tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.delta import confidence_region, delta_covariance
from esscher.convergence.exact import exact_curve
from esscher.convergence.integral.gaussian import gaussian_error
from esscher.convergence.montecarlo.converge import converge
from esscher.convergence.pool_curve import exact_pool_curve
from esscher.convergence.rate.fit import fit_rate
from esscher.convergence.rate.result import FitError, RateFit
from esscher.convergence.split import share_tokens

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
    "gaussian_error",
    "share_tokens",
    "tokens_needed",
]
