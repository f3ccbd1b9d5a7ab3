from . import icl as icl, keep as keep
from .attention.finite import (
    attend as attend,
    attend_hardmax as attend_hardmax,
    attend_linear as attend_linear,
    attend_prefixes as attend_prefixes,
)
from .attention.head import Head as Head, horizon_of_covariances as horizon_of_covariances
from .attention.limit import (
    hardmax_limit as hardmax_limit,
    limit as limit,
    linear_limit as linear_limit,
)
from .errors import (
    Bounds as Bounds,
    ConfidenceRegion as ConfidenceRegion,
    ErrorCurve as ErrorCurve,
    FitError as FitError,
    RateFit as RateFit,
    confidence_region as confidence_region,
    converge as converge,
    delta_covariance as delta_covariance,
    exact_curve as exact_curve,
    exact_pool_curve as exact_pool_curve,
    fit_rate as fit_rate,
    gaussian_error as gaussian_error,
    tokens_needed as tokens_needed,
)
from .measures import (
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
from .hf.capture import capture as capture
from .compress.api import compress as compress
from .describe import describe as describe
from .probe.budget import budget as budget
from .probe.job import probe as probe
from .runs import Run as Run, load_run as load_run
from .theory import (
    Prediction as Prediction,
    predictions as predictions,
)

__version__: str
