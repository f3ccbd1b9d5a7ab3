"""How many tokens does attention need? Limits, exact errors, rates and budgets of attention heads."""

from esscher.attention import (
    Head,
    attend,
    attend_hardmax,
    attend_linear,
    attend_prefixes,
    attend_tokens,
    hardmax_limit,
    horizon_of_covariances,
    limit,
    linear_limit,
)
from esscher.convergence import (
    ErrorCurve,
    asymptotic_from,
    confidence_region,
    delta_covariance,
    exact_curve,
    exact_pool_curve,
    tokens_needed,
)
from esscher.measures import Ball, Cube, Gaussian, Laplace, Measure, Mixture, Pool, Rademacher, Sphere
from esscher.theory import Prediction, gaussian_error, predictions

__version__ = "0.1.0"

__all__ = [
    "Ball",
    "Cube",
    "ErrorCurve",
    "Gaussian",
    "Head",
    "Laplace",
    "Measure",
    "Mixture",
    "Pool",
    "Prediction",
    "Rademacher",
    "Sphere",
    "asymptotic_from",
    "attend",
    "attend_hardmax",
    "attend_linear",
    "attend_prefixes",
    "attend_tokens",
    "confidence_region",
    "delta_covariance",
    "exact_curve",
    "exact_pool_curve",
    "gaussian_error",
    "hardmax_limit",
    "horizon_of_covariances",
    "limit",
    "linear_limit",
    "predictions",
    "tokens_needed",
]
