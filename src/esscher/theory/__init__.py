"""What is known about the error in closed form: proved bounds, rates, heuristics."""

from esscher.theory.catalogue import predictions
from esscher.theory.hardmax import hardmax_mean_abs
from esscher.theory.prediction import Prediction

__all__ = ["Prediction", "hardmax_mean_abs", "predictions"]
