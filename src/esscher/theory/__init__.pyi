from .bohbot import hardmax_mean_abs as hardmax_mean_abs
from .prediction import Prediction as Prediction, predictions as predictions

REFERENCES: dict[str, str]
