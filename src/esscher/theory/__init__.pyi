from .bohbot import hardmax_mean_abs as hardmax_mean_abs
from .catalogue import predictions as predictions
from .prediction import Prediction as Prediction

REFERENCES: dict[str, str]
