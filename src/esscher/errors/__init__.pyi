from .budget import tokens_needed as tokens_needed
from .curve import ErrorCurve as ErrorCurve
from .exact import delta_covariance as delta_covariance
from .exact import exact_curve as exact_curve
from .gaussian import gaussian_error as gaussian_error
from .montecarlo.converge import converge as converge
from .pool_curve import exact_pool_curve as exact_pool_curve
from .rate import fit_rate as fit_rate
from .rate import FitError as FitError, RateFit as RateFit
from .region import (
    Bounds as Bounds,
    ConfidenceRegion as ConfidenceRegion,
    confidence_region as confidence_region,
)
