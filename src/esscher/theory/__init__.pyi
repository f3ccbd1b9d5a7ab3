from .catalogue import predictions as predictions
from .hardmax import hardmax_mean_abs as hardmax_mean_abs
from .prediction import Prediction as Prediction
