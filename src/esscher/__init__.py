"""How many tokens does attention need? Limits, exact errors, rates and budgets of attention heads.

Names are imported when they are first used, so that reading a stored run does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esscher.attention import (
        Head as Head,
        attend as attend,
        attend_hardmax as attend_hardmax,
        attend_linear as attend_linear,
        attend_prefixes as attend_prefixes,
        attend_tokens as attend_tokens,
        hardmax_limit as hardmax_limit,
        horizon_of_covariances as horizon_of_covariances,
        limit as limit,
        linear_limit as linear_limit,
    )
    from esscher.convergence import (
        ErrorCurve as ErrorCurve,
        FitError as FitError,
        RateFit as RateFit,
        asymptotic_from as asymptotic_from,
        confidence_region as confidence_region,
        converge as converge,
        delta_covariance as delta_covariance,
        exact_curve as exact_curve,
        exact_pool_curve as exact_pool_curve,
        fit_rate as fit_rate,
        tokens_needed as tokens_needed,
    )
    from esscher.measures import (
        Ball as Ball,
        Cube as Cube,
        Gaussian as Gaussian,
        Laplace as Laplace,
        Measure as Measure,
        Mixture as Mixture,
        Pool as Pool,
        Rademacher as Rademacher,
        Sphere as Sphere,
        Student as Student,
    )
    from esscher.runs import Run as Run, load_run as load_run
    from esscher.theory import (
        Prediction as Prediction,
        gaussian_error as gaussian_error,
        hardmax_mean_abs as hardmax_mean_abs,
        predictions as predictions,
    )

__version__ = "0.1.0"

_HOME = {
    "esscher.attention": (
        "Head",
        "attend",
        "attend_hardmax",
        "attend_linear",
        "attend_prefixes",
        "attend_tokens",
        "hardmax_limit",
        "horizon_of_covariances",
        "limit",
        "linear_limit",
    ),
    "esscher.convergence": (
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
        "tokens_needed",
    ),
    "esscher.measures": (
        "Ball",
        "Cube",
        "Gaussian",
        "Laplace",
        "Measure",
        "Mixture",
        "Pool",
        "Rademacher",
        "Sphere",
        "Student",
    ),
    "esscher.runs": ("Run", "load_run"),
    "esscher.theory": ("Prediction", "gaussian_error", "hardmax_mean_abs", "predictions"),
}

__all__ = [
    "Ball",
    "Cube",
    "ErrorCurve",
    "FitError",
    "Gaussian",
    "Head",
    "Laplace",
    "Measure",
    "Mixture",
    "Pool",
    "Prediction",
    "Rademacher",
    "RateFit",
    "Run",
    "Sphere",
    "Student",
    "asymptotic_from",
    "attend",
    "attend_hardmax",
    "attend_linear",
    "attend_prefixes",
    "attend_tokens",
    "confidence_region",
    "converge",
    "delta_covariance",
    "exact_curve",
    "exact_pool_curve",
    "fit_rate",
    "gaussian_error",
    "hardmax_limit",
    "hardmax_mean_abs",
    "horizon_of_covariances",
    "limit",
    "linear_limit",
    "load_run",
    "predictions",
    "tokens_needed",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'esscher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
