"""How many tokens does attention need? Limits, exact errors, rates and budgets of attention heads.

Names are imported when they are first used, so that reading a stored run does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esscher.attention import (
        Head as Head,
    )
    from esscher.attention import (
        attend as attend,
    )
    from esscher.attention import (
        attend_hardmax as attend_hardmax,
    )
    from esscher.attention import (
        attend_linear as attend_linear,
    )
    from esscher.attention import (
        attend_prefixes as attend_prefixes,
    )
    from esscher.attention import (
        attend_tokens as attend_tokens,
    )
    from esscher.attention import (
        hardmax_limit as hardmax_limit,
    )
    from esscher.attention import (
        horizon_of_covariances as horizon_of_covariances,
    )
    from esscher.attention import (
        limit as limit,
    )
    from esscher.attention import (
        linear_limit as linear_limit,
    )
    from esscher.convergence import (
        ErrorCurve as ErrorCurve,
    )
    from esscher.convergence import (
        FitError as FitError,
    )
    from esscher.convergence import (
        RateFit as RateFit,
    )
    from esscher.convergence import (
        asymptotic_from as asymptotic_from,
    )
    from esscher.convergence import (
        confidence_region as confidence_region,
    )
    from esscher.convergence import (
        converge as converge,
    )
    from esscher.convergence import (
        delta_covariance as delta_covariance,
    )
    from esscher.convergence import (
        exact_curve as exact_curve,
    )
    from esscher.convergence import (
        exact_pool_curve as exact_pool_curve,
    )
    from esscher.convergence import (
        fit_rate as fit_rate,
    )
    from esscher.convergence import (
        gaussian_error as gaussian_error,
    )
    from esscher.convergence import (
        share_tokens as share_tokens,
    )
    from esscher.convergence import (
        tokens_needed as tokens_needed,
    )
    from esscher.measures import (
        Ball as Ball,
    )
    from esscher.measures import (
        Cube as Cube,
    )
    from esscher.measures import (
        Gaussian as Gaussian,
    )
    from esscher.measures import (
        Laplace as Laplace,
    )
    from esscher.measures import (
        Measure as Measure,
    )
    from esscher.measures import (
        Mixture as Mixture,
    )
    from esscher.measures import (
        Pool as Pool,
    )
    from esscher.measures import (
        Rademacher as Rademacher,
    )
    from esscher.measures import (
        Sphere as Sphere,
    )
    from esscher.measures import (
        Student as Student,
    )
    from esscher.models.huggingface.capture import capture as capture
    from esscher.models.probe.job import probe as probe
    from esscher.runs import Run as Run
    from esscher.runs import load_run as load_run
    from esscher.theory import (
        Prediction as Prediction,
    )
    from esscher.theory import (
        hardmax_mean_abs as hardmax_mean_abs,
    )
    from esscher.theory import (
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
        "gaussian_error",
        "share_tokens",
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
    "esscher.models.huggingface.capture": ("capture",),
    "esscher.models.probe.job": ("probe",),
    "esscher.runs": ("Run", "load_run"),
    "esscher.theory": ("Prediction", "hardmax_mean_abs", "predictions"),
}

__all__ = [name for names in _HOME.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'esscher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
