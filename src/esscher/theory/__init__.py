"""What is known about the error in closed form: exact functions, proved bounds, rates, heuristics."""

from esscher.theory.catalogue import predictions
from esscher.theory.gaussian_error import gaussian_error
from esscher.theory.hardmax import hardmax_mean_abs
from esscher.theory.prediction import Prediction

__all__ = ["Prediction", "gaussian_error", "hardmax_mean_abs", "predictions"]
